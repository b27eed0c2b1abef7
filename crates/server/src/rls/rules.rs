//! Maps descriptors to draws: pure matching, without a store.
//!
//! A rule names all entries of a descriptor, in order. The first match wins. Limits and templates are parsed
//! when the rules are loaded, so that a decision only fills in values.

use std::borrow::Cow;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::{
    Entry, RateLimitOverride,
};
use envoy_types::pb::envoy::r#type::v3::RateLimitUnit;
use thiserror::Error;
use tidegate::{Limit, Policy};
use tidegate_core::duration;
use tidegate_core::excerpt::excerpt;
use tidegate_core::limit::cascade::UNITS_MAX;
use tidegate_core::limit::name::{LimitName, Subject};

use super::config::{Charge, RuleConfig, Unknown};

/// The maximum number of rules.
const RULES_MAX: usize = 1_000;
/// The maximum number of entries of a descriptor.
pub(super) const ENTRIES_MAX: usize = 16;
/// The maximum length of a key and a value in bytes.
pub(super) const VALUE_MAX: usize = 1_024;
/// The maximum number of limits of a rule.
const LIMITS_MAX: usize = 16;
/// The limit that a hit draws from by default.
const REQUESTS: &str = "requests";
/// The limit that a request brings itself. It counts hits.
const OVERRIDE: &str = "override";
/// The minimum and maximum time in which a charge can be refunded.
const REFUND_WITHIN: (Duration, Duration) = (Duration::from_secs(1), Duration::from_hours(24));

/// Rules that map Envoy's descriptors to limits. Clones share the same rules.
#[derive(Debug, Clone)]
pub struct EnvoyRules {
    rules: Arc<[Rule]>,
    unknown: Unknown,
}

/// Invalid rules.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidRules {
    /// Too many rules.
    #[error("{count} rules, more than {RULES_MAX}")]
    Many {
        /// The number of rules.
        count: usize,
    },
    /// An invalid field of a rule.
    #[error("rule {rule}: `{field}` is `{value}`: {why}")]
    Field {
        /// The number of the rule, from 1.
        rule: usize,
        /// The field.
        field: String,
        /// Its value.
        value: String,
        /// What is wrong with it.
        why: String,
    },
}

#[derive(Debug)]
struct Rule {
    domain: Option<Box<str>>,
    entries: Box<[(Box<str>, Pattern)]>,
    action: RuleAction,
}

#[derive(Debug, PartialEq, Eq)]
enum Pattern {
    Any,
    Prefix(Box<str>),
    Exact(Box<str>),
}

#[derive(Debug)]
enum RuleAction {
    Unlimited,
    Draw(DrawRule),
}

/// The draw that a rule makes.
#[derive(Debug)]
pub(super) struct DrawRule {
    /// The number of the rule, from 1.
    pub(super) number: usize,
    entity: Template,
    resource: Template,
    /// Units per hit.
    cost: Box<[(LimitName, u64)]>,
    /// The number of values in its templates, which clients of the proxy may have chosen.
    pub(super) values: usize,
    pub(super) limits: Box<[Limit]>,
    pub(super) is_shadow: bool,
    charge: Charge,
    /// How long after a charge negative hits return its units.
    pub(super) refund_within: Option<Duration>,
}

/// A text with placeholders.
#[derive(Debug, PartialEq, Eq)]
struct Template(Box<[Part]>);

#[derive(Debug, PartialEq, Eq)]
enum Part {
    Text(Box<str>),
    /// The value of the entry with this index.
    Value(usize),
}

/// The result of matching a descriptor.
#[derive(Debug)]
pub(super) enum RuleMatch<'a> {
    Unlimited,
    Unknown(Unknown),
    Draw(DrawRequest<'a>),
    /// The values give no valid draw. It is over its limit unless the rule is a shadow rule: clients may
    /// choose the values, and must not be allowed because of them.
    Invalid {
        why: String,
        is_shadow: bool,
    },
}

