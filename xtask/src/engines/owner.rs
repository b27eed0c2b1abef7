//! The system user of a server: PostgreSQL refuses to run as root.

use std::fs;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::Command;

use anyhow::{Context as _, Result};

/// Users to run a server as, in order of preference: the second exists on every system.
const USERS: [&str; 2] = ["postgres", "nobody"];

/// A user other than root to run a server as.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Owner {
    uid: u32,
    gid: u32,
}

impl Owner {
    /// The user for a server that refuses root; `None` means the current user.
    pub(super) fn instead_of_root() -> Result<Option<Self>> {
        if fs::metadata("/proc/self")?.uid() != 0 {
            return Ok(None);
        }
        let users = fs::read_to_string("/etc/passwd").context("could not read /etc/passwd")?;
        let found = USERS.iter().find_map(|name| find(&users, name));
        found.map(Some).with_context(|| format!("no user to run a server as: none of {USERS:?} exists"))
    }

    /// Sets the user of the command.
    pub(super) fn run(self, command: &mut Command) -> &mut Command {
        command.uid(self.uid).gid(self.gid)
    }

    pub(super) fn give(self, folder: &Path) -> Result<()> {
        std::os::unix::fs::chown(folder, Some(self.uid), Some(self.gid))
            .with_context(|| format!("could not change the owner of {}", folder.display()))
    }
}

/// Whether all users may traverse `folder` and its ancestors.
pub(super) fn is_open_to_all(folder: &Path) -> bool {
    folder.ancestors().all(|folder| {
        folder.as_os_str().is_empty()
            || folder.metadata().is_ok_and(|data| data.permissions().mode() & 0o001 != 0)
    })
}

fn find(users: &str, name: &str) -> Option<Owner> {
    users.lines().find_map(|line| {
        let fields: Vec<_> = line.split(':').collect();
        let [user, _, uid, gid, ..] = fields[..] else { return None };
        (user == name).then_some(())?;
        Some(Owner { uid: uid.parse().ok()?, gid: gid.parse().ok()? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn user_is_found_by_its_whole_name() {
        let users =
            "root:x:0:0::/root:/bin/sh\npostgresql:x:7:7::/:\nbroken\npostgres:x:101:104::/:/bin/sh\n";
        assert_eq!(find(users, "postgres"), Some(Owner { uid: 101, gid: 104 }));
        assert_eq!(find(users, USERS[1]), None);
    }

    #[test]
    fn folder_below_a_private_one_is_not_open() {
        let folder = std::env::temp_dir().join(format!("tidegate-owner-{}", std::process::id()));
        let below = folder.join("below");
        fs::create_dir_all(&below).unwrap();
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o700)).unwrap();
        assert!(!is_open_to_all(&below));
        fs::set_permissions(&folder, fs::Permissions::from_mode(0o711)).unwrap();
        assert!(is_open_to_all(&below));
        fs::remove_dir_all(&folder).unwrap();
    }
}
