//! What must hold over real sockets: nothing is sent to a host whose circuit is open or before it said so, most of what is
//! sent succeeds, and a failure that passes costs few attempts. Counts, and not speeds: the time is moved by hand.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use reqwest::Client;
use reqwest_middleware::ClientWithMiddleware;
use tidegate::reqwest::{ThrottleError, Throttling, Tries};
use tidegate::{CircuitState, Clock as _, Instant, Keyed, ManualClock, Random, Refused};
use tokio::task::JoinSet;

use crate::kit::http::{Far, Reply, hold, on, pass_time, seconds};
use crate::kit::secs;
use crate::kit::upstream::aimd_host;

/// Far sides are known by now.
const SETTLED: Instant = Instant::from_nanos(30_000_000_000);
const END: Instant = Instant::from_nanos(120_000_000_000);

/// What became of the calls of many workers.
#[derive(Debug, Default)]
struct Tally {
    answers: Vec<u16>,
    refused: Vec<Refused>,
}

/// So many workers, each of which calls so often, one after the other.
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
                        hold(&tally).answers.push(status);
                    }
                    Err(error) => match ThrottleError::of(&error) {
                        Some(ThrottleError::Refused(refused)) => {
                            hold(&tally).refused.push(*refused);
                            let wait = refused.retry_after().expect("it says when");
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
    std::mem::take(&mut *hold(&tally))
}

fn client(hosts: &Keyed<tidegate::Authority>) -> ClientWithMiddleware {
    Throttling::by_host(hosts.clone()).client(Client::builder()).expect("a client")
}

#[tokio::test]
async fn nobody_asks_before_the_far_side_said_so() {
    let clock = ManualClock::new();
    // Whoever comes first is told to come back, and then now and then somebody else is.
    let told: Arc<Mutex<Vec<(Instant, u64)>>> = Arc::default();
    let tells = Arc::clone(&told);
    let far = Far::start(&clock, move |seen| match seen.number {
        0 | 20 | 21 | 60 => {
            let wait = [7, 30, 3][seen.number % 3];
            hold(&tells).push((seen.at, wait));
            Reply::status([429, 503][seen.number % 2]).header("retry-after", wait)
        }
        _ => Reply::status(200),
    });
    let (far, hosts) = (far.await, on(&clock, Keyed::builder(aimd_host())));
    let (client, urls) = (client(&hosts), vec![far.url("/"); 8]);
    let tally = pass_time(&clock, &hosts, work(&client, &clock, urls, 12)).await;
    assert!(tally.answers.iter().all(|status| *status == 200), "all succeed in the end");
    let told = hold(&told).clone();
    assert_eq!(told.len(), 4);
    for (at, wait) in told {
        let early = far.seen().into_iter().filter(|seen| seen.at > at && seen.at < at + secs(wait));
        assert_eq!(early.count(), 0, "told at {:.2} s to come back in {wait} s", seconds(at));
    }
}

#[tokio::test]
async fn nothing_is_sent_to_a_host_whose_circuit_is_open_and_others_go_on() {
    let clock = ManualClock::new();
    // Down for its first minute.
    let down =
        Far::start(&clock, |seen| Reply::status(if seconds(seen.at) < 60.0 { 500 } else { 200 })).await;
    let up = Far::start(&clock, |_| Reply::status(200)).await;
    let hosts = on(&clock, Keyed::hosts());
    // When the circuit was open, by what the throttle itself tells.
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
        let sent = down.seen().into_iter().filter(|seen| seen.at > *from && seen.at < *until).count();
        assert_eq!(sent, 0, "open from {:.2} to {:.2} s", seconds(*from), seconds(*until));
    }
    assert!(tally.refused.iter().all(|refused| matches!(refused, Refused::CircuitOpen { .. })));
    assert_eq!(up.count(), 80, "the other host has all of its requests");
    let circuit = hosts.throttle(&down.authority()).snapshot().circuit.expect("a circuit");
    assert_eq!(circuit.state, CircuitState::Closed, "and this one is healed");
}

/// How much a far side bears, which nobody is told: so many in every `span`, and 429 to the rest.
struct Window {
    requests: usize,
    span: Duration,
}

impl Window {
    /// Answers by it; and one in fifty fails by itself.
    async fn far(self, clock: &ManualClock) -> Far {
        let taken: Mutex<Vec<Instant>> = Mutex::default();
        Far::start(clock, move |seen| {
            let mut taken = hold(&taken);
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

#[tokio::test]
async fn nearly_all_that_is_sent_succeeds_once_the_rate_is_found_and_what_fails_costs_few_attempts() {
    let clock = ManualClock::new();
    let builder = Keyed::hosts().clock(clock.clone()).random(Random::seeded(7));
    let hosts = builder.build().expect("within the bounds");
    let windows = [(4, 2), (10, 2), (12, 1)].map(|(requests, span)| Window { requests, span: secs(span) });
    let mut fars = Vec::new();
    for window in windows {
        fars.push(window.far(&clock).await);
    }
    let client = client(&hosts);
    let tally: Arc<Mutex<Vec<(u16, u32)>>> = Arc::default();
    let mut workers = JoinSet::new();
    for url in fars.iter().flat_map(|far| vec![far.url("/"); 6]) {
        let (client, clock, tally) = (client.clone(), clock.clone(), Arc::clone(&tally));
        workers.spawn(async move {
            while clock.now() < END {
                let response = client.get(&url).send().await.expect("an answer, and no open circuit");
                let attempts = response.extensions().get::<Tries>().expect("told").attempts;
                hold(&tally).push((response.status().as_u16(), attempts));
            }
        });
    }
    pass_time(&clock, &hosts, workers.join_all()).await;
    for far in &fars {
        let seen = far.seen();
        let settled: Vec<_> = seen.iter().filter(|seen| seen.at >= SETTLED).collect();
        let good = settled.iter().filter(|seen| seen.said == 200).count();
        assert!(good * 100 > settled.len() * 90, "{good} of {} attempts succeeded", settled.len());
        assert!(good > 100, "and they are many: {good}");
    }
    let calls = hold(&tally).clone();
    let hurt: Vec<_> = calls.iter().filter(|(status, attempts)| *attempts > 1 || *status != 200).collect();
    let attempts: u32 = hurt.iter().map(|(_, attempts)| attempts).sum();
    assert!(hurt.len() > 20, "some were hurt: {}", hurt.len());
    assert!((attempts as usize) < 3 * hurt.len(), "{attempts} attempts for {} that were hurt", hurt.len());
    let healed = hurt.iter().filter(|(status, _)| *status == 200).count();
    assert!(healed * 100 >= hurt.len() * 90, "{healed} of {} that were hurt succeeded", hurt.len());
}
