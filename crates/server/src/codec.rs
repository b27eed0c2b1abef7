//! Bodies and queries: read once, with the field that is wrong; written once.

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
use tidegate_client::{EntityId, LeaseRef, TokenId};

use crate::refusal::Refusal;
use crate::state::State;

/// A body that was sent, checked.
#[derive(Debug)]
pub(crate) struct Sent<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequest<State> for Sent<T> {
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
        let bounds = state.bounds();
        match tokio::time::timeout(bounds.body_time, Bytes::from_request(request, state)).await {
            Ok(Ok(bytes)) => read(&bytes).map(Self),
            Ok(Err(BytesRejection::FailedToBufferBody(rejection)))
                if rejection.status() == StatusCode::PAYLOAD_TOO_LARGE =>
            {
                let detail = format!("a body of more than {} bytes", bounds.body_max);
                Err(Refusal::new(StatusCode::PAYLOAD_TOO_LARGE, "large-body", "Body too large", detail))
            }
            Ok(Err(_)) => {
                let detail = "the body ended before it was whole";
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

/// The value that a body says.
fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, Refusal> {
    // A list of a type's fields would be taken for the type.
    if bytes.trim_ascii_start().first() == Some(&b'[') {
        return Err(Refusal::invalid("", "the body is a list, and must be an object"));
    }
    let error = match serde_json::from_slice(bytes) {
        Ok(value) => return Ok(value),
        Err(error) => error,
    };
    if !error.is_data() {
        let detail = format!("the body is no JSON: {error}");
        return Err(Refusal::new(StatusCode::BAD_REQUEST, "not-json", "Not JSON", detail));
    }
    // Read again, to find out where: only what is wrong costs this.
    let mut reader = serde_json::Deserializer::from_slice(bytes);
    match serde_path_to_error::deserialize::<_, T>(&mut reader) {
        Ok(value) => Ok(value),
        Err(error) => {
            let path = error.path().to_string();
            let sentence = error.into_inner().to_string();
            // The field says where it is, to whoever never saw the body too.
            let sentence =
                sentence.rsplit_once(" at line ").map_or(sentence.as_str(), |(sentence, _)| sentence);
            Err(Refusal::invalid(path.trim_start_matches('.'), shown(sentence)))
        }
    }
}

/// What is asked behind the `?`, checked.
pub(crate) struct Asked<T>(pub(crate) T);

impl<T: DeserializeOwned> FromRequestParts<State> for Asked<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, Refusal> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(asked)) => Ok(Self(asked)),
            Err(rejection) => {
                let text = rejection.body_text();
                let text = text.strip_prefix("Failed to deserialize query string: ").unwrap_or(&text);
                let is_field = |field: &&str| field.bytes().all(|letter| letter.is_ascii_lowercase());
                let field =
                    text.split_once(": ").map(|(field, _)| field).filter(is_field).unwrap_or_default();
                Err(Refusal::invalid(field, shown(text)))
            }
        }
    }
}

/// A part of the address, checked.
pub(crate) struct At<T>(pub(crate) T);

/// What a part of the address is called.
pub(crate) trait Part: FromStr<Err: fmt::Display> {
    /// The field that an error names.
    const FIELD: &'static str;
}

impl Part for EntityId {
    const FIELD: &'static str = "entity";
}

impl Part for TokenId {
    const FIELD: &'static str = "token";
}

impl Part for LeaseRef {
    const FIELD: &'static str = "lease";
}

impl<T: Part> FromRequestParts<State> for At<T> {
    type Rejection = Refusal;

    async fn from_request_parts(parts: &mut Parts, state: &State) -> Result<Self, Refusal> {
        let Ok(Path(text)) = Path::<String>::from_request_parts(parts, state).await else {
            return Err(Refusal::invalid(T::FIELD, format!("the {} is no text", T::FIELD)));
        };
        text.parse().map(Self).map_err(|error: T::Err| Refusal::invalid(T::FIELD, error.to_string()))
    }
}

/// Most answers fit into this, and are not moved while they are written.
const ROOM: usize = 512;

/// A value as it is written into a stream of events.
pub(crate) fn text<T: Serialize>(value: &T) -> String {
    serde_json::to_string(value).unwrap_or_default()
}

/// An answer with a body.
pub(crate) fn answer<T: Serialize>(status: StatusCode, body: &T) -> Response {
    let mut text = Vec::with_capacity(ROOM);
    match serde_json::to_writer(&mut text, body) {
        Ok(()) => {
            let json = HeaderValue::from_static("application/json");
            (status, [(header::CONTENT_TYPE, json)], text).into_response()
        }
        Err(error) => {
            tracing::error!(%error, "an answer could not be written");
            StatusCode::INTERNAL_SERVER_ERROR.into_response()
        }
    }
}

/// An answer to what went well.
pub(crate) struct Done<T>(pub(crate) T);

impl<T: Serialize> IntoResponse for Done<T> {
    fn into_response(self) -> Response {
        answer(StatusCode::OK, &self.0)
    }
}

/// A sentence that may repeat what was sent, cut where it becomes long.
fn shown(sentence: &str) -> String {
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
    fn what_is_wrong_is_told_with_its_place() {
        let refused = |text: &str| *read::<Batch>(text.as_bytes()).expect_err("refused").problem;
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
        let data = *read::<Acquire>(b"[]").expect_err("refused").problem;
        assert_eq!((data.status, data.field), (422, None));
    }

    #[test]
    fn a_long_sentence_is_cut() {
        assert_eq!(shown(&"x".repeat(501)).chars().count(), 501);
        assert!(shown(&"x".repeat(501)).ends_with('…'));
        assert_eq!(shown("short"), "short");
    }
}
