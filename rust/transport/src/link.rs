//! A link to one peer: its streams, each with a task that reads and one that writes.

use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::BufMut;
use tokio::runtime::Handle;
use tokio::sync::mpsc::{self, UnboundedReceiver, UnboundedSender};
use tokio::task::JoinHandle;

use crate::error::{Error, Kind};
use crate::frame::{FrameKind, HEADER, Header};
use crate::inbox::{Channel, Delivery, Switchboard};
use crate::outbox::{Outgoing, write_frames};
use crate::pool::Pool;
use crate::roster::Roster;
use crate::socket::{Socket, mouthful};
use crate::trace::{self, Recorder, Span, What};
use crate::wire::Gauge;

/// Why a rank is lost whose host answers nothing.
const SILENT: &str = "nothing comes from its host any more (host down or cable cut?)";

/// What the tasks of all links share.
pub(crate) struct Hub {
    pub(crate) roster: Roster,
    pub(crate) board: Switchboard,
    pub(crate) pool: Pool,
    pub(crate) trace: Arc<Recorder>,
    /// How many links long data takes from my host at a time: each of its ranks has one to each other host.
    links_in_use: usize,
}

impl Hub {
    /// For a rank that shares its host with so many, itself counted, and has so many other hosts to write to.
    pub(crate) fn new(roster: Roster, members: usize, other_hosts: usize) -> Self {
        Hub {
            roster,
            board: Switchboard::default(),
            pool: Pool::default(),
            trace: Arc::default(),
            links_in_use: members * other_hosts,
        }
    }
}

/// By what a peer is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkKind {
    /// The peer is this rank.
    Myself,
    /// The peer's arena is mapped here and ours there; control frames go over a Unix socket.
    SharedMemory,
    /// TCP streams.
    Tcp,
}

impl LinkKind {
    /// How tables name it.
    pub fn name(self) -> &'static str {
        match self {
            LinkKind::Myself => "self",
            LinkKind::SharedMemory => "shared memory",
            LinkKind::Tcp => "tcp",
        }
    }
}

/// A link to one peer.
pub struct Link {
    /// Its kind.
    pub kind: LinkKind,
    /// Why this kind and this address.
    pub why: String,
    /// The address of our end, empty for shared memory.
    pub local: String,
    /// The address of the peer's end.
    pub remote: String,
    queues: Vec<UnboundedSender<Outgoing>>,
    writers: Vec<JoinHandle<()>>,
    sent: AtomicU64,
    received: Arc<AtomicU64>,
}

impl Link {
    /// The link to oneself, which nothing travels on.
    pub(crate) fn to_myself() -> Self {
        Link::new(LinkKind::Myself, "the same process".to_owned())
    }

    fn new(kind: LinkKind, why: String) -> Self {
        Link {
            kind,
            why,
            local: String::new(),
            remote: String::new(),
            queues: Vec::new(),
            writers: Vec::new(),
            sent: AtomicU64::new(0),
            received: Arc::default(),
        }
    }

    /// Starts the tasks of all streams; the first one carries the control frames.
    pub(crate) fn start(
        runtime: &Handle,
        hub: &Arc<Hub>,
        peer: u32,
        kind: LinkKind,
        why: String,
        sockets: Vec<Socket>,
    ) -> Self {
        let mut link = Link::new(kind, why);
        let streams = sockets.len();
        for (number, socket) in sockets.into_iter().enumerate() {
            let gauge = Gauge::new(&socket, streams, hub.links_in_use);
            if number == 0 {
                (link.local, link.remote) = socket.addresses();
            }
            let (queue, frames) = mpsc::unbounded_channel();
            let socket = Arc::new(socket);
            link.queues.push(queue);
            link.writers.push(runtime.spawn(write_stream(Arc::clone(&socket), frames, gauge, Arc::clone(hub), peer)));
            hub.roster.stream_opened(peer);
            runtime.spawn(read_stream(socket, Arc::clone(hub), peer, number, Arc::clone(&link.received)));
        }
        link
    }

    /// How many streams there are.
    pub fn streams(&self) -> usize {
        self.queues.len()
    }

    /// Bytes (sent, received) so far, headers included; sent ones count when they are queued. Neighbours exchange only
    /// control frames this way: what they read in each other's memory is not counted.
    pub fn traffic(&self) -> (u64, u64) {
        (self.sent.load(Ordering::Relaxed), self.received.load(Ordering::Relaxed))
    }

    /// Queues a frame. Pieces of long data are spread over the streams, all else keeps its order on the first one.
    pub(crate) fn send(&self, frame: Outgoing) {
        self.sent.fetch_add((HEADER + frame.payload.len()) as u64, Ordering::Relaxed);
        let stream = match frame.header.kind {
            FrameKind::Data | FrameKind::Piece | FrameKind::Letter if !self.queues.is_empty() => {
                frame.header.index as usize % self.queues.len()
            }
            _ => 0,
        };
        // a closed queue means that the peer is gone, which the roster tells whoever waits
        if let Some(queue) = self.queues.get(stream) {
            let _ = queue.send(frame);
        }
    }

