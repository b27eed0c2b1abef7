//! `tidegate entity`: who there is, and under whom.

use clap::{Args, Subcommand};
use tidegate::store::Page;
use tidegate::{Entity, EntityId, Expect, Versioned};

use super::listed;
use crate::answer::{Answer, Table};
use crate::backend::Backend;
use crate::codec;
use crate::failure::Failure;
use crate::words::{self, PageArgs};

/// What to do with entities.
#[derive(Debug, Subcommand)]
pub(crate) enum EntityVerb {
    /// Make an entity
    ///
    /// An entity that is not made can be drawn for too: it has no parent.
    Create(CreateArgs),
    /// Show an entity
    Show {
        /// Which one
        #[arg(value_parser = words::entity)]
        id: EntityId,
    },
    /// List entities, by id
    List(PageArgs),
    /// List those directly below an entity, by id
    Children {
        /// Below which one
        #[arg(value_parser = words::entity)]
        id: EntityId,
        #[command(flatten)]
        page: PageArgs,
    },
    /// Put an entity below another one, or below none
    SetParent(ParentArgs),
    /// Remove an entity and its limits
    ///
    /// What it has used stays used: to remove and make it anew is no amnesty.
    Delete {
        /// Which one
        #[arg(value_parser = words::entity)]
        id: EntityId,
        /// Only if this is the version there
        #[arg(long, value_name = "VERSION", value_parser = words::expect)]
        expect: Option<Expect>,
    },
}

/// What to make.
#[derive(Debug, Args)]
pub(crate) struct CreateArgs {
    /// Its id: up to 256 bytes, no `#`, no control characters, no leading `$`
    #[arg(value_parser = words::entity)]
    id: EntityId,
    /// A name for people
    #[arg(long)]
    name: Option<String>,
    /// The entity above it, which must be there
    #[arg(long, value_name = "ID", value_parser = words::entity)]
    parent: Option<EntityId>,
    /// What it draws is drawn from its parent too, all or nothing
    #[arg(long)]
    cascade: bool,
    /// A text to keep beside it; may be given many times
    #[arg(long = "note", value_name = "KEY=VALUE", value_parser = words::note)]
    notes: Vec<(String, String)>,
}

/// Where to put it.
#[derive(Debug, Args)]
pub(crate) struct ParentArgs {
    /// Which one
    #[arg(value_parser = words::entity)]
    id: EntityId,
    /// Below which one
    #[arg(value_parser = words::entity, required_unless_present = "none", conflicts_with = "none")]
    parent: Option<EntityId>,
    /// Below none
    #[arg(long)]
    none: bool,
    /// From now on, draw from the parent too
    #[arg(long, conflicts_with = "no_cascade")]
    cascade: bool,
    /// From now on, do not draw from the parent
    #[arg(long)]
    no_cascade: bool,
}

pub(crate) async fn run(backend: &impl Backend, verb: EntityVerb) -> Result<Answer, Failure> {
    match verb {
        EntityVerb::Create(args) => create(backend, args).await,
        EntityVerb::Show { id } => Ok(shown(&found(backend, &id).await?)),
        EntityVerb::List(page) => Ok(list(&backend.entities(&page.paging()?).await?)),
        EntityVerb::Children { id, page } => {
            let below = backend.children(&id, &page.paging()?).await?;
            if below.items.is_empty() {
                // Nothing below it, or nothing there at all.
                found(backend, &id).await?;
            }
            Ok(list(&below))
        }
        EntityVerb::SetParent(args) => set_parent(backend, args).await,
        EntityVerb::Delete { id, expect } => {
            let expect = match expect {
                Some(expect) => expect,
                None => Expect::Version(found(backend, &id).await?.version),
            };
            let version = backend.remove_entity(&id, expect).await?;
            Ok(Answer::new(codec::removed(id.as_str(), version))
                .line(format!("{id} removed, at version {version}")))
        }
    }
}

async fn found(backend: &impl Backend, id: &EntityId) -> Result<Versioned<Entity>, Failure> {
    backend.entity(id).await?.ok_or_else(|| {
        Failure::failed(format!("there is no entity `{id}`"))
            .next(format!("make it: tidegate entity create '{id}'"))
    })
}

async fn create(backend: &impl Backend, args: CreateArgs) -> Result<Answer, Failure> {
    if backend.entity(&args.id).await?.is_some() {
        let what = format!("the entity `{}` is there already", args.id);
        return Err(Failure::failed(what).next(format!("look at it: tidegate entity show '{}'", args.id)));
    }
    let entity = args.name.into_iter().fold(Entity::new(args.id), Entity::name);
    let entity = args.parent.into_iter().fold(entity, Entity::parent);
    let entity = if args.cascade { entity.cascade() } else { entity };
    let entity = args.notes.into_iter().fold(entity, |entity, (key, value)| entity.metadata(key, value));
    let version = backend.put_entity(&entity, Expect::Absent).await?;
    Ok(shown(&Versioned { version, value: entity }))
}

async fn set_parent(backend: &impl Backend, args: ParentArgs) -> Result<Answer, Failure> {
    let before = found(backend, &args.id).await?;
    let entity = before.value.display_name().into_iter().fold(Entity::new(args.id), Entity::name);
    let entity = args.parent.into_iter().fold(entity, Entity::parent);
    let cascades = args.cascade || (before.value.cascades() && !args.no_cascade);
    let entity = if cascades { entity.cascade() } else { entity };
    let notes = before.value.notes().iter();
    let entity = notes.fold(entity, |entity, (key, value)| entity.metadata(key, value));
    let version = backend.put_entity(&entity, Expect::Version(before.version)).await?;
    Ok(shown(&Versioned { version, value: entity }))
}

fn list(page: &Page<Versioned<Entity>>) -> Answer {
    let mut table = headed();
    page.items.iter().for_each(|entity| row(&mut table, entity));
    listed("entities", page, codec::entity, table)
}

fn shown(entity: &Versioned<Entity>) -> Answer {
    let mut table = headed();
    row(&mut table, entity);
    Answer::new(codec::entity(entity)).table(table)
}

fn headed() -> Table {
    Table::new(["ID", "NAME", "PARENT", "CASCADE", "NOTES", ">VERSION"])
}

fn row(table: &mut Table, Versioned { version, value: entity }: &Versioned<Entity>) {
    let or_none = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
    let notes: Vec<String> = entity.notes().iter().map(|(key, value)| format!("{key}={value}")).collect();
    table.row([
        entity.id().to_string(),
        or_none(entity.display_name().map(str::to_owned)),
        or_none(entity.parent_id().map(ToString::to_string)),
        if entity.cascades() { "yes" } else { "no" }.to_owned(),
        or_none((!notes.is_empty()).then(|| notes.join(" "))),
        version.to_string(),
    ]);
}
