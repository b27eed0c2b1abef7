//! Which limits a descriptor draws from: pure matching, without a store.
//!
//! A rule names all entries of a descriptor, in their order. The first rule that matches counts. What a rule needs to be told of
//! a limit is made when it is read, so that a decision only puts values in their places.

use std::borrow::Cow;
use std::sync::Arc;

use envoy_types::pb::envoy::extensions::common::ratelimit::v3::RateLimitDescriptor;
use envoy_types::pb::envoy::extensions::common::ratelimit::v3::rate_limit_descriptor::Entry;
use thiserror::Error;
use tidegate::{Limit, Policy};
use tidegate_core::limit::cascade::UNITS_MAX;
use tidegate_core::limit::name::{LimitName, Subject};

use super::config::{RuleConfig, Unknown};

/// There are at most so many rules.
const RULES_MAX: usize = 1_000;
/// A descriptor has at most so many entries.
pub(super) const ENTRIES_MAX: usize = 16;
/// A key and a value of an entry have at most so many bytes.
pub(super) const VALUE_MAX: usize = 1_024;
/// A rule draws from at most so many limits.
const LIMITS_MAX: usize = 16;
/// What a hit costs where a rule does not say.
const REQUESTS: &str = "requests";

/// Which limits the descriptors of Envoy's requests draw from. Clones are the same.
#[derive(Debug, Clone)]
pub struct EnvoyRules {
    rules: Arc<[Rule]>,
    unknown: Unknown,
}

/// A rule that cannot be.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum InvalidRules {
    /// Too many of them.
    #[error("{count} rules, more than {RULES_MAX}")]
    Many {
        /// How many.
        count: usize,
    },
    /// A field of one of them.
    #[error("rule {rule}: `{field}` is `{value}`: {why}")]
    Field {
        /// Which rule, counted from 1.
        rule: usize,
        /// Which field.
        field: String,
        /// What it says.
        value: String,
        /// What is wrong with it.
        why: String,
    },
}

#[derive(Debug)]
struct Rule {
    domain: Option<Box<str>>,
    entries: Box<[(Box<str>, Pattern)]>,
    then: Then,
}

#[derive(Debug, PartialEq, Eq)]
enum Pattern {
    Any,
    Prefix(Box<str>),
    Exact(Box<str>),
}

#[derive(Debug)]
enum Then {
    Unlimited,
    Draw(Drawing),
}

/// What a rule draws from.
#[derive(Debug)]
pub(super) struct Drawing {
    /// Which rule, counted from 1.
    pub(super) rule: usize,
    entity: Template,
    resource: Template,
    /// Units per hit.
    cost: Box<[(LimitName, u64)]>,
    /// How many values are in its templates: whoever calls the proxy may have chosen them.
    pub(super) values: usize,
    pub(super) limits: Box<[Limit]>,
    pub(super) is_shadow: bool,
}

/// Text with places for values.
#[derive(Debug, PartialEq, Eq)]
struct Template(Box<[Part]>);

#[derive(Debug, PartialEq, Eq)]
enum Part {
    Text(Box<str>),
    /// The value of the entry with this number.
    Value(usize),
}

/// What a descriptor asks for.
#[derive(Debug)]
pub(super) enum Asked<'a> {
    Unlimited,
    Unknown(Unknown),
    Draw(Ask<'a>),
    /// No limit can be asked for this. It is over its limit, unless the rule only looks: whoever calls the proxy may have chosen
    /// the value, and must not be let through because of it.
    Invalid {
        why: String,
        is_shadow: bool,
    },
}

/// What is to be drawn.
#[derive(Debug)]
pub(super) struct Ask<'a> {
    pub(super) drawing: &'a Drawing,
    pub(super) subject: Subject,
    /// Of one hit, if there is none.
    pub(super) cost: Vec<(&'a str, u64)>,
    pub(super) is_look: bool,
}

impl EnvoyRules {
    /// Checks rules.
    pub(super) fn new(unknown: Unknown, rules: &[RuleConfig]) -> Result<Self, InvalidRules> {
        if rules.len() > RULES_MAX {
            return Err(InvalidRules::Many { count: rules.len() });
        }
        let rules: Result<Vec<_>, _> = rules
            .iter()
            .zip(1..)
            .map(|(rule, number)| {
                checked(rule, number).map_err(|Wrong { field, value, why }| InvalidRules::Field {
                    rule: number,
                    field,
                    value,
                    why,
                })
            })
            .collect();
        Ok(Self { rules: rules?.into(), unknown })
    }

    /// How many there are.
    pub fn len(&self) -> usize {
        self.rules.len()
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.rules.is_empty()
    }

    /// Whether nobody is ever refused by them.
    pub(super) fn let_all_pass(&self) -> bool {
        self.is_empty() && self.unknown == Unknown::Allow
    }

