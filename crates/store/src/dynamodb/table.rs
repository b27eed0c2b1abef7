//! The table: creation, completion, inspection, deletion, and a `CloudFormation` template.

use std::time::Duration;

use aws_sdk_dynamodb::error::ProvideErrorMetadata;
use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, CreateGlobalSecondaryIndexAction, GlobalSecondaryIndex,
    GlobalSecondaryIndexDescription, GlobalSecondaryIndexUpdate, IndexStatus, KeySchemaElement, KeyType,
    Projection, ProjectionType, ScalarAttributeType, TableDescription, TableStatus, TimeToLiveSpecification,
    TimeToLiveStatus,
};

use super::client::{TableClient, invalid};
use super::errors::RequestError;
use super::keys::{GSI1, GSI2, GSI3, PK, SK, TTL};
use crate::error::StoreError;
use crate::lifecycle::Part;

/// The indexes, which project keys only: items found by them are read from the table. No index has an
/// attribute that every draw changes, so draws never write to a partition that all draws of a resource share.
const INDEXES: [&str; 3] = [GSI1, GSI2, GSI3];
/// The prefix of the table's own keys, in place of the name of an index.
const TABLE: &str = "";
/// The polling interval while a table is being created.
pub(super) const POLL_INTERVAL: Duration = Duration::from_millis(500);
/// The most polls.
const POLLS_MAX: usize = 1_200;
/// The most polls during which a new table may still be unknown.
pub(super) const UNKNOWN_POLLS_MAX: usize = 60;

/// What exists of a table.
#[derive(Debug)]
pub(super) struct TableInfo {
    /// Missing parts, in the order of their creation.
    pub(super) missing: Vec<Part>,
    /// The billing mode.
    pub(super) billing: &'static str,
    /// Whether the engine refuses to delete it.
    pub(super) is_protected: bool,
    /// A foreign attribute by which its items expire.
    pub(super) foreign_expiry: Option<String>,
}

/// Describes the table; `None` if it does not exist. A table whose keys or indexes differ from ours is
/// another program's.
pub(super) async fn inspect(client: &TableClient) -> Result<Option<TableInfo>, StoreError> {
    let Some(table) = describe(client).await? else { return Ok(None) };
    check_shape(client, &table)?;
    let mut missing = Vec::new();
    for index in INDEXES {
        if index_in(&table, index).is_none() {
            missing.push(Part::new("index", index));
        }
    }
    let attribute = expires_by(client).await?;
    if attribute.as_deref() != Some(TTL) {
        missing.push(Part::new("expiry", TTL));
    }
    let foreign_expiry = attribute.filter(|attribute| attribute != TTL);
    let billing = table.billing_mode_summary().and_then(|summary| summary.billing_mode());
    let billing = if billing == Some(&BillingMode::PayPerRequest) { "on demand" } else { "provisioned" };
    let is_protected = table.deletion_protection_enabled() == Some(true);
    Ok(Some(TableInfo { missing, billing, is_protected, foreign_expiry }))
}

/// Checks the names and types of the keys, of the table and of each index that it has.
fn check_shape(client: &TableClient, table: &TableDescription) -> Result<(), StoreError> {
    check_keys(client, table, "its keys", table.key_schema(), keys_of(TABLE))?;
    for index in INDEXES {
        if let Some(found) = index_in(table, index) {
            let what = format!("the keys of its index {index}");
            check_keys(client, table, &what, found.key_schema(), keys_of(index))?;
        }
    }
    Ok(())
}

fn check_keys(
    client: &TableClient,
    table: &TableDescription,
    what: &str,
    found: &[KeySchemaElement],
    expected: [String; 2],
) -> Result<(), StoreError> {
    let type_of = |name: &str| {
        let mut types = table.attribute_definitions().iter();
        types.find(|known| known.attribute_name() == name).map_or("", |known| known.attribute_type().as_str())
    };
    let shown = |name: &str| format!("{name} ({})", type_of(name));
    let found: Vec<String> = found.iter().map(|key| shown(key.attribute_name())).collect();
    let expected = expected.map(|name| format!("{name} (S)"));
    if found == expected {
        return Ok(());
    }
    let what = format!(
        "`{}` belongs to another program: {what} are {}, not {}",
        client.context.place,
        found.join(" and "),
        expected.join(" and ")
    );
    Err(StoreError::Invalid { what })
}

fn index_in<'a>(table: &'a TableDescription, name: &str) -> Option<&'a GlobalSecondaryIndexDescription> {
    table.global_secondary_indexes().iter().find(|index| index.index_name() == Some(name))
}

