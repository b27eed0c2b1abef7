//! The table itself: made, completed, looked at, removed, and written as a template for `CloudFormation`.

use std::fmt::Write as _;
use std::time::Duration;

use aws_sdk_dynamodb::error::{BuildError, ProvideErrorMetadata};
use aws_sdk_dynamodb::types::{
    AttributeDefinition, BillingMode, CreateGlobalSecondaryIndexAction, GlobalSecondaryIndex,
    GlobalSecondaryIndexDescription, GlobalSecondaryIndexUpdate, IndexStatus, KeySchemaElement, KeyType,
    Projection, ProjectionType, ScalarAttributeType, TableDescription, TableStatus, TimeToLiveDescription,
    TimeToLiveSpecification, TimeToLiveStatus,
};

use super::keys::{GSI1, GSI2, GSI3, PK, SK, TTL};
use super::link::Link;
use super::trouble::Failed;
use crate::error::StoreError;
use crate::lifecycle::Part;

/// The indexes, all of keys only: whoever finds an item by one reads the item itself. What changes with every draw is in none
/// of them, so that no draw writes to an index that all draws of a resource would share.
const INDEXES: [&str; 3] = [GSI1, GSI2, GSI3];
/// How often a table that is being made is looked at.
pub(super) const LOOKED_AT_EVERY: Duration = Duration::from_millis(500);
/// So often it is looked at.
const LOOKS: usize = 1_200;
/// And so often one that was made may be unknown to whoever answers.
pub(super) const LOOKS_UNKNOWN: usize = 60;

/// What is there of a table.
#[derive(Debug)]
pub(super) struct Found {
    /// What it would have to have too, in the order it is made in.
    pub(super) missing: Vec<Part>,
    /// How its reads and writes are paid for.
    pub(super) billing: &'static str,
    /// The engine refuses to remove it.
    pub(super) is_protected: bool,
    /// Another attribute than ours that its items expire by.
    pub(super) foreign_expiry: Option<String>,
}

/// Describes the table; `None` if it does not exist. A table whose keys or indexes differ from ours is another program's.
pub(super) async fn look(link: &Link) -> Result<Option<Found>, StoreError> {
    let Some(table) = describe(link).await? else { return Ok(None) };
    check_shape(link, &table)?;
    let mut missing = Vec::new();
    for index in INDEXES {
        if index_in(&table, index).is_none() {
            missing.push(Part::new("index", index));
        }
    }
    let expiry = link.client.describe_time_to_live().table_name(&link.table).send().await;
    let expiry = expiry.map_err(|error| link.whose.failed(error).into_error())?;
    let attribute = expires_by(expiry.time_to_live_description());
    if attribute.as_deref() != Some(TTL) {
        missing.push(Part::new("expiry", TTL));
    }
    let foreign_expiry = attribute.filter(|attribute| attribute != TTL);
    let billing = table.billing_mode_summary().and_then(|summary| summary.billing_mode());
    let billing = if billing == Some(&BillingMode::PayPerRequest) { "on demand" } else { "provisioned" };
    let is_protected = table.deletion_protection_enabled() == Some(true);
    Ok(Some(Found { missing, billing, is_protected, foreign_expiry }))
}

/// Checks the names and types of the keys, of the table and of each index that it has.
fn check_shape(link: &Link, table: &TableDescription) -> Result<(), StoreError> {
    check_keys(link, table, "its keys", table.key_schema(), [PK, SK])?;
    for index in INDEXES {
        if let Some(found) = index_in(table, index) {
            let ours = [format!("{index}PK"), format!("{index}SK")];
            let what = format!("the keys of its index {index}");
            check_keys(link, table, &what, found.key_schema(), [&ours[0], &ours[1]])?;
        }
    }
    Ok(())
}

