//! Manifests: entities and tokens beside limits, and `serve --manifest`.

use std::fs;
use std::io::{BufRead as _, BufReader};

use rustix::process::Signal;

use crate::kit::{Fixture, codec, run};

const DECLARED: &str = "
[system]
limits = ['rpm:60/min']
[entity.bot]
parent = 'acme'
cascade = true
notes = { team = 'search' }
limits = ['rpm:5/s']
[entity.acme]
name = 'Acme'
[token.ci]
scopes = ['acquire', 'read']
expires = 2099-01-31
";

/// A token's text with this id.
fn secret(id: &str) -> String {
    format!("tg_{id}_{}", "0123456789abcdef".repeat(4))
}

#[test]
fn entities_and_tokens_are_planned_and_applied() {
    for fixture in Fixture::both() {
        let file = fixture.path("limits.toml");
        fs::write(&file, DECLARED).unwrap();
        let file = file.display();
        fixture.ok("entity create acme --name Old");
        let table = "   SCOPE                  BEFORE    AFTER\n\
                     +  system                 -         rpm:60/min\n\
                     +  entity bot             -         rpm:5/s\n\
                     ~  record of entity acme  name=Old  name=Acme\n\
                     +  record of entity bot   -         parent=acme cascade team=search\n\
                     +  token ci               -         acquire,read\n";
        let plan = fixture.run(&format!("limits plan {file}"));
        let end = format!("2 entities, 2 scopes, 1 token to change; apply: tidegate limits apply {file}\n");
        assert_eq!((plan.code, plan.stdout), (5, format!("{table}{end}")));
        let json = codec::parse(&fixture.run(&format!("--json limits plan {file}")).stdout);
        assert_eq!(
            (&json["tokens"][0]["id"], &json["entities"][0]["before"]["name"]),
            (&"ci".into(), &"Old".into())
        );

        let applied = fixture.ok(&format!("limits apply {file}"));
        let (changes, tokens) = applied.split_once("\nci: tg_ci_").expect("the new token is shown");
        assert!(changes.contains("2 entities, 2 scopes, 1 token changed, at version "), "{applied}");
        assert!(
            tokens.ends_with("These are the tokens. They are shown once: keep them safe.\n"),
            "{applied}"
        );
        let bot = fixture.json("entity show bot");
        assert_eq!((&bot["parent"], &bot["cascade"]), (&"acme".into(), &true.into()));
        let tokens = fixture.json("token list");
        let ci = tokens["tokens"].as_array().unwrap().iter().find(|token| token["id"] == "ci").unwrap();
        assert_eq!((&ci["name"], &ci["expires_at"]), (&"ci".into(), &"2099-01-31T00:00:00Z".into()));
        assert_eq!(fixture.ok(&format!("limits plan {file}")), "no changes\n");
        // What it does not declare stays, even with --prune.
        fixture.ok("entity create other");
        assert_eq!(fixture.ok(&format!("limits apply {file} --prune")), "no changes\n");
        fixture.ok("entity show other");
    }
}

#[test]
fn changed_token_is_refused_before_any_write() {
    for fixture in Fixture::both() {
        let file = fixture.path("limits.toml");
        fs::write(&file, "[token.ci]\nscopes = ['read']\n[system]\nlimits = ['rpm:1/s']").unwrap();
        let file = file.display();
        fixture.ok("token create ci --scopes acquire");
        let refused = fixture.run(&format!("limits apply {file}"));
        assert_eq!(
            (refused.code, refused.stderr.as_str()),
            (
                2,
                "error: the token `ci` is not as the manifest declares: its scopes are acquire, not read\n \
                 next: a token never changes: declare one with another id, and revoke this one\n"
            )
        );
        assert_eq!(fixture.run("limits show system").code, 1);
        // A revocation is the answer to a leak: it stays, and stops nothing.
        fixture.ok("token revoke ci");
        let line = "the token `ci` was revoked, and stays so: remove it from the file\n";
        let applied = fixture.ok(&format!("limits apply {file}"));
        assert!(applied.starts_with(line) && applied.contains("1 scope changed"), "{applied}");
        assert_eq!(fixture.ok(&format!("limits apply {file}")), format!("{line}no changes\n"));
    }
}

#[test]
fn missing_parent_is_refused_before_any_write() {
    for fixture in Fixture::both() {
        let file = fixture.path("limits.toml");
        fs::write(&file, "[entity.a]\nname = 'A'\n[entity.b]\nparent = 'top'").unwrap();
        let file = file.display();
        let refused = fixture.run(&format!("limits apply {file}"));
        let sentence = "error: `top` cannot be the parent of `b`: there is no such entity\n";
        assert_eq!((refused.code, refused.stderr.as_str()), (2, sentence));
        assert_eq!(fixture.run("entity show a").code, 1, "nothing was written");
        // A chain of stored entities above it is too long, or leads back to it.
        fixture.ok("entity create top");
        fixture.ok(&format!("limits apply {file}"));
        fs::write(fixture.path("limits.toml"), "[entity.top]\nparent = 'b'").unwrap();
        let refused = fixture.run(&format!("limits plan {file}"));
        let sentence = "error: `b` cannot be the parent of `top`: it is one of its descendants\n";
        assert_eq!((refused.code, refused.stderr.as_str()), (2, sentence));
    }
}

