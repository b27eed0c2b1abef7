//! Who waits, in which order, and who keeps the timer. No runtime, no clock, no lock of its own.
//!
//! First come, first served: the head is never overtaken, so a costly request cannot starve. Whoever changes
//! anything pumps: while the head is admitted it is granted its charge, which stays here until its owner looks.
//! The owner need not be polled for that, so a task that is busy elsewhere blocks only what it was granted.
//!
//! Waiters live in a slab and are linked by index, so leaving from the middle is as cheap as from the front.
//! Wakers come in and go out by value: they are cloned before the lock and woken or dropped after it.

use std::task::Waker;
use std::time::Duration;

use tidegate_core::cost::{Charge, Cost};
use tidegate_core::refused::Refused;
use tidegate_core::time::Instant;
use tidegate_core::verdict::{Gate, Wait};

use crate::keeper::{Home, Keeper};

/// No waiter.
const NIL: u32 = u32::MAX;
/// Places examined for an unseen grant by each newcomer.
const EXAMINED_MAX: usize = 8;
/// A slab larger than this is given back when the last waiter has gone.
const SLAB_KEPT: usize = 64;

/// A place in the queue. Good until it is redeemed or given up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Ticket {
    index: u32,
    serial: u32,
}

/// The waiters of one throttle.
#[derive(Debug)]
pub(crate) struct Queue {
    slab: Vec<Waiter>,
    free: u32,
    head: u32,
    tail: u32,
    waiting: u32,
    /// Those in line with a deadline of their own.
    pub(crate) hurried: u32,
    /// Granted or refused, and not yet seen by their owners.
    unseen: u32,
    /// Why the head waits, as of the last time it was asked.
    blocked: Option<Wait>,
    pub(crate) keeper: Option<Keeper>,
    /// Keepers so far: each has a number of its own.
    keepers: u32,
    serial: u32,
    /// Those who have joined so far, each once.
    arrived: u64,
    /// Where the search for unseen grants goes on.
    cursor: usize,
}

#[derive(Debug)]
struct Waiter {
    place: Place,
    waker: Option<Waker>,
    home: Home,
    deadline: Option<Instant>,
    /// When it came, in the count of all who came: the line is in this order.
    arrival: u64,
    serial: u32,
    previous: u32,
    next: u32,
}

#[derive(Debug)]
enum Place {
    /// In line.
    Waiting(Cost),
    /// It was its turn; the charge is its owner's to fetch. Stamped by whoever first found it unseen.
    Granted(Charge, Option<Instant>),
    /// Turned away; its owner does not know yet.
    Refused(Refused),
    /// On the free list.
    Free,
}

/// What became of a place in the queue.
#[derive(Debug)]
pub(crate) enum Fate {
    Granted(Charge),
    Refused(Refused),
}

impl Fate {
    pub(crate) fn known(self) -> Result<Charge, Refused> {
        match self {
            Self::Granted(charge) => Ok(charge),
            Self::Refused(refused) => Err(refused),
        }
    }
}

impl Queue {
    pub(crate) const fn new() -> Self {
        Self {
            slab: Vec::new(),
            free: NIL,
            head: NIL,
            tail: NIL,
            waiting: 0,
            hurried: 0,
            unseen: 0,
            blocked: None,
            keeper: None,
            keepers: 0,
            serial: 0,
            arrived: 0,
            cursor: 0,
        }
    }

    /// Callers in line.
    pub(crate) const fn waiting(&self) -> u32 {
        self.waiting
    }

    /// The head's cost.
    pub(crate) fn head(&self) -> Option<Cost> {
        match self.slab.get(self.head as usize)?.place {
            Place::Waiting(cost) => Some(cost),
            Place::Granted(..) | Place::Refused(_) | Place::Free => {
                unreachable!("whoever is granted or refused leaves the line")
            }
        }
    }

    pub(crate) fn is_head(&self, ticket: Ticket) -> bool {
        self.head == ticket.index && self.waiter(ticket).is_some()
    }