/// Whether the table holds no item.
pub(super) async fn is_empty(client: &TableClient) -> Result<bool, StoreError> {
    let call = client.sdk.scan().table_name(&client.table).limit(1).consistent_read(true);
    Ok(client.retry(|| call.clone().send()).await?.items().is_empty())
}

/// Creates the table with its indexes, and waits until it is active. Returns whether it is new.
pub(super) async fn create(client: &TableClient) -> Result<bool, StoreError> {
    let call = client.sdk.create_table().table_name(&client.table);
    let mut call = call.billing_mode(BillingMode::PayPerRequest);
    for name in attributes() {
        call = call.attribute_definitions(definition(&name)?);
    }
    call = call.set_key_schema(Some(key_schema(TABLE)?));
    for index in INDEXES {
        let schema = key_schema(index)?;
        let index = GlobalSecondaryIndex::builder().index_name(index).set_key_schema(Some(schema));
        call = call.global_secondary_indexes(index.projection(keys_only()).build().map_err(invalid)?);
    }
    let is_new = match call.send().await {
        Ok(_) => true,
        Err(error) if error.code() == Some("ResourceInUseException") => false,
        Err(error) => return Err(client.context.store_error(error)),
    };
    wait(client).await?;
    Ok(is_new)
}

/// Adds a missing part, and waits until it is active.
pub(super) async fn add(client: &TableClient, part: &Part) -> Result<(), StoreError> {
    if part.kind == "expiry" {
        return enable_expiry(client).await;
    }
    let index = CreateGlobalSecondaryIndexAction::builder().index_name(&part.name);
    let index = index.set_key_schema(Some(key_schema(&part.name)?)).projection(keys_only());
    let index = index.build().map_err(invalid)?;
    let mut call = client.sdk.update_table().table_name(&client.table);
    for name in keys_of(&part.name) {
        call = call.attribute_definitions(definition(&name)?);
    }
    let update = GlobalSecondaryIndexUpdate::builder().create(index).build();
    let call = call.global_secondary_index_updates(update).send();
    call.await.map_err(|error| client.context.store_error(error))?;
    wait(client).await
}

/// Enables the expiry of items.
async fn enable_expiry(client: &TableClient) -> Result<(), StoreError> {
    let expiry =
        TimeToLiveSpecification::builder().enabled(true).attribute_name(TTL).build().map_err(invalid)?;
    let call = client.sdk.update_time_to_live().table_name(&client.table).time_to_live_specification(expiry);
    match call.send().await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Some("ValidationException") => {
            match expires_by(client).await? {
                // It is enabled already.
                Some(attribute) if attribute == TTL => Ok(()),
                Some(attribute) => {
                    let what = format!(
                        "`{}`: its items expire by `{attribute}`, not by `{TTL}`: disable that time to live first",
                        client.context.place
                    );
                    Err(StoreError::Invalid { what })
                }
                None => Err(client.context.store_error(error)),
            }
        }
        Err(error) => Err(client.context.store_error(error)),
    }
}

/// The attribute that items expire by, if they do.
async fn expires_by(client: &TableClient) -> Result<Option<String>, StoreError> {
    let found = client.sdk.describe_time_to_live().table_name(&client.table).send().await;
    let found = found.map_err(|error| client.context.store_error(error))?;
    let is_on =
        |status: &TimeToLiveStatus| matches!(status, TimeToLiveStatus::Enabled | TimeToLiveStatus::Enabling);
    let expiry =
        found.time_to_live_description.filter(|found| found.time_to_live_status().is_some_and(is_on));
    Ok(expiry.and_then(|expiry| expiry.attribute_name))
}

