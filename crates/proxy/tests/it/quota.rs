//! Tenants share an upstream that hides its limits, and slow readers share a proxy.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use tidegate::Stamp;
use tidegate_core::limit::token::TokenScope;
use tokio::time::{Instant, sleep_until};

use crate::kit::client::{Caller, eventually, mock, proxy, start, upstream};
use crate::kit::codec::json;
use crate::kit::frozen::{Frozen, advance_until};
use crate::kit::raw;
use crate::kit::tenants::Store;

/// Requests per second of the hidden limit.
const RATE: u64 = 40;
/// The length of the run. Its first fifth is for learning.
const RUN: Duration = Duration::from_mins(1);
const CALLERS: usize = 64;

/// How far the frozen clock advances at a time.
const STEP: Duration = Duration::from_millis(5);

/// Time advances only when no task can go on, so the speed of the machine does not matter.
#[tokio::test]
async fn callers_of_four_tenants_use_a_hidden_quota() {
    let _frozen = Frozen::new();
    let addr = mock("openai", |options| {
        options.limits = vec![format!("requests:{RATE}/s").parse().unwrap()];
        options.is_hidden = true;
        options.latency = Duration::from_millis(100);
    })
    .await;
    let store = Store::new(&["tokens:1G/day"]).await;
    let through = start(proxy(&[upstream("openai", addr).key("sk-real")], Some(store.tenants()))).await;
    let names = ["a", "b", "c", "d"];
    let tokens = join_all(names.map(|name| store.token(name, TokenScope::Acquire))).await;
    let began = Instant::now();
    let calls = (0..CALLERS).map(|number| {
        let caller = Caller::new(through).with("authorization", &format!("Bearer {}", tokens[number % 4]));
        async move {
            let (mut calls, mut refused) = (0, 0);
            while began.elapsed() < RUN {
                let reply =
                    caller.post("/openai/v1/responses", &json!({"model": "m", "input": "hello"})).await;
                calls += 1;
                refused += u64::from(reply.status == 429);
            }
            (calls, refused)
        }
    });
    let totals = async || Caller::new(addr).get("/mock/totals").await.json();
    let learned = async {
        sleep_until(began + RUN / 5).await;
        let early = totals().await["completed"].as_u64().unwrap();
        sleep_until(began + RUN).await;
        totals().await["completed"].as_u64().unwrap() - early
    };
    let run = async { tokio::join!(join_all(calls), learned) };
    let ((results, completed), _) = advance_until(STEP, run).await;
    let quota = RATE * RUN.as_secs() / 5 * 4;
    assert!(completed * 100 >= quota * 95, "{completed} of {quota} calls");
    let sum = |of: fn(&(u64, u64)) -> u64| results.iter().map(of).sum::<u64>();
    let (calls, refused) = (sum(|result| result.0), sum(|result| result.1));
    assert!(refused * 100 <= calls, "{refused} of {calls} calls end in a 429");

    // The ledger and the mock count the same.
    let counted = totals().await;
    for (limit, total) in
        [("requests", "completed"), ("input_tokens", "input_tokens"), ("output_tokens", "output_tokens")]
    {
        let total = counted[total].as_u64().unwrap();
        let used = async || {
            let used = join_all(names.map(|name| store.used(name, "m", limit))).await;
            assert!(used.iter().all(|used| *used > 0), "every tenant is served: {used:?}");
            used.iter().sum::<u64>()
        };
        advance_until(STEP, eventually("all calls are booked", async || used().await >= total)).await;
        assert_eq!(used().await, total, "{limit}");
    }
}

/// Each call reserves what it is expected to use, and the rest of the upstream's tokens is for others.
#[tokio::test]
async fn calls_wait_for_a_hidden_limit_of_tokens() {
    let _frozen = Frozen::new();
    let addr = mock("anthropic", |options| {
        options.limits = vec!["tokens:2000/s".parse().unwrap()];
        options.is_hidden = true;
    })
    .await;
    let through = start(proxy(&[upstream("anthropic", addr)], None)).await;
    let caller = Caller::new(through).with("x-tidegate-within", "5m");
    let body =
        json!({"model": "c", "max_tokens": 16, "messages": [{"role": "user", "content": "x".repeat(800)}]});
    let calls = join_all((0..120).map(|_| caller.post("/anthropic/v1/messages", &body)));
    let (replies, took) = advance_until(10 * STEP, calls).await;
    let statuses: Vec<u16> = replies.iter().map(|reply| reply.status).collect();
    assert_eq!(statuses, [200; 120]);
    let scopes = advance_until(STEP, caller.get("/tidegate/scopes")).await.0.json();
    assert!(scopes["scopes"][0]["tokens_quota"].is_number(), "{scopes}");
    // 120 calls of about 226 tokens take 13 s, and the learning some more.
    assert!(took >= Duration::from_secs(10), "{took:?}");
}

