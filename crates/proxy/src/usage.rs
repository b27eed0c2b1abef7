//! Reads the usage of a response while it passes, and removes what the caller did not ask for.

use std::ops::Range;
use std::sync::Arc;

use hyper::body::Bytes;

use crate::codec::is_usage_chunk;
use crate::json_scan::{JsonScan, Scalar};
use crate::multipart::find;
use crate::profile::{Path, Profile};

/// A longer event is not held back to be removed: it has more than usage.
const EVENT_MAX: usize = 512 * 1_024;
/// The beginning of an event's data that is kept, for ends of a stream that are no JSON, such as `[DONE]`.
const HEAD_MAX: usize = 256;
/// The field of a line with data.
const DATA: &[u8] = b"data:";

/// The members of an event that classify an error, after its `type`.
const ERRORS: [&str; 4] = ["error.type", "error.message", "error.code", "response.error.code"];
/// The same of an event whose `type` is `error`.
const TYPED_ERRORS: [&str; 2] = ["code", "message"];

/// The usage of one response.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) input: Option<u64>,
    pub(crate) output: Option<u64>,
    /// Events of a stream that carried data: about one token each.
    pub(crate) events: u64,
    /// Bytes of the body.
    pub(crate) received: u64,
    /// Whether a stream had its last event, as far as the profile names one.
    pub(crate) has_ended: bool,
    pub(crate) error: Option<StreamError>,
}

/// An error that a stream reported after its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum StreamError {
    /// The upstream is overloaded, or a limit is exceeded.
    Overload,
    /// Anything else.
    Other,
}

/// Reads a body as it passes.
#[derive(Debug)]
pub(crate) enum UsageReader {
    /// Nothing is read.
    None,
    /// One JSON document.
    Document { profile: Arc<Profile>, scan: Box<JsonScan>, received: u64 },
    /// Server-sent events.
    Events(Box<Events>),
}

/// Reads server-sent events while they arrive: one of them may be of any size.
#[derive(Debug)]
pub(crate) struct Events {
    profile: Arc<Profile>,
    /// What is read of an event: its type, then errors, then the usage.
    paths: Arc<[Path]>,
    usage: Usage,
    line: Line,
    filter: Option<Filter>,
}

/// The line that is being read.
#[derive(Debug, Default)]
struct Line {
    /// Its first bytes, as many as decide whether it has data.
    field: Vec<u8>,
    data: Option<Data>,
}

/// The data of an event.
#[derive(Debug)]
struct Data {
    head: Vec<u8>,
    scan: JsonScan,
}

/// Removes the chunk with usage, for a caller that did not ask for it.
#[derive(Debug, Default)]
struct Filter {
    /// The bytes of the current event.
    event: Vec<u8>,
    /// The event is too long to hold back.
    passes: bool,
}

impl UsageReader {
    /// Reads server-sent events; `removes_usage` also removes the chunk that reports it.
    pub(crate) fn events(profile: &Arc<Profile>, removes_usage: bool) -> Self {
        let path = |text: &str| text.split('.').map(str::to_owned).collect::<Path>();
        let own = ["type"].into_iter().chain(ERRORS).chain(TYPED_ERRORS).map(path);
        Self::Events(Box::new(Events {
            profile: Arc::clone(profile),
            paths: own.chain(profile.usage.paths().iter().cloned()).collect(),
            usage: Usage { has_ended: profile.stream_end.is_empty(), ..Usage::default() },
            line: Line::default(),
            filter: removes_usage.then(Filter::default),
        }))
    }

    /// Reads one document.
    pub(crate) fn document(profile: &Arc<Profile>) -> Self {
        let scan = Box::new(JsonScan::new(profile.usage.paths()));
        Self::Document { profile: Arc::clone(profile), scan, received: 0 }
    }

    /// Whether the body changes on its way.
    pub(crate) fn edits(&self) -> bool {
        matches!(self, Self::Events(events) if events.filter.is_some())
    }

    /// Reads a piece, and returns what the caller receives of it.
    pub(crate) fn push(&mut self, piece: Bytes) -> Bytes {
        match self {
            Self::None => piece,
            Self::Document { scan, received, .. } => {
                *received += piece.len() as u64;
                scan.push(&piece);
                piece
            }
            Self::Events(events) => events.push(piece),
        }
    }

