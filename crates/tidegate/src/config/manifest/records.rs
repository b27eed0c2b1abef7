//! The records of a manifest: entities and tokens.

use std::collections::BTreeSet;

use tidegate_core::limit::entity::{Entity, LEVELS_MAX};
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::token::{TOKEN_NAME_MAX, TokenId, TokenScope, TokenScopes};
use tidegate_core::time::Stamp;
use toml::de::{DeTable, DeValue};

use super::{Path, Reader};
use crate::config::codec::toml_scalar;
use crate::config::scalar::Scalar;

/// The keys of an entity's table that make it a record.
pub(super) const ENTITY: [&str; 4] = ["name", "parent", "cascade", "notes"];
const TOKEN: [&str; 5] = ["scopes", "name", "entity", "expires", "secret_env"];
/// The maximum length of the name of a variable.
const VARIABLE_MAX: usize = 256;

/// A declared token. A manifest has no secrets.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeclaredToken {
    /// The id.
    pub id: TokenId,
    /// The display name; by default the id.
    pub name: String,
    /// The scopes.
    pub scopes: TokenScopes,
    /// The entity that it is bound to with its descendants; `None` for all entities.
    pub entity: Option<EntityId>,
    /// When it expires; `None` for never.
    pub expires_at: Option<Stamp>,
    /// The environment variable with its secret, for the program that creates it.
    pub secret_env: Option<String>,
}

impl Reader {
    /// Reads the record in an entity's table, if there is one.
    pub(super) fn entity(&mut self, path: &Path, table: &DeTable<'_>, id: &EntityId) {
        if !table.keys().any(|key| ENTITY.contains(&key.get_ref().as_ref())) {
            return;
        }
        let mut entity = Entity::new(id.clone());
        for (key, value) in table {
            let value = value.get_ref();
            let inner = path.join(key.get_ref());
            match key.get_ref().as_ref() {
                "name" => entity = self.text(&inner, value).into_iter().fold(entity, Entity::name),
                "parent" => entity = self.id(&inner, value).into_iter().fold(entity, Entity::parent),
                "cascade" if self.flag(&inner, value) == Some(true) => entity = entity.cascade(),
                "notes" => {
                    for (key, value) in self.table(&inner, value).into_iter().flatten() {
                        let text = self.text(&inner.join(key.get_ref()), value.get_ref());
                        entity = text
                            .into_iter()
                            .fold(entity, |entity, text| entity.metadata(key.get_ref().as_ref(), text));
                    }
                }
                _ => {}
            }
        }
        if let Err(error) = entity.check() {
            self.wrong(path, format!("the entity `{id}`"), format!("within its bounds; {error}"));
        }
        self.entities.push(entity);
    }

    /// Reads the id of an entity.
    fn id(&mut self, path: &Path, value: &DeValue<'_>) -> Option<EntityId> {
        let id = self.text(path, value)?;
        let checked = EntityId::new(&id);
        self.name(path, &id, checked)
    }

    /// Sorts the entities: parents before their children.
    pub(super) fn sort_entities(&mut self) {
        let mut left = std::mem::take(&mut self.entities);
        left.sort_by(|one, other| one.id().cmp(other.id()));
        for _ in 0..LEVELS_MAX {
            let ids: BTreeSet<EntityId> = left.iter().map(|entity| entity.id().clone()).collect();
            let is_blocked = |entity: &Entity| entity.parent_id().is_some_and(|parent| ids.contains(parent));
            let (blocked, ready): (Vec<_>, Vec<_>) = left.into_iter().partition(is_blocked);
            self.entities.extend(ready);
            left = blocked;
        }
        if let Some(entity) = left.first() {
            let parent = entity.parent_id().map(ToString::to_string).unwrap_or_default();
            let path = Path::default().join("entity").join(entity.id().as_str()).join("parent");
            let bound =
                format!("no descendant of the entity, and have fewer than {} ancestors", LEVELS_MAX - 1);
            let _: Option<()> = self.wrong_value(&path, &Scalar::Text(parent), bound);
        }
    }

