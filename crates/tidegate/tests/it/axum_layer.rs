//! `LimitLayer` in front of an axum router, in virtual time: keys, costs, error responses, headers and
//! cancellation.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use axum::Router;
use axum::body::Body;
use axum::http::{HeaderMap, HeaderName, Request, Response, StatusCode};
use axum::routing::get;
use tidegate::axum::{ErrorDetail, Key, LimitLayer, UnitsUsed};
use tidegate::{EntityId, Limit, LimitError, Limiter, Memory, ResourceName};
use tokio::time::{Instant, advance};
use tower::{Service, ServiceExt as _};

use crate::kit::codec::problem_of;
use crate::kit::limiter::{calm, child, id, level, memory};
use crate::kit::{secs, settle_tasks};

fn resource() -> ResourceName {
    ResourceName::new("api").expect("a name")
}

fn limiter(limits: impl IntoIterator<Item = Limit>) -> Limiter {
    Limiter::builder(Memory::new()).defaults(limits).build().expect("within the bounds")
}

/// Two requests a minute.
fn two() -> Limiter {
    limiter([Limit::per_minute("rpm", 2)])
}

fn header(name: &str) -> HeaderName {
    name.parse().expect("a name")
}

/// A router that returns `hello`, and a counter of the requests it served.
fn hello() -> (Router, Arc<AtomicU64>) {
    let served = Arc::new(AtomicU64::new(0));
    let count = Arc::clone(&served);
    let handler = move || {
        count.fetch_add(1, Ordering::SeqCst);
        async { "hello" }
    };
    (Router::new().route("/", get(handler)), served)
}

fn from(tenant: &str) -> Request<Body> {
    Request::get("/").header("x-tenant", tenant).body(Body::empty()).expect("a request")
}

async fn send<S>(app: &S, request: Request<Body>) -> Response<Body>
where
    S: Service<Request<Body>, Response = Response<Body>, Error = std::convert::Infallible> + Clone,
{
    app.clone().oneshot(request).await.expect("a router does not fail")
}

/// The response carries `Retry-After` and the remaining units of each limit.
#[tokio::test(start_paused = true)]
async fn exhausted_limit_returns_429_with_limit_headers() {
    let (app, served) = hello();
    let app = app.layer(LimitLayer::by_header(two(), resource(), header("x-tenant")));
    for left in [1, 0] {
        let response = send(&app, from("acme")).await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()["ratelimit"], format!("\"rpm\";r={left}"));
        assert_eq!(response.headers()["ratelimit-policy"], "\"rpm\";q=2;w=60");
    }
    let refused = send(&app, from("acme")).await;
    assert_eq!(refused.status(), 429);
    assert_eq!(refused.headers()["retry-after"], "30");
    assert_eq!(refused.headers()["ratelimit"], "\"rpm\";r=0;t=30");
    assert_eq!(refused.headers()["ratelimit-policy"], "\"rpm\";q=2;w=60");
    let problem = problem_of(refused).await;
    assert_eq!(problem["type"], "/problems/limited");
    assert_eq!((&problem["status"], &problem["retry_after"]), (&429.into(), &30.into()));
    assert_eq!(served.load(Ordering::SeqCst), 2, "no refused request reached the service");
    assert_eq!(send(&app, from("birch")).await.status(), 200, "another tenant has its own limit");
    advance(secs(30)).await;
    assert_eq!(send(&app, from("acme")).await.status(), 200);
}

#[tokio::test(start_paused = true)]
async fn concurrent_requests_never_exceed_limit() {
    let (app, served) = hello();
    let app = app.layer(LimitLayer::by_header(
        limiter([Limit::per_hour("rpm", 50)]),
        resource(),
        header("x-tenant"),
    ));
    let tasks: Vec<_> = (0..120)
        .map(|_| {
            tokio::spawn({
                let app = app.clone();
                async move { send(&app, from("acme")).await.status() }
            })
        })
        .collect();
    let mut good = 0;
    for task in tasks {
        good += u32::from(task.await.expect("no panic") == StatusCode::OK);
    }
    assert_eq!((good, served.load(Ordering::SeqCst)), (50, 50));
}

