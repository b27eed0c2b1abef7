//! A batch of prompts against a flaky model: it slows down and recovers before your eyes, in about ten seconds.
//!
//! `cargo run --example llm_batch`
//!
//! The model is built in. It has two workers, a token quota it does not tell of (429 with a `Retry-After`), and an
//! outage in the middle (503). On a terminal there is a live line; in a file only plain lines.
#![allow(clippy::print_stdout, reason = "an example talks on its terminal")]

use std::collections::VecDeque;
use std::error::Error;
use std::fmt::Display;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tidegate::{
    Backoff, Bar, Brake, Budget, Change, Class, Controller, Cost, Event, Jitter, Notice, Outcome, Pace,
    Random, Retry, RetryBudget, Slots, Snapshot, Throttle, Why,
};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;

const PROMPTS: u64 = 120;
const SECOND: Duration = Duration::from_secs(1);

fn throttle(show: &Show) -> Result<Throttle, Box<dyn Error>> {
    // Short spans, so that all of it can be seen in ten seconds; the defaults are minutes.
    let brake = Brake::default().at(3, SECOND).cooling(SECOND / 4).ceiling_periods(3);
    let backoff = Backoff::exponential(SECOND / 5, SECOND).jitter(Jitter::Range(0.5..=1.0));
    let (teller, watcher) = (show.clone(), show.clone());
    let throttle = Throttle::builder()
        .slots(Slots::adaptive(1..=8))
        .pace(Pace::every(SECOND / 50).slowest(SECOND / 4))
        .budget(Budget::tokens(24_000, SECOND)) // what the price list says
        .controller(Controller::Brake(brake))
        .retry(Retry::attempts(10).backoff(backoff).budget(RetryBudget::unlimited()))
        .total(PROMPTS)
        .on_state_change(move |notice| teller.event(notice))
        .on_progress(move |seen| watcher.milestone(seen))
        .build()?;
    Ok(throttle)
}

