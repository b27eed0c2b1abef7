//! Guarantees over real sockets: no request during an open circuit or a `Retry-After`, nearly all requests
//! succeed, and transient failures cost few attempts. Tests count requests on a manual clock and measure no
//! speed.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::Client;
use reqwest_middleware::ClientWithMiddleware;
use tidegate::reqwest::{ThrottleError, Throttling, Tries};
use tidegate::{CircuitState, Clock as _, Instant, Keyed, ManualClock, Random, Refused};
use tokio::task::JoinSet;

use crate::kit::http::{Reply, TestServer, keyed_on, lock, pass_time, seconds};
use crate::kit::secs;
use crate::kit::upstream::aimd_host;

/// The rates have converged by now.
const SETTLED: Instant = Instant::from_nanos(30_000_000_000);
const END: Instant = Instant::from_nanos(120_000_000_000);

/// Results of all workers.
#[derive(Debug, Default)]
struct Tally {
    statuses: Vec<u16>,
    refused: Vec<Refused>,
}

/// One worker per URL, each making `calls` sequential requests.
async fn work(client: &ClientWithMiddleware, clock: &ManualClock, urls: Vec<String>, calls: usize) -> Tally {
    let tally = Arc::new(Mutex::new(Tally::default()));
    let mut workers = JoinSet::new();
    for url in urls {
        let (client, clock, tally) = (client.clone(), clock.clone(), Arc::clone(&tally));
        workers.spawn(async move {
            for _ in 0..calls {
                match client.get(&url).send().await {
                    Ok(response) => {
                        let status = response.status().as_u16();
                        response.bytes().await.expect("a body");
                        lock(&tally).statuses.push(status);
                    }
                    Err(error) => match ThrottleError::of(&error) {
                        Some(ThrottleError::Refused(refused)) => {
                            lock(&tally).refused.push(*refused);
                            let wait = refused.retry_after().expect("it has a retry time");
                            clock.sleep_until(clock.now() + wait).await;
                        }
                        _ => panic!("{error}"),
                    },
                }
            }
        });
    }
    while let Some(worker) = workers.join_next().await {
        worker.expect("no panic");
    }
    std::mem::take(&mut *lock(&tally))
}

fn client(hosts: &Keyed<tidegate::Authority>) -> ClientWithMiddleware {
    Throttling::by_host(hosts.clone()).client(Client::builder()).expect("a client")
}

#[tokio::test]
async fn no_request_is_sent_during_a_retry_after() {
    let clock = ManualClock::new();
    // The first request and a few later ones get a `Retry-After`.
    let hints: Arc<Mutex<Vec<(Instant, u64)>>> = Arc::default();
    let sent_hints = Arc::clone(&hints);
    let server = TestServer::start(&clock, move |seen| match seen.number {
        0 | 20 | 21 | 60 => {
            let wait = [7, 30, 3][seen.number % 3];
            lock(&sent_hints).push((seen.at, wait));
            Reply::status([429, 503][seen.number % 2]).header("retry-after", wait)
        }
        _ => Reply::status(200),
    });
    let (server, hosts) = (server.await, keyed_on(&clock, Keyed::builder(aimd_host())));
    let (client, urls) = (client(&hosts), vec![server.url("/"); 8]);
    let tally = pass_time(&clock, &hosts, work(&client, &clock, urls, 12)).await;
    assert!(tally.statuses.iter().all(|status| *status == 200), "all succeed in the end");
    let hints = lock(&hints).clone();
    assert_eq!(hints.len(), 4);
    for (at, wait) in hints {
        let early = server.requests().into_iter().filter(|seen| seen.at > at && seen.at < at + secs(wait));
        assert_eq!(early.count(), 0, "hint at {:.2} s to retry after {wait} s", seconds(at));
    }
}