    /// Joins the line: at its end, or where one belongs that came at `arrival` and has been out since.
    pub(crate) fn push(
        &mut self,
        cost: Cost,
        home: Home,
        deadline: Option<Instant>,
        waker: Waker,
        arrival: Option<u64>,
    ) -> Ticket {
        self.serial = self.serial.wrapping_add(1);
        let (previous, next) = match arrival {
            Some(arrival) => self.gap_of(arrival),
            None => (self.tail, NIL),
        };
        let arrival = arrival.unwrap_or_else(|| {
            self.arrived += 1;
            self.arrived
        });
        let waiter = Waiter {
            place: Place::Waiting(cost),
            waker: Some(waker),
            home,
            deadline,
            arrival,
            serial: self.serial,
            previous,
            next,
        };
        let index = self.store(waiter);
        if let Some(waiter) = self.slab.get_mut(previous as usize) {
            waiter.next = index;
        } else {
            self.head = index;
            // What was said to the old head does not hold for the new one.
            self.blocked = None;
        }
        match self.slab.get_mut(next as usize) {
            Some(waiter) => waiter.previous = index,
            None => self.tail = index,
        }
        self.waiting += 1;
        self.hurried += u32::from(deadline.is_some());
        Ticket { index, serial: self.serial }
    }

    /// Those who have joined so far: whoever enters now came after them, and before whoever joins later.
    pub(crate) const fn arrived(&self) -> u64 {
        self.arrived
    }

    /// When the waiter behind `ticket` came.
    pub(crate) fn arrival(&self, ticket: Ticket) -> Option<u64> {
        self.waiter(ticket).map(|waiter| waiter.arrival)
    }

    /// How many in line came at `arrival` or before.
    pub(crate) fn ahead_of(&self, arrival: u64) -> u32 {
        let mut ahead = 0;
        let mut index = self.head;
        while let Some(waiter) = self.slab.get(index as usize).filter(|waiter| waiter.arrival <= arrival) {
            (ahead, index) = (ahead + 1, waiter.next);
        }
        ahead
    }

    /// Between whom one that came at `arrival` belongs. It came long ago, so its place is near the front.
    fn gap_of(&self, arrival: u64) -> (u32, u32) {
        let (mut previous, mut next) = (NIL, self.head);
        while let Some(waiter) = self.slab.get(next as usize).filter(|waiter| waiter.arrival <= arrival) {
            (previous, next) = (next, waiter.next);
        }
        (previous, next)
    }

    /// Fetches what became of `ticket`. While it waits, `waker` is exchanged for the one left before.
    pub(crate) fn fetch(&mut self, ticket: Ticket, home: Home, waker: &mut Option<Waker>) -> Option<Fate> {
        let waiter = self.waiter_mut(ticket)?;
        if let Place::Waiting(_) = waiter.place {
            std::mem::swap(&mut waiter.waker, waker);
            // A future may move to another runtime between two looks.
            waiter.home = home;
            return None;
        }
        self.ended(ticket)
    }

    /// What became of `ticket`, if its turn has come.
    pub(crate) fn ended(&mut self, ticket: Ticket) -> Option<Fate> {
        if matches!(self.waiter(ticket)?.place, Place::Waiting(_)) {
            return None;
        }
        // Its own waker left when its turn came, so nothing is dropped here.
        let (fate, _none) = self.leave(ticket);
        fate
    }

    /// Gives a place up. What was granted and never seen is answered, to be undone or used.
    pub(crate) fn leave(&mut self, ticket: Ticket) -> (Option<Fate>, Option<Waker>) {
        if self.waiter(ticket).is_none() {
            return (None, None);
        }
        if matches!(self.slab[ticket.index as usize].place, Place::Waiting(_)) {
            self.unlink(ticket.index);
        } else {
            self.unseen -= 1;
        }
        let free = self.free;
        let waiter = &mut self.slab[ticket.index as usize];
        let waker = waiter.waker.take();
        waiter.next = free;
        let place = std::mem::replace(&mut waiter.place, Place::Free);
        self.free = ticket.index;
        if self.waiting == 0 && self.unseen == 0 && self.slab.len() > SLAB_KEPT {
            self.slab = Vec::new();
            self.free = NIL;
        }
        let fate = match place {
            Place::Granted(charge, _) => Some(Fate::Granted(charge)),
            Place::Refused(refused) => Some(Fate::Refused(refused)),
            Place::Waiting(_) | Place::Free => None,
        };
        (fate, waker)
    }

