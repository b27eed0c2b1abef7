//! The boundaries of the architecture: what core may use, and where features and serde may be named.
//!
//! Core is a function of (state, now) only if nothing in it reads a clock or an entropy source (invariant
//! 10). And unconditional code is readable only if `cfg` stays in a few files.

use super::Problem;
use super::source::{Source, holds, is_word, lines_with};

const CORE: &str = "crates/core/";

/// Words that would make core depend on more than its arguments, and the reason that the message gives.
const IMPURE: [(&str, &str); 18] = [
    ("Instant::now", "a clock"),
    ("std::time::Instant", "a clock"),
    ("SystemTime", "a clock"),
    ("thread_rng", "entropy"),
    ("rand::", "entropy"),
    ("getrandom", "entropy"),
    ("RandomState", "entropy"),
    ("HashMap::new", "entropy (its seed)"),
    ("HashMap::with_capacity", "entropy (its seed)"),
    ("HashSet::new", "entropy (its seed)"),
    ("HashSet::with_capacity", "entropy (its seed)"),
    ("std::env", "the environment"),
    ("std::fs", "the file system"),
    ("std::net", "the network"),
    ("std::thread", "threads"),
    ("async", "async"),
    (".await", "async"),
    ("tokio", "async"),
];

/// The same for grouped imports, where `use std::{…}` separates the words.
const IMPURE_IMPORTS: [&str; 6] = ["Instant", "SystemTime", "env", "fs", "net", "thread"];

/// Core's only dependencies: for its errors, and for short lists without an allocation.
const CORE_DEPENDENCIES: [&str; 3] = ["smallvec", "thiserror", "unicode-normalization"];

/// Dependencies that core may use behind a feature: types without behaviour.
const CORE_TYPES: [&str; 2] = ["http", "serde"];

/// Core reads no clock, no entropy and no environment, and never awaits.
pub(super) fn pure_core(source: &Source) -> Vec<Problem> {
    if !source.path.starts_with(CORE) || !source.path[CORE.len()..].starts_with("src/") {
        return Vec::new();
    }
    let problem_at = |line, word: &str, what: &str| {
        Problem::new(&source.path, line, format!("`{word}` brings {what} into core, which is pure"))
    };
    let mut problems = Vec::new();
    for (word, what) in IMPURE {
        problems.extend(lines_with(&source.code, word).into_iter().map(|line| problem_at(line, word, what)));
    }
    for (line, import) in grouped_std_imports(&source.code) {
        let words = IMPURE_IMPORTS.into_iter().filter(|word| holds(import, word));
        problems.extend(words.map(|word| problem_at(line, word, "more than its arguments")));
    }
    problems
}

/// Statements such as `use std::{env, fs};`, each with its first line.
fn grouped_std_imports(code: &str) -> impl Iterator<Item = (usize, &str)> {
    code.match_indices("use std::").filter_map(|(start, _)| {
        let statement = code[start..].split(';').next()?;
        statement.contains('{').then(|| (line_of(code, start), statement))
    })
}

/// Core depends on no crate that could break the rule above indirectly.
pub(super) fn core_dependencies(source: &Source) -> Vec<Problem> {
    if source.path.strip_prefix(CORE) != Some("Cargo.toml") {
        return Vec::new();
    }
    let mut problems = Vec::new();
    let mut section = "";
    for (line, number) in source.text.lines().zip(1..) {
        let line = line.split('#').next().unwrap_or_default().trim();
        if let Some(header) = line.strip_prefix('[') {
            section = header.trim_end_matches(']');
        }
        let is_optional = line.contains("optional = true");
        let may_use =
            |name: &str| CORE_DEPENDENCIES.contains(&name) || (is_optional && CORE_TYPES.contains(&name));
        if let Some(name) = dependency(section, line).filter(|name| !may_use(name)) {
            let may = CORE_DEPENDENCIES.join(" and ");
            let sentence = format!("core depends on {name}; it may use {may} and nothing else");
            problems.push(Problem::new(&source.path, number, sentence));
        }
    }
    problems
}

