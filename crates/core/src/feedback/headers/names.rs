//! Maps header names to a profile, a dimension and a part.

use super::{Dimension, Profile};

/// The longest known name; a label is a part of it.
const NAME_MAX: usize = 96;

/// The meaning of a header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Field {
    RetryAfter,
    RetryAfterMs,
    AmzRetryAfter,
    /// One number of one dimension.
    Part {
        profile: Profile,
        dimension: Dimension,
        label: Option<String>,
        part: Part,
    },
    /// `RateLimit`.
    RateLimit,
    /// `RateLimit-Policy`.
    RateLimitPolicy,
    /// A header that only Azure sends.
    Azure,
}

/// The numbers of a dimension. `ResetAfter` is a reset that is always a duration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Limit,
    Remaining,
    Reset,
    ResetAfter,
}

/// The meaning of the header `name`; `None` if it is unknown.
pub(super) fn field(name: &[u8]) -> Option<Field> {
    // On the stack, because this runs for every header of every response.
    let mut lower = [0; NAME_MAX];
    let name = name.trim_ascii();
    let lower = lower.get_mut(..name.len())?;
    lower.copy_from_slice(name);
    lower.make_ascii_lowercase();
    let name = std::str::from_utf8(lower).ok()?;
    let field = match name {
        "retry-after" => Field::RetryAfter,
        "retry-after-ms" => Field::RetryAfterMs,
        "x-amz-retry-after" => Field::AmzRetryAfter,
        "ratelimit" => Field::RateLimit,
        "ratelimit-policy" => Field::RateLimitPolicy,
        "apim-request-id" | "x-ms-region" => Field::Azure,
        name => return numbered(name),
    };
    Some(field)
}

/// The meaning of a header with one number.
fn numbered(name: &str) -> Option<Field> {
    if let Some(rest) = name.strip_prefix("anthropic-ratelimit-") {
        let (which, part) = rest.rsplit_once('-')?;
        return part_of(Profile::Anthropic, which, part);
    }
    if let Some(part) = name.strip_prefix("ratelimit-") {
        return part_of(Profile::IetfNumbers, "", part);
    }
    let rest = name.strip_prefix("x-ratelimit-").or_else(|| name.strip_prefix("x-rate-limit-"))?;
    if rest == "reset-after" {
        return part_of(Profile::Common, "", rest);
    }
    let (part, which) = rest.split_once('-').unwrap_or((rest, ""));
    let is_open_ai = name.starts_with("x-ratelimit-") && dimension(which).is_some() && !which.is_empty();
    part_of(if is_open_ai { Profile::OpenAi } else { Profile::Common }, which, part)
}

fn part_of(profile: Profile, which: &str, part: &str) -> Option<Field> {
    let part = match part {
        "limit" => Part::Limit,
        "remaining" => Part::Remaining,
        "reset" => Part::Reset,
        "reset-after" => Part::ResetAfter,
        _ => return None,
    };
    let (dimension, label) = match dimension(which) {
        Some(dimension) => (dimension, None),
        None => (Dimension::Other, Some(which.to_owned())),
    };
    Some(Field::Part { profile, dimension, label, part })
}

/// The dimension with this name; an empty name means requests.
pub(super) fn dimension(name: &str) -> Option<Dimension> {
    match name {
        "" | "requests" => Some(Dimension::Requests),
        "tokens" => Some(Dimension::Tokens),
        "input-tokens" => Some(Dimension::InputTokens),
        "output-tokens" => Some(Dimension::OutputTokens),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_map_to_fields_in_any_case() {
        use Dimension::{InputTokens, Other, OutputTokens, Requests, Tokens};
        use Profile::{Anthropic, Common, IetfNumbers, OpenAi};
        let table = [
            ("x-ratelimit-limit-requests", OpenAi, Requests, None, Part::Limit),
            ("X-RateLimit-Remaining-Tokens", OpenAi, Tokens, None, Part::Remaining),
            ("x-ratelimit-reset-input-tokens", OpenAi, InputTokens, None, Part::Reset),
            ("anthropic-ratelimit-requests-limit", Anthropic, Requests, None, Part::Limit),
            ("Anthropic-RateLimit-Input-Tokens-Remaining", Anthropic, InputTokens, None, Part::Remaining),
            ("anthropic-ratelimit-output-tokens-reset", Anthropic, OutputTokens, None, Part::Reset),
            ("anthropic-ratelimit-unified-5h-reset", Anthropic, Other, Some("unified-5h"), Part::Reset),
            ("RateLimit-Limit", IetfNumbers, Requests, None, Part::Limit),
            ("X-RateLimit-Limit", Common, Requests, None, Part::Limit),
            ("X-Rate-Limit-Reset", Common, Requests, None, Part::Reset),
            ("x-ratelimit-reset-after", Common, Requests, None, Part::ResetAfter),
            ("x-ratelimit-remaining-minute", Common, Other, Some("minute"), Part::Remaining),
        ];
        for (name, profile, dimension, label, part) in table {
            let expected = Field::Part { profile, dimension, label: label.map(str::to_owned), part };
            assert_eq!(field(name.as_bytes()), Some(expected), "{name}");
        }
        assert_eq!(field(b" Retry-After\t"), Some(Field::RetryAfter));
        assert_eq!(field(b"RETRY-AFTER-MS"), Some(Field::RetryAfterMs));
        assert_eq!(field(b"x-amz-retry-after"), Some(Field::AmzRetryAfter));
        assert_eq!(field(b"RateLimit"), Some(Field::RateLimit));
        assert_eq!(field(b"ratelimit-policy"), Some(Field::RateLimitPolicy));
        assert_eq!(field(b"apim-request-id"), Some(Field::Azure));
    }

    #[test]
    fn unknown_headers_have_no_field() {
        let long = [b'x'; 200];
        let table: [&[u8]; 10] = [
            b"",
            b"date",
            b"x-ratelimit",
            b"x-ratelimit-",
            b"x-ratelimit-used",
            b"x-ratelimit-resource",
            b"anthropic-ratelimit-limit",
            b"ratelimit-foo",
            b"retry-after\xff",
            &long,
        ];
        for name in table {
            assert_eq!(field(name), None, "{name:?}");
        }
    }
}
