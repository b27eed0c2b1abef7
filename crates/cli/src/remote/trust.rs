//! Whom to trust at an https:// address, and who to be there: files in PEM.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use tidegate_client::ClientBuilder;

use crate::args::SharedArgs;
use crate::failure::Failure;

/// No more of a file is read: certificates and keys are far smaller.
const FILE_MAX: u64 = 1 << 20;

/// What the files hold.
#[derive(Default)]
pub(crate) struct Trust {
    roots: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl Trust {
    /// Reads the files that are said, if the server has TLS: variables may be set for another one.
    pub(crate) fn read(args: &SharedArgs) -> Result<Self, Failure> {
        if !args.server.as_ref().is_some_and(|url| url.starts_with("https://")) {
            return Ok(Self::default());
        }
        let roots = args.ca.as_deref().map(|file| read("--ca or TIDEGATE_CA", file)).transpose()?;
        let identity = match (&args.client_cert, &args.client_key) {
            (None, None) => None,
            (Some(cert), Some(key)) => Some((
                read("--client-cert or TIDEGATE_CLIENT_CERT", cert)?,
                read("--client-key or TIDEGATE_CLIENT_KEY", key)?,
            )),
            (Some(_), None) => return Err(half("--client-cert", "--client-key")),
            (None, Some(_)) => return Err(half("--client-key", "--client-cert")),
        };
        Ok(Self { roots, identity })
    }

    pub(super) fn apply(&self, client: ClientBuilder) -> ClientBuilder {
        let client = self.roots.iter().fold(client, |client, roots| client.root_certificates(roots));
        self.identity.iter().fold(client, |client, (cert, key)| client.identity(cert, key))
    }
}

fn half(said: &str, missing: &str) -> Failure {
    Failure::usage(format!("{said} is said, and {missing} is not: a certificate is used with its key"))
        .next("say both, or neither")
}

fn read(place: &str, file: &Path) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let opened = File::open(file).and_then(|file| file.take(FILE_MAX + 1).read_to_end(&mut bytes));
    opened.map_err(|error| {
        Failure::usage(format!("{place} is `{}`, which cannot be read: {error}", file.display()))
            .next("name a file in PEM")
    })?;
    if bytes.len() as u64 > FILE_MAX {
        let what = format!("{place} is `{}`, which is longer than {FILE_MAX} bytes", file.display());
        return Err(Failure::usage(what).next("name a file in PEM"));
    }
    Ok(bytes)
}
