//! The scheduler under paused time.

use reqwest::StatusCode;
use reqwest::header::{HeaderMap, RETRY_AFTER};
use tempfile::TempDir;
use tidegate::{HttpClasses, Outcome, Random, Retry};
use tokio::time::advance;

use super::*;
use crate::fetch::attempt::{Reply, host_outcome, is_of_page};
use crate::fetch::partial::Partial;
use crate::fetch::robots::RobotsResponse;

const SECOND: Duration = Duration::from_secs(1);

/// A scheduler and the folder that it writes to.
fn frontier(rate: f64, patience: Duration) -> (Frontier, TempDir) {
    let root = tempfile::tempdir().expect("a folder");
    let folder = Arc::new(Folder::open(root.path()).expect("a locked folder"));
    let retry = Retry::attempts(3);
    let options = HostOptions { ignores_robots: true, patience, retry, user_agent: "bot".to_owned() };
    (Frontier::new(Gates::starting_at(rate, Some(rate), 4), folder, options), root)
}

fn add(frontier: &mut Frontier, host: &str, count: usize) {
    for page in 0..count {
        frontier
            .add(Address::parse(&format!("https://{host}/{page}.html")).expect("an address"))
            .expect("it is queued");
    }
}

/// The next request and its host.
fn start(frontier: &mut Frontier) -> Option<(String, Start)> {
    let start = frontier.next(Instant::now()).expect("a disk")?;
    Some((start.job.at.host.to_string(), start))
}

/// Ends a request with this outcome.
fn over(frontier: &mut Frontier, start: Start, outcome: Outcome) {
    start.entry.settle(outcome);
    let host = frontier.host(start.host);
    host.in_flight -= 1;
    host.on_response(outcome.kind(), false);
    frontier.on_request_end(start.host);
    frontier.end(
        start.job,
        PageOutcome::Failed(PageFailure { why: String::new(), status: None, is_final: true }),
    );
}

fn keep(frontier: &mut Frontier) -> Vec<PageResult> {
    let ended = std::mem::take(&mut frontier.finished);
    for ended in &ended {
        frontier.on_written(ended);
    }
    ended
}

#[tokio::test(start_paused = true)]
async fn hosts_take_turns() {
    let (mut frontier, _root) = frontier(1e6, SECOND);
    add(&mut frontier, "a", 50);
    add(&mut frontier, "b", 2);
    add(&mut frontier, "c", 3);
    let mut order = String::new();
    for _ in 0..9 {
        let (host, start) = start(&mut frontier).expect("a host is ready");
        order.push_str(&host);
        over(&mut frontier, start, Outcome::success());
    }
    assert_eq!(order, "abcabcaca");
}

#[tokio::test(start_paused = true)]
async fn waiting_host_leaves_the_queue_and_has_one_timer() {
    let (mut frontier, _root) = frontier(1.0, SECOND);
    add(&mut frontier, "a", 10);
    let (_, first) = start(&mut frontier).expect("the first goes at once");
    over(&mut frontier, first, Outcome::success());
    assert!(start(&mut frontier).is_none());
    add(&mut frontier, "a", 5_000);
    assert!(start(&mut frontier).is_none());
    assert_eq!((frontier.ready.len(), frontier.due.len()), (0, 1));
    assert!(frontier.in_memory <= spill_queue::MEMORY, "the rest is in a file");
    let due = frontier.next_due().expect("it waits for its rate");
    assert!(due <= Instant::now() + SECOND + Duration::from_millis(1), "{:?}", due - Instant::now());
    advance(SECOND).await;
    frontier.fire_timers(Instant::now());
    assert!(start(&mut frontier).is_some() && start(&mut frontier).is_none());
}

