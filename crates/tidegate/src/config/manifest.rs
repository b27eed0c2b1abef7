//! A manifest: the policies of shared limits, entities and tokens, declared in TOML.
//!
//! Each scope has a table: `[system]`, `[resource.<name>]`, `[entity.<id>]` and
//! `[entity.<id>.resource.<name>]`. It holds `limits` as text, and the other settings of a policy. A table
//! without any of these declares no policy. An entity's table with a `name`, a `parent`, `cascade` or `notes`
//! also declares the entity, and `[token.<id>]` declares a token. All problems are reported at once.

mod records;

pub use records::DeclaredToken;
use thiserror::Error;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, InvalidName, ResourceName, Subject};
use tidegate_core::limit::policy::{LIMITS_MAX, OnExpiry, OnUnavailable, Policy, Scope, Share};
use tidegate_core::limit::rule::{InvalidLimit, Limit};
use tidegate_core::plan::FieldValue;
use toml::de::{DeTable, DeValue};

use super::codec::{toml_scalar, toml_table};
use tidegate_core::excerpt::excerpt;

use super::error::{ConfigProblem, Fault, Origin};
use super::scalar::Scalar;
use super::schema::{Kind, closest};

/// The keys of a policy.
const SETTINGS: [&str; 4] = ["limits", "only", "on_unavailable", "on_expiry"];
const UNAVAILABLE: [&str; 2] = ["block", "allow"];
const EXPIRY: [&str; 2] = ["settle", "return"];
/// The minimum share, as in core.
const SHARE_MIN: f64 = 1e-6;

/// Declared policies, entities and tokens, each once.
///
/// ```
/// use tidegate::Manifest;
///
/// let manifest = Manifest::from_toml(r#"
///     [system]
///     limits = ["rpm:1000/min", "tpm:100k/min:150k"]
///     on_unavailable = { local_share = 0.2 }      # or "block", "allow"
///     on_expiry = "return"                        # or "settle"
///
///     [resource."gpt-4"]
///     limits = ["tpm:1M/min"]
///
///     [entity.acme]
///     limits = ["rpm:50/s"]
///     only = true
///
///     [entity.acme.resource."gpt-4"]
///     limits = ["rpm:5/s"]
///
///     [entity.bot]
///     parent = "acme"
///     cascade = true
///     notes = { team = "search" }
///
///     [token.bot]
///     scopes = ["acquire"]
/// "#)?;
/// let scopes: Vec<String> = manifest.policies().iter().map(|(scope, _)| scope.to_string()).collect();
/// assert_eq!(scopes, ["system", "resource gpt-4", "entity acme", "entity acme, resource gpt-4"]);
/// assert_eq!((manifest.entities()[0].id().as_str(), manifest.tokens()[0].id.as_str()), ("bot", "bot"));
/// # Ok::<(), tidegate::ManifestError>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Manifest {
    policies: Vec<(Scope, Policy)>,
    entities: Vec<Entity>,
    tokens: Vec<DeclaredToken>,
}

/// All problems of a manifest.
///
/// ```
/// let error = tidegate::Manifest::from_toml("[system]\nlimit = ['rpm:5/s']\nonly = 1").unwrap_err();
/// assert_eq!(
///     error.to_string(),
///     "`system.limit` in TOML is not a key, did you mean `system.limits`?; \
///      `system.only` is 1 in TOML, and must be true or false"
/// );
/// ```
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("{}", problems.iter().map(ConfigProblem::to_string).collect::<Vec<_>>().join("; "))]
pub struct ManifestError {
    problems: Vec<ConfigProblem>,
}

impl ManifestError {
    /// One entry for each problem.
    pub fn problems(&self) -> &[ConfigProblem] {
        &self.problems
    }
}

