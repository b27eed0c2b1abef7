//! Hosts by key against far sides that nobody knows, in virtual time: what one of them does is no other's trouble, nearly
//! everything that is sent succeeds, an overload is left alone within seconds, and a far side that heals is found healed.
//!
//! `cargo test -p tidegate --test it far_sides -- --nocapture` shows what was measured.

use std::sync::{Arc, OnceLock};
use std::time::Duration;

use tidegate::{Authority, CircuitState, Keyed, Random};
use tokio::time::sleep;

use crate::kit::upstream::{
    Arrival, Capacity, FarSide, Load, Mood, Share, Trouble, aimd_host, drive, in_virtual_time, report,
};
use crate::kit::{millis, secs};

/// Far sides are known by now.
const SETTLED: Duration = secs(30);
/// The far side that turns bad says 429 to everything from here on,
const TURNS_BAD: Duration = secs(60);
/// 503 from here on,
const WORSE: Duration = secs(90);
/// nothing at all from here on,
const SILENT: Duration = secs(150);
/// and is as it was from here on.
const HEALS: Duration = secs(260);
/// The circuit has closed, and the rate is back.
const HEALED: Duration = secs(380);
const END: Duration = secs(500);

const SLOW: usize = 0;
const MIDDLE: usize = 1;
const FAST: usize = 2;

fn hosts(seed: u64) -> Keyed<Authority> {
    Keyed::builder(aimd_host()).random(Random::seeded(seed)).build().expect("in bounds")
}

/// Three far sides: of 2 per second, of 10 in every 2 s, and of 12 per second, which is more than is ever asked for and
/// which turns bad.
fn far_sides(seed: u64) -> [FarSide; 3] {
    let slow = Capacity::Bucket { per_second: 2.0, burst: 2.0 };
    let middle = Capacity::Window { requests: 10, span: secs(2) };
    let fast = Capacity::Bucket { per_second: 12.0, burst: 12.0 };
    [
        FarSide::new("slow.example", slow, millis(120), seed),
        FarSide::new("middle.example", middle, millis(60), seed + 1),
        FarSide::new("fast.example:8443", fast, millis(200), seed + 2)
            .turns(TURNS_BAD, Mood::TooMany(None))
            .turns(WORSE, Mood::Unavailable)
            .turns(SILENT, Mood::Silent)
            .turns(HEALS, Mood::Healthy),
    ]
}

/// Runs those of the three that are asked for, in one registry, and answers them.
fn run(which: &[usize], seed: u64, load: Load) -> Vec<Arc<FarSide>> {
    in_virtual_time(async {
        let hosts = hosts(seed);
        let chosen = far_sides(seed).into_iter().enumerate().filter(|(index, _)| which.contains(index));
        let chosen: Vec<_> = chosen.map(|(_, far_side)| Arc::new(far_side)).collect();
        for far_side in &chosen {
            drive(&hosts, far_side, load, seed);
        }
        sleep(END).await;
        assert_eq!(hosts.snapshot(0).keys, chosen.len());
        chosen
    })
}

const LOADS: [Load; 2] = [Load::Closed(8), Load::Open(millis(180))];

/// One run of all three together.
struct Run {
    load: Load,
    seed: u64,
    far_sides: Vec<Arc<FarSide>>,
}

/// All three together, by each load and by several seeds: run once, looked at by several tests.
fn runs() -> &'static [Run] {
    static RUNS: OnceLock<Vec<Run>> = OnceLock::new();
    RUNS.get_or_init(|| {
        let each = LOADS.into_iter().flat_map(|load| (1..=2).map(move |seed| (load, seed)));
        each.map(|(load, seed)| Run { load, seed, far_sides: run(&[SLOW, MIDDLE, FAST], seed, load) })
            .collect()
    })
}

#[test]
fn the_others_keep_the_goodput_they_have_alone() {
    for Run { load, seed, far_sides } in runs().iter().filter(|run| run.seed == 1) {
        for index in [SLOW, MIDDLE] {
            let alone = run(&[index], *seed, *load).remove(0).served(SETTLED, END).part;
            let (host, beside) = (&far_sides[index].host, far_sides[index].served(SETTLED, END).part);
            report(format_args!("{load:?}: {host} served {alone} alone, {beside} beside a bad one"));
            assert!(beside * 100 >= alone * 95 && alone > 800, "{host}: {alone} alone, {beside} together");
        }
    }
}

