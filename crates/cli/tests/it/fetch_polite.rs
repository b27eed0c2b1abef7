//! What a host can rely on, over real sockets: it is not asked before its `Retry-After` has passed, not while it fails, and for
//! nothing that its robots.txt disallows.
//!
//! Tests compare counts and orders. Two measure a time, as a lower bound, which a slow machine cannot fail.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::Signal;

use crate::kit::codec;
use crate::kit::fetch::{Bay, Log, Reply, Upstream, hold, pages};
use crate::kit::serving::free_port;
use crate::kit::{finish, send, wait_until};

#[test]
fn rejected_page_waits_for_its_hint_and_others_do_not() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match seen.number {
        10 => Reply::status(429).header("retry-after", 1),
        40 => Reply::status(503).header("retry-after", 1),
        _ => Reply::status(200),
    });
    let run = bay.fast(&["--per-host", "1"], &pages(&upstream, 60));
    assert_eq!((run.code, bay.files().len()), (0, 60), "{run:?}");
    let seen = upstream.all();
    assert_eq!(upstream.seen().len(), 62, "each of the two was asked for once more");
    for rejected in seen.iter().filter(|seen| [10, 40].contains(&seen.number)) {
        let again = seen.iter().rfind(|other| other.path == rejected.path).expect("it was asked for");
        assert!(again.at.duration_since(rejected.at) >= Duration::from_secs(1), "{}", rejected.path);
    }
}

#[test]
fn retry_after_stops_a_host_that_accepts_nothing() {
    let (bay, log, healed) = (Bay::new(), Log::default(), Arc::new(AtomicBool::new(false)));
    let is_healed = Arc::clone(&healed);
    let upstream = Upstream::start(&log, move |seen| match seen.number {
        20.. if !is_healed.load(Ordering::SeqCst) => Reply::status(429).header("retry-after", 7_200),
        _ => Reply::status(200),
    });
    let other = Upstream::start(&log, |_| Reply::status(200));
    let urls = [pages(&upstream, 400), pages(&other, 400)].concat();
    let child = bay.begin(&["--per-host", "2", "--timeout", "1m", "--patience", "3h"], &urls);
    // Both hosts have their turns until then.
    wait_until("all pages of the other host", || bay.files_of(&other) == 400);
    let asked = upstream.all().len();
    assert!((21..=31).contains(&asked), "{asked} requests, of which 20 were accepted");
    send(&child, Signal::TERM);
    let run = finish(child);
    assert_eq!(run.code, 143, "{run:?}");
    healed.store(true, Ordering::SeqCst);
    let run = bay.fast(&["--per-host", "2"], &urls);
    assert_eq!((run.code, bay.files().len()), (0, 800), "{run:?}");
}

#[test]
fn a_host_that_asks_to_be_left_alone_for_long_is_left_alone_and_told() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::start(&log, |_| Reply::status(503).header("retry-after", 86_400 * 30));
    let other = Upstream::start(&log, |_| Reply::status(200));
    let run = bay.fast(&["--per-host", "1"], &[pages(&upstream, 40), pages(&other, 40)].concat());
    assert_eq!((run.code, upstream.seen().len(), bay.files().len()), (4, 2, 40), "{run:?}");
    let line =
        format!("given up: {}: it asks to be left alone for longer than --patience (10m)", upstream.host());
    assert!(run.stdout.contains(&line), "{}", run.stdout);
    assert!(run.stdout.contains("run the same command again to try once more"), "{}", run.stdout);
}

#[test]
fn nothing_is_sent_to_a_host_whose_circuit_is_open_and_others_go_on() {
    let (bay, log) = (Bay::new(), Log::default());
    let down = Upstream::start(&log, |_| Reply::status(500));
    let up = Upstream::start(&log, |_| Reply::status(200));
    let urls = [pages(&down, 50), pages(&up, 50)].concat();
    let run = bay.fast(&["--per-host", "1", "--patience", "1s"], &urls);
    assert_eq!((run.code, bay.files().len()), (4, 50), "{run:?}");
    assert_eq!(down.seen().len(), 5, "five failures in a row open it");
    assert!(
        run.stdout.contains("it fails again and again, and for longer than --patience (1s)"),
        "{}",
        run.stdout
    );
    assert_eq!(up.seen().len(), 50);
}

#[test]
fn a_host_that_is_not_there_fails_for_now_and_the_rest_is_fetched() {
    let (bay, log) = (Bay::new(), Log::default());
    let unused = free_port();
    let upstream = Upstream::start(&log, |_| Reply::status(200));
    let mut urls = pages(&upstream, 3);
    urls.push(format!("http://{unused}/a.html"));
    let run = bay.fast(&["--ignore-robots", "--patience", "1s"], &urls);
    assert_eq!((run.code, bay.files().len()), (4, 3), "{run:?}");
    assert!(run.stdout.contains("a.html: no connection: "), "{}", run.stdout);
    // The same if its rules cannot be fetched.
    let run = bay.fast(&["--patience", "1s"], &urls);
    assert_eq!(run.code, 4);
    assert!(
        run.stdout.contains(&format!("robots.txt of {unused} cannot be had: no connection: ")),
        "{}",
        run.stdout
    );
}

