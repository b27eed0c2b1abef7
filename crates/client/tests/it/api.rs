//! Tests every client function against a real server with an in-memory store.

use std::time::Duration;

use tidegate_client::*;
use tidegate_core::limit::token::{TokenScope, TokenScopes as Scopes};

use crate::kit::server::{Kit, make_token};
use crate::kit::upstream::{cost, request};

fn client(kit: &Kit) -> Client {
    Client::builder(&format!("http://{}", kit.addr)).token(&kit.token).build().expect("a client")
}

/// Returns the available tokens of 1,000.
async fn left(client: &Client) -> i64 {
    let query = BalanceQuery { entity: "acme".parse().ok(), resource: "gpt-4".parse().ok() };
    let balances = client.balances(&query).await.expect("balances");
    balances.limits.iter().find(|limit| limit.limit == "tpm").expect("the limit exists").available
}

#[tokio::test]
async fn lease_can_be_extended_adjusted_and_settled() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let lease = client.acquire(&request(&[("rpm", 1), ("tpm", 500)])).await.unwrap();
    assert_eq!(left(&client).await, 500);
    assert_eq!(lease.extend(cost(&[("tpm", 100)])).await.unwrap().len(), 1);
    assert_eq!(left(&client).await, 400);
    lease.adjust(Changes::of([("tpm", -50)]).unwrap()).await.unwrap();
    assert_eq!(left(&client).await, 450);
    assert!(lease.expires_in() > Duration::from_secs(240) && !lease.is_lost());
    lease.settle(cost(&[("tpm", 300)])).await.unwrap();
    assert_eq!(left(&client).await, 700);
    // Repeating the settle returns the first result; any other call fails.
    lease.settle(cost(&[("tpm", 300)])).await.unwrap();
    let error = lease.extend(cost(&[("tpm", 1)])).await.unwrap_err();
    assert_eq!(error.to_string(), "the lease was settled by its holder");
    drop(lease);
    client.drain().await;
    assert_eq!(left(&client).await, 700);
}

#[tokio::test]
async fn dropped_lease_is_cancelled_in_background() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let lease = client.acquire(&request(&[("tpm", 500)])).await.unwrap();
    assert_eq!(left(&client).await, 500);
    drop(lease);
    assert_eq!(client.stats().endings_pending, 1);
    client.drain().await;
    assert_eq!((left(&client).await, client.stats().endings_lost), (1_000, 0));
}

fn written(limits: &[&str]) -> PutPolicy {
    let limits = limits.iter().map(|limit| limit.parse().expect("a limit")).collect();
    PutPolicy { policy: Policy { limits, ..Policy::default() }, expect: Expect::Any }
}

async fn make_and_revoke_a_token(client: &Client) {
    let put = PutToken {
        id: "cd".parse().expect("valid"),
        name: None,
        scopes: "read".parse().expect("valid"),
        entity: None,
        expires_at: None,
    };
    let made = client.create_token(&put).await.expect("an answer");
    assert!(made.secret.starts_with("tg_cd_") && !format!("{made:?}").contains(&made.secret));
    let tokens = client.tokens(&PageQuery::default()).await.expect("an answer").items;
    assert_eq!(tokens.iter().filter(|token| token.id == put.id).count(), 1);
    client.revoke_token(&put.id, &RemoveQuery::default()).await.expect("an answer");
}

async fn acquire_and_settle_a_call(client: &Client) {
    let call = AcquireCall { tokens: 5, ..AcquireCall::default() };
    let upstream = "openai/gpt-4".parse().expect("a name");
    let permit = client.acquire_call(&upstream, &call).await.expect("an answer").permit;
    let settled = SettleCall { status: Some(200), ..SettleCall::default() };
    client.settle_call(&permit, &settled).await.expect("an answer");
    assert_eq!(client.upstreams().await.expect("an answer").upstreams[0].name.to_string(), "openai/gpt-4");
}

