//! Errors: what is an error, and what counts as transient unavailability.

use tidegate_store::lifecycle::{Lifecycle as _, Part, Readiness};
use tidegate_store::{Buckets as _, StoreError};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::ENGINE;
use crate::kit::common::{draw_of, error_text, own};
use crate::kit::dynamodb::{open_new, options};
use crate::kit::dynamodb_proxy::{Fault, Proxy};
use crate::kit::engine::{address, skip_without, unique};

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
    let store = open_new(options(ENGINE).endpoint(proxy.url())).await;
    for code in ["AccessDeniedException", "UnrecognizedClientException", "ExpiredTokenException"] {
        proxy.plan(move |_| Fault::Refused(code));
        let answer = store.draw(&draw_of(&own("acme", 10), 1)).await;
        assert!(matches!(answer, Err(StoreError::Denied { .. })), "{code}: {answer:?}");
    }
    proxy.plan(|_| Fault::Refused("ResourceNotFoundException"));
    let message = error_text(store.draw(&draw_of(&own("acme", 10), 1)).await);
    assert!(message.contains("tidegate store init"), "{message}");
}

#[tokio::test]
async fn unreachable_engine_is_unavailable() {
    skip_without!(ENGINE);
    let store = open_new(options(ENGINE)).await;
    drop(store);
    let error = options(ENGINE)
        .endpoint("http://127.0.0.1:1")
        .timeout(std::time::Duration::from_millis(300))
        .open()
        .await
        .unwrap_err();
    assert!(error.is_transient(), "{error}");
}

