//! Request bodies and queries, with errors that name the invalid field; response bodies.

use axum::body::Bytes;
use axum::extract::rejection::BytesRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use serde::de::DeserializeOwned;
use std::fmt;
use std::str::FromStr;
use tidegate_client::{EntityId, LeaseRef, ResourceName, TokenId};

use crate::refusal::Refusal;
use crate::state::State;

/// A validated JSON body.
#[derive(Debug)]
pub(crate) struct JsonBody<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<State> for JsonBody<T> {
    type Rejection = Refusal;

    async fn from_request(request: Request, state: &State) -> Result<Self, Refusal> {
        if !is_json(request.headers()) {
            return Err(Refusal::new(
                StatusCode::UNSUPPORTED_MEDIA_TYPE,
                "not-json",
                "Unsupported media type",
                "the body's content-type must be application/json",
            ));
        }
        if let Some(encoding) = request.headers().get(header::CONTENT_ENCODING)
            && !encoding.as_bytes().eq_ignore_ascii_case(b"identity")
        {
            let detail = truncated(&format!(
                "the body's content-encoding {encoding:?} is not supported: send it plain"
            ));
            let (status, title) = (StatusCode::UNSUPPORTED_MEDIA_TYPE, "Unsupported media type");
            return Err(Refusal::new(status, "encoded-body", title, detail));
        }
        let bounds = state.bounds();
        match tokio::time::timeout(bounds.body_time, Bytes::from_request(request, state)).await {
            Ok(Ok(bytes)) => parse(&bytes).map(Self),
            Ok(Err(BytesRejection::FailedToBufferBody(rejection)))
                if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE =>
            {
                let detail = format!("a body of more than {} bytes", bounds.body_max);
                Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "large-body", "Body too large", detail))
            }
            Ok(Err(_)) => {
                let detail = "the body ended early";
                Err(Refusal::new(StatusCode::BAD_REQUEST, "broken-body", "Broken body", detail))
            }
            Err(_) => {
                let detail = format!("the body took more than {:?} to arrive", bounds.body_time);
                Err(Refusal::new(StatusCode::REQUEST_TIMEOUT, "slow-body", "Too slow", detail))
            }
        }
    }
}

fn is_json(headers: &HeaderMap) -> bool {
    let essence = |value: &str| {
        value.split(';').next().unwrap_or_default().trim().eq_ignore_ascii_case("application/json")
    };
    headers.get(header::CONTENT_TYPE).and_then(|value| value.to_str().ok()).is_some_and(essence)
}

/// Parses a body.
fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    // serde would accept an array of field values as a struct.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        return Err(Refusal::invalid("", "the body must be an object, not a list"));
    }
    let error = match serde_json::from_slice(bytes) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    if !error.is_data() {
        let detail = format!("the body is not valid JSON: {error}");
        return Err(Refusal::new(StatusCode::BAD_REQUEST, "not-json", "Not JSON", detail));
    }
    // Parses again to find the path of the field: only invalid bodies pay for it.
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    match serde_path_to_error::deserialize::<_, T>(&mut reader) {
        Ok(value) => Ok(value),
        Err(error) => {
            let path = error.path().to_string();
            let sentence = error.into_inner().to_string();
            // The field already locates the error, also for readers who never saw the body.
            let sentence =
                sentence.rsplit_once(" at line ").map_or(sentence.as_str(), |(sentence, _)| sentence);
            Err(Refusal::invalid(path.trim_start_matches('.'), truncated(sentence)))
        }
    }
}

/// The validated query string.
pub(crate) struct QueryParams<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<State> for QueryParams<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, Refusal> {
        if !parts.uri.query().is_none_or(is_utf8) {
            return Err(Refusal::invalid("", "the query is not UTF-8"));
        }
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(params)) => Ok(Self(params)),
            Err(rejection) => {
                let text = rejection.body_text();
                let text = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
                let is_field = |field: &&str| field.bytes().all(|letter| letter.is_ascii_lowercase());
                let field =
                    text.split_once(": ").map(|(field, _)| field).filter(is_field).unwrap_or_default();
                Err(Refusal::invalid(field, truncated(text)))
            }
        }
    }
}

