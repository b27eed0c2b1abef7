//! `tidegate usage plot`: charts in the terminal, as SVG and as JSON.

use std::fs;

use crate::kit::{Fixture, codec};

fn used() -> Fixture {
    let fixture = Fixture::new();
    fixture.ok("limits set system tpm:1M/day rpm:1000/day");
    for (resource, tokens) in [("gpt-4", 700), ("gpt-4", 50), ("images", 9)] {
        fixture.ok(&format!("acquire acme {resource} rpm=1 tpm={tokens}"));
    }
    fixture
}

#[test]
fn usage_is_plotted_per_limit_and_user() {
    let fixture = used();
    let text = fixture.ok("usage plot entity acme --window month");
    assert!(
        text.starts_with("usage of entity acme by month, UTC\n\nrpm of gpt-4: 2 in total, at most 2 at 20"),
        "{text}"
    );
    assert!(text.contains("\ntpm of gpt-4: 750 in total, at most 750 at "), "{text}");
    assert!(text.contains("\ntpm of images: 9 in total") && text.contains("     750│██████\n"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "80 columns in a pipe: {text}");
    let of_resource = fixture.ok("usage plot resource gpt-4 --limit tpm --width 40");
    assert!(
        of_resource.contains("\ntpm of acme: 750 in total") && !of_resource.contains("rpm"),
        "{of_resource}"
    );
    assert_eq!(fixture.ok("usage plot entity ghost"), "no usage\n");
    let later = fixture.ok("usage plot entity acme --limit tpm --since 2100-01-01");
    assert_eq!(later, "no usage\n", "a limit that has none in this time");
    for scope in ["entity acme", "resource gpt-4"] {
        let run = fixture.run(&format!("usage plot {scope} --limit tmp"));
        let error = format!("error: {scope} has no limit `tmp`\n next: choose one of its limits: rpm, tpm\n");
        assert_eq!((run.code, run.stdout.as_str(), run.stderr), (2, "", error));
    }
    let file = fixture.path("none.svg");
    let told = fixture.ok(&format!("usage plot entity ghost --out {}", file.display()));
    assert_eq!((told.as_str(), file.exists()), ("no usage: nothing was written\n", false));
}

/// It was an error: the name of a pool is reserved.
#[test]
fn usage_of_pools_is_plotted_with_its_limit() {
    let fixture = Fixture::new();
    fixture.ok("limits set entity acme usd:10/day,across=resources");
    fixture.ok("limits set resource gpt-4 tpm:1M/day,across=entities");
    fixture.ok("acquire acme gpt-4 usd=4 tpm=50");
    for window in ["minute", "day"] {
        let text = fixture.ok(&format!("usage plot entity acme --window {window}"));
        assert!(text.contains("\nusd of (all): 4 in total"), "{text}");
    }
    let text = fixture.ok("usage plot entity acme --window day");
    assert!(text.contains("; limit 10\n"), "{text}");
    let text = fixture.ok("usage plot resource gpt-4 --window day");
    assert!(text.contains("\ntpm of (all): 50 in total") && text.contains("; limit 1.00M\n"), "{text}");
    // The narrower limit of a pool is the one that counts.
    fixture.ok("limits set system tpm:7M/day,across=entities req:3/day,across=both");
    fixture.ok("acquire acme o1 tpm=50 req=1 usd=1");
    let text = fixture.ok("usage plot resource gpt-4 --window day");
    assert!(text.contains("; limit 1.00M\n"), "{text}");
    let text = fixture.ok("usage plot resource o1 --window day");
    assert!(text.contains("; limit 7.00M\n"), "{text}");
    let text = fixture.ok("usage plot system --window day");
    assert!(text.contains("\nreq of (all): 1 in total") && text.contains("; limit 3\n"), "{text}");
}

#[test]
fn usage_is_plotted_as_svg_and_json() {
    let fixture = used();
    let file = fixture.path("usage.svg");
    let told = fixture.ok(&format!("usage plot entity acme --window day --out {}", file.display()));
    assert_eq!(told, format!("written to {}\n", file.display()));
    let svg = fs::read_to_string(&file).unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"), "{svg}");
    let title = "tpm, units per day; limit 1.00M";
    for text in ["Usage of entity acme by day", title, "gpt-4 (750)", "images (9)"] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    let json = fixture.json("usage plot entity acme --window month --limit tpm");
    assert_eq!(codec::fields(&json), ["left_out", "series", "starts", "window"]);
    assert_eq!((&json["series"][0]["name"], &json["series"][0]["total"]), (&"gpt-4".into(), &750.into()));
    assert_eq!(json["series"][1]["units"].as_array().unwrap().last().unwrap(), 9);
}

#[test]
fn invalid_plot_is_rejected_with_a_reason() {
    let fixture = used();
    let png = fixture.run("usage plot entity acme --out usage.png");
    assert_eq!(png.code, 2);
    assert_eq!(
        png.stderr,
        "error: --out is `usage.png`, and must end in .svg\n next: for example: --out usage.svg\n"
    );
    let nowhere = fixture.run("usage plot entity acme --out /nowhere/at/all/usage.svg");
    assert_eq!(nowhere.code, 1, "{}", nowhere.stderr);
    assert_eq!(fixture.run("usage plot entity acme resource gpt").code, 2);
    assert_eq!(fixture.run("usage plot entity acme --width 39").code, 2);
}
