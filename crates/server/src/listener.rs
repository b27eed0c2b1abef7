//! A bound socket, and the connections that it accepts.

use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::time::sleep;

use crate::connections::{Admission, Connection, Connections};
use crate::log_throttle::LogThrottle;
use crate::server::ServeError;

/// Connections that the system accepts while the server is busy. The system may have a smaller bound.
const BACKLOG: u32 = 4_096;
/// Pause after a failed `accept`, usually for lack of file descriptors.
const ACCEPT_RETRY_DELAY: Duration = Duration::from_millis(50);

static ACCEPT_FAILURES: LogThrottle = LogThrottle::new();

/// A bound socket.
pub struct Listener {
    socket: TcpListener,
    addr: SocketAddr,
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Listener({})", self.addr)
    }
}

impl Listener {
    /// Listens at an address, which must be a loopback address unless others are allowed.
    ///
    /// # Errors
    /// [`ServeError`] if the address is in use, exposed or unavailable.
    ///
    /// # Panics
    /// Outside a tokio runtime: sockets belong to the runtime that binds them.
    pub fn bind(addr: SocketAddr, anywhere: bool) -> Result<Self, ServeError> {
        if !anywhere && !addr.ip().is_loopback() {
            return Err(ServeError::Exposed { addr });
        }
        let bind = || {
            let socket = if addr.is_ipv4() { TcpSocket::new_v4() } else { TcpSocket::new_v6() }?;
            // A restarted server does not wait for the connections of its predecessor to time out.
            socket.set_reuseaddr(true)?;
            socket.bind(addr)?;
            let socket = socket.listen(BACKLOG)?;
            let addr = socket.local_addr()?;
            Ok(Self { socket, addr })
        };
        bind().map_err(|source: io::Error| match source.kind() {
            io::ErrorKind::AddrInUse => ServeError::InUse { addr },
            _ => ServeError::Listen { addr, source },
        })
    }

    /// The address that it is bound to.
    pub const fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Accepts the next connection, and waits if all are in use. Returns `None` if it was refused or failed.
    ///
    /// # Cancel safety
    /// Dropping the future closes a connection that was waiting for its admission.
    pub async fn accept(&self, connections: &Arc<Connections>) -> Option<(TcpStream, Connection)> {
        let (stream, peer) = match self.socket.accept().await {
            Ok(accepted) => accepted,
            Err(error) => {
                if let Some(left_out) = ACCEPT_FAILURES.allow() {
                    tracing::warn!(%error, left_out, "failed to accept a connection");
                }
                sleep(ACCEPT_RETRY_DELAY).await;
                return None;
            }
        };
        loop {
            match connections.open(peer.ip()) {
                Admission::Admitted(connection) => return Some((stream, connection)),
                Admission::Refused => return None,
                Admission::Full => connections.freed().await,
            }
        }
    }
}
