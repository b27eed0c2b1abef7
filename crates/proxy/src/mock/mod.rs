//! A server that behaves like a provider: it counts as the profile says, and responds with the provider's
//! headers, bodies, streams and errors.

mod codec;
mod quota;

use std::num::NonZero;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::{StreamExt as _, stream};
use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode};
use http_body_util::{BodyExt as _, StreamBody};
use hyper::body::{Bytes, Frame, Incoming};
use hyper::{Request, Response};
use thiserror::Error;
use tidegate_core::feedback::headers::Dimension;
use tidegate_core::limit::rule::Limit;
use tidegate_core::outcome::QuotaLevel;
use tidegate_core::time::Stamp;
use tidegate_lab::{LiveResponse, LiveUpstream, Scenario};
use tokio::task::yield_now;
use tokio::time::{Instant, sleep};

use self::quota::{Counted, Level, Quotas};
use crate::codec::{ErrorText, error_body};
use crate::listener::{BodyError, HttpService, ResponseBody, full};
use crate::profile::{Format, Profile, QuotaHeaders, Reserve, Tokens};

/// A token of the mock is this many bytes of the request's body.
const BYTES_PER_TOKEN: u64 = 4;
/// The most bytes of `/bytes/N`.
const BYTES_MAX: u64 = 1 << 40;
/// The size of a piece of `/bytes/N`.
const PIECE: usize = 64 * 1_024;

/// How the pretended provider behaves.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct MockOptions {
    /// The limits of the account, named `requests`, `tokens`, `input_tokens` or `output_tokens`; a suffix after
    /// `-` distinguishes several of one kind.
    pub limits: Vec<Limit>,
    /// Whether responses say nothing about the limits: neither headers nor bodies have amounts or times. Some
    /// providers send `retry-after` even then.
    pub is_hidden: bool,
    /// The output of each call, unless the request asks for less.
    pub output_tokens: u64,
    /// The time until a response begins.
    pub latency: Duration,
    /// The time between two events of a stream.
    pub event_interval: Duration,
    /// Every so many calls, one is refused because of overload: with 529 or 503.
    pub overload_every: Option<NonZero<u64>>,
    /// Every so many streams, one reports an error after its beginning.
    pub error_every: Option<NonZero<u64>>,
    /// Every so many streams, one breaks off.
    pub cut_every: Option<NonZero<u64>>,
    /// Limits, latency and errors of a scenario of the lab, instead of `limits` and `latency`.
    pub scenario: Option<Scenario>,
}

impl Default for MockOptions {
    fn default() -> Self {
        Self {
            limits: Vec::new(),
            is_hidden: false,
            output_tokens: 16,
            latency: Duration::ZERO,
            event_interval: Duration::ZERO,
            overload_every: None,
            error_every: None,
            cut_every: None,
            scenario: None,
        }
    }
}

/// The error of an invalid option.
#[derive(Debug, Error)]
#[error("{0}")]
pub struct InvalidMock(String);

/// A server that behaves like a provider. Clones share their counts.
#[derive(Debug, Clone)]
pub struct Mock(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    profile: Arc<Profile>,
    options: MockOptions,
    started: Instant,
    started_wall: Stamp,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    quotas: Quotas,
    live: Option<LiveUpstream>,
    streams: u64,
    totals: Totals,
}

/// The counts so far.
#[derive(Debug, Clone, Copy, Default)]
struct Totals {
    calls: u64,
    completed: u64,
    refused: u64,
    failed: u64,
    input: u64,
    output: u64,
}

/// The API of a path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Api {
    Chat,
    Responses,
    Messages,
    Gemini,
    Other,
}

/// One call.
#[derive(Debug, Clone)]
struct Call {
    api: Api,
    number: u64,
    created: u64,
    model: String,
    is_stream: bool,
    /// Whether a stream reports usage at its end.
    reports_usage: bool,
    tokens: Tokens,
}

/// The decision on a call.
struct Decision {
    status: u16,
    body: Option<String>,
    headers: HeaderMap,
    latency: Duration,
    reserved: u64,
}

