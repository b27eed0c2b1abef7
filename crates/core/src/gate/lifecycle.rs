//! The lifecycle of a throttle: open, then closing. It never re-opens.

/// Whether new requests are admitted. No outcome changes it.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Lifecycle {
    #[default]
    Open,
    Closing,
}

impl Lifecycle {
    pub(crate) const fn is_closing(self) -> bool {
        matches!(self, Self::Closing)
    }
}
