//! Names of entities, resources and limits, validated once at the edge.
//!
//! `#` separates the parts of keys in stores, so names contain neither it nor control characters. Characters that
//! are invisible or change the direction of text are not allowed, and text is kept in Unicode's canonical
//! composition (NFC): two names that look alike are one name. A leading `$` and `_default_` are reserved: audit keys such as `$SYSTEM` start with the former, and stores file an
//! entity's policy for all resources under the latter.

use std::borrow::{Borrow, Cow};
use std::fmt;
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

fn check_name(name: &str, max: usize) -> Result<(), NameProblem> {
    if name.is_empty() {
        return Err(NameProblem::Empty);
    }
    if name.len() > max {
        return Err(NameProblem::Long { bytes: name.len(), max });
    }
    let is_bad = |letter: char| letter == '#' || letter.is_control() || is_hidden(letter);
    if let Some((at, letter)) = name.char_indices().find(|(_, letter)| is_bad(*letter)) {
        return Err(NameProblem::Letter { letter, at });
    }
    if name.starts_with('$') || name == DEFAULT {
        return Err(NameProblem::Reserved);
    }
    Ok(())
}

/// Limit names appear in limit text (`tpm:100k/min`), so they consist of letters, digits, `_`, `-` and `.`.
fn check_limit_name(name: &str, max: usize) -> Result<(), NameProblem> {
    check_name(name, max)?;
    let fits = |letter: char| letter.is_ascii_alphanumeric() || "_-.".contains(letter);
    match name.char_indices().find(|(_, letter)| !fits(*letter)) {
        Some((at, letter)) => Err(NameProblem::Letter { letter, at }),
        None => Ok(()),
    }
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
                match $check(&name, $max) {
                    Ok(()) => Ok(Self((&*name).into())),
                    Err(why) => Err(InvalidName { kind: $kind, name: name.into_owned(), why }),
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

impl EntityId {
    /// The entity of a stored bucket key; that of a [pool](Subject::pool) stands for all entities.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn stored(name: &str) -> Result<Self, InvalidName> {
        if name == DEFAULT { Ok(Self(name.into())) } else { Self::new(name) }
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

    /// A stored key, which may be that of a pool.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn stored(entity: &str, resource: &str) -> Result<Self, InvalidName> {
        let entity = EntityId::stored(entity)?;
        let resource = if resource == DEFAULT { None } else { Some(ResourceName::new(resource)?) };
        Ok(Self { entity, ..Self::pool(None, resource) })
    }
}

impl fmt::Display for Subject {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} on {}", self.entity, self.resource)
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
    fn pool_is_stored_under_a_reserved_name() {
        let acme = EntityId::new("acme").unwrap();
        let pool = Subject::pool(Some(acme), None);
        assert_eq!(pool.to_string(), "acme on _default_");
        assert_eq!(Subject::stored("acme", DEFAULT), Ok(pool));
        assert_eq!(Subject::stored(DEFAULT, DEFAULT), Ok(Subject::pool(None, None)));
        assert_eq!(Subject::stored("acme", "gpt"), Subject::new("acme", "gpt"));
        assert!(Subject::new("acme", DEFAULT).is_err() && Subject::stored("$all", "gpt").is_err());
    }
}
