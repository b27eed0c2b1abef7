//! Names of keys, and the hash tag ("home") of each tree of entities.
//!
//! Keys begin with `tidegate:{…}:`. On a cluster the hash tag in braces decides which server has them.
//! Records and the index of subjects have the tag `{namespace}`; on a single server buckets and leases do
//! too. On a cluster those have the tag of their tree, one of 256 such as `{namespace#07}`, because a script
//! cannot reach keys of two slots. The first draw of a tree assigns its tag, which never changes.

use std::hash::BuildHasher as _;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ::redis::Cmd;
use foldhash::HashMap;
use foldhash::fast::FixedState;
use sha2::{Digest, Sha256};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{Across, EntityId, Namespace, Subject};
use tokio::time::Instant;

use super::connection::Connection;
use super::script::REGISTER;
use crate::error::StoreError;
use crate::sync::lock;
use crate::two_generations::{Hashed, TwoGenerations};

/// The most leases whose homes are cached.
const LEASES_MAX: usize = 1 << 18;
/// The most subjects whose registration is cached.
const REGISTRATIONS_MAX: usize = 100_000;
/// After this time a subject is registered again: a repair of the index may have removed it before it had a
/// bucket.
pub(super) const REGISTRATION_TTL: Duration = Duration::from_secs(600);

/// Ended leases whose ids were made in the same moment share a hash, because a TTL per lease would cost more
/// than the rest of a step. A moment lasts 2⁶ ms: few enough leases that the server expires the hash without
/// a pause.
const MOMENT_BITS: u32 = 6;

/// The moment in which a lease's id was made; `None` for an id that the caller chose.
pub(super) fn moment_of(lease: LeaseId) -> Option<u64> {
    (!lease.is_chosen()).then(|| lease.millis() >> MOMENT_BITS)
}

/// A hash tag of a namespace; `None` is the tag of its records.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Home(Option<u8>);

/// The distribution of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// One hash tag for everything.
    One,
    /// A hash tag for each tree.
    Trees,
}

impl Layout {
    pub(super) const fn as_str(self) -> &'static str {
        match self {
            Self::One => "one",
            Self::Trees => "trees",
        }
    }
}

/// A lease and its home.
struct LeaseHome(LeaseId, Home);

impl Hashed for LeaseHome {
    fn key_hash(&self) -> u64 {
        FixedState::default().hash_one(self.0)
    }
}

/// The keys of a namespace.
pub(super) struct Keyspace {
    namespace: String,
    layout: Layout,
    registrations: Mutex<HashMap<Subject, (Home, Instant)>>,
    /// The homes of leases that this process drew or found, with several homes.
    leases: Mutex<TwoGenerations<LeaseHome>>,
    /// Subjects registered by this process since the last housekeeping.
    registered: AtomicUsize,
}

impl Keyspace {
    pub(super) fn new(namespace: &Namespace, layout: Layout) -> Self {
        // Braces would end the hash tag.
        let namespace = namespace.as_str().replace('%', "%25").replace('{', "%7B").replace('}', "%7D");
        Self {
            namespace,
            layout,
            registrations: Mutex::default(),
            leases: Mutex::new(TwoGenerations::new(LEASES_MAX)),
            registered: AtomicUsize::new(0),
        }
    }

    /// The prefix of the keys of a home.
    fn prefix(&self, home: Home) -> String {
        match home.0 {
            None => format!("tidegate:{{{}}}:", self.namespace),
            Some(number) => format!("tidegate:{{{}#{number:02x}}}:", self.namespace),
        }
    }

    /// A key of records, the index and other administrative data.
    pub(super) fn admin(&self, what: &str) -> String {
        self.prefix(Home(None)) + what
    }

    pub(super) fn clock(&self, home: Home) -> String {
        self.prefix(home) + "clock"
    }

    pub(super) fn open_leases(&self, home: Home) -> String {
        self.prefix(home) + "open"
    }

