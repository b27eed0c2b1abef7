//! Who is asked next, in a time that the test moves.

use reqwest::StatusCode;
use reqwest::header::HeaderMap;
use tempfile::TempDir;
use tidegate::{HttpClasses, Kind, Outcome, Random};
use tokio::time::advance;

use super::*;
use crate::fetch::crawl::backoff;
use crate::fetch::rules::Told;

const SECOND: Duration = Duration::from_secs(1);

/// A book, and the folder that it writes to.
fn book(rate: f64, patience: Duration) -> (Book, TempDir) {
    let root = tempfile::tempdir().expect("a folder");
    let folder = Arc::new(Folder::open(root.path()).expect("a folder of ours"));
    let manners = Manners { ignores_robots: true, patience, tries_max: 3, user_agent: "bot".to_owned() };
    (Book::new(Gates::new(rate, Some(rate), 4).expect("within the bounds"), folder, manners), root)
}

fn add(book: &mut Book, host: &str, count: usize) {
    for page in 0..count {
        book.add(Address::parse(&format!("https://{host}/{page}.html")).expect("an address"))
            .expect("it is held");
    }
}

/// What may be sent now, as hosts.
fn start(book: &mut Book) -> Option<(String, Start)> {
    let start = book.next(Instant::now()).expect("a disk")?;
    Some((start.job.at.host.to_string(), start))
}

/// It was answered like this, and is over.
fn over(book: &mut Book, start: Start, outcome: Outcome) {
    start.entry.settle(outcome);
    let host = book.host(start.host);
    host.in_flight -= 1;
    host.failing = (outcome.kind() == Kind::Failure).then(|| host.failing.unwrap_or(Instant::now()));
    book.returned(start.host);
    book.end(start.job, Fate::Failed(Failed { why: String::new(), status: None, is_final: true }));
}

fn keep(book: &mut Book) -> Vec<Ended> {
    let ended = std::mem::take(&mut book.verdicts);
    for ended in &ended {
        book.kept(ended);
    }
    ended
}

#[tokio::test(start_paused = true)]
async fn hosts_have_their_turns_one_after_the_other() {
    let (mut book, _root) = book(1e6, SECOND);
    add(&mut book, "a", 50);
    add(&mut book, "b", 2);
    add(&mut book, "c", 3);
    let mut order = String::new();
    for _ in 0..9 {
        let (host, start) = start(&mut book).expect("somebody is ready");
        order.push_str(&host);
        over(&mut book, start, Outcome::success());
    }
    assert_eq!(order, "abcabcaca");
}

#[tokio::test(start_paused = true)]
async fn who_waits_is_not_in_the_round_and_has_one_timer_however_much_there_is_to_do() {
    let (mut book, _root) = book(1.0, SECOND);
    add(&mut book, "a", 10);
    let (_, first) = start(&mut book).expect("the first goes at once");
    over(&mut book, first, Outcome::success());
    assert!(start(&mut book).is_none());
    add(&mut book, "a", 5_000);
    assert!(start(&mut book).is_none());
    assert_eq!((book.ready.len(), book.due.len()), (0, 1));
    assert!(book.held <= ahead::MEMORY, "the rest is in a file");
    let due = book.next_due().expect("it waits for its rate");
    assert!(due <= Instant::now() + SECOND + Duration::from_millis(1), "{:?}", due - Instant::now());
    advance(SECOND).await;
    book.bring_back(Instant::now());
    assert!(start(&mut book).is_some() && start(&mut book).is_none());
}

