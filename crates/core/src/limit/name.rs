//! Names of entities, resources and limits, validated once at the edge.
//!
//! `#` separates the parts of keys in stores, so names contain neither it nor control characters. Characters that
//! are invisible or change the direction of text are not allowed, and text is kept in Unicode's canonical
//! composition (NFC): two names that look alike are one name. Stores may have names from before this rule. A
//! leading `$` and `_default_` are reserved: audit keys such as `$SYSTEM` start with the former, and stores file
//! an entity's policy for all resources under the latter.

use std::borrow::{Borrow, Cow};
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use thiserror::Error;
use unicode_normalization::{IsNormalized, UnicodeNormalization as _, is_nfc_quick};

use crate::excerpt::{excerpt, is_invisible};

/// The maximum length of an entity id or resource name, in bytes.
pub const NAME_MAX: usize = 256;
/// The maximum length of a limit name, in bytes.
pub const LIMIT_NAME_MAX: usize = 64;
/// The reserved name that stores use for "all resources" and "all entities".
pub const DEFAULT: &str = "_default_";

/// The error for an invalid name.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{kind} `{}` {why}", excerpt(name))]
pub struct InvalidName {
    /// The kind of name.
    pub kind: &'static str,
    /// The name.
    pub name: String,
    /// What is wrong with it.
    pub why: NameProblem,
}

/// What is wrong with a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NameProblem {
    /// It is empty.
    #[error("is empty")]
    Empty,
    /// It is too long.
    #[error("has {bytes} bytes, more than {max}")]
    Long {
        /// Its length in bytes.
        bytes: usize,
        /// The bound.
        max: usize,
    },
    /// A character that is not allowed.
    #[error("has {letter:?} at byte {at}, which is not allowed")]
    Letter {
        /// The character.
        letter: char,
        /// Its byte offset.
        at: usize,
    },
    /// It is reserved.
    #[error("is reserved: a leading `$` and `{DEFAULT}` belong to the system")]
    Reserved,
}

