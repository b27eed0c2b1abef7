//! Manifests: what a file declares, compared with a store or a server, and written to it.
//!
//! Entities are written first, parents before their children, then all limits at once, then missing tokens. Each
//! write expects what the comparison has found. Entities and tokens that the file does not declare stay.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::env;
use std::path::{Path, PathBuf};

use tidegate::{
    DeclaredToken, Entity, EntityId, Expect, Limiter, Manifest, Paging, PolicyChanges, Stamp, Undeclared,
    Version, Versioned,
};
use tidegate_core::limit::entity::LEVELS_MAX;
use tidegate_core::limit::token::{Token, TokenId};
use tidegate_server::Secret;
use tokio::sync::Mutex;

use crate::args;
use crate::backend::{Backend, CreatedToken, TokenRequest};
use crate::config::Serving;
use crate::default_paths::OpenStore;
use crate::failure::Failure;
use crate::store::InProcess;
use crate::verbs::{DEFAULT_TIMEOUT, limits};

/// Maximum attempts to apply a manifest that other servers apply at the same time.
const ATTEMPTS_MAX: u32 = 3;

/// The changes that make a store what a manifest declares.
#[derive(Debug)]
pub(crate) struct ManifestChanges {
    pub(crate) entities: Vec<EntityChange>,
    pub(crate) policies: PolicyChanges,
    /// Tokens that do not exist.
    pub(crate) tokens: Vec<DeclaredToken>,
    /// Declared tokens that were revoked, and stay so.
    pub(crate) revoked: Vec<TokenId>,
}

/// The change of one entity.
#[derive(Debug)]
pub(crate) struct EntityChange {
    pub(crate) before: Option<Versioned<Entity>>,
    pub(crate) after: Entity,
}

/// The result of applying a manifest.
pub(crate) struct Applied {
    pub(crate) version: Version,
    pub(crate) tokens: Vec<CreatedToken>,
}

impl ManifestChanges {
    pub(crate) const fn is_empty(&self) -> bool {
        self.entities.is_empty() && self.policies.is_empty() && self.tokens.is_empty()
    }

    /// Compares a manifest with what is stored.
    pub(crate) async fn plan(
        backend: &impl Backend,
        manifest: &Manifest,
        extra: Undeclared,
    ) -> Result<Self, Failure> {
        let mut entities = Vec::new();
        for after in manifest.entities() {
            let before = backend.entity(after.id()).await?;
            // A manifest does not enable an entity that an operator has disabled.
            let is_disabled = before.as_ref().is_some_and(|before| before.value.is_disabled());
            let after = after.clone().disabled(is_disabled);
            if before.as_ref().is_none_or(|before| before.value != after) {
                entities.push(EntityChange { before, after });
            }
        }
        check_parents(backend, manifest, &entities).await?;
        let (tokens, revoked) = missing_tokens(backend, manifest.tokens()).await?;
        let policies = backend.plan(manifest.policies(), extra).await?;
        Ok(Self { entities, policies, tokens, revoked })
    }

    /// Writes the changes. Repeats nothing: a failure in the middle leaves a shorter plan.
    pub(crate) async fn apply(&self, backend: &impl Backend) -> Result<Applied, Failure> {
        // First, so that a missing variable changes nothing.
        let secrets = self.tokens.iter().map(secret_of).collect::<Result<Vec<_>, _>>()?;
        for EntityChange { before, after } in &self.entities {
            let expect = before.as_ref().map_or(Expect::Absent, |before| Expect::Version(before.version));
            backend.put_entity(after, expect).await?;
        }
        let mut version = backend.apply(&self.policies).await?;
        let mut tokens = Vec::with_capacity(secrets.len());
        for (token, secret) in self.tokens.iter().cloned().zip(secrets) {
            let DeclaredToken { id, name, scopes, entity, expires_at, .. } = token;
            let request = TokenRequest { id, name, scopes, entity, expires_at, secret };
            let made = backend.create_token(request).await?;
            version = version.max(made.token.version);
            tokens.push(made);
        }
        Ok(Applied { version, tokens })
    }
}

/// Checks the parents of changed entities as the store would, before anything is written.
async fn check_parents(
    backend: &impl Backend,
    manifest: &Manifest,
    changes: &[EntityChange],
) -> Result<(), Failure> {
    let declared = manifest.entities().iter();
    let mut parents: BTreeMap<EntityId, Option<EntityId>> =
        declared.map(|entity| (entity.id().clone(), entity.parent_id().cloned())).collect();
    for EntityChange { after, .. } in changes {
        let mut above = after.parent_id().cloned();
        for _ in 0..LEVELS_MAX {
            let Some(id) = above else { break };
            let Entry::Vacant(vacant) = parents.entry(id.clone()) else {
                above = parents.get(&id).cloned().flatten();
                continue;
            };
            let Some(found) = backend.entity(&id).await? else { break };
            above = vacant.insert(found.value.parent_id().cloned()).clone();
        }
        let checked = after.check_parent(|id| parents.get(id).cloned());
        checked.map_err(|error| Failure::usage(error.to_string()))?;
    }
    Ok(())
}