#[tokio::test(start_paused = true)]
async fn key_comes_from_header_token_or_function() {
    let by_token =
        LimitLayer::by_token(two(), resource(), |token: &str| (token == "secret").then(|| id("acme")));
    let (app, _) = hello();
    let app = app.layer(by_token);
    let with = |value: &str| {
        Request::get("/").header("authorization", value).body(Body::empty()).expect("a request")
    };
    for (value, status) in [("Bearer secret", 200), ("bearer  secret", 200), ("Bearer secret", 429)] {
        assert_eq!(send(&app, with(value)).await.status(), status, "{value}");
    }
    for value in ["Bearer other", "Bearer ", "Basic secret", "secret"] {
        let refused = send(&app, with(value)).await;
        assert_eq!(
            (refused.status().as_u16(), &refused.headers()["www-authenticate"]),
            (401, &"Bearer".parse().expect("a value"))
        );
        assert!(!problem_of(refused).await.to_string().contains("secret"));
    }

    let key = |request: &Request<Body>| match request.uri().query() {
        Some("bad") => Key::Invalid("the query is bad".to_owned()),
        query => query.and_then(|query| EntityId::new(query).ok()).into(),
    };
    let (app, served) = hello();
    let app = app.layer(LimitLayer::by_key(two(), resource(), key));
    let to = |address: &str| Request::get(address).body(Body::empty()).expect("a request");
    for (address, status) in [("/?acme", 200), ("/?acme", 200), ("/?acme", 429), ("/", 400), ("/?bad", 400)] {
        assert_eq!(send(&app, to(address)).await.status(), status, "{address}");
    }
    assert_eq!(served.load(Ordering::SeqCst), 2);
}

#[tokio::test(start_paused = true)]
async fn anonymous_requests_are_refused_or_share_a_limit() {
    let layer = LimitLayer::by_header(two(), resource(), header("x-tenant"));
    let anonymous = || Request::get("/").body(Body::empty()).expect("a request");
    let (app, served) = hello();
    let strict = app.clone().layer(layer.clone());
    let problem = problem_of(send(&strict, anonymous()).await).await;
    assert_eq!((&problem["type"], &problem["status"]), (&"/problems/no-key".into(), &400.into()));
    let problem = problem_of(send(&strict, from("a#b")).await).await;
    assert_eq!(problem["type"], "/problems/invalid-key");
    assert_eq!(served.load(Ordering::SeqCst), 0);
    let lenient = app.layer(layer.fallback(id("anonymous")));
    for status in [200, 200, 429] {
        assert_eq!(send(&lenient, anonymous()).await.status(), status);
    }
}

#[tokio::test(start_paused = true)]
async fn cost_function_sets_units_and_zero_skips_draw() {
    let limiter = limiter([Limit::per_minute("rpm", 10), Limit::per_minute("tpm", 100)]);
    let price = |request: &Request<Body>| match request.uri().path() {
        "/health" => Vec::new(),
        _ => vec![("rpm", 1), ("tpm", 60)],
    };
    let (app, _) = hello();
    let app = app.route("/health", get(|| async { "fine" }));
    let app = app.layer(LimitLayer::by_header(limiter.clone(), resource(), header("x-tenant")).cost(price));
    let response = send(&app, from("acme")).await;
    assert_eq!(response.headers()["ratelimit"], "\"rpm\";r=9, \"tpm\";r=40");
    let refused = send(&app, from("acme")).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["retry-after"]),
        (429, &"12".parse().expect("a value"))
    );
    // All or nothing: the refused request consumed no `rpm`.
    assert_eq!(refused.headers()["ratelimit"], "\"rpm\";r=9, \"tpm\";r=40;t=12");
    let free = Request::get("/health").body(Body::empty()).expect("a request");
    let response = send(&app, free).await;
    assert_eq!((response.status().as_u16(), response.headers().get("ratelimit")), (200, None));
    let never = |_: &Request<Body>| vec![("tpm", 101)];
    let (app, _) = hello();
    let app = app.layer(LimitLayer::by_header(limiter, resource(), header("x-tenant")).cost(never));
    let refused = send(&app, from("acme")).await;
    assert_eq!((refused.status().as_u16(), refused.headers().get("retry-after")), (422, None));
}

#[tokio::test(start_paused = true)]
async fn response_reports_used_units_when_configured() {
    let store = calm();
    let limiter = crate::kit::limiter::over(&store)
        .defaults([Limit::per_minute("tpm", 100)])
        .build()
        .expect("in bounds");
    let by_answer = |status: StatusCode, headers: &HeaderMap| match headers.get("x-used") {
        _ if status.is_server_error() => UnitsUsed::Nothing,
        Some(used) => UnitsUsed::Units(vec![(
            "tpm",
            used.to_str().ok().and_then(|used| used.parse().ok()).unwrap_or(0),
        )]),
        None => UnitsUsed::All,
    };
    let layer = LimitLayer::by_header(limiter.clone(), resource(), header("x-tenant"))
        .cost(|_: &Request<Body>| vec![("tpm", 30)])
        .settle(by_answer);
    let app = Router::new()
        .route("/fails", get(|| async { StatusCode::BAD_GATEWAY }))
        .route("/uses", get(|| async { ([("x-used", "7")], "some") }))
        .route("/", get(|| async { "all" }))
        .layer(layer);
    let to =
        |path: &str| Request::get(path).header("x-tenant", "acme").body(Body::empty()).expect("a request");
    for (path, left) in [("/fails", 100), ("/uses", 93), ("/", 63)] {
        let response = send(&app, to(path)).await;
        // The headers show the balance at the time of the draw.
        assert!(response.headers().contains_key("ratelimit"), "{path}");
        let balance = level(memory(&store), ("acme", "api"), "tpm").await;
        assert_eq!(balance.map(|(available, _)| available), Some(left), "{path}");
    }
    assert_eq!(limiter.stats().open_leases, 0);
}

