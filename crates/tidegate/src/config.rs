//! Configuration: one schema for TOML, JSON, a map and the environment.
//!
//! Every source becomes a [`Config`], which holds values for some of the keys that [`fields`] lists. Configs
//! are layered key by key, and [`Throttle::from_config`] turns the result into a builder. Each value is
//! checked when it is read; constraints between keys are checked when all of them are known. In both cases
//! all problems are reported at once.
//!
//! ```
//! use tidegate::{Config, Slots, Throttle};
//!
//! let text = r#"
//!     [slots]
//!     max = 16
//!
//!     [budget]
//!     tokens = 90_000
//!     window = "1m"
//! "#;
//! // Precedence: the builder's calls, then the text, then the environment, then the defaults.
//! let config = Config::from_env("TIDEGATE")?.overlaid_by(Config::from_toml(text)?);
//! let throttle = Throttle::from_config(&config)?.waiters_max(100).build()?;
//! assert_eq!(throttle.snapshot().slots, Some(16));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod assemble;
mod codec;
mod environment;
mod error;
mod manifest;
mod scalar;
mod schema;

use std::collections::BTreeMap;
use std::collections::btree_map::Entry as Place;
use std::ffi::OsString;
use std::fmt::Write as _;
use std::hash::Hash;

use tidegate_core::excerpt::excerpt;
use tidegate_core::plan::{Draft, FieldValue};

pub use error::{ConfigError, ConfigProblem, Fault, Origin};
pub use manifest::{DeclaredToken, Manifest, ManifestError};
pub use schema::{Field, fields};

use crate::builder::Builder;
use crate::keyed::{Keyed, KeyedBuilder, KeyedOptions, Limits};
use crate::throttle::Throttle;
use scalar::Scalar;

/// Values for some of the keys of a throttle, or of a keyed registry.
///
/// Two configs are equal when their values are, regardless of their origin and notation: `0.2`, `"200ms"`.
#[derive(Debug, Clone, Default)]
pub struct Config {
    entries: BTreeMap<&'static str, Entry>,
}

/// The value of one key.
#[derive(Debug, Clone)]
struct Entry {
    value: FieldValue,
    /// As written, for messages.
    shown: String,
    origin: Origin,
}

impl Entry {
    fn new(value: FieldValue, origin: Origin) -> Self {
        Self { shown: codec::to_text(&value), value, origin }
    }
}

