//! Failures of `tidegate fetch`: each is reported, the other pages are fetched, and no partial file looks
//! complete.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::sync::Mutex;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::kit::codec;
use crate::kit::fetch::{FAST, FetchDir, Log, Reply, Seen, Upstream, hold, pages, read_line};
use crate::kit::{finish, run, send, wait_until};

#[test]
fn redirect_loop_ends_and_others_are_fetched() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match seen.path.as_str() {
        "/round.html" => Reply::moved("/round.html"),
        "/nowhere.html" => Reply::moved("mailto:a@example.com"),
        "/mute.html" => Reply::status(302),
        _ => Reply::status(200),
    });
    let mut urls =
        vec![upstream.url("/round.html"), upstream.url("/nowhere.html"), upstream.url("/mute.html")];
    urls.extend(pages(&upstream, 5));
    let run = dir.fast(&[], &urls);
    assert_eq!((run.code, dir.files().len()), (1, 5), "{run:?}");
    for (page, why) in [
        ("round", "redirected more than 10 times"),
        ("nowhere", "redirected to an invalid address: the scheme must be https or http"),
        ("mute", "status 302 Found, without a location"),
    ] {
        assert!(run.stdout.contains(&format!("/{page}.html: {why}")), "{}", run.stdout);
    }
    assert_eq!(upstream.seen().iter().filter(|seen| seen.path == "/round.html").count(), 11);
}

#[test]
fn too_large_body_is_dropped_and_others_are_fetched() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match seen.path.as_str() {
        "/said.html" => Reply::page(vec![0; 3_000_000]),
        "/unsaid.html" => Reply::page(vec![0; 3_000_000]).chunked(),
        "/right.html" => Reply::page(vec![0; 1_000_000]).chunked(),
        _ => Reply::status(200),
    });
    let urls = ["/said.html", "/unsaid.html", "/right.html", "/small.html"].map(|path| upstream.url(path));
    let run = dir.fast(&["--max-bytes", "1M"], &urls);
    assert_eq!((run.code, dir.files().len(), dir.parts()), (1, 2, 0), "{run:?}");
    assert_eq!(dir.file(&upstream, "right.html").map(|body| body.len()), Some(1_000_000));
    assert!(run.stdout.contains("/unsaid.html: larger than --max-bytes 1000000"), "{}", run.stdout);
    assert_eq!(upstream.seen().len(), 4, "a retry would be as large");
}

#[test]
fn truncated_body_is_retried_and_never_saved() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let body: Vec<u8> = (0..2_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let whole = body.clone();
    let upstream = Upstream::start(&log, move |seen| match (seen.path.as_str(), seen.number) {
        ("/never.html", _) | (_, 0..=2) => Reply::page(whole.clone()).cut(),
        _ => Reply::page(whole.clone()),
    });
    let run = dir.fast(&["--per-host", "1"], &[upstream.url("/first.html"), upstream.url("/never.html")]);
    assert_eq!((run.code, dir.parts()), (4, 0), "{run:?}");
    assert_eq!(dir.files().len(), 1);
    assert!(dir.file(&upstream, "first.html").is_some_and(|file| file == body));
    assert!(run.stdout.contains("/never.html: the connection was lost: "), "{}", run.stdout);
}

#[test]
fn partial_content_is_not_the_page() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |_| Reply::status(206).header("content-range", "bytes 0-4/100"));
    let run = dir.fast(&[], &pages(&upstream, 1));
    assert_eq!((run.code, dir.files().len(), dir.parts()), (1, 0, 0), "{run:?}");
    assert!(run.stdout.contains("/p/0.html: status 206 Partial Content"), "{}", run.stdout);
}

#[test]
fn stalled_body_of_an_error_is_not_awaited() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" | "/gone.html" => Reply::status(404).stalled(),
        "/moved.html" => Reply::moved("/p/0.html").stalled(),
        _ => Reply::status(200),
    });
    let mut urls = vec![upstream.url("/gone.html"), upstream.url("/moved.html")];
    urls.extend(pages(&upstream, 3));
    let began = Instant::now();
    let run = dir.fast(&["--concurrency", "1", "--timeout", "1m"], &urls);
    assert_eq!((run.code, dir.files().len()), (1, 4), "{run:?}");
    // The rest of the three responses never arrives, and the timeout is a minute for each.
    assert!(began.elapsed() < Duration::from_mins(1), "it waited for the rest of a response");
}