/// Chance is by seed and key, and time is virtual: whoever else is there, a run can be repeated to the millisecond.
#[test]
fn what_arrives_and_when_is_the_same_every_time_and_in_any_company() {
    let Run { load, seed, far_sides } = &runs()[0];
    let times = |far_side: &FarSide| far_side.arrivals().iter().map(|arrival| arrival.at).collect::<Vec<_>>();
    let alone = run(&[SLOW], *seed, *load).remove(0);
    assert!(times(&alone) == times(&far_sides[SLOW]), "alone and in company");
}

#[test]
fn more_than_nine_of_ten_succeed_once_it_is_stable() {
    for Run { load, seed, far_sides } in runs() {
        for (index, far_side) in far_sides.iter().enumerate() {
            let well = if index == FAST { TURNS_BAD } else { END };
            for (from, until) in [(SETTLED, well), (HEALED, END)] {
                let (host, share) = (&far_side.host, far_side.served(from, until));
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
fn the_circuit_opens_within_five_seconds_and_closes_by_itself_after_healing() {
    for Run { load, seed, far_sides } in runs() {
        for far_side in &far_sides[..FAST] {
            assert_eq!(far_side.circuit(), [], "{} is well", far_side.host);
        }
        let bad = &far_sides[FAST];
        let opened = bad.seen_after(TURNS_BAD, CircuitState::Open).expect("it opens");
        let closed = bad.seen_after(HEALS, CircuitState::Closed).expect("it closes");
        let Share { part, of } = bad.served(TURNS_BAD, HEALS);
        report(format_args!(
            "{load:?} {seed}: open after {opened:?}, {of} requests while it was bad, closed {closed:?} after healing"
        ));
        assert!(opened <= secs(5), "{opened:?}");
        // The longest it is open, and three probes at the slowest rate.
        assert!(closed <= secs(75 + 12), "{closed:?}");
        assert_eq!(bad.circuit().last().expect("it closed").1, CircuitState::Closed, "and stays so");
        let per_minute = |from: Duration| bad.served(from, from + secs(60)).part;
        let (before, after) =
            (bad.served(SETTLED, TURNS_BAD).part * 2, per_minute(HEALS + closed + secs(30)));
        assert!(after * 10 >= before * 9, "{before} in a minute before, {after} half a minute after");
        // Next to nothing was sent there, and each mood was met.
        assert!(part == 0 && of <= 40, "{of} while it was bad");
        for (from, until) in [(TURNS_BAD, WORSE), (WORSE, SILENT), (SILENT, HEALS)] {
            assert!(bad.served(from, until).of > 0, "nobody asked from {from:?} to {until:?}");
        }
    }
}

#[test]
fn fewer_than_three_attempts_are_made_for_what_fails_and_may_pass() {
    for Run { load, seed, far_sides } in runs() {
        for far_side in far_sides {
            let (works, attempts) = far_side.attempts_when_hurt();
            report(format_args!("{load:?} {seed}: {} took {attempts} attempts for {works}", far_side.host));
            assert!(works > 0 && attempts < 3 * works, "{}: {attempts} for {works}", far_side.host);
        }
    }
}

/// One far side that is well for a minute and then is not.
fn turned(capacity: Capacity, latency: Duration, mood: Mood, seed: u64) -> Arc<FarSide> {
    in_virtual_time(async {
        let hosts = hosts(seed);
        let far_side = FarSide::new("turned.example", capacity, latency, seed).turns(TURNS_BAD, mood);
        let far_side = Arc::new(far_side);
        drive(&hosts, &far_side, Load::Closed(8), seed);
        sleep(secs(90)).await;
        far_side
    })
}

#[test]
fn each_mood_by_itself_opens_the_circuit_within_five_seconds() {
    let capacity = Capacity::Bucket { per_second: 12.0, burst: 12.0 };
    for mood in [Mood::TooMany(None), Mood::Unavailable, Mood::Silent] {
        for latency in [20, 100, 400] {
            let far_side = turned(capacity, millis(latency), mood, latency);
            let opened = far_side.seen_after(TURNS_BAD, CircuitState::Open).expect("it opens");
            report(format_args!("{mood:?} at a latency of {latency} ms: open after {opened:?}"));
            assert!(opened <= secs(5), "{mood:?} at {latency} ms: {opened:?}");
        }
    }
}

/// The circuit opens at the fifth failure in a row, each overload halves the rate, and callers are there all the time: so
/// a far side that never took much is known to be down a little later, by its five requests at 1/r, 2/r, 4/r, … and at
/// most four seconds apart. What it bears less of it is also sent less of.
#[test]
fn a_slow_far_side_is_left_alone_by_the_fifth_request_at_a_rate_that_halves() {
    for (per_second, least) in [(2.0, 2.0), (3.0, 2.5), (5.0, 4.0)] {
        let capacity = Capacity::Bucket { per_second, burst: per_second };
        for mood in [Mood::TooMany(None), Mood::Unavailable] {
            let far_side = turned(capacity, millis(100), mood, 3);
            let opened = far_side.seen_after(TURNS_BAD, CircuitState::Open).expect("it opens");
            let gaps = [1.0, 2.0, 4.0, 8.0, 16.0].map(|gap: f64| (gap / (least / 2.0)).min(4.0));
            let bound = gaps.iter().sum::<f64>() + 5.0 * 0.15;
            let sent = far_side.served(TURNS_BAD, TURNS_BAD + opened).of;
            report(format_args!(
                "{mood:?} of {per_second} per second: open after {opened:?} and {sent} requests"
            ));
            assert!(opened.as_secs_f64() <= bound && sent <= 8, "{opened:?}, {bound} s, {sent} sent");
        }
    }
}

/// From when a caller heard of a hint until it is over, or until the longest pause is, nobody arrives.
fn check_hints(arrivals: &[Arrival], longest: Duration) -> usize {
    let mut hints = 0;
    for (heard, answer) in arrivals.iter().filter_map(|arrival| arrival.ended) {
        let Err(Trouble::TooMany(Some(hint))) = answer else { continue };
        hints += 1;
        let over = heard + hint.min(longest);
        let early = arrivals.iter().find(|arrival| arrival.at > heard && arrival.at < over);
        assert!(early.is_none(), "told at {heard:?} to come back at {over:?}: {early:?}");
    }
    hints
}

#[test]
fn nobody_arrives_before_a_retry_after_is_over_up_to_the_longest_pause() {
    const LONGEST: Duration = Duration::from_secs(600);
    for (load, seed) in LOADS.into_iter().zip([7, 8]) {
        let far_side = in_virtual_time(async {
            let hosts = hosts(seed);
            let capacity = Capacity::Bucket { per_second: 12.0, burst: 12.0 };
            let far_side = FarSide::new("hints.example", capacity, millis(150), seed)
                .turns(secs(60), Mood::TooMany(Some(secs(7))))
                .turns(secs(100), Mood::Healthy)
                .turns(secs(200), Mood::TooMany(Some(millis(1_500))))
                .turns(secs(210), Mood::Healthy)
                // A day is more than anybody waits: it is capped.
                .turns(secs(300), Mood::TooMany(Some(secs(86_400))))
                .turns(secs(400), Mood::Healthy);
            let far_side = Arc::new(far_side);
            drive(&hosts, &far_side, load, seed);
            sleep(secs(1_000)).await;
            far_side
        });
        let arrivals = far_side.arrivals();
        let hints = check_hints(&arrivals, LONGEST);
        let back = arrivals.iter().find(|arrival| arrival.at > secs(400)).expect("they come back");
        let back = back.at.saturating_sub(secs(300));
        report(format_args!(
            "{load:?}: {hints} hints were kept; after one of a day they were back in {back:?}"
        ));
        assert!(hints >= 10, "{hints}");
        // Capped at ten minutes, with a second to spread and a few to refill.
        assert!(back >= LONGEST && back < LONGEST + secs(10), "{back:?}");
        assert_eq!(far_side.circuit(), [], "a far side that says when to come back is alive");
        let Share { part, of } = far_side.served(secs(900) + secs(30), secs(1_000));
        assert!(part > 0 && part * 10 > of * 9, "{part} of {of} at the end");
    }
}
