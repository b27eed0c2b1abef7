//! Finds the quota that the body of a rejection (429) names: requests, tokens, input or output tokens.
//!
//! Providers name it in prose, in a quota's identifier, or in the error's type:
//!
//! | provider | example |
//! |---|---|
//! | OpenAI, Groq | `… on input tokens per min (ITPM): Limit 10, Used 8, Requested 3`, `"type": "tokens"` |
//! | Anthropic | `… rate limit of 40,000 input tokens per minute`, `number of request tokens has exceeded …` |
//! | Gemini, Vertex | `GenerateRequestsPerMinutePerProjectPerModel`, `…_input_token_count` |
//! | Azure | `Requests to … have exceeded token rate limit of your current … tier` |
//!
//! The body is not parsed as JSON: it may be cut off. It is read once as a sequence of words, without allocation.

use super::headers::Dimension;

/// Bytes of a body that are read; later ones have no effect.
pub const REJECTION_BODY_MAX: usize = 16_384;

/// How a clause names a quota. An earlier variant takes precedence.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Naming {
    /// `on tokens per min`.
    Limit,
    /// `tokens per minute`, `token rate limit`.
    Clause,
    /// `TPM`.
    Abbreviation,
    /// `"type": "tokens"`.
    Type,
}

/// What one way of naming has found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    Nothing,
    One(Dimension),
    /// Several, so none is known to be the cause.
    Several,
}

/// The quota that the body of a rejection names. `None` if it names none, or several.
///
/// ```
/// use tidegate_core::feedback::headers::Dimension;
/// use tidegate_core::feedback::rejection::exceeded;
///
/// let body = br#"{"error": {"message": "Rate limit reached for gpt-4 on tokens per min (TPM): Limit 10, Used 9, Requested 2."}}"#;
/// assert_eq!(exceeded(body), Some(Dimension::Tokens));
/// assert_eq!(exceeded(b"slow down"), None);
/// ```
pub fn exceeded(body: &[u8]) -> Option<Dimension> {
    let mut found = [Found::Nothing; 4];
    let mut words = Words::of(body);
    // The words around the third one.
    let mut window: [&[u8]; 5] =
        [b"", b"", words.next_or_empty(), words.next_or_empty(), words.next_or_empty()];
    while !window[2].is_empty() {
        if let Some((dimension, naming)) = named(&window) {
            let found = &mut found[naming as usize];
            *found = match *found {
                Found::Nothing => Found::One(dimension),
                Found::One(other) if other == dimension => Found::One(other),
                _ => Found::Several,
            };
        }
        window.rotate_left(1);
        window[4] = words.next_or_empty();
    }
    match found.into_iter().find(|found| *found != Found::Nothing) {
        Some(Found::One(dimension)) => Some(dimension),
        _ => None,
    }
}

/// Whether a body contains this text, ignoring the case of ASCII letters. `text` must be lower case.
pub fn mentions(body: &[u8], text: &str) -> bool {
    let text = text.as_bytes();
    let Some(first) = text.first() else { return true };
    let mut starts = body.iter().enumerate().filter(|(_, byte)| byte.to_ascii_lowercase() == *first);
    starts.any(|(at, _)| body[at..].get(..text.len()).is_some_and(|part| part.eq_ignore_ascii_case(text)))
}

/// The quota that the word in the middle names, with the two words before it and the two after it.
fn named([before, last, word, next, after]: &[&[u8]; 5]) -> Option<(Dimension, Naming)> {
    let abbreviations = [
        ("rp", Dimension::Requests),
        ("tp", Dimension::Tokens),
        ("itp", Dimension::InputTokens),
        ("otp", Dimension::OutputTokens),
    ];
    // Per second, minute, hour or day.
    if let Some((b's' | b'S' | b'm' | b'M' | b'h' | b'H' | b'd' | b'D', unit)) = word.split_last()
        && let Some((_, dimension)) = abbreviations.iter().find(|(name, _)| is(unit, &[name]))
    {
        return Some((*dimension, Naming::Abbreviation));
    }
    let kind = |kind: &[u8]| match kind {
        kind if is(kind, &["input", "prompt"]) => Dimension::InputTokens,
        kind if is(kind, &["output", "completion"]) => Dimension::OutputTokens,
        _ => Dimension::Tokens,
    };
    let dimension = match word {
        word if is(word, &["token"]) => kind(last),
        word if is(word, &["request", "call"]) => Dimension::Requests,
        _ => return None,
    };
    // What stands before the unit.
    let lead =
        if matches!(dimension, Dimension::InputTokens | Dimension::OutputTokens) { before } else { last };
    let is_limit = is(next, &["per", "count"]) || (is(next, &["rate"]) && is(after, &["limit"]));
    // An identifier of Google may end with its unit.
    let is_quota = dimension == Dimension::Requests && is(last, &["tier", "content"]);
    if is(next, &["per"]) && is(lead, &["on"]) {
        Some((dimension, Naming::Limit))
    } else if is_limit || is_quota || is(next, &["has"]) {
        Some((dimension, Naming::Clause))
    } else if is(last, &["type"]) {
        Some((dimension, Naming::Type))
    } else {
        None
    }
}

