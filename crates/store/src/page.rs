//! Listings come in pages.

use crate::error::StoreError;

/// A page holds at most so many items.
const ITEMS_MAX: u32 = 1_000;

/// Where the next page begins: opaque, and good only for the listing it came from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor(String);

impl Cursor {
    /// A cursor of a store's own making.
    pub fn new(place: impl Into<String>) -> Self {
        Self(place.into())
    }

    /// As text.
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Which page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Paging {
    after: Option<Cursor>,
    max: u32,
}

impl Default for Paging {
    /// The first hundred.
    fn default() -> Self {
        Self { after: None, max: 100 }
    }
}

impl Paging {
    /// The first `max` items.
    ///
    /// # Errors
    /// [`StoreError::Invalid`] unless `max` is in 1..=1000.
    pub fn first(max: u32) -> Result<Self, StoreError> {
        if (1..=ITEMS_MAX).contains(&max) {
            return Ok(Self { after: None, max });
        }
        Err(StoreError::Invalid { what: format!("a page of {max} items, outside 1..={ITEMS_MAX}") })
    }

    /// The page that begins at `cursor`.
    #[must_use]
    pub fn after(mut self, cursor: Cursor) -> Self {
        self.after = Some(cursor);
        self
    }

    /// Where it begins; the beginning where there is none.
    pub const fn cursor(&self) -> Option<&Cursor> {
        self.after.as_ref()
    }

    /// How many items at most.
    pub const fn max(&self) -> usize {
        self.max as usize
    }
}

/// A page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The items, in the listing's order.
    pub items: Vec<T>,
    /// Where the next page begins; `None` at the end.
    pub next: Option<Cursor>,
}

impl<T> Page<T> {
    /// The page of `items`, of which one more than asked for may have been fetched to see whether there are more.
    ///
    /// The next page begins after the last item of this one, at the place that `place` tells.
    pub fn cut(mut items: Vec<T>, paging: &Paging, place: impl FnOnce(&T) -> Cursor) -> Self {
        let has_more = items.len() > paging.max();
        items.truncate(paging.max());
        let next = if has_more { items.last().map(place) } else { None };
        Self { items, next }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_page_has_a_bound_and_says_where_the_next_begins() {
        for bad in [0, 1_001] {
            let error = Paging::first(bad).unwrap_err().to_string();
            assert_eq!(error, format!("a page of {bad} items, outside 1..=1000"));
        }
        let two = Paging::first(2).unwrap();
        let place = |item: &u32| Cursor::new(item.to_string());
        let page = Page::cut(vec![1, 2, 3], &two, place);
        assert_eq!((page.items, page.next), (vec![1, 2], Some(Cursor::new("2"))));
        assert_eq!(Page::cut(vec![1, 2], &two, place).next, None);
    }
}
