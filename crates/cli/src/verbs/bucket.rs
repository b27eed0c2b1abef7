//! `tidegate bucket`: sets the units available in a bucket.

use clap::{Args, Subcommand};
use tidegate::{Across, BucketLimit, EntityId, InvalidBucketLimit, ResourceName, Subject};

use super::inspect::drawn;
use crate::backend::Backend;
use crate::codec;
use crate::failure::Failure;
use crate::output::Output;
use crate::parse::{self, Units};

const EXAMPLES: &str = "\
Usage stays as it is recorded, and leases return their held units.
Examples:
  tidegate bucket reset acme gpt-4 tpm
  tidegate bucket set acme gpt-4 tpm=5000
  tidegate bucket reset acme gpt-4 tpm --across entities   # all of gpt-4
  tidegate bucket reset acme gpt-4 tpm:1k/min              # given with a call

A limit that only calls or Envoy's rules have is named by its text.";

/// Subcommands of `bucket`.
#[derive(Debug, Subcommand)]
pub(crate) enum BucketVerb {
    /// Set the units available in the bucket of a limit
    #[command(after_help = EXAMPLES)]
    Set {
        #[command(flatten)]
        bucket: BucketArgs,
        /// The limit, and the units available from now on, at most its burst
        #[arg(value_name = "LIMIT=UNITS", value_parser = limit_and_units)]
        units: (BucketLimit, u64),
    },
    /// Fill the bucket of a limit
    #[command(after_help = EXAMPLES)]
    Reset {
        #[command(flatten)]
        bucket: BucketArgs,
        /// The limit
        limit: BucketLimit,
    },
}

/// The bucket.
#[derive(Debug, Args)]
pub(crate) struct BucketArgs {
    /// The entity; for a pool, any that draws from it
    #[arg(value_parser = parse::entity)]
    entity: EntityId,
    /// The resource; for a pool, any that it draws for
    #[arg(value_parser = parse::resource)]
    resource: ResourceName,
    /// The bucket is that of the limit pooled across: resources, entities or both
    #[arg(long, value_name = "WHAT")]
    across: Option<Across>,
}

/// Parses `LIMIT=UNITS`. The text of a limit may contain `=` too.
fn limit_and_units(text: &str) -> Result<(BucketLimit, u64), String> {
    let place = text.rfind('=').unwrap_or(text.len());
    let Units { units, .. } = parse::units(&text[place..])?;
    let limit = text[..place].parse().map_err(|error: InvalidBucketLimit| error.to_string())?;
    Ok((limit, units))
}

pub(crate) async fn run(backend: &impl Backend, verb: BucketVerb) -> Result<Output, Failure> {
    let (bucket, mut limit, units) = match verb {
        BucketVerb::Set { bucket, units: (limit, units) } => (bucket, limit, Some(units)),
        BucketVerb::Reset { bucket, limit } => (bucket, limit, None),
    };
    let subject = Subject { entity: bucket.entity, resource: bucket.resource };
    match (&mut limit, bucket.across) {
        (_, None) => {}
        (BucketLimit::Stored(key), across) => key.across = across,
        (BucketLimit::OfCall(_), Some(_)) => {
            return Err(Failure::usage(
                "a limit of a call is not pooled: --across is for limits of policies",
            ));
        }
    }
    let set = backend.set_bucket(&subject, &limit, units).await?;
    let output = Output::new(codec::bucket(&set));
    let output = output.table(drawn(std::slice::from_ref(&set.value)));
    Ok(output.line(format!("written at version {}", set.version)))
}
