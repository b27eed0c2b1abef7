//! `tidegate import zae-limiter` from a table with zae-limiter's own keys and attributes, which this test writes.

use std::fs;
use std::io::Write as _;
use std::net::TcpStream;

use crate::kit::codec::{Json, json};
use crate::kit::engine::{DYNOXIDE, address, skip_without, unique};
use crate::kit::server::answer;
use crate::kit::{self, Fixture};

/// The opaque id of the namespace.
const ID: &str = "s_loIw0o714";

/// Calls the engine, as any client of its API does.
fn call(server: &str, operation: &str, body: &Json) {
    let host = server.strip_prefix("http://").expect("an address without TLS");
    let mut stream = TcpStream::connect(host).expect("it listens");
    let (text, scope) = (body.to_string(), "20260101/eu-central-1/dynamodb/aws4_request");
    let head = format!(
        "POST / HTTP/1.1\r\nhost: {host}\r\nconnection: close\r\nx-amz-date: 20260101T000000Z\r\n\
         x-amz-target: DynamoDB_20120810.{operation}\r\ncontent-type: application/x-amz-json-1.0\r\n\
         authorization: AWS4-HMAC-SHA256 Credential=tidegate/{scope}, SignedHeaders=host, Signature=0\r\n\
         content-length: {}\r\n\r\n",
        text.len()
    );
    write!(stream, "{head}{text}").expect("it reads");
    let (status, answered) = answer(stream);
    assert_eq!(status, 200, "{operation}: {answered}");
}

/// Creates the table with the keys and the index that an import reads.
fn create(server: &str, table: &str) {
    let key = |hash: &str, range: &str| json!([{"AttributeName": hash, "KeyType": "HASH"}, {"AttributeName": range, "KeyType": "RANGE"}]);
    let names = ["PK", "SK", "GSI4PK", "GSI4SK"];
    let attributes: Vec<Json> =
        names.iter().map(|name| json!({"AttributeName": name, "AttributeType": "S"})).collect();
    let index = json!({
        "IndexName": "GSI4", "KeySchema": key("GSI4PK", "GSI4SK"), "Projection": {"ProjectionType": "KEYS_ONLY"}
    });
    let body = json!({
        "TableName": table, "BillingMode": "PAY_PER_REQUEST", "KeySchema": key("PK", "SK"),
        "AttributeDefinitions": attributes, "GlobalSecondaryIndexes": [index]
    });
    call(server, "CreateTable", &body);
}

/// Writes an item of the namespace. Numbers are attributes of type `N`, texts of type `S`.
fn put(server: &str, table: &str, [place, sort]: [&str; 2], attributes: &Json) {
    let pk = format!("{ID}/{place}");
    let mut item = json!({
        "PK": {"S": pk}, "SK": {"S": sort}, "GSI4PK": {"S": ID}, "GSI4SK": {"S": pk}
    });
    for (name, value) in attributes.as_object().expect("an object") {
        item[name] = match value {
            Json::Number(number) => json!({"N": number.to_string()}),
            Json::Bool(is_set) => json!({"BOOL": is_set}),
            text => json!({"S": text}),
        };
    }
    call(server, "PutItem", &json!({"TableName": table, "Item": item}));
}

fn limit(name: &str, [burst, amount, seconds]: [u64; 3]) -> Json {
    let field = |part: &str| format!("l_{name}_{part}");
    json!({field("cp"): burst, field("ra"): amount, field("rp"): seconds})
}

#[test]
fn zae_limiter_table_becomes_a_manifest_that_applies() {
    skip_without!(DYNOXIDE);
    let (table, server) = (unique("zae"), address(DYNOXIDE));
    create(&server, &table);
    let registered = json!({
        "PK": {"S": "_/SYSTEM#"}, "SK": {"S": "#NAMESPACE#default"}, "namespace_id": {"S": ID}
    });
    call(&server, "PutItem", &json!({"TableName": table, "Item": registered}));
    let items = [
        (["SYSTEM#", "#CONFIG"], limit("rpm", [100, 100, 60])),
        (["RESOURCE#gpt-4", "#CONFIG"], limit("tpm", [150_000, 100_000, 60])),
        (["ENTITY#acme", "#META"], json!({"name": "Acme Inc", "cascade": false})),
        (["ENTITY#acme", "#CONFIG#_default_"], limit("rpm", [7, 7, 3_600])),
        (["ENTITY#bot", "#META"], json!({"parent_id": "acme", "cascade": true})),
        (["ENTITY#bot", "#CONFIG#gpt-4"], limit("rpm", [5, 5, 1])),
        (["BUCKET#bot#gpt-4#0", "#STATE"], json!({"b_rpm_tk": 5_000})),
    ];
    for (place, attributes) in &items {
        put(&server, &table, *place, attributes);
    }
    let fixture = Fixture::new();
    let url = format!("dynamodb://{table}?region=eu-central-1&endpoint={server}&timeout_ms=30000");
    let run = kit::run(&mut fixture.command(&["import", "zae-limiter", &url]));
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
    assert_eq!(
        run.stdout,
        "[system]\n\
         limits = [\"rpm:100/min\"]\n\
         \n[resource.\"gpt-4\"]\n\
         limits = [\"tpm:100k/min:150k\"]\n\
         only = true\n\
         \n[entity.\"acme\"]\n\
         name = \"Acme Inc\"\n\
         cascade = false\n\
         limits = [\"rpm:7/h\"]\n\
         only = true\n\
         \n[entity.\"bot\"]\n\
         parent = \"acme\"\n\
         cascade = true\n\
         \n[entity.\"bot\".resource.\"gpt-4\"]\n\
         limits = [\"rpm:5/s\"]\n\
         only = true\n"
    );
    let file = fixture.path("limits.toml");
    fs::write(&file, &run.stdout).expect("a manifest");
    fixture.ok(&format!("limits apply {}", file.display()));
    let planned = fixture.ok(&format!("limits plan {}", file.display()));
    assert_eq!(planned.trim(), "no changes", "it declares what it applied");
    let explained = fixture.ok("explain bot gpt-4 rpm=1");
    assert!(
        explained.contains("bot") && explained.contains("acme"),
        "its parent's limits apply: {explained}"
    );
}

#[test]
fn import_names_a_missing_namespace() {
    skip_without!(DYNOXIDE);
    let (table, server) = (unique("zae"), address(DYNOXIDE));
    create(&server, &table);
    let url = format!("dynamodb://{table}?region=eu-central-1&endpoint={server}&timeout_ms=30000");
    let run = kit::run(&mut Fixture::new().command(&["import", "zae-limiter", &url]));
    assert_eq!((run.code, run.stdout.as_str()), (1, ""), "{run:?}");
    assert!(run.stderr.contains("no namespace `default` of zae-limiter 0.10 or later"), "{run:?}");
}
