//! Applies a new plan to running gates: levels, requests in flight and the circuit keep their state.

use super::circuit::CircuitGate;
use super::gates::Gates;
use super::named::NamedGates;
use super::pace::PaceGate;
use crate::event::Event;
use crate::plan::Plan;
use crate::time::Instant;

impl Gates {
    /// Switches to the plan `new`.
    ///
    /// Tuned limits keep their value, within the new bounds. A limit at its old maximum (or an interval at
    /// its old minimum) moves to the new one.
    pub fn retune(&mut self, old: &Plan, new: &Plan, now: Instant, events: &mut Vec<Event>) {
        self.advance_to(old, now);
        self.retune_slots(old, new);
        self.retune_pace(old, new);
        let from = self.feedback.shape(old).copied();
        self.feedback.tune(old, new, self.latest);
        self.reshape_rate(new, from);
        self.follow_auto(new);
        match (&mut self.circuit, &new.draft.circuit) {
            (Some(gate), Some(circuit)) => gate.tune(old.draft.circuit.as_ref(), circuit),
            (none @ None, Some(circuit)) => {
                // Requests in flight entered without this circuit, so they must not affect it.
                self.generation = self.generation.saturating_add(1);
                *none = Some(Box::new(CircuitGate::new(circuit, self.generation.get())));
            }
            // A circuit that is added again later starts without history.
            (removed, None) => *removed = None,
        }
        if new.draft.budget.is_none() {
            self.budget.clear();
        }
        self.retune_named(old, new);
        self.update_suspension(new);
        events.push(Event::Retuned);
    }

    fn retune_named(&mut self, old: &Plan, new: &Plan) {
        let Some(plan) = &new.named else {
            // A limit that is added again later starts unused.
            self.named = None;
            return;
        };
        if plan.adds_to(old.named.as_deref()) {
            // Requests in flight took nothing from the new gates.
            self.generation = self.generation.saturating_add(1);
        }
        let generation = self.generation.get();
        match (&mut self.named, &old.named) {
            (Some(named), Some(old)) => named.retune(old, plan, generation, self.latest),
            (named, _) => *named = Some(Box::new(NamedGates::new(plan, generation))),
        }
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
