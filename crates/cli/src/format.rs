//! Formats values for people: the counterpart of [`parse`](crate::parse).

use std::time::Duration;

use tidegate::{Entity, EntityId, OnExpiry, OnUnavailable, Policy, ResourceName, Scope, Stamp, Subject};
use tidegate_core::duration::Rounded;
use tidegate_core::excerpt::one_line;

/// A scope in command-line form.
pub(crate) fn scope(scope: &Scope) -> String {
    match scope {
        Scope::Subject(subject) => format!("entity {} resource {}", subject.entity, subject.resource),
        other => other.to_string(),
    }
}

/// The entity and the resource of a bucket in the columns of a table: `(all)` if all share it.
pub(crate) fn bucket(subject: &Subject) -> [String; 2] {
    const ALL: &str = "(all)";
    let entity = subject.one_entity().map_or(ALL, EntityId::as_str);
    let resource = subject.one_resource().map_or(ALL, ResourceName::as_str);
    [entity, resource].map(escape)
}

/// A policy on one line.
pub(crate) fn policy(policy: &Policy) -> String {
    let mut words: Vec<String> = policy.rules().iter().map(ToString::to_string).collect();
    words.extend(policy.is_only().then(|| "only".to_owned()));
    words.extend(policy.unavailable().map(|behaviour| format!("on-unavailable={}", unavailable(behaviour))));
    words.extend(policy.expiry().map(|behaviour| format!("on-expiry={}", expiry(behaviour))));
    if words.is_empty() { "no limits".to_owned() } else { words.join(" ") }
}

/// An entity's attributes on one line.
pub(crate) fn entity(entity: &Entity) -> String {
    let mut words: Vec<String> =
        entity.display_name().map(|name| format!("name={name}")).into_iter().collect();
    words.extend(entity.parent_id().map(|parent| format!("parent={parent}")));
    words.extend(entity.cascades().then(|| "cascade".to_owned()));
    words.extend(entity.is_disabled().then(|| "disabled".to_owned()));
    words.extend(entity.notes().iter().map(|(key, value)| format!("{key}={value}")));
    if words.is_empty() { "exists".to_owned() } else { words.join(" ") }
}

/// The behaviour while the store is unavailable, in command-line form.
pub(crate) fn unavailable(behaviour: OnUnavailable) -> String {
    match behaviour {
        OnUnavailable::Block => "block".to_owned(),
        OnUnavailable::Allow => "allow".to_owned(),
        OnUnavailable::LocalShare(share) => format!("share:{}", share.fraction()),
    }
}

/// The behaviour for expired leases, in command-line form.
pub(crate) const fn expiry(behaviour: OnExpiry) -> &'static str {
    match behaviour {
        OnExpiry::Settle => "settle",
        OnExpiry::Return => "return",
    }
}

/// A time for people, to the second.
pub(crate) fn time(at: Stamp) -> String {
    let text = at.to_string();
    text.split_once('.').map_or(text.clone(), |(seconds, _)| format!("{seconds}Z"))
}

/// A word as a shell takes it: quoted, unless it is plain.
pub(crate) fn shell_word(word: &str) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric() || "-_./:=@%+,".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', "'\\''"))
}

/// A duration for people, rounded up: to the millisecond, and from a minute on to the second, such as
/// `1h40m`.
pub(crate) fn duration(duration: Duration) -> String {
    Rounded(duration).to_string()
}

/// A latency, with a decimal of a millisecond below 10 ms: `1.4ms`.
pub(crate) fn latency(latency: Duration) -> String {
    const EXACT_BELOW: Duration = Duration::from_millis(10);
    if latency < EXACT_BELOW { format!("{:.1}ms", latency.as_secs_f64() * 1e3) } else { duration(latency) }
}

/// Rewrites the wait at the end of a refusal from the library or a server in the form of [`duration`].
pub(crate) fn rewrite_wait(sentence: &str, retry_after: Option<Duration>) -> String {
    const WAIT: &str = "; retry after ";
    match (sentence.rsplit_once(WAIT), retry_after) {
        (Some((before, _)), Some(span)) => format!("{before}{WAIT}{}", duration(span)),
        _ => sentence.to_owned(),
    }
}

/// A number in at most six characters.
pub(crate) fn number(number: u64) -> String {
    match number {
        0..1_000 => return number.to_string(),
        1_000..100_000 => return format!("{},{:03}", number / 1_000, number % 1_000),
        _ => {}
    }
    #[expect(clippy::cast_precision_loss, reason = "three digits of it are shown")]
    let mut parts = number as f64 / 1e3;
    let mut letters = "kMGTPE".chars();
    let mut letter = letters.next().unwrap_or_default();
    // Decided by the rounded value: 999,999 rounds to a million.
    while parts >= 999.95
        && let Some(next) = letters.next()
    {
        (parts, letter) = (parts / 1e3, next);
    }
    if parts < 9.995 { format!("{parts:.2}{letter}") } else { format!("{parts:.1}{letter}") }
}

/// Escapes untrusted text for a terminal: one line, without control or bidirectional characters.
pub(crate) fn escape(text: &str) -> String {
    one_line(text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn number_picks_its_unit_after_rounding() {
        let table = [
            (99_999, "99,999"),
            (100_000, "100.0k"),
            (999_949, "999.9k"),
            (999_999, "1.00M"),
            (9_994_999, "9.99M"),
            (9_999_999, "10.0M"),
            (999_999_999, "1.00G"),
            (999_999_999_999, "1.00T"),
            (999_900_000_000_000, "999.9T"),
            (1_000_000_000_000_000, "1.00P"),
            (u64::MAX, "18.4E"),
        ];
        for (count, text) in table {
            assert_eq!(number(count), text);
            assert!(text.len() <= 6, "{text}");
        }
    }

    #[test]
    fn time_is_shown_to_the_second() {
        for (micros, text) in [(0, "1970-01-01T00:00:00Z"), (1_999_999, "1970-01-01T00:00:01Z")] {
            assert_eq!(time(Stamp::from_micros(micros)), text);
        }
    }

    #[test]
    fn shell_word_is_quoted_unless_plain() {
        let table = [
            ("limits.toml", "limits.toml"),
            ("sqlite:/a/b.db", "sqlite:/a/b.db"),
            ("", "''"),
            ("my limits", "'my limits'"),
            ("a?b=$c", "'a?b=$c'"),
            ("it's", r"'it'\''s'"),
        ];
        for (word, shown) in table {
            assert_eq!(shell_word(word), shown);
        }
    }

    #[test]
    fn short_latency_has_a_decimal() {
        for (micros, text) in [(0, "0.0ms"), (1_420, "1.4ms"), (12_001, "13ms"), (61_000_000, "1m1s")] {
            assert_eq!(latency(Duration::from_micros(micros)), text);
        }
    }

    #[test]
    fn duration_is_rounded_up() {
        assert_eq!(duration(Duration::from_micros(2_999_999)), "3s");
        assert_eq!(duration(Duration::from_micros(1)), "1ms");
        assert_eq!(duration(Duration::from_secs(61)), "1m1s");
        assert_eq!(duration(Duration::from_millis(6_047_870)), "1h40m48s");
        assert_eq!(
            rewrite_wait("short; retry after 6047.87s", Some(Duration::from_millis(6_047_870))),
            "short; retry after 1h40m48s"
        );
        assert_eq!(rewrite_wait("short", None), "short");
    }
}
