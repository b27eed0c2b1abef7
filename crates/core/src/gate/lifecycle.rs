//! Open, then draining, then closed; nothing re-opens.

/// Whether new requests are taken. Apart from adaptation: no outcome moves it.
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
