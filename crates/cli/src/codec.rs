//! The JSON output. Its field names are stable: fields may be added, and are never renamed.
//!
//! Times are RFC 3339, durations are seconds, amounts are integers, limits are text in command-line form.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::{Map, json};
use tidegate::store::archive::ArchiveReport;
use tidegate::store::lifecycle::{
    BackupReport, CheckReport, DestroyReport, InitReport, NamespaceList, Part, Setting, Space, StoreLocation,
    UpgradeReport,
};
use tidegate::store::{Cursor, Page};
use tidegate::{
    Balance, Capacity, DeclaredToken, Entity, EntityId, Explanation, LimitKey, LimitLine, Policy,
    ResourceName, Scope, Source, Stamp, Step, Subject, Tally, Usage, UsageSum, Version, Versioned, Window,
    Would,
};
use tidegate_core::limit::audit::{Change, Entry};
use tidegate_core::limit::token::Token;

use crate::backend::{AcquireRequest, CreatedToken, Grant, Status, StoredPolicy};
use crate::default_paths::OpenStore;
use crate::failure::Failure;
use crate::format;
use crate::manifest::{Applied, EntityChange, ManifestChanges};
use crate::plot::Series;
use crate::verbs::serve::Addresses;
use tidegate_client::{CallPermit, RetryAdvice, UpstreamState};

/// A JSON document.
pub(crate) type Json = serde_json::Value;

fn seconds(span: Duration) -> Json {
    json!(span.as_secs_f64())
}

/// A failure.
pub(crate) fn failure(failure: &Failure) -> Json {
    json!({ "error": {
        "code": failure.exit.code(),
        "kind": failure.exit.kind(),
        "message": failure.what,
        "next": failure.next,
        "retry_after": failure.retry_after.map(seconds),
        "limits": failure.limits.iter().map(limit_line).collect::<Vec<_>>(),
    } })
}

/// A scope and its parts.
pub(crate) fn scope(scope: &Scope) -> Json {
    let kind = match scope {
        Scope::System => "system",
        Scope::Resource(_) => "resource",
        Scope::Entity(_) => "entity",
        Scope::Subject(_) => "entity_resource",
    };
    let entity = scope.entity().map(ToString::to_string);
    json!({ "kind": kind, "entity": entity, "resource": scope.resource().map(ToString::to_string) })
}

/// A policy.
pub(crate) fn policy(policy: &Policy) -> Json {
    json!({
        "limits": policy.rules().iter().map(ToString::to_string).collect::<Vec<_>>(),
        "only": policy.is_only(),
        "on_unavailable": policy.unavailable().map(format::unavailable),
        "on_expiry": policy.expiry().map(format::expiry),
    })
}

/// A policy with its scope and version.
pub(crate) fn written((at, policy_there): &StoredPolicy) -> Json {
    let version = policy_there.version.number();
    json!({ "scope": scope(at), "version": version, "policy": policy(&policy_there.value) })
}

/// A page, its items under `name`.
pub(crate) fn page<T>(name: &str, page: &Page<T>, item: impl Fn(&T) -> Json) -> Json {
    let mut object = Map::new();
    object.insert(name.to_owned(), page.items.iter().map(item).collect());
    object.insert("next".to_owned(), json!(page.next.as_ref().map(Cursor::as_str)));
    object.into()
}

/// The change of one scope, with the version it was written at, if it was.
pub(crate) fn changed(step: &Step, version: Option<Version>) -> Json {
    json!({
        "scope": scope(&step.scope),
        "before": step.before.as_ref().map(|before| policy(&before.value)),
        "after": step.after.as_ref().map(policy),
        "version": version.map(Version::number),
    })
}