#[test]
fn pages_that_fail_once_are_asked_for_once_more() {
    let (bay, log) = (Bay::new(), Log::default());
    let asked: Mutex<BTreeSet<String>> = Mutex::default();
    let upstream = Upstream::start(&log, move |seen| {
        let is_first = hold(&asked).insert(seen.path.clone());
        Reply::status(match seen.path.as_str() {
            "/p/3.html" | "/p/33.html" if is_first => 429,
            "/p/7.html" | "/p/77.html" if is_first => 502,
            _ => 200,
        })
    });
    let run = bay.fast(&[], &pages(&upstream, 100));
    assert_eq!((run.code, bay.files().len(), upstream.seen().len()), (0, 100, 104), "{run:?}");
}

#[test]
fn what_robots_txt_does_not_let_us_have_is_left_out_and_it_is_asked_for_once() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::page(
            "User-agent: *\nDisallow: /\n\nUser-agent: mybot\nDisallow: /p/1\nAllow: /p/11.html\n",
        ),
        _ => Reply::status(200),
    });
    let urls = pages(&upstream, 20);
    let run = bay.fast(&["--user-agent", "mybot/2.0 (+https://example.com)"], &urls);
    assert_eq!((run.code, bay.files().len(), upstream.robots()), (0, 10, 1), "{run:?}");
    assert!(bay.file(&upstream, "p/11.html").is_some() && bay.file(&upstream, "p/12.html").is_none());
    assert!(upstream.all().iter().all(|seen| seen.agent == "mybot/2.0 (+https://example.com)"));
    assert!(run.stdout.contains("10 left out as robots.txt asks"), "{}", run.stdout);
    // The rules allow other agents nothing, unless they ignore them.
    let run = bay.fast(&["--json"], &urls);
    assert_eq!((run.code, bay.files().len()), (0, 10));
    assert!(codec::lines(&run.stdout).iter().any(|line| line["reason"] == "robots"));
    let run = bay.fast(&["--ignore-robots"], &urls);
    assert_eq!((run.code, bay.files().len(), upstream.robots()), (0, 20, 2));
}

#[test]
fn a_delay_of_robots_txt_is_kept_between_requests() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::page("User-agent: *\nCrawl-delay: 0.3\n"),
        _ => Reply::status(200),
    });
    let run = bay.fast(&[], &pages(&upstream, 5));
    assert_eq!((run.code, bay.files().len()), (0, 5), "{run:?}");
    // From the request for the rules to that for the last page there are four delays at least, however slow the machine is.
    let (all, seen) = (upstream.all(), upstream.seen());
    let span = seen[4].at.duration_since(all[0].at);
    assert!(span >= Duration::from_millis(1_200), "five requests in {span:?}");
}

#[test]
fn robots_txt_has_its_own_rules_for_what_goes_wrong() {
    let (bay, log) = (Bay::new(), Log::default());
    let rules = |status: u16| {
        Upstream::with_robots(&log, move |seen| {
            Reply::status(if seen.path == "/robots.txt" { status } else { 200 })
        })
    };
    let (missing, shut, broken) = (rules(404), rules(403), rules(503));
    // Elsewhere, and five times.
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
    let run = bay.fast(&["--tries", "4"], &urls);
    let kept = all
        .map(|upstream| [bay.file(upstream, "p/0.html").is_some(), bay.file(upstream, "p/1.html").is_some()]);
    let (both, none, one) = ([true, true], [false, false], [false, true]);
    assert_eq!(kept, [both, both, none, one, both, one, one], "{run:?}");
    assert_eq!(run.code, 4, "what is not known now may be later");
    assert_eq!((broken.seen().len(), broken.robots()), (0, 4));
}

#[test]
fn a_redirect_to_another_host_is_that_hosts_request_and_what_it_says_counts_there_alone() {
    let (bay, log) = (Bay::new(), Log::default());
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
    let run = bay.fast(&[], &urls);
    assert_eq!((run.code, bay.files().len()), (4, 30), "{run:?}");
    assert_eq!((busy.seen().len(), busy.robots()), (1, 1));
    assert!(run.stdout.contains("1 failed"), "{}", run.stdout);
    assert!(!run.stdout.contains(&format!("given up: {}", upstream.host())), "{}", run.stdout);
    assert!(run.stdout.contains("1 left out as robots.txt asks"), "{}", run.stdout);
}
