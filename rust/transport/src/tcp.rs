//! Listening and dialing: proven connections, over whichever address works first.

use std::io::ErrorKind;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::AsRawFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use socket2::{Domain, Protocol, Type};
use tokio::net::{TcpListener, TcpStream, UnixListener};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};

use crate::address::plain;
use crate::error::{Error, Kind, Result};
use crate::fork::ClosedInChild;
use crate::handshake::{self, Intro, KEPT, Purpose, Token, WELCOME};
use crate::shm::arena::Arena;
use crate::shm::attach::{self, Neighbour};
use crate::socket::Socket;
use crate::strangers::{Complaints, Strangers};

/// A stranger gets this long to prove itself.
const PROOF_TIME: Duration = Duration::from_secs(10);
/// The next address is tried when this one has not answered for so long.
const STAGGER: Duration = Duration::from_millis(250);
/// So often in a row a rank must refuse to count as lost: a firewall may do so for a moment, too.
pub(crate) const REFUSALS: u32 = 4;

/// A connection whose dialer has proven the token.
pub(crate) struct Arrival {
    pub(crate) intro: Intro,
    pub(crate) socket: Socket,
    /// For a connection that attaches: the dialer's memory.
    pub(crate) neighbour: Option<Neighbour>,
}

/// What every proof needs.
#[derive(Clone)]
pub(crate) struct Door {
    pub(crate) token: Token,
    pub(crate) me: u32,
    pub(crate) world: u32,
    /// After how long a silent host counts as gone.
    pub(crate) patience: Duration,
    /// The memory to offer to neighbours, and where the world's control block is in it.
    pub(crate) memory: Option<(Arc<Arena>, usize)>,
}

/// Listens on a free port of every address, IPv6 and IPv4 where the host has both.
pub(crate) fn listen() -> Result<(u16, TcpListener)> {
    let open = |domain, address: SocketAddr| -> std::io::Result<TcpListener> {
        let socket = socket2::Socket::new(domain, Type::STREAM, Some(Protocol::TCP))?;
        if address.is_ipv6() {
            socket.set_only_v6(false)?;
        }
        socket.bind(&address.into())?;
        socket.listen(1024)?;
        socket.set_nonblocking(true)?;
        TcpListener::from_std(socket.into())
    };
    let listener = open(Domain::IPV6, (Ipv6Addr::UNSPECIFIED, 0).into())
        .or_else(|_| open(Domain::IPV4, (Ipv4Addr::UNSPECIFIED, 0).into()))
        .map_err(|e| Error::io("cannot listen on a TCP port", e))?;
    let port = listener.local_addr().map_err(|e| Error::io("cannot read the port", e))?.port();
    Ok((port, listener))
}

