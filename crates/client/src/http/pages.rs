//! Pagination: reads listings page by page.

use std::fmt;
use std::marker::PhantomData;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::call::Call;
use super::{Client, ClientError};
use crate::{
    AuditEntry, AuditPage, AuditQuery, Entity, EntityPage, PageQuery, PolicyAt, PolicyPage, PolicyQuery,
    Token, TokenPage, UsageLine, UsagePage, UsageQuery,
};

/// A page of a listing.
pub trait Page: DeserializeOwned + sealed::Sealed {
    /// The listed item.
    type Item;

    /// Returns where the next page begins.
    fn next(&self) -> Option<&str>;

    /// Returns the items.
    fn into_items(self) -> Vec<Self::Item>;
}

/// The query of a listing.
pub trait Query: Serialize + sealed::Sealed {
    /// Sets where the page begins.
    fn set_after(&mut self, after: String);
}

mod sealed {
    pub trait Sealed {}
}

macro_rules! pages {
    ($($Page:ident of $Item:ident),+; $($Query:ident),+) => {
        $(
            impl sealed::Sealed for $Page {}

            impl Page for $Page {
                type Item = $Item;

                fn next(&self) -> Option<&str> {
                    self.next.as_deref()
                }

                fn into_items(self) -> Vec<$Item> {
                    self.items
                }
            }
        )+
        $(
            impl sealed::Sealed for $Query {}

            impl Query for $Query {
                fn set_after(&mut self, after: String) {
                    self.after = Some(after);
                }
            }
        )+
    };
}

pages!(
    EntityPage of Entity, PolicyPage of PolicyAt, UsagePage of UsageLine, AuditPage of AuditEntry, TokenPage of Token;
    PageQuery, PolicyQuery, UsageQuery, AuditQuery
);

/// The pages of a listing, created by [`Client::all_entities`] and similar functions.
///
/// ```no_run
/// use tidegate_client::{Client, PageQuery};
///
/// # async fn list() -> Result<(), Box<dyn std::error::Error>> {
/// let client = Client::new("http://127.0.0.1:8707")?.token("tg_ops_0123")?;
/// let mut pages = client.all_entities(PageQuery::default());
/// while let Some(page) = pages.next_page().await? {
///     for entity in page.items {
///         println!("{}", entity.id);
///     }
/// }
/// # Ok(())
/// # }
/// ```
#[must_use = "nothing is fetched until a page is requested"]
pub struct Pages<Q, P> {
    client: Client,
    call: Call,
    query: Q,
    /// The `next` of the previous page.
    after: Option<String>,
    is_done: bool,
    page: PhantomData<fn() -> P>,
}

impl<Q: Query, P: Page> Pages<Q, P> {
    pub(super) const fn new(client: Client, call: Call, query: Q) -> Self {
        Self { client, call, query, after: None, is_done: false, page: PhantomData }
    }

    /// Fetches the next page. Returns `None` after the last one.
    ///
    /// # Errors
    /// See [`ClientError`]. After an error, calling it again fetches the same page.
    ///
    /// # Cancel safety
    /// Dropping the future loses nothing: the next call fetches the same page.
    pub async fn next_page(&mut self) -> Result<Option<P>, ClientError> {
        if self.is_done {
            return Ok(None);
        }
        let call = self.call.clone().with_query(&self.query);
        let page: P = self.client.json(call).await?;
        match page.next() {
            None => self.is_done = true,
            // A page that links to itself would loop forever.
            Some(next) if self.after.as_deref() == Some(next) => {
                return Err(self.client.garbled(&self.call, 200, &"a page links to itself as the next one"));
            }
            Some(next) => {
                self.after = Some(next.to_owned());
                self.query.set_after(next.to_owned());
            }
        }
        Ok(Some(page))
    }

    /// Fetches the remaining items, at most `max`.
    ///
    /// # Errors
    /// As [`next_page`](Self::next_page).
    ///
    /// # Cancel safety
    /// Dropping the future loses the items read so far.
    pub async fn items(&mut self, max: usize) -> Result<Vec<P::Item>, ClientError> {
        let mut items = Vec::new();
        while items.len() < max {
            let Some(page) = self.next_page().await? else { break };
            items.extend(page.into_items());
        }
        items.truncate(max);
        Ok(items)
    }
}

impl<Q, P> fmt::Debug for Pages<Q, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Pages")
            .field("call", &self.call)
            .field("is_done", &self.is_done)
            .finish_non_exhaustive()
    }
}
