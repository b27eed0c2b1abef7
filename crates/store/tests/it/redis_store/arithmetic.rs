//! The script's arithmetic, replayed against core: the test vectors, and numbers beyond the precision of a
//! double.

use std::fmt::Write as _;
use std::time::Duration;

use tidegate_core::bucket::{AMOUNT_MAX, Bucket, PERIOD_MAX, Shape, Span};
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;

use crate::kit::clock::cases;
use crate::kit::common::START;
use crate::kit::engine::{address, skip_without};
use crate::kit::redis::{REDIS, connect};

const VECTORS: &str = include_str!("../../../../core/vectors/buckets.txt");
const CLOCK: &str = include_str!("../../../src/redis/script/clock.lua");
const BUCKET: &str = include_str!("../../../src/redis/script/bucket.lua");
/// Runs one operation per line, and returns the state of the bucket after each.
const REPLAY: &str = "
local r, answers = nil, {}
for i = 1, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do words[#words + 1] = tonumber(word) or word end
  local what, a, b, c, d, e = unpack(words)
  local outcome = 'done'
  if what == 'bucket' then
    r = { 0, 0, 0, 0, 0, a, b, c }
  elseif what == 'shape' then
    if r[6] ~= c or r[7] ~= d or r[8] ~= e then reshape(r, c, d, e, a, b) end
  elseif what == 'take' then
    local s, u, p = after(r, c, a, b)
    outcome = c <= r[8] and is_there(r, s, u, p, a, b) and 'ok' or 'no'
    if outcome == 'ok' then r[1], r[2], r[3] = s, u, p end
  elseif c ~= 0 then
    adjust(r, what == 'debit' and c or -c, a, b)
  end
  answers[i] = string.format('%s %.0f %.0f %.0f', outcome, r[1], r[2], r[3])
end
return answers";

async fn replay(lines: &[String]) -> Vec<String> {
    let mut connection = connect(&address(REDIS)).await;
    let mut call = redis::cmd("EVAL");
    call.arg(format!("{BUCKET}{REPLAY}")).arg(0).arg(lines);
    call.query_async(&mut connection).await.expect("the script runs")
}

fn time(micros: u64) -> String {
    format!("{} {}", micros / 1_000_000, micros % 1_000_000)
}

fn state(outcome: &str, full_at: Span) -> String {
    format!("{outcome} {} {}", time(full_at.whole), full_at.part)
}

#[tokio::test]
async fn script_matches_core_on_every_vector() {
    skip_without!(REDIS);
    let (mut lines, mut expected) = (Vec::new(), Vec::new());
    for line in VECTORS.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let words: Vec<&str> = line.split_whitespace().collect();
        let number = |place: usize| words[place].parse::<u64>().expect("a number");
        if words[0] == "bucket" {
            lines.push(format!("bucket {} {} {}", words[1], words[2], words[3]));
            expected.push("done 0 0 0".to_owned());
            continue;
        }
        let arrow = words.iter().position(|word| *word == "->").expect("an answer");
        let outcome = match words[arrow + 1] {
            "wait" | "never" => "no",
            outcome => outcome,
        };
        let now = time(number(1));
        lines.push(match words[0] {
            "shape" => format!("shape {now} {} {} {}", words[2], words[3], words[4]),
            what => format!("{what} {now} {}", words[2]),
        });
        expected.push(state(outcome, Span { whole: number(arrow + 2), part: number(arrow + 3) }));
    }
    assert!(lines.len() > 400, "{} lines", lines.len());
    for ((line, answer), expected) in lines.iter().zip(replay(&lines).await).zip(expected) {
        // The store does not send an empty debit: it would only move a full bucket to now.
        if line.starts_with("debit") && line.ends_with(" 0") {
            continue;
        }
        assert_eq!(answer, expected, "{line}");
    }
}