/// A plan, with the version it was applied at, if it was.
pub(crate) fn plan(changes: &ManifestChanges) -> Json {
    let step = |step: &Step| {
        json!({
            "scope": scope(&step.scope),
            "before": step.before.as_ref().map(|before| policy(&before.value)),
            "before_version": step.before.as_ref().map(|before| before.version.number()),
            "after": step.after.as_ref().map(policy),
        })
    };
    let steps: Vec<Json> = changes.policies.steps().iter().map(step).collect();
    let entity_change = |change: &EntityChange| {
        json!({
            "before": change.before.as_ref().map(entity),
            "after": bare_entity(&change.after),
        })
    };
    let token = |token: &DeclaredToken| {
        json!({
            "id": token.id.as_str(),
            "name": token.name,
            "scopes": token.scopes.iter().map(|scope| scope.to_string()).collect::<Vec<_>>(),
            "expires_at": token.expires_at.map(|at| at.to_string()),
        })
    };
    json!({
        "has_changes": !changes.is_empty(),
        "changes": steps,
        "entities": changes.entities.iter().map(entity_change).collect::<Vec<_>>(),
        "tokens": changes.tokens.iter().map(token).collect::<Vec<_>>(),
        "version": null,
    })
}

/// The changes of a manifest that was applied, with the secrets of new tokens.
pub(crate) fn applied(changes: &ManifestChanges, applied: &Applied) -> Json {
    let mut json = plan(changes);
    json["version"] = json!(applied.version.number());
    json["tokens"] = applied.tokens.iter().map(made_token).collect();
    json
}

fn bare_entity(entity: &Entity) -> Json {
    json!({
        "id": entity.id().as_str(),
        "name": entity.display_name(),
        "parent": entity.parent_id().map(ToString::to_string),
        "cascade": entity.cascades(),
        "disabled": entity.is_disabled(),
        "metadata": entity.notes(),
    })
}

/// An entity and its version.
pub(crate) fn entity(entity: &Versioned<Entity>) -> Json {
    let mut json = bare_entity(&entity.value);
    json["version"] = json!(entity.version.number());
    json
}

/// An entity in a tree.
pub(crate) fn tree_entity(versioned: &Versioned<Entity>, children: Vec<Json>) -> Json {
    let mut json = entity(versioned);
    json["children"] = Json::Array(children);
    json
}

/// Trees of entities.
pub(crate) fn tree(roots: &[Json]) -> Json {
    json!({ "entities": roots })
}

/// A removed entity.
pub(crate) fn removed(id: &str, version: Version) -> Json {
    json!({ "id": id, "removed": true, "version": version.number() })
}

fn subject(subject: &Subject) -> Json {
    json!({ "entity": subject.entity.as_str(), "resource": subject.resource.as_str() })
}

/// Spent units.
pub(crate) fn spent(request: &AcquireRequest, grant: Grant) -> Json {
    let cost: Map<String, Json> =
        request.pairs().into_iter().map(|(limit, units)| (limit.to_owned(), json!(units))).collect();
    json!({ "granted": true, "subject": subject(&request.subject), "cost": cost, "is_degraded": grant == Grant::WithoutStore })
}

fn source(source: &Source) -> Json {
    match source {
        Source::Policy(at) => scope(at),
        Source::Defaults => json!({ "kind": "defaults", "entity": null, "resource": null }),
        Source::Call => json!({ "kind": "call", "entity": null, "resource": null }),
    }
}

/// The state of a limit.
pub(crate) fn balance(balance: &Balance) -> Json {
    json!({
        "entity": balance.subject.one_entity().map(EntityId::as_str),
        "resource": balance.subject.one_resource().map(ResourceName::as_str),
        "limit": balance.limit.as_str(),
        "available": balance.available,
        "burst": balance.burst,
        "amount": balance.amount,
        "period": seconds(balance.period),
        "consumed": balance.consumed,
        "asked": balance.asked,
        "is_short": balance.is_short(),
        "retry_after": balance.retry_after.map(seconds),
    })
}

/// A bucket that was set.
pub(crate) fn bucket(set: &Versioned<Balance>) -> Json {
    let mut json = balance(&set.value);
    json["version"] = json!(set.version.number());
    json
}

/// The state of a limit, and the policy it comes from.
pub(crate) fn limit_line(line: &LimitLine) -> Json {
    let mut json = balance(&line.balance);
    json["source"] = source(&line.source);
    json
}

