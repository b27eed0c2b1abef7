//! What is booked of calls that are not JSON with a model in the usual place: forms, files, and Gemini's paths in
//! OpenAI's form.

use tidegate_core::limit::token::TokenScope;
use tidegate_proxy::{Proxy, ProxyBounds};

use crate::kit::client::{Caller, eventually, mock, proxy, read, start, upstream};
use crate::kit::codec::json;
use crate::kit::raw;
use crate::kit::tenants::Store;

const FORM: &str = "multipart/form-data; boundary=b-1";

/// A form with an audio file of this size, and these models.
fn form(models: &[&str], size: usize) -> String {
    let model =
        |model: &&str| format!("--b-1\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\n{model}\r\n");
    let models: String = models.iter().map(model).collect();
    let file = "--b-1\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.mp3\"\r\n\r\n";
    format!("{models}{file}{}\r\n--b-1--\r\n", "\u{1}".repeat(size))
}

#[tokio::test]
async fn forms_count_what_their_responses_report() {
    let with_usage =
        "{\"text\":\"hi\",\"usage\":{\"type\":\"tokens\",\"input_tokens\":14,\"output_tokens\":5}}";
    // The models of the form, the response, and what is booked: resource, input, whether it is an estimate.
    let cases = [
        (&["gpt-4o-transcribe"][..], with_usage, ("gpt-4o-transcribe", 14, 0)),
        (&["whisper-1"], "{\"text\":\"hi\"}", ("whisper-1", 21, 1)),
        (&[], "{\"id\":\"file-1\"}", ("openai", 0, 0)),
        (&[], with_usage, ("openai", 14, 0)),
    ];
    for (models, body, (resource, input, estimated)) in cases {
        let store = Store::new(&[]).await;
        let token = store.token("acme", TokenScope::Acquire).await;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
        let reply = format!("{head}: {}\r\n\r\n{body}", body.len());
        let (addr, _seen) = raw::upstream(reply.leak()).await;
        let through = start(proxy(&[upstream("openai", addr).key("sk-real")], Some(store.tenants()))).await;
        let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
        let caller = caller.with("content-type", FORM);
        let response = caller.begin("POST", "/openai/v1/audio/transcriptions", form(models, 30_000)).await;
        assert_eq!(read(response).await.status, 200);
        let used = async |limit: &str| store.used("acme", resource, limit).await;
        eventually("the call is booked", async || used("requests").await == 1).await;
        assert_eq!(
            (used("input_tokens").await, used("estimated").await),
            (input, estimated),
            "{models:?} {body}"
        );
    }
}

