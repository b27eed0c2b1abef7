//! A store's life beside its use: how it is made, looked at, brought up to date and listed.
//!
//! Whoever operates a store does so by its address, and does not open it: to look at a store must not make it. Each engine has
//! its own [`Lifecycle`]; what it finds and does is told in the same words for all of them.

use std::fmt;
use std::time::Duration;

use tidegate_core::limit::name::Namespace;
use tidegate_core::time::Stamp;

pub use crate::open::lifecycle_at as at;

use crate::error::StoreError;
use crate::reply::Reply;

/// Namespaces that a listing has at most.
pub const LISTED_MAX: u32 = 1_000;

/// What an operator does with the store at an address. [`at`] has it for each engine.
///
/// ```
/// # #[tokio::main(flavor = "current_thread")]
/// # async fn main() -> Result<(), tidegate_store::StoreError> {
/// let error = tidegate_store::lifecycle::at("memory:").unwrap_err();
/// assert_eq!(error.to_string(), "`memory:` is gone with its process: there is nothing to make, to look at or to upgrade");
/// # Ok(())
/// # }
/// ```
///
/// # Cancel safety
/// Dropping a reply leaves a store that is whole: as it was, or as it was to be.
pub trait Lifecycle: fmt::Debug + Send + Sync {
    /// Creates what the store needs, and the namespace of the address. What exists is left as it is. A schema of another
    /// version, and anything that holds another program's data, is refused unchanged ([`StoreError::Invalid`]).
    fn init(&self) -> Reply<'_, Made>;

    /// Looks, and changes nothing: what is not there is told, and not made. A schema of a newer version, or of another
    /// program, is refused ([`StoreError::Invalid`]).
    fn check(&self) -> Reply<'_, Checked>;

    /// Brings an older schema to the version of this program, with all that it holds. Several who do so at once do it in
    /// turn, and once. What is not there, or newer, is refused ([`StoreError::Invalid`]).
    fn upgrade(&self) -> Reply<'_, Upgraded>;

    /// The namespaces there are, at most [`LISTED_MAX`] of them. Changes nothing.
    fn list(&self) -> Reply<'_, Listed>;

    /// The namespaces that [`destroy`](Self::destroy) would remove, none if there is no store. Changes nothing, and fails
    /// where `destroy` would refuse.
    fn losses(&self) -> Reply<'_, Listed> {
        Reply::ready(Err(removed_otherwise()))
    }

    /// Removes the store with all namespaces, if the engine has a part that is all ours: a DynamoDB table with a namespace
    /// record. Anything else is removed by the engine's own means ([`StoreError::Invalid`]).
    fn destroy(&self) -> Reply<'_, Destroyed> {
        Reply::ready(Err(removed_otherwise()))
    }

    /// What the store needs, as a template for whoever makes it by other means: `CloudFormation` for a table of DynamoDB, and
    /// none for other engines ([`StoreError::Invalid`]). Nothing is asked.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an engine that has none.
    fn template(&self) -> Result<String, StoreError> {
        let what = "this store needs no template: `tidegate store init` makes all of it".to_owned();
        Err(StoreError::Invalid { what })
    }
}

/// Which store it is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Whereabouts {
    /// What the engine is called.
    pub engine: &'static str,
    /// Where it is, without user and password.
    pub place: String,
}

/// A part of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Part {
    /// What it is: a `file`, a `schema`, a `table`, a `namespace`.
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

/// What [`init`](Lifecycle::init) did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Made {
    /// Which store.
    pub of: Whereabouts,
    /// Its parts.
    pub parts: Vec<MadePart>,
    /// The version of its schema.
    pub schema: u64,
}

/// A part that is there now.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MadePart {
    /// Which one.
    pub part: Part,
    /// It was made by this call.
    pub is_new: bool,
}

/// What [`check`](Lifecycle::check) found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Checked {
    /// Which store.
    pub of: Whereabouts,
    /// What the engine says it is, with its version: `PostgreSQL 17.5`.
    pub server: String,
    /// The version of the schema there; `None` where there is none.
    pub schema: Option<u64>,
    /// The version that this program has.
    pub schema_wanted: u64,
    /// The namespace of the address.
    pub namespace: String,
    /// Parts that are not there.
    pub missing: Vec<Part>,
    /// What survives what, in a sentence.
    pub durability: String,
    /// Settings of the engine that say what its promises are worth.
    pub settings: Vec<Setting>,
    /// How far the engine's clock is from this machine's, where it has one of its own.
    pub clock: Option<ClockDifference>,
    /// How far the store's time is ahead of its clock, because the clock stepped back; `None` where there is no store, and on
    /// DynamoDB, which keeps no time.
    pub clock_offset: Option<Duration>,
}

/// Whether a store can be used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readiness {
    /// As it is.
    Ready,
    /// A part of it is not there.
    Missing,
    /// Its schema is older than this program.
    Older,
}

impl Readiness {
    /// In a word.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Ready => "ready",
            Self::Missing => "missing",
            Self::Older => "older",
        }
    }
}

impl Checked {
    /// Whether it can be used.
    pub fn readiness(&self) -> Readiness {
        match self.schema {
            Some(found) if found < self.schema_wanted => Readiness::Older,
            _ if !self.missing.is_empty() => Readiness::Missing,
            _ => Readiness::Ready,
        }
    }

