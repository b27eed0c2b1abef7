//! Named rates and budgets conserve their units: whatever is admitted, settled, dropped, undone or retuned, each
//! limit holds exactly what an independent count says.
//!
//! The clock stands still, so that nothing refills or expires and the count can be exact.

use std::collections::BTreeMap;
use std::time::Duration;

use proptest::prelude::*;
use proptest::sample::Index;
use tidegate_core::cost::{Charge, Cost};
use tidegate_core::event::Event;
use tidegate_core::feedback::headers::Dimension;
use tidegate_core::gate::{Ending, Gates};
use tidegate_core::outcome::Outcome;
use tidegate_core::plan::{Budget, Draft, Plan, Rate};
use tidegate_core::random::Random;
use tidegate_core::time::Instant;
use tidegate_core::verdict::Verdict;

const NOW: Instant = Instant::from_nanos(1_000_000_000);
const NAMES: [(&str, Dimension); 5] = [
    ("rpm", Dimension::Requests),
    ("rpd", Dimension::Requests),
    ("in", Dimension::InputTokens),
    ("out", Dimension::OutputTokens),
    ("all", Dimension::Tokens),
];

#[derive(Debug, Clone)]
enum Step {
    Admit {
        requests: u32,
        input: u64,
        output: u64,
    },
    Settle {
        which: Index,
        is_success: bool,
        spent: Option<(u64, u64)>,
        reported: Option<u64>,
    },
    Drop(Index),
    Undo(Index),
    /// Whether each name is in the new plan.
    Retune([bool; NAMES.len()]),
}

fn any_step() -> impl Strategy<Value = Step> {
    let spent = prop::option::of((0_u64..60, 0_u64..60));
    prop_oneof![
        6 => (1_u32..4, 0_u64..40, 0_u64..40)
            .prop_map(|(requests, input, output)| Step::Admit { requests, input, output }),
        4 => (any::<Index>(), any::<bool>(), spent, prop::option::of(1_u64..60)).prop_map(
            |(which, is_success, spent, reported)| Step::Settle { which, is_success, spent, reported }
        ),
        2 => any::<Index>().prop_map(Step::Drop),
        2 => any::<Index>().prop_map(Step::Undo),
        2 => any::<[bool; NAMES.len()]>().prop_map(Step::Retune),
    ]
}

fn plan(is_set: [bool; NAMES.len()]) -> Plan {
    let window = Duration::from_secs(60);
    let names = NAMES.iter().zip(is_set).filter(|(_, is_set)| *is_set);
    let draft = names.fold(Draft::default(), |draft, ((name, counts), _)| match counts {
        Dimension::Requests => draft.rate_named(*name, Rate::per_minute(12)),
        Dimension::InputTokens => draft.budget_named(*name, Budget::input_tokens(150, window)),
        Dimension::OutputTokens => draft.budget_named(*name, Budget::output_tokens(150, window)),
        _ => draft.budget_named(*name, Budget::tokens(250, window)),
    });
    draft.check().expect("within the bounds")
}

/// A charge, and the incarnations of the limits that it took from.
struct Held {
    charge: Charge,
    lent: BTreeMap<&'static str, u32>,
}

struct Model {
    plan: Plan,
    gates: Gates,
    events: Vec<Event>,
    held: Vec<Held>,
    /// For each limit of the plan its incarnation and the units used.
    used: BTreeMap<&'static str, (u32, i64)>,
    incarnations: u32,
}

impl Model {
    fn new() -> Self {
        let plan = plan([true; NAMES.len()]);
        let gates = Gates::new(&plan, Random::seeded(1));
        let used = NAMES.iter().map(|(name, _)| (*name, (0, 0))).collect();
        Self { plan, gates, events: Vec::new(), held: Vec::new(), used, incarnations: 0 }
    }

    fn take(&mut self, which: Index) -> Option<Held> {
        (!self.held.is_empty()).then(|| self.held.swap_remove(which.index(self.held.len())))
    }

