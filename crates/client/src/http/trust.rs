//! Whom a client trusts at an https:// address, and who it is there.

use std::fmt;

/// Certificates and a key in PEM, as they were given. The key is shown nowhere.
#[derive(Clone, Default)]
pub(crate) struct Trust {
    /// Those that a server's certificate is signed by, in the place of what the system trusts.
    pub(crate) roots: Option<Vec<u8>>,
    /// The client's own certificate, and its key.
    pub(crate) identity: Option<Vec<u8>>,
}

impl Trust {
    /// A certificate with its key, one after the other.
    pub(super) fn identify(&mut self, certificate: &[u8], key: &[u8]) {
        self.identity = Some([certificate, b"\n", key].concat());
    }
}

impl fmt::Debug for Trust {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |given: &Option<Vec<u8>>| given.as_ref().map(|_| "…");
        f.debug_struct("Trust")
            .field("roots", &shown(&self.roots))
            .field("identity", &shown(&self.identity))
            .finish()
    }
}
