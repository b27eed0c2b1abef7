//! `tidegate upstream`: permits for calls of upstreams at a server, and the state of the upstreams.

use std::io::Read as _;
use std::time::Duration;

use clap::{Args, Subcommand};
use tidegate_client::{
    AcquireCall, CallSettled, Cost, EntityId, LeaseRef, ResourceName, SettleCall, UpstreamState,
};
use tidegate_core::feedback::rejection::REJECTION_BODY_MAX;

use crate::codec;
use crate::failure::Failure;
use crate::format;
use crate::output::{Output, Table};
use crate::parse::{self, Units};
use crate::remote::Remote;

/// Subcommands of `upstream`.
#[derive(Debug, Subcommand)]
pub(crate) enum UpstreamVerb {
    /// List the upstreams that were called recently, the busiest first
    ///
    /// RATE is in requests per second, and REASON says what decides it. QUOTA is what the upstream is estimated
    /// to grant, once it has rejected a request.
    List,
    /// Acquire a permit for one call of an upstream, and print it
    Acquire(AcquireArgs),
    /// Report how a call went, and print whether it may be repeated
    Settle(SettleArgs),
}

/// Arguments of `upstream acquire`.
#[derive(Debug, Args)]
pub(crate) struct AcquireArgs {
    /// The upstream, such as openai/gpt-4
    upstream: ResourceName,
    /// The tokens that the call will use, by an estimate
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    tokens: u64,
    /// Wait this long until the upstream accepts the call, instead of not at all
    #[arg(long, value_name = "SPAN", value_parser = parse::duration)]
    within: Option<Duration>,
    /// How long the call may take
    #[arg(long, value_name = "SPAN", value_parser = parse::duration)]
    deadline: Option<Duration>,
    /// Attempts of this call before: 0 for the first
    #[arg(long, value_name = "COUNT", default_value_t = 0)]
    attempt: u32,
    /// Draw the limits of this entity too; needs --resource and --cost
    #[arg(long, value_name = "ENTITY", requires = "resource")]
    entity: Option<EntityId>,
    /// The resource of those limits
    #[arg(long, value_name = "RESOURCE", requires = "cost")]
    resource: Option<ResourceName>,
    /// Units to draw from one of those limits, such as tpm=800; may be repeated
    #[arg(long, value_name = "LIMIT=UNITS", requires = "entity", value_parser = parse::units)]
    cost: Vec<Units>,
}

/// Arguments of `upstream settle`.
#[derive(Debug, Args)]
pub(crate) struct SettleArgs {
    /// The permit
    permit: LeaseRef,
    /// The status of the response; without it the connection was lost
    #[arg(long, value_name = "STATUS")]
    status: Option<u16>,
    /// A header of the response that is about limits, as `retry-after: 5`; may be repeated
    #[arg(long, value_name = "HEADER", value_parser = header)]
    header: Vec<(String, String)>,
    /// Read the beginning of a rejection's body from stdin: it may name the exceeded limit
    #[arg(long)]
    body: bool,
    /// The tokens that the call used, if not those of the permit
    #[arg(long, value_name = "COUNT")]
    tokens: Option<u64>,
    /// The time until the response began, if it is not the age of the permit
    #[arg(long, value_name = "SPAN", value_parser = parse::duration)]
    latency: Option<Duration>,
    /// Units that the call used of a limit of its entity, if not those that it holds; may be repeated
    #[arg(long, value_name = "LIMIT=UNITS", value_parser = parse::units)]
    actual: Vec<Units>,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once(':').ok_or("must be NAME: VALUE")?;
    Ok((name.trim().to_owned(), value.trim().to_owned()))
}

pub(crate) async fn run(server: &Remote, verb: UpstreamVerb) -> Result<Output, Failure> {
    match verb {
        UpstreamVerb::List => list(server).await,
        UpstreamVerb::Acquire(args) => acquire(server, args).await,
        UpstreamVerb::Settle(args) => settle(server, args).await,
    }
}

async fn acquire(server: &Remote, args: AcquireArgs) -> Result<Output, Failure> {
    let AcquireArgs { upstream, tokens, within, deadline, attempt, entity, resource, cost } = args;
    let (within, deadline) = (within.map(Into::into), deadline.map(Into::into));
    let cost = units(&cost)?;
    let request = AcquireCall { tokens, within, attempt, deadline, entity, resource, cost };
    let granted = server.client().acquire_call(&upstream, &request).await?;
    Ok(Output::new(codec::call_permit(&granted)).line(granted.permit.to_string()))
}

async fn settle(server: &Remote, args: SettleArgs) -> Result<Output, Failure> {
    let SettleArgs { permit, status, header, body, tokens, latency, actual } = args;
    let body = if body { Some(read_body()?) } else { None };
    let headers = header.into_iter().collect();
    let (latency, actual) = (latency.map(Into::into), units(&actual)?);
    let settle = SettleCall { status, headers, body, tokens, latency, actual };
    let CallSettled { retry } = server.client().settle_call(&permit, &settle).await?;
    let text = match retry.after {
        Some(after) if retry.allowed => format!("retry after {}", format::duration(after.as_duration())),
        _ => "no retry".to_owned(),
    };
    Ok(Output::new(codec::call_settled(&retry)).line(text))
}

/// Units of each limit, as the API has them.
fn units(units: &[Units]) -> Result<Cost, Failure> {
    Remote::cost(&units.iter().map(|units| (units.limit.as_str(), units.units)).collect::<Vec<_>>())
}

/// What the server reads of a body, from stdin.
fn read_body() -> Result<String, Failure> {
    let mut body = Vec::new();
    let read = std::io::stdin().take(REJECTION_BODY_MAX as u64).read_to_end(&mut body);
    read.map_err(|error| Failure::failed(format!("stdin cannot be read: {error}")))?;
    Ok(String::from_utf8_lossy(&body).into_owned())
}

async fn list(server: &Remote) -> Result<Output, Failure> {
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
