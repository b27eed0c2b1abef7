//! The lifecycle of a schema: created, checked by a read-only role, upgraded with its data.

use std::time::Duration;

use tidegate_store::lifecycle::{self, Lifecycle, Readiness, Space};

use crate::kit::common::error_text;
use crate::kit::contents::{assert_intact, fill};
use crate::kit::engine::{POSTGRES, skip_without, unique};
use crate::kit::postgres::{database, open, options_at, outside, url};

fn life(schema: &str, options: &str) -> Box<dyn Lifecycle> {
    lifecycle::at(&format!("{}?schema={schema}{options}", url())).expect("an address")
}

/// A schema with data of every kind.
async fn filled(schema: &str) {
    filled_at(&url(), schema).await;
}

async fn filled_at(url: &str, schema: &str) {
    let store = open(options_at(url).schema(schema).connections(4)).await;
    fill(&store).await;
    store.close();
}

/// The schema as the first version left it, without upgrade times and with other functions. Its clock has
/// stepped back by a minute.
async fn as_version_1(schema: &str) {
    let undo = format!(
        "SET search_path = \"{schema}\";
        ALTER TABLE versions DROP COLUMN at; DELETE FROM versions WHERE version > 1;
        ALTER TABLE meters DROP COLUMN kept_until; ALTER TABLE leases DROP COLUMN shorts;
        DROP FUNCTION look(bigint); DROP FUNCTION anchored(bigint, bigint, bigint); DROP FUNCTION tick(bigint, bigint);
        CREATE FUNCTION tick(p_wall bigint, seen bigint) RETURNS bigint LANGUAGE sql AS 'SELECT seen';
        CREATE OR REPLACE FUNCTION wall(wall bigint) RETURNS bigint LANGUAGE sql AS 'SELECT 0::bigint';
        UPDATE clock SET latest = latest + 60000000, ahead = 60000000"
    );
    outside(&url()).await.batch_execute(&undo).await.expect("the schema is downgraded");
}

/// The recorded versions, and how many of them have an upgrade time.
async fn versions(schema: &str) -> (Vec<i64>, i64) {
    let select = format!("SELECT array_agg(version ORDER BY version), count(at) FROM \"{schema}\".versions");
    let row = outside(&url()).await.query_one(&select, &[]).await.expect("a row");
    (row.get(0), row.get(1))
}

/// Whether the functions are those of the current version.
async fn has_functions(schema: &str) -> bool {
    let call = format!("SELECT \"{schema}\".wall(7) = 7");
    outside(&url()).await.query_one(&call, &[]).await.expect("a row").get(0)
}

async fn has_schema(schema: &str) -> bool {
    let find = "SELECT 1 FROM pg_namespace WHERE nspname = $1";
    outside(&url()).await.query_opt(find, &[&schema]).await.expect("the query succeeds").is_some()
}

async fn assert_contents_intact(schema: &str) {
    let store = open(options_at(url()).schema(schema).connections(4)).await;
    assert_intact(&store).await;
    store.close();
}

#[tokio::test]
async fn schema_is_created_once() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    for is_new in [true, false] {
        let made = life(&schema, "&namespace=prod").init().await.unwrap();
        let parts: Vec<_> = made.parts.iter().map(|made| (made.part.kind, made.is_new)).collect();
        assert_eq!((parts, made.schema), (vec![("schema", is_new), ("namespace", is_new)], 6));
    }
    assert_eq!(versions(&schema).await, (vec![1, 2, 3, 4, 5, 6], 5));
}

#[tokio::test]
async fn check_and_list_create_nothing() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    let checked = life(&schema, "").check().await.unwrap();
    assert_eq!((checked.readiness(), checked.schema), (Readiness::Missing, None));
    let what: Vec<_> = checked.missing.iter().map(|part| part.kind).collect();
    assert_eq!(what, ["schema", "namespace"]);
    let refused = error_text(life(&schema, "").upgrade().await);
    assert!(refused.starts_with(&format!("the schema `{schema}` at 127.0.0.1:")), "{refused}");
    assert!(refused.ends_with("does not exist: run `tidegate store init`"), "{refused}");
    life(&schema, "").list().await.unwrap();
    assert!(!has_schema(&schema).await);

    filled(&schema).await;
    let checked = life(&schema, "&namespace=none").check().await.unwrap();
    assert_eq!((checked.readiness(), checked.missing.len()), (Readiness::Missing, 1));
    assert_eq!(life(&schema, "").check().await.unwrap().readiness(), Readiness::Ready);
}

#[tokio::test]
async fn upgraded_schema_keeps_its_data() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    filled(&schema).await;
    as_version_1(&schema).await;
    let checked = life(&schema, "").check().await.unwrap();
    assert_eq!((checked.readiness(), checked.schema, checked.schema_wanted), (Readiness::Older, Some(1), 6));
    let refused = error_text(life(&schema, "").init().await);
    assert!(
        refused.ends_with("has schema version 1, older than 6: run `tidegate store upgrade`"),
        "{refused}"
    );

    let upgraded = life(&schema, "").upgrade().await.unwrap();
    assert_eq!((upgraded.parts[0].from, upgraded.schema), (1, 6));
    assert!(has_functions(&schema).await);
    let kept = life(&schema, "").check().await.unwrap().clock_offset;
    assert_eq!(kept, Some(Duration::from_secs(60)));
    let again = life(&schema, "").upgrade().await.unwrap();
    assert_eq!((again.parts[0].from, again.schema), (6, 6));
    // The time of the first version is unknown.
    assert_eq!(versions(&schema).await, (vec![1, 2, 3, 4, 5, 6], 5));
    assert_contents_intact(&schema).await;
}

