//! `tidegate limits`: text and JSON output, optimistic locking, plans.

use std::fs;
use std::io::Write as _;
use std::process::Stdio;

use crate::kit::{Fixture, codec, finish};

const DECLARED: &str = "
[system]
limits = ['rpm:60/min', 'tpm:100k/min:150k']

[entity.acme.resource.'gpt-4']
limits = ['rpm:5/s']
only = true
";

#[test]
fn limits_are_set_shown_listed_and_deleted() {
    for fixture in Fixture::both() {
        assert_eq!(
            fixture.ok("limits set system rpm:60/min tpm:100k/min:150k"),
            "   SCOPE   BEFORE  AFTER\n\
         +  system  -       rpm:60/min tpm:100k/min:150k\n\
         written at version 3\n\
         `rpm` counts each entity on each resource separately; for one total of all entities on all resources, \
         write rpm:60/min,across=both\n"
        );
        fixture.ok(
        "limits set entity acme resource gpt-4 rpm:5/s --only --on-expiry return --on-unavailable share:0.2",
    );
        assert_eq!(
            fixture.ok("limits list"),
            "SCOPE                       LIMITS                                                  VERSION\n\
         system                      rpm:60/min tpm:100k/min:150k                                  3\n\
         entity acme resource gpt-4  rpm:5/s only on-unavailable=share:0.2 on-expiry=return        4\n"
        );
        assert_eq!(
            fixture.ok("limits show system"),
            "system at version 3: rpm:60/min tpm:100k/min:150k\n\
         LIMIT  AMOUNT  PERIOD   BURST     DEBT  BUCKET\n\
         rpm        60  min         60      600  per entity and resource\n\
         tpm    100000  min     150000  1500000  per entity and resource\n"
        );
        assert_eq!(
            fixture.ok("limits set system rpm:30/min"),
            "   SCOPE   BEFORE                        AFTER\n\
         ~  system  rpm:60/min tpm:100k/min:150k  rpm:30/min\n\
         written at version 5\n\
         `rpm` counts each entity on each resource separately; for one total of all entities on all resources, \
         write rpm:30/min,across=both\n"
        );
        assert_eq!(
            fixture.ok("limits delete system"),
            "   SCOPE   BEFORE      AFTER\n\
         -  system  rpm:30/min  -\n\
         written at version 6\n"
        );
        let gone = fixture.run("limits show system");
        assert_eq!(gone.code, 1);
        assert_eq!(
            gone.stderr,
            "error: no limits are written for `system`\n next: list limits: tidegate limits list\n"
        );
        assert_eq!(fixture.run("limits delete system").code, 1);
    }
}

