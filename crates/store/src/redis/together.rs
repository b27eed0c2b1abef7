//! Steps that go together, as one call of one script: what is said of many is said once.

use std::hash::Hash;
use std::ops::Range;
use std::sync::Arc;

use ::redis::{Cmd, RedisError, Value};
use foldhash::{HashMap, HashMapExt};
use tidegate_core::limit::lease::LeaseId;

use super::levels::Encoded;
use super::link::Link;
use super::pack::{Bytes, Packed, Unpack};
use super::places::moment_of;
use super::script::LEASE;
use super::steps::Op;
use super::trouble::Whose;
use crate::error::StoreError;

/// What a step asks for, apart from where it finds that in the call it goes with.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) op: Op,
    pub(super) encoded: Arc<Encoded>,
    pub(super) lease: LeaseId,
    /// What comes before the places of keys, and what comes behind them.
    pub(super) packed: Bytes,
    pub(super) places_at: usize,
}

/// What the script says to one of many.
#[derive(Debug)]
pub(super) struct Answer {
    all: Arc<Vec<u8>>,
    own: Range<usize>,
    /// It took what it did as so manieth of those that the same is said to.
    pub(super) nth: u16,
}

impl Answer {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.all[self.own.clone()]
    }
}

/// Why none of them was answered: it is told to each.
pub(super) enum Failed {
    Server(RedisError),
    /// What the answer is, if no script of ours gives it.
    Answer(String),
}

impl Failed {
    pub(super) fn told(&self, whose: &Whose) -> StoreError {
        match self {
            Self::Server(error) => whose.trouble(error.clone()),
            Self::Answer(what) => StoreError::Corrupt { what: what.clone() },
        }
    }
}

/// Has these steps made, one after the other, and answers each.
pub(super) async fn make(link: &Link, steps: &[&Asked]) -> Result<Vec<Answer>, Failed> {
    let Some(first) = steps.first() else { return Ok(Vec::new()) };
    let call = Call::of(first, steps);
    let answer = link.try_run(&LEASE, steps.len(), |name, what| call.command(name, what)).await;
    let apart = match answer.map_err(Failed::Server)? {
        Value::BulkString(told) => call.apart(told),
        other => Err(link.whose().unexpected(&other)),
    };
    apart.map_err(|error| match error {
        StoreError::Corrupt { what } => Failed::Answer(what),
        other => Failed::Answer(other.to_string()),
    })
}

/// A call in the making.
struct Call<'a> {
    first: &'a Encoded,
    /// What is read of every key at once, behind the clock.
    leases: Places<LeaseId>,
    drawn: Places<&'a [u8]>,
    /// What is looked at where it is needed, behind the open leases: other buckets and usage, and leases that have ended.
    others: Places<&'a [u8]>,
    moments: Places<u64>,
    /// Limits of levels, and levels as text.
    texts: Places<&'a [u8]>,
    runs: Vec<Run<'a>>,
}

/// Steps that are the same but for their leases.
struct Run<'a> {
    step: &'a Asked,
    packed: Bytes,
    members: Vec<Member>,
}

/// Which of the steps that were asked for, its lease, and its moment if it has one.
struct Member {
    number: usize,
    lease: u16,
    moment: Option<u16>,
}

/// Each of them once, in the order they came.
struct Places<T> {
    all: Vec<T>,
    by_value: HashMap<T, u16>,
}

impl<T: Copy + Eq + Hash> Places<T> {
    fn new(capacity: usize) -> Self {
        Self { all: Vec::with_capacity(capacity), by_value: HashMap::with_capacity(capacity) }
    }

    /// Where it is, counted from zero.
    fn place(&mut self, value: T) -> u16 {
        let next = short(self.all.len());
        let place = *self.by_value.entry(value).or_insert(next);
        if place == next {
            self.all.push(value);
        }
        place
    }
}

