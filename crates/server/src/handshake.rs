//! Turns an accepted connection into a readable stream: plain, or after a TLS handshake.

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
use crate::tls::{Alpn, HandshakeFailure, Tls};

/// The first byte of a TLS handshake record.
const HANDSHAKE: u8 = 0x16;
/// Upper bound on the bytes drained from a plaintext client before closing, so that it receives the response.
const PLAIN_MAX: u64 = 64 * 1_024;
/// The response to a plaintext HTTP request.
const PLAIN: &[u8] =
    b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nconnection: close\r\n\
    content-length: 50\r\n\r\nthis port speaks TLS: ask at its https:// address\n";

/// A connection.
#[derive(Debug)]
pub(crate) enum Io {
    /// Without TLS.
    Plain(TcpStream),
    /// With TLS.
    Tls(Box<TlsStream<TcpStream>>),
}

/// The TLS settings of a listener.
#[derive(Debug, Clone)]
pub(crate) struct TlsHandshake {
    tls: Tls,
    alpn: Alpn,
}

impl Tls {
    /// Performs the TLS handshake of an accepted HTTP/1.1 connection within `span`, for a listener beside the
    /// server's. Failures are counted.
    ///
    /// # Cancel safety
    /// Dropping the future ends the connection.
    pub async fn accept(
        &self,
        stream: TcpStream,
        span: Duration,
    ) -> Option<(impl AsyncRead + AsyncWrite + Send + Unpin + use<>, Option<PeerCertificate>)> {
        TlsHandshake::new(self.clone(), Alpn::Http1).accept(stream, span).await
    }
}

impl TlsHandshake {
    pub(crate) const fn new(tls: Tls, alpn: Alpn) -> Self {
        Self { tls, alpn }
    }

    /// Performs the TLS handshake within `span` and returns the stream with the client's certificate.
    /// Failures are counted.
    ///
    /// # Cancel safety
    /// Dropping the future ends the connection.
    pub(crate) async fn accept(
        &self,
        stream: TcpStream,
        span: Duration,
    ) -> Option<(Io, Option<PeerCertificate>)> {
        let failure = match timeout(span, self.handshake(stream)).await {
            Ok(Ok((secured, peer))) => return Some((Io::Tls(Box::new(secured)), peer)),
            Ok(Err((failure, error))) => {
                tracing::debug!(failed = ?failure, %error, "TLS handshake failed");
                failure
            }
            Err(_) => Some(HandshakeFailure::TimedOut),
        };
        if let Some(failure) = failure {
            self.tls.count_failure(failure);
        }
        None
    }

    /// Performs the handshake. A peer that closes without sending a byte is a port probe and does not count
    /// as a failure.
    async fn handshake(
        &self,
        stream: TcpStream,
    ) -> Result<(TlsStream<TcpStream>, Option<PeerCertificate>), (Option<HandshakeFailure>, io::Error)> {
        let mut first = [0];
        let peeked = stream.peek(&mut first).await.map_err(|error| (None, error))?;
        if peeked == 0 {
            return Err((None, io::ErrorKind::UnexpectedEof.into()));
        }
        if first != [HANDSHAKE] {
            let responded =
                if first[0].is_ascii_uppercase() { respond_plaintext(stream).await } else { Ok(()) };
            let error = responded.err().unwrap_or_else(|| io::ErrorKind::InvalidData.into());
            return Err((Some(HandshakeFailure::Plain), error));
        }
        // Read per handshake, not at bind: the certificate may have been reloaded since.
        let (config, generation) = self.tls.config(self.alpn);
        let broken = |error| (Some(HandshakeFailure::Broken), error);
        let secured = TlsAcceptor::from(config).accept(stream).await.map_err(broken)?;
        let Some(chain) = secured.get_ref().1.peer_certificates() else { return Ok((secured, None)) };
        // rustls may accept a certificate that this crate cannot parse. Its expiry and revoked trust would go
        // unnoticed, so it is rejected.
        let peer = self.tls.peer(chain, generation).ok_or_else(|| {
            broken(io::Error::new(io::ErrorKind::InvalidData, "the client's certificate cannot be read"))
        })?;
        Ok((secured, Some(peer)))
    }
}

/// Responds to a client that sends plaintext HTTP.
async fn respond_plaintext(mut stream: TcpStream) -> io::Result<()> {
    stream.write_all(PLAIN).await?;
    stream.shutdown().await?;
    // Closing a socket with unread data sends a reset, which may discard the response.
    tokio::io::copy(&mut stream.take(PLAIN_MAX), &mut tokio::io::sink()).await?;
    Ok(())
}

impl AsyncRead for Io {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
        }
    }
}

impl AsyncWrite for Io {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn plaintext_response_has_correct_content_length() {
        let text = str::from_utf8(PLAIN).unwrap();
        let (head, body) = text.split_once("\r\n\r\n").unwrap();
        assert!(head.ends_with(&format!("content-length: {}", body.len())), "{}", body.len());
    }
}
