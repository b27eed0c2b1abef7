//! `tidegate upstream`: shows the upstreams that callers get permits for at a server.

use clap::Subcommand;
use tidegate_client::UpstreamState;

use crate::codec;
use crate::failure::Failure;
use crate::format;
use crate::output::{Output, Table};
use crate::remote::Remote;

/// Subcommands of `upstream`.
#[derive(Debug, Subcommand)]
pub(crate) enum UpstreamVerb {
    /// List the upstreams that were called recently, the busiest first
    ///
    /// RATE is in requests per second, and REASON says what decides it. QUOTA is what the upstream is estimated
    /// to grant, once it has rejected a request.
    List,
}

pub(crate) async fn run(server: &Remote, UpstreamVerb::List: UpstreamVerb) -> Result<Output, Failure> {
    let listed = server.client().upstreams().await?;
    let output = Output::new(codec::upstreams(&listed.upstreams));
    if listed.upstreams.is_empty() {
        return Ok(output.line("no upstreams"));
    }
    let headings = ["UPSTREAM", ">RATE", ">QUOTA", ">SLOTS", ">IN FLIGHT", ">WAITING", ">ADMITTED", "REASON"];
    let mut table = Table::new(headings);
    for UpstreamState { name, in_flight, waiting, admitted, rate, slots, quota, reason } in listed.upstreams {
        let rate_cell = |rate: Option<f64>| rate.map_or_else(|| "-".to_owned(), |rate| format!("{rate:.1}"));
        table.row([
            name.to_string(),
            rate_cell(rate),
            rate_cell(quota),
            slots.map_or_else(|| "-".to_owned(), |slots| format::number(slots.into())),
            format::number(in_flight.into()),
            format::number(waiting.into()),
            format::number(admitted),
            reason.unwrap_or_else(|| "-".to_owned()),
        ]);
    }
    Ok(output.table(table))
}

/// The failure without a server.
pub(crate) fn no_server() -> Failure {
    Failure::usage("upstreams are at a server, not in a store")
        .next("name the server: --server URL, or TIDEGATE_SERVER")
}