#[tokio::test]
async fn script_is_exact_beyond_doubles() {
    skip_without!(REDIS);
    let mut random = Random::seeded(0x5EED);
    let period_max = u64::try_from(PERIOD_MAX.as_micros()).unwrap();
    let log = |random: &mut Random, max: u64| {
        let bits = random.below(40);
        1 + random.below((max >> bits).max(1))
    };
    let shape = |random: &mut Random| loop {
        let (amount, period) = (log(random, AMOUNT_MAX), log(random, period_max));
        if let Ok(shape) = Shape::<Stamp>::new(amount, Duration::from_micros(period), log(random, AMOUNT_MAX))
        {
            return shape;
        }
    };
    let (mut lines, mut expected, mut wide) = (Vec::new(), Vec::new(), 0);
    for _ in 0..400 {
        let (mut rule, mut bucket) = (shape(&mut random), Bucket::<Stamp>::full());
        let mut now = 1_800_000_000_000_000_u64;
        let text = |rule: &Shape<Stamp>| {
            let mut text = String::new();
            write!(text, "{} {} {}", rule.amount(), rule.period().as_micros(), rule.burst()).unwrap();
            text
        };
        lines.push(format!("bucket {}", text(&rule)));
        expected.push("done 0 0 0".to_owned());
        for _ in 0..10 {
            now += random.below(rule.span(rule.burst()).whole.min(1 << 50) + 2);
            let at = Stamp::from_micros(now);
            let units = log(&mut random, AMOUNT_MAX).min(rule.burst() + 1);
            let mut outcome = "done";
            wide += u32::from(u128::from(units) * rule.period().as_micros() >= 1 << 53);
            match random.below(5) {
                0 | 1 => {
                    outcome = if bucket.take(&rule, units, at).is_ok() { "ok" } else { "no" };
                    lines.push(format!("take {} {units}", time(now)));
                }
                2 => {
                    bucket.debit(&rule, units, at);
                    lines.push(format!("debit {} {units}", time(now)));
                }
                3 => {
                    bucket.credit(&rule, units);
                    lines.push(format!("credit {} {units}", time(now)));
                }
                _ => {
                    let next = shape(&mut random);
                    if next != rule {
                        bucket.reshape(&rule, &next, at);
                    }
                    rule = next;
                    lines.push(format!("shape {} {}", time(now), text(&rule)));
                }
            }
            expected.push(state(outcome, bucket.full_at()));
        }
    }
    assert!(wide > 300, "{wide} products exceed a double");
    for (number, (answer, expected)) in replay(&lines).await.into_iter().zip(expected).enumerate() {
        let history = lines[..=number].iter().rev().take_while(|line| !line.starts_with("bucket"));
        assert_eq!(answer, expected, "{:?}", history.collect::<Vec<_>>());
    }
}

/// Returns the time and the offset for each reading of the clock.
const TELL: &str = "
local kept, answers = nil, {}
for i = 1, #ARGV do
  local wall = tonumber(ARGV[i])
  local s, u, ahead, keep = tell(kept, { (wall - wall % 1000000) / 1000000, wall % 1000000 })
  kept = keep or kept
  answers[i] = { string.format('%.0f', s * 1000000 + u), string.format('%.0f', ahead) }
end
return answers";

#[tokio::test]
async fn clock_follows_the_vectors() {
    skip_without!(REDIS);
    let mut connection = connect(&address(REDIS)).await;
    for case in cases() {
        let mut call = redis::cmd("EVAL");
        call.arg(format!("{CLOCK}{TELL}")).arg(0);
        for line in &case {
            call.arg((START + line.wall).as_micros());
        }
        let answers: Vec<(u64, u64)> = call.query_async(&mut connection).await.expect("the script runs");
        for (line, (time, offset)) in case.iter().zip(answers) {
            let read = (Stamp::from_micros(time), Duration::from_micros(offset));
            assert_eq!(read, (START + line.time, line.offset), "{}", line.text);
        }
    }
}