#[test]
fn secret_of_a_declared_token_is_in_a_variable() {
    let fixture = Fixture::new();
    let file = fixture.path("limits.toml");
    fs::write(&file, "[token.ci]\nscopes = ['read']\nsecret_env = 'CI_TOKEN'").unwrap();
    let apply = |secret: Option<&str>| {
        let mut command = fixture.command(&["limits", "apply", file.to_str().unwrap()]);
        run(command.envs(secret.map(|secret| ("CI_TOKEN", secret))))
    };
    let other = secret("other");
    let wrong = [
        (None, "is not set"),
        (Some("tg_ci_1"), "is invalid: a token is tg_ID_SECRET, with 64 hexadecimal digits in its secret"),
        (Some(&*other), "is that of the token `other`"),
    ];
    for (secret, why) in wrong {
        let refused = apply(secret);
        let sentence = format!("error: the variable `CI_TOKEN` with the secret of the token `ci` {why}\n");
        assert!(refused.code == 2 && refused.stderr.starts_with(&sentence), "{}", refused.stderr);
        assert_eq!(fixture.json("token list")["tokens"].as_array().unwrap().len(), 0);
    }
    let applied = apply(Some(&secret("ci")));
    assert_eq!(applied.code, 0, "{}", applied.stderr);
    let server = fixture.serve(&[]);
    assert_eq!(server.ask("GET /v1/policies", Some(&secret("ci")), "").0, 200);
    server.stop();
    // A server generates the secrets of its tokens.
    let remote = Fixture::served();
    let mut command = remote.command(&["limits", "apply", file.to_str().unwrap()]);
    let refused = run(command.env("CI_TOKEN", secret("ci")));
    assert!(refused.code == 2 && refused.stderr.contains("a server generates those"), "{}", refused.stderr);
}

#[test]
fn server_applies_its_manifest_at_start_and_on_sighup() {
    let fixture = Fixture::new();
    let file = fixture.path("limits.toml");
    let path = file.to_str().unwrap();
    let token = |rest: &str| format!("[token.ops]\nscopes = ['acquire', 'read', 'admin']\n{rest}\n");
    // A generated secret would be lost.
    fs::write(&file, token("")).unwrap();
    for arguments in [&["--manifest", path][..], &["--manifest", path, "--check"]] {
        let refused = fixture.run_words(&[&["serve", "--listen", "127.0.0.1:0"], arguments].concat());
        let sentence = "the token `ops` of the manifest does not exist, and has no `secret_env`";
        assert!(refused.code == 2 && refused.stderr.contains(sentence), "{refused:?}");
    }
    fixture.ok(&format!("limits apply {path}"));
    // Nor does a restart help a manifest that does not fit the store.
    for manifest in ["[token.ops]\nscopes = ['read']", "[entity.b]\nparent = 'ghost'"] {
        fs::write(&file, manifest).unwrap();
        let refused = fixture.run_words(&["serve", "--listen", "127.0.0.1:0", "--manifest", path]);
        assert_eq!(refused.code, 2, "{refused:?}");
    }
    fixture.ok("token create old --scopes read");
    fixture.ok("token revoke old");

    fs::write(&file, token("[token.old]\nscopes = ['read']\n[system]\nlimits = ['rpm:60/min']")).unwrap();
    let mut server = fixture.serve(&["--manifest", path]);
    let mut log = BufReader::new(server.child().stderr.take().expect("it logs")).lines();
    let mut is_logged = |text: &str| log.any(|line| line.expect("UTF-8").contains(text));
    assert!(is_logged("applied the manifest"));
    assert!(is_logged("a token that was revoked"));
    assert_eq!(server.token(), None, "an admin token exists");
    assert_eq!(fixture.ok("limits list"), "SCOPE   LIMITS      VERSION\nsystem  rpm:60/min        5\n");
    fs::write(&file, token("[system]\nlimits = ['rpm:7/min']\n[entity.acme]\nname = 'Acme'")).unwrap();
    server.send(Signal::HUP);
    assert!(is_logged("applied the manifest"));
    assert!(fixture.ok("limits list").contains("rpm:7/min"));
    fixture.ok("entity show acme");
    // An invalid one changes nothing, and the server goes on.
    fs::write(&file, "[system]\nlimit = []").unwrap();
    server.send(Signal::HUP);
    assert!(is_logged("the manifest is not applied"));
    fs::write(&file, token("[system]\nlimits = ['rpm:8/min']")).unwrap();
    server.send(Signal::HUP);
    assert!(is_logged("applied the manifest"));
    assert!(fixture.ok("limits list").contains("rpm:8/min"));
    server.stop();
}
