//! Builds the conditional update of a bucket's item from a decision.
//!
//! A limit is stored as the time at which it is full, times its amount: one exact integer. To take units is
//! to add to that time if it is in the future; if it is in the past, the bucket is full, and the time is set
//! from now. The cached state selects one of these two forms, and the condition of each fails where the other
//! is right. To return units is to subtract in any state: a time in the past is a full bucket. Every other
//! change of a limit, such as its shape or its creation, requires that the limit is unchanged.

use std::collections::BTreeMap;
use std::time::Duration;

use tidegate_core::bucket::{Bucket, Span};
use tidegate_core::limit::cascade::Level;
use tidegate_core::limit::lease::REMEMBERED;
use tidegate_core::limit::meter::Meter;
use tidegate_core::limit::name::Subject;
use tidegate_core::limit::policy::Scope;
use tidegate_core::limit::resolve::Source;
use tidegate_core::time::Stamp;

use super::bucket_view::{BucketView, DUE, REVISION, RULES, rule_text};
use super::expression::UpdateExpression;
use super::keys::{GSI1, GSI2, Keys, PK, TTL, padded};

/// The lifetime of an item, as a multiple of the time that its slowest limit takes to fill.
const LIFETIMES: u64 = 7;
/// How long an item outlives its last lease, which is still to be counted or may be queried.
const GRACE: Duration = Duration::from_secs(86_400);
/// A debt that is paid less than this before its item expires extends the item's life, in seconds.
const DEBT_MARGIN: u64 = 3_600;

/// The context of an update.
pub(super) struct UpdateContext<'a> {
    pub(super) keys: &'a Keys,
    pub(super) subject: &'a Subject,
    pub(super) now: Stamp,
    /// The requested units, which must be available.
    pub(super) requested: Option<(&'a Level, &'a [Option<u64>])>,
    /// Rows that must be unchanged, because their debt bounds how much they take.
    pub(super) exact: &'a [&'a str],
    /// The new name of the rules, if they change.
    pub(super) epoch: &'a str,
}

/// The stored form of the time at which a bucket is full.
pub(super) fn parts(meter: &Meter) -> u128 {
    let Span { whole, part } = meter.bucket().full_at();
    u128::from(whole) * u128::from(meter.rule().shape().amount()) + u128::from(part)
}

/// Requires that a limit is unchanged. A stored time may be before the first representable one, because
/// returned units may exceed all time since then, or after the last one; both are read as the nearest
/// representable time.
pub(super) fn only_if_unchanged(write: &mut UpdateExpression, full_at: &str, seen: &Meter) {
    let parts = parts(seen);
    let comparison = match seen.bucket().full_at().whole {
        _ if parts == 0 => "<=",
        u64::MAX => ">=",
        _ => "=",
    };
    write.only_if(full_at, comparison, parts);
}

/// The bucket of a stored time.
pub(super) fn bucket(parts: u128, amount: u64) -> Bucket<Stamp> {
    let amount = u128::from(amount);
    let whole = u64::try_from(parts / amount).unwrap_or(u64::MAX);
    let part = u64::try_from(parts % amount).unwrap_or(0);
    Bucket::from_full_at(Span { whole, part })
}

/// Updates the limits of an item to those of the decision.
pub(super) fn write_limits(
    write: &mut UpdateExpression,
    seen: &BucketView,
    target: &BTreeMap<String, Meter>,
    on: &UpdateContext<'_>,
) {
    let mut is_moved = false;
    let mut is_ruled = false;
    for (row, after) in target {
        let Some(before) = seen.meters.get(row) else {
            write.set(&format!("f:{row}"), parts(after));
            write.set(&format!("c:{row}"), after.consumed());
            write.set(&format!("r:{row}"), rule_text(after));
            is_ruled = true;
            continue;
        };
        let requested = on.requested.and_then(|(level, units)| {
            let line = level.limits.iter().find(|line| line.rule.row() == row)?;
            units[line.name]
        });
        is_ruled |= rule_text(before) != rule_text(after);
        if on.exact.contains(&row.as_str()) {
            only_if_unchanged(write, &format!("f:{row}"), before);
            is_moved = true;
        }
        is_moved |= write_limit(write, row, (before, after), requested, (seen, on.now));
    }
    for (row, gone) in seen.meters.iter().filter(|(row, _)| !target.contains_key(*row)) {
        only_if_unchanged(write, &format!("f:{row}"), gone);
        for kind in ["f", "c", "r"] {
            write.remove(&format!("{kind}:{row}"));
        }
        is_ruled = true;
    }
    if is_ruled && seen.meters.is_empty() {
        let sk = format!("BUCKET#{}", on.subject.entity);
        write.set_in_index(GSI2, on.keys.resource(&on.subject.resource), sk);
    }
    if let Some(rules) = seen.rules.as_deref().filter(|_| is_moved || is_ruled) {
        write.only_if(RULES, "=", rules);
    }
    if is_ruled && seen.exists() {
        write.set(RULES, on.epoch);
    }
    begin_update(write, seen, on.epoch);
}