#[tokio::test]
async fn forms_that_hide_their_model_are_refused() {
    let store = Store::new(&[]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let upstream = upstream("openai", mock("openai", |_| {}).await).key("sk-real");
    let through = start(proxy(&[upstream], Some(store.tenants()))).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let caller = caller.with("content-type", FORM);
    for body in [form(&["a", "b"], 9), "{\"model\":\"gpt-4\",\"input\":\"hello\"}".to_owned()] {
        let status = caller.begin("POST", "/openai/v1/responses", body.clone()).await.status();
        assert_eq!(status, 400, "{body}");
    }
}

/// Only the first MiB was searched: a form whose file came first was booked to no model.
#[tokio::test]
async fn model_behind_a_large_file_is_found() {
    let store = Store::new(&[]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let mut bounds = ProxyBounds::default();
    (bounds.replay_max, bounds.search_max) = (10_000, 100_000);
    let upstream = upstream("openai", mock("openai", |_| {}).await).key("sk-real");
    let builder = Proxy::builder().upstream(upstream).unwrap().tenants(store.tenants()).bounds(bounds);
    let through = start(builder.build().unwrap()).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let caller = caller.with("content-type", FORM);
    let post = async |path: &str, body: String| read(caller.begin("POST", path, body).await).await;
    let (model, file) = (form(&["whisper-1"], 0), form(&[], 40_000));
    let file_first = format!("{}{model}", file.strip_suffix("--b-1--\r\n").unwrap());
    let reply = post("/openai/v1/responses", file_first).await;
    assert_eq!(reply.status, 200, "{}", reply.text);
    eventually("it is booked to its model", async || store.used("acme", "whisper-1", "requests").await == 1)
        .await;
    let large = post("/openai/v1/responses", form(&[], 400_000)).await;
    assert_eq!(large.status, 400, "it could hide its model: {}", large.text);
    assert!(large.text.contains("must begin with its model"), "{}", large.text);
    let upload = post("/openai/v1/files", form(&[], 400_000)).await;
    assert_ne!(upload.status, 400, "files are for no model: {}", upload.text);
    let long =
        caller.clone().with("content-type", &format!("multipart/form-data; boundary={}", "-".repeat(71)));
    assert_eq!(long.begin("POST", "/openai/v1/responses", "x").await.status(), 400);
}

#[tokio::test]
async fn gemini_paths_in_the_form_of_openai_are_counted() {
    let store = Store::new(&["tokens:1M/day"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let upstream = upstream("gemini", mock("gemini", |_| {}).await).key("sk-real");
    let through = start(proxy(&[upstream], Some(store.tenants()))).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let path = "/gemini/v1beta/openai/chat/completions";
    for (calls, is_stream) in (1..).zip([false, true]) {
        let body = json!({"model": "gemini-9", "messages": [], "stream": is_stream});
        let reply = caller.post(path, &body).await;
        assert_eq!((reply.status, reply.text.contains("usage")), (200, !is_stream), "{}", reply.text);
        let used = async |limit: &str| store.used("acme", "gemini-9", limit).await;
        eventually("the call is booked", async || used("requests").await == calls).await;
        assert_eq!((used("output_tokens").await, used("estimated").await), (16 * calls, 0));
        assert!(used("input_tokens").await >= 10 * calls);
    }
}

/// A stored prompt, a thread or a batch names no model, and some of them use tokens: they were booked as none.
#[tokio::test]
async fn calls_without_a_model_count_reported_usage() {
    let usage = "{\"usage\":{\"input_tokens\":14,\"output_tokens\":5}}";
    let broken = "{\"usage\":";
    // The response, whether it breaks off, and what is booked: input, whether it is an estimate.
    for (body, missing, (input, estimated)) in [(usage, 0, (14, 0)), ("{}", 0, (0, 0)), (broken, 9, (9, 1))] {
        let store = Store::new(&["tokens:300/day"]).await;
        let token = store.token("acme", TokenScope::Acquire).await;
        let head = "HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length";
        let reply = format!("{head}: {}\r\nconnection: close\r\n\r\n{body}", body.len() + missing);
        let addr = raw::closing_upstream(reply.leak()).await;
        let through = start(proxy(&[upstream("openai", addr).key("sk-real")], Some(store.tenants()))).await;
        let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
        let path = "/openai/v1/responses";
        caller.post(path, &json!({"prompt": {"id": "pmpt_123456"}})).await;
        let used = async |limit: &str| store.used("acme", "openai", limit).await;
        eventually("the call is booked", async || used("requests").await == 1).await;
        assert_eq!((used("input_tokens").await, used("estimated").await), (input, estimated), "{body}");
        let large = caller.post(path, &json!({"prompt": {"id": "p", "text": "x ".repeat(600)}})).await;
        assert_eq!(large.status, 429, "an estimate is reserved: {}", large.text);
    }
}

/// Files may be large, and are for no model.
#[tokio::test]
async fn large_uploads_pass_without_a_model() {
    let store = Store::new(&["tokens:1M/day"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let upstream = upstream("gemini", mock("gemini", |_| {}).await).key("sk-real");
    let through = start(proxy(&[upstream], Some(store.tenants()))).await;
    let caller = Caller::new(through).with("authorization", &format!("Bearer {token}"));
    let status = async |path: &str| caller.begin("POST", path, "x".repeat(9 << 17)).await.status();
    assert_eq!(status("/gemini/upload/v1beta/files").await, 200);
    assert_eq!(status("/gemini/v1beta/openai/chat/completions").await, 400, "it could hide its model");
    assert_eq!(store.available("acme", "gemini", "tokens").await, 1_000_000);
}
