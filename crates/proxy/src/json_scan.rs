//! Finds scalars by their path in a JSON document that arrives in pieces, in bounded memory.
//!
//! Bodies may be of any size, so they are not kept. The scanner does not validate: a document that is not JSON
//! yields arbitrary values, or none.

use std::sync::Arc;

use crate::codec::unescaped;
use crate::multipart::find;
use crate::profile::Path;

/// Keys and values are kept up to this many bytes; no wanted one is longer, even if each of its characters is
/// escaped.
const TEXT_MAX: usize = 1_536;
/// Deeper values are skipped.
const DEPTH_MAX: usize = 32;
/// A string of at least this many letters and digits without a space may be no text but data, such as an image: if it
/// is a `data:` URL, or in a member for data.
const BLOB_MIN: u64 = 1_024;
/// Members of requests whose strings are data in base64.
const BLOB_MEMBERS: [&[u8]; 4] = [b"data", b"file_data", b"b64_json", b"bytesBase64Encoded"];

/// Scans for the values at some paths. Arrays do not count as a step of a path. The last value of a path wins, in the
/// first object or array.
#[derive(Debug)]
pub(crate) struct JsonScan {
    paths: Arc<[Path]>,
    values: Vec<Option<Scalar>>,
    /// For each open object or array: the key of the member that is being read, or `None` in an array.
    open: Vec<Option<Vec<u8>>>,
    /// Open objects and arrays beyond the maximum depth.
    skipped: usize,
    state: State,
    text: Vec<u8>,
    /// The bytes of the current string, as long as it may be encoded data.
    run: Option<u64>,
    /// The bytes of strings that are encoded data.
    blobs: u64,
}

/// A string, a number or a boolean.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Scalar {
    text: String,
    is_string: bool,
}

/// Strings of encoded data, such as images in base64.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Blobs {
    pub(crate) bytes: u64,
    /// Whether the last one continues after the last piece.
    pub(crate) is_cut: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    /// Between tokens; whether the next string is a key.
    Between { is_key: bool },
    /// In a string; whether the last byte was a backslash.
    String { is_key: bool, is_escaped: bool },
    /// In a number or a word.
    Word,
    /// After the document. What follows is none of its members, whatever an upstream makes of it.
    End,
}

impl Scalar {
    /// The number, if it is a whole one.
    pub(crate) fn as_u64(&self) -> Option<u64> {
        if self.is_string { None } else { self.text.parse().ok() }
    }

    pub(crate) fn is_true(&self) -> bool {
        !self.is_string && self.text == "true"
    }

    /// The text, if it is a string. It has a backslash also if an escape is invalid.
    pub(crate) fn into_string(self) -> Option<String> {
        self.is_string.then_some(self.text)
    }
}

impl JsonScan {
    pub(crate) fn new(paths: &Arc<[Path]>) -> Self {
        let (paths, values) = (Arc::clone(paths), vec![None; paths.len()]);
        let state = State::Between { is_key: false };
        Self { paths, values, open: Vec::new(), skipped: 0, state, text: Vec::new(), run: None, blobs: 0 }
    }

    /// Reads the next piece.
    pub(crate) fn push(&mut self, piece: &[u8]) {
        let mut rest = piece;
        while let Some((&byte, tail)) = rest.split_first() {
            rest = match self.state {
                State::String { is_key, is_escaped } => self.in_string(rest, is_key, is_escaped),
                State::Word if is_of_word(byte) => {
                    let end = rest.iter().position(|byte| !is_of_word(*byte)).unwrap_or(rest.len());
                    keep(&mut self.text, &rest[..end]);
                    &rest[end..]
                }
                State::Word => {
                    self.value(false);
                    self.state = State::Between { is_key: false };
                    // The byte that ends it is read again.
                    rest
                }
                State::Between { is_key } => {
                    self.between(byte, is_key);
                    tail
                }
                State::End => return,
            };
        }
    }

    /// Whether the value at the path of this index was found.
    pub(crate) fn has(&self, index: usize) -> bool {
        self.values[index].is_some()
    }

    /// The encoded data in the pieces so far.
    pub(crate) fn blobs(&self) -> Blobs {
        let run = self.blob_run().filter(|_| matches!(self.state, State::String { is_key: false, .. }));
        Blobs { bytes: self.blobs + run.unwrap_or(0), is_cut: run.is_some() }
    }

    /// The values found, in the order of the paths.
    pub(crate) fn finish(mut self) -> Vec<Option<Scalar>> {
        if self.state == State::Word {
            self.value(false);
        }
        self.values
    }

