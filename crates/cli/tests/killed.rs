//! `tidegate serve` that is killed under load and started anew, several times: what its clients were told is so, nothing is
//! invented, and they go on by themselves.
//!
//! A client that hears nothing does not know whether it has drawn. It asks anew, and the draw that it has not heard of stays
//! open until its deadline. An ending it says again, until it is answered: it is done once, however often it is said.

mod kit;

use std::collections::BTreeMap;
use std::io::{self, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use kit::serving::Serving;
use kit::{Shop, codec};
use rustix::process::Signal;
use tidegate_core::limit::check::{BucketId, Entry, Kind, Move, check, check_ledger};
use tidegate_core::limit::lease::LeaseId;
use tidegate_core::limit::name::{LimitName, Subject};
use tidegate_core::limit::rule::Limit;
use tidegate_core::random::Random;
use tidegate_core::time::Stamp;

const CLIENTS: u64 = 4;
/// How much each has at once: hardly anything comes in while the test runs.
const BURSTS: [(&str, u64); 2] = [("plenty", 36_000), ("tight", 40)];
/// How long a client waits before it tries again, unless it is told to end.
const AGAIN: Duration = Duration::from_millis(20);

/// What the clients were told, and by whom they are.
struct World {
    address: String,
    token: String,
    log: Mutex<Vec<Entry>>,
    /// Units that somebody has asked for and has not heard of, by subject.
    unheard: Mutex<BTreeMap<&'static str, u64>>,
    answers: AtomicU64,
    /// Calls that were not answered.
    lost: AtomicU64,
    leases: AtomicU64,
    is_over: AtomicBool,
    quiet: Mutex<()>,
    told: Condvar,
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

impl World {
    /// One try: the status and the body, if all of it arrives.
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
        self.told.notify_all();
        Ok(answer)
    }

    /// Nobody answers: it comes again in a moment.
    fn wait(&self) {
        self.lost.fetch_add(1, Ordering::Relaxed);
        drop(self.told.wait_timeout(lock(&self.quiet), AGAIN).expect("no client panics"));
    }

    fn is_over(&self) -> bool {
        self.is_over.load(Ordering::Relaxed)
    }

    fn note(&self, at: Stamp, entity: &str, movement: Move) {
        lock(&self.log).push(Entry::moved(at, bucket(entity).0, movement));
    }

    /// Draws, until it is answered or all is over.
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
                // It is on its way down, or its disk was too slow for this one: nobody knows whether it was drawn.
                Ok(_) | Err(_) => {
                    *lock(&self.unheard).entry(entity).or_default() += units;
                    self.wait();
                }
            }
        }
        None
    }

    /// Says an ending until it is answered.
    fn end(&self, lease: &str, verb: &str, body: &str) {
        loop {
            match self.ask(&format!("/v1/leases/{lease}/{verb}"), body) {
                Ok((200, _)) => return,
                Ok((503, _)) | Err(_) => self.wait(),
                Ok(other) => panic!("the end of a lease that was granted is answered with {other:?}"),
            }
        }
    }

    /// Draws and settles until all is over. A draw is written down when it is heard of, and what is given back when it is
    /// said: so what has happened earlier is earlier in the log.
    fn be_a_client(&self, number: u64, seed: u64) {
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

    /// Waits for so many more answers.
    fn wait_for_answers(&self, more: u64) {
        let wanted = self.answers.load(Ordering::Relaxed) + more;
        while self.answers.load(Ordering::Relaxed) < wanted {
            drop(self.told.wait_timeout(lock(&self.quiet), AGAIN).expect("no client panics"));
        }
    }
}

#[test]
fn a_server_that_is_killed_under_load_loses_nothing_it_has_told_and_invents_nothing() {
    let rounds = if std::env::var_os("TIDEGATE_DEEP").is_some() { 40 } else { 5 };
    let seed = now().as_micros();
    println!("the seed is {seed}");
    let shop = Shop::new();
    for (entity, burst) in BURSTS {
        shop.ok(&format!("limits set entity {entity} rpm:1/day:{burst}"));
    }
    // A port that was free a moment ago, so that the next server has the same.
    let port = TcpListener::bind("127.0.0.1:0").and_then(|taken| taken.local_addr()).expect("a port").port();
    let start = || {
        let mut command = shop.command(&["serve"]);
        Serving::start(command.env("TIDEGATE_LISTEN", format!("127.0.0.1:{port}")))
    };
    let mut running = Some(start());
    let server = running.as_ref().expect("it runs");
    let world = World {
        address: server.address.clone(),
        token: server.token().expect("the first token").to_owned(),
        log: Mutex::new(
            BURSTS.map(|(entity, _)| bucket(entity)).map(|(id, shape)| Entry::shape(now(), id, shape)).into(),
        ),
        unheard: Mutex::default(),
        answers: AtomicU64::new(0),
        lost: AtomicU64::new(0),
        leases: AtomicU64::new(0),
        is_over: AtomicBool::new(false),
        quiet: Mutex::new(()),
        told: Condvar::new(),
    };
    let world = &world;
    let mut random = Random::seeded(seed);
    thread::scope(|scope| {
        for number in 1..=CLIENTS {
            scope.spawn(move || world.be_a_client(number, seed));
        }
        for _ in 0..rounds {
            world.wait_for_answers(40 + random.below(200));
            let server = running.take().expect("it runs");
            server.send(Signal::KILL);
            drop(server);
            running = Some(start());
        }
        // They go on by themselves, and are done with what they hold.
        world.wait_for_answers(100);
        world.is_over.store(true, Ordering::Relaxed);
    });
    let settled = judge(&shop, world);
    let (answers, lost) = (world.answers.load(Ordering::Relaxed), world.lost.load(Ordering::Relaxed));
    println!("{answers} answers, {lost} calls without one, {settled} units settled");
    assert!(settled > 0 && lost > 0);
}

/// Proves the log, the ledger and what is left to fit together, and answers how many units were settled.
fn judge(shop: &Shop, world: &World) -> u64 {
    let log = lock(&world.log);
    let report = check(&log);
    assert!(report.violations.is_empty(), "{:?}", report.violations);
    assert!(report.open.is_empty(), "every lease that was heard of has ended: {:?}", report.open);
    let (mut usage, mut settled) = (BTreeMap::new(), 0);
    for (entity, burst) in BURSTS {
        let used = shop.json(&format!("usage summary entity {entity}"));
        let lines = used["limits"].as_array().expect("a list of limits");
        let used = lines.first().map_or(0, |line| line["units"].as_u64().expect("a number"));
        let unheard = lock(&world.unheard).get(entity).copied().unwrap_or(0);
        let there = shop.available(entity, "gpt", "rpm");
        // What is neither there nor used is held by leases that nobody has heard of.
        let held = i64::try_from(burst).expect("small") - i64::try_from(used).expect("small") - there;
        let unheard = i64::try_from(unheard).expect("small");
        assert!(
            (0..=unheard).contains(&held),
            "{held} units of {entity} are gone, and {unheard} were not heard of"
        );
        if used > 0 {
            usage.insert((subject(entity), LimitName::new("rpm").expect("a name")), used);
        }
        settled += used;
    }
    let wrong = check_ledger(&log, &usage);
    assert!(wrong.is_empty(), "what was settled, and only that, is in the ledger: {wrong:?}");
    settled
}
