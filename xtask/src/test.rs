//! `cargo xtask test`: every check there is, the quick ones first, stopping at the first that fails.
//!
//! CI runs this and nothing else, so what passes here passes there.

use std::process::Command;

use anyhow::{Context as _, Result};
use serde_json::Value;

use crate::engines::{self, Borrowed, Engine};
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

/// Runs all steps, the tests on `only` those engines, or on all where none is named.
pub(crate) fn run(depth: Depth, only: &[Engine]) -> Result<()> {
    let mut steps = Steps::default();
    steps.run("fmt", || step::stream(&mut cargo("fmt --all --check")))?;
    steps.run("tidy", tidy::run)?;
    steps.run("clippy", || {
        step::stream(&mut cargo("clippy --workspace --all-targets --all-features -- -D warnings"))
    })?;
    // The tours of the pages use it.
    install::ensure_tool("curl", "curl")?;
    // `tidegate watch` is driven in it.
    install::ensure_tool("tmux", "tmux")?;
    steps.run("tests", || tests(depth, only))?;
    steps.run("model", || model(depth))?;
    steps.run("model-clippy", model_clippy)?;
    steps.run("examples", examples::run)?;
    steps.run("fuzz", || fuzz::run(depth))?;
    steps.run("docs", || {
        step::stream(cargo("doc --workspace --no-deps --all-features").env("RUSTDOCFLAGS", "-D warnings"))
    })?;
    steps.run("features", features)?;
    println!("{}", steps.summary());
    let left_out: Vec<_> = left_out(only).iter().map(ToString::to_string).collect();
    if !left_out.is_empty() {
        println!("NARROWED on purpose: not tested on {}", left_out.join(", "));
    }
    Ok(())
}

fn tests(depth: Depth, only: &[Engine]) -> Result<()> {
    let left_out = left_out(only);
    let wanted: Vec<_> = Engine::SERVERS.into_iter().filter(|engine| !left_out.contains(engine)).collect();
    let engines = Borrowed::up(&wanted)?;
    let mut tests = cargo(&test_run(&left_out)?);
    tests.envs(engines.variables()?).envs([engines::envoy()?]);
    if depth == Depth::Deep {
        tests.env("PROPTEST_CASES", "20000").env("TIDEGATE_DEEP", "1");
    }
    step::stream(&mut tests)?;
    // Apart: the examples of the configuration read every variable that begins as ours do.
    step::stream(&mut cargo("test --workspace --all-features --doc"))
}

/// The servers that a run does without, because others were named.
fn left_out(only: &[Engine]) -> Vec<Engine> {
    let is_left_out = |engine: &Engine| !only.is_empty() && !only.contains(engine);
    Engine::SERVERS.into_iter().filter(is_left_out).collect()
}

/// How cargo is asked for all tests but those of the engines that are left out, and those in the documentation.
fn test_run(left_out: &[Engine]) -> Result<String> {
    let all = "test --workspace --all-features --lib --bins --examples";
    if left_out.is_empty() {
        return Ok(format!("{all} --tests"));
    }
    let tests = targets_without(&metadata()?, left_out);
    let named: Vec<_> = tests.iter().map(|name| format!(" --test {name}")).collect();
    Ok(format!("{all}{}", named.concat()))
}

/// The test programs that need none of the engines `left_out`. One that needs an engine says so by its required features,
/// and where a feature has several engines, by the engine's name in its own.
fn targets_without(metadata: &Value, left_out: &[Engine]) -> Vec<String> {
    let packages = metadata["packages"].as_array().into_iter().flatten();
    let targets = packages.flat_map(|package| package["targets"].as_array().into_iter().flatten());
    let tests = targets.filter(|target| {
        target["kind"].as_array().is_some_and(|kinds| kinds.iter().any(|kind| kind == "test"))
    });
    let needs = |target: &Value, engine: &Engine| {
        let features = target["required-features"].as_array().into_iter().flatten();
        let name = target["name"].as_str().unwrap_or_default();
        features.filter_map(Value::as_str).any(|feature| Some(feature) == engine.feature())
            && engine.owns_test(name)
    };
    let kept = tests.filter(|target| !left_out.iter().any(|engine| needs(target, engine)));
    let mut names: Vec<_> = kept.filter_map(|target| Some(target["name"].as_str()?.to_owned())).collect();
    names.sort();
    names.dedup();
    names
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
    for check in feature_checks(&metadata()?) {
        println!("    {check}");
        step::capture(&check, &mut cargo(&check))?;
    }
    Ok(())
}

fn metadata() -> Result<Value> {
    let metadata = step::capture("cargo metadata", &mut cargo("metadata --no-deps --format-version 1"))?;
    serde_json::from_str(&metadata).context("cargo metadata wrote no JSON")
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
    fn a_narrowed_run_leaves_out_the_tests_of_other_engines_and_no_more() {
        let test = |name: &str, features: Value| json!({ "kind": ["test"], "name": name, "required-features": features });
        let metadata = json!({ "packages": [{ "targets": [
            test("api", json!(null)), test("postgres", json!(["postgres"])), test("redis", json!(["redis"])),
            test("valkey", json!(["redis"])), test("redis_cluster", json!(["redis"])),
            test("redis_faults", json!(["conformance", "redis"])), test("dynamodb", json!(["dynamodb"])),
            test("dynamodb_store", json!(["dynamodb"])), test("dynoxide", json!(["dynamodb"])),
            { "kind": ["lib"], "name": "store" },
        ] }] });
        let only = |engines: &[Engine]| targets_without(&metadata, &left_out(engines));
        assert_eq!(only(&[]).len(), 9);
        assert_eq!(only(&[Engine::Memory, Engine::Sqlite]), ["api"]);
        assert_eq!(only(&[Engine::Postgres]), ["api", "postgres"]);
        assert_eq!(only(&[Engine::Redis]), ["api", "redis", "redis_faults"]);
        assert_eq!(only(&[Engine::Dynamodb]), ["api", "dynamodb", "dynamodb_store"]);
        assert_eq!(only(&[Engine::Dynoxide]), ["api", "dynoxide"]);
        assert_eq!(
            only(&[Engine::Redis, Engine::RedisCluster]),
            ["api", "redis", "redis_cluster", "redis_faults"]
        );
    }

    #[test]
    fn the_models_are_built_apart() {
        let mut command = Command::new("cargo");
        let folder = as_model(&mut command).get_envs().find(|(name, _)| *name == "CARGO_TARGET_DIR");
        assert!(folder.unwrap().1.unwrap().to_string_lossy().ends_with("/model"));
    }
}
