//! Requests to the table, one attempt each, and their errors.
//!
//! The SDK does not retry: only this store knows whether a write is safe to repeat.

use std::collections::HashMap;
use std::error::Error;
use std::fmt;
use std::time::Duration;

use aws_sdk_dynamodb::Client;
use aws_sdk_dynamodb::error::{BuildError, ProvideErrorMetadata, SdkError};
use aws_sdk_dynamodb::operation::query::builders::QueryFluentBuilder;
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
use crate::background::random;
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

impl TableClient {
    pub(super) fn retries(&self) -> RetryTimer {
        RetryTimer::new(self.timeout)
    }

    /// Sends a request until it succeeds, fails permanently, or the timeout has passed.
    pub(super) async fn retry<T, E, R, F>(&self, send: impl Fn() -> F) -> Result<T, StoreError>
    where
        F: Future<Output = Result<T, SdkError<E, R>>>,
        E: ProvideErrorMetadata + Error + Send + Sync + 'static,
        R: fmt::Debug + Send + Sync + 'static,
    {
        let mut retries = self.retries();
        loop {
            match send().await {
                Ok(answer) => return Ok(answer),
                Err(error) => retries.wait_or_fail(self.context.request_error(error)).await?,
            }
        }
    }

    /// Reads an item (consistently).
    pub(super) async fn get(&self, key: &Key) -> Result<Option<Item>, StoreError> {
        let call = self.sdk.get_item().table_name(&self.table).set_key(Some(key.attributes()));
        let call = call.consistent_read(true);
        Ok(self.retry(|| call.clone().send()).await?.item)
    }

    /// Reads items by their keys (consistently). Missing ones are left out.
    pub(super) async fn get_all(&self, keys: &[Key]) -> Result<HashMap<Key, Item>, StoreError> {
        let mut found = HashMap::with_capacity(keys.len());
        let mut keys: Vec<Key> = keys.to_vec();
        keys.sort_unstable();
        keys.dedup();
        for keys in keys.chunks(READ_BATCH) {
            let mut left: Vec<Item> = keys.iter().map(Key::attributes).collect();
            let mut retries = self.retries();
            while !left.is_empty() {
                let wanted = KeysAndAttributes::builder().set_keys(Some(left)).consistent_read(true);
                let wanted = wanted.build().map_err(invalid)?;
                let call = self.sdk.batch_get_item().request_items(&self.table, wanted);
                let answer = self.retry(|| call.clone().send()).await?;
                let items = answer.responses.and_then(|mut tables| tables.remove(&self.table));
                let items = items.into_iter().flatten();
                found.extend(items.filter_map(|item| Some((Key::of(&item)?, item))));
                let rest = answer.unprocessed_keys.and_then(|mut tables| tables.remove(&self.table));
                left = rest.map(|rest| rest.keys).unwrap_or_default();
                if !left.is_empty() {
                    let what = format!("`{}` left out some items", self.context.place);
                    retries.pause(StoreError::unavailable(what)).await?;
                }
            }
        }
        Ok(found)
    }

    /// Reads at most 100 items in one transaction. Missing ones are left out.
    pub(super) async fn get_at_once(&self, keys: &[Key]) -> Result<HashMap<Key, Item>, StoreError> {
        let mut call = self.sdk.transact_get_items();
        for key in keys {
            let get = Get::builder().table_name(&self.table).set_key(Some(key.attributes()));
            let get = get.build().map_err(invalid)?;
            call = call.transact_items(TransactGetItem::builder().get(get).build());
        }
        // A concurrent write of one of them is a reason to read again.
        let answer = self.retry(|| call.clone().send()).await?;
        let items = answer.responses.unwrap_or_default().into_iter().filter_map(|found| found.item);
        Ok(items.filter_map(|item| Some((Key::of(&item)?, item))).collect())
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
        call.send().await.map(|done| done.attributes.unwrap_or_default()).map_err(|error| {
            match error.as_service_error() {
                Some(UpdateItemError::ConditionalCheckFailedException(unmet)) => {
                    RequestError::Condition(vec![ItemCondition::Unmet(unmet.item.clone())])
                }
                _ => self.context.request_error(error),
            }
        })
    }

    /// Sends these actions in a transaction, with retries. Returns `false` if a condition does not hold.
    pub(super) async fn commit(&self, token: Option<&str>, actions: &[Action]) -> Result<bool, StoreError> {
        let mut retries = self.retries();
        loop {
            match self.transact(token, actions).await {
                Ok(()) => return Ok(true),
                Err(RequestError::Condition(_)) => return Ok(false),
                Err(error) => retries.wait_or_fail(error).await?,
            }
        }
    }

