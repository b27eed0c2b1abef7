//! Collects signals from headers, one at a time: parses each value, keeps the more careful one of duplicates,
//! and finally drops implausible numbers.

use std::time::Duration;

use smallvec::SmallVec;

use super::date::{http_date, rfc3339};
use super::names::{self, Field, Part, field};
use super::number::{Decimal, SignedDuration, go_duration, span};
use super::structured::{self, Bare, Item};
use super::{
    Dimension, Hint, HintSource, LIMIT_MAX, Profile, QUOTAS_MAX, Quota, RESET_MAX, Reset, Signals, VALUE_MAX,
};
use crate::bucket::PERIOD_MAX;
use crate::time::Stamp;

/// Numbers from here on are dates in seconds: 2001 as a date, 31 years as a duration.
const EPOCH_SECONDS: u64 = 1_000_000_000;
/// Numbers from here on are dates in milliseconds, of the same year.
const EPOCH_MILLIS: u64 = EPOCH_SECONDS * 1_000;
/// Numbers from here on have no known meaning.
const EPOCH_END: u64 = EPOCH_MILLIS * 100;
/// The longest label; longer ones are cut.
const LABEL_MAX: usize = 64;

/// Why a value was rejected.
enum ValueError {
    Malformed,
    Ignored,
}

/// The state of the collection.
pub(super) struct Collector {
    now: Stamp,
    is_azure: bool,
    retry_after: Option<Duration>,
    retry_after_ms: Option<Duration>,
    signals: Signals,
}

impl Collector {
    pub(super) fn new(now: Stamp) -> Self {
        Self { now, is_azure: false, retry_after: None, retry_after_ms: None, signals: Signals::default() }
    }

    /// Reads one header, if it is known.
    pub(super) fn header(&mut self, name: &[u8], value: &[u8]) {
        let Some(field) = field(name) else { return };
        if field == Field::Azure {
            self.is_azure = true;
            return;
        }
        let text = std::str::from_utf8(value).ok().filter(|text| text.len() <= VALUE_MAX);
        let read = text
            .ok_or(ValueError::Malformed)
            .and_then(|text| self.value(field, text.trim_matches([' ', '\t'])));
        self.count(&read);
    }

    fn count(&mut self, read: &Result<(), ValueError>) {
        match read {
            Ok(()) => {}
            Err(ValueError::Malformed) => self.signals.malformed = self.signals.malformed.saturating_add(1),
            Err(ValueError::Ignored) => self.ignored(),
        }
    }

    fn value(&mut self, field: Field, text: &str) -> Result<(), ValueError> {
        let now = self.now;
        match field {
            Field::RetryAfter => later(&mut self.retry_after, retry_after(text, now)),
            Field::RetryAfterMs => later(&mut self.retry_after_ms, longest(text, whole_millis)),
            Field::AmzRetryAfter => later(&mut self.signals.amz_retry_after, longest(text, whole_millis)),
            Field::Part { profile, dimension, label, part } => {
                let read = Number::parse(part, text, now)?;
                let quota = self.quota(profile, dimension, label)?;
                read.keep(quota);
                Ok(())
            }
            Field::RateLimit => self.rate_limit(text),
            Field::RateLimitPolicy => self.rate_limit_policy(text),
            Field::Azure => Ok(()),
        }
    }

    /// The quota of these headers, created if necessary.
    fn quota(
        &mut self,
        profile: Profile,
        dimension: Dimension,
        label: Option<String>,
    ) -> Result<&mut Quota, ValueError> {
        let quotas = &mut self.signals.quotas;
        // A policy's name is unique; its unit and its level may come from different headers.
        let is_same = |quota: &Quota| {
            quota.profile == profile
                && quota.label == label
                && (quota.dimension == dimension || profile == Profile::Ietf)
        };
        let at = match quotas.iter().position(is_same) {
            Some(at) => at,
            None if quotas.len() < QUOTAS_MAX => {
                let (limit, remaining, reset, window) = (None, None, None, None);
                quotas.push(Quota { profile, dimension, label, limit, remaining, reset, window });
                quotas.len() - 1
            }
            None => return Err(ValueError::Ignored),
        };
        Ok(&mut quotas[at])
    }

