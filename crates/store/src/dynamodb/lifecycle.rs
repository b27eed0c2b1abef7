//! A table's life beside its use: it is made with all its parts, looked at, completed, listed, removed, and written down for
//! whoever makes tables by other means.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tidegate_core::limit::name::Namespace;

use super::clock::Corrected;
use super::expression::Write;
use super::keys::{GSI2, Item, Keys, PK, SPACES};
use super::ledger::PRUNED;
use super::link::{Link, Range};
use super::options::DynamoDbOptions;
use super::records::SCHEMA;
use super::table::{self, Found};
use super::trouble::{Failed, is_missing, of_code};
use super::view::{number_of, text_of};
use crate::clock::HostWall;
use crate::error::StoreError;
use crate::lifecycle::{
    Checked, Destroyed, LISTED_MAX, Lifecycle, Listed, Made, MadePart, Part, Setting, Space, Upgraded,
    UpgradedPart, Whereabouts, is_enough, namespace, not_there, other_version,
};
use crate::reply::Reply;

/// The namespace of an address that names none.
const DEFAULT_NAMESPACE: &str = "default";
/// How often a table that holds items is searched for a namespace record: the index lags behind writes.
const MARKER_LOOKS: usize = 3;

/// What an operator does with a table.
#[derive(Debug)]
pub(crate) struct DynamoDbLifecycle {
    options: DynamoDbOptions,
    namespace: Namespace,
    /// The table's name is what the names of several begin with.
    is_prefix: bool,
}

impl DynamoDbOptions {
    /// What an operator does with the table. A name that ends with `*` stands for all tables of the account that begin so;
    /// they can be listed, and no more.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for a table or a namespace that cannot be.
    pub fn lifecycle(self) -> Result<impl Lifecycle, StoreError> {
        let namespace = namespace(self.namespace_name())?;
        if let Some(prefix) = self.table_name().strip_suffix('*').map(str::to_owned) {
            return Ok(DynamoDbLifecycle { options: self.of_table(prefix), namespace, is_prefix: true });
        }
        self.check()?;
        Ok(DynamoDbLifecycle { options: self, namespace, is_prefix: false })
    }

    /// Creates the table with its indexes and expiry, and the namespace in it, and waits until they are active. Parts
    /// that exist are left as they are, missing ones are added.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if a table of this name belongs to another program, and whatever the engine answers.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a table that is still being created; calling it again waits for that.
    pub async fn create(&self) -> Result<(), StoreError> {
        self.clone().lifecycle()?.init().await.map(drop)
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
        Reply::later(self.losses_of())
    }

    fn destroy(&self) -> Reply<'_, Destroyed> {
        Reply::later(self.remove())
    }

    fn template(&self) -> Result<String, StoreError> {
        self.check_is_one()?;
        Ok(table::template(self.options.table_name()))
    }
}

impl DynamoDbLifecycle {
    fn check_is_one(&self) -> Result<(), StoreError> {
        if !self.is_prefix {
            return Ok(());
        }
        let table = self.options.table_name();
        let what = format!("`{table}*` names several tables, which `tidegate store list` alone can do");
        Err(StoreError::Invalid { what })
    }

    async fn link(&self) -> Result<Link, StoreError> {
        self.check_is_one()?;
        self.options.own_link().await
    }

    fn table(&self) -> Part {
        Part::new("table", self.options.table_name())
    }

    fn part(&self) -> Part {
        Part::new("namespace", self.namespace.as_str())
    }

