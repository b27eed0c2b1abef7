//! The mock counts and responds as the provider that it pretends to be.

use std::num::NonZero;
use std::time::Duration;

use crate::kit::client::{Caller, eventually, mock};
use crate::kit::codec::json;
use crate::kit::frozen::{Frozen, advance_until};
use tidegate_lab::Scenario;

#[tokio::test]
async fn openai_mock_refuses_in_its_own_words() {
    let limits = ["requests:2/day", "tokens:100k/min"];
    let addr =
        mock("openai", |options| options.limits = limits.map(|text| text.parse().unwrap()).into()).await;
    let caller = Caller::new(addr);
    let body =
        json!({"model": "gpt-4", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 500});
    let first = caller.post("/v1/chat/completions", &body).await;
    assert_eq!(first.status, 200, "{}", first.text);
    assert_eq!(first.json()["usage"]["completion_tokens"], 16);
    assert_eq!(first.json()["model"], "gpt-4");
    assert_eq!(
        (first.header("x-ratelimit-limit-requests"), first.header("x-ratelimit-remaining-requests")),
        ("2", "1")
    );
    assert_eq!(first.header("x-ratelimit-remaining-tokens"), "99500", "max_tokens is reserved");
    caller.post("/v1/chat/completions", &body).await;
    let refused = caller.post("/v1/chat/completions", &body).await;
    assert_eq!((refused.status, refused.header("retry-after").is_empty()), (429, false));
    let error = &refused.json()["error"];
    assert_eq!(
        (error["type"].as_str(), error["code"].as_str()),
        (Some("requests"), Some("rate_limit_exceeded"))
    );
    assert!(error["message"].as_str().unwrap().contains("Limit 2, Used 2, Requested 1"), "{error}");
    let totals = caller.get("/mock/totals").await.json();
    assert_eq!((totals["calls"].as_u64(), totals["refused"].as_u64()), (Some(3), Some(1)));
    assert_eq!(totals["output_tokens"], 32);
}

#[tokio::test]
async fn hidden_limits_are_in_no_header() {
    let addr = mock("openai", |options| {
        options.limits = vec!["requests:1/day".parse().unwrap()];
        options.is_hidden = true;
    })
    .await;
    let caller = Caller::new(addr);
    for status in [200, 429] {
        let reply = caller.post("/v1/responses", &json!({"model": "m", "input": "x"})).await;
        assert_eq!(reply.status, status);
        let names = reply
            .headers
            .keys()
            .filter(|name| name.as_str().contains("rate") || name.as_str().contains("retry"));
        assert_eq!(names.count(), 0, "{:?}", reply.headers);
    }
}

#[tokio::test]
async fn streams_report_usage_as_their_provider_does() {
    let openai = Caller::new(mock("openai", |_| {}).await);
    let chat = json!({"model": "m", "stream": true, "messages": []});
    let plain = openai.post("/v1/chat/completions", &chat).await;
    assert_eq!(plain.header("content-type"), "text/event-stream");
    assert!(plain.text.ends_with("data: [DONE]\n\n") && !plain.text.contains("usage"), "{}", plain.text);
    let with_usage = json!({"model": "m", "stream": true, "stream_options": {"include_usage": true}});
    let with_usage = openai.post("/v1/chat/completions", &with_usage).await.text;
    assert!(with_usage.contains("\"usage\":null") && with_usage.contains("\"completion_tokens\":16"));
    let responses = openai.post("/v1/responses", &json!({"model": "m", "stream": true})).await.text;
    assert!(responses.contains("event: response.completed") && !responses.contains("[DONE]"), "{responses}");

    let anthropic = Caller::new(mock("anthropic", |_| {}).await);
    let messages =
        anthropic.post("/v1/messages", &json!({"model": "c", "stream": true, "max_tokens": 9})).await.text;
    assert!(
        messages.starts_with("event: message_start") && messages.contains("\"usage\":{\"output_tokens\":9}"),
        "{messages}"
    );

    let gemini = Caller::new(mock("gemini", |_| {}).await);
    let path = "/v1beta/models/gemini-9:streamGenerateContent?alt=sse";
    let reply = gemini.post(path, &json!({"contents": []})).await.text;
    assert!(
        reply.contains("\"candidatesTokenCount\":16") && reply.contains("\"modelVersion\":\"gemini-9\""),
        "{reply}"
    );
}

