//! Entities, usage, the audit and the rest of what is looked at.

use crate::kit::{self, Shop, codec};

#[test]
fn entities_are_made_shown_moved_and_deleted() {
    for shop in Shop::both() {
        let made = shop.run_words(&["entity", "create", "acme", "--name", "Acme Inc", "--note", "tier=gold"]);
        assert_eq!(
            made.stdout,
            "ID    NAME      PARENT  CASCADE  NOTES      VERSION\n\
         acme  Acme Inc  -       no       tier=gold        3\n"
        );
        shop.ok("entity create team --parent acme --cascade");
        shop.ok("entity create user --parent team --cascade --note a=1");
        assert_eq!(
            shop.ok("entity children acme"),
            "ID    NAME  PARENT  CASCADE  NOTES  VERSION\nteam  -     acme    yes      -            4\n"
        );
        assert_eq!(shop.ok("entity children user"), "no entities\n");
        assert_eq!(shop.json("entity list")["entities"].as_array().unwrap().len(), 3);

        shop.ok("entity set-parent user acme --no-cascade");
        let user = shop.json("entity show user");
        let wanted = r#"{ "id": "user", "name": null, "parent": "acme", "cascade": false, "metadata": { "a": "1" }, "version": 6 }"#;
        assert_eq!(user, codec::parse(wanted), "what was not spoken of stays");
        shop.ok("entity set-parent user --none");
        assert!(shop.json("entity show user")["parent"].is_null());

        let parent = shop.run("entity delete acme");
        assert_eq!(parent.code, 1);
        assert_eq!(
            parent.stderr,
            "error: the entity `acme` has 1 below it; move or remove them first\n \
         next: list them: tidegate entity children 'acme'\n"
        );
        assert_eq!(shop.ok("entity delete team"), "team removed, at version 8\n");
        let gone = shop.json("entity delete acme");
        assert_eq!(gone, codec::parse(r#"{ "id": "acme", "removed": true, "version": 9 }"#));
    }
}

#[test]
fn an_entity_that_cannot_be_is_refused_with_what_to_do() {
    for shop in Shop::both() {
        shop.ok("entity create acme");
        let table = [
            (
                "entity create acme",
                "error: the entity `acme` is there already\n next: look at it: tidegate entity show 'acme'\n",
            ),
            (
                "entity show nobody",
                "error: there is no entity `nobody`\n next: make it: tidegate entity create 'nobody'\n",
            ),
            (
                "entity delete nobody",
                "error: there is no entity `nobody`\n next: make it: tidegate entity create 'nobody'\n",
            ),
            (
                "entity create team --parent nobody",
                "error: `nobody` cannot be the parent of `team`: there is no such entity\n",
            ),
            ("entity set-parent acme acme", "error: `acme` cannot be the parent of `acme`: it is below it\n"),
        ];
        for (line, sentence) in table {
            let run = shop.run(line);
            assert_eq!((run.code, run.stdout.as_str(), run.stderr.as_str()), (1, "", sentence), "{line}");
        }
    }
}

#[test]
fn capacity_sums_the_buckets_of_a_resource() {
    for shop in Shop::both() {
        shop.ok("limits set system rpd:5/day");
        assert_eq!(shop.ok("capacity gpt"), "nothing was ever drawn of gpt\n");
        shop.ok("acquire acme gpt rpd=4");
        shop.ok("acquire beta gpt rpd=1");
        shop.ok("acquire beta other rpd=1");
        assert_eq!(
            shop.ok("capacity gpt"),
            "LIMIT  BUCKETS  AVAILABLE  BURST  CONSUMED\n\
             rpd          2          5     10         5\n"
        );
        assert_eq!(
            shop.json("capacity gpt").to_string(),
            r#"{"limits":[{"available":5,"buckets":2,"burst":10,"consumed":5,"limit":"rpd"}]}"#
        );
    }
}

#[test]
fn balances_and_explanations_say_whose_limit_it_is_and_by_which_policy() {
    for shop in Shop::both() {
        shop.ok("limits set system rpd:5/day");
        shop.ok("limits set entity org rpd:100/day");
        shop.ok("entity create org");
        shop.ok("entity create acme --parent org --cascade");
        assert_eq!(
            shop.ok("balance acme gpt"),
            "ENTITY  RESOURCE  LIMIT  THERE  BURST  RATE      BY\n\
         acme    gpt       rpd        5      5  5/1day    system\n\
         org     gpt       rpd      100    100  100/1day  entity org\n"
        );
        assert_eq!(shop.ok("balance acme"), "nothing was ever drawn for acme\n");
        shop.ok("acquire acme gpt rpd=4");
        assert_eq!(
            shop.ok("balance acme"),
            "ENTITY  RESOURCE  LIMIT  THERE  BURST  RATE\n\
         acme    gpt       rpd        1      5  5/1day\n\
         org     gpt       rpd       96    100  100/1day\n"
        );
        assert_eq!(
            shop.ok("explain acme gpt rpd=1"),
            "acme on gpt would be granted this\n    \
         ENTITY  RESOURCE  LIMIT  THERE  BURST  RATE      ASKED  COMES IN  BY\n\
         ok  acme    gpt       rpd        1      5  5/1day        1  now       system\n\
         ok  org     gpt       rpd       96    100  100/1day      1  now       entity org\n\
         store away: block (by defaults)\n\
         lease never ended: settle (by defaults)\n"
        );
        let never = shop.json("explain acme gpt rpd=6");
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
        let waits = shop.json("explain acme gpt rpd=3");
        assert_eq!(waits["would"], "wait");
        assert!(waits["retry_after"].as_f64().unwrap() > 1_000.0);
        assert!(
            shop.ok("explain acme gpt rpd=3").starts_with("acme on gpt would be refused; come back in 9h ")
        );
    }
}

#[test]
fn usage_is_listed_and_summed() {
    for shop in Shop::both() {
        shop.ok("limits set system rpm:100/min tpm:1k/min");
        assert_eq!(shop.ok("usage list entity acme"), "no usage\n");
        shop.ok("acquire acme gpt rpm=1 tpm=30");
        shop.ok("acquire acme gpt rpm=2");
        shop.ok("acquire other gpt rpm=4");
        let usage = shop.json("usage list entity acme --window month");
        let lines = usage["usage"].as_array().unwrap();
        assert_eq!(
            codec::fields(&lines[0]),
            ["entity", "leases", "limit", "own", "resource", "start", "units", "window"]
        );
        assert_eq!(
            (&lines[0]["limit"], &lines[0]["units"], &lines[0]["leases"]),
            (&"rpm".into(), &3.into(), &2.into())
        );
        let table = shop.ok("usage list entity acme --window month");
        assert!(
            table.starts_with("START                 ENTITY  RESOURCE  LIMIT  UNITS  OWN  LEASES\n"),
            "{table}"
        );
        assert_eq!(
            shop.ok("usage summary resource gpt --window month"),
            "LIMIT  UNITS  OWN  LEASES\nrpm        7    7       3\ntpm       30   30       1\n"
        );
        assert_eq!(shop.ok("usage summary resource gpt --until 2020-01-01"), "no usage\n");
        let run = shop.run("usage list system");
        assert_eq!(run.code, 2);
        assert_eq!(
            run.stderr,
            "error: usage of `system` is not kept\n next: ask for `entity ID` or `resource NAME`\n"
        );
    }
}

#[test]
fn every_change_is_audited_in_the_name_of_who_made_it_and_can_be_archived() {
    let shop = Shop::new();
    shop.ok("limits set system rpm:5/s");
    shop.ok("--actor alice entity create acme --cascade");
    shop.ok("limits set entity acme rpm:1/s");
    let audit = shop.json("audit list");
    let changes = audit["changes"].as_array().unwrap();
    assert_eq!(
        codec::fields(&changes[0]),
        ["actor", "after", "at", "before", "filed", "scope", "version", "what"]
    );
    let actors: Vec<_> = changes.iter().map(|change| change["actor"].as_str().unwrap()).collect();
    assert_eq!(actors, ["ops", "alice", "ops"]);
    let table = shop.ok("audit list entity acme");
    let rows: Vec<_> = table.lines().collect();
    assert_eq!(rows.len(), 3, "{table}");
    assert!(rows[1].ends_with("alice  record of entity acme  -       cascade"), "{table}");
    assert!(rows[2].ends_with("ops    limits of entity acme  -       rpm:1/s"), "{table}");

    let folder = shop.path("audit");
    let nothing = shop.json(&format!("audit archive file://{}", folder.display()));
    assert_eq!(nothing, codec::parse(r#"{ "files": 0, "entries": 0, "pruned": 0, "through": null }"#));
    let moved = shop.ok(&format!("audit archive {} --before 0s", folder.display()));
    assert_eq!(moved, format!("3 changes moved to `{}`\n", folder.display()));
    assert_eq!(shop.ok("audit list"), "no changes\n");
}

#[test]
fn the_status_says_where_the_store_is() {
    let shop = Shop::new();
    let status = shop.json("status");
    assert_eq!(
        codec::fields(&status),
        ["at", "clock", "clock_offset", "engine", "is_durable", "namespace", "took", "url", "version"]
    );
    assert_eq!(status["url"], format!("sqlite:{}", shop.file().display()));
    let text = shop.ok("status");
    let names: Vec<_> = text.lines().filter_map(|line| line.split_whitespace().next()).collect();
    assert_eq!(names, ["store", "engine", "time", "changes", "answers"]);
}

#[test]
fn without_an_address_the_store_is_in_the_data_folder() {
    let shop = Shop::new();
    let data = shop.path("data");
    let run = kit::run(
        shop.command(&["--json", "status"]).env_remove("TIDEGATE_STORE").env("XDG_DATA_HOME", &data),
    );
    let file = data.join("tidegate").join("tidegate.db");
    assert_eq!(codec::parse(&run.stdout)["url"], format!("sqlite:{}", file.display()));
    assert!(file.is_file());
    let nowhere = kit::run(shop.command(&["status"]).env_remove("TIDEGATE_STORE"));
    assert_eq!(nowhere.code, 2);
    assert_eq!(
        nowhere.stderr,
        "error: there is no data folder: neither XDG_DATA_HOME nor HOME names a folder\n \
         next: name a store with --store sqlite:PATH or TIDEGATE_STORE\n"
    );
}
