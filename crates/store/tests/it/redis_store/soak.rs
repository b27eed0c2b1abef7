//! Four processes on one server, each over a connection that is cut repeatedly.

use crate::kit::child::{ChildArgs, test_name};
use crate::kit::engine::{REDIS, address, skip_without};
use crate::kit::killed;
use crate::kit::proxy::{Proxy, local};
use crate::kit::redis::options_at;
use crate::kit::soak::{check_logs, name, run_child, run_children, runtime, soak_folder, url};
use tidegate_store::{HostWall, WallClock};

/// Runs the soak on the server whose address is in this variable, for the test of this name.
pub(crate) fn soak(variable: &str, test: &str) -> Vec<String> {
    if let Some(args) = ChildArgs::from_env() {
        runtime().block_on(async {
            let url = url(&args.path);
            let port = url.rsplit(':').next().and_then(|port| port.parse().ok());
            let wire = Proxy::to(local(port.expect("an address with a port"))).await;
            let opened = options_at(&wire.redis()).namespace(name(&args.path)).open().await;
            let store = opened.expect("the server responds");
            run_child(&args, store, async |number| wire.cut(1 + u32::from(number % 3 == 0))).await;
            assert!(wire.cuts() > 0);
        });
        return Vec::new();
    }
    let folder = soak_folder(&address(variable));
    let mut reports = run_children(test, folder.path());
    runtime().block_on(async {
        let opened = options_at(&address(variable)).namespace(name(folder.path())).open().await;
        let store = opened.expect("the server responds");
        reports.push(check_logs(folder.path(), &store).await.expect("the server responds"));
    });
    reports
}

#[test]
fn four_processes_over_cut_wires_conserve_units() {
    skip_without!(REDIS);
    println!("{}", soak(REDIS, test_name!(four_processes_over_cut_wires_conserve_units)).join("\n"));
}

#[test]
fn killed_processes_do_not_exceed_a_pool() {
    skip_without!(REDIS);
    if let Some(args) = ChildArgs::from_env() {
        return runtime().block_on(async {
            let opened = options_at(&url(&args.path)).namespace(name(&args.path)).open().await;
            killed::run_child(&args, opened.expect("the server responds")).await;
        });
    }
    let folder = soak_folder(&address(REDIS));
    let test = test_name!(killed_processes_do_not_exceed_a_pool);
    let reports = killed::kill_children(test, folder.path(), HostWall.now().as_micros());
    runtime().block_on(async {
        let opened = options_at(&address(REDIS)).namespace(name(folder.path())).open().await;
        println!("{}", killed::check_reports(&reports, &opened.expect("the server responds")).await);
    });
}
