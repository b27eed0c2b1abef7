//! `tidegate entity tree`: entities below their parents.

use std::collections::{BTreeMap, VecDeque};

use tidegate::{Entity, EntityId, Paging, Versioned};

use super::entity::found;
use crate::backend::Backend;
use crate::codec::{self, Json};
use crate::failure::Failure;
use crate::format;
use crate::output::Output;

/// The maximum number of entities of a tree.
const ENTITIES_MAX: usize = 10_000;

/// Entities by their parent.
type Children = BTreeMap<Option<EntityId>, Vec<Versioned<Entity>>>;

/// Shows an entity and its descendants, or all entities.
pub(super) async fn show(backend: &impl Backend, root: Option<EntityId>) -> Result<Output, Failure> {
    let (roots, children) = if let Some(id) = root {
        let root = found(backend, &id).await?;
        (vec![root], descendants(backend, id).await?)
    } else {
        let mut children = all(backend).await?;
        (children.remove(&None).unwrap_or_default(), children)
    };
    let nested: Vec<Json> = roots.iter().map(|root| nest(root, &children)).collect();
    let mut lines = Vec::new();
    for root in &roots {
        draw(root, &children, (String::new(), String::new()), &mut lines);
    }
    let output = Output::new(codec::tree(&nested));
    if lines.is_empty() {
        return Ok(output.line("no entities"));
    }
    Ok(lines.into_iter().fold(output, Output::line))
}

async fn all(backend: &impl Backend) -> Result<Children, Failure> {
    let mut children = Children::new();
    let mut count = 0;
    let (first, mut paging) = (Paging::first(1_000)?, Paging::first(1_000)?);
    loop {
        let page = backend.entities(&paging).await?;
        count += page.items.len();
        check(count)?;
        for entity in page.items {
            children.entry(entity.value.parent_id().cloned()).or_default().push(entity);
        }
        match page.next {
            Some(next) => paging = first.clone().after(next),
            None => return Ok(children),
        }
    }
}

async fn descendants(backend: &impl Backend, root: EntityId) -> Result<Children, Failure> {
    let mut children = Children::new();
    let mut count = 0;
    let mut left = VecDeque::from([root]);
    while let Some(parent) = left.pop_front() {
        let (first, mut paging) = (Paging::first(1_000)?, Paging::first(1_000)?);
        loop {
            let page = backend.children(&parent, &paging).await?;
            count += page.items.len();
            check(count)?;
            left.extend(page.items.iter().map(|child| child.value.id().clone()));
            children.entry(Some(parent.clone())).or_default().extend(page.items);
            match page.next {
                Some(next) => paging = first.clone().after(next),
                None => break,
            }
        }
    }
    Ok(children)
}

fn check(count: usize) -> Result<(), Failure> {
    if count <= ENTITIES_MAX {
        return Ok(());
    }
    Err(Failure::failed(format!("the tree has more than {ENTITIES_MAX} entities"))
        .next("show a part: tidegate entity tree ID, or list them: tidegate entity list"))
}

fn below<'a>(entity: &Versioned<Entity>, children: &'a Children) -> &'a [Versioned<Entity>] {
    children.get(&Some(entity.value.id().clone())).map_or(&[], Vec::as_slice)
}

/// An entity with its descendants. Entities have few levels.
fn nest(entity: &Versioned<Entity>, children: &Children) -> Json {
    let below = below(entity, children).iter().map(|child| nest(child, children)).collect();
    codec::tree_entity(entity, below)
}

/// One line for an entity, after the first indent, and one for each descendant, after the second.
fn draw(
    entity: &Versioned<Entity>,
    children: &Children,
    (own, further): (String, String),
    lines: &mut Vec<String>,
) {
    let value = &entity.value;
    let mut line = format!("{own}{}", value.id());
    line.extend(value.display_name().map(|name| format!(" ({})", format::escape(name))));
    if value.cascades() && value.parent_id().is_some() {
        line.push_str(" cascades");
    }
    if value.is_disabled() {
        line.push_str(" disabled");
    }
    lines.push(line);
    let below = below(entity, children);
    for (place, child) in below.iter().enumerate() {
        let (own, next) = if place + 1 < below.len() { ("├─ ", "│  ") } else { ("└─ ", "   ") };
        draw(child, children, (format!("{further}{own}"), format!("{further}{next}")), lines);
    }
}
