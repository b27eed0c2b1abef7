//! Punycode (RFC 3492): encodes a Unicode label as ASCII letters, digits and hyphens.

const BASE: u32 = 36;
const T_MIN: u32 = 1;
const T_MAX: u32 = 26;
const SKEW: u32 = 38;
const DAMP: u32 = 700;
const BIAS: u32 = 72;
const FIRST: u32 = 128;

/// Encodes a label, without the `xn--` prefix. `None` on overflow, which labels of up to 63 bytes never
/// cause.
pub(super) fn encode(label: &str) -> Option<String> {
    let mut output: String = label.chars().filter(char::is_ascii).collect();
    let basic = u32::try_from(output.len()).ok()?;
    let all = u32::try_from(label.chars().count()).ok()?;
    if basic > 0 {
        output.push('-');
    }
    let (mut code, mut delta, mut bias, mut done) = (FIRST, 0_u32, BIAS, basic);
    while done < all {
        let next = label.chars().map(u32::from).filter(|letter| *letter >= code).min()?;
        delta = delta.checked_add((next - code).checked_mul(done + 1)?)?;
        code = next;
        for letter in label.chars().map(u32::from) {
            if letter < code {
                delta = delta.checked_add(1)?;
            }
            if letter == code {
                push_number(&mut output, delta, bias);
                bias = adapt(delta, done + 1, done == basic);
                delta = 0;
                done += 1;
            }
        }
        delta = delta.checked_add(1)?;
        code += 1;
    }
    Some(output)
}

/// Decodes a lower-case label given without its `xn--` prefix; `None` if it is not punycode.
pub(super) fn decode(text: &str) -> Option<String> {
    let (basic, digits) = text.rsplit_once('-').unwrap_or(("", text));
    let mut letters: Vec<char> = basic.chars().collect();
    let (mut code, mut at, mut bias) = (FIRST, 0_u32, BIAS);
    let mut digits = digits.bytes().peekable();
    while digits.peek().is_some() {
        let before = at;
        let mut weight = 1_u32;
        for place in (BASE..).step_by(36) {
            let digit = match digits.next()? {
                byte @ b'a'..=b'z' => u32::from(byte - b'a'),
                byte @ b'0'..=b'9' => u32::from(byte - b'0') + 26,
                _ => return None,
            };
            at = at.checked_add(digit.checked_mul(weight)?)?;
            let threshold = threshold(place, bias);
            if digit < threshold {
                break;
            }
            weight = weight.checked_mul(BASE - threshold)?;
        }
        let count = u32::try_from(letters.len()).ok()?.checked_add(1)?;
        bias = adapt(at - before, count, before == 0);
        code = code.checked_add(at / count)?;
        at %= count;
        letters.insert(usize::try_from(at).ok()?, char::from_u32(code)?);
        at += 1;
    }
    Some(letters.into_iter().collect())
}

/// Appends a generalized variable-length integer (RFC 3492, section 3.3).
fn push_number(output: &mut String, number: u32, bias: u32) {
    let mut rest = number;
    for place in (BASE..).step_by(36) {
        let threshold = threshold(place, bias);
        if rest < threshold {
            break;
        }
        output.push(digit(threshold + (rest - threshold) % (BASE - threshold)));
        rest = (rest - threshold) / (BASE - threshold);
    }
    output.push(digit(rest));
}

fn digit(number: u32) -> char {
    char::from_digit((number + 10) % BASE, BASE).unwrap_or('0')
}

fn threshold(place: u32, bias: u32) -> u32 {
    place.saturating_sub(bias).clamp(T_MIN, T_MAX)
}

fn adapt(delta: u32, count: u32, is_first: bool) -> u32 {
    let mut delta = if is_first { delta / DAMP } else { delta / 2 };
    delta += delta / count;
    let mut steps = 0;
    while delta > (BASE - T_MIN) * T_MAX / 2 {
        delta /= BASE - T_MIN;
        steps += BASE;
    }
    steps + (BASE - T_MIN + 1) * delta / (delta + SKEW)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn rfc_samples_encode_and_decode() {
        let table = [
            ("bücher", "bcher-kva"),
            ("münchen", "mnchen-3ya"),
            ("faß", "fa-hia"),
            ("ü", "tda"),
            ("点看", "3pxu8k"),
            ("他们为什么不说中文", "ihqwcrb4cv8a8dqg056pqjye"),
            ("почемужеонинеговорятпорусски", "b1abfaaepdrnnbgefbadotcwatmq2g4l"),
            ("3年b組金八先生", "3b-ww4c5e180e575a65lsy2b"),
            ("ひとつ屋根の下2", "2-u9tlzr9756bt3uc0v"),
            ("パフィーdeルンバ", "de-jg4avhby1noc0d"),
            ("यहलोगहिन्दीक्योंनहींबोलसकतेहैं", "i1baa7eci9glrd9b2ae1bj0hfcgg6iyaf8o0a1dig0cd"),
            ("למההםפשוטלאמדבריםעברית", "4dbcagdahymbxekheh6e0a7fei0b"),
            ("💩", "ls8h"),
        ];
        for (letters, code) in table {
            assert_eq!(encode(letters).as_deref(), Some(code), "{letters}");
            assert_eq!(decode(code).as_deref(), Some(letters), "{code}");
        }
    }

    #[test]
    fn malformed_punycode_does_not_decode() {
        for code in ["999999999", "a-é", "tda!", "99", "zzzzzzzzzzzzzzzzzzzz"] {
            assert_eq!(decode(code), None, "{code}");
        }
    }

    proptest! {
        #[test]
        fn labels_round_trip(label in "[a-zà-öא-ת一-龥😀-😎]{1,40}") {
            prop_assert_eq!(decode(&encode(&label).expect("short")), Some(label));
        }

        #[test]
        fn arbitrary_text_does_not_panic(text in any::<String>(), near in "[a-z0-9-]{0,80}") {
            let _ = (encode(&text), decode(&text), decode(&near));
        }
    }
}
