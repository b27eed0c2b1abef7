//! One batch of steps as one call of the lease script: encoding, and splitting of the reply.
//! Keys, limits and levels that several steps share are sent once, and equal draws are sent as one step.

use std::hash::Hash;
use std::ops::Range;
use std::sync::Arc;

use ::redis::{Cmd, ErrorKind, RedisError};
use foldhash::{HashMap, HashMapExt};
use tidegate_core::limit::lease::LeaseId;

use super::connection::Connection;
use super::keyspace::moment_of;
use super::levels::EncodedLevels;
use super::lua_codec::{Bytes, Packer, Unpacker};
use super::script::LEASE;
use super::steps::Op;
use crate::error::StoreError;

/// A step, encoded except for the indices of its keys, which depend on the batch that it is sent in.
#[derive(Debug)]
pub(super) struct EncodedStep {
    pub(super) op: Op,
    pub(super) encoded: Arc<EncodedLevels>,
    pub(super) lease: LeaseId,
    /// The bytes before the indices of keys, and those after them.
    pub(super) packed: Bytes,
    pub(super) indices_at: usize,
}

/// The script's reply to one step.
#[derive(Debug)]
pub(super) struct StepReply {
    all: Arc<Vec<u8>>,
    own: Range<usize>,
    /// The position of this step among the equal steps that share the reply, from 1.
    pub(super) nth: u16,
}

impl StepReply {
    pub(super) fn bytes(&self) -> &[u8] {
        &self.all[self.own.clone()]
    }
}

/// Runs these steps in order, in one call, and returns the reply to each. An error is that of every step.
pub(super) async fn send_batch(
    connection: &Connection,
    steps: &[&EncodedStep],
) -> Result<Vec<StepReply>, RedisError> {
    let Some(first) = steps.first() else { return Ok(Vec::new()) };
    let call = BatchCall::new(first, steps);
    let reply = connection.try_run(&LEASE, steps.len(), |name, what| call.command(name, what)).await?;
    call.split_reply(::redis::from_redis_value(reply)?).map_err(|error| {
        let kind = ErrorKind::UnexpectedReturnType;
        RedisError::from((kind, "the reply to a batch of steps", error.to_string()))
    })
}

/// A script call that is being built.
struct BatchCall<'a> {
    first: &'a EncodedLevels,
    /// Keys that the script reads in one `MGET`, after the clock.
    leases: Interner<LeaseId>,
    drawn: Interner<&'a [u8]>,
    /// Keys that are read only if needed, after the open leases: other buckets, usage and ended leases.
    others: Interner<&'a [u8]>,
    moments: Interner<u64>,
    /// The limits of levels, and levels as text.
    texts: Interner<&'a [u8]>,
    groups: Vec<StepGroup<'a>>,
}

/// Steps that are equal except for their leases.
struct StepGroup<'a> {
    step: &'a EncodedStep,
    packed: Bytes,
    members: Vec<Member>,
}

/// The position of a step in the batch, the index of its lease, and that of its moment if it has one.
struct Member {
    number: usize,
    lease: u16,
    moment: Option<u16>,
}

/// Distinct values, in insertion order.
struct Interner<T> {
    all: Vec<T>,
    by_value: HashMap<T, u16>,
}

impl<T: Copy + Eq + Hash> Interner<T> {
    fn new(capacity: usize) -> Self {
        Self { all: Vec::with_capacity(capacity), by_value: HashMap::with_capacity(capacity) }
    }

    /// The index of a value, which is added if it is new.
    fn index_of(&mut self, value: T) -> u16 {
        let next = short(self.all.len());
        let index = *self.by_value.entry(value).or_insert(next);
        if index == next {
            self.all.push(value);
        }
        index
    }
}

/// An index or a count. One call has a few hundred of them.
fn short(count: usize) -> u16 {
    u16::try_from(count).unwrap_or(u16::MAX)
}