#[tokio::test(start_paused = true)]
async fn nothing_is_sent_while_a_circuit_is_open_and_a_host_that_heals_goes_on() {
    let (mut book, _root) = book(1e6, 1_000 * SECOND);
    add(&mut book, "a", 200);
    let began = Instant::now();
    let (mut sent, mut open) = (Vec::new(), Vec::new());
    // Down for its first 40 s: it opens, and opens again when a probe fails.
    while began.elapsed() < 120 * SECOND {
        book.bring_back(Instant::now());
        while let Some((_, start)) = start(&mut book) {
            let is_down = began.elapsed() < 40 * SECOND;
            sent.push((Instant::now(), is_down));
            over(&mut book, start, if is_down { Outcome::failure() } else { Outcome::success() });
            keep(&mut book);
        }
        let Some(due) = book.next_due() else { break };
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
    assert_eq!(sent.len(), 200, "and in the end it has all of them");
}

#[tokio::test(start_paused = true)]
async fn a_host_that_fails_for_longer_than_anybody_waits_is_given_up_with_all_that_is_left() {
    let (mut book, _root) = book(1e6, 5 * SECOND);
    add(&mut book, "a", 1_500);
    add(&mut book, "b", 1);
    let mut sent = 0;
    let mut ended = Vec::new();
    for _ in 0..100 {
        while let Some((host, start)) = start(&mut book) {
            sent += usize::from(host == "a");
            over(&mut book, start, if host == "a" { Outcome::failure() } else { Outcome::success() });
        }
        ended.extend(keep(&mut book));
    }
    assert_eq!((sent, ended.len(), book.is_empty()), (5, 1_501, true));
    let is_told = |ended: &&Ended| matches!(&ended.fate, Fate::Failed(failed) if !failed.is_final && failed.why.contains("fails again"));
    assert_eq!(ended.iter().filter(is_told).count(), 1_495);
}

#[tokio::test(start_paused = true)]
async fn pages_wait_for_the_rules_of_their_site_which_are_asked_for_once() {
    let (mut book, _root) = book(1e6, SECOND);
    book.manners.ignores_robots = false;
    add(&mut book, "a", 3);
    let (_, rules) = start(&mut book).expect("the rules");
    assert_eq!(rules.job.at.url.path(), "/robots.txt");
    assert!(start(&mut book).is_none(), "all else waits");
    let id = rules.host;
    rules.entry.settle(Outcome::success());
    book.host(id).in_flight -= 1;
    let told = Told::File(b"User-agent: *\nDisallow: /1".to_vec());
    *book.host(id).rules_of(true) = Rules::read(told, "bot", Instant::now());
    book.returned(id);
    let paths: Vec<String> = std::iter::from_fn(|| start(&mut book))
        .map(|(_, start)| start.job.at.url.path().to_owned())
        .collect();
    assert_eq!(paths, ["/0.html", "/2.html"]);
    let ended = keep(&mut book);
    assert!(matches!(ended[..], [Ended { fate: Fate::Skipped(Skip::Robots), .. }]), "{ended:?}");
}

#[tokio::test(start_paused = true)]
async fn of_hosts_with_nothing_to_do_so_many_are_remembered_and_none_of_their_counts_is_lost() {
    let (mut book, _root) = book(1e6, SECOND);
    let hosts = HOSTS_MAX + 500;
    for number in 0..hosts {
        add(&mut book, &format!("h{number}.example"), 1);
        let (_, start) = start(&mut book).expect("it is new");
        over(&mut book, start, Outcome::success());
        keep(&mut book);
    }
    assert_eq!((book.by_name.len(), book.forgotten.1, book.forgotten.0.failed), (HOSTS_MAX, 500, 500));
    assert!(book.hosts.len() <= HOSTS_MAX + 1 && book.is_empty());
}

#[tokio::test(start_paused = true)]
async fn hosts_that_only_redirects_led_to_are_forgotten_too() {
    let (mut book, _root) = book(1e6, SECOND);
    for number in 0..HOSTS_MAX + 500 {
        add(&mut book, "short.example", 1);
        let (_, Start { host, job, entry }) = start(&mut book).expect("its page is new");
        entry.settle(Outcome::success());
        book.host(host).in_flight -= 1;
        book.rest(host);
        let at = Address::parse(&format!("https://h{number}.example/")).expect("an address");
        book.put(Job { at, hops: 1, ..job });
        let (_, there) = start(&mut book).expect("where it led");
        let id = there.host;
        over(&mut book, there, Outcome::success());
        book.rest(id);
        keep(&mut book);
    }
    assert!(book.by_name.len() <= HOSTS_MAX && book.is_empty(), "{} hosts", book.by_name.len());
    assert_eq!(book.host(0).tally.failed, (HOSTS_MAX + 500) as u64, "all of them were pages of the first");
}

#[tokio::test(start_paused = true)]
async fn a_slow_host_to_which_a_fast_one_redirects_does_not_fill_the_memory() {
    let (mut book, _root) = book(1e6, 1_000 * SECOND);
    let slow = Address::parse("https://slow.example/0.html").expect("an address");
    book.gates.try_enter(&slow.host).unwrap().settle(Outcome::overload().retry_after(60 * SECOND));
    let pages = UNDER_WAY_MAX + 5_000;
    add(&mut book, "fast.example", pages);
    let (mut redirected, mut ended) = (0, 0);
    for _ in 0..4 * pages {
        book.bring_back(Instant::now());
        let Some((host, Start { host: id, job, entry })) = start(&mut book) else {
            ended += keep(&mut book).len();
            if book.is_empty() {
                break;
            }
            advance(CROWDED).await;
            continue;
        };
        entry.settle(Outcome::success());
        book.host(id).in_flight -= 1;
        book.returned(id);
        if host == "fast.example" {
            redirected += 1;
            book.put(Job { at: slow.clone(), hops: 1, ..job });
        } else {
            book.end(job, Fate::Failed(Failed { why: String::new(), status: None, is_final: true }));
        }
        assert!(book.under_way.len() <= UNDER_WAY_MAX, "after {redirected} redirects");
    }
    assert_eq!(
        (redirected, ended, book.is_empty()),
        (pages, pages, true),
        "and in the end it has all of them"
    );
}

/// A host that takes so many requests in each window, answers 429 to the rest, and fails one request in fifty.
#[derive(Default)]
struct Limited {
    taken: Vec<Instant>,
    /// Every request: its page, and the status of its answer.
    answers: Vec<(Key, StatusCode)>,
}

impl Limited {
    const TAKES: usize = 20;
    const WINDOW: Duration = Duration::from_millis(500);

    fn answer(&mut self, key: Key) -> StatusCode {
        let now = Instant::now();
        self.taken.retain(|at| now - *at < Self::WINDOW);
        let status = if self.taken.len() >= Self::TAKES {
            StatusCode::TOO_MANY_REQUESTS
        } else if self.answers.len() % 50 == 49 {
            StatusCode::BAD_GATEWAY
        } else {
            StatusCode::OK
        };
        self.taken.push(now);
        self.answers.push((key, status));
        status
    }
}

#[tokio::test(start_paused = true)]
async fn most_requests_succeed_once_the_rate_is_found() {
    const PAGES: usize = 400;
    let (mut book, _root) = book(1.0, 600 * SECOND);
    book.gates = Gates::new(10.0, Some(100.0), 8).expect("within the bounds");
    book.manners.tries_max = 6;
    add(&mut book, "a", PAGES);
    let (mut limited, mut random, mut done) = (Limited::default(), Random::seeded(1), 0);
    let took = Duration::from_millis(5);
    while !book.is_empty() {
        book.bring_back(Instant::now());
        let mut answered = Vec::new();
        while let Some((_, start)) = start(&mut book) {
            let What::Page(page) = &start.job.what else { unreachable!("rules are ignored") };
            let status = limited.answer(page.key);
            answered.push((start, status));
        }
        if answered.is_empty() {
            let due = book.next_due().expect("something is left to do");
            advance(due.saturating_duration_since(Instant::now())).await;
            continue;
        }
        advance(took).await;
        for (Start { host, mut job, entry }, status) in answered {
            let class = HttpClasses::default().read(status, &HeaderMap::new());
            let outcome = class.outcome().took(took);
            entry.settle(outcome);
            job.tries += 1;
            let now = Instant::now();
            let upstream = book.host(host);
            upstream.in_flight -= 1;
            upstream.failing = match outcome.kind() {
                Kind::Failure | Kind::Overload => upstream.failing.or(Some(now)),
                _ => None,
            };
            book.returned(host);
            if class.is_worth_another() && job.tries < book.manners.tries_max {
                let delay = backoff().delay(job.tries - 1, &mut random);
                book.put_later(host, job, now + delay);
                continue;
            }
            done += usize::from(status == StatusCode::OK);
            book.end(job, Fate::Failed(Failed { why: String::new(), status: None, is_final: true }));
        }
        keep(&mut book);
    }
    assert_eq!(done, PAGES);
    let settled = &limited.answers[limited.answers.len() / 3..];
    let good = settled.iter().filter(|(_, status)| *status == StatusCode::OK).count();
    assert!(good * 10 > settled.len() * 9, "{good} of {} succeed", settled.len());
    let mut attempts: HashMap<Key, usize> = HashMap::new();
    for (key, _) in &limited.answers {
        *attempts.entry(*key).or_default() += 1;
    }
    let failed: Vec<usize> = attempts.into_values().filter(|attempts| *attempts > 1).collect();
    assert!(failed.iter().sum::<usize>() < 3 * failed.len(), "attempts at pages that failed: {failed:?}");
}
