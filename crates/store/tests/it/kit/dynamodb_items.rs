//! Direct access to the items of a table, bypassing the store.

use std::collections::HashMap;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::config::{BehaviorVersion, Credentials, Region};
use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_store::DynamoDb;

use crate::kit::engine;

/// A client for the table of a store.
pub(crate) struct RawTable {
    client: Client,
    table: String,
}

/// The name of the table of an open store.
pub(crate) fn table_of(store: &DynamoDb) -> String {
    store.place().trim_start_matches("dynamodb://").split('?').next().expect("a table").to_owned()
}

impl RawTable {
    pub(crate) fn on(variable: &str, store: &DynamoDb) -> Self {
        let config = aws_sdk_dynamodb::Config::builder()
            .behavior_version(BehaviorVersion::latest())
            .region(Region::new("eu-central-1"))
            .endpoint_url(engine::address(variable))
            .credentials_provider(Credentials::new("tidegate", "tidegate", None, None, "given"))
            .http_client(aws_smithy_http_client::Builder::new().build_http())
            .build();
        Self { client: Client::from_conf(config), table: table_of(store) }
    }

    /// The item of an entity's bucket.
    pub(crate) async fn item(&self, entity: &str) -> HashMap<String, AttributeValue> {
        let call = self.client.get_item().table_name(&self.table).set_key(Some(key(entity)));
        let found = call.consistent_read(true).send().await.expect("the table exists");
        found.item.unwrap_or_default()
    }

    /// Deletes the item, as the engine does when it expires.
    pub(crate) async fn delete(&self, entity: &str) {
        let call = self.client.delete_item().table_name(&self.table).set_key(Some(key(entity)));
        call.send().await.expect("the item is deleted");
    }

    /// Sets an attribute of the item.
    pub(crate) async fn set(&self, entity: &str, name: &str, value: AttributeValue) {
        let call = self.client.update_item().table_name(&self.table).set_key(Some(key(entity)));
        let call = call.update_expression("SET #0 = :0").expression_attribute_names("#0", name);
        call.expression_attribute_values(":0", value).send().await.expect("the attribute is set");
    }

    /// Removes an attribute of the item.
    pub(crate) async fn remove(&self, entity: &str, name: &str) {
        let call = self.client.update_item().table_name(&self.table).set_key(Some(key(entity)));
        let call = call.update_expression("REMOVE #0").expression_attribute_names("#0", name);
        call.send().await.expect("the attribute is removed");
    }

    /// All items whose partition key has this prefix.
    pub(crate) async fn items(&self, prefix: &str) -> Vec<HashMap<String, AttributeValue>> {
        let scan = self.client.scan().table_name(&self.table).consistent_read(true);
        let found = scan.send().await.expect("the table exists").items.unwrap_or_default();
        let has_prefix = |item: &HashMap<String, AttributeValue>| {
            item["PK"].as_s().is_ok_and(|key| key.starts_with(prefix))
        };
        found.into_iter().filter(has_prefix).collect()
    }

    /// Deletes all items.
    pub(crate) async fn clear(&self) {
        for item in self.items("").await {
            let key = ["PK", "SK"].map(|name| (name.to_owned(), item[name].clone()));
            let call = self.client.delete_item().table_name(&self.table).set_key(Some(key.into()));
            call.send().await.expect("the item is deleted");
        }
    }

    /// Writes an item and replaces an existing one.
    pub(crate) async fn put(&self, item: HashMap<String, AttributeValue>) {
        let call = self.client.put_item().table_name(&self.table).set_item(Some(item));
        call.send().await.expect("the item is written");
    }
}

fn key(entity: &str) -> HashMap<String, AttributeValue> {
    let text = |text: String| AttributeValue::S(text);
    HashMap::from([
        ("PK".to_owned(), text(format!("ENTITY#{entity}"))),
        ("SK".to_owned(), text("#BUCKET#gpt".to_owned())),
    ])
}
