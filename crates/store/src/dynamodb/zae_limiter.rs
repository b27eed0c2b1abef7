//! Reads the entities and limits of a table of zae-limiter. Nothing is written.
//!
//! A namespace has an opaque id, which begins its keys and is its partition of the index `GSI4`. Entities are
//! `ENTITY#id` with `#META` and `#CONFIG#resource`, resources are `RESOURCE#name` with `#CONFIG`, and the
//! defaults of all are `SYSTEM#` with `#CONFIG`. A limit is three attributes: `l_name_cp`, its burst,
//! `l_name_ra`, the amount, and `l_name_rp`, the period in seconds.

use std::collections::BTreeSet;
use std::error::Error;
use std::time::Duration;

use aws_sdk_dynamodb::types::AttributeValue;
use tidegate_core::limit::entity::Entity;
use tidegate_core::limit::name::{EntityId, ResourceName, Subject};
use tidegate_core::limit::policy::{OnUnavailable, Policy, Scope};
use tidegate_core::limit::rule::Limit;

use super::bucket_view::text_of;
use super::client::{Range, TableClient};
use super::keys::{Item, Key, PK, SK};
use super::options::DynamoDbOptions;
use crate::error::StoreError;
use crate::zae_limiter::ZaeLimiterContents;

/// The index of all items of a namespace.
const GSI4: &str = "GSI4";
/// The maximum number of entities and limits that are read.
const ITEMS_MAX: usize = 100_000;
/// The resource of limits for all resources.
const ALL_RESOURCES: &str = "_default_";

impl DynamoDbOptions {
    /// Reads the entities and limits that zae-limiter 0.10 or later keeps in the table, in its namespace of the
    /// same name.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if the table has no such namespace, and errors of the engine.
    ///
    /// # Cancel safety
    /// Changes nothing.
    pub(crate) async fn read_zae_limiter(&self, namespace: &str) -> Result<ZaeLimiterContents, StoreError> {
        let client = self.standalone_client().await?;
        let registered = Key { pk: "_/SYSTEM#".to_owned(), sk: format!("#NAMESPACE#{namespace}") };
        let Some(registered) = client.get(&registered).await? else {
            let what = format!("the table has no namespace `{namespace}` of zae-limiter 0.10 or later");
            return Err(StoreError::Invalid { what });
        };
        let id = text_of(&registered, "namespace_id")?.to_owned();
        let mut keys = vec![Key { pk: format!("{id}/SYSTEM#"), sk: "#CONFIG".to_owned() }];
        for kind in ["RESOURCE#", "ENTITY#"] {
            keys.extend(listed(&client, &id, kind).await?);
        }
        if keys.len() > ITEMS_MAX {
            let what = format!("the namespace has more than {ITEMS_MAX} entities and limits");
            return Err(StoreError::Invalid { what });
        }
        let mut items: Vec<Item> = client.get_all(&keys).await?.into_values().collect();
        let key = |item: &Item| [PK, SK].map(|name| text_of(item, name).unwrap_or_default().to_owned());
        items.sort_by_cached_key(key);
        Ok(contents(&items, &id))
    }
}

/// The keys of entities and limits whose own part begins with `kind`.
async fn listed(client: &TableClient, id: &str, kind: &str) -> Result<Vec<Key>, StoreError> {
    let range = Range::new(Some(GSI4), id.to_owned(), format!("{id}/{kind}"));
    let found = client.range(&range, ITEMS_MAX + 1).await?;
    let is_read = |key: &Key| key.sk == "#META" || key.sk.starts_with("#CONFIG");
    Ok(found.iter().filter_map(Key::of).filter(is_read).collect())
}

/// The contents of a namespace's items.
fn contents(items: &[Item], id: &str) -> ZaeLimiterContents {
    let mut contents = ZaeLimiterContents::default();
    for item in items {
        let part = |name: &str| text_of(item, name).unwrap_or_default();
        let Some(place) = part(PK).strip_prefix(id).and_then(|rest| rest.strip_prefix('/')) else { continue };
        if let Err(why) = read(item, place, part(SK), &mut contents) {
            contents.skipped.push(format!("{place}: {why}"));
        }
    }
    contents
}

