//! Agreement of those that are there, without a group: everyone hands in a value, and all that are left use the same values,
//! whoever is lost meanwhile. It is what goes on where a group's call has failed because a member is gone.
//!
//! ```text
//! Value    everyone to everyone, once
//! Have     who holds the values of all its members says so, again for each list of members
//! Agreed   who has heard so from all of a list uses their values, and tells everyone before it goes on
//! ```
//! If a rank has agreed on a list, all members of it hold these values; and whoever is left waits for every rank that is
//! there, so it hears `Agreed` from one that has gone on, before it could agree on anything else. Who hears it passes it on.
//!
//! A call in the world's group that has ended well for some and failed for others is settled the same way: who has its
//! result says so with an `Agreed` without a list.
//!
//! There is no thread: letters wait until the next question. Questions have the number of the meeting and of the question in
//! it, which all ranks count alike.

use std::sync::Arc;
use std::time::{Duration, Instant};

use offbeat_transport::inbox::{Channel, Reception};
use offbeat_transport::mesh::Mesh;
use offbeat_transport::roster::Absence;
use offbeat_transport::{Interrupt, SLICE, fork};

use super::post::{About, Envelope, Epoch, Letter, Post};
use crate::{Error, Kind, Result};

/// The number of the letters: that of the world's group, which has no background thread.
const CHANNEL: u64 = 0;
/// The most that one value may have.
const LONGEST: usize = 64 << 20;

/// What came of a question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Agreed {
    /// Somebody has the result of the call that failed here.
    Settled,
    /// The values of these ranks, in ascending order.
    Values(Vec<(u32, Vec<u8>)>),
}

/// Where those that are there agree.
pub struct Council {
    post: Post,
    meeting: u64,
    question: u64,
    letters: Vec<Letter>,
}

/// What to do about a question.
#[derive(Debug, PartialEq, Eq)]
enum Move {
    Wait,
    /// Say that the values of all members are here.
    Tell,
    Settle,
    /// Use the values of these.
    Use(Vec<u32>),
}

impl Council {
    /// Of all ranks.
    pub(crate) fn new(mesh: &Arc<Mesh>, chunk: usize) -> Self {
        let members: Vec<u32> = (0..mesh.world()).collect();
        let post = Post::new(Arc::clone(mesh), CHANNEL, &members, chunk, LONGEST);
        Council { post, meeting: 0, question: 0, letters: Vec::new() }
    }

    /// Begins the next meeting. Every rank does so, whether it will have to ask anything or not.
    pub(crate) fn convene(&mut self) {
        (self.meeting, self.question) = (self.meeting + 1, 0);
        let now = self.number();
        self.letters.retain(|letter| letter.envelope.round >= now);
    }

    /// The number of the question.
    fn number(&self) -> u64 {
        self.meeting << 32 | self.question
    }

    /// What the others may ask in this meeting needs no answer: the call that it is about has ended well here.
    pub(crate) fn settled(&mut self) {
        self.tell(&Envelope { extra: 1, ..Envelope::new(About::Agreed, Epoch::default(), self.number()) }, &[]);
        let mesh = Arc::clone(&self.post.mesh);
        self.collect(&mesh.board().open(Channel::Letters(CHANNEL)));
    }

