//! What a table of zae-limiter declares, in the terms of a store here.

use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::policy::{Policy, Scope};

/// The entities and limits of one namespace of zae-limiter.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ZaeLimiterContents {
    /// The entities.
    pub entities: Vec<Entity>,
    /// The limits of each scope. Those of narrower scopes replace all others, as there.
    pub policies: Vec<(Scope, Policy)>,
    /// What cannot be declared here, one sentence each.
    pub skipped: Vec<String>,
}
