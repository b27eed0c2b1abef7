//! `tidegate upstream`: permits for calls, from a shell.

use std::io::Write as _;
use std::process::Stdio;

use crate::kit::{self, Fixture};

#[test]
fn shell_gets_permits_and_settles_them() {
    let fixture = Fixture::served();
    let permit = fixture.ok("upstream acquire openai --within 30s --tokens 800");
    let permit = permit.trim();
    let settled = fixture.ok(&format!("upstream settle {permit} --status 200 --tokens 700"));
    assert_eq!(settled, "no retry\n");
    let again = fixture.run(&format!("upstream settle {permit} --status 200"));
    assert!(again.code != 0 && again.stderr.contains("settled before, or has expired"), "{}", again.stderr);

    let granted = fixture.json("upstream acquire openai --within 30s --tokens 800");
    let permit = granted["permit"].as_str().unwrap();
    let line =
        ["--json", "upstream", "settle", permit, "--status", "429", "--header", "retry-after: 0", "--body"];
    let mut command = fixture.command(&line);
    let mut child =
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    child.stdin.take().unwrap().write_all(b"Rate limit reached on tokens per min").unwrap();
    let run = kit::finish(child);
    assert_eq!(run.code, 0, "{}", run.stderr);
    let settled = kit::codec::parse(&run.stdout);
    assert_eq!(settled["retry"]["allowed"], true, "{}", run.stdout);
    let listed = fixture.json("upstream list");
    assert!(listed["upstreams"][0]["quota"].is_null(), "requests were not cut: {listed}");

    let bad = fixture.run("upstream settle x --header nothing");
    assert_eq!(bad.code, 2, "{}", bad.stderr);
}

#[test]
fn permit_draws_and_settles_limits_of_a_subject() {
    let fixture = Fixture::served();
    fixture.ok("limits set entity acme rpm:10/day tpm:1000/day");
    let acquire = "upstream acquire openai --entity acme --resource gpt-4 --cost rpm=1 --cost tpm=800";
    let permit = fixture.ok(acquire);
    assert!((200..900).contains(&fixture.available("acme", "gpt-4", "tpm")));
    let permit = permit.trim();
    fixture.ok(&format!("upstream settle {permit} --status 200 --latency 250ms --actual tpm=100"));
    assert!(fixture.available("acme", "gpt-4", "tpm") >= 900);
    for (line, missing) in [
        ("upstream acquire openai --entity acme", "--resource"),
        ("upstream acquire openai --entity acme --resource gpt-4", "--cost"),
        ("upstream acquire openai --cost tpm=1", "--entity"),
    ] {
        let run = fixture.run(line);
        assert!(run.code == 2 && run.stderr.contains(missing), "{line}: {}", run.stderr);
    }
}