    /// Gives the head what it waited for; its waker is to be woken after the lock.
    pub(crate) fn end_head(&mut self, fate: Fate) -> Option<Waker> {
        let index = self.head;
        self.end(index, fate)
    }

    /// Why the head waits, as of the last time it was asked.
    pub(crate) const fn blocked(&self) -> Option<Wait> {
        self.blocked
    }

    /// The head was asked and has to wait.
    pub(crate) fn block(&mut self, wait: Wait) {
        self.blocked = Some(wait);
    }

    /// Something other than time changed: the head is worth asking whatever it was told.
    pub(crate) fn unblock(&mut self) {
        self.blocked = None;
    }

    /// Whether the head is worth asking at `now`. A return helps those who wait for one, and not before
    /// what the timed gates said; time helps those who wait for time.
    pub(crate) fn is_due(&self, now: Instant, returned: Returned) -> bool {
        match (self.waiting, self.blocked) {
            (0, _) => false,
            (_, None) => true,
            (_, Some(wait)) if wait.until.is_some_and(|until| until <= now) => true,
            (_, Some(wait)) => self.is_helped_by(returned) && wait.floor <= now,
        }
    }

    /// Whether what came back is of any use to the head: places do not help one that waits for tokens.
    pub(crate) fn is_helped_by(&self, returned: Returned) -> bool {
        match (returned, self.blocked.map(|wait| wait.by)) {
            (Returned::Nothing, _) | (Returned::Places, Some(Gate::Budget)) => false,
            (Returned::Places | Returned::Tokens, _) => true,
        }
    }

    /// A return came before pace or rate let anybody in: the head is asked again when they do.
    pub(crate) fn settle_for_time(&mut self) {
        if let Some(wait) = &mut self.blocked {
            // A budget or a tail may say much later: it did not know of what came back just now.
            wait.until = Some(wait.until.map_or(wait.floor, |until| until.min(wait.floor)));
        }
    }

    /// When the head is to be asked again; `None` when nobody waits for time.
    pub(crate) fn wake_at(&self) -> Option<Instant> {
        if self.waiting == 0 { None } else { self.blocked.and_then(|wait| wait.until) }
    }

    /// What is to be done so that the timer is set as it should be.
    ///
    /// The timer lives where the head lives: a keeper elsewhere may sit in a runtime that nobody drives. So a
    /// keeper at home is woken if its timer is wrong. Without one, whoever runs at the head's home becomes the
    /// keeper, and otherwise the head is woken to do so.
    pub(crate) fn timer(&mut self) -> Timer {
        let Some(home) = self.slab.get(self.head as usize).map(|head| head.home) else {
            // Nobody waits: a keeper that sleeps on may go.
            return Timer::Wake(self.keeper.as_mut().and_then(|keeper| keeper.waker.take()));
        };
        let Some(at) = self.wake_at() else { return Timer::Wake(None) };
        match &mut self.keeper {
            Some(keeper) if keeper.home == home => {
                Timer::Wake(if keeper.armed == Some(at) { None } else { keeper.waker.take() })
            }
            _ => Timer::Missing,
        }
    }

    /// The number of a new keeper, which is at `home`; the old one, to be woken.
    pub(crate) fn new_keeper(&mut self, home: Home, waker: Option<Waker>) -> (u32, Option<Keeper>) {
        self.keepers = self.keepers.wrapping_add(1);
        let armed = waker.as_ref().and(self.wake_at());
        let keeper = Keeper { id: self.keepers, home, armed, waker };
        (self.keepers, self.keeper.replace(keeper))
    }

    /// Where the head lives.
    pub(crate) fn head_home(&self) -> Option<Home> {
        self.slab.get(self.head as usize).map(|head| head.home)
    }

    /// Whether the waiter behind `ticket` must keep the timer.
    ///
    /// In a runtime, whoever finds that nobody keeps it there does: time may come to matter in any plan, and the
    /// head may not be polled, or not even driven, by then. Elsewhere only the head keeps it, while time matters.
    pub(crate) fn wants_keeper(&self, ticket: Ticket) -> bool {
        let Some(waiter) = self.waiter(ticket) else { return false };
        let is_kept = self.keeper.as_ref().is_some_and(|keeper| keeper.home == waiter.home);
        match waiter.home {
            _ if is_kept => false,
            Home::Runtime(_) => true,
            Home::Alone(_) => self.is_head(ticket) && self.wake_at().is_some(),
        }
    }

