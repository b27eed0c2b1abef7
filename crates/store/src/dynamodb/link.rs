//! The calls to the table, one attempt each, and what came of them.
//!
//! The SDK tries nothing twice: whether a write may be made again is known here, and by whom it was made.

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

use super::expression::{Value, Write};
use super::keys::{Item, Key, PK, SK};
use super::trouble::{Failed, Unmet, Whose, of_code};
use crate::error::StoreError;

/// Items that are read in one call.
const READ_AT_ONCE: usize = 100;
/// The first pause before another try.
const PAUSE: Duration = Duration::from_millis(4);
/// Pauses get no longer than this.
const PAUSE_MAX: Duration = Duration::from_millis(120);

/// The way to a table.
#[derive(Debug)]
pub(super) struct Link {
    pub(super) client: Client,
    pub(super) table: String,
    pub(super) whose: Whose,
    pub(super) timeout: Duration,
}

/// A part of a transaction.
#[derive(Debug, Clone)]
pub(super) enum Action {
    Update(Write),
    Delete(Write),
    /// Only the condition.
    Check(Write),
}

/// A part of an index, or of a partition.
#[derive(Debug, Clone)]
pub(super) struct Range {
    /// The index, or the table itself.
    pub(super) index: Option<&'static str>,
    pub(super) pk: String,
    /// Sort keys that begin with this.
    pub(super) prefix: String,
    /// Sort keys after this.
    pub(super) after: Option<String>,
    /// Sort keys up to this.
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

/// How long something is tried, and how often it was.
#[derive(Debug)]
pub(super) struct RetryTimer {
    until: Instant,
    tries: u32,
}

impl RetryTimer {
    pub(super) fn new(timeout: Duration) -> Self {
        Self { until: Instant::now() + timeout, tries: 0 }
    }

    /// Waits a while before another try, a random one so that those who collided do not again. Where there is no time for it,
    /// the trouble is answered.
    pub(super) async fn pause(&mut self, trouble: StoreError) -> Result<(), StoreError> {
        let most = PAUSE.saturating_mul(1 << self.tries.min(5)).min(PAUSE_MAX);
        self.tries += 1;
        let part = u32::try_from(random() % 1_000).unwrap_or(0);
        let pause = most / 4 + most * part / 1_000;
        if Instant::now() + pause >= self.until {
            return Err(trouble);
        }
        tokio::time::sleep(pause).await;
        Ok(())
    }

    /// The same for a write: what is not to be tried again is answered.
    pub(super) async fn bear(&mut self, failed: Failed) -> Result<(), StoreError> {
        match failed {
            Failed::Answer(error) => Err(error),
            failed => self.pause(failed.into_error()).await,
        }
    }
}

/// A number that nobody can tell beforehand: two hashers of this process have keys of their own.
pub(super) fn random() -> u64 {
    use std::hash::{BuildHasher, RandomState};
    RandomState::new().hash_one(std::process::id())
}

impl Link {
    pub(super) fn retries(&self) -> RetryTimer {
        RetryTimer::new(self.timeout)
    }

    /// An item as it is now.
    pub(super) async fn get(&self, key: &Key) -> Result<Option<Item>, StoreError> {
        let mut retries = self.retries();
        loop {
            let call = self.client.get_item().table_name(&self.table).set_key(Some(key.attributes()));
            match call.consistent_read(true).send().await {
                Ok(found) => return Ok(found.item),
                Err(error) => retries.bear(self.whose.failed(error)).await?,
            }
        }
    }