/// A draw for a descriptor.
#[derive(Debug)]
pub(super) struct DrawRequest<'a> {
    pub(super) rule: &'a DrawRule,
    pub(super) subject: Subject,
    pub(super) action: DrawAction,
    pub(super) hits: u64,
    /// The cost; for a query, that of one hit, and for a check, one unit of each limit.
    pub(super) cost: Vec<(&'a str, u64)>,
    /// A limit that the request brings itself, in addition to those of its rule.
    pub(super) limit: Option<Limit>,
}

/// What a descriptor asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DrawAction {
    /// Draws units, or is over the limit.
    Draw,
    /// Zero hits: draws nothing, and is over the limit only if a limit is in debt.
    Query,
    /// Zero hits of a rule that charges afterwards: draws nothing, and is over the limit if no unit is left.
    Check,
    /// Reports units that were used.
    Report,
    /// Returns units.
    Refund,
}

impl EnvoyRules {
    /// Validates rules.
    pub(super) fn new(unknown: Unknown, rules: &[RuleConfig]) -> Result<Self, InvalidRules> {
        if rules.len() > RULES_MAX {
            return Err(InvalidRules::Many { count: rules.len() });
        }
        let rules: Result<Vec<_>, _> = rules
            .iter()
            .zip(1..)
            .map(|(rule, number)| {
                parse_rule(rule, number).map_err(|FieldError { field, value, why }| InvalidRules::Field {
                    rule: number,
                    field,
                    value,
                    why,
                })
            })
            .collect();
        Ok(Self { rules: rules?.into(), unknown })
    }

    /// Returns the number of rules.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there are no rules.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Whether these rules never refuse a request.
    pub(super) fn allows_all(&self) -> bool {
        self.is_empty() && self.unknown == Unknown::Allow
    }

    /// Matches a descriptor; `hits` applies if it sets none itself.
    pub(super) fn resolve<'a>(
        &'a self,
        domain: &str,
        descriptor: &'a RateLimitDescriptor,
        hits: u64,
    ) -> RuleMatch<'a> {
        let entries = &descriptor.entries;
        let Some(rule) = self.rules.iter().find(|rule| rule.matches(domain, entries)) else {
            return RuleMatch::Unknown(self.unknown);
        };
        match &rule.action {
            RuleAction::Unlimited => RuleMatch::Unlimited,
            RuleAction::Draw(draw_rule) => {
                let hits = descriptor.hits_addend.as_ref().map_or(hits, |own| own.value);
                match draw_rule.request(descriptor, hits) {
                    Ok(request) => RuleMatch::Draw(request),
                    Err(why) => RuleMatch::Invalid { why, is_shadow: draw_rule.is_shadow },
                }
            }
        }
    }
}

impl Rule {
    fn matches(&self, domain: &str, entries: &[Entry]) -> bool {
        self.entries.len() == entries.len()
            && self.entries.iter().zip(entries).all(|((key, pattern), entry)| {
                **key == *entry.key
                    && match pattern {
                        Pattern::Any => true,
                        Pattern::Prefix(prefix) => entry.value.starts_with(&**prefix),
                        Pattern::Exact(value) => **value == *entry.value,
                    }
            })
            && self.domain.as_ref().is_none_or(|own| **own == *domain)
    }
}

