//! A server with a script (200, a slow 200, 429, 200, …), and what a host's limits make of it, step by step:
//! when each request was answered, the rate after it, and the circuit.

use std::time::Duration;

use tidegate::CircuitState::{self, Closed, HalfOpen, Open};
use tidegate::{Authority, Classes, Ended, Keyed, Outcome, Random, Refused};
use tokio::time::{Instant, sleep};

use crate::kit::upstream::aimd_host;
use crate::kit::{REQUEST, millis, secs};

static CLASSES: Classes = Classes::new();

use Reply::{Fast, Slow, TooMany, TooManyUntil, Unavailable};

/// What the server says, and how long it takes to say it.
#[derive(Debug, Clone, Copy)]
enum Reply {
    Fast,
    Slow,
    TooMany,
    TooManyUntil(Duration),
    Unavailable,
}

impl Reply {
    const fn latency(self) -> Duration {
        match self {
            // Twice the target of one second is too much.
            Self::Slow => millis(2_000),
            _ => millis(50),
        }
    }

    fn outcome(self) -> Outcome {
        match self {
            Self::Fast | Self::Slow => CLASSES.outcome(Ended::Status(200)),
            Self::TooMany => CLASSES.outcome(Ended::Status(429)),
            Self::TooManyUntil(hint) => CLASSES.outcome(Ended::Status(429)).retry_after(hint),
            Self::Unavailable => CLASSES.outcome(Ended::Status(503)),
        }
    }
}

/// One caller, who asks again as soon as it was answered.
struct Script {
    hosts: Keyed<Authority>,
    host: Authority,
    born: Instant,
}

impl Script {
    fn new() -> Self {
        // A pause of chance zero ends when it ends.
        let hosts = Keyed::builder(aimd_host()).random(Random::fixed(0.0)).build().expect("in bounds");
        Self {
            hosts,
            host: Authority::new("https://scripted.example/").expect("a host"),
            born: Instant::now(),
        }
    }

    fn millis(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_millis()).expect("a short test")
    }

    /// Entries per second in millionths, and the circuit.
    fn seen(&self) -> (u64, CircuitState) {
        let seen = self.hosts.throttle(&self.host).snapshot();
        (seen.rate.expect("a rate").millionths(), seen.circuit.expect("a circuit").state)
    }

    /// For how long the circuit refuses.
    fn refused_for(&self) -> Option<Duration> {
        match self.hosts.try_acquire(&self.host, REQUEST) {
            Err(Refused::CircuitOpen { retry_after }) => Some(retry_after),
            _ => None,
        }
    }

    /// Asks, is answered, and says when that was and what is left of it.
    async fn goes(&self, reply: Reply) -> (u64, u64, CircuitState) {
        let permit = self.hosts.acquire(&self.host, REQUEST).await.expect("admitted");
        sleep(reply.latency()).await;
        permit.settle(reply.outcome());
        let (rate, circuit) = self.seen();
        (self.millis(), rate, circuit)
    }
}

