//! `tidegate usage plot` as its users run it.

use std::fs;

use crate::kit::{Shop, codec};

fn used() -> Shop {
    let shop = Shop::new();
    shop.ok("limits set system tpm:1M/day rpm:1000/day");
    for (resource, tokens) in [("gpt-4", 700), ("gpt-4", 50), ("images", 9)] {
        shop.ok(&format!("acquire acme {resource} rpm=1 tpm={tokens}"));
    }
    shop
}

#[test]
fn usage_is_drawn_in_the_terminal_by_limit_and_by_who_used_it() {
    let shop = used();
    let text = shop.ok("usage plot entity acme --window month");
    assert!(
        text.starts_with("usage of entity acme by month, UTC\n\nrpm of gpt-4: 2 in all, at most 2 at 20"),
        "{text}"
    );
    assert!(text.contains("\ntpm of gpt-4: 750 in all, at most 750 at "), "{text}");
    assert!(text.contains("\ntpm of images: 9 in all") && text.contains("     750│██████\n"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "80 columns in a pipe: {text}");
    let of_resource = shop.ok("usage plot resource gpt-4 --limit tpm --width 40");
    assert!(
        of_resource.contains("\ntpm of acme: 750 in all") && !of_resource.contains("rpm"),
        "{of_resource}"
    );
    assert_eq!(shop.ok("usage plot entity nobody"), "no usage\n");
    let file = shop.path("none.svg");
    let told = shop.ok(&format!("usage plot entity nobody --out {}", file.display()));
    assert_eq!((told.as_str(), file.exists()), ("no usage: nothing was written\n", false));
}

#[test]
fn usage_is_written_as_an_svg_and_as_json() {
    let shop = used();
    let file = shop.path("usage.svg");
    let told = shop.ok(&format!("usage plot entity acme --window day --out {}", file.display()));
    assert_eq!(told, format!("written to {}\n", file.display()));
    let svg = fs::read_to_string(&file).unwrap();
    assert!(svg.starts_with("<svg xmlns=") && svg.trim_end().ends_with("</svg>"), "{svg}");
    for text in ["Usage of entity acme by day", "tpm, units per day", "gpt-4 (750)", "images (9)"] {
        assert!(svg.contains(text), "{text}: {svg}");
    }
    let json = shop.json("usage plot entity acme --window month --limit tpm");
    assert_eq!(codec::fields(&json), ["left_out", "series", "starts", "window"]);
    assert_eq!((&json["series"][0]["name"], &json["series"][0]["total"]), (&"gpt-4".into(), &750.into()));
    assert_eq!(json["series"][1]["units"].as_array().unwrap().last().unwrap(), 9);
}

#[test]
fn what_cannot_be_drawn_says_why() {
    let shop = used();
    let png = shop.run("usage plot entity acme --out usage.png");
    assert_eq!(png.code, 2);
    assert_eq!(
        png.stderr,
        "error: --out is `usage.png`, and only .svg can be written\n next: such as --out usage.svg\n"
    );
    let nowhere = shop.run("usage plot entity acme --out /nowhere/at/all/usage.svg");
    assert_eq!(nowhere.code, 1, "{}", nowhere.stderr);
    assert_eq!(shop.run("usage plot system").code, 2);
    assert_eq!(shop.run("usage plot entity acme --width 39").code, 2);
}