impl DrawRule {
    fn request<'a>(&'a self, descriptor: &RateLimitDescriptor, hits: u64) -> Result<DrawRequest<'a>, String> {
        let entries = &descriptor.entries;
        let action = match (descriptor.is_negative_hits, hits, self.charge) {
            (true, ..) => DrawAction::Refund,
            (false, 0, Charge::Before) => DrawAction::Query,
            (false, 0, Charge::After) => DrawAction::Check,
            (false, _, Charge::Before) => DrawAction::Draw,
            (false, _, Charge::After) => DrawAction::Report,
        };
        let mut cost = Vec::with_capacity(self.cost.len() + 1);
        for (limit, units) in &self.cost {
            let units = if action == DrawAction::Check { 1 } else { *units };
            let Some(all) = units.checked_mul(hits.max(1)).filter(|all| *all <= UNITS_MAX) else {
                return Err(format!("{hits} hits of {units} `{limit}` each are more than {UNITS_MAX}"));
            };
            cost.push((limit.as_str(), all));
        }
        let limit = descriptor.limit.map(own_limit).transpose()?;
        if limit.is_some() {
            cost.push((OVERRIDE, hits.max(1)));
        }
        let (entity, resource) = (self.entity.fill(entries)?, self.resource.fill(entries)?);
        let subject = Subject::new(&entity, &resource).map_err(|error| error.to_string())?;
        Ok(DrawRequest { rule: self, subject, action, hits, cost, limit })
    }

    /// Units per hit.
    pub(super) fn cost(&self) -> impl Iterator<Item = (&str, u64)> {
        self.cost.iter().map(|(limit, units)| (limit.as_str(), *units))
    }
}

/// The limit that a request brings.
fn own_limit(limit: RateLimitOverride) -> Result<Limit, String> {
    const DAY: u64 = 86_400;
    let seconds = match limit.unit() {
        RateLimitUnit::Unknown => return Err("its own limit has no unit".to_owned()),
        RateLimitUnit::Second => 1,
        RateLimitUnit::Minute => 60,
        RateLimitUnit::Hour => 3_600,
        RateLimitUnit::Day => DAY,
        RateLimitUnit::Month => 30 * DAY,
        RateLimitUnit::Year => 365 * DAY,
    };
    if limit.requests_per_unit == 0 {
        return Err("its own limit allows no hits".to_owned());
    }
    Ok(Limit::per(OVERRIDE, limit.requests_per_unit.into(), Duration::from_secs(seconds)))
}

impl DrawRequest<'_> {
    /// Whether it draws nothing.
    pub(super) const fn is_query(&self) -> bool {
        matches!(self.action, DrawAction::Query | DrawAction::Check)
    }

    /// Whether it is about units that were used, and is never over a limit.
    pub(super) const fn is_report(&self) -> bool {
        matches!(self.action, DrawAction::Report | DrawAction::Refund)
    }
}

impl Template {
    /// Fills in the values, unless other values could produce the same text.
    fn fill<'a>(&'a self, entries: &'a [Entry]) -> Result<Cow<'a, str>, String> {
        // Most templates are one text or one value, and are borrowed.
        let mut filled = Cow::Borrowed("");
        for (place, part) in self.0.iter().enumerate() {
            match part {
                Part::Text(text) => filled += &**text,
                // The rule matched, so the entry exists.
                Part::Value(number) => {
                    let Some(Entry { key, value, .. }) = entries.get(*number) else { continue };
                    if value.len() > VALUE_MAX {
                        let bytes = value.len();
                        return Err(format!("the entry `{key}` has {bytes} bytes, more than {VALUE_MAX}"));
                    }
                    filled += value.as_str();
                    // A value must not contain the text that follows it, nor overlap with it: the split would
                    // be ambiguous.
                    if let [Part::Text(end), Part::Value(_), ..] = &self.0[place + 1..]
                        && format!("{value}{end}").find(&**end) != Some(value.len())
                    {
                        return Err(format!(
                            "the entry `{key}` contains `{end}`, which separates it in its rule"
                        ));
                    }
                }
            }
        }
        Ok(filled)
    }

    fn values(&self) -> usize {
        self.0.iter().filter(|part| matches!(part, Part::Value(_))).count()
    }

    /// Returns an example, for validation.
    fn example(&self) -> String {
        let text = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Value(_) => "x".into(),
        };
        self.0.iter().map(text).collect()
    }
}

/// An invalid field.
struct FieldError {
    field: String,
    value: String,
    why: String,
}

fn field_error(field: impl Into<String>, value: &str, why: impl Into<String>) -> FieldError {
    FieldError { field: field.into(), value: excerpt(value), why: why.into() }
}

