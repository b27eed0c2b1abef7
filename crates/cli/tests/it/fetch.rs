//! `tidegate fetch` over real sockets: its files, its output and its exit codes.

use std::fs;
use std::io::Write as _;
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};

use rustix::process::Signal;

use crate::kit::codec::{self, Json};
use crate::kit::fetch::{FAST, FetchDir, Log, Reply, Upstream, hold, pages, read_line};
use crate::kit::{clear_environment, finish, run, send, wait_until};

fn echo(log: &Log) -> Upstream {
    Upstream::start(log, |seen| Reply::page(format!("this is {}", seen.path)))
}

#[test]
fn pages_are_saved_and_not_fetched_again() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let (one, two) = (echo(&log), echo(&log));
    let mut urls = pages(&one, 5);
    urls.extend([two.url("/"), two.url("/about"), two.url("/a/b.html?c=1"), two.url("/A.txt#there")]);
    let run = dir.fast(&[], &urls);
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
    assert!(run.stdout.contains("9 fetched"), "{}", run.stdout);
    assert_eq!(dir.file(&one, "p/3.html").as_deref(), Some(&b"this is /p/3.html"[..]));
    assert_eq!(dir.file(&two, "_index.data").as_deref(), Some(&b"this is /"[..]));
    assert_eq!(dir.file(&two, "about.data").as_deref(), Some(&b"this is /about"[..]));
    assert_eq!((dir.files().len(), dir.parts()), (9, 0));
    let seen = hold(&log).len();
    let again = dir.fast(&[], &urls);
    assert_eq!((again.code, hold(&log).len()), (0, seen), "no request is sent, not even for robots.txt");
    assert!(again.stdout.contains("0 fetched (0 B), 9 already fetched"), "{}", again.stdout);
    // A file that was removed is fetched again.
    fs::remove_file(dir.out().join(one.folder()).join("p/3.html")).unwrap();
    assert_eq!(dir.fast(&[], &urls).code, 0);
    assert_eq!((one.seen().len(), two.seen().len()), (6, 4));
}

#[test]
fn json_lines_report_each_page_and_a_summary() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match seen.path.as_str() {
        "/gone.html" => Reply::status(404),
        "/old.html" => Reply::moved("/new.html"),
        path => Reply::page(path),
    });
    let there = upstream.url("/a.html");
    assert_eq!(dir.fast(&[], std::slice::from_ref(&there)).code, 0);
    let urls = [there, upstream.url("/old.html"), upstream.url("/gone.html"), "nonsense".to_owned()];
    let run = dir.fast(&["--json"], &urls);
    assert_eq!((run.code, run.stderr.as_str()), (1, ""), "{run:?}");
    let lines = codec::lines(&run.stdout);
    let line = |end: &str| {
        lines.iter().find(|line| line["url"].as_str().is_some_and(|url| url.ends_with(end))).expect(end)
    };
    assert_eq!(
        (&line("a.html")["outcome"], &line("a.html")["reason"]),
        (&Json::from("skipped"), &Json::from("there"))
    );
    let moved = line("old.html");
    assert_eq!(moved["outcome"], "done");
    assert_eq!(moved["moved_to"], upstream.url("/new.html"));
    assert_eq!((&moved["bytes"], &moved["attempts"]), (&Json::from(9), &Json::from(2)));
    assert_eq!(moved["file"], format!("{}/old.html", upstream.folder()));
    let gone = line("gone.html");
    assert_eq!(
        (&gone["outcome"], &gone["status"], &gone["is_final"]),
        (&"failed".into(), &404.into(), &true.into())
    );
    assert_eq!(line("nonsense")["error"], "invalid address: it must begin with https:// or http://");
    let summary = &lines.last().expect("a summary")["summary"];
    let counts = ["done", "skipped", "failed", "bad_urls", "unfinished"].map(|name| summary[name].as_u64());
    assert_eq!(counts, [Some(1), Some(1), Some(2), Some(1), Some(0)], "{summary}");
    assert_eq!(summary["hosts"][0]["host"], upstream.host());
    let host = &summary["hosts"][0];
    assert_eq!(host["attempts"], 4, "robots.txt, and a redirect");
    assert_eq!((&host["circuit"], &host["error_rate"]), (&"closed".into(), &Json::from(0.0)));
    assert!(host["latency_p95_ms"].as_f64().is_some_and(|latency| latency > 0.0), "{host}");
    assert_eq!(lines.len(), 5);
}