fn check_keys(
    link: &Link,
    table: &TableDescription,
    what: &str,
    found: &[KeySchemaElement],
    ours: [&str; 2],
) -> Result<(), StoreError> {
    let type_of = |name: &str| {
        let mut types = table.attribute_definitions().iter();
        types.find(|known| known.attribute_name() == name).map_or("", |known| known.attribute_type().as_str())
    };
    let shown = |name: &str| format!("{name} ({})", type_of(name));
    let found: Vec<String> = found.iter().map(|key| shown(key.attribute_name())).collect();
    let ours = ours.map(|name| format!("{name} (S)"));
    if found == ours {
        return Ok(());
    }
    let what = format!(
        "`{}` belongs to another program: {what} are {}, not {}",
        link.whose.place,
        found.join(" and "),
        ours.join(" and ")
    );
    Err(StoreError::Invalid { what })
}

fn index_in<'a>(table: &'a TableDescription, name: &str) -> Option<&'a GlobalSecondaryIndexDescription> {
    table.global_secondary_indexes().iter().find(|index| index.index_name() == Some(name))
}

/// Whether the table holds no item.
pub(super) async fn is_empty(link: &Link) -> Result<bool, StoreError> {
    let mut retries = link.retries();
    loop {
        match link.client.scan().table_name(&link.table).limit(1).consistent_read(true).send().await {
            Ok(answer) => return Ok(answer.items().is_empty()),
            Err(error) => retries.bear(link.whose.failed(error)).await?,
        }
    }
}

/// Makes the table with its indexes, and waits until it is there. Answers whether it was made.
pub(super) async fn make(link: &Link) -> Result<bool, StoreError> {
    let call = link.client.create_table().table_name(&link.table);
    let mut call = call.billing_mode(BillingMode::PayPerRequest);
    for name in attributes() {
        call = call.attribute_definitions(definition(&name)?);
    }
    for element in key_schema(PK, SK)? {
        call = call.key_schema(element);
    }
    for index in INDEXES {
        let (schema, projection) = index_of(index)?;
        let index = GlobalSecondaryIndex::builder().index_name(index).set_key_schema(Some(schema));
        call = call.global_secondary_indexes(index.projection(projection).build().map_err(bad)?);
    }
    let is_made = match call.send().await {
        Ok(_) => true,
        Err(error) if error.code() == Some("ResourceInUseException") => false,
        Err(error) => return Err(link.whose.failed(error).into_error()),
    };
    wait(link).await?;
    Ok(is_made)
}

/// Adds a part that a table lacks, and waits until it is there.
pub(super) async fn add(link: &Link, part: &Part) -> Result<(), StoreError> {
    if part.kind == "expiry" {
        return expire(link).await;
    }
    let (schema, projection) = index_of(&part.name)?;
    let index = CreateGlobalSecondaryIndexAction::builder().index_name(&part.name);
    let index = index.set_key_schema(Some(schema)).projection(projection).build().map_err(bad)?;
    let mut call = link.client.update_table().table_name(&link.table);
    for name in [format!("{}PK", part.name), format!("{}SK", part.name)] {
        call = call.attribute_definitions(definition(&name)?);
    }
    let update = GlobalSecondaryIndexUpdate::builder().create(index).build();
    let call = call.global_secondary_index_updates(update).send();
    call.await.map_err(|error| link.whose.failed(error).into_error())?;
    wait(link).await
}

/// Has the engine forget items by their own time.
async fn expire(link: &Link) -> Result<(), StoreError> {
    let expiry = TimeToLiveSpecification::builder().enabled(true).attribute_name(TTL).build().map_err(bad)?;
    let call = link.client.update_time_to_live().table_name(&link.table).time_to_live_specification(expiry);
    match call.send().await {
        Ok(_) => Ok(()),
        Err(error) if error.code() == Some("ValidationException") => {
            let found = link.client.describe_time_to_live().table_name(&link.table).send().await;
            let found = found.map_err(|error| link.whose.failed(error).into_error())?;
            match expires_by(found.time_to_live_description()) {
                // It is so already.
                Some(attribute) if attribute == TTL => Ok(()),
                Some(attribute) => {
                    let what = format!(
                        "`{}`: its items expire by `{attribute}`, and not by `{TTL}`: have the engine end that first",
                        link.whose.place
                    );
                    Err(StoreError::Invalid { what })
                }
                None => Err(link.whose.failed(error).into_error()),
            }
        }
        Err(error) => Err(link.whose.failed(error).into_error()),
    }
}

