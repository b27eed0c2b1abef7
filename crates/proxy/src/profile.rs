//! Profiles: how a provider counts, and where requests and responses carry what the proxy reads.

use std::collections::BTreeMap;
use std::sync::Arc;

use tidegate_core::cost::Cost;
use tidegate_core::feedback::rejection::mentions;

use crate::headers::percent_decoded;
use crate::json_scan::{Blobs, JsonScan, Scalar};

/// The profile of an upstream whose name has none.
pub(crate) const GENERIC: &str = "generic";

/// How a provider counts, and what its requests, responses and errors look like.
#[derive(Debug, Clone, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each is a key of the file")]
pub struct Profile {
    pub(crate) name: String,
    pub(crate) format: Format,
    pub(crate) key_headers: Vec<String>,
    pub(crate) key_query: Option<String>,
    pub(crate) reserve: Reserve,
    pub(crate) release: bool,
    pub(crate) separate_output: bool,
    pub(crate) refused_counts: bool,
    pub(crate) request: RequestPaths,
    pub(crate) model_after: Option<String>,
    pub(crate) usage_option: Vec<String>,
    pub(crate) usage: UsagePaths,
    pub(crate) stream_end: Vec<String>,
    pub(crate) never: Vec<String>,
    pub(crate) retry_after_is_sent: bool,
    pub(crate) quota_headers: QuotaHeaders,
    pub(crate) groups: Vec<Group>,
}

/// What is read of the requests of all providers: whether usage is streamed, and how many choices are generated.
const OWN_PATHS: [&str; 4] = ["stream", "stream_options.include_usage", "n", "best_of"];

/// The keys that lead to a value in a JSON document.
pub(crate) type Path = Vec<String>;

/// Where requests carry what the proxy reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct RequestPaths {
    paths: Arc<[Path]>,
    models: usize,
}

/// Where responses report usage. Of several paths in a group the first with a value counts; the groups of a kind
/// are added.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct UsagePaths {
    paths: Arc<[Path]>,
    /// The ends of the groups: input, more input, output.
    ends: [usize; 3],
}

/// What the proxy reads of a request.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct RequestFacts {
    pub(crate) model: Option<String>,
    pub(crate) is_stream: bool,
    pub(crate) includes_usage: bool,
    pub(crate) output_max: Option<u64>,
    pub(crate) choices: u64,
    /// Whether the body is a JSON object.
    pub(crate) is_json: bool,
    pub(crate) blobs: Blobs,
}

impl RequestPaths {
    pub(crate) fn new(model: Vec<Path>, output_max: Vec<Path>) -> Self {
        let path = |text: &str| text.split('.').map(str::to_owned).collect();
        let own = OWN_PATHS.map(path);
        let models = model.len();
        Self { paths: own.into_iter().chain(model).chain(output_max).collect(), models }
    }

    pub(crate) fn scan(&self) -> JsonScan {
        JsonScan::new(&self.paths)
    }

    /// Whether the model was found so far.
    pub(crate) fn has_model(&self, scan: &JsonScan) -> bool {
        (OWN_PATHS.len()..OWN_PATHS.len() + self.models).any(|index| scan.has(index))
    }

    pub(crate) fn facts(&self, scan: JsonScan) -> RequestFacts {
        let blobs = scan.blobs();
        let mut values = scan.finish();
        let output_max =
            values.split_off(OWN_PATHS.len() + self.models).iter().flatten().find_map(Scalar::as_u64);
        let model = values.split_off(OWN_PATHS.len()).into_iter().flatten().find_map(Scalar::into_string);
        let is_true = |at: usize| values[at].as_ref().is_some_and(Scalar::is_true);
        // Of `best_of` choices, which are all generated, `n` are returned.
        let choices = values[2..].iter().flatten().filter_map(Scalar::as_u64).max().unwrap_or(1);
        let (is_stream, includes_usage) = (is_true(0), is_true(1));
        let is_json = false;
        RequestFacts { model, is_stream, includes_usage, output_max, choices, is_json, blobs }
    }
}