impl Manifest {
    /// Parses a TOML text.
    ///
    /// # Errors
    /// The text is not TOML; or every key that is unknown, of the wrong type, or an invalid name or limit.
    pub fn from_toml(text: &str) -> Result<Self, ManifestError> {
        let table = toml_table(text).map_err(|problem| ManifestError { problems: vec![problem] })?;
        let mut reader = Reader::default();
        reader.top(&table);
        reader.sort_entities();
        let Reader { mut policies, entities, tokens, problems } = reader;
        if !problems.is_empty() {
            return Err(ManifestError { problems });
        }
        policies.sort_by(|(one, _), (other, _)| one.cmp(other));
        Ok(Self { policies, entities, tokens })
    }

    /// The policies, in the order of their scopes.
    pub fn policies(&self) -> &[(Scope, Policy)] {
        &self.policies
    }

    /// The entities, parents before their children.
    pub fn entities(&self) -> &[Entity] {
        &self.entities
    }

    /// The tokens.
    pub fn tokens(&self) -> &[DeclaredToken] {
        &self.tokens
    }
}

#[derive(Default)]
struct Reader {
    policies: Vec<(Scope, Policy)>,
    entities: Vec<Entity>,
    tokens: Vec<DeclaredToken>,
    problems: Vec<ConfigProblem>,
}

impl Reader {
    fn top(&mut self, top: &DeTable<'_>) {
        for (key, value) in top {
            let (key, value) = (key.get_ref().as_ref(), value.get_ref());
            let path = Path::default().join(key);
            match key {
                "system" => self.scope(&path, value, Scope::System, &[]),
                "resource" => self.resources(&path, value, Scope::Resource),
                "entity" => self.entities(&path, value),
                "token" => self.tokens(&path, value),
                _ => self.unknown(&path, &Path::default(), key, &["system", "resource", "entity", "token"]),
            }
        }
    }

    fn entities(&mut self, path: &Path, value: &DeValue<'_>) {
        for (key, value) in self.table(path, value).into_iter().flatten() {
            let (id, value) = (key.get_ref().as_ref(), value.get_ref());
            let path = path.join(id);
            let Some(entity) = self.name(&path, id, EntityId::new(id)) else { continue };
            let beside = [&records::ENTITY[..], &["resource"]].concat();
            self.scope(&path, value, Scope::Entity(entity.clone()), &beside);
            if let DeValue::Table(table) = value {
                self.entity(&path, table, &entity);
            }
            let of_resource = |resource| Scope::Subject(Subject { entity: entity.clone(), resource });
            if let DeValue::Table(table) = value
                && let Some(resources) = table.get("resource")
            {
                self.resources(&path.join("resource"), resources.get_ref(), of_resource);
            }
        }
    }

    fn resources(&mut self, path: &Path, value: &DeValue<'_>, scope: impl Fn(ResourceName) -> Scope) {
        for (key, value) in self.table(path, value).into_iter().flatten() {
            let (name, value) = (key.get_ref().as_ref(), value.get_ref());
            let path = path.join(name);
            if let Some(name) = self.name(&path, name, ResourceName::new(name)) {
                self.scope(&path, value, scope(name), &[]);
            }
        }
    }

    /// Reads the policy of one scope, whose table may also contain the keys `beside`.
    fn scope(&mut self, path: &Path, value: &DeValue<'_>, scope: Scope, beside: &[&str]) {
        let Some(table) = self.table(path, value) else { return };
        let (mut limits, mut settings): (Vec<Limit>, Vec<Setting>) = (Vec::new(), Vec::new());
        let mut has_settings = false;
        for (key, value) in table {
            let (key, value) = (key.get_ref().as_ref(), value.get_ref());
            let inner = path.join(key);
            has_settings |= SETTINGS.contains(&key);
            match key {
                "limits" => limits = self.limits(&inner, value),
                "only" => settings.extend(self.flag(&inner, value).map(Setting::Only)),
                "on_unavailable" => settings.extend(self.on_unavailable(&inner, value)),
                "on_expiry" => settings.extend(self.on_expiry(&inner, value)),
                _ if beside.contains(&key) => {}
                _ => self.unknown(&inner, path, key, &[&SETTINGS, beside].concat()),
            }
        }
        match Policy::new(limits) {
            _ if !has_settings => {}
            Ok(policy) => match policy.check_scope(&scope) {
                Ok(()) => {
                    let policy = settings.into_iter().fold(policy, |policy, setting| setting.to(policy));
                    self.policies.push((scope, policy));
                }
                Err(error) => {
                    let pooled = policy.rules().iter().find(|rule| rule.across().is_some());
                    let value = pooled.map(ToString::to_string).unwrap_or_default();
                    self.wrong(
                        &path.join("limits"),
                        format!("\"{value}\""),
                        format!("a limit for this scope; {error}"),
                    );
                }
            },
            // Each limit was checked when it was read, including for duplicate names.
            Err(error) => unreachable!("checked limits make a valid policy: {error}"),
        }
    }