/// Runs the replies, and compares each step with what it should have come to: the time of the answer in milliseconds, the
/// rate after it in millionths per second, and the circuit after it.
async fn check(script: &Script, steps: &[(Reply, u64, u64, CircuitState)]) {
    for (number, (reply, at, rate, circuit)) in steps.iter().enumerate() {
        let found = script.goes(*reply).await;
        assert_eq!(found, (*at, *rate, *circuit), "step {number}: {reply:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn the_path_of_the_rate_and_of_the_circuit_is_that_of_the_script() {
    let script = Script::new();
    let up_and_down = [
        // Four at once, and then two per second.
        (Fast, 50, 2_000_000, Closed),
        (Fast, 100, 2_000_000, Closed),
        (Fast, 150, 2_000_000, Closed),
        (Fast, 200, 2_000_000, Closed),
        (Fast, 550, 2_000_000, Closed),
        // A second since the first: 0.25 more; and 1.339 s later in proportion.
        (Fast, 1_050, 2_250_000, Closed),
        (Fast, 1_500, 2_250_000, Closed),
        (Fast, 1_945, 2_250_000, Closed),
        (Fast, 2_389, 2_584_750, Closed),
        // Twice the latency to expect: half the rate. Meanwhile four entries have accrued.
        (Slow, 4_733, 1_292_375, Closed),
        (Fast, 4_783, 1_292_375, Closed),
        (Fast, 4_833, 1_292_375, Closed),
        (Fast, 4_883, 1_292_375, Closed),
        // Half again; the circuit counts one failure, and the next success forgets it.
        (TooMany, 4_933, 646_187, Closed),
        // What was too much is remembered: a quarter more for each second.
        (Fast, 6_131, 847_715, Closed),
        (Fast, 7_323, 1_110_505, Closed),
        (Fast, 8_235, 1_110_505, Closed),
        // Told to come back in three seconds: half the rate, nothing accrues until 12.136, and the circuit counts nothing.
        (TooManyUntil(secs(3)), 9_136, 555_252, Closed),
        (Fast, 13_886, 824_202, Closed),
        (Fast, 15_116, 1_034_991, Closed),
        (Fast, 16_092, 1_034_991, Closed),
    ];
    check(&script, &up_and_down).await;

    // Nothing but 503: half each time down to the floor, and open at the fifth in a row.
    let down = [
        (Unavailable, 17_058, 517_495, Closed),
        (Unavailable, 18_941, 258_747, Closed),
        (Unavailable, 22_755, 250_000, Closed),
        (Unavailable, 26_753, 250_000, Closed),
        (Unavailable, 30_753, 250_000, Open),
    ];
    check(&script, &down).await;
    assert_eq!(script.refused_for(), Some(secs(15)));
    sleep(millis(14_999)).await;
    assert_eq!(script.refused_for(), Some(millis(1)));
    sleep(millis(1)).await;

    let healed = [
        // The first probe enters at 45.753, 15 s after it opened; the next one at the rate, 4 s later.
        (Fast, 45_803, 250_000, HalfOpen),
        // 1.03 was too much when the fall began: up again, and never more than twice as much in one step.
        (Fast, 49_803, 500_000, HalfOpen),
        // The third probe closes it.
        (Fast, 51_828, 786_132, Closed),
        (Fast, 53_119, 988_384, Closed),
        // A fiftieth for each second near what was too much.
        (Fast, 54_141, 1_008_594, Closed),
        (Fast, 55_133, 1_008_594, Closed),
        (Fast, 56_125, 1_049_010, Closed),
    ];
    check(&script, &healed).await;
}

#[tokio::test(start_paused = true)]
async fn each_failed_probe_doubles_the_open_time_up_to_five_times_the_first() {
    let script = Script::new();
    // Four at once, and the fifth at the floor of the rate.
    let opens = [
        (Unavailable, 50, 1_000_000, Closed),
        (Unavailable, 100, 500_000, Closed),
        (Unavailable, 150, 250_000, Closed),
        (Unavailable, 200, 250_000, Closed),
    ];
    check(&script, &opens).await;
    let (opened, _, circuit) = script.goes(Unavailable).await;
    assert_eq!(circuit, Open);
    let mut expected = opened;
    for span in [15, 30, 60, 75, 75] {
        assert_eq!(script.refused_for(), Some(secs(span)));
        sleep(secs(span)).await;
        expected += span * 1_000 + 50;
        assert_eq!(script.goes(Unavailable).await, (expected, 250_000, Open), "open for {span} s");
    }
    sleep(secs(75)).await;
    for (probe, circuit) in [HalfOpen, HalfOpen, Closed].into_iter().enumerate() {
        assert_eq!(script.goes(Fast).await.2, circuit, "probe {probe}");
    }
    // Once closed it starts over.
    for _ in 0..5 {
        script.goes(Unavailable).await;
    }
    assert_eq!(script.refused_for(), Some(secs(15)));
}