#[test]
fn total_is_set_shown_and_repaired() {
    for fixture in Fixture::both() {
        let set = fixture.ok("limits set resource gpt-4 tpm:100/day,across=entities,debt=50");
        assert!(set.ends_with("written at version 3\n"), "a total needs no hint: {set}");
        assert_eq!(
            fixture.ok("limits show resource gpt-4"),
            "resource gpt-4 at version 3: tpm:100/day,across=entities,debt=50\n\
             LIMIT  AMOUNT  PERIOD  BURST  DEBT  BUCKET\n\
             tpm       100  day       100    50  all entities\n"
        );
        fixture.ok("acquire a gpt-4 tpm=60");
        fixture.ok("acquire b gpt-4 tpm=40");
        let refused = fixture.run("acquire c gpt-4 tpm=30");
        assert_eq!(refused.code, 3);
        assert!(
            refused.stderr.contains("limit \"tpm\" exceeded for all entities on gpt-4"),
            "{}",
            refused.stderr
        );
        // Two limits of one name: the bucket is named.
        fixture.ok("limits set entity d usd:5/day usd:9/day,across=resources");
        let explained = fixture.ok("explain d o1 usd=1");
        assert!(
            explained.contains("d       o1        usd") && explained.contains("d       (all)     usd"),
            "{explained}"
        );
        assert!(!fixture.ok("explain c gpt-4 tpm=1").contains("RESOURCE"));
        let balance = fixture.ok("balance c gpt-4");
        assert!(balance.contains("(all)   gpt-4     tpm"), "{balance}");
        let balance = &fixture.json("balance c gpt-4")["limits"][0];
        assert_eq!((balance["entity"].as_str(), balance["resource"].as_str()), (None, Some("gpt-4")));
        let summary = fixture.json("usage summary resource gpt-4");
        assert_eq!(summary["limits"][0]["limit"], "tpm,across=entities");
        assert_eq!(summary["limits"][0]["units"], 100);

        let set = fixture.json("bucket set c gpt-4 tpm=30 --across entities");
        assert_eq!((set["available"].as_i64(), set["limit"].as_str()), (Some(30), Some("tpm")));
        fixture.ok("acquire c gpt-4 tpm=30");
        let reset = fixture.ok("bucket reset c gpt-4 tpm --across entities");
        assert!(reset.contains("100    100"), "{reset}");
        let audit = fixture.ok("audit list resource gpt-4");
        assert!(audit.contains("bucket tpm") && audit.contains("30 available"), "{audit}");
        let own = fixture.run("bucket reset c gpt-4 tpm");
        assert_eq!((own.code, own.stdout.as_str()), (2, ""));
        assert!(
            own.stderr
                .contains("the limit `tpm` of `c on gpt-4` is pooled: its bucket is the one across entities"),
            "{}",
            own.stderr
        );
        // A limit of a call is named by its text, which may contain an equals sign.
        let set = fixture.json("bucket set c gpt-4 quota:5/min,debt=3=2");
        assert_eq!((set["available"].as_i64(), set["limit"].as_str()), (Some(2), Some("quota")));
        let pooled = fixture.run("bucket reset c gpt-4 quota:5/min --across entities");
        assert_eq!(pooled.code, 2, "{}", pooled.stderr);
        let many = fixture.run("bucket set c gpt-4 tpm=101 --across entities");
        assert!(
            many.stderr.contains("101 units available in `tpm`, more than its burst of 100"),
            "{}",
            many.stderr
        );
    }
}

#[test]
fn total_that_its_scope_does_not_cover_is_refused() {
    for fixture in Fixture::both() {
        let refused = fixture.run("limits set entity acme tpm:5/day,across=entities");
        assert_eq!(refused.code, 2);
        let sentence = "the limit `tpm` counts across=entities, which a policy at `entity acme` cannot limit";
        assert!(refused.stderr.contains(sentence), "{}", refused.stderr);
        let hint = fixture.ok("limits set entity acme usd:10/day");
        let sentence = "`usd` counts each resource separately; for one total of all resources, write \
                        usd:10/day,across=resources\n";
        assert!(hint.ends_with(sentence), "{hint}");
        let both = fixture.ok("limits set entity acme usd:1/day usd:10/day,across=resources");
        assert!(both.ends_with("written at version 4\n"), "a limit beside its total needs no hint: {both}");
    }
}

#[test]
fn json_of_limits_has_stable_fields() {
    for fixture in Fixture::both() {
        let set = fixture.json("limits set entity acme resource gpt-4 rpm:5/s --only");
        assert_eq!(codec::fields(&set), ["after", "before", "scope", "version"]);
        let shown = fixture.json("limits show entity acme resource gpt-4");
        let wanted = r#"{
        "scope": { "kind": "entity_resource", "entity": "acme", "resource": "gpt-4" },
        "version": 3,
        "policy": { "limits": ["rpm:5/s"], "only": true, "on_unavailable": null, "on_expiry": null }
    }"#;
        assert_eq!(shown, codec::parse(wanted));
        let list = fixture.json("limits list");
        assert_eq!(codec::fields(&list), ["limits", "next"]);
        assert_eq!(list["limits"][0], shown);
    }
}

#[test]
fn listing_continues_after_its_cursor() {
    for fixture in Fixture::both() {
        for name in ["a", "b", "c"] {
            fixture.ok(&format!("limits set entity {name} rpm:1/s"));
        }
        fixture.ok("limits set entity b resource gpt rpm:1/s");
        let first = fixture.json("limits list --max 2");
        assert_eq!(first["limits"].as_array().unwrap().len(), 2);
        let cursor = first["next"].as_str().unwrap();
        let rest = fixture.json(&format!("limits list --max 2 --after {cursor}"));
        assert_eq!(rest["limits"][0]["scope"]["entity"], "c");
        assert!(rest["next"].is_null());
        assert!(fixture.ok("limits list --max 1").ends_with("there are more: --after 'e#a'\n"));
        assert_eq!(fixture.json("limits list --entity b")["limits"].as_array().unwrap().len(), 2);
        assert_eq!(fixture.json("limits list --resource gpt")["limits"].as_array().unwrap().len(), 1);
    }
}