#[tokio::test(start_paused = true)]
async fn open_circuit_sends_nothing_until_a_probe_succeeds() {
    let (mut frontier, _root) = frontier(1e6, 1_000 * SECOND);
    add(&mut frontier, "a", 200);
    let began = Instant::now();
    let (mut sent, mut open) = (Vec::new(), Vec::new());
    // The host is down for 40 s: its circuit opens, and opens again when a probe fails.
    while began.elapsed() < 120 * SECOND {
        frontier.fire_timers(Instant::now());
        while let Some((_, start)) = start(&mut frontier) {
            let is_down = began.elapsed() < 40 * SECOND;
            sent.push((Instant::now(), is_down));
            over(&mut frontier, start, if is_down { Outcome::failure() } else { Outcome::success() });
            keep(&mut frontier);
        }
        let Some(due) = frontier.next_due() else { break };
        open.push((Instant::now(), due));
        advance(due - Instant::now()).await;
    }
    let long: Vec<_> =
        open.iter().filter(|(from, until)| until.duration_since(*from) >= 15 * SECOND).collect();
    assert!(long.len() >= 2, "{open:?}");
    for (from, until) in long {
        let early = sent.iter().filter(|(at, _)| at > from && at < until).count();
        assert_eq!(early, 0, "open from {from:?} to {until:?}");
    }
    let wasted = sent.iter().filter(|(_, is_down)| *is_down).count();
    assert!(wasted <= 5 + 2 * 3, "{wasted} requests to a host that is down");
    assert_eq!(sent.len(), 200, "all pages are fetched in the end");
}

#[tokio::test(start_paused = true)]
async fn host_that_fails_beyond_patience_is_given_up() {
    let (mut frontier, _root) = frontier(1e6, 5 * SECOND);
    add(&mut frontier, "a", 1_500);
    add(&mut frontier, "b", 1);
    let mut sent = 0;
    let mut ended = Vec::new();
    for _ in 0..100 {
        while let Some((host, start)) = start(&mut frontier) {
            sent += usize::from(host == "a");
            over(&mut frontier, start, if host == "a" { Outcome::failure() } else { Outcome::success() });
        }
        ended.extend(keep(&mut frontier));
    }
    assert_eq!((sent, ended.len(), frontier.is_empty()), (5, 1_501, true));
    let is_expected = |ended: &&PageResult| matches!(&ended.outcome, PageOutcome::Failed(failed) if !failed.is_final && failed.why.contains("has been failing"));
    assert_eq!(ended.iter().filter(is_expected).count(), 1_495);
}

