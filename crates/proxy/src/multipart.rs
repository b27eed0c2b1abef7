//! Finds the model in a form (`multipart/form-data`), as calls with audio or images have it.

use http::header::{CONTENT_TYPE, HeaderMap};

/// A longer model is none.
const MODEL_MAX: usize = 256;
/// Parts that are looked at.
const PARTS_MAX: usize = 64;

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

/// The values of the form's field `model` in the beginning of its body.
pub(crate) fn models<'a>(body: &'a [u8], boundary: &str) -> impl Iterator<Item = &'a str> {
    let delimiter = format!("--{boundary}");
    parts(body, delimiter).take(PARTS_MAX).filter_map(|part| {
        let head = find(part, b"\r\n\r\n")?;
        let (head, value) = (str::from_utf8(&part[..head]).ok()?, &part[head + 4..]);
        let value = value.strip_suffix(b"\r\n").unwrap_or(value);
        (is_model(head) && value.len() <= MODEL_MAX).then(|| str::from_utf8(value).ok())?
    })
}

/// The parts between delimiters that are followed by another one.
fn parts(body: &[u8], delimiter: String) -> impl Iterator<Item = &[u8]> {
    let mut rest = find(body, delimiter.as_bytes()).map(|at| &body[at + delimiter.len()..]);
    std::iter::from_fn(move || {
        let current = rest?;
        let end = find(current, delimiter.as_bytes());
        rest = end.map(|end| &current[end + delimiter.len()..]);
        end.map(|end| &current[..end])
    })
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

    fn models_of(body: &str) -> Vec<&str> {
        models(body.as_bytes(), "b-1").collect()
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
        assert_eq!(models_of(&format!("{file}{model}{end}")), ["gpt-4o-transcribe"]);
        assert_eq!(models_of(&format!("{model}{file}{end}")), ["gpt-4o-transcribe"]);
        assert_eq!(models_of(&format!("{model}{model}{end}")).len(), 2);
        assert!(models_of(&format!("{file}{end}")).is_empty());
        assert!(models_of(model).is_empty(), "it may be cut off");
        let long = format!(
            "--b-1\r\ncontent-disposition: form-data; name=\"model\"\r\n\r\n{}\r\n{end}",
            "x".repeat(257)
        );
        assert!(models_of(&long).is_empty());
    }

    proptest! {
        #[test]
        fn any_body_is_read(body in "(--b|\r\n|name=model|:|;|x){0,40}") {
            let _ = models(body.as_bytes(), "b").count();
        }
    }
}