#[test]
fn addresses_are_read_from_a_file_and_stdin() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = echo(&log);
    // With a byte order mark, as some editors write it.
    let text = format!("\u{feff}{}  \r\n# pages\n\n  {}", upstream.url("/a.html"), upstream.url("/b.html"));
    fs::write(dir.path("urls"), &text).unwrap();
    let file = dir.path("urls").display().to_string();
    assert_eq!(dir.fast(&["-i", &file], &[]).code, 0);
    assert_eq!(dir.files().len(), 2);
    let mut child = dir
        .command(FAST)
        .arg("-")
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().expect("it reads");
    // The first line is fetched before the second one is written.
    writeln!(stdin, "{}", upstream.url("/c.html")).unwrap();
    wait_until("the first line is fetched", || dir.file(&upstream, "c.html").is_some());
    writeln!(stdin, "{}", upstream.url("/d.html")).unwrap();
    drop(stdin);
    assert_eq!(finish(child).code, 0);
    assert_eq!(dir.files().len(), 4);
    let missing = dir.fast(&["-i", "not/there"], &[]);
    assert_eq!(missing.code, 2);
    assert!(missing.stderr.contains("the input `not/there` cannot be read"), "{}", missing.stderr);
}

#[test]
fn invalid_address_is_reported_and_others_fetched() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = echo(&log);
    let endless = format!("https://h/{}", "x".repeat(9_000));
    let bad = [
        "ftp://h/x",
        "example.com/x",
        "https://",
        "https://u:secret@h/",
        "http://h:0/",
        "\u{1b}[2J",
        &endless,
    ];
    let urls: Vec<String> = bad.iter().map(ToString::to_string).chain(pages(&upstream, 3)).collect();
    let run = dir.fast(&[], &urls);
    assert_eq!((run.code, dir.files().len()), (1, 3));
    assert!(
        run.stdout.contains("failed: ftp://h/x: invalid address: the scheme must be https or http"),
        "{}",
        run.stdout
    );
    assert!(!run.stdout.contains('\u{1b}'), "control characters are escaped");
    let journal = fs::read_to_string(dir.out().join(".tidegate/journal.jsonl")).unwrap();
    assert!(!run.stdout.contains("secret") && !journal.contains("secret"), "{journal}");
    assert!(run.stdout.contains("3 fetched (51 B), 7 failed"), "{}", run.stdout);
}

#[test]
fn duplicate_page_is_fetched_once() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = echo(&log);
    let urls: Vec<String> =
        (0..50).map(|number| upstream.url(&format!("/{}.html#{number}", number % 5))).collect();
    let run = dir.fast(&[], &urls);
    assert_eq!((run.code, upstream.seen().len(), dir.files().len()), (0, 5, 5), "{run:?}");
}

#[test]
fn second_fetch_in_one_folder_is_refused() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let (tell, go_on) = channel::<()>();
    let go_on = Mutex::new(go_on);
    let upstream = Upstream::start(&log, move |_| {
        // Until the second fetch has ended.
        let _ = hold(&go_on).recv();
        Reply::status(200)
    });
    let first = dir.begin(&[], &pages(&upstream, 1));
    wait_until("the first fetch runs", || upstream.seen().len() == 1);
    let second = dir.fast(&[], &pages(&upstream, 1));
    assert_eq!(second.code, 1);
    assert!(second.stderr.contains("another fetch is running in "), "{}", second.stderr);
    drop(tell);
    assert_eq!(finish(first).code, 0);
    assert_eq!(upstream.seen().len(), 1);
}

