//! `tidegate store`: creating, checking, upgrading and listing a store.

use std::fs;

use rusqlite::Connection;

use crate::kit::lifecycle::{Lifecycle, Older};
use crate::kit::server::free_port;
use crate::kit::{self, Fixture, codec};

#[test]
fn file_is_created_checked_and_upgraded() {
    let fixture = Fixture::new();
    let (url, file) = (fixture.store(), fixture.file());
    let lifecycle = Lifecycle { fixture, url, wanted: 5, older: Older::Upgraded };
    lifecycle.walk(|| {
        let outside = Connection::open(&file).unwrap();
        let undo = "
            CREATE TABLE policies (namespace INTEGER, kind INTEGER, entity TEXT, resource TEXT, version INTEGER, body TEXT);
            CREATE TABLE entities (namespace INTEGER, id TEXT, version INTEGER, parent TEXT, body TEXT);
            CREATE TABLE audit (namespace INTEGER, number INTEGER, version INTEGER, at INTEGER, actor TEXT, filed TEXT,
                change TEXT);
            INSERT INTO policies SELECT namespace, kind, first, second, version, body FROM records WHERE kind < 4;
            INSERT INTO entities SELECT namespace, first, version, link, body FROM records WHERE kind = 4;
            DROP TABLE records; DROP INDEX usage_by_age; ALTER TABLE subjects DROP COLUMN kept_until;
            ALTER TABLE clock DROP COLUMN held_until; PRAGMA user_version = 1";
        outside.execute_batch(undo).unwrap();
    });
}

#[test]
fn store_is_backed_up_while_it_is_served() {
    let fixture = Fixture::new();
    let server = fixture.serve(&[]);
    fixture.ok("limits set system rpm:60/min");
    let copy = fixture.path("backup.db");
    let place = copy.display();
    let shown = fixture.ok(&format!("store backup {place}"));
    let bytes = fs::metadata(&copy).unwrap().len();
    assert_eq!(shown, format!("store      {}\ncopied to  `{place}`, {bytes} bytes\n", fixture.store()));
    let again = fixture.run(&format!("store backup {place}"));
    assert!(again.code == 1 && again.stderr.contains("exists already"), "{}", again.stderr);
    let listed = fixture.ok(&format!("limits list --store sqlite:{place}"));
    assert!(listed.contains("rpm:60/min"), "{listed}");
    let json = fixture.json(&format!("store backup {place}.2"));
    assert_eq!(codec::fields(&json), ["bytes", "file", "store"]);
    server.stop();
}

#[test]
fn text_output_is_stable() {
    let fixture = Fixture::new();
    let place = fixture.file().display().to_string();
    let made = |verb: &str| {
        format!(
            "store      sqlite:{place}?namespace=prod\n{verb:<11}the file `{place}`\n\
             {verb:<11}the namespace `prod`\nschema     version 5\n"
        )
    };
    assert_eq!(fixture.ok("store init --namespace prod"), made("created"));
    assert_eq!(fixture.ok("store init --namespace prod"), made("exists"));
    fixture.ok("store init");
    fixture.ok("entity create acme");
    assert_eq!(
        fixture.ok("store list"),
        "NAMESPACE  VERSION  CHANGES  ENTITIES  POLICIES\n\
         default          5        1         1         0\n\
         prod             5        0         0         0\n"
    );
    assert_eq!(
        fixture.ok("store upgrade"),
        format!("store      sqlite:{place}\nnothing    to do: the file `{place}` has schema version 5\n")
    );
    let checked = fixture.ok("store check");
    let lines: Vec<&str> = checked.lines().collect();
    assert_eq!(lines[0], format!("store      sqlite:{place}"));
    assert!(lines[1].starts_with("engine     sqlite: SQLite 3."), "{checked}");
    assert_eq!(lines[2], "schema     version 5; this program has 5");
    assert_eq!(lines[3], "namespace  default");
    assert!(lines[5].starts_with("settings   durable second; size "), "{checked}");
    assert_eq!(lines[6], "result     ready");
}

#[test]
fn clock_offset_is_in_check_and_status() {
    let fixture = Fixture::new();
    fixture.ok("entity create acme");
    assert_eq!(fixture.json("store check")["clock_offset"], 0.0);
    let file = Connection::open(fixture.file()).unwrap();
    file.execute("UPDATE clock SET latest = latest + 3600000000, ahead = 3600000000", []).unwrap();
    assert_eq!(fixture.json("store check")["clock_offset"], 3_600.0);
    let checked = fixture.ok("store check");
    assert!(
        checked.contains("offset     the clock stepped back: the store's time is 1h ahead of it\n"),
        "{checked}"
    );
    // The time since the last call is absorbed where it is more than a second.
    let offset = fixture.json("status")["clock_offset"].as_f64().unwrap();
    assert!(offset > 3_000.0 && offset <= 3_600.0, "{offset}");
    let status = fixture.ok("status");
    assert!(status.contains(" by the clock of the host, ") && status.contains(" ahead of it\n"), "{status}");
}

