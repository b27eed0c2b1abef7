//! Validated limits that many throttles share.

use std::fmt;
use std::sync::Arc;

use tidegate_core::plan::{Draft, InvalidPlan, Plan};

/// Validated limits as a value: created once, and used for any number of keys.
///
/// Created by [`Builder::limits`](crate::Builder::limits) or from a draft: `Limits::try_from(draft)`. Clones
/// are the same limits and share their memory.
///
/// ```
/// use tidegate::{Limits, Rate, Throttle};
///
/// let polite: Limits = Throttle::host().limits()?;
/// let eager = polite.edited(|draft| draft.waiters_max = 10)?;
/// assert_ne!(polite, eager);
/// assert_eq!(eager.draft().waiters_max, 10);
/// # Ok::<(), tidegate::InvalidPlan>(())
/// ```
#[derive(Clone)]
pub struct Limits {
    pub(super) plan: Arc<Plan>,
}

impl Limits {
    pub(crate) fn new(plan: Plan) -> Self {
        Self { plan: Arc::new(plan) }
    }

    /// The draft they were created from.
    pub fn draft(&self) -> &Draft {
        self.plan.draft()
    }

    /// A copy with changes; these limits are not modified.
    ///
    /// # Errors
    /// [`InvalidPlan`] lists every number that is out of bounds.
    pub fn edited(&self, edit: impl FnOnce(&mut Draft)) -> Result<Self, InvalidPlan> {
        let mut draft = self.draft().clone();
        edit(&mut draft);
        Self::try_from(draft)
    }
}

impl TryFrom<Draft> for Limits {
    type Error = InvalidPlan;

    fn try_from(draft: Draft) -> Result<Self, InvalidPlan> {
        draft.check().map(Self::new)
    }
}

impl PartialEq for Limits {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.plan, &other.plan) || self.plan == other.plan
    }
}

impl fmt::Debug for Limits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Limits").field(self.draft()).finish()
    }
}
