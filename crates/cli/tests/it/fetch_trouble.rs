//! What goes wrong: each failure is reported, the rest is fetched, and no partial file looks complete.

use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use crate::kit::codec;
use crate::kit::fetch::{Bay, FAST, Log, Reply, Upstream, hold, pages, read_line};
use crate::kit::{finish, run};

#[test]
fn a_redirect_loop_ends_and_the_rest_is_fetched() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match seen.path.as_str() {
        "/round.html" => Reply::moved("/round.html"),
        "/nowhere.html" => Reply::moved("mailto:a@example.com"),
        "/mute.html" => Reply::status(302),
        _ => Reply::status(200),
    });
    let mut urls =
        vec![upstream.url("/round.html"), upstream.url("/nowhere.html"), upstream.url("/mute.html")];
    urls.extend(pages(&upstream, 5));
    let run = bay.fast(&[], &urls);
    assert_eq!((run.code, bay.files().len()), (1, 5), "{run:?}");
    for (page, why) in [
        ("round", "redirected more than 10 times"),
        ("nowhere", "redirected to where nobody can go: it is neither https:// nor http://"),
        ("mute", "it answers 302 Found, without saying where to"),
    ] {
        assert!(run.stdout.contains(&format!("/{page}.html: {why}")), "{}", run.stdout);
    }
    assert_eq!(upstream.seen().iter().filter(|seen| seen.path == "/round.html").count(), 11);
}

#[test]
fn a_body_that_is_too_large_is_left_and_the_rest_is_fetched() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match seen.path.as_str() {
        "/said.html" => Reply::page(vec![0; 3_000_000]),
        "/unsaid.html" => Reply::page(vec![0; 3_000_000]).chunked(),
        "/right.html" => Reply::page(vec![0; 1_000_000]).chunked(),
        _ => Reply::status(200),
    });
    let urls = ["/said.html", "/unsaid.html", "/right.html", "/small.html"].map(|path| upstream.url(path));
    let run = bay.fast(&["--max-bytes", "1M"], &urls);
    assert_eq!((run.code, bay.files().len(), bay.parts()), (1, 2, 0), "{run:?}");
    assert_eq!(bay.file(&upstream, "right.html").map(|body| body.len()), Some(1_000_000));
    assert!(run.stdout.contains("/unsaid.html: it has more than --max-bytes 1000000"), "{}", run.stdout);
    assert_eq!(upstream.seen().len(), 4, "it would be as large again");
}

#[test]
fn a_body_that_breaks_off_is_asked_for_again_and_never_looks_whole() {
    let (bay, log) = (Bay::new(), Log::default());
    let body: Vec<u8> = (0..2_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let whole = body.clone();
    let upstream = Upstream::start(&log, move |seen| match (seen.path.as_str(), seen.number) {
        ("/never.html", _) | (_, 0..=2) => Reply::page(whole.clone()).cut(),
        _ => Reply::page(whole.clone()),
    });
    let run = bay.fast(&["--per-host", "1"], &[upstream.url("/first.html"), upstream.url("/never.html")]);
    assert_eq!((run.code, bay.parts()), (4, 0), "{run:?}");
    assert_eq!(bay.files().len(), 1);
    assert!(bay.file(&upstream, "first.html").is_some_and(|file| file == body));
    assert!(run.stdout.contains("/never.html: the connection was lost: "), "{}", run.stdout);
}

#[test]
fn a_part_that_nobody_asked_for_is_not_the_page() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::start(&log, |_| Reply::status(206).header("content-range", "bytes 0-4/100"));
    let run = bay.fast(&[], &pages(&upstream, 1));
    assert_eq!((run.code, bay.files().len(), bay.parts()), (1, 0, 0), "{run:?}");
    assert!(run.stdout.contains("/p/0.html: it answers 206 Partial Content"), "{}", run.stdout);
}

#[test]
fn nobody_waits_for_the_end_of_an_answer_that_nobody_wants() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::with_robots(&log, |seen| match seen.path.as_str() {
        "/robots.txt" | "/gone.html" => Reply::status(404).stalled(),
        "/moved.html" => Reply::moved("/p/0.html").stalled(),
        _ => Reply::status(200),
    });
    let mut urls = vec![upstream.url("/gone.html"), upstream.url("/moved.html")];
    urls.extend(pages(&upstream, 3));
    let began = Instant::now();
    let run = bay.fast(&["--concurrency", "1", "--timeout", "1m"], &urls);
    assert_eq!((run.code, bay.files().len()), (1, 4), "{run:?}");
    // The rest of the three answers never comes, and the program would wait for a minute for each.
    assert!(began.elapsed() < Duration::from_mins(1), "it waits for the rest of an answer");
}