    fn limits(&mut self, path: &Path, value: &DeValue<'_>) -> Vec<Limit> {
        let DeValue::Array(array) = value else {
            self.wrong(
                path,
                toml_scalar(value).to_string(),
                "an array of limits such as \"tpm:100k/min:150k\"",
            );
            return Vec::new();
        };
        if array.len() > LIMITS_MAX {
            self.wrong(path, format!("{} limits", array.len()), format!("at most {LIMITS_MAX}"));
            return Vec::new();
        }
        let mut limits: Vec<Limit> = Vec::new();
        for (place, value) in array.iter().enumerate() {
            let path = path.at(place);
            let scalar = toml_scalar(value.get_ref());
            match read_limit(&scalar) {
                Err(bound) => self.wrong(&path, scalar.to_string(), bound),
                Ok(limit) if limits.iter().any(|other| other.key() == limit.key()) => {
                    let bound = format!("a limit with another name: `{}` occurs twice", limit.name());
                    self.wrong(&path, scalar.to_string(), bound);
                }
                Ok(limit) => limits.push(limit),
            }
        }
        limits
    }

    fn flag(&mut self, path: &Path, value: &DeValue<'_>) -> Option<bool> {
        match toml_scalar(value) {
            Scalar::Bool(is_set) => Some(is_set),
            other => self.wrong_value(path, &other, "true or false"),
        }
    }

    fn on_unavailable(&mut self, path: &Path, value: &DeValue<'_>) -> Option<Setting> {
        let behaviour = match value {
            DeValue::Table(table) => self.local_share(path, table)?,
            _ => match toml_scalar(value).read(&Kind::Word(&UNAVAILABLE)) {
                Ok(FieldValue::Word("allow")) => OnUnavailable::Allow,
                Ok(_) => OnUnavailable::Block,
                Err(_) => {
                    let bound = "\"block\", \"allow\" or { local_share = 0.2 }";
                    return self.wrong_value(path, &toml_scalar(value), bound);
                }
            },
        };
        Some(Setting::OnUnavailable(behaviour))
    }

    fn local_share(&mut self, path: &Path, table: &DeTable<'_>) -> Option<OnUnavailable> {
        let unknown = table.iter().find(|(key, _)| key.get_ref() != "local_share");
        if let Some((key, _)) = unknown {
            self.unknown(&path.join(key.get_ref()), path, key.get_ref(), &["local_share"]);
            return None;
        }
        let Some(value) = table.get("local_share") else {
            return self.wrong_value(path, &Scalar::Empty, "\"block\", \"allow\" or { local_share = 0.2 }");
        };
        let scalar = toml_scalar(value.get_ref());
        let path = path.join("local_share");
        let share = match scalar.read(&Kind::Fraction { min: SHARE_MIN }) {
            Ok(FieldValue::Fraction(fraction)) => Share::new(fraction).map_err(|error| error.to_string()),
            Ok(_) => unreachable!("the kind is a fraction"),
            Err(bound) => Err(bound),
        };
        match share {
            Ok(share) => Some(OnUnavailable::LocalShare(share)),
            Err(bound) => self.wrong_value(&path, &scalar, bound),
        }
    }

