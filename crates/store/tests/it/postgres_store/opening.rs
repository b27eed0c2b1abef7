//! Opening: what is made and brought up to date, and what is refused, never called away.

use tidegate_store::lifecycle;
use tidegate_store::{Buckets, Store, StoreError, open as open_by_address};

use crate::kit::engine::{POSTGRES, free_port, skip_without, unique};
use crate::kit::postgres::{open, options, outside, patient, url};
use crate::kit::words::{draw_of, granted, own, shows, until_answered};

#[tokio::test]
async fn a_store_is_opened_by_its_address() {
    skip_without!(POSTGRES);
    let schema = unique("t");
    let address = format!("{}?schema={schema}&connections=2&namespace=prod&application_name=suite", url());
    let store = until_answered(|| open_by_address(&address)).await.unwrap();
    assert_eq!(store.capabilities().engine, "postgres");
    granted(store.draw(&draw_of(&own("acme", 5), 2)).await);
    let other = open(patient(url()).schema(&schema)).await;
    assert_eq!(shows(&other, "acme").await, None, "it is of another namespace");
    assert_eq!(shows(&other.namespace("prod").await.unwrap(), "acme").await, Some((3, 2)));
    let table = [
        (format!("{}?connections=many", url()), "connections is `many`, which is no number"),
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
async fn a_wrong_password_a_missing_database_and_a_missing_right_are_answers() {
    skip_without!(POSTGRES);
    let outside = outside(&url()).await;
    let rights = "DO $$ BEGIN CREATE ROLE keyed LOGIN PASSWORD 'right'; EXCEPTION WHEN duplicate_object THEN NULL; END $$";
    outside.batch_execute(rights).await.unwrap();
    let wrong = url().replace("tidegate@", "keyed:wrong@");
    let error = patient(&wrong).open().await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }) && !error.is_transient(), "{error:?}");
    assert!(error.to_string().contains("password authentication failed"), "{error}");
    assert!(!error.to_string().contains("wrong@"), "no password is told: {error}");

    // The password is right, and may make no schema.
    let right = url().replace("tidegate@", "keyed:right@");
    let error = patient(&right).schema(unique("t")).open().await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");

    let missing = url().replace("/postgres", "/nowhere");
    let error = patient(&missing).open().await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
    assert!(error.to_string().contains("database \"nowhere\" does not exist"), "{error}");

    // This server speaks no TLS, and whoever insists is told so.
    let secure = format!("{}?sslmode=require", url());
    let error = patient(&secure).open().await.unwrap_err();
    assert!(matches!(error, StoreError::Denied { .. }), "{error:?}");
}

#[tokio::test]
async fn a_server_that_is_not_there_is_away() {
    let error = patient(format!("postgres://me@127.0.0.1:{}/x", free_port())).open().await.unwrap_err();
    assert!(error.is_transient(), "{error:?}");
}

#[tokio::test]
async fn many_who_open_a_new_schema_at_once_make_it_once() {
    skip_without!(POSTGRES);
    let options = options();
    let opening: Vec<_> = (0..8).map(|_| tokio::spawn(options.clone().open())).collect();
    for store in opening {
        let store = store.await.unwrap().unwrap();
        granted(store.draw(&draw_of(&own("acme", 8), 1)).await);
        store.close();
    }
    assert_eq!(shows(&open(options).await, "acme").await, Some((0, 8)));
}

#[tokio::test]
async fn a_newer_schema_and_one_of_another_program_are_refused() {
    skip_without!(POSTGRES);
    let (schema, outside) = (unique("t"), outside(&url()).await);
    let options = patient(url()).schema(&schema);
    open(options.clone()).await.close();
    outside.batch_execute(&format!("INSERT INTO \"{schema}\".versions VALUES (99)")).await.unwrap();
    let error = options.open().await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }), "{error:?}");
    assert!(
        error.to_string().ends_with("has schema version 99, newer than 4: use a newer tidegate"),
        "{error}"
    );

    let theirs = unique("t");
    let make = format!("CREATE SCHEMA \"{theirs}\"; CREATE TABLE \"{theirs}\".clock (hands int)");
    outside.batch_execute(&make).await.unwrap();
    let error = patient(url()).schema(&theirs).open().await.unwrap_err();
    assert!(error.to_string().ends_with("has tables of another program"), "{error}");
}

/// A table called `versions` was taken for ours: `init` and `upgrade` altered it.
#[tokio::test]
async fn foreign_schema_with_versions_is_left_alone() {
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
            ("open", patient(url()).schema(&theirs).open().await.map(drop)),
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
async fn a_store_that_was_closed_says_so() {
    skip_without!(POSTGRES);
    let store = open(options()).await;
    store.close();
    let answer = store.draw(&draw_of(&own("acme", 8), 1)).await;
    assert!(matches!(answer, Err(StoreError::Closed { .. })), "{answer:?}");
}