/// A file size limit simulates a full disk for one file; the program ignores the signal that comes with it.
#[test]
fn full_disk_stops_the_fetch_with_whole_files() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| {
        Reply::page(if seen.path == "/p/7.html" { vec![7; 4_000_000] } else { vec![1; 1_000] })
    });
    let urls = pages(&upstream, 20);
    let program = dir.command(FAST);
    let line = "trap '' XFSZ; ulimit -f 2000; exec \"$@\"";
    let mut limited = Command::new("sh");
    limited.args(["-c", line, "sh"]).arg(program.get_program()).args(program.get_args());
    let run = run(limited.args(["--per-host", "1"]).args(&urls).stdin(Stdio::null()));
    assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{run:?}");
    assert!(run.stderr.contains("exceeds the file size limit"), "{}", run.stderr);
    assert!(run.stderr.contains("then run the same command again to resume"), "{}", run.stderr);
    assert!(dir.file(&upstream, "p/7.html").is_none());
    // Pages that ended before are saved or dropped, and the same command fetches the rest.
    let before = dir.files();
    for file in &before {
        assert_eq!(std::fs::read(dir.out().join(file)).unwrap().len(), 1_000, "{file}");
    }
    let asked = upstream.seen().len();
    let run = dir.fast(&[], &urls);
    assert_eq!((run.code, dir.files().len(), dir.parts()), (0, 20, 0), "{run:?}");
    assert_eq!(upstream.seen().len(), asked + 20 - before.len(), "existing files are not fetched again");
    assert_eq!(dir.file(&upstream, "p/7.html").map(|body| body.len()), Some(4_000_000));
}

#[test]
fn pages_before_a_full_disk_are_saved() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| {
        Reply::page(if seen.path == "/p/7.html" { vec![7; 200_000] } else { vec![1; 1_000] })
    });
    let program = dir.command(FAST);
    let line = "trap '' XFSZ; ulimit -f 100; exec \"$@\"";
    let mut limited = Command::new("sh");
    limited.args(["-c", line, "sh"]).arg(program.get_program()).args(program.get_args());
    let run = run(limited.args(["--per-host", "1"]).args(pages(&upstream, 8)).stdin(Stdio::null()));
    assert_eq!((run.code, dir.files().len()), (1, 7), "{run:?}");
}

#[test]
fn closed_stdout_does_not_stop_the_fetch() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| Reply::page(seen.path.clone()));
    let mut child = dir.begin(&["--json", "--per-host", "1"], &pages(&upstream, 300));
    let line = read_line(child.stdout.as_mut().expect("a pipe"));
    assert_eq!(codec::lines(&line)[0]["outcome"], "done");
    drop(child.stdout.take());
    let run = finish(child);
    assert_eq!((run.code, dir.files().len()), (0, 300), "{}", run.stderr);
    assert!(
        run.stderr.is_empty() || run.stderr.starts_with("note: stdout can no longer be written"),
        "{}",
        run.stderr
    );
    // A closed terminal does not stop it either.
    let other = FetchDir::new();
    let mut command = other.command(FAST);
    command.args(pages(&upstream, 5)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.process_group(0).spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    assert_eq!((finish(child).code, other.files().len()), (0, 5));
}

#[test]
fn only_temporary_failures_are_retried() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match seen.path.as_str() {
        "/gone.html" => Reply::status(410),
        "/shaky.html" if seen.number < 2 => Reply::hangs_up(),
        "/busy.html" => Reply::status(503),
        _ => Reply::status(200),
    });
    let run = dir.fast(
        &["--tries", "3", "--per-host", "1"],
        &["/shaky.html", "/gone.html", "/busy.html"].map(|path| upstream.url(path)),
    );
    assert_eq!((run.code, dir.files().len()), (1, 1), "{run:?}");
    let asked = |path: &str| hold(&log).iter().filter(|seen| seen.path == path).count();
    assert_eq!((asked("/gone.html"), asked("/busy.html")), (1, 3));
    assert!(run.stdout.contains("/busy.html: status 503 Service Unavailable"), "{}", run.stdout);
}

