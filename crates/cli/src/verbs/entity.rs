//! `tidegate entity`: creates, shows, moves, disables and deletes entities.

use clap::{Args, Subcommand};
use tidegate::store::Page;
use tidegate::{Entity, EntityId, Expect, Versioned};

use super::{listed, tree};
use crate::backend::Backend;
use crate::codec;
use crate::failure::Failure;
use crate::output::{Output, Table};
use crate::parse::{self, PageArgs};

/// Subcommands of `entity`.
#[derive(Debug, Subcommand)]
pub(crate) enum EntityVerb {
    /// Create an entity
    ///
    /// Entities need not be created to draw units: one that is not has no parent.
    Create(CreateArgs),
    /// Show an entity
    Show {
        /// The entity
        #[arg(value_parser = parse::entity)]
        id: EntityId,
    },
    /// List entities, by id
    List(PageArgs),
    /// List the children of an entity, by id
    Children {
        /// The parent
        #[arg(value_parser = parse::entity)]
        id: EntityId,
        #[command(flatten)]
        page: PageArgs,
    },
    /// Show entities as a tree
    Tree {
        /// Show this entity and its descendants [default: all entities]
        #[arg(value_parser = parse::entity)]
        id: Option<EntityId>,
    },
    /// Refuse the draws of an entity, and of entities that cascade to it
    ///
    /// Leases it holds can be settled, and its usage is still reported. Programs that use the store directly may take
    /// up to a minute to notice.
    Disable {
        /// The entity, which is created if it does not exist
        #[arg(value_parser = parse::entity)]
        id: EntityId,
    },
    /// Allow the draws of a disabled entity again
    Enable {
        /// The entity
        #[arg(value_parser = parse::entity)]
        id: EntityId,
    },
    /// Set or remove the parent of an entity
    SetParent(ParentArgs),
    /// Remove an entity and its limits
    ///
    /// Its usage is kept: an entity that is created again starts with the same balances.
    Delete {
        /// The entity
        #[arg(value_parser = parse::entity)]
        id: EntityId,
        /// Delete only if the current version is this one
        #[arg(long, value_name = "VERSION", value_parser = parse::expect)]
        expect: Option<Expect>,
    },
}

/// Arguments of `entity create`.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// The id: up to 256 bytes, no `#`, no control characters, no leading `$`
    #[arg(value_parser = parse::entity)]
    id: EntityId,
    /// A display name
    #[arg(long)]
    name: Option<String>,
    /// The parent, which must exist
    #[arg(long, value_name = "ID", value_parser = parse::entity)]
    parent: Option<EntityId>,
    /// Draw from the parent too, all or nothing
    #[arg(long)]
    cascade: bool,
    /// Attach a note; can be repeated
    #[arg(long = "note", value_name = "KEY=VALUE", value_parser = parse::note)]
    notes: Vec<(String, String)>,
}

/// Arguments of `entity set-parent`.
#[derive(Debug, Args)]
pub(crate) struct ParentArgs {
    /// The entity
    #[arg(value_parser = parse::entity)]
    id: EntityId,
    /// The new parent
    #[arg(value_parser = parse::entity, required_unless_present = "none", conflicts_with = "none")]
    parent: Option<EntityId>,
    /// Remove the parent
    #[arg(long)]
    none: bool,
    /// Draw from the parent too from now on
    #[arg(long, conflicts_with = "no_cascade")]
    cascade: bool,
    /// Stop drawing from the parent
    #[arg(long)]
    no_cascade: bool,
}

pub(crate) async fn run(backend: &impl Backend, verb: EntityVerb) -> Result<Output, Failure> {
    match verb {
        EntityVerb::Create(args) => create(backend, args).await,
        EntityVerb::Show { id } => Ok(shown(&found(backend, &id).await?)),
        EntityVerb::List(page) => Ok(list(&backend.entities(&page.paging()?).await?)),
        EntityVerb::Children { id, page } => {
            let below = backend.children(&id, &page.paging()?).await?;
            if below.items.is_empty() {
                // No children, or no such entity: report the latter.
                found(backend, &id).await?;
            }
            Ok(list(&below))
        }
        EntityVerb::Tree { id } => tree::show(backend, id).await,
        EntityVerb::Disable { id } => set_disabled(backend, id, true).await,
        EntityVerb::Enable { id } => {
            found(backend, &id).await?;
            set_disabled(backend, id, false).await
        }
        EntityVerb::SetParent(args) => set_parent(backend, args).await,
        EntityVerb::Delete { id, expect } => {
            let expect = match expect {
                Some(expect) => expect,
                None => Expect::Version(found(backend, &id).await?.version),
            };
            let version = backend.remove_entity(&id, expect).await?;
            Ok(Output::new(codec::removed(id.as_str(), version))
                .line(format!("{id} removed, at version {version}")))
        }
    }
}