    /// Hands in a value, and gives those of all that are there. All of these make the call; whoever is lost is left out.
    pub(crate) fn gather(
        &mut self,
        value: &[u8],
        limit: Duration,
        interrupt: Option<&Interrupt<'_>>,
    ) -> Result<Agreed> {
        if fork::in_child() {
            let message = "this process was forked from a rank and is none itself; try: communicate in the parent only";
            return Err(Error::new(Kind::NotInitialized, message));
        }
        if value.len() > LONGEST {
            return Err(Error::invalid(format!("{} bytes at once; try: at most {LONGEST}", value.len())));
        }
        let (number, began) = (self.number(), Instant::now());
        self.question += 1;
        let mesh = Arc::clone(&self.post.mesh);
        let inbox = mesh.board().open(Channel::Letters(CHANNEL));
        self.tell(&Envelope::new(About::Value, self.post.epoch(), number), value);
        // the last list of which this rank has said that it holds everything
        let mut told = None;
        loop {
            self.look_around(&inbox);
            let seen: Vec<Seen<'_>> = self.letters.iter().filter_map(|letter| Seen::of(letter, number)).collect();
            match decide(self.post.me, self.post.living(), self.post.epoch(), told, &seen) {
                Move::Wait => {}
                Move::Tell => {
                    told = Some(self.post.epoch());
                    self.tell(&Envelope::new(About::Have, self.post.epoch(), number), &[]);
                    continue;
                }
                Move::Settle => {
                    let envelope = Envelope { extra: 1, ..Envelope::new(About::Agreed, Epoch::default(), number) };
                    self.tell(&envelope, &[]);
                    return Ok(Agreed::Settled);
                }
                Move::Use(list) => {
                    self.report_left_out(&list);
                    let body: Vec<u8> = list.iter().flat_map(|rank| rank.to_le_bytes()).collect();
                    self.tell(&Envelope::new(About::Agreed, Epoch::default(), number), &body);
                    return Ok(Agreed::Values(self.values(number, &list, value)));
                }
            }
            if let Some(delivery) = inbox.wait(SLICE) {
                self.letters.extend(self.post.receive(&delivery));
            }
            if let Some(interrupt) = interrupt {
                interrupt()?;
            }
            if began.elapsed() >= limit {
                return Err(self.late(number, limit));
            }
        }
    }

    fn tell(&self, envelope: &Envelope, body: &[u8]) {
        self.post.others().into_iter().for_each(|rank| self.post.send(rank, envelope, body));
    }

    /// The values of a list, my own among them; what is past is forgotten.
    fn values(&mut self, number: u64, list: &[u32], mine: &[u8]) -> Vec<(u32, Vec<u8>)> {
        let (now, later) = std::mem::take(&mut self.letters).into_iter().partition(|l| l.envelope.round <= number);
        self.letters = later;
        let mut now: Vec<Letter> = now;
        let mut of = |rank: &u32| {
            let is_it = |l: &Letter| (l.from, l.envelope.about, l.envelope.round) == (*rank, About::Value, number);
            let at = now.iter().position(is_it)?;
            Some((*rank, now.swap_remove(at).body))
        };
        let me = self.post.me;
        list.iter().filter_map(|rank| if *rank == me { Some((me, mine.to_vec())) } else { of(rank) }).collect()
    }

    fn collect(&mut self, inbox: &Reception<'_>) {
        let now = self.meeting << 32;
        let is_news = |letter: &Letter| letter.envelope.about == About::Lost || letter.envelope.round >= now;
        while let Some(delivery) = inbox.poll() {
            self.letters.extend(self.post.receive(&delivery).filter(is_news));
        }
    }

    /// Takes letters, and goes on without those that are gone. What these have sent before counts.
    fn look_around(&mut self, inbox: &Reception<'_>) {
        let mesh = Arc::clone(&self.post.mesh);
        let others = self.post.others().into_iter();
        let gone: Vec<_> = others.filter_map(|rank| Some((rank, mesh.roster().absence(rank)?))).collect();
        self.collect(inbox);
        for (rank, how) in gone {
            self.post.drop_member(rank);
            if let Absence::Gone(error) = how {
                self.post.report(rank, &error);
            }
        }
        let (me, mut lost) = (self.post.me, Vec::new());
        self.letters.retain(|letter| {
            let is_loss = letter.envelope.about == About::Lost;
            // two ranks that have lost each other cannot both be members
            lost.extend(is_loss.then_some(if letter.envelope.shard == me {
                letter.from
            } else {
                letter.envelope.shard
            }));
            !is_loss
        });
        for rank in lost {
            self.post.drop_member(rank);
        }
    }

    /// Tells the user who has left, and has no part in what is agreed on. Who has left since it told its values has.
    fn report_left_out(&self, list: &[u32]) {
        let (mesh, me) = (&self.post.mesh, self.post.me);
        for rank in (0..mesh.world()).filter(|rank| *rank != me && !list.contains(rank)) {
            if let Some(Absence::Left(why)) = mesh.roster().absence(rank)
                && mesh.roster().report(rank)
            {
                let name = mesh.roster().card(rank).name();
                log::warn!("{name} has left ({why}), and a model is agreed on without it");
            }
        }
    }