/// Both in one run and in the next.
#[test]
fn rest_of_a_truncated_body_is_requested() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let body: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let whole = body.clone();
    let upstream = Upstream::start(&log, move |seen| {
        let from = seen.range_start();
        let is_known = seen.head.contains("if-range: \"v1\"\r\n") && seen.path != "/changed.bin";
        let range = format!("bytes {from}-2999999/3000000");
        let reply = if from > 0 && is_known {
            Reply::page(&whole[from..]).with_status(206).header("content-range", range)
        } else {
            Reply::page(&whole[..])
        };
        let reply = reply.header("etag", "\"v1\"");
        if seen.number < 5 { reply.cut() } else { reply }
    });
    let urls = ["/a.bin", "/changed.bin"].map(|path| upstream.url(path));
    let one_at_once = ["--per-host", "1", "--ignore-robots"];
    assert_eq!(dir.fast(&[&one_at_once[..], &["--tries", "2"]].concat(), &urls).code, 4);
    assert_eq!((dir.files().len(), dir.parts()), (0, 2), "they are kept for the next run");
    let run = dir.fast(&one_at_once, &urls);
    assert_eq!((run.code, dir.files().len(), dir.parts()), (0, 2, 0), "{run:?}");
    for name in ["a.bin", "changed.bin"] {
        assert!(dir.file(&upstream, name).is_some_and(|file| file == body), "{name}");
    }
    let ranges = |path: &str| -> Vec<bool> {
        upstream.seen().iter().filter(|seen| seen.path == path).map(|seen| seen.range_start() > 0).collect()
    };
    let (resumed, restarted) = (ranges("/a.bin"), ranges("/changed.bin"));
    assert!(!resumed[0] && resumed[1..].iter().all(|is_range| *is_range), "{resumed:?}");
    assert!(restarted.len() >= 3 && restarted[1], "{restarted:?}");
    let resumed = upstream.seen().into_iter().find(|seen| seen.range_start() > 0).expect("a range");
    assert!(resumed.head.contains("accept-encoding: identity\r\n"), "{}", resumed.head);
}

/// The next run asked the requested address without a range, dropped the part, and began from zero.
#[test]
fn rest_of_a_redirected_page_is_requested() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let body: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let whole = body.clone();
    let upstream = Upstream::start(&log, move |seen| match (seen.path.as_str(), seen.range_start()) {
        ("/a.bin", _) => Reply::moved("/there.bin"),
        (_, 0) => Reply::page(&whole[..]).header("etag", "\"v1\"").cut(),
        (_, from) => {
            let range = format!("bytes {from}-2999999/3000000");
            Reply::page(&whole[from..]).with_status(206).header("content-range", range)
        }
    });
    let urls = [upstream.url("/a.bin")];
    assert_eq!(dir.fast(&["--ignore-robots", "--tries", "1"], &urls).code, 4);
    assert_eq!(dir.parts(), 1, "it is kept for the next run");
    let run = dir.fast(&["--ignore-robots"], &urls);
    assert_eq!((run.code, dir.parts()), (0, 0), "{run:?}");
    assert!(dir.file(&upstream, "a.bin").is_some_and(|file| file == body));
    let seen = upstream.seen();
    let seen: Vec<_> = seen.iter().map(|seen| (seen.path.as_str(), seen.range_start() > 0)).collect();
    let wanted = [("/a.bin", false), ("/there.bin", false), ("/a.bin", false), ("/there.bin", true)];
    assert_eq!(seen, wanted);
}

/// The same rest was requested again and again.
#[test]
fn unusable_rest_restarts_the_page() {
    let body: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let gzip = |body: &[u8]| Reply::page(body).header("content-encoding", "gzip");
    // Two that cannot be decoded, the second after some bytes, and one of which nothing arrives.
    let broken: &[u8] = b"\x1f\x8b\x08\0\0\0\0\0\0\x03\0\x05\0\xfa\xffhello\x07";
    // The connection may be lost once, so an empty rest is requested again.
    let rests = [
        (gzip(b"no gzip"), vec![false, true, false]),
        (gzip(broken), vec![false, true, false]),
        (Reply::page("x").cut(), vec![false, true, true, false]),
    ];
    for (rest, wanted) in rests {
        let (dir, log, whole) = (FetchDir::new(), Log::default(), body.clone());
        let upstream = Upstream::start(&log, move |seen| {
            let reply = match seen.range_start() {
                0 => Reply::page(&whole[..]),
                from => rest
                    .clone()
                    .with_status(206)
                    .header("content-range", format!("bytes {from}-2999999/3000000")),
            };
            let reply = reply.header("etag", "\"v1\"");
            if seen.number == 0 { reply.cut() } else { reply }
        });
        let run = dir.fast(&["--ignore-robots"], &[upstream.url("/a.bin")]);
        assert_eq!((run.code, dir.parts()), (0, 0), "{run:?}");
        assert!(dir.file(&upstream, "a.bin").is_some_and(|file| file == body));
        let ranges: Vec<bool> = upstream.seen().iter().map(|seen| seen.range_start() > 0).collect();
        assert_eq!(ranges, wanted);
    }
}