    /// Items as they are now, by their keys: those that are there.
    pub(super) async fn get_all(&self, keys: &[Key]) -> Result<HashMap<Key, Item>, StoreError> {
        let mut found = HashMap::with_capacity(keys.len());
        let mut keys: Vec<Key> = keys.to_vec();
        keys.sort_unstable_by(|one, other| (&one.pk, &one.sk).cmp(&(&other.pk, &other.sk)));
        keys.dedup();
        for keys in keys.chunks(READ_AT_ONCE) {
            let mut left: Vec<Item> = keys.iter().map(Key::attributes).collect();
            let mut retries = self.retries();
            while !left.is_empty() {
                let asked = KeysAndAttributes::builder().set_keys(Some(left.clone())).consistent_read(true);
                let asked = asked.build().map_err(|error| StoreError::Invalid { what: error.to_string() })?;
                match self.client.batch_get_item().request_items(&self.table, asked).send().await {
                    Err(error) => retries.bear(self.whose.failed(error)).await?,
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
                            let what = format!("`{}` leaves items out", self.whose.place);
                            retries.pause(StoreError::unavailable(what)).await?;
                        }
                    }
                }
            }
        }
        Ok(found)
    }

    /// Items that are there, at most 100, all as of one moment.
    pub(super) async fn get_at_once(&self, keys: &[Key]) -> Result<HashMap<Key, Item>, StoreError> {
        let invalid = |error: BuildError| StoreError::Invalid { what: error.to_string() };
        let mut gets = Vec::with_capacity(keys.len());
        for key in keys {
            let get = Get::builder().table_name(&self.table).set_key(Some(key.attributes()));
            gets.push(TransactGetItem::builder().get(get.build().map_err(invalid)?).build());
        }
        let mut retries = self.retries();
        loop {
            match self.client.transact_get_items().set_transact_items(Some(gets.clone())).send().await {
                Ok(answer) => {
                    let items =
                        answer.responses.unwrap_or_default().into_iter().filter_map(|found| found.item);
                    return Ok(items.filter_map(|item| Some((Key::of(&item)?, item))).collect());
                }
                // A transaction that writes one of them is a reason to read again.
                Err(error) => retries.bear(self.whose.failed(error)).await?,
            }
        }
    }

    /// Makes a write if what must hold does. Answers what was set, as it is after it.
    pub(super) async fn update(&self, write: &Write) -> Result<Item, Failed> {
        let call = self.client.update_item().table_name(&self.table).set_key(Some(write.key.attributes()));
        let call = call
            .update_expression(write.update())
            .set_condition_expression(write.condition())
            .set_expression_attribute_names(write.names())
            .set_expression_attribute_values(write.values())
            .return_values(ReturnValue::UpdatedNew)
            .return_values_on_condition_check_failure(ReturnValuesOnConditionCheckFailure::AllOld);
        match call.send().await {
            Ok(done) => Ok(done.attributes.unwrap_or_default()),
            Err(SdkError::ServiceError(said))
                if matches!(said.err(), UpdateItemError::ConditionalCheckFailedException(_)) =>
            {
                let UpdateItemError::ConditionalCheckFailedException(unmet) = said.into_err() else {
                    return Err(Failed::Conflict);
                };
                Err(Failed::Condition(vec![Unmet::Yes(unmet.item)]))
            }
            Err(error) => Err(self.whose.failed(error)),
        }
    }

    /// Makes all of these writes, or none.
    pub(super) async fn transact(&self, actions: &[Action]) -> Result<(), Failed> {
        self.transact_as(None, actions).await
    }

    /// The same under a name: made again under it, they are made once.
    pub(super) async fn transact_as(&self, token: Option<&str>, actions: &[Action]) -> Result<(), Failed> {
        let built: Result<Vec<_>, _> = actions.iter().map(|action| self.action(action)).collect();
        let built = match built {
            Ok(built) => built,
            Err(error) => return Err(Failed::Answer(StoreError::Invalid { what: error.to_string() })),
        };
        let call = self.client.transact_write_items().set_transact_items(Some(built));
        match call.set_client_request_token(token.map(str::to_owned)).send().await {
            Ok(_) => Ok(()),
            Err(SdkError::ServiceError(said))
                if matches!(said.err(), TransactWriteItemsError::TransactionCanceledException(_)) =>
            {
                let TransactWriteItemsError::TransactionCanceledException(cancelled) = said.into_err() else {
                    return Err(Failed::Conflict);
                };
                let reasons = cancelled.cancellation_reasons.unwrap_or_default().into_iter();
                let reasons = reasons.map(|reason| (reason.code.unwrap_or_default(), reason.item)).collect();
                Err(cancelled_for(&self.whose, reasons))
            }
            Err(error) => Err(self.whose.failed(error)),
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

    /// Up to `max` items of a range, in its order. Of an index these are keys.
    pub(super) async fn range(&self, range: &Range, max: usize) -> Result<Vec<Item>, StoreError> {
        let (pk, sk) = range.names();
        let mut values = HashMap::from([(":pk".to_owned(), Value::from(range.pk.as_str()).0)]);
        let mut condition = "#pk = :pk".to_owned();
        // One condition on the sort key is all that a query takes.
        let first = range.after.clone().map(|after| format!("{after}\0"));
        let first = first.filter(|after| *after > range.prefix).unwrap_or_else(|| range.prefix.clone());
        let last = range.up_to.clone().unwrap_or_else(|| format!("{}\u{10FFFF}", range.prefix));
        if first > last {
            return Ok(Vec::new());
        }
        if first.is_empty() {
            // The engine takes no empty text in a key.
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
                self.client.query().table_name(&self.table).set_index_name(range.index.map(str::to_owned));
            let call = call
                .key_condition_expression(&condition)
                .set_expression_attribute_names(Some(names.clone()))
                .set_expression_attribute_values(Some(values.clone()))
                .set_exclusive_start_key(start.clone())
                .limit(i32::try_from(left.min(1_000)).unwrap_or(1_000))
                .consistent_read(range.index.is_none());
            match call.send().await {
                Err(error) => retries.bear(self.whose.failed(error)).await?,
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

    /// How many items a range has.
    pub(super) async fn count(&self, range: &Range) -> Result<u64, StoreError> {
        let (pk, _) = range.names();
        let mut start: Option<Item> = None;
        let (mut count, mut retries) = (0, self.retries());
        loop {
            let call =
                self.client.query().table_name(&self.table).set_index_name(range.index.map(str::to_owned));
            let call = call
                .key_condition_expression("#pk = :pk")
                .expression_attribute_names("#pk", &pk)
                .expression_attribute_values(":pk", Value::from(range.pk.as_str()).0)
                .set_exclusive_start_key(start.clone())
                .select(Select::Count);
            match call.send().await {
                Err(error) => retries.bear(self.whose.failed(error)).await?,
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

    /// Looks through the whole table: every item that `filter` lets through is handed to `see`, until it has seen enough.
    pub(super) async fn scan(
        &self,
        filter: (&str, HashMap<String, String>, HashMap<String, AttributeValue>),
        mut see: impl FnMut(Item) -> bool + Send,
    ) -> Result<(), StoreError> {
        let (expression, names, values) = filter;
        let mut start: Option<Item> = None;
        let mut retries = self.retries();
        loop {
            let call = self.client.scan().table_name(&self.table).filter_expression(expression);
            let call = call
                .set_expression_attribute_names((!names.is_empty()).then(|| names.clone()))
                .set_expression_attribute_values((!values.is_empty()).then(|| values.clone()))
                .set_exclusive_start_key(start.clone())
                .consistent_read(true);
            match call.send().await {
                Err(error) => retries.bear(self.whose.failed(error)).await?,
                Ok(answer) => {
                    for item in answer.items.unwrap_or_default() {
                        if !see(item) {
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

/// Why a transaction was cancelled, by the reason of each of its parts. A condition that does not hold is an answer, whatever
/// else there was; a conflict alone is none, and is tried again.
fn cancelled_for(whose: &Whose, reasons: Vec<(String, Option<Item>)>) -> Failed {
    let is_unmet = |code: &str| code == "ConditionalCheckFailed";
    if reasons.iter().any(|(code, _)| is_unmet(code)) {
        let unmet =
            |(code, item): (String, Option<Item>)| if is_unmet(&code) { Unmet::Yes(item) } else { Unmet::No };
        return Failed::Condition(reasons.into_iter().map(unmet).collect());
    }
    // What is not to be tried again comes first.
    let codes = reasons.iter().map(|(code, _)| code.as_str()).filter(|code| !["None", ""].contains(code));
    let failed = codes.map(|code| {
        let what = format!("`{}`: a transaction was cancelled: {code}", whose.place);
        of_code(code, what)
    });
    let mut failed: Vec<_> = failed.collect();
    let answer = failed.iter().position(|failed| matches!(failed, Failed::Answer(_)));
    match answer {
        Some(place) => failed.swap_remove(place),
        None => failed.pop().unwrap_or(Failed::Conflict),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn failed_condition_wins_over_conflict() {
        let whose = Whose { place: "dynamodb://limits".to_owned() };
        let of = |codes: &[&str]| {
            cancelled_for(&whose, codes.iter().map(|code| ((*code).to_owned(), None)).collect())
        };
        match of(&["ConditionalCheckFailed", "TransactionConflict", "None"]) {
            Failed::Condition(unmet) => {
                assert!(matches!(unmet[..], [Unmet::Yes(None), Unmet::No, Unmet::No]));
            }
            other => panic!("{other:?}"),
        }
        assert!(matches!(of(&["None", "TransactionConflict"]), Failed::Conflict));
        assert!(matches!(of(&["None", "ThrottlingError"]), Failed::Unavailable { is_undone: true, .. }));
        assert!(matches!(of(&["TransactionConflict", "ValidationError"]), Failed::Answer(_)));
        assert!(matches!(of(&[]), Failed::Conflict));
    }
}
