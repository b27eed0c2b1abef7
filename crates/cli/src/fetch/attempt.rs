//! One request: sends it, reads the response and writes its page to a part. It records the outcome for the
//! host; the caller decides what follows.

use std::error::Error;
use std::fs;
use std::io;
use std::iter;
use std::path::PathBuf;
use std::time::Duration;

use reqwest::header::{CONTENT_TYPE, HeaderMap, LOCATION};
use reqwest::{Client, Response, StatusCode, Url};
use tidegate::{Class, Completion, HttpClasses, Kind, Outcome};
use tokio::time::{Instant, timeout};

use super::file_name::extension;
use super::gates::Entry;
use super::part_file::{Body, PartFile};
use super::partial::{Partial, validator};
use super::robots::{BYTES_MAX, RobotsResponse};
use super::writer::PartialJournal;

/// Bytes of an unneeded body that are read, so that the connection can be reused.
const DRAIN_MAX: usize = 16 << 10;
/// How long to wait for them.
const DRAIN_TIMEOUT: Duration = Duration::from_secs(1);

/// Minimum bytes of a body within [`BODY_SPAN`]: a slower one would occupy its worker for days.
const BODY_MIN: usize = 4 << 10;
const BODY_SPAN: Duration = Duration::from_mins(1);
/// A body is synced and journaled after so many bytes: a kill loses no more of it.
const JOURNAL_SPAN: u64 = 16 << 20;
/// After so many requests in a row of which nothing arrived, the rest is no longer requested.
const EMPTY_RESTS_MAX: u32 = 2;

/// A request.
#[derive(Debug)]
pub(crate) struct PageRequest {
    pub(crate) url: Url,
    pub(crate) sink: Sink,
    /// Whether a failure of this page has counted against its host.
    pub(crate) has_failed: bool,
    /// Headers of the user.
    pub(crate) headers: HeaderMap,
}

/// What to do with the response.
#[derive(Debug)]
pub(crate) enum Sink {
    /// Write it to a part.
    Page(Box<PageSink>),
    /// Read it as the robots.txt of a site.
    Robots,
}

/// Where a page is written.
#[derive(Debug)]
pub(crate) struct PageSink {
    /// The address as requested, before redirects.
    pub(crate) page: Url,
    pub(crate) journal: PartialJournal,
    /// The folder of parts.
    pub(crate) parts: PathBuf,
    /// The name of a new part.
    pub(crate) part: String,
    pub(crate) bytes_max: u64,
    /// What arrived of the page before.
    pub(crate) partial: Option<Partial>,
}

impl PageSink {
    fn remove(&self, partial: &Partial) {
        // A part that remains is removed when the folder is next opened.
        drop(fs::remove_file(self.parts.join(&partial.part)));
    }
}

/// The result of a request.
#[derive(Debug)]
pub(crate) struct AttemptResult {
    pub(crate) reply: Reply,
    /// What the response head says about the host.
    pub(crate) kind: Kind,
    /// Whether it may be the page's own failure, which counts against the host once.
    pub(crate) is_of_page: bool,
    /// Whether a retry may succeed.
    pub(crate) is_retryable: bool,
    /// The host's `Retry-After`.
    pub(crate) hint: Option<Duration>,
    /// What has arrived of the page, if the rest can be requested.
    pub(crate) partial: Option<Partial>,
}

impl AttemptResult {
    /// Whether the host will accept the page later: a 429, or an overload with a hint. A plain 503 is often the
    /// page's own.
    pub(crate) fn is_rejection(&self) -> bool {
        let is_until_later = |status| status == 429 || self.hint.is_some();
        self.kind == Kind::Overload && matches!(self.reply, Reply::Status(status) if is_until_later(status))
    }
}

/// The response.
#[derive(Debug)]
pub(crate) enum Reply {
    /// A complete page.
    Page {
        status: u16,
        body: Body,
        /// The extension for its content type.
        extension: Option<&'static str>,
        /// The name of its part.
        part: String,
    },
    Robots(RobotsResponse),
    /// A redirect.
    Redirect(Url),
    /// A redirect without a valid target, or another permanent error.
    Invalid(String),
    Status(u16),
    /// A body larger than allowed.
    TooLarge,
    /// No response, or an incomplete one.
    Broken(String),
    /// A page that could not be written.
    Disk(io::Error),
}