    /// The prefix of the keys of open leases.
    pub(super) fn leases(&self, home: Home) -> String {
        self.prefix(home) + "l:"
    }

    /// The key of an open lease.
    pub(super) fn lease(&self, home: Home, lease: LeaseId) -> String {
        format!("{}{lease}", self.leases(home))
    }

    /// The prefix of the hashes of ended leases.
    pub(super) fn moments(&self, home: Home) -> String {
        self.prefix(home) + "e:"
    }

    pub(super) fn bucket(&self, home: Home, subject: &Subject) -> String {
        format!("{}b:{}#{}", self.prefix(home), subject.entity, subject.resource)
    }

    pub(super) fn usage(&self, home: Home, subject: &Subject) -> String {
        format!("{}u:{}#{}", self.prefix(home), subject.entity, subject.resource)
    }

    /// A pattern that matches the keys of buckets and usage.
    pub(super) fn pattern(&self) -> String {
        let mut namespace = String::new();
        for letter in self.namespace.chars() {
            if matches!(letter, '*' | '?' | '[' | ']' | '^' | '\\') {
                namespace.push('\\');
            }
            namespace.push(letter);
        }
        format!("tidegate:{{{namespace}*}}:[bu]:*")
    }

    /// The hash tag, entity and resource of a key, if it is a bucket or usage of this namespace.
    pub(super) fn subject_in(&self, key: &str) -> Option<(String, String, String)> {
        let rest = key.strip_prefix("tidegate:{")?.strip_prefix(&self.namespace)?;
        let (home, rest) = rest.split_once("}:")?;
        let subject = rest.strip_prefix("b:").or_else(|| rest.strip_prefix("u:"))?;
        let (entity, resource) = subject.split_once('#')?;
        let home = if home.is_empty() { home } else { home.strip_prefix('#')? };
        // Keys of other namespaces may look similar.
        let is_home = match self.layout {
            Layout::One => home.is_empty(),
            Layout::Trees => home.len() == 2 && self.parse(home.as_bytes()).is_ok(),
        };
        crate::tables::subject(entity, resource).ok().filter(|_| is_home)?;
        Some((home.to_owned(), entity.to_owned(), resource.to_owned()))
    }

    /// The home of records, whose clock dates them.
    pub(super) const fn admin_home() -> Home {
        Home(None)
    }

    pub(super) const fn layout(&self) -> Layout {
        self.layout
    }