/// Lets proven dialers in for ever; strangers are logged and dropped.
pub(crate) async fn accept_tcp(listener: TcpListener, door: Door, arrivals: mpsc::UnboundedSender<Arrival>) {
    let _registered = ClosedInChild::new(listener.as_raw_fd());
    let (mut strangers, complaints) = (Strangers::default(), Arc::new(Complaints::default()));
    loop {
        match listener.accept().await {
            Ok((stream, address)) => match Socket::tcp(stream, door.patience) {
                Ok(socket) => {
                    admit(socket, plain(address).to_string(), &door, (&mut strangers, &complaints), &arrivals)
                }
                Err(error) => log::debug!("a connection from {} went away: {error}", plain(address)),
            },
            Err(error) => {
                complaints.warn(&format!("cannot accept connections: {error}; try: ulimit -n"));
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// As [`accept_tcp`], for the abstract Unix socket.
pub(crate) async fn accept_unix(listener: UnixListener, door: Door, arrivals: mpsc::UnboundedSender<Arrival>) {
    let _registered = ClosedInChild::new(listener.as_raw_fd());
    let (mut strangers, complaints) = (Strangers::default(), Arc::new(Complaints::default()));
    loop {
        match listener.accept().await {
            Ok((stream, _)) => admit(
                Socket::unix(stream),
                "a local process".to_owned(),
                &door,
                (&mut strangers, &complaints),
                &arrivals,
            ),
            Err(error) => {
                complaints.warn(&format!("cannot accept local connections: {error}; try: ulimit -n"));
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

fn admit(
    socket: Socket,
    address: String,
    door: &Door,
    (strangers, complaints): (&mut Strangers, &Arc<Complaints>),
    arrivals: &mpsc::UnboundedSender<Arrival>,
) {
    if strangers.make_room() {
        complaints.warn(&format!("dropped a connection for one from {address}: too many that have proven nothing"));
    }
    let (door, arrivals, complaints) = (door.clone(), arrivals.clone(), Arc::clone(complaints));
    let proof = tokio::spawn(async move {
        match timeout(PROOF_TIME, greet(&socket, &door)).await {
            Ok(Ok((intro, neighbour))) => {
                // after the links are up nobody takes arrivals any more, and this one is dropped
                let _ = arrivals.send(Arrival { intro, socket, neighbour });
            }
            Ok(Err(error)) if error.kind == Kind::PeerLost => log::debug!("{address} looked in: {}", error.message),
            Ok(Err(error)) => complaints.warn(&format!("dropped a connection from {address}: {}", error.message)),
            Err(_) => {
                complaints.warn(&format!("dropped a connection from {address}: it said too little for {PROOF_TIME:?}"));
            }
        }
    });
    strangers.add(proof.abort_handle());
}

fn hung_up(error: std::io::Error) -> Error {
    Error::new(Kind::Unauthorized, format!("it hung up before it proved anything ({error})"))
}

/// A connection that was not made. Lost is only who refuses it: on the way there much else can fail for a while.
fn unanswered(error: std::io::Error) -> Error {
    let kind = if error.kind() == ErrorKind::ConnectionRefused { Kind::PeerLost } else { Kind::Timeout };
    Error::new(kind, error.to_string())
}

/// A listener that hung up on us. Not a refusal: with another token it would have shown that in its reply. It may have had
/// too many strangers at its door, or have ended, which the next attempt tells.
fn dropped_us(error: std::io::Error) -> Error {
    Error::new(Kind::Timeout, format!("it hung up before it proved anything ({error})"))
}

/// The listener's half of the handshake.
async fn greet(socket: &Socket, door: &Door) -> Result<(Intro, Option<Neighbour>)> {
    let dialer = handshake::read_hello(&socket.read_array().await.map_err(|error| match error.kind() {
        // somebody only looked whether this rank is there (`late.rs`)
        ErrorKind::ConnectionAborted => Error::new(Kind::PeerLost, "it said nothing"),
        _ => hung_up(error),
    })?)?;
    let listener = handshake::nonce()?;
    socket.write_all(&handshake::reply(&door.token, &dialer, &listener, door.me)).await.map_err(hung_up)?;
    let intro = socket.read_array().await.map_err(hung_up)?;
    let intro = handshake::read_intro(&door.token, &dialer, &listener, &intro)?;
    if intro.to != door.me || intro.from <= door.me || intro.from >= door.world {
        return Err(Error::new(Kind::BadFrame, format!("rank {} has no reason to dial rank {}", intro.from, door.me)));
    }
    socket.write_all(&[WELCOME]).await.map_err(hung_up)?;
    // a dialer that reached us at several addresses keeps one connection and drops the others
    if socket.read_array().await.map_err(hung_up)? != [KEPT] {
        return Err(Error::new(Kind::Unauthorized, "it did not keep the connection"));
    }
    let neighbour = match (&door.memory, intro.purpose) {
        (Some((arena, control)), Purpose::Attach) => Some(attach::swap(socket, arena, *control).await?),
        _ => None,
    };
    Ok((intro, neighbour))
}

/// The dialer's half of the handshake. The purpose is chosen when the time of a round trip is known.
pub(crate) async fn introduce(
    socket: &Socket,
    door: &Door,
    to: u32,
    purpose: impl FnOnce(Duration) -> Purpose,
) -> Result<Purpose> {
    let dialer = handshake::nonce()?;
    let began = Instant::now();
    socket.write_all(&handshake::hello(&dialer)).await.map_err(dropped_us)?;
    let reply = socket.read_array().await.map_err(dropped_us)?;
    let round_trip = socket.round_trip().unwrap_or_else(|| began.elapsed());
    let (listener, rank) = handshake::read_reply(&door.token, &dialer, &reply)?;
    if rank != to {
        return Err(Error::new(Kind::Unauthorized, format!("rank {rank} answered there")));
    }
    let intro = Intro { from: door.me, to, purpose: purpose(round_trip) };
    socket.write_all(&handshake::intro(&door.token, &dialer, &listener, &intro)).await.map_err(dropped_us)?;
    match socket.read_array().await.map_err(dropped_us)? {
        [WELCOME] => Ok(intro.purpose),
        [_] => Err(Error::new(Kind::Unauthorized, "it did not welcome us")),
    }
}

/// Dials the addresses of a rank, staggered; the first that proves to be that rank wins. Goes on until the deadline, or
/// until it is clear that nobody listens there: a rank does before anybody knows its addresses.
pub(crate) async fn dial(
    door: &Door,
    to: u32,
    addresses: &[SocketAddr],
    purpose: impl Fn(Duration) -> Purpose + Copy + Send + Sync + 'static,
    deadline: Instant,
) -> Result<(Socket, SocketAddr, Purpose)> {
    let mut refusals = 0;
    loop {
        let mut attempts = JoinSet::new();
        for (turn, address) in addresses.iter().copied().enumerate() {
            let door = door.clone();
            attempts.spawn(async move {
                sleep(STAGGER * turn as u32).await;
                let attempt = async {
                    let stream = TcpStream::connect(address).await.map_err(unanswered)?;
                    let socket = Socket::tcp(stream, door.patience).map_err(|e| Error::io("socket options", e))?;
                    let purpose = introduce(&socket, &door, to, purpose).await?;
                    Ok((socket, purpose))
                };
                match timeout(PROOF_TIME, attempt).await {
                    Ok(Ok((socket, purpose))) => Ok((socket, address, purpose)),
                    Ok(Err(error)) => Err((address, error)),
                    Err(_) => Err((address, Error::new(Kind::Timeout, "no answer"))),
                }
            });
        }
        let mut failures = Vec::new();
        while let Some(attempt) = attempts.join_next().await {
            match attempt {
                Ok(Ok(won)) => match won.0.write_all(&[KEPT]).await {
                    Ok(()) => return Ok(won),
                    Err(error) => failures.push((won.1, dropped_us(error))),
                },
                Ok(Err(failure)) => failures.push(failure),
                Err(error) => log::debug!("a dialing task ended: {error}"),
            }
        }
        let all = |kind| !failures.is_empty() && failures.iter().all(|(_, e)| e.kind == kind);
        let refused = all(Kind::Unauthorized);
        refusals = if all(Kind::PeerLost) { refusals + 1 } else { 0 };
        if refused || refusals == REFUSALS || Instant::now() + STAGGER > deadline {
            let list: Vec<String> = failures.iter().map(|(address, e)| format!("{address}: {}", e.message)).collect();
            let kind = if refused { Kind::Unauthorized } else { Kind::PeerLost };
            let list = if list.is_empty() { "it offers no address".to_owned() } else { list.join(", ") };
            return Err(Error::new(kind, list));
        }
        sleep(STAGGER).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn door(secret: &[u8], me: u32) -> Door {
        Door { token: Token::new(secret), me, world: 4, patience: Duration::from_secs(5), memory: None }
    }

    fn first(_: Duration) -> Purpose {
        Purpose::Stream { number: 0, of: 1 }
    }

    #[tokio::test]
    async fn strangers_are_dropped_and_the_next_one_gets_in() {
        let (port, listener) = listen().unwrap();
        let (sender, mut arrivals) = mpsc::unbounded_channel();
        tokio::spawn(accept_tcp(listener, door(b"secret", 0), sender));
        let address: SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
        let hello = handshake::hello(&[9; 32]);
        let forged = [hello.as_slice(), &[7; handshake::INTRO]].concat();
        let truncated = &hello[..10];
        for garbage in [b"GET / HTTP/1.1\r\n\r\n".as_slice(), &[0xff; 4096], &forged, truncated] {
            let mut stream = TcpStream::connect(address).await.unwrap();
            let _ = stream.write_all(garbage).await;
            let _ = stream.shutdown().await;
            let mut answer = Vec::new();
            let _ = timeout(Duration::from_secs(5), stream.read_to_end(&mut answer)).await.unwrap();
            assert!(answer.len() <= handshake::REPLY, "a stranger was told {} bytes", answer.len());
        }
        let soon = Instant::now() + Duration::from_secs(5);
        let wrong = dial(&door(b"guess", 1), 0, &[address], first, soon).await.unwrap_err();
        assert_eq!(wrong.kind, Kind::Unauthorized);
        let not_him = dial(&door(b"secret", 1), 2, &[address], first, soon).await.unwrap_err();
        assert!(not_him.message.contains("rank 0 answered"), "{not_him}");
        let (_socket, ..) = dial(&door(b"secret", 3), 0, &[address], first, soon).await.unwrap();
        assert_eq!(arrivals.recv().await.unwrap().intro.from, 3);
    }

    #[tokio::test]
    async fn a_crowd_at_the_door_keeps_nobody_out() {
        let (port, listener) = listen().unwrap();
        let (sender, mut arrivals) = mpsc::unbounded_channel();
        tokio::spawn(accept_tcp(listener, door(b"secret", 0), sender));
        let address: SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
        let mut crowd = Vec::new();
        for _ in 0..crate::strangers::MOST + 50 {
            let mut silent = TcpStream::connect(address).await.unwrap();
            silent.write_all(b"O").await.unwrap();
            crowd.push(silent);
        }
        let soon = Instant::now() + PROOF_TIME / 2;
        let (_socket, ..) = dial(&door(b"secret", 3), 0, &[address], first, soon).await.unwrap();
        assert_eq!(arrivals.recv().await.unwrap().intro.from, 3);
        // the oldest have gone, the youngest still have their time
        assert_eq!(timeout(PROOF_TIME / 2, crowd[0].read(&mut [0])).await.unwrap().unwrap_or(0), 0);
        let (mut byte, youngest) = ([0], crowd.last_mut().unwrap());
        assert!(timeout(Duration::from_millis(50), youngest.read(&mut byte)).await.is_err());
    }

    #[tokio::test]
    async fn who_is_hung_up_on_tries_again() {
        let (port, listener) = listen().unwrap();
        let (sender, _arrivals) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            for _ in 0..2 {
                drop(listener.accept().await);
            }
            accept_tcp(listener, door(b"s", 0), sender).await;
        });
        let soon = Instant::now() + Duration::from_secs(5);
        let address: SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
        assert_eq!(dial(&door(b"s", 1), 0, &[address], first, soon).await.unwrap().1, address);
    }

    #[tokio::test]
    async fn a_dead_address_does_not_keep_a_good_one_from_winning() {
        let (port, listener) = listen().unwrap();
        let (sender, _arrivals) = mpsc::unbounded_channel();
        tokio::spawn(accept_tcp(listener, door(b"s", 0), sender));
        let dead: SocketAddr = (Ipv4Addr::LOCALHOST, 1).into();
        let good: SocketAddr = (Ipv4Addr::LOCALHOST, port).into();
        let soon = Instant::now() + Duration::from_secs(5);
        assert_eq!(dial(&door(b"s", 1), 0, &[dead, good], first, soon).await.unwrap().1, good);
        let error = dial(&door(b"s", 1), 0, &[dead], first, Instant::now()).await.unwrap_err();
        assert!(error.message.contains("127.0.0.1:1"), "{error}");
    }
}
