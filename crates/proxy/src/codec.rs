//! JSON that the proxy writes and edits: refusals, the usage option of a request, and chunks of a stream.

use serde::{Deserialize, Deserializer};
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
    /// Also `null`, which is a member.
    #[serde(borrow, default, deserialize_with = "present")]
    stream_options: Option<&'a RawValue>,
}

fn present<'de, D: Deserializer<'de>>(from: D) -> Result<Option<&'de RawValue>, D::Error> {
    <&RawValue>::deserialize(from).map(Some)
}

/// The same request, asking for usage in its stream even if it refuses that. `None` if it asks already, or is not
/// valid.
pub(crate) fn with_usage_option(body: &[u8]) -> Option<Vec<u8>> {
    let text = std::str::from_utf8(body).ok()?;
    let given = serde_json::from_str::<UsageOption<'_>>(text).ok()?.stream_options.map(RawValue::get);
    let known = given.map(serde_json::from_str::<Option<serde_json::Map<String, Json>>>).transpose().ok()?;
    let mut options = known.flatten().unwrap_or_default();
    if options.insert("include_usage".to_owned(), Json::Bool(true)) == Some(Json::Bool(true)) {
        return None;
    }
    let options = Json::Object(options);
    let (range, inserted) = if let Some(given) = given {
        // It is a part of the text.
        let start = given.as_ptr().addr().checked_sub(text.as_ptr().addr())?;
        (start..start + given.len(), options.to_string())
    } else {
        let start = text.find('{')? + 1;
        (start..start, format!("\"stream_options\":{options},"))
    };
    let (before, after) = (text.get(..range.start)?, text.get(range.end..)?);
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
                Some(r#"{"stream_options":{"include_usage":true,"x":[1,2]},"a":1.50}"#),
            ),
            (r#"{"stream_options": {} }"#, Some(r#"{"stream_options": {"include_usage":true} }"#)),
            (r#"{"stream_options":{"include_usage":true}}"#, None),
            (
                r#"{"stream_options":{"include_usage":false}}"#,
                Some(r#"{"stream_options":{"include_usage":true}}"#),
            ),
            (
                r#"{"stream_options":{"include_usage":true,"include_\u0075sage":null}}"#,
                Some(r#"{"stream_options":{"include_usage":true}}"#),
            ),
            (r#"{"stream_options": null }"#, Some(r#"{"stream_options": {"include_usage":true} }"#)),
            (r#"{"stream_\u006fptions":null}"#, Some(r#"{"stream_\u006fptions":{"include_usage":true}}"#)),
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
