//! Golden vectors: the behavior of core's buckets as text, which engines in other languages replay.
//!
//! `vectors/buckets.txt` is generated from core. A change to it changes what every engine must do: run this
//! test with `TIDEGATE_REWRITE_VECTORS=1` to regenerate it, and review the diff.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::Duration;

use tidegate_core::bucket::{Bucket, Shape, Span};
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;

const HEADER: &str = "\
# Golden vectors of a bucket. Generated from tidegate-core by tests/it/vectors.rs; engines replay them line by line.
#
# A bucket is the time at which it is full: whole microseconds since 1970, and a fraction of one more as a numerator
# over the shape's amount. Every span (a cost, a capacity, a point in time) is written `whole part`. All numbers are
# below 2^53, so that doubles represent them exactly. An engine adds with a carry at the amount, subtracts with a borrow,
# and compares; it neither multiplies nor divides. `0 0` is a new, full bucket.
#
# bucket <amount> <period µs> <burst> <capacity>
#     A new bucket of this shape: `amount` units per period. The capacity is the cost of the whole burst.
# take <now> <units> <cost> -> ok|wait|never <full at> <available> <retry after µs>
#     after = max(full at, now) + cost. More units than the burst are never available. If after - capacity, rounded up
#     to whole microseconds, is later than now, wait for the difference, and nothing changes. Otherwise ok, and full at
#     becomes after. Zero units are ok if there is no debt.
# debit <now> <units> <cost> -> done <full at> <available> -
#     Takes even if not available: full at = max(full at, now) + cost.
# credit <now> <units> <cost> -> done <full at> <available> -
#     Returns units: full at = full at - cost, or `0 0` if that is before 1970. Now is used only for `available`.
# shape <now> <amount> <period µs> <burst> <capacity> -> done <full at> <available> -
#     Changes the shape and keeps the level, capped to the new burst. The caller computes full at.
#
# Available is in whole units at `now`, rounded down; a negative number is debt.
";

/// Amount, period in microseconds, burst: slow and fast, with and without a fraction, large and small.
const SHAPES: [(u64, u64, u64); 16] = [
    (1, 86_400_000_000, 1),
    (1, 86_400_000_000, 30),
    (10, 3_600_000_000, 10),
    (7, 3_600_000_000, 3),
    (60, 60_000_000, 60),
    (100_000, 60_000_000, 100_000),
    (100_000, 60_000_000, 150_000),
    (999_983, 60_000_000, 5_000),
    (1_000, 3_000_000, 1_000),
    (3, 1_000_000, 1),
    (1_000_000, 1_000_000, 1),
    (1_000_000, 1_000_000, 2_000_000),
    (3_000_000, 1_000_000, 100),
    (1_099_511_627_776, 86_400_000_000, 1_099_511_627_776),
    (11, 13, 17),
    (5, 31_622_400_000_000, 12),
];

const START: u64 = 1_800_000_000_000_000;
const OPERATIONS: usize = 24;
const EXACT: u64 = 1 << 53;

struct Writer {
    text: String,
    random: Random,
    bucket: Bucket<Stamp>,
    shape: Shape<Stamp>,
    now: u64,
}

fn shape((amount, period, burst): (u64, u64, u64)) -> Shape<Stamp> {
    Shape::new(amount, Duration::from_micros(period), burst).expect("a shape within the bounds")
}

fn span(span: Span) -> String {
    assert!(span.whole < EXACT && span.part < EXACT, "exact in a double");
    format!("{} {}", span.whole, span.part)
}

fn shape_text(shape: &Shape<Stamp>) -> String {
    let (period, burst) = (shape.period().as_micros(), shape.burst());
    format!("{} {period} {burst} {}", shape.amount(), span(shape.span(burst)))
}

impl Writer {
    fn line(&mut self, line: &str) {
        self.text.push_str(line);
        self.text.push('\n');
    }

    fn done(&mut self, line: &str) {
        let available = self.bucket.level(&self.shape, Stamp::from_micros(self.now));
        let line = format!("{line} -> done {} {available} -", span(self.bucket.full_at()));
        self.line(&line);
    }

