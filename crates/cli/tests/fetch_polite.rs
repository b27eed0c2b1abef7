//! What a host may count on, over real sockets: it is asked as often as it bears, never before it said so, not while it fails, and
//! for nothing that its robots.txt does not let robots have. Counts and orders, and no speeds.

mod fetch_kit;

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use fetch_kit::{Bay, Far, Log, Moment, Reply, codec, hold, pages};

#[test]
fn nobody_asks_before_the_host_said_so() {
    let (bay, log) = (Bay::new(), Log::default());
    let told: Arc<Mutex<Vec<Instant>>> = Arc::default();
    let tells = Arc::clone(&told);
    let far = Far::start(&log, move |seen| match seen.number {
        2 | 30 => {
            hold(&tells).push(seen.at);
            Reply::status(if seen.number == 2 { 429 } else { 503 }).header("retry-after", 1)
        }
        _ => Reply::status(200),
    });
    // One at a time: what was under way when it was said does not count.
    let run = bay.fast(&["--per-host", "1"], &pages(&far, 60));
    assert_eq!((run.code, bay.files().len()), (0, 60), "{run:?}");
    let told = hold(&told).clone();
    assert_eq!(told.len(), 2);
    for at in told {
        let until = at + Duration::from_secs(1);
        let early = far.all().into_iter().filter(|seen| seen.at > at && seen.at < until).count();
        assert_eq!(early, 0);
    }
    assert_eq!(far.seen().len(), 62, "each of the two was asked for once more");
}

#[test]
fn what_the_host_said_holds_from_its_headers_on_though_the_body_takes_its_time() {
    let (bay, log) = (Bay::new(), Log::default());
    let told = Moment::default();
    let tells = Arc::clone(&told);
    let far = Far::start(&log, move |seen| match seen.number {
        20 => Reply::status(429).header("retry-after", 2).stalled().noting(&tells),
        _ => Reply::status(200),
    });
    let run = bay.fast(&["--per-host", "2", "--timeout", "1m"], &pages(&far, 400));
    assert_eq!((run.code, bay.files().len()), (0, 400), "{run:?}");
    let at = hold(&told).expect("it was said");
    let until = at + Duration::from_secs(2);
    // The other one of two at a time goes on until the head is read, which a busy machine does when it can; not to the end.
    let early = far.all().into_iter().filter(|seen| seen.at > at && seen.at < until).count();
    assert!(early <= 190, "{early} of 379 before it said so");
}

#[test]
fn a_host_that_asks_to_be_left_alone_for_long_is_left_alone_and_told() {
    let (bay, log) = (Bay::new(), Log::default());
    let far = Far::start(&log, |_| Reply::status(503).header("retry-after", 86_400 * 30));
    let other = Far::start(&log, |_| Reply::status(200));
    let run = bay.fast(&["--per-host", "1"], &[pages(&far, 40), pages(&other, 40)].concat());
    assert_eq!((run.code, far.seen().len(), bay.files().len()), (4, 1, 40), "{run:?}");
    let line = format!("given up: {}: it asks to be left alone for longer than --patience (10m)", far.host());
    assert!(run.stdout.contains(&line), "{}", run.stdout);
    assert!(run.stdout.contains("run the same command again to try once more"), "{}", run.stdout);
}

#[test]
fn nothing_is_sent_to_a_host_whose_circuit_is_open_and_others_go_on() {
    let (bay, log) = (Bay::new(), Log::default());
    let down = Far::start(&log, |_| Reply::status(500));
    let up = Far::start(&log, |_| Reply::status(200));
    let urls = [pages(&down, 50), pages(&up, 50)].concat();
    let run = bay.fast(&["--per-host", "1", "--patience", "1s"], &urls);
    assert_eq!((run.code, bay.files().len()), (4, 50), "{run:?}");
    assert_eq!(down.seen().len(), 5, "five failures in a row open it");
    assert!(
        run.stdout.contains("it fails again and again, and for longer than --patience (1s)"),
        "{}",
        run.stdout
    );
    // It is healed by the next run.
    assert_eq!(up.seen().len(), 50);
}