    fn between(&mut self, byte: u8, is_key: bool) {
        match byte {
            b'{' | b'[' => {
                self.open(byte == b'{');
                self.state = State::Between { is_key: byte == b'{' };
            }
            b'}' | b']' => {
                let was_open = !self.open.is_empty();
                self.close();
                let is_end = was_open && self.open.is_empty();
                self.state = if is_end { State::End } else { State::Between { is_key: false } };
            }
            b'"' => {
                self.text.clear();
                self.run = Some(0);
                self.state = State::String { is_key, is_escaped: false };
            }
            b',' => self.state = State::Between { is_key: self.is_in_object() },
            byte if is_of_word(byte) => {
                self.text.clear();
                self.text.push(byte);
                self.state = State::Word;
            }
            _ => {}
        }
    }

    /// Reads to the end of a string, or of the piece; returns the rest.
    fn in_string<'b>(&mut self, rest: &'b [u8], is_key: bool, is_escaped: bool) -> &'b [u8] {
        if is_escaped {
            keep(&mut self.text, &rest[..1]);
            self.state = State::String { is_key, is_escaped: false };
            return &rest[1..];
        }
        let end = rest.iter().position(|byte| matches!(byte, b'"' | b'\\')).unwrap_or(rest.len());
        keep(&mut self.text, &rest[..end]);
        self.run =
            self.run.filter(|_| rest[..end].iter().copied().all(is_of_blob)).map(|run| run + end as u64);
        match rest.get(end) {
            Some(b'"') => {
                let run = self.blob_run().filter(|_| !is_key);
                self.run = None;
                if self.text.contains(&b'\\')
                    && let Some(text) = unescaped(&self.text)
                {
                    self.text = text.into_bytes();
                }
                if is_key {
                    let key = std::mem::take(&mut self.text);
                    if let (0, Some(Some(last))) = (self.skipped, self.open.last_mut()) {
                        *last = key;
                    }
                } else {
                    self.value(true);
                }
                self.blobs += run.unwrap_or(0);
                self.state = State::Between { is_key: false };
                &rest[end + 1..]
            }
            Some(_) => {
                keep(&mut self.text, b"\\");
                self.state = State::String { is_key, is_escaped: true };
                &rest[end + 1..]
            }
            None => &[],
        }
    }

    /// The bytes of the current string so far, if it is encoded data.
    fn blob_run(&self) -> Option<u64> {
        let is_url = || self.text.starts_with(b"data:") && find(&self.text, b";base64,").is_some();
        let member = self.open.iter().rev().flatten().next().filter(|_| self.skipped == 0);
        let is_member = || member.is_some_and(|key| BLOB_MEMBERS.contains(&key.as_slice()));
        self.run.filter(|run| *run >= BLOB_MIN && (is_url() || is_member()))
    }

    fn open(&mut self, is_object: bool) {
        if self.open.len() < DEPTH_MAX && self.skipped == 0 {
            self.open.push(is_object.then(Vec::new));
        } else {
            self.skipped += 1;
        }
    }

    fn close(&mut self) {
        if self.skipped > 0 {
            self.skipped -= 1;
        } else {
            self.open.pop();
        }
    }

    /// In skipped parts this may be wrong, which does not matter: nothing is kept there.
    fn is_in_object(&self) -> bool {
        self.open.last().is_some_and(Option::is_some)
    }

    /// A scalar has ended: keeps it if its path is wanted.
    fn value(&mut self, is_string: bool) {
        if self.skipped > 0 || (!is_string && self.text == b"null") {
            return;
        }
        for (path, value) in self.paths.iter().zip(&mut self.values) {
            let keys = self.open.iter().flatten().map(Vec::as_slice);
            if keys.eq(path.iter().map(String::as_bytes)) {
                let text = String::from_utf8_lossy(&self.text).into_owned();
                *value = Some(Scalar { text, is_string });
            }
        }
    }
}

fn keep(text: &mut Vec<u8>, bytes: &[u8]) {
    let space = TEXT_MAX.saturating_sub(text.len());
    text.extend_from_slice(&bytes[..bytes.len().min(space)]);
}

/// Whether base64, or the beginning of a `data:` URL, may contain it.
const fn is_of_blob(byte: u8) -> bool {
    byte.is_ascii_alphanumeric()
        || matches!(byte, b'+' | b'/' | b'-' | b'_' | b'=' | b':' | b';' | b',' | b'.')
}

const fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'+' | b'.')
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn path(text: &str) -> Path {
        text.split('.').map(str::to_owned).collect()
    }

    fn found(paths: &[&str], pieces: &[&str]) -> Vec<String> {
        let paths: Arc<[Path]> = paths.iter().map(|text| path(text)).collect();
        let mut scan = JsonScan::new(&paths);
        for piece in pieces {
            scan.push(piece.as_bytes());
        }
        scan.finish().into_iter().map(|value| value.map_or("-".to_owned(), |value| value.text)).collect()
    }

    #[test]
    fn values_are_found_by_path() {
        let body = r#"{"a": {"model": "no"}, "model" : "m-1","list":[{"model":"x"},1], "stream":true,
            "options": {"n": 12, "text": "\"model\": \"y\" \\"}, "none": null, "price": -1.5e3 }"#;
        let paths = ["model", "stream", "options.n", "options", "none", "price", "list.model"];
        let wanted = ["m-1", "true", "12", "-", "-", "-1.5e3", "x"];
        assert_eq!(found(&paths, &[body]), wanted);
        assert_eq!(found(&["n"], &[r#"[{"n":1},{"n":2}]"#]), ["2"], "arrays are no step of a path");
        assert_eq!(found(&["model"], &[r#"{"model":"m","rest":"#]), ["m"], "of a document that is cut off");
        assert_eq!(found(&["model"], &[r#"{"\u006dod\u0065l":"a\/\u002d4"}"#]), ["a/-4"], "escaped");
        assert_eq!(found(&["model"], &[r#"{"model":"\ud800"}"#]), [r"\ud800"], "an invalid escape");
    }

    #[test]
    fn deep_and_invalid_documents_are_harmless() {
        let deep = "[{\"a\":".repeat(100_000);
        assert_eq!(found(&["model"], &[&deep]), ["-"]);
        assert_eq!(found(&["model"], &["}}]]\"{,,", r#"{"model":"x"}"#]), ["-"]);
        let long = format!(r#"{{"model":"{}"}}"#, "x".repeat(100_000));
        assert_eq!(found(&["model"], &[&long])[0].len(), TEXT_MAX);
    }

    #[test]
    fn encoded_data_is_no_text() {
        let image = format!("data:image/png;base64,{}==", "aZ0+/".repeat(1_000));
        let body = format!(
            r#"{{"image":"{image}","text":"{}","wide":"{}"}}"#,
            "word ".repeat(900),
            "字".repeat(900)
        );
        let paths: Arc<[Path]> = [path("model")].into();
        for size in [7, 100_000] {
            let mut scan = JsonScan::new(&paths);
            body.as_bytes().chunks(size).for_each(|piece| scan.push(piece));
            let whole = Blobs { bytes: image.len() as u64, is_cut: false };
            assert_eq!(scan.blobs(), whole, "in pieces of {size}");
        }
        let mut scan = JsonScan::new(&paths);
        scan.push(&body.as_bytes()[..3_010]);
        assert_eq!(scan.blobs(), Blobs { bytes: 3_000, is_cut: true }, "of a body that is cut off");
    }

    /// Any text without spaces was taken for data, and counted less against the limits of tokens.
    #[test]
    fn text_without_spaces_is_no_data() {
        let text = "word,word.".repeat(200);
        let size = text.len() as u64;
        let table = [
            (format!(r#"{{"text":"{text}"}}"#), 0),
            (format!(r#"{{"text":"data:{text}"}}"#), 0),
            (format!(r#"{{"{text}":1,"data":["{text}",{{"text":"{text}"}}]}}"#), size),
            (format!(r#"{{"source":{{"type":"base64","data":"{text}"}}}}"#), size),
            (format!(r#"{{"url":"data:image\/png;base64,{text}"}}"#), size + 21),
        ];
        for (body, wanted) in table {
            let mut scan = JsonScan::new(&[].into());
            scan.push(body.as_bytes());
            assert_eq!(scan.blobs().bytes, wanted, "{}", &body[..20]);
        }
    }

    /// The model after the document was booked, and the one within was called.
    #[test]
    fn members_after_the_document_do_not_count() {
        let bodies = [r#"{"model":"m"}{"model":"x"}"#, r#"{"model":"m"} , "model":"x"}"#];
        for body in bodies {
            assert_eq!(found(&["model"], &[body]), ["m"], "{body}");
            assert_eq!(found(&["model"], &[&body[..13], &body[13..]]), ["m"], "{body}");
        }
        assert_eq!(found(&["model"], &[r#"[{"model":"m"},{"model":"x"}]{"model":"y"}"#]), ["x"]);
    }

    proptest! {
        /// Pieces do not matter: a cut at any place finds the same.
        #[test]
        fn pieces_do_not_matter(cut in 0_usize..60) {
            let body = r#"{"a":{"b":"te\"xt\\","c":[1,{"d":true}]},"model":"m","n":17}"#;
            let (left, right) = body.split_at(cut);
            let paths = ["a.b", "a.c.d", "model", "n"];
            prop_assert_eq!(found(&paths, &[left, right]), found(&paths, &[body]));
        }

        #[test]
        fn scan_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let mut scan = JsonScan::new(&[path("model")].into());
            scan.push(&bytes);
            let _ = (scan.blobs(), scan.finish());
        }
    }
}