/// Sends a request and settles its entry.
pub(crate) async fn attempt(client: Client, mut request: PageRequest, mut entry: Entry) -> AttemptResult {
    let classes = HttpClasses::default();
    let start = Instant::now();
    let mut partial = match &mut request.sink {
        Sink::Page(sink) => sink.partial.take(),
        Sink::Robots => None,
    };
    // What came from another address is kept: this one may redirect there.
    let is_from_here = partial.as_ref().is_some_and(|partial| partial.url == request.url);
    let range = partial.as_ref().filter(|_| is_from_here).and_then(Partial::headers).unwrap_or_default();
    let mut response = match client.get(request.url).headers(request.headers).headers(range).send().await {
        Ok(response) => response,
        Err(error) => {
            let ended = if error.is_timeout() { Completion::Timeout } else { Completion::Connection };
            // A URL that cannot be requested is not the host's failure.
            let ended = if error.is_builder() { Completion::Unsent } else { ended };
            let class = Class::of(classes.classes(), ended);
            let outcome = class.outcome().took(start.elapsed());
            let is_of_page = is_of_page(outcome, None);
            entry.settle(host_outcome(outcome, is_of_page && request.has_failed));
            let (kind, is_retryable) = (outcome.kind(), class.is_retryable());
            let reply = Reply::Broken(why(&error));
            return AttemptResult { reply, kind, is_of_page, is_retryable, hint: None, partial };
        }
    };
    let latency = start.elapsed();
    let class = classes.read(response.status(), response.headers());
    let outcome = class.outcome().took(latency);
    // A hint counts from the response head, however long the body takes. A success without a hint is reported
    // only after its body has arrived.
    let is_recorded = outcome.kind() != Kind::Success || outcome.has_hint();
    let is_of_page = is_of_page(outcome, Some(response.status()));
    if is_recorded {
        entry.learn(host_outcome(outcome, is_of_page && request.has_failed));
    }
    let reply = match request.sink {
        Sink::Robots => robots(response).await,
        Sink::Page(_) if is_redirect(response.status()) => redirected(response).await,
        Sink::Page(sink) => {
            let is_continued =
                |partial: &Partial| partial.is_continued_by(response.status(), response.headers());
            let is_rest = is_from_here && partial.as_ref().is_some_and(is_continued);
            let is_whole = is_whole(response.status());
            // The page has changed, or the server does not support ranges: it starts from the beginning.
            let is_ranged = [StatusCode::PARTIAL_CONTENT, StatusCode::RANGE_NOT_SATISFIABLE];
            let is_unfit = is_whole || is_from_here && !is_rest && is_ranged.contains(&response.status());
            let old = if is_unfit { partial.take() } else { None };
            if let Some(old) = &old {
                sink.remove(old);
            }
            if is_rest || is_whole {
                let received = page(response, &sink, partial.take()).await;
                partial = received.1;
                received.0
            } else if old.is_some() {
                drain(&mut response).await;
                Reply::Broken("the rest of it is no longer available".to_owned())
            } else {
                status(response).await
            }
        }
    };
    // A body that breaks off is the page's failure: the host has responded.
    let is_broken = matches!(reply, Reply::Broken(_));
    entry.settle(if is_recorded || is_broken { Outcome::ignored() } else { outcome });
    let is_retryable = is_broken || class.is_retryable();
    AttemptResult { reply, kind: outcome.kind(), is_of_page, is_retryable, hint: outcome.hint(), partial }
}

/// Whether a failure may be the page's own: not a 429, nor one with a hint.
pub(crate) fn is_of_page(outcome: Outcome, status: Option<StatusCode>) -> bool {
    let is_overload = outcome.kind() == Kind::Overload;
    let is_rejection = outcome.has_hint() || status == Some(StatusCode::TOO_MANY_REQUESTS);
    outcome.kind() == Kind::Failure || is_overload && !is_rejection
}

/// The outcome of a request for its host. A page that fails again says nothing new about the host.
pub(crate) fn host_outcome(outcome: Outcome, is_repeated: bool) -> Outcome {
    if is_repeated { Outcome::ignored() } else { outcome }
}

