//! The measures of a run.

use crate::scenario::{Scenario, Upstream};
use crate::sim::{BIN, Bin, Run, index};

/// The measures of one run, or the means of several.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Measures {
    /// Units that succeeded as a share of the capacity, after the first fifth of the run.
    pub goodput: f64,
    /// Goodput in the second half of the run; with a fixed window, only whole windows count.
    pub goodput_late: f64,
    /// The mean capacity in units per second, the base of `goodput`.
    pub capacity: f64,
    /// Share of requests that were rejected, after the first fifth of the run.
    pub rejected: f64,
    /// Jain's fairness index of the clients in the second half: 1 means equal shares.
    pub jain: f64,
    /// The 99th percentile of the latency of successes, in seconds.
    pub p99_s: f64,
    /// The 99th percentile of the wait of arrivals until they were sent, in seconds.
    pub wait_s: f64,
    /// Seconds until 90 % of the capacity was used with at most 10 % rejected: from the start, and from each
    /// change of the limit. A run that never settles counts with its length.
    pub settled_s: Vec<f64>,
}

/// Rates over time, for plots.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Series {
    /// Seconds between two points.
    pub step_s: f64,
    /// Units per second that succeeded.
    pub good: Vec<f64>,
    /// Capacity in units per second.
    pub capacity: Vec<f64>,
    /// Requests per second that were rejected.
    pub rejected: Vec<f64>,
}

impl Measures {
    pub(crate) fn of(scenario: &Scenario, run: &mut Run) -> Self {
        let (from, until) = judged(scenario);
        let bins = &run.bins[from..until];
        let total = |value: fn(&Bin) -> f64| bins.iter().map(value).sum::<f64>();
        let (late_from, late_until) = second_half(scenario);
        let sent = total(|bin| f64::from(bin.sent)).max(1.0);
        let changes = scenario.capacity.iter().skip(1).map(|(at, _)| *at).filter(|at| *at < scenario.seconds);
        let ends = changes.clone().chain([scenario.seconds]);
        let starts = [0.0].into_iter().chain(changes);
        Self {
            goodput: goodput(bins),
            goodput_late: goodput(&run.bins[late_from..late_until]),
            capacity: total(|bin| bin.ideal) / crate::sim::start(bins.len()),
            rejected: total(|bin| f64::from(bin.rejected)) / sent,
            jain: jain(&run.late),
            p99_s: quantile(&mut run.latencies, 0.99),
            wait_s: quantile(&mut run.waits, 0.99),
            settled_s: starts.zip(ends).map(|(from, until)| settled(scenario, run, from, until)).collect(),
        }
    }

    /// The means of several runs.
    #[expect(clippy::cast_precision_loss, reason = "seeds are few")]
    pub(crate) fn mean(all: &[Self]) -> Self {
        let count = all.len().max(1) as f64;
        let mean = |value: &dyn Fn(&Self) -> f64| all.iter().map(value).sum::<f64>() / count;
        let changes = all.first().map_or(0, |first| first.settled_s.len());
        Self {
            goodput: mean(&|one| one.goodput),
            goodput_late: mean(&|one| one.goodput_late),
            capacity: mean(&|one| one.capacity),
            rejected: mean(&|one| one.rejected),
            jain: mean(&|one| one.jain),
            p99_s: mean(&|one| one.p99_s),
            wait_s: mean(&|one| one.wait_s),
            settled_s: (0..changes).map(|change| mean(&|one| one.settled_s[change])).collect(),
        }
    }
}

impl Series {
    /// At most about this many points.
    const POINTS: usize = 240;

    #[expect(clippy::cast_precision_loss, reason = "bins are few")]
    pub(crate) fn of(run: &Run) -> Self {
        // The last two bins are beyond the end of the run.
        let bins = &run.bins[..run.bins.len().saturating_sub(2)];
        let per_point = bins.len().div_ceil(Self::POINTS).max(10);
        let step_s = per_point as f64 * BIN;
        let rate = |value: fn(&Bin) -> f64| {
            bins.chunks_exact(per_point).map(|bins| bins.iter().map(value).sum::<f64>() / step_s).collect()
        };
        Self {
            step_s,
            good: rate(|bin| bin.good),
            capacity: rate(|bin| bin.ideal),
            rejected: rate(|bin| f64::from(bin.rejected)),
        }
    }
}

