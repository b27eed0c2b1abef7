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
use tidegate_server::{AtCapacity, PeerCertificate, Slot};
use tokio::time::{Instant, sleep, timeout};

use crate::body::MeteredBody;
use crate::builder::Upstream;
use crate::codec::with_usage_option;
use crate::headers::{
    Key, WITHIN, find_key, percent_decoded, remove_hop_by_hop, remove_tokens, replace_key, upstream_path,
};
use crate::listener::{ResponseBody, full};
use crate::multipart::{boundary, models};
use crate::profile::{RequestFacts, Tokens};
use crate::proxy::Inner;
use crate::refusal::Refusal;
use crate::scope::Scope;
use crate::tenant::CallTokens;
use crate::ticket::{CallInfo, Ending, Ticket, cost, count};
use crate::transport::{Beginning, Prefixed};
use crate::usage::UsageReader;

/// The part of a rejection that is read to classify it.
const REJECTION_MAX: usize = 64 * 1_024;
/// Timeout for that part.
const REJECTION_TIME: Duration = Duration::from_secs(10);
/// Where Google takes files, which are not for a model.
const UPLOADS: &str = "/upload/";
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

/// The body of a request.
enum Payload {
    /// Kept for another attempt.
    Kept(Bytes),
    /// Can be sent once.
    Once(Option<Prefixed>),
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
    if info.model.is_some() {
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
            let drawn = tenants.draw(entity, resource, tokens, left(deadline)).await;
            Some(drawn.inspect_err(|_| count(&proxy.counts.refused_by_limits, 1))?)
        }
        _ => None,
    };
    let group = upstream.profile.group_of(&model);
    let scope = proxy.scopes.scope(&upstream.name, caller.key.as_ref(), group);
    let ticket = Ticket::new(info, proxy.estimates.clone(), proxy.counts.clone(), lease);
    send(proxy, Attempts { scope, deadline, prepared, ticket, slot }).await
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
            let entity = tenants.identify(token, peer).await?;
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
    let (profile, max) = (&upstream.profile, proxy.bounds.replay_max);
    let reads = profile.reads_bodies() && !body.is_end_stream();
    let path = head.uri.path().get(upstream.name.len() + 1..).unwrap_or_default();
    let in_path = profile.model_in(path);
    let is_tenant = caller.entity.is_some() && head.method == Method::POST;
    if is_tenant && has_empty_steps(path) {
        return Err(Refusal::invalid("the path must have no empty steps, `.` or `..`"));
    }
    let length = body.size_hint().exact();
    let is_small = length.is_some_and(|length| length <= max as u64);
    let form = boundary(&head.headers).filter(|_| profile.counts_by_body());
    let mut scan = profile.request.scan();
    let mut facts = RequestFacts::default();
    let mut beginning = None;
    let payload = if reads || is_small {
        let see = |piece: &[u8]| {
            if reads {
                scan.push(piece);
            }
        };
        let read = timeout(proxy.bounds.body_time, Beginning::read(body, max, see)).await;
        let Ok(Ok(read)) = read else { return Err(Refusal::invalid("the body did not arrive")) };
        if reads {
            facts = match form {
                Some(boundary) => form_facts(&read.bytes, boundary)?,
                None => profile.request.facts(scan),
            };
            if is_tenant && in_path.is_none() && profile.counts_by_body() {
                check_hidden(&head, path, (&read, form), facts.model.is_some())?;
            }
        }
        match read.rest {
            None => {
                beginning = Some(read.bytes.clone());
                Payload::Kept(read.bytes)
            }
            Some(_) => Payload::Once(Some(read.into_body())),
        }
    } else {
        Payload::Once(Some(Prefixed::of(body)))
    };
    let model = in_path.or(facts.model).filter(|_| head.method == Method::POST);
    if is_tenant && model.as_deref().is_some_and(|model| model.contains(['\\', '%'])) {
        return Err(Refusal::invalid("the name of a model must have no escapes of its own"));
    }
    let bytes = length.or(beginning.as_ref().map(|bytes| bytes.len() as u64)).unwrap_or(max as u64);
    let estimate = |model: &str| proxy.estimates.input(model, bytes, form.is_some());
    let input = model.as_deref().map_or(0, estimate);
    let tokens = Tokens { input, output: 0, output_max: facts.output_max, choices: facts.choices };
    let is_form = form.is_some();
    let mut headers = head.headers;
    remove_hop_by_hop(&mut headers);
    remove_tokens(&mut headers);
    headers.remove(HOST);
    let asks = facts.is_stream && profile.needs_usage_option(path) && !headers.contains_key(CONTENT_ENCODING);
    let (payload, adds_usage) = payload.edited(&mut headers, asks);
    let reads_usage = !profile.usage.is_empty() && (model.is_some() || is_form);
    if reads_usage {
        // Usage cannot be read of a compressed response.
        headers.insert(ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    }
    let without = profile.key_query.as_deref().filter(|_| caller.entity.is_some());
    let uri = upstream_uri(upstream, path, head.uri.query(), without)
        .ok_or_else(|| Refusal::invalid("the path is invalid"))?;
    let info =
        CallInfo { profile: profile.clone(), tenant: String::new(), model, reads_usage, bytes, tokens };
    Ok((Prepared { method: head.method, uri, headers, body: payload, adds_usage }, info))
}

/// The address of a call at its upstream; `without` is a parameter to leave out.
fn upstream_uri(upstream: &Upstream, path: &str, query: Option<&str>, without: Option<&str>) -> Option<Uri> {
    let target = upstream_path(&upstream.base, path, query, without)?;
    let uri = Uri::builder().scheme(upstream.scheme.clone()).authority(upstream.authority.clone());
    uri.path_and_query(target).build().ok()
}