/// The system limits the size of a file: for one file the disk is full, and the program ignores the signal that comes with it.
#[test]
fn a_disk_that_takes_no_more_stops_it_and_what_is_there_is_whole() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| {
        Reply::page(if seen.path == "/p/7.html" { vec![7; 4_000_000] } else { vec![1; 1_000] })
    });
    let urls = pages(&upstream, 20);
    let program = bay.command(FAST);
    let line = "trap '' XFSZ; ulimit -f 2000; exec \"$@\"";
    let mut limited = Command::new("sh");
    limited.args(["-c", line, "sh"]).arg(program.get_program()).args(program.get_args());
    let run = run(limited.args(["--per-host", "1"]).args(&urls).stdin(Stdio::null()));
    assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{run:?}");
    assert!(run.stderr.contains("may not be as large as it has to be"), "{}", run.stderr);
    assert!(
        run.stderr.contains("then run the same command again: it goes on where it was"),
        "{}",
        run.stderr
    );
    assert!(bay.file(&upstream, "p/7.html").is_none());
    // What had ended before it is kept or gone, and the same command does the rest.
    let before = bay.files();
    for file in &before {
        assert_eq!(std::fs::read(bay.out().join(file)).unwrap().len(), 1_000, "{file}");
    }
    let asked = upstream.seen().len();
    let run = bay.fast(&[], &urls);
    assert_eq!((run.code, bay.files().len(), bay.parts()), (0, 20, 0), "{run:?}");
    assert_eq!(upstream.seen().len(), asked + 20 - before.len(), "what was there is not fetched again");
    assert_eq!(bay.file(&upstream, "p/7.html").map(|body| body.len()), Some(4_000_000));
}

#[test]
fn what_was_fetched_before_the_disk_took_no_more_is_kept() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| {
        Reply::page(if seen.path == "/p/7.html" { vec![7; 200_000] } else { vec![1; 1_000] })
    });
    let program = bay.command(FAST);
    let line = "trap '' XFSZ; ulimit -f 100; exec \"$@\"";
    let mut limited = Command::new("sh");
    limited.args(["-c", line, "sh"]).arg(program.get_program()).args(program.get_args());
    let run = run(limited.args(["--per-host", "1"]).args(pages(&upstream, 8)).stdin(Stdio::null()));
    assert_eq!((run.code, bay.files().len()), (1, 7), "{run:?}");
}

#[test]
fn a_reader_that_goes_away_stops_nothing() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| Reply::page(seen.path.clone()));
    let mut child = bay.begin(&["--json", "--per-host", "1"], &pages(&upstream, 300));
    let line = read_line(child.stdout.as_mut().expect("a pipe"));
    assert_eq!(codec::lines(&line)[0]["outcome"], "done");
    drop(child.stdout.take());
    let run = finish(child);
    assert_eq!((run.code, bay.files().len()), (0, 300), "{}", run.stderr);
    assert!(
        run.stderr.is_empty() || run.stderr.starts_with("note: stdout cannot be written to any more"),
        "{}",
        run.stderr
    );
    // A terminal that is gone stops nothing either.
    let other = Bay::new();
    let mut command = other.command(FAST);
    command.args(pages(&upstream, 5)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.process_group(0).spawn().unwrap();
    drop((child.stdout.take(), child.stderr.take()));
    assert_eq!((finish(child).code, other.files().len()), (0, 5));
}

#[test]
fn what_fails_for_good_is_asked_for_once_and_what_may_pass_as_often_as_it_is_said() {
    let (bay, log) = (Bay::new(), Log::default());
    let upstream = Upstream::start(&log, |seen| match seen.path.as_str() {
        "/gone.html" => Reply::status(410),
        "/shaky.html" if seen.number < 2 => Reply::hangs_up(),
        "/busy.html" => Reply::status(503),
        _ => Reply::status(200),
    });
    let run = bay.fast(
        &["--tries", "3", "--per-host", "1"],
        &["/shaky.html", "/gone.html", "/busy.html"].map(|path| upstream.url(path)),
    );
    assert_eq!((run.code, bay.files().len()), (1, 1), "{run:?}");
    let asked = |path: &str| hold(&log).iter().filter(|seen| seen.path == path).count();
    assert_eq!((asked("/gone.html"), asked("/busy.html")), (1, 3));
    assert!(run.stdout.contains("/busy.html: it answers 503 Service Unavailable"), "{}", run.stdout);
}