impl<'a> BatchCall<'a> {
    fn new(first: &'a EncodedStep, steps: &[&'a EncodedStep]) -> Self {
        let count = steps.len();
        let mut call = Self {
            first: &first.encoded,
            leases: Interner::new(count),
            drawn: Interner::new(count),
            others: Interner::new(count),
            moments: Interner::new(2),
            texts: Interner::new(4),
            groups: Vec::with_capacity(count),
        };
        call.group_steps(steps);
        call.pack();
        call
    }

    /// Groups draws and spends that are equal except for their leases. Steps of the same lease keep their
    /// order.
    fn group_steps(&mut self, steps: &[&'a EncodedStep]) {
        let mut by_step: HashMap<(usize, &[u8]), usize> = HashMap::with_capacity(steps.len());
        for (number, step) in steps.iter().enumerate() {
            let known = self.leases.all.len();
            let lease = self.leases.index_of(step.lease);
            let is_first = usize::from(lease) == known;
            let next = self.groups.len();
            let mut group = next;
            if is_first && matches!(step.op, Op::Draw | Op::Spend) {
                group = *by_step.entry((Arc::as_ptr(&step.encoded).addr(), &step.packed)).or_insert(next);
            }
            if group == next {
                self.groups.push(StepGroup { step, packed: Bytes::new(), members: Vec::new() });
            }
            let moment = moment_of(step.lease).map(|moment| self.moments.index_of(moment));
            self.groups[group].members.push(Member { number, lease, moment });
        }
    }

    /// Encodes each group once. Lua counts from one.
    fn pack(&mut self) {
        // Steps without a text refer to this one.
        self.texts.index_of(&[]);
        let texts_at = short(self.groups.len()) + 2;
        let drawn_at = short(self.leases.all.len()) + 2;
        for group in &mut self.groups {
            let (step, encoded) = (group.step, &*group.step.encoded);
            let (head, tail) = step.packed.split_at(step.indices_at);
            let mut packed = Packer::default();
            packed.bytes(head);
            for (level, limits) in encoded.limits.iter().enumerate() {
                let (bucket, usage) = (encoded.buckets[level].as_bytes(), encoded.usage[level].as_bytes());
                let is_drawn = matches!(step.op, Op::Draw | Op::Spend);
                let others = &mut self.others;
                packed.short(if is_drawn {
                    self.drawn.index_of(bucket) + drawn_at
                } else {
                    others.index_of(bucket) + 1
                });
                packed.short(if step.op == Op::Draw { 0 } else { others.index_of(usage) + 1 });
                packed.short(self.texts.index_of(limits) + texts_at);
            }
            let text = if step.op == Op::Draw { encoded.text.as_bytes() } else { &[] };
            packed.bytes(tail).short(self.texts.index_of(text) + texts_at);
            group.packed = packed.0;
        }
    }

    fn command(&self, name: &str, what: &str) -> Cmd {
        let (leases, drawn) = (self.leases.all.len(), self.drawn.all.len());
        let (others, moments) = (self.others.all.len(), self.moments.all.len());
        let mut head = Packer::default();
        head.short(short(self.groups.len())).short(short(leases + drawn));
        for group in &self.groups {
            head.short(short(group.members.len()));
            for Member { lease, moment, .. } in &group.members {
                head.short(lease + 2).short(moment.map_or(0, |moment| moment + short(others) + 1));
            }
        }
        let texts = || {
            let groups = self.groups.iter().map(|group| group.packed.as_slice());
            groups.chain(self.texts.all.iter().copied())
        };
        let keys = || self.drawn.all.iter().chain(&self.others.all).copied();
        let known = keys().chain(texts()).map(<[u8]>::len).sum::<usize>();
        let count = 2 + leases + drawn + others + moments;
        let mut call = Cmd::with_capacity(
            count + self.groups.len() + self.texts.all.len() + 4,
            known + 96 * (leases + 4),
        );
        call.arg(name).arg(what).arg(count).arg(&self.first.clock);
        for lease in &self.leases.all {
            call.arg(format!("{}{lease}", self.first.leases));
        }
        for bucket in &self.drawn.all {
            call.arg(*bucket);
        }
        call.arg(&self.first.open_leases);
        for other in &self.others.all {
            call.arg(*other);
        }
        for moment in &self.moments.all {
            call.arg(format!("{}{moment:x}", self.first.moments));
        }
        call.arg(&head.0[..]);
        for text in texts() {
            call.arg(text);
        }
        call
    }

    /// Splits the reply by step. Steps that left the fast path are listed first and have their replies last.
    fn split_reply(&self, reply: Vec<u8>) -> Result<Vec<StepReply>, StoreError> {
        let all = Arc::new(reply);
        let mut read = Unpacker::new(&all, "the script's reply");
        let numbers: Vec<usize> =
            self.groups.iter().flat_map(|group| &group.members).map(|member| member.number).collect();
        let mut slow = Vec::new();
        for _ in 0..read.short()? {
            slow.push(usize::from(read.short()?));
        }
        let is_slow = |number: &usize| slow.contains(number);
        let mut order = (1..=numbers.len()).filter(|number| !is_slow(number)).chain(slow.iter().copied());
        let mut answers: Vec<Option<StepReply>> = numbers.iter().map(|_| None).collect();
        while !read.is_empty() {
            let count = read.short()?;
            let size = usize::try_from(read.word()?).unwrap_or(usize::MAX);
            let start = all.len() - read.rest().len();
            read.skip(size)?;
            for nth in 1..=count {
                let number = order.next().and_then(|number| numbers.get(number.checked_sub(1)?));
                let number = number.ok_or_else(|| read.corrupt("a step that was not requested"))?;
                answers[*number] = Some(StepReply { all: Arc::clone(&all), own: start..start + size, nth });
            }
        }
        let answered = answers.into_iter().collect::<Option<Vec<_>>>();
        answered.ok_or_else(|| read.corrupt("a step without a reply"))
    }
}
