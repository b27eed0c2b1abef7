//! Reads a log in time order. A bounded heap sorts lines that are slightly out of order; a line beyond the
//! bound is an error.

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
use crate::format;

/// Maximum bytes of a line.
const LINE_MAX: u64 = 64 * 1_024;
/// Size of the reorder buffer, in lines.
const REORDER_MAX: usize = 10_000;

/// One request.
#[derive(Debug, Clone)]
pub(crate) struct Line {
    /// The line number, from 1.
    pub(crate) number: u64,
    pub(crate) at: Stamp,
    pub(crate) subject: Subject,
    pub(crate) cost: Cost,
    /// The units used in the end.
    pub(crate) actual: Option<Cost>,
    /// How long the lease was held until they were known.
    pub(crate) held: Duration,
    pub(crate) origin: Origin,
}

/// The writer of a line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Origin {
    /// A user: an invalid request is an error.
    User,
    /// A server, which logs requests before it validates them: invalid ones are counted.
    Server,
    /// A server, for a request with limits of its own, to which the replayed limits do not apply.
    OwnLimits,
}

/// A line ordered by time, then by line number.
#[derive(Debug)]
struct ByTime(Line);

impl ByTime {
    const fn key(&self) -> (Stamp, u64) {
        (self.0.at, self.0.number)
    }
}

impl PartialEq for ByTime {
    fn eq(&self, other: &Self) -> bool {
        self.key() == other.key()
    }
}

impl Eq for ByTime {}

impl PartialOrd for ByTime {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for ByTime {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.key().cmp(&other.key())
    }
}

/// A reader of a log.
pub(crate) struct Log {
    name: String,
    reader: Box<dyn BufRead>,
    size: Option<u64>,
    /// Bytes and lines read.
    read: u64,
    number: u64,
    buffer: BinaryHeap<Reverse<ByTime>>,
    buffer_max: usize,
    /// The time of the last returned line.
    last_at: Stamp,
    is_read: bool,
}

impl Log {
    /// Opens a file; `-` is stdin.
    pub(crate) fn open(path: &Path) -> Result<Self, Failure> {
        let name = format::escape(&path.display().to_string());
        if path == Path::new("-") {
            return Ok(Self::new("stdin", Box::new(io::stdin().lock()), None, REORDER_MAX));
        }
        let failed = |error: io::Error| {
            Failure::usage(format!("the log `{name}` cannot be read: {error}"))
                .next("choose a file of JSON lines, or `-` for stdin")
        };
        let file = File::open(path).map_err(failed)?;
        let size = file.metadata().map_err(failed)?;
        let size = size.is_file().then_some(size.len());
        Ok(Self::new(&name, Box::new(BufReader::with_capacity(1 << 16, file)), size, REORDER_MAX))
    }

    fn new(name: &str, reader: Box<dyn BufRead>, size: Option<u64>, buffer_max: usize) -> Self {
        Self {
            name: name.to_owned(),
            reader,
            size,
            read: 0,
            number: 0,
            buffer: BinaryHeap::new(),
            buffer_max,
            last_at: Stamp::ZERO,
            is_read: false,
        }
    }

    /// The size in bytes, if known.
    pub(crate) const fn size(&self) -> Option<u64> {
        self.size
    }

    /// The number of bytes read.
    pub(crate) const fn read(&self) -> u64 {
        self.read
    }

    /// The next line in time order.
    pub(crate) fn next(&mut self) -> Result<Option<Line>, Failure> {
        while !self.is_read && self.buffer.len() < self.buffer_max {
            match self.take()? {
                Some(line) => self.buffer.push(Reverse(ByTime(line))),
                None => self.is_read = true,
            }
        }
        let line = self.buffer.pop().map(|Reverse(ByTime(line))| line);
        if let Some(line) = &line {
            self.last_at = line.at;
        }
        Ok(line)
    }

    /// The next line in file order.
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
                return Err(self.wrong(&format!("longer than {LINE_MAX} bytes")));
            }
            let text = text.trim_ascii();
            if text.is_empty() {
                continue;
            }
            let Some(line) = codec::line(text, self.number).map_err(|what| self.wrong(&what))? else {
                continue;
            };
            if line.at < self.last_at {
                let what = format!(
                    "`at`: {} is before {}, which is replayed already: lines may be out of order by at most {} lines",
                    line.at, self.last_at, self.buffer_max
                );
                return Err(self.wrong(&what).next("sort the log by its times"));
            }
            return Ok(Some(line));
        }
    }

    fn wrong(&self, what: &str) -> Failure {
        Failure::usage(format!("line {} of `{}`: {what}", self.number, self.name))
            .next("see the format of a log: tidegate explain --help")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn log(text: &str, buffer_max: usize) -> Log {
        Log::new("log", Box::new(io::Cursor::new(text.to_owned())), None, buffer_max)
    }

    fn times(text: &str, buffer_max: usize) -> Result<Vec<u64>, String> {
        let mut log = log(text, buffer_max);
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
    fn lines_are_sorted_up_to_the_reorder_bound() {
        assert_eq!(times(&at(&[3, 1, 2, 5, 4]), 3).unwrap(), [1, 2, 3, 4, 5]);
        assert_eq!(times("\n  \n", 3).unwrap(), [0; 0]);
        assert_eq!(
            times(&at(&[3, 4, 5, 1]), 2).unwrap_err(),
            "line 4 of `log`: `at`: 1970-01-01T00:00:01Z is before 1970-01-01T00:00:04Z, which is replayed already: \
             lines may be out of order by at most 2 lines"
        );
    }

    #[test]
    fn invalid_line_error_names_line_and_field() {
        let good = at(&[1]);
        let whole = |at: &str, entity: &str, cost: &str| {
            format!("{good}{{\"at\": {at}, \"entity\": {entity}, \"resource\": \"b\", \"cost\": {cost}}}\n")
        };
        let table = [
            (format!("{good}nonsense\n"), "invalid JSON: `nonsense`"),
            (format!("{good}{{\"at\": 1}}\n"), "missing field `entity`"),
            (
                whole("\"soon\"", "\"a\"", "{}"),
                "`at`: `soon` is not an RFC 3339 time such as 2026-01-31T09:30:00Z",
            ),
            (
                whole("1769864400000", "\"a\"", "{}"),
                "`at`: 1769864400000 is not a time in seconds since 1970, outside 0..=253402300799",
            ),
            (
                whole("1", "\"a#b\"", "{}"),
                "`entity`: the entity `a#b` has '#' at byte 1, which is not allowed",
            ),
            (whole("1", "\"a\"", "{\"rpm\": -1}"), "`cost.rpm`: invalid value: integer `-1`, expected u64"),
            (
                format!("{good}{{\"type\": \"refused\", \"at\": 1}}\n"),
                "this is an event of `watch --json`, which has no cost: `{\"type\": \"refused\", \"at\": 1}`",
            ),
            (format!("{good}{}", "x".repeat(70_000)), "longer than 65536 bytes"),
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