/// Reads an item, or returns why it is skipped.
fn read(
    item: &Item,
    place: &str,
    sort: &str,
    contents: &mut ZaeLimiterContents,
) -> Result<(), Box<dyn Error>> {
    let scope = match (place.split_once('#'), sort) {
        (Some(("SYSTEM", "")), "#CONFIG") => Scope::System,
        (Some(("RESOURCE", name)), "#CONFIG") => Scope::Resource(ResourceName::new(name)?),
        (Some(("ENTITY", id)), "#META") => return entity(item, &EntityId::new(id)?, contents),
        (Some(("ENTITY", id)), sort) => match sort.strip_prefix("#CONFIG#") {
            Some(ALL_RESOURCES) => Scope::Entity(EntityId::new(id)?),
            Some(resource) => Scope::Subject(Subject::new(id, resource)?),
            None => return Ok(()),
        },
        _ => return Ok(()),
    };
    policy(item, scope, contents)
}

fn entity(item: &Item, id: &EntityId, contents: &mut ZaeLimiterContents) -> Result<(), Box<dyn Error>> {
    let text = |name: &str| item.get(name).and_then(|value| value.as_s().ok());
    let mut entity = text("name").into_iter().fold(Entity::new(id.clone()), Entity::name);
    if let Some(parent) = text("parent_id") {
        entity = entity.parent(EntityId::new(parent)?);
    }
    if item.get("cascade").and_then(|value| value.as_bool().ok()) == Some(&true) {
        entity = entity.cascade();
    }
    let metadata = item.get("metadata").and_then(|value| value.as_m().ok());
    for (key, value) in metadata.into_iter().flatten() {
        match value.as_s() {
            Ok(value) => entity = entity.metadata(key, value),
            Err(_) => contents.skipped.push(format!("ENTITY#{id}: the metadata `{key}` is no text")),
        }
    }
    entity.check()?;
    contents.entities.push(entity);
    Ok(())
}

