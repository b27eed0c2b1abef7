//! Where what is kept: the names of keys, and the home of each tree.
//!
//! All keys of a namespace begin with `tidegate:{…}:`, and what stands in braces decides, on a cluster, which server has
//! them. What administrators write, and the index of subjects, is at one place, `{namespace}`. On one server buckets and
//! leases are there too. On a cluster they are at the home of their tree, `{namespace#07}`, one of 256: whoever draws first
//! gives his tree its home, which it keeps, since no script reaches the keys of two.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use ::redis::Value;
use foldhash::HashMap;
use sha2::{Digest, Sha256};
use tidegate_core::limit::cascade::Levels;
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{EntityId, Namespace, Subject};
use tokio::time::Instant;

use super::link::Link;
use super::script::REGISTER;
use crate::error::StoreError;
use crate::sync::lock;

/// Subjects that this process knows to be known.
const KNOWN_MAX: usize = 100_000;
/// After this long a subject is made known again: what repairs the index may have found no bucket yet.
pub(super) const KNOWN_FOR: Duration = Duration::from_secs(600);

/// A lease that has ended is kept with others whose ids were made at the same moment: they are read, written and forgotten together,
/// and a key with a time to live costs more than all else of a step. As long as that, in powers of two of milliseconds:
/// few enough at any rate that a server forgets them without a pause.
const MOMENT: u32 = 6;

/// At which moment the id of a lease was made; one that was chosen tells none.
pub(super) fn moment_of(lease: LeaseId) -> Option<u64> {
    (!lease.is_chosen()).then(|| lease.millis() >> MOMENT)
}

/// Which of the homes of a namespace; the place of administrators where there is but one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(super) struct Home(Option<u8>);

/// How keys are laid out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// All at one place.
    One,
    /// Each tree at its home.
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

/// The places of a namespace.
pub(super) struct Places {
    namespace: String,
    layout: Layout,
    known: Mutex<HashMap<Subject, (Home, Instant)>>,
    /// Subjects that this process has made known since it last looked after the index.
    registered: AtomicUsize,
}

impl Places {
    pub(super) fn new(namespace: &Namespace, layout: Layout) -> Self {
        // Braces would end the part that decides where a key is.
        let namespace = namespace.as_str().replace('%', "%25").replace('{', "%7B").replace('}', "%7D");
        Self { namespace, layout, known: Mutex::default(), registered: AtomicUsize::new(0) }
    }

    /// What the keys at a home begin with.
    fn at(&self, home: Home) -> String {
        match home.0 {
            None => format!("tidegate:{{{}}}:", self.namespace),
            Some(number) => format!("tidegate:{{{}#{number:02x}}}:", self.namespace),
        }
    }

    /// A key of what administrators write.
    pub(super) fn admin(&self, what: &str) -> String {
        self.at(Home(None)) + what
    }

    pub(super) fn clock(&self, home: Home) -> String {
        self.at(home) + "clock"
    }

    pub(super) fn open_leases(&self, home: Home) -> String {
        self.at(home) + "open"
    }

    /// What the keys of leases begin with.
    pub(super) fn leases(&self, home: Home) -> String {
        self.at(home) + "l:"
    }

    /// Where a lease is while it is open.
    pub(super) fn lease(&self, home: Home, lease: LeaseId) -> String {
        format!("{}{lease}", self.leases(home))
    }

    /// What the keys of leases that have ended begin with.
    pub(super) fn moments(&self, home: Home) -> String {
        self.at(home) + "e:"
    }

    pub(super) fn bucket(&self, home: Home, subject: &Subject) -> String {
        format!("{}b:{}#{}", self.at(home), subject.entity, subject.resource)
    }

    pub(super) fn usage(&self, home: Home, subject: &Subject) -> String {
        format!("{}u:{}#{}", self.at(home), subject.entity, subject.resource)
    }

    /// What the keys of buckets and usage look like.
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

    /// Whose bucket or usage a key is, if it is one of this namespace's: where it is, the entity and the resource.
    pub(super) fn subject_in(&self, key: &str) -> Option<(String, String, String)> {
        let rest = key.strip_prefix("tidegate:{")?.strip_prefix(&self.namespace)?;
        let (home, rest) = rest.split_once("}:")?;
        let subject = rest.strip_prefix("b:").or_else(|| rest.strip_prefix("u:"))?;
        let (entity, resource) = subject.split_once('#')?;
        let home = if home.is_empty() { home } else { home.strip_prefix('#')? };
        // Others may have keys that look like ours.
        let is_home = match self.layout {
            Layout::One => home.is_empty(),
            Layout::Trees => home.len() == 2 && self.parse(home.as_bytes()).is_ok(),
        };
        crate::tables::subject(entity, resource).ok().filter(|_| is_home)?;
        Some((home.to_owned(), entity.to_owned(), resource.to_owned()))
    }

    /// The home of administrators' records, whose clock dates them.
    pub(super) const fn center() -> Home {
        Home(None)
    }

