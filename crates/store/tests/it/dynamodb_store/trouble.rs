//! What is wrong is said, and only what may pass is told as being away.

use tidegate_store::lifecycle::{Lifecycle as _, Part, Readiness};
use tidegate_store::{Buckets as _, StoreError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::ENGINE;
use crate::kit::dynamodb::{made, options};
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::{address, skip_without, unique};
use crate::kit::words::{draw_of, own, said};

#[tokio::test]
async fn missing_table_is_an_error() {
    skip_without!(ENGINE);
    let error = options(ENGINE).open().await.unwrap_err();
    assert!(matches!(error, StoreError::Invalid { .. }) && !error.is_transient(), "{error}");
    assert!(error.to_string().contains("tidegate store init"), "{error}");
}

#[tokio::test]
async fn denied_access_is_an_error() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let store = made(options(ENGINE).endpoint(proxy.url())).await;
    for code in ["AccessDeniedException", "UnrecognizedClientException", "ExpiredTokenException"] {
        proxy.plan(move |_| Fault::Refused(code));
        let answer = store.draw(&draw_of(&own("acme", 10), 1)).await;
        assert!(matches!(answer, Err(StoreError::Denied { .. })), "{code}: {answer:?}");
    }
    proxy.plan(|_| Fault::Refused("ResourceNotFoundException"));
    let told = said(store.draw(&draw_of(&own("acme", 10), 1)).await);
    assert!(told.contains("tidegate store init"), "{told}");
}

#[tokio::test]
async fn unreachable_engine_is_unavailable() {
    skip_without!(ENGINE);
    let store = made(options(ENGINE)).await;
    drop(store);
    let error = options(ENGINE)
        .endpoint("http://127.0.0.1:1")
        .timeout(std::time::Duration::from_millis(300))
        .open()
        .await
        .unwrap_err();
    assert!(error.is_transient(), "{error}");
}

/// Another program's single-table design often has the same key names. `init` used to add indexes, a stream and an expiry to
/// such a table, and `destroy` deleted it.
#[tokio::test]
async fn foreign_table_with_our_keys_is_left_alone() {
    skip_without!(ENGINE);
    let table = unique("theirs");
    let keys = "\"KeySchema\": [{\"AttributeName\": \"PK\", \"KeyType\": \"HASH\"}, \
                {\"AttributeName\": \"SK\", \"KeyType\": \"RANGE\"}], \"AttributeDefinitions\": [\
                {\"AttributeName\": \"PK\", \"AttributeType\": \"S\"}, {\"AttributeName\": \"SK\", \"AttributeType\": \"S\"}]";
    tell(
        "CreateTable",
        &format!("{{\"TableName\": \"{table}\", \"BillingMode\": \"PAY_PER_REQUEST\", {keys}}}"),
    )
    .await;
    let item = "{\"PK\": {\"S\": \"ORDER#1\"}, \"SK\": {\"S\": \"#META\"}}";
    tell("PutItem", &format!("{{\"TableName\": \"{table}\", \"Item\": {item}}}")).await;
    let life = options(ENGINE).of_table(&table).lifecycle().unwrap();
    let described = describe(&table).await;
    for (verb, error) in [
        ("open", options(ENGINE).of_table(&table).open().await.map(drop)),
        ("create", options(ENGINE).of_table(&table).create().await),
        ("init", life.init().await.map(drop)),
        ("check", life.check().await.map(drop)),
        ("upgrade", life.upgrade().await.map(drop)),
        ("dry run", life.losses().await.map(drop)),
        ("destroy", life.destroy().await.map(drop)),
    ] {
        let error = error.map(|()| verb).unwrap_err();
        assert!(matches!(error, StoreError::Invalid { .. }), "{verb}: {error}");
        assert_eq!(describe(&table).await, described, "after {verb}");
    }
    let error = life.destroy().await.unwrap_err().to_string();
    assert!(error.contains("belongs to another program") && error.contains("no namespace record"), "{error}");
}

