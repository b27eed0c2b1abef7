//! The verbs of a lease: each carries its step, so that to say it again does no harm.

use tidegate_core::limit::policy;

use crate::amounts::{Changes, Cost};
use crate::limit::LimitState;
use crate::policy::OnExpiry;
use crate::seconds::Seconds;
use crate::text::{EntityId, ResourceName, Time};

wire! {
    /// Draws more, all or nothing. Refused, the lease stays as it is.
    #[serde(deny_unknown_fields)]
    pub struct Extend {
        /// The lease's next step, from 1.
        pub step: u32,
        /// How much more of each limit.
        pub cost: Cost,
    }

    /// Takes what turned out to be needed, or gives back what was not: never refused.
    #[serde(deny_unknown_fields)]
    pub struct Adjust {
        /// The lease's next step, from 1.
        pub step: u32,
        /// More, or less, of each limit.
        pub changes: Changes,
    }

    /// Gives the lease more time from now on; one that has more is left with it.
    #[serde(deny_unknown_fields)]
    pub struct Renew {
        /// The lease's next step, from 1.
        pub step: u32,
        /// How long from now on, at most a day.
        pub expires_in: Seconds,
    }

    /// Ends the lease at what was used of the limits named, and at what it holds of the others.
    #[serde(deny_unknown_fields)]
    pub struct Settle {
        /// The lease's next step, from 1.
        pub step: u32,
        /// What was used.
        #[serde(default)]
        pub actual: Cost,
    }

    /// Ends the lease as if it had never been.
    #[serde(deny_unknown_fields)]
    pub struct Cancel {
        /// The lease's next step, from 1.
        pub step: u32,
    }

    /// What a step came to.
    #[serde(deny_unknown_fields)]
    pub struct StepDone {
        /// When it was decided. A repeat tells when it was decided first.
        pub at: Time,
        /// It was done before, and nothing moved now.
        pub is_repeat: bool,
        /// The limits that took part, after it. The repeat of an ending knows of none.
        pub limits: Vec<LimitState>,
    }

    /// A lease that was renewed.
    #[serde(deny_unknown_fields)]
    pub struct Renewed {
        /// When it was decided. A repeat tells when it was decided first.
        pub at: Time,
        /// It was done before, and nothing changed now.
        pub is_repeat: bool,
        /// When the lease expires.
        pub deadline: Time,
        /// How long after `at` that is.
        pub expires_in: Seconds,
    }

    /// An open lease.
    #[serde(deny_unknown_fields)]
    pub struct OpenLease {
        /// Who drew it.
        pub entity: EntityId,
        /// Of what.
        pub resource: ResourceName,
        /// What it holds of each limit that takes part.
        pub held: Cost,
        /// The last step that was done: its holder goes on with the next number.
        pub step: u32,
        /// When it drew, by the wall clock.
        pub drawn_at: Time,
        /// When it expires.
        pub deadline: Time,
        /// How long it has until then.
        pub expires_in: Seconds,
        /// What becomes of it then.
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
