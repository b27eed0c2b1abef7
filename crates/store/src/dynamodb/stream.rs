//! The stream of a table: which there is, what shards it has, and what they tell.
//!
//! Each call is one attempt. What of a record is kept is little: the bucket that it is about, when it was made, and how many
//! marks of ended leases the bucket had then.

use aws_sdk_dynamodb::error::ProvideErrorMetadata;
use aws_sdk_dynamodb::types::StreamSpecification;
use aws_sdk_dynamodbstreams::error::SdkError;
use aws_sdk_dynamodbstreams::types::{
    AttributeValue, OperationType, Record, Shard, ShardIteratorType, StreamStatus,
};
use tidegate_core::limit::name::Subject;
use tidegate_core::time::Stamp;

use super::keys::{Key, Keys, PK, SK};
use super::link::Link;
use super::shards::{Ask, Listed, Place};
use super::table;
use super::trouble::Failed;
use crate::error::StoreError;

/// Records that are asked for at a time; the engine gives no more.
const RECORDS_MAX: i32 = 1_000;
/// Pages of shards that are asked for, a hundred to each: a table has far fewer.
const PAGES_MAX: usize = 1_000;

/// What a record tells.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Told {
    /// When the change was made, as the engine says.
    pub(super) at: Option<Stamp>,
    pub(super) of: About,
}

/// What a record is about.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum About {
    /// A bucket that may have marks to be counted.
    Marks(Subject),
    /// A bucket that was removed with so many marks that nobody had counted.
    Lost(u64),
    /// Nothing that concerns whoever counts.
    Other,
}

/// What asking a shard came to.
#[derive(Debug)]
pub(super) enum Said {
    Iterator(Option<String>),
    Records {
        told: Vec<Told>,
        last: Option<String>,
        next: Option<String>,
    },
    /// The iterator is too old.
    Expired,
    /// The records are.
    Trimmed,
    /// There is no such shard any more.
    Gone,
}

/// The name of the stream that a table has.
pub(super) async fn find(link: &Link) -> Result<String, StoreError> {
    let place = &link.whose.place;
    let table =
        table::describe(link).await?.ok_or_else(|| crate::lifecycle::not_there(&format!("`{place}`")))?;
    let is_on = table.stream_specification().is_some_and(StreamSpecification::stream_enabled);
    table.latest_stream_arn.filter(|_| is_on).ok_or_else(|| {
        let what = format!(
            "`{place}` has no stream, by which usage is counted: `tidegate store init` adds one to the table as it is"
        );
        StoreError::Invalid { what }
    })
}

/// All shards of a stream, and whether it still goes on.
pub(super) async fn list(link: &Link, arn: &str) -> Result<(Vec<Listed>, bool), Failed> {
    let (mut shards, mut start) = (Vec::new(), None);
    for _ in 0..PAGES_MAX {
        let call = link.streams.describe_stream().stream_arn(arn).set_exclusive_start_shard_id(start.take());
        let answer = call.send().await.map_err(|error| link.whose.failed(error))?;
        let Some(stream) = answer.stream_description else { break };
        shards.extend(stream.shards().iter().filter_map(listed));
        start.clone_from(&stream.last_evaluated_shard_id);
        if start.is_none() {
            let is_on =
                !matches!(stream.stream_status(), Some(StreamStatus::Disabled | StreamStatus::Disabling));
            return Ok((shards, is_on));
        }
    }
    let what = format!("`{}`: its stream has no end of shards", link.whose.place);
    Err(Failed::Answer(StoreError::Corrupt { what }))
}

fn listed(shard: &Shard) -> Option<Listed> {
    let numbers = shard.sequence_number_range();
    Some(Listed {
        id: shard.shard_id()?.to_owned(),
        parent: shard.parent_shard_id().map(str::to_owned),
        is_closed: numbers.is_some_and(|numbers| numbers.ending_sequence_number().is_some()),
    })
}

/// Asks a shard.
pub(super) async fn ask(link: &Link, keys: &Keys, arn: &str, shard: &str, ask: &Ask) -> Result<Said, Failed> {
    match ask {
        Ask::Iterator(place) => {
            let (kind, number) = match place {
                Place::Oldest => (ShardIteratorType::TrimHorizon, None),
                Place::Newest => (ShardIteratorType::Latest, None),
                Place::After(number) => (ShardIteratorType::AfterSequenceNumber, Some(number.clone())),
            };
            let call = link.streams.get_shard_iterator().stream_arn(arn).shard_id(shard);
            let call = call.shard_iterator_type(kind).set_sequence_number(number);
            match call.send().await {
                Ok(answer) => Ok(Said::Iterator(answer.shard_iterator)),
                Err(error) => refused(link, error),
            }
        }
        Ask::Records(iterator) => {
            let call = link.streams.get_records().shard_iterator(iterator).limit(RECORDS_MAX);
            match call.send().await {
                Ok(answer) => {
                    let records = answer.records.unwrap_or_default();
                    let number = |record: &Record| Some(record.dynamodb()?.sequence_number()?.to_owned());
                    let last = records.last().and_then(number);
                    let told = records.iter().map(|record| told(keys, record)).collect();
                    Ok(Said::Records { told, last, next: answer.next_shard_iterator })
                }
                Err(error) => refused(link, error),
            }
        }
    }
}