pub(super) async fn found(backend: &impl Backend, id: &EntityId) -> Result<Versioned<Entity>, Failure> {
    backend.entity(id).await?.ok_or_else(|| {
        Failure::failed(format!("there is no entity `{id}`"))
            .next(format!("create it: tidegate entity create '{id}'"))
    })
}

async fn create(backend: &impl Backend, args: CreateArgs) -> Result<Output, Failure> {
    if backend.entity(&args.id).await?.is_some() {
        let what = format!("the entity `{}` already exists", args.id);
        return Err(Failure::failed(what).next(format!("show it: tidegate entity show '{}'", args.id)));
    }
    let entity = args.name.into_iter().fold(Entity::new(args.id), Entity::name);
    let entity = args.parent.into_iter().fold(entity, Entity::parent);
    let entity = if args.cascade { entity.cascade() } else { entity };
    let entity = args.notes.into_iter().fold(entity, |entity, (key, value)| entity.metadata(key, value));
    let version = backend.put_entity(&entity, Expect::Absent).await?;
    Ok(shown(&Versioned { version, value: entity }))
}

async fn set_parent(backend: &impl Backend, args: ParentArgs) -> Result<Output, Failure> {
    let before = found(backend, &args.id).await?;
    let entity = before.value.display_name().into_iter().fold(Entity::new(args.id), Entity::name);
    let entity = args.parent.into_iter().fold(entity, Entity::parent);
    let cascades = args.cascade || (before.value.cascades() && !args.no_cascade);
    let entity = if cascades { entity.cascade() } else { entity };
    let entity = entity.disabled(before.value.is_disabled());
    let notes = before.value.notes().iter();
    let entity = notes.fold(entity, |entity, (key, value)| entity.metadata(key, value));
    let version = backend.put_entity(&entity, Expect::Version(before.version)).await?;
    Ok(shown(&Versioned { version, value: entity }))
}

async fn set_disabled(backend: &impl Backend, id: EntityId, is_disabled: bool) -> Result<Output, Failure> {
    let before = backend.entity(&id).await?;
    let expect = before.as_ref().map_or(Expect::Absent, |before| Expect::Version(before.version));
    let before = match before {
        // Nothing to change, and nothing to audit.
        Some(before) if before.value.is_disabled() == is_disabled => return Ok(shown(&before)),
        before => before.map_or_else(|| Entity::new(id), |before| before.value),
    };
    let entity = before.disabled(is_disabled);
    let version = backend.put_entity(&entity, expect).await?;
    Ok(shown(&Versioned { version, value: entity }))
}

fn list(page: &Page<Versioned<Entity>>) -> Output {
    let mut table = headed();
    page.items.iter().for_each(|entity| row(&mut table, entity));
    listed("entities", page, codec::entity, table)
}

fn shown(entity: &Versioned<Entity>) -> Output {
    let mut table = headed();
    row(&mut table, entity);
    Output::new(codec::entity(entity)).table(table)
}

fn headed() -> Table {
    Table::new(["ID", "NAME", "PARENT", "CASCADE", "NOTES", ">VERSION"])
}

fn row(table: &mut Table, Versioned { version, value: entity }: &Versioned<Entity>) {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let notes = entity.notes().iter().map(|(key, value)| format!("{key}={value}"));
    let disabled = entity.is_disabled().then(|| "disabled".to_owned());
    let notes: Vec<String> = disabled.into_iter().chain(notes).collect();
    table.row([
        entity.id().to_string(),
        or_none(entity.display_name().map(str::to_owned)),
        or_none(entity.parent_id().map(ToString::to_string)),
        if entity.cascades() { "yes" } else { "no" }.to_owned(),
        or_none((!notes.is_empty()).then(|| notes.join(" "))),
        version.to_string(),
    ]);
}