#[test]
fn first_interrupt_drains_and_next_run_resumes() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let (tell, go_on) = channel::<()>();
    let go_on = Arc::new(Mutex::new(go_on));
    let upstream = Upstream::start(&log, move |seen| {
        let _ = hold(&go_on).recv();
        Reply::page(seen.path.clone())
    });
    let urls = pages(&upstream, 20);
    let mut child = dir.begin(&["--per-host", "4"], &urls);
    wait_until("four requests in flight", || upstream.seen().len() == 4);
    send(&child, Signal::INT);
    assert!(
        read_line(child.stderr.as_mut().unwrap()).starts_with("stopping: waiting for 4 requests in flight")
    );
    // Those four finish, and no other starts.
    (0..4).for_each(|_| tell.send(()).expect("the upstream waits"));
    let run = finish(child);
    assert_eq!(run.code, 130, "{run:?}");
    assert!(run.stdout.contains("interrupted: run the same command again"), "{}", run.stdout);
    assert_eq!(
        (upstream.seen().len(), dir.files().len(), dir.parts()),
        (4, 4, 0),
        "pages in flight are complete"
    );
    drop(tell);
    let run = dir.fast(&[], &urls);
    assert_eq!((run.code, dir.files().len(), upstream.seen().len()), (0, 20, 20), "{run:?}");
}

#[test]
fn second_interrupt_stops_at_once() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let (tell, go_on) = channel::<()>();
    let go_on = Mutex::new(go_on);
    let upstream = Upstream::start(&log, move |_| {
        let _ = hold(&go_on).recv();
        Reply::status(200)
    });
    let child = dir.begin(&[], &pages(&upstream, 1));
    wait_until("a request in flight", || upstream.seen().len() == 1);
    send(&child, Signal::INT);
    // The system keeps one signal of each kind until it is handled.
    send(&child, Signal::TERM);
    let run = finish(child);
    assert!(matches!(run.code, 130 | 143), "{run:?}");
    assert_eq!(dir.files().len(), 0);
    drop(tell);
    assert_eq!(dir.fast(&[], &pages(&upstream, 1)).code, 0);
}

#[test]
fn hosts_are_served_in_turn() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let (large, small) = (echo(&log), echo(&log));
    let urls = [pages(&large, 100), pages(&small, 10)].concat();
    let run = dir.fast(&["--concurrency", "1", "--ignore-robots"], &urls);
    assert_eq!(run.code, 0, "{run:?}");
    let log = hold(&log);
    let last = log.iter().rposition(|seen| seen.port == small.port()).expect("the small host has requests");
    let before = log[..last].iter().filter(|seen| seen.port == large.port()).count();
    assert!(before <= 12, "the large one had {before} turns before the small one had its ten");
}

#[test]
fn waiting_host_occupies_no_worker() {
    let (dir, log) = (FetchDir::new(), Log::default());
    // Longer than the test: the host gets no second turn in the first run.
    let healed = Arc::new(AtomicBool::new(false));
    let is_healed = Arc::clone(&healed);
    let slow = Upstream::start(&log, move |_| {
        let is_healed = is_healed.load(Ordering::SeqCst);
        if is_healed { Reply::status(200) } else { Reply::status(429).header("retry-after", 7_200) }
    });
    let quick = echo(&log);
    let urls = [pages(&slow, 5), pages(&quick, 30)].concat();
    let arguments = ["--concurrency", "1", "--ignore-robots", "--patience", "3h"];
    let child = dir.begin(&arguments, &urls);
    wait_until("the only worker serves the other host", || dir.files_of(&quick) == 30);
    let rejected = slow.seen().len();
    assert!(rejected <= 3, "{rejected}");
    assert_eq!(quick.seen().len(), 30);
    send(&child, Signal::TERM);
    let run = finish(child);
    assert_eq!(run.code, 143, "{run:?}");
    healed.store(true, Ordering::SeqCst);
    let run = dir.fast(&arguments, &urls);
    assert_eq!((run.code, dir.files().len()), (0, 35), "{run:?}");
    assert_eq!((slow.seen().len(), quick.seen().len()), (rejected + 5, 30));
}