    pub(super) fn tokens(&mut self, path: &Path, value: &DeValue<'_>) {
        for (key, value) in self.table(path, value).into_iter().flatten() {
            let (id, value) = (key.get_ref().as_ref(), value.get_ref());
            let path = path.join(id);
            match TokenId::new(id) {
                Ok(id) if !id.is_reserved() => self.token(&path, value, id),
                Ok(_) => {
                    let bound = "an id that does not begin with `.`: those are the server's";
                    let _: Option<()> = self.wrong_value(&path, &Scalar::Text(id.to_owned()), bound);
                }
                Err(error) => {
                    let bound = format!("the id of a token; {error}");
                    let _: Option<()> = self.wrong_value(&path, &Scalar::Text(id.to_owned()), bound);
                }
            }
        }
    }

    fn token(&mut self, path: &Path, value: &DeValue<'_>, id: TokenId) {
        let Some(table) = self.table(path, value) else { return };
        let none = TokenScopes::new([]);
        let name = id.to_string();
        let mut token =
            DeclaredToken { id, name, scopes: none, entity: None, expires_at: None, secret_env: None };
        for (key, value) in table {
            let (key, value) = (key.get_ref().as_ref(), value.get_ref());
            let inner = path.join(key);
            match key {
                "scopes" => token.scopes = self.scopes(&inner, value),
                "name" => {
                    let name = self.text(&inner, value).unwrap_or_default();
                    if name.len() > TOKEN_NAME_MAX {
                        let bound = format!("at most {TOKEN_NAME_MAX} bytes");
                        self.wrong(&inner, format!("{} bytes", name.len()), bound);
                    }
                    token.name = name;
                }
                "entity" => token.entity = self.id(&inner, value),
                "expires" => token.expires_at = self.time(&inner, value),
                "secret_env" => {
                    let name = self.text(&inner, value);
                    let is_valid = |name: &String| {
                        !name.is_empty() && name.len() <= VARIABLE_MAX && !name.contains(['=', '\0'])
                    };
                    if name.as_ref().is_some_and(|name| !is_valid(name)) {
                        let bound = "the name of an environment variable";
                        let _: Option<()> = self.wrong_value(&inner, &toml_scalar(value), bound);
                    }
                    token.secret_env = name;
                }
                _ => self.unknown(&inner, path, key, &TOKEN),
            }
        }
        if !table.keys().any(|key| key.get_ref() == "scopes") {
            self.wrong(&path.join("scopes"), "missing".to_owned(), SCOPES);
        }
        if token.scopes.has(TokenScope::Admin)
            && let Some(entity) = &token.entity
        {
            let bound = "without the scope admin, which reaches all entities";
            self.wrong(&path.join("scopes"), format!("{}, bound to `{entity}`", token.scopes), bound);
        }
        self.tokens.push(token);
    }

    fn scopes(&mut self, path: &Path, value: &DeValue<'_>) -> TokenScopes {
        let none = TokenScopes::new([]);
        let DeValue::Array(array) = value else {
            self.wrong(path, toml_scalar(value).to_string(), SCOPES);
            return none;
        };
        if array.is_empty() {
            self.wrong(path, "empty".to_owned(), SCOPES);
        }
        let mut scopes: Vec<TokenScope> = Vec::new();
        for (place, value) in array.iter().enumerate() {
            let scalar = toml_scalar(value.get_ref());
            match &scalar {
                Scalar::Text(text) if text.parse::<TokenScope>().is_ok() => {
                    scopes.extend(text.parse::<TokenScope>());
                }
                _ => self.wrong(&path.at(place), scalar.to_string(), "acquire, read or admin"),
            }
        }
        TokenScopes::new(scopes)
    }

    fn time(&mut self, path: &Path, value: &DeValue<'_>) -> Option<Stamp> {
        let text = match value {
            DeValue::Datetime(datetime) => datetime.to_string(),
            _ => match toml_scalar(value) {
                Scalar::Text(text) => text,
                other => return self.wrong_value(path, &other, TIME),
            },
        };
        let stamp = text.parse().or_else(|_| format!("{text}T00:00:00Z").parse::<Stamp>());
        match stamp {
            Ok(stamp) => Some(stamp),
            Err(_) => self.wrong_value(path, &Scalar::Text(text), TIME),
        }
    }

    fn text(&mut self, path: &Path, value: &DeValue<'_>) -> Option<String> {
        match toml_scalar(value) {
            Scalar::Text(text) => Some(text),
            other => self.wrong_value(path, &other, "a text"),
        }
    }
}

const SCOPES: &str = "an array of acquire, read and admin";
const TIME: &str = "a time such as 2030-01-31 or 2030-01-31T09:30:00Z";
