//! Scores as a text table that fits 100 columns.

use tidegate_core::excerpt::excerpt_of;

use std::fmt::Write as _;

use crate::score::Score;

/// The longest name that is not truncated.
const NAME_MAX: usize = 24;
/// Changes of the limit whose settling time is shown.
const CHANGES_MAX: usize = 3;

/// A header and a line for each score: goodput, 429s, Jain's index, p99 latency, and the seconds until 90 %
/// of the capacity was used, from the start and from each change of the limit.
pub fn table(scores: &[Score]) -> String {
    let names: Vec<String> = scores.iter().map(|score| excerpt_of(&score.scenario, NAME_MAX - 1)).collect();
    let width = names.iter().map(|name| name.chars().count()).max().unwrap_or(0).max("SCENARIO".len());
    let mut text = format!(
        "{:<width$}  {:<12}  {:>9}  {:>6}  {:>5}  {:>7}  {}\n",
        "SCENARIO", "STRATEGY", "GOODPUT %", "429 %", "JAIN", "P99 S", "SETTLE S"
    );
    for (score, name) in scores.iter().zip(names) {
        let measures = &score.measures;
        // Writing to a string cannot fail.
        let _ = writeln!(
            text,
            "{name:<width$}  {:<12}  {:>9.1}  {:>6.2}  {:>5.3}  {:>7.2}  {}",
            score.strategy.name(),
            100.0 * measures.goodput,
            100.0 * measures.rejected,
            measures.jain,
            measures.p99_s,
            settled(score),
        );
    }
    text
}

/// `0.7 6.1 0.1`: the first few settling times.
pub(crate) fn settled(score: &Score) -> String {
    let all = &score.measures.settled_s;
    let shown = all.iter().take(CHANGES_MAX).map(|seconds| format!("{seconds:.1}"));
    let more = (all.len() > CHANGES_MAX).then(|| "…".to_owned());
    shown.chain(more).collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Measures, Series};
    use crate::scenario::Scenario;
    use crate::strategy::Strategy;

    fn score(scenario: &str, strategy: Strategy, settled_s: &[f64]) -> Score {
        let measures = Measures {
            goodput: 0.995,
            rejected: 0.0123,
            jain: 1.0,
            p99_s: 0.3812,
            settled_s: settled_s.to_vec(),
            ..Measures::default()
        };
        let (goodput_min, goodput_max, series) = (0.9, 1.0, Series::default());
        Score {
            scenario: scenario.to_owned(),
            strategy,
            seeds: 1,
            measures,
            goodput_min,
            goodput_max,
            series,
        }
    }

    #[test]
    fn table_has_a_line_for_each_score() {
        let scores =
            [score("R50", Strategy::Auto, &[0.7]), score("S20-100", Strategy::Aws, &[0.7, 6.12, 0.1])];
        assert_eq!(
            table(&scores),
            "SCENARIO  STRATEGY      GOODPUT %   429 %   JAIN    P99 S  SETTLE S\n\
             R50       auto               99.5    1.23  1.000     0.38  0.7\n\
             S20-100   aws-adaptive       99.5    1.23  1.000     0.38  0.7 6.1 0.1\n"
        );
    }

    #[test]
    fn table_fits_100_columns() {
        let mut scores: Vec<Score> = Scenario::built_in()
            .iter()
            .flat_map(|one| Strategy::ALL.map(|strategy| score(&one.name, strategy, &[3_600.0; 3])))
            .collect();
        scores.push(score(&"x".repeat(100), Strategy::Aws, &[86_400.0; 20]));
        for line in table(&scores).lines() {
            assert!(line.chars().count() <= 100, "{line}");
        }
    }

    #[test]
    fn names_cannot_move_the_cursor() {
        let text = table(&[score("a\x1b[2J\nb", Strategy::Auto, &[])]);
        assert!(text.contains("a\\u{1b}[2J\\nb  auto") && text.lines().count() == 2, "{text}");
    }
}
