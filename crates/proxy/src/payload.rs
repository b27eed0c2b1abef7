//! The body of a request: what is read of it before it is sent, and what is kept for another attempt.

use std::sync::Arc;

use http::HeaderMap;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, HeaderValue};
use hyper::body::{Body as _, Bytes, Incoming};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use crate::codec::with_usage_option;
use crate::estimate::text_bytes;
use crate::listener::{ResponseBody, full};
use crate::multipart::{FormFacts, FormScan};
use crate::profile::{Profile, RequestFacts};
use crate::proxy::{Inner, ProxyBounds};
use crate::refusal::Refusal;
use crate::transport::{Beginning, Prefixed};

/// The bytes for which a body may take its time to arrive.
const MIB: usize = 1 << 20;

/// The body of a request, as it is sent.
pub(crate) struct Payload {
    body: Body,
    /// Its share of the memory for bodies, until the response begins.
    _memory: Option<OwnedSemaphorePermit>,
}

enum Body {
    /// Kept for another attempt.
    Kept(Bytes),
    /// Can be sent once.
    Once(Option<Prefixed>),
}

/// The part of a body that was read before it is sent.
pub(crate) struct ReadBody {
    beginning: Beginning,
    pub(crate) facts: RequestFacts,
    /// Whether a form may hide its model.
    is_odd: bool,
    /// The length of the body, if it is known.
    length: Option<u64>,
    memory: Memory,
    replay_max: usize,
}

/// The share of a body in the memory for all bodies.
struct Memory {
    all: Arc<Semaphore>,
    held: Option<OwnedSemaphorePermit>,
    is_full: bool,
}

/// How the body of a request is read.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Reading<'a> {
    pub(crate) profile: &'a Profile,
    /// The boundary, if the body is a form that is read.
    pub(crate) form: Option<&'a str>,
    /// Whether the model can only be in the body.
    pub(crate) searches: bool,
}

impl ReadBody {
    /// Reads the beginning of a body. If that is JSON or a form and does not name the model, the rest is read too:
    /// SDKs write the messages before the model, and curl a file.
    pub(crate) async fn read(proxy: &Inner, body: Incoming, how: Reading<'_>) -> Result<Self, Refusal> {
        let Reading { profile, form, searches } = how;
        let ProxyBounds { replay_max, search_max, body_time, .. } = proxy.bounds;
        let length = body.size_hint().exact();
        let reads = profile.reads_bodies() && !body.is_end_stream();
        let mut memory = Memory { all: Arc::clone(&proxy.kept), held: None, is_full: false };
        let mut facts = RequestFacts::default();
        if !reads && length.is_none_or(|length| length > replay_max as u64) {
            let beginning = Beginning { bytes: Bytes::new(), rest: Some(body) };
            return Ok(Self { beginning, facts, is_odd: false, length, memory, replay_max });
        }
        let (mut scan, mut form) = (profile.request.scan(), form.map(FormScan::new));
        let (mut size, mut max, mut is_json) = (0, replay_max, false);
        let wants_more = |piece: &[u8]| {
            is_json |= size == 0 && piece.trim_ascii_start().starts_with(b"{");
            size += piece.len();
            let lacks_model = match &mut form {
                _ if !reads => false,
                Some(form) => {
                    form.push(piece);
                    !form.has_model()
                }
                None => {
                    scan.push(piece);
                    is_json && !profile.request.has_model(&scan)
                }
            };
            if size > max && searches && lacks_model {
                max = max.max(search_max);
            }
            size <= max && memory.take(piece.len())
        };
        let read_max = if searches { length.unwrap_or(0).min(search_max as u64) } else { 0 };
        let spans = u32::try_from(read_max / MIB as u64).unwrap_or(u32::MAX).max(1);
        let read = timeout(body_time.saturating_mul(spans), Beginning::read(body, wants_more)).await;
        let Ok(Ok(beginning)) = read else { return Err(Refusal::invalid("the body did not arrive")) };
        let mut is_odd = false;
        if let Some(form) = form {
            let FormFacts { model, has_other, is_odd: is_form_odd } = form.finish();
            if has_other {
                return Err(Refusal::invalid("the form must name one model"));
            }
            (facts.model, is_odd) = (model, is_form_odd);
        } else if reads {
            facts = RequestFacts { is_json, ..profile.request.facts(scan) };
        }
        Ok(Self { beginning, facts, is_odd, length, memory, replay_max })
    }

