//! JSON output of scores. Its field names are stable: fields may be added, but not renamed.

use serde_json::{Value, json};

use crate::measure::Series;
use crate::scenario::Scenario;
use crate::score::Score;

/// Scores with their rates over time, as one JSON document.
pub fn scores_json(scores: &[Score]) -> Value {
    let with_series = |score: &Score| {
        let mut json = score_json(score);
        json["series"] = series_json(&score.series);
        json
    };
    json!({ "scores": scores.iter().map(with_series).collect::<Vec<_>>() })
}

/// Scores without their rates over time.
pub fn summary_json(scores: &[Score]) -> Value {
    json!({ "scores": scores.iter().map(score_json).collect::<Vec<_>>() })
}

/// Scenarios by name, with a summary of each.
pub fn scenarios_json(scenarios: &[Scenario]) -> Value {
    let one = |scenario: &Scenario| json!({ "name": scenario.name, "summary": scenario.summary(), "seconds": scenario.seconds });
    json!({ "scenarios": scenarios.iter().map(one).collect::<Vec<_>>() })
}

fn score_json(score: &Score) -> Value {
    let measures = &score.measures;
    json!({
        "scenario": score.scenario,
        "strategy": score.strategy.name(),
        "seeds": score.seeds,
        "goodput": rounded(measures.goodput),
        "goodput_min": rounded(score.goodput_min),
        "goodput_max": rounded(score.goodput_max),
        "goodput_late": rounded(measures.goodput_late),
        "capacity": rounded(measures.capacity),
        "rejected": rounded(measures.rejected),
        "jain": rounded(measures.jain),
        "p99_s": rounded(measures.p99_s),
        "wait_s": rounded(measures.wait_s),
        "settled_s": measures.settled_s.iter().copied().map(rounded).collect::<Vec<_>>(),
    })
}

fn series_json(series: &Series) -> Value {
    let list = |values: &[f64]| values.iter().copied().map(rounded).collect::<Vec<_>>();
    json!({
        "step_s": series.step_s,
        "good": list(&series.good),
        "capacity": list(&series.capacity),
        "rejected": list(&series.rejected),
    })
}

/// Rounds to a millionth, beyond which digits are noise.
fn rounded(value: f64) -> f64 {
    (value * 1e6).round() / 1e6
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::score::{ScoreOptions, score};
    use crate::strategy::Strategy;

    #[test]
    fn json_holds_measures_and_series() {
        let text =
            "[[scenario]]\nname = \"a\"\nupstream = \"cap\"\ncapacity = [[0, 4], [10, 8]]\nseconds = 20\n";
        let scenarios = Scenario::parse(text).unwrap();
        let strategies = vec![Strategy::Oracle];
        let scores = score(&scenarios, &ScoreOptions { strategies, ..ScoreOptions::default() }, &|_| {});
        let json = scores_json(&scores);
        let one = &json["scores"][0];
        assert_eq!(
            (&one["scenario"], &one["strategy"], &one["seeds"]),
            (&"a".into(), &"oracle".into(), &3.into())
        );
        assert_eq!(one["settled_s"].as_array().map(Vec::len), Some(2));
        assert_eq!(one["series"]["good"].as_array().map(Vec::len), Some(20));
        assert!(summary_json(&scores)["scores"][0].get("series").is_none());
        assert_eq!(scenarios_json(&scenarios)["scenarios"][0]["seconds"], 20.0);
    }
}
