//! Scores: strategies × scenarios × seeds, run on several threads.
//!
//! Every run depends only on its scenario, strategy and seed, and results are sorted before they are
//! averaged, so the scores are the same with any number of threads.

use std::num::NonZero;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use crate::measure::{Measures, Series};
use crate::scenario::Scenario;
use crate::strategy::Strategy;
use crate::{Outcome, run};

/// Seeds of our strategies, unless `seeds` is set.
const SEEDS_OURS: u32 = 20;
/// Seeds of peers and the oracle, unless `seeds` is set.
const SEEDS_PEERS: u32 = 3;

/// One strategy in one scenario, over several seeds.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Score {
    /// The scenario's name.
    pub scenario: String,
    /// The strategy.
    pub strategy: Strategy,
    /// How many seeds were run, from 1 on.
    pub seeds: u32,
    /// Means over the seeds.
    pub measures: Measures,
    /// The lowest goodput of a seed.
    pub goodput_min: f64,
    /// The highest goodput of a seed.
    pub goodput_max: f64,
    /// Rates over time of the first seed.
    pub series: Series,
}

/// Options: what to run, and on how many threads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ScoreOptions {
    /// The strategies, in the order of the scores.
    pub strategies: Vec<Strategy>,
    /// Seeds of every strategy. By default 20 for `auto` and `host`, and 3 for others.
    pub seeds: Option<NonZero<u32>>,
    /// Threads. By default as many as the machine runs at once.
    pub threads: NonZero<usize>,
}

impl Default for ScoreOptions {
    fn default() -> Self {
        let threads = thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN);
        Self { strategies: Strategy::ALL.to_vec(), seeds: None, threads }
    }
}

impl ScoreOptions {
    fn seeds_of(&self, strategy: Strategy) -> u32 {
        self.seeds.map_or_else(|| default_seeds(strategy), NonZero::get)
    }
}

/// Progress after each run.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Progress<'a> {
    /// Runs that are done.
    pub done: usize,
    /// Runs in total.
    pub total: usize,
    /// The scenario of the run that is done.
    pub scenario: &'a str,
    /// Its strategy.
    pub strategy: Strategy,
}

/// Runs every strategy in every scenario and returns a score for each pair, scenario by scenario.
///
/// `on_progress` is called after each run, from any of the threads.
///
/// # Panics
/// If `on_progress` does.
pub fn score(
    scenarios: &[Scenario],
    options: &ScoreOptions,
    on_progress: &(dyn Fn(Progress<'_>) + Sync),
) -> Vec<Score> {
    let jobs = jobs(scenarios, options);
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let work = || {
        let mut outcomes = Vec::new();
        // A job is claimed by its index; nothing else is shared, so no order between threads is needed.
        while let Some((index, job)) = claim(&jobs, &next) {
            let mut outcome = run(job.scenario, job.strategy, job.seed);
            if job.seed != 1 {
                outcome.series = Series::default();
            }
            outcomes.push((index, outcome));
            let done = done.fetch_add(1, Ordering::Relaxed) + 1;
            let (scenario, strategy) = (job.scenario.name.as_str(), job.strategy);
            on_progress(Progress { done, total: jobs.len(), scenario, strategy });
        }
        outcomes
    };
    let mut outcomes: Vec<(usize, Outcome)> = thread::scope(|scope| {
        let threads = options.threads.get().min(jobs.len());
        let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .flat_map(|worker| worker.join().expect("neither a run nor its callback panics"))
            .collect()
    });
    outcomes.sort_by_key(|(index, _)| *index);
    let mut outcomes = outcomes.into_iter().map(|(_, outcome)| outcome);
    let mut scores = Vec::new();
    for scenario in scenarios {
        for strategy in &options.strategies {
            let seeds = options.seeds_of(*strategy);
            scores.push(Score::of(scenario, *strategy, outcomes.by_ref().take(seeds as usize).collect()));
        }
    }
    scores
}

impl Score {
    fn of(scenario: &Scenario, strategy: Strategy, mut outcomes: Vec<Outcome>) -> Self {
        let series = outcomes.first_mut().map(|first| std::mem::take(&mut first.series)).unwrap_or_default();
        let measures: Vec<Measures> = outcomes.into_iter().map(|outcome| outcome.measures).collect();
        let goodputs = || measures.iter().map(|one| one.goodput);
        Self {
            scenario: scenario.name.clone(),
            strategy,
            seeds: u32::try_from(measures.len()).unwrap_or(u32::MAX),
            measures: Measures::mean(&measures),
            goodput_min: goodputs().fold(f64::INFINITY, f64::min),
            goodput_max: goodputs().fold(0.0, f64::max),
            series,
        }
    }
}

struct Job<'a> {
    scenario: &'a Scenario,
    strategy: Strategy,
    seed: u64,
}

/// Every run, in the order of the scores and then of the seeds.
fn jobs<'a>(scenarios: &'a [Scenario], options: &ScoreOptions) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for scenario in scenarios {
        for strategy in options.strategies.iter().copied() {
            let seeds = 1..=u64::from(options.seeds_of(strategy));
            jobs.extend(seeds.map(|seed| Job { scenario, strategy, seed }));
        }
    }
    jobs
}