#[test]
fn check_creates_nothing_and_its_fields_are_stable() {
    let fixture = Fixture::new();
    let run = fixture.run("--json store check");
    assert_eq!(run.code, 5);
    let json = codec::parse(&run.stdout);
    let fields = [
        "clock",
        "clock_offset",
        "dangers",
        "durability",
        "engine",
        "missing",
        "namespace",
        "place",
        "schema",
        "server",
        "settings",
        "state",
        "store",
    ];
    assert_eq!(codec::fields(&json), fields);
    assert_eq!(fs::read_dir(fixture.path("")).unwrap().count(), 0);
    let made = fixture.json("store init");
    assert_eq!(codec::fields(&made), ["engine", "parts", "place", "schema", "store"]);
    assert_eq!(codec::fields(&made["parts"][0]), ["is_new", "kind", "name"]);
    let upgraded = fixture.json("store upgrade");
    assert_eq!(codec::fields(&upgraded["parts"][0]), ["from", "kind", "name", "to"]);
    let listed = fixture.json("store list");
    assert_eq!(codec::fields(&listed), ["engine", "has_more", "namespaces", "place", "schema"]);
    assert_eq!(
        codec::fields(&listed["namespaces"][0]),
        ["changes", "entities", "namespace", "policies", "schema", "within"]
    );
}

#[test]
fn default_store_is_in_the_data_folder() {
    let fixture = Fixture::new();
    let data = fixture.path("data");
    let run = |line: &str| {
        let mut command = fixture.command(&line.split(' ').collect::<Vec<_>>());
        kit::run(command.env_remove("TIDEGATE_STORE").env("XDG_DATA_HOME", &data))
    };
    assert_eq!(run("store check").code, 5);
    assert!(!data.exists(), "a check creates nothing");
    let made = run("store init");
    assert_eq!(made.code, 0);
    assert!(made.stdout.contains("tidegate/tidegate.db`"), "{}", made.stdout);
    assert_eq!(run("store check").code, 0);
}

#[test]
fn store_verbs_reject_a_server() {
    let fixture = Fixture::new();
    let run = fixture.run("--server http://127.0.0.1:1 store check");
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert!(run.stderr.starts_with("error: `store` works on the store directly: use --store <URL>"));
    let mut command = fixture.command(&["store", "check"]);
    let run = kit::run(command.env_remove("TIDEGATE_STORE").env("TIDEGATE_SERVER", "http://127.0.0.1:1"));
    assert_eq!((run.code, run.stdout.as_str()), (2, ""));
    assert!(run.stderr.starts_with("error: TIDEGATE_SERVER is set"), "{}", run.stderr);
    // With both variables set, the store is used.
    let mut command = fixture.command(&["store", "init"]);
    assert_eq!(kit::run(command.env("TIDEGATE_SERVER", "http://127.0.0.1:1")).code, 0);
}

#[test]
fn invalid_address_is_reported_without_its_password() {
    let unused = free_port();
    let fixture = Fixture::new();
    let table = [
        ("memory:".to_owned(), 2, "`memory:` exists only in its process"),
        ("mysql://me:s3cret@h/x".to_owned(), 2, "`mysql://h/x` is not the address of a store"),
        ("redis://:s3cret@h:port".to_owned(), 2, "`redis://h:port` is not an address of Redis"),
        ("redis://:s3cret@h?colour=red".to_owned(), 2, "`redis://h` has no option `colour`"),
        ("postgres://me:s3cret@h/x?schema=a.b".to_owned(), 2, "the schema `a.b`: it has 1..=40 letters"),
        ("sqlite:x.db?namespace=a#b".to_owned(), 2, "which is not allowed"),
        (format!("redis://:s3cret@{unused}"), 4, "the store is unavailable: "),
        (format!("postgres://me:s3cret@{unused}/x"), 4, "the store is unavailable: "),
    ];
    for (url, code, sentence) in table {
        for line in ["store check", "store init", "store upgrade", "store list"] {
            let words: Vec<&str> = ["--store", &url].into_iter().chain(line.split(' ')).collect();
            let run = fixture.run_words(&words);
            assert_eq!((run.code, run.stdout.as_str()), (code, ""), "{url} {line}: {run:?}");
            assert!(run.stderr.contains(sentence), "{url} {line}: {}", run.stderr);
            assert!(!run.stderr.contains("s3cret"), "{url} {line}: {}", run.stderr);
        }
    }
    let run = fixture.run_words(&["--store", "sqlite:x.db?namespace=a", "store", "init", "--namespace", "b"]);
    assert_eq!(run.code, 2);
    assert!(run.stderr.starts_with("error: the address names a namespace, and so does --namespace"));
    assert_eq!(fixture.run_words(&["store", "init", "--namespace", "a&durable=commit"]).code, 2);
}