#[test]
fn a_host_that_is_not_there_fails_for_now_and_the_rest_is_fetched() {
    let (bay, log) = (Bay::new(), Log::default());
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let far = Far::start(&log, |_| Reply::status(200));
    let mut urls = pages(&far, 3);
    urls.push(format!("http://127.0.0.1:{port}/a.html"));
    let run = bay.fast(&["--ignore-robots", "--patience", "1s"], &urls);
    assert_eq!((run.code, bay.files().len()), (4, 3), "{run:?}");
    assert!(run.stdout.contains("a.html: no connection: "), "{}", run.stdout);
    // And so it is where its rules cannot be had.
    let run = bay.fast(&["--patience", "1s"], &urls);
    assert_eq!(run.code, 4);
    assert!(
        run.stdout.contains(&format!("robots.txt of 127.0.0.1:{port} cannot be had: no connection: ")),
        "{}",
        run.stdout
    );
}

/// A machine that stands still sends at once what was to be spread, which a host does not bear: one run of three is undisturbed.
#[test]
fn most_requests_succeed_once_the_rate_is_found_and_a_failure_that_passes_costs_few_attempts() {
    let mut runs = Vec::new();
    for _ in 0..3 {
        let (good, settled, failed) = rate_is_found();
        if good * 10 > settled * 9 && failed.iter().sum::<usize>() < 3 * failed.len() {
            return;
        }
        runs.push(format!("{good} of {settled} succeed, and these attempts are made: {failed:?}"));
    }
    panic!("{runs:?}");
}

/// How much a host bears, which nobody is told: so many in every window, 429 to the rest; and one in fifty fails by itself.
/// Answers how many of the last requests succeed, of how many, and how often each page was asked for that failed.
fn rate_is_found() -> (usize, usize, Vec<usize>) {
    const BEARS: usize = 20;
    const WINDOW: Duration = Duration::from_millis(500);
    let (bay, log) = (Bay::new(), Log::default());
    let taken: Mutex<Vec<Instant>> = Mutex::default();
    let said: Arc<Mutex<Vec<(String, u16)>>> = Arc::default();
    let says = Arc::clone(&said);
    let far = Far::start(&log, move |seen| {
        let mut taken = hold(&taken);
        taken.retain(|at| seen.at.duration_since(*at) < WINDOW);
        let status = if taken.len() >= BEARS {
            429
        } else if seen.number % 50 == 49 {
            502
        } else {
            200
        };
        taken.push(seen.at);
        hold(&says).push((seen.path.clone(), status));
        Reply::status(status)
    });
    let urls = pages(&far, 400);
    let run = bay.fetch(&["--rate", "10", "--rate-max", "100", "--tries", "6"], &urls);
    assert_eq!((run.code, bay.files().len()), (0, 400), "{run:?}");
    let said = hold(&said).clone();
    let settled = &said[said.len() / 3..];
    let good = settled.iter().filter(|(_, status)| *status == 200).count();
    let mut attempts: HashMap<&str, usize> = HashMap::new();
    for (path, _) in &said {
        *attempts.entry(path).or_default() += 1;
    }
    (good, settled.len(), attempts.into_values().filter(|attempts| *attempts > 1).collect())
}

#[test]
fn what_robots_txt_does_not_let_us_have_is_left_out_and_it_is_asked_for_once() {
    let (bay, log) = (Bay::new(), Log::default());
    let far = Far::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::page(
            "User-agent: *\nDisallow: /\n\nUser-agent: mybot\nDisallow: /p/1\nAllow: /p/11.html\n",
        ),
        _ => Reply::status(200),
    });
    let urls = pages(&far, 20);
    let run = bay.fast(&["--user-agent", "mybot/2.0 (+https://example.com)"], &urls);
    assert_eq!((run.code, bay.files().len(), far.robots()), (0, 10, 1), "{run:?}");
    assert!(bay.file(&far, "p/11.html").is_some() && bay.file(&far, "p/12.html").is_none());
    assert!(far.all().iter().all(|seen| seen.agent == "mybot/2.0 (+https://example.com)"));
    assert!(run.stdout.contains("10 left out as robots.txt asks"), "{}", run.stdout);
    // Others may have nothing, unless they do not ask.
    let run = bay.fast(&["--json"], &urls);
    assert_eq!((run.code, bay.files().len()), (0, 10));
    assert!(codec::lines(&run.stdout).iter().any(|line| line["reason"] == "robots"));
    let run = bay.fast(&["--ignore-robots"], &urls);
    assert_eq!((run.code, bay.files().len(), far.robots()), (0, 20, 2));
}

