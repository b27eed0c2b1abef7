//! Its own program: it changes the current folder of the process.
//!
//! A file that was opened by a relative path stays open in a program that changes its folder, as daemons do. It was reported
//! as vanished.

use tidegate_store::{Policies, Sqlite};

#[tokio::test]
async fn a_relative_path_stays_the_file_it_was_when_the_program_changes_its_folder() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::env::set_current_dir(folder.path()).unwrap();
    let store = Sqlite::open("limits.db").await.unwrap();
    store.namespace("before").await.unwrap();
    std::env::set_current_dir(other.path()).unwrap();
    store.version().await.unwrap();
    store.namespace("after").await.unwrap();
    assert!(!other.path().join("limits.db").exists());
    // And one that is reached by another name is the file itself.
    std::os::unix::fs::symlink(folder.path().join("limits.db"), other.path().join("link.db")).unwrap();
    let linked = Sqlite::open("link.db").await.unwrap();
    std::env::set_current_dir("/").unwrap();
    linked.namespace("after").await.unwrap();
    std::fs::remove_file(other.path().join("link.db")).unwrap();
    linked.version().await.unwrap();
}
