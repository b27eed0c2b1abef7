//! Rules as a file has them.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Deserializer};

use super::rules::{EnvoyRules, InvalidRules};

/// What a file says about Envoy: where to listen, and which limits its descriptors draw from.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// use tidegate_server::{EnvoyConfig, EnvoyRules};
///
/// let config: EnvoyConfig = serde_json::from_str(
///     r#"{"rules": [{"match": [{"key": "user", "value": "*"}], "entity": "{user}", "resource": "shop"}]}"#,
/// )?;
/// let rules: EnvoyRules = config.rules()?;
/// assert_eq!(rules.len(), 1);
/// # Ok(())
/// # }
/// ```
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct EnvoyConfig {
    /// Where to listen.
    pub listen: Option<SocketAddr>,
    /// What becomes of a descriptor that no rule matches.
    pub unknown: Unknown,
    /// The rules: the first that matches counts.
    pub rules: Vec<RuleConfig>,
}

/// What becomes of a descriptor that no rule matches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(clippy::exhaustive_enums, reason = "there is no third way")]
pub enum Unknown {
    /// It is let through, and counted.
    #[default]
    Allow,
    /// It is over its limit, and counted.
    Refuse,
}

/// One rule: which descriptors, and what they draw from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct RuleConfig {
    /// The domain of the request; any, where it is not said.
    pub domain: Option<String>,
    /// The descriptor's entries, all of them, in their order.
    #[serde(rename = "match")]
    pub entries: Vec<EntryConfig>,
    /// Who draws: text with `{key}` where the value of that entry is to stand.
    pub entity: Option<String>,
    /// Of what: the same.
    pub resource: Option<String>,
    /// Units per hit, by the names of limits; one of `requests` where nothing is said.
    pub cost: BTreeMap<String, u64>,
    /// Limits of the rule's own, such as `requests:100/min`, in the place of those that are written for the subject.
    pub limits: Vec<String>,
    /// Decided and counted, and never refused.
    pub shadow: bool,
    /// Let through, and nothing drawn.
    pub unlimited: bool,
}

/// One entry of a descriptor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct EntryConfig {
    /// Its key.
    pub key: String,
    /// Its value: `*` is any, `text*` is any that begins so, everything else is itself.
    #[serde(default = "any")]
    pub value: String,
}

fn any() -> String {
    "*".to_owned()
}

impl EnvoyConfig {
    /// Reads it.
    ///
    /// # Errors
    /// One sentence with the place of what is wrong.
    pub fn read<'de>(source: impl Deserializer<'de>) -> Result<Self, String> {
        serde_path_to_error::deserialize(source).map_err(|error| {
            let place = error.path().to_string();
            let why = error.into_inner();
            if place == "." { format!("`envoy`: {why}") } else { format!("`envoy.{place}`: {why}") }
        })
    }

    /// The rules, checked.
    ///
    /// # Errors
    /// [`InvalidRules`] names the rule, its field and what is wrong with it.
    pub fn rules(&self) -> Result<EnvoyRules, InvalidRules> {
        EnvoyRules::new(self.unknown, &self.rules)
    }
}