    pub(super) const fn layout(&self) -> Layout {
        self.layout
    }

    /// The home of these levels, which are made known where they are not.
    pub(super) async fn register(&self, link: &Link, levels: &Levels) -> Result<Home, StoreError> {
        let subjects = || levels.levels().iter().map(|level| &level.subject);
        if let Some(home) = self.remembered(subjects()) {
            return Ok(home);
        }
        let root = subjects().next_back().unwrap_or_else(|| levels.subject());
        let new = match self.layout {
            Layout::One => String::new(),
            Layout::Trees => format!("{:02x}", Sha256::digest(root.entity.as_str())[0]),
        };
        let mut args = vec![new.as_bytes()];
        for subject in subjects() {
            args.extend([subject.entity.as_str().as_bytes(), subject.resource.as_str().as_bytes()]);
        }
        let keys = ["homes", "index", "trees"].map(|key| self.admin(key));
        let keys = [keys[0].as_bytes(), keys[1].as_bytes(), keys[2].as_bytes()];
        let home = match link.run(&REGISTER, &keys, &args).await? {
            Value::BulkString(home) => self.parse(&home)?,
            Value::Array(pair) => return Err(parted(&pair)),
            other => return Err(link.whose().unexpected(&other)),
        };
        self.remember(subjects(), home);
        self.registered.fetch_add(levels.levels().len(), Ordering::Relaxed);
        Ok(home)
    }

    /// How many subjects were made known since the last call.
    pub(super) fn take_registered(&self) -> usize {
        self.registered.swap(0, Ordering::Relaxed)
    }

    /// Where an entity's buckets are, if it has any.
    pub(super) async fn home_of(&self, link: &Link, entity: &EntityId) -> Result<Option<Home>, StoreError> {
        if self.layout == Layout::One {
            return Ok(Some(Self::center()));
        }
        let mut call = ::redis::cmd("HGET");
        call.arg(self.admin("homes")).arg(entity.as_str());
        match link.query(&call).await? {
            Value::Nil => Ok(None),
            Value::BulkString(home) => self.parse(&home).map(Some),
            other => Err(link.whose().unexpected(&other)),
        }
    }

    /// Every home where something may be.
    pub(super) async fn homes(&self, link: &Link) -> Result<Vec<Home>, StoreError> {
        if self.layout == Layout::One {
            return Ok(vec![Self::center()]);
        }
        let mut call = ::redis::cmd("SMEMBERS");
        call.arg(self.admin("trees"));
        let (Value::Array(homes) | Value::Set(homes)) = link.query(&call).await? else {
            return Ok(Vec::new());
        };
        let parse = |home: &Value| match home {
            Value::BulkString(home) => self.parse(home),
            other => Err(link.whose().unexpected(other)),
        };
        let mut homes = homes.iter().map(parse).collect::<Result<Vec<_>, _>>()?;
        homes.sort_unstable();
        Ok(homes)
    }

    fn parse(&self, home: &[u8]) -> Result<Home, StoreError> {
        if self.layout == Layout::One {
            return Ok(Self::center());
        }
        let number = std::str::from_utf8(home).ok().and_then(|home| u8::from_str_radix(home, 16).ok());
        let corrupt = || StoreError::Corrupt { what: format!("the home `{}`", home.escape_ascii()) };
        number.map(|number| Home(Some(number))).ok_or_else(corrupt)
    }

    fn remembered<'a>(&self, subjects: impl Iterator<Item = &'a Subject>) -> Option<Home> {
        let known = lock(&self.known);
        let mut home = None;
        for subject in subjects {
            let (found, at) = known.get(subject)?;
            // Two homes are for the engine to refuse.
            if at.elapsed() >= KNOWN_FOR || home.is_some_and(|home| home != *found) {
                return None;
            }
            home = Some(*found);
        }
        home
    }

    fn remember<'a>(&self, subjects: impl Iterator<Item = &'a Subject>, home: Home) {
        let mut known = lock(&self.known);
        if known.len() >= KNOWN_MAX {
            known.clear();
        }
        known.extend(subjects.map(|subject| (subject.clone(), (home, Instant::now()))));
    }
}

/// Two entities of one draw whose homes are different.
fn parted(pair: &[Value]) -> StoreError {
    let shown = |value: &Value| match value {
        Value::BulkString(text) => String::from_utf8_lossy(text).into_owned(),
        other => format!("{other:?}"),
    };
    let names: Vec<String> = pair.iter().map(shown).collect();
    moved(&names.first().cloned().unwrap_or_default(), &names.get(1).cloned().unwrap_or_default())
}

/// Why an entity that has drawn cannot be below one of another tree.
pub(super) fn moved(entity: &str, other: &str) -> StoreError {
    let what = format!(
        "`{entity}` and `{other}` have drawn as parts of different trees: on a cluster an entity does not move from one \
         tree to another, because their buckets are on different servers"
    );
    StoreError::Invalid { what }
}
