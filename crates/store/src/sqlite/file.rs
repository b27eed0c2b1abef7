//! The identity of the open file: one that was removed or replaced takes no more writes.

use std::fs;
use std::path::{Path, PathBuf};

use crate::error::StoreError;

/// A path, and the identity of the file that it had when it was opened.
pub(super) struct File {
    pub(super) path: PathBuf,
    identity: Identity,
}

type Identity = (u64, u64);

impl File {
    pub(super) fn at(path: PathBuf) -> std::io::Result<Self> {
        let identity = identity(&path)?;
        Ok(Self { path, identity })
    }

    /// Checks that the path still leads to the file: writes to an unlinked file are lost with the process.
    pub(super) fn check(&self) -> Result<(), StoreError> {
        let place = self.path.display();
        match identity(&self.path) {
            Ok(found) if found == self.identity => Ok(()),
            Ok(_) => Err(StoreError::unavailable(format!(
                "`{place}` was replaced by another file while it was open: reopen it"
            ))),
            Err(error) => {
                Err(StoreError::unavailable(format!("`{place}` has vanished while it was open: {error}")))
            }
        }
    }
}

/// Creates a missing file, readable by its owner only: it has the hashes of tokens. SQLite gives the files beside
/// it the same mode. A file that cannot be created is reported when it is opened.
#[cfg(unix)]
pub(super) fn create_private(path: &Path) {
    use std::os::unix::fs::OpenOptionsExt;
    drop(fs::OpenOptions::new().write(true).create_new(true).mode(0o600).open(path));
}

/// Other systems give a new file the permissions of its folder.
#[cfg(not(unix))]
pub(super) fn create_private(_: &Path) {}

#[cfg(unix)]
fn identity(path: &Path) -> std::io::Result<Identity> {
    use std::os::unix::fs::MetadataExt;
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity(path: &Path) -> std::io::Result<Identity> {
    // An open file cannot be removed on other systems.
    fs::metadata(path).map(|_| (0, 0))
}
