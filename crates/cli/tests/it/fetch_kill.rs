//! Kills `tidegate fetch` at random moments and runs it again until it is done: every file is complete at any
//! time, and no existing file is fetched again.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::process::Child;
use std::sync::Mutex;
use std::sync::mpsc::channel;

use rustix::process::Signal;
use tidegate_core::random::Random;

use crate::kit::codec;
use crate::kit::fetch::{FetchDir, Log, Reply, Seen, Upstream, hold, pages, read_line};
use crate::kit::{finish, send, wait_until};

const SEEDS: u64 = 3;
const KILLS: u64 = 8;
const PAGES: usize = 60;

/// The body of a page, from empty to some hundred thousand bytes.
fn body(path: &str) -> Vec<u8> {
    let number = path.bytes().fold(7_u32, |sum, letter| sum.wrapping_mul(31).wrapping_add(letter.into()));
    let bytes = [0, 10, 5_000, 70_000, 400_000][number as usize % 5] + number as usize % 97;
    path.bytes().cycle().take(bytes).collect()
}

fn kill_now(child: Child) {
    send(&child, Signal::KILL);
    // It may have written more than its pipes hold.
    child.wait_with_output().expect("it ends");
}

#[test]
fn killed_fetch_leaves_whole_files_and_resumes() {
    for seed in 0..SEEDS {
        let (dir, log) = (FetchDir::new(), Log::default());
        let upstreams = [0, 1, 2].map(|_| Upstream::start(&log, |seen| Reply::page(body(&seen.path))));
        let urls: Vec<String> =
            upstreams.iter().flat_map(|upstream| pages(upstream, PAGES / upstreams.len())).collect();
        let path_of =
            |file: &str| file.split_once('/').map(|(folder, name)| (folder.to_owned(), format!("/{name}")));
        let mut random = Random::seeded(seed);
        for kill in 0..=KILLS {
            let there: BTreeSet<_> = dir.files().iter().filter_map(|file| path_of(file)).collect();
            let begun = hold(&log).len();
            let mut child = dir.begin(&["--json"], &urls);
            if kill == KILLS {
                let run = finish(child);
                assert_eq!(run.code, 0, "seed {seed}: {run:?}");
            } else if there.len() == PAGES {
                finish(child);
            } else if random.below(2) == 0 {
                // In the middle of requests.
                let requests = usize::try_from(1 + random.below(20)).unwrap();
                let left = PAGES - there.len();
                wait_until("so many requests", || hold(&log).len() >= begun + requests.min(left));
                kill_now(child);
            } else {
                // While parts are renamed.
                let lines = 1 + random.below(6);
                (0..lines).for_each(|_| drop(read_line(child.stdout.as_mut().expect("a pipe"))));
                kill_now(child);
            }
            for file in dir.files() {
                let (_, path) = path_of(&file).expect("a file of a host");
                assert!(
                    fs::read(dir.out().join(&file)).unwrap() == body(&path),
                    "seed {seed}: {file} is not whole"
                );
            }
            for seen in &hold(&log)[begun..] {
                let upstream =
                    upstreams.iter().find(|upstream| upstream.port() == seen.port).expect("one of them");
                let page = (upstream.folder(), seen.path.clone());
                assert!(!there.contains(&page), "seed {seed}: {page:?} existed, and is fetched again");
            }
        }
        assert_eq!((dir.files().len(), dir.parts()), (PAGES, 0), "seed {seed}");
        // The journal has each of them once.
        let journal = fs::read_to_string(dir.out().join(".tidegate/journal.jsonl")).unwrap();
        let mut done = BTreeMap::new();
        for line in codec::lines(&journal).iter().filter(|line| line["outcome"] == "done") {
            *done.entry(line["file"].as_str().expect("a file").to_owned()).or_insert(0) += 1;
        }
        assert_eq!(done.keys().cloned().collect::<Vec<_>>(), dir.files(), "seed {seed}");
        assert!(done.values().all(|lines| *lines == 1), "seed {seed}: {done:?}");
    }
}

/// Parts without a line in the journal were removed.
#[test]
fn killed_fetch_continues_a_large_page() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let body: Vec<u8> = (0..40_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let whole = body.clone();
    let upstream = Upstream::start(&log, move |seen| match seen.range_start() {
        0 => Reply::page(&whole[..]).header("etag", "\"v1\"").halved(),
        from => {
            let range = format!("bytes {from}-39999999/40000000");
            Reply::page(&whole[from..]).with_status(206).header("content-range", range)
        }
    });
    let urls = [upstream.url("/a.bin")];
    let child = dir.begin(&["--ignore-robots"], &urls);
    let journal = dir.out().join(".tidegate/journal.jsonl");
    wait_until("a line in the journal", || {
        fs::read_to_string(&journal).is_ok_and(|text| text.ends_with('\n'))
    });
    kill_now(child);
    let run = dir.fast(&["--ignore-robots"], &urls);
    assert_eq!((run.code, dir.parts()), (0, 0), "{run:?}");
    assert!(dir.file(&upstream, "a.bin").is_some_and(|file| file == body));
    let starts: Vec<usize> = upstream.seen().iter().map(Seen::range_start).collect();
    assert!(starts.len() == 2 && starts[1] >= 16 << 20, "{starts:?}");
}

/// An error that ended the fetch removed the parts of all pages in progress, although they were journaled.
#[test]
fn failed_fetch_keeps_a_large_page() {
    let (dir, log) = (FetchDir::new(), Log::default());
    let (tell, go_on) = channel::<()>();
    let go_on = Mutex::new(go_on);
    let body: Vec<u8> = (0..40_000_000_u32).map(|number| number.to_le_bytes()[1]).collect();
    let whole = body.clone();
    let upstream = Upstream::start(&log, move |seen| match (seen.path.as_str(), seen.range_start()) {
        ("/in/the/way.html", _) => {
            let _ = hold(&go_on).recv();
            Reply::status(200)
        }
        (_, 0) => Reply::page(&whole[..]).header("etag", "\"v1\"").halved(),
        (_, from) => {
            let range = format!("bytes {from}-39999999/40000000");
            Reply::page(&whole[from..]).with_status(206).header("content-range", range)
        }
    });
    // A file of the user where the folder of the other page belongs.
    let in_the_way = dir.out().join(upstream.folder()).join("in");
    fs::create_dir_all(in_the_way.parent().expect("the folder of the host")).unwrap();
    fs::write(&in_the_way, "mine").unwrap();
    let urls = ["/a.bin", "/in/the/way.html"].map(|path| upstream.url(path));
    let child = dir.begin(&["--ignore-robots"], &urls);
    let journal = dir.out().join(".tidegate/journal.jsonl");
    wait_until("a line in the journal", || {
        fs::read_to_string(&journal).is_ok_and(|text| text.ends_with('\n'))
    });
    drop(tell);
    let run = finish(child);
    assert!(run.code == 1 && run.stderr.contains("way.html cannot be created"), "{run:?}");
    fs::remove_file(in_the_way).unwrap();
    let run = dir.fast(&["--ignore-robots"], &urls);
    assert_eq!((run.code, dir.parts(), dir.files().len()), (0, 0, 2), "{run:?}");
    assert!(dir.file(&upstream, "a.bin").is_some_and(|file| file == body));
    let starts: Vec<usize> = upstream.seen().iter().map(Seen::range_start).collect();
    assert!(starts.len() == 3 && starts[2] >= 16 << 20, "{starts:?}");
}
