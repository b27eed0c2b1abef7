//! A separate program, because it changes the current folder of the process.
//!
//! A store opened by a relative path must survive a change of the current folder, as daemons make. It used to
//! be reported as vanished.

use tidegate_store::{Policies, Sqlite};

#[tokio::test]
async fn relative_path_survives_a_change_of_folder() {
    let (folder, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::env::set_current_dir(folder.path()).unwrap();
    let store = Sqlite::open("limits.db").await.unwrap();
    store.namespace("before").await.unwrap();
    std::env::set_current_dir(other.path()).unwrap();
    store.version().await.unwrap();
    store.namespace("after").await.unwrap();
    assert!(!other.path().join("limits.db").exists());
    // A file reached through a symbolic link is the file itself.
    std::os::unix::fs::symlink(folder.path().join("limits.db"), other.path().join("link.db")).unwrap();
    let linked = Sqlite::open("link.db").await.unwrap();
    std::env::set_current_dir("/").unwrap();
    linked.namespace("after").await.unwrap();
    std::fs::remove_file(other.path().join("link.db")).unwrap();
    linked.version().await.unwrap();
}
