//! `tidegate token`: creates, lists and revokes the tokens of a server's clients.

use clap::{Args, Subcommand};
use tidegate::store::Page;
use tidegate::{EntityId, Stamp, Versioned};
use tidegate_core::limit::token::{Token, TokenId, TokenScopes, TokenState};

use super::listed;
use crate::backend::{Backend, TokenRequest};
use crate::codec;
use crate::failure::Failure;
use crate::format;
use crate::output::{Output, Table, Tint};
use crate::parse::{self, PageArgs};

const SCOPES: &str = "\
Scopes, each independent:
  acquire                          draw units, and renew and end leases
  read                             read limits, entities, usage and the audit
  admin                            change limits, entities and tokens

Example:
  tidegate token create ci --scopes acquire,read --expires 90d";

/// Subcommands of `token`.
#[derive(Debug, Subcommand)]
pub(crate) enum TokenVerb {
    /// Create a token, and show it once
    #[command(after_help = SCOPES)]
    Create(CreateArgs),
    /// List tokens, by id; secrets are not stored
    List(PageArgs),
    /// Revoke a token
    ///
    /// It stays in the list, and its id is never reused. Revoking it again has no effect.
    Revoke {
        /// The token
        #[arg(value_parser = token_id)]
        id: TokenId,
    },
}

/// Arguments of `token create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The id: up to 64 letters, digits, `_`, `-` and `.`
    #[arg(value_parser = token_id)]
    id: TokenId,
    /// The scopes: acquire, read or admin, separated by commas
    #[arg(long, value_parser = scopes)]
    scopes: TokenScopes,
    /// Bind it to this entity and its descendants, without the scope admin [default: all entities]
    #[arg(long, value_name = "ID", value_parser = parse::entity)]
    entity: Option<EntityId>,
    /// A display name [default: the id]
    #[arg(long)]
    name: Option<String>,
    /// Expire at this time: 2030-01-31, 2030-01-31T09:30:00Z, or 90d from now [default: never]
    #[arg(long, value_name = "TIME", value_parser = parse::future_time)]
    expires: Option<Stamp>,
}

fn token_id(text: &str) -> Result<TokenId, String> {
    let id = TokenId::new(text).map_err(|error| error.to_string())?;
    if id.is_reserved() {
        return Err("ids that begin with `.` are reserved for the server".to_owned());
    }
    Ok(id)
}

fn scopes(text: &str) -> Result<TokenScopes, String> {
    text.parse().map_err(|error: tidegate_core::limit::token::InvalidToken| error.to_string())
}

pub(crate) async fn run(backend: &impl Backend, verb: TokenVerb) -> Result<Output, Failure> {
    match verb {
        TokenVerb::Create(args) => create(backend, args).await,
        TokenVerb::List(page) => {
            let now = parse::time("0s").map_err(Failure::failed)?;
            Ok(list(&backend.tokens(&page.paging()?).await?, now))
        }
        TokenVerb::Revoke { id } => {
            let version = backend.revoke_token(&id).await?;
            let output = Output::new(codec::revoked(id.as_str(), version));
            Ok(output.line(format!("{id} revoked at version {version}")))
        }
    }
}

async fn create(backend: &impl Backend, args: CreateArgs) -> Result<Output, Failure> {
    let name = args.name.unwrap_or_else(|| args.id.to_string());
    let request = TokenRequest {
        id: args.id,
        name,
        scopes: args.scopes,
        entity: args.entity,
        expires_at: args.expires,
        secret: None,
    };
    let made = backend.create_token(request).await?;
    let json = codec::made_token(&made);
    // Alone on the first line, for `| head -1`.
    Ok(Output::new(json).line(made.secret).line("This is the token. It is shown once: keep it safe."))
}

fn list(page: &Page<Versioned<Token>>, now: Stamp) -> Output {
    let mut table = Table::new(["ID", "NAME", "SCOPES", "STATE", "EXPIRES", "CREATED"]);
    for Versioned { value: token, .. } in &page.items {
        let (state, tint) = match token.state(now) {
            TokenState::Good => ("good", Tint::Plain),
            TokenState::Expired => ("expired", Tint::Bad),
            TokenState::Revoked => ("revoked", Tint::Bad),
        };
        let cells = [
            token.id.to_string(),
            token.name.clone(),
            token
                .entity
                .as_ref()
                .map_or_else(|| token.scopes.to_string(), |entity| format!("{} of {entity}", token.scopes)),
            state.to_owned(),
            token.expires_at.map_or_else(|| "never".to_owned(), format::time),
            format::time(token.created_at),
        ];
        table.tinted(tint, cells);
    }
    listed("tokens", page, codec::token, table)
}