fn parse_rule(rule: &RuleConfig, number: usize) -> Result<Rule, FieldError> {
    let count = rule.entries.len();
    if count == 0 || count > ENTRIES_MAX {
        return Err(field_error(
            "match",
            &format!("{count} entries"),
            format!("there are 1 to {ENTRIES_MAX}"),
        ));
    }
    let mut entries = Vec::with_capacity(count);
    for (place, entry) in rule.entries.iter().enumerate() {
        for (part, text) in [("key", &entry.key), ("value", &entry.value)] {
            if text.len() > VALUE_MAX {
                let why = format!("it has {} bytes, more than {VALUE_MAX}", text.len());
                return Err(field_error(format!("match[{place}].{part}"), text, why));
            }
        }
        if entry.key.is_empty() {
            return Err(field_error(format!("match[{place}].key"), "", "it is empty"));
        }
        let pattern = pattern(&entry.value).ok_or_else(|| {
            field_error(format!("match[{place}].value"), &entry.value, "`*` is only allowed at the end")
        })?;
        entries.push((entry.key.as_str().into(), pattern));
    }
    let action = if rule.unlimited { unlimited(rule)? } else { RuleAction::Draw(draw_rule(rule, number)?) };
    Ok(Rule { domain: rule.domain.as_deref().map(Into::into), entries: entries.into(), action })
}

fn pattern(text: &str) -> Option<Pattern> {
    match text.find('*') {
        None => Some(Pattern::Exact(text.into())),
        Some(0) if text.len() == 1 => Some(Pattern::Any),
        Some(place) if place + 1 == text.len() => Some(Pattern::Prefix(text[..place].into())),
        Some(_) => None,
    }
}

fn unlimited(rule: &RuleConfig) -> Result<RuleAction, FieldError> {
    let fields = [
        ("entity", rule.entity.is_some()),
        ("resource", rule.resource.is_some()),
        ("cost", !rule.cost.is_empty()),
        ("limits", !rule.limits.is_empty()),
        ("charge", rule.charge != Charge::Before),
        ("refund_within", rule.refund_within.is_some()),
        ("shadow", rule.shadow),
    ];
    match fields.into_iter().find(|(_, is_set)| *is_set) {
        Some((field, _)) => {
            Err(field_error("unlimited", "true", format!("an unlimited rule cannot have `{field}`")))
        }
        None => Ok(RuleAction::Unlimited),
    }
}

