//! Turns among peers: a rank with many of them writes to few at a time.
//!
//! The kernel packs about a millisecond of a stream's rate into a packet, so streams that share a wire send packets as small
//! as there are many of them, and both ends and all between work for each: among eight hosts at 100 Mbit/s, seven streams at
//! once sent three times as many as two by turns, and an all-reduce that took 2.3 times as long as the wire needs, because
//! the emulated one was busy with packets, took 1.3 times with turns.
//!
//! A turn is some frames to one peer, and ends when most of it is on its way, not when it lies in the kernel's buffer: what
//! lies there shares the wire with the next ones. A peer that takes nothing gives its turn up, so that nobody waits for it
//! but who has to.

use std::io;
use std::time::Duration;

use tokio::sync::mpsc::UnboundedReceiver;
use tokio::sync::{Semaphore, SemaphorePermit};

use crate::socket::{SHORT, Socket};

/// So many other hosts, and no more, are all written to at once: their packets are large enough.
const FEW: usize = 3;

/// How many peers are written to at a time where there are more.
const AT_A_TIME: usize = 2;

/// The most streams that a link has; a peer's turn is divided among its streams.
const STREAMS: usize = 8;

/// Bytes of a turn.
const TURN: usize = 256 << 10;

/// A stream that takes nothing for so long gives its turn up.
const STUCK: Duration = Duration::from_millis(100);

/// Who may write; shared by all links of a rank.
pub(crate) struct Turns(Semaphore);

impl Turns {
    /// Turns for a rank that has so many other hosts to write to; none if they are few.
    pub(crate) fn among(other_hosts: usize) -> Option<Self> {
        (other_hosts > FEW).then(|| Turns(Semaphore::new(AT_A_TIME * STREAMS)))
    }
}

/// A stream's side of it.
pub(crate) struct Speaker<'a> {
    turns: Option<&'a Turns>,
    /// What one of the link's streams takes of its peer's turn.
    share: u32,
    turn: Option<SemaphorePermit<'a>>,
    /// What is left of the turn.
    left: usize,
}

impl<'a> Speaker<'a> {
    pub(crate) fn new(turns: Option<&'a Turns>, streams: usize) -> Self {
        Speaker { turns, share: (STREAMS / streams.max(1)).max(1) as u32, turn: None, left: 0 }
    }

    /// The next frame to write. Whoever has nothing to say ends its turn.
    pub(crate) async fn next<T>(&mut self, queue: &mut UnboundedReceiver<T>) -> Option<T> {
        if self.turn.is_some()
            && let Ok(frame) = queue.try_recv()
        {
            return Some(frame);
        }
        self.turn = None;
        queue.recv().await
    }

    /// Waits for a turn, if these bytes need one and the last one is over.
    pub(crate) async fn ask(&mut self, bytes: usize, socket: &Socket) {
        let Some(turns) = self.turns.filter(|_| bytes > SHORT) else { return };
        if self.turn.is_none() || self.left == 0 {
            // given back first: the others have waited longer
            self.turn = None;
            self.turn = turns.0.acquire_many(self.share).await.ok();
            self.left = TURN;
            socket.bound_unsent();
        }
        self.left = self.left.saturating_sub(bytes);
    }

    /// Does a write, which may be dropped where it waits; without a turn from where it is stuck.
    pub(crate) async fn write<F: Future<Output = io::Result<usize>>>(
        &mut self,
        write: impl Fn() -> F,
    ) -> io::Result<usize> {
        if self.turn.is_some() {
            match tokio::time::timeout(STUCK, write()).await {
                Ok(written) => return written,
                Err(_) => self.turn = None,
            }
        }
        write().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::net::{TcpListener, TcpStream};
    use tokio::sync::mpsc;

    async fn socket() -> (Socket, TcpStream) {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let (ours, theirs) = tokio::join!(TcpStream::connect(listener.local_addr().unwrap()), listener.accept());
        (Socket::tcp(ours.unwrap(), Duration::from_secs(30)).unwrap(), theirs.unwrap().0)
    }

    fn at_once(turns: &Turns) -> usize {
        turns.0.available_permits()
    }

    #[test]
    fn few_hosts_need_no_turns() {
        assert!(Turns::among(FEW).is_none());
        assert_eq!(at_once(&Turns::among(FEW + 1).unwrap()), AT_A_TIME * STREAMS);
    }

    #[tokio::test]
    async fn long_frames_take_a_turn_and_short_ones_pass() {
        let turns = Turns::among(7).unwrap();
        let (socket, _peer) = socket().await;
        let mut near = Speaker::new(Some(&turns), 1);
        near.ask(SHORT, &socket).await;
        assert_eq!(at_once(&turns), AT_A_TIME * STREAMS);
        near.ask(TURN - 1, &socket).await;
        assert_eq!(at_once(&turns), (AT_A_TIME - 1) * STREAMS);
        let mut far = Speaker::new(Some(&turns), 4);
        far.ask(TURN, &socket).await;
        assert_eq!(at_once(&turns), (AT_A_TIME - 1) * STREAMS - STREAMS / 4, "a quarter of a peer's turn");
        near.ask(TURN, &socket).await;
        assert_eq!(at_once(&turns), (AT_A_TIME - 1) * STREAMS - STREAMS / 4, "a byte was left of the turn");
        let mut third = Speaker::new(Some(&turns), 1);
        let waits = tokio::time::timeout(Duration::from_millis(20), third.ask(TURN, &socket)).await;
        assert!(waits.is_err(), "there is no room for a whole peer beside a whole one and a quarter");
    }

    #[tokio::test]
    async fn turns_go_round_and_end_with_the_queue() {
        let turns = Turns::among(7).unwrap();
        let (socket, _peer) = socket().await;
        let (mut one, mut two, mut three) =
            (Speaker::new(Some(&turns), 1), Speaker::new(Some(&turns), 1), Speaker::new(Some(&turns), 1));
        one.ask(TURN, &socket).await;
        two.ask(TURN, &socket).await;
        // both have had their turn: whoever asks again comes after the one that waits
        let order = std::cell::RefCell::new(Vec::new());
        tokio::join!(
            async {
                three.ask(TURN, &socket).await;
                order.borrow_mut().push(3);
                drop(three);
            },
            async {
                one.ask(TURN, &socket).await;
                order.borrow_mut().push(1);
            },
        );
        assert_eq!(order.into_inner(), [3, 1]);
        assert_eq!(at_once(&turns), 0, "one and two have theirs");
        let (queue, mut frames) = mpsc::unbounded_channel();
        queue.send("a frame").unwrap();
        assert!(two.next(&mut frames).await.is_some());
        assert_eq!(at_once(&turns), 0, "who has more to say keeps it");
        drop(queue);
        assert!(two.next(&mut frames).await.is_none());
        assert_eq!(at_once(&turns), STREAMS, "who has nothing more to say does not");
    }

    #[tokio::test]
    async fn whoever_is_stuck_gives_its_turn_up() {
        let turns = Turns::among(7).unwrap();
        let (socket, peer) = socket().await;
        let mut speaker = Speaker::new(Some(&turns), 1);
        speaker.ask(TURN, &socket).await;
        let bytes = vec![0; 1 << 20];
        let stuck = async {
            loop {
                let write = || socket.write_some(|write| write(&[io::IoSlice::new(&bytes)]));
                speaker.write(write).await.unwrap();
            }
        };
        assert!(tokio::time::timeout(STUCK * 10, stuck).await.is_err(), "nobody reads");
        assert_eq!(at_once(&turns), AT_A_TIME * STREAMS);
        drop(peer);
    }
}
