//! Operating a store: init, check, upgrade, list and destroy.
//!
//! Operators address a store without opening it, because checking a store must not create it. Each engine
//! implements [`Lifecycle`]; the reports are the same for all of them.

use std::fmt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tidegate_core::limit::name::Namespace;
use tidegate_core::time::Stamp;

pub use crate::open::lifecycle_at as at;

use crate::error::StoreError;
use crate::reply::Reply;

/// The maximum number of namespaces in a listing.
pub const LISTED_MAX: u32 = 1_000;

/// Operations on the store at an address; see [`at`].
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tidegate_store::StoreError> {
/// let error = tidegate_store::lifecycle::at("memory:").unwrap_err();
/// assert_eq!(error.to_string(), "`memory:` exists only in its process: there is nothing to init, check or upgrade");
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
/// Dropping a reply leaves a consistent store, with or without the change.
pub trait Lifecycle: fmt::Debug + Send + Sync {
    /// Creates what the store needs, and the namespace of the address. Existing parts are left as they are. A
    /// schema of another version or another program's data is refused unchanged ([`StoreError::Invalid`]).
    fn init(&self) -> Reply<'_, InitReport>;

    /// Checks the store and changes nothing: missing parts are reported, not created. A schema of a newer
    /// version, or of another program, is refused ([`StoreError::Invalid`]).
    fn check(&self) -> Reply<'_, CheckReport>;

    /// Migrates an older schema and its data to the version of this program. Concurrent upgrades are
    /// serialized and run once. A missing or newer schema is refused ([`StoreError::Invalid`]).
    fn upgrade(&self) -> Reply<'_, UpgradeReport>;

    /// Lists at most [`LISTED_MAX`] namespaces. Changes nothing.
    fn list(&self) -> Reply<'_, NamespaceList>;

    /// Lists the namespaces that [`destroy`](Self::destroy) would remove, none if there is no store. Changes
    /// nothing, and fails if `destroy` would refuse.
    fn losses(&self) -> Reply<'_, NamespaceList> {
        Reply::ready(Err(removed_otherwise()))
    }

    /// Removes the store with all namespaces, if it owns a part of the engine exclusively: a DynamoDB table
    /// with a namespace record. Other stores are removed with the engine's own tools
    /// ([`StoreError::Invalid`]).
    fn destroy(&self) -> Reply<'_, DestroyReport> {
        Reply::ready(Err(removed_otherwise()))
    }

    /// Copies the store to a new file: a snapshot of one moment, whatever is written in the meantime. An existing
    /// file is refused ([`StoreError::Invalid`]), and so is a store that its engine's own tools back up.
    fn backup<'a>(&'a self, file: &'a Path) -> Reply<'a, BackupReport> {
        let what = format!(
            "this store cannot be copied to `{}`: back it up with its engine's own tools",
            file.display()
        );
        Reply::ready(Err(StoreError::Invalid { what }))
    }

    /// A template of the store's parts for other provisioning tools: `CloudFormation` for a DynamoDB table.
    /// Makes no request.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an engine without a template.
    fn template(&self) -> Result<String, StoreError> {
        let what = "this store needs no template: `tidegate store init` creates all of it".to_owned();
        Err(StoreError::Invalid { what })
    }
}

/// The location of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreLocation {
    /// The name of the engine.
    pub engine: &'static str,
    /// Its address, without user and password.
    pub place: String,
}

/// A part of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// The kind: a `file`, a `schema`, a `table`, a `namespace`.
    pub kind: &'static str,
    /// Its name.
    pub name: String,
}

impl Part {
    pub(crate) fn new(kind: &'static str, name: impl Into<String>) -> Self {
        Self { kind, name: name.into() }
    }
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} `{}`", self.kind, self.name)
    }
}

/// The result of [`init`](Lifecycle::init).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct InitReport {
    /// The store.
    pub of: StoreLocation,
    /// Its parts.
    pub parts: Vec<InitPart>,
    /// The version of its schema.
    pub schema: u64,
}

