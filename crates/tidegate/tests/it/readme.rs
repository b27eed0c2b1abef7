//! The README's table of features is that of Cargo.toml.

use std::collections::BTreeSet;

const README: &str = include_str!("../../../../README.md");
const MANIFEST: &str = include_str!("../../Cargo.toml");

#[test]
fn feature_table_is_complete() {
    let features = MANIFEST.split("\n[features]\n").nth(1).expect("there is a table of features");
    let features = features.split("\n[").next().unwrap_or_default();
    let names = features.lines().filter_map(|line| line.split_once(" = ")).map(|(name, _)| name.trim());
    let declared: BTreeSet<_> =
        names.filter(|name| !name.starts_with(['#', '"']) && *name != "default").collect();
    let rows = README.lines().filter_map(|line| line.strip_prefix("| `")?.split('`').next());
    let listed: BTreeSet<_> = rows.filter(|name| !name.contains(' ')).collect();
    assert_eq!(listed, declared);
}
