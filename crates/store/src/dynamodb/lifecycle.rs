//! A table's life beside its use: it is made with all its parts, looked at, completed, listed, removed, and written down for
//! whoever makes tables by other means.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tidegate_core::limit::name::Namespace;

use super::clock::Corrected;
use super::expression::Write;
use super::keys::{GSI2, Keys, PK, SPACES};
use super::ledger::PRUNED;
use super::link::{Link, Range};
use super::log::SCHEMA;
use super::options::DynamoDbOptions;
use super::table;
use super::trouble::{Failed, is_missing, of_code};
use super::view::{number_of, text_of};
use crate::clock::HostWall;
use crate::error::StoreError;
use crate::lifecycle::{
    Checked, Destroyed, LISTED_MAX, Lifecycle, Listed, Made, MadePart, Part, Setting, Space, Upgraded,
    UpgradedPart, Whereabouts, namespace, not_there, other_version,
};
use crate::reply::Reply;

/// What an operator does with a table.
#[derive(Debug)]
pub(crate) struct DynamoDbLifecycle {
    options: DynamoDbOptions,
    namespace: Namespace,
}

impl DynamoDbOptions {
    /// What an operator does with the table.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a table or a namespace that cannot be.
    pub fn lifecycle(self) -> Result<impl Lifecycle, StoreError> {
        self.check()?;
        let namespace = namespace(self.namespace_name())?;
        Ok(DynamoDbLifecycle { options: self, namespace })
    }

    /// Makes the table, with its indexes, its stream and its expiry, and waits until it is there. What is there is left as it
    /// is; what is missing of it is added.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] where a table of this name is another program's, and what the engine says.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a table that is being made; to make it again waits for it.
    pub async fn create(&self) -> Result<(), StoreError> {
        self.check()?;
        make(&self.own_link().await?, self.has_stream).await.map(drop)
    }

    async fn own_link(&self) -> Result<Link, StoreError> {
        self.link(Arc::new(Corrected::new(HostWall)), Arc::new(AtomicU64::new(0))).await
    }
}

impl Lifecycle for DynamoDbLifecycle {
    fn init(&self) -> Reply<'_, Made> {
        Reply::later(self.make())
    }

    fn check(&self) -> Reply<'_, Checked> {
        Reply::later(self.look())
    }

    fn upgrade(&self) -> Reply<'_, Upgraded> {
        Reply::later(self.bring_up_to_date())
    }

    fn list(&self) -> Reply<'_, Listed> {
        Reply::later(self.spaces())
    }

    fn losses(&self) -> Reply<'_, Listed> {
        Reply::later(self.spaces())
    }

    fn destroy(&self) -> Reply<'_, Destroyed> {
        Reply::later(self.remove())
    }

    fn template(&self) -> Result<String, StoreError> {
        Ok(table::template(self.options.table_name()))
    }
}

impl DynamoDbLifecycle {
    fn table(&self) -> Part {
        Part::new("table", self.options.table_name())
    }

    fn part(&self) -> Part {
        Part::new("namespace", self.namespace.as_str())
    }

    async fn make(&self) -> Result<Made, StoreError> {
        let link = self.options.own_link().await?;
        if table::look(&link, self.options.has_stream).await?.is_some() {
            self.version(&link).await?;
        }
        let mut parts = vec![MadePart { part: self.table(), is_new: false }];
        match make(&link, self.options.has_stream).await? {
            Makings::All => parts[0].is_new = true,
            Makings::Rest(added) => {
                parts.extend(added.into_iter().map(|part| MadePart { part, is_new: true }));
            }
        }
        let is_new = enrol(&link, &Keys::new(&self.namespace), parts[0].is_new).await?;
        parts.push(MadePart { part: self.part(), is_new });
        Ok(Made { of: whereabouts(&link), parts, schema: SCHEMA })
    }

    /// The version of the namespace's schema; `None` where there is no namespace.
    async fn version(&self, link: &Link) -> Result<Option<u64>, StoreError> {
        let Some(item) = link.get(&Keys::new(&self.namespace).version()).await? else { return Ok(None) };
        let found = number_of(&item, "schema")?;
        if found > SCHEMA {
            let place = format!("{} at `{}`", self.part(), link.whose.place);
            return Err(other_version(&place, found, SCHEMA));
        }
        Ok(Some(found))
    }

    async fn look(&self) -> Result<Checked, StoreError> {
        let link = self.options.own_link().await?;
        let found = table::look(&link, self.options.has_stream).await?;
        let schema = if found.is_some() { self.version(&link).await? } else { None };
        let (mut missing, settings) = match found {
            None => (vec![self.table()], Vec::new()),
            Some(found) => {
                let protected = if found.is_protected { "on" } else { "off" };
                let mut settings = vec![
                    Setting::new("billing", found.billing),
                    Setting::new("deletion protection", protected),
                ];
                if let Some(attribute) = &found.foreign_expiry {
                    let what = format!("by `{attribute}`, which is not ours: have the engine end that first");
                    settings.push(Setting::new("expiry", what));
                }
                (found.missing, settings)
            }
        };
        if schema.is_none() {
            missing.push(self.part());
        }
        Ok(Checked {
            of: whereabouts(&link),
            server: "DynamoDB".to_owned(),
            schema,
            schema_wanted: SCHEMA,
            namespace: self.namespace.to_string(),
            missing,
            durability: "what was answered is on several of the engine's disks".to_owned(),
            settings,
            clock: None,
        })
    }

