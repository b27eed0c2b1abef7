//! From an accepted connection to one that can be read: as it is, or behind TLS.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use crate::peer::PeerCertificate;
use crate::tls::{Alpn, Failed, Tls};

/// What the first byte of TLS is.
const HANDSHAKE: u8 = 0x16;
/// No more is read of those who speak no TLS, so that they hear the answer.
const PLAIN_MAX: u64 = 64 * 1_024;
/// What they hear.
const PLAIN: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\
    content-length: 50\r\n\r\nthis port speaks TLS: ask at its https:// address\n";

/// A connection.
#[derive(Debug)]
pub(crate) enum Io {
    /// As it is.
    Plain(TcpStream),
    /// Behind TLS.
    Secured(Box<TlsStream<TcpStream>>),
}

/// How the connections of a door are secured.
#[derive(Debug, Clone)]
pub(crate) struct Secured {
    tls: Tls,
    alpn: Alpn,
}

impl Secured {
    pub(crate) const fn new(tls: Tls, alpn: Alpn) -> Self {
        Self { tls, alpn }
    }

    /// The connection behind TLS, and who is at its other end, if that is done within `patience`. What goes wrong is counted.
    ///
    /// # Cancel safety
    /// Dropping the future ends the connection.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
        patience: Duration,
    ) -> Option<(Io, Option<PeerCertificate>)> {
        let failed = match timeout(patience, self.shake_hands(stream)).await {
            Ok(Ok((secured, peer))) => return Some((Io::Secured(Box::new(secured)), peer)),
            Ok(Err((failed, error))) => {
                tracing::debug!(?failed, %error, "no connection was made");
                failed
            }
            Err(_) => Some(Failed::TimedOut),
        };
        if let Some(failed) = failed {
            self.tls.failed(failed);
        }
        None
    }

    /// The connection, and who is at its other end. Who leaves without a word has only looked whether the port is open, and nothing
    /// has failed.
    async fn shake_hands(
        &self,
        stream: TcpStream,
    ) -> Result<(TlsStream<TcpStream>, Option<PeerCertificate>), (Option<Failed>, io::Error)> {
        let mut first = [0];
        let peeked = stream.peek(&mut first).await.map_err(|error| (None, error))?;
        if peeked == 0 {
            return Err((None, io::ErrorKind::UnexpectedEof.into()));
        }
        if first != [HANDSHAKE] {
            let told = if first[0].is_ascii_uppercase() { tell(stream).await } else { Ok(()) };
            let error = told.err().unwrap_or_else(|| io::ErrorKind::InvalidData.into());
            return Err((Some(Failed::Plain), error));
        }
        // Chosen now, and not when the door was opened: it may have been renewed since.
        let (config, generation) = self.tls.config(self.alpn);
        let broken = |error| (Some(Failed::Broken), error);
        let secured = TlsAcceptor::from(config).accept(stream).await.map_err(broken)?;
        let Some(chain) = secured.get_ref().1.peer_certificates() else { return Ok((secured, None)) };
        // rustls may have checked one that cannot be read here: nobody would see that it expires, or is trusted no more.
        let peer = self.tls.peer(chain, generation).ok_or_else(|| {
            broken(io::Error::new(io::ErrorKind::InvalidData, "the client's certificate cannot be read"))
        })?;
        Ok((secured, Some(peer)))
    }
}

/// Says what is wrong to somebody who speaks HTTP as it is.
async fn tell(mut stream: TcpStream) -> io::Result<()> {
    stream.write_all(PLAIN).await?;
    stream.shutdown().await?;
    // What is closed with something unread may never be heard.
    tokio::io::copy(&mut stream.take(PLAIN_MAX), &mut tokio::io::sink()).await?;
    Ok(())
}

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Secured(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Secured(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Secured(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Secured(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Self::Secured(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Secured(stream) => stream.is_write_vectored(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_answer_to_those_who_speak_no_tls_is_as_long_as_it_says() {
        let text = str::from_utf8(PLAIN).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{}", body.len());
    }
}
