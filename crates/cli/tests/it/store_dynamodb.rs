//! `tidegate store` in DynamoDB.

use crate::kit::engine::{address, skip_without, unique};
use crate::kit::life::{Life, Older};
use crate::kit::{self, Shop};

/// The variable with the address of the engine.
const DYNAMODB: &str = "TIDEGATE_TEST_DYNAMODB";

fn life(name: &str) -> Life {
    let (table, server) = (unique(name), address(DYNAMODB));
    let url =
        format!("dynamodb://{table}?region=eu-central-1&endpoint={server}&deadline_ms=5000&timeout_ms=30000");
    Life { shop: Shop::new(), url, wanted: 2, older: Older::Refused }
}

#[test]
fn a_table_is_made_looked_at_used_and_removed_once_it_is_said_that_it_may_be_lost() {
    skip_without!(DYNAMODB);
    let life = life("life");
    life.is_made();
    life.is_used();
    let (_, checked) = life.json("store check");
    let settings =
        checked["settings"].as_array().unwrap().iter().map(|setting| setting["name"].as_str().unwrap());
    assert_eq!(settings.collect::<Vec<_>>(), ["billing", "deletion protection"]);

    let told = life.run("store destroy");
    assert_eq!((told.code, told.stderr.as_str()), (5, ""), "{told:?}");
    assert!(told.stdout.ends_with("nothing is removed: say --yes to lose all of it\n"), "{told:?}");
    let (code, told) = life.json("store destroy");
    assert_eq!(
        (code, &told["is_removed"], &told["namespaces"][0]["policies"]),
        (5, &false.into(), &1.into())
    );
    assert_eq!(life.json("store check").0, 0, "it is still there");

    let (code, gone) = life.json("store destroy --yes");
    assert_eq!((code, &gone["is_removed"], &gone["parts"][0]["was_there"]), (0, &true.into(), &true.into()));
    let again = life.run("store destroy --yes");
    assert_eq!((again.code, again.stderr.as_str()), (0, ""), "{again:?}");
    assert!(again.stdout.contains("was not there"), "{again:?}");
    let dry = life.run("store destroy");
    assert_eq!((dry.code, dry.stderr.as_str()), (0, ""), "a dry run agrees: {dry:?}");
    assert!(dry.stdout.contains("was not there"), "{dry:?}");
    let used = life.run("balance acme gpt");
    assert_eq!(used.code, 1, "{used:?}");
    assert!(used.stderr.contains("tidegate store init"), "{used:?}");
}

#[test]
fn a_template_names_the_table_and_asks_nobody() {
    let shop = Shop::new();
    let run = shop.run("--store dynamodb://limits?endpoint=http://127.0.0.1:1 store template");
    assert_eq!((run.code, run.stderr.as_str()), (0, ""), "{run:?}");
    assert!(
        run.stdout.starts_with("AWSTemplateFormatVersion") && run.stdout.contains("TableName: \"limits\"")
    );
}

#[test]
fn what_is_not_a_table_is_neither_removed_from_here_nor_has_a_template() {
    let shop = Shop::new();
    shop.ok("store init");
    for line in ["store destroy", "store destroy --yes"] {
        let run = shop.run(line);
        assert_eq!(run.code, 1, "{run:?}");
        assert!(run.stderr.contains("by the engine's own means"), "{run:?}");
    }
    let run = shop.run("store template");
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("`tidegate store init` makes all of it"), "{run:?}");
    assert!(shop.file().exists());
}

#[test]
fn without_keys_to_sign_with_it_is_denied_and_not_away() {
    let shop = Shop::new();
    let url = "dynamodb://limits?region=eu-central-1&endpoint=http://127.0.0.1:1";
    let mut command = shop.command(&["--store", url, "store", "check"]);
    command.env_remove("AWS_ACCESS_KEY_ID").env_remove("AWS_SECRET_ACCESS_KEY");
    // The machine has no role, and asking for one takes long.
    let run = kit::run(command.env("AWS_EC2_METADATA_DISABLED", "true"));
    assert_eq!(run.code, 1, "{run:?}");
    assert!(run.stderr.contains("AWS_PROFILE"), "{run:?}");
}
