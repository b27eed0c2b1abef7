//! The buckets an acquire draws from, all or nothing: the subject's own, those of its parents, and pools.
//!
//! [`Levels`] is the result of resolving a subject: a list of buckets, each with its key and effective
//! limits. It is computed once, cached and shared; a draw is one of these and an amount per limit name. A
//! lease keeps the levels it drew from, so that it can be ended after any later change of a policy.

use std::sync::Arc;

use smallvec::{SmallVec, smallvec};
use thiserror::Error;

use crate::excerpt::excerpt;
use crate::limit::audit::About;
use crate::limit::lease::{digest_by_key, name_key};
use crate::limit::name::{Across, EntityId, LimitName, Subject};
use crate::limit::policy::{OnExpiry, OnUnavailable, Scope, Version};
use crate::limit::resolve::{EffectiveLimit, EffectiveLimits, Source};
use crate::limit::rule::{DEBT_TIME_MAX, Rule, refilled_in};

/// The largest cost or change of a limit, in units: 2⁴⁰.
pub const UNITS_MAX: u64 = 1 << 40;

/// The maximum number of buckets of a draw: those of eight entities and their pools over all resources, and a
/// few pools over all entities.
pub const BUCKETS_MAX: usize = 20;

/// Whole units per limit name, in the order of [`Levels::names`]; `None` for a limit that is not part of the
/// call.
pub type Units = SmallVec<[Option<u64>; 2]>;
/// Changes per limit name, in the order of [`Levels::names`]; `None` for a limit that is not part of the
/// call.
pub type Deltas = SmallVec<[Option<i64>; 2]>;

/// A subject's levels, its own first, as of a version.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_field_names, reason = "the levels are what it has")]
pub struct Levels {
    version: Version,
    names: Box<[LimitName]>,
    /// The maximum units of each name in one call: more could not be counted exactly.
    units_max: Box<[u64]>,
    /// The hash of each name, for digests of amounts.
    keys: Box<[u64]>,
    levels: Box<[Level]>,
    on_unavailable: (OnUnavailable, Source),
    on_expiry: (OnExpiry, Source),
    /// The first entity among the levels that is disabled.
    disabled: Option<EntityId>,
}

/// One level: a bucket and its limits. Engines treat the subject's own bucket, a parent's and a pool's alike.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Level {
    /// The key of the bucket.
    pub subject: Subject,
    /// The limits.
    pub limits: Box<[Line]>,
}

/// One limit of one level.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Line {
    /// The limit's index in [`Levels::names`].
    pub name: usize,
    /// The limit.
    pub rule: Arc<Rule>,
    /// Where it comes from.
    pub source: Source,
    /// The debt at which settling and adjusting stop taking units; `None` is unbounded.
    pub debt_max: Option<u64>,
}

/// The error for an invalid cost.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidCost {
    /// The limit is pooled, and its bucket was not named so.
    #[error("the limit `{name}` of `{subject}` is pooled: its bucket is the one across {across}")]
    Pooled {
        /// The subject.
        subject: Subject,
        /// The limit.
        name: LimitName,
        /// What it is pooled across.
        across: Across,
    },
    /// No level has such a limit.
    #[error("`{subject}` has no limit `{}`; it has {}", excerpt(name), listed(known))]
    Unknown {
        /// The subject.
        subject: Subject,
        /// The requested name.
        name: String,
        /// The known names.
        known: Vec<LimitName>,
    },
    /// The cost is empty or all zeros.
    #[error(
        "nothing is requested of `{subject}`: at least one limit needs a cost above 0; it has {}",
        listed(known)
    )]
    Nothing {
        /// The subject.
        subject: Subject,
        /// The known names.
        known: Vec<LimitName>,
    },
    /// A limit is named twice.
    #[error("the limit `{}` is requested twice", excerpt(name))]
    Twice {
        /// The limit.
        name: String,
    },
    /// More units than can be counted exactly.
    #[error("{units} units of `{name}`, more than {max}")]
    Units {
        /// The limit.
        name: String,
        /// The units.
        units: i128,
        /// The bound: 2⁴⁰, or the amount that refills in a thousand years.
        max: u64,
    },
}

