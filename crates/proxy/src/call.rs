//! One call: the tenant's limits, the throttle, the upstream, and another attempt if it rejects.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::header::{ACCEPT_ENCODING, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, HOST, RETRY_AFTER};
use http::{HeaderMap, HeaderValue, StatusCode, Version, request, response};
use http_body_util::BodyExt as _;
use hyper::body::{Body as _, Bytes, Incoming};
use hyper::{Method, Request, Response, Uri};
use tidegate::{Classes, Gate, Outcome, Refused, RetryInfo, Stamp, retry_info};
use tidegate_core::duration;
use tidegate_core::limit::name::EntityId;
use tidegate_core::limit::token::TokenScope;
use tidegate_server::{AtCapacity, PeerCertificate, Slot};
use tokio::time::{Instant, sleep, timeout};

use crate::body::MeteredBody;
use crate::builder::Upstream;
use crate::headers::{
    Key, WITHIN, find_key, percent_decoded, remove_hop_by_hop, remove_tokens, replace_key, upstream_path,
};
use crate::listener::ResponseBody;
use crate::multipart::{BOUNDARY_MAX, boundary};
use crate::payload::{Payload, ReadBody, Reading, is_upload};
use crate::profile::Tokens;
use crate::proxy::Inner;
use crate::refusal::Refusal;
use crate::scope::Scope;
use crate::tenant::{CallTokens, DrawTimes};
use crate::ticket::{CallInfo, Counts, Ending, Ticket, count};
use crate::transport::{Beginning, Prefixed};
use crate::usage::UsageReader;

/// The part of a rejection that is read to classify it.
const REJECTION_MAX: usize = 64 * 1_024;
/// Timeout for that part.
const REJECTION_TIME: Duration = Duration::from_secs(10);
/// Attempts of one call. The wait is the bound in practice.
const ATTEMPTS_MAX: u32 = 64;

/// A response, or the reason why there is none.
type Forwarded = Result<Response<ResponseBody>, Refusal>;

/// Who calls, and the key that the upstream receives.
struct Caller {
    key: Option<Key>,
    entity: Option<EntityId>,
}

/// A request as it is sent to the upstream, possibly several times.
struct Prepared {
    method: Method,
    uri: Uri,
    headers: HeaderMap,
    body: Payload,
    /// Whether the usage option was added, so that its chunk is removed.
    adds_usage: bool,
}

/// Forwards a request, and responds with the upstream's response.
pub(crate) async fn forward(proxy: &Inner, upstream: &Upstream, request: Request<Incoming>) -> Forwarded {
    count(&proxy.counts.calls, 1);
    let (mut head, body) = request.into_parts();
    let deadline = Instant::now() + within(proxy, &mut head.headers)?;
    let caller = identify(proxy, upstream, &mut head).await?;
    let slot = match &caller.entity {
        Some(tenant) => proxy.calls.take(tenant),
        None => proxy.calls.take_any(),
    };
    let slot = slot.map_err(|at| at_capacity(proxy, at))?;
    let (prepared, mut info) = prepare(proxy, (upstream, &caller), head, body).await?;
    info.tenant = caller.entity.as_ref().map(|entity| entity.as_str().to_owned()).unwrap_or_default();
    let model = info.model.clone().unwrap_or_default();
    if info.has_estimate {
        let output = proxy.estimates.output(&info.tenant, &model);
        info.tokens.output = output.min(info.tokens.output_max.unwrap_or(u64::MAX));
    } else {
        info.tokens = Tokens::default();
    }
    let lease = match (&proxy.tenants, &caller.entity) {
        (Some(tenants), Some(entity)) => {
            let tokens = CallTokens { input: info.tokens.input, output: info.tokens.output };
            let tokens = info.reads_usage.then_some(tokens);
            let resource = if model.is_empty() { &*upstream.name } else { model.as_str() };
            let times = DrawTimes { within: left(deadline), lease_time: proxy.bounds.lease_time };
            let drawn = tenants.draw(entity, resource, tokens, times).await;
            Some(drawn.inspect_err(|refusal| {
                let Counts { refused_by_store, refused_by_limits, .. } = &*proxy.counts;
                count(if refusal.is_unavailable() { refused_by_store } else { refused_by_limits }, 1);
            })?)
        }
        _ => None,
    };
    let group = upstream.profile.group_of(&model);
    let scope = proxy.scopes.scope(&upstream.name, caller.key.as_ref(), group);
    let ticket = Ticket::new(info, proxy.estimates.clone(), proxy.counts.clone(), lease);
    send(proxy, upstream, Attempts { scope, deadline, prepared, ticket, slot }).await
}