    /// `"policy";r=50;t=30, …`, or `limit=100, remaining=50, reset=30` in an older draft.
    fn rate_limit(&mut self, text: &str) -> Result<(), ValueError> {
        for item in structured::list(text).ok_or(ValueError::Malformed)? {
            let read = match label_of(&item.value) {
                Some(label) => self.level(&item, label),
                None => self.older(&item),
            };
            self.count(&read);
        }
        Ok(())
    }

    /// One of `"policy";r=50;t=30`.
    fn level(&mut self, item: &Item, label: String) -> Result<(), ValueError> {
        let remaining = amount(item, "r")?.ok_or(ValueError::Malformed)?;
        let after = amount(item, "t")?.map(Duration::from_secs);
        let quota = self.quota(Profile::Ietf, Dimension::Requests, Some(label))?;
        lower(&mut quota.remaining, remaining);
        if let Some(after) = after {
            further(&mut quota.reset, Reset::More(after));
        }
        Ok(())
    }

    /// One of `limit=100`, `remaining=50` and `reset=30`.
    fn older(&mut self, item: &Item) -> Result<(), ValueError> {
        let (limit, remaining) = (amount(item, "limit")?, amount(item, "remaining")?);
        let reset = amount(item, "reset")?;
        if limit.or(remaining).or(reset).is_none() {
            return Err(ValueError::Malformed);
        }
        let quota = self.quota(Profile::Ietf, Dimension::Requests, None)?;
        if let Some(limit) = limit {
            lower(&mut quota.limit, limit);
        }
        if let Some(remaining) = remaining {
            lower(&mut quota.remaining, remaining);
        }
        if let Some(reset) = reset {
            further(&mut quota.reset, Reset::More(Duration::from_secs(reset)));
        }
        Ok(())
    }

    /// `"policy";q=100;w=60, …`, or `100;w=60` in an older draft.
    fn rate_limit_policy(&mut self, text: &str) -> Result<(), ValueError> {
        for item in structured::list(text).ok_or(ValueError::Malformed)? {
            let read = self.policy(&item);
            self.count(&read);
        }
        Ok(())
    }

    fn policy(&mut self, item: &Item) -> Result<(), ValueError> {
        let limit = match item.value {
            Bare::Integer(limit) => u64::try_from(limit).map_err(|_| ValueError::Ignored)?,
            _ => amount(item, "q")?.ok_or(ValueError::Malformed)?,
        };
        let window = amount(item, "w")?.map(Duration::from_secs);
        let dimension = match item.get("qu") {
            None => Dimension::Requests,
            Some(Bare::Text(unit)) => names::dimension(unit).unwrap_or(Dimension::Other),
            Some(_) => return Err(ValueError::Malformed),
        };
        let quota = self.quota(Profile::Ietf, dimension, label_of(&item.value))?;
        // Limit and window belong together: of several policies with the same name, or none, the first
        // counts.
        if quota.window.is_none() {
            quota.dimension = dimension;
            lower(&mut quota.limit, limit);
            quota.window = window.filter(|window| !window.is_zero() && *window <= PERIOD_MAX);
        }
        Ok(())
    }