    /// What a descriptor asks for, with so many hits where it does not say.
    pub(super) fn ask<'a>(
        &'a self,
        domain: &str,
        descriptor: &'a RateLimitDescriptor,
        hits: u64,
    ) -> Asked<'a> {
        let entries = &descriptor.entries;
        let Some(rule) = self.rules.iter().find(|rule| rule.is_of(domain, entries)) else {
            return Asked::Unknown(self.unknown);
        };
        match &rule.then {
            Then::Unlimited => Asked::Unlimited,
            Then::Draw(drawing) => {
                let hits = descriptor.hits_addend.as_ref().map_or(hits, |own| own.value);
                match drawing.ask(entries, hits) {
                    Ok(ask) => Asked::Draw(ask),
                    Err(why) => Asked::Invalid { why, is_shadow: drawing.is_shadow },
                }
            }
        }
    }
}

impl Rule {
    fn is_of(&self, domain: &str, entries: &[Entry]) -> bool {
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

impl Drawing {
    fn ask<'a>(&'a self, entries: &[Entry], hits: u64) -> Result<Ask<'a>, String> {
        let mut cost = Vec::with_capacity(self.cost.len());
        for (limit, units) in &self.cost {
            let Some(all) = units.checked_mul(hits.max(1)).filter(|all| *all <= UNITS_MAX) else {
                return Err(format!("{hits} hits of {units} `{limit}` each are more than {UNITS_MAX}"));
            };
            cost.push((limit.as_str(), all));
        }
        let (entity, resource) = (self.entity.filled(entries)?, self.resource.filled(entries)?);
        let subject = Subject::new(&entity, &resource).map_err(|error| error.to_string())?;
        Ok(Ask { drawing: self, subject, cost, is_look: hits == 0 })
    }
}

