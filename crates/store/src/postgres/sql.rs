//! Statements with qualified names.
//!
//! Each statement names its schema instead of relying on the search path: other programs may share the
//! connections through a pooler, and the server's statistics show which schema a statement is for.

/// The schema's name, plain and quoted.
#[derive(Debug, Clone)]
pub(super) struct Sql {
    schema: String,
    quoted: String,
    /// The call of the function `steps`.
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

    /// Replaces `@` by the schema. None of the statements has another `@`.
    pub(super) fn text(&self, statement: &str) -> String {
        statement.replace('@', &self.quoted)
    }

    /// The channel of change notifications.
    pub(super) fn channel(&self) -> String {
        format!("tidegate_{}", self.schema)
    }

    pub(super) fn listen(&self) -> String {
        format!("LISTEN \"{}\"", self.channel().replace('"', "\"\""))
    }
}

/// The number of parameters of the function `steps`.
pub(super) const PARAMETERS: usize = 35;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn schema_is_quoted_in_statements() {
        let sql = Sql::new("a\"b");
        assert_eq!(
            sql.text("SELECT @.now(NULL) FROM @.clock"),
            "SELECT \"a\"\"b\".now(NULL) FROM \"a\"\"b\".clock"
        );
        assert_eq!(sql.listen(), "LISTEN \"tidegate_a\"\"b\"");
        assert!(sql.steps.ends_with("$34, $35)"));
    }
}
