//! Reads what the program tells other programs.

pub(crate) type Json = serde_json::Value;

/// One document for each line.
pub(crate) fn lines(text: &str) -> Vec<Json> {
    text.lines().map(|line| serde_json::from_str(line).expect("a document on each line")).collect()
}
