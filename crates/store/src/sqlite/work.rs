//! What is done in a transaction, and who is told when it is done.

use std::collections::hash_map::Entry;
use std::sync::{Arc, Weak};
use std::time::Instant;

use foldhash::HashMap;
use rusqlite::Connection;
use tidegate_core::limit::anchor::Anchor;
use tidegate_core::time::Stamp;
use tokio::sync::oneshot;

use super::evict::Round;
use super::queue::Queue;
use super::space::Space;
use super::trouble::Trouble;
use crate::engine_time::EngineTime;
use crate::error::StoreError;
use crate::retention::Retention;

/// A transaction, and what the namespaces look like in it.
pub(super) struct Work<'a> {
    pub(super) connection: &'a Connection,
    /// One reading of the clock, taken within the transaction.
    pub(super) anchor: Anchor,
    pub(super) now: Stamp,
    spaces: &'a mut HashMap<i64, Space>,
    rounds: &'a mut HashMap<i64, Round>,
    pub(super) retention: Retention,
    /// Namespaces that were looked after in this transaction.
    tidied: Vec<i64>,
    pub(super) draws: u64,
    /// Why nothing new may be drawn.
    pub(super) no_room: Option<String>,
    /// Calls that are done together.
    pub(super) calls: usize,
    /// More may be too old to be kept than this transaction has forgotten.
    pub(super) is_behind: bool,
}

impl<'a> Work<'a> {
    pub(super) const fn new(
        connection: &'a Connection,
        anchor: Anchor,
        (spaces, rounds): (&'a mut HashMap<i64, Space>, &'a mut HashMap<i64, Round>),
        retention: Retention,
    ) -> Self {
        let now = anchor.latest();
        Self {
            connection,
            anchor,
            now,
            spaces,
            rounds,
            retention,
            tidied: Vec::new(),
            draws: 0,
            no_room: None,
            calls: 0,
            is_behind: false,
        }
    }

    /// Counts a draw, if there is room for one.
    pub(super) fn draws(&mut self) -> Result<(), StoreError> {
        self.draws += 1;
        self.no_room.clone().map_or(Ok(()), |what| Err(StoreError::unavailable(what)))
    }

    /// A namespace whose leases have ended that are past their deadline.
    pub(super) fn space(&mut self, namespace: i64) -> Result<&mut Space, Trouble> {
        let (connection, now) = (self.connection, self.now);
        let (is_first, calls) = (!self.tidied.contains(&namespace), self.calls);
        let space = self.untidied(namespace)?;
        if is_first {
            space.tidy(connection, now, calls)?;
        }
        Ok(space)
    }

    /// A namespace as it is: whoever tidies it himself counts what he does.
    pub(super) fn untidied(&mut self, namespace: i64) -> Result<&mut Space, Trouble> {
        if !self.tidied.contains(&namespace) {
            self.tidied.push(namespace);
        }
        let space = match self.spaces.entry(namespace) {
            Entry::Occupied(space) => space.into_mut(),
            Entry::Vacant(place) => {
                let space = place.insert(Space::open(self.connection, namespace)?);
                space.round = self.rounds.remove(&namespace).unwrap_or_default();
                space
            }
        };
        space.clock_offset = self.anchor.offset();
        Ok(space)
    }

    /// Writes all that has changed so far.
    pub(super) fn write(&mut self) -> Result<(), Trouble> {
        for namespace in &self.tidied {
            if let Some(space) = self.spaces.get_mut(namespace) {
                space.write(self.connection)?;
            }
        }
        Ok(())
    }
}

/// A job, and when it came.
pub(super) struct Asked {
    pub(super) at: Instant,
    pub(super) time: EngineTime,
    pub(super) job: Box<dyn Job>,
}

impl Asked {
    pub(super) fn new(job: Box<dyn Job>) -> Self {
        let time = EngineTime::current();
        time.wait();
        Self { at: Instant::now(), time, job }
    }
}

/// Something to be done in a transaction, with others.
pub(super) trait Job: Send {
    /// Whether somebody still waits for it, or it is to be done all the same.
    fn is_wanted(&self) -> bool;

