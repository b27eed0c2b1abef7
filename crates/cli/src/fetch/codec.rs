//! The JSON of a fetch: lines for programs, and the journal. The names of its fields are a promise, as everywhere.

use std::io::{self, Write};

use serde_json::{Map, Value, json};

use super::ended::{Ended, Fate, Skip};
use super::tally::{Summary, Tally};

/// The part and the name in a line of the journal, if it is of a page that was fetched.
pub(crate) fn done(line: &[u8]) -> Option<(String, String)> {
    let line: Value = serde_json::from_slice(line).ok()?;
    let text = |name: &str| line[name].as_str();
    (text("outcome") == Some("done")).then_some(())?;
    Some((text("part")?.to_owned(), text("file")?.to_owned()))
}

/// Writes a line of the journal.
pub(crate) fn write_journal(to: &mut impl Write, ended: &Ended) -> io::Result<()> {
    let mut line = line(ended);
    if let Fate::Done(page) = &ended.fate {
        // What an interrupted run finds its part by.
        line.insert("part".to_owned(), json!(page.part));
    }
    write(to, &line)
}

/// Writes the same for programs.
pub(crate) fn write_told(to: &mut impl Write, ended: &Ended) -> io::Result<()> {
    write(to, &line(ended))
}

fn write(to: &mut impl Write, line: &Map<String, Value>) -> io::Result<()> {
    serde_json::to_writer(&mut *to, line)?;
    to.write_all(b"\n")
}

/// What is told of a page that has ended.
fn line(ended: &Ended) -> Map<String, Value> {
    let mut line = Map::new();
    let mut put = |name: &str, value: Value| drop(line.insert(name.to_owned(), value));
    put("url", json!(ended.url));
    match &ended.fate {
        Fate::Done(page) => {
            put("outcome", json!("done"));
            put("file", json!(page.file));
            put("bytes", json!(page.body.bytes()));
            put("status", json!(page.status));
            put("moved_to", json!(page.moved_to));
        }
        Fate::Skipped(skip) => {
            put("outcome", json!("skipped"));
            put("reason", json!(skip_word(*skip)));
        }
        Fate::Failed(failed) => {
            put("outcome", json!("failed"));
            put("error", json!(failed.why));
            put("status", json!(failed.status));
            // Whether the same command may do better later.
            put("is_final", json!(failed.is_final));
        }
    }
    put("attempts", json!(ended.attempts));
    line
}

const fn skip_word(skip: Skip) -> &'static str {
    match skip {
        Skip::There => "there",
        Skip::Twice => "twice",
        Skip::Robots => "robots",
    }
}

/// What a fetch came to, in one line.
pub(crate) fn summary(summary: &Summary) -> String {
    let tally = |tally: &Tally| {
        json!({
            "done": tally.done,
            "skipped": tally.skipped(),
            "there": tally.there,
            "twice": tally.twice,
            "robots": tally.robots,
            "failed": tally.failed,
            "bytes": tally.bytes,
            "attempts": tally.attempts,
        })
    };
    let host = |line: &super::tally::HostLine| {
        let mut host = tally(&line.tally);
        host["host"] = json!(line.host);
        host["per_second"] = json!(line.per_second);
        host["limit_per_second"] = json!(line.limit);
        host["gave_up"] = json!(line.gave_up);
        host
    };
    let mut all = tally(&summary.total);
    all["bad_urls"] = json!(summary.bad);
    all["unfinished"] = json!(summary.unfinished);
    all["is_interrupted"] = json!(summary.is_interrupted);
    all["took"] = json!(summary.took.as_secs_f64());
    all["hosts"] = summary.hosts.iter().map(host).collect();
    json!({ "summary": all }).to_string() + "\n"
}

/// The least line of a page that was fetched.
#[cfg(test)]
pub(crate) fn done_line(part: &str, file: &str) -> String {
    json!({ "outcome": "done", "part": part, "file": file }).to_string() + "\n"
}