#[test]
fn invalid_arguments_are_rejected() {
    let dir = FetchDir::new();
    let slots = dir.path("slots.toml").display().to_string();
    fs::write(&slots, "slots.max = 100").unwrap();
    let table = [
        (vec![], "required arguments were not provided"),
        (vec!["-", "https://h/"], "`-` cannot be combined with addresses"),
        (vec!["-i", "x", "https://h/"], "cannot be used with"),
        (vec!["https://h/", "--max-bytes", "0"], "a number of bytes from 1"),
        (vec!["https://h/", "--rate", "0"], "a number from 0.01 to 1000000"),
        (vec!["https://h/", "--rate", "5", "--rate-max", "2"], "--rate 5 is above --rate-max 2"),
        (
            vec!["https://h/", "--per-host", "9", "--concurrency", "8"],
            "--per-host 9 is above --concurrency 8",
        ),
        (
            vec!["https://h/", "--config", &slots, "--concurrency", "64"],
            "slots.max = 100 in --config is above --concurrency 64",
        ),
        (vec!["https://h/", "--header", "Host: other"], "`host` is set by the connection"),
        (vec!["https://h/", "--header", "Content-Length: 1"], "`content-length` is set by the connection"),
        (vec!["https://h/", "--config", "not/there"], "--config not/there: "),
        (vec!["https://h/", "--header", "X"], "must be `Name: value`"),
        (vec!["https://h/", "--server", "http://h"], "does not apply to this command"),
        (vec!["https://h/", "--user-agent", "a\nb"], "invalid request options"),
    ];
    for (arguments, why) in table {
        let run = dir.fetch(&arguments, &[]);
        assert_eq!(run.code, 2, "{arguments:?}: {run:?}");
        assert!(run.stderr.contains(why), "{arguments:?}: {}", run.stderr);
    }
    let mut command = dir.command(&["https://h/"]);
    fs::write(dir.out(), "a file").unwrap();
    let run = run(&mut command);
    assert_eq!(run.code, 1);
    assert!(run.stderr.contains("cannot be used: "), "{}", run.stderr);
}

#[test]
fn files_go_to_the_current_folder_by_default() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream =
        Upstream::start(&log, |seen| Reply::page(seen.path.clone()).header("content-type", "text/html"));
    let mut command = Command::new(env!("CARGO_BIN_EXE_tidegate"));
    clear_environment(&mut command);
    fs::create_dir(dir.out()).unwrap();
    command.current_dir(dir.out()).args(["fetch", &upstream.url("/a.txt"), &upstream.url("/about")]);
    let run = run(&mut command);
    assert_eq!(run.code, 0, "{run:?}");
    assert_eq!(dir.file(&upstream, "a.txt").as_deref(), Some(&b"/a.txt"[..]));
    assert_eq!(dir.file(&upstream, "about~.html").as_deref(), Some(&b"/about"[..]));
    let again = dir.fast(&[], &[upstream.url("/about")]);
    assert_eq!((again.code, upstream.seen().len()), (0, 2), "its extension does not make it a new page");
}

#[test]
fn headers_are_not_sent_to_another_host() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let other = echo(&log);
    let there = other.url("/there.html");
    let upstream = Upstream::start(&log, move |seen| match seen.path.as_str() {
        "/here.html" => Reply::moved("/new.html"),
        "/away.html" => Reply::moved(&there),
        path => Reply::page(path),
    });
    let urls = ["/here.html", "/away.html"].map(|path| upstream.url(path));
    let headers = ["--header", "Authorization: Bearer abc", "--header", "X-Two: 1", "--header", "X-Two: 2"];
    let run = dir.fast(&headers, &urls);
    assert_eq!((run.code, dir.files().len()), (0, 2), "{run:?}");
    assert_eq!((upstream.seen().len(), other.seen().len()), (3, 1));
    for seen in upstream.seen() {
        for line in ["authorization: bearer abc\r\n", "x-two: 1\r\n", "x-two: 2\r\n"] {
            assert!(seen.head.contains(line), "{}", seen.head);
        }
    }
    for head in other.all().into_iter().map(|seen| seen.head) {
        assert!(!head.contains("authorization") && !head.contains("x-two"), "{head}");
    }
}

#[test]
fn compressed_bodies_are_saved_decoded() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| {
        let body: &[u8] = match seen.path.as_str() {
            "/gzip.txt" => b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x02\x03\xcb\x48\xcd\xc9\xc9\x07\x00\x86\xa6\x10\x36\x05\x00\x00\x00",
            "/br.txt" => b"\x0b\x02\x80hello\x03",
            "/zstd.txt" => b"\x28\xb5\x2f\xfd\x20\x05\x29\x00\x00hello",
            path => unreachable!("{path}"),
        };
        Reply::page(body).header("content-encoding", &seen.path[1..seen.path.len() - 4])
    });
    let names = ["gzip.txt", "br.txt", "zstd.txt"];
    let run = dir.fast(&[], &names.map(|name| upstream.url(&format!("/{name}"))));
    assert_eq!((run.code, dir.files().len()), (0, 3), "{run:?}");
    for name in names {
        assert_eq!(dir.file(&upstream, name).as_deref(), Some(&b"hello"[..]), "{name}");
    }
    let head = &upstream.seen()[0].head;
    assert!(["gzip", "br", "zstd"].iter().all(|coding| head.contains(coding)), "{head}");
    assert!(run.stdout.contains("(15 B)"), "decoded bytes are counted: {}", run.stdout);
}

