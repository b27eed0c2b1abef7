//! A log, line by line, in the order of its times: what is a little out of order is put in order, and what is more is refused.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};
use std::path::Path;
use std::time::Duration;

use tidegate::{Stamp, Subject};
use tidegate_client::Cost;

use super::codec;
use crate::failure::Failure;
use crate::words::shown;

/// A line has at most so many bytes.
const LINE_MAX: u64 = 64 * 1_024;
/// Lines that are read ahead of the one that is replayed, and may be out of order among each other.
const AHEAD_MAX: usize = 10_000;

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    /// Which line of the log, from 1.
    pub(crate) number: u64,
    pub(crate) at: Stamp,
    pub(crate) subject: Subject,
    pub(crate) cost: Cost,
    /// What it used in the end.
    pub(crate) actual: Option<Cost>,
    /// How long it took until that was known.
    pub(crate) held: Duration,
    pub(crate) origin: Origin,
}

/// Who wrote a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// Somebody who means what it says: what is wrong with it is told.
    Somebody,
    /// A server, before it judged the request: what it refused by itself is among them.
    Server,
    /// A server, of a request that brought limits of its own: those that are tried do not stand for it.
    OwnLimits,
}

/// A line by its time, and lines of the same time as they were written.
#[derive(Debug)]
struct Ahead(Line);

impl Ahead {
    const fn key(&self) -> (Stamp, u64) {
        (self.0.at, self.0.number)
    }
}

impl PartialEq for Ahead {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for Ahead {}

impl PartialOrd for Ahead {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ahead {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// A log that is being read.
pub(crate) struct Log {
    name: String,
    reader: Box<dyn BufRead>,
    size: Option<u64>,
    /// Bytes and lines that were read.
    read: u64,
    number: u64,
    ahead: BinaryHeap<Reverse<Ahead>>,
    ahead_max: usize,
    /// The time of the line that was handed out last.
    passed: Stamp,
    is_read: bool,
}

impl Log {
    /// Opens a file; `-` is stdin.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let name = shown(&path.display().to_string());
        if path == Path::new("-") {
            return Ok(Self::new("stdin", Box::new(io::stdin().lock()), None, AHEAD_MAX));
        }
        let failed = |error: io::Error| {
            Failure::usage(format!("the log `{name}` cannot be read: {error}"))
                .next("name a file of lines of JSON, or `-` for stdin")
        };
        let file = File::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?;
        let size = size.is_file().then_some(size.len());
        Ok(Self::new(&name, Box::new(BufReader::with_capacity(1 << 16, file)), size, AHEAD_MAX))
    }

    fn new(name: &str, reader: Box<dyn BufRead>, size: Option<u64>, ahead_max: usize) -> Self {
        Self {
            name: name.to_owned(),
            reader,
            size,
            read: 0,
            number: 0,
            ahead: BinaryHeap::new(),
            ahead_max,
            passed: Stamp::ZERO,
            is_read: false,
        }
    }

    /// How many bytes there are, where that is known.
    pub(crate) const fn size(&self) -> Option<u64> {
        self.size
    }

    /// How many were read.
    pub(crate) const fn read(&self) -> u64 {
        self.read
    }

    /// The next line by its time.
    pub(crate) fn next(&mut self) -> Result<Option<Line>, Failure> {
        while !self.is_read && self.ahead.len() < self.ahead_max {
            match self.take()? {
                Some(line) => self.ahead.push(Reverse(Ahead(line))),
                None => self.is_read = true,
            }
        }
        let line = self.ahead.pop().map(|Reverse(Ahead(line))| line);
        if let Some(line) = &line {
            self.passed = line.at;
        }
        Ok(line)
    }

    /// The next line as it is written.
    fn take(&mut self) -> Result<Option<Line>, Failure> {
        let mut text = Vec::new();
        loop {
            text.clear();
            let taken = (&mut self.reader).take(LINE_MAX + 1).read_until(b'\n', &mut text);
            let taken = taken.map_err(|error| {
                Failure::failed(format!("the log `{}` cannot be read any further: {error}", self.name))
            })?;
            if taken == 0 {
                return Ok(None);
            }
            (self.read, self.number) = (self.read + taken as u64, self.number + 1);
            if text.len() as u64 > LINE_MAX {
                return Err(self.wrong(&format!("it has more than {LINE_MAX} bytes, the most there may be")));
            }
            let text = text.trim_ascii();
            if text.is_empty() {
                continue;
            }
            let Some(line) = codec::line(text, self.number).map_err(|what| self.wrong(&what))? else {
                continue;
            };
            if line.at < self.passed {
                let what = format!(
                    "`at`: {} is before {}, which was replayed already: lines may be out of order by {} lines",
                    line.at, self.passed, self.ahead_max
                );
                return Err(self.wrong(&what).next("sort the log by its times"));
            }
            return Ok(Some(line));
        }
    }