fn refused<E, R>(link: &Link, error: SdkError<E, R>) -> Result<Said, Failed>
where
    E: ProvideErrorMetadata + std::error::Error + Send + Sync + 'static,
    R: std::fmt::Debug + Send + Sync + 'static,
{
    let code = match &error {
        SdkError::ServiceError(said) => said.err().code().unwrap_or_default(),
        _ => "",
    };
    match code {
        "ExpiredIteratorException" => Ok(Said::Expired),
        "TrimmedDataAccessException" => Ok(Said::Trimmed),
        "ResourceNotFoundException" => Ok(Said::Gone),
        _ => Err(link.whose.failed(error)),
    }
}

fn told(keys: &Keys, record: &Record) -> Told {
    let Some(change) = record.dynamodb() else { return Told { at: None, of: About::Other } };
    let at = change.approximate_creation_date_time().and_then(|at| {
        let secs = u64::try_from(at.secs()).ok()?.checked_mul(1_000_000)?;
        Some(Stamp::from_micros(secs.checked_add(u64::from(at.subsec_nanos() / 1_000))?))
    });
    let text = |name: &str| change.keys()?.get(name)?.as_s().ok().cloned();
    let key = text(PK).zip(text(SK)).map(|(pk, sk)| Key { pk, sk });
    let Some(subject) = key.and_then(|key| keys.subject(&key)) else { return Told { at, of: About::Other } };
    let marks = |image: &std::collections::HashMap<String, AttributeValue>| {
        image.keys().filter(|name| name.starts_with("e:")).count() as u64
    };
    let of = if record.event_name() == Some(&OperationType::Remove) {
        match change.old_image().map(marks) {
            Some(marks @ 1..) => About::Lost(marks),
            _ => About::Other,
        }
    } else {
        // A stream of keys alone does not tell whether there are any.
        match change.new_image().map(marks) {
            Some(0) => About::Other,
            _ => About::Marks(subject),
        }
    };
    Told { at, of }
}

#[cfg(test)]
mod tests {
    use aws_sdk_dynamodbstreams::types::StreamRecord;
    use aws_smithy_types::DateTime;
    use tidegate_core::limit::name::Namespace;

    use super::*;

    fn record(pk: &str, sk: &str, kind: OperationType, old: &[&str], new: Option<&[&str]>) -> Record {
        let text = |text: &str| AttributeValue::S(text.to_owned());
        let mut change = StreamRecord::builder().keys(PK, text(pk)).keys(SK, text(sk));
        change = change.approximate_creation_date_time(DateTime::from_millis(1_800_000_000_250));
        for name in old {
            change = change.old_image(*name, text("x"));
        }
        if let Some(new) = new {
            change =
                change.set_new_image(Some(new.iter().map(|name| ((*name).to_owned(), text("x"))).collect()));
        }
        Record::builder().event_name(kind).dynamodb(change.build()).build()
    }

    #[test]
    fn a_record_tells_of_a_bucket_with_marks_in_its_own_namespace_and_of_nothing_else() {
        let keys = Keys::new(&Namespace::new("prod").unwrap());
        let (own, bucket) = ("NS#prod#ENTITY#acme", "#BUCKET#gpt");
        let marks = About::Marks(Subject::new("acme", "gpt").unwrap());
        let modify = || OperationType::Modify;
        let table = [
            (record(own, bucket, modify(), &[], Some(&["n", "e:1"])), marks.clone()),
            (record(own, bucket, OperationType::Insert, &[], Some(&["e:1"])), marks.clone()),
            // Keys alone: perhaps.
            (record(own, bucket, modify(), &[], None), marks),
            (record(own, bucket, modify(), &["e:1"], Some(&["n", "o:2"])), About::Other),
            (record(own, "#USAGE#gpt#hour#x", modify(), &[], Some(&["u:rpm"])), About::Other),
            (record("ENTITY#acme", bucket, modify(), &[], Some(&["e:1"])), About::Other),
            (record("NS#prod2#ENTITY#acme", bucket, modify(), &[], Some(&["e:1"])), About::Other),
            (record(own, bucket, OperationType::Remove, &["n"], None), About::Other),
            (record(own, bucket, OperationType::Remove, &["e:1", "e:2", "n"], None), About::Lost(2)),
        ];
        for (record, of) in table {
            let at = Some(Stamp::from_micros(1_800_000_000_250_000));
            assert_eq!(told(&keys, &record), Told { at, of }, "{record:?}");
        }
        assert_eq!(told(&keys, &Record::builder().build()), Told { at: None, of: About::Other });
    }
}