/// A part that exists after [`init`](Lifecycle::init).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InitPart {
    /// The part.
    pub part: Part,
    /// Whether this call created it.
    pub is_new: bool,
}

/// The result of [`check`](Lifecycle::check).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct CheckReport {
    /// The store.
    pub of: StoreLocation,
    /// The engine's name and version: `PostgreSQL 17.5`.
    pub server: String,
    /// The version of the stored schema; `None` if there is none.
    pub schema: Option<u64>,
    /// The schema version of this program.
    pub schema_wanted: u64,
    /// The namespace of the address.
    pub namespace: String,
    /// Missing parts.
    pub missing: Vec<Part>,
    /// Which failures the data survives, in a sentence.
    pub durability: String,
    /// Settings of the engine that affect its guarantees.
    pub settings: Vec<Setting>,
    /// The difference between the engine's clock and this machine's, if the engine has a clock.
    pub clock: Option<ClockDifference>,
    /// How far the store's time is ahead of its clock because the clock was set back; `None` if there is no
    /// store, and for DynamoDB, which persists no time.
    pub clock_offset: Option<Duration>,
}

/// Whether a store can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// It can be used.
    Ready,
    /// A part is missing.
    Missing,
    /// Its schema is older than that of this program.
    Older,
}

impl Readiness {
    /// A lower-case name, for output.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Missing => "missing",
            Self::Older => "older",
        }
    }
}

impl CheckReport {
    /// Whether the store can be used.
    pub fn readiness(&self) -> Readiness {
        match self.schema {
            Some(found) if found < self.schema_wanted => Readiness::Older,
            _ if !self.missing.is_empty() => Readiness::Missing,
            _ => Readiness::Ready,
        }
    }

    /// The risks of the settings, one sentence each.
    pub fn dangers(&self) -> impl Iterator<Item = &str> {
        self.settings.iter().filter_map(|setting| setting.danger.as_deref())
    }
}

/// A setting of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The engine's name of the setting.
    pub name: &'static str,
    /// The value as the engine reports it.
    pub value: String,
    /// The risk, in a sentence; `None` if there is none.
    pub danger: Option<String>,
}

impl Setting {
    pub(crate) fn new(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: value.into(), danger: None }
    }

    /// Sets the risk if `is_one`.
    pub(crate) fn danger_if(mut self, is_one: bool, danger: &str) -> Self {
        self.danger = is_one.then(|| danger.to_owned());
        self
    }
}

/// The difference of two clocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockDifference {
    /// Microseconds that the engine's clock is ahead of this machine's; negative if it is behind.
    pub ahead_micros: i64,
    /// The accuracy: half of the round trip.
    pub within: Duration,
}

impl ClockDifference {
    /// The difference for an engine's time read between two times of this machine.
    pub(crate) fn between(before: Stamp, engine: Stamp, after: Stamp) -> Self {
        let micros = |stamp: Stamp| i64::try_from(stamp.as_micros()).unwrap_or(i64::MAX);
        let (before, engine, after) = (micros(before), micros(engine), micros(after));
        let half = after.saturating_sub(before).max(0) / 2;
        Self {
            ahead_micros: engine.saturating_sub(before.saturating_add(half)),
            within: Duration::from_micros(half.unsigned_abs()),
        }
    }
}

/// The result of [`upgrade`](Lifecycle::upgrade).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct UpgradeReport {
    /// The store.
    pub of: StoreLocation,
    /// The versioned parts, including those that were up to date.
    pub parts: Vec<UpgradePart>,
    /// The version that all of them have now.
    pub schema: u64,
}

/// A versioned part.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpgradePart {
    /// The part.
    pub part: Part,
    /// Its version before the upgrade.
    pub from: u64,
}

