//! `tidegate token`: who may ask a server for what.

use clap::{Args, Subcommand};
use tidegate::store::Page;
use tidegate::{Stamp, Versioned};
use tidegate_core::limit::token::{Token, TokenId, TokenScopes, TokenState};

use super::listed;
use crate::answer::{Answer, Table, Tint};
use crate::backend::{Backend, TokenAsk};
use crate::codec;
use crate::failure::Failure;
use crate::words::{self, PageArgs};

const SCOPES: &str = "\
Scopes, each by itself:
  acquire                          draw, and go on with what was drawn
  read                             look at limits, entities, usage and the audit
  admin                            change them

Example:
  tidegate token create ci --scopes acquire,read --expires 90d";

/// What to do with tokens.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenVerb {
    /// Make a token, and show it: once, and never again
    #[command(after_help = SCOPES)]
    Create(CreateArgs),
    /// List tokens, by id; their secrets are kept by nobody
    List(PageArgs),
    /// Make a token good no more
    ///
    /// It stays in the list, and its id is never another's. To revoke it again does no harm.
    Revoke {
        /// Which one
        #[arg(value_parser = token_id)]
        id: TokenId,
    },
}

/// What to make.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Its id: up to 64 letters, digits, `_`, `-` and `.`
    #[arg(value_parser = token_id)]
    id: TokenId,
    /// What it is good for: some of acquire, read and admin, parted by commas
    #[arg(long, value_parser = scopes)]
    scopes: TokenScopes,
    /// A name for people [default: its id]
    #[arg(long)]
    name: Option<String>,
    /// Until when it is good: 2030-01-31, 2030-01-31T09:30:00Z, or for so long 90d; without it, until it is revoked
    #[arg(long, value_name = "TIME", value_parser = words::time_to_come)]
    expires: Option<Stamp>,
}

fn token_id(text: &str) -> Result<TokenId, String> {
    let id = TokenId::new(text).map_err(|error| error.to_string())?;
    if id.is_reserved() {
        return Err("ids that begin with `.` are the server's own".to_owned());
    }
    Ok(id)
}

fn scopes(text: &str) -> Result<TokenScopes, String> {
    text.parse().map_err(|error: tidegate_core::limit::token::InvalidToken| error.to_string())
}

pub(crate) async fn run(backend: &impl Backend, verb: TokenVerb) -> Result<Answer, Failure> {
    match verb {
        TokenVerb::Create(args) => create(backend, args).await,
        TokenVerb::List(page) => {
            let now = words::time("0s").map_err(Failure::failed)?;
            Ok(list(&backend.tokens(&page.paging()?).await?, now))
        }
        TokenVerb::Revoke { id } => {
            let version = backend.revoke_token(&id).await?;
            let answer = Answer::new(codec::revoked(id.as_str(), version));
            Ok(answer.line(format!("{id} is good no more, since version {version}")))
        }
    }
}

async fn create(backend: &impl Backend, args: CreateArgs) -> Result<Answer, Failure> {
    let name = args.name.unwrap_or_else(|| args.id.to_string());
    let ask = TokenAsk { id: args.id, name, scopes: args.scopes, expires_at: args.expires };
    let made = backend.create_token(ask).await?;
    let json = codec::made_token(&made);
    // By itself on the first line, for whoever wants nothing else: `| head -1`.
    Ok(Answer::new(json).line(made.secret).line("This is the token. It is shown once: keep it safe."))
}

fn list(page: &Page<Versioned<Token>>, now: Stamp) -> Answer {
    let mut table = Table::new(["ID", "NAME", "NAMESPACE", "SCOPES", "STATE", "EXPIRES", "CREATED", "BY"]);
    for Versioned { value: token, .. } in &page.items {
        let (state, tint) = match token.state(now) {
            TokenState::Good => ("good", Tint::Plain),
            TokenState::Expired => ("expired", Tint::Bad),
            TokenState::Revoked => ("revoked", Tint::Bad),
        };
        let cells = [
            token.id.to_string(),
            token.name.clone(),
            token.namespace.to_string(),
            token.scopes.to_string(),
            state.to_owned(),
            token.expires_at.map_or_else(|| "never".to_owned(), |at| at.to_string()),
            token.created_at.to_string(),
            token.created_by.clone(),
        ];
        table.tinted(tint, cells);
    }
    listed("tokens", page, codec::token, table)
}