#[test]
fn a_delay_of_robots_txt_is_kept_between_requests() {
    let (bay, log) = (Bay::new(), Log::default());
    let far = Far::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::page("User-agent: *\nCrawl-delay: 0.3\n"),
        _ => Reply::status(200),
    });
    let run = bay.fast(&[], &pages(&far, 5));
    assert_eq!((run.code, bay.files().len()), (0, 5), "{run:?}");
    // From when the rules were asked for to the last page: four delays at the least, however long anything is on its way.
    let (all, seen) = (far.all(), far.seen());
    let span = seen[4].at.duration_since(all[0].at);
    assert!(span >= Duration::from_millis(1_200), "five requests in {span:?}");
}

#[test]
fn robots_txt_has_its_own_rules_for_what_goes_wrong() {
    let (bay, log) = (Bay::new(), Log::default());
    let rules = |status: u16| {
        Far::with_robots(&log, move |seen| {
            Reply::status(if seen.path == "/robots.txt" { status } else { 200 })
        })
    };
    let (missing, shut, broken) = (rules(404), rules(403), rules(503));
    // Elsewhere, and five times.
    let hops = Far::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::moved("/1"),
        "/1" | "/2" | "/3" => Reply::moved(&format!("/{}", seen.path[1..].parse::<u32>().unwrap() + 1)),
        "/4" => Reply::page("User-agent: *\nDisallow: /p/0"),
        _ => Reply::status(200),
    });
    let looped = Far::with_robots(&log, |seen| match seen.path.as_str() {
        path if path.starts_with("/p/") => Reply::status(200),
        _ => Reply::moved("/again"),
    });
    let there = hops.url("/4");
    let borrowed = Far::with_robots(&log, move |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::moved(&there),
        _ => Reply::status(200),
    });
    // It says so only for a while: then it is as good as any.
    let shaky = Far::with_robots(&log, |seen| match (seen.path.as_str(), seen.number) {
        ("/robots.txt", 0) => Reply::status(503),
        ("/robots.txt", 1) => Reply::hangs_up(),
        ("/robots.txt", _) => Reply::page("User-agent: *\nDisallow: /p/0"),
        _ => Reply::status(200),
    });
    let all = [&missing, &shut, &broken, &hops, &looped, &borrowed, &shaky];
    let urls: Vec<String> = all.iter().flat_map(|far| pages(far, 2)).collect();
    let run = bay.fast(&["--tries", "4"], &urls);
    let kept = all.map(|far| [bay.file(far, "p/0.html").is_some(), bay.file(far, "p/1.html").is_some()]);
    let (both, none, one) = ([true, true], [false, false], [false, true]);
    assert_eq!(kept, [both, both, none, one, both, one, one], "{run:?}");
    assert_eq!(run.code, 4, "what is not known now may be later");
    assert_eq!((broken.seen().len(), broken.robots()), (0, 4));
}

#[test]
fn a_redirect_to_another_host_is_that_hosts_request_and_what_it_says_counts_there_alone() {
    let (bay, log) = (Bay::new(), Log::default());
    let busy = Far::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" => Reply::page("User-agent: *\nDisallow: /shut"),
        // Whatever it says of limits is said of itself.
        _ => Reply::status(429).header("retry-after", 3_600).header("ratelimit", "\"day\";r=0;t=3600"),
    });
    let (to, shut) = (busy.url("/there"), busy.url("/shut"));
    let far = Far::start(&log, move |seen| match seen.path.as_str() {
        "/moved.html" => Reply::moved(&to),
        "/shut.html" => Reply::moved(&shut),
        _ => Reply::status(200),
    });
    let mut urls = vec![far.url("/moved.html"), far.url("/shut.html")];
    urls.extend(pages(&far, 30));
    let run = bay.fast(&[], &urls);
    assert_eq!((run.code, bay.files().len()), (4, 30), "{run:?}");
    assert_eq!((busy.seen().len(), busy.robots()), (1, 1));
    assert!(run.stdout.contains(&format!("given up: {}", busy.host())), "{}", run.stdout);
    assert!(!run.stdout.contains(&format!("given up: {}", far.host())), "{}", run.stdout);
    assert!(run.stdout.contains("1 left out as robots.txt asks"), "{}", run.stdout);
}
