//! Requests to the table, one attempt each, and their errors.
//!
//! The SDK does not retry: only this store knows whether a write is safe to repeat.

use std::collections::HashMap;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::error::{BuildError, SdkError};
use aws_sdk_dynamodb::operation::transact_write_items::TransactWriteItemsError;
use aws_sdk_dynamodb::operation::update_item::UpdateItemError;
use aws_sdk_dynamodb::types::{
    AttributeValue, ConditionCheck, Delete, Get, KeysAndAttributes, ReturnValue,
    ReturnValuesOnConditionCheckFailure, Select, TransactGetItem, TransactWriteItem, Update,
};
use tokio::time::Instant;

use super::errors::{ErrorContext, ItemCondition, RequestError, code_error};
use super::expression::{UpdateExpression, Value};
use super::keys::{Item, Key, PK, SK};
use crate::error::StoreError;

/// Items per `BatchGetItem`.
const READ_BATCH: usize = 100;
/// The first pause before a retry.
const PAUSE_MIN: Duration = Duration::from_millis(4);
/// The longest pause.
const PAUSE_MAX: Duration = Duration::from_millis(120);

/// A client of one table.
#[derive(Debug)]
pub(super) struct TableClient {
    pub(super) sdk: Client,
    pub(super) table: String,
    pub(super) context: ErrorContext,
    pub(super) timeout: Duration,
}

/// An action of a transaction.
#[derive(Debug, Clone)]
pub(super) enum Action {
    Update(UpdateExpression),
    Delete(UpdateExpression),
    /// Checks the condition only.
    Check(UpdateExpression),
}

/// A range of sort keys in a partition of the table or of an index.
#[derive(Debug, Clone)]
pub(super) struct Range {
    /// The index; `None` for the table.
    pub(super) index: Option<&'static str>,
    pub(super) pk: String,
    /// The prefix of the sort keys.
    pub(super) prefix: String,
    /// Only sort keys after this.
    pub(super) after: Option<String>,
    /// Only sort keys up to this.
    pub(super) up_to: Option<String>,
}

impl Range {
    pub(super) const fn new(index: Option<&'static str>, pk: String, prefix: String) -> Self {
        Self { index, pk, prefix, after: None, up_to: None }
    }

    pub(super) fn after(mut self, after: Option<String>) -> Self {
        self.after = after;
        self
    }

    pub(super) fn up_to(mut self, last: String) -> Self {
        self.up_to = Some(last);
        self
    }

    fn names(&self) -> (String, String) {
        self.index
            .map_or((PK.to_owned(), SK.to_owned()), |index| (format!("{index}PK"), format!("{index}SK")))
    }
}

/// The time limit of retries, and their number.
#[derive(Debug)]
pub(super) struct RetryTimer {
    until: Instant,
    tries: u32,
}