#[tokio::test]
async fn init_completes_an_empty_table_of_our_shape() {
    skip_without!(ENGINE);
    let options = options(ENGINE).of_table(unique("empty"));
    let life = options.clone().lifecycle().unwrap();
    assert_eq!(life.losses().await.unwrap().spaces, [], "a dry run without a table agrees with a real one");
    assert!(!life.destroy().await.unwrap().was_there);
    life.init().await.unwrap();
    // A second namespace: the table holds a record of the first.
    let second = options.clone().namespace("second").lifecycle().unwrap();
    assert!(
        second.init().await.unwrap().parts.iter().any(|part| part.is_new && part.part.kind == "namespace")
    );
    assert_eq!(second.losses().await.unwrap().spaces.len(), 2);
    assert!(second.destroy().await.unwrap().was_there);
}

/// What the engine says of a table, without what changes by itself.
async fn describe(table: &str) -> String {
    let told = tell("DescribeTable", &format!("{{\"TableName\": \"{table}\"}}")).await;
    let (_, body) = told.split_once("\r\n\r\n").expect("a body");
    body.to_owned()
}

/// Sends a request to the engine as another program could, and returns the response.
async fn tell(operation: &str, body: &str) -> String {
    let server = address(ENGINE).trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(&server).await.expect("the engine is there");
    let keys = "AWS4-HMAC-SHA256 Credential=tidegate/20270115/eu-central-1/dynamodb/aws4_request, \
                SignedHeaders=host, Signature=none";
    let asked = format!(
        "POST / HTTP/1.1\r\nhost: {server}\r\nauthorization: {keys}\r\nx-amz-date: 20270115T080000Z\r\n\
         x-amz-target: DynamoDB_20120810.{operation}\r\ncontent-type: application/x-amz-json-1.0\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(asked.as_bytes()).await.expect("it reads");
    let mut said = String::new();
    stream.read_to_string(&mut said).await.expect("it answers");
    assert!(said.starts_with("HTTP/1.1 200"), "{said}");
    said
}

#[tokio::test]
async fn newer_schema_of_a_table_is_refused() {
    skip_without!(ENGINE);
    let table = unique("newer");
    let options = options(ENGINE).of_table(&table);
    let life = options.clone().lifecycle().unwrap();
    life.init().await.unwrap();
    let key = "{\"PK\": {\"S\": \"SYSTEM#\"}, \"SK\": {\"S\": \"#VERSION\"}";
    let item = format!("{{\"TableName\": \"{table}\", \"Item\": {key}, \"schema\": {{\"N\": \"99\"}}}}}}");
    tell("PutItem", &item).await;
    let newer = "has schema version 99, newer than 2: use a newer tidegate";
    let told = [
        options.open().await.map(drop).unwrap_err().to_string(),
        life.init().await.map(drop).unwrap_err().to_string(),
        life.check().await.map(drop).unwrap_err().to_string(),
        life.upgrade().await.map(drop).unwrap_err().to_string(),
    ];
    assert!(told.iter().all(|told| told.contains(newer)), "{told:?}");
}

#[tokio::test]
async fn table_is_created_checked_and_removed() {
    skip_without!(ENGINE);
    let life = options(ENGINE).lifecycle().unwrap();
    let kinds = |missing: &[Part]| missing.iter().map(|part| part.kind).collect::<Vec<_>>();
    assert_eq!(kinds(&life.check().await.unwrap().missing), ["table", "namespace"]);
    assert!(life.upgrade().await.unwrap_err().to_string().contains("run `tidegate store init`"));
    assert!(life.init().await.unwrap().parts.iter().all(|part| part.is_new));
    assert!(!life.init().await.unwrap().parts.iter().any(|part| part.is_new), "it is there already");
    assert_eq!(life.check().await.unwrap().readiness(), Readiness::Ready);
    assert_eq!(life.upgrade().await.unwrap().parts[0].from, 2);
    assert_eq!(life.list().await.unwrap().spaces[0].namespace.as_deref(), Some("default"));
    assert!(life.destroy().await.unwrap().was_there);
    assert!(!life.destroy().await.unwrap().was_there, "it is gone already");
    assert_eq!(life.check().await.unwrap().readiness(), Readiness::Missing);
}

#[tokio::test]
async fn tables_of_an_account_are_listed_by_prefix() {
    skip_without!(ENGINE);
    let prefix = unique("many");
    let table = |name: &str| options(ENGINE).of_table(format!("{prefix}-{name}"));
    for (name, namespace) in [("a", "default"), ("b", "prod")] {
        table(name).namespace(namespace).lifecycle().unwrap().init().await.unwrap();
    }
    let others = format!("{prefix}-theirs");
    let key = "{\"AttributeName\": \"id\", \"KeyType\": \"HASH\"}";
    let attribute = "{\"AttributeName\": \"id\", \"AttributeType\": \"S\"}";
    let theirs = format!(
        "{{\"TableName\": \"{others}\", \"KeySchema\": [{key}], \"AttributeDefinitions\": [{attribute}],
           \"BillingMode\": \"PAY_PER_REQUEST\"}}"
    );
    tell("CreateTable", &theirs).await;
    let all = options(ENGINE).of_table(format!("{prefix}*")).lifecycle().unwrap();
    let listed = all.list().await.unwrap();
    let found = listed.spaces.iter().map(|space| (space.within.as_deref(), space.namespace.as_deref()));
    let (a, b) = (format!("{prefix}-a"), format!("{prefix}-b"));
    assert_eq!(
        found.collect::<Vec<_>>(),
        [(Some(&*a), Some("default")), (Some(&*b), Some("prod"))],
        "those of other programs are left out"
    );
    let refused = all.destroy().await.unwrap_err().to_string();
    assert!(refused.ends_with("names several tables, which `tidegate store list` alone can do"), "{refused}");
}

/// Older versions made tables with a stream.
#[tokio::test]
async fn table_with_a_stream_is_accepted() {
    skip_without!(ENGINE);
    let table = unique("streamed");
    let options = options(ENGINE).of_table(&table);
    let life = options.clone().lifecycle().unwrap();
    life.init().await.unwrap();
    assert!(!describe(&table).await.contains("StreamSpecification"), "a new table has none");
    let stream = "{\"StreamEnabled\": true, \"StreamViewType\": \"NEW_AND_OLD_IMAGES\"}";
    tell("UpdateTable", &format!("{{\"TableName\": \"{table}\", \"StreamSpecification\": {stream}}}")).await;
    assert!(!life.init().await.unwrap().parts.iter().any(|part| part.is_new));
    assert_eq!(life.check().await.unwrap().readiness(), Readiness::Ready);
    options.open().await.unwrap();
}

#[tokio::test]
async fn new_table_is_waited_for_until_it_is_known() {
    skip_without!(ENGINE);
    let proxy = Proxy::new(ENGINE).await;
    let options = options(ENGINE).endpoint(proxy.url());
    let (mut is_made, mut unknown) = (false, ["DescribeTable", "DescribeTimeToLive", "UpdateItem"].to_vec());
    proxy.plan(move |asked| {
        is_made |= asked == "CreateTable";
        let place = unknown.iter().position(|unknown| is_made && *unknown == asked);
        place.map_or(Fault::None, |place| {
            unknown.remove(place);
            Fault::Refused("ResourceNotFoundException")
        })
    });
    let made = options.clone().lifecycle().unwrap().init().await.expect("it is there soon");
    assert!(made.parts.iter().all(|part| part.is_new), "{made:?}");
    assert_eq!(options.lifecycle().unwrap().check().await.unwrap().missing, []);
}

#[tokio::test]
async fn foreign_expiry_attribute_is_reported() {
    skip_without!(ENGINE);
    let table = unique("ttl");
    let options = options(ENGINE).of_table(&table);
    drop(made(options.clone()).await);
    let set = |attribute: &str, is_on: bool| {
        format!(
            "{{\"TableName\":\"{table}\",\"TimeToLiveSpecification\":{{\"AttributeName\":\"{attribute}\",\"Enabled\":{is_on}}}}}"
        )
    };
    tell("UpdateTimeToLive", &set("ttl", false)).await;
    tell("UpdateTimeToLive", &set("other", true)).await;
    let lifecycle = options.lifecycle().unwrap();
    let told = said(lifecycle.init().await);
    assert!(told.contains("`other`") && told.contains("`ttl`"), "{told}");
    let checked = lifecycle.check().await.unwrap();
    assert!(checked.missing.iter().any(|part| part.kind == "expiry"), "{checked:?}");
    assert!(format!("{checked:?}").contains("`other`"), "{checked:?}");
}
