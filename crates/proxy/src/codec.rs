//! JSON that the proxy writes and edits: refusals, the usage option of a request, and chunks of a stream.

use serde::Deserialize;
use serde_json::value::RawValue;
pub(crate) use serde_json::{Value as Json, json};

use crate::profile::Format;
use crate::scope::ScopeView;

/// What a refusal says.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ErrorText<'a> {
    pub(crate) status: u16,
    /// The type in the words of OpenAI and Anthropic, such as `rate_limit_error`.
    pub(crate) kind: &'a str,
    /// The code in the words of OpenAI.
    pub(crate) code: Option<&'a str>,
    pub(crate) message: &'a str,
    /// Seconds until a retry can succeed.
    pub(crate) retry_after: Option<f64>,
}

/// The body of an error in a provider's format.
pub(crate) fn error_body(format: Format, error: ErrorText<'_>) -> String {
    let ErrorText { status, kind, code, message, retry_after } = error;
    let body = match format {
        Format::OpenAi => {
            json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
        }
        Format::Anthropic => json!({"type": "error", "error": {"type": kind, "message": message}}),
        Format::Google => {
            let state = match status {
                401 => "UNAUTHENTICATED",
                403 => "PERMISSION_DENIED",
                404 => "NOT_FOUND",
                429 => "RESOURCE_EXHAUSTED",
                400..=499 => "INVALID_ARGUMENT",
                _ => "UNAVAILABLE",
            };
            let detail = |seconds: f64| json!({"@type": "type.googleapis.com/google.rpc.RetryInfo", "retryDelay": format!("{seconds}s")});
            let details: Vec<Json> = retry_after.map(detail).into_iter().collect();
            json!({"error": {"code": status, "message": message, "status": state, "details": details}})
        }
    };
    body.to_string()
}

/// The inside of a JSON string without its escapes; `None` if one is invalid.
pub(crate) fn unescaped(text: &[u8]) -> Option<String> {
    serde_json::from_slice(&[b"\"", text, b"\""].concat()).ok()
}

/// The members of a request that concern usage in a stream.
#[derive(Deserialize)]
struct UsageOption<'a> {
    #[serde(borrow)]
    stream_options: Option<&'a RawValue>,
}

/// The same request, asking for usage in its stream. `None` if it does so already, refuses, or is not valid.
pub(crate) fn with_usage_option(body: &[u8]) -> Option<Vec<u8>> {
    const OPTION: &str = "\"include_usage\":true";
    let text = std::str::from_utf8(body).ok()?;
    let UsageOption { stream_options } = serde_json::from_str(text).ok()?;
    let (at, inserted) = match stream_options.map(RawValue::get) {
        None => {
            // `null` or absent. A second member of this name would be ambiguous.
            if text.contains("\"stream_options\"") {
                return None;
            }
            (text.find('{')? + 1, format!("\"stream_options\":{{{OPTION}}},"))
        }
        Some(options) => {
            let known: serde_json::Map<String, Json> = serde_json::from_str(options).ok()?;
            if known.contains_key("include_usage") {
                return None;
            }
            // The slice is a part of the text.
            let start = options.as_ptr().addr().checked_sub(text.as_ptr().addr())?;
            let comma = if known.is_empty() { "" } else { "," };
            (start + 1, format!("{OPTION}{comma}"))
        }
    };
    let (before, after) = text.split_at_checked(at)?;
    Some([before, inserted.as_str(), after].concat().into_bytes())
}

/// Whether a chunk of a stream only reports usage: it has no choices.
pub(crate) fn is_usage_chunk(data: &[u8]) -> bool {
    #[derive(Deserialize)]
    struct Chunk {
        choices: Vec<serde::de::IgnoredAny>,
        usage: Option<serde::de::IgnoredAny>,
    }
    serde_json::from_slice::<Chunk>(data).is_ok_and(|chunk| chunk.choices.is_empty() && chunk.usage.is_some())
}

/// The state of the throttles.
pub(crate) fn scopes_json(scopes: &[ScopeView]) -> String {
    let scope = |scope: &ScopeView| {
        json!({"upstream": scope.upstream, "group": scope.group, "in_flight": scope.in_flight,
            "waiting": scope.waiting, "admitted": scope.admitted, "rate": scope.rate, "quota": scope.quota,
            "tokens_quota": scope.tokens_quota, "slots": scope.slots, "reason": scope.reason})
    };
    json!({"scopes": scopes.iter().map(scope).collect::<Vec<_>>()}).to_string()
}

#[cfg(test)]
pub(crate) fn parse(text: &str) -> Json {
    serde_json::from_str(text).expect("it is JSON")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn usage_option_is_added_where_it_is_missing() {
        let table = [
            (r#" {"a":1}"#, Some(r#" {"stream_options":{"include_usage":true},"a":1}"#)),
            (
                r#"{"stream_options":{"x":[1, 2]},"a":1.50}"#,
                Some(r#"{"stream_options":{"include_usage":true,"x":[1, 2]},"a":1.50}"#),
            ),
            (r#"{"stream_options": {} }"#, Some(r#"{"stream_options": {"include_usage":true} }"#)),
            (r#"{"stream_options":{"include_usage":false}}"#, None),
            (r#"{"stream_options":{"include_usage":true}}"#, None),
            (r#"{"stream_options":null}"#, None),
            (r#"{"stream_options":5}"#, None),
            ("[]", None),
            ("{", None),
        ];
        for (body, wanted) in table {
            let edited = with_usage_option(body.as_bytes());
            assert_eq!(edited.map(|body| String::from_utf8(body).unwrap()).as_deref(), wanted, "{body}");
        }
    }

    #[test]
    fn usage_chunk_has_no_choices() {
        assert!(is_usage_chunk(br#"{"choices":[],"usage":{"prompt_tokens":1}}"#));
        assert!(!is_usage_chunk(br#"{"choices":[{"delta":{}}],"usage":null}"#));
        assert!(!is_usage_chunk(br#"{"choices":[],"usage":null}"#));
        assert!(!is_usage_chunk(b"[DONE]"));
    }

    #[test]
    fn errors_have_the_format_of_their_provider() {
        let error = ErrorText {
            status: 429,
            kind: "rate_limit_error",
            code: Some("rate_limit_exceeded"),
            message: "wait",
            retry_after: Some(2.5),
        };
        let body = |format| parse(&error_body(format, error));
        assert_eq!(body(Format::OpenAi)["error"]["code"], "rate_limit_exceeded");
        assert_eq!(body(Format::Anthropic)["error"]["type"], "rate_limit_error");
        let google = body(Format::Google);
        assert_eq!(google["error"]["status"], "RESOURCE_EXHAUSTED");
        assert_eq!(google["error"]["details"][0]["retryDelay"], "2.5s");
    }
}