/// The balances of a subject's limits.
pub(crate) fn balances<T>(lines: &[T], line: impl Fn(&T) -> Json) -> Json {
    json!({ "limits": lines.iter().map(line).collect::<Vec<_>>() })
}

/// How much of a resource's limits is in use.
pub(crate) fn capacity(sums: &BTreeMap<LimitKey, Capacity>) -> Json {
    let limit = |(limit, sum): (&LimitKey, &Capacity)| {
        json!({
            "limit": limit.to_string(),
            "buckets": sum.buckets,
            "burst": sum.burst,
            "available": sum.available,
            "consumed": sum.consumed,
        })
    };
    json!({ "limits": sums.iter().map(limit).collect::<Vec<_>>() })
}

/// A decision without effect, and its reasons.
pub(crate) fn explanation(explanation: &Explanation) -> Json {
    let (would, retry_after) = match explanation.would {
        Would::Grant => ("grant", Some(0.0)),
        Would::Wait(span) => ("wait", Some(span.as_secs_f64())),
        _ => ("never", None),
    };
    let (on_unavailable, says_unavailable) = &explanation.on_unavailable;
    let (on_expiry, says_expiry) = &explanation.on_expiry;
    json!({
        "subject": subject(&explanation.subject),
        "would": would,
        "retry_after": retry_after,
        "limits": explanation.lines.iter().map(limit_line).collect::<Vec<_>>(),
        "on_unavailable": { "behaviour": format::unavailable(*on_unavailable), "source": source(says_unavailable) },
        "on_expiry": { "behaviour": format::expiry(*on_expiry), "source": source(says_expiry) },
        "version": explanation.version.number(),
    })
}

/// The name of a window.
pub(crate) const fn window(window: Window) -> &'static str {
    match window {
        Window::Minute => "minute",
        Window::Hour => "hour",
        Window::Day => "day",
        Window::Month => "month",
    }
}

fn tally(json: &mut Json, tally: &Tally) {
    json["units"] = json!(tally.units);
    json["own"] = json!(tally.own);
    json["leases"] = json!(tally.leases);
}

/// A line of usage.
pub(crate) fn usage(line: &Usage) -> Json {
    let mut json = json!({
        "entity": line.subject.one_entity().map(EntityId::as_str),
        "resource": line.subject.one_resource().map(ResourceName::as_str),
        "limit": line.limit.as_str(),
        "window": window(line.window),
        "start": line.start.to_string(),
    });
    tally(&mut json, &line.tally);
    json
}

/// Summed usage.
pub(crate) fn usage_sum(sum: &UsageSum) -> Json {
    let line = |(limit, sum): (&LimitKey, &Tally)| {
        let mut json = json!({ "limit": limit.to_string() });
        tally(&mut json, sum);
        json
    };
    json!({ "limits": sum.limits.iter().map(line).collect::<Vec<_>>(), "windows": sum.windows })
}

/// Usage by window, without gaps.
pub(crate) fn chart(window_of: Window, starts: &[Stamp], all: &[&Series]) -> Json {
    let series = |series: &&Series| json!({ "limit": series.limit, "name": series.name, "units": series.units, "total": series.total() });
    json!({
        "window": window(window_of),
        "starts": starts.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "series": all.iter().map(series).collect::<Vec<_>>(),
    })
}

fn bare_token(token: &Token) -> Json {
    json!({
        "id": token.id.as_str(),
        "name": token.name,
        "namespace": token.namespace.as_str(),
        "scopes": token.scopes.to_string(),
        "entity": token.entity.as_ref().map(ToString::to_string),
        "created_at": token.created_at.to_string(),
        "created_by": token.created_by,
        "expires_at": token.expires_at.map(|at| at.to_string()),
        "revoked_at": token.revoked_at.map(|at| at.to_string()),
    })
}

/// A token and its version.
pub(crate) fn token(token: &Versioned<Token>) -> Json {
    let mut json = bare_token(&token.value);
    json["version"] = json!(token.version.number());
    json
}

