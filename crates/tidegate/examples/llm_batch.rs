//! A batch of prompts against a flaky model: the throttle slows down and recovers within about ten seconds.
//!
//! `cargo run --example llm_batch`
//!
//! The model is built in. It has two workers, an undocumented token quota (429 with a `Retry-After`), and an
//! outage in the middle (503). A terminal shows a live line; a file has plain lines only.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

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

fn throttle(console: &Console) -> Result<Throttle, Box<dyn Error>> {
    // Short times, so that everything happens within ten seconds; the defaults are minutes.
    let brake = Brake::default().at(3, SECOND).cooling(SECOND / 4).ceiling_periods(3);
    let backoff = Backoff::exponential(SECOND / 5, SECOND).jitter(Jitter::Range(0.5..=1.0));
    let (events, progress) = (console.clone(), console.clone());
    let throttle = Throttle::builder()
        .slots(Slots::adaptive(1..=8))
        .pace(Pace::every(SECOND / 50).slowest(SECOND / 4))
        .budget(Budget::tokens(24_000, SECOND)) // the documented quota
        .controller(Controller::Brake(brake))
        .retry(Retry::attempts(10).backoff(backoff).budget(RetryBudget::unlimited()))
        .total(PROMPTS)
        .on_state_change(move |notice| events.event(notice))
        .on_progress(move |snapshot| progress.milestone(snapshot))
        .build()?;
    Ok(throttle)
}