/// Whether a reader cannot see the character, or it reorders others: also those of scripts and emoji, which text
/// may have and names may not.
const fn is_hidden(letter: char) -> bool {
    is_invisible(letter)
        || matches!(letter,
            '\u{ad}' | '\u{34f}' | '\u{115f}'..='\u{1160}' | '\u{17b4}'..='\u{17b5}' | '\u{180b}'..='\u{180f}'
            | '\u{200c}'..='\u{200d}' | '\u{206a}'..='\u{206f}' | '\u{3164}' | '\u{fe00}'..='\u{fe0f}'
            | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// The text in NFC. Most names are.
fn composed(name: &str) -> Cow<'_, str> {
    // Longer text is refused anyway.
    if name.is_ascii() || name.len() > NAME_MAX || is_nfc_quick(name.chars()) == IsNormalized::Yes {
        return Cow::Borrowed(name);
    }
    Cow::Owned(name.nfc().collect())
}

/// A display name as it is written: composed (NFC), as names are.
pub(crate) fn composed_text(text: &str) -> String {
    text.nfc().collect()
}

/// The first character of a display name that a reader cannot see or that reorders others, and its place.
pub(crate) fn hidden_letter(text: &str) -> Option<(usize, char)> {
    text.char_indices().find(|(_, letter)| letter.is_control() || is_hidden(*letter))
}

fn check_letters(name: &str, is_bad: impl Fn(char) -> bool) -> Result<(), NameProblem> {
    match name.char_indices().find(|(_, letter)| is_bad(*letter)) {
        Some((at, letter)) => Err(NameProblem::Letter { letter, at }),
        None => Ok(()),
    }
}

fn check_name(name: &str, max: usize) -> Result<(), NameProblem> {
    if name.is_empty() {
        return Err(NameProblem::Empty);
    }
    if name.len() > max {
        return Err(NameProblem::Long { bytes: name.len(), max });
    }
    check_letters(name, |letter| letter == '#' || letter.is_control())?;
    if name.starts_with('$') || name == DEFAULT {
        return Err(NameProblem::Reserved);
    }
    Ok(())
}

/// Limit names appear in limit text (`tpm:100k/min`), so they consist of letters, digits, `_`, `-` and `.`.
fn check_limit_name(name: &str, max: usize) -> Result<(), NameProblem> {
    check_name(name, max)?;
    check_letters(name, |letter| !letter.is_ascii_alphanumeric() && !"_-.".contains(letter))
}

macro_rules! name {
    ($(#[$doc:meta])* $Name:ident, $kind:literal, $check:ident, $max:ident) => {
        $(#[$doc])*
        #[derive(Clone, Eq, PartialOrd, Ord, Hash)]
        #[expect(clippy::derived_hash_with_manual_eq, reason = "the same text is equal, and hashes the same")]
        pub struct $Name(Arc<str>);

        impl PartialEq for $Name {
            #[inline]
            fn eq(&self, other: &Self) -> bool {
                // Most compared names share one allocation.
                Arc::ptr_eq(&self.0, &other.0) || self.0 == other.0
            }
        }

        impl $Name {
            /// Validates a name, and composes its characters (NFC).
            ///
            /// # Errors
            /// [`InvalidName`] with the name and what is wrong with it.
            pub fn new(name: &str) -> Result<Self, InvalidName> {
                let name = composed(name);
                match check_letters(&name, is_hidden) {
                    Ok(()) => Self::stored(&name),
                    Err(why) => Err(InvalidName { kind: $kind, name: name.into_owned(), why }),
                }
            }

            /// A name as a store has it. Earlier versions stored names that [`new`](Self::new) would compose
            /// or refuse, and their records are still found under these.
            ///
            /// # Errors
            /// [`InvalidName`] if no version would have stored it.
            pub fn stored(name: &str) -> Result<Self, InvalidName> {
                match $check(name, $max) {
                    Ok(()) => Ok(Self(name.into())),
                    Err(why) => Err(InvalidName { kind: $kind, name: name.to_owned(), why }),
                }
            }

            /// The name as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl Borrow<str> for $Name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl TryFrom<&str> for $Name {
            type Error = InvalidName;

            fn try_from(name: &str) -> Result<Self, InvalidName> {
                Self::new(name)
            }
        }

        impl fmt::Display for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.pad(&self.0)
            }
        }

        impl fmt::Debug for $Name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:?}", &*self.0)
            }
        }
    };
}

name!(
    /// The id of an entity: a tenant, a team, a user, an API key.
    EntityId, "the entity", check_name, NAME_MAX
);
name!(
    /// The name of a resource: a model, an endpoint, a service.
    ResourceName, "the resource", check_name, NAME_MAX
);
name!(
    /// The name of a limit within a subject.
    LimitName, "the limit", check_limit_name, LIMIT_NAME_MAX
);

name!(
    /// An isolated part of a store with its own entities, policies and buckets.
    Namespace, "the namespace", check_name, NAME_MAX
);

/// The subjects that share the bucket of a pooled limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Across {
    /// All resources of an entity.
    Resources,
    /// All entities on a resource.
    Entities,
    /// All entities on all resources.
    Both,
}

impl Across {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Resources, Self::Entities, Self::Both];

    /// The name in lower case, as in the text of a limit.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Resources => "resources",
            Self::Entities => "entities",
            Self::Both => "both",
        }
    }
}

impl fmt::Display for Across {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// The error for text that is not an [`Across`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{text}` is not one of `resources`, `entities` and `both`")]
pub struct InvalidAcross {
    /// The text.
    pub text: String,
}

impl FromStr for Across {
    type Err = InvalidAcross;

    fn from_str(text: &str) -> Result<Self, InvalidAcross> {
        let found = Self::ALL.into_iter().find(|across| across.as_str() == text);
        found.ok_or_else(|| InvalidAcross { text: excerpt(text) })
    }
}

/// A limit's name and which subjects share its bucket, as text `tpm` or `tpm,across=entities`.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LimitKey {
    /// The name.
    pub name: LimitName,
    /// Which subjects share the bucket; `None` if each has one of its own.
    pub across: Option<Across>,
}

impl From<LimitName> for LimitKey {
    fn from(name: LimitName) -> Self {
        Self { name, across: None }
    }
}