/// Raises the revision of an item, and creates an item that does not exist. An item that was deleted since is
/// not recreated from a change of it.
pub(super) fn begin_update(write: &mut UpdateExpression, seen: &BucketView, epoch: &str) {
    if seen.exists() {
        write.only_with(PK);
    } else {
        write.only_without(PK);
        write.set(RULES, epoch);
    }
    write.add(REVISION, 1_u64);
}

/// Updates one limit. Returns whether anything of it is written or checked.
fn write_limit(
    write: &mut UpdateExpression,
    row: &str,
    (before, after): (&Meter, &Meter),
    requested: Option<u64>,
    (seen, now): (&BucketView, Stamp),
) -> bool {
    let (full_at, consumed) = (format!("f:{row}"), format!("c:{row}"));
    let shape = after.rule().shape();
    let moved = after.consumed().saturating_sub(before.consumed());
    let is_ruled = rule_text(before) != rule_text(after);
    if is_ruled {
        write.set(&format!("r:{row}"), rule_text(after));
    }
    if moved != 0 || is_ruled {
        write.add(&consumed, moved);
    }
    let (amount, period) = (u128::from(shape.amount()), shape.period().as_micros());
    let cost = u128::from(moved.unsigned_abs()) * period;
    let now_parts = u128::from(now.as_micros()) * amount;
    // Rounded up to a second, as in the condition below.
    let Span { whole, part } = after.bucket().full_at();
    let reaches = whole.saturating_add(u64::from(part > 0)).div_ceil(1_000_000) + DEBT_MARGIN;
    let outlives = seen.ttl.is_some_and(|ttl| reaches > ttl);
    // A repair sets the level without moving units. Full buckets are equal.
    let are_full = before.is_full(now) && after.is_full(now);
    let is_set = moved == 0 && before.bucket() != after.bucket() && !are_full;
    if before.rule().shape() != shape || is_set || (moved > 0 && outlives) {
        only_if_unchanged(write, &full_at, before);
        write.set(&full_at, parts(after));
        if outlives {
            write.expires(reaches + LIFETIMES * DEBT_MARGIN);
        }
        return true;
    }
    // The requested units are available if the bucket is full at most a whole burst from now after they are
    // taken.
    let most = |units: u64| {
        let burst = u128::from(shape.burst().saturating_sub(units)) * period;
        now_parts + burst
    };
    if moved > 0 && before.is_full(now) {
        write.only_if(&full_at, "<=", now_parts);
        write.set(&full_at, now_parts + cost);
    } else if moved > 0 {
        write.only_if(&full_at, ">", now_parts);
        if let Some(units) = requested {
            write.only_if(&full_at, "<=", most(units));
        } else if let Some(ttl) = seen.ttl {
            let last = u128::from(ttl.saturating_sub(DEBT_MARGIN)) * 1_000_000 * amount;
            write.only_if(&full_at, "<=", last.saturating_sub(cost));
            write.only_if(TTL, ">=", ttl);
        }
        write.add(&full_at, cost);
    } else if moved < 0 {
        write.add(&full_at, -i128::try_from(cost).unwrap_or(i128::MAX));
    } else {
        if let Some(units) = requested {
            write.only_if(&full_at, "<=", most(units));
        }
        if is_ruled {
            write.add(&full_at, 0_u64);
        }
    }
    moved != 0 || requested.is_some()
}

/// Schedules the item for the sweep no later than `at`.
pub(super) fn set_due_by(write: &mut UpdateExpression, seen: &BucketView, at: Stamp, on: (&Keys, &Subject)) {
    let at_text = padded(at.as_micros());
    if seen.due.is_some_and(|due| due <= at) {
        write.only_if(DUE, "<=", at_text);
        return;
    }
    if seen.exists() {
        write.only_unless_or(DUE, ">", at_text.as_str());
    }
    write.set_in_index(GSI1, on.0.due(part_of(on.1)), at_text);
}

/// The partition of the due index that a bucket is in.
pub(super) fn part_of(subject: &Subject) -> u64 {
    let text = format!("{} on {}", subject.entity, subject.resource);
    text.bytes().fold(0_u64, |sum, byte| sum.wrapping_mul(31).wrapping_add(u64::from(byte)))
}

