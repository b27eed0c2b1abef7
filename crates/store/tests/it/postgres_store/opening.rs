//! Opening a store: what is created and upgraded, and which errors are not transient.

use tidegate_store::lifecycle;
use tidegate_store::{Buckets, Store, StoreError, open as open_by_address};

use crate::kit::common::{balance, draw_of, granted, own, until_answered};
use crate::kit::engine::{POSTGRES, free_port, skip_without, unique};
use crate::kit::postgres::{open, options, options_at, outside, url};

#[tokio::test]
async fn store_is_opened_by_its_address() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    let address = format!("{}?schema={schema}&connections=2&namespace=prod&application_name=suite", url());
    let store = until_answered(|| open_by_address(&address)).await.unwrap();
    assert_eq!(store.capabilities().engine, "postgres");
    granted(store.draw(&draw_of(&own("acme", 5), 2)).await);
    let other = open(options_at(url()).schema(&schema)).await;
    assert_eq!(balance(&other, "acme").await, None, "the default namespace is empty");
    assert_eq!(balance(&other.namespace("prod").await.unwrap(), "acme").await, Some((3, 2)));
    let table = [
        (format!("{}?connections=many", url()), "connections is `many`, which is not a number"),
        (format!("{}?schema=a%20b", url()), "the schema `a%20b`: it has 1..=40 letters"),
        (format!("{}?colour=red", url()), "the address: invalid"),
    ];
    for (address, sentence) in table {
        let error = open_by_address(&address).await.unwrap_err();
        assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
        assert!(error.to_string().starts_with(sentence), "{error}");
    }
}

#[tokio::test]
async fn denied_access_and_missing_database_are_errors() {
    skip_without!(POSTGRES);
    let outside = outside(&url()).await;
    let rights = "DO $$ BEGIN CREATE ROLE keyed LOGIN PASSWORD 'right'; EXCEPTION WHEN duplicate_object THEN NULL; END $$";
    outside.batch_execute(rights).await.unwrap();
    let wrong = url().replace("tidegate@", "keyed:wrong@");
    let error = options_at(&wrong).open().await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }) && !error.is_transient(), "{error:?}");
    assert!(error.to_string().contains("password authentication failed"), "{error}");
    assert!(!error.to_string().contains("wrong@"), "no password is shown: {error}");

    // The password is right, but the role may not create schemas.
    let right = url().replace("tidegate@", "keyed:right@");
    let error = options_at(&right).schema(unique("t")).open().await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");

    let missing = url().replace("/postgres", "/nowhere");
    let error = options_at(&missing).open().await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
    assert!(error.to_string().contains("database \"nowhere\" does not exist"), "{error}");

    // This server does not support TLS, so an address that requires it is denied.
    let secure = format!("{}?sslmode=require", url());
    let error = options_at(&secure).open().await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
}

#[tokio::test]
async fn unreachable_server_is_unavailable() {
    let error = options_at(format!("postgres://me@127.0.0.1:{}/x", free_port())).open().await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
}

#[tokio::test]
async fn racing_opens_create_a_schema_once() {
    skip_without!(POSTGRES);
    let options = options();
    let opening: Vec<_> = (0..8).map(|_| tokio::spawn(options.clone().open())).collect();
    for store in opening {
        let store = store.await.unwrap().unwrap();
        granted(store.draw(&draw_of(&own("acme", 8), 1)).await);
        store.close();
    }
    assert_eq!(balance(&open(options).await, "acme").await, Some((0, 8)));
}

#[tokio::test]
async fn newer_and_foreign_schemas_are_refused() {
    skip_without!(POSTGRES);
    let (schema, outside) = (unique("t"), outside(&url()).await);
    let options = options_at(url()).schema(&schema);
    open(options.clone()).await.close();
    outside.batch_execute(&format!("INSERT INTO \"{schema}\".versions VALUES (99)")).await.unwrap();
    let error = options.open().await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
    assert!(
        error.to_string().ends_with("has schema version 99, newer than 6: use a newer tidegate"),
        "{error}"
    );

    let theirs = unique("t");
    let make = format!("CREATE SCHEMA \"{theirs}\"; CREATE TABLE \"{theirs}\".clock (hands int)");
    outside.batch_execute(&make).await.unwrap();
    let error = options_at(url()).schema(&theirs).open().await.unwrap_err();
    assert!(error.to_string().ends_with("has tables of another program"), "{error}");
}

/// A foreign table called `versions` used to be taken for ours: `init` and `upgrade` altered it.
#[tokio::test]
async fn foreign_schema_with_versions_is_not_changed() {
    skip_without!(POSTGRES);
    let (outside, theirs) = (outside(&url()).await, unique("t"));
    for version in [0, 1] {
        let make = format!(
            "DROP SCHEMA IF EXISTS \"{theirs}\" CASCADE; CREATE SCHEMA \"{theirs}\";
             CREATE TABLE \"{theirs}\".versions AS SELECT {version}::bigint AS version"
        );
        outside.batch_execute(&make).await.unwrap();
        let life = lifecycle::at(&format!("{}?schema={theirs}", url())).unwrap();
        for (verb, answer) in [
            ("open", options_at(url()).schema(&theirs).open().await.map(drop)),
            ("init", life.init().await.map(drop)),
            ("check", life.check().await.map(drop)),
            ("upgrade", life.upgrade().await.map(drop)),
        ] {
            let error = answer.map(|()| verb).unwrap_err();
            assert!(error.to_string().ends_with("has tables of another program"), "{verb}: {error}");
        }
        let columns =
            "SELECT string_agg(table_name || '.' || column_name, ',') FROM information_schema.columns
                       WHERE table_schema = $1";
        let columns: String = outside.query_one(columns, &[&theirs]).await.unwrap().get(0);
        assert_eq!(columns, "versions.version");
    }
}

#[tokio::test]
async fn closed_store_reports_it() {
    skip_without!(POSTGRES);
    let store = open(options()).await;
    store.close();
    let answer = store.draw(&draw_of(&own("acme", 8), 1)).await;
    assert!(matches!(answer, Err(StoreError::Closed { .. })), "{answer:?}");
}
