//! A small deterministic fuzzer that mutates seeds.
//!
//! Some of its inputs become seeds themselves, so that mutations accumulate. The caller sets the number of
//! inputs; with `TIDEGATE_DEEP` set it is multiplied by a thousand.

use std::panic::{AssertUnwindSafe, catch_unwind};

use tidegate_core::random::Random;

/// The most seeds taken from inputs; new ones replace random old ones.
const POOL_MAX: usize = 512;
/// Longer inputs are tried but do not become seeds, because they would slow down all their descendants.
const SEED_MAX: usize = 1_500;
/// The longest input.
const LENGTH_MAX: usize = 9_000;

/// Makes inputs from seeds.
pub(crate) struct Mutator {
    random: Random,
    seeds: Vec<Vec<u8>>,
    pool: Vec<Vec<u8>>,
    tokens: &'static [&'static str],
}

impl Mutator {
    pub(crate) fn new(seed: u64, seeds: &[&str], tokens: &'static [&'static str]) -> Self {
        let seeds = seeds.iter().map(|seed| seed.as_bytes().to_vec()).collect();
        Self { random: Random::seeded(seed), seeds, pool: Vec::new(), tokens }
    }

    /// Runs `check` on `inputs` inputs (a thousand times as many with `TIDEGATE_DEEP`), and shows a failing
    /// one.
    pub(crate) fn run(mut self, inputs: u64, check: impl Fn(&[u8], u64)) {
        let deep = if std::env::var_os("TIDEGATE_DEEP").is_some() { 1_000 } else { 1 };
        for number in 0..inputs * deep {
            let input = self.next_input();
            let salt = self.random.below(u64::MAX);
            let outcome = catch_unwind(AssertUnwindSafe(|| check(&input, salt)));
            assert!(outcome.is_ok(), "input {number}, salt {salt}: {:?}", input.escape_ascii().to_string());
            if input.len() <= SEED_MAX && self.below(64) == 0 {
                let at = self.below(POOL_MAX);
                if self.pool.len() < POOL_MAX { self.pool.push(input) } else { self.pool[at] = input }
            }
        }
    }

    fn next_input(&mut self) -> Vec<u8> {
        let mut input = self.pick();
        for _ in 0..=self.below(6) {
            self.change(&mut input);
        }
        input.truncate(LENGTH_MAX);
        input
    }

    /// A seed, or an input that became one.
    fn pick(&mut self) -> Vec<u8> {
        let from = if self.pool.is_empty() || self.below(2) == 0 { &self.seeds } else { &self.pool };
        let at = usize::try_from(self.random.below(from.len() as u64)).expect("an index");
        from[at].clone()
    }

    fn change(&mut self, input: &mut Vec<u8>) {
        let (from, to) = self.range(input.len());
        match self.below(10) {
            0 => input.splice(from..from, [self.byte()]).for_each(drop),
            1 => drop(input.drain(from..to)),
            2 if from < input.len() => input[from] ^= 1 << self.below(8),
            3 if from < input.len() => input[from] = self.byte(),
            4 => input[from..to].reverse(),
            5 => {
                let again = input[from..to].to_vec();
                input.splice(to..to, again).for_each(drop);
            }
            6 => {
                let other = self.pick();
                let (start, end) = self.range(other.len());
                input.splice(from..to, other[start..end].iter().copied()).for_each(drop);
            }
            7 => input[from..to].iter_mut().for_each(|byte| *byte ^= 0x20),
            8 => {
                let most = if self.below(50) == 0 { 9_000 } else { 70 };
                let long = vec![self.byte(); self.below(most)];
                input.splice(from..from, long).for_each(drop);
            }
            _ => {
                let token = self.tokens[self.below(self.tokens.len())].bytes();
                let to = if self.below(2) == 0 { from } else { to };
                input.splice(from..to, token).for_each(drop);
            }
        }
    }

    /// A range within the input, mostly a short one.
    fn range(&mut self, length: usize) -> (usize, usize) {
        let from = self.below(length + 1);
        let most = if self.below(4) == 0 { length } else { 8 };
        (from, length.min(from + self.below(most + 1)))
    }

    fn byte(&mut self) -> u8 {
        const COMMON: &[u8] = b"0123456789-.,;:=\"/@[]%\\ \t\nsm\xff\0";
        let at = self.below(COMMON.len());
        if self.below(2) == 0 { COMMON[at] } else { u8::try_from(self.below(256)).expect("a byte") }
    }

    fn below(&mut self, span: usize) -> usize {
        usize::try_from(self.random.below(span as u64)).expect("below a usize")
    }
}