    /// Does it. The answer is kept until the transaction is written; trouble is of the whole transaction.
    fn run(&mut self, work: &mut Work<'_>) -> Result<(), rusqlite::Error>;

    /// The transaction is written: whoever waits is told. Nobody does any more: what undoes it is answered. Whoever goes
    /// without having heard leaves it to `writer`.
    fn answer(self: Box<Self>, writer: &Arc<Queue<Asked>>) -> Option<Box<dyn Job>>;

    /// Nothing was done: whoever waits is told why. Nobody ever did: it is answered, to be tried again.
    fn fail(self: Box<Self>, error: StoreError) -> Option<Box<dyn Job>>;
}

/// A call: what is asked, how it is done, and who waits for it.
pub(super) struct Call<R, T> {
    asked: R,
    run: fn(&mut Work<'_>, &R) -> Result<T, Trouble>,
    undo: fn(&R, &T) -> Option<Box<dyn Job>>,
    /// Nobody, where it undoes something.
    waiting: Option<oneshot::Sender<Told<T>>>,
    answer: Option<Result<T, StoreError>>,
}

/// What undoes something, and who is to do it.
type Undoing = (Box<dyn Job>, Weak<Queue<Asked>>);

/// An answer on its way. Dropped unheard, it has what was done undone.
pub(super) struct Told<T> {
    answer: Option<Result<T, StoreError>>,
    undoing: Option<Undoing>,
}

impl<T> Told<T> {
    /// Hears the answer.
    pub(super) fn hear(mut self) -> Result<T, StoreError> {
        self.undoing = None;
        self.answer.take().unwrap_or_else(|| Err(StoreError::unavailable("it was heard before")))
    }
}

impl<T> Drop for Told<T> {
    fn drop(&mut self) {
        if let Some((job, writer)) = self.undoing.take()
            && let Some(writer) = writer.upgrade()
        {
            // Where there is no room for it, what was drawn returns when its deadline comes.
            drop(writer.push(Asked::new(job)));
        }
    }
}

impl<R: Send + 'static, T: Send + 'static> Call<R, T> {
    /// A call, and where its answer will be.
    pub(super) fn new(
        asked: R,
        run: fn(&mut Work<'_>, &R) -> Result<T, Trouble>,
    ) -> (Self, oneshot::Receiver<Told<T>>) {
        let (waiting, answer) = oneshot::channel();
        (Self { asked, run, undo: |_, _| None, waiting: Some(waiting), answer: None }, answer)
    }

    /// A call that nobody waits for.
    pub(super) fn unheard(asked: R, run: fn(&mut Work<'_>, &R) -> Result<T, Trouble>) -> Self {
        Self { asked, run, undo: |_, _| None, waiting: None, answer: None }
    }

    /// Undone by another call if whoever asked has gone when it is done.
    pub(super) fn or_undo(mut self, undo: fn(&R, &T) -> Option<Box<dyn Job>>) -> Self {
        self.undo = undo;
        self
    }
}

impl<R: Send + 'static, T: Send + 'static> Job for Call<R, T> {
    fn is_wanted(&self) -> bool {
        self.waiting.as_ref().is_none_or(|waiting| !waiting.is_closed())
    }

    fn run(&mut self, work: &mut Work<'_>) -> Result<(), rusqlite::Error> {
        self.answer = Some(match (self.run)(work, &self.asked) {
            Ok(answer) => Ok(answer),
            Err(Trouble::Answer(error)) => Err(error),
            Err(Trouble::Engine(error)) => return Err(error),
        });
        Ok(())
    }

    fn answer(self: Box<Self>, writer: &Arc<Queue<Asked>>) -> Option<Box<dyn Job>> {
        let Self { asked, undo, waiting, answer, .. } = *self;
        let undoing = answer.as_ref()?.as_ref().ok().and_then(|done| undo(&asked, done));
        let undoing = undoing.map(|job| (job, Arc::downgrade(writer)));
        let mut unheard = waiting?.send(Told { answer, undoing }).err()?;
        unheard.undoing.take().map(|(job, _)| job)
    }

    fn fail(mut self: Box<Self>, error: StoreError) -> Option<Box<dyn Job>> {
        let Some(waiting) = self.waiting.take() else { return Some(self) };
        // Whoever has gone does not want to know.
        drop(waiting.send(Told { answer: Some(Err(error)), undoing: None }));
        None
    }
}
