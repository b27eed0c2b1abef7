//! The result of a page.

use super::address::Key;
use super::frontier::HostId;
use super::part_file::Body;
use super::partial::Partial;

/// A finished page and its result.
#[derive(Debug)]
pub(crate) struct PageResult {
    /// The address as requested; an invalid one as it was read.
    pub(crate) url: Box<str>,
    /// The host that the page is counted for; `None` for an invalid address.
    pub(crate) host: Option<HostId>,
    /// The key that is in progress until this is written; `None` if the page was never started.
    pub(crate) key: Option<Key>,
    /// Requests sent for it.
    pub(crate) attempts: u32,
    /// What has arrived of a page that failed.
    pub(crate) partial: Option<Box<Partial>>,
    pub(crate) outcome: PageOutcome,
}

/// The result of a page.
#[derive(Debug)]
pub(crate) enum PageOutcome {
    Done(Download),
    Skipped(SkipReason),
    Failed(PageFailure),
}

/// A complete page that has not been renamed to its final name.
#[derive(Debug)]
pub(crate) struct Download {
    pub(crate) part: String,
    pub(crate) file: String,
    pub(crate) body: Body,
    /// Bytes that were in memory when it was handed over.
    pub(crate) bytes_in_memory: usize,
    pub(crate) status: u16,
    /// The final address, if it was redirected.
    pub(crate) moved_to: Option<String>,
}

/// Why a page was skipped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SkipReason {
    /// A previous run fetched it.
    Exists,
    /// The input has it twice.
    Duplicate,
    /// robots.txt disallows it.
    Robots,
}

/// Why a page failed.
#[derive(Debug, Clone)]
pub(crate) struct PageFailure {
    pub(crate) why: String,
    /// The status of the response, if there was one.
    pub(crate) status: Option<u16>,
    /// Whether a retry would fail again.
    pub(crate) is_final: bool,
}
