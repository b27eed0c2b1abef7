//! `tidegate store` on DynamoDB.

use crate::kit::engine::{address, skip_without, unique};
use crate::kit::lifecycle::{Lifecycle, Older};
use crate::kit::{self, Fixture};

/// The variable with the address of the engine.
const DYNAMODB: &str = "TIDEGATE_TEST_DYNAMODB";

fn lifecycle(name: &str) -> Lifecycle {
    let (table, server) = (unique(name), address(DYNAMODB));
    let url =
        format!("dynamodb://{table}?region=eu-central-1&endpoint={server}&deadline_ms=5000&timeout_ms=30000");
    Lifecycle { fixture: Fixture::new(), url, wanted: 2, older: Older::Refused }
}

#[test]
fn table_is_created_used_and_removed_with_yes() {
    skip_without!(DYNAMODB);
    let lifecycle = lifecycle("life");
    lifecycle.is_made();
    lifecycle.is_used();
    let (_, checked) = lifecycle.json("store check");
    let settings =
        checked["settings"].as_array().unwrap().iter().map(|setting| setting["name"].as_str().unwrap());
    assert_eq!(settings.collect::<Vec<_>>(), ["billing", "deletion protection"]);

    let told = lifecycle.run("store destroy");
    assert_eq!((told.code, told.stderr.as_str()), (5, ""), "{told:?}");
    assert!(told.stdout.ends_with("nothing was removed: use --yes to remove all of it\n"), "{told:?}");
    let (code, told) = lifecycle.json("store destroy");
    assert_eq!(
        (code, &told["is_removed"], &told["namespaces"][0]["policies"]),
        (5, &false.into(), &1.into())
    );
    assert_eq!(lifecycle.json("store check").0, 0, "it still exists");

    let (code, gone) = lifecycle.json("store destroy --yes");
    assert_eq!((code, &gone["is_removed"], &gone["parts"][0]["was_there"]), (0, &true.into(), &true.into()));
    let again = lifecycle.run("store destroy --yes");
    assert_eq!((again.code, again.stderr.as_str()), (0, ""), "{again:?}");
    assert!(again.stdout.contains("not found"), "{again:?}");
    let dry = lifecycle.run("store destroy");
    assert_eq!((dry.code, dry.stderr.as_str()), (0, ""), "a dry run agrees: {dry:?}");
    assert!(dry.stdout.contains("not found"), "{dry:?}");
    let used = lifecycle.run("balance acme gpt");
    assert_eq!(used.code, 1, "{used:?}");
    assert!(used.stderr.contains("tidegate store init"), "{used:?}");
}

#[test]
fn template_names_the_table_without_a_connection() {
    let fixture = Fixture::new();
    let run = fixture.run("--store dynamodb://limits?endpoint=http://127.0.0.1:1 store template");
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
    assert!(
        run.stdout.starts_with("AWSTemplateFormatVersion") && run.stdout.contains("TableName: \"limits\"")
    );
}

#[test]
fn file_store_has_no_removal_and_no_template() {
    let fixture = Fixture::new();
    fixture.ok("store init");
    for line in ["store destroy", "store destroy --yes"] {
        let run = fixture.run(line);
        assert_eq!(run.code, 1, "{run:?}");
        assert!(run.stderr.contains("with the engine's own tools"), "{run:?}");
    }
    let run = fixture.run("store template");
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("`tidegate store init` creates all of it"), "{run:?}");
    assert!(fixture.file().exists());
}

#[test]
fn missing_credentials_deny_access() {
    let fixture = Fixture::new();
    let url = "dynamodb://limits?region=eu-central-1&endpoint=http://127.0.0.1:1";
    let mut command = fixture.command(&["--store", url, "store", "check"]);
    command.env_remove("AWS_ACCESS_KEY_ID").env_remove("AWS_SECRET_ACCESS_KEY");
    // Looking up a role of the machine would take long.
    let run = kit::run(command.env("AWS_EC2_METADATA_DISABLED", "true"));
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("AWS_PROFILE"), "{run:?}");
}