impl Config {
    /// Parses a TOML text.
    ///
    /// Keys are as in [`fields`], in tables or dotted. Times are seconds (`0.2`) or text with a unit (`"200ms"`,
    /// `"1.5s"`, `"2m"`, `"1h"`, `"1d"`).
    ///
    /// # Errors
    /// The text is not TOML; or every key that is unknown, of the wrong type or out of bounds.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        Self::from_scalars(&Origin::Toml, codec::from_toml(text)?)
    }

    /// Parses a JSON text: an object with the same keys as in TOML.
    ///
    /// ```
    /// use tidegate::Config;
    ///
    /// let json = Config::from_json(r#"{ "pace": { "interval_min": 0.2 } }"#)?;
    /// assert_eq!(json, Config::from_toml("pace.interval_min = '200ms'")?);
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// The text is not a JSON object; or every key that is unknown, of the wrong type or out of bounds.
    pub fn from_json(text: &str) -> Result<Self, ConfigError> {
        Self::from_scalars(&Origin::Json, codec::from_json(text)?)
    }

    /// Reads pairs of a dotted key and a value as text.
    ///
    /// ```
    /// use tidegate::Config;
    ///
    /// let config = Config::from_map([("slots.max", "8"), ("budget.tokens", "9000"), ("budget.window", "1m")])?;
    /// assert_eq!(config.to_map()["slots.max"], "8");
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// Every key that is unknown, repeated, of the wrong type or out of bounds.
    pub fn from_map<K, V>(pairs: impl IntoIterator<Item = (K, V)>) -> Result<Self, ConfigError>
    where
        K: Into<String>,
        V: Into<String>,
    {
        let pairs = pairs.into_iter().map(|(key, value)| (key.into(), Scalar::Untyped(value.into())));
        Self::from_scalars(&Origin::Map, pairs)
    }

    /// The default prefix of environment variables.
    pub const PREFIX: &'static str = "TIDEGATE";

    /// Reads the environment of the process: with the prefix `TIDEGATE`, the variable `TIDEGATE_SLOTS_MAX`
    /// sets the key `slots.max`. With this prefix, the variables of the program `tidegate`, such as
    /// `TIDEGATE_SERVER`, are ignored.
    ///
    /// # Errors
    /// Every variable with the prefix that is an unknown key, not UTF-8, of the wrong type or out of bounds;
    /// or an empty prefix.
    pub fn from_env(prefix: &str) -> Result<Self, ConfigError> {
        Self::from_variables(prefix, std::env::vars_os())
    }

    /// [`from_env`](Self::from_env) with the prefix [`PREFIX`](Self::PREFIX).
    ///
    /// # Errors
    /// As `from_env`.
    pub fn from_default_env() -> Result<Self, ConfigError> {
        Self::from_env(Self::PREFIX)
    }

    /// Reads variables as [`from_env`](Self::from_env) does, from a list of names and values.
    ///
    /// ```
    /// use tidegate::Config;
    ///
    /// let config = Config::from_variables("APP", [("APP_WAITERS_MAX", "100"), ("PATH", "/bin")])?;
    /// assert_eq!(config, Config::from_map([("waiters_max", "100")])?);
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_variables<N, V>(
        prefix: &str,
        variables: impl IntoIterator<Item = (N, V)>,
    ) -> Result<Self, ConfigError>
    where
        N: Into<OsString>,
        V: Into<OsString>,
    {
        let (values, mut problems) = environment::read(prefix, variables);
        let mut config = Self::default();
        for (field, origin, scalar) in values {
            config.put(field, origin, &scalar, &mut problems);
        }
        ConfigError::unless_any(problems, config)
    }

    /// A config with all values of `draft`, on top of the preset `empty`.
    ///
    /// ```
    /// use tidegate::{Config, Draft};
    ///
    /// let config = Config::from_draft(&Draft::gentle());
    /// assert_eq!(config.to_draft()?, Draft::gentle());
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    pub fn from_draft(draft: &Draft) -> Self {
        let fields = [("preset", FieldValue::Word("empty"))].into_iter().chain(draft.fields());
        let entries = fields.map(|(key, value)| (key, Entry::new(value, Origin::Draft)));
        Self { entries: entries.collect() }
    }

    /// Layers another config on top: if both have a key, the other's value applies.
    #[must_use]
    pub fn overlaid_by(mut self, over: Self) -> Self {
        self.entries.extend(over.entries);
        self
    }

    /// Adds all values of `options`, for keyed throttles.
    ///
    /// ```
    /// use tidegate::{Config, Draft, KeyedOptions};
    ///
    /// let config = Config::from_draft(&Draft::host()).with_keyed(&KeyedOptions::default().shards(64));
    /// assert_eq!(config.to_map()["keyed.shards"], "64");
    /// assert_eq!(config.to_keyed()?, (Draft::host(), KeyedOptions::default().shards(64)));
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    #[must_use]
    pub fn with_keyed(mut self, options: &KeyedOptions) -> Self {
        let fields = options.fields().map(|(key, value)| (key, Entry::new(value, Origin::Draft)));
        self.entries.extend(fields);
        self
    }

    /// The draft for this config. Missing keys have the defaults of its preset, which is `auto` unless it
    /// names another.
    ///
    /// Use it with [`Throttle::retune`] to apply a changed configuration to a running throttle.
    ///
    /// # Errors
    /// Every key that is missing, without effect (a key of `keyed.`), or out of bounds given the other keys.
    pub fn to_draft(&self) -> Result<Draft, ConfigError> {
        assemble::draft(&self.entries)
    }

    /// For keyed throttles: the draft of each key, and the registry's options. The defaults are those of the
    /// preset `host`, unless it names another.
    ///
    /// ```
    /// use tidegate::Config;
    ///
    /// let config = Config::from_toml("aimd.rate_max = 20\n[keyed]\nkeys_max = 5_000\nidle_ttl = '10m'")?;
    /// let (limits, options) = config.to_keyed()?;
    /// assert_eq!((options.keys_max, options.shards), (5_000, 16));
    /// assert!(limits.check().is_ok());
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// Every key that is missing, without effect, or out of bounds given the other keys.
    pub fn to_keyed(&self) -> Result<(Draft, KeyedOptions), ConfigError> {
        assemble::keyed(&self.entries)
    }

    /// Keys and values as text that [`from_map`](Self::from_map) can read.
    pub fn to_map(&self) -> BTreeMap<&'static str, String> {
        self.entries.iter().map(|(key, entry)| (*key, codec::to_text(&entry.value))).collect()
    }

    /// A TOML text that [`from_toml`](Self::from_toml) can parse: one key per line.
    ///
    /// ```
    /// let config = tidegate::Config::from_map([("slots.max", "8"), ("pause.max", "90")])?;
    /// assert_eq!(config.to_toml(), "slots.max = 8\npause.max = \"90s\"\n");
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    pub fn to_toml(&self) -> String {
        let mut text = String::new();
        for field in fields() {
            if let Some(entry) = self.entries.get(field.key()) {
                // Writing to a string cannot fail.
                let _ = writeln!(text, "{} = {}", field.key(), codec::to_literal(&entry.value));
            }
        }
        text
    }

    /// A JSON text that [`from_json`](Self::from_json) can parse: one key per line.
    ///
    /// ```
    /// let config = tidegate::Config::from_map([("slots.max", "8")])?;
    /// assert_eq!(config.to_json(), "{\n  \"slots.max\": 8\n}\n");
    /// assert_eq!(tidegate::Config::from_json(&config.to_json())?, config);
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    pub fn to_json(&self) -> String {
        let lines: Vec<String> = fields()
            .iter()
            .filter_map(|field| Some((field.key(), self.entries.get(field.key())?)))
            .map(|(key, entry)| format!("  \"{key}\": {}", codec::to_literal(&entry.value)))
            .collect();
        if lines.is_empty() { "{}\n".to_owned() } else { format!("{{\n{}\n}}\n", lines.join(",\n")) }
    }

    fn from_scalars(
        origin: &Origin,
        scalars: impl IntoIterator<Item = (String, Scalar)>,
    ) -> Result<Self, ConfigError> {
        let mut config = Self::default();
        let mut problems = Vec::new();
        for (key, scalar) in scalars {
            if let Some(field) = schema::field(&key) {
                config.put(field, origin.clone(), &scalar, &mut problems);
            } else if scalar != Scalar::Empty || !schema::is_group(&key) {
                let fault = Fault::Unknown { closest: schema::closest_key(&key) };
                problems.push(ConfigProblem::new(origin.clone(), excerpt(&key), fault));
            }
        }
        ConfigError::unless_any(problems, config)
    }

    fn put(&mut self, field: &Field, origin: Origin, scalar: &Scalar, problems: &mut Vec<ConfigProblem>) {
        let fault = match (scalar.read(field.shape()), self.entries.entry(field.key())) {
            (Ok(value), Place::Vacant(place)) => {
                place.insert(Entry { value, shown: scalar.bare(), origin });
                return;
            }
            (Ok(_), Place::Occupied(_)) => Fault::Repeated,
            (Err(bound), _) => Fault::OutOfBounds { value: scalar.to_string(), bound },
        };
        problems.push(ConfigProblem::new(origin, field.key(), fault));
    }
}