    /// The bytes still held back when the body has ended.
    pub(crate) fn rest(&mut self) -> Bytes {
        match self {
            Self::Events(events) => events.rest(),
            _ => Bytes::new(),
        }
    }

    /// The usage that was reported so far.
    pub(crate) fn finish(&mut self) -> Usage {
        match std::mem::replace(self, Self::None) {
            Self::None => Usage::default(),
            Self::Document { profile, scan, received } => {
                let (input, output) = profile.usage.read(&scan.finish());
                Usage { input, output, received, has_ended: true, ..Usage::default() }
            }
            Self::Events(events) => events.usage,
        }
    }
}

impl Events {
    fn push(&mut self, piece: Bytes) -> Bytes {
        self.usage.received += piece.len() as u64;
        if self.filter.is_none() {
            for line in piece.split_inclusive(|byte| *byte == b'\n') {
                self.read_line(line);
            }
            return piece;
        }
        let mut passed = Vec::with_capacity(piece.len());
        for line in piece.split_inclusive(|byte| *byte == b'\n') {
            let is_blank = self.read_line(line);
            if let Some(filter) = &mut self.filter {
                filter.push(line, is_blank, &mut passed);
            }
        }
        passed.into()
    }

    fn rest(&mut self) -> Bytes {
        self.filter.as_mut().map_or_else(Bytes::new, |filter| std::mem::take(&mut filter.event).into())
    }

    /// Reads a part of a line. Returns whether it ends an event.
    fn read_line(&mut self, part: &[u8]) -> bool {
        let Line { field, data } = &mut self.line;
        let missing = DATA.len().saturating_sub(field.len()).min(part.len());
        let (start, rest) = part.split_at(missing);
        field.extend_from_slice(start);
        if field == DATA {
            let new = || Data { head: Vec::new(), scan: JsonScan::new(&self.paths) };
            data.get_or_insert_with(new).push(rest);
        }
        if !part.ends_with(b"\n") {
            return false;
        }
        let is_blank = field.trim_ascii().is_empty() && field.len() < DATA.len();
        field.clear();
        if let Some(data) = data.take() {
            self.read(data);
        }
        is_blank
    }

    fn read(&mut self, data: Data) {
        let head = data.head.trim_ascii();
        let values = data.scan.finish();
        let (own, usage) = values.split_at(1 + ERRORS.len() + TYPED_ERRORS.len());
        let text = |value: &Option<Scalar>| value.clone().and_then(Scalar::into_string);
        let kind = text(&own[0]);
        let is_end = |end: &String| head == end.as_bytes() || kind.as_ref() == Some(end);
        self.usage.has_ended |= self.profile.stream_end.iter().any(is_end);
        if head == b"[DONE]" {
            return;
        }
        self.usage.events += 1;
        let (input, output) = self.profile.usage.read(usage);
        self.usage.input = input.or(self.usage.input);
        self.usage.output = output.or(self.usage.output);
        let is_error = kind.as_deref() == Some("error");
        let members = if is_error { &own[1..] } else { &own[1..=ERRORS.len()] };
        let texts: Vec<String> = members.iter().filter_map(text).collect();
        if is_error || !texts.is_empty() {
            let text = texts.join(" ").to_lowercase();
            let is_overload =
                ["overload", "rate_limit", "too many", "exhausted"].iter().any(|mark| text.contains(mark));
            self.usage.error = Some(if is_overload { StreamError::Overload } else { StreamError::Other });
        }
    }
}

impl Data {
    fn push(&mut self, part: &[u8]) {
        let space = HEAD_MAX.saturating_sub(self.head.len());
        self.head.extend_from_slice(&part[..part.len().min(space)]);
        self.scan.push(part);
    }
}

impl Filter {
    fn push(&mut self, line: &[u8], is_blank: bool, passed: &mut Vec<u8>) {
        if self.passes || self.event.len() + line.len() > EVENT_MAX {
            self.passes = true;
            passed.append(&mut self.event);
            passed.extend_from_slice(line);
        } else {
            self.event.extend_from_slice(line);
        }
        if !is_blank {
            return;
        }
        let event = std::mem::take(&mut self.event);
        if !has_usage_chunk(&event) {
            let Range { start, end } = without_usage(&event).unwrap_or_default();
            passed.extend_from_slice(&event[..start]);
            passed.extend_from_slice(&event[end..]);
        }
        self.passes = false;
    }
}

