//! Root certificates and client identity for https:// URLs.

use std::fmt;

/// Certificates and a key in PEM. `Debug` hides their content.
#[derive(Clone, Default)]
pub(crate) struct Certificates {
    /// Trusted roots, which replace those of the system.
    pub(crate) roots: Option<Vec<u8>>,
    /// The client certificate and its key.
    pub(crate) identity: Option<Vec<u8>>,
}

impl Certificates {
    /// Sets the client certificate and its key.
    pub(super) fn identify(&mut self, certificate: &[u8], key: &[u8]) {
        self.identity = Some([certificate, b"\n", key].concat());
    }
}

impl fmt::Debug for Certificates {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |pem: &Option<Vec<u8>>| pem.as_ref().map(|_| "…");
        f.debug_struct("Certificates")
            .field("roots", &shown(&self.roots))
            .field("identity", &shown(&self.identity))
            .finish()
    }
}
