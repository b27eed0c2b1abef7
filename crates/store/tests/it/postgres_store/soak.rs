//! Four processes on one server, each over a connection that is cut repeatedly.

use crate::kit::child::{ChildArgs, test_name};
use crate::kit::engine::{POSTGRES, skip_without};
use crate::kit::killed;
use crate::kit::postgres::{open, options_at, socket_addr, url as server, url_via};
use crate::kit::proxy::Proxy;
use crate::kit::soak::{check_logs, name, run_child, run_children, runtime, soak_folder, url};
use tidegate_store::{HostWall, WallClock};

#[test]
fn four_processes_over_cut_wires_conserve_units() {
    skip_without!(POSTGRES);
    if let Some(args) = ChildArgs::from_env() {
        return runtime().block_on(async {
            let url = url(&args.path);
            let wire = Proxy::to(socket_addr(&url)).await;
            let options = options_at(url_via(&url, wire.address)).schema(name(&args.path));
            let store = open(options.connections(4)).await;
            run_child(&args, store, async |number| wire.cut(1 + u32::from(number % 3 == 0))).await;
            assert!(wire.cuts() > 0);
        });
    }
    let folder = soak_folder(&server());
    let test = test_name!(four_processes_over_cut_wires_conserve_units);
    let reports = run_children(test, folder.path());
    runtime().block_on(async {
        let store = open(options_at(server()).schema(name(folder.path()))).await;
        let summary = check_logs(folder.path(), &store).await.unwrap();
        println!("{}\n{summary}", reports.join("\n"));
    });
}

#[test]
fn killed_processes_do_not_exceed_a_pool() {
    skip_without!(POSTGRES);
    if let Some(args) = ChildArgs::from_env() {
        return runtime().block_on(async {
            let options = options_at(url(&args.path)).schema(name(&args.path));
            killed::run_child(&args, open(options.connections(4)).await).await;
        });
    }
    let folder = soak_folder(&server());
    let test = test_name!(killed_processes_do_not_exceed_a_pool);
    let reports = killed::kill_children(test, folder.path(), HostWall.now().as_micros());
    runtime().block_on(async {
        let store = open(options_at(server()).schema(name(folder.path()))).await;
        println!("{}", killed::check_reports(&reports, &store).await);
    });
}