    fn wrong(&self, what: &str) -> Failure {
        Failure::usage(format!("line {} of `{}`: {what}", self.number, self.name))
            .next("see how a log is written: tidegate explain --help")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(text: &str, ahead_max: usize) -> Log {
        Log::new("log", Box::new(io::Cursor::new(text.to_owned())), None, ahead_max)
    }

    fn times(text: &str, ahead_max: usize) -> Result<Vec<u64>, String> {
        let mut log = log(text, ahead_max);
        let mut times = Vec::new();
        loop {
            match log.next() {
                Ok(Some(line)) => times.push(line.at.as_micros() / 1_000_000),
                Ok(None) => return Ok(times),
                Err(failure) => return Err(failure.what),
            }
        }
    }

    fn at(times: &[u64]) -> String {
        let line = |at: &u64| {
            format!("{{\"at\": {at}, \"entity\": \"a\", \"resource\": \"b\", \"cost\": {{\"rpm\": 1}}}}\n")
        };
        times.iter().map(line).collect()
    }

    #[test]
    fn lines_that_are_a_little_out_of_order_are_put_in_order_and_others_are_refused() {
        assert_eq!(times(&at(&[3, 1, 2, 5, 4]), 3).unwrap(), [1, 2, 3, 4, 5]);
        assert_eq!(times("\n  \n", 3).unwrap(), [0; 0]);
        assert_eq!(
            times(&at(&[3, 4, 5, 1]), 2).unwrap_err(),
            "line 4 of `log`: `at`: 1970-01-01T00:00:01Z is before 1970-01-01T00:00:04Z, which was replayed already: \
             lines may be out of order by 2 lines"
        );
    }

    #[test]
    fn a_line_that_cannot_be_read_says_which_and_what_is_wrong() {
        let good = at(&[1]);
        let whole = |at: &str, entity: &str, cost: &str| {
            format!("{good}{{\"at\": {at}, \"entity\": {entity}, \"resource\": \"b\", \"cost\": {cost}}}\n")
        };
        let table = [
            (format!("{good}nonsense\n"), "it is no JSON: `nonsense`"),
            (format!("{good}{{\"at\": 1}}\n"), "missing field `entity`"),
            (
                whole("\"soon\"", "\"a\"", "{}"),
                "`at`: `soon` is no time as RFC 3339 writes it, such as 2026-01-31T09:30:00Z",
            ),
            (
                whole("1769864400000", "\"a\"", "{}"),
                "`at`: 1769864400000 is no time in seconds since 1970, outside 0..=253402300799",
            ),
            (
                whole("1", "\"a#b\"", "{}"),
                "`entity`: the entity `a#b` holds '#' at byte 1, which no such name does",
            ),
            (whole("1", "\"a\"", "{\"rpm\": -1}"), "`cost.rpm`: invalid value: integer `-1`, expected u64"),
            (
                format!("{good}{{\"type\": \"refused\", \"at\": 1}}\n"),
                "it is an event, as `watch --json` writes it, and no event tells a cost: `{\"type\": \"refused\", \"at\": 1}`",
            ),
            (format!("{good}{}", "x".repeat(70_000)), "it has more than 65536 bytes, the most there may be"),
        ];
        for (text, what) in table {
            assert_eq!(times(&text, 10).unwrap_err(), format!("line 2 of `log`: {what}"));
        }
    }

    #[test]
    fn times_are_seconds_or_rfc_3339() {
        let text = "{\"at\": 1.5, \"entity\": \"a\", \"resource\": \"b\", \"cost\": {\"r\": 1}, \"more\": [1]}\n\
                    {\"at\": \"1970-01-01T01:00:02+01:00\", \"entity\": \"a\", \"resource\": \"b\", \"cost\": {\"r\": 1}, \"actual\": {\"r\": 0}, \"held\": 2.5}";
        let mut log = log(text, 9);
        let (one, other) = (log.next().unwrap().unwrap(), log.next().unwrap().unwrap());
        assert_eq!((one.at, one.actual, one.held), (Stamp::from_micros(1_500_000), None, Duration::ZERO));
        assert_eq!((other.at, other.held), (Stamp::from_secs(2), Duration::from_millis(2_500)));
        assert_eq!(other.actual.unwrap().get("r"), Some(0));
    }
}
