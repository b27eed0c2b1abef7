//! Scores as one HTML page without scripts or external resources: an overview, and for each scenario a table
//! of all strategies and a plot of `auto`.

use std::fmt::Write as _;

use crate::plot;
use crate::report::settled;
use crate::scenario::Scenario;
use crate::score::Score;
use crate::strategy::Strategy;
use crate::targets::{self, Row};

/// Times that differ by less are equal.
const NOISE: f64 = 0.05;

const STYLE: &str = include_str!("page.css");

/// A column of a scenario's table.
struct Column {
    name: &'static str,
    title: &'static str,
    text: fn(&Score) -> String,
    /// The value to compare, rounded as shown: an invisible difference does not count.
    value: fn(&Score) -> f64,
    is_more_better: bool,
    /// Differences up to this share are noise of the seeds.
    noise: f64,
}

const GOODPUT: Column = Column {
    name: "goodput %",
    title: "Units that succeeded as a share of the capacity, after the first fifth of the run",
    text: |score| format!("{:.1}", 100.0 * score.measures.goodput),
    value: |score| (1_000.0 * score.measures.goodput).round(),
    is_more_better: true,
    noise: 0.0,
};

const REJECTED: Column = Column {
    name: "429 %",
    title: "Share of requests that were rejected, after the first fifth of the run",
    text: |score| format!("{:.2}", 100.0 * score.measures.rejected),
    value: |score| (10_000.0 * score.measures.rejected).round(),
    is_more_better: false,
    noise: 0.0,
};

const COLUMNS: [Column; 5] = [
    GOODPUT,
    REJECTED,
    Column {
        name: "Jain",
        title: "Jain's fairness index of the clients: 1 is equal shares",
        text: |score| format!("{:.3}", score.measures.jain),
        value: |score| (1_000.0 * score.measures.jain).round(),
        is_more_better: true,
        noise: 0.0,
    },
    Column {
        name: "p99 s",
        title: "99 of 100 successes took at most this many seconds",
        text: |score| format!("{:.2}", score.measures.p99_s),
        value: |score| (100.0 * score.measures.p99_s).round(),
        is_more_better: false,
        noise: NOISE,
    },
    Column {
        name: "settle s",
        title: "Seconds until 90 % of the capacity was used, from the start and from each change of the limit",
        text: settled,
        value: |score| (10.0 * score.measures.settled_s.iter().sum::<f64>()).round(),
        is_more_better: false,
        noise: NOISE,
    },
];

/// The scores of one scenario.
struct Group<'a> {
    scenario: &'a Scenario,
    scores: Vec<&'a Score>,
    rows: Vec<Row>,
}

impl<'a> Group<'a> {
    fn of(scenario: &'a Scenario, scores: &'a [Score], rows: &[Row]) -> Self {
        let scores = scores.iter().filter(|score| score.scenario == scenario.name).collect();
        let is_ours = |row: &&Row| row.name.rsplit_once('.').is_some_and(|(name, _)| name == scenario.name);
        Self { scenario, scores, rows: rows.iter().filter(is_ours).cloned().collect() }
    }

    fn auto(&self) -> Option<&'a Score> {
        self.scores.iter().find(|score| score.strategy == Strategy::Auto).copied()
    }

    /// The highest goodput, as it is shown, of all that do not know the limit; the fewest 429s decide between
    /// equals.
    fn best(&self, is_candidate: impl Fn(&Score) -> bool) -> Option<&'a Score> {
        let knows_nothing = |score: &&&Score| score.strategy != Strategy::Oracle && is_candidate(score);
        let order = |score: &&&Score| ((GOODPUT.value)(score), -(REJECTED.value)(score));
        self.scores
            .iter()
            .filter(knows_nothing)
            .max_by(|a, b| order(a).partial_cmp(&order(b)).unwrap_or(std::cmp::Ordering::Equal))
            .copied()
    }

    fn best_peer(&self) -> Option<&'a Score> {
        self.best(|score| score.strategy.is_peer())
    }

    /// Whether the goodput of a peer is higher than that of `auto`.
    fn is_beaten(&self) -> bool {
        self.auto().zip(self.best_peer()).is_some_and(|(auto, peer)| GOODPUT.is_better(peer, auto))
    }

    /// Whether it is so for a peer that has no more 429s than `auto`.
    fn is_beaten_fairly(&self) -> bool {
        let Some(auto) = self.auto() else { return false };
        let beats = |peer: &&Score| GOODPUT.is_better(peer, auto) && !REJECTED.is_better(auto, peer);
        self.scores.iter().filter(|score| score.strategy.is_peer()).copied().any(|peer| beats(&peer))
    }
}

