//! An upstream that writes the bytes of a script, and shows what it receives.

use std::net::SocketAddr;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// What happened at the upstream.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Seen {
    /// The head of a request, and the part of its body that came with it.
    Request(String),
    /// The connection was closed by the other side.
    Closed,
}

/// Accepts connections, and writes `reply` for each request until the other side closes.
pub(crate) async fn upstream(reply: &'static str) -> (SocketAddr, mpsc::UnboundedReceiver<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    let (seen, seen_by_test) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(serve(stream, reply, seen.clone()));
        }
    });
    (addr, seen_by_test)
}

/// Writes `reply` for one request of each connection, and closes it.
pub(crate) async fn closing_upstream(reply: &'static str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4_096]).await;
            let _ = stream.write_all(reply.as_bytes()).await;
        }
    });
    addr
}

/// Closes each connection once a request has arrived.
pub(crate) async fn hanging_up_upstream() -> (SocketAddr, mpsc::UnboundedReceiver<Seen>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let addr = listener.local_addr().expect("an address");
    let (seen, seen_by_test) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut buffer = vec![0; 65_536];
            if let Ok(count @ 1..) = stream.read(&mut buffer).await {
                let _ = seen.send(Seen::Request(String::from_utf8_lossy(&buffer[..count]).into_owned()));
            }
        }
    });
    (addr, seen_by_test)
}

async fn serve(mut stream: TcpStream, reply: &'static str, seen: mpsc::UnboundedSender<Seen>) {
    let mut buffer = vec![0; 65_536];
    while let Ok(count @ 1..) = stream.read(&mut buffer).await {
        let _ = seen.send(Seen::Request(String::from_utf8_lossy(&buffer[..count]).into_owned()));
        let _ = stream.write_all(reply.as_bytes()).await;
    }
    let _ = seen.send(Seen::Closed);
}