#[tokio::test(start_paused = true)]
async fn pages_wait_for_one_robots_txt_request() {
    let (mut frontier, _root) = frontier(1e6, SECOND);
    frontier.options.ignores_robots = false;
    add(&mut frontier, "a", 3);
    let (_, rules) = start(&mut frontier).expect("the rules");
    assert_eq!(rules.job.at.url.path(), "/robots.txt");
    assert!(start(&mut frontier).is_none(), "every page waits");
    let id = rules.host;
    rules.entry.settle(Outcome::success());
    frontier.host(id).in_flight -= 1;
    let response = RobotsResponse::File(b"User-agent: *\nDisallow: /1".to_vec());
    *frontier.host(id).rules_of(true) = RobotsRules::read(response, "bot", Instant::now());
    frontier.on_request_end(id);
    let paths: Vec<String> = std::iter::from_fn(|| start(&mut frontier))
        .map(|(_, start)| start.job.at.url.path().to_owned())
        .collect();
    assert_eq!(paths, ["/0.html", "/2.html"]);
    let ended = keep(&mut frontier);
    assert!(
        matches!(ended[..], [PageResult { outcome: PageOutcome::Skipped(SkipReason::Robots), .. }]),
        "{ended:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn idle_hosts_are_bounded_and_keep_their_counts() {
    let (mut frontier, _root) = frontier(1e6, SECOND);
    let hosts = HOSTS_MAX + 500;
    for number in 0..hosts {
        add(&mut frontier, &format!("h{number}.example"), 1);
        let (_, start) = start(&mut frontier).expect("it is new");
        over(&mut frontier, start, Outcome::success());
        keep(&mut frontier);
    }
    assert_eq!(
        (frontier.by_name.len(), frontier.evicted.1, frontier.evicted.0.failed),
        (HOSTS_MAX, 500, 500)
    );
    assert!(frontier.hosts.len() <= HOSTS_MAX + 1 && frontier.is_empty());
}

/// The summary had no rate, circuit and latency of a host that had ended minutes before.
#[tokio::test(start_paused = true)]
async fn evicted_throttle_is_summarized() {
    let (mut frontier, _root) = frontier(1e6, SECOND);
    add(&mut frontier, "early", 1);
    let (_, first) = start(&mut frontier).expect("it is new");
    let early = first.host;
    over(&mut frontier, first, Outcome::success().took(SECOND));
    keep(&mut frontier);
    let state =
        |frontier: &Frontier| frontier.throttle_state(frontier.hosts[early].as_ref().expect("it is cached"));
    let before = state(&frontier);
    assert!(before.limit.is_some() && before.circuit.is_some() && before.latency_p95.is_some(), "{before:?}");
    // Each new key examines some of the old ones.
    for number in 0..1_000 {
        advance(SECOND).await;
        add(&mut frontier, &format!("h{number}"), 1);
        let (_, start) = start(&mut frontier).expect("it is new");
        over(&mut frontier, start, Outcome::success());
        keep(&mut frontier);
    }
    let authority = frontier.host(early).authority.clone();
    assert_eq!(frontier.gates.view(&authority), None, "it was evicted");
    assert_eq!(state(&frontier), before);
}

#[tokio::test(start_paused = true)]
async fn hosts_reached_by_redirects_are_evicted_too() {
    let (mut frontier, _root) = frontier(1e6, SECOND);
    for number in 0..HOSTS_MAX + 500 {
        add(&mut frontier, "short.example", 1);
        let (_, Start { host, job, entry }) = start(&mut frontier).expect("its page is new");
        entry.settle(Outcome::success());
        frontier.host(host).in_flight -= 1;
        frontier.mark_idle(host);
        let at = Address::parse(&format!("https://h{number}.example/")).expect("an address");
        frontier.enqueue(job.redirected(at));
        let (_, target) = start(&mut frontier).expect("where it led");
        let id = target.host;
        over(&mut frontier, target, Outcome::success());
        frontier.mark_idle(id);
        keep(&mut frontier);
    }
    assert!(frontier.by_name.len() <= HOSTS_MAX && frontier.is_empty(), "{} hosts", frontier.by_name.len());
    assert_eq!(
        frontier.host(0).tally.failed,
        (HOSTS_MAX + 500) as u64,
        "every page belongs to the first host"
    );
}

#[tokio::test(start_paused = true)]
async fn redirects_to_a_slow_host_stay_within_memory() {
    let (mut frontier, _root) = frontier(1e6, 1_000 * SECOND);
    let slow = Address::parse("https://slow.example/0.html").expect("an address");
    frontier.gates.try_enter(&slow.host).unwrap().settle(Outcome::overload().retry_after(60 * SECOND));
    let pages = IN_PROGRESS_MAX + 5_000;
    add(&mut frontier, "fast.example", pages);
    let (mut redirected, mut ended) = (0, 0);
    for _ in 0..4 * pages {
        frontier.fire_timers(Instant::now());
        let Some((host, Start { host: id, job, entry })) = start(&mut frontier) else {
            ended += keep(&mut frontier).len();
            if frontier.is_empty() {
                break;
            }
            advance(CROWDED_DELAY).await;
            continue;
        };
        entry.settle(Outcome::success());
        frontier.host(id).in_flight -= 1;
        frontier.on_request_end(id);
        if host == "fast.example" {
            redirected += 1;
            frontier.enqueue(job.redirected(slow.clone()));
        } else {
            frontier.end(
                job,
                PageOutcome::Failed(PageFailure { why: String::new(), status: None, is_final: true }),
            );
        }
        assert!(frontier.in_progress.len() <= IN_PROGRESS_MAX, "after {redirected} redirects");
    }
    assert_eq!(
        (redirected, ended, frontier.is_empty()),
        (pages, pages, true),
        "all pages are fetched in the end"
    );
}

/// A host that accepts a fixed number of requests per window, answers 429 to the rest, and fails one request
/// in fifty.
#[derive(Default)]
struct Limited {
    taken: Vec<Instant>,
    /// Every request: its page, and the status of its answer.
    responses: Vec<(Key, StatusCode)>,
}

impl Limited {
    const TAKES: usize = 20;
    const WINDOW: Duration = Duration::from_millis(500);

    fn respond(&mut self, key: Key) -> StatusCode {
        let now = Instant::now();
        self.taken.retain(|at| now - *at < Self::WINDOW);
        let status = if self.taken.len() >= Self::TAKES {
            StatusCode::TOO_MANY_REQUESTS
        } else if self.responses.len() % 50 == 49 {
            StatusCode::BAD_GATEWAY
        } else {
            StatusCode::OK
        };
        self.taken.push(now);
        self.responses.push((key, status));
        status
    }
}

/// The response to a request of a simulated fetch.
enum Response {
    Status(StatusCode),
    /// A rejection with `Retry-After`, in seconds.
    Rejection(StatusCode, u64),
    /// A good head, and a body that breaks off.
    Cut,
}

/// Fetches everything, with a response to each request `took` after it; returns the pages that ended.
async fn fetch(
    frontier: &mut Frontier,
    took: Duration,
    mut respond: impl FnMut(&Job) -> Response,
) -> Vec<PageResult> {
    let (mut random, mut ended) = (Random::seeded(1), Vec::new());
    while !frontier.is_empty() {
        frontier.fire_timers(Instant::now());
        let mut responses = Vec::new();
        while let Some((_, start)) = start(frontier) {
            let response = respond(&start.job);
            responses.push((start, response));
        }
        ended.extend(keep(frontier));
        if responses.is_empty() {
            let Some(due) = frontier.next_due() else { continue };
            advance(due.saturating_duration_since(Instant::now())).await;
            continue;
        }
        advance(took).await;
        for (Start { host, job, entry }, response) in responses {
            let mut headers = HeaderMap::new();
            let (status, is_cut) = match response {
                Response::Cut => (StatusCode::OK, true),
                Response::Status(status) => (status, false),
                Response::Rejection(status, seconds) => {
                    headers.insert(RETRY_AFTER, seconds.into());
                    (status, false)
                }
            };
            let class = HttpClasses::default().read(status, &headers);
            let outcome = class.outcome().took(took);
            let is_of_page = is_of_page(outcome, Some(status));
            let is_repeated = is_of_page && job.has_failed;
            entry.settle(if is_cut { Outcome::ignored() } else { host_outcome(outcome, is_repeated) });
            let result = AttemptResult {
                reply: Reply::Status(status.as_u16()),
                kind: outcome.kind(),
                is_of_page,
                is_retryable: is_cut || class.is_retryable(),
                hint: outcome.hint(),
                partial: None,
            };
            let Some(job) = frontier.on_attempt_end(host, job, &result, &mut random) else { continue };
            let status = (!is_cut).then_some(status.as_u16());
            frontier.end(
                job,
                PageOutcome::Failed(PageFailure {
                    why: String::new(),
                    status,
                    is_final: !result.is_retryable,
                }),
            );
        }
        ended.extend(keep(frontier));
    }
    ended
}

fn is_good(ended: &PageResult) -> bool {
    matches!(&ended.outcome, PageOutcome::Failed(failed) if failed.status == Some(200))
}

#[tokio::test(start_paused = true)]
async fn most_requests_succeed_once_the_rate_is_found() {
    const PAGES: usize = 400;
    let (mut frontier, _root) = frontier(1.0, 600 * SECOND);
    frontier.gates = Gates::starting_at(10.0, Some(100.0), 8);
    frontier.options.retry = Retry::attempts(6);
    add(&mut frontier, "a", PAGES);
    let mut limited = Limited::default();
    let ended = fetch(&mut frontier, Duration::from_millis(5), |job| {
        let JobKind::Page(page) = &job.kind else { unreachable!("rules are ignored") };
        Response::Status(limited.respond(page.key))
    })
    .await;
    assert_eq!(ended.iter().filter(|ended| is_good(ended)).count(), PAGES);
    let settled = &limited.responses[limited.responses.len() / 3..];
    let good = settled.iter().filter(|(_, status)| *status == StatusCode::OK).count();
    assert!(good * 10 > settled.len() * 9, "{good} of {} succeed", settled.len());
    let mut attempts: HashMap<Key, usize> = HashMap::new();
    for (key, _) in &limited.responses {
        *attempts.entry(*key).or_default() += 1;
    }
    let failed: Vec<usize> = attempts.into_values().filter(|attempts| *attempts > 1).collect();
    assert!(failed.iter().sum::<usize>() < 3 * failed.len(), "attempts at pages that failed: {failed:?}");
}

/// The number of a page that `add` added.
fn number(job: &Job) -> usize {
    let name = job.at.url.path().trim_start_matches('/').trim_end_matches(".html");
    name.parse().expect("a number")
}

/// Six broken pages next to each other made the fetch give up a healthy host: each retry counted as a failure
/// of the host, and retries went before pages that were never requested.
#[tokio::test(start_paused = true)]
async fn six_broken_pages_do_not_stop_the_others() {
    const ERROR: StatusCode = StatusCode::INTERNAL_SERVER_ERROR;
    for at_once in [1, 8] {
        for (cut, error) in [(0, ERROR), (3, ERROR), (6, ERROR), (0, StatusCode::SERVICE_UNAVAILABLE)] {
            let (mut frontier, _root) = frontier(1.0, 600 * SECOND);
            frontier.gates = Gates::starting_at(10.0, None, at_once);
            frontier.options.retry = Retry::attempts(4);
            add(&mut frontier, "a", 100);
            let began = Instant::now();
            let ended = fetch(&mut frontier, Duration::from_millis(50), |job| match number(job) {
                page @ 40..46 if page - 40 < cut => Response::Cut,
                40..46 => Response::Status(error),
                _ => Response::Status(StatusCode::OK),
            })
            .await;
            let case = format!("{cut} cut, others {error}, {at_once} at once");
            assert_eq!(
                (ended.iter().filter(|ended| is_good(ended)).count(), ended.len()),
                (94, 100),
                "{case}"
            );
            assert!(began.elapsed() <= 60 * SECOND, "{case}: {:?}", began.elapsed());
            assert_eq!(frontier.host(0).gave_up, None, "{case}");
            assert_eq!(frontier.host(0).tally.attempts, 94 + 6 * 4, "{case}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn untried_pages_go_before_retries() {
    let (mut frontier, _root) = frontier(1e6, 600 * SECOND);
    frontier.gates = Gates::starting_at(10.0, None, 1);
    add(&mut frontier, "a", 20);
    let mut order = Vec::new();
    fetch(&mut frontier, SECOND, |job| {
        order.push(number(job));
        let is_broken = number(job) == 3 && job.tries == 0;
        Response::Status(if is_broken { StatusCode::BAD_GATEWAY } else { StatusCode::OK })
    })
    .await;
    assert_eq!(order, (0..20).chain([3]).collect::<Vec<_>>());
}

#[tokio::test(start_paused = true)]
async fn pages_that_failed_before_go_last() {
    let (mut first, root) = frontier(1e6, SECOND);
    let journal = first.folder.journal_path();
    first.folder = Arc::new(Folder::open(tempfile::tempdir().expect("a folder").path()).expect("a folder"));
    let line = |page: u32, attempts: u32| {
        format!(r#"{{"url":"https://a/{page}.html","outcome":"failed","attempts":{attempts}}}"#) + "\n"
    };
    // The last one was never requested: its host was given up.
    std::fs::write(journal, line(0, 4) + &line(2, 1) + &line(3, 0)).expect("it is written");
    let folder = Arc::new(Folder::open(root.path()).expect("a locked folder"));
    let gates = Gates::starting_at(1e6, Some(1e6), 1);
    let mut frontier = Frontier::new(gates, folder, first.options);
    add(&mut frontier, "a", 5);
    let mut order = Vec::new();
    fetch(&mut frontier, SECOND, |job| {
        order.push(number(job));
        Response::Status(StatusCode::OK)
    })
    .await;
    assert_eq!(order, [1, 3, 4, 0, 2]);
}

#[tokio::test(start_paused = true)]
async fn pages_count_once_against_a_host() {
    // Four pages that always fail: twelve failures, and fewer than five pages.
    let (mut frontier, _root) = frontier(1e6, SECOND);
    add(&mut frontier, "a", 4);
    let ended =
        fetch(&mut frontier, Duration::from_millis(5), |_| Response::Status(StatusCode::BAD_GATEWAY)).await;
    let host = frontier.host(0);
    assert_eq!((ended.len(), host.tally.attempts, &host.gave_up), (4, 12, &None));
}

/// Plain 503s and 429s open no circuit: a fetch went on for hours at the lowest rate.
#[tokio::test(start_paused = true)]
async fn host_that_only_rejects_is_given_up() {
    for status in [StatusCode::SERVICE_UNAVAILABLE, StatusCode::TOO_MANY_REQUESTS] {
        let (mut frontier, _root) = frontier(1.0, 600 * SECOND);
        frontier.gates = Gates::starting_at(10.0, None, 8);
        add(&mut frontier, "a", 1_100);
        let began = Instant::now();
        let ended = fetch(&mut frontier, Duration::from_millis(50), |job| {
            Response::Status(if number(job) < 100 { StatusCode::OK } else { status })
        })
        .await;
        assert_eq!((ended.iter().filter(|ended| is_good(ended)).count(), ended.len()), (100, 1_100));
        assert!(began.elapsed() < 700 * SECOND, "{status}: {:?}", began.elapsed());
        let why = frontier.host(0).gave_up.as_deref();
        assert_eq!(why, Some("it has been failing for longer than --patience (10m)"), "{status}");
    }
}

/// Probes were the pages next to the broken ones, so a block of about 35 looked like a host that is down.
#[tokio::test(start_paused = true)]
async fn large_broken_block_does_not_stop_the_others() {
    const ERROR: StatusCode = StatusCode::INTERNAL_SERVER_ERROR;
    for at_once in [1, 8] {
        // The last: broken at both ends.
        for (one, two) in [(0..60, 0..0), (50..110, 0..0), (90..150, 0..0), (0..30, 130..160)] {
            let (mut frontier, _root) = frontier(1.0, 600 * SECOND);
            frontier.gates = Gates::starting_at(10.0, None, at_once);
            add(&mut frontier, "a", 160);
            let ended = fetch(&mut frontier, Duration::from_millis(50), |job| {
                let is_broken = one.contains(&number(job)) || two.contains(&number(job));
                Response::Status(if is_broken { ERROR } else { StatusCode::OK })
            })
            .await;
            let good = ended.iter().filter(|ended| is_good(ended)).count();
            assert_eq!((good, ended.len()), (100, 160), "{one:?} and {two:?}, {at_once} at once");
        }
    }
}

/// A page that had waited out its own `Retry-After` found every gate open, and was requested for hours.
#[tokio::test(start_paused = true)]
async fn page_that_is_always_rejected_ends() {
    for status in [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE] {
        let (mut frontier, _root) = frontier(1.0, 600 * SECOND);
        frontier.gates = Gates::starting_at(10.0, None, 8);
        add(&mut frontier, "a", 1);
        let began = Instant::now();
        let ended = fetch(&mut frontier, Duration::from_millis(50), |_| match began.elapsed() {
            // Only to end the test if the page does not end before.
            elapsed if elapsed > 7_200 * SECOND => Response::Status(StatusCode::OK),
            _ => Response::Rejection(status, 60),
        })
        .await;
        assert_eq!((ended.len(), ended.iter().any(is_good)), (1, false), "{status}");
        let took = began.elapsed();
        assert!(took > 500 * SECOND && took < 660 * SECOND, "{status}: {took:?}");
    }
}

/// A host shared with other clients rejected a page `--tries` times, and the page failed.
#[tokio::test(start_paused = true)]
async fn rejections_use_up_no_tries() {
    let (mut frontier, _root) = frontier(1.0, 600 * SECOND);
    frontier.gates = Gates::starting_at(10.0, None, 8);
    add(&mut frontier, "a", 30);
    let ended = fetch(&mut frontier, Duration::from_millis(50), |job| {
        let is_rejected = number(job) % 10 == 3 && job.attempts < 6;
        Response::Status(if is_rejected { StatusCode::TOO_MANY_REQUESTS } else { StatusCode::OK })
    })
    .await;
    assert_eq!(ended.iter().filter(|ended| is_good(ended)).count(), 30);
    assert_eq!(frontier.host(0).tally.attempts, 30 + 3 * 6);
}

/// A page that waited for a retry when the fetch stopped left no line in the journal, and its part was removed.
#[tokio::test(start_paused = true)]
async fn stop_ends_queued_pages_that_have_a_part() {
    let (mut frontier, _root) = frontier(1e6, SECOND);
    add(&mut frontier, "a", 4);
    let starts: Vec<Start> = std::iter::from_fn(|| start(&mut frontier)).map(|(_, start)| start).collect();
    let queues = ["due", "retries", "started", "without a part"];
    for (Start { host, mut job, .. }, queue) in starts.into_iter().zip(queues) {
        let (part, url) = (queue.to_owned(), job.at.url.clone());
        let partial = Partial { part, bytes: 1, url, validator: String::new(), empty_rests: 0 };
        job.partial = (queue != "without a part").then_some(partial);
        job.tries = u32::from(queue != "started");
        match queue {
            "due" => frontier.enqueue_later(host, job, Instant::now() + SECOND),
            _ => frontier.enqueue(job),
        }
    }
    frontier.stop();
    let parts: Vec<String> =
        keep(&mut frontier).into_iter().filter_map(|ended| Some(ended.partial?.part)).collect();
    assert_eq!(parts, ["due", "started", "retries"]);
}
