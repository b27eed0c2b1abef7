//! No permit leaks: a hundred thousand services, calls and bodies are dropped in random states, and after
//! every step the permits held match the live objects.

use std::cell::Cell;
use std::convert::Infallible;
use std::future::Future;
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use http::{Request, Response};
use http_body::Body as _;
use tidegate::tower::{CallError, PermitBody, ThrottleLayer, ThrottleService};
use tidegate::{Circuit, Outcome, Random, Rate, Slots, Throttle};
use tower::{Layer as _, Service};

use crate::kit::millis;
use crate::kit::tower::{Pieces, get};

const DROPS: u32 = 100_000;
const SLOTS: u32 = 4;
const SERVICES_MAX: usize = 24;

/// A client that responds after a random number of polls, and counts calls in flight.
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

type ResponseFuture = Pin<Box<dyn Future<Output = Result<Response<PermitBody<Pieces>>, CallError>>>>;

/// An object that holds or may hold a permit.
enum Droppable {
    Service(ThrottleService<Client>),
    Ready(ThrottleService<Client>),
    Call(ResponseFuture),
    Body(PermitBody<Pieces>),
}

/// Advances an object. Returns what it becomes.
fn step(object: Droppable, context: &mut Context<'_>) -> Vec<Droppable> {
    match object {
        Droppable::Service(mut service) => match service.poll_ready(context) {
            Poll::Ready(Ok(())) => vec![Droppable::Ready(service)],
            _ => vec![Droppable::Service(service)],
        },
        Droppable::Ready(mut service) => {
            let call = service.call(get());
            vec![Droppable::Service(service), Droppable::Call(Box::pin(call))]
        }
        Droppable::Call(mut call) => match call.as_mut().poll(context) {
            Poll::Ready(Ok(response)) => vec![Droppable::Body(response.into_body())],
            Poll::Ready(Err(_)) => Vec::new(),
            Poll::Pending => vec![Droppable::Call(call)],
        },
        Droppable::Body(mut body) => match Pin::new(&mut body).poll_frame(context) {
            Poll::Ready(Some(Ok(_))) => vec![Droppable::Body(body)],
            _ => Vec::new(),
        },
    }
}

async fn drop_randomly(start: u64, throttle: Throttle, drops: u32) {
    let random = Rc::new(Cell::new(start));
    let client = Client { random: Rc::clone(&random), under_way: Rc::default(), called: Rc::default() };
    let (under_way, called) = (Rc::clone(&client.under_way), Rc::clone(&client.called));
    let service = ThrottleLayer::new(throttle.clone()).layer(client);
    let mut context = Context::from_waker(Waker::noop());
    let (mut objects, mut dropped) = (vec![Droppable::Service(service.clone())], 0);
    while dropped < drops {
        let index = usize::try_from(draw(&random, objects.len().max(1) as u64)).expect("small");
        match draw(&random, 10) {
            0..=5 if !objects.is_empty() => {
                let object = objects.swap_remove(index);
                objects.extend(step(object, &mut context));
            }
            6 | 7 if objects.len() > 1 => {
                drop(objects.swap_remove(index));
                dropped += 1;
            }
            8 => tokio::time::advance(Duration::from_micros(draw(&random, 3_000))).await,
            _ if objects.len() < SERVICES_MAX => {
                // Clones of a ready service as well: a clone holds no reservation.
                objects.push(Droppable::Service(match objects.get(index) {
                    Some(Droppable::Service(one) | Droppable::Ready(one)) => one.clone(),
                    _ => service.clone(),
                }));
            }
            _ => {}
        }
        let seen = throttle.snapshot();
        let bodies = objects
            .iter()
            .filter(|object| matches!(object, Droppable::Body(body) if body.holds_permit()))
            .count();
        let bodies = u32::try_from(bodies).expect("a few");
        let ready = objects
            .iter()
            .filter(|object| matches!(object, Droppable::Ready(_) | Droppable::Service(_)))
            .count();
        let least = under_way.get() + bodies;
        let most = least + u32::try_from(ready).expect("a few");
        assert!(seen.in_flight <= SLOTS, "seed {start}: {} in flight", seen.in_flight);
        assert!(
            (least..=most).contains(&seen.in_flight),
            "seed {start}: {} in flight, and {least}..={most} out",
            seen.in_flight
        );
    }
    objects.clear();
    drop(service);
    let seen = throttle.snapshot();
    assert_eq!((seen.in_flight, seen.waiting), (0, 0), "seed {start}");
    assert_eq!(seen.admitted, called.get(), "seed {start}: unsent requests were returned in full");
}

#[tokio::test(start_paused = true)]
async fn random_drops_leak_no_permit() {
    let slots = || Throttle::builder().slots(Slots::fixed(SLOTS)).random(Random::fixed(0.5));
    let circuit = Circuit::after_failures(4).open_for(millis(20)).probes(2);
    let throttles = [
        slots().build(),
        slots().rate(Rate::per_second(2_000).burst(8)).build(),
        slots().circuit(circuit).build(),
        Throttle::host().slots(Slots::fixed(SLOTS)).build(),
    ];
    for (seed, throttle) in (1..).zip(throttles) {
        drop_randomly(seed, throttle.expect("within the bounds"), DROPS / 4).await;
    }
}

#[tokio::test(start_paused = true)]
async fn retune_and_close_between_drops_leak_nothing() {
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
        tokio::join!(change, drop_randomly(100 + seed, throttle.clone(), 500));
    }
}
