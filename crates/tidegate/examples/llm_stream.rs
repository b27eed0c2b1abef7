//! A batch of prompts with streamed answers: tokens count as they arrive, and a stream that breaks off is
//! tried again.
//!
//! `cargo run --example llm_stream`
//!
//! The model is built in: a server on the loopback that streams ten tokens at a time, returns 429 with a
//! `Retry-After` beyond a rate that it does not announce, and breaks off every seventh stream. The throttle
//! finds the rate. At the end it has counted every token that the model sent, also those of broken streams.
#![allow(clippy::print_stdout, reason = "an example prints its results")]

use std::error::Error;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use tidegate::{Attempt, Budget, Class, Cost, Outcome, Retry, RetryBudget, Throttle};
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep};

type Result<T> = std::result::Result<T, Box<dyn Error + Send + Sync>>;

const PROMPTS: u64 = 60;
/// The tokens of an answer, and of one chunk of it.
const ANSWER: u64 = 40;
const CHUNK: &str = "tok tok tok tok tok tok tok tok tok tok ";

#[tokio::main]
async fn main() -> Result<()> {
    let model = Arc::new(Model::default());
    let url = Arc::clone(&model).serve().await?;
    let throttle = Throttle::auto()
        .budget(Budget::tokens(100_000, Duration::from_secs(60))) // the documented quota
        .retry(Retry::attempts(8).budget(RetryBudget::unlimited()))
        .build()?;
    let client = reqwest::Client::new();
    let mut prompts = JoinSet::new();
    for _ in 0..PROMPTS {
        let (throttle, client, url) = (throttle.clone(), client.clone(), url.clone());
        prompts.spawn(async move {
            let work = |attempt| complete(client.clone(), url.clone(), attempt);
            // An answer may be longer: the estimate only reserves tokens until they are counted.
            throttle.runner().classify(classify).run(Cost::from(ANSWER / 2), work).await
        });
    }
    let mut tokens = 0;
    while let Some(answer) = prompts.join_next().await {
        tokens += words(&answer??);
    }
    let (counted, sent) = (throttle.snapshot().tokens_used, model.sent.load(Ordering::SeqCst));
    let outcomes = throttle.snapshot().outcomes;
    println!("{PROMPTS} answers with {tokens} tokens");
    println!("{} rejected with 429, {} broken streams", outcomes.throttled, outcomes.network);
    println!("{counted} tokens counted, {sent} sent by the model");
    if tokens != PROMPTS * ANSWER || counted != sent {
        return Err("tokens were lost".into());
    }
    Ok(())
}

/// Requests an answer, and reports its tokens as they arrive.
async fn complete(
    client: reqwest::Client,
    url: String,
    attempt: Attempt,
) -> std::result::Result<String, ModelError> {
    let mut response = client.get(url).send().await?;
    if response.status() == 429 {
        let seconds =
            response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        return Err(ModelError::Busy { retry_after: Duration::from_secs(seconds.unwrap_or(1)) });
    }
    let mut answer = String::new();
    while let Some(chunk) = response.chunk().await? {
        let chunk = String::from_utf8_lossy(&chunk);
        attempt.spend(words(&chunk));
        answer.push_str(&chunk);
    }
    Ok(answer)
}

#[derive(Debug, thiserror::Error)]
enum ModelError {
    #[error("429: retry after {retry_after:?}")]
    Busy { retry_after: Duration },
    #[error("the stream broke off: {0}")]
    Broken(#[from] reqwest::Error),
}

fn classify(answer: &std::result::Result<String, ModelError>) -> Class {
    match answer {
        Ok(_) => Class::end(Outcome::success()),
        Err(ModelError::Busy { retry_after }) => Class::again(Outcome::overload().retry_after(*retry_after)),
        Err(ModelError::Broken(_)) => Class::again(Outcome::failure().because(tidegate::Cause::Network)),
    }
}

fn words(text: &str) -> u64 {
    text.split_whitespace().map(|_| 1).sum()
}

/// The upstream.
struct Model {
    /// It admits one stream per permit.
    permits: Semaphore,
    streams: AtomicU64,
    /// Tokens sent.
    sent: AtomicU64,
}

impl Default for Model {
    fn default() -> Self {
        Self { permits: Semaphore::new(10), streams: AtomicU64::new(0), sent: AtomicU64::new(0) }
    }
}

impl Model {
    /// Streams per second that it admits; ten at once.
    const RATE: u32 = 40;

    /// Returns its address.
    async fn serve(self: Arc<Self>) -> Result<String> {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        let url = format!("http://{}/", listener.local_addr()?);
        let refill = Arc::clone(&self);
        tokio::spawn(async move {
            let mut next = Instant::now();
            loop {
                next += Duration::from_secs(1) / Self::RATE;
                tokio::time::sleep_until(next).await;
                if refill.permits.available_permits() < 10 {
                    refill.permits.add_permits(1);
                }
            }
        });
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let model = Arc::clone(&self);
                // A client that is gone is no error of the model.
                tokio::spawn(async move { drop(model.answer(stream).await) });
            }
        });
        Ok(url)
    }

    /// Answers one request of a connection.
    async fn answer(&self, mut stream: TcpStream) -> std::io::Result<()> {
        let mut lines = BufReader::new(&mut stream).lines();
        while lines.next_line().await?.is_some_and(|line| !line.is_empty()) {}
        let Ok(permit) = self.permits.try_acquire() else {
            let head = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";
            return stream.write_all(head).await;
        };
        permit.forget();
        let is_broken = self.streams.fetch_add(1, Ordering::SeqCst) % 7 == 3;
        let head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\nconnection: close\r\n\r\n";
        stream.write_all(head).await?;
        for _ in 0..if is_broken { 2 } else { 4 } {
            let chunk = format!("{:x}\r\n{CHUNK}\r\n", CHUNK.len());
            self.sent.fetch_add(words(CHUNK), Ordering::SeqCst);
            stream.write_all(chunk.as_bytes()).await?;
            sleep(Duration::from_millis(5)).await;
        }
        if !is_broken {
            stream.write_all(b"0\r\n\r\n").await?;
        }
        stream.shutdown().await
    }
}