/// The error for invalid levels.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidLevels {
    /// There is no level, not even the subject's own.
    #[error("there is no level")]
    Empty,
    /// A limit is named twice.
    #[error("the limit `{name}` is named twice")]
    Twice {
        /// The limit.
        name: LimitName,
    },
    /// A limit's index does not match its name.
    #[error("the limit `{name}` is not the one at index {place} of the names")]
    Misplaced {
        /// The limit.
        name: LimitName,
        /// Its index.
        place: usize,
    },
}

fn keys(names: &[LimitName]) -> Box<[u64]> {
    names.iter().map(|name| name_key(name.as_str())).collect()
}

fn units_max(names: usize, levels: &[Level]) -> Box<[u64]> {
    let mut max: Box<[u64]> = vec![UNITS_MAX; names].into();
    for line in levels.iter().flat_map(|level| &level.limits) {
        max[line.name] = max[line.name].min(refilled_in(DEBT_TIME_MAX, line.rule.shape()));
    }
    max
}

/// Whether two names are equal. For a few bytes an inlined loop is faster than a call of `memcmp`.
#[inline]
fn is_same(one: &str, other: &str) -> bool {
    let (one, other) = (one.as_bytes(), other.as_bytes());
    one.len() == other.len() && one.iter().eq(other)
}

/// `None` for each of `names` limits.
#[inline]
fn none_of(names: usize) -> Units {
    match names {
        // Most subjects have one or two limits, which need no allocation.
        0..=2 => Units::from_buf_and_len([None; 2], names),
        _ => smallvec![None; names],
    }
}

fn listed(names: &[LimitName]) -> String {
    if names.is_empty() {
        return "none".to_owned();
    }
    names.iter().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
}

impl Levels {
    /// The levels of resolved subjects, the subject's own first, then those of its parents, then the pools of
    /// all of them, as of `version`.
    ///
    /// The settings for an unavailable store and for expiry come from the subject's own policies.
    ///
    /// # Panics
    /// With no level at all.
    pub fn new(version: Version, resolved: Vec<(Subject, EffectiveLimits)>) -> Self {
        let own = &resolved.first().expect("a subject is a level by itself").1;
        let (on_unavailable, on_expiry) = (own.on_unavailable.clone(), own.on_expiry.clone());
        let mut names: Vec<LimitName> = Vec::new();
        let mut line = |held: EffectiveLimit| {
            let found = names.iter().position(|name| name == held.rule.name());
            let name = found.unwrap_or_else(|| {
                names.push(held.rule.name().clone());
                names.len() - 1
            });
            Line { name, debt_max: Some(held.rule.debt_max()), rule: held.rule, source: held.source }
        };
        let (mut levels, mut pools) = (Vec::new(), Vec::<(Subject, Vec<Line>)>::new());
        for (subject, resolved) in resolved {
            let mut own = Vec::new();
            for held in resolved.limits {
                let Some(across) = held.rule.across() else {
                    own.push(line(held));
                    continue;
                };
                let (line, pool) = (line(held), subject.pooled(across));
                let place = pools.iter().position(|(key, _)| *key == pool).unwrap_or_else(|| {
                    pools.push((pool, Vec::new()));
                    pools.len() - 1
                });
                // A subject and its parents name the same pools across entities: each counts once.
                if pools[place].1.iter().all(|other| other.name != line.name) {
                    pools[place].1.push(line);
                }
            }
            levels.push(Level { subject, limits: own.into() });
        }
        levels.extend(pools.into_iter().map(|(subject, lines)| Level { subject, limits: lines.into() }));
        let levels: Box<[Level]> = levels.into();
        let (units_max, keys) = (units_max(names.len(), &levels), keys(&names));
        let disabled = None;
        Self { version, names: names.into(), units_max, keys, levels, on_unavailable, on_expiry, disabled }
    }

    /// The levels of a lease read back from a store, to end the lease. They have no setting for an
    /// unavailable store, because no new lease draws from them.
    ///
    /// # Errors
    /// [`InvalidLevels`] if there is no level, a name is duplicated, or a limit does not match the name at
    /// its index.
    pub fn restored(
        version: Version,
        names: Vec<LimitName>,
        levels: Vec<Level>,
        on_expiry: OnExpiry,
    ) -> Result<Self, InvalidLevels> {
        if levels.is_empty() {
            return Err(InvalidLevels::Empty);
        }
        if let Some((_, name)) = names.iter().enumerate().find(|(place, name)| names[..*place].contains(name))
        {
            return Err(InvalidLevels::Twice { name: name.clone() });
        }
        let mut lines = levels.iter().flat_map(|level| &level.limits);
        if let Some(line) = lines.find(|line| names.get(line.name) != Some(line.rule.name())) {
            return Err(InvalidLevels::Misplaced { name: line.rule.name().clone(), place: line.name });
        }
        let (units_max, keys) = (units_max(names.len(), &levels), keys(&names));
        Ok(Self {
            version,
            names: names.into(),
            units_max,
            keys,
            levels: levels.into(),
            on_unavailable: (OnUnavailable::default(), Source::Defaults),
            on_expiry: (on_expiry, Source::Defaults),
            disabled: None,
        })
    }