#[tokio::test]
async fn every_nth_call_fails_as_requested() {
    let addr = mock("anthropic", |options| {
        options.overload_every = NonZero::new(2);
        options.error_every = NonZero::new(2);
        options.cut_every = NonZero::new(3);
    })
    .await;
    let caller = Caller::new(addr);
    let body = json!({"model": "c", "stream": true, "max_tokens": 4});
    let mut replies = Vec::new();
    for _ in 0..5 {
        replies.push(caller.post("/v1/messages", &body).await);
    }
    assert_eq!(replies.iter().map(|reply| reply.status).collect::<Vec<_>>(), [200, 529, 200, 529, 200]);
    assert!(replies[1].text.contains("overloaded_error"));
    assert!(replies[2].text.contains("event: error"), "an error within a stream: {}", replies[2].text);
    assert!(replies[4].text.ends_with("<broken>"), "{}", replies[4].text);
}

#[tokio::test]
async fn mock_follows_a_scenario() {
    let text = "[[scenario]]\nname = 'x'\nseconds = 60\nupstream = { window = { length = 86400 } }\n\
                capacity = [[0, 0.0000231481482]]\nlatency = 0.001\nheaders = 'right'\nretry-after = 'seconds'";
    let scenario = Scenario::parse(text).unwrap().remove(0);
    let addr = mock("openai", |options| options.scenario = Some(scenario)).await;
    let caller = Caller::new(addr);
    let body = json!({"model": "m", "input": "x"});
    let mut replies = Vec::new();
    for _ in 0..3 {
        replies.push(caller.post("/v1/responses", &body).await);
    }
    assert_eq!(replies.iter().map(|reply| reply.status).collect::<Vec<_>>(), [200, 200, 429]);
    assert_eq!(replies[0].header("x-ratelimit-remaining-requests"), "1");
    assert!(replies[2].header("retry-after").parse::<u64>().is_ok_and(|seconds| seconds > 80_000));
}

/// It was in flight for good, and took the place of others.
#[tokio::test]
async fn disconnected_caller_leaves_the_mock() {
    let _frozen = Frozen::new();
    let text = "[[scenario]]\nname = 'x'\nseconds = 60\nupstream = 'cap'\ncapacity = [[0, 1]]\nlatency = 5";
    let scenario = Scenario::parse(text).unwrap().remove(0);
    let caller = Caller::new(mock("openai", |options| options.scenario = Some(scenario)).await);
    let body = json!({"model": "m", "input": "x"});
    let call = tokio::spawn({
        let (caller, body) = (caller.clone(), body.clone());
        async move { caller.post("/v1/responses", &body).await }
    });
    let step = Duration::from_millis(10);
    let begun = async || caller.get("/mock/totals").await.json()["calls"] == 1;
    advance_until(step, eventually("a call is in flight", begun)).await;
    call.abort();
    let is_free = async || caller.post("/v1/responses", &body).await.status == 200;
    advance_until(step, eventually("its place is free", is_free)).await;
}

#[tokio::test]
async fn bytes_of_any_size_are_streamed() {
    let caller = Caller::new(mock("generic", |options| options.latency = Duration::ZERO).await);
    assert_eq!(caller.get("/bytes/200001").await.text.len(), 200_001);
    assert_eq!(caller.get("/elsewhere").await.status, 404);
}

