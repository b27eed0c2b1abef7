//! Server events: parses the server-sent event stream of `/v1/events`.

use std::fmt;
use std::time::Duration;

use reqwest::Response;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use tokio::time::{Instant, timeout};

use super::call::Call;
use super::error::{Cause, ClientError, Outage, StopReason};
use super::secret::Secret;
use super::send::{self, Outcome};
use super::{Client, Inner};
use crate::event::Event;

/// The maximum size of an event; events of this server are far smaller.
const EVENT_MAX: usize = 64 * 1_024;

/// A stream of server events. Dropping it closes the connection.
pub struct Events {
    response: Response,
    parser: EventParser,
    call: Call,
    token: Option<Secret>,
    unknown: u64,
}

impl Client {
    /// Subscribes to server events. The call is not retried: after a lost connection call it again; events in
    /// between are missed.
    ///
    /// # Errors
    /// Those of every call; the server also limits the number of listeners.
    ///
    /// # Cancel safety
    /// Dropping the future has no effect.
    pub async fn events(&self) -> Result<Events, ClientError> {
        let call = Call::get("/v1/events");
        let (token, began) = (self.token.clone(), Instant::now());
        match self.inner.open_stream(token.as_ref(), &call).await {
            Ok(Ok(response)) if !is_stream(response.headers()) => {
                Err(self.garbled(&call, response.status().as_u16(), &"it is not an event stream"))
            }
            Ok(Ok(response)) => {
                Ok(Events { response, parser: EventParser::default(), call, token, unknown: 0 })
            }
            Ok(Err(Outcome::Problem { status, problem })) if status < 500 => {
                Err(ClientError::from_problem(problem, status, false))
            }
            Ok(Err(Outcome::Problem { status, problem })) => {
                let retry_after = problem.retry_after.map(crate::Seconds::as_duration);
                Err(unavailable(&call, began, Cause::Status { status, problem: Some(problem), retry_after }))
            }
            Ok(Err(Outcome::Fatal(error))) => Err(error),
            Ok(Err(Outcome::Failed(cause))) | Err(cause) => Err(unavailable(&call, began, cause)),
            Ok(Err(Outcome::Success(payload))) => {
                Err(self.garbled(&call, payload.status, &"it is not an event stream"))
            }
        }
    }
}

impl Inner {
    /// Opens the event stream, or returns the response in its place.
    async fn open_stream(
        &self,
        token: Option<&Secret>,
        call: &Call,
    ) -> Result<Result<Response, Outcome>, Cause> {
        let span = self.settings.request;
        let url = match call.url(&self.base) {
            Ok(url) => url,
            Err(why) => return Ok(Err(Outcome::Fatal(send::invalid(call, why)))),
        };
        let mut request = self.http.request(call.method.clone(), url);
        request = request.header(ACCEPT, HeaderValue::from_static("text/event-stream"));
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, token.header());
        }
        let opening = async {
            let response = request.send().await?;
            if response.status().is_success() {
                Ok(Ok(response))
            } else {
                send::read_response(token, call, response).await.map(Err)
            }
        };
        match timeout(span, opening).await {
            Ok(opened) => Ok(opened.unwrap_or_else(|error: reqwest::Error| {
                Err(send::transport_failure(call, error.without_url()))
            })),
            Err(_) => Err(Cause::Timeout(span)),
        }
    }
}

impl Events {
    /// Returns the next event, or `None` once the server has closed the stream. Keep-alive comments are
    /// skipped, and so are events of an unknown type, which are [counted](Self::unknown).
    ///
    /// # Errors
    /// [`ClientError::Unavailable`] if the connection is lost, [`ClientError::Garbled`] for an invalid event.
    ///
    /// # Cancel safety
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        let began = Instant::now();
        loop {
            while let Some(data) = self.parser.next_event() {
                match serde_json::from_str(&data) {
                    Ok(event) => return Ok(Some(event)),
                    // An event type of a newer server.
                    Err(error) if error.is_data() => self.unknown += 1,
                    Err(error) => return Err(self.garbled(&format!("an event is not valid JSON: {error}"))),
                }
            }
            match self.response.chunk().await {
                Ok(Some(chunk)) => self.parser.push(&chunk).map_err(|why| self.garbled(&why))?,
                Ok(None) => return Ok(None),
                Err(error) => {
                    return Err(unavailable(&self.call, began, Cause::Cut(error.without_url().into())));
                }
            }
        }
    }

    /// Returns the number of skipped events of unknown types, sent by a newer server.
    pub const fn unknown(&self) -> u64 {
        self.unknown
    }

    fn garbled(&self, why: &str) -> ClientError {
        send::garbled(self.token.as_ref(), &self.call, self.response.status().as_u16(), why, None)
    }
}