    /// Sends these actions in a transaction. A retry with the same token is applied once.
    pub(super) async fn transact(&self, token: Option<&str>, actions: &[Action]) -> Result<(), RequestError> {
        let built: Result<Vec<_>, _> = actions.iter().map(|action| self.action(action)).collect();
        let built = built.map_err(|error| RequestError::Permanent(invalid(error)))?;
        let call = self.sdk.transact_write_items().set_transact_items(Some(built));
        let call = call.set_client_request_token(token.map(str::to_owned));
        call.send().await.map(drop).map_err(|error| match error.as_service_error() {
            Some(TransactWriteItemsError::TransactionCanceledException(cancelled)) => {
                let reasons = cancelled.cancellation_reasons.clone().unwrap_or_default().into_iter();
                let reasons = reasons.map(|reason| (reason.code.unwrap_or_default(), reason.item));
                cancelled_for(&self.context, reasons.collect())
            }
            _ => self.context.request_error(error),
        })
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
        let (mut found, mut start) = (Vec::new(), None);
        let Some(query) = self.query(range) else { return Ok(found) };
        loop {
            let left = max.saturating_sub(found.len()).min(1_000);
            let call = query.clone().limit(i32::try_from(left).unwrap_or(1_000));
            let call = call.set_exclusive_start_key(start);
            let page = self.retry(|| call.clone().send()).await?;
            found.extend(page.items.unwrap_or_default());
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() || found.len() >= max {
                found.truncate(max);
                return Ok(found);
            }
        }
    }

    /// Counts the items of a range.
    pub(super) async fn count(&self, range: &Range) -> Result<u64, StoreError> {
        let (mut count, mut start) = (0, None);
        let Some(query) = self.query(range) else { return Ok(count) };
        loop {
            let call = query.clone().select(Select::Count).set_exclusive_start_key(start);
            let page = self.retry(|| call.clone().send()).await?;
            count += u64::from(page.count.unsigned_abs());
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() {
                return Ok(count);
            }
        }
    }

    /// The query of a range; `None` if nothing can be in it.
    fn query(&self, range: &Range) -> Option<QueryFluentBuilder> {
        let (pk, sk) = range.names();
        // A query takes only one condition on the sort key.
        let first = range.after.as_ref().map(|after| format!("{after}\0"));
        let first = first.filter(|after| *after > range.prefix).unwrap_or_else(|| range.prefix.clone());
        let last = range.up_to.clone().unwrap_or_else(|| format!("{}\u{10FFFF}", range.prefix));
        if first > last {
            return None;
        }
        let call = self.sdk.query().table_name(&self.table).set_index_name(range.index.map(str::to_owned));
        let call = call
            .consistent_read(range.index.is_none())
            .expression_attribute_names("#pk", pk)
            .expression_attribute_names("#sk", sk)
            .expression_attribute_values(":pk", Value::from(range.pk.as_str()).0)
            .expression_attribute_values(":last", Value::from(last).0);
        // The engine does not allow an empty text in a key.
        Some(if first.is_empty() {
            call.key_condition_expression("#pk = :pk AND #sk <= :last")
        } else {
            call.key_condition_expression("#pk = :pk AND #sk BETWEEN :first AND :last")
                .expression_attribute_values(":first", Value::from(first).0)
        })
    }

    /// Scans the whole table for the items that match a filter.
    pub(super) async fn scan(
        &self,
        filter: &str,
        names: &HashMap<String, String>,
        values: &HashMap<String, AttributeValue>,
    ) -> Result<Vec<Item>, StoreError> {
        let (mut found, mut start) = (Vec::new(), None);
        let scan = self.sdk.scan().table_name(&self.table).filter_expression(filter).consistent_read(true);
        let scan = scan
            .set_expression_attribute_names(Some(names.clone()))
            .set_expression_attribute_values(Some(values.clone()));
        loop {
            let call = scan.clone().set_exclusive_start_key(start);
            let page = self.retry(|| call.clone().send()).await?;
            found.extend(page.items.unwrap_or_default());
            start = page.last_evaluated_key.filter(|key| !key.is_empty());
            if start.is_none() {
                return Ok(found);
            }
        }
    }
}

#[expect(clippy::needless_pass_by_value, reason = "as `map_err` hands it on")]
pub(super) fn invalid(error: BuildError) -> StoreError {
    StoreError::Invalid { what: error.to_string() }
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
