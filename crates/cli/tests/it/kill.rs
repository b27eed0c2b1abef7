//! Kills and restarts `tidegate serve` under load, several times: acknowledged operations survive, no others
//! appear, and clients recover by themselves.
//!
//! A client without a response does not know whether its draw was executed. It retries, and a draw without a
//! response stays open until its deadline. A client retries the end of a lease until it is acknowledged, and
//! it counts once.

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::TcpStream;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::Signal;
use tidegate_core::limit::exactness::{BucketId, Entry, Kind, Move, check, check_ledger};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::rule::Limit;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;

use crate::kit::server::{TestServer, free_port};
use crate::kit::{Fixture, codec, wait_until};

const CLIENTS: u64 = 4;
/// The burst of each entity: almost nothing refills while the test runs.
const BURSTS: [(&str, u64); 2] = [("plenty", 36_000), ("tight", 40)];
/// Delay before a retry, unless another client gets a response.
const AGAIN: Duration = Duration::from_millis(20);

/// State that the clients share: the address, and a log of acknowledged operations.
struct Load {
    address: String,
    token: String,
    log: Mutex<Vec<Entry>>,
    /// Units of draws without a response, by entity.
    unanswered: Mutex<BTreeMap<&'static str, u64>>,
    answers: AtomicU64,
    /// Calls without a response.
    lost: AtomicU64,
    leases: AtomicU64,
    is_over: AtomicBool,
    quiet: Mutex<()>,
    answered: Condvar,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().expect("no client panics")
}

fn now() -> Stamp {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
    Stamp::from_micros(u64::try_from(since.as_micros()).expect("before the year 500,000"))
}

fn subject(entity: &str) -> Subject {
    Subject::new(entity, "gpt").expect("a name")
}

/// The one bucket of an entity.
fn bucket(entity: &str) -> (BucketId, tidegate_core::bucket::Shape<Stamp>) {
    let (_, burst) = BURSTS.into_iter().find(|(name, _)| *name == entity).expect("one of them");
    let rule = Limit::per_day("rpm", 1).burst(burst).check().expect("a limit");
    (BucketId::new(&subject(entity), &rule), *rule.shape())
}

impl Load {
    /// Sends one request. Returns the status and the body, if complete.
    fn ask(&self, path: &str, body: &str) -> io::Result<(u16, String)> {
        let mut stream = TcpStream::connect(&self.address)?;
        write!(
            stream,
            "POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-type: application/json\r\n\
             authorization: Bearer {}\r\ncontent-length: {}\r\n\r\n{body}",
            self.token,
            body.len()
        )?;
        let mut answer = String::new();
        stream.read_to_string(&mut answer)?;
        let whole = || {
            let (head, body) = answer.split_once("\r\n\r\n")?;
            let length = head.lines().find_map(|line| line.strip_prefix("content-length: "))?;
            let status = head.split(' ').nth(1)?.parse().ok()?;
            (length.parse() == Ok(body.len())).then(|| (status, body.to_owned()))
        };
        let answer = whole().ok_or(io::ErrorKind::UnexpectedEof)?;
        self.answers.fetch_add(1, Ordering::Relaxed);
        self.answered.notify_all();
        Ok(answer)
    }