fn claim<'a, 'b>(jobs: &'b [Job<'a>], next: &AtomicUsize) -> Option<(usize, &'b Job<'a>)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    jobs.get(index).map(|job| (index, job))
}

const fn default_seeds(strategy: Strategy) -> u32 {
    match strategy {
        Strategy::Auto | Strategy::Host => SEEDS_OURS,
        _ => SEEDS_PEERS,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn scenarios() -> Vec<Scenario> {
        Scenario::parse(
            "[[scenario]]\nname = \"a\"\nupstream = { bucket = { depth = 1 } }\ncapacity = [[0, 20]]\nseconds = 20\n\
             [[scenario]]\nname = \"b\"\nupstream = \"cap\"\ncapacity = [[0, 4]]\nseconds = 20\nerrors = 0.1\n",
        )
        .unwrap()
    }

    fn options(strategies: &[Strategy], seeds: u32, threads: usize) -> ScoreOptions {
        let threads = NonZero::new(threads).unwrap();
        ScoreOptions { strategies: strategies.to_vec(), seeds: NonZero::new(seeds), threads }
    }

    #[test]
    fn scores_are_equal_with_any_thread_count() {
        let strategies = [Strategy::Auto, Strategy::Backoff16, Strategy::Oracle];
        let with = |threads| score(&scenarios(), &options(&strategies, 4, threads), &|_| {});
        let one = with(1);
        let order: Vec<_> = one.iter().map(|score| (score.scenario.as_str(), score.strategy)).collect();
        let wanted = ["a", "b"].map(|name| strategies.map(|strategy| (name, strategy)));
        assert_eq!(order, wanted.concat());
        assert_eq!(one, with(3));
        assert_eq!(one, with(64));
    }

    #[test]
    fn score_has_mean_and_spread_of_its_seeds() {
        let scenarios = scenarios();
        let [score] = &score(&scenarios[1..], &options(&[Strategy::Auto], 5, 2), &|_| {})[..] else {
            panic!("one pair");
        };
        let runs: Vec<Outcome> = (1..=5).map(|seed| run(&scenarios[1], Strategy::Auto, seed)).collect();
        let goodputs: Vec<f64> = runs.iter().map(|outcome| outcome.measures.goodput).collect();
        assert!((score.measures.goodput - goodputs.iter().sum::<f64>() / 5.0).abs() < 1e-12);
        assert!(goodputs.contains(&score.goodput_min) && goodputs.contains(&score.goodput_max));
        assert!(score.goodput_min < score.measures.goodput && score.measures.goodput < score.goodput_max);
        assert_eq!((score.seeds, &score.series), (5, &runs[0].series));
    }

    #[test]
    fn progress_counts_every_run() {
        let seen = Mutex::new(Vec::new());
        let on_progress = |progress: Progress<'_>| {
            assert_eq!(progress.total, 4);
            seen.lock().unwrap().push(progress.done);
        };
        score(&scenarios(), &options(&[Strategy::Oracle], 2, 2), &on_progress);
        let mut seen = seen.into_inner().unwrap();
        seen.sort_unstable();
        assert_eq!(seen, [1, 2, 3, 4]);
    }

    #[test]
    fn default_seeds_are_20_for_ours_and_3_for_peers() {
        let options = ScoreOptions::default();
        assert_eq!(options.strategies, Strategy::ALL);
        let seeds = [Strategy::Auto, Strategy::Host, Strategy::Aws, Strategy::Oracle];
        assert_eq!(seeds.map(|strategy| options.seeds_of(strategy)), [20, 20, 3, 3]);
    }

    #[test]
    fn score_of_nothing_is_empty() {
        assert!(score(&[], &ScoreOptions::default(), &|_| {}).is_empty());
        assert!(score(&scenarios(), &options(&[], 1, 1), &|_| {}).is_empty());
    }
}
