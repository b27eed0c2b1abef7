//! A page that is under way: in memory while it is small, and else in its part, which is removed unless it becomes whole.

use std::fs::{self, File};
use std::io::{self, Write as _};
use std::path::PathBuf;

use tokio::task::spawn_blocking;

/// So much is collected before it is written: most pages are whole before that.
pub(crate) const BUFFER: usize = 256 << 10;

/// A page that is whole.
#[derive(Debug)]
pub(crate) enum Body {
    /// Not written yet.
    Memory(Vec<u8>),
    /// In its part, with so many bytes.
    Part(u64),
}

impl Body {
    pub(crate) const fn bytes(&self) -> u64 {
        match self {
            Self::Memory(body) => body.len() as u64,
            Self::Part(bytes) => *bytes,
        }
    }

    /// Bytes of it in memory.
    pub(crate) const fn held(&self) -> usize {
        match self {
            Self::Memory(body) => body.len(),
            Self::Part(_) => 0,
        }
    }
}

/// A page that comes.
#[derive(Debug)]
pub(crate) struct Part {
    path: PathBuf,
    file: Option<File>,
    buffer: Vec<u8>,
    bytes: u64,
    is_whole: bool,
}

impl Part {
    /// A part that has nothing yet. Its file is made when there is something to write.
    pub(crate) const fn new(path: PathBuf) -> Self {
        Self { path, file: None, buffer: Vec::new(), bytes: 0, is_whole: false }
    }

    /// What has come so far.
    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Adds what has come.
    pub(crate) async fn push(&mut self, chunk: &[u8]) -> io::Result<()> {
        self.buffer.extend_from_slice(chunk);
        self.bytes += chunk.len() as u64;
        if self.buffer.len() >= BUFFER { self.write().await } else { Ok(()) }
    }

    /// All has come. What was not begun to be written is for the keeper to write: nobody waits for that here.
    pub(crate) async fn end(mut self) -> io::Result<Body> {
        if self.file.is_none() {
            self.is_whole = true;
            return Ok(Body::Memory(std::mem::take(&mut self.buffer)));
        }
        self.write().await?;
        self.is_whole = true;
        Ok(Body::Part(self.bytes))
    }

    /// Off the threads on which requests run: a disk may be slow.
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

impl Drop for Part {
    fn drop(&mut self) {
        if !self.is_whole && self.bytes >= BUFFER as u64 {
            // Whatever is left is removed when the folder is next opened.
            drop(fs::remove_file(&self.path));
        }
    }
}
