//! Random healthy upstreams: two minutes after the start, `auto` and `host` use nearly all of an unknown
//! limit.
//!
//! The cases come from a fixed seed, so that every run tests the same ones. A case that fails is printed as a
//! scenario file for `tidegate lab run --scenario FILE`.

use std::fmt::Write as _;
use std::num::NonZero;

use tidegate_lab::{Scenario, Score, ScoreOptions, Strategy, score};

const CASES: u64 = 32;
const SEED: u64 = 20_261_116;
/// Seconds of a run; the second half is judged.
const SECONDS: u32 = 240;
/// The share of `capacity × (1 − errors)` that succeeds.
const BUCKET_MIN: f64 = 0.90;
const WINDOW_MIN: f64 = 0.75;

/// SplitMix64.
struct Random(u64);

impl Random {
    /// Uniform in `[0, 1)`.
    fn share(&mut self) -> f64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut bits = self.0;
        bits = (bits ^ (bits >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        bits = (bits ^ (bits >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        f64::from(u32::try_from((bits ^ (bits >> 31)) >> 32).expect("32 bits")) / 4_294_967_296.0
    }

    /// Log-uniform between the bounds.
    fn scale(&mut self, least: f64, most: f64) -> f64 {
        least * (most / least).powf(self.share())
    }
}

/// The scenario file of the next case.
fn case(number: u64, random: &mut Random) -> String {
    let rate = random.scale(2.0, 5_000.0);
    let latency = random.scale(0.01, 20.0).min(1_000.0 / rate);
    let (errors, sigma) = (0.02 * random.share(), 0.2 + 0.8 * random.share());
    // A third of the buckets hold one request.
    let depth = 60.0 * (random.share() * 1.5 - 0.5).max(0.0) * random.share();
    let is_window = random.share() < 0.4;
    let retry_after = if random.share() < 0.5 { "seconds" } else { "none" };
    // Whole seconds, so that a window ends where a bin of the measures does.
    let length = random.scale(1.0, 60.0).round();
    let upstream = if is_window {
        format!("{{ window = {{ length = {length:.0} }} }}")
    } else {
        format!("{{ bucket = {{ depth = {depth:.2} }} }}")
    };
    let workers = (4.0 * rate * latency).clamp(32.0, 4_000.0);
    format!(
        "[[scenario]]\nname = \"{number}\"\nupstream = {upstream}\ncapacity = [[0, {rate:.3}]]\nseconds = {SECONDS}\n\
         workers = {workers:.0}\nlatency = {latency:.4}\nsigma = {sigma:.2}\nerrors = {errors:.4}\n\
         retry-after = \"{retry_after}\"\n"
    )
}

/// The failure of a case, if any.
fn complaint(text: &str, score: &Score) -> Option<String> {
    let scenario = Scenario::parse(text).expect("cases are valid").remove(0);
    let least = if text.contains("window") { WINDOW_MIN } else { BUCKET_MIN };
    let used = score.measures.goodput_late / (1.0 - scenario.errors);
    (used < least).then(|| {
        format!(
            "{} used {:.1} % of capacity × (1 − errors) in the second half, at least {:.0} % wanted; \
             goodput {:.3}, 429s {:.2} %, p99 {:.2} s, settled after {:.1} s, in the scenario\n{text}",
            score.strategy.name(),
            100.0 * used,
            100.0 * least,
            score.measures.goodput,
            100.0 * score.measures.rejected,
            score.measures.p99_s,
            score.measures.settled_s[0],
        )
    })
}

#[test]
fn healthy_upstreams_are_used() {
    let mut random = Random(SEED);
    let cases: Vec<String> = (1..=CASES).map(|number| case(number, &mut random)).collect();
    let scenarios: Vec<Scenario> =
        cases.iter().flat_map(|text| Scenario::parse(text).expect("cases are valid")).collect();
    let strategies = vec![Strategy::Auto, Strategy::Host];
    let options =
        ScoreOptions { strategies: strategies.clone(), seeds: NonZero::new(1), ..ScoreOptions::default() };
    let scores = score(&scenarios, &options, &|_| {});
    let mut failed = String::new();
    for (text, scores) in cases.iter().zip(scores.chunks(strategies.len())) {
        for complaint in scores.iter().filter_map(|score| complaint(text, score)) {
            let _ = writeln!(failed, "{complaint}");
        }
    }
    assert!(failed.is_empty(), "{failed}");
}
