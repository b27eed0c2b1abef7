//! The script's arithmetic, replayed against core: the golden vectors, and numbers that no double holds.

use std::fmt::Write as _;
use std::time::Duration;

use tidegate_core::bucket::{AMOUNT_MAX, Bucket, PERIOD_MAX, Shape, Span};
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;

use crate::kit::clock::cases;
use crate::kit::engine::{address, skip_without};
use crate::kit::redis::{REDIS, connect};
use crate::kit::words::START;

const VECTORS: &str = include_str!("../../../../core/vectors/buckets.txt");
const CLOCK: &str = include_str!("../../../src/redis/script/clock.lua");
const BUCKET: &str = include_str!("../../../src/redis/script/bucket.lua");
/// Does what it is told, one line after the other, and answers each with the bucket as it is then.
const REPLAY: &str = "
local r, answers = nil, {}
for i = 1, #ARGV do
  local words = {}
  for word in string.gmatch(ARGV[i], '%S+') do words[#words + 1] = tonumber(word) or word end
  local what, a, b, c, d, e = unpack(words)
  local told = 'done'
  if what == 'bucket' then
    r = { 0, 0, 0, 0, 0, a, b, c }
  elseif what == 'shape' then
    if r[6] ~= c or r[7] ~= d or r[8] ~= e then reshape(r, c, d, e, a, b) end
  elseif what == 'take' then
    local s, u, p = after(r, c, a, b)
    told = c <= r[8] and is_there(r, s, u, p, a, b) and 'ok' or 'no'
    if told == 'ok' then r[1], r[2], r[3] = s, u, p end
  elseif c ~= 0 then
    adjust(r, what == 'debit' and c or -c, a, b)
  end
  answers[i] = string.format('%s %.0f %.0f %.0f', told, r[1], r[2], r[3])
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

fn state(told: &str, full_at: Span) -> String {
    format!("{told} {} {}", time(full_at.whole), full_at.part)
}

#[tokio::test]
async fn every_line_of_the_vectors_is_decided_as_core_decides_it() {
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
        let told = match words[arrow + 1] {
            "wait" | "never" => "no",
            told => told,
        };
        let now = time(number(1));
        lines.push(match words[0] {
            "shape" => format!("shape {now} {} {} {}", words[2], words[3], words[4]),
            what => format!("{what} {now} {}", words[2]),
        });
        expected.push(state(told, Span { whole: number(arrow + 2), part: number(arrow + 3) }));
    }
    assert!(lines.len() > 400, "{} lines", lines.len());
    for ((line, answer), expected) in lines.iter().zip(replay(&lines).await).zip(expected) {
        // A debit of nothing is not made: it would only move a full bucket to now.
        if line.starts_with("debit") && line.ends_with(" 0") {
            continue;
        }
        assert_eq!(answer, expected, "{line}");
    }
}

#[tokio::test]
async fn spans_of_centuries_and_rules_that_change_are_exact_beyond_what_a_double_holds() {
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
            let mut told = "done";
            wide += u32::from(u128::from(units) * rule.period().as_micros() >= 1 << 53);
            match random.below(5) {
                0 | 1 => {
                    told = if bucket.take(&rule, units, at).is_ok() { "ok" } else { "no" };
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
            expected.push(state(told, bucket.full_at()));
        }
    }
    assert!(wide > 300, "{wide} products are beyond a double");
    for (number, (answer, expected)) in replay(&lines).await.into_iter().zip(expected).enumerate() {
        let story = lines[..=number].iter().rev().take_while(|line| !line.starts_with("bucket"));
        assert_eq!(answer, expected, "{:?}", story.collect::<Vec<_>>());
    }
}

/// Returns the time and the offset at each reading of the clock.
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
            let told = (Stamp::from_micros(time), Duration::from_micros(offset));
            assert_eq!(told, (START + line.time, line.offset), "{}", line.text);
        }
    }
}
