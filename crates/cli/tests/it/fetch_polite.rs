//! Politeness to hosts, over real sockets: no request before `Retry-After` has passed, while the circuit is
//! open, or that robots.txt disallows.
//!
//! Tests compare counts and orders. Two measure a time, as a lower bound, which a slow machine cannot fail.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::Signal;

use crate::kit::codec;
use crate::kit::fetch::{FetchDir, Log, Reply, Upstream, hold, pages};
use crate::kit::server::free_port;
use crate::kit::{finish, send, wait_until};

#[test]
fn rejected_page_waits_for_its_hint_and_others_do_not() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match seen.number {
        10 => Reply::status(429).header("retry-after", 1),
        40 => Reply::status(503).header("retry-after", 1),
        _ => Reply::status(200),
    });
    let run = dir.fast(&["--per-host", "1"], &pages(&upstream, 60));
    assert_eq!((run.code, dir.files().len()), (0, 60), "{run:?}");
    let seen = upstream.all();
    assert_eq!(upstream.seen().len(), 62, "each of the two was requested once more");
    for rejected in seen.iter().filter(|seen| [10, 40].contains(&seen.number)) {
        let again = seen.iter().rfind(|other| other.path == rejected.path).expect("it was requested");
        assert!(again.at.duration_since(rejected.at) >= Duration::from_secs(1), "{}", rejected.path);
    }
}

#[test]
fn retry_after_stops_a_host_that_accepts_nothing() {
    let (dir, log, healed) = (FetchDir::new(), Log::default(), Arc::new(AtomicBool::new(false)));
    let is_healed = Arc::clone(&healed);
    let upstream = Upstream::start(&log, move |seen| match seen.number {
        20.. if !is_healed.load(Ordering::SeqCst) => Reply::status(429).header("retry-after", 7_200),
        _ => Reply::status(200),
    });
    let other = Upstream::start(&log, |_| Reply::status(200));
    let urls = [pages(&upstream, 400), pages(&other, 400)].concat();
    let child = dir.begin(&["--per-host", "2", "--timeout", "1m", "--patience", "3h"], &urls);
    // Both hosts have their turns until then.
    wait_until("all pages of the other host", || dir.files_of(&other) == 400);
    let asked = upstream.all().len();
    assert!((21..=31).contains(&asked), "{asked} requests, of which 20 were accepted");
    send(&child, Signal::TERM);
    let run = finish(child);
    assert_eq!(run.code, 143, "{run:?}");
    healed.store(true, Ordering::SeqCst);
    let run = dir.fast(&["--per-host", "2"], &urls);
    assert_eq!((run.code, dir.files().len()), (0, 800), "{run:?}");
}

#[test]
fn host_with_a_long_pause_is_given_up() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |_| Reply::status(503).header("retry-after", 86_400 * 30));
    let other = Upstream::start(&log, |_| Reply::status(200));
    let run = dir.fast(&["--per-host", "1"], &[pages(&upstream, 40), pages(&other, 40)].concat());
    assert_eq!((run.code, upstream.seen().len(), dir.files().len()), (4, 2, 40), "{run:?}");
    let line = format!("given up: {}: it asks for a pause longer than --patience (10m)", upstream.host());
    assert!(run.stdout.contains(&line), "{}", run.stdout);
    assert!(run.stdout.contains("run the same command again to retry them"), "{}", run.stdout);
}

#[test]
fn open_circuit_stops_one_host_only() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let down = Upstream::start(&log, |_| Reply::status(500));
    let up = Upstream::start(&log, |_| Reply::status(200));
    let urls = [pages(&down, 50), pages(&up, 50)].concat();
    let run = dir.fast(&["--per-host", "1", "--patience", "1s"], &urls);
    assert_eq!((run.code, dir.files().len()), (4, 50), "{run:?}");
    assert_eq!(down.seen().len(), 5, "five failures in a row open it");
    assert!(run.stdout.contains("it has been failing for longer than --patience (1s)"), "{}", run.stdout);
    assert_eq!(up.seen().len(), 50);
}

#[test]
fn unreachable_host_fails_and_others_are_fetched() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let unused = free_port();
    let upstream = Upstream::start(&log, |_| Reply::status(200));
    let mut urls = pages(&upstream, 3);
    urls.push(format!("http://{unused}/a.html"));
    let run = dir.fast(&["--ignore-robots", "--patience", "1s"], &urls);
    assert_eq!((run.code, dir.files().len()), (4, 3), "{run:?}");
    assert!(run.stdout.contains("a.html: no connection: "), "{}", run.stdout);
    // The same if its rules cannot be fetched.
    let run = dir.fast(&["--patience", "1s"], &urls);
    assert_eq!(run.code, 4);
    assert!(
        run.stdout.contains(&format!("robots.txt of {unused} is unavailable: no connection: ")),
        "{}",
        run.stdout
    );
}

#[test]
fn failed_pages_are_retried_once() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let asked: Mutex<BTreeSet<String>> = Mutex::default();
    let upstream = Upstream::start(&log, move |seen| {
        let is_first = hold(&asked).insert(seen.path.clone());
        Reply::status(match seen.path.as_str() {
            "/p/3.html" | "/p/33.html" if is_first => 429,
            "/p/7.html" | "/p/77.html" if is_first => 502,
            _ => 200,
        })
    });
    let run = dir.fast(&[], &pages(&upstream, 100));
    assert_eq!((run.code, dir.files().len(), upstream.seen().len()), (0, 100, 104), "{run:?}");
}

