//! `tidegate audit`: lists and archives the audit of changes.

use std::path::PathBuf;

use clap::{Args, Subcommand};
use tidegate::Stamp;
use tidegate::store::AuditQuery;
use tidegate_core::limit::audit::{AuditKey, Change};
use tidegate_core::limit::token::{Token, TokenId};

use super::listed;
use crate::backend::Backend;
use crate::codec;
use crate::failure::Failure;
use crate::format;
use crate::output::{Output, Table};
use crate::parse::{self, PageArgs};

const WHERE: &str = "\
Scopes:
  system                           limits of the system
  resource NAME                    limits of a resource
  entity ID                        an entity, and all of its limits
  token ID                         a token
The default is all changes.
Times: 2026-01-31, 2026-01-31T09:30:00Z, or 24h or 7d for a time ago.";

/// Subcommands of `audit`.
#[derive(Debug, Subcommand)]
pub(crate) enum AuditVerb {
    /// List changes in chronological order
    #[command(override_usage = "tidegate audit list [OPTIONS] [SCOPE]", after_help = WHERE)]
    List(ListArgs),
    /// Move old changes from the store to gzip files of JSON lines
    ///
    /// The folder is created if it does not exist. Each store needs its own folder. An interruption loses
    /// nothing: run the command again.
    Archive {
        /// A folder, or `s3://BUCKET/PREFIX?region=REGION`, `gs://BUCKET/PREFIX`,
        /// `az://CONTAINER/PREFIX?account_name=NAME`
        folder: PathBuf,
        /// Move changes made before this time: 2026-01-31, 2026-01-31T09:30:00Z, or 24h or 7d for a time ago
        #[arg(long, value_name = "TIME", value_parser = parse::time, default_value = "30d")]
        before: Stamp,
    },
}

/// Arguments of `audit list`.
#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    /// Whose changes to list, as described below
    #[arg(value_name = "SCOPE")]
    scope: Vec<String>,
    /// List changes made at this time or later
    #[arg(long, value_name = "TIME", value_parser = parse::time)]
    since: Option<Stamp>,
    /// List changes made before this time
    #[arg(long, value_name = "TIME", value_parser = parse::time)]
    until: Option<Stamp>,
    #[command(flatten)]
    page: PageArgs,
}

pub(crate) async fn run(backend: &impl Backend, verb: AuditVerb) -> Result<Output, Failure> {
    match verb {
        AuditVerb::List(args) => list(backend, args).await,
        AuditVerb::Archive { folder, before } => {
            let archived = backend.archive(&folder, before).await?;
            let line = format!("{} changes moved to `{}`", archived.entries, folder.display());
            Ok(Output::new(codec::archived(&archived)).line(line))
        }
    }
}

async fn list(backend: &impl Backend, args: ListArgs) -> Result<Output, Failure> {
    let filed = filed(&args.scope)?;
    let range = args.since.unwrap_or(Stamp::ZERO)..args.until.unwrap_or(Stamp::MAX);
    let page = backend.audit(&AuditQuery { filed, range }, &args.page.paging()?).await?;
    let mut table = Table::new([">VERSION", "AT", "ACTOR", "WHAT", "BEFORE", "AFTER"]);
    for entry in &page.items {
        let [what, before, after] = change_words(&entry.change);
        table.row([
            entry.version.to_string(),
            format::time(entry.at),
            entry.actor.clone(),
            what,
            before,
            after,
        ]);
    }
    Ok(listed("changes", &page, codec::entry, table))
}

/// The filter for a scope or a token.
fn filed(words: &[String]) -> Result<Option<AuditKey>, Failure> {
    match words {
        [] => Ok(None),
        [word, id] if word == "token" => {
            let id = TokenId::new(id).map_err(|error| Failure::usage(error.to_string()))?;
            Ok(Some(AuditKey::token(&id)))
        }
        scope => Ok(Some(AuditKey::scope(&parse::whole_scope(scope)?))),
    }
}

/// The object of a change, and its state before and after, in words.
fn change_words(change: &Change) -> [String; 3] {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    match change {
        Change::Entity { before, after } => {
            let id = after.as_ref().or(before.as_ref()).map(|entity| entity.id().to_string());
            let [before, after] = [before, after].map(|entity| or_none(entity.as_ref().map(format::entity)));
            [format!("record of entity {}", id.unwrap_or_default()), before, after]
        }
        Change::Policy { scope, before, after } => {
            let [before, after] = [before, after].map(|policy| or_none(policy.as_ref().map(format::policy)));
            [format!("limits of {}", format::scope(scope)), before, after]
        }
        Change::Bucket { bucket, limit, before, after } => [
            format!("bucket {limit} of {bucket}"),
            format!("{before} available"),
            format!("{after} available"),
        ],
        Change::Token { before, after } => {
            let before = or_none(before.as_ref().map(token_words));
            [format!("token {}", after.id), before, token_words(after)]
        }
    }
}

fn token_words(token: &Token) -> String {
    match (token.revoked_at, token.expires_at) {
        (Some(_), _) => format!("{} revoked", token.scopes),
        (None, Some(at)) => format!("{} until {at}", token.scopes),
        (None, None) => token.scopes.to_string(),
    }
}
