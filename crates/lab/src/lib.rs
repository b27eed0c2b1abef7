//! The lab: tidegate's controllers and others against simulated upstreams with hidden limits.
//!
//! A [`Scenario`] is an upstream and its clients; a [`Strategy`] decides when requests are sent. [`run`]
//! simulates one with the other in virtual time, and the same seed gives the same run. Ours run the
//! production gates and controllers.
//!
//! ```
//! use tidegate_lab::{Scenario, Strategy, run};
//!
//! let scenarios = Scenario::built_in();
//! let hidden = scenarios.iter().find(|scenario| scenario.name == "R50").expect("50 per second");
//! let outcome = run(hidden, Strategy::Auto, 1);
//! assert!(outcome.measures.goodput > 0.95);
//! ```

mod client;
mod codec;
mod describe;
mod live;
mod measure;
mod page;
mod peers;
mod plot;
mod report;
mod rng;
mod scenario;
mod score;
mod sim;
mod strategy;
pub mod targets;
mod upstream;

pub use codec::{scenarios_json, scores_json, summary_json};
pub use live::{LiveResponse, LiveUpstream};
pub use measure::{Measures, Series};
pub use page::page;
pub use report::table;
pub use scenario::{Headers, RetryAfter, Scenario, ScenarioError, TokenQuota, Upstream};
pub use score::{Progress, Score, ScoreOptions, score};
pub use strategy::Strategy;

/// One simulated run.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Outcome {
    /// The measures.
    pub measures: Measures,
    /// Rates over time.
    pub series: Series,
}

/// Runs a scenario with one strategy from a seed.
pub fn run(scenario: &Scenario, strategy: Strategy, seed: u64) -> Outcome {
    let mut run = sim::run(scenario, seed, &|seed| strategy.client(scenario, seed));
    let series = Series::of(&run);
    Outcome { measures: Measures::of(scenario, &mut run), series }
}
