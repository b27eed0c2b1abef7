//! Bodies of the lease routes. Each request carries its step number, so that a retry is idempotent.

use tidegate_core::limit::policy;

use crate::amounts::{Changes, Cost};
use crate::limit::LimitState;
use crate::policy::OnExpiry;
use crate::seconds::Seconds;
use crate::text::{EntityId, ResourceName, Time};

wire! {
    /// Draws more units, all or nothing. On refusal the lease is unchanged.
    #[serde(deny_unknown_fields)]
    pub struct Extend {
        /// The number of this step: one more than the last step; the first is 1.
        pub step: u32,
        /// Additional units of each limit.
        pub cost: Cost,
    }

    /// Adjusts the units that the lease holds, up or down. Never refused: units beyond the limit become debt.
    #[serde(deny_unknown_fields)]
    pub struct Adjust {
        /// The number of this step: one more than the last step; the first is 1.
        pub step: u32,
        /// Signed changes in units of each limit.
        pub changes: Changes,
    }

    /// Extends the deadline, counted from now; a later deadline is kept.
    #[serde(deny_unknown_fields)]
    pub struct Renew {
        /// The number of this step: one more than the last step; the first is 1.
        pub step: u32,
        /// Time until the lease expires, counted from now; at most a day.
        pub expires_in: Seconds,
    }

    /// Ends the lease. Limits that `actual` names are settled at that amount, all others at what the lease
    /// holds.
    #[serde(deny_unknown_fields)]
    pub struct Settle {
        /// The number of this step: one more than the last step; the first is 1.
        pub step: u32,
        /// Units actually used of each limit.
        #[serde(default)]
        pub actual: Cost,
    }

    /// Ends the lease and returns all its units.
    #[serde(deny_unknown_fields)]
    pub struct Cancel {
        /// The number of this step: one more than the last step; the first is 1.
        pub step: u32,
    }

    /// The result of a step.
    #[serde(deny_unknown_fields)]
    pub struct StepDone {
        /// When the step was decided; for a repeat, when it was first decided.
        pub at: Time,
        /// Whether this repeats an earlier step: no units moved now.
        pub is_repeat: bool,
        /// The affected limits after the step. Empty for the repeat of an ending.
        pub limits: Vec<LimitState>,
    }

    /// The result of a renewal.
    #[serde(deny_unknown_fields)]
    pub struct Renewed {
        /// When the step was decided; for a repeat, when it was first decided.
        pub at: Time,
        /// Whether this repeats an earlier step: nothing changed now.
        pub is_repeat: bool,
        /// When the lease expires.
        pub deadline: Time,
        /// Time from `at` to `deadline`.
        pub expires_in: Seconds,
    }

    /// An open lease.
    #[serde(deny_unknown_fields)]
    pub struct OpenLease {
        /// The entity that drew it.
        pub entity: EntityId,
        /// The resource.
        pub resource: ResourceName,
        /// Units held of each limit.
        pub held: Cost,
        /// The last completed step: the holder continues with the next number.
        pub step: u32,
        /// When it was drawn, by the wall clock.
        pub drawn_at: Time,
        /// When it expires.
        pub deadline: Time,
        /// Time until it expires.
        pub expires_in: Seconds,
        /// What happens on expiry.
        pub on_expiry: OnExpiry,
    }
}

impl From<policy::OnExpiry> for OnExpiry {
    fn from(behaviour: policy::OnExpiry) -> Self {
        match behaviour {
            policy::OnExpiry::Settle => Self::Settle,
            policy::OnExpiry::Return => Self::Return,
        }
    }
}
