//! Canonical form of a host: a name, an IPv4 address, or an IPv6 address in brackets.

use core::net::{Ipv4Addr, Ipv6Addr};

use super::{HOST_MAX, InvalidAuthority, LABEL_MAX, punycode};

/// Lower-case non-ASCII letters with a single encoding that combine with no other, as inclusive ranges.
///
/// These are the letters that NFC and the UTS 46 mapping leave unchanged. Characters between two ranges are
/// mapped, combine with their neighbours, or are not letters.
const LETTERS: [(char, char); 47] = [
    // Latin, without the ligatures and digraphs that come apart, and the long s.
    ('ß', 'ö'),
    ('ø', 'ı'),
    ('ĵ', 'ľ'),
    ('ł', 'ň'),
    ('ŋ', 'ž'),
    ('ƀ', 'ǃ'),
    ('ǎ', 'ǰ'),
    ('ǵ', 'ɏ'),
    ('ḁ', 'ẙ'),
    ('ẜ', 'ỿ'),
    // Greek, without variants of symbols.
    ('ΐ', 'ΐ'),
    ('ά', 'ώ'),
    // Cyrillic.
    ('а', 'ҁ'),
    ('ҋ', 'ԯ'),
    // Armenian, without the ligature.
    ('ա', 'ֆ'),
    // Hebrew.
    ('א', 'ת'),
    // Arabic with its digits, without marks and without letters that come apart.
    ('ؠ', 'ؿ'),
    ('ف', 'ي'),
    ('٠', '٩'),
    ('ٮ', 'ٯ'),
    ('ٱ', 'ٴ'),
    ('ٹ', 'ۓ'),
    ('ە', 'ە'),
    ('ۮ', 'ۼ'),
    // Devanagari with its signs, without the dot that combines.
    ('\u{900}', 'ह'),
    ('ऽ', '\u{94d}'),
    ('ॐ', 'ॐ'),
    ('ॠ', '\u{963}'),
    ('०', '९'),
    ('ॲ', 'ॿ'),
    // Georgian.
    ('ა', 'ჺ'),
    ('ჽ', 'ჿ'),
    // Han: the marks of iteration and closing, zero.
    ('々', '〇'),
    // Kana, without the marks that combine.
    ('ぁ', 'ゖ'),
    ('ゝ', 'ゞ'),
    ('ァ', 'ヺ'),
    ('ー', 'ヾ'),
    ('ㇰ', 'ㇿ'),
    // Han.
    ('㐀', '䶿'),
    ('一', '鿿'),
    // Hangul, in syllables.
    ('가', '힣'),
    // Han again, in the planes above.
    ('\u{20000}', '\u{2a6df}'),
    ('\u{2a700}', '\u{2b739}'),
    ('\u{2b740}', '\u{2b81d}'),
    ('\u{2b820}', '\u{2cea1}'),
    ('\u{2ceb0}', '\u{2ebe0}'),
    ('\u{30000}', '\u{3134a}'),
];

/// The full stop and its equivalents in other scripts (UTS 46).
const DOTS: [char; 4] = ['.', '\u{3002}', '\u{ff0e}', '\u{ff61}'];

/// Returns the host in canonical form.
pub(super) fn canonical(text: &str) -> Result<String, InvalidAuthority> {
    if text.contains('%') {
        return Err(InvalidAuthority::Percent);
    }
    if text.contains(['[', ']']) {
        let inner = text.strip_prefix('[').and_then(|text| text.strip_suffix(']'));
        let address: Option<Ipv6Addr> = inner.and_then(|text| text.parse().ok());
        return address.map(|address| format!("[{address}]")).ok_or(InvalidAuthority::Ipv6);
    }
    let text = text.strip_suffix(DOTS).unwrap_or(text);
    if text.is_empty() {
        return Err(InvalidAuthority::Empty);
    }
    let mut host = String::with_capacity(text.len());
    for (part, label) in text.split(DOTS).zip(1..) {
        if label > 1 {
            host.push('.');
        }
        push_label(&mut host, part, label)?;
    }
    if host.len() > HOST_MAX {
        return Err(InvalidAuthority::Long { part: "the host", bytes: host.len(), max: HOST_MAX });
    }
    let last = host.rsplit('.').next().unwrap_or_default();
    if is_number(last) && host.parse::<Ipv4Addr>().is_err() {
        return Err(InvalidAuthority::Ipv4);
    }
    Ok(host)
}