/// Units that succeeded as a share of the capacity.
fn goodput(bins: &[Bin]) -> f64 {
    let (good, ideal) =
        bins.iter().fold((0.0, 0.0), |(good, ideal), bin| (good + bin.good, ideal + bin.ideal));
    good / f64::max(ideal, 1e-9)
}

/// The bins of the second half. With a fixed window, only whole windows count, if there is one: a client may
/// use all of a window at its start, and half of one would count as all or nothing.
fn second_half(scenario: &Scenario) -> (usize, usize) {
    let (from, until) = (scenario.seconds / 2.0, scenario.seconds);
    let (from, until) = match scenario.upstream {
        Upstream::Window { length } => {
            let whole = ((from / length).ceil() * length, (until / length).floor() * length);
            if whole.1 > whole.0 { whole } else { (from, until) }
        }
        _ => (from, until),
    };
    // The middle of a bin, so that rounding does not select the previous one.
    (index(from + BIN / 2.0), index(until + BIN / 2.0))
}

/// The bins that count: after the first fifth, after all clients have started, and before responses would be
/// missing.
fn judged(scenario: &Scenario) -> (usize, usize) {
    let clients = crate::sim::start(scenario.clients) / BIN;
    let from = (0.2 * scenario.seconds).max(scenario.stagger * clients + 10.0).min(scenario.seconds / 2.0);
    let missing =
        if scenario.counts_on_arrival() { (8.0 * scenario.latency).min(0.3 * scenario.seconds) } else { 0.0 };
    (index(from), index(scenario.seconds - missing) - 1)
}

/// The first time from `from` on at which a stretch of 20 requests, and at least a second, gets 90 % of the
/// capacity.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "times are positive and short")]
fn settled(scenario: &Scenario, run: &Run, from: f64, until: f64) -> f64 {
    let requests = scenario.ideal_at(from + BIN / 2.0) / scenario.unit();
    let stretch = ((20.0 / requests).max(1.0) / BIN).ceil() as usize;
    let (first, last) = ((from / BIN).ceil() as usize, index(until).min(run.bins.len()));
    let is_settled = |at: &usize| {
        let bins = &run.bins[*at..*at + stretch];
        let (mut good, mut ideal, mut sent, mut rejected) = (0.0, 0.0, 0, 0);
        for bin in bins {
            good += bin.good;
            ideal += bin.ideal;
            sent += bin.sent;
            rejected += bin.rejected;
        }
        good >= 0.9 * ideal && f64::from(rejected) <= 0.1 * f64::from(sent) + 1.0
    };
    let found = (first..last.saturating_sub(stretch)).find(is_settled);
    found.map_or(until - from, |at| crate::sim::start(at) - from)
}

/// Jain's fairness index.
#[expect(clippy::cast_precision_loss, reason = "clients are few")]
fn jain(shares: &[f64]) -> f64 {
    let (sum, squares) = shares.iter().fold((0.0, 0.0), |(sum, squares), x| (sum + x, squares + x * x));
    sum * sum / (shares.len() as f64 * squares).max(1e-9)
}

#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    clippy::cast_precision_loss,
    reason = "an index of a list"
)]
fn quantile(values: &mut [f32], share: f64) -> f64 {
    if values.is_empty() {
        return 0.0;
    }
    let at = ((values.len() - 1) as f64 * share) as usize;
    let (_, value, _) = values.select_nth_unstable_by(at, f32::total_cmp);
    f64::from(*value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jain_is_one_for_equal_shares() {
        assert!((jain(&[3.0, 3.0, 3.0]) - 1.0).abs() < 1e-9);
        assert!((jain(&[3.0, 0.0]) - 0.5).abs() < 1e-9);
    }

    #[test]
    fn quantile_is_of_the_sorted_values() {
        let mut values: Vec<f32> = (0..=100_u8).rev().map(f32::from).collect();
        assert!((quantile(&mut values, 0.99) - 99.0).abs() < 1e-9);
        assert!(quantile(&mut [], 0.99).abs() < 1e-9);
    }
}