/// The dependency that this line declares, as `name = …`, `name.workspace = …` or `[dependencies.name]`.
fn dependency<'a>(section: &'a str, line: &'a str) -> Option<&'a str> {
    let is_dependencies = |section: &str| section == "dependencies" || section.ends_with(".dependencies");
    let name = if line.starts_with('[') {
        let (parent, name) = section.rsplit_once('.')?;
        is_dependencies(parent).then_some(name)?
    } else {
        let (key, _) = line.split_once('=')?;
        is_dependencies(section).then_some(key)?
    };
    name.split('.').next().map(|name| name.trim().trim_matches('"'))
}

/// Conditions on features appear only in the files that declare modules.
pub(super) fn features(source: &Source) -> Vec<Problem> {
    // The test kit of a crate has modules that need a feature.
    if ["lib.rs", "main.rs", "open.rs"].contains(&source.name())
        || source.path.ends_with("tests/it/kit/mod.rs")
    {
        return Vec::new();
    }
    let conditions =
        source.code.match_indices("cfg").filter(|(start, _)| names_feature(&source.code, *start));
    let lines = conditions.map(|(start, _)| line_of(&source.code, start));
    let sentence = "`cfg(feature)` is allowed only in lib.rs, open.rs and main.rs";
    lines.map(|line| Problem::new(&source.path, line, sentence)).collect()
}

/// Whether `cfg(…)`, `cfg!(…)` or `cfg_attr(…)` starts here and names a feature at any depth.
fn names_feature(code: &str, start: usize) -> bool {
    if code[..start].chars().next_back().is_some_and(is_word) {
        return false;
    }
    let rest = &code[start + "cfg".len()..];
    let rest = rest.strip_prefix("_attr").or_else(|| rest.strip_prefix('!')).unwrap_or(rest);
    let mut depth = 0_usize;
    let end = rest.find(|letter| {
        match letter {
            '(' => depth += 1,
            ')' => depth = depth.saturating_sub(1),
            _ => {}
        }
        depth == 0
    });
    // Text that opens no parenthesis here is not a condition.
    end.is_some_and(|end| holds(&rest[..end], "feature"))
}

/// Wire formats are read and written at the edge; inner types do not use serde.
pub(super) fn serde(source: &Source) -> Vec<Problem> {
    let is_edge_file = ["config.rs", "codec.rs"].contains(&source.name());
    let is_edge_folder = ["crates/client/", "crates/lab/", "bench/", "xtask/"]
        .iter()
        .any(|folder| source.path.starts_with(folder));
    if is_edge_file || is_edge_folder {
        return Vec::new();
    }
    let sentence = "serde is allowed only in config.rs, codec.rs, crates/client and crates/lab";
    let names_serde =
        |line: &str| line.split(|letter| !is_word(letter)).any(|word| word.starts_with("serde"));
    let lines = source.code.lines().zip(1..).filter(|(line, _)| names_serde(line));
    lines.map(|(_, number)| Problem::new(&source.path, number, sentence)).collect()
}