/// Writes the page. The same scores give the same page.
pub fn page(scenarios: &[Scenario], scores: &[Score]) -> String {
    let rows = targets::rows(scores);
    let groups = scenarios.iter().map(|scenario| Group::of(scenario, scores, &rows));
    let groups: Vec<Group<'_>> = groups.filter(|group| !group.scores.is_empty()).collect();
    let mut html = format!(
        "<!doctype html>\n<html lang=\"en\">\n<head>\n<meta charset=\"utf-8\">\n\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
         <title>tidegate lab</title>\n<style>\n{STYLE}</style>\n</head>\n<body>\n"
    );
    intro(&mut html, &groups, &rows);
    overview(&mut html, &groups);
    html.push_str("<h2>Scenarios</h2>\n");
    for group in &groups {
        section(&mut html, group);
    }
    html.push_str("</body>\n</html>\n");
    html
}

fn intro(html: &mut String, groups: &[Group<'_>], rows: &[Row]) {
    let judged = rows.iter().filter(|row| row.met.is_some()).count();
    let met = rows.iter().filter(|row| row.met == Some(true)).count();
    let beaten = groups.iter().filter(|group| group.is_beaten()).count();
    let fairly = groups.iter().filter(|group| group.is_beaten_fairly()).count();
    let strategies = groups.iter().map(|group| group.scores.len()).max().unwrap_or(0);
    let seeds = groups.iter().filter_map(Group::auto).map(|auto| auto.seeds).max().unwrap_or(0);
    // Writing to a string cannot fail.
    let _ = write!(
        html,
        "<h1>tidegate lab</h1>\n\
         <p>Each strategy sends requests to simulated upstreams without knowing their limits. Runs are in virtual time and \
         repeat exactly from their seeds; numbers are means over the seeds.</p>\n\
         <div class=\"card\"><strong>{}</strong> scenarios, <strong>{strategies}</strong> strategies, \
         <strong>{seeds}</strong> seeds of <code>auto</code>. It meets <strong>{met} of {judged}</strong> targets. \
         A peer has a higher goodput in <strong>{beaten}</strong> scenarios, in <strong>{fairly}</strong> of them with no \
         more 429s.</div>\n\
         <ul class=\"legend\"><li><strong class=\"met\">★</strong> best goodput of all but the oracle</li>\
         <li><strong style=\"color:var(--better)\">▲</strong> better than <code>auto</code> in this measure (times: by 5 % or more)</li>\
         <li><em>oracle</em> knows the limit</li></ul>\n",
        groups.len()
    );
}

fn overview(html: &mut String, groups: &[Group<'_>]) {
    html.push_str(
        "<h2>Overview</h2>\n<div class=\"card\">\n<table class=\"overview\">\n<thead><tr><th>scenario</th>\
         <th class=\"left\">limit</th><th>auto: goodput %</th><th>429 %</th><th class=\"left\">best peer</th><th>goodput %</th><th>429 %</th>\
         <th class=\"left\">targets</th></tr></thead>\n<tbody>\n",
    );
    for group in groups {
        let name = escape(&group.scenario.name);
        let limit = escape(&group.scenario.limit_in_words());
        let _ = write!(
            html,
            "<tr><th><a href=\"#{}\">{name}</a></th><td class=\"left soft\">{limit}</td>",
            anchor(&group.scenario.name)
        );
        match group.auto() {
            Some(auto) => {
                let share = (100.0 * auto.measures.goodput).clamp(0.0, 100.0);
                let _ = write!(
                    html,
                    "<td class=\"bar\" style=\"--share:{share:.1}%\">{}</td><td>{}</td>",
                    (GOODPUT.text)(auto),
                    (REJECTED.text)(auto)
                );
            }
            None => html.push_str("<td></td><td></td>"),
        }
        match group.best_peer() {
            Some(peer) => {
                let (class, mark) = if group.is_beaten() { (" class=\"better\"", "▲ ") } else { ("", "") };
                let _ = write!(
                    html,
                    "<td class=\"left\">{}</td><td{class}>{mark}{}</td><td>{}</td>",
                    peer.strategy.name(),
                    (GOODPUT.text)(peer),
                    (REJECTED.text)(peer)
                );
            }
            None => html.push_str("<td></td><td></td><td></td>"),
        }
        let _ = writeln!(html, "<td class=\"left\">{}</td></tr>", verdict(&group.rows));
    }
    html.push_str("</tbody>\n</table>\n</div>\n");
}

/// The number of met targets of a scenario, and the names of the missed ones.
fn verdict(rows: &[Row]) -> String {
    let judged = rows.iter().filter(|row| row.met.is_some()).count();
    let missed: Vec<&str> = rows.iter().filter(|row| row.met == Some(false)).map(measure_of).collect();
    match (judged, missed.len()) {
        (0, _) => String::new(),
        (_, 0) => format!("<span class=\"met\">✓ {judged} of {judged}</span>"),
        (_, count) => format!(
            "<span class=\"missed\">✗ {} of {judged}: {}</span>",
            judged - count,
            escape(&missed.join(", "))
        ),
    }
}

fn section(html: &mut String, group: &Group<'_>) {
    let scenario = group.scenario;
    let (name, anchor) = (escape(&scenario.name), anchor(&scenario.name));
    let summary = escape(&scenario.summary());
    let _ = write!(
        html,
        "<section class=\"scenario\" id=\"{anchor}\">\n<header><h3><a href=\"#{anchor}\">{name}</a></h3>\
         <p>{summary}</p></header>\n"
    );
    chips(html, &group.rows);
    html.push_str("<div class=\"columns\">\n<div>\n");
    strategies(html, group);
    html.push_str("</div>\n<div>\n");
    if let Some(auto) = group.auto() {
        html.push_str(&plot::svg(&scenario.name, scenario.unit_name(), &auto.series));
    }
    html.push_str("</div>\n</div>\n</section>\n");
}

/// The targets of a scenario, each with the ratio it is judged by.
fn chips(html: &mut String, rows: &[Row]) {
    if rows.is_empty() {
        return;
    }
    html.push_str("<ul class=\"chips\">\n");
    for row in rows {
        let (class, mark) = match row.met {
            Some(true) => ("met", "✓ "),
            Some(false) => ("missed", "✗ "),
            None => ("reported", ""),
        };
        let _ = writeln!(html, "<li class=\"{class}\">{mark}{}</li>", escape(&target_in_words(row)));
    }
    html.push_str("</ul>\n");
}

/// `goodput 99.9 % ≥ 99.0 %`, `up_s 5.8 s ≤ 9.0 s`.
fn target_in_words(row: &Row) -> String {
    let sign = if row.is_at_least { "≥" } else { "≤" };
    let measure = measure_of(row);
    let (ours, bound, unit) = match measure {
        "goodput" => (100.0 * row.ratio, row.target.map(|target| 100.0 * target), "%"),
        _ => (row.ours, row.target.map(|target| target * row.peer), row.unit),
    };
    let space = if unit.is_empty() { "" } else { " " };
    let digits = if unit.is_empty() {
        3
    } else {
        usize::from(unit != "ms") + usize::from(unit != "ms" && ours < 10.0)
    };
    let value = |value: f64| format!("{value:.digits$}{space}{unit}");
    match bound {
        Some(bound) => format!("{measure} {} {sign} {}", value(ours), value(bound)),
        None => format!("{measure} {}", value(ours)),
    }
}

fn strategies(html: &mut String, group: &Group<'_>) {
    html.push_str("<table>\n<thead><tr><th>strategy</th>");
    for column in &COLUMNS {
        let _ = write!(html, "<th title=\"{}\">{}</th>", escape(column.title), escape(column.name));
    }
    html.push_str("</tr></thead>\n<tbody>\n");
    let (auto, best) = (group.auto(), group.best(|_| true));
    for score in &group.scores {
        let class = match score.strategy {
            Strategy::Auto => " class=\"auto\"",
            Strategy::Oracle => " class=\"oracle\"",
            _ => "",
        };
        let _ = write!(html, "<tr{class}><th title=\"{}\">{}</th>", spread(score), score.strategy.name());
        let is_peer = !matches!(score.strategy, Strategy::Auto | Strategy::Oracle);
        for (index, column) in COLUMNS.iter().enumerate() {
            let is_best =
                index == 0 && best.is_some_and(|best| (column.value)(best) <= (column.value)(score));
            let is_best = is_best && score.strategy != Strategy::Oracle;
            let is_better = is_peer && auto.is_some_and(|auto| column.is_better(score, auto));
            let (class, marks) = match (is_best, is_better) {
                (true, true) => (" class=\"best better\"", "★ ▲ "),
                (true, false) => (" class=\"best\"", "★ "),
                (false, true) => (" class=\"better\"", "▲ "),
                (false, false) => ("", ""),
            };
            let _ = write!(html, "<td{class}>{marks}{}</td>", escape(&(column.text)(score)));
        }
        html.push_str("</tr>\n");
    }
    html.push_str("</tbody>\n</table>\n");
}

impl Column {
    fn is_better(&self, one: &Score, other: &Score) -> bool {
        let (one, other) = ((self.value)(one), (self.value)(other));
        if self.is_more_better { one > other * (1.0 + self.noise) } else { one < other * (1.0 - self.noise) }
    }
}

/// Seeds and spread of a score, for the tooltip of its name.
fn spread(score: &Score) -> String {
    format!(
        "{} seeds, goodput from {:.1} to {:.1} %",
        score.seeds,
        100.0 * score.goodput_min,
        100.0 * score.goodput_max
    )
}

/// The part of a row's name after the scenario, whose name may contain dots.
fn measure_of(row: &Row) -> &str {
    row.name.rsplit_once('.').map_or(row.name.as_str(), |(_, measure)| measure)
}

/// A unique id for a name, made only of ASCII letters, digits, dashes, dots and underscores.
fn anchor(name: &str) -> String {
    let mut id = String::from("s-");
    for letter in name.chars() {
        if letter.is_ascii_alphanumeric() || letter == '-' || letter == '.' {
            id.push(letter);
        } else {
            let _ = write!(id, "_{:x}", u32::from(letter));
        }
    }
    id
}

/// Escapes text for HTML.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            letter if letter.is_control() || matches!(letter, '\u{fffe}' | '\u{ffff}') => {
                safe.push('\u{fffd}');
            }
            letter => safe.push(letter),
        }
    }
    safe
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::measure::{Measures, Series};

    fn scenario(name: &str) -> Scenario {
        let text = "[[scenario]]\nname = \"x\"\nupstream = { bucket = { depth = 1 } }\ncapacity = [[0, 50]]\nseconds = 60\n";
        let scenario = Scenario::parse(text).unwrap().remove(0);
        Scenario { name: name.to_owned(), ..scenario }
    }

    fn score(scenario: &str, strategy: Strategy, goodput: f64) -> Score {
        let measures =
            Measures { goodput, capacity: 50.0, jain: 1.0, settled_s: vec![1.0], ..Measures::default() };
        let series =
            Series { step_s: 1.0, good: vec![50.0; 60], capacity: vec![50.0; 60], rejected: vec![0.0; 60] };
        let (goodput_min, goodput_max) = (goodput, goodput);
        Score {
            scenario: scenario.to_owned(),
            strategy,
            seeds: 3,
            measures,
            goodput_min,
            goodput_max,
            series,
        }
    }

    #[test]
    fn page_has_a_section_table_and_plot() {
        let scores = [
            score("R50", Strategy::Auto, 0.995),
            score("R50", Strategy::Aws, 0.7),
            score("R50", Strategy::Oracle, 1.0),
        ];
        let html = page(&[scenario("R50")], &scores);
        for part in [
            "<section class=\"scenario\" id=\"s-R50\">",
            "<tr class=\"auto\"><th title=\"3 seeds, goodput from 99.5 to 99.5 %\">auto</th><td class=\"best\">★ 99.5</td>",
            "<td>70.0</td>",
            "<tr class=\"oracle\">",
            "✓ goodput 99.5 % ≥ 99.0 %",
            "<svg ",
            "prefers-color-scheme: dark",
        ] {
            assert!(html.contains(part), "{part}: {html}");
        }
        assert!(!html.contains("<script") && !html.contains("http"), "{html}");
        assert_eq!(html, page(&[scenario("R50")], &scores));
    }

    #[test]
    fn peer_that_beats_auto_is_marked() {
        let scores = [
            score("R50", Strategy::Auto, 0.9),
            score("R50", Strategy::Vegas, 0.95),
            score("R50", Strategy::Gentlify, 0.9),
        ];
        let html = page(&[scenario("R50")], &scores);
        assert!(html.contains("<td class=\"best better\">★ ▲ 95.0</td>"), "{html}");
        assert!(html.contains("<td class=\"better\">▲ 95.0</td>"), "in the overview: {html}");
        assert!(html.contains("✗ 1 of 2: goodput"), "{html}");
        assert_eq!(html.matches('★').count(), 2, "the legend and one cell: {html}");
    }

    #[test]
    fn names_are_text_and_never_markup() {
        let name = "<b>&\"'\u{1b}";
        let html = page(&[scenario(name)], &[score(name, Strategy::Auto, 1.0)]);
        assert!(html.contains("&lt;b&gt;&amp;&quot;&#39;\u{fffd}") && !html.contains("<b>"), "{html}");
        assert_ne!(anchor("a/b"), anchor("a b"));
        assert_eq!(anchor("R0.2"), "s-R0.2");
    }

    #[test]
    fn scenario_without_scores_is_left_out() {
        assert!(!page(&[scenario("R50")], &[]).contains("<section"));
    }
}