/// Deletes the table. Returns whether it existed.
pub(super) async fn remove(client: &TableClient) -> Result<bool, StoreError> {
    match client.sdk.delete_table().table_name(&client.table).send().await {
        Ok(_) => {}
        Err(error) if error.code() == Some("ResourceNotFoundException") => return Ok(false),
        Err(error) => return Err(client.context.store_error(error)),
    }
    for _ in 0..POLLS_MAX {
        if describe(client).await?.is_none() {
            return Ok(true);
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Err(StoreError::unavailable(format!("`{}` still exists after {POLLS_MAX} checks", client.context.place)))
}

/// A `CloudFormation` template of the table and of a policy for its users, in YAML.
pub(super) fn template(table: &str) -> String {
    include_str!("template.yaml").replace("TABLE", &quoted(table))
}

/// The attributes of the keys of an index, or of the table.
fn keys_of(index: &str) -> [String; 2] {
    [format!("{index}{PK}"), format!("{index}{SK}")]
}

/// The attributes of all keys.
fn attributes() -> impl Iterator<Item = String> {
    std::iter::once(TABLE).chain(INDEXES).flat_map(keys_of)
}

fn definition(name: &str) -> Result<AttributeDefinition, StoreError> {
    let definition = AttributeDefinition::builder().attribute_name(name);
    definition.attribute_type(ScalarAttributeType::S).build().map_err(invalid)
}

fn key_schema(index: &str) -> Result<Vec<KeySchemaElement>, StoreError> {
    let keys = keys_of(index).into_iter().zip([KeyType::Hash, KeyType::Range]);
    let element = |(name, kind)| {
        KeySchemaElement::builder().attribute_name(name).key_type(kind).build().map_err(invalid)
    };
    keys.map(element).collect()
}

fn keys_only() -> Projection {
    Projection::builder().projection_type(ProjectionType::KeysOnly).build()
}

/// The tables of the account whose names begin with that of the client, by name.
pub(super) async fn names(client: &TableClient) -> Result<Vec<String>, StoreError> {
    let (mut names, mut last) = (Vec::new(), None);
    loop {
        let page = client.sdk.list_tables().set_exclusive_start_table_name(last).send().await;
        let page = page.map_err(|error| client.context.store_error(error))?;
        names.extend(page.table_names().iter().filter(|name| name.starts_with(&client.table)).cloned());
        last = page.last_evaluated_table_name;
        if last.is_none() {
            return Ok(names);
        }
    }
}

/// The engine's description of the table; `None` if it does not exist.
pub(super) async fn describe(client: &TableClient) -> Result<Option<TableDescription>, StoreError> {
    match client.sdk.describe_table().table_name(&client.table).send().await {
        Ok(found) => Ok(found.table),
        Err(error) if error.code() == Some("ResourceNotFoundException") => Ok(None),
        Err(error) => Err(client.context.store_error(error)),
    }
}

/// Waits until the table and its indexes are active.
async fn wait(client: &TableClient) -> Result<(), StoreError> {
    for poll in 0..POLLS_MAX {
        match client.sdk.describe_table().table_name(&client.table).send().await {
            Ok(found) if found.table().is_some_and(is_ready) => return Ok(()),
            Ok(_) => {}
            // A new table is not known everywhere at once.
            Err(error) if error.code() == Some("ResourceNotFoundException") && poll < UNKNOWN_POLLS_MAX => {}
            Err(error) => match client.context.request_error(error) {
                RequestError::Unavailable { .. } => {}
                request_error => return Err(request_error.into_error()),
            },
        }
        tokio::time::sleep(POLL_INTERVAL).await;
    }
    Err(StoreError::unavailable(format!("`{}` is not active after {POLLS_MAX} checks", client.context.place)))
}

fn is_ready(table: &TableDescription) -> bool {
    let mut indexes = table.global_secondary_indexes().iter();
    table.table_status() == Some(&TableStatus::Active)
        && indexes.all(|index| index.index_status().is_none_or(|status| *status == IndexStatus::Active))
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\""))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn template_has_a_policy_for_programs() {
        let template = template("limits");
        assert!(template.contains("Type: AWS::IAM::ManagedPolicy"));
        // The actions of the SDK that `client.rs` sends, and of the parts of its transactions.
        for right in ["BatchGetItem", "ConditionCheckItem", "DeleteItem", "DescribeTable", "GetItem"] {
            assert!(template.contains(&format!("              - dynamodb:{right}\n")), "{right}");
        }
        for right in ["Query", "Scan", "UpdateItem"] {
            assert!(template.contains(&format!("              - dynamodb:{right}\n")), "{right}");
        }
        assert!(template.contains(r#"Resource: [!GetAtt Limits.Arn, !Sub "${Limits.Arn}/index/*"]"#));
    }

    #[test]
    fn template_has_the_keys_and_three_indexes() {
        let template = template("limits");
        assert!(template.contains("TableName: \"limits\""));
        assert_eq!(template.matches("IndexName: GSI").count(), 3);
        assert_eq!(template.matches("KEYS_ONLY").count(), 3);
        assert_eq!(template.matches("AttributeType: S").count(), attributes().count());
        for name in attributes() {
            assert!(template.contains(&format!("- {{AttributeName: {name}, KeyType: ")), "{name}");
        }
        assert!(template.contains("AttributeName: ttl, Enabled: true"));
        assert!(!template.contains("Stream"), "nothing reads a stream");
    }
}