#[test]
fn stale_change_is_refused_with_the_current_version() {
    for fixture in Fixture::both() {
        fixture.ok("limits set system rpm:60/min --expect absent");
        let again = fixture.run("limits set system rpm:50/min --expect absent");
        assert_eq!(again.code, 1);
        assert_eq!(
            again.stderr,
            "error: the policy for system is not as expected: it is at version 3\n \
         next: it was changed concurrently: read it again, then retry\n"
        );
        assert_eq!(fixture.run("limits delete system --expect 7").code, 1);
        fixture.ok("limits delete system --expect 3");
    }
}

#[test]
fn plan_shows_changes_and_exits_with_5() {
    for fixture in Fixture::both() {
        let file = fixture.path("limits.toml");
        fs::write(&file, DECLARED).unwrap();
        let file = file.display();
        fixture.ok("limits set system rpm:10/min");
        fixture.ok("limits set resource old rpm:1/min");
        let plan = fixture.run(&format!("limits plan {file}"));
        let table = "   SCOPE                       BEFORE      AFTER\n\
                 ~  system                      rpm:10/min  rpm:60/min tpm:100k/min:150k\n\
                 +  entity acme resource gpt-4  -           rpm:5/s only\n";
        assert_eq!((plan.code, plan.stderr.as_str()), (5, ""));
        let command = format!("limits apply {file}");
        assert_eq!(plan.stdout, format!("{table}2 scopes to change; apply: tidegate {command}\n"));
        let json = fixture.run(&format!("--json limits plan {file} --prune"));
        assert_eq!(json.code, 5);
        let json = codec::parse(&json.stdout);
        assert_eq!(codec::fields(&json), ["changes", "entities", "has_changes", "tokens", "version"]);
        assert_eq!((&json["has_changes"], json["changes"].as_array().unwrap().len()), (&true.into(), 3));
        assert_eq!(codec::fields(&json["changes"][0]), ["after", "before", "before_version", "scope"]);

        assert_eq!(fixture.ok(&command), format!("{table}2 scopes changed, at version 5\n"));
        assert_eq!(fixture.ok(&format!("limits plan {file}")), "no changes\n");
        assert_eq!(fixture.ok(&format!("limits apply {file}")), "no changes\n");
        assert_eq!(fixture.run(&format!("limits plan {file} --prune")).code, 5);
        fixture.ok(&format!("limits apply {file} --prune"));
        assert_eq!(fixture.run("limits show resource old").code, 1);
    }
}

#[test]
fn limits_are_applied_from_stdin() {
    for fixture in Fixture::both() {
        let mut command = fixture.command(&["limits", "apply", "-"]);
        let mut child =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        child.stdin.take().unwrap().write_all(DECLARED.as_bytes()).unwrap();
        let run = finish(child);
        assert_eq!((run.code, run.stderr.as_str()), (0, ""));
        fixture.ok("limits show system");
    }
}

#[test]
fn invalid_file_reports_all_problems() {
    for fixture in Fixture::both() {
        let file = fixture.path("limits.toml");
        fs::write(&file, "[system]\nlimit = ['rpm:5/s']\nonly = 1").unwrap();
        let run = fixture.run(&format!("limits apply {}", file.display()));
        assert_eq!((run.code, run.stdout.as_str()), (2, ""));
        assert_eq!(
            run.stderr,
            format!(
                "error: `{}` is not a file of limits:\n       \
             `system.limit` in TOML is not a key, did you mean `system.limits`?\n       \
             `system.only` is 1 in TOML, and must be true or false\n \
             next: see the format: tidegate limits plan --help\n",
                file.display()
            )
        );
        let run = fixture.run(&format!("limits plan {}", fixture.path("none.toml").display()));
        assert_eq!(run.code, 2);
        assert!(run.stderr.contains("none.toml` cannot be read: No such file"), "{}", run.stderr);
    }
}
