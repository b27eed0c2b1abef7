//! `tidegate bucket`: sets the units available in a bucket.

use clap::{Args, Subcommand};
use tidegate::{Across, EntityId, LimitKey, LimitName, ResourceName, Subject};

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
  tidegate bucket reset acme gpt-4 tpm --across entities   # all of gpt-4";

/// Subcommands of `bucket`.
#[derive(Debug, Subcommand)]
pub(crate) enum BucketVerb {
    /// Set the units available in the bucket of a limit
    #[command(after_help = EXAMPLES)]
    Set {
        #[command(flatten)]
        bucket: BucketArgs,
        /// The limit, and the units available from now on, at most its burst
        #[arg(value_name = "LIMIT=UNITS", value_parser = parse::units)]
        units: Units,
    },
    /// Fill the bucket of a limit
    #[command(after_help = EXAMPLES)]
    Reset {
        #[command(flatten)]
        bucket: BucketArgs,
        /// The limit
        #[arg(value_parser = parse::limit_name)]
        limit: LimitName,
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

pub(crate) async fn run(backend: &impl Backend, verb: BucketVerb) -> Result<Output, Failure> {
    let (bucket, name, units) = match verb {
        BucketVerb::Set { bucket, units: Units { limit, units } } => {
            (bucket, parse::limit_name(&limit).map_err(Failure::usage)?, Some(units))
        }
        BucketVerb::Reset { bucket, limit } => (bucket, limit, None),
    };
    let subject = Subject { entity: bucket.entity, resource: bucket.resource };
    let limit = LimitKey { name, across: bucket.across };
    let set = backend.set_bucket(&subject, &limit, units).await?;
    let output = Output::new(codec::bucket(&set));
    let output = output.table(drawn(std::slice::from_ref(&set.value)));
    Ok(output.line(format!("written at version {}", set.version)))
}
