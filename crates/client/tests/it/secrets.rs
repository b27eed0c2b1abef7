//! Tests that the token is sent as a header, and hidden in errors and debug output.

use tidegate_client::*;

use crate::kit::upstream::{Reply, Upstream, cost, done, granted, problem, request};

const TOKEN: &str = "tg_ci_0123456789";

/// Asserts that neither an error nor its sources contain the token.
fn assert_hides_token(error: &ClientError) {
    let first: &(dyn std::error::Error + 'static) = error;
    let chain = std::iter::successors(Some(first), |error| error.source());
    let shown: Vec<_> = chain.map(|error| format!("{error} {error:?}")).collect();
    let shown = shown.join(" ");
    assert!(!shown.contains("0123456789"), "{shown}");
    // The lease name is a credential too.
    assert!(!shown.contains(&"7".repeat(64)), "{shown}");
}

#[tokio::test]
async fn token_is_hidden_in_errors_that_echo_it() {
    let echo = |status: u16| {
        let detail = format!("`Bearer {TOKEN}` is no token");
        let problem = Problem::new(status, "bad-token", "t", detail);
        Reply::Respond(status, "", serde_json::to_string(&problem).expect("a body"))
    };
    let text = |status: u16, text: String| Reply::Respond(status, "", text);
    let page = format!("{{\"items\": [], \"next\": 5, \"{TOKEN}\": 1}}");
    let table = [
        echo(400),
        echo(401),
        echo(403),
        echo(404),
        echo(410),
        echo(429),
        echo(500),
        text(200, page),
        text(200, format!("{{\"{TOKEN}\": 1}}")),
        text(200, TOKEN.to_owned()),
        text(418, TOKEN.to_owned()),
        text(502, TOKEN.to_owned()),
        Reply::Bytes(format!("HTTP/1.1 {TOKEN}").into_bytes()),
        Reply::Close,
    ];
    for reply in table {
        let upstream = Upstream::new(None, std::iter::repeat_n(reply.clone(), 3)).await;
        let client = upstream.builder().build().unwrap();
        assert_hides_token(&client.entities(&PageQuery::default()).await.unwrap_err());
        let arrived = upstream.requests();
        assert!(arrived[0].head.contains(&format!("authorization: Bearer {TOKEN}")), "{arrived:?}");
        assert!(arrived[0].head.contains("user-agent: tidegate-client/"), "{arrived:?}");
        assert!(!arrived[0].line.contains(TOKEN));
    }
}

#[tokio::test]
async fn debug_output_hides_token_and_lease_proof() {
    let upstream = Upstream::new(None, [granted(), problem(500, "internal", "")]).await;
    let builder = upstream.builder().retry(Retry::attempts(1));
    let client = builder.clone().build().unwrap();
    let lease = client.acquire(&request(&[("tpm", 1)])).await.unwrap();
    assert_hides_token(&lease.extend(cost(&[("tpm", 1)])).await.unwrap_err());
    let pages = client.all_entities(PageQuery::default());
    let blocking = std::thread::spawn({
        let builder = builder.clone();
        move || format!("{:?}", blocking::Client::new(builder).unwrap())
    });
    let shown = format!("{builder:?} {client:?} {lease:?} {pages:?} {}", blocking.join().unwrap());
    assert!(!shown.contains("0123456789") && !shown.contains(&"7".repeat(33)), "{shown}");
    assert!(shown.contains("token: Some(…)"), "{shown}");
    upstream.then([done()]);
}

#[tokio::test]
async fn redirects_are_not_followed_with_token() {
    let elsewhere = Upstream::new(None, []).await;
    let location: &'static str = format!("location: http://{}/v1/entities\r\n", elsewhere.addr).leak();
    let upstream = Upstream::new(None, [Reply::Respond(307, location, String::new())]).await;
    let error = upstream.builder().build().unwrap().entities(&PageQuery::default()).await.unwrap_err();
    assert!(matches!(error, ClientError::Garbled { status: 307, .. }), "{error}");
    assert_eq!(elsewhere.count(), 0);
}
