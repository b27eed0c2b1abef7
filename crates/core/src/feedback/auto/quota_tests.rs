//! Tests of single cuts, returns and rises of one dimension.

use super::*;

/// A client at 100 per second that has sent 1,000 requests since an anchor 10 s ago.
fn quota(estimate: f64, rate: f64, confidence: u32) -> Quota {
    let mut quota = Quota { estimate, calm: estimate, sent: 1_000, ..Quota::starting_at(rate, 0) };
    (0..confidence).for_each(|_| quota.probe.confirm(1_000.0));
    quota.start(0.0);
    quota
}

/// Rejects the last of `sent` requests.
fn cut(quota: &mut Quota, wave: Wave, sent: u64, sent_at: f64) {
    quota.sent = sent;
    quota.reject(1, sent_at);
    quota.cut(wave, sent - 1, 1, sent_at, 1.0);
}

#[track_caller]
fn near(one: f64, other: f64) {
    assert!((one - other).abs() < 1e-6 * (1.0 + other.abs()), "{one}, not {other}");
}

#[test]
fn first_cut_keeps_a_share_of_a_doubling_pace() {
    let mut quota = quota(0.0, 200.0, 0);
    cut(&mut quota, Wave::First, 1_001, 10.0);
    near(quota.estimate, 140.0);
    near(quota.rate, 140.0 * 0.8);
    near(quota.calm, 0.0);
}

#[test]
fn calm_cut_measures_accepted_units_over_time() {
    // Estimate, pace, sent in 10 s; the new estimate and what the pace returns to.
    let table = [
        // As expected: the accepted requests.
        (100.0, 102.0, 1_011, 101.0, 101.0),
        // Within half a swing below the pace.
        (100.0, 102.0, 501, 102.0 * 0.985, 102.0 * 0.985),
        (100.0, 102.0, 2_001, 102.0, 102.0),
        // The limit has moved: between the accepted requests and the pace.
        (100.0, 400.0, 2_001, (200.0_f64 * 400.0).sqrt(), 200.0),
        (100.0, 900.0, 1_201, 450.0, 120.0),
        // No more was accepted than before: one step up.
        (100.0, 400.0, 1_051, 105.0 * 1.1, 105.0 * 1.1),
        (100.0, 400.0, 501, 110.0, 110.0),
        (100.0, 109.0, 501, 109.0, 109.0),
    ];
    for (estimate, rate, sent, wanted, calm) in table {
        let mut quota = quota(estimate, rate, 3);
        cut(&mut quota, Wave::Calm, sent, 10.0);
        near(quota.estimate, wanted);
        near(quota.calm, calm);
        near(quota.rate, wanted * (1.0 - quota.probe.swing()));
    }
}

#[test]
fn calm_cut_moves_confidence() {
    let confidence = |estimate, rate, sent| {
        let mut quota = quota(estimate, rate, 3);
        cut(&mut quota, Wave::Calm, sent, 10.0);
        quota.probe.confidence()
    };
    near(confidence(100.0, 102.0, 1_011), 4.0);
    near(confidence(100.0, 95.0, 1_011), 3.0);
    near(confidence(100.0, 400.0, 2_001), 1.0);
    near(confidence(100.0, 400.0, 501), 3.0);
}

#[test]
fn pressed_cut_goes_below_pace_and_measure() {
    for accepted_some in [false, true] {
        let mut quota = quota(100.0, 90.0, 3);
        cut(&mut quota, Wave::Pressed { accepted_some }, 2_001, 10.0);
        near(quota.estimate, 90.0 * 0.985);
        near(quota.calm, if accepted_some { 90.0 * 0.985 } else { 100.0 });
        near(quota.probe.confidence(), if accepted_some { 1.5 } else { 3.0 });
    }
    let mut few = quota(100.0, 90.0, 3);
    cut(&mut few, Wave::Pressed { accepted_some: true }, 501, 10.0);
    near(few.estimate, 50.1);
    let mut none = quota(100.0, 90.0, 3);
    cut(&mut none, Wave::Pressed { accepted_some: false }, 1, 1e9);
    near(none.estimate, ESTIMATE_MIN);
}

