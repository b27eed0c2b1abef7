//! `tidegate import`: writes what other limiters declare as a manifest.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use clap::Subcommand;
use tidegate::store::{ZaeLimiterContents, read_zae_limiter};
use tidegate::{Entity, EntityId, OnUnavailable, Policy, Scope};

use crate::default_paths::store_failure;
use crate::failure::Failure;
use crate::format;
use crate::output::Output;

const ZAE_LIMITER: &str = "\
Reads the entities, parents and limits of a table of zae-limiter 0.10 or later,
and prints a manifest for `limits apply`. Nothing is written to the table. What
cannot be declared is a comment at the top.

Example:
  tidegate import zae-limiter 'dynamodb://limits?region=eu-west-1' > limits.toml
  tidegate limits apply limits.toml";

/// Subcommands of `import`.
#[derive(Debug, Subcommand)]
pub(crate) enum ImportVerb {
    /// Print the entities and limits of a zae-limiter table as a manifest
    #[command(after_help = ZAE_LIMITER)]
    ZaeLimiter {
        #[arg(
            value_name = "ADDRESS",
            help = "The table: dynamodb://TABLE?region=REGION, with `namespace=NAME` for another one than `default`"
        )]
        address: String,
    },
}

pub(crate) async fn run(verb: ImportVerb) -> Result<Output, Failure> {
    let ImportVerb::ZaeLimiter { address } = verb;
    let contents = read_zae_limiter(&address).await.map_err(|error| store_failure(error, &address))?;
    Ok(Output::raw(manifest(&contents).into_bytes()))
}

/// The manifest of these contents.
fn manifest(contents: &ZaeLimiterContents) -> String {
    let mut text = String::new();
    for skipped in &contents.skipped {
        line(&mut text, &format!("# skipped: {}", format::escape(skipped)));
    }
    let mut scopes: BTreeMap<&Scope, &Policy> =
        contents.policies.iter().map(|(scope, policy)| (scope, policy)).collect();
    if let Some(policy) = scopes.remove(&Scope::System) {
        line(&mut text, "[system]");
        settings(&mut text, policy);
    }
    let mut entities: BTreeMap<EntityId, (Option<&Entity>, Option<&Policy>)> = BTreeMap::new();
    for entity in &contents.entities {
        entities.entry(entity.id().clone()).or_default().0 = Some(entity);
    }
    let mut subjects = Vec::new();
    for (scope, policy) in scopes {
        match scope {
            Scope::Resource(name) => {
                line(&mut text, &format!("\n[resource.{}]", quoted(name.as_str())));
                settings(&mut text, policy);
            }
            Scope::Entity(id) => entities.entry(id.clone()).or_default().1 = Some(policy),
            Scope::Subject(subject) => subjects.push((subject, policy)),
            Scope::System => {}
        }
    }
    for (id, (entity, policy)) in entities {
        line(&mut text, &format!("\n[entity.{}]", quoted(id.as_str())));
        if let Some(entity) = entity {
            declare(&mut text, entity);
        }
        if let Some(policy) = policy {
            settings(&mut text, policy);
        }
    }
    for (subject, policy) in subjects {
        let [entity, resource] = [subject.entity.as_str(), subject.resource.as_str()].map(quoted);
        line(&mut text, &format!("\n[entity.{entity}.resource.{resource}]"));
        settings(&mut text, policy);
    }
    text
}

fn declare(text: &mut String, entity: &Entity) {
    if let Some(name) = entity.display_name() {
        line(text, &format!("name = {}", quoted(name)));
    }
    if let Some(parent) = entity.parent_id() {
        line(text, &format!("parent = {}", quoted(parent.as_str())));
    }
    line(text, &format!("cascade = {}", entity.cascades()));
    if !entity.notes().is_empty() {
        let notes = entity.notes().iter().map(|(key, value)| format!("{} = {}", quoted(key), quoted(value)));
        line(text, &format!("notes = {{ {} }}", notes.collect::<Vec<_>>().join(", ")));
    }
}

fn settings(text: &mut String, policy: &Policy) {
    let limits: Vec<_> = policy.rules().iter().map(|rule| quoted(&rule.to_string())).collect();
    line(text, &format!("limits = [{}]", limits.join(", ")));
    if policy.is_only() {
        line(text, "only = true");
    }
    match policy.unavailable() {
        Some(OnUnavailable::Allow) => line(text, "on_unavailable = \"allow\""),
        Some(OnUnavailable::Block) => line(text, "on_unavailable = \"block\""),
        _ => {}
    }
}

fn line(text: &mut String, line: &str) {
    text.push_str(line);
    text.push('\n');
}

/// A text as a TOML string, or as a quoted key.
fn quoted(text: &str) -> String {
    let mut quoted = String::from('"');
    for letter in text.chars() {
        match letter {
            '"' | '\\' => quoted.extend(['\\', letter]),
            // Writing to a string cannot fail.
            letter if letter.is_control() => drop(write!(quoted, "\\u{:04X}", u32::from(letter))),
            letter => quoted.push(letter),
        }
    }
    quoted.push('"');
    quoted
}

#[cfg(test)]
mod tests {
    use tidegate::{Limit, Manifest, Subject};

    use super::*;

    #[test]
    fn manifest_declares_the_same() {
        let id = |name: &str| EntityId::new(name).unwrap();
        let policy =
            |limits: &[&str]| Policy::new(limits.iter().map(|text| text.parse::<Limit>().unwrap())).unwrap();
        let mut contents = ZaeLimiterContents::default();
        contents.entities = vec![
            Entity::new(id("acme")).name("Größe \"&\" \\ Söhne\n").metadata("a b", "c"),
            Entity::new(id("b.o t")).parent(id("acme")).cascade(),
            Entity::new(id("plain")),
        ];
        let subject = Subject::new("acme", "gpt-4").unwrap();
        contents.policies = vec![
            (Scope::System, policy(&["rpm:100/min", "rpd:5k/day"]).on_unavailable(OnUnavailable::Allow)),
            (Scope::Resource(subject.resource.clone()), policy(&["tpm:100k/min:150k"]).only()),
            (Scope::Entity(id("acme")), policy(&["rpm:7/h"]).only()),
            (Scope::Subject(subject), policy(&["rpm:5/s"]).only()),
        ];
        contents.skipped = vec!["one\nthing".to_owned()];
        let text = manifest(&contents);
        assert!(text.starts_with("# skipped: one\\nthing\n[system]\n"), "{text}");
        let read = Manifest::from_toml(&text).unwrap_or_else(|error| panic!("{error}\n{text}"));
        assert_eq!(read.policies(), contents.policies);
        let mut entities = read.entities().to_vec();
        entities.sort_by(|one, other| one.id().cmp(other.id()));
        assert_eq!(entities, contents.entities);
    }
}
