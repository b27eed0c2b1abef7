//! The suite, on the machine's clock, beside two other processes that load the same file in another namespace.

use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::Duration;

use tidegate_store::conformance::{self, Fixture, RealTime, Time};
use tidegate_store::{Buckets, SqliteOptions};

use crate::kit::child::{Child, Orders, test_name};
use crate::kit::sqlite::{PATIENCE, Place};
use crate::kit::words::{draw_of, own, settle_of, shows};

/// A file, and the processes that load it until this is dropped.
#[derive(Debug)]
struct Loaded {
    children: Mutex<Vec<Child>>,
    place: Place,
}

impl Loaded {
    /// The one that the running cases share.
    fn shared() -> Arc<Self> {
        static SHARED: Mutex<Weak<Loaded>> = Mutex::new(Weak::new());
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let started = Arc::new(Self::start());
            *shared = Arc::downgrade(&started);
            started
        })
    }

    fn start() -> Self {
        let place = Place::new();
        let name = test_name!(a_child_loads_the_file_until_its_parent_ends);
        let mut children: Vec<_> = (0..2).map(|number| Child::start(name, &place.path, number, 0)).collect();
        children.iter().for_each(Child::is_ready);
        children.iter_mut().for_each(Child::go);
        Self { children: Mutex::new(children), place }
    }

    fn path(&self) -> &PathBuf {
        &self.place.path
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        let children = self.children.get_mut().unwrap_or_else(PoisonError::into_inner);
        children.drain(..).for_each(Child::ends);
    }
}

/// The time of a case, during which the file is loaded.
#[derive(Debug)]
struct Beside {
    time: RealTime,
    _loaded: Arc<Loaded>,
}

impl Time for Beside {
    fn pass(&self, span: Duration) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        self.time.pass(span)
    }

    fn can_jump(&self) -> bool {
        self.time.can_jump()
    }
}

async fn open(namespace: &str) -> Fixture {
    let loaded = Loaded::shared();
    let store = SqliteOptions::file(loaded.path()).namespace(namespace).deadline(PATIENCE).open().await;
    let store = Arc::new(store.expect("the file is opened"));
    let time = Beside { time: RealTime(store.clone()), _loaded: loaded };
    Fixture::new(store, Arc::new(time))
}

conformance::suite!(beside_others, open);

/// As the parent, it sees that the children run and go on.
#[test]
fn a_child_loads_the_file_until_its_parent_ends() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    let runtime = runtime.expect("a runtime");
    let Some(orders) = Orders::read() else {
        return runtime.block_on(async {
            let loaded = Loaded::shared();
            let store = SqliteOptions::file(loaded.path()).namespace("the others").open().await.unwrap();
            let mut before = None;
            for _ in 0..3 {
                let mut now = shows(&store, "acme").await;
                while now == before {
                    tokio::task::yield_now().await;
                    now = shows(&store, "acme").await;
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
                    // It may fail on a slow machine: the suite is what is tested here.
                    let draw = draw_of(&levels, 1);
                    if store.draw(&draw).await.is_ok() {
                        drop(store.settle(&settle_of(&draw, 1)).await);
                    }
                    // A moderate load: the suite is not to take for ever.
                    tokio::time::sleep(Duration::from_millis(2)).await;
                }
            });
        }
        let until_its_end = tokio::task::spawn_blocking(|| std::io::stdin().read_line(&mut String::new()));
        drop(until_its_end.await);
        store.close().await;
    });
    // Its callers are still at it, and are not waited for.
    std::process::exit(0);
}