/// Extends the life of an item that is drawn from: seven times as long as its slowest limit takes to fill,
/// and a day beyond the deadline of each lease. The expiry never moves back, because leases that draw from
/// the item may have their marks in another one. An item with limits of its own entity never expires.
pub(super) fn extend_lifetime(
    write: &mut UpdateExpression,
    seen: &BucketView,
    level: &Level,
    (now, until): (Stamp, Stamp),
) {
    if is_custom(level) {
        if seen.ttl.is_some() {
            write.never_expires();
        }
        return;
    }
    let (wanted, enough) = lifetime(seen, level, (now, until));
    if seen.ttl.is_some_and(|ttl| ttl >= enough) {
        write.only_if(TTL, ">=", enough);
        return;
    }
    write.expires(wanted);
    if seen.exists() && seen.ttl.is_none() {
        // Leases that drew while it did not expire must be known.
        write.only_if(REVISION, "=", seen.revision);
    }
}

/// Whether the item expires too early for a lease that draws from it.
pub(super) fn is_too_short(seen: &BucketView, level: &Level, times: (Stamp, Stamp)) -> bool {
    !is_custom(level) && seen.ttl.is_some_and(|ttl| ttl < lifetime(seen, level, times).1)
}

/// The second at which an item should expire, and the earliest one that is sufficient, so that not every draw
/// writes it.
fn lifetime(seen: &BucketView, level: &Level, (now, until): (Stamp, Stamp)) -> (u64, u64) {
    let rules = level.limits.iter().map(|line| &line.rule);
    let rules = rules.chain(seen.meters.values().map(Meter::rule));
    let full = rules.map(|rule| rule.shape().span(rule.shape().burst()).whole.div_ceil(1_000_000)).max();
    let seconds = |at: Stamp| at.as_micros() / 1_000_000;
    let open = seen.open.values().map(|mark| mark.record.deadline()).max();
    let last = if seen.ttl.is_none() { open.map_or(until, |open| open.max(until)) } else { until };
    let grace = seconds(last + GRACE.max(REMEMBERED));
    let wanted = (seconds(now) + LIFETIMES * full.unwrap_or(0)).max(grace);
    (wanted, wanted - ((wanted - seconds(now)) / 10).min(GRACE.as_secs() / 2))
}