fn draw_rule(rule: &RuleConfig, number: usize) -> Result<DrawRule, FieldError> {
    let needed = |field: &str, text: &Option<String>| {
        text.clone().ok_or_else(|| field_error(field, "", "it is missing, and the rule is not `unlimited`"))
    };
    let (entity, resource) = (needed("entity", &rule.entity)?, needed("resource", &rule.resource)?);
    let templates = (template("entity", &entity, rule)?, template("resource", &resource, rule)?);
    let examples = (templates.0.example(), templates.1.example());
    for (field, text, example) in
        [("entity", &entity, (&*examples.0, "x")), ("resource", &resource, ("x", &*examples.1))]
    {
        Subject::new(example.0, example.1).map_err(|error| field_error(field, text, error.to_string()))?;
    }
    if rule.cost.len() > LIMITS_MAX || rule.limits.len() > LIMITS_MAX {
        let field = if rule.cost.len() > LIMITS_MAX { "cost" } else { "limits" };
        let value = format!("{} limits", rule.cost.len().max(rule.limits.len()));
        return Err(field_error(field, &value, format!("there are at most {LIMITS_MAX}")));
    }
    let mut cost = Vec::with_capacity(rule.cost.len().max(1));
    for (limit, units) in &rule.cost {
        let field = format!("cost.{}", excerpt(limit));
        let name = LimitName::new(limit).map_err(|error| field_error(&*field, limit, error.to_string()))?;
        if limit == OVERRIDE {
            return Err(field_error(field, limit, "this name is that of limits which requests bring"));
        }
        if !(1..=UNITS_MAX).contains(units) {
            return Err(field_error(field, &units.to_string(), format!("a hit costs 1 to {UNITS_MAX}")));
        }
        cost.push((name, *units));
    }
    if cost.is_empty() {
        let name =
            LimitName::new(REQUESTS).map_err(|error| field_error("cost", REQUESTS, error.to_string()))?;
        cost.push((name, 1));
    }
    let mut limits = Vec::with_capacity(rule.limits.len());
    for (place, text) in rule.limits.iter().enumerate() {
        let limit: Result<Limit, _> = text.parse();
        limits.push(limit.map_err(|error| field_error(format!("limits[{place}]"), text, error.to_string()))?);
    }
    let policy = Policy::new(limits.iter().cloned()).and_then(|policy| policy.check_call().map(|()| policy));
    let policy = policy.map_err(|error| field_error("limits", &rule.limits.join(", "), error.to_string()))?;
    let is_drawn = |limit: &LimitName| cost.iter().any(|(name, _)| name == limit);
    if let Some(place) = policy.rules().iter().position(|limit| !is_drawn(limit.name())) {
        let names: Vec<_> = cost.iter().map(|(name, _)| format!("`{name}`")).collect();
        let why = format!("`cost` does not contain this limit, but {}", names.join(", "));
        return Err(field_error(format!("limits[{place}]"), &rule.limits[place], why));
    }
    let (entity, resource) = templates;
    let refund_within = rule.refund_within.as_deref().map(|text| refund_within(text, rule)).transpose()?;
    Ok(DrawRule {
        number,
        values: entity.values() + resource.values(),
        entity,
        resource,
        cost: cost.into(),
        limits: limits.into(),
        is_shadow: rule.shadow,
        charge: rule.charge,
        refund_within,
    })
}

fn refund_within(text: &str, rule: &RuleConfig) -> Result<Duration, FieldError> {
    let field = "refund_within";
    if rule.shadow {
        return Err(field_error(field, text, "a shadow rule cannot have it"));
    }
    let span = duration::parse(text).map_err(|error| field_error(field, text, error.to_string()))?;
    let (min, max) = REFUND_WITHIN;
    if span < min || span > max {
        let bounds = format!("it is outside {}..={}", duration::Exact(min), duration::Exact(max));
        return Err(field_error(field, text, bounds));
    }
    Ok(span)
}

fn template(field: &str, text: &str, rule: &RuleConfig) -> Result<Template, FieldError> {
    let mut parts = Vec::new();
    // The constant part: text, and values that the match fixes.
    let mut fixed = String::new();
    let mut rest = text;
    while let Some(begin) = rest.find(['{', '}']) {
        let key = rest[begin..].strip_prefix('{').and_then(|inner| inner.split_once('}'));
        let Some((key, behind)) = key else {
            return Err(field_error(field, text, "unbalanced brace"));
        };
        let mut places = rule.entries.iter().enumerate().filter(|(_, entry)| entry.key == key);
        let Some((place, entry)) = places.next() else {
            return Err(field_error(field, text, format!("`match` has no entry `{}`", excerpt(key))));
        };
        if places.next().is_some() {
            return Err(field_error(field, text, format!("`match` has the entry `{}` twice", excerpt(key))));
        }
        fixed.push_str(&rest[..begin]);
        rest = behind;
        if matches!(pattern(&entry.value), Some(Pattern::Exact(_))) {
            fixed.push_str(&entry.value);
            continue;
        }
        if !fixed.is_empty() {
            parts.push(Part::Text(std::mem::take(&mut fixed).into()));
        }
        if matches!(parts.last(), Some(Part::Value(_))) {
            let why = "two values need a text between them, or the split is ambiguous";
            return Err(field_error(field, text, why));
        }
        parts.push(Part::Value(place));
    }
    fixed.push_str(rest);
    if !fixed.is_empty() || parts.is_empty() {
        parts.push(Part::Text(fixed.into()));
    }
    Ok(Template(parts.into()))
}

#[cfg(test)]
#[path = "rules_tests.rs"]
mod tests;