fn policy(item: &Item, scope: Scope, contents: &mut ZaeLimiterContents) -> Result<(), Box<dyn Error>> {
    let number = |name: &str| item.get(name)?.as_n().ok()?.parse::<u64>().ok();
    let name_of = |key: &String| Some(key.strip_prefix("l_")?.strip_suffix("_cp")?.to_owned());
    let names: BTreeSet<String> = item.keys().filter_map(name_of).collect();
    let mut limits = Vec::with_capacity(names.len());
    let has_limits = !names.is_empty();
    for name in names {
        let [burst, amount, seconds] = ["cp", "ra", "rp"].map(|part| number(&format!("l_{name}_{part}")));
        let (Some(burst), Some(amount), Some(seconds)) = (burst, amount, seconds) else {
            contents.skipped.push(format!("{scope}: the limit `{name}` is incomplete"));
            continue;
        };
        let limit = Limit::per(&name, amount, Duration::from_secs(seconds)).burst(burst);
        match limit.check() {
            Ok(_) => limits.push(limit),
            Err(error) => contents.skipped.push(format!("{scope}: {error}")),
        }
    }
    let is_off =
        |value: &AttributeValue| matches!(value, AttributeValue::Null(_) | AttributeValue::Bool(false));
    if item.get("disabled").is_some_and(|value| !is_off(value)) {
        contents.skipped.push(format!("{scope}: it is disabled; see `tidegate entity disable`"));
    }
    // Without its limits it would lift the wider ones.
    if has_limits && limits.is_empty() {
        contents.skipped.push(format!("{scope}: without any other limit, so the wider ones apply"));
        return Ok(());
    }
    let mut policy = Policy::new(limits)?;
    // The narrowest scope with any limit replaces all wider ones; one without falls through to them.
    if scope != Scope::System && has_limits {
        policy = policy.only();
    }
    match item.get("on_unavailable").and_then(|value| value.as_s().ok()).map(String::as_str) {
        Some("allow") => policy = policy.on_unavailable(OnUnavailable::Allow),
        Some("block") => policy = policy.on_unavailable(OnUnavailable::Block),
        _ if !has_limits => return Ok(()),
        _ => {}
    }
    contents.policies.push((scope, policy));
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const ID: &str = "s_loIw0o714";

    fn item(place: &str, sort: &str, rest: &[(&str, AttributeValue)]) -> Item {
        let text = |text: String| AttributeValue::S(text);
        let keys = [(PK.to_owned(), text(format!("{ID}/{place}"))), (SK.to_owned(), text(sort.to_owned()))];
        keys.into_iter().chain(rest.iter().map(|(name, value)| ((*name).to_owned(), value.clone()))).collect()
    }

    fn number(number: u64) -> AttributeValue {
        AttributeValue::N(number.to_string())
    }

    fn text(text: &str) -> AttributeValue {
        AttributeValue::S(text.to_owned())
    }

    /// Items as zae-limiter 0.17 writes them.
    #[test]
    fn items_become_entities_and_policies() {
        let rpm = |amount, period| {
            [("l_rpm_cp", number(amount)), ("l_rpm_ra", number(amount)), ("l_rpm_rp", number(period))]
        };
        let metadata = [("tier".to_owned(), text("gold")), ("seats".to_owned(), number(5))].into();
        let of_acme = [("name", text("Acme Inc")), ("metadata", AttributeValue::M(metadata))];
        let of_bot = [("parent_id", text("acme")), ("cascade", AttributeValue::Bool(true))];
        let tokens = [("l_t_pm_cp", number(150)), ("l_t_pm_ra", number(100)), ("l_t_pm_rp", number(60))];
        let items = [
            item("SYSTEM#", "#CONFIG", &[&rpm(100, 60)[..], &[("on_unavailable", text("allow"))]].concat()),
            item("RESOURCE#gpt-4", "#CONFIG", &tokens),
            item("ENTITY#acme", "#META", &of_acme),
            item(
                "ENTITY#acme",
                "#CONFIG#_default_",
                &[&rpm(7, 3_600)[..], &[("disabled", AttributeValue::Bool(true))]].concat(),
            ),
            item("ENTITY#bot", "#META", &of_bot),
            item("ENTITY#bot", "#CONFIG#gpt-4", &rpm(0, 1)),
            // Without limits, the wider ones apply there.
            item("ENTITY#idle", "#CONFIG#_default_", &[]),
            item("ENTITY#bot", "#CONFIG#o1", &[("on_unavailable", text("block"))]),
            item("BUCKET#bot#gpt-4#0", "#STATE", &[]),
        ];
        let ZaeLimiterContents { entities, policies, skipped } = contents(&items, ID);
        let id = |name: &str| EntityId::new(name).unwrap();
        let acme = Entity::new(id("acme")).name("Acme Inc").metadata("tier", "gold");
        assert_eq!(entities, [acme, Entity::new(id("bot")).parent(id("acme")).cascade()]);
        let shown = policies.iter().map(|(scope, policy)| {
            let limits: Vec<_> = policy.rules().iter().map(ToString::to_string).collect();
            format!("{scope}: {} {} {:?}", limits.join(" "), policy.is_only(), policy.unavailable())
        });
        assert_eq!(
            shown.collect::<Vec<_>>(),
            [
                "system: rpm:100/min false Some(Allow)",
                "resource gpt-4: t_pm:100/min:150 true None",
                "entity acme: rpm:7/h true None",
                "entity bot, resource o1:  false Some(Block)",
            ]
        );
        assert_eq!(
            skipped,
            [
                "ENTITY#acme: the metadata `seats` is no text",
                "entity acme: it is disabled; see `tidegate entity disable`",
                "entity bot, resource gpt-4: the limit `rpm`: 0 units per period, outside 1..=1099511627776",
                "entity bot, resource gpt-4: without any other limit, so the wider ones apply",
            ]
        );
    }
}