#[tokio::test(start_paused = true)]
async fn disconnected_client_pays_for_its_draw() {
    for has_settle in [false, true] {
        let store = calm();
        let limiter = crate::kit::limiter::over(&store)
            .defaults([Limit::per_minute("rpm", 10)])
            .build()
            .expect("in bounds");
        let mut layer = LimitLayer::by_header(limiter.clone(), resource(), header("x-tenant"));
        if has_settle {
            layer = layer.settle(|_, _| UnitsUsed::Nothing);
        }
        let app = Router::new().route("/", get(std::future::pending::<&str>)).layer(layer);
        let call = tokio::spawn(async move { send(&app, from("acme")).await });
        settle_tasks().await;
        call.abort();
        call.await.expect_err("it was aborted");
        settle_tasks().await;
        let balance = level(memory(&store), ("acme", "api"), "rpm").await;
        assert_eq!((balance.map(|(available, _)| available), limiter.stats().open_leases), (Some(9), 0));
    }
}

#[tokio::test(start_paused = true)]
async fn refusal_does_not_disclose_the_limit_owner() {
    let limiter = limiter([Limit::per_minute("rpm", 1)]);
    child(&limiter, "acme", "the-house").await;
    let layer = LimitLayer::by_header(limiter, resource(), header("x-tenant"));
    let (app, _) = hello();
    let (little, everything) =
        (app.clone().layer(layer.clone()), app.layer(layer.error_detail(ErrorDetail::Full)));
    assert_eq!(send(&little, from("acme")).await.status(), 200);
    let text = problem_of(send(&little, from("acme")).await).await.to_string();
    assert!(!text.contains("acme") && !text.contains("house"), "{text}");
    let problem = problem_of(send(&everything, from("acme")).await).await;
    let whose: Vec<_> =
        problem["limits"].as_array().into_iter().flatten().map(|limit| &limit["entity"]).collect();
    assert_eq!(whose, ["acme", "the-house"]);
}

#[tokio::test(start_paused = true)]
async fn internal_errors_return_5xx_and_reach_on_refused() {
    let errors: Arc<Mutex<Vec<String>>> = Arc::default();
    let recorder = Arc::clone(&errors);
    let layer = LimitLayer::by_header(two(), resource(), header("x-tenant"))
        .cost(|_: &Request<Body>| vec![("typo", 1)])
        .on_refused(move |error: &LimitError| recorder.lock().expect("no panic").push(error.to_string()));
    let (app, served) = hello();
    let app = app.layer(layer);
    let problem = problem_of(send(&app, from("acme")).await).await;
    assert_eq!((&problem["type"], &problem["status"]), (&"/problems/internal".into(), &500.into()));
    let errors = errors.lock().expect("no panic").clone();
    assert!(errors.len() == 1 && errors[0].contains("typo"), "{errors:?}");
    assert_eq!(served.load(Ordering::SeqCst), 0);

    let limiter = two();
    let (app, _) = hello();
    let app = app.layer(LimitLayer::by_header(limiter.clone(), resource(), header("x-tenant")));
    limiter.close();
    let refused = send(&app, from("acme")).await;
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["retry-after"]),
        (503, &"1".parse().expect("a value"))
    );
}

#[tokio::test(start_paused = true)]
async fn requests_wait_for_units_in_fifo_order() {
    let layer = LimitLayer::by_header(two(), resource(), header("x-tenant")).within(secs(40));
    let (app, _) = hello();
    let app = app.layer(layer);
    let began = Instant::now();
    for waits in [0, 0, 30] {
        assert_eq!(send(&app, from("acme")).await.status(), 200);
        assert_eq!(began.elapsed().as_secs(), waits);
    }
    let calls = [0, 1].map(|_| {
        tokio::spawn({
            let app = app.clone();
            async move { send(&app, from("acme")).await.status() }
        })
    });
    let statuses = [calls[0].is_finished(), calls[1].is_finished()];
    assert_eq!(statuses, [false, false]);
    let mut statuses = Vec::new();
    for call in calls {
        statuses.push(call.await.expect("no panic").as_u16());
    }
    // One unit refills every 30 s; the last request would have to wait 60.
    assert_eq!(statuses, [200, 429]);
}