/// Fails if the proxy may see no model, or another one than the upstream: a tenant could evade its limits.
fn check_hidden(
    head: &request::Parts,
    path: &str,
    (read, form): (&Beginning, Option<&str>),
    has_model: bool,
) -> Result<(), Refusal> {
    let mut encodings = head.headers.get_all(CONTENT_ENCODING).iter();
    let is_encoded = encodings.any(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"));
    // JSON in UTF-16 or UTF-32, which some upstreams accept.
    let is_wide = read.bytes.iter().take(4).any(|byte| *byte == 0);
    let is_cut = read.rest.is_some() && !has_model && !path.starts_with(UPLOADS);
    let what = match form {
        _ if is_encoded => "the body must have no content-encoding: the proxy reads its model",
        Some(boundary) if !begins_with(&read.bytes, boundary) => "the form must begin with its boundary",
        None if is_wide => "the body must be UTF-8: the proxy reads its model",
        None if is_cut => "a large body must begin with its model: the proxy reads the beginning only",
        _ => return Ok(()),
    };
    Err(Refusal::invalid(what))
}

/// Whether a body is a form with this boundary, and not JSON that is called one.
fn begins_with(body: &[u8], boundary: &str) -> bool {
    body.strip_prefix(b"--").is_some_and(|body| body.starts_with(boundary.as_bytes()))
}

/// What is read of a form.
fn form_facts(body: &[u8], boundary: &str) -> Result<RequestFacts, Refusal> {
    let mut models = models(body, boundary);
    let model = models.next().map(str::to_owned);
    if models.any(|other| Some(other) != model.as_deref()) {
        return Err(Refusal::invalid("the form must name one model"));
    }
    Ok(RequestFacts { model, ..RequestFacts::default() })
}

/// Whether an upstream may read another path than the proxy.
fn has_empty_steps(path: &str) -> bool {
    let path = percent_decoded(path);
    let is_dots = |step: &str| matches!(step, "." | "..");
    path.contains("//") || path.split(['/', '\\']).any(is_dots)
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
async fn send(proxy: &Inner, call: Attempts) -> Forwarded {
    let Attempts { scope, deadline, mut prepared, mut ticket, slot } = call;
    let reserved = ticket.info().profile.reserved(ticket.info().tokens);
    for attempt in 1.. {
        let permit = match proxy.scopes.acquire(&scope, cost(reserved), left(deadline)).await {
            Ok(permit) => permit,
            Err(refused) => {
                count(&proxy.counts.refused_by_upstream, 1);
                ticket.end(Ending::NotDone);
                return Err(refused.into());
            }
        };
        let Some(request) = prepared.request() else { break };
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
            return Ok(passed(head, Prefixed::of(body), ticket, prepared.adds_usage, slot));
        }
        let Rejection { body, outcome, is_final } = classify(&ticket, &head, body, outcome).await;
        let is_retryable = head.status != StatusCode::SERVICE_UNAVAILABLE && prepared.is_repeatable();
        if is_retryable && !is_final && attempt < ATTEMPTS_MAX && !left(deadline).is_zero() {
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
        ticket.end(Ending::NotDone);
        remove_hop_by_hop(&mut head.headers);
        return Ok(Response::from_parts(head, body.boxed()));
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
    let read = timeout(REJECTION_TIME, Beginning::read(body, REJECTION_MAX, |_| {})).await;
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
    ticket: Ticket,
    adds_usage: bool,
    slot: Slot,
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
    if !head.status.is_success() {
        // The upstream did nothing that would be paid for.
        ticket.end(Ending::NotDone);
        return Response::from_parts(head, body.boxed());
    }
    if reader.edits() {
        head.headers.remove(CONTENT_LENGTH);
    }
    head.version = Version::HTTP_11;
    Response::from_parts(head, MeteredBody::new(body, reader, ticket, slot).boxed_unsync())
}

fn outcome_of(head: &response::Parts) -> Outcome {
    const CLASSES: &Classes = &Classes::new();
    let now = Stamp::ZERO + SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    CLASSES.outcome_of_parts(head.status, &head.headers, now)
}

impl Payload {
    /// Adds the usage option if the request is to ask for usage. Returns whether it was added.
    fn edited(self, headers: &mut HeaderMap, asks: bool) -> (Self, bool) {
        let Self::Kept(bytes) = self else { return (self, false) };
        // The length may change, and a body that is kept has one anyway.
        let had_length = headers.remove(CONTENT_LENGTH).is_some();
        let edited = if asks { with_usage_option(&bytes) } else { None };
        let adds_usage = edited.is_some();
        let bytes = edited.map_or(bytes, Bytes::from);
        if had_length || !bytes.is_empty() {
            headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes.len()));
        }
        (Self::Kept(bytes), adds_usage)
    }
}

impl Prepared {
    const fn is_repeatable(&self) -> bool {
        matches!(self.body, Payload::Kept(_))
    }

    /// The next request; `None` if its body was already sent.
    fn request(&mut self) -> Option<Request<ResponseBody>> {
        let body = match &mut self.body {
            Payload::Kept(bytes) => full(bytes.clone()),
            Payload::Once(body) => body.take()?.boxed(),
        };
        let mut request = Request::new(body);
        *request.method_mut() = self.method.clone();
        *request.uri_mut() = self.uri.clone();
        *request.headers_mut() = self.headers.clone();
        Some(request)
    }
}