/// Bodies had the limit, the usage and the time of a retry.
#[tokio::test]
async fn hidden_limits_are_in_no_body() {
    let cases = [
        ("openai", "/v1/responses", "reached for m in organization org-mock on requests per day (RPD)."),
        ("anthropic", "/v1/messages", "rate limit of requests per day"),
        ("gemini", "/v1beta/models/m:generateContent", "quota of requests per day"),
    ];
    for (profile, path, words) in cases {
        let addr = mock(profile, |options| {
            options.limits = vec!["requests:777/day".parse().unwrap()];
            options.is_hidden = true;
        })
        .await;
        let caller = Caller::new(addr);
        let mut reply = caller.post(path, &json!({"model": "m"})).await;
        while reply.status == 200 {
            reply = caller.post(path, &json!({"model": "m"})).await;
        }
        assert_eq!(reply.status, 429);
        let message = reply.json()["error"]["message"].to_string();
        assert!(message.contains(words), "{message}");
        assert!(!reply.text.contains("777") && !reply.text.contains("RetryInfo"), "{}", reply.text);
        assert!(!reply.text.contains("try again in"), "{}", reply.text);
    }
}

#[tokio::test]
async fn anthropic_mock_reports_rounded_tokens() {
    let limits = ["input_tokens:100k/day", "output_tokens:8k/day"];
    let options = |options: &mut tidegate_proxy::MockOptions| {
        options.limits = limits.map(|text| text.parse().unwrap()).into();
        options.output_tokens = 1_200;
    };
    let caller = Caller::new(mock("anthropic", options).await);
    let body = json!({"model": "c", "max_tokens": 2_000, "messages": []});
    caller.post("/v1/messages", &body).await;
    let reply = caller.post("/v1/messages", &body).await;
    let header = |name: &str| reply.header(&format!("anthropic-ratelimit-{name}")).to_owned();
    assert_eq!(
        (header("input-tokens-remaining"), header("output-tokens-remaining")),
        ("100000".into(), "7000".into())
    );
    assert_eq!(
        (header("tokens-limit"), header("tokens-remaining")),
        ("8000".into(), "7000".into()),
        "the tightest"
    );
}

/// Output that a stream had sent before it was cut was not counted.
#[tokio::test]
async fn anthropic_counts_output_of_cut_streams() {
    let addr = mock("anthropic", |options| {
        options.limits = vec!["output_tokens:100k/day".parse().unwrap()];
        options.output_tokens = 20_000;
        options.cut_every = NonZero::new(1);
    })
    .await;
    let caller = Caller::new(addr);
    let body = json!({"model": "c", "max_tokens": 20_000, "messages": [], "stream": true});
    assert!(caller.post("/v1/messages", &body).await.text.ends_with("<broken>"));
    let reply = caller.post("/v1/messages", &body).await;
    assert_eq!(reply.header("anthropic-ratelimit-output-tokens-remaining"), "90000");
}

/// Of the choices that Azure generates, only `n` were counted.
#[tokio::test]
async fn azure_mock_counts_all_generated_choices() {
    let addr = mock("azure", |options| options.limits = vec!["tokens:100k/day".parse().unwrap()]).await;
    let caller = Caller::new(addr);
    let reply = caller
        .post(
            "/openai/deployments/m/completions",
            &json!({"prompt": "x", "n": 2, "best_of": 5, "max_tokens": 1_000}),
        )
        .await;
    assert!(reply.header("x-ratelimit-remaining-tokens").starts_with("94"), "{:?}", reply.headers);
}

#[tokio::test]
async fn responses_mock_has_its_own_error_event() {
    let caller = Caller::new(mock("openai", |options| options.error_every = NonZero::new(1)).await);
    let text = caller.post("/v1/responses", &json!({"model": "m", "stream": true})).await.text;
    let last = text.trim_end().rsplit("data: ").next().unwrap();
    assert!(
        last.starts_with('{') && last.contains("\"type\":\"error\"") && !last.contains("\"error\":"),
        "{last}"
    );
}