    fn begin(&mut self, shape: Shape<Stamp>) {
        (self.bucket, self.shape) = (Bucket::full(), shape);
        let line = format!("bucket {}", shape_text(&shape));
        self.line(&line);
    }

    fn take(&mut self, units: u64) {
        let now = Stamp::from_micros(self.now);
        let (verdict, retry_after) = match self.bucket.take(&self.shape, units, now) {
            Ok(()) => ("ok", "0".to_owned()),
            Err(Stamp::MAX) => ("never", "-".to_owned()),
            Err(ready) => ("wait", (ready.as_micros() - self.now).to_string()),
        };
        let line = format!(
            "take {} {units} {} -> {verdict} {} {} {retry_after}",
            self.now,
            span(self.shape.span(units)),
            span(self.bucket.full_at()),
            self.bucket.level(&self.shape, now),
        );
        self.line(&line);
    }

    fn debit(&mut self, units: u64) {
        self.bucket.debit(&self.shape, units, Stamp::from_micros(self.now));
        let line = format!("debit {} {units} {}", self.now, span(self.shape.span(units)));
        self.done(&line);
    }

    fn credit(&mut self, units: u64) {
        self.bucket.credit(&self.shape, units);
        let line = format!("credit {} {units} {}", self.now, span(self.shape.span(units)));
        self.done(&line);
    }

    fn reshape(&mut self, next: Shape<Stamp>) {
        self.bucket.reshape(&self.shape, &next, Stamp::from_micros(self.now));
        self.shape = next;
        let line = format!("shape {} {}", self.now, shape_text(&next));
        self.done(&line);
    }

    /// A number of units: none, one, a few, many, all, one too many.
    fn units(&mut self) -> u64 {
        let burst = self.shape.burst();
        match self.random.below(8) {
            0 => 0,
            1 | 2 => 1,
            3 | 4 => 1 + self.random.below(burst.min(9)),
            5 => 1 + self.random.below(burst),
            6 => burst,
            _ => burst + 1,
        }
    }

    /// Advances time by nothing, a tick, a few units or a burst; sometimes the clock steps back.
    fn pass(&mut self) {
        let unit = self.shape.span(1).whole;
        let burst = self.shape.span(self.shape.burst()).whole;
        let gap = match self.random.below(6) {
            0 => 0,
            1 => 1,
            2 => self.random.below(unit.saturating_mul(3) + 2),
            3 => unit + 1,
            4 => self.random.below(burst + 2),
            _ => self.random.below(burst / 3 + 2),
        };
        if self.random.below(12) == 0 {
            self.now -= gap.min(self.now - START);
        } else {
            self.now += gap;
        }
    }

    fn operate(&mut self) {
        self.pass();
        let units = self.units();
        match self.random.below(10) {
            0..=5 => self.take(units),
            6 => self.debit(units),
            7 => self.debit(units + self.shape.burst()),
            _ => self.credit(units),
        }
    }
}

fn generated() -> String {
    let first = shape(SHAPES[0]);
    let random = Random::seeded(0x7469_6465);
    let mut writer =
        Writer { text: HEADER.to_owned(), random, bucket: Bucket::full(), shape: first, now: START };
    for numbers in SHAPES {
        let _ = writeln!(writer.text);
        writer.now = START;
        writer.begin(shape(numbers));
        for _ in 0..OPERATIONS {
            writer.operate();
        }
    }
    let _ = writeln!(writer.text, "\n# Changes of shape: full, in use, empty and in debt.");
    for pair in SHAPES.windows(2).chain([[SHAPES[14], SHAPES[0]].as_slice(), &[SHAPES[5], SHAPES[4]]]) {
        let [old, new] = [shape(pair[0]), shape(pair[1])];
        for quarters in [0, 1, 4, 6] {
            writer.now = START;
            writer.begin(old);
            writer.debit((old.burst() * quarters).div_ceil(4));
            writer.pass();
            writer.reshape(new);
            writer.take(1);
            writer.take(new.burst());
        }
    }
    writer.text
}

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("vectors/buckets.txt")
}

