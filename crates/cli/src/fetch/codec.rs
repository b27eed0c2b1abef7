//! The JSON of a fetch: lines for programs, and the journal. Its field names are stable.

use std::io::{self, Write};

use reqwest::Url;
use serde_json::{Map, Value, json};
use tidegate::CircuitState;

use super::gates::UserLimit;
use super::partial::Partial;
use super::result::{PageOutcome, PageResult, SkipReason};
use super::tally::{Summary, Tally};

/// A line of the journal of an earlier run, as far as the next run needs it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum JournalLine {
    /// A fetched page.
    Done { url: String, part: String, file: String },
    /// A page that was requested and failed, or that was in progress.
    Failed { url: String, partial: Option<Partial> },
}

/// Reads a journal line; `None` if it is another one.
pub(crate) fn journaled(line: &[u8]) -> Option<JournalLine> {
    let line: Value = serde_json::from_slice(line).ok()?;
    let text = |name: &str| line[name].as_str().map(str::to_owned);
    match line["outcome"].as_str()? {
        "done" => Some(JournalLine::Done { url: text("url")?, part: text("part")?, file: text("file")? }),
        "failed" | "partial" if line["attempts"] != 0 => {
            Some(JournalLine::Failed { url: text("url")?, partial: partial(&line["partial"]) })
        }
        _ => None,
    }
}

fn partial(value: &Value) -> Option<Partial> {
    Some(Partial {
        part: value["part"].as_str()?.to_owned(),
        bytes: value["bytes"].as_u64()?,
        url: value["url"].as_str()?.parse().ok()?,
        validator: value["validator"].as_str()?.to_owned(),
        empty_rests: 0,
    })
}

/// Writes a journal line.
pub(crate) fn write_journal(to: &mut impl Write, result: &PageResult) -> io::Result<()> {
    let mut line = line(result);
    if let PageOutcome::Done(page) = &result.outcome {
        // Recovery finds the part by this name.
        line.insert("part".to_owned(), json!(page.part));
    }
    if let Some(partial) = &result.partial {
        line.insert("partial".to_owned(), partial_value(partial));
    }
    write(to, &line)
}

/// Writes the journal line of a page in progress.
pub(crate) fn write_partial(to: &mut impl Write, page: &Url, partial: &Partial) -> io::Result<()> {
    let mut line = Map::new();
    line.insert("url".to_owned(), json!(page.as_str()));
    line.insert("outcome".to_owned(), json!("partial"));
    line.insert("partial".to_owned(), partial_value(partial));
    write(to, &line)
}

fn partial_value(partial: &Partial) -> Value {
    let Partial { part, bytes, url, validator, empty_rests: _ } = partial;
    json!({ "part": part, "bytes": bytes, "url": url.as_str(), "validator": validator })
}

/// Writes the same line for programs.
pub(crate) fn write_line(to: &mut impl Write, result: &PageResult) -> io::Result<()> {
    write(to, &line(result))
}

fn write(to: &mut impl Write, line: &Map<String, Value>) -> io::Result<()> {
    serde_json::to_writer(&mut *to, line)?;
    to.write_all(b"\n")
}

/// The fields of an ended page.
fn line(result: &PageResult) -> Map<String, Value> {
    let mut line = Map::new();
    let mut put = |name: &str, value: Value| drop(line.insert(name.to_owned(), value));
    put("url", json!(result.url));
    match &result.outcome {
        PageOutcome::Done(page) => {
            put("outcome", json!("done"));
            put("file", json!(page.file));
            put("bytes", json!(page.body.bytes()));
            put("status", json!(page.status));
            put("moved_to", json!(page.moved_to));
        }
        PageOutcome::Skipped(skip) => {
            put("outcome", json!("skipped"));
            put("reason", json!(skip_word(*skip)));
        }
        PageOutcome::Failed(failed) => {
            put("outcome", json!("failed"));
            put("error", json!(failed.why));
            put("status", json!(failed.status));
            // Whether a later run may succeed.
            put("is_final", json!(failed.is_final));
        }
    }
    put("attempts", json!(result.attempts));
    line
}

const fn skip_word(skip: SkipReason) -> &'static str {
    match skip {
        SkipReason::Exists => "there",
        SkipReason::Duplicate => "twice",
        SkipReason::Robots => "robots",
    }
}

const fn circuit_word(circuit: CircuitState) -> &'static str {
    match circuit {
        CircuitState::Closed => "closed",
        CircuitState::Open => "open",
        CircuitState::HalfOpen => "half_open",
    }
}

/// The summary of a fetch, in one line.
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
        host["limit_per_second"] = json!(line.throttle.limit);
        host["limited_by"] = json!(line.limited_by.map(|limit| limit.to_string()));
        host["limited_by_rate_max"] = json!(line.limited_by.is_some_and(UserLimit::is_rate_max));
        host["circuit"] = json!(line.throttle.circuit.map(circuit_word));
        host["latency_p95_ms"] = json!(line.throttle.latency_p95.map(|latency| latency.as_secs_f64() * 1e3));
        host["error_rate"] = json!(line.error_rate());
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

/// The minimal journal line of a fetched page.
#[cfg(test)]
pub(crate) fn done_line(url: &str, part: &str, file: &str) -> String {
    json!({ "url": url, "outcome": "done", "part": part, "file": file }).to_string() + "\n"
}