    /// Why levels cannot have such pools: those of different trees would need them in different places.
    pub(super) const fn pool_refusal(&self, across: Across) -> Option<&'static str> {
        match (self.layout, across) {
            (Layout::One, _) | (Layout::Trees, Across::Resources) => None,
            (Layout::Trees, Across::Entities | Across::Both) => Some(
                "on Redis Cluster the buckets of different entities are on different servers, and no draw is all or \
                 nothing across servers; use `across=resources`, a common parent with `cascade`, or one server",
            ),
        }
    }

    /// The home of these levels. Registers their subjects in the index if they are new.
    pub(super) async fn register(
        &self,
        connection: &Connection,
        levels: &Levels,
    ) -> Result<Home, StoreError> {
        let subjects = || levels.levels().iter().map(|level| &level.subject);
        if let Some(home) = self.cached_home(subjects()) {
            return Ok(home);
        }
        for across in subjects().filter_map(Subject::across) {
            if let Some(why) = self.pool_refusal(across) {
                return Err(StoreError::Invalid { what: format!("a limit counts across={across}: {why}") });
            }
        }
        // Pools come after the lineage.
        let root = subjects().rfind(|subject| subject.across().is_none()).unwrap_or_else(|| levels.subject());
        let new = match self.layout {
            Layout::One => String::new(),
            Layout::Trees => format!("{:02x}", Sha256::digest(root.entity.as_str())[0]),
        };
        let mut args = vec![new.as_str()];
        for subject in subjects() {
            args.extend([subject.entity.as_str(), subject.resource.as_str()]);
        }
        let keys = ["homes", "index", "trees"].map(|key| self.admin(key));
        let (home, conflict): (Vec<u8>, Option<(String, String)>) =
            connection.run(&REGISTER, &keys, &args).await?;
        if let Some((entity, other)) = conflict {
            return Err(cross_tree_error(&entity, &other));
        }
        let home = self.parse(&home)?;
        self.cache_home(subjects(), home);
        self.registered.fetch_add(levels.levels().len(), Ordering::Relaxed);
        Ok(home)
    }

    /// Returns and resets the number of newly registered subjects.
    pub(super) fn take_registered(&self) -> usize {
        self.registered.swap(0, Ordering::Relaxed)
    }

    /// The home of an entity's buckets, if it has one.
    pub(super) async fn home_of(
        &self,
        connection: &Connection,
        entity: &EntityId,
    ) -> Result<Option<Home>, StoreError> {
        if self.layout == Layout::One {
            return Ok(Some(Self::admin_home()));
        }
        let home: Option<Vec<u8>> =
            connection.query(&Cmd::hget(self.admin("homes"), entity.as_str())).await?;
        home.map(|home| self.parse(&home)).transpose()
    }

    /// The home of a lease, if it is cached.
    pub(super) fn home_of_lease(&self, lease: LeaseId) -> Option<Home> {
        let hash = LeaseHome(lease, Self::admin_home()).key_hash();
        lock(&self.leases).find(hash, |cached| cached.0 == lease).map(|cached| cached.1)
    }

    /// Caches the home of a lease, unless there is only one.
    pub(super) fn remember_lease(&self, lease: LeaseId, home: Home) {
        if self.layout == Layout::Trees {
            lock(&self.leases).insert(LeaseHome(lease, home), |cached| cached.0 == lease);
        }
    }

    /// All homes that are in use.
    pub(super) async fn homes(&self, connection: &Connection) -> Result<Vec<Home>, StoreError> {
        if self.layout == Layout::One {
            return Ok(vec![Self::admin_home()]);
        }
        let homes: Vec<Vec<u8>> = connection.query(&Cmd::smembers(self.admin("trees"))).await?;
        let mut homes = homes.iter().map(|home| self.parse(home)).collect::<Result<Vec<_>, _>>()?;
        homes.sort_unstable();
        Ok(homes)
    }

    fn parse(&self, home: &[u8]) -> Result<Home, StoreError> {
        if self.layout == Layout::One {
            return Ok(Self::admin_home());
        }
        let number = std::str::from_utf8(home).ok().and_then(|home| u8::from_str_radix(home, 16).ok());
        let corrupt = || StoreError::Corrupt { what: format!("the home `{}`", home.escape_ascii()) };
        number.map(|number| Home(Some(number))).ok_or_else(corrupt)
    }

    fn cached_home<'a>(&self, subjects: impl Iterator<Item = &'a Subject>) -> Option<Home> {
        let registrations = lock(&self.registrations);
        let mut home = None;
        for subject in subjects {
            let (found, at) = registrations.get(subject)?;
            // The script reports levels of different homes.
            if at.elapsed() >= REGISTRATION_TTL || home.is_some_and(|home| home != *found) {
                return None;
            }
            home = Some(*found);
        }
        home
    }

    fn cache_home<'a>(&self, subjects: impl Iterator<Item = &'a Subject>, home: Home) {
        let mut registrations = lock(&self.registrations);
        if registrations.len() >= REGISTRATIONS_MAX {
            registrations.clear();
        }
        registrations.extend(subjects.map(|subject| (subject.clone(), (home, Instant::now()))));
    }
}

/// The error for an entity that has drawn and would move to another tree.
pub(super) fn cross_tree_error(entity: &str, other: &str) -> StoreError {
    let what = format!(
        "`{entity}` and `{other}` have drawn as parts of different trees: on a cluster an entity does not move from one \
         tree to another, because their buckets are on different servers"
    );
    StoreError::Invalid { what }
}