    fn late(&self, number: u64, limit: Duration) -> Error {
        let roster = self.post.mesh.roster();
        let heard: Vec<u32> = self.letters.iter().filter(|l| l.envelope.round == number).map(|l| l.from).collect();
        let silent = self.post.others().into_iter().filter(|rank| !heard.contains(rank));
        let names: Vec<String> = silent.take(8).map(|rank| roster.card(rank).name()).collect();
        Error::new(
            Kind::Timeout,
            format!(
                "{} waited {:.1} s for {} to agree on a model after a rank was lost; try: the same calls on every rank, or \
                 raise timeout (OFFBEAT_TIMEOUT)",
                roster.card(self.post.me).name(),
                limit.as_secs_f64(),
                if names.is_empty() { "the other ranks".to_owned() } else { names.join(", ") }
            ),
        )
    }
}

/// What a letter says of a question.
#[derive(Debug, PartialEq, Eq)]
enum Seen<'a> {
    Value(u32),
    Have(u32, Epoch),
    Settled,
    Agreed(&'a [u8]),
}

impl<'a> Seen<'a> {
    fn of(letter: &'a Letter, number: u64) -> Option<Self> {
        let envelope = &letter.envelope;
        if envelope.round != number {
            return None;
        }
        match envelope.about {
            About::Value => Some(Seen::Value(letter.from)),
            About::Have => Some(Seen::Have(letter.from, envelope.epoch)),
            About::Agreed if envelope.extra == 1 => Some(Seen::Settled),
            About::Agreed => Some(Seen::Agreed(&letter.body)),
            _ => None,
        }
    }
}

/// What to do, from all that was heard of a question.
fn decide(me: u32, living: &[u32], epoch: Epoch, told: Option<Epoch>, seen: &[Seen<'_>]) -> Move {
    if seen.contains(&Seen::Settled) {
        return Move::Settle;
    }
    let has = |rank: &u32| *rank == me || seen.contains(&Seen::Value(*rank));
    for agreed in seen {
        if let Seen::Agreed(list) = agreed {
            let list: Vec<u32> =
                list.chunks_exact(4).map(|word| u32::from_le_bytes([word[0], word[1], word[2], word[3]])).collect();
            if list.iter().all(has) {
                return Move::Use(list);
            }
        }
    }
    match living.iter().all(has) {
        false => Move::Wait,
        true if told != Some(epoch) => Move::Tell,
        true if living.iter().all(|rank| *rank == me || seen.contains(&Seen::Have(*rank, epoch))) => {
            Move::Use(living.to_vec())
        }
        true => Move::Wait,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_used_when_all_have_them_and_those_of_others_when_they_do() {
        let (all, two) = (Epoch::of(&[0, 1, 2]), Epoch::of(&[0, 1]));
        let list = [0u8, 0, 0, 0, 1, 0, 0, 0];
        assert_eq!(decide(0, &[0, 1, 2], all, None, &[Seen::Value(1)]), Move::Wait);
        let mut seen = vec![Seen::Value(1), Seen::Value(2)];
        assert_eq!(decide(0, &[0, 1, 2], all, None, &seen), Move::Tell);
        seen.push(Seen::Have(1, all));
        assert_eq!(decide(0, &[0, 1, 2], all, Some(all), &seen), Move::Wait);
        // rank 2 is lost before it said so: what was said of the longer list counts no more
        assert_eq!(decide(0, &[0, 1], two, Some(all), &seen), Move::Tell);
        assert_eq!(decide(0, &[0, 1], two, Some(two), &seen), Move::Wait);
        seen.push(Seen::Have(1, two));
        assert_eq!(decide(0, &[0, 1], two, Some(two), &seen), Move::Use(vec![0, 1]));
        // unless rank 1 had heard it from rank 2 and has gone on
        let everyone = [0u8, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0];
        seen.push(Seen::Agreed(&everyone));
        assert_eq!(decide(0, &[0, 1], two, Some(two), &seen), Move::Use(vec![0, 1, 2]));
        assert_eq!(decide(0, &[0, 1], two, None, &[Seen::Agreed(&list)]), Move::Wait, "without the values");
        assert_eq!(decide(0, &[0, 1], two, None, &[Seen::Settled]), Move::Settle);
        assert_eq!(decide(0, &[0], Epoch::of(&[0]), None, &[]), Move::Tell);
        assert_eq!(decide(0, &[0], Epoch::of(&[0]), Some(Epoch::of(&[0])), &[]), Move::Use(vec![0]));
    }
}