#[test]
fn anchor_moves_with_calm_cuts_and_many_requests() {
    // In 10 s 2,000 requests, then in 1 s as many, and in 10 s a hundred.
    for (sent, at, is_moved) in [(2_001, 10.0, true), (2_001, 1.0, false), (101, 10.0, false)] {
        let mut pressed = quota(100.0, 90.0, 3);
        cut(&mut pressed, Wave::Pressed { accepted_some: true }, sent, at);
        near(pressed.dark_for(at), if is_moved { 0.0 } else { at });
        let mut calm = quota(100.0, 90.0, 3);
        cut(&mut calm, Wave::Calm, sent, at);
        near(calm.dark_for(at), 0.0);
    }
}

#[test]
fn rejection_before_the_anchor_does_not_count_twice() {
    let mut one = quota(100.0, 102.0, 3);
    cut(&mut one, Wave::Calm, 1_001, 10.0);
    let mut other = one;
    // Of the thousand before the anchor ten were rejected: that changes nothing of those accepted since.
    other.reject(10, 9.0);
    for quota in [&mut one, &mut other] {
        quota.rate = 102.0;
        cut(quota, Wave::Calm, 2_001, 20.0);
    }
    near(other.estimate, one.estimate);
}

#[test]
fn return_separates_a_window_from_an_outage() {
    // Confidence, units accepted in 60 s; the new estimate, and whether that is a window.
    let table = [
        (0, Some(3_000.0), 52.5, true),
        (0, Some(9_000.0), 150.0, true),
        (0, Some(5_800.0), 100.0, true),
        (3, Some(4_800.0), 84.0, true),
        (3, Some(3_000.0), 100.0, false),
        (0, Some(0.0), 0.02, true),
        (3, None, 100.0, false),
    ];
    for (confidence, accepted, wanted, is_window) in table {
        let mut quota = quota(100.0, 1.0, confidence);
        assert_eq!(quota.recover(accepted, 60.0, 1.0, 10.0), is_window, "{accepted:?}");
        near(quota.estimate, wanted);
        near(quota.calm, wanted);
        near(quota.rate, wanted * (1.0 - quota.probe.swing()));
    }
    let mut unknown = quota(0.0, 1.0, 0);
    assert!(!unknown.recover(None, 60.0, 7.0, 10.0));
    near(unknown.rate, 70.0);
}

#[test]
fn pace_returns_swings_and_departs() {
    // Estimate, what the pace returns to, pace; the pace 0.1 s later.
    let table = [
        // Doubles in the baseline latency of 0.2 s.
        (0.0, 0.0, 10.0, 10.0 * 2_f64.sqrt()),
        // Back to the estimate, and not beyond its swing.
        (100.0, 100.0, 50.0, 53.0),
        (100.0, 100.0, 96.0, 97.0),
        // Back to the pace granted before a deep cut.
        (100.0, 300.0, 98.0, 107.0),
        // The swing: 6 % in 3 s.
        (100.0, 100.0, 98.0, 98.2),
        // Away: the excess doubles in 0.35 s.
        (100.0, 100.0, 110.0, 112.0),
    ];
    for (estimate, calm, rate, wanted) in table {
        let mut quota = Quota { calm, ..quota(estimate, rate, 3) };
        quota.rise(0.1, 0.2, 1.0, 0.0);
        near(quota.rate, wanted);
    }
    let mut returned = Quota { calm: 101.0, ..quota(90.0, 97.9, 3) };
    returned.rise(0.1, 0.2, 1.0, 0.0);
    near(returned.estimate, 101.0);
    let mut unmeasured = quota(0.0, 10.0, 0);
    unmeasured.rise(1.0, 0.0, 1.0, 0.0);
    near(unmeasured.rate, 10.0);
    let mut windowed = quota(100.0, 110.0, 3);
    windowed.rise(0.1, 0.2, 1.0, 60.0);
    near(windowed.rate, 110.0 + 2.0 / 60.0 * 10.0 * 0.1);
}
