//! Host limits against a scripted server (200, a slow 200, 429, 200, …): the time of each response, and the
//! rate and circuit after it.

use std::time::Duration;

use tidegate::CircuitState::{self, Closed, HalfOpen, Open};
use tidegate::{Authority, Classes, Completion, Keyed, Outcome, Random, Refused};
use tokio::time::{Instant, sleep};

use crate::kit::upstream::aimd_host;
use crate::kit::{REQUEST, millis, secs};

static CLASSES: Classes = Classes::new();

use Reply::{Fast, Slow, TooMany, TooManyUntil, Unavailable};

/// A response of the server, with its latency.
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
            // Twice the target latency of one second counts as overload.
            Self::Slow => millis(2_000),
            _ => millis(50),
        }
    }

    fn outcome(self) -> Outcome {
        match self {
            Self::Fast | Self::Slow => CLASSES.outcome(Completion::Status(200)),
            Self::TooMany => CLASSES.outcome(Completion::Status(429)),
            Self::TooManyUntil(hint) => CLASSES.outcome(Completion::Status(429)).retry_after(hint),
            Self::Unavailable => CLASSES.outcome(Completion::Status(503)),
        }
    }
}

/// A single caller that sends requests back to back.
struct Script {
    hosts: Keyed<Authority>,
    host: Authority,
    started: Instant,
}

impl Script {
    fn new() -> Self {
        // With randomness fixed at zero, a pause has no jitter.
        let hosts = Keyed::builder(aimd_host()).random(Random::fixed(0.0)).build().expect("in bounds");
        Self {
            hosts,
            host: Authority::new("https://scripted.example/").expect("a host"),
            started: Instant::now(),
        }
    }

    fn millis(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_millis()).expect("a short test")
    }

    /// The rate in millionths per second, and the state of the circuit.
    fn seen(&self) -> (u64, CircuitState) {
        let seen = self.hosts.throttle(&self.host).snapshot();
        (seen.rate.expect("a rate").millionths(), seen.circuit.expect("a circuit").state)
    }

    /// How long the circuit stays open.
    fn refused_for(&self) -> Option<Duration> {
        match self.hosts.try_acquire(&self.host, REQUEST) {
            Err(Refused::CircuitOpen { retry_after }) => Some(retry_after),
            _ => None,
        }
    }

    /// Makes one request. Returns the time of its response, and the rate and circuit after it.
    async fn step(&self, reply: Reply) -> (u64, u64, CircuitState) {
        let permit = self.hosts.acquire(&self.host, REQUEST).await.expect("admitted");
        sleep(reply.latency()).await;
        permit.settle(reply.outcome());
        let (rate, circuit) = self.seen();
        (self.millis(), rate, circuit)
    }
}

/// Runs the replies and checks each step: the time of the response in milliseconds, and the rate in
/// millionths per second and the circuit after it.
async fn check(script: &Script, steps: &[(Reply, u64, u64, CircuitState)]) {
    for (number, (reply, at, rate, circuit)) in steps.iter().enumerate() {
        let found = script.step(*reply).await;
        assert_eq!(found, (*at, *rate, *circuit), "step {number}: {reply:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn rate_and_circuit_follow_the_script() {
    let script = Script::new();
    let up_and_down = [
        // A burst of four, then two per second.
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
        // Twice the expected latency halves the rate. Four entries have accrued in the meantime of the slow
        // response.
        (Slow, 4_733, 1_292_375, Closed),
        (Fast, 4_783, 1_292_375, Closed),
        (Fast, 4_833, 1_292_375, Closed),
        (Fast, 4_883, 1_292_375, Closed),
        // Halved again; the circuit counts one failure, which the next success resets.
        (TooMany, 4_933, 646_187, Closed),
        // The overload rate is remembered: a quarter more per second.
        (Fast, 6_131, 847_715, Closed),
        (Fast, 7_323, 1_110_505, Closed),
        (Fast, 8_235, 1_110_505, Closed),
        // A `Retry-After` of three seconds: half the rate, no accrual until 12.136, and no failure for the
        // circuit.
        (TooManyUntil(secs(3)), 9_136, 555_252, Closed),
        (Fast, 13_886, 824_202, Closed),
        (Fast, 15_116, 1_034_991, Closed),
        (Fast, 16_092, 1_034_991, Closed),
    ];
    check(&script, &up_and_down).await;

    // Only 503: halved each time down to the floor, and the circuit opens at the fifth in a row.
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
        // The overload rate was 1.03 when the cuts began: the rate climbs again, at most doubling per step.
        (Fast, 49_803, 500_000, HalfOpen),
        // The third probe closes it.
        (Fast, 51_828, 786_132, Closed),
        (Fast, 53_119, 988_384, Closed),
        // Near the overload rate, it grows by a fiftieth per second.
        (Fast, 54_141, 1_008_594, Closed),
        (Fast, 55_133, 1_008_594, Closed),
        (Fast, 56_125, 1_049_010, Closed),
    ];
    check(&script, &healed).await;
}

#[tokio::test(start_paused = true)]
async fn failed_probes_double_open_time_up_to_fivefold() {
    let script = Script::new();
    // A burst of four, and the fifth at the floor of the rate.
    let opens = [
        (Unavailable, 50, 1_000_000, Closed),
        (Unavailable, 100, 500_000, Closed),
        (Unavailable, 150, 250_000, Closed),
        (Unavailable, 200, 250_000, Closed),
    ];
    check(&script, &opens).await;
    let (opened, _, circuit) = script.step(Unavailable).await;
    assert_eq!(circuit, Open);
    let mut expected = opened;
    for span in [15, 30, 60, 75, 75] {
        assert_eq!(script.refused_for(), Some(secs(span)));
        sleep(secs(span)).await;
        expected += span * 1_000 + 50;
        assert_eq!(script.step(Unavailable).await, (expected, 250_000, Open), "open for {span} s");
    }
    sleep(secs(75)).await;
    for (probe, circuit) in [HalfOpen, HalfOpen, Closed].into_iter().enumerate() {
        assert_eq!(script.step(Fast).await.2, circuit, "probe {probe}");
    }
    // After it has closed, the open time starts over.
    for _ in 0..5 {
        script.step(Unavailable).await;
    }
    assert_eq!(script.refused_for(), Some(secs(15)));
}
