//! Which file it is, whatever it is called: one that was removed or replaced while it was open takes no more writes.

use std::fs;
use std::path::{Path, PathBuf};

use super::trouble::Fault;

/// A file as it was when it was opened.
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

    /// What is written to a file that has no name any more is lost with the process.
    pub(super) fn check(&self) -> Result<(), Fault> {
        let place = self.path.display();
        match identity(&self.path) {
            Ok(found) if found == self.identity => Ok(()),
            Ok(_) => Err(Fault::Away(format!(
                "`{place}` was replaced by another file while it was open: open it anew"
            ))),
            Err(error) => Err(Fault::Away(format!("`{place}` has vanished while it was open: {error}"))),
        }
    }
}

#[cfg(unix)]
fn identity(path: &Path) -> std::io::Result<Identity> {
    use std::os::unix::fs::MetadataExt;
    let found = fs::metadata(path)?;
    Ok((found.dev(), found.ino()))
}

#[cfg(not(unix))]
fn identity(path: &Path) -> std::io::Result<Identity> {
    // A file that is open cannot be removed there.
    fs::metadata(path).map(|_| (0, 0))
}
