//! Entities, balances, usage, the audit and the status.

use crate::kit::{self, Fixture, codec};

#[test]
fn entities_are_created_shown_moved_and_deleted() {
    for fixture in Fixture::both() {
        let made =
            fixture.run_words(&["entity", "create", "acme", "--name", "Acme Inc", "--note", "tier=gold"]);
        assert_eq!(
            made.stdout,
            "ID    NAME      PARENT  CASCADE  NOTES      VERSION\n\
         acme  Acme Inc  -       no       tier=gold        3\n"
        );
        fixture.ok("entity create team --parent acme --cascade");
        fixture.ok("entity create user --parent team --cascade --note a=1");
        assert_eq!(
            fixture.ok("entity children acme"),
            "ID    NAME  PARENT  CASCADE  NOTES  VERSION\nteam  -     acme    yes      -            4\n"
        );
        assert_eq!(fixture.ok("entity children user"), "no entities\n");
        assert_eq!(fixture.json("entity list")["entities"].as_array().unwrap().len(), 3);

        fixture.ok("entity set-parent user acme --no-cascade");
        let user = fixture.json("entity show user");
        let wanted = r#"{ "id": "user", "name": null, "parent": "acme", "cascade": false, "disabled": false, "metadata": { "a": "1" }, "version": 6 }"#;
        assert_eq!(user, codec::parse(wanted), "fields that were not set stay");
        fixture.ok("entity set-parent user --none");
        assert!(fixture.json("entity show user")["parent"].is_null());

        let parent = fixture.run("entity delete acme");
        assert_eq!(parent.code, 1);
        assert_eq!(
            parent.stderr,
            "error: the entity `acme` has children: 1; move or remove them first\n \
         next: list them: tidegate entity children 'acme'\n"
        );
        assert_eq!(fixture.ok("entity delete team"), "team removed, at version 8\n");
        let gone = fixture.json("entity delete acme");
        assert_eq!(gone, codec::parse(r#"{ "id": "acme", "removed": true, "version": 9 }"#));
    }
}

#[test]
fn disabled_entity_draws_nothing_until_enabled() {
    for fixture in Fixture::both() {
        fixture.ok("limits set system rpm:60/day");
        fixture.ok("entity create acme --note tier=gold");
        fixture.ok("entity create bot --parent acme --cascade");
        fixture.ok("entity create user --parent acme");
        fixture.ok("acquire bot gpt rpm=1");
        let shown = fixture.ok("entity disable acme");
        assert!(shown.contains("disabled tier=gold"), "{shown}");
        for (entity, at) in [("acme", "acme"), ("bot", "bot")] {
            for verb in ["acquire", "explain"] {
                let refused = fixture.run(&format!("{verb} {entity} gpt rpm=1"));
                let sentence = format!(
                    "error: the entity `acme` is disabled: requests of {at} on gpt are refused\n \
                     next: enable it: tidegate entity enable ID\n"
                );
                assert_eq!((refused.code, refused.stderr), (3, sentence), "{verb}");
            }
        }
        // It does not draw from its parent, and a limit can still be read.
        fixture.ok("acquire user gpt rpm=1");
        assert_eq!(fixture.available("bot", "gpt", "rpm"), 59);
        let version = fixture.json("status")["version"].clone();
        fixture.ok("entity disable acme");
        assert_eq!(fixture.json("status")["version"], version, "nothing changed");
        fixture.ok("entity set-parent acme --none");
        assert_eq!(fixture.json("entity show acme")["disabled"], true, "a move keeps it");

        let enabled = fixture.ok("entity enable acme");
        assert!(!enabled.contains("disabled"), "{enabled}");
        fixture.ok("acquire bot gpt rpm=1");
        let audit = fixture.json("audit list entity acme");
        let states: Vec<_> =
            audit["changes"].as_array().unwrap().iter().map(|entry| &entry["after"]["disabled"]).collect();
        assert!(states.contains(&&true.into()), "{audit}");
        assert_eq!(fixture.run("entity enable ghost").code, 1);
        // One without a record can be disabled too.
        fixture.ok("entity disable new");
        assert_eq!(fixture.run("acquire new gpt rpm=1").code, 3);
    }
}

#[test]
fn entities_are_shown_as_a_tree() {
    for fixture in Fixture::both() {
        assert_eq!(fixture.ok("entity tree"), "no entities\n");
        fixture.run_words(&["entity", "create", "acme", "--name", "Acme Inc"]);
        fixture.ok("entity create team --parent acme --cascade");
        fixture.ok("entity create bot --parent team --cascade");
        fixture.ok("entity create user --parent acme");
        fixture.ok("entity create zeta");
        fixture.ok("entity disable user");
        assert_eq!(
            fixture.ok("entity tree"),
            "acme (Acme Inc)\n├─ team cascades\n│  └─ bot cascades\n└─ user disabled\nzeta\n"
        );
        assert_eq!(fixture.ok("entity tree team"), "team cascades\n└─ bot cascades\n");
        let json = fixture.json("entity tree acme");
        assert_eq!(json["entities"][0]["children"][0]["children"][0]["id"], "bot");
        assert_eq!(fixture.run("entity tree ghost").code, 1);
    }
}

#[test]
fn invalid_entity_is_refused_with_a_hint() {
    for fixture in Fixture::both() {
        fixture.ok("entity create acme");
        let table = [
            (
                "entity create acme",
                "error: the entity `acme` already exists\n next: show it: tidegate entity show 'acme'\n",
            ),
            (
                "entity show ghost",
                "error: there is no entity `ghost`\n next: create it: tidegate entity create 'ghost'\n",
            ),
            (
                "entity delete ghost",
                "error: there is no entity `ghost`\n next: create it: tidegate entity create 'ghost'\n",
            ),
            (
                "entity create team --parent ghost",
                "error: `ghost` cannot be the parent of `team`: there is no such entity\n",
            ),
            (
                "entity set-parent acme acme",
                "error: `acme` cannot be the parent of `acme`: it is one of its descendants\n",
            ),
        ];
        for (line, sentence) in table {
            let run = fixture.run(line);
            assert_eq!((run.code, run.stdout.as_str(), run.stderr.as_str()), (1, "", sentence), "{line}");
        }
    }
}

#[test]
fn capacity_sums_the_buckets_of_a_resource() {
    for fixture in Fixture::both() {
        fixture.ok("limits set system rpd:5/day");
        assert_eq!(fixture.ok("capacity gpt"), "no units were ever drawn from gpt\n");
        fixture.ok("acquire acme gpt rpd=4");
        fixture.ok("acquire beta gpt rpd=1");
        fixture.ok("acquire beta other rpd=1");
        assert_eq!(
            fixture.ok("capacity gpt"),
            "LIMIT  BUCKETS  AVAILABLE  BURST  CONSUMED\n\
             rpd          2          5     10         5\n"
        );
        assert_eq!(
            fixture.json("capacity gpt").to_string(),
            r#"{"limits":[{"available":5,"buckets":2,"burst":10,"consumed":5,"limit":"rpd"}]}"#
        );
    }
}

#[test]
fn balances_and_explanations_name_owner_and_policy() {
    for fixture in Fixture::both() {
        fixture.ok("limits set system rpd:5/day");
        fixture.ok("limits set entity org rpd:100/day");
        fixture.ok("entity create org");
        fixture.ok("entity create acme --parent org --cascade");
        assert_eq!(
            fixture.ok("balance acme gpt"),
            "ENTITY  RESOURCE  LIMIT  AVAILABLE  BURST  RATE     BY\n\
                     acme    gpt       rpd            5      5  5/day    system\n\
                     org     gpt       rpd          100    100  100/day  entity org\n"
        );
        assert_eq!(fixture.ok("balance acme"), "no units were ever drawn for acme\n");
        fixture.ok("acquire acme gpt rpd=4");
        assert_eq!(
            fixture.ok("balance acme"),
            "ENTITY  RESOURCE  LIMIT  AVAILABLE  BURST  RATE\n\
                     acme    gpt       rpd            1      5  5/day\n\
                     org     gpt       rpd           96    100  100/day\n"
        );
        assert_eq!(
            fixture.ok("explain acme gpt rpd=1"),
            "acme on gpt would be granted\n    \
                     ENTITY  LIMIT  AVAILABLE  BURST  RATE     REQUESTED  RETRY IN  BY\n\
                     ok  acme    rpd            1      5  5/day            1  now       system\n\
                     ok  org     rpd           96    100  100/day          1  now       entity org\n\
                     store unavailable: block (by defaults)\n\
                     lease expired: settle (by defaults)\n"
        );
        let never = fixture.json("explain acme gpt rpd=6");
        assert_eq!((&never["would"], &never["retry_after"]), (&"never".into(), &codec::Json::Null));
        assert_eq!(
            codec::fields(&never),
            ["limits", "on_expiry", "on_unavailable", "retry_after", "subject", "version", "would"]
        );
        assert_eq!(
            codec::fields(&never["limits"][0]),
            [
                "amount",
                "asked",
                "available",
                "burst",
                "consumed",
                "entity",
                "is_short",
                "limit",
                "period",
                "resource",
                "retry_after",
                "source"
            ]
        );
        let waits = fixture.json("explain acme gpt rpd=3");
        assert_eq!(waits["would"], "wait");
        assert!(waits["retry_after"].as_f64().unwrap() > 1_000.0);
        assert!(
            fixture.ok("explain acme gpt rpd=3").starts_with("acme on gpt would be refused; retry after 9h")
        );
    }
}

#[test]
fn usage_is_listed_and_summed() {
    for fixture in Fixture::both() {
        fixture.ok("limits set system rpm:100/min tpm:1k/min");
        assert_eq!(fixture.ok("usage list entity acme"), "no usage\n");
        fixture.ok("acquire acme gpt rpm=1 tpm=30");
        fixture.ok("acquire acme gpt rpm=2");
        fixture.ok("acquire other gpt rpm=4");
        let usage = fixture.json("usage list entity acme --window month");
        let lines = usage["usage"].as_array().unwrap();
        assert_eq!(
            codec::fields(&lines[0]),
            ["entity", "leases", "limit", "own", "resource", "start", "units", "window"]
        );
        assert_eq!(
            (&lines[0]["limit"], &lines[0]["units"], &lines[0]["leases"]),
            (&"rpm".into(), &3.into(), &2.into())
        );
        let table = fixture.ok("usage list entity acme --window month");
        assert!(
            table.starts_with("START                 ENTITY  RESOURCE  LIMIT  UNITS  OWN  LEASES\n"),
            "{table}"
        );
        assert_eq!(
            fixture.ok("usage summary resource gpt --window month"),
            "LIMIT  UNITS  OWN  LEASES\nrpm        7    7       3\ntpm       30   30       1\n"
        );
        assert_eq!(fixture.ok("usage summary resource gpt --until 2020-01-01"), "no usage\n");
        let run = fixture.run("usage list entity acme resource gpt");
        assert_eq!(run.code, 2);
        assert_eq!(
            run.stderr,
            "error: usage is not recorded for `entity acme resource gpt`\n \
             next: use `entity ID`, `resource NAME` or `system`\n"
        );
    }
}

#[test]
fn changes_are_audited_with_their_actor_and_archived() {
    let fixture = Fixture::new();
    fixture.ok("limits set system rpm:5/s");
    fixture.ok("--actor alice entity create acme --cascade");
    fixture.ok("limits set entity acme rpm:1/s");
    let audit = fixture.json("audit list");
    let changes = audit["changes"].as_array().unwrap();
    assert_eq!(
        codec::fields(&changes[0]),
        ["actor", "after", "at", "before", "filed", "scope", "version", "what"]
    );
    let actors: Vec<_> = changes.iter().map(|change| change["actor"].as_str().unwrap()).collect();
    assert_eq!(actors, ["ops", "alice", "ops"]);
    let table = fixture.ok("audit list entity acme");
    let rows: Vec<_> = table.lines().collect();
    assert_eq!(rows.len(), 3, "{table}");
    assert!(rows[1].ends_with("alice  record of entity acme  -       cascade"), "{table}");
    assert!(rows[2].ends_with("ops    limits of entity acme  -       rpm:1/s"), "{table}");

    let folder = fixture.path("audit");
    let nothing = fixture.json(&format!("audit archive file://{}", folder.display()));
    assert_eq!(nothing, codec::parse(r#"{ "files": 0, "entries": 0, "pruned": 0, "through": null }"#));
    let moved = fixture.ok(&format!("audit archive {} --before 0s", folder.display()));
    assert_eq!(moved, format!("3 changes moved to `{}`\n", folder.display()));
    assert_eq!(fixture.ok("audit list"), "no changes\n");
}

#[test]
fn status_names_the_store() {
    let fixture = Fixture::new();
    let status = fixture.json("status");
    assert_eq!(
        codec::fields(&status),
        ["at", "clock", "clock_offset", "engine", "is_durable", "namespace", "took", "url", "version"]
    );
    assert_eq!(status["url"], format!("sqlite:{}", fixture.file().display()));
    let text = fixture.ok("status");
    let names: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["store", "engine", "time", "changes", "latency"]);
}

#[test]
fn default_store_is_in_the_data_folder() {
    let fixture = Fixture::new();
    let data = fixture.path("data");
    let run = kit::run(
        fixture.command(&["--json", "status"]).env_remove("TIDEGATE_STORE").env("XDG_DATA_HOME", &data),
    );
    let file = data.join("tidegate").join("tidegate.db");
    assert_eq!(codec::parse(&run.stdout)["url"], format!("sqlite:{}", file.display()));
    assert!(file.is_file());
    let nowhere = kit::run(fixture.command(&["status"]).env_remove("TIDEGATE_STORE"));
    assert_eq!(nowhere.code, 2);
    assert_eq!(
        nowhere.stderr,
        "error: there is no data folder: neither XDG_DATA_HOME nor HOME is an absolute path\n \
         next: choose a store with --store sqlite:PATH or TIDEGATE_STORE\n"
    );
}
