//! `tidegate store` on PostgreSQL.

use tokio::runtime::Builder;

use crate::kit::Fixture;
use crate::kit::engine::{address, skip_without, unique};
use crate::kit::lifecycle::{Lifecycle, Older};

/// The variable with the address of the engine.
const POSTGRES: &str = "TIDEGATE_TEST_POSTGRES";

/// Runs a statement on the server, as another program could.
fn execute(url: &str, statement: &str) {
    let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let (client, connection) =
            tokio_postgres::connect(url, tokio_postgres::NoTls).await.expect("the server runs");
        tokio::spawn(connection);
        client.batch_execute(statement).await.expect("the statement succeeds");
    });
}

#[test]
fn postgres_schema_is_created_checked_and_upgraded() {
    skip_without!(POSTGRES);
    let (server, schema) = (address(POSTGRES), unique("life"));
    let url = format!("{server}?schema={schema}");
    let lifecycle = Lifecycle { fixture: Fixture::new(), url, wanted: 6, older: Older::Upgraded };
    lifecycle.walk(|| {
        let undo = format!(
            "ALTER TABLE \"{schema}\".versions DROP COLUMN at; DELETE FROM \"{schema}\".versions WHERE version > 1;
             ALTER TABLE \"{schema}\".meters DROP COLUMN kept_until; ALTER TABLE \"{schema}\".leases DROP COLUMN shorts"
        );
        execute(&server, &undo);
    });
    let (code, checked) = lifecycle.json("store check");
    assert_eq!((code, &checked["dangers"]), (0, &0.into()));
    assert!(checked["server"].as_str().unwrap().starts_with("PostgreSQL "));
    let clock = |field: &str| checked["clock"][field].as_f64().unwrap();
    assert!(clock("ahead").abs() <= 1.0 + clock("within"), "it is the same machine");

    execute(&server, &format!("INSERT INTO \"{schema}\".versions (version) VALUES (99)"));
    for line in ["store init", "store check", "store upgrade", "balance acme gpt"] {
        let run = lifecycle.run(line);
        assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{line}: {run:?}");
        assert!(
            run.stderr.ends_with(" has schema version 99, newer than 6: use a newer tidegate\n"),
            "{run:?}"
        );
    }
}
