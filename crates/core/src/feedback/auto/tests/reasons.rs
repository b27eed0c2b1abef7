//! The reason reported for the limits, and when it ends.

use super::*;

/// Regression: the reason stayed `latency` although slots had grown beyond those before the cut.
#[test]
fn reason_latency_ends_when_slots_have_regrown() {
    let mut rig = Rig::new();
    let fast = |_, _| (millis(100), Outcome::success());
    rig.work(20, fast);
    assert_ne!(rig.control().reason, Reason::Latency);
    let slow = rig.work(20, |in_flight, _| {
        (millis(if in_flight > 10 { 40 * in_flight } else { 100 }), Outcome::success())
    });
    assert!(slow.contains(&Reason::Latency), "{slow:?}");
    rig.work(60, fast);
    assert_ne!(rig.control().reason, Reason::Latency, "{:?}", rig.control());
}

/// Regression: the reason stayed `concurrency` although the cap was lifted.
#[test]
fn reason_concurrency_ends_when_a_cap_is_lifted() {
    let mut rig = Rig::new();
    rig.work(60, |in_flight, _| {
        if in_flight > 10 { (millis(20), Outcome::overload()) } else { (millis(200), Outcome::success()) }
    });
    assert_eq!(rig.control().reason, Reason::Concurrency);
    rig.work(60, |_, _| (millis(200), Outcome::success()));
    assert_ne!(rig.control().reason, Reason::Concurrency);
    assert!(rig.control().slots > 40, "{:?}", rig.control());
}

/// Regression: every client was reported as sharing its quota until it was sure of it.
#[test]
fn reason_shared_needs_others() {
    for is_shared in [false, true] {
        let (mut rig, mut level, mut at) = (Rig::new(), 1.0_f64, Instant::ZERO);
        let reasons = rig.work(120, |_, now| {
            // Of 50 per second others take 40 in every other second.
            let is_taken = is_shared && now.as_nanos() / 1_000_000_000 % 2 == 0;
            let refill = if is_taken { 10.0 } else { 50.0 };
            level = (level + refill * now.since(at).as_secs_f64()).min(5.0);
            at = now;
            if level < 1.0 {
                return (millis(20), Outcome::overload());
            }
            level -= 1.0;
            (millis(100), Outcome::success())
        });
        assert_eq!(reasons.contains(&Reason::Shared), is_shared, "{reasons:?}");
    }
}