fn at_capacity(proxy: &Inner, at: AtCapacity) -> Refusal {
    let max = proxy.bounds.calls_max;
    match at {
        AtCapacity::Full => {
            let busy = format!("{max} calls are in flight or waiting, which is the maximum");
            Refusal::upstream(StatusCode::SERVICE_UNAVAILABLE, busy)
        }
        AtCapacity::Share { held } => Refusal::busy(format!(
            "{held} of {max} calls are the tenant's, in flight or waiting: the rest is for others"
        )),
    }
}

/// How long the caller waits at most.
fn within(proxy: &Inner, headers: &mut HeaderMap) -> Result<Duration, Refusal> {
    let Some(value) = headers.remove(WITHIN) else { return Ok(proxy.bounds.within) };
    let parsed = value.to_str().ok().and_then(|text| match text.parse::<f64>() {
        Ok(seconds) => Duration::try_from_secs_f64(seconds).ok(),
        Err(_) => duration::parse(text).ok(),
    });
    match parsed {
        Some(span) => Ok(span.min(proxy.bounds.within_max)),
        None => Err(Refusal::invalid(format!("{WITHIN} must be seconds, or a duration such as `30s`"))),
    }
}

fn left(deadline: Instant) -> Duration {
    deadline.saturating_duration_since(Instant::now())
}

/// Finds the caller's key. A token of tidegate is exchanged for the key that is kept for the upstream.
async fn identify(proxy: &Inner, upstream: &Upstream, head: &mut request::Parts) -> Result<Caller, Refusal> {
    let key = find_key(&upstream.profile, &head.headers, &head.uri);
    let token = key.as_ref().filter(|key| key.is_token());
    let peer = head.extensions.get::<PeerCertificate>();
    // A certificate stands for a token if there is no key at all.
    let is_mapped = key.is_none() && peer.is_some_and(|peer| peer.token().is_some());
    match &proxy.tenants {
        Some(tenants) if token.is_some() || is_mapped => {
            let entity = tenants.identify(token, peer, TokenScope::Acquire).await;
            let entity = entity.inspect_err(|refusal| {
                count(&proxy.counts.refused_by_store, u64::from(refusal.is_unavailable()));
            })?;
            let Some(kept) = &upstream.key else {
                let name = &upstream.name;
                return Err(Refusal::forbidden(format!("the proxy keeps no key for the upstream `{name}`")));
            };
            if !replace_key(&upstream.profile, &mut head.headers, kept) {
                return Err(Refusal::forbidden("the key that the proxy keeps cannot be sent in a header"));
            }
            Ok(Caller { key: Some(kept.clone()), entity: Some(entity) })
        }
        None if token.is_some() => {
            Err(Refusal::unauthorized("this proxy has no store of tokens: start it with --store URL"))
        }
        _ if proxy.requires_token => Err(Refusal::unauthorized("this proxy needs a token of tidegate")),
        _ => Ok(Caller { key, entity: None }),
    }
}