    /// Closes the queues; the handles end when everything queued is written.
    pub(crate) fn close(&mut self) -> Vec<JoinHandle<()>> {
        self.queues.clear();
        std::mem::take(&mut self.writers)
    }
}

async fn write_stream(
    socket: Arc<Socket>,
    mut frames: UnboundedReceiver<Outgoing>,
    gauge: Option<Gauge>,
    hub: Arc<Hub>,
    peer: u32,
) {
    if let Err(error) = write_frames(&socket, &mut frames, gauge, peer, &hub.trace).await {
        log::debug!("writing to rank {peer}: {error}");
    }
}

async fn read_stream(socket: Arc<Socket>, hub: Arc<Hub>, peer: u32, number: usize, received: Arc<AtomicU64>) {
    let end = tokio::select! {
        biased;
        end = read_frames(&socket, &hub, peer, &received) => end,
        () = socket.silence() => SILENT.to_owned(),
    };
    hub.roster.stream_ended(peer);
    if number > 0 {
        // the first stream knows better: it may hold a goodbye or the story of a failure
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    if !hub.roster.is_accounted_for(peer) {
        hub.roster.lost(peer, &end);
    }
}

/// Reads frames until the stream ends, and gives why.
async fn read_frames(socket: &Socket, hub: &Hub, peer: u32, received: &AtomicU64) -> String {
    loop {
        match read_frame(socket, hub, peer, received).await {
            Ok(true) => {}
            Ok(false) => return "its connection closed without a goodbye (killed or crashed?)".to_owned(),
            Err(End::Io(error)) if error.kind() == ErrorKind::TimedOut => return SILENT.to_owned(),
            Err(End::Io(error)) => return format!("its connection broke: {error}"),
            Err(End::Bad(error)) => {
                let card = hub.roster.card(peer);
                let story =
                    format!("{} sent a bad frame: {}; try: the same offbeat on every host", card.name(), error.message);
                hub.roster.failed(peer, Error::of_rank(Kind::BadFrame, peer, &card.host, story));
                return "it sent a bad frame".to_owned();
            }
        }
    }
}

enum End {
    Io(io::Error),
    Bad(Error),
}

impl From<io::Error> for End {
    fn from(error: io::Error) -> Self {
        End::Io(error)
    }
}

/// Reads one frame and hands it to whom it is for; `false` at the end of the stream.
async fn read_frame(socket: &Socket, hub: &Hub, peer: u32, received: &AtomicU64) -> Result<bool, End> {
    let mut head = [0; HEADER];
    let mut free = &mut head[..];
    if socket.read_some(&mut free).await? == 0 {
        return Ok(false);
    }
    // not before: a stream on which nothing comes is not receiving
    let begin = trace::now();
    while free.has_remaining_mut() {
        if socket.read_some(&mut free).await? == 0 {
            return Err(End::Io(ErrorKind::UnexpectedEof.into()));
        }
    }
    let header = Header::decode(&head).map_err(End::Bad)?;
    let length = header.length as usize;
    let mut payload = hub.pool.take(length);
    while payload.len() < length {
        let left = length - payload.len();
        socket.wake_for(mouthful(length, left));
        if socket.read_some(&mut (&mut payload).limit(left)).await? == 0 {
            return Err(End::Io(ErrorKind::UnexpectedEof.into()));
        }
    }
    socket.wake_for(1);
    received.fetch_add((HEADER + length) as u64, Ordering::Relaxed);
    if length >= trace::LEAST_PAYLOAD {
        hub.trace.record(Span::of_frame(What::Receive { peer }, &header, begin));
    }
    let delivery = Delivery { from: peer, header, payload };
    let story = |delivery: &Delivery| Error::from_bytes(&delivery.payload).map_err(End::Bad);
    match header.kind {
        FrameKind::Data => hub.board.deliver(Channel::Call(header.group, header.sequence), delivery),
        FrameKind::Message | FrameKind::Offer => hub.board.deliver(Channel::Mail(peer, header.group), delivery),
        FrameKind::Accept | FrameKind::Taken => hub.board.deliver(Channel::Outgoing(peer, header.sequence), delivery),
        FrameKind::Piece => hub.board.deliver(Channel::Incoming(peer, header.sequence), delivery),
        FrameKind::Letter => hub.board.deliver(Channel::Letters(header.group), delivery),
        FrameKind::Ready => hub.roster.ready(peer),
        FrameKind::Poison => {
            hub.roster.poison(header.group, &story(&delivery)?);
        }
        FrameKind::Failed => hub.roster.failed(peer, story(&delivery)?),
        FrameKind::Goodbye => hub.roster.goodbye(peer, String::from_utf8_lossy(&delivery.payload).into_owned()),
    }
    Ok(true)
}
