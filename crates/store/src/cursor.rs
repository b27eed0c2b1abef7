//! Cursors of listings: the position of the last item of a page.
//!
//! `#` separates the parts of a position, because names do not contain it. Cursors come from clients, so
//! parsing validates them.

use tidegate_core::excerpt::excerpt;
use tidegate_core::limit::name::{DEFAULT, EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::Scope;
use tidegate_core::limit::token::TokenId;
use tidegate_core::limit::usage::Usage;
use tidegate_core::time::Stamp;

use crate::error::StoreError;
use crate::ledger::UsageOf;
use crate::page::Cursor;

/// The position in a listing of usage: a page begins after this resource or entity, limit and window.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UsagePlace<'a> {
    /// The resource, in the usage of an entity; the entity, in that of a resource.
    pub name: &'a str,
    /// The limit.
    pub limit: &'a str,
    /// When the window began.
    pub start: Stamp,
}

impl<'a> UsagePlace<'a> {
    /// Parses a cursor of [`of`](Self::of).
    pub(crate) fn parse(cursor: &'a Cursor) -> Result<Self, StoreError> {
        let mut parts = cursor.as_str().split('#');
        let place =
            (parts.next(), parts.next(), parts.next().and_then(|start| start.parse().ok()), parts.next());
        match place {
            (Some(name), Some(limit), Some(start), None) => {
                Ok(Self { name, limit, start: Stamp::from_micros(start) })
            }
            _ => Err(bad_cursor(cursor.as_str())),
        }
    }

    /// Where the page after this line begins.
    pub(crate) fn of(of: &UsageOf, line: &Usage) -> Cursor {
        let name = name_of(of, &line.subject);
        Cursor::new(format!("{name}#{}#{}", line.limit, line.start.as_micros()))
    }
}

/// The part of a subject that a usage query leaves open.
pub(crate) fn name_of<'a>(of: &UsageOf, subject: &'a Subject) -> &'a str {
    match of {
        UsageOf::Entity(_) => subject.resource.as_str(),
        UsageOf::Resource(_) => subject.entity.as_str(),
    }
}

/// Where the page after this policy begins.
pub(crate) fn scope_cursor(scope: &Scope) -> Cursor {
    Cursor::new(match scope {
        Scope::System => "s".to_owned(),
        Scope::Resource(resource) => format!("r#{resource}"),
        Scope::Entity(entity) => format!("e#{entity}"),
        Scope::Subject(subject) => format!("x#{}#{}", subject.entity, subject.resource),
    })
}

/// Parses a cursor of [`scope_cursor`].
pub(crate) fn parse_scope(cursor: &Cursor) -> Result<Scope, StoreError> {
    let text = cursor.as_str();
    let parts: Vec<&str> = text.split('#').collect();
    let bad = |_| bad_cursor(text);
    match parts[..] {
        ["s"] => Ok(Scope::System),
        ["r", resource] => Ok(Scope::Resource(ResourceName::stored(resource).map_err(bad)?)),
        ["e", entity] => Ok(Scope::Entity(EntityId::stored(entity).map_err(bad)?)),
        ["x", entity, resource] => Ok(Scope::Subject(Subject::stored(entity, resource).map_err(bad)?)),
        _ => Err(bad_cursor(text)),
    }
}

/// Where the page after this entity begins.
pub(crate) fn entity_cursor(entity: &EntityId) -> Cursor {
    Cursor::new(entity.as_str())
}

/// Parses a cursor of [`entity_cursor`].
pub(crate) fn parse_entity(cursor: &Cursor) -> Result<EntityId, StoreError> {
    let subject = Subject::stored(cursor.as_str(), DEFAULT).map_err(|_| bad_cursor(cursor.as_str()))?;
    Ok(subject.entity)
}

/// Where the page after this token begins.
pub(crate) fn token_cursor(token: &TokenId) -> Cursor {
    Cursor::new(token.as_str())
}

/// Parses a cursor of [`token_cursor`].
pub(crate) fn parse_token(cursor: &Cursor) -> Result<TokenId, StoreError> {
    TokenId::new(cursor.as_str()).map_err(|_| bad_cursor(cursor.as_str()))
}

/// Where the page after the item of this number begins.
pub(crate) fn number_cursor(number: u64) -> Cursor {
    Cursor::new(number.to_string())
}

/// Parses a cursor of [`number_cursor`].
pub(crate) fn parse_number(cursor: &Cursor) -> Result<u64, StoreError> {
    cursor.as_str().parse().map_err(|_| bad_cursor(cursor.as_str()))
}

/// The error for an invalid cursor.
pub(crate) fn bad_cursor(text: &str) -> StoreError {
    StoreError::Invalid { what: format!("the cursor \"{}\" is not valid for this listing", excerpt(text)) }
}

#[cfg(test)]
mod tests {
    use tidegate_core::limit::name::LimitName;
    use tidegate_core::limit::usage::{Tally, Window};

    use super::*;

    #[test]
    fn every_cursor_roundtrips() {
        let subject = Subject::new("größe 7", "gpt:4").unwrap();
        let scopes = [
            Scope::System,
            Scope::Resource(subject.resource.clone()),
            Scope::Entity(subject.entity.clone()),
            Scope::Subject(subject.clone()),
        ];
        for scope in scopes {
            assert_eq!(parse_scope(&scope_cursor(&scope)).unwrap(), scope);
        }
        assert_eq!(parse_entity(&entity_cursor(&subject.entity)).unwrap(), subject.entity);
        let token = TokenId::new("ci-7").unwrap();
        assert_eq!(parse_token(&token_cursor(&token)).unwrap(), token);
        assert_eq!(parse_number(&number_cursor(u64::MAX)).unwrap(), u64::MAX);
        let limit = LimitName::new("tpm").unwrap();
        let start = Stamp::from_secs(7_200);
        let line = Usage { subject, limit, window: Window::Hour, start, tally: Tally::default() };
        let table = [
            (UsageOf::Entity(line.subject.entity.clone()), "gpt:4"),
            (UsageOf::Resource(line.subject.resource.clone()), "größe 7"),
        ];
        for (of, name) in table {
            let cursor = UsagePlace::of(&of, &line);
            assert_eq!(UsagePlace::parse(&cursor).unwrap(), UsagePlace { name, limit: "tpm", start });
        }
    }

    #[test]
    fn cursor_of_another_listing_is_rejected() {
        let cursor = |text: &str| Cursor::new(text);
        for text in ["", "s#", "r", "e#a#b", "x#a", "y#a", "r#$SYSTEM"] {
            assert!(parse_scope(&cursor(text)).is_err(), "{text}");
        }
        for text in ["", "a", "a#b", "a#b#c", "a#b#1#2", "a#b#-1"] {
            assert!(UsagePlace::parse(&cursor(text)).is_err(), "{text}");
        }
        assert!(parse_entity(&cursor("a#b")).is_err());
        let error = parse_number(&cursor("-1\u{1b}")).unwrap_err().to_string();
        assert_eq!(error, r#"the cursor "-1\u{1b}" is not valid for this listing"#);
    }
}