/// Reads what is to be known of a request, and prepares what is sent.
async fn prepare(
    proxy: &Inner,
    (upstream, caller): (&Upstream, &Caller),
    head: request::Parts,
    body: Incoming,
) -> Result<(Prepared, CallInfo), Refusal> {
    let profile = &upstream.profile;
    let path = head.uri.path().get(upstream.name.len() + 1..).unwrap_or_default();
    let in_path = profile.model_in(path);
    // With any method, a kept key must not leave the path of its upstream.
    if caller.entity.is_some() && has_empty_steps(path) {
        return Err(Refusal::invalid("the path must have no empty steps, `.` or `..`"));
    }
    let is_post = head.method == Method::POST;
    let is_tenant = caller.entity.is_some() && is_post;
    let form = boundary(&head.headers).filter(|_| profile.counts_by_body());
    if is_tenant && form.is_some_and(|boundary| boundary.len() > BOUNDARY_MAX) {
        return Err(Refusal::invalid(format!("a form's boundary has at most {BOUNDARY_MAX} characters")));
    }
    let form = form.filter(|boundary| boundary.len() <= BOUNDARY_MAX);
    let searches = is_post && in_path.is_none() && profile.counts_by_body() && !is_upload(path);
    let is_empty = body.is_end_stream();
    let read = ReadBody::read(proxy, body, Reading { profile, form, searches }).await?;
    if is_tenant && in_path.is_none() && profile.counts_by_body() && !is_empty {
        read.check_hidden(&head.headers, path, form)?;
    }
    let facts = read.facts.clone();
    let model = in_path.or(facts.model).filter(|_| is_post);
    if is_tenant && model.as_deref().is_some_and(|model| model.contains(['\\', '%'])) {
        return Err(Refusal::invalid("the name of a model must have no escapes of its own"));
    }
    let is_form = form.is_some();
    let bytes = read.counted_bytes(is_form);
    let has_estimate = model.is_some() || (is_post && facts.is_json);
    let named = model.as_deref().unwrap_or_default();
    let input = if has_estimate { proxy.estimates.input(named, bytes, is_form) } else { 0 };
    let tokens = Tokens { input, output: 0, output_max: facts.output_max, choices: facts.choices };
    let mut headers = head.headers;
    remove_hop_by_hop(&mut headers);
    remove_tokens(&mut headers);
    headers.remove(HOST);
    let asks = facts.is_stream && profile.needs_usage_option(path) && !headers.contains_key(CONTENT_ENCODING);
    let (body, adds_usage) = read.into_payload(&mut headers, asks);
    let reads_usage = is_post && !profile.usage.is_empty();
    if reads_usage {
        // Usage cannot be read of a compressed response.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    let without = profile.key_query.as_deref().filter(|_| caller.entity.is_some());
    let uri = upstream_uri(upstream, path, head.uri.query(), without)
        .ok_or_else(|| Refusal::invalid("the path is invalid"))?;
    let (profile, tenant) = (profile.clone(), String::new());
    let info = CallInfo { profile, tenant, model, has_estimate, reads_usage, bytes, tokens };
    Ok((Prepared { method: head.method, uri, headers, body, adds_usage }, info))
}

/// The address of a call at its upstream; `without` is a parameter to leave out.
fn upstream_uri(upstream: &Upstream, path: &str, query: Option<&str>, without: Option<&str>) -> Option<Uri> {
    let target = upstream_path(&upstream.base, path, query, without)?;
    let uri = Uri::builder().scheme(upstream.scheme.clone()).authority(upstream.authority.clone());
    uri.path_and_query(target).build().ok()
}

/// Whether an upstream may read another path than the proxy. Some decode a path twice, and some servers ignore
/// what follows a `;` in a step.
fn has_empty_steps(path: &str) -> bool {
    let once = percent_decoded(path);
    let twice = percent_decoded(&once);
    let is_dots = |step: &str| matches!(step.split(';').next(), Some("." | ".."));
    [&once, &twice].iter().any(|path| path.contains("//") || path.split(['/', '\\']).any(is_dots))
}

/// A call that may be sent.
struct Attempts {
    scope: Scope,
    deadline: Instant,
    prepared: Prepared,
    ticket: Ticket,
    slot: Slot,
}

/// Sends a call until the upstream does not reject it, or time is up.
async fn send(proxy: &Inner, upstream: &Upstream, call: Attempts) -> Forwarded {
    let Attempts { scope, deadline, mut prepared, mut ticket, slot } = call;
    let reserved = ticket.info().profile.reserved(ticket.info().tokens);
    for attempt in 1.. {
        let permit = match proxy.scopes.acquire(&scope, reserved, left(deadline)).await {
            Ok(permit) => permit,
            Err(refused) => {
                count(&proxy.counts.refused_by_upstream, 1);
                ticket.end(Ending::NotDone);
                return Err(refused.into());
            }
        };
        let Some(request) = prepared.request() else { break };
        if attempt == 1 {
            proxy.begin(upstream);
        }
        ticket.send(permit);
        let sent_at = Instant::now();
        let response = timeout(proxy.bounds.response_time, proxy.transport.send(request)).await;
        let response = match response {
            Ok(Ok(response)) => response,
            failed => return Err(no_response(proxy, ticket, failed.ok().and_then(Result::err))),
        };
        let took = sent_at.elapsed();
        let (mut head, body) = response.into_parts();
        let outcome = outcome_of(&head).took(took);
        if !matches!(head.status.as_u16(), 429 | 503 | 529) {
            ticket.learn(outcome);
            remove_hop_by_hop(&mut head.headers);
            let pause_max = proxy.bounds.response_time;
            return Ok(passed(head, Prefixed::of(body), (ticket, slot), prepared.adds_usage, pause_max));
        }
        let Rejection { body, outcome, is_final } = classify(&ticket, &head, body, outcome).await;
        let is_retryable = head.status != StatusCode::SERVICE_UNAVAILABLE && prepared.body.is_repeatable();
        let may_retry = is_retryable && !is_final && attempt < ATTEMPTS_MAX && !left(deadline).is_zero();
        if may_retry && proxy.takes_retry(upstream) {
            ticket.retry(outcome);
            let wait = outcome.hint().unwrap_or_default();
            if wait > left(deadline) {
                count(&proxy.counts.refused_by_upstream, 1);
                ticket.end(Ending::NotDone);
                return Err(Refused::Limited { by: Gate::Pause, retry_after: Some(wait) }.into());
            }
            sleep(wait).await;
            continue;
        }
        count(&proxy.counts.rejected, 1);
        ticket.learn(outcome);
        remove_hop_by_hop(&mut head.headers);
        return Ok(passed(head, body, (ticket, slot), false, proxy.bounds.response_time));
    }
    ticket.end(Ending::NotDone);
    Err(Refusal::upstream(StatusCode::BAD_GATEWAY, "the upstream rejects this call"))
}

/// What is known of a rejection.
struct Rejection {
    body: Prefixed,
    outcome: Outcome,
    /// Another attempt cannot succeed.
    is_final: bool,
}

/// Reads the beginning of a rejection's body, which says whether another attempt can succeed, and when.
async fn classify(ticket: &Ticket, head: &response::Parts, body: Incoming, outcome: Outcome) -> Rejection {
    let mut size = 0;
    let wants_more = |piece: &[u8]| {
        size += piece.len();
        size <= REJECTION_MAX
    };
    let read = timeout(REJECTION_TIME, Beginning::read(body, wants_more)).await;
    let Ok(Ok(read)) = read else {
        let body = Beginning { bytes: Bytes::new(), rest: None }.into_body();
        return Rejection { body, outcome, is_final: false };
    };
    let outcome = outcome.exceeded_in(&read.bytes);
    let has_retry_after = head.headers.contains_key(RETRY_AFTER);
    let is_limit = head.status == StatusCode::TOO_MANY_REQUESTS;
    let info = retry_info(&read.bytes);
    let is_final = is_limit
        && (info == Some(RetryInfo::DayUsedUp)
            || ticket.info().profile.is_final(&read.bytes, has_retry_after));
    let outcome = match info {
        // It says nothing about the rate that the upstream accepts.
        _ if is_final => Outcome::ignored(),
        Some(RetryInfo::After(wait)) if !outcome.has_hint() => outcome.retry_after(wait),
        _ => outcome,
    };
    Rejection { body: read.into_body(), outcome, is_final }
}

/// The upstream did not respond. A call that it may have received is not repeated.
fn no_response(
    proxy: &Inner,
    mut ticket: Ticket,
    error: Option<hyper_util::client::legacy::Error>,
) -> Refusal {
    count(&proxy.counts.failed, 1);
    let Some(error) = error else {
        ticket.learn(Outcome::failure());
        ticket.end(Ending::Unknown);
        let span = proxy.bounds.response_time.as_secs();
        return Refusal::upstream(
            StatusCode::GATEWAY_TIMEOUT,
            format!("the upstream did not respond within {span}s"),
        );
    };
    // It is counted; a line for each call would fill the log.
    tracing::debug!(%error, "the upstream did not respond");
    ticket.learn(Outcome::failure());
    let is_connect = error.is_connect();
    ticket.end(if is_connect { Ending::NotDone } else { Ending::Unknown });
    let what = if is_connect { "cannot be reached" } else { "broke the connection" };
    Refusal::upstream(StatusCode::BAD_GATEWAY, format!("the upstream {what}"))
}

/// The response as it passes to the caller.
fn passed(
    mut head: response::Parts,
    body: Prefixed,
    (ticket, slot): (Ticket, Slot),
    adds_usage: bool,
    pause_max: Duration,
) -> Response<ResponseBody> {
    let profile = &ticket.info().profile;
    let kind = head.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).unwrap_or_default();
    let is_readable =
        ticket.info().reads_usage && head.status.is_success() && !head.headers.contains_key(CONTENT_ENCODING);
    let reader = match kind {
        _ if !is_readable => UsageReader::None,
        kind if kind.starts_with("text/event-stream") => UsageReader::events(profile, adds_usage),
        _ => UsageReader::document(profile),
    };
    if reader.edits() {
        head.headers.remove(CONTENT_LENGTH);
    }
    head.version = Version::HTTP_11;
    let reader = head.status.is_success().then_some(reader);
    Response::from_parts(head, MeteredBody::new(body, reader, (ticket, slot), pause_max).boxed_unsync())
}

fn outcome_of(head: &response::Parts) -> Outcome {
    const CLASSES: &Classes = &Classes::new();
    let now = Stamp::ZERO + SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    CLASSES.outcome_of_parts(head.status, &head.headers, now)
}

impl Prepared {
    /// The next request; `None` if its body was already sent.
    fn request(&mut self) -> Option<Request<ResponseBody>> {
        let mut request = Request::new(self.body.next()?);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        Some(request)
    }
}
