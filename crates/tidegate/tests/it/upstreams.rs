//! Keyed host throttles against simulated upstreams with hidden limits, in virtual time: hosts are isolated,
//! nearly all requests succeed, the circuit opens within seconds of an outage, and traffic resumes after
//! recovery.
//!
//! `cargo test -p tidegate --test it upstreams -- --nocapture` shows the measurements.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidegate::{Authority, CircuitState, Keyed, Random};
use tokio::time::sleep;

use crate::kit::upstream::{
    Arrival, Capacity, Health, Load, Share, Upstream, UpstreamError, aimd_host, drive, in_virtual_time,
    report,
};
use crate::kit::{millis, secs};

/// The rates have converged by now.
const SETTLED: Duration = secs(30);
/// The failing upstream returns 429 for everything from here on,
const FAILS: Duration = secs(60);
/// 503 from here on,
const UNAVAILABLE: Duration = secs(90);
/// no response from here on,
const SILENT: Duration = secs(150);
/// and is healthy again from here on.
const RECOVERS: Duration = secs(260);
/// The circuit has closed, and the rate is back.
const RECOVERED: Duration = secs(380);
const END: Duration = secs(500);

const SLOW: usize = 0;
const MIDDLE: usize = 1;
const FAST: usize = 2;

fn hosts(seed: u64) -> Keyed<Authority> {
    Keyed::builder(aimd_host()).random(Random::seeded(seed)).build().expect("in bounds")
}

/// Three upstreams: 2 per second, 10 in every 2 s, and 12 per second, which exceeds the load. The last one
/// fails.
fn upstreams(seed: u64) -> [Upstream; 3] {
    let slow = Capacity::Bucket { per_second: 2.0, burst: 2.0 };
    let middle = Capacity::Window { requests: 10, span: secs(2) };
    let fast = Capacity::Bucket { per_second: 12.0, burst: 12.0 };
    [
        Upstream::new("slow.example", slow, millis(120), seed),
        Upstream::new("middle.example", middle, millis(60), seed + 1),
        Upstream::new("fast.example:8443", fast, millis(200), seed + 2)
            .becomes(FAILS, Health::TooMany(None))
            .becomes(UNAVAILABLE, Health::Unavailable)
            .becomes(SILENT, Health::Silent)
            .becomes(RECOVERS, Health::Healthy),
    ]
}

/// Runs the selected upstreams in one registry and returns them.
fn run(which: &[usize], seed: u64, load: Load) -> Vec<Arc<Upstream>> {
    in_virtual_time(async {
        let hosts = hosts(seed);
        let chosen = upstreams(seed).into_iter().enumerate().filter(|(index, _)| which.contains(index));
        let chosen: Vec<_> = chosen.map(|(_, upstream)| Arc::new(upstream)).collect();
        for upstream in &chosen {
            drive(&hosts, upstream, load, seed);
        }
        sleep(END).await;
        assert_eq!(hosts.snapshot(0).keys, chosen.len());
        chosen
    })
}

const LOADS: [Load; 2] = [Load::Closed(8), Load::Open(millis(180))];

/// One run of all three upstreams.
struct Run {
    load: Load,
    seed: u64,
    upstreams: Vec<Arc<Upstream>>,
}

/// All three upstreams under each load and several seeds, run once and shared by several tests.
fn runs() -> &'static [Run] {
    static RUNS: OnceLock<Vec<Run>> = OnceLock::new();
    RUNS.get_or_init(|| {
        let each = LOADS.into_iter().flat_map(|load| (1..=2).map(move |seed| (load, seed)));
        each.map(|(load, seed)| Run { load, seed, upstreams: run(&[SLOW, MIDDLE, FAST], seed, load) })
            .collect()
    })
}

#[test]
fn healthy_hosts_keep_goodput_beside_a_failing_one() {
    for Run { load, seed, upstreams } in runs().iter().filter(|run| run.seed == 1) {
        for index in [SLOW, MIDDLE] {
            let alone = run(&[index], *seed, *load).remove(0).served(SETTLED, END).part;
            let (host, beside) = (&upstreams[index].host, upstreams[index].served(SETTLED, END).part);
            report(format_args!("{load:?}: {host} served {alone} alone, {beside} beside a failing one"));
            assert!(beside * 100 >= alone * 95 && alone > 800, "{host}: {alone} alone, {beside} together");
        }
    }
}