/// A created token: the only output that contains its secret.
pub(crate) fn made_token(made: &CreatedToken) -> Json {
    let version = made.token.version.number();
    json!({ "token": bare_token(&made.token.value), "version": version, "secret": made.secret })
}

/// A revoked token.
pub(crate) fn revoked(id: &str, version: Version) -> Json {
    json!({ "id": id, "revoked": true, "version": version.number() })
}

/// An audit entry.
pub(crate) fn entry(entry: &Entry) -> Json {
    let (what, at, before, after) = match &entry.change {
        Change::Entity { before, after } => {
            ("entity", Json::Null, before.as_ref().map(bare_entity), after.as_ref().map(bare_entity))
        }
        Change::Policy { scope: at, before, after } => {
            ("policy", scope(at), before.as_ref().map(policy), after.as_ref().map(policy))
        }
        Change::Bucket { bucket, limit, before, after } => {
            let at = json!({
                "kind": "bucket",
                "entity": bucket.one_entity().map(EntityId::as_str),
                "resource": bucket.one_resource().map(ResourceName::as_str),
                "limit": limit.as_str(),
            });
            ("bucket", at, Some(json!({ "available": before })), Some(json!({ "available": after })))
        }
        Change::Token { before, after } => {
            ("token", Json::Null, before.as_ref().map(bare_token), Some(bare_token(after)))
        }
    };
    json!({
        "version": entry.version.number(),
        "at": entry.at.to_string(),
        "actor": entry.actor,
        "filed": entry.filed.as_str(),
        "what": what,
        "scope": at,
        "before": before,
        "after": after,
    })
}

/// The result of an archive run.
pub(crate) fn archived(archived: &ArchiveReport) -> Json {
    json!({
        "files": archived.files,
        "entries": archived.entries,
        "pruned": archived.pruned,
        "through": archived.through.map(Version::number),
    })
}

/// The startup document of a server, with the token only if it was just created.
pub(crate) fn serving(addresses: &Addresses, opened: &OpenStore, token: Option<&str>) -> Json {
    json!({
        "url": addresses.url,
        "metrics": addresses.metrics,
        "envoy": addresses.envoy,
        "proxy": addresses.proxy,
        "store": opened.url,
        "namespace": opened.namespace.as_str(),
        "token": token,
    })
}

/// Where a proxy or a mock listens.
pub(crate) fn listening(url: &str) -> Json {
    json!({ "url": url })
}

/// A permit for a call.
pub(crate) fn call_permit(granted: &CallPermit) -> Json {
    json!({ "permit": granted.permit.to_string(), "expires_in": seconds(granted.expires_in.as_duration()) })
}

/// Whether a call may be repeated.
pub(crate) fn call_settled(retry: &RetryAdvice) -> Json {
    let after = retry.after.map(|after| seconds(after.as_duration()));
    json!({ "retry": { "allowed": retry.allowed, "after": after } })
}

/// The upstreams of a server.
pub(crate) fn upstreams(listed: &[UpstreamState]) -> Json {
    let upstream = |state: &UpstreamState| {
        json!({
            "name": state.name.0.as_str(),
            "rate": state.rate,
            "quota": state.quota,
            "slots": state.slots,
            "in_flight": state.in_flight,
            "waiting": state.waiting,
            "admitted": state.admitted,
            "reason": state.reason,
        })
    };
    json!({ "upstreams": listed.iter().map(upstream).collect::<Vec<_>>() })
}

/// The state of the store or the server.
pub(crate) fn status(status: &Status) -> Json {
    json!({
        "url": status.url,
        "namespace": status.namespace.as_str(),
        "engine": status.engine,
        "is_durable": status.is_durable,
        "clock": status.clock,
        "at": status.at.to_string(),
        "clock_offset": seconds(status.clock_offset),
        "version": status.version.number(),
        "took": seconds(status.took),
    })
}

