//! Finds the model in a form (`multipart/form-data`), as calls with audio or images have it.

use http::header::{CONTENT_TYPE, HeaderMap};

/// A longer model is none.
const MODEL_MAX: usize = 256;
/// The head of a part, and a model, are among its first bytes.
const PART_MAX: usize = 16 << 10;
/// Parts that are looked at.
const PARTS_MAX: usize = 64;
/// The longest boundary (RFC 2046).
pub(crate) const BOUNDARY_MAX: usize = 70;

/// The boundary of a form, if the headers say that the body is one.
pub(crate) fn boundary(headers: &HeaderMap) -> Option<&str> {
    let kind = headers.get(CONTENT_TYPE)?.to_str().ok()?;
    let (kind, parameters) = kind.split_once(';')?;
    let is_form = kind.trim().eq_ignore_ascii_case("multipart/form-data");
    let mut pairs = parameters.split(';').filter_map(|pair| pair.split_once('='));
    let (_, boundary) = pairs.find(|(name, _)| name.trim().eq_ignore_ascii_case("boundary"))?;
    let boundary = boundary.trim().trim_matches('"');
    (is_form && !boundary.is_empty()).then_some(boundary)
}

/// The model of a form, and whether it can be trusted.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct FormFacts {
    /// The first value of its field `model`.
    pub(crate) model: Option<String>,
    /// Another value of that field.
    pub(crate) has_other: bool,
    /// A part that may be the model cannot be read: its head or value is too long, or there are too many.
    pub(crate) is_odd: bool,
}

/// Looks for the model in a form that arrives in pieces.
#[derive(Debug)]
pub(crate) struct FormScan {
    delimiter: Vec<u8>,
    /// The beginning of the current part.
    part: Vec<u8>,
    /// The last bytes that may begin a delimiter.
    tail: Vec<u8>,
    /// Delimiters that were passed.
    delimiters: usize,
    facts: FormFacts,
}

impl FormScan {
    pub(crate) fn new(boundary: &str) -> Self {
        let delimiter = format!("--{boundary}").into_bytes();
        let facts = FormFacts::default();
        Self { delimiter, part: Vec::new(), tail: Vec::new(), delimiters: 0, facts }
    }

    /// Reads the next piece. A part counts once the delimiter behind it has arrived.
    pub(crate) fn push(&mut self, piece: &[u8]) {
        let mut window = std::mem::take(&mut self.tail);
        window.extend_from_slice(piece);
        let mut rest = &window[..];
        while let Some(at) = find(rest, &self.delimiter) {
            self.keep(&rest[..at]);
            self.end_part();
            rest = &rest[at + self.delimiter.len()..];
        }
        let (passed, tail) = rest.split_at(rest.len().saturating_sub(self.delimiter.len() - 1));
        self.keep(passed);
        self.tail = tail.to_vec();
    }

    pub(crate) const fn has_model(&self) -> bool {
        self.facts.model.is_some()
    }

    pub(crate) fn finish(self) -> FormFacts {
        self.facts
    }

    fn keep(&mut self, bytes: &[u8]) {
        let space = PART_MAX.saturating_sub(self.part.len());
        self.part.extend_from_slice(&bytes[..bytes.len().min(space)]);
    }

    fn end_part(&mut self) {
        let part = std::mem::take(&mut self.part);
        self.delimiters += 1;
        // Nothing counts before the first delimiter.
        if self.delimiters == 1 {
            return;
        }
        let Some(head_end) = find(&part, b"\r\n\r\n") else {
            self.facts.is_odd |= part.len() >= PART_MAX;
            return;
        };
        if !str::from_utf8(&part[..head_end]).is_ok_and(is_model) {
            self.facts.is_odd |= self.delimiters > PARTS_MAX && !self.has_model();
            return;
        }
        let value = &part[head_end + 4..];
        let value = value.strip_suffix(b"\r\n").unwrap_or(value);
        match str::from_utf8(value) {
            Ok(value) if value.len() <= MODEL_MAX => match &self.facts.model {
                Some(model) => self.facts.has_other |= model != value,
                None => self.facts.model = Some(value.to_owned()),
            },
            _ => self.facts.is_odd = true,
        }
    }
}

fn is_model(head: &str) -> bool {
    let mut lines = head.split("\r\n").filter_map(|line| line.split_once(':'));
    let Some((_, value)) = lines.find(|(name, _)| name.trim().eq_ignore_ascii_case("content-disposition"))
    else {
        return false;
    };
    let mut parameters = value.split(';').skip(1).filter_map(|pair| pair.split_once('='));
    parameters.any(|(name, value)| {
        name.trim().eq_ignore_ascii_case("name") && value.trim().trim_matches('"') == "model"
    })
}

/// Where `needle` begins.
pub(crate) fn find(text: &[u8], needle: &[u8]) -> Option<usize> {
    let first = *needle.first()?;
    let mut from = 0;
    while let Some(at) = text[from..].iter().position(|byte| *byte == first) {
        let at = from + at;
        if text[at..].starts_with(needle) {
            return Some(at);
        }
        from = at + 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn facts_of(body: &str, piece: usize) -> FormFacts {
        let mut scan = FormScan::new("b-1");
        body.as_bytes().chunks(piece).for_each(|piece| scan.push(piece));
        scan.finish()
    }

    #[test]
    fn boundary_is_read_from_the_content_type() {
        let table = [
            ("multipart/form-data; boundary=b-1", Some("b-1")),
            ("Multipart/Form-Data;charset=utf-8; Boundary=\"b 1\"", Some("b 1")),
            ("multipart/form-data; boundary=", None),
            ("multipart/mixed; boundary=b", None),
            ("application/json", None),
        ];
        for (kind, wanted) in table {
            let headers = HeaderMap::from_iter([(CONTENT_TYPE, kind.parse().unwrap())]);
            assert_eq!(boundary(&headers), wanted, "{kind}");
        }
    }

    #[test]
    fn model_is_found_in_any_part() {
        let file = "--b-1\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\nContent-Type: audio/mpeg\r\n\r\n\
                    name=\"model\"\r\n\r\nno\r\n";
        let model = "--b-1\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\ngpt-4o-transcribe\r\n";
        let end = "--b-1--\r\n";
        let other = model.replace("gpt", "gpu");
        let long = model.replace("gpt", &"x".repeat(300));
        let head = file.replace("audio", &"x".repeat(20_000));
        let table = [
            (format!("{file}{model}{end}"), true, false, false),
            (format!("{model}{file}{end}"), true, false, false),
            (format!("{model}{model}{end}"), true, false, false),
            (format!("{model}{other}{end}"), true, true, false),
            (format!("{file}{end}"), false, false, false),
            // It may be cut off.
            (model.to_owned(), false, false, false),
            (format!("{long}{end}"), false, false, true),
            (format!("{head}{end}"), false, false, true),
            (format!("{}{end}", file.repeat(65)), false, false, true),
        ];
        for (body, has_model, has_other, is_odd) in table {
            let model = has_model.then(|| "gpt-4o-transcribe".to_owned());
            let wanted = FormFacts { model, has_other, is_odd };
            for piece in [1, 7, body.len()] {
                assert_eq!(facts_of(&body, piece), wanted, "{piece} {}", &body[..body.len().min(300)]);
            }
        }
    }

    proptest! {
        #[test]
        fn any_body_is_read(body in "(--b|\r\n|name=model|:|;|x){0,40}") {
            let mut scan = FormScan::new("b");
            body.as_bytes().chunks(3).for_each(|piece| scan.push(piece));
        }
    }
}