impl UsagePaths {
    pub(crate) fn new(groups: [Vec<Path>; 4]) -> Self {
        let [input, input_more, output, _] = [0, 1, 2, 3].map(|at: usize| groups[at].len());
        let ends = [input, input + input_more, input + input_more + output];
        Self { paths: groups.into_iter().flatten().collect(), ends }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// The paths, to scan a document for.
    pub(crate) const fn paths(&self) -> &Arc<[Path]> {
        &self.paths
    }

    /// Input and output tokens, if the values found at the paths report them.
    pub(crate) fn read(&self, values: &[Option<Scalar>]) -> (Option<u64>, Option<u64>) {
        let values: Vec<Option<u64>> =
            values.iter().map(|value| value.as_ref().and_then(Scalar::as_u64)).collect();
        let [input, input_more, output] = self.ends;
        let first = |from: usize, to: usize| values[from..to].iter().flatten().next().copied();
        let sum = |one: Option<u64>, more: Option<u64>| {
            one.map(|one| one.saturating_add(more.unwrap_or(0))).or(more)
        };
        (
            sum(first(0, input), first(input, input_more)),
            sum(first(input_more, output), first(output, values.len())),
        )
    }
}

/// The shape of a provider's errors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Format {
    /// `{"error": {"message": …, "type": …, "code": …}}`
    OpenAi,
    /// `{"type": "error", "error": {"type": …, "message": …}}`
    Anthropic,
    /// `{"error": {"code": …, "status": …, "message": …}}`
    Google,
}

/// The tokens that a provider counts when a request starts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Reserve {
    /// None: only requests count.
    None,
    /// Input only.
    Input,
    /// Input, and the output that is expected.
    Expected,
    /// Input and the maximum of the output, for each choice.
    All,
    /// The larger of the maximum of the output and the estimate of input and output.
    Largest,
}

/// The quota headers of a provider's responses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuotaHeaders {
    /// None.
    None,
    /// `x-ratelimit-…`, with resets as durations.
    OpenAi,
    /// `x-ratelimit-…`, with resets in seconds.
    Azure,
    /// `anthropic-ratelimit-…`, with resets as dates.
    Anthropic,
}

/// Models that share one quota.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Group {
    /// How the names of its models begin.
    pub prefix: String,
    /// Its name.
    pub group: String,
}

/// The numbers that decide how many tokens a request counts.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tokens {
    pub(crate) input: u64,
    pub(crate) output: u64,
    /// The maximum of the output that the request sets.
    pub(crate) output_max: Option<u64>,
    /// Choices that are generated.
    pub(crate) choices: u64,
}

impl Profile {
    /// The name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The shape of its errors.
    pub const fn format(&self) -> Format {
        self.format
    }

    /// Which tokens count when a request starts.
    pub const fn reserve(&self) -> Reserve {
        self.reserve
    }

    /// The name of the quota that a model shares with others; its own name unless a group lists it.
    pub fn group_of<'a>(&'a self, model: &'a str) -> &'a str {
        let group = self.groups.iter().find(|group| model.starts_with(&group.prefix));
        group.map_or(model, |group| &group.group)
    }

    /// Whether the bodies of requests are read, for the model and for tokens.
    pub(crate) fn reads_bodies(&self) -> bool {
        self.reserve != Reserve::None || self.request.models > 0
    }

    /// Whether the bodies of requests name the model, for which usage is counted.
    pub(crate) fn counts_by_body(&self) -> bool {
        self.request.models > 0 && !self.usage.is_empty()
    }

    /// The model that a path names.
    pub(crate) fn model_in(&self, path: &str) -> Option<String> {
        let (path, after) = (percent_decoded(path), self.model_after.as_deref()?);
        // Some providers ignore the case of a path.
        let start = path.to_ascii_lowercase().find(&after.to_ascii_lowercase())? + after.len();
        path[start..].split(['/', ':', '?']).next().filter(|model| !model.is_empty()).map(str::to_owned)
    }

    /// Whether this path reports usage in a stream only if the request asks for it.
    pub(crate) fn needs_usage_option(&self, path: &str) -> bool {
        self.usage_option.iter().any(|end| path.ends_with(end.as_str()))
    }

    /// What counts when a request starts.
    pub(crate) fn reserved(&self, tokens: Tokens) -> Cost {
        let Tokens { input, output, output_max, choices } = tokens;
        let all = input.saturating_add(output);
        let total = match self.reserve {
            Reserve::None => 0,
            Reserve::Input => input,
            Reserve::Expected => all,
            Reserve::All => input.saturating_add(output_max.unwrap_or(output).saturating_mul(choices.max(1))),
            Reserve::Largest => all.max(output_max.unwrap_or(0)),
        };
        self.cost(total, input, output)
    }

    /// What stays counted when the request has ended with this usage.
    pub(crate) fn spent(&self, reserved: Cost, input: u64, output: u64) -> Cost {
        let total = match self.reserve {
            _ if !self.release => return reserved,
            Reserve::None => 0,
            Reserve::Input => input,
            Reserve::Expected | Reserve::All | Reserve::Largest => input.saturating_add(output),
        };
        self.cost(total, input, output)
    }