impl Mock {
    /// A provider with full quotas.
    ///
    /// # Errors
    /// [`InvalidMock`] names a limit that counts nothing known.
    pub fn new(profile: Arc<Profile>, options: MockOptions) -> Result<Self, InvalidMock> {
        let quotas = Quotas::new(&profile, &options.limits).map_err(InvalidMock)?;
        let live = options.scenario.clone().map(LiveUpstream::new);
        let started_wall = Stamp::ZERO + SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let state = Mutex::new(State { quotas, live, streams: 0, totals: Totals::default() });
        Ok(Self(Arc::new(Inner { profile, options, started: Instant::now(), started_wall, state })))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn now(&self) -> Stamp {
        self.0.started_wall + self.0.started.elapsed()
    }

    /// Reads a request to its end. A body is counted, not kept.
    async fn read(&self, path: &str, body: Incoming) -> Result<Call, hyper::Error> {
        let profile = &*self.0.profile;
        let mut scan = profile.request.scan();
        let (mut bytes, mut body) = (0_u64, body);
        while let Some(frame) = body.frame().await {
            if let Some(data) = frame?.data_ref() {
                bytes += data.len() as u64;
                scan.push(data);
            }
        }
        let facts = profile.request.facts(scan);
        let api = api_of(path);
        let output = self.0.options.output_tokens.min(facts.output_max.unwrap_or(u64::MAX)).min(1 << 20);
        Ok(Call {
            api,
            number: 0,
            created: self.now().as_micros() / 1_000_000,
            model: profile.model_in(path).or(facts.model).unwrap_or_else(|| "mock".to_owned()),
            is_stream: facts.is_stream || path.contains(":streamGenerateContent"),
            reports_usage: facts.includes_usage,
            tokens: Tokens {
                input: bytes.div_ceil(BYTES_PER_TOKEN),
                output,
                output_max: facts.output_max,
                choices: facts.choices,
            },
        })
    }

    /// Counts the call and decides.
    fn decide(&self, call: &mut Call) -> Decision {
        let now = self.now();
        let Inner { profile, options, started, .. } = &*self.0;
        let mut state = self.lock();
        state.totals.calls += 1;
        call.number = state.totals.calls;
        let mut decision = Decision {
            status: 200,
            body: None,
            headers: HeaderMap::new(),
            latency: options.latency,
            reserved: 0,
        };
        if let Some(live) = &mut state.live {
            let response = live.receive(call.tokens.input, started.elapsed().as_secs_f64());
            decision.of_scenario(call, profile, (&response, now));
        } else if options.overload_every.is_some_and(|every| call.number % every == 0) {
            decision.overloaded(profile.format);
        } else {
            match state.quotas.start(profile, call.tokens, now) {
                Ok(reserved) => decision.reserved = reserved,
                Err(exceeded) => {
                    decision.status = 429;
                    decision.body = Some(codec::refusal(call, profile.format, &exceeded, options.is_hidden));
                    let is_sent = !options.is_hidden || profile.retry_after_is_sent;
                    let wait = exceeded
                        .retry_after
                        .filter(|_| is_sent && profile.quota_headers != QuotaHeaders::None);
                    decision.retry_after(wait.map(|wait| wait.as_secs_f64()));
                }
            }
            if !options.is_hidden {
                let mut levels = state.quotas.levels(now);
                if profile.quota_headers == QuotaHeaders::Anthropic {
                    levels = as_anthropic_reports(levels);
                }
                quota_headers(&mut decision.headers, profile.quota_headers, &levels, now);
            }
        }
        match decision.status {
            200 => {}
            429 => state.totals.refused += 1,
            _ => state.totals.failed += 1,
        }
        decision
    }

    /// Counts the end of an accepted call, whose output is counted up to `produced`.
    fn end(&self, call: &Call, (reserved, produced): (u64, u64), is_completed: bool) {
        let now = self.now();
        let mut state = self.lock();
        if let Some(live) = &mut state.live {
            live.ended();
        }
        if is_completed {
            let rest = Tokens { output: call.tokens.output.saturating_sub(produced), ..call.tokens };
            state.quotas.end(&self.0.profile, reserved, rest, now);
            state.totals.completed += 1;
            state.totals.input += call.tokens.input;
            state.totals.output += call.tokens.output;
        }
    }

    /// The events of a stream, with the failures that the options ask for.
    fn script(&self, call: &Call) -> Script {
        let options = &self.0.options;
        let number = {
            let mut state = self.lock();
            state.streams += 1;
            state.streams
        };
        let mut events: Vec<_> = codec::events(call).into_iter().map(Ok).collect();
        let count = events.len();
        let is_due = |every: Option<NonZero<u64>>| every.is_some_and(|every| number % every == 0);
        let failure = if is_due(options.error_every) {
            Some(Ok(codec::error_event(call, self.0.profile.format)))
        } else if is_due(options.cut_every) {
            Some(Err("the mock breaks this stream off".into()))
        } else {
            None
        };
        let is_completed = failure.is_none();
        if let Some(failure) = failure {
            events.truncate(count / 2);
            events.push(failure);
        }
        Script { events: events.into_iter(), count, is_completed }
    }

    fn stream(&self, end: EndOnDrop) -> ResponseBody {
        let script = self.script(&end.call);
        let interval = self.0.options.event_interval;
        let frames = stream::unfold((script, end, 0), move |(mut script, mut end, sent)| async move {
            let event = script.events.next();
            if event.is_some() && sent > 0 && !interval.is_zero() {
                sleep(interval).await;
            }
            match &event {
                // Earlier events are flushed only while the body is pending.
                Some(Err(_)) => yield_now().await,
                Some(Ok(_)) => end.produce((sent + 1).min(script.count), script.count),
                None => {}
            }
            end.is_completed = script.is_completed && script.events.len() == 0;
            event.map(|event| (event.map(|text| Frame::data(Bytes::from(text))), (script, end, sent + 1)))
        });
        StreamBody::new(frames).boxed_unsync()
    }
}

/// What a stream sends.
struct Script {
    events: std::vec::IntoIter<Result<String, BodyError>>,
    /// The events of the complete stream.
    count: usize,
    /// Whether it ends with its usage.
    is_completed: bool,
}

/// Counts the end of a call when its response is dropped, complete or not, or its caller disconnects before.
struct EndOnDrop {
    mock: Mock,
    call: Call,
    reserved: u64,
    /// Output that was counted so far.
    produced: u64,
    is_completed: bool,
}

impl EndOnDrop {
    /// So many events of a stream were sent. Output that counts as expected is counted as it is produced, whether
    /// or not the stream is completed.
    fn produce(&mut self, sent: usize, count: usize) {
        if self.mock.0.profile.reserve() != Reserve::Expected {
            return;
        }
        let produced = self.call.tokens.output * sent as u64 / count as u64;
        let now = self.mock.now();
        self.mock.lock().quotas.produce(produced.saturating_sub(self.produced), now);
        self.produced = produced;
    }
}

impl Drop for EndOnDrop {
    fn drop(&mut self) {
        self.mock.end(&self.call, (self.reserved, self.produced), self.is_completed);
    }
}

impl HttpService for Mock {
    async fn respond(&self, request: Request<Incoming>) -> Response<ResponseBody> {
        let (head, body) = request.into_parts();
        let path = head.uri.path().to_owned();
        if head.method == Method::GET {
            return self.show(&path);
        }
        let Ok(mut call) = self.read(&path, body).await else {
            return respond(400, HeaderMap::new(), full("the body broke off"));
        };
        let Decision { status, body, headers, reserved, latency } = self.decide(&mut call);
        let mut end = EndOnDrop { mock: self.clone(), call, reserved, produced: 0, is_completed: false };
        if !latency.is_zero() {
            sleep(latency).await;
        }
        match body {
            Some(body) => respond(status, headers, full(body)),
            None if end.call.is_stream => {
                let mut response = respond(status, headers, self.stream(end));
                let kind = HeaderValue::from_static("text/event-stream");
                response.headers_mut().insert(CONTENT_TYPE, kind);
                response
            }
            None => {
                end.is_completed = true;
                respond(status, headers, full(codec::completion(&end.call)))
            }
        }
    }
}

impl Mock {
    /// What is not a call: totals, models, and bodies of any size.
    fn show(&self, path: &str) -> Response<ResponseBody> {
        let headers = HeaderMap::new();
        if let Some(count) = path.strip_prefix("/bytes/").and_then(|count| count.parse::<u64>().ok()) {
            let piece = Bytes::from(vec![b'.'; PIECE]);
            let pieces = stream::unfold(count.min(BYTES_MAX), move |left| {
                let size = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
                let next = (size > 0).then(|| (Frame::data(piece.slice(..size)), left - size as u64));
                std::future::ready(next)
            });
            return respond(200, headers, StreamBody::new(pieces.map(Ok)).boxed_unsync());
        }
        match path {
            "/mock/totals" => respond(200, headers, full(codec::totals(&self.lock().totals))),
            path if path.ends_with("/models") => respond(200, headers, full(codec::models())),
            "/" => respond(200, headers, full("{}")),
            _ => {
                let text = ErrorText {
                    status: 404,
                    kind: "invalid_request_error",
                    code: None,
                    message: "unknown path",
                    retry_after: None,
                };
                respond(404, headers, full(error_body(self.0.profile.format, text)))
            }
        }
    }
}

impl Decision {
    fn retry_after(&mut self, seconds: Option<f64>) {
        if let Some(value) =
            seconds.and_then(|seconds| HeaderValue::from_str(&format!("{:.0}", seconds.ceil())).ok())
        {
            self.headers.insert(RETRY_AFTER, value);
        }
    }

