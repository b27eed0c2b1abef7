//! A page in progress: buffered in memory while it is small, then in a part file that is removed unless it
//! becomes complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write as _};
use std::path::PathBuf;

use tokio::task::spawn_blocking;

/// Bytes that are buffered before a write: most pages are smaller.
pub(crate) const BUFFER: usize = 256 << 10;

/// The body of a complete page.
#[derive(Debug)]
pub(crate) enum Body {
    /// Not written yet.
    Memory(Vec<u8>),
    /// In its part file, with this many bytes.
    PartFile(u64),
}

impl Body {
    pub(crate) const fn bytes(&self) -> u64 {
        match self {
            Self::Memory(body) => body.len() as u64,
            Self::PartFile(bytes) => *bytes,
        }
    }

    /// Its bytes in memory.
    pub(crate) const fn bytes_in_memory(&self) -> usize {
        match self {
            Self::Memory(body) => body.len(),
            Self::PartFile(_) => 0,
        }
    }
}

/// A page that is being received.
#[derive(Debug)]
pub(crate) struct PartFile {
    path: PathBuf,
    file: Option<File>,
    buffer: Vec<u8>,
    bytes: u64,
    /// Whether the file stays: it is complete, or the rest of it can be requested later.
    is_kept: bool,
}

impl PartFile {
    /// An empty part. Its file is created on the first write.
    pub(crate) const fn new(path: PathBuf) -> Self {
        Self { path, file: None, buffer: Vec::new(), bytes: 0, is_kept: false }
    }

    /// The first `bytes` of a part of an earlier request; `None` if it does not have that many.
    pub(crate) async fn resume(path: PathBuf, bytes: u64) -> io::Result<Option<Self>> {
        let open = move || -> io::Result<_> {
            let file = match OpenOptions::new().append(true).open(&path) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                file => file?,
            };
            if file.metadata()?.len() < bytes {
                return Ok(None);
            }
            file.set_len(bytes)?;
            Ok(Some(Self { path, file: Some(file), buffer: Vec::new(), bytes, is_kept: true }))
        };
        spawn_blocking(open).await.map_err(io::Error::other)?
    }

    /// Syncs what arrived so far and keeps it from now on, however the request ends; returns whether that is
    /// worth a later request for the rest.
    pub(crate) async fn keep(&mut self) -> io::Result<bool> {
        if self.file.is_none() {
            return Ok(false);
        }
        self.write().await?;
        if let Some(file) = self.file.take() {
            let sync = move || file.sync_all().map(|()| file);
            self.file = Some(spawn_blocking(sync).await.map_err(io::Error::other)??);
        }
        self.is_kept = true;
        Ok(true)
    }

    /// Removes what arrived.
    pub(crate) fn discard(mut self) {
        self.is_kept = false;
    }

    /// Bytes received so far.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Appends a chunk.
    pub(crate) async fn push(&mut self, chunk: &[u8]) -> io::Result<()> {
        self.buffer.extend_from_slice(chunk);
        self.bytes += chunk.len() as u64;
        if self.buffer.len() >= BUFFER { self.write().await } else { Ok(()) }
    }

    /// Completes the page. A body that is still in memory is returned for the writer thread to write.
    pub(crate) async fn end(mut self) -> io::Result<Body> {
        if self.file.is_none() {
            self.is_kept = true;
            return Ok(Body::Memory(std::mem::take(&mut self.buffer)));
        }
        self.write().await?;
        self.is_kept = true;
        Ok(Body::PartFile(self.bytes))
    }

    /// Writes the buffer on a blocking thread, since a disk may be slow.
    async fn write(&mut self) -> io::Result<()> {
        let (buffer, file, path) = (std::mem::take(&mut self.buffer), self.file.take(), self.path.clone());
        let write = move || -> io::Result<_> {
            let mut file = file.map_or_else(|| File::create(path), Ok)?;
            file.write_all(&buffer)?;
            Ok((file, buffer))
        };
        let (file, mut buffer) = spawn_blocking(write).await.map_err(io::Error::other)??;
        buffer.clear();
        (self.file, self.buffer) = (Some(file), buffer);
        Ok(())
    }
}

impl Drop for PartFile {
    fn drop(&mut self) {
        if !self.is_kept && self.bytes >= BUFFER as u64 {
            // A part that remains is removed when the folder is next opened.
            drop(fs::remove_file(&self.path));
        }
    }
}
