//! Statements that name the schema they work in.
//!
//! A schema is named in each statement rather than by a connection's search path: connections may be pooled by others too, and a
//! server's statistics then tell whose statements they are.

/// The schema's name, in and without quotes.
#[derive(Debug, Clone)]
pub(super) struct Sql {
    schema: String,
    quoted: String,
    /// The one that every draw calls.
    pub(super) steps: String,
}

impl Sql {
    pub(super) fn new(schema: &str) -> Self {
        let quoted = format!("\"{}\"", schema.replace('"', "\"\""));
        let places: Vec<_> = (1..=PARAMETERS).map(|place| format!("${place}")).collect();
        let steps = format!("SELECT * FROM {quoted}.steps({})", places.join(", "));
        Self { schema: schema.to_owned(), quoted, steps }
    }

    pub(super) fn schema(&self) -> &str {
        &self.schema
    }

    /// A statement with `@` for the schema. None of ours has one for anything else.
    pub(super) fn text(&self, statement: &str) -> String {
        statement.replace('@', &self.quoted)
    }

    /// The channel that changes are announced on.
    pub(super) fn channel(&self) -> String {
        format!("tidegate_{}", self.schema)
    }

    pub(super) fn listen(&self) -> String {
        format!("LISTEN \"{}\"", self.channel().replace('"', "\"\""))
    }
}

/// Parameters of the function that every draw calls.
pub(super) const PARAMETERS: usize = 35;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_schema_is_quoted_wherever_it_stands() {
        let sql = Sql::new("a\"b");
        assert_eq!(
            sql.text("SELECT @.now(NULL) FROM @.clock"),
            "SELECT \"a\"\"b\".now(NULL) FROM \"a\"\"b\".clock"
        );
        assert_eq!(sql.listen(), "LISTEN \"tidegate_a\"\"b\"");
        assert!(sql.steps.ends_with("$34, $35)"));
    }
}
