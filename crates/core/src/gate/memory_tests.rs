//! A far side takes two requests per second and holds four at once. The rate grew to 3.2 before it met the wall, since the
//! far side lived off what it held; 3.2 was remembered, nine tenths of that are well above two, and so it grew by a quarter
//! each second right through the capacity and into the wall again, for ever: one request of nine was refused, one of five
//! where it takes one per second.
//!
//! What is remembered is what was really sent of late: that is what the far side bears.

use super::tests::{Rig, at, millis, secs};
use crate::bucket::{Bucket, Shape};
use crate::outcome::Outcome;
use crate::plan::{Aimd, Controller, Draft};

/// One caller that asks whenever it may, against a far side of so much and so many at once, for a quarter of an hour after
/// five minutes. Answers what was served and what was sent, in percent of what the far side bears.
fn course(per_second: u64, burst: u64) -> (u64, u64) {
    let shape = Shape::new(per_second, secs(1), burst).unwrap();
    let mut far_side = Bucket::full();
    let controller = Controller::Aimd(Aimd::default());
    let mut rig = Rig::new(Draft { rate: Some(Aimd::RATE), controller, ..Draft::host() });
    let (mut served, mut sent) = (0, 0);
    while rig.now < at(1_200) {
        let charge = rig.enter_when_told();
        let is_fine = far_side.take(&shape, 1, rig.now).is_ok();
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
fn nine_of_ten_requests_are_served_whatever_the_far_side_bears_and_holds() {
    for (per_second, bursts) in [(2, [1, 2, 4, 8]), (3, [1, 2, 4, 8]), (5, [1, 2, 5, 20]), (7, [1, 3, 7, 20])]
    {
        for burst in bursts {
            let (served, sent) = course(per_second, burst);
            assert!(served * 10 >= sent * 9, "{per_second}/s, {burst} at once: {served} % of {sent} %");
            assert!(served >= 70, "{per_second}/s, {burst} at once: {served} % of what it bears");
        }
    }
}
