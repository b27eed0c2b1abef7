//! `tidegate lab` as its users run it.

use std::fs;

use crate::kit::{Fixture, codec};

/// A scenario that is simulated in no time.
const SHORT: &str = "[[scenario]]\nname = \"short\"\nupstream = { bucket = { depth = 1 } }\ncapacity = [[0, 20]]\n\
                     seconds = 30\nworkers = 8\n";

#[test]
fn list_names_the_scenarios() {
    let fixture = Fixture::new();
    let text = fixture.ok("lab list");
    assert!(
        text.contains("\nR50 ") && text.contains(" token bucket of 50/s, 1 s deep; 40 workers"),
        "{text}"
    );
    let json = fixture.json("lab list");
    let scenarios = json["scenarios"].as_array().unwrap();
    assert_eq!(scenarios.len() + 1, text.lines().filter(|line| !line.starts_with(' ')).count());
    assert_eq!(codec::fields(&scenarios[0]), ["name", "seconds", "summary"]);
    assert!(!fixture.file().exists(), "the lab opens no store");
}

#[test]
fn run_prints_a_row_for_each_strategy() {
    let fixture = Fixture::new();
    let text = fixture.ok("lab run R50 --seeds 1");
    let lines: Vec<&str> = text.lines().collect();
    let [header, row] = lines[..] else { panic!("a header and a row: {text}") };
    assert!(header.starts_with("SCENARIO  STRATEGY      GOODPUT %   429 %"), "{text}");
    assert!(row.starts_with("R50       auto"), "{text}");
    let line = "lab run R50 R50 --seeds 1 --strategy oracle --strategy vegas";
    let json = fixture.json(line);
    let scores = json["scores"].as_array().unwrap();
    let names: Vec<_> = scores.iter().map(|score| score["strategy"].as_str().unwrap()).collect();
    assert_eq!(names, ["oracle", "vegas"]);
    assert!(scores[0]["goodput"].as_f64().unwrap() > 0.99, "{}", scores[0]);
    assert_eq!(codec::fields(&scores[0]["series"]), ["capacity", "good", "rejected", "step_s"]);
    assert_eq!(json, fixture.json(line), "the same seeds give the same run");
}

#[test]
fn run_rejects_unknown_names() {
    let fixture = Fixture::new();
    let none = fixture.run("lab run nope");
    assert_eq!((none.code, none.stdout.as_str()), (2, ""));
    assert_eq!(none.stderr, "error: there is no scenario `nope`\n next: list them: tidegate lab list\n");
    let strategy = fixture.run("lab run R50 --strategy best");
    assert!(
        strategy.code == 2 && strategy.stderr.contains("[possible values: auto, host"),
        "{}",
        strategy.stderr
    );
    assert_eq!(fixture.run("lab run").code, 2);
    assert_eq!(fixture.run("lab run R50 --seeds 0").code, 2);
    assert_eq!(fixture.run("lab list --server http://localhost:1").code, 2);
}

#[test]
fn run_reads_scenarios_from_a_file() {
    let fixture = Fixture::new();
    let file = fixture.path("mine.toml");
    let line = format!("lab run --seeds 2 --scenario {}", file.display());
    fs::write(&file, SHORT).unwrap();
    let text = fixture.ok(&line);
    assert!(text.lines().nth(1).is_some_and(|row| row.starts_with("short     auto")), "{text}");
    assert_eq!(fixture.run(&format!("{line} R50")).code, 2, "the file has no R50");
}

#[test]
fn run_names_what_is_wrong_in_a_file() {
    let fixture = Fixture::new();
    let file = fixture.path("mine.toml");
    let path = file.display().to_string();
    let table = [
        (
            format!("{SHORT}errors = 2\n"),
            "is not a file of scenarios: `errors` of scenario `short` is 2, and must be from 0, below 1\n",
        ),
        (format!("{SHORT}speed = 3\n"), "unknown field `speed`"),
        (SHORT.replace("20", "\"fast\""), "\"fast\""),
        (String::new(), "it has no [[scenario]]"),
    ];
    for (text, wanted) in table {
        fs::write(&file, text).unwrap();
        let run = fixture.run(&format!("lab run --scenario {path}"));
        assert_eq!((run.code, run.stdout.as_str()), (2, ""));
        assert!(
            run.stderr.starts_with(&format!("error: `{path}` is not a file of scenarios: ")),
            "{}",
            run.stderr
        );
        assert!(run.stderr.contains(wanted), "{wanted}: {}", run.stderr);
        assert!(run.stderr.ends_with("\n next: see the format: tidegate lab run --help\n"), "{}", run.stderr);
    }
    let missing = fixture.run(&format!("lab run --scenario {path}.gone"));
    assert!(missing.code == 2 && missing.stderr.contains("cannot be read"), "{}", missing.stderr);
}

#[test]
fn score_writes_a_page_and_json() {
    let fixture = Fixture::new();
    let out = fixture.path("lab");
    let text = fixture.ok(&format!("lab score R20 --seeds 1 --out {}", out.display()));
    assert!(text.contains("\nR20       oracle") && text.contains("\nauto meets "), "{text}");
    assert!(text.ends_with(&format!("\nwritten to {}\n", out.join("index.html").display())), "{text}");
    let page = fs::read_to_string(out.join("index.html")).unwrap();
    assert!(
        page.starts_with("<!doctype html>") && page.contains("<svg ") && page.contains(">R20<"),
        "{page}"
    );
    let json = codec::parse(&fs::read_to_string(out.join("scores.json")).unwrap());
    assert_eq!(json["scores"].as_array().map(Vec::len), Some(10));
    fs::write(fixture.path("file"), "").unwrap();
    let blocked = fixture.run(&format!("lab score R20 --seeds 1 --out {}", fixture.path("file").display()));
    assert!(blocked.code == 1 && blocked.stderr.contains("cannot be written"), "{}", blocked.stderr);
}