    /// The head's waker, for whoever gives the timer up.
    pub(crate) fn head_waker(&mut self) -> Option<Waker> {
        self.slab.get_mut(self.head as usize).and_then(|head| head.waker.take())
    }

    /// Refuses all in line for whom there is a `reason`, told their cost, how many are ahead of them and their own
    /// deadline, and answers their wakers.
    pub(crate) fn refuse_some(
        &mut self,
        reason: impl Fn(Cost, u32, Option<Instant>) -> Option<Refused>,
    ) -> Vec<Waker> {
        let mut wakers = Vec::new();
        let mut ahead = 0;
        let mut index = self.head;
        while let Some(waiter) = self.slab.get(index as usize) {
            let (next, deadline) = (waiter.next, waiter.deadline);
            let Place::Waiting(cost) = waiter.place else { unreachable!("only who waits is in line") };
            match reason(cost, ahead, deadline) {
                Some(refused) => wakers.extend(self.end(index, Fate::Refused(refused))),
                None => ahead += 1,
            }
            index = next;
        }
        wakers
    }

    /// Looks at a few places for a grant that nobody has come for in `patience`. Stamps those it finds first.
    pub(crate) fn finds_unseen(&mut self, now: Instant, patience: Duration) -> bool {
        let mut found_one = false;
        for _ in 0..EXAMINED_MAX.min(self.slab.len()) {
            self.cursor = (self.cursor + 1) % self.slab.len();
            if let Place::Granted(_, found) = &mut self.slab[self.cursor].place {
                let since = *found.get_or_insert(now);
                if now.since(since) >= patience {
                    // Told once: it is found again only after as long again.
                    *found = Some(now);
                    found_one = true;
                }
            }
        }
        found_one
    }

    /// Whether grants are waiting for their owners.
    pub(crate) const fn has_unseen(&self) -> bool {
        self.unseen > 0
    }

    fn end(&mut self, index: u32, fate: Fate) -> Option<Waker> {
        self.unlink(index);
        self.unseen += 1;
        let waiter = &mut self.slab[index as usize];
        waiter.place = match fate {
            Fate::Granted(charge) => Place::Granted(charge, None),
            Fate::Refused(refused) => Place::Refused(refused),
        };
        waiter.waker.take()
    }

    fn unlink(&mut self, index: u32) {
        let waiter = &self.slab[index as usize];
        let (previous, next) = (waiter.previous, waiter.next);
        let is_hurried = waiter.deadline.is_some();
        if let Some(waiter) = self.slab.get_mut(previous as usize) {
            waiter.next = next;
        } else {
            self.head = next;
            // What was said to the old head does not hold for the new one.
            self.blocked = None;
        }
        match self.slab.get_mut(next as usize) {
            Some(waiter) => waiter.previous = previous,
            None => self.tail = previous,
        }
        self.waiting -= 1;
        self.hurried -= u32::from(is_hurried);
    }

    fn store(&mut self, waiter: Waiter) -> u32 {
        if let Some(slot) = self.slab.get_mut(self.free as usize) {
            let index = self.free;
            self.free = slot.next;
            *slot = waiter;
            return index;
        }
        self.slab.push(waiter);
        u32::try_from(self.slab.len() - 1).unwrap_or_else(|_| unreachable!("waiters_max fits in u32"))
    }

    fn waiter(&self, ticket: Ticket) -> Option<&Waiter> {
        self.slab.get(ticket.index as usize).filter(|waiter| waiter.is(ticket))
    }

    fn waiter_mut(&mut self, ticket: Ticket) -> Option<&mut Waiter> {
        self.slab.get_mut(ticket.index as usize).filter(|waiter| waiter.is(ticket))
    }
}

impl Waiter {
    fn is(&self, ticket: Ticket) -> bool {
        self.serial == ticket.serial && !matches!(self.place, Place::Free)
    }
}

/// What the timer needs.
#[derive(Debug)]
pub(crate) enum Timer {
    /// Somebody may have to be woken, and that is all.
    Wake(Option<Waker>),
    /// There is none where the head lives.
    Missing,
}

/// What the caller just gave back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Returned {
    Nothing,
    /// Slots, bytes, a probe's place.
    Places,
    /// Tokens too.
    Tokens,
}
