//! Administration of a table: init, check, upgrade, list, destroy, and a template for other tools.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use tidegate_core::limit::name::Namespace;

use super::bucket_view::{number_of, text_of};
use super::client::{Action, Range, TableClient};
use super::clock::CorrectedClock;
use super::errors::{RequestError, code_error, is_missing};
use super::expression::UpdateExpression;
use super::keys::{GSI2, Item, Keys, NAMESPACES, PK};
use super::ledger::PRUNED;
use super::options::DynamoDbOptions;
use super::records::SCHEMA;
use super::table::{self, TableInfo};
use crate::clock::HostWall;
use crate::error::StoreError;
use crate::lifecycle::{
    CheckReport, DestroyReport, InitPart, InitReport, LISTED_MAX, Lifecycle, NamespaceList, Part, Setting,
    Space, StoreLocation, UpgradePart, UpgradeReport, is_enough, namespace, not_there, other_version,
};
use crate::reply::Reply;

/// The namespace of an address that names none.
const DEFAULT_NAMESPACE: &str = "default";
/// How often a table with items is searched for a namespace record, because the index lags behind writes.
const NAMESPACE_CHECKS_MAX: usize = 3;

/// Manages a table.
#[derive(Debug)]
pub(crate) struct DynamoDbLifecycle {
    options: DynamoDbOptions,
    namespace: Namespace,
    /// Whether the name is a prefix of the names of several tables.
    is_prefix: bool,
}

impl DynamoDbOptions {
    /// The administration of the table. A name that ends with `*` stands for all tables of the account with
    /// that prefix, which can only be listed.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] for an invalid table or namespace.
    pub fn lifecycle(self) -> Result<impl Lifecycle, StoreError> {
        let namespace = namespace(self.namespace_name())?;
        if let Some(prefix) = self.table_name().strip_suffix('*').map(str::to_owned) {
            return Ok(DynamoDbLifecycle { options: self.of_table(prefix), namespace, is_prefix: true });
        }
        self.check()?;
        Ok(DynamoDbLifecycle { options: self, namespace, is_prefix: false })
    }

    /// Creates the table with its indexes and expiry, and the namespace in it, and waits until they are
    /// active. Parts that exist are left as they are, missing ones are added.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] if a table of this name belongs to another program, and errors of the engine.
    ///
    /// # Cancel safety
    /// Dropping the future may leave a table that is still being created; calling it again waits for that.
    pub async fn create(&self) -> Result<(), StoreError> {
        self.clone().lifecycle()?.init().await.map(drop)
    }

    pub(super) async fn standalone_client(&self) -> Result<TableClient, StoreError> {
        self.connect(Arc::new(CorrectedClock::new(HostWall)), Arc::new(AtomicU64::new(0))).await
    }
}