    async fn make(&self) -> Result<Made, StoreError> {
        let link = self.link().await?;
        if table::look(&link).await?.is_some()
            && let Some(older) = self.version(&link).await?.filter(|version| *version < SCHEMA)
        {
            return Err(other_version(&format!("{} at `{}`", self.part(), link.whose.place), older, SCHEMA));
        }
        let mut parts = vec![MadePart { part: self.table(), is_new: false }];
        match make(&link, &self.namespace).await? {
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
        if !item.contains_key("schema") {
            return Err(foreign(link));
        }
        let found = number_of(&item, "schema")?;
        if found > SCHEMA {
            let place = format!("{} at `{}`", self.part(), link.whose.place);
            return Err(other_version(&place, found, SCHEMA));
        }
        Ok(Some(found))
    }

    async fn look(&self) -> Result<Checked, StoreError> {
        let link = self.link().await?;
        let found = table::look(&link).await?;
        let schema = match &found {
            Some(found) => match self.version(&link).await? {
                None => demand_ours_or_empty(&link, found, &self.namespace).await.map(|()| None)?,
                version => version,
            },
            None => None,
        };
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
            clock_offset: None,
        })
    }

    async fn bring_up_to_date(&self) -> Result<Upgraded, StoreError> {
        let link = self.link().await?;
        let found = table::look(&link).await?;
        let Some(found) = found else { return Err(not_there(&format!("`{}`", link.whose.place))) };
        let Some(from) = self.version(&link).await? else {
            return Err(not_there(&format!("{} at `{}`", self.part(), link.whose.place)));
        };
        for part in &found.missing {
            table::add(&link, part).await?;
        }
        if from < SCHEMA {
            let mut write = Write::new(Keys::new(&self.namespace).version());
            write.only_if("schema", "=", from);
            write.set("schema", SCHEMA);
            let mut retries = link.retries();
            loop {
                match link.update(&write).await {
                    // Another process may have been first.
                    Ok(_) | Err(Failed::Condition(_)) => break,
                    Err(failed) => retries.bear(failed).await?,
                }
            }
        }
        let parts = vec![UpgradedPart { part: self.part(), from }];
        Ok(Upgraded { of: whereabouts(&link), parts, schema: SCHEMA })
    }

    async fn spaces(&self) -> Result<Listed, StoreError> {
        if self.is_prefix {
            return self.spaces_of_tables(self.options.own_link().await?).await;
        }
        let link = self.link().await?;
        let Some(found) = table::look(&link).await? else {
            return Err(not_there(&format!("`{}`", link.whose.place)));
        };
        self.spaces_in(&link, &found).await
    }

    /// The namespaces of all tables that are ours and whose names begin as the address says.
    async fn spaces_of_tables(&self, mut link: Link) -> Result<Listed, StoreError> {
        let (of, mut spaces) = (whereabouts(&link), Vec::new());
        for name in table::names(&link).await? {
            link.table = name;
            let found = match table::look(&link).await {
                Ok(Some(found)) => found,
                // It is another program's, or was removed meanwhile.
                Ok(None) | Err(StoreError::Invalid { .. }) => continue,
                Err(error) => return Err(error),
            };
            let listed = self.spaces_in(&link, &found).await?;
            spaces.extend(
                listed.spaces.into_iter().map(|space| Space { within: Some(link.table.clone()), ..space }),
            );
            if is_enough(&spaces) {
                break;
            }
        }
        Ok(Listed::cut(of, SCHEMA, spaces))
    }

    async fn spaces_in(&self, link: &Link, found: &Found) -> Result<Listed, StoreError> {
        let mut spaces = Vec::new();
        for (name, item) in markers(link, found, &self.namespace, LISTED_MAX as usize + 1).await? {
            let schema = number_of(&item, "schema")?;
            let bare = Space { namespace: Some(name.to_string()), schema: Some(schema), ..Space::default() };
            // The layout of a newer version is unknown to this program.
            if schema > SCHEMA {
                spaces.push(bare);
                continue;
            }
            let keys = Keys::new(&name);
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
        Ok(Listed::cut(whereabouts(link), SCHEMA, spaces))
    }

    /// What [`remove`](Self::remove) deletes, checked as it checks it: nothing if there is no table.
    async fn removable(&self, link: &Link) -> Result<Listed, StoreError> {
        let Some(found) = table::look(link).await? else {
            return Ok(Listed::cut(whereabouts(link), SCHEMA, Vec::new()));
        };
        let listed = self.spaces_in(link, &found).await?;
        if listed.spaces.is_empty() {
            return Err(foreign(link));
        }
        if found.is_protected {
            let what = format!("`{}` has deletion protection: turn it off first", link.whose.place);
            return Err(StoreError::Invalid { what });
        }
        Ok(listed)
    }

    async fn losses_of(&self) -> Result<Listed, StoreError> {
        self.removable(&self.link().await?).await
    }

    async fn remove(&self) -> Result<Destroyed, StoreError> {
        let link = self.link().await?;
        let is_there = !self.removable(&link).await?.spaces.is_empty();
        let was_there = is_there && table::remove(&link).await?;
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

/// Creates the table, or completes one that is ours or empty.
async fn make(link: &Link, own: &Namespace) -> Result<Makings, StoreError> {
    let is_new = table::make(link).await?;
    if !is_new && let Some(found) = table::look(link).await? {
        demand_ours_or_empty(link, &found, own).await?;
    }
    let mut looks = 0;
    loop {
        match complete(link).await {
            Err(error) if is_new && is_missing(&error) && looks < table::LOOKS_UNKNOWN => {}
            Err(error) => return Err(error),
            Ok(_) if is_new => return Ok(Makings::All),
            Ok(added) => return Ok(Makings::Rest(added)),
        }
        // A table created a moment ago is not known everywhere yet.
        looks += 1;
        tokio::time::sleep(table::LOOKED_AT_EVERY).await;
    }
}

/// The namespace records of the table, at most `max`: each has a `schema`, and together they mark the table as ours.
///
/// The index that lists namespaces lags behind, so the address's own namespace and `default` are read by key.
async fn markers(
    link: &Link,
    found: &Found,
    own: &Namespace,
    max: usize,
) -> Result<Vec<(Namespace, Item)>, StoreError> {
    let mut names = BTreeSet::from([own.clone(), namespace(DEFAULT_NAMESPACE)?]);
    if !found.missing.iter().any(|part| part.name == GSI2) {
        let all = Range::new(Some(GSI2), SPACES.to_owned(), String::new());
        for item in link.range(&all, max).await? {
            names.insert(namespace(text_of(&item, "GSI2SK")?)?);
        }
    }
    let mut markers = Vec::new();
    for name in names {
        let item = link.get(&Keys::new(&name).version()).await?;
        markers.extend(item.filter(|item| item.contains_key("schema")).map(|item| (name, item)));
    }
    markers.truncate(max);
    Ok(markers)
}

/// Refuses a table that holds items but no namespace record.
async fn demand_ours_or_empty(link: &Link, found: &Found, own: &Namespace) -> Result<(), StoreError> {
    for look in 0..MARKER_LOOKS {
        if look > 0 {
            tokio::time::sleep(table::LOOKED_AT_EVERY).await;
        }
        if !markers(link, found, own, 1).await?.is_empty() || table::is_empty(link).await? {
            return Ok(());
        }
    }
    Err(foreign(link))
}

/// Creates the namespace's record when a store is opened without one, if the table is ours or empty.
pub(super) async fn enrol_on_open(link: &Link, own: &Namespace) -> Result<(), StoreError> {
    if let Some(found) = table::look(link).await? {
        demand_ours_or_empty(link, &found, own).await?;
    }
    enrol(link, &Keys::new(own), false).await.map(drop)
}

pub(super) fn foreign(link: &Link) -> StoreError {
    let what = format!(
        "`{}` belongs to another program: it holds no namespace record of tidegate; nothing was changed",
        link.whose.place
    );
    StoreError::Invalid { what }
}

/// Adds what a table lacks.
async fn complete(link: &Link) -> Result<Vec<Part>, StoreError> {
    let Some(found) = table::look(link).await? else {
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
    let mut retries = link.retries();
    loop {
        match link.update(&write).await {
            Ok(_) => return Ok(true),
            Err(Failed::Condition(_)) => return Ok(false),
            Err(Failed::Answer(error)) if is_new && is_missing(&error) => retries.pause(error).await?,
            Err(failed) => retries.bear(failed).await?,
        }
    }
}

/// What a namespace's record begins with: its schema, and its place in the listing of them.
pub(super) fn enrolled(write: &mut Write, keys: &Keys) {
    write.set("schema", SCHEMA);
    write.set("GSI2PK", SPACES);
    write.set("GSI2SK", keys.name());
}
