//! Steps that go together, as one call of one script: what is said of many is said once.

use std::ops::Range;
use std::sync::Arc;

use ::redis::{Cmd, RedisError, Value};
use foldhash::{HashMap, HashMapExt};

use super::levels::Encoded;
use super::link::Link;
use super::pack::{Packed, Unpack};
use super::script::LEASE;
use super::steps::Op;
use super::trouble::Whose;
use crate::error::StoreError;

/// What a step asks for, apart from where it finds that in the call it goes with.
#[derive(Debug)]
pub(super) struct Asked {
    pub(super) op: Op,
    pub(super) encoded: Arc<Encoded>,
    /// The key of the lease.
    pub(super) lease: String,
    /// What comes before the places of keys, and what comes behind them.
    pub(super) packed: Vec<u8>,
    pub(super) places_at: usize,
}

/// What the script says to one of many.
#[derive(Debug)]
pub(super) struct Answer {
    all: Arc<Vec<u8>>,
    own: Range<usize>,
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
    let call = Call::of(steps);
    let answer = link.try_run(&LEASE, steps.len(), |name, what| call.command(name, what)).await;
    let apart = match answer.map_err(Failed::Server)? {
        Value::BulkString(told) => apart(told, steps.len()),
        other => Err(link.whose().unexpected(&other)),
    };
    apart.map_err(|error| match error {
        StoreError::Corrupt { what } => Failed::Answer(what),
        other => Failed::Answer(other.to_string()),
    })
}

/// The answer to all, taken apart. Those that took longer are told at the beginning, and answered at the end.
fn apart(told: Vec<u8>, count: usize) -> Result<Vec<Answer>, StoreError> {
    let all = Arc::new(told);
    let mut read = Unpack::new(&all, "an answer of the script");
    let mut order: Vec<Option<Range<usize>>> = vec![None; count];
    let late = (0..read.short()?).map(|_| read.short().map(usize::from)).collect::<Result<Vec<_>, _>>()?;
    let is_late = |number: &usize| late.contains(number);
    for number in (1..=count).filter(|number| !is_late(number)).chain(late.iter().copied()) {
        let size = usize::try_from(read.word()?).unwrap_or(usize::MAX);
        let start = all.len() - read.rest().len();
        read.skip(size)?;
        let own = number.checked_sub(1).and_then(|place| order.get_mut(place));
        *own.ok_or_else(|| read.corrupt("a step that was not asked for"))? = Some(start..start + size);
    }
    let answer = |own: Option<Range<usize>>| {
        let own = own.ok_or_else(|| read.corrupt("a step without an answer"))?;
        Ok(Answer { all: Arc::clone(&all), own })
    };
    if !read.is_empty() {
        return Err(read.corrupt("it goes on behind its end"));
    }
    order.into_iter().map(answer).collect()
}

/// A call in the making.
struct Call<'a> {
    /// What is read of every key at once: the clock, leases, and the buckets that are drawn from.
    read: Places<'a>,
    /// The open leases, and what is looked at where it is needed.
    others: Places<'a>,
    /// Limits of levels, and levels as text.
    texts: Places<'a>,
    steps: Vec<Vec<u8>>,
}

/// Each of them once, in the order they came.
struct Places<'a> {
    all: Vec<&'a [u8]>,
    by_value: HashMap<&'a [u8], u16>,
}

impl<'a> Places<'a> {
    fn new(first: &'a [u8], capacity: usize) -> Self {
        let mut places =
            Self { all: Vec::with_capacity(capacity), by_value: HashMap::with_capacity(capacity) };
        places.place(first);
        places
    }

    /// Where it is, counted from zero.
    fn place(&mut self, value: &'a [u8]) -> u16 {
        let next = u16::try_from(self.all.len()).unwrap_or(u16::MAX);
        let place = *self.by_value.entry(value).or_insert(next);
        if place == next {
            self.all.push(value);
        }
        place
    }
}

impl<'a> Call<'a> {
    fn of(steps: &[&'a Asked]) -> Self {
        let (mut clock, mut open): (&[u8], &[u8]) = (&[], &[]);
        if let Some(first) = steps.first() {
            (clock, open) = (first.encoded.clock.as_bytes(), first.encoded.open_leases.as_bytes());
        }
        let count = steps.len();
        let mut call = Self {
            read: Places::new(clock, 1 + 2 * count),
            others: Places::new(open, 1 + 2 * count),
            // What a step that brings no text points at.
            texts: Places::new(&[], 4),
            steps: Vec::with_capacity(count),
        };
        for step in steps {
            call.add(step, count);
        }
        call
    }

    fn add(&mut self, step: &'a Asked, count: usize) {
        let encoded = &*step.encoded;
        // Lua counts from one. Texts come behind the head and the steps.
        let text_at = |place: u16| place.saturating_add(u16::try_from(count).unwrap_or(u16::MAX)) + 2;
        let (head, tail) = step.packed.split_at(step.places_at);
        let mut packed = Packed(Vec::with_capacity(step.packed.len() + 8 + 6 * encoded.limits.len()));
        packed.bytes(head).short(self.read.place(step.lease.as_bytes()) + 1);
        for (level, limits) in encoded.limits.iter().enumerate() {
            let bucket = encoded.buckets[level].as_bytes();
            let is_drawn = matches!(step.op, Op::Draw | Op::Spend);
            packed.short(if is_drawn { self.read.place(bucket) + 1 } else { self.others.place(bucket) });
            let is_counted = step.op != Op::Draw;
            packed.short(if is_counted { self.others.place(encoded.usage[level].as_bytes()) } else { 0 });
            packed.short(text_at(self.texts.place(limits)));
        }
        let text = if step.op == Op::Draw { encoded.text.as_bytes() } else { &[] };
        packed.bytes(tail).short(text_at(self.texts.place(text)));
        self.steps.push(packed.0);
    }

    fn command(&self, name: &str, what: &str) -> Cmd {
        let keys = || self.read.all.iter().chain(&self.others.all);
        let args = || self.steps.iter().map(Vec::as_slice).chain(self.texts.all.iter().copied());
        let (count, size) = keys()
            .copied()
            .chain(args())
            .fold((4, what.len() + 64), |(count, size), arg| (count + 1, size + arg.len()));
        let mut call = Cmd::with_capacity(count, size);
        call.arg(name).arg(what).arg(self.read.all.len() + self.others.all.len());
        for key in keys() {
            call.arg(*key);
        }
        let mut head = Packed(Vec::with_capacity(4));
        let short = |count: usize| u16::try_from(count).unwrap_or(u16::MAX);
        head.short(short(self.steps.len())).short(short(self.read.all.len() - 1));
        call.arg(head.0);
        for arg in args() {
            call.arg(arg);
        }
        call
    }
}