    fn overloaded(&mut self, format: Format) {
        let (status, kind) = match format {
            Format::Anthropic => (529, "overloaded_error"),
            Format::OpenAi | Format::Google => (503, "server_error"),
        };
        let text = ErrorText { status, kind, code: None, message: "Overloaded", retry_after: None };
        self.status = status;
        self.body = Some(error_body(format, text));
    }

    fn of_scenario(&mut self, call: &Call, profile: &Profile, (response, now): (&LiveResponse, Stamp)) {
        self.status = response.status;
        self.latency = response.latency;
        self.retry_after(response.retry_after);
        if let Some((dimension, level)) = response.quota {
            let QuotaLevel { limit, remaining, reset, .. } = level;
            let counted = if dimension == Dimension::Tokens { Counted::Tokens } else { Counted::Requests };
            let level = Level { counted, limit, remaining, full_after: reset.after() };
            quota_headers(&mut self.headers, profile.quota_headers, &[level], now);
        }
        if response.status != 200 {
            let kind = match (response.exceeded, profile.format) {
                _ if response.status == 500 => "server_error",
                (_, Format::Anthropic) => "rate_limit_error",
                (Some(Dimension::Tokens), _) => "tokens",
                _ => "requests",
            };
            let message = format!("Rate limit reached for {}", call.model);
            let code = (response.status == 429).then_some("rate_limit_exceeded");
            let text = ErrorText {
                status: response.status,
                kind,
                code,
                message: &message,
                retry_after: response.retry_after,
            };
            self.body = Some(error_body(profile.format, text));
        }
    }
}

fn api_of(path: &str) -> Api {
    if path.ends_with("/chat/completions") || path.ends_with("/completions") {
        Api::Chat
    } else if path.ends_with("/responses") {
        Api::Responses
    } else if path.ends_with("/messages") {
        Api::Messages
    } else if path.contains(":generateContent") || path.contains(":streamGenerateContent") {
        Api::Gemini
    } else {
        Api::Other
    }
}

/// The levels as Anthropic reports them: tokens to the nearest thousand, and the tightest limit as that of all
/// tokens.
fn as_anthropic_reports(mut levels: Vec<Level>) -> Vec<Level> {
    let tokens = levels.iter().filter(|level| level.counted != Counted::Requests);
    let tightest = tokens.min_by_key(|level| level.remaining).copied();
    levels.retain(|level| level.counted != Counted::Tokens);
    levels.extend(tightest.map(|level| Level { counted: Counted::Tokens, ..level }));
    for level in levels.iter_mut().filter(|level| level.counted != Counted::Requests) {
        level.remaining = ((level.remaining + 500) / 1_000 * 1_000).min(level.limit);
    }
    levels
}

/// Writes the levels into the headers of a provider.
fn quota_headers(headers: &mut HeaderMap, style: QuotaHeaders, levels: &[Level], now: Stamp) {
    for Level { counted, limit, remaining, full_after } in levels {
        let what = match counted {
            Counted::Requests => "requests",
            Counted::Tokens => "tokens",
            Counted::Input => "input-tokens",
            Counted::Output => "output-tokens",
        };
        let seconds = full_after.as_secs_f64();
        let name = |part: &str| match style {
            QuotaHeaders::Anthropic => format!("anthropic-ratelimit-{what}-{part}"),
            _ => format!("x-ratelimit-{part}-{what}"),
        };
        let reset = match style {
            QuotaHeaders::None => continue,
            QuotaHeaders::OpenAi => format!("{seconds:.3}s"),
            QuotaHeaders::Azure => format!("{:.0}", seconds.ceil()),
            QuotaHeaders::Anthropic => (now + *full_after).to_string(),
        };
        for (part, value) in
            [("limit", limit.to_string()), ("remaining", remaining.to_string()), ("reset", reset)]
        {
            if let (Ok(name), Ok(value)) = (HeaderName::try_from(name(part)), HeaderValue::from_str(&value)) {
                headers.insert(name, value);
            }
        }
    }
}

fn respond(status: u16, headers: HeaderMap, body: ResponseBody) -> Response<ResponseBody> {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    *response.headers_mut() = headers;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}