/// What an answer means to the throttle.
fn classify(reply: &Result<Reply, Fault>) -> Class {
    match reply {
        Ok(reply) => Class::end(Outcome::success().spent(Cost::request().tokens(reply.tokens))),
        Err(Fault::TooMany { retry_after }) => Class::again(Outcome::overload().retry_after(*retry_after)),
        Err(Fault::Unavailable) => Class::again(Outcome::failure()),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let show = Show::new();
    let throttle = throttle(&show)?;
    let model = Arc::new(Model::new());
    let mut random = Random::seeded(2);

    show.say(&format!("{PROMPTS} prompts, up to 8 slots, 24000 tokens a second"));
    let bar = show.bar.watch(&throttle);
    let watching = tokio::spawn(watch(throttle.clone(), show.clone()));
    let mut tasks = JoinSet::new();
    for _ in 0..PROMPTS {
        let (throttle, model) = (throttle.clone(), Arc::clone(&model));
        let tokens = 300 + random.below(600);
        tasks.spawn(async move {
            // The estimate is a little high: the answer's length is not known before.
            let cost = Cost::request().tokens(tokens * 11 / 10);
            throttle.runner().classify(classify).run(cost, |_| model.ask(tokens)).await
        });
    }
    let (mut done, mut tokens) = (0, 0);
    while let Some(reply) = tasks.join_next().await {
        match reply? {
            Ok(reply) => {
                done += 1;
                tokens += reply.tokens;
            }
            Err(error) => show.say(&format!("given up: {error}")),
        }
    }
    watching.abort();
    drop(bar);
    let retries = throttle.snapshot().admitted - PROMPTS;
    throttle.drain().await;
    show.summary(done, retries, tokens);
    Ok(())
}

/// Looks at the throttle ten times a second.
async fn watch(throttle: Throttle, show: Show) {
    let mut past: VecDeque<u64> = VecDeque::new();
    loop {
        let seen = throttle.snapshot();
        let rate = past.front().map_or(0, |before| seen.completed - before);
        show.look(&seen, rate, past.len() == 10);
        past.push_back(seen.completed);
        if past.len() > 10 {
            past.pop_front();
        }
        tokio::time::sleep(SECOND / 10).await;
    }
}

/// What is seen of it: a live line on a terminal, plain lines elsewhere.
#[derive(Clone)]
struct Show {
    start: Instant,
    bar: Bar,
    slowest: Arc<Mutex<Option<Slowest>>>,
}

/// The second in which the least was done.
struct Slowest {
    at: Duration,
    rate: u64,
    slots: u32,
    state: String,
}

impl Show {
    fn new() -> Self {
        Self { start: Instant::now(), bar: Bar::new(), slowest: Arc::default() }
    }

    /// One plain line, above the live one where there is one.
    fn say(&self, line: &str) {
        let at = self.start.elapsed().as_secs_f64();
        self.bar.suspend(|| println!("{at:>5.1} s  {line}"));
    }

    fn look(&self, seen: &Snapshot, rate: u64, is_whole_second: bool) {
        let slots = seen.slots.unwrap_or(0);
        let state = seen.state.to_string();
        let mut slowest = lock(&self.slowest);
        if is_whole_second && slowest.as_ref().is_none_or(|slowest| rate < slowest.rate) {
            *slowest = Some(Slowest { at: self.start.elapsed(), rate, slots, state });
        }
    }

    fn milestone(&self, seen: &Snapshot) {
        let percent = seen.percentage.unwrap_or(0.0);
        self.say(&format!("{percent:>3.0} %: {} of {} done", seen.completed, seen.total));
    }

    fn event(&self, notice: &Notice) {
        match &notice.event {
            Event::Slowed { slots, interval, why, .. } => {
                let why = match why {
                    Why::Overload => "a 429".to_owned(),
                    Why::Failures { count, .. } => format!("{count} failures"),
                    other => format!("{other:?}"),
                };
                self.say(&format!("slowed by {why}: {}", limits(*slots, *interval)));
            }
            Event::SpedUp { slots, interval, .. } => {
                self.say(&format!("sped up: {}", limits(*slots, *interval)));
            }
            Event::Paused { span, .. } => {
                self.say(&format!("paused: nobody enters for {} ms", span.as_millis()));
            }
            _ => {}
        }
    }

    fn summary(&self, done: u64, retries: u64, tokens: u64) {
        self.say(&format!("{done} of {PROMPTS} done, {retries} retries, {tokens} tokens used"));
        if let Some(Slowest { at, rate, slots, state }) = &*lock(&self.slowest) {
            let at = at.as_secs_f64();
            self.say(&format!(
                "slowest moment: {rate} done in the second before {at:.1} s, slots {slots}, {state}"
            ));
        }
    }
}

fn limits(slots: Change<u32>, gap: Change<Duration>) -> String {
    let gap = Change { from: gap.from.as_millis(), to: gap.to.as_millis() };
    format!("slots {}, gap {} ms", change(slots), change(gap))
}

fn change<T: PartialEq + Display>(Change { from, to }: Change<T>) -> String {
    if from == to { format!("{to}") } else { format!("{from} to {to}") }
}

/// An answer, and what it used.
struct Reply {
    tokens: u64,
}

#[derive(Debug, thiserror::Error)]
enum Fault {
    #[error("429: too many tokens, come back in {retry_after:?}")]
    TooMany { retry_after: Duration },
    #[error("503: unavailable")]
    Unavailable,
}

/// The far side. Nothing in it knows of tidegate but the dice.
struct Model {
    workers: Semaphore,
    books: Mutex<Books>,
}

struct Books {
    start: Instant,
    random: Random,
    used: VecDeque<(Instant, u64)>,
    answers: u32,
    down_until: Option<Instant>,
}

impl Model {
    /// Tokens a second; at first others use a part of it.
    const QUOTA: u64 = 24_000;
    const OTHERS: u64 = 9_000;
    const OTHERS_FOR: Duration = Duration::from_millis(2_500);
    /// When the outage begins, and for how long it lasts.
    const DOWN_AFTER: u32 = 50;
    const DOWN_FOR: Duration = Duration::from_millis(1_300);

    fn new() -> Self {
        let books = Books {
            start: Instant::now(),
            random: Random::seeded(1),
            used: VecDeque::new(),
            answers: 0,
            down_until: None,
        };
        Self { workers: Semaphore::new(2), books: Mutex::new(books) }
    }

    async fn ask(&self, tokens: u64) -> Result<Reply, Fault> {
        lock(&self.books).charge(tokens)?;
        let _worker = self.workers.acquire().await;
        let millis = 30 + lock(&self.books).random.below(50);
        tokio::time::sleep(Duration::from_millis(millis)).await;
        lock(&self.books).answer(tokens)
    }
}

impl Books {
    /// Books the tokens, unless they exceed the quota of the last second.
    fn charge(&mut self, tokens: u64) -> Result<(), Fault> {
        let now = Instant::now();
        self.used.retain(|(at, _)| now.duration_since(*at) < SECOND);
        let others = if now.duration_since(self.start) < Model::OTHERS_FOR { Model::OTHERS } else { 0 };
        let used = others + self.used.iter().map(|(_, tokens)| tokens).sum::<u64>();
        if used + tokens <= Model::QUOTA {
            self.used.push_back((now, tokens));
            return Ok(());
        }
        // Come back when about half of it is free again.
        let middle = self.used.get(self.used.len() / 2).map_or(now, |(at, _)| *at);
        Err(Fault::TooMany { retry_after: (middle + SECOND).duration_since(now) })
    }

    /// The answer, unless the model is down.
    fn answer(&mut self, tokens: u64) -> Result<Reply, Fault> {
        let now = Instant::now();
        if self.answers == Model::DOWN_AFTER {
            self.down_until = self.down_until.or(Some(now + Model::DOWN_FOR));
        }
        if self.down_until.is_some_and(|until| now < until) {
            return Err(Fault::Unavailable);
        }
        self.answers += 1;
        Ok(Reply { tokens })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