/// The attribute that items expire by, if they do.
fn expires_by(found: Option<&TimeToLiveDescription>) -> Option<String> {
    let is_on =
        |status: &TimeToLiveStatus| matches!(status, TimeToLiveStatus::Enabled | TimeToLiveStatus::Enabling);
    let found = found.filter(|found| found.time_to_live_status().is_some_and(is_on))?;
    found.attribute_name().map(str::to_owned)
}

/// Removes the table and all that is in it. Answers whether there was one.
pub(super) async fn remove(link: &Link) -> Result<bool, StoreError> {
    match link.client.delete_table().table_name(&link.table).send().await {
        Ok(_) => {}
        Err(error) if error.code() == Some("ResourceNotFoundException") => return Ok(false),
        Err(error) => return Err(link.whose.failed(error).into_error()),
    }
    for _ in 0..LOOKS {
        if describe(link).await?.is_none() {
            return Ok(true);
        }
        tokio::time::sleep(LOOKED_AT_EVERY).await;
    }
    Err(StoreError::unavailable(format!("`{}` is still there after {LOOKS} looks", link.whose.place)))
}

/// What a program that uses a table may do with it and its indexes.
const RIGHTS: [&str; 8] = [
    "BatchGetItem",
    "ConditionCheckItem",
    "DeleteItem",
    "DescribeTable",
    "GetItem",
    "Query",
    "Scan",
    "UpdateItem",
];

/// The table and a policy for its users as a template of `CloudFormation`, in YAML.
pub(super) fn template(table: &str) -> String {
    let mut text = String::from(
        "AWSTemplateFormatVersion: \"2010-09-09\"\nDescription: A table for tidegate\nResources:\n  Limits:\n    \
         Type: AWS::DynamoDB::Table\n    DeletionPolicy: Retain\n    UpdateReplacePolicy: Retain\n    Properties:\n",
    );
    let mut line = |indent: usize, line: &str| {
        // To a string nothing fails.
        let _ = writeln!(text, "{:indent$}{line}", "");
    };
    line(6, &format!("TableName: {}", quoted(table)));
    line(6, "BillingMode: PAY_PER_REQUEST");
    line(6, "PointInTimeRecoverySpecification: {PointInTimeRecoveryEnabled: true}");
    line(6, &format!("TimeToLiveSpecification: {{AttributeName: {TTL}, Enabled: true}}"));
    line(6, "AttributeDefinitions:");
    for name in attributes() {
        line(8, &format!("- {{AttributeName: {name}, AttributeType: S}}"));
    }
    line(6, "KeySchema:");
    line(8, &format!("- {{AttributeName: {PK}, KeyType: HASH}}"));
    line(8, &format!("- {{AttributeName: {SK}, KeyType: RANGE}}"));
    line(6, "GlobalSecondaryIndexes:");
    for index in INDEXES {
        line(8, &format!("- IndexName: {index}"));
        line(10, "Projection: {ProjectionType: KEYS_ONLY}");
        line(10, "KeySchema:");
        line(12, &format!("- {{AttributeName: {index}PK, KeyType: HASH}}"));
        line(12, &format!("- {{AttributeName: {index}SK, KeyType: RANGE}}"));
    }
    line(2, "Access:");
    line(4, "Type: AWS::IAM::ManagedPolicy");
    line(4, "Properties:");
    line(6, "Description: What a program that uses the table may do");
    line(6, "PolicyDocument:");
    line(8, "Version: \"2012-10-17\"");
    line(8, "Statement:");
    line(10, "- Effect: Allow");
    line(12, "Action:");
    for right in RIGHTS {
        line(14, &format!("- dynamodb:{right}"));
    }
    line(12, "Resource: [!GetAtt Limits.Arn, !Sub \"${Limits.Arn}/index/*\"]");
    text.push_str("Outputs:\n  Table: {Value: !Ref Limits}\n  Access: {Value: !Ref Access}\n");
    text
}

