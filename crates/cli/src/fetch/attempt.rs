//! One request: sent, read, and its page written to its part. What it means for the host is learned here; what is done about it is
//! decided elsewhere.

use std::io;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::header::LOCATION;
use reqwest::{Client, Response, StatusCode, Url};
use tidegate::{Class, Ended, HttpClasses, Kind, Outcome};
use tokio::time::{Instant, timeout};

use super::gates::Entry;
use super::part::{Body, Part};
use super::rules::{BYTES_MAX, Told};

/// So much of an answer that nobody wants is read, so that its connection can be used again.
const REST_MAX: usize = 16 << 10;
/// And so long it is waited for.
const REST_WAIT: Duration = Duration::from_secs(1);

/// A body that brings less than this in so long is as good as none: it would keep its worker for days.
const FLOW_MIN: usize = 4 << 10;
const FLOW_SPAN: Duration = Duration::from_mins(1);

/// What is asked for.
#[derive(Debug)]
pub(crate) struct Ask {
    pub(crate) url: Url,
    pub(crate) wants: Wants,
}

/// What is done with the answer.
#[derive(Debug)]
pub(crate) enum Wants {
    /// It is written there, if it has at most so many bytes.
    Page { part: PathBuf, bytes_max: u64 },
    /// It is the rules of a site.
    Rules,
}

/// What a request came to.
#[derive(Debug)]
pub(crate) struct Tried {
    pub(crate) got: Got,
    /// What it says about the host.
    pub(crate) kind: Kind,
    /// Whether another attempt may do better.
    pub(crate) is_worth_another: bool,
    /// When the host asked to retry it.
    pub(crate) hint: Option<Duration>,
}

/// What it brought.
#[derive(Debug)]
pub(crate) enum Got {
    /// A page.
    Page {
        status: u16,
        body: Body,
    },
    Rules(Told),
    /// It is elsewhere.
    Moved(Url),
    /// It is elsewhere, at no address.
    Lost(String),
    Status(u16),
    /// It has more bytes than it may.
    Large,
    /// No answer, or not all of it.
    Broken(String),
    /// It could not be written.
    Disk(io::Error),
}

/// Sends a request under its entry.
pub(crate) async fn attempt(client: Client, ask: Ask, mut entry: Entry) -> Tried {
    let classes = HttpClasses::default();
    let start = Instant::now();
    let response = match client.get(ask.url).send().await {
        Ok(response) => response,
        Err(error) => {
            let ended = if error.is_timeout() { Ended::Timeout } else { Ended::Connection };
            // An address that cannot be asked for says nothing about its host.
            let ended = if error.is_builder() { Ended::Unsent } else { ended };
            let class = Class::of(classes.classes(), ended);
            return settled(entry, class, Got::Broken(why(&error)), start.elapsed());
        }
    };
    let latency = start.elapsed();
    let class = classes.read(response.status(), response.headers());
    let said = class.outcome().took(latency);
    // When to come back holds from the moment that it is said, however long the rest of the answer takes. What says no more
    // than that all is well has yet to bring its body.
    let is_told = said.kind() != Kind::Success || said.has_hint();
    if is_told {
        entry.learn(said);
    }
    let got = match ask.wants {
        Wants::Rules => rules(response).await,
        Wants::Page { .. } if is_redirect(response.status()) => redirected(response).await,
        Wants::Page { part, bytes_max } if is_whole(response.status()) => {
            page(response, part, bytes_max).await
        }
        Wants::Page { .. } => status(response).await,
    };
    if matches!(got, Got::Broken(_)) {
        return settled(entry, Class::of(classes.classes(), Ended::Connection), got, latency);
    }
    entry.settle(if is_told { Outcome::ignored() } else { said });
    Tried { got, kind: said.kind(), is_worth_another: class.is_worth_another(), hint: said.hint() }
}

fn settled(entry: Entry, class: Class, got: Got, latency: Duration) -> Tried {
    let outcome: Outcome = class.outcome().took(latency);
    entry.settle(outcome);
    Tried { got, kind: outcome.kind(), is_worth_another: class.is_worth_another(), hint: None }
}

