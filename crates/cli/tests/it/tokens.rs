//! `tidegate token`: creating, listing and revoking tokens.

use std::fs;

use crate::kit::{Fixture, codec};

#[test]
fn token_is_shown_once_and_its_secret_is_not_stored() {
    for fixture in Fixture::both() {
        let shown = fixture.ok("token create ci_7 --scopes acquire,read --expires 90d");
        let (token, rest) = shown.split_once('\n').unwrap();
        assert_eq!(rest, "This is the token. It is shown once: keep it safe.\n");
        let secret = token.strip_prefix("tg_ci_7_").unwrap();
        assert!(secret.len() == 64 && secret.bytes().all(|digit| digit.is_ascii_hexdigit()), "{token}");
        let other = fixture.json("token create other --scopes admin");
        assert_eq!(codec::fields(&other), ["secret", "token", "version"]);
        assert!(other["secret"].as_str().unwrap().starts_with("tg_other_"));

        let everything = ["token list", "--json token list", "audit list", "--json audit list"]
            .map(|line| fixture.ok(line));
        let mut bytes = everything.concat().into_bytes();
        for name in ["limits.db", "limits.db-wal"] {
            bytes.extend(fs::read(fixture.path(name)).unwrap_or_default());
        }
        let holds = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(!holds(secret) && holds("ci_7"));
    }
}

#[test]
fn tokens_are_listed_with_state_and_stay_revoked() {
    let fixture = Fixture::new();
    fixture.ok("token create a --scopes acquire");
    fixture.run_words(&[
        "token",
        "create",
        "b",
        "--scopes",
        "read,admin",
        "--name",
        "the build",
        "--expires",
        "2999-01-01",
    ]);
    assert_eq!(fixture.ok("token revoke a"), "a revoked at version 3\n");
    assert_eq!(
        fixture.json("token revoke a"),
        codec::parse(r#"{ "id": "a", "revoked": true, "version": 3 }"#),
        "revoking it again has no effect"
    );
    let table = fixture.ok("token list");
    let rows: Vec<_> = table.lines().collect();
    assert!(
        rows[0].starts_with("ID  NAME       SCOPES      STATE    EXPIRES               CREATED"),
        "{table}"
    );
    assert!(rows[1].starts_with("a   a          acquire     revoked  never "), "{table}");
    assert!(rows[2].starts_with("b   the build  read,admin  good     2999-01-01T00:00:00Z "), "{table}");
    let json = fixture.json("token list --max 1");
    let fields = [
        "created_at",
        "created_by",
        "entity",
        "expires_at",
        "id",
        "name",
        "namespace",
        "revoked_at",
        "scopes",
        "version",
    ];
    assert_eq!(codec::fields(&json["tokens"][0]), fields);
    assert_eq!(json["tokens"][0]["created_by"], "ops");
    assert_eq!(fixture.json("audit list token a")["changes"].as_array().unwrap().len(), 2);
    assert!(fixture.ok("audit list token a").ends_with("token a  acquire  acquire revoked\n"));
}

#[test]
fn token_belongs_to_the_namespace_of_its_store() {
    let fixture = Fixture::new();
    let store = format!("sqlite:{}?namespace=prod", fixture.file().display());
    let made = fixture.json(&format!("--store {store} token create a --scopes read"));
    assert_eq!(made["token"]["namespace"], "prod");
    assert_eq!(fixture.json(&format!("--store {store} status"))["namespace"], "prod");
}

#[test]
fn invalid_token_is_refused_with_field_and_bound() {
    for fixture in Fixture::both() {
        fixture.ok("token create a --scopes read");
        let table = [
            ("token create b", 2, "--scopes <SCOPES>"),
            (
                "token create b --scopes write",
                2,
                "`write` is not a token scope: expected acquire, read or admin",
            ),
            ("token create b#c --scopes read", 2, "an id has 1..=64 letters, digits"),
            (
                "token create b --scopes read --expires 2020-01-01",
                2,
                "the token `b` expires at 2020-01-01T00:00:00Z, which is not after now",
            ),
            ("token create b --scopes read --expires soon", 2, "expected a time such as 2030-01-31"),
            (
                "token create a --scopes read",
                1,
                "error: the token id `a` is or was in use, and ids are never reused\n next: choose another id",
            ),
            ("token revoke b", 1, "error: there is no token `b`\n next: list tokens: tidegate token list\n"),
        ];
        for (line, code, sentence) in table {
            let run = fixture.run(line);
            assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{line}: {run:?}");
            assert!(run.stderr.contains(sentence), "{line}: {}", run.stderr);
        }
    }
}
