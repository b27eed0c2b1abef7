//! Structured fields (RFC 9651), as far as `RateLimit` and `RateLimit-Policy` need them: lists of items with
//! parameters.
//!
//! As the standard requires, one error invalidates the whole field. Types that these headers do not use are
//! parsed and skipped.

use smallvec::SmallVec;

/// A value without its parameters.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Bare {
    /// A whole number of at most 15 digits.
    Integer(i64),
    /// A string or a token.
    Text(String),
    /// A decimal, a boolean, bytes, a date.
    Other,
}

/// One member of a list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Item {
    pub(super) value: Bare,
    parameters: SmallVec<[(String, Bare); 4]>,
}

impl Item {
    /// A parameter; the last of several with the same name.
    pub(super) fn get(&self, key: &str) -> Option<&Bare> {
        self.parameters.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value)
    }
}

/// Parses the members of a list, or of a dictionary of `key=value` members; a dictionary member becomes an
/// item without a value, with the key as a parameter.
pub(super) fn list(text: &str) -> Option<Vec<Item>> {
    let mut cursor = Cursor { rest: text };
    let mut items = Vec::new();
    cursor.skip(&[' ']);
    loop {
        items.push(cursor.member()?);
        cursor.skip(&[' ', '\t']);
        if cursor.rest.is_empty() {
            return Some(items);
        }
        cursor.eat(',')?;
        cursor.skip(&[' ', '\t']);
    }
}

struct Cursor<'a> {
    rest: &'a str,
}

impl<'a> Cursor<'a> {
    fn skip(&mut self, letters: &[char]) {
        self.rest = self.rest.trim_start_matches(letters);
    }

    fn eat(&mut self, letter: char) -> Option<()> {
        self.rest = self.rest.strip_prefix(letter)?;
        Some(())
    }

