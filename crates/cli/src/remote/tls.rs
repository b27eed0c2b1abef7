//! TLS of the client: trusted certificates and the client's own, from PEM files.

use std::fs::File;
use std::io::Read as _;
use std::path::Path;

use tidegate_client::ClientBuilder;

use crate::args::SharedArgs;
use crate::failure::Failure;

/// Maximum size of a file: certificates and keys are far smaller.
const FILE_MAX: u64 = 1 << 20;

/// The contents of the files.
#[derive(Default)]
pub(crate) struct TlsFiles {
    roots: Option<Vec<u8>>,
    identity: Option<(Vec<u8>, Vec<u8>)>,
}

impl TlsFiles {
    /// Reads the configured files, if the server's address is https://. Otherwise ignores them, since the
    /// variables may be meant for another server.
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
            (Some(_), None) => return Err(missing_pair("--client-cert", "--client-key")),
            (None, Some(_)) => return Err(missing_pair("--client-key", "--client-cert")),
        };
        Ok(Self { roots, identity })
    }

    pub(super) fn apply(&self, client: ClientBuilder) -> ClientBuilder {
        let client = self.roots.iter().fold(client, |client, roots| client.root_certificates(roots));
        self.identity.iter().fold(client, |client, (cert, key)| client.identity(cert, key))
    }
}

fn missing_pair(given: &str, missing: &str) -> Failure {
    Failure::usage(format!("{given} is set, but {missing} is not: a certificate requires its key"))
        .next("set both, or neither")
}

fn read(option: &str, file: &Path) -> Result<Vec<u8>, Failure> {
    let mut bytes = Vec::new();
    let opened = File::open(file).and_then(|file| file.take(FILE_MAX + 1).read_to_end(&mut bytes));
    opened.map_err(|error| {
        Failure::usage(format!("{option} is `{}`, which cannot be read: {error}", file.display()))
            .next("choose a PEM file")
    })?;
    if bytes.len() as u64 > FILE_MAX {
        let what = format!("{option} is `{}`, which is longer than {FILE_MAX} bytes", file.display());
        return Err(Failure::usage(what).next("choose a PEM file"));
    }
    Ok(bytes)
}