    /// Drops implausible numbers and computes the hints.
    pub(super) fn finish(mut self, wait_max: Duration) -> Signals {
        let mut quotas: SmallVec<[Quota; 4]> = std::mem::take(&mut self.signals.quotas);
        for quota in &mut quotas {
            self.check(quota);
            if self.is_azure && quota.profile == Profile::OpenAi {
                quota.profile = Profile::Azure;
            }
        }
        quotas.retain(|quota| quota.limit.or(quota.remaining).is_some() || quota.reset.is_some());
        let hint =
            |wait: Duration, source| Hint { wait: wait.min(wait_max), source, is_capped: wait > wait_max };
        let millis = self.retry_after_ms.map(|wait| hint(wait, HintSource::RetryAfterMs));
        let seconds = || self.retry_after.map(|wait| hint(wait, HintSource::RetryAfter));
        self.signals.retry_after = millis.or_else(seconds);
        let empty = quotas.iter().filter_map(|quota| Some((empty_for(quota)?, quota)));
        let longest = empty.max_by_key(|(wait, _)| *wait);
        self.signals.empty_quota =
            longest.map(|(wait, quota)| hint(wait, HintSource::Quota(quota.profile, quota.dimension)));
        self.signals.quotas = quotas;
        self.signals
    }

    /// Drops the implausible numbers of a quota.
    fn check(&mut self, quota: &mut Quota) {
        if quota.limit.is_some_and(|limit| limit == 0 || limit > LIMIT_MAX) {
            quota.limit = None;
            self.ignored();
        }
        let is_open_ai = quota.profile == Profile::OpenAi;
        let is_implausible = quota.remaining.is_some_and(|remaining| match quota.limit {
            Some(limit) => remaining > limit,
            // Azure sends 0 when it does not report the limit.
            None => remaining > LIMIT_MAX || (is_open_ai && remaining == 0),
        });
        if is_implausible {
            quota.remaining = None;
            self.ignored();
        }
        if quota.reset.is_some_and(|reset| reset.after() > RESET_MAX) {
            quota.reset = None;
            self.ignored();
        }
    }

    fn ignored(&mut self) {
        self.signals.ignored = self.signals.ignored.saturating_add(1);
    }
}

/// One parsed number of a dimension.
enum Number {
    Limit(u64),
    Remaining(u64),
    Reset(Duration),
}

impl Number {
    fn parse(part: Part, text: &str, now: Stamp) -> Result<Self, ValueError> {
        match part {
            // Policies may follow the number: `100, 100;w=60`.
            Part::Limit => lowest(text, |text| units(text.split(';').next()?)).map(Self::Limit),
            Part::Remaining => lowest(text, units).map(Self::Remaining),
            Part::Reset => reset(text, now).map(Self::Reset),
            Part::ResetAfter => {
                let number = Decimal::parse(text).ok_or(ValueError::Malformed)?;
                if number.is_negative {
                    Err(ValueError::Ignored)
                } else {
                    Ok(Self::Reset(span(number.nanos())))
                }
            }
        }
    }

    /// Stores the number, unless a more careful one is known.
    fn keep(self, quota: &mut Quota) {
        match self {
            Self::Limit(limit) => lower(&mut quota.limit, limit),
            Self::Remaining(remaining) => lower(&mut quota.remaining, remaining),
            Self::Reset(after) => {
                let is_full = matches!(quota.profile, Profile::OpenAi | Profile::Anthropic);
                further(&mut quota.reset, if is_full { Reset::Full(after) } else { Reset::More(after) });
            }
        }
    }
}

/// How long an empty quota stays empty; `None` if it is not empty, or the time is unknown.
fn empty_for(quota: &Quota) -> Option<Duration> {
    // Other dimensions, such as images, may not concern the next request.
    if quota.remaining != Some(0) || quota.dimension == Dimension::Other {
        return None;
    }
    let after = match quota.profile {
        // The time to full would be far too long a wait for one request.
        Profile::OpenAi | Profile::Azure => quota.time_to(1)?,
        _ => quota.reset?.after(),
    };
    (!after.is_zero()).then_some(after)
}

/// Parses one trimmed `Retry-After` value; the longest of several in one line.
pub(super) fn retry_after(text: &str, now: Stamp) -> Option<Duration> {
    http_date(text, now).map(|date| date.since(now)).or_else(|| longest(text, whole_seconds))
}