    /// Fails if the proxy may see no model, or another one than the upstream: a tenant could evade its limits.
    pub(crate) fn check_hidden(
        &self,
        headers: &HeaderMap,
        path: &str,
        form: Option<&str>,
    ) -> Result<(), Refusal> {
        let Beginning { bytes, rest } = &self.beginning;
        let mut encodings = headers.get_all(CONTENT_ENCODING).iter();
        let is_encoded = encodings.any(|value| !value.as_bytes().eq_ignore_ascii_case(b"identity"));
        // JSON in UTF-16 or UTF-32, which some upstreams accept.
        let is_wide = bytes.iter().take(4).any(|byte| *byte == 0);
        let is_cut = rest.is_some() && self.facts.model.is_none() && !is_upload(path);
        let what = match form {
            _ if is_encoded => "the body must have no content-encoding: the proxy reads its model",
            Some(boundary) if !begins_with(bytes, boundary) => "the form must begin with its boundary",
            Some(_) if self.is_odd => "the form has too many or too long parts to find its model",
            None if is_wide => "the body must be UTF-8: the proxy reads its model",
            _ if is_cut && self.memory.is_full => {
                return Err(Refusal::busy("other calls take all of the memory for large bodies"));
            }
            _ if is_cut => "a body of this size must begin with its model",
            _ => return Ok(()),
        };
        Err(Refusal::invalid(what))
    }

    /// The bytes that count for the estimate of tokens: images count less than text.
    pub(crate) fn counted_bytes(&self, is_form: bool) -> u64 {
        let read = self.beginning.bytes.len() as u64;
        let total = self.length.unwrap_or(read);
        let blobs = self.facts.blobs;
        let unread = if blobs.is_cut { total.saturating_sub(read) } else { 0 };
        if is_form { total } else { text_bytes(total, blobs.bytes + unread) }
    }

    /// What is sent, and whether the usage option was added to it.
    pub(crate) fn into_payload(self, headers: &mut HeaderMap, asks_for_usage: bool) -> (Payload, bool) {
        let Self { beginning, memory, replay_max, .. } = self;
        let (body, adds_usage) = match beginning {
            Beginning { bytes, rest: None } => {
                // The length may change.
                let had_length = headers.remove(CONTENT_LENGTH).is_some();
                let edited = if asks_for_usage { with_usage_option(&bytes) } else { None };
                let is_kept = bytes.len() <= replay_max && !memory.is_full;
                let adds_usage = edited.is_some();
                let bytes = edited.map_or(bytes, Bytes::from);
                if had_length || !bytes.is_empty() {
                    headers.insert(CONTENT_LENGTH, HeaderValue::from(bytes.len()));
                }
                let whole = |bytes| Beginning { bytes, rest: None }.into_body();
                let body = if is_kept { Body::Kept(bytes) } else { Body::Once(Some(whole(bytes))) };
                (body, adds_usage)
            }
            cut => (Body::Once(Some(cut.into_body())), false),
        };
        (Payload { body, _memory: memory.held }, adds_usage)
    }
}

impl Payload {
    pub(crate) const fn is_repeatable(&self) -> bool {
        matches!(self.body, Body::Kept(_))
    }

    /// The body of the next request; `None` if it was already sent.
    pub(crate) fn next(&mut self) -> Option<ResponseBody> {
        match &mut self.body {
            Body::Kept(bytes) => Some(full(bytes.clone())),
            Body::Once(body) => body.take().map(Prefixed::boxed),
        }
    }
}

impl Memory {
    /// Takes memory for another piece, if there is some.
    fn take(&mut self, bytes: usize) -> bool {
        let more = u32::try_from(bytes).ok();
        let more = more.and_then(|bytes| Arc::clone(&self.all).try_acquire_many_owned(bytes).ok());
        match (more, &mut self.held) {
            (Some(more), Some(held)) => held.merge(more),
            (Some(more), held) => *held = Some(more),
            (None, _) => self.is_full = true,
        }
        !self.is_full
    }
}

/// Whether a path takes files that are for no model: Google's, and those of OpenAI's files and uploads.
pub(crate) fn is_upload(path: &str) -> bool {
    path.starts_with("/upload/") || path.ends_with("/files") || path.contains("/uploads/")
}

/// Whether a body is a form with this boundary, and not JSON that is called one.
fn begins_with(body: &[u8], boundary: &str) -> bool {
    body.strip_prefix(b"--").is_some_and(|body| body.starts_with(boundary.as_bytes()))
}
