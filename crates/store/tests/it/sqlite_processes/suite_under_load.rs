//! Runs the suite with the system clock, while two other processes load the same file in another namespace.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tidegate_store::conformance::{self, Fixture, RealTime, Time};
use tidegate_store::{Buckets, SqliteOptions};

use crate::kit::child::{Child, ChildArgs, test_name};
use crate::kit::common::{balance, draw_of, own, settle_of};
use crate::kit::sqlite::{TIMEOUT, TempFile};

/// A file, and the processes that load it until drop.
#[derive(Debug)]
struct LoadedFile {
    children: Mutex<Vec<Child>>,
    place: TempFile,
}

impl LoadedFile {
    /// The file that concurrent cases share.
    fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<LoadedFile>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let started = Arc::new(Self::start());
            *shared = Arc::downgrade(&started);
            started
        })
    }

    fn start() -> Self {
        let place = TempFile::new();
        let name = test_name!(child_loads_the_file_until_its_parent_exits);
        let mut children: Vec<_> = (0..2).map(|number| Child::start(name, &place.path, number, 0)).collect();
        children.iter().for_each(Child::wait_ready);
        children.iter_mut().for_each(Child::go);
        Self { children: Mutex::new(children), place }
    }

    fn path(&self) -> &PathBuf {
        &self.place.path
    }
}

impl Drop for LoadedFile {
    fn drop(&mut self) {
        let children = self.children.get_mut().unwrap_or_else(PoisonError::into_inner);
        children.drain(..).for_each(Child::wait);
    }
}

/// The time of a case, which keeps the load running.
#[derive(Debug)]
struct LoadedTime {
    time: RealTime,
    _loaded: Arc<LoadedFile>,
}

impl Time for LoadedTime {
    fn pass(&self, span: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.time.pass(span)
    }

    fn can_jump(&self) -> bool {
        self.time.can_jump()
    }
}

async fn open(namespace: &str) -> Fixture {
    let loaded = LoadedFile::shared();
    let store = SqliteOptions::file(loaded.path()).namespace(namespace).deadline(TIMEOUT).open().await;
    let store = Arc::new(store.expect("the file is opened"));
    let time = LoadedTime { time: RealTime(store.clone()), _loaded: loaded };
    Fixture::new(store, Arc::new(time))
}

conformance::suite!(beside_others, open);

/// The parent checks that the children make progress.
#[test]
fn child_loads_the_file_until_its_parent_exits() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let Some(args) = ChildArgs::from_env() else {
        return runtime.block_on(async {
            let loaded = LoadedFile::shared();
            let store = SqliteOptions::file(loaded.path()).namespace("the others").open().await.unwrap();
            let mut before = None;
            for _ in 0..3 {
                let mut now = balance(&store, "acme").await;
                while now == before {
                    tokio::task::yield_now().await;
                    now = balance(&store, "acme").await;
                }
                before = now;
            }
        });
    };
    runtime.block_on(async {
        let store = SqliteOptions::file(&args.path).namespace("the others").open().await;
        let store = store.expect("the file is opened");
        ChildArgs::wait_for_go();
        for caller in 0..2 {
            let store = store.clone();
            tokio::spawn(async move {
                let levels = own(if caller == 0 { "acme" } else { "other" }, 30_000);
                loop {
                    // A draw may fail on a slow machine: the suite is under test, not the load.
                    let draw = draw_of(&levels, 1);
                    if store.draw(&draw).await.is_ok() {
                        drop(store.settle(&settle_of(&draw, 1)).await);
                    }
                    // A moderate load, so that the suite finishes.
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            });
        }
        let parent_exit = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
        drop(parent_exit.await);
        store.close().await;
    });
    // The callers are still running, and are not awaited.
    std::process::exit(0);
}