/// Receives a page; returns what arrived of it if it breaks off.
async fn page(mut response: Response, sink: &PageSink, resumed: Option<Partial>) -> (Reply, Option<Partial>) {
    let status = response.status().as_u16();
    let content_type = response.headers().get(CONTENT_TYPE).and_then(|value| value.to_str().ok());
    let extension = content_type.and_then(extension);
    let validator = validator(response.headers());
    let (name, opened) = match &resumed {
        Some(partial) => {
            (partial.part.clone(), PartFile::resume(sink.parts.join(&partial.part), partial.bytes).await)
        }
        None => (sink.part.clone(), Ok(Some(PartFile::new(sink.parts.join(&sink.part))))),
    };
    let mut part = match opened {
        Ok(Some(part)) => part,
        Ok(None) => return (Reply::Broken("its first bytes are lost".to_owned()), None),
        Err(error) => return (Reply::Disk(error), None),
    };
    if response.content_length().is_some_and(|bytes| part.bytes().saturating_add(bytes) > sink.bytes_max) {
        part.discard();
        return (Reply::TooLarge, None);
    }
    let validator = resumed.as_ref().map(|partial| partial.validator.clone()).or(validator);
    let (mut flow, mut synced) = (BodyRate::new(), part.bytes());
    let (why, is_undecodable) = loop {
        match response.chunk().await {
            Ok(Some(chunk)) if flow.is_too_slow(chunk.len()) => break (TOO_SLOW.to_owned(), false),
            Ok(Some(chunk)) if part.bytes() + chunk.len() as u64 > sink.bytes_max => {
                part.discard();
                return (Reply::TooLarge, None);
            }
            Ok(Some(chunk)) => {
                if let Err(error) = part.push(&chunk).await {
                    return (Reply::Disk(error), None);
                }
                if let Some(validator) = validator.as_ref().filter(|_| part.bytes() - synced >= JOURNAL_SPAN)
                {
                    // Only bytes on the disk may be journaled.
                    if let Err(error) = part.keep().await {
                        return (Reply::Disk(error), None);
                    }
                    synced = part.bytes();
                    let (part, url, validator) = (name.clone(), response.url().clone(), validator.clone());
                    let partial = Partial { part, bytes: synced, url, validator, empty_rests: 0 };
                    sink.journal.write(&sink.page, partial);
                }
            }
            Ok(None) => {
                return match part.end().await {
                    Ok(body) => (Reply::Page { status, body, extension, part: name }, None),
                    Err(error) => (Reply::Disk(error), None),
                };
            }
            Err(error) => break (why(&error), is_undecodable(&error)),
        }
    };
    let empty = resumed.as_ref().filter(|partial| part.bytes() == partial.bytes);
    let empty_rests = empty.map_or(0, |partial| partial.empty_rests + 1);
    if resumed.is_some() && is_undecodable || empty_rests >= EMPTY_RESTS_MAX {
        // The same rest would arrive again: the page starts from the beginning.
        part.discard();
        return (Reply::Broken(why), None);
    }
    let Some(validator) = validator else { return (Reply::Broken(why), None) };
    let (bytes, url) = (part.bytes(), response.url().clone());
    match part.keep().await {
        Ok(true) => (Reply::Broken(why), Some(Partial { part: name, bytes, url, validator, empty_rests })),
        Ok(false) => (Reply::Broken(why), None),
        Err(error) => (Reply::Disk(error), None),
    }
}

async fn robots(mut response: Response) -> Reply {
    let status = response.status();
    if is_redirect(status) {
        return redirected(response).await;
    }
    if !status.is_success() {
        drain(&mut response).await;
        // RFC 9309: a 5xx means that the rules are unknown. A 429 is treated alike.
        let is_away = status.is_server_error() || status == StatusCode::TOO_MANY_REQUESTS;
        return Reply::Robots(if is_away {
            RobotsResponse::Unavailable(status_text(status.as_u16()))
        } else {
            RobotsResponse::Missing
        });
    }
    let mut text = Vec::new();
    let mut flow = BodyRate::new();
    loop {
        match response.chunk().await {
            Ok(Some(chunk)) if flow.is_too_slow(chunk.len()) => return Reply::Broken(TOO_SLOW.to_owned()),
            Ok(Some(chunk)) => text.extend_from_slice(&chunk),
            Ok(None) => break,
            Err(error) => return Reply::Broken(why(&error)),
        }
        if text.len() > BYTES_MAX {
            break;
        }
    }
    Reply::Robots(RobotsResponse::File(text))
}

