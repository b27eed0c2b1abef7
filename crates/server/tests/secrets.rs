//! Tests that logs, metrics and responses contain no secrets, with the log at its most detailed level.
//!
//! A separate program, because it sets the global tracing subscriber.

#[path = "it/kit/mod.rs"]
mod kit;

use std::io;
use std::sync::{Arc, Mutex};

use kit::Kit;
use kit::codec::json;

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
async fn no_secret_is_in_logs_metrics_or_errors() {
    let log = Log::default();
    let writer = log.clone();
    let lines =
        tracing_subscriber::fmt().with_max_level(tracing::Level::TRACE).with_writer(move || writer.clone());
    tracing::subscriber::set_global_default(lines.finish()).expect("it is the first");
    let kit = Kit::new().await;
    let secret = kit.token.rsplit('_').next().unwrap().to_owned();
    let ask = json!({"entity": "acme", "resource": "gpt-4", "cost": {"tpm": 100}});
    let granted = kit.post("/v1/acquire", ask).await;
    let lease = granted.body["lease"].as_str().unwrap().to_owned();
    let mut texts = vec![
        kit.get(&format!("/v1/leases/{lease}")).await.text,
        kit.post(&format!("/v1/leases/{lease}/settle"), json!({"step": 1, "actual": {"usd": 1}})).await.text,
        kit.ask_as(&kit.other, "GET", &format!("/v1/leases/{lease}"), None).await.text,
        kit.get(&format!("/v1/nothing/{}", "x".repeat(300))).await.text,
        kit.ask_as(&format!("{}0", kit.token), "GET", "/v1/tokens", None).await.text,
        kit.get("/v1/tokens").await.text,
        kit.get("/v1/audit").await.text,
        kit.get("/metrics").await.text,
        format!("{:?}", kit.state),
    ];
    assert!(texts[7].contains("tidegate_granted_total 1"), "{}", texts[7]);
    assert!(!texts[7].contains("acme"), "metrics name no entity");
    let logged = String::from_utf8_lossy(&log.0.lock().unwrap()).into_owned();
    assert!(logged.contains("/v1/leases/{lease}/settle"), "requests are logged by their route: {logged}");
    texts.push(logged);
    for text in texts {
        assert!(!text.contains(&secret), "the token's secret: {text}");
        assert!(!text.contains(&lease[32..]), "the lease's proof: {text}");
    }
}
