//! How a page ended.

use super::address::Key;
use super::book::HostId;
use super::part::Body;

/// A page that has ended, and what became of it.
#[derive(Debug)]
pub(crate) struct Ended {
    /// As it was asked for; what is no address, as it was read.
    pub(crate) url: Box<str>,
    /// Whose page it is; none for what is no address.
    pub(crate) host: Option<HostId>,
    /// The page that is under way until this is kept; none for what was never begun.
    pub(crate) key: Option<Key>,
    /// Requests that were sent for it.
    pub(crate) attempts: u32,
    pub(crate) fate: Fate,
}

/// What became of a page.
#[derive(Debug)]
pub(crate) enum Fate {
    Done(Whole),
    Skipped(Skip),
    Failed(Failed),
}

/// A page that is whole, and has yet to get its name.
#[derive(Debug)]
pub(crate) struct Whole {
    pub(crate) part: String,
    pub(crate) file: String,
    pub(crate) body: Body,
    /// Bytes of it that were in memory when it was handed over.
    pub(crate) held: usize,
    pub(crate) status: u16,
    /// Where it was in the end, if it was redirected.
    pub(crate) moved_to: Option<String>,
}

/// Why a page was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Skip {
    /// It was fetched before.
    There,
    /// It is fetched already: the input has it twice.
    Twice,
    /// The site does not want it fetched.
    Robots,
}

/// Why a page could not be fetched.
#[derive(Debug, Clone)]
pub(crate) struct Failed {
    pub(crate) why: String,
    /// What the host answered, if it did.
    pub(crate) status: Option<u16>,
    /// The same will happen again.
    pub(crate) is_final: bool,
}