/// Another program's single-table design often has the same key names. `init` used to add indexes, a stream
/// and an expiry to such a table, and `destroy` deleted it.
#[tokio::test]
async fn foreign_table_with_our_keys_is_not_changed() {
    skip_without!(ENGINE);
    let table = unique("theirs");
    let keys = "\"KeySchema\": [{\"AttributeName\": \"PK\", \"KeyType\": \"HASH\"}, \
                {\"AttributeName\": \"SK\", \"KeyType\": \"RANGE\"}], \"AttributeDefinitions\": [\
                {\"AttributeName\": \"PK\", \"AttributeType\": \"S\"}, {\"AttributeName\": \"SK\", \"AttributeType\": \"S\"}]";
    send(
        "CreateTable",
        &format!("{{\"TableName\": \"{table}\", \"BillingMode\": \"PAY_PER_REQUEST\", {keys}}}"),
    )
    .await;
    let item = "{\"PK\": {\"S\": \"ORDER#1\"}, \"SK\": {\"S\": \"#META\"}}";
    send("PutItem", &format!("{{\"TableName\": \"{table}\", \"Item\": {item}}}")).await;
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

/// The description of a table, without fields that change by themselves.
async fn describe(table: &str) -> String {
    let response = send("DescribeTable", &format!("{{\"TableName\": \"{table}\"}}")).await;
    let (_, body) = response.split_once("\r\n\r\n").expect("a body");
    body.to_owned()
}

/// Sends a request to the engine as another program would, and returns the response.
async fn send(operation: &str, body: &str) -> String {
    let server = address(ENGINE).trim_start_matches("http://").to_owned();
    let mut stream = TcpStream::connect(&server).await.expect("the engine responds");
    let keys = "AWS4-HMAC-SHA256 Credential=tidegate/20270115/eu-central-1/dynamodb/aws4_request, \
                SignedHeaders=host, Signature=none";
    let request = format!(
        "POST / HTTP/1.1\r\nhost: {server}\r\nauthorization: {keys}\r\nx-amz-date: 20270115T080000Z\r\n\
         x-amz-target: DynamoDB_20120810.{operation}\r\ncontent-type: application/x-amz-json-1.0\r\n\
         connection: close\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.expect("the engine reads");
    let mut response = String::new();
    stream.read_to_string(&mut response).await.expect("the engine responds");
    assert!(response.starts_with("HTTP/1.1 200"), "{response}");
    response
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
    send("PutItem", &item).await;
    let newer = "has schema version 99, newer than 2: use a newer tidegate";
    let messages = [
        options.open().await.map(drop).unwrap_err().to_string(),
        life.init().await.map(drop).unwrap_err().to_string(),
        life.check().await.map(drop).unwrap_err().to_string(),
        life.upgrade().await.map(drop).unwrap_err().to_string(),
    ];
    assert!(messages.iter().all(|message| message.contains(newer)), "{messages:?}");
}

#[tokio::test]
async fn table_is_created_checked_and_removed() {
    skip_without!(ENGINE);
    let life = options(ENGINE).lifecycle().unwrap();
    let kinds = |missing: &[Part]| missing.iter().map(|part| part.kind).collect::<Vec<_>>();
    assert_eq!(kinds(&life.check().await.unwrap().missing), ["table", "namespace"]);
    assert!(life.upgrade().await.unwrap_err().to_string().contains("run `tidegate store init`"));
    assert!(life.init().await.unwrap().parts.iter().all(|part| part.is_new));
    assert!(!life.init().await.unwrap().parts.iter().any(|part| part.is_new), "it exists already");
    assert_eq!(life.check().await.unwrap().readiness(), Readiness::Ready);
    assert_eq!(life.upgrade().await.unwrap().parts[0].from, 2);
    assert_eq!(life.list().await.unwrap().spaces[0].namespace.as_deref(), Some("default"));
    assert!(life.destroy().await.unwrap().was_there);
    assert!(!life.destroy().await.unwrap().was_there, "it is removed already");
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
    send("CreateTable", &theirs).await;
    let all = options(ENGINE).of_table(format!("{prefix}*")).lifecycle().unwrap();
    let listed = all.list().await.unwrap();
    let found = listed.spaces.iter().map(|space| (space.within.as_deref(), space.namespace.as_deref()));
    let (a, b) = (format!("{prefix}-a"), format!("{prefix}-b"));
    assert_eq!(
        found.collect::<Vec<_>>(),
        [(Some(&*a), Some("default")), (Some(&*b), Some("prod"))],
        "foreign tables are left out"
    );
    let refused = all.destroy().await.unwrap_err().to_string();
    assert!(refused.ends_with("names several tables, which only `tidegate store list` accepts"), "{refused}");
}

/// Older versions created tables with a stream.
#[tokio::test]
async fn table_with_a_stream_is_accepted() {
    skip_without!(ENGINE);
    let table = unique("streamed");
    let options = options(ENGINE).of_table(&table);
    let life = options.clone().lifecycle().unwrap();
    life.init().await.unwrap();
    assert!(!describe(&table).await.contains("StreamSpecification"), "a new table has no stream");
    let stream = "{\"StreamEnabled\": true, \"StreamViewType\": \"NEW_AND_OLD_IMAGES\"}";
    send("UpdateTable", &format!("{{\"TableName\": \"{table}\", \"StreamSpecification\": {stream}}}")).await;
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
    proxy.plan(move |operation| {
        is_made |= operation == "CreateTable";
        let place = unknown.iter().position(|unknown| is_made && *unknown == operation);
        place.map_or(Fault::None, |place| {
            unknown.remove(place);
            Fault::Refused("ResourceNotFoundException")
        })
    });
    let made =
        options.clone().lifecycle().unwrap().init().await.expect("init retries until the table is known");
    assert!(made.parts.iter().all(|part| part.is_new), "{made:?}");
    assert_eq!(options.lifecycle().unwrap().check().await.unwrap().missing, []);
}

#[tokio::test]
async fn foreign_expiry_attribute_is_reported() {
    skip_without!(ENGINE);
    let table = unique("ttl");
    let options = options(ENGINE).of_table(&table);
    drop(open_new(options.clone()).await);
    let set = |attribute: &str, is_on: bool| {
        format!(
            "{{\"TableName\":\"{table}\",\"TimeToLiveSpecification\":{{\"AttributeName\":\"{attribute}\",\"Enabled\":{is_on}}}}}"
        )
    };
    send("UpdateTimeToLive", &set("ttl", false)).await;
    send("UpdateTimeToLive", &set("other", true)).await;
    let lifecycle = options.lifecycle().unwrap();
    let message = error_text(lifecycle.init().await);
    assert!(message.contains("`other`") && message.contains("`ttl`"), "{message}");
    let checked = lifecycle.check().await.unwrap();
    assert!(checked.missing.iter().any(|part| part.kind == "expiry"), "{checked:?}");
    assert!(format!("{checked:?}").contains("`other`"), "{checked:?}");
}