/// Whether a word is one of these, in any case.
fn is(word: &[u8], names: &[&str]) -> bool {
    names.iter().any(|name| word.eq_ignore_ascii_case(name.as_bytes()))
}

/// The words of a text: runs of ASCII letters without a final `s`, also within identifiers such as `PerMinute`
/// and `per_minute`.
struct Words<'a>(&'a [u8]);

impl<'a> Words<'a> {
    fn of(body: &'a [u8]) -> Self {
        Self(&body[..body.len().min(REJECTION_BODY_MAX)])
    }

    /// The next word; empty at the end.
    fn next_or_empty(&mut self) -> &'a [u8] {
        let mut rest = self.0;
        loop {
            rest = match rest {
                [] => break,
                // The letter of an escape, as in `\n`, belongs to no word.
                [b'\\', _, tail @ ..] => tail,
                [first, ..] if first.is_ascii_alphabetic() => break,
                [_, tail @ ..] => tail,
            };
        }
        let mut pairs = rest.windows(2);
        let ends = |pair: &[u8]| {
            !pair[1].is_ascii_alphabetic() || (pair[0].is_ascii_lowercase() && pair[1].is_ascii_uppercase())
        };
        let length = pairs.position(ends).map_or(rest.len(), |last| last + 1);
        let (word, rest) = rest.split_at(length);
        self.0 = rest;
        match word {
            [singular @ .., _, b's' | b'S']
                if !singular.is_empty() && !is(word, &["has", "rps", "tps", "itps", "otps"]) =>
            {
                &word[..word.len() - 1]
            }
            word => word,
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::Dimension::{InputTokens, OutputTokens, Requests, Tokens};
    use super::*;

    /// Bodies of providers, and the quota that each names.
    const BODIES: &[(&str, Option<Dimension>)] = &[
        // OpenAI
        (
            r#"{"error":{"message":"Rate limit reached for gpt-4o in organization org-x on tokens per min (TPM): Limit 30000, Used 29000, Requested 2000. Please try again in 2s. Visit https://platform.openai.com/account/rate-limits to learn more.","type":"tokens","param":null,"code":"rate_limit_exceeded"}}"#,
            Some(Tokens),
        ),
        (
            r#"{"error":{"message":"Rate limit reached for gpt-4o in organization org-x on requests per min (RPM): Limit 500, Used 500, Requested 1. Please try again in 120ms.","type":"requests","param":null,"code":"rate_limit_exceeded"}}"#,
            Some(Requests),
        ),
        (
            r#"{"error":{"message":"Rate limit reached for gpt-4o on requests per day (RPD): Limit 200, Used 200, Requested 1.","type":"requests"}}"#,
            Some(Requests),
        ),
        (
            r#"{"error":{"message":"Rate limit reached for gpt-4o","type":"tokens","code":"rate_limit_exceeded"}}"#,
            Some(Tokens),
        ),
        (
            r#"{"error": {"message": "Rate limit reached for tokens-per-min on requests per min (RPM): Limit 5"}}"#,
            Some(Requests),
        ),
        (
            r#"{"error":{"message":"You exceeded your current quota, please check your plan","type":"insufficient_quota","code":"insufficient_quota"}}"#,
            None,
        ),
        // Groq: the clause decides, not the type and not what else is mentioned.
        (
            r#"{"error":{"message":"Rate limit reached for model `m` in organization `o` service tier `on_demand` on output tokens per minute (OTPM): Limit 1000, Used 990, Requested 200. Your input tokens per minute limit is 7000.","type":"tokens","code":"rate_limit_exceeded"}}"#,
            Some(OutputTokens),
        ),
        (
            r#"{"error":{"message":"Rate limit reached on input tokens per minute (ITPM): Limit 7000, Used 6000, Requested 2000.","type":"tokens"}}"#,
            Some(InputTokens),
        ),
        (r#"{"error":{"message":"OTPM limit of 1000 reached","type":"tokens"}}"#, Some(OutputTokens)),
        (r#"{"error":{"message":"OTPM and ITPM limits reached","type":"tokens"}}"#, None),
        // Anthropic
        (
            r#"{"type":"error","error":{"type":"rate_limit_error","message":"This request would exceed your organization\u2019s rate limit of 40,000 input tokens per minute (org: x, model: claude). For details, refer to: https://docs.example/rate-limits. You can see the response headers for current usage. Please reduce the prompt length or the maximum tokens requested, or try again later."}}"#,
            Some(InputTokens),
        ),
        (
            r#"{"error":{"type":"rate_limit_error","message":"This request would exceed the rate limit for your organization of 8,000 output tokens per minute."}}"#,
            Some(OutputTokens),
        ),
        (
            r#"{"error":{"type":"rate_limit_error","message":"This request would exceed your organization's rate limit of 50 requests per minute."}}"#,
            Some(Requests),
        ),
        (
            r#"{"error":{"type":"rate_limit_error","message":"Number of request tokens has exceeded your per-minute rate limit"}}"#,
            Some(Tokens),
        ),
        (
            r#"{"error":{"type":"rate_limit_error","message":"Number of requests has exceeded your per-minute rate limit"}}"#,
            Some(Requests),
        ),
        (
            r#"{"error":{"type":"rate_limit_error","message":"Number of concurrent connections has exceeded your rate limit"}}"#,
            None,
        ),
        // Gemini and Vertex
        (
            r#"{"error":{"code":429,"message":"Resource has been exhausted (e.g. check quota).","status":"RESOURCE_EXHAUSTED"}}"#,
            None,
        ),
        (
            r#"{"error":{"message":"You exceeded your current quota.\n* Quota exceeded for metric: generativelanguage.googleapis.com/generate_content_free_tier_requests, limit: 15","details":[{"violations":[{"quotaMetric":"generativelanguage.googleapis.com/generate_content_free_tier_requests","quotaId":"GenerateRequestsPerMinutePerProjectPerModel-FreeTier"}]}]}}"#,
            Some(Requests),
        ),
        (
            r#"{"error":{"details":[{"violations":[{"quotaMetric":"generativelanguage.googleapis.com/generate_content_free_tier_input_token_count","quotaId":"GenerateContentInputTokensPerModelPerMinute-FreeTier"}]}]}}"#,
            Some(InputTokens),
        ),
        (
            r#"{"error":{"message":"Quota exceeded for aiplatform.googleapis.com/online_prediction_output_tokens_per_minute_per_base_model with base model: m."}}"#,
            Some(OutputTokens),
        ),
        (
            r#"{"error":{"message":"Quota exceeded for aiplatform.googleapis.com/generate_content_requests_per_minute_per_project_per_base_model."}}"#,
            Some(Requests),
        ),
        (
            r#"{"violations":[{"quotaId":"GenerateRequestsPerMinute"},{"quotaId":"GenerateContentInputTokensPerModelPerMinute"}]}"#,
            None,
        ),
        // Azure
        (
            r#"{"error":{"code":"429","message":"Requests to the ChatCompletions_Create Operation under Azure OpenAI API version 2024-02-01 have exceeded token rate limit of your current OpenAI S0 pricing tier. Please retry after 6 seconds."}}"#,
            Some(Tokens),
        ),
        (
            r#"{"error":{"code":"429","message":"Requests to the ChatCompletions_Create Operation have exceeded call rate limit of your current OpenAI S0 pricing tier. Please retry after 3 seconds."}}"#,
            Some(Requests),
        ),
        (
            r#"{"error":{"code":"RateLimitReached","message":"Your requests to gpt-4 for gpt-4 in East US have exceeded the token rate limit for your current AIServices S0 pricing tier."}}"#,
            Some(Tokens),
        ),
        // No provider's
        ("<html><body>429 Too Many Requests</body></html>", None),
        ("", None),
        ("PROMPT TOKENS PER MINUTE", Some(InputTokens)),
    ];

    #[test]
    fn body_names_the_exceeded_quota() {
        for (body, wanted) in BODIES {
            assert_eq!(exceeded(body.as_bytes()), *wanted, "{body}");
        }
    }

    #[test]
    fn only_the_beginning_is_read() {
        let text = "tokens per minute";
        let padded = |bytes: usize| format!("{}{text}", ".".repeat(bytes));
        assert_eq!(exceeded(padded(REJECTION_BODY_MAX - text.len()).as_bytes()), Some(Tokens));
        assert_eq!(exceeded(padded(REJECTION_BODY_MAX).as_bytes()), None);
    }

    #[test]
    fn mention_ignores_case() {
        assert!(mentions(b"Request Too Large for gpt-4", "request too large"));
        assert!(mentions(b"PerDay", "perday") && mentions(b"", ""));
        assert!(!mentions(b"per da", "per day") && !mentions(b"", "x"));
    }

    proptest! {
        #[test]
        fn any_body_is_read(body in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = exceeded(&body);
        }

        /// A body that is cut off anywhere names the same quota, or none.
        #[test]
        fn cut_body_names_nothing_else(cut in 0_usize..70) {
            let body = b"Rate limit reached on output tokens per min (OTPM): Limit 10, Used 10";
            let named = exceeded(&body[..cut.min(body.len())]);
            prop_assert!(matches!(named, None | Some(OutputTokens)));
        }
    }
}