fn is_custom(level: &Level) -> bool {
    let is_own = |source: &Source| matches!(source, Source::Policy(Scope::Entity(_) | Scope::Subject(_)));
    level.limits.iter().any(|line| is_own(&line.source))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tidegate_core::limit::name::Namespace;
    use tidegate_core::limit::policy::Version;
    use tidegate_core::limit::rule::Limit;

    use super::super::keys::Key;
    use super::*;

    const NOW: Stamp = Stamp::from_secs(1_800_000_000);

    fn meter(limit: &Limit, taken: u64, at: Stamp) -> Meter {
        let mut meter = Meter::new(Arc::new(limit.check().unwrap()), Version::ZERO);
        meter.take(taken, at);
        meter
    }

    fn seen(meter: &Meter) -> BucketView {
        let meters = BTreeMap::from([("tpm".to_owned(), meter.clone())]);
        BucketView { rules: Some("a".to_owned()), meters, ..BucketView::default() }
    }

    /// The update and condition for a change from `before` to `after`.
    fn update_for(before: &Meter, after: &Meter) -> (String, String) {
        update_of(&seen(before), after)
    }

    fn update_of(seen: &BucketView, after: &Meter) -> (String, String) {
        let subject = Subject::new("acme", "gpt").unwrap();
        let keys = Keys::new(&Namespace::new("default").unwrap());
        let mut write = UpdateExpression::new(Key { pk: String::new(), sk: String::new() });
        let on = UpdateContext {
            keys: &keys,
            subject: &subject,
            now: NOW,
            requested: None,
            exact: &[],
            epoch: "b",
        };
        let target = BTreeMap::from([("tpm".to_owned(), after.clone())]);
        write_limits(&mut write, seen, &target, &on);
        let names = write.names().unwrap();
        let plain =
            |text: String| names.iter().fold(text, |text, (place, name)| text.replace(place.as_str(), name));
        (plain(write.update()), plain(write.condition().unwrap()))
    }

    #[test]
    fn full_limit_is_set_and_filling_one_added_to() {
        let limit = Limit::per_minute("tpm", 600);
        let long_ago = NOW.as_micros() - 3_600_000_000;
        let full = meter(&limit, 5, Stamp::from_micros(long_ago));
        let filling = meter(&limit, 300, NOW);
        let after = |before: &Meter, delta| {
            let mut after = before.clone();
            after.adjust(delta, NOW);
            update_for(before, &after)
        };
        let (change, condition) = after(&full, 7);
        assert!(change.starts_with("SET f:tpm = "), "{change}");
        assert!(condition.starts_with("f:tpm <= "), "{condition}");
        let (change, condition) = after(&filling, 7);
        assert!(change.contains("ADD c:tpm") && change.contains("f:tpm :"), "{change}");
        assert!(condition.starts_with("f:tpm > "), "{condition}");
        let (change, condition) = after(&filling, -7);
        assert!(change.contains("f:tpm :"), "{change}");
        assert!(condition.starts_with("R = "), "{condition}");
    }

    #[test]
    fn changed_shape_requires_unchanged_limit() {
        let before = meter(&Limit::per_minute("tpm", 600), 300, NOW);
        let mut after = before.clone();
        after.follow(&Arc::new(Limit::per_minute("tpm", 1_200).check().unwrap()), Version::new(2), NOW);
        let (change, condition) = update_for(&before, &after);
        assert!(condition.contains("f:tpm = :") && condition.contains("R = :"), "{condition}");
        assert!(change.contains("R = :") && change.contains("r:tpm = :"), "{change}");
    }

    #[test]
    fn shape_changes_at_the_ends_of_time() {
        let limit = Limit::per_day("tpm", 1);
        let rule = Arc::new(limit.check().unwrap());
        for (parts, condition) in [(u128::MAX >> 2, "f:tpm >= :"), (0, "f:tpm <= :")] {
            let before = Meter::restored(bucket(parts, 1), Arc::clone(&rule), Version::ZERO, 7);
            let mut after = before.clone();
            after.follow(&Arc::new(Limit::per_day("tpm", 2).check().unwrap()), Version::new(1), NOW);
            let text = update_for(&before, &after).1;
            assert!(text.contains(condition), "{text}");
        }
    }

    #[test]
    fn debt_is_added_if_item_lives_long_enough() {
        let before = meter(&Limit::per_minute("tpm", 600), 300, NOW);
        let owing = |debt: i64| {
            let mut after = before.clone();
            after.adjust(debt, NOW);
            let in_two_hours = 1_800_000_000 + 7_200;
            update_of(&BucketView { ttl: Some(in_two_hours), ..seen(&before) }, &after)
        };
        let (change, condition) = owing(7);
        assert!(change.contains("ADD") && !change.contains("ttl"), "{change}");
        assert!(condition.contains("f:tpm <= :") && condition.contains("ttl >= :"), "{condition}");
        // Paid an hour before the expiry, which is too little: the item's life is extended.
        let (change, condition) = owing(36_000);
        assert!(change.contains("SET f:tpm = :") && change.contains("ttl = :"), "{change}");
        assert!(condition.contains("f:tpm = :"), "{condition}");
    }

    #[test]
    fn time_round_trips_as_one_integer() {
        for limit in [
            Limit::per_day("tpm", 1),
            Limit::per_second("tpm", 1 << 40).burst(1),
            Limit::per("tpm", 7, Duration::from_secs(3)),
        ] {
            for taken in [1, 3, 1_000_000] {
                let meter = meter(&limit, taken, NOW);
                assert_eq!(bucket(parts(&meter), meter.rule().shape().amount()), *meter.bucket());
            }
        }
    }

    #[test]
    fn item_lives_for_seven_refills() {
        let subject = Subject::new("acme", "gpt").unwrap();
        let level = Level { subject, limits: Box::default() };
        let until = NOW + Duration::from_secs(60);
        let lives = |limits: &[Limit], ttl: Option<u64>| {
            let meters = limits.iter().map(|limit| (limit.name().to_owned(), meter(limit, 1, NOW)));
            let seen = BucketView { ttl, meters: meters.collect(), ..BucketView::default() };
            let mut write = UpdateExpression::new(Key { pk: String::new(), sk: String::new() });
            extend_lifetime(&mut write, &seen, &level, (NOW, until));
            (write.set_values().get(TTL).cloned(), is_too_short(&seen, &level, (NOW, until)))
        };
        let expires = |seconds: u64| Some(super::super::expression::Value::from(1_800_000_000 + seconds).0);
        let (fast, slow) = (Limit::per_minute("a", 10), Limit::per_minute("b", 10).burst(10_000));
        assert_eq!(
            lives(std::slice::from_ref(&fast), None),
            (expires(86_460), false),
            "a day beyond the lease"
        );
        assert_eq!(lives(&[fast, slow.clone()], Some(1)), (expires(420_000), true));
        assert_eq!(lives(&[slow], Some(1_800_420_000)), (None, false), "long enough");
    }
}