#[tokio::test]
async fn open_upgrades_an_older_schema() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    filled(&schema).await;
    as_version_1(&schema).await;
    assert_contents_intact(&schema).await;
    assert_eq!(versions(&schema).await, (vec![1, 2, 3, 4, 5, 6], 5));
}

#[tokio::test]
async fn one_of_many_concurrent_upgrades_runs() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    filled(&schema).await;
    as_version_1(&schema).await;
    let upgrades: Vec<_> = (0..6)
        .map(|_| {
            let life = life(&schema, "");
            tokio::spawn(async move { life.upgrade().await })
        })
        .collect();
    let mut from = Vec::new();
    for upgrade in upgrades {
        from.push(upgrade.await.unwrap().unwrap().parts[0].from);
    }
    from.sort_unstable();
    assert_eq!(from, [1, 6, 6, 6, 6, 6]);
    assert_contents_intact(&schema).await;
}

#[tokio::test]
async fn newer_schema_is_refused_with_both_versions() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    filled(&schema).await;
    let newer = format!("INSERT INTO \"{schema}\".versions (version) VALUES (99)");
    outside(&url()).await.batch_execute(&newer).await.unwrap();
    let life = life(&schema, "");
    for refused in
        [error_text(life.init().await), error_text(life.check().await), error_text(life.upgrade().await)]
    {
        assert!(refused.ends_with("has schema version 99, newer than 6: use a newer tidegate"), "{refused}");
    }
}

#[tokio::test]
async fn namespaces_are_listed_with_schema_and_counts() {
    skip_without!(POSTGRES);
    let url = database().await;
    let life = |options: &str| lifecycle::at(&format!("{url}{options}")).unwrap();
    assert!(life("").list().await.unwrap().spaces.is_empty());
    filled_at(&url, "ours").await;
    life("?schema=ours&namespace=another").init().await.unwrap();
    // Not read further, since its version is newer than ours. Schemas of other programs are not listed.
    filled_at(&url, "newer").await;
    let outside = outside(&url).await;
    outside.batch_execute("INSERT INTO newer.versions (version) VALUES (99)").await.unwrap();
    outside
        .batch_execute("CREATE SCHEMA other_program; CREATE TABLE other_program.versions (version int)")
        .await
        .unwrap();
    let listed = life("").list().await.unwrap();
    let row = |space: &Space| {
        let name = |name: &Option<String>| name.clone().unwrap_or_default();
        (
            name(&space.within),
            name(&space.namespace),
            space.schema,
            space.changes,
            space.entities,
            space.policies,
        )
    };
    let text = str::to_owned;
    let expected = [
        (text("newer"), text(""), Some(99), None, None, None),
        (text("ours"), text("another"), Some(6), Some(0), Some(0), Some(0)),
        (text("ours"), text("default"), Some(6), Some(2), Some(1), Some(1)),
    ];
    assert_eq!(listed.spaces.iter().map(row).collect::<Vec<_>>(), expected);
    assert!(!listed.has_more);
}

#[tokio::test]
async fn check_reports_durability_and_clock_offset() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    filled(&schema).await;
    let checked = life(&schema, "").check().await.unwrap();
    assert!(checked.server.starts_with("PostgreSQL "), "{}", checked.server);
    assert_eq!(checked.durability, "acknowledged writes are on the server's disk");
    assert_eq!(checked.dangers().count(), 0);
    let clock = checked.clock.expect("the server has a clock");
    let apart = Duration::from_micros(clock.ahead_micros.unsigned_abs());
    assert!(apart <= clock.within + Duration::from_secs(1), "the same machine: {clock:?}");
    // An address can turn it off.
    let unsafe_address = life(&schema, "&options=-csynchronous_commit=off").check().await.unwrap();
    let dangers: Vec<_> = unsafe_address.dangers().collect();
    assert_eq!(dangers, ["the last acknowledged writes are lost when the server crashes"]);
}

#[tokio::test]
async fn read_only_role_can_check_and_list() {
    skip_without!(POSTGRES);
    let url = database().await;
    for schema in ["ours", "secret"] {
        filled_at(&url, schema).await;
    }
    let rights = "DO $$ BEGIN CREATE ROLE reader LOGIN PASSWORD 'look';
                      EXCEPTION WHEN duplicate_object OR unique_violation THEN NULL; END $$;
                  GRANT USAGE ON SCHEMA ours TO reader; GRANT SELECT ON ALL TABLES IN SCHEMA ours TO reader";
    outside(&url).await.batch_execute(rights).await.unwrap();
    let address = format!("{}?schema=ours", url.replace("tidegate@", "reader:look@"));
    let life = lifecycle::at(&address).unwrap();
    assert!(!format!("{life:?}").contains("look@"), "no password is shown");
    assert_eq!(life.check().await.unwrap().readiness(), Readiness::Ready);
    let listed = life.list().await.unwrap();
    let counts: Vec<_> =
        listed.spaces.iter().map(|space| (space.within.as_deref(), space.entities)).collect();
    assert_eq!(counts, [(Some("ours"), Some(1)), (Some("secret"), None)]);
    let refused = error_text(lifecycle::at(&format!("{address}&namespace=new")).unwrap().init().await);
    assert!(refused.starts_with("the store denies access"), "{refused}");
}