    /// The cost of a call, by kinds of tokens only where these have limits of their own: each kind is throttled by
    /// itself.
    const fn cost(&self, total: u64, input: u64, output: u64) -> Cost {
        let cost = Cost::request().tokens(total);
        if self.separate_output { cost.input_tokens(input).output_tokens(output) } else { cost }
    }

    /// Whether the body of a refusal says that a retry can never succeed.
    pub(crate) fn is_final(&self, body: &[u8], has_retry_after: bool) -> bool {
        if self.retry_after_is_sent && !has_retry_after {
            return true;
        }
        self.never.iter().any(|mark| mentions(body, mark))
    }
}

/// Profiles by name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Profiles(pub(crate) BTreeMap<String, Arc<Profile>>);

impl Profiles {
    /// The profile of this name.
    pub fn get(&self, name: &str) -> Option<&Arc<Profile>> {
        self.0.get(name)
    }

    /// The names, in order.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.keys().map(String::as_str)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// One request, as each provider counts it at the start and at the end.
    #[test]
    fn each_provider_counts_its_own_tokens() {
        let tokens = Tokens { input: 100, output: 50, output_max: Some(1_000), choices: 2 };
        let table = [
            ("openai", 1_000, 1_000),
            ("azure", 2_100, 130),
            ("anthropic", 150, 130),
            ("gemini", 100, 90),
            ("generic", 0, 0),
        ];
        let profiles = Profiles::built_in();
        for (name, reserved, spent) in table {
            let profile = profiles.get(name).unwrap();
            let cost = profile.reserved(tokens);
            assert_eq!(cost.total_tokens(), reserved, "{name}");
            let spent_cost = profile.spent(cost, 90, 40);
            assert_eq!(spent_cost.total_tokens(), spent, "{name}");
            let kinds = if name == "anthropic" { (90, 40) } else { (0, 0) };
            assert_eq!((spent_cost.input_tokens, spent_cost.output_tokens), kinds, "{name}");
        }
    }

    #[test]
    fn models_of_a_group_share_its_name() {
        let profiles = Profiles::built_in();
        let anthropic = profiles.get("anthropic").unwrap();
        assert_eq!(anthropic.group_of("claude-opus-4-8"), "claude-opus-4");
        assert_eq!(anthropic.group_of("claude-haiku-4-5"), "claude-haiku-4-5");
    }

    #[test]
    fn final_refusals_are_recognized() {
        let profiles = Profiles::built_in();
        let is_final =
            |name: &str, body: &str, hint| profiles.get(name).unwrap().is_final(body.as_bytes(), hint);
        assert!(is_final("openai", r#"{"error":{"code":"insufficient_quota"}}"#, true));
        assert!(is_final("openai", "Request too large for gpt-4: Limit 10, Requested 20", true));
        assert!(!is_final("openai", "Rate limit reached: Limit 10, Used 8, Requested 3", false));
        assert!(is_final("anthropic", "rate_limit_error", false), "the spend limit sends no retry-after");
        assert!(!is_final("anthropic", "rate_limit_error", true));
        let minute = "would exceed your organization's rate limit of 30,000 input tokens per minute (org: x, model: c)";
        assert!(!is_final("anthropic", minute, true) && is_final("anthropic", minute, false));
        assert!(is_final("gemini", "GenerateRequestsPerDayPerProjectPerModel", true));
    }

    #[test]
    fn docs_say_how_each_profile_counts() {
        let docs = include_str!("../../../docs/proxy.md");
        let Profiles(profiles) = Profiles::built_in();
        for (name, profile) in profiles {
            let start = match profile.reserve {
                Reserve::None => "nothing",
                Reserve::Input => "input",
                Reserve::Expected => "input, and expected output",
                Reserve::All => "input, and `max_tokens` for each choice",
                Reserve::Largest => "`max_tokens`, or expected total if that is more",
            };
            let end = match profile.reserve {
                Reserve::None => "nothing",
                _ if !profile.release => "the same",
                Reserve::Input => "used input",
                _ => "used input and output",
            };
            let limits = if profile.separate_output { "apart" } else { "together" };
            let refused = if profile.refused_counts { "count" } else { "do not count" };
            let row = format!("| `{name}` | {start} | {end} | {limits} | {refused} |\n");
            assert!(docs.contains(&row), "no row {row}");
        }
    }
}