    async fn bring_up_to_date(&self) -> Result<Upgraded, StoreError> {
        let link = self.options.own_link().await?;
        let found = table::look(&link, self.options.has_stream).await?;
        let Some(found) = found else { return Err(not_there(&format!("`{}`", link.whose.place))) };
        let Some(from) = self.version(&link).await? else {
            return Err(not_there(&format!("{} at `{}`", self.part(), link.whose.place)));
        };
        for part in &found.missing {
            table::add(&link, part).await?;
        }
        let parts = vec![UpgradedPart { part: self.part(), from }];
        Ok(Upgraded { of: whereabouts(&link), parts, schema: SCHEMA })
    }

    async fn spaces(&self) -> Result<Listed, StoreError> {
        let link = self.options.own_link().await?;
        if table::look(&link, self.options.has_stream).await?.is_none() {
            return Err(not_there(&format!("`{}`", link.whose.place)));
        }
        let all = Range::new(Some(GSI2), SPACES.to_owned(), String::new());
        let mut spaces = Vec::new();
        for item in link.range(&all, LISTED_MAX as usize + 1).await? {
            let name = namespace(text_of(&item, "GSI2SK")?)?;
            let keys = Keys::new(&name);
            let Some(item) = link.get(&keys.version()).await? else { continue };
            let schema = number_of(&item, "schema")?;
            let bare = Space { namespace: Some(name.to_string()), schema: Some(schema), ..Space::default() };
            // What a newer program keeps where is not ours to know.
            if schema > SCHEMA {
                spaces.push(bare);
                continue;
            }
            let count = async |kind: &str| {
                link.count(&Range::new(Some(GSI2), keys.all(kind), String::new())).await.map(Some)
            };
            spaces.push(Space {
                changes: Some(number_of(&item, "version")?),
                entities: count("ENTITIES").await?,
                policies: count("CONFIGS").await?,
                ..bare
            });
        }
        Ok(Listed::cut(whereabouts(&link), SCHEMA, spaces))
    }

    async fn remove(&self) -> Result<Destroyed, StoreError> {
        let link = self.options.own_link().await?;
        // One that is another program's is not ours to remove.
        table::look(&link, self.options.has_stream).await?;
        let was_there = table::remove(&link).await?;
        Ok(Destroyed { of: whereabouts(&link), part: self.table(), was_there })
    }
}

fn whereabouts(link: &Link) -> Whereabouts {
    Whereabouts { engine: "dynamodb", place: link.whose.place.clone() }
}

/// What was made.
enum Makings {
    All,
    /// What was missing of a table that was there.
    Rest(Vec<Part>),
}

/// Makes a table, or what is missing of it.
async fn make(link: &Link, has_stream: bool) -> Result<Makings, StoreError> {
    let is_new = table::make(link, has_stream).await?;
    let mut looks = 0;
    loop {
        match complete(link, has_stream).await {
            Err(error) if is_new && is_missing(&error) && looks < table::LOOKS_UNKNOWN => {}
            Err(error) => return Err(error),
            Ok(_) if is_new => return Ok(Makings::All),
            Ok(added) => return Ok(Makings::Rest(added)),
        }
        // What was made a moment ago is not known everywhere yet.
        looks += 1;
        tokio::time::sleep(table::LOOKED_AT_EVERY).await;
    }
}

/// Adds what a table lacks.
async fn complete(link: &Link, has_stream: bool) -> Result<Vec<Part>, StoreError> {
    let Some(found) = table::look(link, has_stream).await? else {
        return Err(of_code("ResourceNotFoundException", format!("`{}`", link.whose.place)).into_error());
    };
    for part in &found.missing {
        table::add(link, part).await?;
    }
    Ok(found.missing)
}

/// Makes a namespace's record, if there is none. Answers whether it was made. A table that `is_new` may be unknown to whoever
/// answers, and is asked again.
async fn enrol(link: &Link, keys: &Keys, is_new: bool) -> Result<bool, StoreError> {
    let mut write = Write::new(keys.version());
    write.only_without(PK);
    enrolled(&mut write, keys);
    write.set("version", 0_u64);
    write.set("audited", 0_u64);
    write.set(PRUNED, 0_u64);
    let mut patience = link.patience();
    loop {
        match link.update(&write).await {
            Ok(_) => return Ok(true),
            Err(Failed::Condition(_)) => return Ok(false),
            Err(Failed::Answer(error)) if is_new && is_missing(&error) => patience.pause(error).await?,
            Err(failed) => patience.bear(failed).await?,
        }
    }
}

/// What a namespace's record begins with: its schema, and its place in the listing of them.
pub(super) fn enrolled(write: &mut Write, keys: &Keys) {
    write.set("schema", SCHEMA);
    write.set("GSI2PK", SPACES);
    write.set("GSI2SK", keys.name());
}
