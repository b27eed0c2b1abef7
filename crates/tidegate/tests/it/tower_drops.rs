//! No permit leaks: a hundred thousand services, calls and bodies are dropped at random, in whatever state they are, and
//! after every step what is held is what is out.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{Request, Response};
use http_body::Body as _;
use tidegate::tower::{CallError, HeldBody, ThrottleLayer, Throttled};
use tidegate::{Circuit, Outcome, Random, Rate, Slots, Throttle};
use tower::{Layer as _, Service};

use crate::kit::millis;
use crate::kit::tower::{Pieces, get};

const DROPS: u32 = 100_000;
const SLOTS: u32 = 4;
const SERVICES_MAX: usize = 24;

/// A client that answers when it likes, and counts what is under way.
#[derive(Clone)]
struct Client {
    random: Rc<Cell<u64>>,
    under_way: Rc<Cell<u32>>,
    called: Rc<Cell<u64>>,
}

impl Service<Request<()>> for Client {
    type Response = Response<Pieces>;
    type Error = Infallible;
    type Future = Call;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        if draw(&self.random, 4) == 0 { Poll::Pending } else { Poll::Ready(Ok(())) }
    }

    fn call(&mut self, _: Request<()>) -> Call {
        self.called.set(self.called.get() + 1);
        self.under_way.set(self.under_way.get() + 1);
        Call(self.clone())
    }
}

struct Call(Client);

impl Future for Call {
    type Output = Result<Response<Pieces>, Infallible>;

    fn poll(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Self::Output> {
        let random = &self.0.random;
        if draw(random, 2) == 0 {
            return Poll::Pending;
        }
        let pieces = usize::try_from(draw(random, 3)).expect("a few");
        let body = if draw(random, 8) == 0 { Pieces::broken_after(pieces) } else { Pieces::of(pieces) };
        let status = if draw(random, 10) == 0 { 503 } else { 200 };
        Poll::Ready(Ok(Response::builder().status(status).body(body).expect("a status")))
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.0.under_way.set(self.0.under_way.get() - 1);
    }
}

fn draw(random: &Cell<u64>, below: u64) -> u64 {
    let mut state = random.get().wrapping_add(0x9E37_79B9_7F4A_7C15);
    random.set(state);
    state = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    state = (state ^ (state >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    (state ^ (state >> 31)) % below
}

type Answering = Pin<Box<dyn Future<Output = Result<Response<HeldBody<Pieces>>, CallError>>>>;

/// One of everything that may be dropped.
enum Thing {
    Service(Throttled<Client>),
    Ready(Throttled<Client>),
    Call(Answering),
    Body(HeldBody<Pieces>),
}

/// One step of a thing: what it becomes.
fn step(thing: Thing, context: &mut Context<'_>) -> Vec<Thing> {
    match thing {
        Thing::Service(mut service) => match service.poll_ready(context) {
            Poll::Ready(Ok(())) => vec![Thing::Ready(service)],
            _ => vec![Thing::Service(service)],
        },
        Thing::Ready(mut service) => {
            let call = service.call(get());
            vec![Thing::Service(service), Thing::Call(Box::pin(call))]
        }
        Thing::Call(mut call) => match call.as_mut().poll(context) {
            Poll::Ready(Ok(response)) => vec![Thing::Body(response.into_body())],
            Poll::Ready(Err(_)) => Vec::new(),
            Poll::Pending => vec![Thing::Call(call)],
        },
        Thing::Body(mut body) => match Pin::new(&mut body).poll_frame(context) {
            Poll::Ready(Some(Ok(_))) => vec![Thing::Body(body)],
            _ => Vec::new(),
        },
    }
}

async fn wander(start: u64, throttle: Throttle, drops: u32) {
    let random = Rc::new(Cell::new(start));
    let client = Client { random: Rc::clone(&random), under_way: Rc::default(), called: Rc::default() };
    let (under_way, called) = (Rc::clone(&client.under_way), Rc::clone(&client.called));
    let service = ThrottleLayer::new(throttle.clone()).layer(client);
    let mut context = Context::from_waker(Waker::noop());
    let (mut things, mut dropped) = (vec![Thing::Service(service.clone())], 0);
    while dropped < drops {
        let index = usize::try_from(draw(&random, things.len().max(1) as u64)).expect("small");
        match draw(&random, 10) {
            0..=5 if !things.is_empty() => {
                let thing = things.swap_remove(index);
                things.extend(step(thing, &mut context));
            }
            6 | 7 if things.len() > 1 => {
                drop(things.swap_remove(index));
                dropped += 1;
            }
            8 => tokio::time::advance(Duration::from_micros(draw(&random, 3_000))).await,
            _ if things.len() < SERVICES_MAX => {
                // Of a ready service too: a clone has nothing of its turn.
                things.push(Thing::Service(match things.get(index) {
                    Some(Thing::Service(one) | Thing::Ready(one)) => one.clone(),
                    _ => service.clone(),
                }));
            }
            _ => {}
        }
        let seen = throttle.snapshot();
        let bodies =
            things.iter().filter(|thing| matches!(thing, Thing::Body(body) if body.is_held())).count();
        let bodies = u32::try_from(bodies).expect("a few");
        let ready =
            things.iter().filter(|thing| matches!(thing, Thing::Ready(_) | Thing::Service(_))).count();
        let least = under_way.get() + bodies;
        let most = least + u32::try_from(ready).expect("a few");
        assert!(seen.in_flight <= SLOTS, "seed {start}: {} in flight", seen.in_flight);
        assert!(
            (least..=most).contains(&seen.in_flight),
            "seed {start}: {} in flight, and {least}..={most} out",
            seen.in_flight
        );
    }
    things.clear();
    drop(service);
    let seen = throttle.snapshot();
    assert_eq!((seen.in_flight, seen.waiting), (0, 0), "seed {start}");
    assert_eq!(seen.admitted, called.get(), "seed {start}: what never went out was given back whole");
}

#[tokio::test(start_paused = true)]
async fn no_permit_leaks_over_a_hundred_thousand_random_drops() {
    let slots = || Throttle::builder().slots(Slots::fixed(SLOTS)).random(Random::fixed(0.5));
    let circuit = Circuit::after_failures(4).open_for(millis(20)).probes(2);
    let throttles = [
        slots().build(),
        slots().rate(Rate::per_second(2_000).burst(8)).build(),
        slots().circuit(circuit).build(),
        Throttle::host().slots(Slots::fixed(SLOTS)).build(),
    ];
    for (seed, throttle) in (1..).zip(throttles) {
        wander(seed, throttle.expect("within the bounds"), DROPS / 4).await;
    }
}

#[tokio::test(start_paused = true)]
async fn nothing_leaks_where_limits_change_and_the_end_comes_in_between() {
    for seed in 0..20 {
        let throttle = Throttle::builder().slots(Slots::fixed(SLOTS)).build().expect("within the bounds");
        let changer = throttle.clone();
        let change = async move {
            for slots in [1, 2, 3, 4, 1, 4] {
                tokio::time::sleep(millis(20)).await;
                changer.retune(|limits| limits.slots = Some(Slots::fixed(slots))).expect("within the bounds");
                changer.record(Outcome::overload().retry_after(millis(5)));
            }
            changer.close();
        };
        tokio::join!(change, wander(100 + seed, throttle.clone(), 500));
    }
}
