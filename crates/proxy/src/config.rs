//! Reads profiles from TOML.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;
use thiserror::Error;
use toml::{Table, Value};

use crate::profile::{
    Format, Group, Path, Profile, Profiles, QuotaHeaders, RequestPaths, Reserve, UsagePaths,
};

/// The profiles that come with the program.
const BUILT_IN: &str = include_str!("../profiles.toml");
/// The most profiles.
const PROFILES_MAX: usize = 256;
/// How many profiles may extend each other.
const DEPTH_MAX: usize = 8;

/// An error in a file of profiles.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct InvalidProfiles(String);

/// A profile as it is written. Paths have their keys joined by dots.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[expect(clippy::struct_excessive_bools, reason = "each is a key of the file")]
struct ProfileConfig {
    format: FormatConfig,
    #[serde(default)]
    key_headers: Vec<String>,
    key_query: Option<String>,
    reserve: ReserveConfig,
    #[serde(default)]
    release: bool,
    #[serde(default)]
    separate_output: bool,
    #[serde(default)]
    refused_counts: bool,
    #[serde(default)]
    model: Vec<String>,
    model_after: Option<String>,
    #[serde(default)]
    output_max: Vec<String>,
    #[serde(default)]
    usage_option: Vec<String>,
    #[serde(default)]
    input: Vec<String>,
    #[serde(default)]
    input_more: Vec<String>,
    #[serde(default)]
    output: Vec<String>,
    #[serde(default)]
    output_more: Vec<String>,
    #[serde(default)]
    stream_end: Vec<String>,
    #[serde(default)]
    never: Vec<String>,
    #[serde(default)]
    retry_after_is_sent: bool,
    quota_headers: QuotaHeadersConfig,
    #[serde(default)]
    groups: Vec<GroupConfig>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum FormatConfig {
    OpenAi,
    Anthropic,
    Google,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ReserveConfig {
    None,
    Input,
    Expected,
    All,
    Largest,
}

#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum QuotaHeadersConfig {
    None,
    OpenAi,
    Azure,
    Anthropic,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct GroupConfig {
    prefix: String,
    group: String,
}

impl Profiles {
    /// The profiles that come with the program.
    ///
    /// # Panics
    /// Never: they are compiled in, and a test parses them.
    pub fn built_in() -> Self {
        Self::parse(&Table::new()).expect("built-in profiles are valid")
    }

    /// The built-in profiles with those of a file.
    ///
    /// A profile of an existing name changes the keys that it names; a new one begins with the keys of the
    /// profile that it `extends`, if any.
    ///
    /// ```
    /// use tidegate_proxy::Profiles;
    ///
    /// let profiles = Profiles::read("[groq]\nextends = 'openai'\nreserve = 'expected'")?;
    /// assert!(profiles.get("groq").is_some() && profiles.get("openai").is_some());
    /// # Ok::<(), tidegate_proxy::InvalidProfiles>(())
    /// ```
    ///
    /// # Errors
    /// [`InvalidProfiles`] names the line, or the profile and its key.
    pub fn read(text: &str) -> Result<Self, InvalidProfiles> {
        let table: Table = text.parse().map_err(|error: toml::de::Error| {
            let line = error.span().map(|span| text[..span.start].matches('\n').count() + 1);
            let place = line.map(|line| format!("line {line}: ")).unwrap_or_default();
            InvalidProfiles(format!("{place}{}", error.message()))
        })?;
        Self::parse(&table)
    }

    fn parse(file: &Table) -> Result<Self, InvalidProfiles> {
        let mut tables: Table = BUILT_IN.parse().map_err(|error| InvalidProfiles(format!("{error}")))?;
        for (name, value) in file {
            let Value::Table(changes) = value else {
                return Err(InvalidProfiles(format!("`{name}` is no table: a profile is [{name}]")));
            };
            match tables.get_mut(name) {
                Some(Value::Table(known)) => known.extend(changes.clone()),
                _ => drop(tables.insert(name.clone(), Value::Table(changes.clone()))),
            }
        }
        if tables.len() > PROFILES_MAX {
            return Err(InvalidProfiles(format!("{} profiles, more than {PROFILES_MAX}", tables.len())));
        }
        let mut profiles = BTreeMap::new();
        for name in tables.keys() {
            let table = inherit(&tables, name)?;
            profiles.insert(name.clone(), Arc::new(profile(name, table)?));
        }
        Ok(Self(profiles))
    }
}

/// The keys of a profile, with those of the profiles that it extends.
fn inherit(tables: &Table, name: &str) -> Result<Table, InvalidProfiles> {
    let (mut all, mut current) = (Table::new(), name.to_owned());
    for _ in 0..DEPTH_MAX {
        let Some(Value::Table(own)) = tables.get(&current) else {
            return Err(InvalidProfiles(format!("`{name}.extends`: there is no profile `{current}`")));
        };
        for (key, value) in own {
            all.entry(key.clone()).or_insert_with(|| value.clone());
        }
        match (own.get("extends"), all.remove("extends")) {
            (Some(Value::String(next)), _) => current.clone_from(next),
            (Some(_), _) => return Err(InvalidProfiles(format!("`{name}.extends` is no name of a profile"))),
            (None, _) => return Ok(all),
        }
    }
    Err(InvalidProfiles(format!("`{name}.extends`: more than {DEPTH_MAX} profiles extend each other")))
}

fn profile(name: &str, table: Table) -> Result<Profile, InvalidProfiles> {
    let config: ProfileConfig = table.try_into().map_err(|error: toml::de::Error| {
        InvalidProfiles(format!("profile `{name}`: {}", error.message()))
    })?;
    let group = |GroupConfig { prefix, group }| Group { prefix, group };
    let lower = |texts: Vec<String>| texts.iter().map(|text| text.to_ascii_lowercase()).collect();
    Ok(Profile {
        name: name.to_owned(),
        format: match config.format {
            FormatConfig::OpenAi => Format::OpenAi,
            FormatConfig::Anthropic => Format::Anthropic,
            FormatConfig::Google => Format::Google,
        },
        key_headers: lower(config.key_headers),
        key_query: config.key_query,
        reserve: match config.reserve {
            ReserveConfig::None => Reserve::None,
            ReserveConfig::Input => Reserve::Input,
            ReserveConfig::Expected => Reserve::Expected,
            ReserveConfig::All => Reserve::All,
            ReserveConfig::Largest => Reserve::Largest,
        },
        release: config.release,
        separate_output: config.separate_output,
        refused_counts: config.refused_counts,
        request: RequestPaths::new(paths(&config.model), paths(&config.output_max)),
        model_after: config.model_after,
        usage_option: config.usage_option,
        usage: UsagePaths::new(
            [&config.input, &config.input_more, &config.output, &config.output_more]
                .map(|texts| paths(texts)),
        ),
        stream_end: config.stream_end,
        never: lower(config.never),
        retry_after_is_sent: config.retry_after_is_sent,
        quota_headers: match config.quota_headers {
            QuotaHeadersConfig::None => QuotaHeaders::None,
            QuotaHeadersConfig::OpenAi => QuotaHeaders::OpenAi,
            QuotaHeadersConfig::Azure => QuotaHeaders::Azure,
            QuotaHeadersConfig::Anthropic => QuotaHeaders::Anthropic,
        },
        groups: config.groups.into_iter().map(group).collect(),
    })
}

fn paths(texts: &[String]) -> Vec<Path> {
    texts.iter().map(|text| text.split('.').map(str::to_owned).collect()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn file_changes_and_adds_profiles() {
        let profiles = Profiles::read(
            "[openai]\nrelease = true\n[groq]\nextends = 'openai'\nreserve = 'expected'\n\
             groups = [{ prefix = 'llama', group = 'llama' }]",
        )
        .unwrap();
        let openai = profiles.get("openai").unwrap();
        assert!(openai.release && openai.reserve == Reserve::Largest);
        let groq = profiles.get("groq").unwrap();
        assert!(groq.release && groq.reserve == Reserve::Expected && groq.reads_bodies());
        assert_eq!(groq.group_of("llama-9"), "llama");
        assert_eq!(
            profiles.names().collect::<Vec<_>>(),
            ["anthropic", "azure", "gemini", "generic", "groq", "openai"]
        );
    }

    #[test]
    fn invalid_profiles_are_named() {
        let table = [
            ("openai = 5", "`openai` is no table: a profile is [openai]"),
            (
                "[openai]\nreserve = 'some'",
                "profile `openai`: unknown variant `some`, expected one of `none`",
            ),
            ("[x]\nformat = 'openai'", "profile `x`: missing field `reserve`"),
            ("[x]\nextends = 'y'", "`x.extends`: there is no profile `y`"),
            ("[x]\nextends = 'x'", "`x.extends`: more than 8 profiles extend each other"),
            ("[openai]\nmodels = []", "unknown field `models`"),
            ("[x\n", "line 1: "),
        ];
        for (text, sentence) in table {
            let error = Profiles::read(text).unwrap_err().to_string();
            assert!(error.contains(sentence), "{error}");
        }
    }
}