/// A place or a count. Those of one call are a few hundred.
fn short(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

impl<'a> Call<'a> {
    fn of(first: &'a Asked, steps: &[&'a Asked]) -> Self {
        let count = steps.len();
        let mut call = Self {
            first: &first.encoded,
            leases: Places::new(count),
            drawn: Places::new(count),
            others: Places::new(count),
            moments: Places::new(2),
            texts: Places::new(4),
            runs: Vec::with_capacity(count),
        };
        call.join(steps);
        call.pack();
        call
    }

    /// Puts those together that are the same but for their leases. A lease that has several steps has them in their order.
    fn join(&mut self, steps: &[&'a Asked]) {
        let mut by_step: HashMap<(usize, &[u8]), usize> = HashMap::with_capacity(steps.len());
        for (number, step) in steps.iter().enumerate() {
            let known = self.leases.all.len();
            let lease = self.leases.place(step.lease);
            let is_first = usize::from(lease) == known;
            let next = self.runs.len();
            let mut run = next;
            if is_first && matches!(step.op, Op::Draw | Op::Spend) {
                run = *by_step.entry((Arc::as_ptr(&step.encoded).addr(), &step.packed)).or_insert(next);
            }
            if run == next {
                self.runs.push(Run { step, packed: Bytes::new(), members: Vec::new() });
            }
            let moment = moment_of(step.lease).map(|moment| self.moments.place(moment));
            self.runs[run].members.push(Member { number, lease, moment });
        }
    }

    /// Says each of them once. Lua counts from one.
    fn pack(&mut self) {
        // What a step that brings no text points at.
        self.texts.place(&[]);
        let texts_at = short(self.runs.len()) + 2;
        let drawn_at = short(self.leases.all.len()) + 2;
        for run in &mut self.runs {
            let (step, encoded) = (run.step, &*run.step.encoded);
            let (head, tail) = step.packed.split_at(step.places_at);
            let mut packed = Packed::default();
            packed.bytes(head);
            for (level, limits) in encoded.limits.iter().enumerate() {
                let (bucket, usage) = (encoded.buckets[level].as_bytes(), encoded.usage[level].as_bytes());
                let is_drawn = matches!(step.op, Op::Draw | Op::Spend);
                let others = &mut self.others;
                packed.short(if is_drawn {
                    self.drawn.place(bucket) + drawn_at
                } else {
                    others.place(bucket) + 1
                });
                packed.short(if step.op == Op::Draw { 0 } else { others.place(usage) + 1 });
                packed.short(self.texts.place(limits) + texts_at);
            }
            let text = if step.op == Op::Draw { encoded.text.as_bytes() } else { &[] };
            packed.bytes(tail).short(self.texts.place(text) + texts_at);
            run.packed = packed.0;
        }
    }

    fn command(&self, name: &str, what: &str) -> Cmd {
        let (leases, drawn) = (self.leases.all.len(), self.drawn.all.len());
        let (others, moments) = (self.others.all.len(), self.moments.all.len());
        let mut head = Packed::default();
        head.short(short(self.runs.len())).short(short(leases + drawn));
        for run in &self.runs {
            head.short(short(run.members.len()));
            for Member { lease, moment, .. } in &run.members {
                head.short(lease + 2).short(moment.map_or(0, |moment| moment + short(others) + 1));
            }
        }
        let texts = || {
            let runs = self.runs.iter().map(|run| run.packed.as_slice());
            runs.chain(self.texts.all.iter().copied())
        };
        let keys = || self.drawn.all.iter().chain(&self.others.all).copied();
        let known = keys().chain(texts()).map(<[u8]>::len).sum::<usize>();
        let count = 2 + leases + drawn + others + moments;
        let mut call =
            Cmd::with_capacity(count + self.runs.len() + self.texts.all.len() + 4, known + 96 * (leases + 4));
        call.arg(name).arg(what).arg(count).arg(&self.first.clock);
        let mut key = String::new();
        for lease in &self.leases.all {
            self.first.lease(*lease, &mut key);
            call.arg(&key);
        }
        for bucket in &self.drawn.all {
            call.arg(*bucket);
        }
        call.arg(&self.first.open_leases);
        for other in &self.others.all {
            call.arg(*other);
        }
        for moment in &self.moments.all {
            self.first.moment(*moment, &mut key);
            call.arg(&key);
        }
        call.arg(&head.0[..]);
        for text in texts() {
            call.arg(text);
        }
        call
    }

    /// The answer to all, taken apart. Those that took longer are told at the beginning, and answered at the end.
    fn apart(&self, told: Vec<u8>) -> Result<Vec<Answer>, StoreError> {
        let all = Arc::new(told);
        let mut read = Unpack::new(&all, "an answer of the script");
        let asked: Vec<usize> =
            self.runs.iter().flat_map(|run| &run.members).map(|member| member.number).collect();
        let mut late = Vec::new();
        for _ in 0..read.short()? {
            late.push(usize::from(read.short()?));
        }
        let is_late = |number: &usize| late.contains(number);
        let mut order = (1..=asked.len()).filter(|number| !is_late(number)).chain(late.iter().copied());
        let mut answers: Vec<Option<Answer>> = asked.iter().map(|_| None).collect();
        while !read.is_empty() {
            let count = read.short()?;
            let size = usize::try_from(read.word()?).unwrap_or(usize::MAX);
            let start = all.len() - read.rest().len();
            read.skip(size)?;
            for nth in 1..=count {
                let number = order.next().and_then(|number| asked.get(number.checked_sub(1)?));
                let number = number.ok_or_else(|| read.corrupt("a step that was not asked for"))?;
                answers[*number] = Some(Answer { all: Arc::clone(&all), own: start..start + size, nth });
            }
        }
        let answered = answers.into_iter().collect::<Option<Vec<_>>>();
        answered.ok_or_else(|| read.corrupt("a step without an answer"))
    }
}
