//! The adaptive retry mode of AWS's SDKs: a token bucket whose rate follows CUBIC, off until the first
//! throttle.

use crate::client::{Client, Decision, Request};
use crate::upstream::{Kind, Response};

/// The fraction of the rate that remains after a throttle.
const BETA: f64 = 0.7;
/// How fast CUBIC grows.
const SCALE: f64 = 0.4;
/// The lowest rate, per second.
const RATE_MIN: f64 = 0.5;
/// The weight of the newest half second in the measured rate.
const SMOOTH: f64 = 0.8;

#[derive(Debug)]
pub(crate) struct AwsAdaptive {
    is_on: bool,
    rate: f64,
    level: f64,
    level_at: f64,
    /// The rate at the last throttle, and when that was.
    window_max: f64,
    throttled_at: f64,
    /// Responses per second, over half seconds.
    measured: f64,
    measured_at: f64,
    count: f64,
    paused_until: f64,
}

impl AwsAdaptive {
    pub(crate) const fn new() -> Self {
        Self {
            is_on: false,
            rate: RATE_MIN,
            level: 1.0,
            level_at: 0.0,
            window_max: 0.0,
            throttled_at: 0.0,
            measured: 0.0,
            measured_at: 0.0,
            count: 0.0,
            paused_until: 0.0,
        }
    }

    fn measure(&mut self, now: f64) {
        self.count += 1.0;
        let half_second = (now * 2.0).floor() / 2.0;
        if half_second > self.measured_at {
            let newest = self.count / (half_second - self.measured_at);
            self.measured = newest * SMOOTH + self.measured * (1.0 - SMOOTH);
            (self.count, self.measured_at) = (0.0, half_second);
        }
    }

    /// The CUBIC rate at the time since the last throttle.
    fn cubic(&self, now: f64) -> f64 {
        let inflection = (self.window_max * (1.0 - BETA) / SCALE).cbrt();
        SCALE * (now - self.throttled_at - inflection).powi(3) + self.window_max
    }
}

impl Client for AwsAdaptive {
    fn ask(&mut self, now: f64, _: Request) -> Decision {
        if now < self.paused_until {
            return Decision::NotBefore(self.paused_until);
        }
        if self.is_on {
            self.level = (self.level + self.rate * (now - self.level_at)).min(self.rate.max(1.0));
            self.level_at = now;
            if self.level < 1.0 - 1e-9 {
                return Decision::NotBefore(now + (1.0 - self.level) / self.rate);
            }
            self.level -= 1.0;
        }
        Decision::Send(0)
    }

    fn done(&mut self, now: f64, _: usize, response: &Response) {
        self.measure(now);
        if let Some(hint) = response.retry_after {
            self.paused_until = self.paused_until.max(now + hint);
        }
        let rate = if response.kind == Kind::Rejected {
            self.window_max = if self.is_on { self.measured.min(self.rate) } else { self.measured };
            self.throttled_at = now;
            if !self.is_on {
                (self.is_on, self.level_at) = (true, now);
            }
            self.window_max * BETA
        } else {
            self.cubic(now)
        };
        if self.is_on {
            self.rate = rate.min(2.0 * self.measured).max(RATE_MIN);
        }
    }
}
