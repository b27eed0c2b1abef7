//! Type-checks the feature combinations that users pick, each alone, to find a feature that only compiles
//! beside others.
//!
//! Checking every feature of every crate alone would rebuild most dependencies each time. A crate's features
//! are covered where a user enables them: the store's engines through `tidegate`, for instance.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use serde_json::Value;

use crate::step;
use crate::workspace::cargo;

/// A package, whether its default features are enabled, and further features.
type Combination = (&'static str, bool, &'static str);

const COMBINATIONS: [Combination; 14] = [
    ("tidegate-core", false, ""),
    // The throttle alone, then with the features that programs add.
    ("tidegate", false, ""),
    ("tidegate", false, "tower"),
    ("tidegate", false, "reqwest"),
    ("tidegate", false, "bar,config,metrics,registrable,serde,test-util,tracing"),
    // Shared limits, one engine at a time.
    ("tidegate", true, ""),
    ("tidegate", true, "archive,axum,sqlite"),
    ("tidegate", true, "redis"),
    ("tidegate", true, "postgres"),
    ("tidegate", true, "dynamodb"),
    ("tidegate-client", false, ""),
    ("tidegate-client", false, "blocking"),
    // The smallest CLI, and the one that `cargo run` builds.
    ("tidegate-cli", false, ""),
    ("tidegate-cli", true, ""),
];

/// Features of `tidegate` in no combination, and why they are covered.
const COVERED_ELSEWHERE: [(&str, &str); 4] = [
    ("http", "part of tower and reqwest"),
    ("redis-tls", "part of the program"),
    ("postgres-tls", "part of the program"),
    ("archive-remote", "part of the program"),
];

/// Checks every combination, and that every feature of the library is covered.
pub(super) fn check(metadata: &Value) -> Result<()> {
    let uncovered = uncovered(metadata);
    ensure!(
        uncovered.is_empty(),
        "features of tidegate in no combination of xtask: {}",
        uncovered.join(", ")
    );
    let programs = default_programs(metadata);
    ensure!(programs == ["tidegate"], "`cargo run` must mean the program, but could mean {programs:?}");
    for combination in COMBINATIONS {
        let command = command(combination);
        println!("    {command}");
        step::capture(&command, &mut cargo(&command))?;
    }
    Ok(())
}

fn command((package, has_default, features): Combination) -> String {
    let mut command = format!("check -p {package}");
    if !has_default {
        command.push_str(" --no-default-features");
    }
    if !features.is_empty() {
        command.push_str(" --features ");
        command.push_str(features);
    }
    command
}

fn uncovered(metadata: &Value) -> Vec<String> {
    let mut packages = metadata["packages"].as_array().into_iter().flatten();
    let library = packages.find(|package| package["name"] == "tidegate");
    let features = library.and_then(|library| library["features"].as_object()).into_iter().flatten();
    let named = COMBINATIONS.iter().filter(|(package, ..)| *package == "tidegate");
    let mut known: BTreeSet<&str> = named.flat_map(|(_, _, features)| features.split(',')).collect();
    known.extend(COVERED_ELSEWHERE.map(|(feature, _)| feature));
    known.extend(["default", "shared"]);
    features.map(|(feature, _)| feature.clone()).filter(|feature| !known.contains(feature.as_str())).collect()
}

/// The programs that `cargo run` could start at the root.
fn default_programs(metadata: &Value) -> Vec<&str> {
    let members: Vec<_> = metadata["workspace_default_members"].as_array().into_iter().flatten().collect();
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let targets = packages
        .filter(|package| members.contains(&&package["id"]))
        .flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let is_program = |target: &&Value| target["kind"][0] == "bin";
    targets.filter(is_program).filter_map(|target| target["name"].as_str()).collect()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn feature_in_no_combination_is_reported() {
        let with = |features: Value| json!({ "packages": [{ "name": "tidegate", "features": features }] });
        assert!(
            uncovered(&with(json!({ "default": ["shared"], "shared": [], "tower": [], "http": [] })))
                .is_empty()
        );
        assert_eq!(uncovered(&with(json!({ "quic": [] }))), ["quic"]);
    }

    #[test]
    fn only_default_members_programs_are_found() {
        let package = |id: &str, kind: &str| json!({ "id": id, "targets": [{ "kind": [kind], "name": id }] });
        let packages = [package("cli", "bin"), package("core", "lib"), package("bench", "bin")];
        let metadata = json!({ "workspace_default_members": ["cli", "core"], "packages": packages });
        assert_eq!(default_programs(&metadata), ["cli"]);
    }

    #[test]
    fn combination_becomes_a_cargo_check() {
        assert_eq!(command(("tidegate", true, "")), "check -p tidegate");
        assert_eq!(
            command(("tidegate", false, "tower")),
            "check -p tidegate --no-default-features --features tower"
        );
    }
}