    /// Waits before a retry.
    fn wait(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        drop(self.answered.wait_timeout(lock(&self.quiet), AGAIN).expect("no client panics"));
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn note(&self, at: Stamp, entity: &str, movement: Move) {
        lock(&self.log).push(Entry::moved(at, bucket(entity).0, movement));
    }

    /// Draws, with retries, until there is a response or the test is over.
    fn draw(&self, entity: &'static str, units: u64) -> Option<String> {
        let body = format!(
            r#"{{"entity": "{entity}", "resource": "gpt", "cost": {{"rpm": {units}}}, "deadline": 3600}}"#
        );
        while !self.is_over() {
            match self.ask("/v1/acquire", &body) {
                Ok((200, answer)) => {
                    return Some(codec::parse(&answer)["lease"].as_str().expect("a lease").to_owned());
                }
                Ok((429, _)) => return None,
                Ok((503, why)) if !why.contains("/problems/store-away") => self.wait(),
                Ok(other) if other.0 != 503 => panic!("a draw is answered with {other:?}"),
                // The server is stopping, or its disk was too slow: the draw may have been executed.
                Ok(_) | Err(_) => {
                    *lock(&self.unanswered).entry(entity).or_default() += units;
                    self.wait();
                }
            }
        }
        None
    }

    /// Sends the end of a lease until it is acknowledged.
    fn end(&self, lease: &str, verb: &str, body: &str) {
        loop {
            match self.ask(&format!("/v1/leases/{lease}/{verb}"), body) {
                Ok((200, _)) => return,
                Ok((503, _)) | Err(_) => self.wait(),
                Ok(other) => panic!("the end of an acknowledged lease is answered with {other:?}"),
            }
        }
    }

    /// Draws and settles until the test is over. A draw is logged after its response, and a return when it is
    /// sent, so that the log has the order of their execution.
    fn run_client(&self, number: u64, seed: u64) {
        let mut random = Random::seeded(seed + number);
        while !self.is_over() {
            let (entity, units) = (BURSTS[usize::from(random.below(3) == 0)].0, 1 + random.below(5));
            let Some(lease) = self.draw(entity, units) else { continue };
            let id = LeaseId::new(1_800_000_000_000, self.leases.fetch_add(1, Ordering::Relaxed).into());
            let signed = i64::try_from(units).expect("a few");
            self.note(now(), entity, Move::new(Kind::Draw, id, 0, signed));
            let at = now();
            if entity == "tight" || random.below(4) == 0 {
                self.end(&lease, "cancel", r#"{"step": 1}"#);
                self.note(at, entity, Move::new(Kind::Return, id, 1, -signed));
            } else {
                let used = random.below(2 * units + 1);
                self.end(&lease, "settle", &format!(r#"{{"step": 1, "actual": {{"rpm": {used}}}}}"#));
                let used = i64::try_from(used).expect("a few");
                self.note(at, entity, Move::new(Kind::Settle, id, 1, used));
            }
        }
    }

    /// Waits for more responses.
    fn wait_for_answers(&self, more: u64) {
        let wanted = self.answers.load(Ordering::Relaxed) + more;
        wait_until("so many answers", || self.answers.load(Ordering::Relaxed) >= wanted);
    }

    /// Waits for one more call without a response.
    fn wait_for_a_loss(&self) {
        let lost = self.lost.load(Ordering::Relaxed);
        wait_until("a call without an answer", || self.lost.load(Ordering::Relaxed) > lost);
    }
}

#[test]
fn killed_server_keeps_acknowledged_operations() {
    let rounds = if std::env::var_os("TIDEGATE_DEEP").is_some() { 40 } else { 5 };
    let seed = now().as_micros();
    println!("the seed is {seed}");
    let fixture = Fixture::new();
    for (entity, burst) in BURSTS {
        fixture.ok(&format!("limits set entity {entity} rpm:1/day:{burst}"));
    }
    let address = free_port().to_string();
    let start = || {
        let mut command = fixture.command(&["serve"]);
        TestServer::start(command.env("TIDEGATE_LISTEN", &address))
    };
    let mut running = Some(start());
    let server = running.as_ref().expect("it runs");
    let load = Load {
        address: server.address.clone(),
        token: server.token().expect("the first token").to_owned(),
        log: Mutex::new(
            BURSTS.map(|(entity, _)| bucket(entity)).map(|(id, shape)| Entry::shape(now(), id, shape)).into(),
        ),
        unanswered: Mutex::default(),
        answers: AtomicU64::new(0),
        lost: AtomicU64::new(0),
        leases: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
        quiet: Mutex::new(()),
        answered: Condvar::new(),
    };
    let load = &load;
    let mut random = Random::seeded(seed);
    thread::scope(|scope| {
        for number in 1..=CLIENTS {
            scope.spawn(move || load.run_client(number, seed));
        }
        for _ in 0..rounds {
            load.wait_for_answers(40 + random.below(200));
            let server = running.take().expect("it runs");
            server.send(Signal::KILL);
            drop(server);
            load.wait_for_a_loss();
            running = Some(start());
        }
        // The clients recover, and end their leases.
        load.wait_for_answers(100);
        load.is_over.store(true, Ordering::Relaxed);
    });
    let settled = verify(&fixture, load);
    let (answers, lost) = (load.answers.load(Ordering::Relaxed), load.lost.load(Ordering::Relaxed));
    println!("{answers} answers, {lost} calls without one, {settled} units settled");
    assert!(settled > 0 && lost > 0);
}

/// Checks that the log, the ledger and the balances agree, and returns how many units were settled.
fn verify(fixture: &Fixture, load: &Load) -> u64 {
    let log = lock(&load.log);
    let report = check(&log);
    assert!(report.violations.is_empty(), "{:?}", report.violations);
    assert!(report.open.is_empty(), "every acknowledged lease has ended: {:?}", report.open);
    let (mut usage, mut settled) = (BTreeMap::new(), 0);
    for (entity, burst) in BURSTS {
        let used = fixture.json(&format!("usage summary entity {entity}"));
        let lines = used["limits"].as_array().expect("a list of limits");
        let used = lines.first().map_or(0, |line| line["units"].as_u64().expect("a number"));
        let unanswered = lock(&load.unanswered).get(entity).copied().unwrap_or(0);
        let there = fixture.available(entity, "gpt", "rpm");
        // Units neither available nor used are held by draws without a response.
        let held = i64::try_from(burst).expect("small") - i64::try_from(used).expect("small") - there;
        let unanswered = i64::try_from(unanswered).expect("small");
        assert!(
            (0..=unanswered).contains(&held),
            "{held} units of {entity} are held, and {unanswered} were drawn without a response"
        );
        if used > 0 {
            usage.insert((subject(entity), LimitName::new("rpm").expect("a name")), used);
        }
        settled += used;
    }
    let wrong = check_ledger(&log, &usage);
    assert!(wrong.is_empty(), "the ledger has exactly the settled units: {wrong:?}");
    settled
}