/// The declared tokens that do not exist, and those that were revoked.
async fn missing_tokens(
    backend: &impl Backend,
    declared: &[DeclaredToken],
) -> Result<(Vec<DeclaredToken>, Vec<TokenId>), Failure> {
    if declared.is_empty() {
        return Ok((Vec::new(), Vec::new()));
    }
    let mut stored: BTreeMap<TokenId, Token> = BTreeMap::new();
    let (first, mut paging) = (Paging::first(1_000)?, Paging::first(1_000)?);
    loop {
        let page = backend.tokens(&paging).await?;
        stored.extend(page.items.into_iter().map(|token| (token.value.id.clone(), token.value)));
        match page.next {
            Some(next) => paging = first.clone().after(next),
            None => break,
        }
    }
    let (mut missing, mut revoked) = (Vec::new(), Vec::new());
    for token in declared {
        match stored.get(&token.id) {
            None => missing.push(token.clone()),
            // The normal answer to a leak, which must not stop the next start.
            Some(stored) if stored.revoked_at.is_some() => revoked.push(token.id.clone()),
            Some(stored) => check(token, stored)?,
        }
    }
    Ok((missing, revoked))
}

/// Checks that a stored token is as declared: it cannot be changed.
fn check(declared: &DeclaredToken, stored: &Token) -> Result<(), Failure> {
    let id = &declared.id;
    let expires = |at: Option<Stamp>| at.map_or_else(|| "never".to_owned(), |at| at.to_string());
    let differs = if stored.scopes != declared.scopes {
        format!("its scopes are {}, not {}", stored.scopes, declared.scopes)
    } else if stored.entity != declared.entity {
        let bound =
            |entity: Option<&EntityId>| entity.map_or_else(|| "none".to_owned(), |id| format!("`{id}`"));
        format!("its entity is {}, not {}", bound(stored.entity.as_ref()), bound(declared.entity.as_ref()))
    } else if stored.expires_at != declared.expires_at {
        format!("it expires {}, not {}", expires(stored.expires_at), expires(declared.expires_at))
    } else {
        return Ok(());
    };
    Err(Failure::usage(format!("the token `{id}` is not as the manifest declares: {differs}"))
        .next("a token never changes: declare one with another id, and revoke this one"))
}

/// The secret in the token's variable, if it names one.
fn secret_of(token: &DeclaredToken) -> Result<Option<Secret>, Failure> {
    let (id, Some(name)) = (&token.id, &token.secret_env) else { return Ok(None) };
    let wrong = |why: String| {
        Failure::usage(format!("the variable `{name}` with the secret of the token `{id}` {why}"))
            .next("set it to a token of the form tg_ID_SECRET, with 64 random hexadecimal digits")
    };
    let text = env::var(name).map_err(|_| wrong("is not set".to_owned()))?;
    let secret: Secret = text.trim().parse().map_err(|error| wrong(format!("is invalid: {error}")))?;
    if secret.id() != id {
        return Err(wrong(format!("is that of the token `{}`", secret.id())));
    }
    Ok(Some(secret))
}

impl ManifestChanges {
    /// Checks that every token to be created has a secret: a generated one would be lost.
    fn check_unattended(&self) -> Result<(), Failure> {
        let Some(DeclaredToken { id, .. }) = self.tokens.iter().find(|token| token.secret_env.is_none())
        else {
            return self.tokens.iter().try_for_each(|token| secret_of(token).map(drop));
        };
        let what = format!("the token `{id}` of the manifest does not exist, and has no `secret_env`");
        let next = "create it with `tidegate limits apply FILE`, which shows it once, or set `secret_env`";
        Err(Failure::usage(what).next(next))
    }
}

/// The manifest of a server.
#[derive(Debug)]
pub(crate) struct ManifestFile {
    file: PathBuf,
    backend: InProcess,
    /// One apply at a time.
    applying: Mutex<()>,
}

impl ManifestFile {
    pub(crate) fn new(file: &Path, opened: &OpenStore, serving: &Serving) -> Result<Self, Failure> {
        let timeout = serving.timeout.unwrap_or(DEFAULT_TIMEOUT);
        let backend = InProcess::new(opened.clone(), args::actor(serving.actor.clone()), timeout)?;
        Ok(Self { file: file.to_owned(), backend, applying: Mutex::new(()) })
    }

    /// Checks that the manifest can be applied. Nothing is written.
    pub(crate) async fn check(&self) -> Result<(), Failure> {
        let manifest = limits::manifest(&self.file)?;
        ManifestChanges::plan(&self.backend, &manifest, Undeclared::Keep).await?.check_unattended()
    }

    /// Applies the manifest, and logs what changed. Servers that start together may all apply it: what one of them
    /// has written is nothing to change for the others.
    pub(crate) async fn apply(&self) -> Result<(), Failure> {
        let _applying = self.applying.lock().await;
        let manifest = limits::manifest(&self.file)?;
        let mut attempt = 1;
        loop {
            let changes = ManifestChanges::plan(&self.backend, &manifest, Undeclared::Keep).await?;
            changes.check_unattended()?;
            match changes.apply(&self.backend).await {
                Err(_) if attempt < ATTEMPTS_MAX => attempt += 1,
                applied => {
                    let version = applied?.version.number();
                    let (entities, scopes) = (changes.entities.len(), changes.policies.steps().len());
                    let tokens = changes.tokens.len();
                    tracing::info!(version, entities, scopes, tokens, "applied the manifest");
                    for token in &changes.revoked {
                        tracing::warn!(%token, "the manifest declares a token that was revoked: it stays revoked");
                    }
                    return Ok(());
                }
            }
        }
    }

    /// Applies the manifest while the server runs. Errors are logged, and what is stored stays.
    pub(crate) async fn reload(&self, limiter: &Limiter) {
        match self.apply().await {
            Ok(()) => limiter.invalidate(),
            Err(failure) => tracing::error!("the manifest is not applied: {}", failure.what),
        }
    }
}