/// Classifies a reply: its outcome, and whether to retry.
fn classify(reply: &Result<Reply, ModelError>) -> Class {
    match reply {
        Ok(reply) => Class::end(Outcome::success().spent(Cost::request().tokens(reply.tokens))),
        Err(ModelError::TooManyTokens { retry_after }) => {
            Class::again(Outcome::overload().retry_after(*retry_after))
        }
        Err(ModelError::Unavailable) => Class::again(Outcome::failure()),
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), Box<dyn Error>> {
    let console = Console::new();
    let throttle = throttle(&console)?;
    let model = Arc::new(Model::new());
    let mut random = Random::seeded(2);

    console.print(&format!("{PROMPTS} prompts, up to 8 slots, 24000 tokens per second"));
    let bar = console.bar.watch(&throttle);
    let sampler = tokio::spawn(sample(throttle.clone(), console.clone()));
    let mut tasks = JoinSet::new();
    for _ in 0..PROMPTS {
        let (throttle, model) = (throttle.clone(), Arc::clone(&model));
        let tokens = 300 + random.below(600);
        tasks.spawn(async move {
            // Estimate 10 % high: the length of the reply is not known in advance.
            let cost = Cost::request().tokens(tokens * 11 / 10);
            throttle.runner().classify(classify).run(cost, |_| model.complete(tokens)).await
        });
    }
    let (mut done, mut tokens) = (0, 0);
    while let Some(reply) = tasks.join_next().await {
        match reply? {
            Ok(reply) => {
                done += 1;
                tokens += reply.tokens;
            }
            Err(error) => console.print(&format!("failed: {error}")),
        }
    }
    sampler.abort();
    drop(bar);
    let retries = throttle.snapshot().admitted - PROMPTS;
    throttle.drain().await;
    console.summary(done, retries, tokens);
    Ok(())
}

/// Samples the throttle ten times per second.
async fn sample(throttle: Throttle, console: Console) {
    let mut history: VecDeque<u64> = VecDeque::new();
    loop {
        let snapshot = throttle.snapshot();
        let rate = history.front().map_or(0, |before| snapshot.completed - before);
        console.sample(&snapshot, rate, history.len() == 10);
        history.push_back(snapshot.completed);
        if history.len() > 10 {
            history.pop_front();
        }
        tokio::time::sleep(SECOND / 10).await;
    }
}

/// Prints a live line on a terminal, and plain lines elsewhere.
#[derive(Clone)]
struct Console {
    start: Instant,
    bar: Bar,
    slowest: Arc<Mutex<Option<Slowest>>>,
}

/// The second with the fewest completions.
struct Slowest {
    at: Duration,
    rate: u64,
    slots: u32,
    state: String,
}

impl Console {
    fn new() -> Self {
        Self { start: Instant::now(), bar: Bar::new(), slowest: Arc::default() }
    }

    /// Prints a plain line, above the live line if there is one.
    fn print(&self, line: &str) {
        let at = self.start.elapsed().as_secs_f64();
        self.bar.suspend(|| println!("{at:>5.1} s  {line}"));
    }

    fn sample(&self, snapshot: &Snapshot, rate: u64, is_whole_second: bool) {
        let slots = snapshot.slots.unwrap_or(0);
        let state = snapshot.state.to_string();
        let mut slowest = lock(&self.slowest);
        if is_whole_second && slowest.as_ref().is_none_or(|slowest| rate < slowest.rate) {
            *slowest = Some(Slowest { at: self.start.elapsed(), rate, slots, state });
        }
    }

    fn milestone(&self, snapshot: &Snapshot) {
        let percent = snapshot.percentage.unwrap_or(0.0);
        self.print(&format!("{percent:>3.0} %: {} of {} done", snapshot.completed, snapshot.total));
    }

    fn event(&self, notice: &Notice) {
        match &notice.event {
            Event::Slowed { slots, interval, why, .. } => {
                let reason = match why {
                    Why::Overload => "a 429".to_owned(),
                    Why::Failures { count, .. } => format!("{count} failures"),
                    other => format!("{other:?}"),
                };
                self.print(&format!("slowed by {reason}: {}", limits(*slots, *interval)));
            }
            Event::SpedUp { slots, interval, .. } => {
                self.print(&format!("sped up: {}", limits(*slots, *interval)));
            }
            Event::Paused { span, .. } => {
                self.print(&format!("paused for {} ms: no request is admitted", span.as_millis()));
            }
            _ => {}
        }
    }

    fn summary(&self, done: u64, retries: u64, tokens: u64) {
        self.print(&format!("{done} of {PROMPTS} done, {retries} retries, {tokens} tokens used"));
        if let Some(Slowest { at, rate, slots, state }) = &*lock(&self.slowest) {
            let at = at.as_secs_f64();
            self.print(&format!("slowest second: {rate} done up to {at:.1} s, {slots} slots, {state}"));
        }
    }
}

fn limits(slots: Change<u32>, interval: Change<Duration>) -> String {
    let interval = Change { from: interval.from.as_millis(), to: interval.to.as_millis() };
    format!("slots {}, interval {} ms", change(slots), change(interval))
}

fn change<T: PartialEq + Display>(Change { from, to }: Change<T>) -> String {
    if from == to { format!("{to}") } else { format!("{from} to {to}") }
}

/// A successful reply.
struct Reply {
    tokens: u64,
}

#[derive(Debug, thiserror::Error)]
enum ModelError {
    #[error("429: too many tokens, retry after {retry_after:?}")]
    TooManyTokens { retry_after: Duration },
    #[error("503: unavailable")]
    Unavailable,
}

/// The upstream. It uses nothing of tidegate but the random generator.
struct Model {
    workers: Semaphore,
    state: Mutex<ModelState>,
}

struct ModelState {
    start: Instant,
    random: Random,
    used: VecDeque<(Instant, u64)>,
    replies: u32,
    down_until: Option<Instant>,
}

impl Model {
    /// Tokens per second.
    const QUOTA: u64 = 24_000;
    /// Tokens per second that other clients use at first, and how long they do.
    const OTHER_CLIENTS: u64 = 9_000;
    const OTHER_CLIENTS_FOR: Duration = Duration::from_millis(2_500);
    /// The number of replies before the outage, and its duration.
    const OUTAGE_AFTER: u32 = 50;
    const OUTAGE_FOR: Duration = Duration::from_millis(1_300);

    fn new() -> Self {
        let state = ModelState {
            start: Instant::now(),
            random: Random::seeded(1),
            used: VecDeque::new(),
            replies: 0,
            down_until: None,
        };
        Self { workers: Semaphore::new(2), state: Mutex::new(state) }
    }

    async fn complete(&self, tokens: u64) -> Result<Reply, ModelError> {
        lock(&self.state).charge(tokens)?;
        let _worker = self.workers.acquire().await;
        let millis = 30 + lock(&self.state).random.below(50);
        tokio::time::sleep(Duration::from_millis(millis)).await;
        lock(&self.state).reply(tokens)
    }
}

impl ModelState {
    /// Charges the tokens to a sliding window of one second, unless they exceed the quota.
    fn charge(&mut self, tokens: u64) -> Result<(), ModelError> {
        let now = Instant::now();
        self.used.retain(|(at, _)| now.duration_since(*at) < SECOND);
        let other_clients =
            if now.duration_since(self.start) < Model::OTHER_CLIENTS_FOR { Model::OTHER_CLIENTS } else { 0 };
        let used = other_clients + self.used.iter().map(|(_, tokens)| tokens).sum::<u64>();
        if used + tokens <= Model::QUOTA {
            self.used.push_back((now, tokens));
            return Ok(());
        }
        // By then about half of the charges have left the window.
        let middle = self.used.get(self.used.len() / 2).map_or(now, |(at, _)| *at);
        Err(ModelError::TooManyTokens { retry_after: (middle + SECOND).duration_since(now) })
    }

    /// Returns the reply, or an error during the outage.
    fn reply(&mut self, tokens: u64) -> Result<Reply, ModelError> {
        let now = Instant::now();
        if self.replies == Model::OUTAGE_AFTER {
            self.down_until = self.down_until.or(Some(now + Model::OUTAGE_FOR));
        }
        if self.down_until.is_some_and(|until| now < until) {
            return Err(ModelError::Unavailable);
        }
        self.replies += 1;
        Ok(Reply { tokens })
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
