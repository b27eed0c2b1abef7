//! A source file for the rules: its text, and for Rust its code without comments and literals.
//!
//! Prose may mention clocks and sleeping, code may not; so the rules need to tell them apart. A small lexer
//! is enough, because comments and literals only have to be skipped, not understood.

/// One file of the tree.
#[derive(Debug)]
pub(super) struct Source {
    /// Relative to the root of the checkout, with forward slashes.
    pub(super) path: String,
    /// All of it.
    pub(super) text: String,
    /// For Rust, the text with comments and literals blanked, line by line; otherwise empty.
    pub(super) code: String,
}

impl Source {
    /// Creates a file and extracts its code.
    pub(super) fn new(path: &str, text: impl Into<String>) -> Self {
        let mut source = Self { path: path.to_owned(), text: text.into(), code: String::new() };
        if source.is_rust() {
            source.code = code_of(&source.text);
        }
        source
    }

    /// Whether it holds Rust.
    pub(super) fn is_rust(&self) -> bool {
        self.has_extension("rs")
    }

    /// Whether the file name has this extension.
    pub(super) fn has_extension(&self, extension: &str) -> bool {
        self.name().rsplit_once('.').is_some_and(|(_, end)| end == extension)
    }

    /// The file name.
    pub(super) fn name(&self) -> &str {
        self.path.rsplit('/').next().unwrap_or(&self.path)
    }
}

/// The lines, counted from one, that contain `needle` as a whole word.
pub(super) fn lines_with(text: &str, needle: &str) -> Vec<usize> {
    let lines = text.lines().zip(1..);
    lines.filter(|(line, _)| holds(line, needle)).map(|(_, number)| number).collect()
}

/// Whether `text` contains `needle` as a whole word.
pub(super) fn holds(text: &str, needle: &str) -> bool {
    text.match_indices(needle).any(|(start, _)| {
        let (before, after) = (&text[..start], &text[start + needle.len()..]);
        let joins =
            |left: Option<char>, right: Option<char>| left.is_some_and(is_word) && right.is_some_and(is_word);
        !joins(before.chars().next_back(), needle.chars().next())
            && !joins(needle.chars().next_back(), after.chars().next())
    })
}

/// Whether `letter` may be part of an identifier.
pub(super) fn is_word(letter: char) -> bool {
    letter.is_alphanumeric() || letter == '_'
}

/// The text with comments and string and character literals replaced by blanks.
fn code_of(text: &str) -> String {
    let letters: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < letters.len() {
        let after_word = at > 0 && is_word(letters[at - 1]);
        let skipped = skipped(&letters[at..], after_word);
        let blanks = letters[at..at + skipped].iter().map(|letter| if *letter == '\n' { '\n' } else { ' ' });
        code.extend(blanks);
        at += skipped;
        if skipped == 0 {
            code.push(letters[at]);
            at += 1;
        }
    }
    code
}

/// The length of the comment or literal that begins here; zero for code.
fn skipped(rest: &[char], after_word: bool) -> usize {
    match rest {
        ['/', '/', ..] => rest.iter().position(|letter| *letter == '\n').unwrap_or(rest.len()),
        ['/', '*', ..] => block_comment(rest),
        ['"', ..] => quoted(rest, '"'),
        ['r', '"' | '#', ..] if !after_word => raw_string(rest, 1),
        ['b' | 'c', 'r', '"' | '#', ..] if !after_word => raw_string(rest, 2),
        // A quote around one letter is a character literal; otherwise it starts a lifetime.
        ['\'', '\\', ..] | ['\'', _, '\'', ..] => quoted(rest, '\''),
        _ => 0,
    }
}

fn block_comment(rest: &[char]) -> usize {
    let (mut depth, mut at) = (0_usize, 0);
    while at < rest.len() {
        match rest[at..] {
            ['/', '*', ..] => (depth, at) = (depth + 1, at + 2),
            ['*', '/', ..] => (depth, at) = (depth - 1, at + 2),
            _ => at += 1,
        }
        if depth == 0 {
            break;
        }
    }
    at
}

fn quoted(rest: &[char], quote: char) -> usize {
    let mut at = 1;
    while at < rest.len() && rest[at] != quote {
        at += if rest[at] == '\\' { 2 } else { 1 };
    }
    (at + 1).min(rest.len())
}

/// A raw string ends with as many hashes as it starts with; a raw identifier (`r#type`) has no quote and is
/// code.
fn raw_string(rest: &[char], prefix: usize) -> usize {
    let hashes = rest[prefix..].iter().take_while(|letter| **letter == '#').count();
    let open = prefix + hashes;
    if rest.get(open) != Some(&'"') {
        return 0;
    }
    let mut close = vec!['"'];
    close.resize(hashes + 1, '#');
    let inside = &rest[open + 1..];
    let length = inside.windows(close.len()).position(|window| window == close);
    length.map_or(rest.len(), |length| open + 1 + length + close.len())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words_of_code(text: &str) -> Vec<String> {
        code_of(text).split_whitespace().map(str::to_owned).collect()
    }

    #[test]
    fn comments_are_not_code() {
        assert_eq!(words_of_code("a // no\nb /* no /* no */ no */ c"), ["a", "b", "c"]);
    }

    #[test]
    fn literals_are_not_code() {
        assert_eq!(
            words_of_code(r##"a "no \" no" b r#"no " no"# c br"no\" d '"' e '\'' f"##),
            ["a", "b", "c", "d", "e", "f"]
        );
    }

    #[test]
    fn lifetimes_and_raw_identifiers_are_code() {
        assert_eq!(words_of_code("&'a str r#type 'static"), ["&'a", "str", "r#type", "'static"]);
    }

    #[test]
    fn unfinished_literal_ends_with_the_file() {
        assert_eq!(words_of_code("a \"no"), ["a"]);
        assert_eq!(words_of_code("a \"no\\"), ["a"]);
        assert_eq!(words_of_code("a r#\"no\""), ["a"]);
        assert_eq!(words_of_code("a /* no"), ["a"]);
    }

    #[test]
    fn line_numbers_survive_blanking() {
        let code = code_of("/* one\ntwo */ a\n\"four\nfive\" b");
        assert_eq!((lines_with(&code, "a"), lines_with(&code, "b")), (vec![2], vec![4]));
    }

    #[test]
    fn needles_match_whole_words_only() {
        assert!(holds("use rand::Rng;", "rand::"));
        assert!(!holds("use operand::Rng;", "rand::"));
        assert!(!holds("tokio_like()", "tokio"));
        assert!(holds("x.await?", ".await"));
    }
}