/// The result of [`backup`](Lifecycle::backup).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BackupReport {
    /// The store.
    pub of: StoreLocation,
    /// The new file.
    pub file: PathBuf,
    /// Its size in bytes.
    pub bytes: u64,
}

/// The result of [`destroy`](Lifecycle::destroy).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DestroyReport {
    /// The store.
    pub of: StoreLocation,
    /// The removed part.
    pub part: Part,
    /// Whether it existed.
    pub was_there: bool,
}

/// The result of [`list`](Lifecycle::list).
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct NamespaceList {
    /// The store.
    pub of: StoreLocation,
    /// The schema version of this program.
    pub schema_wanted: u64,
    /// The namespaces, in the order of names.
    pub spaces: Vec<Space>,
    /// Whether there are more namespaces than listed.
    pub has_more: bool,
}

impl NamespaceList {
    /// A listing of `spaces`, which may have one more than are listed.
    pub(crate) fn cut(of: StoreLocation, schema_wanted: u64, mut spaces: Vec<Space>) -> Self {
        let has_more = is_enough(&spaces);
        spaces.truncate(LISTED_MAX as usize);
        Self { of, schema_wanted, spaces, has_more }
    }
}

/// Whether there are more namespaces than are listed.
pub(crate) const fn is_enough(spaces: &[Space]) -> bool {
    spaces.len() > LISTED_MAX as usize
}

/// A namespace in a listing.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Space {
    /// Its schema, if the engine has several.
    pub within: Option<String>,
    /// Its name; `None` for a schema without namespaces, or whose namespaces this program cannot read.
    pub namespace: Option<String>,
    /// The version of its schema; `None` without permission to read it.
    pub schema: Option<u64>,
    /// The number of administrative changes.
    pub changes: Option<u64>,
    /// The number of entities.
    pub entities: Option<u64>,
    /// The number of policies.
    pub policies: Option<u64>,
}

/// The error for a schema of another version, the same for every engine.
pub(crate) fn other_version(place: &str, found: u64, wanted: u64) -> StoreError {
    let what = if found > wanted {
        format!("{place} has schema version {found}, newer than {wanted}: use a newer tidegate")
    } else {
        format!("{place} has schema version {found}, older than {wanted}: run `tidegate store upgrade`")
    };
    StoreError::Invalid { what }
}

/// The error for a store that owns no part of its engine exclusively.
fn removed_otherwise() -> StoreError {
    let what = "this store cannot be destroyed from here: remove its file, its schema or its keys with the engine's own tools";
    StoreError::Invalid { what: what.to_owned() }
}

/// The error for a missing part.
pub(crate) fn not_there(what: &str) -> StoreError {
    StoreError::Invalid { what: format!("{what} does not exist: run `tidegate store init`") }
}

/// Validates the name of a namespace.
pub(crate) fn namespace(name: &str) -> Result<Namespace, StoreError> {
    Namespace::new(name).map_err(|error| StoreError::Invalid { what: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clock_is_compared_with_the_middle_of_a_round_trip() {
        let at = |millis: u64| Stamp::from_micros(millis * 1_000);
        let table = [(105, 0, 5), (100, -5_000, 5), (112, 7_000, 5)];
        for (engine, ahead, within) in table {
            let difference = ClockDifference::between(at(100), at(engine), at(110));
            assert_eq!((difference.ahead_micros, difference.within), (ahead, Duration::from_millis(within)));
        }
        // This machine's clock was set back during the request.
        assert_eq!(ClockDifference::between(at(110), at(100), at(100)).within, Duration::ZERO);
    }

    #[test]
    fn version_error_has_both_versions_and_advice() {
        assert_eq!(
            other_version("`a.db`", 9, 3).to_string(),
            "`a.db` has schema version 9, newer than 3: use a newer tidegate"
        );
        assert_eq!(
            other_version("`a.db`", 1, 3).to_string(),
            "`a.db` has schema version 1, older than 3: run `tidegate store upgrade`"
        );
    }
}