    /// The levels with `rules` given for one call, which replace the subject's own limits of the same names.
    #[must_use]
    pub fn with_call_limits(&self, rules: impl IntoIterator<Item = Rule>) -> Self {
        let mut levels = self.clone();
        let mut names = levels.names.into_vec();
        let mut own = std::mem::take(&mut levels.levels[0].limits).into_vec();
        for rule in rules {
            let found = names.iter().position(|name| name == rule.name());
            let name = found.unwrap_or_else(|| {
                names.push(rule.name().clone());
                names.len() - 1
            });
            own.retain(|line| line.name != name);
            let rule = Arc::new(rule.of_call());
            own.push(Line { name, debt_max: Some(rule.debt_max()), rule, source: Source::Call });
        }
        levels.levels[0].limits = own.into();
        levels.units_max = units_max(names.len(), &levels.levels);
        levels.keys = keys(&names);
        levels.names = names.into();
        levels
    }

    /// The level of one bucket and one of its limits, to repair it; `None` if there is no such limit.
    pub fn single(&self, across: Option<Across>, name: &str) -> Option<Self> {
        let subject = match across {
            Some(across) => self.subject().pooled(across),
            None => self.subject().clone(),
        };
        let level = self.levels.iter().find(|level| level.subject == subject)?;
        let line = level.limits.iter().find(|line| line.rule.name().as_str() == name)?;
        let line = Line { name: 0, ..line.clone() };
        let (names, levels) =
            (vec![line.rule.name().clone()], vec![Level { subject, limits: [line].into() }]);
        Self::restored(self.version, names, levels, OnExpiry::default()).ok()
    }

    /// The levels with each rule replaced by `map`.
    #[must_use]
    pub fn map_rules(&self, mut map: impl FnMut(&Rule) -> Rule) -> Self {
        let mut levels = self.clone();
        for line in levels.levels.iter_mut().flat_map(|level| level.limits.iter_mut()) {
            line.rule = Arc::new(map(&line.rule));
            line.debt_max = line.debt_max.map(|_| line.rule.debt_max());
        }
        levels.units_max = units_max(levels.names.len(), &levels.levels);
        levels
    }

    /// The levels whose leases expire as `behaviour` says.
    #[must_use]
    pub fn with_on_expiry(mut self, behaviour: OnExpiry) -> Self {
        self.on_expiry = (behaviour, Source::Call);
        self
    }

    /// The levels whose draws do as `behaviour` says while the store is unavailable.
    #[must_use]
    pub fn with_on_unavailable(mut self, behaviour: OnUnavailable) -> Self {
        self.on_unavailable = (behaviour, Source::Call);
        self
    }

    /// The levels of which this entity is disabled.
    #[must_use]
    pub fn with_disabled(mut self, entity: Option<EntityId>) -> Self {
        self.disabled = entity;
        self
    }

    /// The levels with other bounds of debt.
    #[must_use]
    pub fn with_debt_max(mut self, mut debt_max: impl FnMut(&Subject, &Rule) -> Option<u64>) -> Self {
        for Level { subject, limits } in &mut self.levels {
            for line in limits {
                line.debt_max = debt_max(subject, &line.rule);
            }
        }
        self
    }

    /// The subject that was resolved.
    pub fn subject(&self) -> &Subject {
        &self.levels[0].subject
    }

    /// The entity that is disabled, if one is: nothing may be drawn.
    pub const fn disabled(&self) -> Option<&EntityId> {
        self.disabled.as_ref()
    }

    /// The version of the namespace that the levels were resolved at.
    pub const fn version(&self) -> Version {
        self.version
    }

    /// The names of all limits, of all levels.
    pub fn names(&self) -> &[LimitName] {
        &self.names
    }