/// Randomness depends on seed and key alone, so a run is reproducible to the millisecond whatever other hosts
/// do.
#[test]
fn arrival_times_do_not_depend_on_other_hosts() {
    let Run { load, seed, upstreams } = &runs()[0];
    let times =
        |upstream: &Upstream| upstream.arrivals().iter().map(|arrival| arrival.at).collect::<Vec<_>>();
    let alone = run(&[SLOW], *seed, *load).remove(0);
    assert!(times(&alone) == times(&upstreams[SLOW]), "other hosts changed the arrival times");
}

#[test]
fn over_90_percent_succeed_once_rate_is_stable() {
    for Run { load, seed, upstreams } in runs() {
        for (index, upstream) in upstreams.iter().enumerate() {
            let healthy_until = if index == FAST { FAILS } else { END };
            for (from, until) in [(SETTLED, healthy_until), (RECOVERED, END)] {
                let (host, share) = (&upstream.host, upstream.served(from, until));
                let Share { part, of } = share;
                report(format_args!(
                    "{load:?} {seed}: {host} served {part} of {of} from {from:?} to {until:?}"
                ));
                assert!(share.is_above(90) && of >= 100, "{host} served {part} of {of} from {from:?}");
            }
        }
    }
}

#[test]
fn circuit_opens_within_5s_and_closes_after_recovery() {
    for Run { load, seed, upstreams } in runs() {
        for upstream in &upstreams[..FAST] {
            assert_eq!(upstream.circuit(), [], "the circuit of {} never changed", upstream.host);
        }
        let failing = &upstreams[FAST];
        let opened = failing.seen_after(FAILS, CircuitState::Open).expect("the circuit opens");
        let closed = failing.seen_after(RECOVERS, CircuitState::Closed).expect("the circuit closes");
        let Share { part, of } = failing.served(FAILS, RECOVERS);
        report(format_args!(
            "{load:?} {seed}: open after {opened:?}, {of} requests during the outage, closed {closed:?} after recovery"
        ));
        assert!(opened <= secs(5), "{opened:?}");
        // The longest open period, and three probes at the lowest rate.
        assert!(closed <= secs(75 + 12), "{closed:?}");
        assert_eq!(failing.circuit().last().expect("it closed").1, CircuitState::Closed, "it stays closed");
        let per_minute = |from: Duration| failing.served(from, from + secs(60)).part;
        let (before, after) =
            (failing.served(SETTLED, FAILS).part * 2, per_minute(RECOVERS + closed + secs(30)));
        assert!(after * 10 >= before * 9, "{before} in a minute before, {after} half a minute after");
        // Few requests were sent during the outage, and some in each of its phases.
        assert!(part == 0 && of <= 40, "{of} during the outage");
        for (from, until) in [(FAILS, UNAVAILABLE), (UNAVAILABLE, SILENT), (SILENT, RECOVERS)] {
            assert!(failing.served(from, until).of > 0, "no request from {from:?} to {until:?}");
        }
    }
}

#[test]
fn transient_failures_cost_under_three_attempts() {
    for Run { load, seed, upstreams } in runs() {
        for upstream in upstreams {
            let (calls, attempts) = upstream.attempts_of_failing_calls();
            report(format_args!("{load:?} {seed}: {} took {attempts} attempts for {calls}", upstream.host));
            assert!(calls > 0 && attempts < 3 * calls, "{}: {attempts} for {calls}", upstream.host);
        }
    }
}

/// One upstream that is healthy for a minute and fails from then on.
fn failing_upstream(capacity: Capacity, latency: Duration, health: Health, seed: u64) -> Arc<Upstream> {
    in_virtual_time(async {
        let hosts = hosts(seed);
        let upstream = Upstream::new("failing.example", capacity, latency, seed).becomes(FAILS, health);
        let upstream = Arc::new(upstream);
        drive(&hosts, &upstream, Load::Closed(8), seed);
        sleep(secs(90)).await;
        upstream
    })
}