const TOO_SLOW: &str = "the body arrives too slowly";

/// The transfer rate of a body.
struct BodyRate {
    since: Instant,
    bytes: usize,
}

impl BodyRate {
    fn new() -> Self {
        Self { since: Instant::now(), bytes: 0 }
    }

    /// Adds `more` bytes and returns whether the last [`BODY_SPAN`] had too few.
    fn is_too_slow(&mut self, more: usize) -> bool {
        self.bytes = self.bytes.saturating_add(more);
        if self.since.elapsed() < BODY_SPAN {
            return false;
        }
        let is_too_slow = self.bytes < BODY_MIN;
        *self = Self::new();
        is_too_slow
    }
}

async fn redirected(mut response: Response) -> Reply {
    let location = response.headers().get(LOCATION).map(|value| String::from_utf8_lossy(value.as_bytes()));
    let target = match location {
        Some(location) => response
            .url()
            .join(&location)
            .map_err(|error| format!("redirected to an invalid address: {error}")),
        None => Err(format!("{}, without a location", status_text(response.status().as_u16()))),
    };
    drain(&mut response).await;
    target.map_or_else(Reply::Invalid, |mut url| {
        // A redirect must not set credentials. The setters fail only for URLs without a host.
        let _ = url.set_username("");
        let _ = url.set_password(None);
        Reply::Redirect(url)
    })
}

async fn status(mut response: Response) -> Reply {
    drain(&mut response).await;
    Reply::Status(response.status().as_u16())
}

/// Drains a short rest of a body so that the connection can be reused. Beyond the bounds, a new connection is
/// cheaper.
async fn drain(response: &mut Response) {
    let read = async {
        let mut bytes = 0;
        while bytes <= DRAIN_MAX
            && let Ok(Some(chunk)) = response.chunk().await
        {
            bytes += chunk.len();
        }
    };
    drop(timeout(DRAIN_TIMEOUT, read).await);
}

/// Whether the response contains the whole page.
fn is_whole(status: StatusCode) -> bool {
    status.is_success() && status != StatusCode::PARTIAL_CONTENT
}

fn is_redirect(status: StatusCode) -> bool {
    matches!(status.as_u16(), 301 | 302 | 303 | 307 | 308)
}

/// A status and its reason phrase.
pub(crate) fn status_text(status: u16) -> String {
    let reason = StatusCode::from_u16(status).ok().and_then(|status| status.canonical_reason());
    format!("status {status}{}", reason.map(|reason| format!(" {reason}")).unwrap_or_default())
}

/// Whether a body arrived and cannot be decoded: the cause is an I/O error, and that of a lost connection
/// hyper's.
fn is_undecodable(error: &reqwest::Error) -> bool {
    let mut causes = iter::successors(error.source(), |&cause| cause.source());
    causes.find(|cause| !cause.is::<reqwest::Error>()).is_some_and(<dyn Error>::is::<io::Error>)
}

/// An error in one line: the innermost cause is the most specific.
fn why(error: &reqwest::Error) -> String {
    if error.is_timeout() {
        return "timed out".to_owned();
    }
    let mut cause: &dyn Error = error;
    while let Some(next) = cause.source() {
        cause = next;
    }
    let what = if error.is_connect() { "no connection" } else { "the connection was lost" };
    format!("{what}: {}", crate::format::escape(&cause.to_string()))
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn trickling_body_is_aborted_and_slow_body_is_not() {
        for (bytes, every, is_given_up) in
            [(1, 29, true), (60, 1, true), (4 << 10, 29, false), (1_500, 20, false)]
        {
            let (mut flow, mut is_too_slow) = (BodyRate::new(), false);
            for _ in 0..1_000 {
                advance(Duration::from_secs(every)).await;
                is_too_slow |= flow.is_too_slow(bytes);
            }
            assert_eq!(is_too_slow, is_given_up, "{bytes} bytes every {every} s");
        }
    }
}