#[tokio::test]
async fn slow_readers_hold_up_no_other_call() {
    let through = start(proxy(&[upstream("generic", mock("generic", |_| {}).await)], None)).await;
    let mut unread = Vec::new();
    for _ in 0..8 {
        unread.push(Caller::new(through).begin("GET", "/generic/bytes/1000000000", "").await);
    }
    let caller = Caller::new(through);
    for _ in 0..10 {
        assert_eq!(caller.get("/generic/bytes/300000").await.text.len(), 300_000);
    }
    let scopes = caller.get("/tidegate/scopes").await.json();
    assert_eq!(scopes["scopes"][0]["in_flight"], 8, "they go on: {scopes}");
}

/// Anthropic limits input and output apart. Their sum was throttled by the limit of either.
#[tokio::test(start_paused = true)]
async fn hidden_output_limit_does_not_hold_input_back() {
    const INPUT_PER_SECOND: u64 = 20_000;
    let addr = mock("anthropic", |options| {
        let limits = [format!("input_tokens:{INPUT_PER_SECOND}/s"), "output_tokens:2k/s".to_owned()];
        options.limits = limits.iter().map(|limit| limit.parse().unwrap()).collect();
        options.is_hidden = true;
        options.latency = Duration::from_millis(100);
    })
    .await;
    let through = start(proxy(&[upstream("anthropic", addr)], None)).await;
    // About 1,000 tokens of input, and 8 of output.
    let body = json!({"model": "c", "max_tokens": 8, "system": "x ".repeat(2_000), "messages": []});
    let began = Instant::now();
    let callers = (0..16).map(|_| async {
        let caller = Caller::new(through);
        while began.elapsed() < RUN {
            caller.post("/anthropic/v1/messages", &body).await;
        }
    });
    let totals = async || Caller::new(addr).get("/mock/totals").await.json();
    let learned = async {
        sleep_until(began + RUN / 5).await;
        let early = totals().await["input_tokens"].as_u64().unwrap();
        sleep_until(began + RUN).await;
        totals().await["input_tokens"].as_u64().unwrap() - early
    };
    let (_, input) = tokio::join!(join_all(callers), learned);
    let quota = INPUT_PER_SECOND * RUN.as_secs() / 5 * 4;
    assert!(input * 100 >= quota * 80, "{input} of {quota} tokens");
}

/// The limit of output is reported as that of all tokens too, if it is the tighter one.
#[tokio::test(start_paused = true)]
async fn reported_output_limit_does_not_hold_input_back() {
    let reset = Stamp::ZERO + SystemTime::now().duration_since(UNIX_EPOCH).unwrap() + Duration::from_mins(1);
    let level = |of: &str, limit: u64, remaining: u64| {
        let name = format!("anthropic-ratelimit-{of}");
        format!("{name}-limit: {limit}\r\n{name}-remaining: {remaining}\r\n{name}-reset: {reset}\r\n")
    };
    let levels = [
        level("input-tokens", 1_000_000, 900_000),
        level("output-tokens", 8_000, 4_000),
        level("tokens", 8_000, 4_000),
    ];
    let body = "{\"usage\":{\"input_tokens\":1000,\"output_tokens\":1}}";
    let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n";
    let reply = format!("{head}{}content-length: {}\r\n\r\n{body}", levels.concat(), body.len());
    let (addr, _seen) = raw::upstream(reply.leak()).await;
    let caller = Caller::new(start(proxy(&[upstream("anthropic", addr)], None)).await);
    let body = json!({"model": "c", "max_tokens": 1, "system": "x ".repeat(2_000), "messages": []});
    let began = Instant::now();
    for _ in 0..60 {
        assert_eq!(caller.post("/anthropic/v1/messages", &body).await.status, 200);
    }
    assert!(began.elapsed() < Duration::from_secs(90), "{:?}", began.elapsed());
}
