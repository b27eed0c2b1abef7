//! Configuration: one schema for TOML, JSON, a map and the environment.
//!
//! Every source becomes the same thing: a [`Config`], which holds a value for some of the keys that
//! [`fields`] lists. Configs are laid over each other key by key, and [`Throttle::from_config`] makes a builder
//! of the result. What a key may be by itself is judged when it is read; what keys must be to each other, when
//! all of them are there. Either way everything that is wrong is told at once.
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
//! // The builder's own calls win over the text, the text over the environment, and that over the defaults.
//! let config = Config::from_env("TIDEGATE")?.overlaid_by(Config::from_toml(text)?);
//! let throttle = Throttle::from_config(&config)?.waiters_max(100).build()?;
//! assert_eq!(throttle.snapshot().slots, Some(16));
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod assemble;
mod codec;
mod duration;
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

use tidegate_core::plan::{Draft, FieldValue};

pub use error::{ConfigError, ConfigProblem, Fault, Origin};
pub use manifest::{Manifest, ManifestError};
pub use schema::{Field, fields};

use crate::builder::Builder;
use crate::keyed::{Keyed, KeyedBuilder, KeyedOptions, Limits};
use crate::throttle::Throttle;
use error::shown;
use scalar::Scalar;

/// Values for some of the keys of a throttle, or of many that are kept by key.
///
/// Two are equal when they say the same, wherever they say it and however it is written: `0.2`, `"200ms"`.
#[derive(Debug, Clone, Default)]
pub struct Config {
    entries: BTreeMap<&'static str, Entry>,
}

/// What is said for one key.
#[derive(Debug, Clone)]
struct Entry {
    value: FieldValue,
    /// As it was written, for messages.
    shown: String,
    origin: Origin,
}

impl Entry {
    fn new(value: FieldValue, origin: Origin) -> Self {
        Self { value, shown: codec::to_text(&value), origin }
    }
}

impl Config {
    /// Reads a TOML text.
    ///
    /// Keys are as in [`fields`], in tables or dotted. Times are seconds (`0.2`) or text with a unit (`"200ms"`,
    /// `"1.5s"`, `"2m"`, `"1h"`, `"1d"`).
    ///
    /// # Errors
    /// Where it is no TOML, or everything in it that is no key, of the wrong type or out of its bounds.
    pub fn from_toml(text: &str) -> Result<Self, ConfigError> {
        Self::from_scalars(&Origin::Toml, codec::from_toml(text)?)
    }

    /// Reads a JSON text: an object whose keys are as in TOML.
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
    /// Where it is no JSON object, or everything in it that is no key, of the wrong type or out of its bounds.
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
    /// Everything in it that is no key, given twice, of the wrong type or out of its bounds.
    pub fn from_map<K, V>(pairs: impl IntoIterator<Item = (K, V)>) -> Result<Self, ConfigError>
    where
        K: Into<String>,
        V: Into<String>,
    {
        let pairs = pairs.into_iter().map(|(key, value)| (key.into(), Scalar::Untyped(value.into())));
        Self::from_scalars(&Origin::Map, pairs)
    }

    /// The prefix of variables where no other is asked for.
    pub const PREFIX: &'static str = "TIDEGATE";

    /// Reads the environment of the process: with the prefix `TIDEGATE`, the variable `TIDEGATE_SLOTS_MAX` is
    /// the key `slots.max`.
    ///
    /// # Errors
    /// Every variable with the prefix that is no key, not UTF-8, of the wrong type or out of its bounds; an
    /// empty prefix.
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
        let (said, mut problems) = environment::read(prefix, variables);
        let mut config = Self::default();
        for (field, origin, scalar) in said {
            config.put(field, origin, &scalar, &mut problems);
        }
        ConfigError::unless_any(problems, config)
    }

    /// The config that says everything `draft` says, and nothing else limits.
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

    /// This config with the other laid over it: where both give a key, the other's counts.
    #[must_use]
    pub fn overlaid_by(mut self, over: Self) -> Self {
        self.entries.extend(over.entries);
        self
    }

    /// This config with everything that `options` say, for keyed throttles.
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

    /// The draft this config asks for, with the defaults of its preset where it says nothing: `gentle`, unless it
    /// names another.
    ///
    /// It suits [`Throttle::retune`], to put a changed configuration under a living throttle.
    ///
    /// # Errors
    /// Everything that is missing, without effect (a key of `keyed.`), or out of its bounds given the other keys.
    pub fn to_draft(&self) -> Result<Draft, ConfigError> {
        assemble::draft(&self.entries)
    }

    /// For keyed throttles: the draft of each key, and how the keys are kept. The defaults are those of the preset
    /// `host`, unless another is named.
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
    /// Everything that is missing, without effect, or out of its bounds given the other keys.
    pub fn to_keyed(&self) -> Result<(Draft, KeyedOptions), ConfigError> {
        assemble::keyed(&self.entries)
    }

    /// Keys and values as text, such that [`from_map`](Self::from_map) reads them back.
    pub fn to_map(&self) -> BTreeMap<&'static str, String> {
        self.entries.iter().map(|(key, entry)| (*key, codec::to_text(&entry.value))).collect()
    }

    /// A TOML text, such that [`from_toml`](Self::from_toml) reads it back: one key on each line.
    ///
    /// ```
    /// let config = tidegate::Config::from_map([("slots.max", "8"), ("pause.tail", "90")])?;
    /// assert_eq!(config.to_toml(), "slots.max = 8\npause.tail = \"90s\"\n");
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

    /// A JSON text, such that [`from_json`](Self::from_json) reads it back: one key on each line.
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
                problems.push(ConfigProblem::new(origin.clone(), shown(&key), fault));
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
        let said = |config: &Self| config.entries.iter().map(|(key, entry)| (*key, entry.value)).collect();
        let (this, that): (Vec<_>, Vec<_>) = (said(self), said(other));
        this == that
    }
}

impl Throttle {
    /// A builder with what `config` says, above the limits of [`Throttle::gentle`] or of the preset it names.
    ///
    /// What the builder is told afterwards wins. It is told whole groups: `slots(…)` replaces `slots.min`,
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
    /// Everything that is missing, without effect, or out of its bounds given the other keys. The keys of `keyed.` have no
    /// effect on a single throttle: they are for [`Config::to_keyed`].
    pub fn from_config(config: &Config) -> Result<Builder, ConfigError> {
        // A configuration is definite about its controller: what it implies was worked out with the rest.
        config.to_draft().map(|draft| {
            let controller = draft.controller;
            Builder::new(draft).controller(controller)
        })
    }
}

impl<K: Hash + Eq + Clone + Send + Sync + 'static> Keyed<K> {
    /// A builder with what `config` says, above the limits of [`Throttle::host`] or of the preset it names: the same for
    /// every key, each for itself.
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
    #[expect(clippy::missing_panics_doc, reason = "what is assembled is checked")]
    pub fn from_config(config: &Config) -> Result<KeyedBuilder<K>, ConfigError> {
        let (draft, options) = config.to_keyed()?;
        let limits = Limits::try_from(draft).expect("a draft that was assembled is checked");
        Ok(Self::builder(limits).options(options))
    }
}