impl Lifecycle for DynamoDbLifecycle {
    fn init(&self) -> Reply<'_, InitReport> {
        Reply::later(async move {
            let client = self.client().await?;
            if table::inspect(&client).await?.is_some()
                && let Some(older) =
                    schema_of(&client, &self.namespace).await?.filter(|version| *version < SCHEMA)
            {
                return Err(wrong_version(&client, &self.namespace, older));
            }
            let (is_new_table, added) = create_or_complete(&client, &self.namespace).await?;
            let mut parts = vec![InitPart { part: self.table(), is_new: is_new_table }];
            if !is_new_table {
                parts.extend(added.into_iter().map(|part| InitPart { part, is_new: true }));
            }
            let is_new = create_namespace(&client, &Keys::new(&self.namespace), is_new_table).await?;
            parts.push(InitPart { part: self.part(), is_new });
            Ok(InitReport { of: whereabouts(&client), parts, schema: SCHEMA })
        })
    }

    fn check(&self) -> Reply<'_, CheckReport> {
        Reply::later(async move {
            let client = self.client().await?;
            let found = table::inspect(&client).await?;
            let schema = match &found {
                Some(found) => match schema_of(&client, &self.namespace).await? {
                    None => check_ours_or_empty(&client, found, &self.namespace).await.map(|()| None)?,
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
                        let what =
                            format!("by `{attribute}`, which is not ours: disable that time to live first");
                        settings.push(Setting::new("expiry", what));
                    }
                    (found.missing, settings)
                }
            };
            if schema.is_none() {
                missing.push(self.part());
            }
            Ok(CheckReport {
                of: whereabouts(&client),
                server: "DynamoDB".to_owned(),
                schema,
                schema_wanted: SCHEMA,
                namespace: self.namespace.to_string(),
                missing,
                durability: "acknowledged writes are replicated by the engine".to_owned(),
                settings,
                clock: None,
                clock_offset: None,
            })
        })
    }

    fn upgrade(&self) -> Reply<'_, UpgradeReport> {
        Reply::later(async move {
            let client = self.client().await?;
            let found = table::inspect(&client).await?;
            let Some(found) = found else { return Err(not_there(&format!("`{}`", client.context.place))) };
            let Some(from) = schema_of(&client, &self.namespace).await? else {
                return Err(not_there(&place_of(&client, &self.namespace)));
            };
            for part in &found.missing {
                table::add(&client, part).await?;
            }
            if from < SCHEMA {
                let mut write = UpdateExpression::new(Keys::new(&self.namespace).version());
                write.only_if("schema", "=", from);
                write.set("schema", SCHEMA);
                // Another process may have been first.
                client.commit(None, &[Action::Update(write)]).await?;
            }
            let parts = vec![UpgradePart { part: self.part(), from }];
            Ok(UpgradeReport { of: whereabouts(&client), parts, schema: SCHEMA })
        })
    }

    fn list(&self) -> Reply<'_, NamespaceList> {
        Reply::later(async move {
            if self.is_prefix {
                return self.namespaces_of_tables(self.options.standalone_client().await?).await;
            }
            let client = self.client().await?;
            let Some(found) = table::inspect(&client).await? else {
                return Err(not_there(&format!("`{}`", client.context.place)));
            };
            self.namespaces_in(&client, &found).await
        })
    }

    fn losses(&self) -> Reply<'_, NamespaceList> {
        Reply::later(async move { self.removable(&self.client().await?).await })
    }

    fn destroy(&self) -> Reply<'_, DestroyReport> {
        Reply::later(async move {
            let client = self.client().await?;
            let exists = !self.removable(&client).await?.spaces.is_empty();
            let was_there = exists && table::remove(&client).await?;
            Ok(DestroyReport { of: whereabouts(&client), part: self.table(), was_there })
        })
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
        let what = format!("`{table}*` names several tables, which only `tidegate store list` accepts");
        Err(StoreError::Invalid { what })
    }

    async fn client(&self) -> Result<TableClient, StoreError> {
        self.check_is_one()?;
        self.options.standalone_client().await
    }

    fn table(&self) -> Part {
        Part::new("table", self.options.table_name())
    }

    fn part(&self) -> Part {
        part_of(&self.namespace)
    }

    /// The namespaces of all of our tables whose names begin with the prefix.
    async fn namespaces_of_tables(&self, mut client: TableClient) -> Result<NamespaceList, StoreError> {
        let (of, mut spaces) = (whereabouts(&client), Vec::new());
        for name in table::names(&client).await? {
            client.table = name;
            let found = match table::inspect(&client).await {
                Ok(Some(found)) => found,
                // It belongs to another program, or was deleted since.
                Ok(None) | Err(StoreError::Invalid { .. }) => continue,
                Err(error) => return Err(error),
            };
            let listed = self.namespaces_in(&client, &found).await?;
            spaces.extend(
                listed.spaces.into_iter().map(|space| Space { within: Some(client.table.clone()), ..space }),
            );
            if is_enough(&spaces) {
                break;
            }
        }
        Ok(NamespaceList::cut(of, SCHEMA, spaces))
    }

    async fn namespaces_in(
        &self,
        client: &TableClient,
        found: &TableInfo,
    ) -> Result<NamespaceList, StoreError> {
        let mut spaces = Vec::new();
        for (name, item) in namespace_records(client, found, &self.namespace, LISTED_MAX as usize + 1).await?
        {
            let schema = number_of(&item, "schema")?;
            let bare = Space { namespace: Some(name.to_string()), schema: Some(schema), ..Space::default() };
            // The layout of a newer version is unknown to this program.
            if schema > SCHEMA {
                spaces.push(bare);
                continue;
            }
            let keys = Keys::new(&name);
            let count = async |kind: &str| {
                client.count(&Range::new(Some(GSI2), keys.all(kind), String::new())).await.map(Some)
            };
            spaces.push(Space {
                changes: Some(number_of(&item, "version")?),
                entities: count("ENTITIES").await?,
                policies: count("CONFIGS").await?,
                ..bare
            });
        }
        Ok(NamespaceList::cut(whereabouts(client), SCHEMA, spaces))
    }

    /// What [`destroy_table`](Self::destroy_table) deletes, after the same checks; empty if there is no
    /// table.
    async fn removable(&self, client: &TableClient) -> Result<NamespaceList, StoreError> {
        let Some(found) = table::inspect(client).await? else {
            return Ok(NamespaceList::cut(whereabouts(client), SCHEMA, Vec::new()));
        };
        let listed = self.namespaces_in(client, &found).await?;
        if listed.spaces.is_empty() {
            return Err(foreign(client));
        }
        if found.is_protected {
            let what = format!("`{}` has deletion protection: turn it off first", client.context.place);
            return Err(StoreError::Invalid { what });
        }
        Ok(listed)
    }
}

/// The version of a namespace's schema, which is not newer than this program's; `None` if there is no namespace.
pub(super) async fn schema_of(
    client: &TableClient,
    namespace: &Namespace,
) -> Result<Option<u64>, StoreError> {
    let Some(item) = client.get(&Keys::new(namespace).version()).await? else { return Ok(None) };
    if !item.contains_key("schema") {
        return Err(foreign(client));
    }
    match number_of(&item, "schema")? {
        found if found > SCHEMA => Err(wrong_version(client, namespace, found)),
        found => Ok(Some(found)),
    }
}