#[test]
fn committed_vectors_match_core() {
    let generated = generated();
    if std::env::var_os("TIDEGATE_REWRITE_VECTORS").is_some() {
        std::fs::write(path(), &generated).unwrap();
    }
    let committed = std::fs::read_to_string(path()).unwrap();
    for (number, (committed, generated)) in committed.lines().zip(generated.lines()).enumerate() {
        assert_eq!(committed, generated, "line {} of vectors/buckets.txt", number + 1);
    }
    assert_eq!(committed, generated, "vectors/buckets.txt differs in its number of lines");
}

/// The state of an engine, which only adds, subtracts and compares.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Time {
    whole: i64,
    part: i64,
}

impl Time {
    fn plus(self, more: Self, amount: i64) -> Self {
        let (whole, part) = (self.whole + more.whole, self.part + more.part);
        if part >= amount { Self { whole: whole + 1, part: part - amount } } else { Self { whole, part } }
    }

    fn minus(self, less: Self, amount: i64) -> Self {
        let (whole, part) = (self.whole - less.whole, self.part - less.part);
        if part < 0 { Self { whole: whole - 1, part: part + amount } } else { Self { whole, part } }
    }
}

#[derive(Default)]
struct Engine {
    amount: i64,
    burst: i64,
    capacity: Option<Time>,
    full_at: Option<Time>,
}

impl Engine {
    const NEW: Time = Time { whole: 0, part: 0 };

    fn shape(&mut self, numbers: &[i64]) {
        (self.amount, self.burst) = (numbers[0], numbers[2]);
        self.capacity = Some(Time { whole: numbers[3], part: numbers[4] });
    }

    /// Executes one line and returns the verdict, full at and retry after.
    fn run(&mut self, operation: &str, numbers: &[i64]) -> (&'static str, Time, Option<i64>) {
        let cost = Time { whole: numbers[2], part: numbers[3] };
        let (now, full_at) = (Time { whole: numbers[0], part: 0 }, self.full_at.unwrap_or(Self::NEW));
        let after = full_at.max(now).plus(cost, self.amount);
        let (verdict, full_at, retry_after) = match operation {
            "take" => {
                let ready = after.minus(self.capacity.expect("a shape"), self.amount);
                let ready = ready.whole + i64::from(ready.part > 0);
                if numbers[1] > self.burst {
                    ("never", full_at, None)
                } else if ready > now.whole {
                    ("wait", full_at, Some(ready - now.whole))
                } else {
                    ("ok", after, Some(0))
                }
            }
            "debit" => ("done", after, None),
            _ => ("done", full_at.minus(cost, self.amount).max(Self::NEW), None),
        };
        self.full_at = Some(full_at);
        (verdict, full_at, retry_after)
    }
}

#[test]
fn adding_and_comparing_engine_replays_vectors() {
    let text = generated();
    let mut engine = Engine::default();
    let mut replayed = 0;
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (input, output) = line.split_once(" -> ").unwrap_or((line, ""));
        let (operation, numbers) = input.split_once(' ').unwrap();
        let numbers: Vec<i64> = numbers.split(' ').map(|number| number.parse().unwrap()).collect();
        let output: Vec<&str> = output.split(' ').collect();
        let full_at = || Time {
            whole: output[1].parse().expect("a number"),
            part: output[2].parse().expect("a number"),
        };
        match operation {
            "bucket" => {
                engine = Engine::default();
                engine.shape(&numbers);
            }
            "shape" => {
                engine.shape(&numbers[1..]);
                engine.full_at = Some(full_at());
            }
            _ => {
                let wanted = (output[0], full_at(), output[4].parse().ok());
                assert_eq!(engine.run(operation, &numbers), wanted, "{line}");
                replayed += 1;
            }
        }
    }
    assert!(replayed > 300, "{replayed} operations");
    for verdict in ["-> ok ", "-> wait ", "-> never ", "-> done "] {
        assert!(text.matches(verdict).count() > 20, "too few lines with `{verdict}`");
    }
}
