//! Every verb has the same output at a store and at a server.

use std::fs;

use crate::kit::codec::{self, Json};
use crate::kit::{Fixture, Run};

/// Commands run at both, in this order. `FILE` is a file of limits.
const LINES: &[&str] = &[
    "limits list",
    "limits set system rpm:60/min tpm:100k/min:150k",
    "limits set entity acme resource gpt-4 rpm:5/day --only --on-expiry return --on-unavailable share:0.2",
    "limits set resource build jobs:10/day",
    "limits set system rpm:30/min --expect absent",
    "limits set system rpm:30/min --expect 4711",
    "limits set system rpm:0/s",
    "limits show system",
    "limits show entity acme resource gpt-4",
    "limits show entity ghost",
    "limits list",
    "limits list --max 1",
    "limits list --max 2 --after system",
    "limits list --entity acme",
    "limits list --resource gpt-4",
    "limits plan FILE",
    "limits plan FILE --prune",
    "limits apply FILE",
    "limits apply FILE",
    "limits plan FILE",
    "limits delete resource build --expect 1",
    "limits delete resource old",
    "limits delete resource spare",
    "entity create org --name Org --note tier=gold --note a=b",
    "entity create acme --parent org --cascade",
    "entity create acme",
    "entity create team --parent ghost",
    "entity show acme",
    "entity show ghost",
    "entity list",
    "entity list --max 1",
    "entity children org",
    "entity children acme",
    "entity children ghost",
    "entity set-parent acme --none",
    "entity set-parent acme acme",
    "entity set-parent acme org --cascade",
    "entity delete org",
    "entity delete ghost",
    "balance acme",
    "balance acme build",
    "balance acme nothing-written",
    "acquire acme build jobs=4",
    "acquire acme build jobs=1 --within 1m",
    "acquire acme build jobs=6",
    "acquire acme build jobs=6 --within 1s",
    "acquire acme build jobs=11",
    "acquire acme build cpus=1",
    "acquire acme build jobs=0",
    "acquire acme build jobs=1 jobs=2",
    "acquire acme build jobs=99999999",
    "acquire acme build jobs=1 -- echo runs",
    "acquire acme build jobs=1 -- false",
    "acquire acme build jobs=1 -- no-such-command-anywhere",
    "acquire acme build jobs=9 -- echo runs",
    "balance acme build",
    "balance acme",
    "explain acme build jobs=1",
    "explain acme build jobs=9",
    "explain acme build jobs=99",
    "explain acme gpt-4 rpm=1",
    "explain acme build cpus=1",
    "usage list entity acme --window month",
    "usage list resource build --window month --max 1",
    "usage list entity acme --since 2020-01-01 --until 2021-01-01",
    "usage list entity acme --after nonsense",
    "usage summary entity acme --window month",
    "usage summary resource build --window month",
    "usage list system",
    "audit list",
    "audit list system",
    "audit list resource build",
    "audit list entity acme",
    "audit list token ops",
    "audit list --until 2020-01-01",
    "audit list --max 2",
    "token create ci --scopes acquire,read --name build --expires 2999-01-01",
    "token create ci --scopes acquire",
    "token create cd --scopes read --expires 2020-01-01",
    "token list",
    "token list --max 1",
    "token revoke ci",
    "token revoke ci",
    "token revoke ghost",
    "token list",
    "entity set-parent acme --none",
    "entity delete org",
    "status",
];

const DECLARED: &str = "
[system]
limits = ['rpm:60/min', 'tpm:100k/min:150k']
[resource.build]
limits = ['jobs:10/day']
[resource.old]
limits = ['jobs:1/s']
[resource.spare]
limits = ['jobs:1/s']
";

/// Masks what differs between runs: times, durations, secrets and addresses.
fn mask(text: &str) -> String {
    let masked = |word: &str| {
        let bare = word.trim_end_matches([',', ';', '.']);
        let is_span =
            humantime::parse_duration(bare).is_ok() && bare.contains(|letter: char| letter.is_alphabetic());
        let is_fraction = bare.starts_with(|letter: char| letter.is_ascii_digit()) && bare.contains('.');
        if humantime::parse_rfc3339_weak(bare).is_ok() || bare.len() > 20 && bare.ends_with('Z') {
            "TIME".to_owned()
        } else if is_span || is_fraction {
            "SPAN".to_owned()
        } else if bare.starts_with("tg_") {
            "SECRET".to_owned()
        } else if bare.starts_with("sqlite:") || bare.starts_with("http:") || bare == "server" {
            // A status begins with its kind.
            if bare == "server" { "store" } else { "ADDRESS" }.to_owned()
        } else {
            word.to_owned()
        }
    };
    let line = |line: &str| {
        let mut words: Vec<String> = line.split_whitespace().map(masked).collect();
        words.dedup_by(|one, other| one == "SPAN" && other == "SPAN");
        words.join(" ")
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

/// Masks what differs between runs in JSON.
fn mask_json(json: &mut Json) {
    match json {
        Json::Array(items) => items.iter_mut().for_each(mask_json),
        Json::Object(fields) => {
            for (name, value) in fields {
                let is_volatile = [
                    "at",
                    "created_at",
                    "revoked_at",
                    "start",
                    "took",
                    "url",
                    "retry_after",
                    "secret",
                    "message",
                ];
                if is_volatile.contains(&name.as_str()) && !value.is_null() {
                    *value = value.as_str().map_or_else(|| "NUMBER".into(), |text| mask(text).into());
                } else {
                    mask_json(value);
                }
            }
        }
        _ => {}
    }
}

fn masked(run: &Run, is_json: bool) -> String {
    let text = |text: &str| {
        if is_json && text.starts_with('{') {
            let mut json = codec::parse(text);
            mask_json(&mut json);
            return format!("{json:#}");
        }
        mask(text)
    };
    format!("ends with {}\n{}\n{}", run.code, text(&run.stdout), text(&run.stderr))
}

fn compare(is_json: bool) {
    let fixtures = Fixture::both();
    for fixture in &fixtures {
        fs::write(fixture.path("limits.toml"), DECLARED).expect("a file can be written");
    }
    let mut differ = Vec::new();
    for line in LINES {
        let [store, server] = fixtures.each_ref().map(|fixture| {
            let file = fixture.path("limits.toml").display().to_string();
            let line = line.replace("FILE", &file);
            let line = if is_json { format!("--json {line}") } else { line };
            masked(&fixture.run(&line), is_json).replace(&file, "FILE")
        });
        if store != server {
            differ.push(format!("{line}\n--- a store\n{store}\n--- a server\n{server}\n"));
        }
    }
    assert!(differ.is_empty(), "{}", differ.join("\n"));
}

#[test]
fn text_output_is_equal_at_store_and_server() {
    compare(false);
}

#[test]
fn json_output_is_equal_at_store_and_server() {
    compare(true);
}