/// The error for a namespace that this program cannot use as it is.
pub(super) fn wrong_version(client: &TableClient, namespace: &Namespace, found: u64) -> StoreError {
    other_version(&place_of(client, namespace), found, SCHEMA)
}

fn place_of(client: &TableClient, namespace: &Namespace) -> String {
    format!("{} at `{}`", part_of(namespace), client.context.place)
}

fn part_of(namespace: &Namespace) -> Part {
    Part::new("namespace", namespace.as_str())
}

fn whereabouts(client: &TableClient) -> StoreLocation {
    StoreLocation { engine: "dynamodb", place: client.context.place.clone() }
}

/// Creates the table, or completes one that is ours or empty. Returns whether it is new, and the parts that
/// were added.
async fn create_or_complete(client: &TableClient, own: &Namespace) -> Result<(bool, Vec<Part>), StoreError> {
    let is_new = table::create(client).await?;
    if !is_new && let Some(found) = table::inspect(client).await? {
        check_ours_or_empty(client, &found, own).await?;
    }
    let mut polls = 0;
    loop {
        match complete(client).await {
            // A table created a moment ago is not known everywhere yet.
            Err(error) if is_new && is_missing(&error) && polls < table::UNKNOWN_POLLS_MAX => polls += 1,
            added => return added.map(|added| (is_new, added)),
        }
        tokio::time::sleep(table::POLL_INTERVAL).await;
    }
}

/// The namespace records of the table, at most `max`: each has a `schema`, and together they mark the table
/// as ours.
///
/// The index that lists namespaces lags behind, so the address's own namespace and `default` are read by key.
async fn namespace_records(
    client: &TableClient,
    found: &TableInfo,
    own: &Namespace,
    max: usize,
) -> Result<Vec<(Namespace, Item)>, StoreError> {
    let mut names = BTreeSet::from([own.clone(), namespace(DEFAULT_NAMESPACE)?]);
    if !found.missing.iter().any(|part| part.name == GSI2) {
        let all = Range::new(Some(GSI2), NAMESPACES.to_owned(), String::new());
        for item in client.range(&all, max).await? {
            names.insert(namespace(text_of(&item, "GSI2SK")?)?);
        }
    }
    let mut records = Vec::new();
    for name in names {
        let item = client.get(&Keys::new(&name).version()).await?;
        records.extend(item.filter(|item| item.contains_key("schema")).map(|item| (name, item)));
    }
    records.truncate(max);
    Ok(records)
}

/// Refuses a table that holds items but no namespace record.
async fn check_ours_or_empty(
    client: &TableClient,
    found: &TableInfo,
    own: &Namespace,
) -> Result<(), StoreError> {
    for check in 0..NAMESPACE_CHECKS_MAX {
        if check > 0 {
            tokio::time::sleep(table::POLL_INTERVAL).await;
        }
        if !namespace_records(client, found, own, 1).await?.is_empty() || table::is_empty(client).await? {
            return Ok(());
        }
    }
    Err(foreign(client))
}

/// Creates the namespace's record when a store is opened without one, if the table is ours or empty.
pub(super) async fn create_namespace_on_open(
    client: &TableClient,
    own: &Namespace,
) -> Result<(), StoreError> {
    if let Some(found) = table::inspect(client).await? {
        check_ours_or_empty(client, &found, own).await?;
    }
    create_namespace(client, &Keys::new(own), false).await.map(drop)
}

fn foreign(client: &TableClient) -> StoreError {
    let what = format!(
        "`{}` belongs to another program: it holds no namespace record of tidegate; nothing was changed",
        client.context.place
    );
    StoreError::Invalid { what }
}

/// Adds missing parts.
async fn complete(client: &TableClient) -> Result<Vec<Part>, StoreError> {
    let Some(found) = table::inspect(client).await? else {
        return Err(
            code_error("ResourceNotFoundException", format!("`{}`", client.context.place)).into_error()
        );
    };
    for part in &found.missing {
        table::add(client, part).await?;
    }
    Ok(found.missing)
}

/// Creates a namespace's record unless it exists. Returns whether it is new. A table that `is_new` may be
/// unknown to some nodes, and is retried.
async fn create_namespace(client: &TableClient, keys: &Keys, is_new: bool) -> Result<bool, StoreError> {
    let mut write = UpdateExpression::new(keys.version());
    write.only_without(PK);
    set_namespace_header(&mut write, keys);
    write.set("version", 0_u64);
    write.set("audited", 0_u64);
    write.set(PRUNED, 0_u64);
    let mut retries = client.retries();
    loop {
        match client.update(&write).await {
            Ok(_) => return Ok(true),
            Err(RequestError::Condition(_)) => return Ok(false),
            Err(RequestError::Permanent(error)) if is_new && is_missing(&error) => {
                retries.pause(error).await?;
            }
            Err(error) => retries.wait_or_fail(error).await?,
        }
    }
}

/// Sets the schema of a namespace's record, and its entry in the list of namespaces.
pub(super) fn set_namespace_header(write: &mut UpdateExpression, keys: &Keys) {
    write.set("schema", SCHEMA);
    write.set_in_index(GSI2, NAMESPACES, keys.name());
}