#[tokio::test]
async fn every_server_route_has_a_client_function() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let (acme, page) = ("acme".parse().unwrap(), PageQuery::default());
    client
        .put_entity(&acme, &PutEntity { name: Some("Acme".to_owned()), ..PutEntity::default() })
        .await
        .unwrap();
    assert_eq!(client.entity(&acme).await.unwrap().name.as_deref(), Some("Acme"));
    assert_eq!(client.entities(&page).await.unwrap().items.len(), 1);
    assert!(client.children(&acme, &page).await.unwrap().items.is_empty());
    let scope = ScopeQuery { entity: Some(acme.clone()), ..ScopeQuery::default() };
    let version = client.put_policy(&scope, &written(&["tpm:2k/min"])).await.unwrap().version;
    assert_eq!(client.policy(&scope).await.unwrap().version, version);
    assert_eq!(client.policies(&PolicyQuery::default()).await.unwrap().items.len(), 2);
    let declared =
        Declared { entity: Some(acme.clone()), resource: None, policy: written(&["tpm:3k/min"]).policy };
    let plan = client.plan(&Declaration { policies: vec![declared], prune: false }).await.unwrap();
    assert_eq!(client.apply(&Apply { changes: plan.changes }).await.unwrap().version, version + 1);

    let ask = Ask {
        entity: acme.clone(),
        resource: "gpt-4".parse().unwrap(),
        cost: cost(&[("tpm", 5)]),
        limits: vec![],
    };
    assert_eq!(client.explain(&ask).await.unwrap().would, Forecast::Grant);
    let name = client.draw(&request(&[("tpm", 5)])).await.unwrap().lease;
    client.extend_lease(&name, &Extend { step: 1, cost: cost(&[("tpm", 1)]) }).await.unwrap();
    let changes = Changes::of([("tpm", -1)]).unwrap();
    client.adjust_lease(&name, &Adjust { step: 2, changes }).await.unwrap();
    let expires_in = Seconds::new(600.0).unwrap();
    let renewed = client.renew_lease(&name, &Renew { step: 3, expires_in }).await.unwrap();
    assert_eq!((renewed.expires_in, client.open_lease(&name).await.unwrap().step), (expires_in, 3));
    let settle = Settle { step: 4, actual: Cost::default() };
    assert!(!client.settle_lease(&name, &settle).await.unwrap().is_repeat);
    assert!(client.settle_lease(&name, &settle).await.unwrap().is_repeat);
    let batch = client.draw_batch(&Batch { requests: vec![request(&[("tpm", 5)])] }).await.unwrap();
    let [BatchResult::Granted(granted)] = &batch.results[..] else { panic!("{batch:?}") };
    client.cancel_lease(&granted.lease, &Cancel { step: 1 }).await.unwrap();
    let spend = Spend::new(acme.clone(), "gpt-4".parse().unwrap(), cost(&[("tpm", 5)]));
    client.spend(&spend).await.unwrap();
    acquire_and_settle_a_call(&client).await;
    let query = BalanceQuery { entity: Some(acme.clone()), resource: None };
    assert!(!client.balances(&query).await.unwrap().limits.is_empty());
    let query = CapacityQuery { resource: Some("gpt-4".parse().unwrap()) };
    assert_eq!(client.capacity(&query).await.unwrap().limits[0].buckets, 1);
    let query = UsageQuery { entity: Some(acme.clone()), ..UsageQuery::default() };
    assert_eq!(client.usage(&query).await.unwrap().items[0].units, 10);
    assert_eq!(client.usage_summary(&query).await.unwrap().limits["tpm"].units, 10);

    let (entity, resource) = (acme.clone(), "gpt-4".parse().unwrap());
    let put = PutBucket { entity, resource, limit: "tpm".to_owned(), units: Some(7) };
    assert_eq!(client.put_bucket(&put).await.unwrap().limit.available, 7);

    make_and_revoke_a_token(&client).await;
    client.remove_policy(&scope).await.unwrap();
    client.remove_entity(&acme, &RemoveQuery::default()).await.unwrap();
    assert!(client.audit(&AuditQuery::default()).await.unwrap().items.len() >= 6);
    client.live().await.unwrap();
    client.ready().await.unwrap();
    assert!(client.openapi().await.unwrap().contains(&client.status().await.unwrap().namespace));
    assert_eq!((client.metrics().await.is_ok(), client.snapshot().await.unwrap().granted), (true, 3));

    // The server counted a request for every route, except for the endless event stream.
    let counted = client.metrics().await.unwrap();
    for route in tidegate_server::routes().into_iter().filter(|route| route.path != "/v1/events") {
        let line = format!(
            "tidegate_http_requests_total{{method=\"{}\",path=\"{}\",kind=\"ok\"}}",
            route.method, route.path
        );
        let count = counted.lines().find_map(|text| text.strip_prefix(line.as_str()));
        assert!(count.is_some_and(|count| count.trim() != "0"), "{line} {count:?}");
    }
}