/// Whether `text` is an unbracketed IPv6 address, whose last group is ambiguous with a port.
pub(super) fn is_bare_ipv6(text: &str) -> bool {
    text.parse::<Ipv6Addr>().is_ok()
}

/// Appends one label in canonical form.
fn push_label(host: &mut String, text: &str, label: usize) -> Result<(), InvalidAuthority> {
    // Encoding never makes a label shorter than its character count.
    if !text.is_ascii() && text.chars().count() > LABEL_MAX {
        return Err(InvalidAuthority::Long {
            part: "a label of the host",
            bytes: text.len(),
            max: LABEL_MAX,
        });
    }
    // Lower-case first: the kelvin sign (U+212A) becomes an ASCII `k`.
    let lower: String = text.chars().flat_map(char::to_lowercase).collect();
    let ascii = if lower.is_ascii() {
        if lower.strip_prefix("xn--").is_some_and(|code| !is_canonical_punycode(code)) {
            return Err(InvalidAuthority::Punycode { label });
        }
        lower
    } else {
        check_letters(&lower, label)?;
        let code = punycode::encode(&lower).ok_or(InvalidAuthority::Punycode { label })?;
        format!("xn--{code}")
    };
    if ascii.is_empty() {
        return Err(InvalidAuthority::EmptyLabel { label });
    }
    if !ascii.chars().all(is_host_letter) {
        return Err(InvalidAuthority::Letter { label });
    }
    if ascii.len() > LABEL_MAX {
        return Err(InvalidAuthority::Long {
            part: "a label of the host",
            bytes: ascii.len(),
            max: LABEL_MAX,
        });
    }
    if ascii.starts_with('-') || ascii.ends_with('-') {
        return Err(InvalidAuthority::Hyphen { label });
    }
    host.push_str(&ascii);
    Ok(())
}

/// Checks a lower-case label before it is encoded as punycode.
fn check_letters(lower: &str, label: usize) -> Result<(), InvalidAuthority> {
    let is_known = |letter: char| LETTERS.iter().any(|(first, last)| (*first..=*last).contains(&letter));
    for letter in lower.chars() {
        if letter.is_ascii() && !is_host_letter(letter) || letter.is_control() || letter.is_whitespace() {
            return Err(InvalidAuthority::Letter { label });
        }
        if !letter.is_ascii() && !is_known(letter) {
            return Err(InvalidAuthority::Script { label });
        }
    }
    // After encoding, a hyphen at either end is no longer at an end, and a leading `xn--` would be mistaken
    // for a prefix.
    match lower {
        _ if lower.starts_with('-') || lower.ends_with('-') => Err(InvalidAuthority::Hyphen { label }),
        _ if lower.starts_with("xn--") => Err(InvalidAuthority::Punycode { label }),
        _ => Ok(()),
    }
}

/// The standards do not allow underscores in host names, but many resolvable names contain them.
fn is_host_letter(letter: char) -> bool {
    letter.is_ascii_lowercase() || letter.is_ascii_digit() || letter == '-' || letter == '_'
}

/// Whether encoding the decoded letters yields `code` again, so that each label has one spelling.
fn is_canonical_punycode(code: &str) -> bool {
    let Some(letters) = punycode::decode(code) else { return false };
    let is_lower = |letter: char| letter.to_lowercase().eq([letter]);
    let is_letter = |letter: char| is_lower(letter) && !letter.is_control() && !letter.is_whitespace();
    !letters.is_ascii()
        && letters.chars().all(is_letter)
        && punycode::encode(&letters).as_deref() == Some(code)
}

/// Whether some parsers read `label` as part of an IPv4 address: digits, or `0x` and hexadecimal digits.
fn is_number(label: &str) -> bool {
    let is_digits = label.bytes().all(|byte| byte.is_ascii_digit());
    is_digits
        || label.strip_prefix("0x").is_some_and(|rest| rest.bytes().all(|byte| byte.is_ascii_hexdigit()))
}