#[test]
fn disallowed_pages_are_skipped_with_one_robots_txt() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::page(
            "User-agent: *\nDisallow: /\n\nUser-agent: mybot\nDisallow: /p/1\nAllow: /p/11.html\n",
        ),
        _ => Reply::status(200),
    });
    let urls = pages(&upstream, 20);
    let run = dir.fast(&["--user-agent", "mybot/2.0 (+https://example.com)"], &urls);
    assert_eq!((run.code, dir.files().len(), upstream.robots()), (0, 10, 1), "{run:?}");
    assert!(dir.file(&upstream, "p/11.html").is_some() && dir.file(&upstream, "p/12.html").is_none());
    assert!(upstream.all().iter().all(|seen| seen.agent == "mybot/2.0 (+https://example.com)"));
    assert!(run.stdout.contains("10 disallowed by robots.txt"), "{}", run.stdout);
    // The rules allow other agents nothing, unless they ignore them.
    let run = dir.fast(&["--json"], &urls);
    assert_eq!((run.code, dir.files().len()), (0, 10));
    assert!(codec::lines(&run.stdout).iter().any(|line| line["reason"] == "robots"));
    let run = dir.fast(&["--ignore-robots"], &urls);
    assert_eq!((run.code, dir.files().len(), upstream.robots()), (0, 20, 2));
}

#[test]
fn crawl_delay_of_robots_txt_is_obeyed() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::page("User-agent: *\nCrawl-delay: 0.3\n"),
        _ => Reply::status(200),
    });
    let run = dir.fast(&[], &pages(&upstream, 5));
    assert_eq!((run.code, dir.files().len()), (0, 5), "{run:?}");
    // From the request for the rules to that for the last page there are four delays at least, however slow
    // the machine is.
    let (all, seen) = (upstream.all(), upstream.seen());
    let span = seen[4].at.duration_since(all[0].at);
    assert!(span >= Duration::from_millis(1_200), "five requests in {span:?}");
}

#[test]
fn robots_txt_errors_follow_rfc_9309() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let rules = |status: u16| {
        Upstream::with_robots(&log, move |seen| {
            Reply::status(if seen.path == "/robots.txt" { status } else { 200 })
        })
    };
    let (missing, shut, broken) = (rules(404), rules(403), rules(503));
    // Four redirects, then the file.
    let hops = Upstream::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::moved("/1"),
        "/1" | "/2" | "/3" => Reply::moved(&format!("/{}", seen.path[1..].parse::<u32>().unwrap() + 1)),
        "/4" => Reply::page("User-agent: *\nDisallow: /p/0"),
        _ => Reply::status(200),
    });
    let looped = Upstream::with_robots(&log, |seen| match seen.path.as_str() {
        path if path.starts_with("/p/") => Reply::status(200),
        _ => Reply::moved("/again"),
    });
    let there = hops.url("/4");
    let borrowed = Upstream::with_robots(&log, move |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::moved(&there),
        _ => Reply::status(200),
    });
    // It fails at first.
    let shaky = Upstream::with_robots(&log, |seen| match (seen.path.as_str(), seen.number) {
        ("/robots.txt", 0) => Reply::status(503),
        ("/robots.txt", 1) => Reply::hangs_up(),
        ("/robots.txt", _) => Reply::page("User-agent: *\nDisallow: /p/0"),
        _ => Reply::status(200),
    });
    let all = [&missing, &shut, &broken, &hops, &looped, &borrowed, &shaky];
    let urls: Vec<String> = all.iter().flat_map(|upstream| pages(upstream, 2)).collect();
    let run = dir.fast(&["--tries", "4"], &urls);
    let kept = all
        .map(|upstream| [dir.file(upstream, "p/0.html").is_some(), dir.file(upstream, "p/1.html").is_some()]);
    let (both, none, one) = ([true, true], [false, false], [false, true]);
    assert_eq!(kept, [both, both, none, one, both, one, one], "{run:?}");
    assert_eq!(run.code, 4, "unknown rules are a temporary failure");
    assert_eq!((broken.seen().len(), broken.robots()), (0, 4));
}

#[test]
fn redirect_target_limits_its_own_host_only() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let busy = Upstream::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::page("User-agent: *\nDisallow: /shut"),
        // These headers are about this host alone.
        _ => Reply::status(429).header("retry-after", 3_600).header("ratelimit", "\"day\";r=0;t=3600"),
    });
    let (to, shut) = (busy.url("/there"), busy.url("/shut"));
    let upstream = Upstream::start(&log, move |seen| match seen.path.as_str() {
        "/moved.html" => Reply::moved(&to),
        "/shut.html" => Reply::moved(&shut),
        _ => Reply::status(200),
    });
    let mut urls = vec![upstream.url("/moved.html"), upstream.url("/shut.html")];
    urls.extend(pages(&upstream, 30));
    let run = dir.fast(&[], &urls);
    assert_eq!((run.code, dir.files().len()), (4, 30), "{run:?}");
    assert_eq!((busy.seen().len(), busy.robots()), (1, 1));
    assert!(run.stdout.contains("1 failed"), "{}", run.stdout);
    assert!(!run.stdout.contains(&format!("given up: {}", upstream.host())), "{}", run.stdout);
    assert!(run.stdout.contains("1 disallowed by robots.txt"), "{}", run.stdout);
}