/// Parses a reset in any format: a Go duration, seconds, or a date as a number or text.
fn reset(text: &str, now: Stamp) -> Result<Duration, ValueError> {
    if let Some(number) = Decimal::parse(text) {
        let point = |per_second: u128| span(number.nanos().div_ceil(per_second));
        let since_now = |since_1970: Duration| (Stamp::ZERO + since_1970).since(now);
        return match number.whole {
            _ if number.is_negative => Err(ValueError::Ignored),
            ..EPOCH_SECONDS => Ok(point(1)),
            EPOCH_SECONDS..EPOCH_MILLIS => Ok(since_now(point(1))),
            EPOCH_MILLIS..EPOCH_END => Ok(since_now(point(1_000))),
            _ => Err(ValueError::Ignored),
        };
    }
    match go_duration(text) {
        Some(SignedDuration { is_negative: false, size }) => Ok(size),
        Some(_) => Err(ValueError::Ignored),
        None => {
            let date = rfc3339(text).or_else(|| http_date(text, now)).ok_or(ValueError::Malformed)?;
            Ok(date.since(now))
        }
    }
}

/// Seconds, rounded up; a negative number is zero.
fn whole_seconds(text: &str) -> Option<Duration> {
    let number = Decimal::parse(text)?;
    Some(if number.is_negative { Duration::ZERO } else { Duration::from_secs(number.whole_up()) })
}

/// Milliseconds, rounded up; a negative number is zero.
fn whole_millis(text: &str) -> Option<Duration> {
    let number = Decimal::parse(text)?;
    Some(if number.is_negative { Duration::ZERO } else { Duration::from_millis(number.whole_up()) })
}

/// Units, rounded down; `Err` if negative.
fn units(text: &str) -> Option<Result<u64, ValueError>> {
    let number = Decimal::parse(text.trim_matches([' ', '\t']))?;
    Some(if number.is_negative { Err(ValueError::Ignored) } else { Ok(number.whole) })
}

/// The lowest of the numbers in one line, because duplicate headers may be joined by a comma.
fn lowest(text: &str, read: impl Fn(&str) -> Option<Result<u64, ValueError>>) -> Result<u64, ValueError> {
    let mut lowest = u64::MAX;
    for part in text.split(',') {
        lowest = lowest.min(read(part).ok_or(ValueError::Malformed)??);
    }
    Ok(lowest)
}

/// The longest of the waits in one line, if all are valid.
fn longest(text: &str, read: impl Fn(&str) -> Option<Duration>) -> Option<Duration> {
    let waits = text.split(',').map(|part| read(part.trim_matches([' ', '\t'])));
    waits.collect::<Option<SmallVec<[Duration; 2]>>>()?.into_iter().max()
}

/// A parameter that is a non-negative integer.
fn amount(item: &Item, key: &str) -> Result<Option<u64>, ValueError> {
    match item.get(key) {
        None => Ok(None),
        Some(Bare::Integer(number)) => u64::try_from(*number).map(Some).map_err(|_| ValueError::Ignored),
        Some(_) => Err(ValueError::Malformed),
    }
}

/// The name of a policy, cut to the longest label.
fn label_of(value: &Bare) -> Option<String> {
    match value {
        Bare::Text(text) => Some(text.chars().take(LABEL_MAX).collect()),
        _ => None,
    }
}

fn later(slot: &mut Option<Duration>, read: Option<Duration>) -> Result<(), ValueError> {
    let read = read.ok_or(ValueError::Malformed)?;
    *slot = Some(slot.map_or(read, |known| known.max(read)));
    Ok(())
}

fn lower(slot: &mut Option<u64>, read: u64) {
    *slot = Some(slot.map_or(read, |known| known.min(read)));
}

fn further(slot: &mut Option<Reset>, read: Reset) {
    if slot.is_none_or(|known| known.after() < read.after()) {
        *slot = Some(read);
    }
}