#[tokio::test]
async fn refusal_names_limit_entity_source_and_retry_after() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let lease = client.acquire(&request(&[("rpm", 1), ("tpm", 900)])).await.unwrap();
    let error = client.acquire(&request(&[("rpm", 1), ("tpm", 600)])).await.unwrap_err();
    assert!(matches!(error, ClientError::Refused { .. }) && !error.may_be_done(), "{error}");
    assert_eq!(error.retry_after(), Some(Duration::from_secs(30)));
    let short: Vec<_> = error.short_limits().collect();
    let [limit] = &short[..] else { panic!("{short:?}") };
    let entity = limit.entity.as_ref().map(ToString::to_string);
    assert_eq!((limit.limit.as_str(), entity.as_deref()), ("tpm", Some("acme")));
    assert_eq!((limit.source.as_deref(), limit.available, limit.asked), (Some("system"), 100, 600));
    // A cost above the burst is a permanent error.
    let error = client.acquire(&request(&[("tpm", 6_000)])).await.unwrap_err();
    assert!(matches!(&error, ClientError::Problem { problem, .. } if problem.is("too-large")), "{error}");
    assert_eq!(error.retry_after(), None);
    lease.cancel().await.unwrap();
}

#[tokio::test]
async fn unauthorized_and_forbidden_are_distinct() {
    let kit = Kit::new().await;
    let base = Client::new(&format!("http://{}", kit.addr)).unwrap();
    base.ready().await.unwrap();
    let reader = make_token(kit.limiter.store(), "reader", Scopes::new([TokenScope::Read]), "default").await;
    let wrong = format!("tg_reader_{}", "0".repeat(64));
    for client in [base.clone(), base.clone().token(&wrong).unwrap(), base.clone().token("nonsense").unwrap()]
    {
        let error = client.entities(&PageQuery::default()).await.unwrap_err();
        assert!(matches!(error, ClientError::Unauthorized { .. }), "{error}");
    }
    let reader = base.token(&reader).unwrap();
    reader.entities(&PageQuery::default()).await.unwrap();
    let error = reader.acquire(&request(&[("tpm", 1)])).await.unwrap_err();
    assert!(matches!(error, ClientError::Forbidden { .. }), "{error}");
    assert_eq!(
        error.to_string(),
        "not allowed: the token `reader` lacks the scope `acquire`, which this needs"
    );
}

#[tokio::test]
async fn problem_kinds_reach_client() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let acme = "acme".parse().unwrap();
    let is = |error: &ClientError, status: u16, kind: &str| {
        let problem = error.problem().unwrap_or_else(|| panic!("{error}"));
        assert!(matches!(error, ClientError::Problem { may_be_done: false, .. }), "{error:?}");
        assert!(problem.status == status && problem.is(kind), "{problem:?}");
    };
    is(&client.entity(&acme).await.unwrap_err(), 404, "no-entity");
    let put = PutEntity { expect: Expect::Version(7), ..PutEntity::default() };
    is(&client.put_entity(&acme, &put).await.unwrap_err(), 409, "stale");
    is(&client.draw_batch(&Batch { requests: vec![] }).await.unwrap_err(), 422, "invalid");
    let too_long = Acquire { within: Some(Seconds::new(3_600.0).unwrap()), ..request(&[("tpm", 1)]) };
    let error = client.acquire(&too_long).await.unwrap_err();
    is(&error, 422, "invalid");
    assert_eq!(error.problem().unwrap().field.as_deref(), Some("within"));
    let error = client.entity(&"..".parse().unwrap()).await.unwrap_err();
    assert_eq!(
        error.to_string(),
        "GET /v1/entities/{entity} cannot be sent: `..` is not a valid path segment"
    );
}

