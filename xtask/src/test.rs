//! `cargo xtask test`: every check there is, the quick ones first, stopping at the first that fails.
//!
//! CI runs this and nothing else, so what passes here passes there.

use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::examples;
use crate::fuzz;
use crate::install;
use crate::step::{self, Steps};
use crate::tidy;
use crate::workspace::{self, cargo};

/// How long to look for trouble.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Depth {
    /// Minutes: before a push.
    Usual,
    /// As long as it takes: before a release, or when a defect hides.
    Deep,
}

/// Runs all steps.
pub(crate) fn run(depth: Depth) -> Result<()> {
    let mut steps = Steps::default();
    steps.run("fmt", || step::stream(&mut cargo("fmt --all --check")))?;
    steps.run("tidy", tidy::run)?;
    steps.run("clippy", || {
        step::stream(&mut cargo("clippy --workspace --all-targets --all-features -- -D warnings"))
    })?;
    // The tours of the pages use it.
    install::ensure_tool("curl", "curl")?;
    steps.run("tests", || tests(depth))?;
    steps.run("model", || model(depth))?;
    steps.run("model-clippy", model_clippy)?;
    steps.run("examples", examples::run)?;
    steps.run("fuzz", || fuzz::run(depth))?;
    steps.run("docs", || {
        step::stream(cargo("doc --workspace --no-deps --all-features").env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    steps.run("features", features)?;
    println!("{}", steps.summary());
    Ok(())
}

fn tests(depth: Depth) -> Result<()> {
    // Not `--all-targets`: that would leave the doc tests out.
    let mut tests = cargo("test --workspace --all-features");
    if depth == Depth::Deep {
        tests.env("PROPTEST_CASES", "20000").env("TIDEGATE_DEEP", "1");
    }
    step::stream(&mut tests)
}

fn model(depth: Depth) -> Result<()> {
    let mut model = cargo("test --release -p tidegate --features test-util --test model --test model_keyed");
    if depth == Depth::Deep {
        model.env("MODEL_DEEP", "1");
    }
    step::stream(as_model(&mut model))
}

fn model_clippy() -> Result<()> {
    // In release, as the models run, so that the two share what they build.
    let mut clippy = cargo(
        "clippy --release -p tidegate --features test-util --test model --test model_keyed -- -D warnings",
    );
    step::stream(as_model(&mut clippy))
}

/// Other flags mean another build of everything: a folder of its own keeps the usual one warm.
fn as_model(command: &mut Command) -> &mut Command {
    command
        .env("RUSTFLAGS", "--cfg tidegate_model")
        .env("CARGO_TARGET_DIR", workspace::target().join("model"))
}

fn features() -> Result<()> {
    let metadata = step::capture("cargo metadata", &mut cargo("metadata --no-deps --format-version 1"))?;
    let metadata = serde_json::from_str(&metadata).context("cargo metadata wrote no JSON")?;
    for check in feature_checks(&metadata) {
        println!("    {check}");
        step::capture(&check, &mut cargo(&check))?;
    }
    Ok(())
}

/// For every library, the check without any feature, then with each alone.
fn feature_checks(metadata: &Value) -> Vec<String> {
    let mut checks = Vec::new();
    for package in metadata["packages"].as_array().into_iter().flatten().filter(|package| is_library(package))
    {
        let bare = format!("check -p {} --no-default-features", package["name"].as_str().unwrap_or_default());
        let features = package["features"].as_object().into_iter().flatten().map(|(feature, _)| feature);
        let alone = features.filter(|feature| *feature != "default");
        let alone: Vec<_> = alone.map(|feature| format!("{bare} --features {feature}")).collect();
        checks.push(bare);
        checks.extend(alone);
    }
    checks
}

fn is_library(package: &Value) -> bool {
    let kinds =
        package["targets"].as_array().into_iter().flatten().filter_map(|target| target["kind"].as_array());
    kinds.flatten().any(|kind| kind == "lib")
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn every_feature_of_a_library_is_checked_alone_but_default_is_not() {
        let metadata = json!({ "packages": [
            { "name": "lib", "features": { "default": ["a"], "a": [], "b": [] },
              "targets": [{ "kind": ["lib"] }, { "kind": ["test"] }] },
            { "name": "program", "features": { "c": [] }, "targets": [{ "kind": ["bin"] }] },
        ] });
        assert_eq!(
            feature_checks(&metadata),
            [
                "check -p lib --no-default-features",
                "check -p lib --no-default-features --features a",
                "check -p lib --no-default-features --features b",
            ]
        );
    }

    #[test]
    fn the_models_are_built_apart() {
        let mut command = Command::new("cargo");
        let folder = as_model(&mut command).get_envs().find(|(name, _)| *name == "CARGO_TARGET_DIR");
        assert!(folder.unwrap().1.unwrap().to_string_lossy().ends_with("/model"));
    }
}
