//! The configuration file format of Envoy rules.

use std::collections::BTreeMap;
use std::net::SocketAddr;

use serde::{Deserialize, Deserializer};

use super::rules::{EnvoyRules, InvalidRules};

/// The Envoy configuration: the listener, and the rules that map descriptors to limits.
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
    /// The address to listen on.
    pub listen: Option<SocketAddr>,
    /// How to treat descriptors that no rule matches.
    pub unknown: Unknown,
    /// The rules. The first match wins.
    pub rules: Vec<RuleConfig>,
}

/// How to treat descriptors that no rule matches.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(clippy::exhaustive_enums, reason = "there are only two outcomes")]
pub enum Unknown {
    /// Allowed and counted.
    #[default]
    Allow,
    /// Over its limit, and counted.
    Refuse,
}

/// One rule: the descriptors it matches, and the limits they draw from.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
#[non_exhaustive]
pub struct RuleConfig {
    /// The domain of the request; any domain if absent.
    pub domain: Option<String>,
    /// All entries of the descriptor, in order.
    #[serde(rename = "match")]
    pub entries: Vec<EntryConfig>,
    /// The entity: a template in which `{key}` stands for the value of that entry.
    pub entity: Option<String>,
    /// The resource: a template too.
    pub resource: Option<String>,
    /// Units per hit by limit name; by default one of `requests`.
    pub cost: BTreeMap<String, u64>,
    /// Limits of this rule, such as `requests:100/min`, which replace the stored limits of the subject.
    pub limits: Vec<String>,
    /// Whether requests draw before they are forwarded, or report their usage afterwards.
    pub charge: Charge,
    /// How long after a charge negative hits return its units, such as `10m`; never if absent.
    pub refund_within: Option<String>,
    /// Shadow mode: decided and counted, but never refused.
    pub shadow: bool,
    /// Allowed without drawing.
    pub unlimited: bool,
}

/// When a rule charges.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
#[expect(clippy::exhaustive_enums, reason = "there is no third moment")]
pub enum Charge {
    /// Hits are drawn, or refused, before the request is forwarded.
    #[default]
    Before,
    /// Zero hits check that units are left. Hits are a report of usage, which is never refused.
    After,
}

/// One entry of a descriptor.
#[derive(Debug, Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields)]
#[non_exhaustive]
pub struct EntryConfig {
    /// The key.
    pub key: String,
    /// The value: `*` matches any value, `text*` any value with this prefix, everything else itself.
    #[serde(default = "any")]
    pub value: String,
}

fn any() -> String {
    "*".to_owned()
}

impl EnvoyConfig {
    /// Deserializes the configuration.
    ///
    /// # Errors
    /// A message with the path of the invalid field.
    pub fn read<'de>(source: impl Deserializer<'de>) -> Result<Self, String> {
        serde_path_to_error::deserialize(source).map_err(|error| {
            let place = error.path().to_string();
            let why = error.into_inner();
            if place == "." { format!("`envoy`: {why}") } else { format!("`envoy.{place}`: {why}") }
        })
    }

    /// Validates the rules.
    ///
    /// # Errors
    /// [`InvalidRules`] names the rule, its field and what is wrong with it.
    pub fn rules(&self) -> Result<EnvoyRules, InvalidRules> {
        EnvoyRules::new(self.unknown, &self.rules)
    }
}
