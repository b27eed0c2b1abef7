//! Pages of listings.

use crate::error::StoreError;

/// The maximum number of items of a page.
const ITEMS_MAX: u32 = 1_000;

/// The start of the next page: opaque, and valid only for the listing that returned it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cursor(String);

impl Cursor {
    /// A cursor created by a store.
    pub fn new(place: impl Into<String>) -> Self {
        Self(place.into())
    }

    /// The cursor as text.
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
    /// The first hundred items.
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

    /// The cursor to begin at; `None` for the beginning.
    pub const fn cursor(&self) -> Option<&Cursor> {
        self.after.as_ref()
    }

    /// The maximum number of items.
    pub const fn max(&self) -> usize {
        self.max as usize
    }
}

/// A page of a listing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Page<T> {
    /// The items, in the listing's order.
    pub items: Vec<T>,
    /// The cursor of the next page; `None` at the end.
    pub next: Option<Cursor>,
}

impl<T> Page<T> {
    /// The page of `items`. One more item than requested may have been fetched to find out whether there are
    /// more.
    ///
    /// The cursor of the next page is `place` of the last item of this one.
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
    fn page_is_bounded_and_has_the_next_cursor() {
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