impl fmt::Debug for Events {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Events").field("unknown", &self.unknown).finish_non_exhaustive()
    }
}

/// Whether the response is an event stream. Other services may respond with a page.
fn is_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("text/event-stream"))
}

fn unavailable(call: &Call, began: Instant, cause: Cause) -> ClientError {
    let took: Duration = began.elapsed();
    let (method, route) = (call.method.to_string(), call.route);
    // Subscribing changes nothing at the server.
    ClientError::Unavailable(Box::new(Outage {
        method,
        route,
        attempts: 1,
        took,
        why: StopReason::Attempts,
        cause,
        may_be_done: false,
    }))
}

/// An incremental parser for server-sent events.
#[derive(Debug, Default)]
struct EventParser {
    bytes: Vec<u8>,
    /// Bytes already scanned for a line break.
    scanned: usize,
    data: Option<String>,
}

impl EventParser {
    /// Adds received bytes.
    fn push(&mut self, chunk: &[u8]) -> Result<(), String> {
        // Complete events were removed before: the rest is part of one event.
        if self.bytes.len() + self.data.as_ref().map_or(0, String::len) > EVENT_MAX {
            return Err(format!("an event has more than {EVENT_MAX} bytes"));
        }
        self.bytes.extend_from_slice(chunk);
        Ok(())
    }

    /// Returns the data of the next complete event.
    fn next_event(&mut self) -> Option<String> {
        loop {
            let end = self.bytes[self.scanned..].iter().position(|byte| *byte == b'\n');
            let Some(end) = end.map(|end| end + self.scanned) else {
                self.scanned = self.bytes.len();
                return None;
            };
            let line: Vec<u8> = self.bytes.drain(..=end).collect();
            self.scanned = 0;
            let line = line[..end].strip_suffix(b"\r").unwrap_or(&line[..end]);
            if line.is_empty() {
                if let Some(data) = self.data.take() {
                    return Some(data);
                }
            } else if let Some(text) = line.strip_prefix(b"data:") {
                let text = String::from_utf8_lossy(text.strip_prefix(b" ").unwrap_or(text));
                match &mut self.data {
                    Some(data) => {
                        data.push('\n');
                        data.push_str(&text);
                    }
                    None => self.data = Some(text.into_owned()),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(chunks: &[&str]) -> Vec<String> {
        let (mut parser, mut events) = (EventParser::default(), Vec::new());
        for chunk in chunks {
            parser.push(chunk.as_bytes()).unwrap();
            while let Some(event) = parser.next_event() {
                events.push(event);
            }
        }
        events
    }

    #[test]
    fn events_survive_any_chunking() {
        let text = ": alive\n\nevent: busy\ndata: {\"a\":1}\n\ndata: one\r\ndata:two\r\n\r\nid: 7\n\n";
        let whole = ["{\"a\":1}", "one\ntwo"];
        assert_eq!(parse(&[text]), whole);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(parse(&letters.iter().map(String::as_str).collect::<Vec<_>>()), whole);
        assert_eq!(parse(&["data: unfinished\n"]), [""; 0]);
    }

    #[test]
    fn only_event_stream_content_type_is_accepted() {
        let table = [
            (Some("text/event-stream"), true),
            (Some("Text/Event-Stream; charset=utf-8"), true),
            (Some("text/html"), false),
            (Some("application/json"), false),
            (None, false),
        ];
        for (kind, is_one) in table {
            let kinds = kind.map(|kind| (CONTENT_TYPE, HeaderValue::from_static(kind)));
            assert_eq!(is_stream(&kinds.into_iter().collect()), is_one, "{kind:?}");
        }
    }

    #[test]
    fn oversized_event_is_rejected() {
        let mut parser = EventParser::default();
        let chunk = vec![b'x'; EVENT_MAX];
        parser.push(&chunk).unwrap();
        assert_eq!(parser.next_event(), None);
        assert_eq!(parser.push(b"x"), Ok(()));
        assert_eq!(parser.next_event(), None);
        assert_eq!(parser.push(b"x"), Err("an event has more than 65536 bytes".to_owned()));
    }
}