    /// What the settings endanger, each in a sentence.
    pub fn dangers(&self) -> impl Iterator<Item = &str> {
        self.settings.iter().filter_map(|setting| setting.danger.as_deref())
    }
}

/// A setting of an engine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// As the engine calls it.
    pub name: &'static str,
    /// As the engine says it.
    pub value: String,
    /// What it endangers, in a sentence; `None` where it endangers nothing.
    pub danger: Option<String>,
}

impl Setting {
    pub(crate) fn new(name: &'static str, value: impl Into<String>) -> Self {
        Self { name, value: value.into(), danger: None }
    }

    /// Says what it endangers, if it does.
    pub(crate) fn danger_if(mut self, is_one: bool, danger: &str) -> Self {
        self.danger = is_one.then(|| danger.to_owned());
        self
    }
}

/// How far two clocks are apart.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockDifference {
    /// By how many microseconds the engine's clock is ahead of this machine's; less than zero where it is behind.
    pub ahead_micros: i64,
    /// It is known this well: half of the time that it took to ask.
    pub within: Duration,
}

impl ClockDifference {
    /// What the engine's clock said, somewhere between two times of this machine.
    pub(crate) fn between(before: Stamp, there: Stamp, after: Stamp) -> Self {
        let micros = |stamp: Stamp| i64::try_from(stamp.as_micros()).unwrap_or(i64::MAX);
        let (before, there, after) = (micros(before), micros(there), micros(after));
        let half = after.saturating_sub(before).max(0) / 2;
        Self {
            ahead_micros: there.saturating_sub(before.saturating_add(half)),
            within: Duration::from_micros(half.unsigned_abs()),
        }
    }
}

/// What [`upgrade`](Lifecycle::upgrade) did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Upgraded {
    /// Which store.
    pub of: Whereabouts,
    /// What has a version; those that had the right one included.
    pub parts: Vec<UpgradedPart>,
    /// The version that all of them have now.
    pub schema: u64,
}

/// A part that has a version.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UpgradedPart {
    /// Which one.
    pub part: Part,
    /// The version that it had.
    pub from: u64,
}

/// What [`destroy`](Lifecycle::destroy) did.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Destroyed {
    /// Which store.
    pub of: Whereabouts,
    /// What is gone.
    pub part: Part,
    /// It was there.
    pub was_there: bool,
}

/// What [`list`](Lifecycle::list) found.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Listed {
    /// Which store.
    pub of: Whereabouts,
    /// The version that this program has.
    pub schema_wanted: u64,
    /// What there is, in the order of names.
    pub spaces: Vec<Space>,
    /// There are more of them than are listed.
    pub has_more: bool,
}

impl Listed {
    /// What there is, found one further than is listed.
    pub(crate) fn cut(of: Whereabouts, schema_wanted: u64, mut spaces: Vec<Space>) -> Self {
        let has_more = is_enough(&spaces);
        spaces.truncate(LISTED_MAX as usize);
        Self { of, schema_wanted, spaces, has_more }
    }
}

/// Whether there are more of them than are listed.
pub(crate) const fn is_enough(spaces: &[Space]) -> bool {
    spaces.len() > LISTED_MAX as usize
}

/// A namespace that there is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Space {
    /// The schema that it is in, where the engine has several.
    pub within: Option<String>,
    /// Its name; `None` for a schema that has none, or whose namespaces this program cannot read.
    pub namespace: Option<String>,
    /// The version of its schema; `None` where it may not be read.
    pub schema: Option<u64>,
    /// The count of administrative changes.
    pub changes: Option<u64>,
    /// Entities in it.
    pub entities: Option<u64>,
    /// Policies in it.
    pub policies: Option<u64>,
}

/// Another version than this program's, in the same words for every engine.
pub(crate) fn other_version(place: &str, found: u64, wanted: u64) -> StoreError {
    let what = if found > wanted {
        format!("{place} has schema version {found}, newer than {wanted}: use a newer tidegate")
    } else {
        format!("{place} has schema version {found}, older than {wanted}: run `tidegate store upgrade`")
    };
    StoreError::Invalid { what }
}

/// A store that is not all of something.
fn removed_otherwise() -> StoreError {
    let what = "this store is not removed from here: remove its file, its schema or its keys by the engine's own means";
    StoreError::Invalid { what: what.to_owned() }
}

/// Something that would have to be there.
pub(crate) fn not_there(what: &str) -> StoreError {
    StoreError::Invalid { what: format!("{what} is not there: run `tidegate store init`") }
}

/// A namespace by its name.
pub(crate) fn namespace(name: &str) -> Result<Namespace, StoreError> {
    Namespace::new(name).map_err(|error| StoreError::Invalid { what: error.to_string() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_is_compared_with_the_middle_of_the_time_it_took_to_ask() {
        let at = |millis: u64| Stamp::from_micros(millis * 1_000);
        let table = [(105, 0, 5), (100, -5_000, 5), (112, 7_000, 5)];
        for (there, ahead, within) in table {
            let difference = ClockDifference::between(at(100), at(there), at(110));
            assert_eq!((difference.ahead_micros, difference.within), (ahead, Duration::from_millis(within)));
        }
        // This machine's clock was set back meanwhile.
        assert_eq!(ClockDifference::between(at(110), at(100), at(100)).within, Duration::ZERO);
    }

    #[test]
    fn a_version_that_is_another_is_told_with_both_and_what_to_do() {
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
