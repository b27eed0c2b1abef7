//! The layers over services that are not HTTP: a classifier reads the result, and a cost function the request.

use std::convert::Infallible;
use std::future::ready;

use tidegate::tower::{CallError, ThrottleLayer, WaitLayer};
use tidegate::{Budget, Class, Cost, EveryError, Keyed, Outcome, Throttle};
use tower::{Layer as _, Service as _, ServiceExt as _};

use crate::kit::{secs, slots};

/// The request of a model: the prompt, and the tokens that the answer takes.
type Prompt = (&'static str, u64);

/// Answers with the tokens that it used; refuses empty prompts.
async fn answer((prompt, tokens): Prompt) -> Result<u64, &'static str> {
    if prompt.is_empty() { Err("busy") } else { Ok(tokens) }
}

fn class(result: &Result<u64, &'static str>) -> Class {
    match result {
        Ok(tokens) => Class::end(Outcome::success().spent(Cost::from(*tokens))),
        Err(_) => Class::again(Outcome::overload().retry_after(secs(30))),
    }
}

fn budget(tokens: u64) -> Throttle {
    let builder = Throttle::builder().budget(Budget::tokens(tokens, secs(60)));
    builder.build().expect("within the bounds")
}

#[tokio::test(start_paused = true)]
async fn classifier_settles_with_the_tokens_used() {
    let throttle = budget(1_000);
    let layer = ThrottleLayer::new(throttle.clone()).classifier(class);
    let service = layer.cost(|(prompt, _): &Prompt| Cost::from(prompt.len() as u64 * 100));
    let mut service = service.layer(tower::service_fn(answer));
    let call = service.ready().await.unwrap().call(("abc", 40));
    assert_eq!(call.await.unwrap(), 40);
    assert_eq!(throttle.snapshot().tokens_used, 40, "not the 300 that were reserved");
    let error = service.ready().await.unwrap().call(("", 0)).await.unwrap_err();
    assert_eq!(error.to_string(), "busy");
    assert_eq!(throttle.snapshot().outcomes.throttled, 1);
}

#[tokio::test(start_paused = true)]
async fn slot_returns_with_the_response() {
    let throttle = slots(1);
    let layer = ThrottleLayer::new(throttle.clone()).classifier(EveryError);
    let mut service = layer.layer(tower::service_fn(|number: u32| ready(Ok::<_, Infallible>(number))));
    for number in 0..3 {
        let call = service.ready().await.unwrap().call(number);
        assert_eq!(throttle.snapshot().in_flight, 1);
        assert_eq!(call.await.unwrap(), number);
        assert_eq!(throttle.snapshot().in_flight, 0);
    }
    throttle.close();
    let refused = service.ready().await.unwrap().call(9).await.unwrap_err();
    assert!(matches!(refused, CallError::Refused(_)), "{refused}");
}

#[tokio::test(start_paused = true)]
async fn keys_and_costs_come_from_the_request() {
    let keyed: Keyed<&'static str> = Keyed::builder(budget_limits()).build().expect("within the bounds");
    let layer = WaitLayer::by_key(keyed.clone(), |(model, _): &Prompt| *model);
    let layer = layer.cost(|(_, tokens): &Prompt| Cost::from(*tokens)).classifier(class);
    let service = layer.layer(tower::service_fn(answer));
    for (model, tokens) in [("large", 700), ("small", 20), ("large", 100)] {
        assert_eq!(service.clone().oneshot((model, tokens)).await.unwrap(), tokens);
    }
    let used = ["large", "small"].map(|model| keyed.throttle(&model).snapshot().tokens_used);
    assert_eq!(used, [800, 20]);
}

fn budget_limits() -> tidegate::Limits {
    Throttle::builder().budget(Budget::tokens(1_000, secs(60))).limits().expect("within the bounds")
}

#[tokio::test(start_paused = true)]
async fn classifier_that_panics_returns_the_slot() {
    let throttle = slots(1);
    let layer = ThrottleLayer::new(throttle.clone());
    let layer = layer.classifier(|_: &Result<u32, Infallible>| -> Class { panic!("a bug") });
    let mut service = layer.layer(tower::service_fn(|number: u32| ready(Ok::<_, Infallible>(number))));
    let call = service.ready().await.unwrap().call(1);
    let ended = tokio::spawn(call).await;
    assert!(ended.is_err_and(|error| error.is_panic()));
    assert_eq!(throttle.snapshot().in_flight, 0);
}