/// The attributes that keys are made of.
fn attributes() -> Vec<String> {
    let own = [PK.to_owned(), SK.to_owned()];
    own.into_iter()
        .chain(INDEXES.iter().flat_map(|index| [format!("{index}PK"), format!("{index}SK")]))
        .collect()
}

fn definition(name: &str) -> Result<AttributeDefinition, StoreError> {
    let definition = AttributeDefinition::builder().attribute_name(name);
    definition.attribute_type(ScalarAttributeType::S).build().map_err(bad)
}

fn key_schema(pk: &str, sk: &str) -> Result<Vec<KeySchemaElement>, StoreError> {
    let element = |name: &str, kind| KeySchemaElement::builder().attribute_name(name).key_type(kind).build();
    Ok(vec![element(pk, KeyType::Hash).map_err(bad)?, element(sk, KeyType::Range).map_err(bad)?])
}

fn index_of(name: &str) -> Result<(Vec<KeySchemaElement>, Projection), StoreError> {
    let schema = key_schema(&format!("{name}PK"), &format!("{name}SK"))?;
    Ok((schema, Projection::builder().projection_type(ProjectionType::KeysOnly).build()))
}

#[expect(clippy::needless_pass_by_value, reason = "as `map_err` hands it on")]
fn bad(error: BuildError) -> StoreError {
    StoreError::Invalid { what: error.to_string() }
}

/// The tables of the account whose names begin with that of the link, in the order of names.
pub(super) async fn names(link: &Link) -> Result<Vec<String>, StoreError> {
    let (mut names, mut last) = (Vec::new(), None);
    loop {
        let page = link.client.list_tables().set_exclusive_start_table_name(last).send().await;
        let page = page.map_err(|error| link.whose.failed(error).into_error())?;
        names.extend(page.table_names().iter().filter(|name| name.starts_with(&link.table)).cloned());
        last = page.last_evaluated_table_name;
        if last.is_none() {
            return Ok(names);
        }
    }
}

/// The table as the engine describes it; `None` where there is none.
pub(super) async fn describe(link: &Link) -> Result<Option<TableDescription>, StoreError> {
    match link.client.describe_table().table_name(&link.table).send().await {
        Ok(found) => Ok(found.table),
        Err(error) if error.code() == Some("ResourceNotFoundException") => Ok(None),
        Err(error) => Err(link.whose.failed(error).into_error()),
    }
}

/// Waits until the table and all its indexes can be used.
async fn wait(link: &Link) -> Result<(), StoreError> {
    for look in 0..LOOKS {
        match link.client.describe_table().table_name(&link.table).send().await {
            Ok(found) if found.table().is_some_and(is_ready) => return Ok(()),
            Ok(_) => {}
            // What was made a moment ago is not known everywhere yet.
            Err(error) if error.code() == Some("ResourceNotFoundException") && look < LOOKS_UNKNOWN => {}
            Err(error) => match link.whose.failed(error) {
                Failed::Unavailable { .. } => {}
                failed => return Err(failed.into_error()),
            },
        }
        tokio::time::sleep(LOOKED_AT_EVERY).await;
    }
    Err(StoreError::unavailable(format!("`{}` is not there after {LOOKS} looks", link.whose.place)))
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
        for right in RIGHTS {
            assert!(template.contains(&format!("              - dynamodb:{right}\n")), "{right}");
        }
        assert!(template.contains(r#"Resource: [!GetAtt Limits.Arn, !Sub "${Limits.Arn}/index/*"]"#));
    }

    #[test]
    fn the_template_has_the_keys_and_the_three_indexes() {
        let template = template("limits");
        assert!(template.contains("TableName: \"limits\""));
        assert_eq!(template.matches("IndexName: GSI").count(), 3);
        assert_eq!(template.matches("KEYS_ONLY").count(), 3);
        assert_eq!(template.matches("AttributeType: S").count(), 8);
        assert!(template.contains("AttributeName: ttl, Enabled: true"));
        assert!(!template.contains("Stream"), "nothing reads a stream");
    }
}