    /// Adds what `units` returns for each limit of the plan and whether the charge took from it.
    fn count(&mut self, held: &Held, units: impl Fn(Dimension, bool) -> i64) {
        for (name, counts) in NAMES {
            if let Some((incarnation, used)) = self.used.get_mut(name) {
                *used += units(counts, held.lent.get(name) == Some(incarnation));
            }
        }
    }

    fn run(&mut self, step: &Step) {
        match *step {
            Step::Admit { requests, input, output } => {
                let cost = Cost::requests(requests).input_tokens(input).output_tokens(output);
                match self.gates.admit(&self.plan, cost, 0, NOW, &mut self.events) {
                    Ok(charge) => {
                        let lent =
                            self.used.iter().map(|(name, (incarnation, _))| (*name, *incarnation)).collect();
                        let held = Held { charge, lent };
                        self.count(&held, |counts, _| cost.units(counts).cast_signed());
                        self.held.push(held);
                    }
                    Err(Verdict::Wait(_)) => {}
                    Err(verdict) => panic!("{verdict:?}"),
                }
            }
            Step::Settle { which, is_success, spent, reported } => {
                let Some(held) = self.take(which) else { return };
                let outcome = if is_success { Outcome::success() } else { Outcome::failure() };
                let spent =
                    spent.map(|(input, output)| Cost::request().input_tokens(input).output_tokens(output));
                let outcome = spent.map_or(outcome, |spent| outcome.spent(spent));
                self.settle(held, spent, reported.map(Cost::from), outcome, is_success);
            }
            Step::Drop(which) => {
                let Some(held) = self.take(which) else { return };
                self.settle(held, None, None, Outcome::ignored(), false);
            }
            Step::Undo(which) => {
                let Some(held) = self.take(which) else { return };
                let cost = held.charge.cost();
                self.count(
                    &held,
                    |counts, has_lent| if has_lent { -cost.units(counts).cast_signed() } else { 0 },
                );
                self.gates.undo(&self.plan, held.charge, NOW, &mut self.events);
            }
            Step::Retune(is_set) => {
                let plan = plan(is_set);
                self.gates.retune(&self.plan, &plan, NOW, &mut self.events);
                self.plan = plan;
                self.incarnations += 1;
                for ((name, _), is_set) in NAMES.iter().zip(is_set) {
                    if is_set {
                        self.used.entry(name).or_insert((self.incarnations, 0));
                    } else {
                        self.used.remove(name);
                    }
                }
            }
        }
    }

    fn settle(
        &mut self,
        held: Held,
        spent: Option<Cost>,
        reported: Option<Cost>,
        outcome: Outcome,
        is_success: bool,
    ) {
        let cost = held.charge.cost();
        self.count(&held, |counts, has_lent| {
            let reserved = if has_lent { cost.units(counts).cast_signed() } else { 0 };
            let used = match (spent, reported, counts) {
                // Rates get nothing back.
                (_, _, Dimension::Requests) => return 0,
                (Some(spent), ..) => spent.units(counts).cast_signed(),
                (None, Some(_), Dimension::InputTokens | Dimension::OutputTokens) => reserved,
                (None, Some(reported), _) => reported.units(counts).cast_signed(),
                (None, None, _) if is_success => reserved,
                (None, None, _) => 0,
            };
            used - reserved
        });
        if let Some(reported) = reported {
            self.gates.spend(&self.plan, &held.charge, (None, reported), NOW, &mut self.events);
        }
        let ending = Ending { charge: held.charge, reported, outcome: &outcome };
        self.gates.settle(&self.plan, ending, 0, NOW, &mut self.events);
    }

    fn check(&self) {
        let seen = self.gates.snapshot(&self.plan, 0, NOW).limits;
        assert_eq!(seen.len(), self.used.len());
        for limit in seen {
            let (_, used) = self.used[limit.name.as_str()];
            assert_eq!(limit.available, limit.capacity.cast_signed() - used, "{limit:?}");
        }
    }
}

proptest! {
    #[test]
    fn named_limits_hold_exactly_what_is_used(steps in prop::collection::vec(any_step(), 1..80)) {
        let mut model = Model::new();
        for step in &steps {
            model.run(step);
            model.check();
        }
    }
}