async fn page(mut response: Response, part: PathBuf, bytes_max: u64) -> Got {
    if response.content_length().is_some_and(|bytes| bytes > bytes_max) {
        return Got::Large;
    }
    let status = response.status().as_u16();
    let mut part = Part::new(part);
    let mut flow = Flow::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if flow.is_a_trickle(chunk.len()) => return Got::Broken(TRICKLE.to_owned()),
            Ok(Some(chunk)) if part.bytes() + chunk.len() as u64 > bytes_max => return Got::Large,
            Ok(Some(chunk)) => {
                if let Err(error) = part.push(&chunk).await {
                    return Got::Disk(error);
                }
            }
            Ok(None) => break,
            Err(error) => return Got::Broken(why(&error)),
        }
    }
    match part.end().await {
        Ok(body) => Got::Page { status, body },
        Err(error) => Got::Disk(error),
    }
}

async fn rules(mut response: Response) -> Got {
    let status = response.status();
    if is_redirect(status) {
        return redirected(response).await;
    }
    if !status.is_success() {
        rest(&mut response).await;
        // "Come back later" is no answer either: it is as if nobody had answered.
        let is_away = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
        return Got::Rules(if is_away { Told::Away(status_words(status.as_u16())) } else { Told::None });
    }
    let mut text = Vec::new();
    let mut flow = Flow::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if flow.is_a_trickle(chunk.len()) => return Got::Broken(TRICKLE.to_owned()),
            Ok(Some(chunk)) => text.extend_from_slice(&chunk),
            Ok(None) => break,
            Err(error) => return Got::Broken(why(&error)),
        }
        if text.len() > BYTES_MAX {
            break;
        }
    }
    Got::Rules(Told::File(text))
}

const TRICKLE: &str = "its body comes too slowly";

/// How a body comes.
struct Flow {
    since: Instant,
    bytes: usize,
}

impl Flow {
    fn new() -> Self {
        Self { since: Instant::now(), bytes: 0 }
    }

    /// Whether too little has come of late, now that there are `more` bytes.
    fn is_a_trickle(&mut self, more: usize) -> bool {
        self.bytes = self.bytes.saturating_add(more);
        if self.since.elapsed() < FLOW_SPAN {
            return false;
        }
        let is_a_trickle = self.bytes < FLOW_MIN;
        *self = Self::new();
        is_a_trickle
    }
}

async fn redirected(mut response: Response) -> Got {
    let location = response.headers().get(LOCATION).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let target = match location {
        Some(location) => {
            response.url().join(&location).map_err(|error| format!("redirected to no address: {error}"))
        }
        None => Err(format!("{}, without saying where to", status_words(response.status().as_u16()))),
    };
    rest(&mut response).await;
    target.map_or_else(Got::Lost, |mut url| {
        // Whoever redirects does not choose with whose name we go there. It cannot fail where there is a host.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        Got::Moved(url)
    })
}

async fn status(mut response: Response) -> Got {
    rest(&mut response).await;
    Got::Status(response.status().as_u16())
}

/// Reads what nobody wants, if it is little and comes soon: a connection is not worth more than that.
async fn rest(response: &mut Response) {
    let read = async {
        let mut bytes = 0;
        while bytes <= REST_MAX
            && let Ok(Some(chunk)) = response.chunk().await
        {
            bytes += chunk.len();
        }
    };
    drop(timeout(REST_WAIT, read).await);
}

/// Whether a page comes with it. Nobody asks for a range: what is a part all the same is not the page.
fn is_whole(status: StatusCode) -> bool {
    status.is_success() && status != StatusCode::PARTIAL_CONTENT
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// A status as people say it.
pub(crate) fn status_words(status: u16) -> String {
    let reason = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
    format!("it answers {status}{}", reason.map(|reason| format!(" {reason}")).unwrap_or_default())
}

/// An error in one line: the innermost cause says what has happened.
fn why(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "it does not answer in time".to_owned();
    }
    let mut cause: &dyn std::error::Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    let what = if error.is_connect() { "no connection" } else { "the connection was lost" };
    format!("{what}: {}", crate::words::shown(&cause.to_string()))
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_body_that_comes_byte_by_byte_is_given_up_and_a_slow_one_is_not() {
        for (bytes, every, is_given_up) in
            [(1, 29, true), (60, 1, true), (4 << 10, 29, false), (1_500, 20, false)]
        {
            let (mut flow, mut is_a_trickle) = (Flow::new(), false);
            for _ in 0..1_000 {
                advance(Duration::from_secs(every)).await;
                is_a_trickle |= flow.is_a_trickle(bytes);
            }
            assert_eq!(is_a_trickle, is_given_up, "{bytes} bytes every {every} s");
        }
    }
}