/// Whether percent-encoded text is UTF-8. Other bytes would be replaced, and a name would become another one.
fn is_utf8(query: &str) -> bool {
    let (mut bytes, mut rest) = (Vec::with_capacity(query.len()), query.as_bytes());
    while let [first, after @ ..] = rest {
        let digit = |place: usize| after.get(place).and_then(|digit| char::from(*digit).to_digit(16));
        let encoded = digit(0).zip(digit(1)).filter(|_| *first == b'%');
        let byte = encoded.and_then(|(high, low)| u8::try_from(high * 16 + low).ok());
        rest = if byte.is_some() { &after[2..] } else { after };
        bytes.push(byte.unwrap_or(*first));
    }
    std::str::from_utf8(&bytes).is_ok()
}

/// A validated path segment.
pub(crate) struct PathParam<T>(pub(crate) T);

/// A type that is parsed from a path segment.
pub(crate) trait PathSegment: FromStr<Err: fmt::Display> {
    /// The field name in errors.
    const FIELD: &'static str;
}

impl PathSegment for EntityId {
    const FIELD: &'static str = "entity";
}

/// The name of an upstream.
impl PathSegment for ResourceName {
    const FIELD: &'static str = "upstream";
}

impl PathSegment for TokenId {
    const FIELD: &'static str = "token";
}

impl PathSegment for LeaseRef {
    const FIELD: &'static str = "lease";
}

impl<T: PathSegment> FromRequestParts<State> for PathParam<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, Refusal> {
        let Ok(Path(text)) = Path::<String>::from_request_parts(parts, state).await else {
            return Err(Refusal::invalid(T::FIELD, format!("the {} is not valid UTF-8", T::FIELD)));
        };
        text.parse().map(Self).map_err(|error: T::Err| Refusal::invalid(T::FIELD, error.to_string()))
    }
}

/// Most responses fit into this capacity and need no reallocation.
const RESPONSE_CAPACITY: usize = 512;

/// Serializes a value for an event stream.
pub(crate) fn to_json<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// A response with a JSON body.
pub(crate) fn json_response<T: Serialize>(status: StatusCode, body: &T) -> Response {
    let mut text = Vec::with_capacity(RESPONSE_CAPACITY);
    match serde_json::to_writer(&mut text, body) {
        Ok(()) => {
            let json = HeaderValue::from_static("application/json");
            (status, [(header::CONTENT_TYPE, json)], text).into_response()
        }
        Err(error) => {
            tracing::error!(%error, "failed to serialize the response");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// A 200 response.
pub(crate) struct OkJson<T>(pub(crate) T);

impl<T: Serialize> IntoResponse for OkJson<T> {
    fn into_response(self) -> Response {
        json_response(StatusCode::OK, &self.0)
    }
}

/// Truncates a message that may quote the request.
fn truncated(sentence: &str) -> String {
    let mut short: String = sentence.chars().take(500).collect();
    if sentence.chars().nth(500).is_some() {
        short.push('…');
    }
    short
}

#[cfg(test)]
mod tests {
    use tidegate_client::{Acquire, Batch};

    use super::*;

    #[test]
    fn query_must_be_utf8() {
        for query in ["", "a=b", "a=%C3%A9", "a=%c3%a9&b=%zz%", "a=é", "%EF%BF%BD"] {
            assert!(is_utf8(query), "{query}");
        }
        for query in ["a=%ff", "%C3", "a=%c3%28&b=1"] {
            assert!(!is_utf8(query), "{query}");
        }
    }

    #[test]
    fn invalid_body_error_names_field() {
        let refused = |text: &str| *parse::<Batch>(text.as_bytes()).expect_err("refused").problem;
        let field = |text: &str| refused(text).field.unwrap_or_default();
        let with = |ask: &str| format!("{{\"requests\": [{ask}]}}");
        assert_eq!(field(&with(r#"{"entity": "a#", "resource": "b", "cost": {}}"#)), "requests[0].entity");
        assert_eq!(
            field(&with(r#"{"entity": "a", "resource": "b", "cost": {"r": -1}}"#)),
            "requests[0].cost.r"
        );
        let detail =
            refused(&with(r#"{"entity": "a", "resource": "b", "cost": {"r": 9999999999999}}"#)).detail;
        assert_eq!(detail, "9999999999999 units of `r`, more than 1099511627776");
        let broken = refused("{\"requests\": [");
        assert_eq!((broken.status, broken.kind.as_str()), (400, "/problems/not-json"));
        let data = *parse::<Acquire>(b"[]").expect_err("refused").problem;
        assert_eq!((data.status, data.field), (422, None));
    }

    #[test]
    fn long_message_is_truncated() {
        assert_eq!(truncated(&"x".repeat(501)).chars().count(), 501);
        assert!(truncated(&"x".repeat(501)).ends_with('…'));
        assert_eq!(truncated("short"), "short");
    }
}