fn line_of(text: &str, offset: usize) -> usize {
    text[..offset].matches('\n').count() + 1
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::FileRule;

    /// The lines that `rule` reports.
    fn lines(rule: FileRule, path: &str, text: &str) -> Vec<usize> {
        rule(&Source::new(path, text)).into_iter().map(|problem| problem.line).collect()
    }

    #[test]
    fn core_must_not_name_anything_impure() {
        for (word, _) in IMPURE {
            let text = format!("//! Why.\n{word} ");
            assert_eq!(lines(pure_core, "crates/core/src/gate/pace.rs", &text), [2], "{word}");
        }
    }

    #[test]
    fn core_must_not_import_anything_impure_in_a_group() {
        let text = "//! Why.\nuse std::{\n    sync::Arc,\n    time::{Duration, Instant},\n};\n";
        assert_eq!(lines(pure_core, "crates/core/src/a.rs", text), [2]);
        assert_eq!(lines(pure_core, "crates/core/src/a.rs", "pub use std::{env, fmt};"), [1]);
    }

    #[test]
    fn core_may_have_its_own_time_and_speak_of_clocks() {
        let text = "//! No tokio, no std::env.\nuse crate::time::{Instant, Rate};\nuse std::time::Duration;\n\
                    use std::collections::{BTreeMap, VecDeque};\nfn f(now: Instant) { say(\"rand::\"); random::mix() }";
        assert!(lines(pure_core, "crates/core/src/a.rs", text).is_empty());
        assert!(lines(pure_core, "crates/tidegate/src/clock.rs", "tokio::time::Instant::now()").is_empty());
        assert!(lines(pure_core, "crates/core/tests/a.rs", "std::env::var(x)").is_empty());
    }

    #[test]
    fn core_depends_on_listed_crates_alone() {
        let text = "[package]\nname = \"c\"\n[dependencies]\nthiserror.workspace = true\nrand = \"1\"\n\
                    [dependencies.tokio]\nversion = \"1\"\n[target.'cfg(unix)'.dependencies]\nlibc.workspace = true\n";
        assert_eq!(lines(core_dependencies, "crates/core/Cargo.toml", text), [5, 6, 9]);
        let problems = core_dependencies(&Source::new("crates/core/Cargo.toml", text));
        let sentence = "core depends on rand; it may use smallvec and thiserror and unicode-normalization and nothing else";
        assert!(problems[0].to_string().ends_with(sentence), "{}", problems[0]);
    }

    #[test]
    fn core_may_use_http_types_behind_a_feature() {
        let text = "[dependencies]\nhttp = { workspace = true, optional = true }\n";
        assert!(lines(core_dependencies, "crates/core/Cargo.toml", text).is_empty());
        let always = "[dependencies]\nhttp.workspace = true\ntokio = { version = \"1\", optional = true }\n";
        assert_eq!(lines(core_dependencies, "crates/core/Cargo.toml", always), [2, 3]);
    }

    #[test]
    fn tests_of_core_and_other_crates_may_depend_on_more() {
        let text = "[dependencies]\nsmallvec.workspace = true\nthiserror = \"2\" # rand = 1\n\
                    [dev-dependencies]\nproptest.workspace = true\n";
        assert!(lines(core_dependencies, "crates/core/Cargo.toml", text).is_empty());
        assert!(
            lines(core_dependencies, "crates/tidegate/Cargo.toml", "[dependencies]\ntokio = \"1\"\n")
                .is_empty()
        );
    }

    #[test]
    fn feature_condition_elsewhere_is_found_in_every_form() {
        for condition in [
            "#[cfg(feature = \"a\")]",
            "#[cfg(any(test, feature = \"a\"))]",
            "#[cfg(all(\n    unix,\n    feature = \"a\",\n))]",
            "if cfg!(feature = \"a\") {}",
            "#[cfg_attr(feature = \"a\", derive(X))]",
        ] {
            assert_eq!(
                lines(features, "src/queue.rs", &format!("//! Why.\n{condition}\n")),
                [2],
                "{condition}"
            );
        }
    }

    #[test]
    fn feature_conditions_in_module_files_are_fine() {
        for door in ["lib.rs", "open.rs", "main.rs"] {
            assert!(lines(features, &format!("src/{door}"), "#[cfg(feature = \"a\")]").is_empty());
        }
        let text =
            "// cfg(feature)\n#[cfg(test)]\nmod feature {}\nlet cfg = feature(cfg);\n#[cfg(tidegate_model)]";
        assert!(lines(features, "src/queue.rs", text).is_empty());
    }

    #[test]
    fn serde_inside_is_found() {
        assert_eq!(lines(serde, "crates/tidegate/src/a.rs", "//! Why.\nuse serde::Serialize;\n"), [2]);
        assert_eq!(lines(serde, "crates/store/src/a.rs", "serde_json::to_string(x)"), [1]);
    }

    #[test]
    fn serde_at_the_edge_is_fine() {
        for path in [
            "crates/a/src/config.rs",
            "crates/store/src/codec.rs",
            "crates/client/src/a.rs",
            "bench/src/a.rs",
        ] {
            assert!(lines(serde, path, "use serde::Serialize;").is_empty(), "{path}");
        }
        assert!(lines(serde, "crates/a/src/a.rs", "//! serde is not here\nfn deserde() {}").is_empty());
    }
}