    fn on_expiry(&mut self, path: &Path, value: &DeValue<'_>) -> Option<Setting> {
        let scalar = toml_scalar(value);
        match scalar.read(&Kind::Word(&EXPIRY)) {
            Ok(FieldValue::Word("return")) => Some(Setting::OnExpiry(OnExpiry::Return)),
            Ok(_) => Some(Setting::OnExpiry(OnExpiry::Settle)),
            Err(bound) => self.wrong_value(path, &scalar, bound),
        }
    }

    fn table<'a, 'i>(&mut self, path: &Path, value: &'a DeValue<'i>) -> Option<&'a DeTable<'i>> {
        match value {
            DeValue::Table(table) => Some(table),
            _ => self.wrong_value(path, &toml_scalar(value), "a table"),
        }
    }

    fn name<T>(&mut self, path: &Path, name: &str, checked: Result<T, InvalidName>) -> Option<T> {
        let bound = match checked {
            Ok(name) => return Some(name),
            Err(error) => format!("a valid name; {} {}", error.kind, error.why),
        };
        self.wrong_value(path, &Scalar::Text(name.to_owned()), bound)
    }

    fn unknown(&mut self, path: &Path, parent: &Path, key: &str, known: &[&str]) {
        let closest = closest(key, known.iter().map(|known| (*known).to_owned()));
        let closest = closest.map(|closest| parent.join(&closest).0);
        self.problems.push(ConfigProblem::new(Origin::Toml, path.0.clone(), Fault::Unknown { closest }));
    }

    fn wrong(&mut self, path: &Path, value: String, bound: impl Into<String>) {
        let fault = Fault::OutOfBounds { value, bound: bound.into() };
        self.problems.push(ConfigProblem::new(Origin::Toml, path.0.clone(), fault));
    }

    fn wrong_value<T>(&mut self, path: &Path, value: &Scalar, bound: impl Into<String>) -> Option<T> {
        self.wrong(path, value.to_string(), bound);
        None
    }
}

/// A setting of a policy besides its limits.
enum Setting {
    Only(bool),
    OnUnavailable(OnUnavailable),
    OnExpiry(OnExpiry),
}

impl Setting {
    fn to(self, policy: Policy) -> Policy {
        match self {
            Self::Only(true) => policy.only(),
            Self::Only(false) => policy,
            Self::OnUnavailable(behaviour) => policy.on_unavailable(behaviour),
            Self::OnExpiry(behaviour) => policy.on_expiry(behaviour),
        }
    }
}

/// The limit, or a description of the valid values.
fn read_limit(scalar: &Scalar) -> Result<Limit, String> {
    const FORM: &str = "name:amount/period[:burst], such as \"tpm:100k/min:150k\"";
    let Scalar::Text(text) = scalar else { return Err(FORM.to_owned()) };
    text.parse().map_err(|error| match error {
        InvalidLimit::Text { why, .. } => format!("{FORM}; {why}"),
        other => format!("a valid limit; {other}"),
    })
}

/// A path in the document: keys joined by dots, quoted as in TOML.
#[derive(Default)]
struct Path(String);

impl Path {
    fn join(&self, key: &str) -> Self {
        let is_bare = |letter: char| letter.is_ascii_alphanumeric() || letter == '_' || letter == '-';
        let key = if !key.is_empty() && key.chars().all(is_bare) {
            excerpt(key)
        } else {
            format!("\"{}\"", excerpt(key))
        };
        Self(if self.0.is_empty() { key } else { format!("{}.{key}", self.0) })
    }

    fn at(&self, place: usize) -> Self {
        Self(format!("{}[{place}]", self.0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn path_quotes_keys_as_toml_does() {
        let path = Path::default().join("entity").join("a.b").join("").join("é\n").join("x-1_Y").at(3);
        assert_eq!(path.0, "entity.\"a.b\".\"\".\"é\\n\".x-1_Y[3]");
        let long = Path::default().join(&"x".repeat(1_000)).0;
        assert!(long.chars().count() < 100, "{long}");
    }
}