/// A connection that was lost before the rest arrived removed everything that had arrived before.
#[test]
fn lost_connection_keeps_a_resumed_part() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let body: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let whole = body.clone();
    let upstream = Upstream::start(&log, move |seen| {
        let from = seen.range_start();
        let rest = if seen.number == 1 { Reply::page("x").cut() } else { Reply::page(&whole[from..]) };
        match from {
            0 => rest.header("etag", "\"v1\"").cut(),
            _ => rest.with_status(206).header("content-range", format!("bytes {from}-2999999/3000000")),
        }
    });
    let run = dir.fast(&["--ignore-robots"], &[upstream.url("/a.bin")]);
    assert_eq!((run.code, dir.parts()), (0, 0), "{run:?}");
    assert!(dir.file(&upstream, "a.bin").is_some_and(|file| file == body));
    let starts: Vec<usize> = upstream.seen().iter().map(Seen::range_start).collect();
    assert!(starts.len() == 3 && starts[1] > 0 && starts[2] == starts[1], "{starts:?}");
}

/// The retry that waited was dropped, and the next run began from zero.
#[test]
fn interrupted_fetch_keeps_what_arrived() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let (tell, go_on) = channel::<()>();
    let go_on = Mutex::new(go_on);
    let body: Vec<u8> = (0..3_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let whole = body.clone();
    let upstream = Upstream::start(&log, move |seen| {
        let from = seen.range_start();
        let range = format!("bytes {from}-2999999/3000000");
        match from {
            0 => {
                let _ = hold(&go_on).recv();
                Reply::page(&whole[..]).header("etag", "\"v1\"").cut()
            }
            _ => Reply::page(&whole[from..]).with_status(206).header("content-range", range),
        }
    });
    let urls = [upstream.url("/a.bin")];
    let mut child = dir.begin(&["--ignore-robots", "--json"], &urls);
    wait_until("a request in flight", || upstream.seen().len() == 1);
    send(&child, Signal::INT);
    assert!(read_line(child.stderr.as_mut().unwrap()).starts_with("stopping: waiting for 1 requests"));
    drop(tell);
    let run = finish(child);
    assert_eq!((run.code, dir.parts()), (130, 1), "{run:?}");
    let run = dir.fast(&["--ignore-robots"], &urls);
    assert_eq!((run.code, dir.parts()), (0, 0), "{run:?}");
    assert!(dir.file(&upstream, "a.bin").is_some_and(|file| file == body));
    let ranges: Vec<bool> = upstream.seen().iter().map(|seen| seen.range_start() > 0).collect();
    assert_eq!(ranges, [false, true]);
}

#[test]
fn broken_pages_do_not_stop_a_healthy_host() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match page_number(&seen.path) {
        40..44 => Reply::page(vec![1; 1_000]).cut(),
        44..46 => Reply::status(500),
        _ => Reply::status(200),
    });
    // A host that was given up would stay so: its circuit is open for longer than that.
    let run = dir.fast(&["--per-host", "1", "--patience", "10s"], &pages(&upstream, 100));
    assert_eq!((run.code, dir.files().len(), dir.parts()), (4, 94, 0), "{run:?}");
    // A page that was never requested goes before those that failed.
    let before = upstream.seen().len();
    let urls = [pages(&upstream, 100), vec![upstream.url("/new.html")]].concat();
    assert_eq!(dir.fast(&["--per-host", "1", "--tries", "1"], &urls).code, 4);
    let paths: Vec<String> = upstream.seen().split_off(before).into_iter().map(|seen| seen.path).collect();
    assert_eq!((paths[0].as_str(), paths.len()), ("/new.html", 7), "{paths:?}");
}

fn page_number(path: &str) -> usize {
    let name = path.trim_start_matches("/p/").trim_end_matches(".html");
    name.parse().unwrap_or(usize::MAX)
}
