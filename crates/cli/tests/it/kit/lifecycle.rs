//! The lifecycle of a store from its first check to an upgrade, the same on every engine.

use super::{Fixture, Json, Run, codec};

/// A store that does not exist yet.
pub(crate) struct Lifecycle {
    pub(crate) fixture: Fixture,
    pub(crate) url: String,
    /// The version of this program's schema.
    pub(crate) wanted: u64,
    /// What happens to an older store when a verb uses it.
    pub(crate) older: Older,
}

/// What happens to an older store when it is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Older {
    Upgraded,
    Refused,
}

impl Lifecycle {
    pub(crate) fn run(&self, line: &str) -> Run {
        let mut words: Vec<&str> = line.split_whitespace().collect();
        words.splice(0..0, ["--store", &self.url]);
        self.fixture.run_words(&words)
    }

    /// The exit code and the JSON output.
    pub(crate) fn json(&self, line: &str) -> (i32, Json) {
        let run = self.run(&format!("--json {line}"));
        assert_eq!(run.stderr, "", "{line}");
        (run.code, codec::parse(&run.stdout))
    }

    fn ok(&self, line: &str) -> String {
        let run = self.run(line);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{line}: {run:?}");
        run.stdout
    }

    fn refused(&self, line: &str, sentence: &str) {
        let run = self.run(line);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{line}: {run:?}");
        assert!(run.stderr.contains(sentence), "{line}: {}", run.stderr);
    }

    /// Runs the whole lifecycle. `make_older` downgrades the store to the first version.
    pub(crate) fn walk(&self, make_older: impl Fn()) {
        self.is_made();
        self.is_used();
        let (older, advice) = (
            format!("has schema version 1, older than {}: run `tidegate store upgrade`", self.wanted),
            "older than this program: run `tidegate store upgrade`",
        );
        make_older();
        let (code, checked) = self.json("store check");
        assert_eq!((code, &checked["state"], &checked["schema"]["found"]), (5, &"older".into(), &1.into()));
        assert!(self.run("store check").stdout.contains(advice));
        self.refused("store init", &older);
        match self.older {
            Older::Refused => self.refused("balance acme gpt", &older),
            Older::Upgraded => {
                assert!(self.ok("balance acme gpt").contains("57"));
                make_older();
            }
        }
        let (code, upgraded) = self.json("store upgrade");
        let part = &upgraded["parts"][0];
        assert_eq!((code, &part["from"], &part["to"]), (0, &1.into(), &self.wanted.into()));
        let nothing = self.ok("store upgrade");
        let last = nothing.lines().last().expect("a line");
        assert!(last.starts_with("nothing    to do: the "), "{nothing}");
        assert!(last.ends_with(&format!("has schema version {}", self.wanted)), "{nothing}");
        assert!(self.ok("balance acme gpt").contains("57"), "its data has survived");
    }

    pub(crate) fn is_made(&self) {
        let (code, checked) = self.json("store check");
        assert_eq!((code, &checked["state"]), (5, &"missing".into()));
        assert_eq!(
            (&checked["schema"]["found"], &checked["schema"]["wanted"]),
            (&Json::Null, &self.wanted.into())
        );
        let text = self.run("store check").stdout;
        assert!(text.ends_with("missing: run `tidegate store init`\n"), "{text}");
        self.refused("store upgrade", "does not exist: run `tidegate store init`");
        for is_new in [true, false] {
            let (code, made) = self.json("store init");
            assert_eq!((code, &made["schema"]), (0, &self.wanted.into()));
            let parts = made["parts"].as_array().expect("parts");
            assert!(!parts.is_empty() && parts.iter().all(|part| part["is_new"] == is_new), "{made}");
        }
        assert!(self.ok("store init").contains("\nexists     the namespace `"));
        let (code, checked) = self.json("store check");
        assert_eq!(&checked["state"], "ready");
        // The test servers are not durable, which a check reports.
        assert_eq!(code, if checked["dangers"] == 0 { 0 } else { 5 }, "{checked}");
    }

    pub(crate) fn is_used(&self) {
        self.ok("limits set system rpm:60/day");
        self.ok("entity create acme");
        self.ok("acquire acme gpt rpm=3");
        let (_, checked) = self.json("store check");
        let (code, listed) = self.json("store list");
        assert_eq!((code, &listed["schema"]), (0, &self.wanted.into()));
        if listed["has_more"] == true {
            return;
        }
        let spaces = listed["namespaces"].as_array().expect("namespaces");
        let schema = self.url.split(['?', '&']).find_map(|option| option.strip_prefix("schema="));
        let is_ours = |space: &&Json| {
            space["namespace"] == checked["namespace"]
                && schema.is_none_or(|schema| space["within"] == schema)
        };
        let ours = spaces.iter().find(is_ours).expect("it is listed");
        let counts = ["schema", "changes", "entities", "policies"].map(|field| ours[field].as_u64());
        assert_eq!(counts, [Some(self.wanted), Some(2), Some(1), Some(1)]);
    }
}
