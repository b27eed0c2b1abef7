//! Tests against a scripted upstream that fails: which calls are retried, and for how long.

use std::time::Duration;

use tidegate_client::*;
use tokio::time::advance;

use crate::kit::frozen::{Frozen, settle_down, until};
use crate::kit::upstream::{Reply, Upstream, cost, done, granted, problem, request};

const AFTER: &str = "retry-after: 5\r\n";

fn spend() -> Spend {
    Spend::new("acme".parse().expect("a name"), "gpt-4".parse().expect("a name"), cost(&[("tpm", 1)]))
}

fn page() -> Reply {
    Reply::Respond(200, "", "{\"items\":[]}".to_owned())
}

fn outage(error: ClientError) -> Outage {
    match error {
        ClientError::Unavailable(outage) => *outage,
        other => panic!("{other}"),
    }
}

/// Ways to lose the response to a request that may have been executed.
fn losses() -> [Reply; 4] {
    let half = b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\n{\"items\"".to_vec();
    [Reply::Close, Reply::Bytes(half), Reply::Bytes(b"HTTP/1.1 2".to_vec()), problem(500, "internal", "")]
}

#[tokio::test]
async fn reads_are_retried_after_lost_response() {
    for loss in losses() {
        let upstream = Upstream::new(None, [loss.clone(), loss.clone(), page()]).await;
        let client = upstream.builder().build().unwrap();
        let page = client.entities(&PageQuery::default()).await.unwrap();
        assert_eq!((page.items.len(), upstream.count(), client.stats().retries), (0, 3, 2), "{loss:?}");
    }
}

#[tokio::test]
async fn draws_are_retried_with_same_request_id() {
    let own: RequestId = "01890a5d-ac96-774b-bcce-b302099a8057".parse().unwrap();
    let spent = || Reply::Respond(204, "", String::new());
    for loss in losses() {
        let upstream =
            Upstream::new(None, [loss.clone(), granted(), loss.clone(), spent(), loss.clone(), spent()])
                .await;
        let client = upstream.builder().build().unwrap();
        client.draw(&request(&[("tpm", 1)])).await.unwrap();
        client.spend(&spend()).await.unwrap();
        client.spend(&Spend { id: Some(own.clone()), ..spend() }).await.unwrap();
        let ids: Vec<_> = upstream
            .requests()
            .iter()
            .map(|arrived| arrived.body["id"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!((&ids[0], &ids[2], ids[4].as_str()), (&ids[1], &ids[3], own.as_str()), "{loss:?}");
        assert!(ids[0] != ids[2] && ids[4] == ids[5] && ids.len() == 6, "{ids:?}");
    }
}

#[tokio::test]
async fn non_idempotent_calls_are_not_retried() {
    let id: EntityId = "acme".parse().unwrap();
    let put = PutToken {
        id: "ci".parse().unwrap(),
        name: None,
        scopes: "read".parse().unwrap(),
        entity: None,
        expires_at: None,
    };
    for loss in losses() {
        let upstream = Upstream::new(None, std::iter::repeat_n(loss.clone(), 4)).await;
        let client = upstream.builder().build().unwrap();
        let errors = [
            client.create_token(&put).await.unwrap_err(),
            client.remove_entity(&id, &RemoveQuery::default()).await.unwrap_err(),
            client.put_entity(&id, &PutEntity::default()).await.unwrap_err(),
            client.remove_policy(&ScopeQuery::default()).await.unwrap_err(),
        ];
        for error in errors {
            assert!(error.is_unavailable() && error.may_be_done(), "{error}");
            let outage = outage(error);
            assert_eq!((outage.attempts, outage.why), (1, StopReason::MayBeDone), "{outage}");
        }
        assert_eq!(upstream.count(), 4, "{loss:?}");
    }
}

#[tokio::test]
async fn conditional_write_retry_reports_may_be_done() {
    let upstream = Upstream::new(None, [Reply::Close, problem(409, "stale", "")]).await;
    let client = upstream.builder().build().unwrap();
    let put = PutEntity { expect: Expect::Version(3), ..PutEntity::default() };
    let error = client.put_entity(&"acme".parse().unwrap(), &put).await.unwrap_err();
    assert!(matches!(&error, ClientError::Problem { may_be_done: true, .. }), "{error}");
    assert!(error.may_be_done());
    let sentence = "it is stale (an earlier attempt may have succeeded)";
    assert_eq!((error.to_string().as_str(), upstream.count()), (sentence, 2));
}

#[tokio::test]
async fn rejections_before_execution_are_retried() {
    let id: EntityId = "acme".parse().unwrap();
    for kind in ["busy", "stopping"] {
        let upstream = Upstream::new(
            None,
            [problem(503, kind, ""), Reply::Respond(200, "", "{\"version\":3}".to_owned())],
        )
        .await;
        upstream.builder().build().unwrap().put_entity(&id, &PutEntity::default()).await.unwrap();
        assert_eq!(upstream.count(), 2, "{kind}");
    }
    // A store that did not respond may have executed the call.
    let upstream = Upstream::new(None, [problem(503, "store-away", "")]).await;
    let error = upstream.builder().build().unwrap().put_entity(&id, &PutEntity::default()).await.unwrap_err();
    assert_eq!((outage(error).why, upstream.count()), (StopReason::MayBeDone, 1));
}

#[tokio::test]
async fn retry_after_is_a_lower_bound() {
    let upstream = Upstream::new(None, [problem(503, "busy", AFTER), page()]).await;
    let client = upstream.builder().build().unwrap();
    let _frozen = Frozen::new();
    let asking = tokio::spawn({
        let client = client.clone();
        async move { client.entities(&PageQuery::default()).await }
    });
    until("the retry", || client.stats().retries == 1).await;
    advance(Duration::from_millis(4_999)).await;
    settle_down().await;
    assert_eq!(upstream.count(), 1);
    // The jitter is at most 10%.
    advance(Duration::from_millis(502)).await;
    until("the second request", || upstream.count() == 2).await;
    asking.await.unwrap().unwrap();
}

#[tokio::test]
async fn retry_after_past_deadline_fails_immediately() {
    let upstream = Upstream::new(None, [problem(503, "busy", "retry-after: 4000\r\n")]).await;
    let error = upstream.builder().build().unwrap().entities(&PageQuery::default()).await.unwrap_err();
    assert_eq!(error.retry_after(), Some(Duration::from_secs(4_000)));
    assert_eq!(outage(error).why, StopReason::Deadline);
}

#[tokio::test]
async fn attempts_are_bounded_and_reported() {
    let upstream = Upstream::new(None, []).await;
    let error = upstream.builder().build().unwrap().live().await.unwrap_err();
    let text = error.to_string();
    assert!(text.starts_with("server unavailable: GET /health/live failed 3 times in "), "{text}");
    assert!(text.ends_with(" (attempt limit reached): status 500"), "{text}");
    assert_eq!(upstream.count(), 3);
}

#[tokio::test]
async fn total_timeout_bounds_call() {
    let upstream = Upstream::new(None, [Reply::Silence, Reply::Silence]).await;
    let retry = Retry::attempts(u32::MAX).budget(RetryBudget::unlimited());
    let client = upstream.builder().retry(retry).build().unwrap();
    let _frozen = Frozen::new();
    let asking = tokio::spawn(async move { client.live().await });
    let mut passed = Duration::ZERO;
    while !asking.is_finished() {
        settle_down().await;
        advance(Duration::from_secs(1)).await;
        passed += Duration::from_secs(1);
        assert!(passed < Duration::from_secs(40), "the call exceeds its total timeout");
    }
    let outage = outage(asking.await.unwrap().unwrap_err());
    assert_eq!(outage.why, StopReason::Deadline);
    assert!(outage.took <= Duration::from_secs(31), "{outage}");
}

#[tokio::test]
async fn retry_budget_is_enforced_and_counted() {
    let upstream = Upstream::new(None, []).await;
    let retry = Retry::attempts(10).backoff(Backoff::fixed(Duration::ZERO));
    let budget = RetryBudget::new(0.0, 5, Duration::from_secs(3_600));
    let client = upstream.builder().retry(retry.budget(budget)).build().unwrap();
    let error = client.live().await.unwrap_err();
    assert_eq!((outage(error).why, upstream.count()), (StopReason::Budget, 6));
    assert_eq!(outage(client.live().await.unwrap_err()).attempts, 1);
    let stats = client.stats();
    assert_eq!((stats.retries, stats.out_of_budget), (5, 2));
}

#[tokio::test]
async fn invalid_response_is_not_retried() {
    let html = "<html>hello</html>".to_owned();
    let table = [
        Reply::Respond(200, "", html.clone()),
        Reply::Respond(200, "", "{\"items\":[],\"colour\":\"blue\"}".to_owned()),
        Reply::Respond(404, "", html.clone()),
        Reply::Respond(302, "location: http://127.0.0.1:1/\r\n", String::new()),
        Reply::Respond(200, "", " ".repeat(16 * 1_024 * 1_024 + 1)),
    ];
    for reply in table {
        let upstream = Upstream::new(None, [reply]).await;
        let error = upstream.builder().build().unwrap().entities(&PageQuery::default()).await.unwrap_err();
        assert!(matches!(error, ClientError::Garbled { .. }), "{error}");
        assert_eq!(upstream.count(), 1);
    }
    // An error page of a proxy in front of the server is retried.
    let upstream = Upstream::new(None, [Reply::Respond(502, "", html), page()]).await;
    upstream.builder().build().unwrap().entities(&PageQuery::default()).await.unwrap();
    assert_eq!(upstream.count(), 2);
}

#[tokio::test]
async fn connection_refused_is_retried_and_not_executed() {
    // Bound but not listening, so that no other process can listen there.
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let addr = socket.local_addr().unwrap();
    let retry = Retry::attempts(3).backoff(Backoff::fixed(Duration::ZERO));
    let client = Client::builder(&format!("http://{addr}")).retry(retry).build().unwrap();
    let error = client.spend(&spend()).await.unwrap_err();
    assert!(error.is_unavailable() && !error.may_be_done(), "{error}");
    let outage = outage(error);
    assert_eq!((outage.attempts, outage.why), (3, StopReason::Attempts));
    assert!(matches!(outage.cause, Cause::Connect(_)), "{outage}");
}

#[tokio::test]
async fn refusal_is_retried_when_configured() {
    let refused = || {
        Reply::Respond(429, "", "{\"type\":\"/problems/limited\",\"title\":\"t\",\"status\":429,\"detail\":\"d\",\"retry_after\":0.001}".to_owned())
    };
    let upstream =
        Upstream::new(None, [refused(), refused(), Reply::Respond(204, "", String::new()), refused()]).await;
    let waiting_client =
        upstream.builder().retry(Retry::attempts(1).when_refused(WhenRefused::Wait)).build().unwrap();
    waiting_client.spend(&spend()).await.unwrap();
    assert_eq!(upstream.count(), 3);
    let error = upstream.builder().build().unwrap().spend(&spend()).await.unwrap_err();
    assert!(matches!(error, ClientError::Refused { .. }), "{error}");
    assert_eq!(error.retry_after(), Some(Duration::from_millis(1)));
}

#[tokio::test]
async fn lost_step_keeps_number_and_others_get_new_one() {
    let lost = || std::iter::repeat_n(Reply::Close, 3);
    let upstream = Upstream::new(None, [granted(), done()]).await;
    let lease = upstream.builder().build().unwrap().acquire(&request(&[("tpm", 5)])).await.unwrap();
    lease.extend(cost(&[("tpm", 1)])).await.unwrap();
    upstream.then(lost());
    assert!(lease.extend(cost(&[("tpm", 2)])).await.unwrap_err().may_be_done());
    upstream.then([done()]);
    lease.extend(cost(&[("tpm", 2)])).await.unwrap();
    upstream.then(lost());
    assert!(lease.extend(cost(&[("tpm", 2)])).await.unwrap_err().may_be_done());
    upstream.then([done(), problem(429, "limited", ""), done()]);
    lease.adjust(Changes::of([("tpm", 2)]).unwrap()).await.unwrap();
    assert!(lease.extend(cost(&[("tpm", 2)])).await.is_err());
    lease.settle(cost(&[])).await.unwrap();
    let extends = |step: u64, times: usize| std::iter::repeat_n(("extend".to_owned(), step), times);
    let mut expected: Vec<_> = extends(1, 1).chain(extends(2, 4)).chain(extends(3, 3)).collect();
    expected.extend([("adjust".to_owned(), 4), ("extend".to_owned(), 5), ("settle".to_owned(), 6)]);
    assert_eq!(upstream.steps(), expected);
}

#[tokio::test]
async fn cancelled_step_keeps_its_number() {
    let upstream = Upstream::new(None, [granted(), Reply::Silence, done(), Reply::Silence, done()]).await;
    let lease = upstream.builder().build().unwrap().acquire(&request(&[("tpm", 5)])).await.unwrap();
    for (arrived, again) in [(2, cost(&[("tpm", 1)])), (4, cost(&[("tpm", 2)]))] {
        tokio::select! {
            _ = lease.extend(cost(&[("tpm", 1)])) => panic!("the upstream is silent"),
            () = until("the extension", || upstream.count() == arrived) => {}
        }
        lease.extend(again).await.unwrap();
    }
    assert_eq!(upstream.steps().iter().map(|(_, step)| *step).collect::<Vec<_>>(), [1, 1, 2, 3]);
    lease.detach();
}

#[tokio::test]
async fn unconfirmed_settle_is_resent_on_drop() {
    let upstream = Upstream::new(None, [granted()]).await;
    let client = upstream.builder().build().unwrap();
    let lease = client.acquire(&request(&[("tpm", 5)])).await.unwrap();
    upstream.then(std::iter::repeat_n(Reply::Close, 3));
    assert!(lease.settle(cost(&[("tpm", 3)])).await.unwrap_err().is_unavailable());
    let error = lease.cancel().await.unwrap_err();
    assert_eq!(error.to_string(), "the lease is being settled by its holder");
    upstream.then([done()]);
    drop(lease);
    client.drain().await;
    assert_eq!(upstream.steps(), std::iter::repeat_n(("settle".to_owned(), 1), 4).collect::<Vec<_>>());
    assert_eq!(client.stats().endings_lost, 0);
}

#[tokio::test]
async fn rejected_settle_leaves_lease_open() {
    let upstream = Upstream::new(None, [granted(), problem(422, "invalid", ""), done()]).await;
    let lease = upstream.builder().build().unwrap().acquire(&request(&[("tpm", 5)])).await.unwrap();
    assert!(lease.settle(cost(&[("typo", 3)])).await.is_err());
    lease.settle(cost(&[("tpm", 3)])).await.unwrap();
    assert_eq!(upstream.steps(), [("settle".to_owned(), 1), ("settle".to_owned(), 2)]);
}

#[tokio::test]
async fn background_endings_are_bounded_and_losses_counted() {
    let upstream = Upstream::new(None, std::iter::repeat_n(granted(), 5)).await;
    let client = upstream.builder().endings_max(2).build().unwrap();
    let mut leases = Vec::new();
    for _ in 0..5 {
        leases.push(client.acquire(&request(&[("tpm", 5)])).await.unwrap());
    }
    upstream.then([done(), done()]);
    drop(leases);
    let stats = client.stats();
    assert_eq!((stats.endings_pending, stats.endings_lost), (2, 3));
    client.drain().await;
    assert_eq!((client.stats().endings_pending, client.stats().endings_lost, upstream.count()), (0, 3, 7));
}

#[tokio::test]
async fn undeliverable_ending_is_counted_as_lost() {
    let upstream = Upstream::new(None, [granted()]).await;
    let client = upstream.builder().build().unwrap();
    drop(client.acquire(&request(&[("tpm", 5)])).await.unwrap());
    client.drain().await;
    assert_eq!((client.stats().endings_lost, upstream.count()), (1, 4));
}

#[test]
fn lease_outliving_runtime_is_counted_as_lost() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let (client, lease) = runtime.block_on(async {
        let upstream = Upstream::new(None, [granted()]).await;
        let client = upstream.builder().build().unwrap();
        let lease = client.acquire(&request(&[("tpm", 5)])).await.unwrap();
        (client, lease)
    });
    drop(runtime);
    drop(lease);
    assert_eq!((client.stats().endings_lost, client.stats().endings_pending), (1, 0));
}

#[tokio::test]
async fn slow_settle_times_out_and_retries_same_step() {
    let upstream = Upstream::new(None, [granted(), Reply::Silence, done()]).await;
    let client = upstream.builder().request_timeout(Duration::from_secs(2)).build().unwrap();
    // Frozen before the first call, so that its response is never late on a slow machine.
    let _frozen = Frozen::new();
    let lease = client.acquire(&request(&[("tpm", 5)])).await.unwrap();
    let settling = tokio::spawn(async move { lease.settle(Cost::default()).await });
    until("the settle", || upstream.count() == 2).await;
    advance(Duration::from_millis(1_999)).await;
    settle_down().await;
    assert_eq!(client.stats().retries, 0);
    // Runtime timers fire up to a millisecond late.
    advance(Duration::from_millis(2)).await;
    until("the retry", || client.stats().retries == 1).await;
    advance(Duration::from_millis(3)).await;
    settling.await.unwrap().unwrap();
    assert_eq!(upstream.steps(), [("settle".to_owned(), 1), ("settle".to_owned(), 1)]);
}

#[tokio::test]
async fn page_that_links_to_itself_is_an_error() {
    let again = || Reply::Respond(200, "", "{\"items\":[],\"next\":\"a\"}".to_owned());
    let upstream = Upstream::new(None, [again(), again(), again()]).await;
    let client = upstream.builder().build().unwrap();
    let error = client.all_entities(PageQuery::default()).items(usize::MAX).await.unwrap_err();
    assert!(error.to_string().ends_with("a page links to itself as the next one"), "{error}");
    assert_eq!(upstream.count(), 2);
}
