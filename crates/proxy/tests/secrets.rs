//! No key and no prompt is in logs, metrics, errors or the store, with the log at its most detailed level.
//!
//! A separate program, because it sets the global tracing subscriber.

#[path = "it/kit/mod.rs"]
mod kit;

use std::io;
use std::num::NonZero;
use std::sync::{Arc, Mutex};

use tidegate::store::AuditQuery;
use tidegate::{Paging, Stamp, Window};
use tidegate_core::limit::token::TokenScope;
use tokio::net::TcpListener;

use kit::client::{Caller, eventually, mock, proxy, start, upstream};
use kit::codec::json;
use kit::raw;
use kit::tenants::Store;

/// A caller's own key, the key that the proxy keeps, a prompt, and a response.
const SECRETS: [&str; 4] = ["sk-callers-own", "sk-kept-here", "a-private-prompt", "a-private-response"];

/// The captured log.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[tokio::test]
async fn no_key_and_no_prompt_is_seen() {
    let [own, kept, prompt, answer] = SECRETS;
    let log = Log::default();
    let writer = log.clone();
    let lines =
        tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(move || writer.clone());
    tracing::subscriber::set_global_default(lines.finish()).expect("it is the first");

    let store = Store::new(&["requests:1/day"]).await;
    let token = store.token("acme", TokenScope::Acquire).await;
    let secret = token.rsplit('_').next().expect("a secret").to_owned();
    let closed = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap();
    let garbage = format!("HTTP/1.1 200 {answer}\r\ncontent-length: {answer}\r\n\r\n{answer}");
    let body = format!("{{\"error\": {{\"message\": \"{answer} on tokens per min\"}}}}");
    let refusal = format!("HTTP/1.1 429 Too Many\r\ncontent-length: {}\r\n\r\n{body}", body.len());
    let cutting = mock("openai", |options| options.cut_every = NonZero::new(2)).await;
    let upstreams = [
        upstream("openai", cutting),
        upstream("closed:openai", closed),
        upstream("garbage:openai", raw::upstream(garbage.leak()).await.0),
        upstream("refusing:openai", raw::upstream(refusal.leak()).await.0),
        upstream("gemini", mock("gemini", |_| {}).await),
    ];
    let through = start(proxy(&upstreams.map(|one| one.key(kept)), Some(store.tenants()))).await;
    let mut errors = Vec::new();
    for key in [token.as_str(), own, &format!("{token}x"), "tg_other_unknown"] {
        let caller = Caller::new(through)
            .with("authorization", &format!("Bearer {key}"))
            .with("x-tidegate-within", "0");
        for name in ["openai", "closed", "garbage", "refusing", "unknown"] {
            for is_stream in [false, true] {
                let request = json!({"model": "m", "stream": is_stream, "messages": [{"role": "user", "content": prompt}]});
                let reply = caller.post(&format!("/{name}/v1/chat/completions?user={own}"), &request).await;
                // What the upstream says passes.
                if reply.status >= 400 && name != "refusing" {
                    errors.push(reply.text);
                }
            }
        }
        let path = format!("/gemini/v1beta/models/g:generateContent?key={key}");
        let reply =
            Caller::new(through).post(&path, &json!({"contents": [{"parts": [{"text": prompt}]}]})).await;
        errors.extend((reply.status >= 400).then_some(reply.text));
        errors.push(caller.get("/tidegate/scopes").await.text);
        errors.push(caller.get("/tidegate/metrics").await.text);
    }
    eventually("calls are booked", async || store.used("acme", "m", "requests").await > 0).await;
    assert!(errors.iter().any(|text| text.contains("invalid_api_key")), "{errors:?}");
    assert!(errors.iter().any(|text| text.contains("cannot be reached")), "{errors:?}");
    assert!(errors.iter().any(|text| text.contains("exceeded for acme")), "{errors:?}");

    let range = Stamp::ZERO..Stamp::from_secs(4_000_000_000);
    let paging = Paging::first(1_000).expect("a page");
    let usage = store.limiter.usage_of_entity("acme", Window::Month, range, &paging).await.expect("usage");
    let all = AuditQuery { filed: None, range: Stamp::ZERO..Stamp::MAX };
    let audit = store.limiter.store().audit(&all, &paging).await.expect("the audit log");
    let logged = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(logged.contains("the upstream did not respond"), "it is logged");
    let texts = errors.into_iter().chain([format!("{usage:?}"), format!("{audit:?}"), logged]);
    for text in texts {
        for hidden in SECRETS.iter().copied().chain([secret.as_str()]) {
            let at = text
                .find(hidden)
                .map(|at| text[at.saturating_sub(300)..].chars().take(600).collect::<String>());
            assert_eq!(at, None, "`{hidden}` is seen");
        }
    }
}