    /// The longest prefix whose characters satisfy `fits`.
    fn run(&mut self, fits: impl Fn(char) -> bool) -> &'a str {
        let end = self.rest.find(|letter| !fits(letter)).unwrap_or(self.rest.len());
        let (run, rest) = self.rest.split_at(end);
        self.rest = rest;
        run
    }

    fn member(&mut self) -> Option<Item> {
        let before = self.rest;
        let mut item = Item { value: Bare::Other, parameters: SmallVec::new() };
        // A dictionary member begins with a key and `=`; a token that looks like a key is not followed by
        // `=`.
        match self.key().map(str::to_owned) {
            Some(key) if self.eat('=').is_some() => item.parameters.push((key, self.bare()?)),
            _ => {
                self.rest = before;
                item.value = self.bare()?;
            }
        }
        while self.eat(';').is_some() {
            self.skip(&[' ']);
            let key = self.key()?.to_owned();
            let value = if self.eat('=').is_some() { self.bare()? } else { Bare::Other };
            item.parameters.push((key, value));
        }
        Some(item)
    }

    fn key(&mut self) -> Option<&'a str> {
        let starts = self.rest.starts_with(|letter: char| letter.is_ascii_lowercase() || letter == '*');
        let fits =
            |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || "_-.*".contains(letter);
        starts.then(|| self.run(fits))
    }

    fn bare(&mut self) -> Option<Bare> {
        match self.rest.chars().next()? {
            '"' => self.string(),
            '-' | '0'..='9' => self.number(),
            ':' => {
                self.eat(':')?;
                self.run(|letter| letter.is_ascii_alphanumeric() || "+/=".contains(letter));
                self.eat(':').map(|()| Bare::Other)
            }
            '?' => {
                self.eat('?')?;
                self.eat('0').or_else(|| self.eat('1')).map(|()| Bare::Other)
            }
            '@' => {
                self.eat('@')?;
                self.number().filter(|date| *date != Bare::Other).map(|_| Bare::Other)
            }
            letter if letter.is_ascii_alphabetic() || letter == '*' => {
                let fits =
                    |letter: char| letter.is_ascii_alphanumeric() || "!#$%&'*+-.^_`|~:/".contains(letter);
                Some(Bare::Text(self.run(fits).to_owned()))
            }
            _ => None,
        }
    }

    fn string(&mut self) -> Option<Bare> {
        self.eat('"')?;
        let mut text = String::new();
        let mut letters = self.rest.char_indices();
        while let Some((at, letter)) = letters.next() {
            match letter {
                '"' => {
                    self.rest = &self.rest[at + 1..];
                    return Some(Bare::Text(text));
                }
                '\\' => {
                    let (_, next) = letters.next().filter(|(_, next)| "\"\\".contains(*next))?;
                    text.push(next);
                }
                ' '..='~' => text.push(letter),
                _ => return None,
            }
        }
        None
    }

    fn number(&mut self) -> Option<Bare> {
        let sign = if self.eat('-').is_some() { -1 } else { 1 };
        let whole = self.run(|letter| letter.is_ascii_digit());
        if self.eat('.').is_some() {
            let fraction = self.run(|letter| letter.is_ascii_digit());
            let fits = (1..=12).contains(&whole.len()) && (1..=3).contains(&fraction.len());
            return fits.then_some(Bare::Other);
        }
        if !(1..=15).contains(&whole.len()) {
            return None;
        }
        whole.parse::<i64>().ok().map(|number| Bare::Integer(sign * number))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn text(text: &str) -> Bare {
        Bare::Text(text.to_owned())
    }

    #[test]
    fn a_list_of_items_with_parameters_is_read() {
        let items =
            list(r#""a\"b\\";r=50;t=30 ,	tok/en*;x;y=?1;z=1.5;b=:aGk=:;d=@17, 100;w=60;w=-70"#).unwrap();
        assert_eq!(items.len(), 3);
        assert_eq!(items[0].value, text("a\"b\\"));
        assert_eq!(items[0].get("r"), Some(&Bare::Integer(50)));
        assert_eq!(items[0].get("q"), None);
        assert_eq!(items[1].value, text("tok/en*"));
        assert!(["x", "y", "z", "b", "d"].iter().all(|key| items[1].get(key) == Some(&Bare::Other)));
        assert_eq!(items[2].value, Bare::Integer(100));
        assert_eq!(items[2].get("w"), Some(&Bare::Integer(-70)));
    }

    #[test]
    fn a_dictionary_is_read_as_keys_with_values() {
        let items = list("limit=100, remaining=50;x=1, reset=5").unwrap();
        let read: Vec<_> =
            ["limit", "remaining", "reset"].iter().zip(&items).map(|(key, item)| item.get(key)).collect();
        assert_eq!(read, [Some(&Bare::Integer(100)), Some(&Bare::Integer(50)), Some(&Bare::Integer(5))]);
    }

    #[test]
    fn one_error_invalidates_the_whole_field() {
        let table = [
            "",
            ",",
            "\"a\",",
            "\"a\"\"b\"",
            "\"a",
            "\"a\\n\"",
            "\"é\"",
            "\"a\";r=",
            "\"a\";R=5",
            "\"a\";=5",
            "\"a\";r=1234567890123456",
            "\"a\";r=--5",
            "\"a\";r=1.",
            "\"a\";r=1.2345",
            "\"a\" ;r=1",
            "\"a\";b=:é:",
            "\"a\";b=?2",
            "\"a\";d=@1.5",
            "(\"a\");r=1",
            "é",
        ];
        for text in table {
            assert_eq!(list(text), None, "{text}");
        }
    }

    proptest! {
        #[test]
        fn arbitrary_lists_do_not_panic(
            text in any::<String>(),
            near in r#"("[a\\"é]{0,4}"|[a-z*]{0,3}|[0-9.-]{0,18})(;[a-z]?=?[-0-9.?@:]{0,20}){0,3}[, ]{0,2}"[a-z]{0,4}"?"#,
        ) {
            let _ = list(&text);
            let _ = list(&near);
        }
    }
}
