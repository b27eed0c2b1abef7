//! What happens to a server, heard one by one: server-sent events that end when the server does.

use std::fmt;
use std::time::Duration;

use reqwest::Response;
use reqwest::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use tokio::time::{Instant, timeout};

use super::call::Call;
use super::error::{Away, Cause, ClientError, GaveUp};
use super::secret::Secret;
use super::send::{self, Heard};
use super::{Client, Inner};
use crate::event::Event;

/// An event has at most so many bytes: those of this server have far fewer.
const EVENT_MAX: usize = 64 * 1_024;

/// Events as they come. Dropping it ends the connection.
pub struct Events {
    response: Response,
    lines: Lines,
    call: Call,
    token: Option<Secret>,
    unknown: u64,
}

impl Client {
    /// Hears what happens to the server from now on. It is asked once: whoever wants to go on after a loss asks again, and
    /// hears nothing of what happened meanwhile.
    ///
    /// # Errors
    /// As every call: a token that is not good or may not read, a server that is away, or one to which as many listen as may.
    ///
    /// # Cancel safety
    /// Nothing is changed.
    pub async fn events(&self) -> Result<Events, ClientError> {
        let call = Call::get("/v1/events");
        let (token, began) = (self.token.clone(), Instant::now());
        match self.inner.listen(token.as_ref(), &call).await {
            Ok(Ok(response)) if !is_stream(response.headers()) => {
                Err(self.garbled(&call, response.status().as_u16(), &"it is no stream of events"))
            }
            Ok(Ok(response)) => Ok(Events { response, lines: Lines::default(), call, token, unknown: 0 }),
            Ok(Err(Heard::Said { status, problem })) if status < 500 => {
                Err(ClientError::of(problem, status, false))
            }
            Ok(Err(Heard::Said { status, problem })) => {
                let retry_after = problem.retry_after.map(crate::Seconds::as_duration);
                Err(away(&call, began, Cause::Status { status, problem: Some(problem), retry_after }))
            }
            Ok(Err(Heard::Strange(error))) => Err(error),
            Ok(Err(Heard::Nothing(cause))) | Err(cause) => Err(away(&call, began, cause)),
            Ok(Err(Heard::Done(answer))) => {
                Err(self.garbled(&call, answer.status, &"it is no stream of events"))
            }
        }
    }
}

impl Inner {
    /// A connection on which events come, or what was said in its place.
    async fn listen(&self, token: Option<&Secret>, call: &Call) -> Result<Result<Response, Heard>, Cause> {
        let span = self.patience.request;
        let url = match call.url(&self.base) {
            Ok(url) => url,
            Err(why) => return Ok(Err(Heard::Strange(send::invalid(call, why)))),
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
                send::said(token, call, response).await.map(Err)
            }
        };
        match timeout(span, opening).await {
            Ok(opened) => {
                Ok(opened
                    .unwrap_or_else(|error: reqwest::Error| Err(send::unsent(call, error.without_url()))))
            }
            Err(_) => Err(Cause::Timeout(span)),
        }
    }
}

impl Events {
    /// The next event; nothing once the server has ended the connection. Signs of life are heard and not told, and so are
    /// events that this client does not know, which are [counted](Self::unknown).
    ///
    /// # Errors
    /// [`ClientError::Away`] if the connection is lost, [`ClientError::Garbled`] for what is no event.
    ///
    /// # Cancel safety
    /// Dropping the future loses no event.
    pub async fn next(&mut self) -> Result<Option<Event>, ClientError> {
        let began = Instant::now();
        loop {
            while let Some(data) = self.lines.event() {
                match serde_json::from_str(&data) {
                    Ok(event) => return Ok(Some(event)),
                    // A newer server tells more.
                    Err(error) if error.is_data() => self.unknown += 1,
                    Err(error) => return Err(self.garbled(&format!("an event is no JSON: {error}"))),
                }
            }
            match self.response.chunk().await {
                Ok(Some(chunk)) => self.lines.take(&chunk).map_err(|why| self.garbled(&why))?,
                Ok(None) => return Ok(None),
                Err(error) => {
                    return Err(away(&self.call, began, Cause::Cut(error.without_url().into())));
                }
            }
        }
    }

    /// Events that this client does not know, of a newer server.
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

/// Whether what answers says that events come: a page that any server has for any address is none.
fn is_stream(headers: &HeaderMap) -> bool {
    let kind = headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    kind.split(';').next().is_some_and(|kind| kind.trim().eq_ignore_ascii_case("text/event-stream"))
}

fn away(call: &Call, began: Instant, cause: Cause) -> ClientError {
    let took: Duration = began.elapsed();
    let (method, route) = (call.method.to_string(), call.route);
    // To listen changes nothing, and so nothing may have been done.
    ClientError::Away(Box::new(Away {
        method,
        route,
        attempts: 1,
        took,
        why: GaveUp::Attempts,
        cause,
        unheard: false,
    }))
}

/// Bytes as they come, cut into events.
#[derive(Debug, Default)]
struct Lines {
    bytes: Vec<u8>,
    /// So many bytes are known to end no line.
    looked: usize,
    data: Option<String>,
}

impl Lines {
    /// Takes what came.
    fn take(&mut self, chunk: &[u8]) -> Result<(), String> {
        // Whole events were taken out before: this is what is left of one.
        if self.bytes.len() + self.data.as_ref().map_or(0, String::len) > EVENT_MAX {
            return Err(format!("an event has more than {EVENT_MAX} bytes"));
        }
        self.bytes.extend_from_slice(chunk);
        Ok(())
    }

    /// The data of the next event that is whole.
    fn event(&mut self) -> Option<String> {
        loop {
            let end = self.bytes[self.looked..].iter().position(|byte| *byte == b'\n');
            let Some(end) = end.map(|end| end + self.looked) else {
                self.looked = self.bytes.len();
                return None;
            };
            let line: Vec<u8> = self.bytes.drain(..=end).collect();
            self.looked = 0;
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

    fn heard(chunks: &[&str]) -> Vec<String> {
        let (mut lines, mut events) = (Lines::default(), Vec::new());
        for chunk in chunks {
            lines.take(chunk.as_bytes()).unwrap();
            while let Some(event) = lines.event() {
                events.push(event);
            }
        }
        events
    }

    #[test]
    fn events_are_heard_whole_however_they_are_cut() {
        let text = ": alive\n\nevent: busy\ndata: {\"a\":1}\n\ndata: one\r\ndata:two\r\n\r\nid: 7\n\n";
        let whole = ["{\"a\":1}", "one\ntwo"];
        assert_eq!(heard(&[text]), whole);
        let letters: Vec<String> = text.chars().map(String::from).collect();
        assert_eq!(heard(&letters.iter().map(String::as_str).collect::<Vec<_>>()), whole);
        assert_eq!(heard(&["data: unfinished\n"]), [""; 0]);
    }

    #[test]
    fn only_what_says_that_it_is_a_stream_of_events_is_heard() {
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
    fn an_event_without_end_is_refused() {
        let mut lines = Lines::default();
        let chunk = vec![b'x'; EVENT_MAX];
        lines.take(&chunk).unwrap();
        assert_eq!(lines.event(), None);
        assert_eq!(lines.take(b"x"), Ok(()));
        assert_eq!(lines.event(), None);
        assert_eq!(lines.take(b"x"), Err("an event has more than 65536 bytes".to_owned()));
    }
}