impl PartialEq for Config {
    fn eq(&self, other: &Self) -> bool {
        let values =
            |config: &Self| config.entries.iter().map(|(key, entry)| (*key, entry.value.clone())).collect();
        let (this, that): (Vec<_>, Vec<_>) = (values(self), values(other));
        this == that
    }
}

impl Throttle {
    /// A builder with the values of `config`, on top of [`Throttle::auto`] or the preset it names.
    ///
    /// Later calls of the builder win. They replace whole groups: `slots(…)` replaces `slots.min`,
    /// `slots.start` and `slots.max`.
    ///
    /// ```
    /// use tidegate::{Config, Throttle};
    ///
    /// let config = Config::from_toml("slots.max = 3\nbudget.tokens = 500")?;
    /// let error = Throttle::from_config(&config).unwrap_err();
    /// assert_eq!(
    ///     error.to_string(),
    ///     "`budget.window` is missing, because `budget.tokens` is given in TOML"
    /// );
    /// # Ok::<(), tidegate::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// Every key that is missing, without effect, or out of bounds given the other keys. The keys of `keyed.`
    /// have no effect on a single throttle: use [`Config::to_keyed`] for those.
    pub fn from_config(config: &Config) -> Result<Builder, ConfigError> {
        // The draft's controller is final: an implied one was resolved with the other keys.
        config.to_draft().map(|draft| {
            let controller = draft.controller;
            Builder::new(draft).controller(controller)
        })
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Keyed<K> {
    /// A builder with the values of `config`, on top of [`Throttle::host`] or the preset it names: the same
    /// limits for every key, each with its own instance.
    ///
    /// ```
    /// use tidegate::{Authority, Config, Keyed};
    ///
    /// let config = Config::from_toml("aimd.rate_max = 20\nkeyed.keys_max = 5_000")?;
    /// let hosts: Keyed<Authority> = Keyed::from_config(&config)?.labelled(Authority::to_string).build()?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// As [`Config::to_keyed`].
    #[expect(clippy::missing_panics_doc, reason = "the assembled draft is checked")]
    pub fn from_config(config: &Config) -> Result<KeyedBuilder<K>, ConfigError> {
        let (draft, options) = config.to_keyed()?;
        let limits = Limits::try_from(draft).expect("an assembled draft is checked");
        Ok(Self::builder(limits).options(options))
    }
}
