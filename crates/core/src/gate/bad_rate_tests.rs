//! Regression tests for the remembered bad rate of AIMD.
//!
//! With an upstream of two requests per second and a burst of four, the rate grew to 3.2 before the first
//! rejection, because the upstream lived off its burst. The controller remembered 3.2; nine tenths of that
//! are well above two, so the rate grew by a quarter each second through the capacity, forever: one request
//! in nine was rejected, or one in five at one per second. The controller now remembers the measured send
//! rate, which is what the upstream can sustain.

use super::tests::{Rig, at, millis, secs};
use crate::bucket::{Bucket, Shape};
use crate::outcome::Outcome;
use crate::plan::{Aimd, Controller, Draft};

/// Runs one caller that sends as early as it may against an upstream bucket, measured for 15 minutes after a
/// warm-up of five. Returns the served and the sent requests in percent of the upstream's rate.
fn simulate(per_second: u64, burst: u64) -> (u64, u64) {
    let shape = Shape::new(per_second, secs(1), burst).unwrap();
    let mut upstream = Bucket::full();
    let controller = Controller::Aimd(Aimd::default());
    let mut rig = Rig::new(Draft { rate: Some(Aimd::RATE), ..Draft::host() }.controlled_by(controller));
    let (mut served, mut sent) = (0, 0);
    while rig.now < at(1_200) {
        let charge = rig.enter_when_ready();
        let is_fine = upstream.take(&shape, 1, rig.now).is_ok();
        if rig.now >= at(300) {
            served += u64::from(is_fine);
            sent += 1;
        }
        rig.later(millis(20));
        rig.settle(charge, if is_fine { Outcome::success() } else { Outcome::overload() });
    }
    (served * 100 / (per_second * 900), sent * 100 / (per_second * 900))
}

#[test]
fn nine_of_ten_requests_are_served_for_any_burst() {
    for (per_second, bursts) in [(2, [1, 2, 4, 8]), (3, [1, 2, 4, 8]), (5, [1, 2, 5, 20]), (7, [1, 3, 7, 20])]
    {
        for burst in bursts {
            let (served, sent) = simulate(per_second, burst);
            assert!(served * 10 >= sent * 9, "{per_second}/s, {burst} at once: {served} % of {sent} %");
            assert!(served >= 70, "{per_second}/s, {burst} at once: {served} % of the upstream's rate");
        }
    }
}
