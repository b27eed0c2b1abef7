//! A TCP proxy between a store and its server that can delay, stall, cut, redirect and refuse connections.

use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

/// No cut is planned.
const NEVER: u64 = u64::MAX;

/// A proxy to a server. It stops with its last clone and the runtime.
#[derive(Debug, Clone)]
pub(crate) struct Proxy {
    pub(crate) address: SocketAddr,
    wire: Arc<Wire>,
}

#[derive(Debug)]
struct Wire {
    target: Mutex<SocketAddr>,
    /// Replies still to be cut in the middle.
    cuts: AtomicU32,
    /// Bytes of replies after which all connections are cut, once.
    cut_after: AtomicU64,
    /// The delay of replies, in milliseconds.
    late: AtomicU64,
    is_down: AtomicBool,
    /// While true, no bytes pass.
    is_held: watch::Sender<bool>,
    /// While true, no replies pass.
    is_mute: watch::Sender<bool>,
    /// Replies that arrived while none passed.
    held_replies: AtomicU64,
    /// The generation of connections: older ones are cut.
    number: watch::Sender<u64>,
    /// Forwarded replies.
    replies: AtomicU64,
    connections: AtomicU64,
    /// The number of cuts.
    cut_count: AtomicU64,
}

/// A server on this machine.
pub(crate) fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

impl Proxy {
    pub(crate) async fn to(target: SocketAddr) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("it is bound");
        let wire = Arc::new(Wire {
            target: Mutex::new(target),
            cuts: AtomicU32::new(0),
            cut_after: AtomicU64::new(NEVER),
            late: AtomicU64::new(0),
            is_down: AtomicBool::new(false),
            is_held: watch::Sender::new(false),
            is_mute: watch::Sender::new(false),
            held_replies: AtomicU64::new(0),
            number: watch::Sender::new(0),
            replies: AtomicU64::new(0),
            connections: AtomicU64::new(0),
            cut_count: AtomicU64::new(0),
        });
        let serving = Arc::clone(&wire);
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                serving.connections.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(serve(Arc::clone(&serving), client));
            }
        });
        Self { address, wire }
    }

    /// The address of a Redis server through this proxy.
    pub(crate) fn redis(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Connects to another server from now on; existing connections are cut.
    pub(crate) fn redirect_to(&self, target: SocketAddr) {
        *self.wire.target.lock().expect("no test panics while holding it") = target;
        self.sever();
    }

    /// Cuts all connections.
    pub(crate) fn sever(&self) {
        self.wire.sever();
    }

    /// Cuts the next `replies` in the middle, each with its connection.
    pub(crate) fn cut(&self, replies: u32) {
        self.wire.cuts.store(replies, Ordering::SeqCst);
    }

    /// The number of replies still to be cut.
    pub(crate) fn pending_cuts(&self) -> u32 {
        self.wire.cuts.load(Ordering::SeqCst)
    }

    /// Cuts all connections in the middle of a reply, after so many more bytes.
    pub(crate) fn cut_after(&self, bytes: u64) {
        self.wire.cut_after.store(bytes, Ordering::SeqCst);
    }

    /// The number of cuts so far.
    pub(crate) fn cuts(&self) -> u64 {
        self.wire.cut_count.load(Ordering::SeqCst)
    }

    /// Delays every reply.
    pub(crate) fn delay(&self, by: Duration) {
        self.wire.late.store(u64::try_from(by.as_millis()).expect("a short time"), Ordering::SeqCst);
    }

    /// Stalls all traffic without closing connections: a black hole.
    pub(crate) fn hold(&self, is_held: bool) {
        self.wire.is_held.send_replace(is_held);
    }

    /// Forwards requests and holds replies back, until it is called with `false`.
    pub(crate) fn hold_replies(&self, is_mute: bool) {
        self.wire.is_mute.send_replace(is_mute);
    }

    /// Replies held back so far, including those forwarded later.
    pub(crate) fn held_replies(&self) -> u64 {
        self.wire.held_replies.load(Ordering::SeqCst)
    }

    /// Refuses and cuts all connections, or accepts them again.
    pub(crate) fn take_down(&self, is_down: bool) {
        self.wire.is_down.store(is_down, Ordering::SeqCst);
        self.sever();
    }

    /// Replies forwarded so far.
    pub(crate) fn replies(&self) -> u64 {
        self.wire.replies.load(Ordering::SeqCst)
    }

    /// Connections accepted so far, including refused ones.
    pub(crate) fn connections(&self) -> u64 {
        self.wire.connections.load(Ordering::SeqCst)
    }
}

impl Wire {
    fn sever(&self) {
        self.cut_count.fetch_add(1, Ordering::SeqCst);
        self.number.send_modify(|number| *number += 1);
    }
}

async fn serve(wire: Arc<Wire>, client: TcpStream) {
    let mut number = wire.number.subscribe();
    number.mark_unchanged();
    if wire.is_down.load(Ordering::SeqCst) {
        return;
    }
    let target = *wire.target.lock().expect("no test panics while holding it");
    let Ok(server) = TcpStream::connect(target).await else { return };
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    // Whichever side closes first closes the other.
    tokio::select! {
        _ = number.changed() => {}
        () = requests(&wire, from_client, to_server) => {}
        () = replies(&wire, from_server, to_client) => {}
    }
}

async fn requests(wire: &Wire, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let (mut buffer, mut held) = (vec![0; 1 << 16], wire.is_held.subscribe());
    while let Ok(count @ 1..) = from.read(&mut buffer).await
        && held.wait_for(|is_held| !is_held).await.is_ok()
        && to.write_all(&buffer[..count]).await.is_ok()
    {}
}

async fn replies(wire: &Wire, mut from: OwnedReadHalf, mut to: OwnedWriteHalf) {
    let mut buffer = vec![0; 1 << 16];
    let (mut held, mut mute) = (wire.is_held.subscribe(), wire.is_mute.subscribe());
    while let Ok(count @ 1..) = from.read(&mut buffer).await {
        let late = wire.late.load(Ordering::SeqCst);
        if late > 0 {
            tokio::time::sleep(Duration::from_millis(late)).await;
        }
        if *mute.borrow() {
            wire.held_replies.fetch_add(1, Ordering::SeqCst);
        }
        if mute.wait_for(|is_mute| !is_mute).await.is_err()
            || held.wait_for(|is_held| !is_held).await.is_err()
        {
            return;
        }
        let cut = wire.cuts.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |cuts| cuts.checked_sub(1));
        if cut.is_ok() {
            // The server has applied the request, and half of the reply arrives.
            drop(to.write_all(&buffer[..count / 2]).await);
            wire.cut_count.fetch_add(1, Ordering::SeqCst);
            return;
        }
        let (left, bytes) = (wire.cut_after.load(Ordering::SeqCst), count as u64);
        if left < bytes {
            // The rest of the reply is lost.
            wire.cut_after.store(NEVER, Ordering::SeqCst);
            let kept = usize::try_from(left).unwrap_or(0);
            drop(to.write_all(&buffer[..kept]).await);
            drop(to.flush().await);
            wire.sever();
            return;
        }
        if left != NEVER {
            wire.cut_after.store(left - bytes, Ordering::SeqCst);
        }
        if to.write_all(&buffer[..count]).await.is_err() {
            return;
        }
        wire.replies.fetch_add(1, Ordering::SeqCst);
    }
}