#[test]
fn each_failure_kind_opens_circuit_within_5s() {
    let capacity = Capacity::Bucket { per_second: 12.0, burst: 12.0 };
    for health in [Health::TooMany(None), Health::Unavailable, Health::Silent] {
        for latency in [20, 100, 400] {
            let upstream = failing_upstream(capacity, millis(latency), health, latency);
            let opened = upstream.seen_after(FAILS, CircuitState::Open).expect("the circuit opens");
            report(format_args!("{health:?} at a latency of {latency} ms: open after {opened:?}"));
            assert!(opened <= secs(5), "{health:?} at {latency} ms: {opened:?}");
        }
    }
}

/// The circuit opens at the fifth failure in a row and each overload halves the rate. So under constant load
/// an upstream with a low rate takes a little longer: five requests 1/r, 2/r, 4/r, … apart, and at most four
/// seconds.
#[test]
fn low_rate_upstream_trips_at_fifth_failure() {
    for (per_second, least) in [(2.0, 2.0), (3.0, 2.5), (5.0, 4.0)] {
        let capacity = Capacity::Bucket { per_second, burst: per_second };
        for health in [Health::TooMany(None), Health::Unavailable] {
            let upstream = failing_upstream(capacity, millis(100), health, 3);
            let opened = upstream.seen_after(FAILS, CircuitState::Open).expect("the circuit opens");
            let gaps = [1.0, 2.0, 4.0, 8.0, 16.0].map(|gap: f64| (gap / (least / 2.0)).min(4.0));
            let bound = gaps.iter().sum::<f64>() + 5.0 * 0.15;
            let sent = upstream.served(FAILS, FAILS + opened).of;
            report(format_args!(
                "{health:?} of {per_second} per second: open after {opened:?} and {sent} requests"
            ));
            assert!(opened.as_secs_f64() <= bound && sent <= 8, "{opened:?}, {bound} s, {sent} sent");
        }
    }
}

/// Checks that no request arrives during a hint, up to the longest pause. Returns the number of hints.
fn check_hints(arrivals: &[Arrival], longest: Duration) -> usize {
    let mut hints = 0;
    for (received, answer) in arrivals.iter().filter_map(|arrival| arrival.result) {
        let Err(UpstreamError::TooMany(Some(hint))) = answer else { continue };
        hints += 1;
        let over = received + hint.min(longest);
        let early = arrivals.iter().find(|arrival| arrival.at > received && arrival.at < over);
        assert!(early.is_none(), "hint at {received:?} to retry after {over:?}: {early:?}");
    }
    hints
}

/// A hint longer than the longest pause is capped.
#[test]
fn no_request_arrives_during_a_retry_after() {
    const LONGEST: Duration = Duration::from_secs(600);
    for (load, seed) in LOADS.into_iter().zip([7, 8]) {
        let upstream = in_virtual_time(async {
            let hosts = hosts(seed);
            let capacity = Capacity::Bucket { per_second: 12.0, burst: 12.0 };
            let upstream = Upstream::new("hints.example", capacity, millis(150), seed)
                .becomes(secs(60), Health::TooMany(Some(secs(7))))
                .becomes(secs(100), Health::Healthy)
                .becomes(secs(200), Health::TooMany(Some(millis(1_500))))
                .becomes(secs(210), Health::Healthy)
                // A day exceeds the longest pause, so it is capped.
                .becomes(secs(300), Health::TooMany(Some(secs(86_400))))
                .becomes(secs(400), Health::Healthy);
            let upstream = Arc::new(upstream);
            drive(&hosts, &upstream, load, seed);
            sleep(secs(1_000)).await;
            upstream
        });
        let arrivals = upstream.arrivals();
        let hints = check_hints(&arrivals, LONGEST);
        let resumed = arrivals.iter().find(|arrival| arrival.at > secs(400)).expect("requests resume");
        let resumed = resumed.at.saturating_sub(secs(300));
        report(format_args!(
            "{load:?}: {hints} hints were honoured; after a hint of one day requests resumed in {resumed:?}"
        ));
        assert!(hints >= 10, "{hints}");
        // Capped at ten minutes, plus up to a second of jitter and a few to refill.
        assert!(resumed >= LONGEST && resumed < LONGEST + secs(10), "{resumed:?}");
        assert_eq!(upstream.circuit(), [], "an upstream that sends `Retry-After` is alive");
        let Share { part, of } = upstream.served(secs(900) + secs(30), secs(1_000));
        assert!(part > 0 && part * 10 > of * 9, "{part} of {of} at the end");
    }
}