#[test]
fn limits_of_hosts_are_read_from_a_file() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |_| Reply::status(500));
    let file = dir.path("limits.toml").display().to_string();
    fs::write(&file, "[retry]\nattempts = 2\nbackoff_base = 0.001\n").unwrap();
    let urls = pages(&upstream, 1);
    assert_eq!(dir.fetch(&["--config", &file], &urls).code, 4);
    assert_eq!(upstream.seen().len(), 2, "as many attempts as in the file");
    assert_eq!(dir.fetch(&["--config", &file, "--tries", "1"], &urls).code, 4);
    assert_eq!(upstream.seen().len(), 3, "an option overrides the file");
    fs::write(&file, "slots.maxx = 3").unwrap();
    let run = dir.fetch(&["--config", &file], &urls);
    assert_eq!(run.code, 2);
    assert!(run.stderr.contains("slots.maxx") && run.stderr.contains("slots.max"), "{}", run.stderr);
}

#[test]
fn ceiling_that_limited_a_fetch_is_reported() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = echo(&log);
    let run = dir.fetch(&["--rate-max", "20"], &pages(&upstream, 30));
    assert_eq!((run.code, dir.files().len()), (0, 30), "{run:?}");
    let line = format!("limited by --rate-max 20: {}", upstream.host());
    assert!(run.stdout.contains(&line), "{}", run.stdout);
    let run = FetchDir::new().fetch(&["--rate-max", "1000"], &pages(&upstream, 3));
    assert!(!run.stdout.contains("limited by"), "{}", run.stdout);
    let dir = FetchDir::new();
    let file = dir.path("limits.toml").display().to_string();
    fs::write(&file, "auto.rate_max = 20").unwrap();
    let run = dir.fetch(&["--config", &file], &pages(&upstream, 30));
    let line = format!("limited by auto.rate_max = 20 in --config: {}", upstream.host());
    assert!(run.stdout.contains(&line), "{}", run.stdout);
}

/// A fetch waited for hours, and nothing said why.
#[test]
fn limit_in_the_file_that_held_back_is_reported() {
    let log = Log::default();
    let upstream = echo(&log);
    for (text, limit) in [
        ("rates = ['rps:20/s:1']", "the limit \"rps\" in --config"),
        ("rate = { amount = 20, period = 1, burst = 1 }", "rate.amount = 20 in --config"),
    ] {
        let dir = FetchDir::new();
        let file = dir.path("limits.toml").display().to_string();
        fs::write(&file, text).unwrap();
        let run = dir.fetch(&["--config", &file, "--rate", "1000"], &pages(&upstream, 10));
        assert_eq!((run.code, dir.files().len()), (0, 10), "{run:?}");
        let line = format!("limited by {limit}: {}", upstream.host());
        assert!(run.stdout.contains(&line), "{}", run.stdout);
        let again = FetchDir::new().fetch(&["--config", &file, "--json"], &pages(&upstream, 10));
        let lines = codec::lines(&again.stdout);
        let host = &lines.last().expect("a summary")["summary"]["hosts"][0];
        assert_eq!((&host["limited_by"], &host["limited_by_rate_max"]), (&limit.into(), &false.into()));
    }
}

/// It was refused because of the default of an option that was not given.
#[test]
fn per_host_raises_concurrency_that_is_not_given() {
    let log = Log::default();
    let (tell, go_on) = channel::<()>();
    let go_on = Mutex::new(go_on);
    let upstream = Upstream::start(&log, move |_| {
        // Until all are in flight.
        let _ = hold(&go_on).recv();
        Reply::status(200)
    });
    let dir = FetchDir::new();
    let child = dir.begin(&["--per-host", "70", "--ignore-robots"], &pages(&upstream, 70));
    wait_until("more than the default in flight", || upstream.seen().len() == 70);
    drop(tell);
    assert_eq!(finish(child).code, 0);
}