impl Template {
    /// The text with these values, if no others make the same one.
    fn filled<'a>(&'a self, entries: &'a [Entry]) -> Result<Cow<'a, str>, String> {
        // Most are one text or one value, and stay where they are.
        let mut filled = Cow::Borrowed("");
        for (place, part) in self.0.iter().enumerate() {
            match part {
                Part::Text(text) => filled += &**text,
                // A rule matches descriptors with as many entries as it names.
                Part::Value(number) => {
                    let Some(Entry { key, value, .. }) = entries.get(*number) else { continue };
                    if value.len() > VALUE_MAX {
                        let bytes = value.len();
                        return Err(format!("the entry `{key}` has {bytes} bytes, more than {VALUE_MAX}"));
                    }
                    filled += value.as_str();
                    // A value ends where the text behind it first is: it must not bring its own end, in part or as a whole.
                    if let [Part::Text(end), Part::Value(_), ..] = &self.0[place + 1..]
                        && format!("{value}{end}").find(&**end) != Some(value.len())
                    {
                        return Err(format!(
                            "the entry `{key}` has `{end}` in it, which ends it in its rule"
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

    /// What it may look like.
    fn example(&self) -> String {
        let text = |part: &Part| match part {
            Part::Text(text) => text.clone(),
            Part::Value(_) => "x".into(),
        };
        self.0.iter().map(text).collect()
    }
}

/// What is wrong with a field.
struct Wrong {
    field: String,
    value: String,
    why: String,
}

fn wrong(field: impl Into<String>, value: &str, why: impl Into<String>) -> Wrong {
    Wrong { field: field.into(), value: shown(value), why: why.into() }
}

/// No more of a text than a line of a log has room for.
fn shown(text: &str) -> String {
    let mut short: String = text.chars().take(80).flat_map(char::escape_debug).collect();
    if text.chars().nth(80).is_some() {
        short.push('…');
    }
    short
}

fn checked(rule: &RuleConfig, number: usize) -> Result<Rule, Wrong> {
    let count = rule.entries.len();
    if count == 0 || count > ENTRIES_MAX {
        return Err(wrong("match", &format!("{count} entries"), format!("there are 1 to {ENTRIES_MAX}")));
    }
    let mut entries = Vec::with_capacity(count);
    for (place, entry) in rule.entries.iter().enumerate() {
        for (part, text) in [("key", &entry.key), ("value", &entry.value)] {
            if text.len() > VALUE_MAX {
                let why = format!("it has {} bytes, more than {VALUE_MAX}", text.len());
                return Err(wrong(format!("match[{place}].{part}"), text, why));
            }
        }
        if entry.key.is_empty() {
            return Err(wrong(format!("match[{place}].key"), "", "it is empty"));
        }
        let pattern = pattern(&entry.value)
            .ok_or_else(|| wrong(format!("match[{place}].value"), &entry.value, "`*` stands at the end"))?;
        entries.push((entry.key.as_str().into(), pattern));
    }
    let then = if rule.unlimited { unlimited(rule)? } else { Then::Draw(drawing(rule, number)?) };
    Ok(Rule { domain: rule.domain.as_deref().map(Into::into), entries: entries.into(), then })
}

fn pattern(text: &str) -> Option<Pattern> {
    match text.find('*') {
        None => Some(Pattern::Exact(text.into())),
        Some(0) if text.len() == 1 => Some(Pattern::Any),
        Some(place) if place + 1 == text.len() => Some(Pattern::Prefix(text[..place].into())),
        Some(_) => None,
    }
}

fn unlimited(rule: &RuleConfig) -> Result<Then, Wrong> {
    let said = [
        ("entity", rule.entity.is_some()),
        ("resource", rule.resource.is_some()),
        ("cost", !rule.cost.is_empty()),
        ("limits", !rule.limits.is_empty()),
        ("shadow", rule.shadow),
    ];
    match said.into_iter().find(|(_, is_said)| *is_said) {
        Some((field, _)) => Err(wrong("unlimited", "true", format!("such a rule has no `{field}`"))),
        None => Ok(Then::Unlimited),
    }
}

fn drawing(rule: &RuleConfig, number: usize) -> Result<Drawing, Wrong> {
    let needed = |field: &str, text: &Option<String>| {
        text.clone().ok_or_else(|| wrong(field, "", "it is missing, and the rule is not `unlimited`"))
    };
    let (entity, resource) = (needed("entity", &rule.entity)?, needed("resource", &rule.resource)?);
    let templates = (template("entity", &entity, rule)?, template("resource", &resource, rule)?);
    let examples = (templates.0.example(), templates.1.example());
    for (field, text, example) in
        [("entity", &entity, (&*examples.0, "x")), ("resource", &resource, ("x", &*examples.1))]
    {
        Subject::new(example.0, example.1).map_err(|error| wrong(field, text, error.to_string()))?;
    }
    if rule.cost.len() > LIMITS_MAX || rule.limits.len() > LIMITS_MAX {
        let field = if rule.cost.len() > LIMITS_MAX { "cost" } else { "limits" };
        let value = format!("{} limits", rule.cost.len().max(rule.limits.len()));
        return Err(wrong(field, &value, format!("there are at most {LIMITS_MAX}")));
    }
    let mut cost = Vec::with_capacity(rule.cost.len().max(1));
    for (limit, units) in &rule.cost {
        let field = format!("cost.{}", shown(limit));
        let name = LimitName::new(limit).map_err(|error| wrong(&*field, limit, error.to_string()))?;
        if !(1..=UNITS_MAX).contains(units) {
            return Err(wrong(field, &units.to_string(), format!("a hit costs 1 to {UNITS_MAX}")));
        }
        cost.push((name, *units));
    }
    if cost.is_empty() {
        let name = LimitName::new(REQUESTS).map_err(|error| wrong("cost", REQUESTS, error.to_string()))?;
        cost.push((name, 1));
    }
    let mut limits = Vec::with_capacity(rule.limits.len());
    for (place, text) in rule.limits.iter().enumerate() {
        let limit: Result<Limit, _> = text.parse();
        limits.push(limit.map_err(|error| wrong(format!("limits[{place}]"), text, error.to_string()))?);
    }
    let policy = Policy::new(limits.iter().cloned());
    let policy = policy.map_err(|error| wrong("limits", &rule.limits.join(", "), error.to_string()))?;
    let is_drawn = |limit: &LimitName| cost.iter().any(|(name, _)| name == limit);
    if let Some(place) = policy.rules().iter().position(|limit| !is_drawn(limit.name())) {
        let names: Vec<_> = cost.iter().map(|(name, _)| format!("`{name}`")).collect();
        let why = format!("a hit costs nothing of it, but of {}: say it in `cost`", names.join(", "));
        return Err(wrong(format!("limits[{place}]"), &rule.limits[place], why));
    }
    let (entity, resource) = templates;
    Ok(Drawing {
        rule: number,
        values: entity.values() + resource.values(),
        entity,
        resource,
        cost: cost.into(),
        limits: limits.into(),
        is_shadow: rule.shadow,
    })
}

fn template(field: &str, text: &str, rule: &RuleConfig) -> Result<Template, Wrong> {
    let mut parts = Vec::new();
    // What is always the same: text, and values that the match says.
    let mut fixed = String::new();
    let mut rest = text;
    while let Some(begin) = rest.find(['{', '}']) {
        let key = rest[begin..].strip_prefix('{').and_then(|inner| inner.split_once('}'));
        let Some((key, behind)) = key else {
            return Err(wrong(field, text, "a brace has no other half"));
        };
        let mut places = rule.entries.iter().enumerate().filter(|(_, entry)| entry.key == key);
        let Some((place, entry)) = places.next() else {
            return Err(wrong(field, text, format!("there is no entry `{}` in its match", shown(key))));
        };
        if places.next().is_some() {
            return Err(wrong(field, text, format!("the entry `{}` is in its match twice", shown(key))));
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
            let why = "two values need a text between them, or nobody can tell where one ends";
            return Err(wrong(field, text, why));
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
