//! Ranks that are late while ranks link: whether they have ended.
//!
//! No link would tell yet. But a rank listens before it leaves its card in the store, and its port closes with its process:
//! who is refused there knows. It leaves the story in the store, because it raises it and ends, and those that wait for it
//! in turn would take it for the one that was lost.

use std::cell::RefCell;
use std::collections::HashMap;
use std::io::ErrorKind;
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::time::timeout;

use crate::address::{self, Interface};
use crate::error::{Error, Kind, Result};
use crate::rendezvous::{Card, Store};
use crate::tcp::REFUSALS;

/// Where in the store the story lies that ends the linking.
const STORY: &str = "story";
/// How often those that wait look for it, and at the ports of those they wait for.
pub(crate) const LOOK: Duration = Duration::from_millis(250);
/// For so long a rank stays that knows the story: the store may end with it, and the others look at ports in between.
const STAY: Duration = LOOK.saturating_mul(4);
/// So many late ranks are looked at.
const LOOKED_AT: usize = 4;
/// How long a port may take to answer. One that does not answer says nothing.
const ANSWER: Duration = Duration::from_millis(200);

/// What is known of late ranks.
pub(crate) struct Late<'a> {
    store: &'a dyn Store,
    cards: &'a [Card],
    me: u32,
    interfaces: &'a [Interface],
    /// How often in a row each rank has refused.
    refusals: RefCell<HashMap<u32, u32>>,
}

impl<'a> Late<'a> {
    pub(crate) fn new(store: &'a dyn Store, cards: &'a [Card], me: u32, interfaces: &'a [Interface]) -> Self {
        Late { store, cards, me, interfaces, refusals: RefCell::default() }
    }

    /// Raises the story that some rank has left, if one has.
    pub(crate) fn hear(&self) -> Result<()> {
        let Some(story) = self.store.get(STORY, Duration::ZERO)? else { return Ok(()) };
        std::thread::sleep(STAY);
        Err(Error::from_bytes(&story)?)
    }

    /// Leaves the story of a refused or lost rank for the others, and gives it; or the one that was left before.
    pub(crate) fn tell(&self, error: Error) -> Error {
        if !matches!(error.kind, Kind::Unauthorized | Kind::PeerLost) {
            return error;
        }
        if let Err(story) = self.hear() {
            return story;
        }
        match self.store.set(STORY, &error.to_bytes()) {
            Ok(()) => std::thread::sleep(STAY),
            Err(problem) => log::debug!("leaving word in the store: {problem}"),
        }
        error
    }

    /// Raises a story if there is one, or if one of these ranks, which are late, has ended.
    pub(crate) async fn check(&self, late: &[u32]) -> Result<()> {
        self.hear()?;
        for rank in late.iter().take(LOOKED_AT) {
            if self.has_ended(*rank).await {
                let card = &self.cards[*rank as usize];
                let message = format!(
                    "{} has ended while ranks were linking: nobody listens on its port any more; try: read its output",
                    card.name()
                );
                return Err(self.tell(Error::of_rank(Kind::PeerLost, card.rank, &card.host, message)));
            }
        }
        Ok(())
    }

    async fn has_ended(&self, rank: u32) -> bool {
        let (card, mine) = (&self.cards[rank as usize], &self.cards[self.me as usize]);
        let same_machine = card.machine == mine.machine;
        let addresses = address::candidates(self.interfaces, &card.addresses, card.port, same_machine);
        let mut refused = !addresses.is_empty();
        for address in addresses {
            let answer = timeout(ANSWER, TcpStream::connect(address)).await;
            refused &= matches!(answer, Ok(Err(error)) if error.kind() == ErrorKind::ConnectionRefused);
        }
        let mut refusals = self.refusals.borrow_mut();
        let count = refusals.entry(rank).or_default();
        *count = if refused { *count + 1 } else { 0 };
        // on this machine once is enough
        *count >= if same_machine { 1 } else { REFUSALS }
    }
}

#[cfg(test)]
mod tests {
    use std::net::{IpAddr, Ipv4Addr};

    use super::*;
    use crate::rendezvous::MemoryStore;

    fn card(rank: u32, port: u16) -> Card {
        Card {
            version: String::new(),
            rank,
            pid: 1,
            host: format!("host{rank}"),
            machine: 7,
            addresses: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
            port,
            socket: Err(String::new()),
        }
    }

    #[tokio::test]
    async fn who_has_ended_is_known_by_its_port_and_told_to_all() {
        let listeners = [(); 3].map(|()| std::net::TcpListener::bind("127.0.0.1:0").unwrap());
        let port = |at: usize| listeners[at].local_addr().unwrap().port();
        let cards: Vec<Card> = (0..3).map(|rank| card(rank as u32, port(rank))).collect();
        let (store, interfaces) = (MemoryStore::default(), crate::address::interfaces().unwrap());
        let [first, second, third] = listeners;
        let late = |me| Late::new(&store, &cards, me, &interfaces);
        late(0).check(&[1, 2]).await.unwrap();
        drop(third);
        let error = late(0).check(&[1, 2]).await.unwrap_err();
        assert_eq!((error.kind, error.rank), (Kind::PeerLost, Some(2)));
        assert!(error.message.contains("rank 2 (host host2") && error.message.contains("try:"), "{error}");
        // rank 0 raises this and ends; rank 1, which waits for it, names rank 2 as well
        drop(first);
        let heard = late(1).check(&[0]).await.unwrap_err();
        assert_eq!(heard.message, error.message);
        drop(second);
    }

    #[tokio::test]
    async fn another_host_may_refuse_for_a_while() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        // loopback is never dialed on another machine, so it gets an address of the same kind
        let away = Card { machine: 8, addresses: vec![crate::address::interfaces().unwrap()[0].ip], ..card(1, closed) };
        let cards = [card(0, closed), away];
        let (store, interfaces) = (MemoryStore::default(), crate::address::interfaces().unwrap());
        let late = Late::new(&store, &cards, 0, &interfaces);
        let outside = address::candidates(&interfaces, &cards[1].addresses, closed, false);
        if outside.is_empty() {
            // a machine with loopback alone cannot play another host: nothing to dial is no sign of an end
            late.check(&[1]).await.unwrap();
            return;
        }
        for _ in 1..REFUSALS {
            late.check(&[1]).await.unwrap();
        }
        assert_eq!(late.check(&[1]).await.unwrap_err().rank, Some(1));
    }
}