fn whereabouts(of: &StoreLocation, url: Option<&str>) -> Map<String, Json> {
    let mut object = Map::new();
    if let Some(url) = url {
        object.insert("store".to_owned(), json!(url));
    }
    object.insert("engine".to_owned(), json!(of.engine));
    object.insert("place".to_owned(), json!(of.place));
    object
}

fn with(mut object: Map<String, Json>, fields: Json) -> Json {
    if let Json::Object(fields) = fields {
        object.extend(fields);
    }
    object.into()
}

fn part(part: &Part) -> Map<String, Json> {
    [("kind", part.kind), ("name", &part.name)]
        .map(|(key, value)| (key.to_owned(), json!(value)))
        .into_iter()
        .collect()
}

/// A store that was created, or existed.
pub(crate) fn made(made: &InitReport, url: &str) -> Json {
    let parts: Vec<Json> =
        made.parts.iter().map(|made| with(part(&made.part), json!({ "is_new": made.is_new }))).collect();
    with(whereabouts(&made.of, Some(url)), json!({ "schema": made.schema, "parts": parts }))
}

/// The result of a store check.
pub(crate) fn checked(checked: &CheckReport, url: &str) -> Json {
    let setting =
        |setting: &Setting| json!({ "name": setting.name, "value": setting.value, "danger": setting.danger });
    let clock = checked.clock.map(|clock| {
        let ahead = Duration::from_micros(clock.ahead_micros.unsigned_abs()).as_secs_f64();
        let ahead = if clock.ahead_micros < 0 { -ahead } else { ahead };
        json!({ "ahead": ahead, "within": seconds(clock.within) })
    });
    with(
        whereabouts(&checked.of, Some(url)),
        json!({
            "state": checked.readiness().as_str(),
            "server": checked.server,
            "schema": { "found": checked.schema, "wanted": checked.schema_wanted },
            "namespace": checked.namespace,
            "missing": checked.missing.iter().map(|missing| Json::from(part(missing))).collect::<Vec<_>>(),
            "durability": checked.durability,
            "settings": checked.settings.iter().map(setting).collect::<Vec<_>>(),
            "dangers": checked.dangers().count(),
            "clock": clock,
            "clock_offset": checked.clock_offset.map(seconds),
        }),
    )
}

/// The result of an upgrade.
pub(crate) fn upgraded(upgraded: &UpgradeReport, url: &str) -> Json {
    let parts: Vec<Json> = upgraded
        .parts
        .iter()
        .map(|upgrade| with(part(&upgrade.part), json!({ "from": upgrade.from, "to": upgraded.schema })))
        .collect();
    with(whereabouts(&upgraded.of, Some(url)), json!({ "schema": upgraded.schema, "parts": parts }))
}

/// What a removal would lose.
pub(crate) fn copied(copied: &BackupReport, url: &str) -> Json {
    json!({ "store": url, "file": copied.file.display().to_string(), "bytes": copied.bytes })
}

pub(crate) fn losses(listed: &NamespaceList, url: &str) -> Json {
    let Json::Object(listed) = listed_store(listed) else { return Json::Null };
    with(listed, json!({ "store": url, "is_removed": false }))
}

/// The result of a removal.
pub(crate) fn destroyed(destroyed: &DestroyReport, url: &str) -> Json {
    let gone = with(part(&destroyed.part), json!({ "was_there": destroyed.was_there }));
    with(whereabouts(&destroyed.of, Some(url)), json!({ "is_removed": true, "parts": [gone] }))
}

/// The contents of a store.
pub(crate) fn listed_store(listed: &NamespaceList) -> Json {
    let space = |space: &Space| {
        json!({
            "within": space.within,
            "namespace": space.namespace,
            "schema": space.schema,
            "changes": space.changes,
            "entities": space.entities,
            "policies": space.policies,
        })
    };
    let spaces: Vec<Json> = listed.spaces.iter().map(space).collect();
    with(
        whereabouts(&listed.of, None),
        json!({ "schema": listed.schema_wanted, "namespaces": spaces, "has_more": listed.has_more }),
    )
}