#[tokio::test]
async fn names_with_special_characters_round_trip() {
    let kit = Kit::new().await;
    let client = client(&kit);
    for name in ["a/b", "a b", "ü%20?&=+", "...", "a\\b", "x;y:z@w", "%2e%2e"] {
        let id: EntityId = name.parse().unwrap();
        client.put_entity(&id, &PutEntity::default()).await.unwrap();
        assert_eq!(client.entity(&id).await.unwrap().id, id);
        let query =
            ScopeQuery { entity: Some(id.clone()), resource: name.parse().ok(), ..ScopeQuery::default() };
        client.put_policy(&query, &written(&["rpm:1/s"])).await.unwrap();
        assert_eq!(
            client.policy(&query).await.unwrap().resource.map(|name| name.to_string()).as_deref(),
            Some(name)
        );
    }
}

#[tokio::test]
async fn listing_reads_all_pages_up_to_max() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let parent = PutEntity { parent: "e00".parse().ok(), ..PutEntity::default() };
    for number in 0..25 {
        let put = if number == 0 { PutEntity::default() } else { parent.clone() };
        client.put_entity(&format!("e{number:02}").parse().unwrap(), &put).await.unwrap();
    }
    let by_ten = || PageQuery { after: None, max: Some(10) };
    let all = client.all_entities(by_ten()).items(1_000).await.unwrap();
    assert_eq!(
        all.iter().map(|entity| entity.id.to_string()).collect::<Vec<_>>(),
        (0..25).map(|number| format!("e{number:02}")).collect::<Vec<_>>()
    );
    assert_eq!(client.all_entities(by_ten()).items(15).await.unwrap().len(), 15);
    assert_eq!(client.all_children(&"e00".parse().unwrap(), by_ten()).items(1_000).await.unwrap().len(), 24);
    let mut pages = client.all_audit(AuditQuery { max: Some(9), ..AuditQuery::default() });
    let mut sizes = Vec::new();
    while let Some(page) = pages.next_page().await.unwrap() {
        sizes.push(page.items.len());
    }
    // 25 entities, a policy, two tokens and the lease key.
    assert_eq!(sizes, [9, 9, 9, 2]);
    assert!(pages.next_page().await.unwrap().is_none());
    assert_eq!(client.all_tokens(by_ten()).items(10).await.unwrap().len(), 2);
    assert_eq!(client.all_policies(PolicyQuery::default()).items(10).await.unwrap().len(), 1);
    let usage = UsageQuery { entity: "e00".parse().ok(), ..UsageQuery::default() };
    assert!(client.all_usage(usage).items(10).await.unwrap().is_empty());
}

#[tokio::test]
async fn batch_requests_are_decided_independently() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let requests = [600, 600, 300].map(|tokens| request(&[("tpm", tokens)])).to_vec();
    let results = client.acquire_batch(&Batch { requests }).await.unwrap();
    assert!(matches!(&results[..], [Ok(_), Err(ClientError::Refused { .. }), Ok(_)]), "{results:?}");
    assert_eq!(left(&client).await, 100);
    drop(results);
    client.drain().await;
    assert_eq!(left(&client).await, 1_000);
}

#[tokio::test]
async fn events_arrive_as_they_happen() {
    let kit = Kit::new().await;
    let client = client(&kit);
    let mut events = client.events().await.unwrap();
    let _lease = client.acquire(&request(&[("tpm", 900)])).await.unwrap();
    client.acquire(&request(&[("tpm", 600)])).await.unwrap_err();
    let Some(Event::Refused { entity, limit, retry_after, .. }) = events.next().await.unwrap() else {
        panic!("the refusal is the first event");
    };
    assert_eq!((entity.to_string().as_str(), limit.as_str()), ("acme", "tpm"));
    assert_eq!((retry_after.unwrap().as_duration(), events.unknown()), (Duration::from_secs(30), 0));
    let unauthorized = Client::builder(&format!("http://{}", kit.addr)).token("tg_x_00").build().unwrap();
    let error = unauthorized.events().await.unwrap_err();
    assert!(matches!(error, ClientError::Unauthorized { .. }), "{error}");
    let unreachable = Client::new("http://127.0.0.1:1").unwrap();
    let error = unreachable.events().await.unwrap_err();
    assert!(error.is_unavailable() && !error.may_be_done(), "{error}");
}
