//! A new plan under a living state: levels, requests in flight and the circuit stay as they are.

use super::circuit::CircuitGate;
use super::gates::Gates;
use super::pace::PaceGate;
use crate::event::Event;
use crate::plan::Plan;
use crate::time::Instant;

impl Gates {
    /// Goes on under `new`.
    ///
    /// What a controller has tuned stays where it is, within the new bounds; what stood at its old maximum (or
    /// the interval at its old minimum) follows to the new one.
    pub fn retune(&mut self, old: &Plan, new: &Plan, now: Instant, events: &mut Vec<Event>) {
        self.see(old, now);
        self.retune_slots(old, new);
        self.retune_pace(old, new);
        let from = self.feedback.shape(old).copied();
        self.feedback.tune(old, new, self.latest);
        self.reshape_rate(new, from);
        self.follow_auto(new);
        match (&mut self.circuit, &new.draft.circuit) {
            (Some(gate), Some(circuit)) => gate.tune(old.draft.circuit.as_ref(), circuit),
            (none @ None, Some(circuit)) => {
                // What is in flight was never under this circuit.
                self.generation = self.generation.saturating_add(1);
                *none = Some(Box::new(CircuitGate::new(circuit, self.generation.get())));
            }
            // One that comes back later knows nothing of what happened before.
            (gone, None) => *gone = None,
        }
        if new.draft.budget.is_none() {
            self.budget.forget();
        }
        self.update_rest(new);
        events.push(Event::Retuned);
    }

    fn retune_slots(&mut self, old: &Plan, new: &Plan) {
        if old.draft.slots == new.draft.slots {
            return;
        }
        self.slots_limit = match (old.draft.slots, new.draft.slots) {
            (_, None) => u32::MAX,
            (None, Some(slots)) => slots.start,
            (Some(old), Some(new)) if self.slots_limit == old.max => new.max,
            (Some(_), Some(new)) => self.slots_limit.clamp(new.min, new.max),
        };
    }

    fn retune_pace(&mut self, old: &Plan, new: &Plan) {
        let Some(pace) = new.draft.pace else {
            self.pace = None;
            return;
        };
        let gate = self.pace.get_or_insert_with(|| Box::new(PaceGate::new(pace.interval_min)));
        let was_fastest = old.draft.pace.is_none_or(|old| gate.interval() == old.interval_min);
        let interval = if was_fastest {
            pace.interval_min
        } else {
            gate.interval().clamp(pace.interval_min, pace.interval_max)
        };
        gate.tune(interval, pace.jitter, &mut self.random);
    }
}

#[cfg(test)]
#[path = "retune_tests.rs"]
mod tests;