impl RetryTimer {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { until: Instant::now() + timeout, tries: 0 }
    }

    /// Waits before a retry: exponential backoff with jitter, so that colliding calls do not collide again.
    /// Returns the error if the time limit would pass.
    pub(super) async fn pause(&mut self, error: StoreError) -> Result<(), StoreError> {
        let most = PAUSE_MIN.saturating_mul(1 << self.tries.min(5)).min(PAUSE_MAX);
        self.tries += 1;
        let part = u32::try_from(random() % 1_000).unwrap_or(0);
        let pause = most / 4 + most * part / 1_000;
        if Instant::now() + pause >= self.until {
            return Err(error);
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// Like [`pause`](Self::pause), but returns a permanent error at once.
    pub(super) async fn wait_or_fail(&mut self, error: RequestError) -> Result<(), StoreError> {
        match error {
            RequestError::Permanent(error) => Err(error),
            error => self.pause(error.into_error()).await,
        }
    }
}

/// An unpredictable number: two hashers of this process have keys of their own.
pub(super) fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

impl TableClient {
    pub(super) fn retries(&self) -> RetryTimer {
        RetryTimer::new(self.timeout)
    }

    /// Reads an item (consistently).
    pub(super) async fn get(&self, key: &Key) -> Result<Option<Item>, StoreError> {
        let mut retries = self.retries();
        loop {
            let call = self.sdk.get_item().table_name(&self.table).set_key(Some(key.attributes()));
            match call.consistent_read(true).send().await {
                Ok(found) => return Ok(found.item),
                Err(error) => retries.wait_or_fail(self.context.request_error(error)).await?,
            }
        }
    }

    /// Reads items by their keys (consistently). Missing ones are left out.
    pub(super) async fn get_all(&self, keys: &[Key]) -> Result<HashMap<Key, Item>, StoreError> {
        let mut found = HashMap::with_capacity(keys.len());
        let mut keys: Vec<Key> = keys.to_vec();
        keys.sort_unstable_by(|one, other| (&one.pk, &one.sk).cmp(&(&other.pk, &other.sk)));
        keys.dedup();
        for keys in keys.chunks(READ_BATCH) {
            let mut left: Vec<Item> = keys.iter().map(Key::attributes).collect();
            let mut retries = self.retries();
            while !left.is_empty() {
                let wanted = KeysAndAttributes::builder().set_keys(Some(left.clone())).consistent_read(true);
                let wanted =
                    wanted.build().map_err(|error| StoreError::Invalid { what: error.to_string() })?;
                match self.sdk.batch_get_item().request_items(&self.table, wanted).send().await {
                    Err(error) => retries.wait_or_fail(self.context.request_error(error)).await?,
                    Ok(answer) => {
                        let items = answer.responses.and_then(|mut tables| tables.remove(&self.table));
                        for item in items.into_iter().flatten() {
                            if let Some(key) = Key::of(&item) {
                                found.insert(key, item);
                            }
                        }
                        let rest = answer.unprocessed_keys.and_then(|mut tables| tables.remove(&self.table));
                        left = rest.map(|rest| rest.keys).unwrap_or_default();
                        if !left.is_empty() {
                            let what = format!("`{}` left out some items", self.context.place);
                            retries.pause(StoreError::unavailable(what)).await?;
                        }
                    }
                }
            }
        }
        Ok(found)
    }

    /// Reads at most 100 items in one transaction. Missing ones are left out.
    pub(super) async fn get_at_once(&self, keys: &[Key]) -> Result<HashMap<Key, Item>, StoreError> {
        let invalid = |error: BuildError| StoreError::Invalid { what: error.to_string() };
        let mut gets = Vec::with_capacity(keys.len());
        for key in keys {
            let get = Get::builder().table_name(&self.table).set_key(Some(key.attributes()));
            gets.push(TransactGetItem::builder().get(get.build().map_err(invalid)?).build());
        }
        let mut retries = self.retries();
        loop {
            match self.sdk.transact_get_items().set_transact_items(Some(gets.clone())).send().await {
                Ok(answer) => {
                    let items =
                        answer.responses.unwrap_or_default().into_iter().filter_map(|found| found.item);
                    return Ok(items.filter_map(|item| Some((Key::of(&item)?, item))).collect());
                }
                // A concurrent write of one of them is a reason to read again.
                Err(error) => retries.wait_or_fail(self.context.request_error(error)).await?,
            }
        }
    }

    /// Sends an update, and returns the attributes that it has set.
    pub(super) async fn update(&self, write: &UpdateExpression) -> Result<Item, RequestError> {
        let call = self.sdk.update_item().table_name(&self.table).set_key(Some(write.key.attributes()));
        let call = call
            .update_expression(write.update())
            .set_condition_expression(write.condition())
            .set_expression_attribute_names(write.names())
            .set_expression_attribute_values(write.values())
            .return_values(ReturnValue::UpdatedNew)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        match call.send().await {
            Ok(done) => Ok(done.attributes.unwrap_or_default()),
            Err(SdkError::ServiceError(response))
                if matches!(response.err(), UpdateItemError::ConditionalCheckFailedException(_)) =>
            {
                let UpdateItemError::ConditionalCheckFailedException(unmet) = response.into_err() else {
                    return Err(RequestError::Conflict);
                };
                Err(RequestError::Condition(vec![ItemCondition::Unmet(unmet.item)]))
            }
            Err(error) => Err(self.context.request_error(error)),
        }
    }

    /// Sends these actions in a transaction.
    pub(super) async fn transact(&self, actions: &[Action]) -> Result<(), RequestError> {
        self.transact_as(None, actions).await
    }

    /// Like [`transact`](Self::transact), with an idempotency token: a retry with the same token is applied
    /// once.
    pub(super) async fn transact_as(
        &self,
        token: Option<&str>,
        actions: &[Action],
    ) -> Result<(), RequestError> {
        let built: Result<Vec<_>, _> = actions.iter().map(|action| self.action(action)).collect();
        let built = match built {
            Ok(built) => built,
            Err(error) => {
                return Err(RequestError::Permanent(StoreError::Invalid { what: error.to_string() }));
            }
        };
        let call = self.sdk.transact_write_items().set_transact_items(Some(built));
        match call.set_client_request_token(token.map(str::to_owned)).send().await {
            Ok(_) => Ok(()),
            Err(SdkError::ServiceError(response))
                if matches!(response.err(), TransactWriteItemsError::TransactionCanceledException(_)) =>
            {
                let TransactWriteItemsError::TransactionCanceledException(cancelled) = response.into_err()
                else {
                    return Err(RequestError::Conflict);
                };
                let reasons = cancelled.cancellation_reasons.unwrap_or_default().into_iter();
                let reasons = reasons.map(|reason| (reason.code.unwrap_or_default(), reason.item)).collect();
                Err(cancelled_for(&self.context, reasons))
            }
            Err(error) => Err(self.context.request_error(error)),
        }
    }

    fn action(&self, action: &Action) -> Result<TransactWriteItem, BuildError> {
        let (names, values, condition) = match action {
            Action::Update(write) | Action::Delete(write) | Action::Check(write) => {
                (write.names(), write.values(), write.condition())
            }
        };
        let built = TransactWriteItem::builder();
        let old = ReturnValuesOnConditionCheckFailure::AllOld;
        Ok(match action {
            Action::Update(write) => {
                let update = Update::builder().table_name(&self.table).set_key(Some(write.key.attributes()));
                let update = update.update_expression(write.update()).set_condition_expression(condition);
                let update = update
                    .set_expression_attribute_names(names)
                    .set_expression_attribute_values(values)
                    .return_values_on_condition_check_failure(old);
                built.update(update.build()?).build()
            }
            Action::Delete(write) => {
                let delete = Delete::builder().table_name(&self.table).set_key(Some(write.key.attributes()));
                let delete = delete
                    .set_condition_expression(condition)
                    .set_expression_attribute_names(names)
                    .set_expression_attribute_values(values)
                    .return_values_on_condition_check_failure(old);
                built.delete(delete.build()?).build()
            }
            Action::Check(write) => {
                let check =
                    ConditionCheck::builder().table_name(&self.table).set_key(Some(write.key.attributes()));
                let check = check
                    .set_condition_expression(condition)
                    .set_expression_attribute_names(names)
                    .set_expression_attribute_values(values);
                built.condition_check(check.build()?).build()
            }
        })
    }

    /// Up to `max` items of a range, by sort key. An index returns keys only.
    pub(super) async fn range(&self, range: &Range, max: usize) -> Result<Vec<Item>, StoreError> {
        let (pk, sk) = range.names();
        let mut values = HashMap::from([(":pk".to_owned(), Value::from(range.pk.as_str()).0)]);
        let mut condition = "#pk = :pk".to_owned();
        // A query takes only one condition on the sort key.
        let first = range.after.clone().map(|after| format!("{after}\0"));
        let first = first.filter(|after| *after > range.prefix).unwrap_or_else(|| range.prefix.clone());
        let last = range.up_to.clone().unwrap_or_else(|| format!("{}\u{10FFFF}", range.prefix));
        if first > last {
            return Ok(Vec::new());
        }
        if first.is_empty() {
            // The engine does not allow an empty text in a key.
            condition.push_str(" AND #sk <= :last");
        } else {
            condition.push_str(" AND #sk BETWEEN :first AND :last");
            values.insert(":first".to_owned(), Value::from(first).0);
        }
        values.insert(":last".to_owned(), Value::from(last).0);
        let names = HashMap::from([("#pk".to_owned(), pk), ("#sk".to_owned(), sk)]);
        let (mut found, mut start): (Vec<Item>, Option<Item>) = (Vec::new(), None);
        let mut retries = self.retries();
        loop {
            let left = max.saturating_sub(found.len());
            let call =
                self.sdk.query().table_name(&self.table).set_index_name(range.index.map(str::to_owned));
            let call = call
                .key_condition_expression(&condition)
                .set_expression_attribute_names(Some(names.clone()))
                .set_expression_attribute_values(Some(values.clone()))
                .set_exclusive_start_key(start.clone())
                .limit(i32::try_from(left.min(1_000)).unwrap_or(1_000))
                .consistent_read(range.index.is_none());
            match call.send().await {
                Err(error) => retries.wait_or_fail(self.context.request_error(error)).await?,
                Ok(answer) => {
                    found.extend(answer.items.unwrap_or_default());
                    start = answer.last_evaluated_key.filter(|key| !key.is_empty());
                    if start.is_none() || found.len() >= max {
                        found.truncate(max);
                        return Ok(found);
                    }
                    retries = self.retries();
                }
            }
        }
    }

    /// Counts the items of a range.
    pub(super) async fn count(&self, range: &Range) -> Result<u64, StoreError> {
        let (pk, _) = range.names();
        let mut start: Option<Item> = None;
        let (mut count, mut retries) = (0, self.retries());
        loop {
            let call =
                self.sdk.query().table_name(&self.table).set_index_name(range.index.map(str::to_owned));
            let call = call
                .key_condition_expression("#pk = :pk")
                .expression_attribute_names("#pk", &pk)
                .expression_attribute_values(":pk", Value::from(range.pk.as_str()).0)
                .set_exclusive_start_key(start.clone())
                .select(Select::Count);
            match call.send().await {
                Err(error) => retries.wait_or_fail(self.context.request_error(error)).await?,
                Ok(answer) => {
                    count += u64::from(answer.count.unsigned_abs());
                    start = answer.last_evaluated_key.filter(|key| !key.is_empty());
                    if start.is_none() {
                        return Ok(count);
                    }
                    retries = self.retries();
                }
            }
        }
    }

    /// Scans the whole table, and passes every item that matches `filter` to `visit`, until it returns
    /// `false`.
    pub(super) async fn scan(
        &self,
        filter: (&str, HashMap<String, String>, HashMap<String, AttributeValue>),
        mut visit: impl FnMut(Item) -> bool + Send,
    ) -> Result<(), StoreError> {
        let (expression, names, values) = filter;
        let mut start: Option<Item> = None;
        let mut retries = self.retries();
        loop {
            let call = self.sdk.scan().table_name(&self.table).filter_expression(expression);
            let call = call
                .set_expression_attribute_names((!names.is_empty()).then(|| names.clone()))
                .set_expression_attribute_values((!values.is_empty()).then(|| values.clone()))
                .set_exclusive_start_key(start.clone())
                .consistent_read(true);
            match call.send().await {
                Err(error) => retries.wait_or_fail(self.context.request_error(error)).await?,
                Ok(answer) => {
                    for item in answer.items.unwrap_or_default() {
                        if !visit(item) {
                            return Ok(());
                        }
                    }
                    start = answer.last_evaluated_key.filter(|key| !key.is_empty());
                    if start.is_none() {
                        return Ok(());
                    }
                    retries = self.retries();
                }
            }
        }
    }
}

/// The error of a cancelled transaction, by the reasons of its actions. A failed condition takes precedence;
/// a conflict alone is retried.
fn cancelled_for(context: &ErrorContext, reasons: Vec<(String, Option<Item>)>) -> RequestError {
    let is_unmet = |code: &str| code == "ConditionalCheckFailed";
    if reasons.iter().any(|(code, _)| is_unmet(code)) {
        let unmet = |(code, item): (String, Option<Item>)| {
            if is_unmet(&code) { ItemCondition::Unmet(item) } else { ItemCondition::Met }
        };
        return RequestError::Condition(reasons.into_iter().map(unmet).collect());
    }
    // Permanent errors come first.
    let codes = reasons.iter().map(|(code, _)| code.as_str()).filter(|code| !["None", ""].contains(code));
    let errors = codes.map(|code| {
        let what = format!("`{}`: a transaction was cancelled: {code}", context.place);
        code_error(code, what)
    });
    let mut errors: Vec<_> = errors.collect();
    let permanent = errors.iter().position(|error| matches!(error, RequestError::Permanent(_)));
    match permanent {
        Some(place) => errors.swap_remove(place),
        None => errors.pop().unwrap_or(RequestError::Conflict),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_condition_wins_over_conflict() {
        let context = ErrorContext { place: "dynamodb://limits".to_owned() };
        let of = |codes: &[&str]| {
            cancelled_for(&context, codes.iter().map(|code| ((*code).to_owned(), None)).collect())
        };
        match of(&["ConditionalCheckFailed", "TransactionConflict", "None"]) {
            RequestError::Condition(unmet) => {
                assert!(matches!(
                    unmet[..],
                    [ItemCondition::Unmet(None), ItemCondition::Met, ItemCondition::Met]
                ));
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(of(&["None", "TransactionConflict"]), RequestError::Conflict));
        assert!(matches!(
            of(&["None", "ThrottlingError"]),
            RequestError::Unavailable { is_undone: true, .. }
        ));
        assert!(matches!(of(&["TransactionConflict", "ValidationError"]), RequestError::Permanent(_)));
        assert!(matches!(of(&[]), RequestError::Conflict));
    }
}