#[tokio::test]
async fn open_circuit_stops_its_host_alone() {
    let clock = ManualClock::new();
    // Fails for its first minute.
    let down =
        TestServer::start(&clock, |seen| Reply::status(if seconds(seen.at) < 60.0 { 500 } else { 200 }))
            .await;
    let up = TestServer::start(&clock, |_| Reply::status(200)).await;
    let hosts = keyed_on(&clock, Keyed::hosts());
    // The open periods of the circuit, from the throttle's events.
    let mut events = hosts.events();
    let client = client(&hosts);
    let urls = vec![down.url("/"), down.url("/"), down.url("/"), up.url("/"), up.url("/")];
    let tally = pass_time(&clock, &hosts, work(&client, &clock, urls, 40)).await;
    let mut open: Vec<(Instant, Instant)> = Vec::new();
    while let Some(notice) = events.try_next() {
        if let tidegate::KeyedEvent::Throttle(tidegate::Event::CircuitOpened { span, .. }) = notice.event {
            assert_eq!(notice.key.as_ref(), Some(&down.authority()));
            open.push((notice.at, notice.at + span));
        }
    }
    assert!(open.len() >= 2, "it opens, and again when a probe fails: {open:?}");
    for (from, until) in &open {
        let sent = down.requests().into_iter().filter(|seen| seen.at > *from && seen.at < *until).count();
        assert_eq!(sent, 0, "open from {:.2} to {:.2} s", seconds(*from), seconds(*until));
    }
    assert!(tally.refused.iter().all(|refused| matches!(refused, Refused::CircuitOpen { .. })));
    assert_eq!(up.count(), 80, "the other host has all of its requests");
    let circuit = hosts.throttle(&down.authority()).snapshot().circuit.expect("a circuit");
    assert_eq!(circuit.state, CircuitState::Closed, "and the failing host has recovered");
}

/// A hidden limit of an upstream: `requests` in every `span`, and 429 for the rest.
struct Window {
    requests: usize,
    span: Duration,
}

impl Window {
    /// Starts a server with this limit, which also fails one request in fifty.
    async fn server(self, clock: &ManualClock) -> TestServer {
        let taken: Mutex<Vec<Instant>> = Mutex::default();
        TestServer::start(clock, move |seen| {
            let mut taken = lock(&taken);
            taken.retain(|at| seen.at < *at + self.span);
            if taken.len() >= self.requests {
                return Reply::status(429);
            }
            taken.push(seen.at);
            Reply::status(if seen.number % 50 == 49 { 502 } else { 200 })
        })
        .await
    }
}

/// This holds once the rate has converged.
#[tokio::test]
async fn over_90_percent_succeed_with_few_attempts() {
    let clock = ManualClock::new();
    let builder = Keyed::hosts().clock(clock.clone()).random(Random::seeded(7));
    let hosts = builder.build().expect("within the bounds");
    let windows = [(4, 2), (10, 2), (12, 1)].map(|(requests, span)| Window { requests, span: secs(span) });
    let mut servers = Vec::new();
    for window in windows {
        servers.push(window.server(&clock).await);
    }
    let client = client(&hosts);
    let tally: Arc<Mutex<Vec<(u16, u32)>>> = Arc::default();
    let mut workers = JoinSet::new();
    for url in servers.iter().flat_map(|server| vec![server.url("/"); 6]) {
        let (client, clock, tally) = (client.clone(), clock.clone(), Arc::clone(&tally));
        workers.spawn(async move {
            while clock.now() < END {
                let response = client.get(&url).send().await.expect("a response, and no open circuit");
                let attempts = response.extensions().get::<Tries>().expect("tries").attempts;
                lock(&tally).push((response.status().as_u16(), attempts));
            }
        });
    }
    pass_time(&clock, &hosts, workers.join_all()).await;
    for server in &servers {
        let seen = server.requests();
        let settled: Vec<_> = seen.iter().filter(|seen| seen.at >= SETTLED).collect();
        let good = settled.iter().filter(|seen| seen.status == 200).count();
        assert!(good * 100 > settled.len() * 90, "{good} of {} attempts succeeded", settled.len());
        assert!(good > 100, "there are many of them: {good}");
    }
    let calls = lock(&tally).clone();
    let failed: Vec<_> = calls.iter().filter(|(status, attempts)| *attempts > 1 || *status != 200).collect();
    let attempts: u32 = failed.iter().map(|(_, attempts)| attempts).sum();
    assert!(failed.len() > 20, "some calls met a failure: {}", failed.len());
    assert!(
        (attempts as usize) < 3 * failed.len(),
        "{attempts} attempts for {} calls with a failure",
        failed.len()
    );
    let recovered = failed.iter().filter(|(status, _)| *status == 200).count();
    assert!(
        recovered * 100 >= failed.len() * 90,
        "{recovered} of {} calls with a failure succeeded",
        failed.len()
    );
}