/// The member `"usage": null` with one comma, which a chunk has only if usage was requested.
fn without_usage(event: &[u8]) -> Option<Range<usize>> {
    const NAME: &[u8] = b"\"usage\"";
    let mut from = 0;
    while let Some(at) = find(&event[from..], NAME) {
        let (start, name_end) = (from + at, from + at + NAME.len());
        from = name_end;
        let after = |text: &[u8], word: &[u8]| {
            text.trim_ascii_start().strip_prefix(word).map(|rest| event.len() - rest.len())
        };
        let end = after(&event[name_end..], b":").and_then(|end| after(&event[end..], b"null"));
        let Some(end) = end else { continue };
        let before = event[..start].trim_ascii_end();
        // Inside a string a quote is escaped, so this can only be a member.
        match before.last() {
            Some(b',') => return Some(before.len() - 1..end),
            Some(b'{') => return Some(start..after(&event[end..], b",").unwrap_or(end)),
            _ => {}
        }
    }
    None
}

/// Whether an event only reports usage.
fn has_usage_chunk(event: &[u8]) -> bool {
    let mut lines = event.split(|byte| *byte == b'\n').filter_map(|line| line.strip_prefix(DATA));
    find(event, b"\"usage").is_some() && lines.any(is_usage_chunk)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::profile::Profiles;

    fn profile(name: &str) -> Arc<Profile> {
        Arc::clone(Profiles::built_in().get(name).unwrap())
    }

    /// What passes of a stream that arrives in pieces of this size, and its usage.
    fn read(mut reader: UsageReader, text: &str, size: usize) -> (String, Usage) {
        let mut passed = Vec::new();
        for piece in text.as_bytes().chunks(size) {
            passed.extend_from_slice(&reader.push(Bytes::copy_from_slice(piece)));
        }
        passed.extend_from_slice(&reader.rest());
        (String::from_utf8(passed).unwrap(), reader.finish())
    }

    const CHAT: &str = "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\":null\"}}],\"usage\":null}\n\n\
        data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":5}}\n\ndata: [DONE]\n\n";

    #[test]
    fn chunk_that_was_not_requested_is_removed() {
        for size in [1, 7, 1_000] {
            let (passed, usage) = read(UsageReader::events(&profile("openai"), true), CHAT, size);
            let wanted =
                "data: {\"choices\":[{\"delta\":{\"content\":\"\\\"usage\\\":null\"}}]}\n\ndata: [DONE]\n\n";
            assert_eq!(passed, wanted, "in pieces of {size}");
            assert_eq!((usage.input, usage.output), (Some(7), Some(5)));
            let (passed, usage) = read(UsageReader::events(&profile("openai"), false), CHAT, size);
            assert_eq!((passed.as_str(), usage.output), (CHAT, Some(5)), "requested usage passes");
        }
    }

    #[test]
    fn member_without_usage_is_removed() {
        let table = [
            (r#"{"id":1,"usage":null}"#, r#"{"id":1}"#),
            (r#"{"id":1, "usage" : null , "x":2}"#, r#"{"id":1 , "x":2}"#),
            (r#"{ "usage": null, "id":1}"#, r#"{  "id":1}"#),
            (r#"{"usage":null}"#, "{}"),
            (r#"{"usage":{"a":1}}"#, r#"{"usage":{"a":1}}"#),
            (r#"{"text":"\",\"usage\":null"}"#, r#"{"text":"\",\"usage\":null"}"#),
        ];
        for (event, wanted) in table {
            let Range { start, end } = without_usage(event.as_bytes()).unwrap_or_default();
            assert_eq!([&event[..start], &event[end..]].concat(), wanted, "{event}");
        }
    }

    #[test]
    fn stream_has_ended_after_its_last_event() {
        let has_ended =
            |name: &str, text: &str| read(UsageReader::events(&profile(name), false), text, 5).1.has_ended;
        let (last, quoted) =
            ("data: {\"type\":\"message_stop\"}\n\n", "data: {\"text\":\"message_stop\"}\n\n");
        assert!(has_ended("anthropic", last) && !has_ended("anthropic", quoted));
        assert!(has_ended("openai", CHAT) && !has_ended("openai", CHAT.trim_end_matches("data: [DONE]\n\n")));
        assert!(has_ended("openai", "data: {\"type\":\"response.completed\",\"response\":{}}\n\n"));
        assert!(has_ended("gemini", "data: {}\n\n"), "it has no last event");
    }

    #[test]
    fn usage_of_each_provider_is_read() {
        let anthropic = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"usage\":{\"input_tokens\":10,\
            \"cache_creation_input_tokens\":5,\"cache_read_input_tokens\":90,\"output_tokens\":1}}}\n\n\
            event: message_delta\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":33}}\n\n";
        let (_, usage) = read(UsageReader::events(&profile("anthropic"), false), anthropic, 9);
        assert_eq!((usage.input, usage.output), (Some(15), Some(33)), "cache reads do not count");
        let responses = "data: {\"response\":{\"usage\":{\"input_tokens\":3,\"output_tokens\":4}}}\n\n";
        let (_, usage) = read(UsageReader::events(&profile("openai"), false), responses, 9);
        assert_eq!((usage.input, usage.output), (Some(3), Some(4)));
        let gemini = "[{\"usageMetadata\": {\"promptTokenCount\": 8, \"candidatesTokenCount\": 2, \"thoughtsTokenCount\": 3}}]";
        let (_, usage) = read(UsageReader::document(&profile("gemini")), gemini, 9);
        assert_eq!((usage.input, usage.output), (Some(8), Some(5)));
        let absurd = "{\"usage\": {\"prompt_tokens\": 18446744073709551615, \"completion_tokens\": -5}}";
        let (_, usage) = read(UsageReader::document(&profile("openai")), absurd, 9);
        assert_eq!((usage.input, usage.output), (Some(u64::MAX), None), "the ticket judges it");
    }

    /// A line above 256 KiB was dropped with its usage: the last event of a response repeats its output.
    #[test]
    fn usage_of_a_large_event_is_read() {
        let output = "x".repeat(1 << 20);
        let text = format!(
            "event: response.completed\r\ndata: {{\"type\":\"response.completed\",\"response\":{{\"output\":\"{output}\",\
             \"usage\":{{\"input_tokens\":3,\"output_tokens\":4}}}}}}\r\n\r\n"
        );
        for size in [1, 1_000, 10 << 20] {
            let (passed, usage) = read(UsageReader::events(&profile("openai"), false), &text, size);
            assert!(passed == text && usage.has_ended, "in pieces of {size}");
            assert_eq!((usage.input, usage.output, usage.events), (Some(3), Some(4), 1));
            assert_eq!(usage.received, text.len() as u64);
        }
    }

    #[test]
    fn errors_within_a_stream_are_classified() {
        let error = |text: &str| read(UsageReader::events(&profile("anthropic"), false), text, 11).1.error;
        let overloaded =
            "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\"}}\n\n";
        assert_eq!(error(overloaded), Some(StreamError::Overload));
        assert_eq!(error("data: {\"error\":{\"message\":\"oops\"}}\n\n"), Some(StreamError::Other));
        assert_eq!(error("data: {\"error\":null,\"text\":\"\\\"error\\\"\"}\n\n"), None);
        // Responses have it at the top. They were taken for streams without an error.
        let limited = "data: {\"type\":\"error\",\"code\":\"rate_limit_exceeded\",\"message\":\"wait\",\"param\":null}\n\n";
        assert_eq!(error(limited), Some(StreamError::Overload));
        assert_eq!(error("data: {\"type\":\"error\",\"message\":null}\n\n"), Some(StreamError::Other));
        assert_eq!(error("data: {\"type\":\"note\",\"code\":\"overloaded\"}\n\n"), None);
    }

    #[test]
    fn endless_line_passes_in_bounded_memory() {
        let text = format!("data: {}\n\ndata: [DONE]\n\n", "x".repeat(3 * EVENT_MAX));
        let mut reader = UsageReader::events(&profile("openai"), true);
        let mut passed = 0;
        for piece in text.as_bytes().chunks(1_000) {
            passed += reader.push(Bytes::copy_from_slice(piece)).len();
            let UsageReader::Events(events) = &reader else { panic!("events") };
            assert!(events.line.data.as_ref().is_none_or(|data| data.head.len() <= HEAD_MAX));
            assert!(events.filter.as_ref().unwrap().event.len() <= EVENT_MAX);
        }
        assert_eq!(passed + reader.rest().len(), text.len());
    }
}
