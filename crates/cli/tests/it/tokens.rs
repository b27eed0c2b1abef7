//! `tidegate token`: made, shown once, listed and revoked.

use std::fs;

use crate::kit::{Shop, codec};

#[test]
fn a_token_is_shown_once_and_its_secret_is_nowhere_in_the_store() {
    for shop in Shop::both() {
        let shown = shop.ok("token create ci_7 --scopes acquire,read --expires 90d");
        let (token, rest) = shown.split_once('\n').unwrap();
        assert_eq!(rest, "This is the token. It is shown once: keep it safe.\n");
        let secret = token.strip_prefix("tg_ci_7_").unwrap();
        assert!(secret.len() == 64 && secret.bytes().all(|digit| digit.is_ascii_hexdigit()), "{token}");
        let other = shop.json("token create other --scopes admin");
        assert_eq!(codec::fields(&other), ["secret", "token", "version"]);
        assert!(other["secret"].as_str().unwrap().starts_with("tg_other_"));

        let everything =
            ["token list", "--json token list", "audit list", "--json audit list"].map(|line| shop.ok(line));
        let mut bytes = everything.concat().into_bytes();
        for name in ["limits.db", "limits.db-wal"] {
            bytes.extend(fs::read(shop.path(name)).unwrap_or_default());
        }
        let holds = |text: &str| bytes.windows(text.len()).any(|window| window == text.as_bytes());
        assert!(!holds(secret) && holds("ci_7"));
    }
}

#[test]
fn tokens_are_listed_with_their_state_and_revoked_for_good() {
    let shop = Shop::new();
    shop.ok("token create a --scopes acquire");
    shop.run_words(&[
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
    assert_eq!(shop.ok("token revoke a"), "a is good no more, since version 3\n");
    assert_eq!(
        shop.json("token revoke a"),
        codec::parse(r#"{ "id": "a", "revoked": true, "version": 3 }"#),
        "to revoke it again does no harm"
    );
    let table = shop.ok("token list");
    let rows: Vec<_> = table.lines().collect();
    assert!(
        rows[0].starts_with("ID  NAME       NAMESPACE  SCOPES      STATE    EXPIRES               CREATED"),
        "{table}"
    );
    assert!(rows[1].starts_with("a   a          default    acquire     revoked  never "), "{table}");
    assert!(
        rows[2].starts_with("b   the build  default    read,admin  good     2999-01-01T00:00:00Z "),
        "{table}"
    );
    let json = shop.json("token list --max 1");
    let fields = [
        "created_at",
        "created_by",
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
    assert_eq!(shop.json("audit list token a")["changes"].as_array().unwrap().len(), 2);
    assert!(shop.ok("audit list token a").ends_with("token a  acquire  acquire revoked\n"));
}

#[test]
fn a_token_is_good_for_the_namespace_of_its_store() {
    let shop = Shop::new();
    let store = format!("sqlite:{}?namespace=prod", shop.file().display());
    let made = shop.json(&format!("--store {store} token create a --scopes read"));
    assert_eq!(made["token"]["namespace"], "prod");
    assert_eq!(shop.json(&format!("--store {store} status"))["namespace"], "prod");
}

#[test]
fn a_token_that_cannot_be_is_refused_with_its_field_and_bound() {
    for shop in Shop::both() {
        shop.ok("token create a --scopes read");
        let table = [
            ("token create b", 2, "--scopes <SCOPES>"),
            (
                "token create b --scopes write",
                2,
                "`write` is no scope of a token: there are acquire, read and admin",
            ),
            ("token create b#c --scopes read", 2, "an id has 1..=64 letters, digits"),
            (
                "token create b --scopes read --expires 2020-01-01",
                2,
                "the token `b` expires at 2020-01-01T00:00:00Z, which is not after now",
            ),
            ("token create b --scopes read --expires soon", 2, "it is a time such as 2030-01-31"),
            (
                "token create a --scopes read",
                1,
                "error: there is, or was, a token `a`, and its id is never another's\n next: choose another id",
            ),
            (
                "token revoke b",
                1,
                "error: there is no token `b`\n next: see which there are: tidegate token list\n",
            ),
        ];
        for (line, code, sentence) in table {
            let run = shop.run(line);
            assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{line}: {run:?}");
            assert!(run.stderr.contains(sentence), "{line}: {}", run.stderr);
        }
    }
}
