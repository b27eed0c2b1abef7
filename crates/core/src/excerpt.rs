//! Text from outside as it may stand in a message: on one line, without control characters, and not long.

/// Characters of a text that a message repeats.
pub const EXCERPT_MAX: usize = 80;

/// The first 80 characters of a text, escaped, with `…` if there are more.
///
/// Escaped are control characters, quotes, and characters that are invisible or change the direction of the
/// text.
///
/// ```
/// use tidegate_core::excerpt::excerpt;
///
/// assert_eq!(excerpt("two\nlines"), "two\\nlines");
/// assert_eq!(excerpt(&"a".repeat(81)), "a".repeat(80) + "…");
/// ```
pub fn excerpt(text: &str) -> String {
    excerpt_of(text, EXCERPT_MAX)
}

/// The first `max` characters of a text, escaped as by [`excerpt`].
pub fn excerpt_of(text: &str, max: usize) -> String {
    let mut letters = text.chars();
    let mut excerpt: String = letters.by_ref().take(max).flat_map(escape).collect();
    if letters.next().is_some() {
        excerpt.push('…');
    }
    excerpt
}

/// A whole text on one line: what has no width or moves the cursor is escaped, everything else is kept.
pub fn one_line(text: &str) -> String {
    text.chars()
        .flat_map(|letter| Escaped::new(letter, letter.is_control() || is_invisible(letter)))
        .collect()
}

fn escape(letter: char) -> impl Iterator<Item = char> {
    let is_quoting = matches!(letter, '"' | '\'' | '\\');
    Escaped::new(letter, letter.is_control() || is_quoting || is_invisible(letter))
}

/// A character as itself, or as its escape.
enum Escaped {
    Plain(Option<char>),
    Escape(std::char::EscapeDefault),
}

impl Escaped {
    fn new(letter: char, is_escaped: bool) -> Self {
        if is_escaped { Self::Escape(letter.escape_default()) } else { Self::Plain(Some(letter)) }
    }
}

impl Iterator for Escaped {
    type Item = char;

    fn next(&mut self) -> Option<char> {
        match self {
            Self::Plain(letter) => letter.take(),
            Self::Escape(escape) => escape.next(),
        }
    }
}

/// Characters without width, line separators, and marks that change the direction of the text.
pub const fn is_invisible(letter: char) -> bool {
    matches!(letter, '\u{61c}' | '\u{200b}' | '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{2069}' | '\u{feff}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excerpt_escapes_and_cuts() {
        let table = [
            ("plain", "plain"),
            ("a\tb\"c\\", "a\\tb\\\"c\\\\"),
            ("bücher…", "bücher…"),
            ("\u{202e}gnp", "\\u{202e}gnp"),
            ("\u{1b}[31m", "\\u{1b}[31m"),
        ];
        for (text, wanted) in table {
            assert_eq!(excerpt(text), wanted);
        }
        assert_eq!(excerpt(&"é".repeat(80)), "é".repeat(80));
        assert_eq!(excerpt_of("abc", 2), "ab…");
        assert_eq!(one_line("say \"hi\"\n\u{200b}"), "say \"hi\"\\n\\u{200b}");
    }
}