    /// The levels, the subject's own first.
    pub fn levels(&self) -> &[Level] {
        &self.levels
    }

    /// Whether a change of this record may change the levels.
    pub fn depend_on(&self, about: &About) -> bool {
        let mut subjects = self.levels.iter().map(|level| &level.subject);
        match about {
            About::Policy(Scope::System) => true,
            About::Policy(Scope::Resource(resource)) => self.subject().resource == *resource,
            About::Policy(Scope::Entity(entity)) | About::Entity(entity) => {
                subjects.any(|subject| subject.entity == *entity)
            }
            About::Policy(Scope::Subject(changed)) => subjects.any(|subject| subject == changed),
        }
    }

    /// Whether no level has a limit.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// What an acquire does when the store is unavailable, and the source of the setting.
    pub const fn on_unavailable(&self) -> &(OnUnavailable, Source) {
        &self.on_unavailable
    }

    /// What to do with a lease that is never ended, and the source of the setting.
    pub const fn on_expiry(&self) -> &(OnExpiry, Source) {
        &self.on_expiry
    }

    /// The index of a limit in [`names`](Self::names).
    ///
    /// # Errors
    /// [`InvalidCost::Unknown`] lists the known names.
    #[inline]
    pub fn position(&self, name: &str) -> Result<usize, InvalidCost> {
        self.names.iter().position(|known| is_same(known.as_str(), name)).ok_or_else(|| {
            InvalidCost::Unknown {
                subject: self.subject().clone(),
                name: name.to_owned(),
                known: self.names.to_vec(),
            }
        })
    }

    /// The requested units of each limit.
    ///
    /// # Errors
    /// [`InvalidCost`] for an unknown or duplicated name, too many units, or a cost of zero.
    pub fn units(&self, cost: &[(&str, u64)]) -> Result<Units, InvalidCost> {
        let units = self.amounts(cost)?;
        if units.iter().flatten().all(|units| *units == 0) {
            return Err(InvalidCost::Nothing { subject: self.subject().clone(), known: self.names.to_vec() });
        }
        Ok(units)
    }

    /// Checks that a change of limit `name` by `units` is within the bound of one call.
    ///
    /// # Errors
    /// [`InvalidCost::Units`] with the bound.
    pub fn check_units(&self, name: usize, units: i128) -> Result<(), InvalidCost> {
        let max = self.units_max[name];
        if units.unsigned_abs() <= u128::from(max) {
            return Ok(());
        }
        Err(InvalidCost::Units { name: self.names[name].to_string(), units, max })
    }

    /// The [`digest`](crate::limit::lease::digest) of the units that are set, by name.
    #[inline]
    pub fn digest(&self, units: &[Option<u64>]) -> u64 {
        let set = self.keys.iter().zip(units).filter_map(|(key, units)| units.map(|units| (*key, units)));
        digest_by_key(set)
    }

    /// Units by name, possibly none or zero: the amounts that a lease is settled at.
    ///
    /// # Errors
    /// [`InvalidCost`] for an unknown or duplicated name, or too many units.
    pub fn amounts(&self, amounts: &[(&str, u64)]) -> Result<Units, InvalidCost> {
        let mut units = none_of(self.names.len());
        for (place, (name, amount)) in amounts.iter().enumerate() {
            // Callers mostly use the order of the policy.
            let is_in_order = self.names.get(place).is_some_and(|known| is_same(known.as_str(), name));
            let place = if is_in_order { place } else { self.position(name)? };
            if *amount > self.units_max[place] {
                self.check_units(place, i128::from(*amount))?;
            }
            if units[place].replace(*amount).is_some() {
                return Err(InvalidCost::Twice { name: (*name).to_owned() });
            }
        }
        Ok(units)
    }

    /// Changes by name.
    ///
    /// # Errors
    /// [`InvalidCost`] for an unknown or duplicated name, or too many units.
    pub fn deltas(&self, changes: &[(&str, i64)]) -> Result<Deltas, InvalidCost> {
        let mut deltas: Deltas = smallvec![None; self.names.len()];
        for (name, delta) in changes {
            let place = self.position(name)?;
            self.check_units(place, i128::from(*delta))?;
            if deltas[place].replace(*delta).is_some() {
                return Err(InvalidCost::Twice { name: (*name).to_owned() });
            }
        }
        Ok(deltas)
    }
}

#[cfg(test)]
#[path = "cascade_tests.rs"]
mod tests;
