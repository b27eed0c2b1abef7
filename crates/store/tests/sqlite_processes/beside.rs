//! The suite, on the machine's clock, beside two other processes that load the same file in another namespace.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, OnceLock};

use tidegate_store::conformance::{self, Fixture, RealTime};
use tidegate_store::{Buckets, SqliteOptions};

use crate::child::{Child, Orders};
use crate::kit::{PATIENCE, draw_of, own, settle_of};

/// The file that all cases share, and those who load it. They end, and remove it, when this process does.
fn loaded() -> &'static PathBuf {
    static LOADED: OnceLock<(PathBuf, Mutex<Vec<Child>>)> = OnceLock::new();
    let start = || {
        let path = tempfile::tempdir().expect("a folder for a test").keep().join("limits.db");
        let name = "beside::a_child_loads_the_file_until_its_parent_ends";
        let mut children: Vec<_> = (0..2).map(|number| Child::start(name, &path, number, 0)).collect();
        children.iter().for_each(Child::is_ready);
        children.iter_mut().for_each(Child::go);
        (path, Mutex::new(children))
    };
    &LOADED.get_or_init(start).0
}

async fn open(namespace: &str) -> Fixture {
    let store = SqliteOptions::file(loaded()).namespace(namespace).patience(PATIENCE).open().await;
    let store = Arc::new(store.expect("the file is opened"));
    Fixture::new(store.clone(), Arc::new(RealTime(store)))
}

conformance::suite!(beside_others, open);

/// As the parent, it sees that they are there and go on.
#[test]
fn a_child_loads_the_file_until_its_parent_ends() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let Some(orders) = Orders::read() else {
        return runtime.block_on(async {
            let store = SqliteOptions::file(loaded()).namespace("the others").open().await.unwrap();
            let mut before = None;
            for _ in 0..3 {
                let mut now = crate::kit::shows(&store, "acme").await;
                while now == before {
                    tokio::task::yield_now().await;
                    now = crate::kit::shows(&store, "acme").await;
                }
                before = now;
            }
        });
    };
    runtime.block_on(async {
        let store = SqliteOptions::file(&orders.path).namespace("the others").open().await;
        let store = store.expect("the file is opened");
        Orders::wait_for_go();
        for caller in 0..2 {
            let store = store.clone();
            tokio::spawn(async move {
                let levels = own(if caller == 0 { "acme" } else { "other" }, 30_000);
                loop {
                    // The machine may be slow, and the suite is what is shown here.
                    let draw = draw_of(&levels, 1);
                    if store.draw(&draw).await.is_ok() {
                        drop(store.settle(&settle_of(&draw, 1)).await);
                    }
                    // A moderate load: the suite is not to take for ever.
                    tokio::time::sleep(std::time::Duration::from_millis(2)).await;
                }
            });
        }
        let until_its_end = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
        drop(until_its_end.await);
        store.close().await;
        if let Some(folder) = orders.path.parent() {
            // The other may have been faster.
            drop(std::fs::remove_dir_all(folder));
        }
    });
    // Its callers are still at it, and are not waited for.
    std::process::exit(0);
}