impl fmt::Display for LimitKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.across {
            None => f.pad(self.name.as_str()),
            Some(across) => f.pad(&format!("{},across={across}", self.name)),
        }
    }
}

/// The error for text that is not a [`LimitKey`].
#[derive(Debug, Clone, PartialEq, Eq, Error)]
pub enum InvalidLimitKey {
    /// The name is invalid.
    #[error(transparent)]
    Name(#[from] InvalidName),
    /// What follows `,across=` is none of its values.
    #[error(transparent)]
    Across(#[from] InvalidAcross),
}

impl FromStr for LimitKey {
    type Err = InvalidLimitKey;

    fn from_str(text: &str) -> Result<Self, InvalidLimitKey> {
        let (name, across) = match text.split_once(",across=") {
            Some((name, across)) => (name, Some(across.parse()?)),
            None => (text, None),
        };
        Ok(Self { name: LimitName::new(name)?, across })
    }
}

/// The key of a bucket: an entity's use of a resource, or a [pool](Self::pool).
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Subject {
    /// The entity.
    pub entity: EntityId,
    /// The resource.
    pub resource: ResourceName,
}

impl Subject {
    /// The subject of two names.
    ///
    /// # Errors
    /// [`InvalidName`] with the wrong name of the two and the reason.
    pub fn new(entity: &str, resource: &str) -> Result<Self, InvalidName> {
        Ok(Self { entity: EntityId::new(entity)?, resource: ResourceName::new(resource)? })
    }

    /// The key of a bucket shared by all entities, all resources, or both; `None` stands for all.
    pub fn pool(entity: Option<EntityId>, resource: Option<ResourceName>) -> Self {
        Self {
            entity: entity.unwrap_or_else(|| EntityId(DEFAULT.into())),
            resource: resource.unwrap_or_else(|| ResourceName(DEFAULT.into())),
        }
    }

    /// The entity; `None` for a pool of all entities.
    pub fn one_entity(&self) -> Option<&EntityId> {
        Some(&self.entity).filter(|entity| entity.as_str() != DEFAULT)
    }

    /// The resource; `None` for a pool of all resources.
    pub fn one_resource(&self) -> Option<&ResourceName> {
        Some(&self.resource).filter(|resource| resource.as_str() != DEFAULT)
    }

    /// The key of the pool that this subject's use counts in.
    #[must_use]
    pub fn pooled(&self, across: Across) -> Self {
        let entity = matches!(across, Across::Resources).then(|| self.entity.clone());
        let resource = matches!(across, Across::Entities).then(|| self.resource.clone());
        Self::pool(entity, resource)
    }

    /// Which subjects share the bucket; `None` if it is not a pool.
    pub fn across(&self) -> Option<Across> {
        match (self.one_entity(), self.one_resource()) {
            (Some(_), Some(_)) => None,
            (Some(_), None) => Some(Across::Resources),
            (None, Some(_)) => Some(Across::Entities),
            (None, None) => Some(Across::Both),
        }
    }

    /// A [stored](EntityId::stored) key, which may be that of a pool.
    ///
    /// # Errors
    /// [`InvalidName`] with the wrong name of the two and the reason.
    pub fn stored(entity: &str, resource: &str) -> Result<Self, InvalidName> {
        let entity = Some(entity).filter(|name| *name != DEFAULT).map(EntityId::stored).transpose()?;
        let resource =
            Some(resource).filter(|name| *name != DEFAULT).map(ResourceName::stored).transpose()?;
        Ok(Self::pool(entity, resource))
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.across() {
            None => write!(f, "{} on {}", self.entity, self.resource),
            Some(Across::Resources) => write!(f, "{} on all resources", self.entity),
            Some(Across::Entities) => write!(f, "all entities on {}", self.resource),
            Some(Across::Both) => f.write_str("all entities on all resources"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invalid_name_error_has_offset_and_bound() {
        let long = "x".repeat(NAME_MAX + 1);
        let table = [
            ("", "the entity `` is empty"),
            ("a#b", "the entity `a#b` has '#' at byte 1, which is not allowed"),
            ("a\nb", "the entity `a\\nb` has '\\n' at byte 1, which is not allowed"),
            ("$SYSTEM", "is reserved"),
            ("_default_", "is reserved"),
            (&long, "…` has 257 bytes, more than 256"),
        ];
        for (name, sentence) in table {
            let error = EntityId::new(name).unwrap_err().to_string();
            assert!(error.contains(sentence), "{error}");
        }
        for good in ["a", "user 7", "größe", "org/team:7", "a$", "_default"] {
            assert_eq!(EntityId::new(good).unwrap().as_str(), good);
        }
    }

    #[test]
    fn names_that_look_alike_are_one_name() {
        let composed = EntityId::new("caf\u{e9}").unwrap();
        assert_eq!(EntityId::new("cafe\u{301}").unwrap(), composed);
        assert_eq!(ResourceName::new("\u{1100}\u{1161}").unwrap().as_str(), "\u{ac00}");
        for hidden in
            ["a\u{200b}", "\u{feff}a", "a\u{202e}b", "a\u{2066}b", "a\u{ad}b", "a\u{fe0f}", "a\u{e0041}"]
        {
            let error = EntityId::new(hidden).unwrap_err();
            assert!(matches!(error.why, NameProblem::Letter { .. }), "{error}");
        }
    }

    #[test]
    fn stored_names_are_kept_as_they_are() {
        for name in ["cafe\u{301}", "a\u{200c}b", "a\u{fe0f}"] {
            assert_eq!(EntityId::stored(name).unwrap().as_str(), name);
            let subject = Subject::stored(name, name).unwrap();
            assert_eq!((subject.entity.as_str(), subject.resource.as_str()), (name, name));
        }
        for bad in ["", "a#b", "a\nb", "$SYSTEM", DEFAULT] {
            assert!(ResourceName::stored(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn limit_name_has_no_separators() {
        assert!(LimitName::new("tpm-in.v2_x").is_ok());
        let error = LimitName::new("a:b").unwrap_err().to_string();
        assert_eq!(error, "the limit `a:b` has ':' at byte 1, which is not allowed");
        assert!(LimitName::new(&"x".repeat(LIMIT_NAME_MAX + 1)).is_err());
    }

    #[test]
    fn invalid_subject_error_has_the_wrong_name() {
        assert_eq!(Subject::new("a", "b").unwrap().to_string(), "a on b");
        assert_eq!(Subject::new("a", "").unwrap_err().kind, "the resource");
    }

    #[test]
    fn pools_of_a_subject_are_named_by_what_they_count() {
        let subject = Subject::new("acme", "gpt").unwrap();
        assert_eq!(subject.across(), None);
        let table = [
            (Across::Resources, "acme on all resources"),
            (Across::Entities, "all entities on gpt"),
            (Across::Both, "all entities on all resources"),
        ];
        for (across, shown) in table {
            let pool = subject.pooled(across);
            assert_eq!((pool.to_string().as_str(), pool.across()), (shown, Some(across)));
            assert_eq!(across.as_str().parse(), Ok(across));
        }
        for text in ["tpm", "tpm,across=both"] {
            assert_eq!(text.parse::<LimitKey>().unwrap().to_string(), text);
        }
        assert!("tpm,across=x".parse::<LimitKey>().is_err() && "t pm".parse::<LimitKey>().is_err());
        let error = "entity".parse::<Across>().unwrap_err().to_string();
        assert_eq!(error, "`entity` is not one of `resources`, `entities` and `both`");
    }

    #[test]
    fn pool_is_stored_under_a_reserved_name() {
        let acme = EntityId::new("acme").unwrap();
        let pool = Subject::pool(Some(acme), None);
        assert_eq!(pool.to_string(), "acme on all resources");
        assert_eq!(Subject::stored("acme", DEFAULT), Ok(pool));
        assert_eq!(Subject::stored(DEFAULT, DEFAULT), Ok(Subject::pool(None, None)));
        assert_eq!(Subject::stored("acme", "gpt"), Subject::new("acme", "gpt"));
        assert!(Subject::new("acme", DEFAULT).is_err() && Subject::stored("$all", "gpt").is_err());
    }
}
