//! Steps on buckets that are not in this host's memory: who carries them is chosen once, when a pipeline is built.
//!
//! A device has streams, on which work is enqueued and not called. A bucket begins when the streams that wrote its gradients
//! have come so far (an [`Event`] for each), and ends with an event that the stream which reads them waits for. The host waits
//! for neither.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use offbeat_transport::Interrupt;

use super::Step;
use super::memory::Keeper;
use crate::bucket::{Bucket, Tensor};
use crate::buffer::{Buffer, Owned, Shaped};
use crate::call::Call;
use crate::coding::Tally;
use crate::dtype::DType;
use crate::event::Event;
use crate::group::{Group, Terms, Work};
use crate::{Error, Result};

pub use crate::buffer::{Lent, Storage};
pub use crate::event::Stream;

/// One run of carried steps.
pub struct Trip<'a> {
    /// The bucket.
    pub buffer: Buffer,
    /// The round.
    pub step: u64,
    /// What it is called in errors.
    pub what: &'a str,
    /// What must have happened before.
    pub after: &'a [Arc<dyn Event>],
    /// What is counted.
    pub tally: &'a Tally,
    /// Is told from when to when a function of the user's ran.
    pub ran: &'a dyn Fn(u64, u64),
}

/// Steps of an algorithm, ready to run on a bucket.
pub trait Carried: Send + Sync {
    /// Enqueues all of them. The event is their end.
    fn enqueue(&self, trip: &Trip<'_>) -> Result<Arc<dyn Event>>;
    /// Enqueues that anchors and copies begin with the weights in a bucket, after some events. The event is its end.
    fn begin(&self, buffer: Buffer, after: &[Arc<dyn Event>]) -> Result<Arc<dyn Event>>;
    /// (step, name, whose it is) of what is kept.
    fn kept(&self) -> Vec<(usize, String, Keeper)>;
    /// Where the `at`-th of these has its numbers of a slot of the bucket.
    fn place(&self, at: usize, slot: usize) -> Range<usize>;
    /// Some numbers of the `at`-th of these; waits for what is under way.
    fn read(&self, at: usize, range: Range<usize>) -> Result<Vec<f32>>;
    /// Puts some there.
    fn write(&self, at: usize, first: usize, values: &[f32]) -> Result<()>;
}

/// Who carries the steps of a model's buckets, on one device.
pub trait Carrier: Send + Sync {
    /// Memory for a bucket, all zero.
    fn allocate(&self, bucket: &Bucket) -> Result<Arc<dyn Lent>>;
    /// Steps for a bucket that lies in `memory`. What cannot be carried is refused here.
    fn build(&self, steps: &[Step], bucket: &Bucket, tensors: &[Tensor], memory: &Storage) -> Result<Box<dyn Carried>>;
    /// The end of what is enqueued on a stream of the caller's so far.
    fn mark(&self, stream: Stream) -> Result<Arc<dyn Event>>;
    /// Lets what comes on a stream of the caller's wait for an event.
    fn wait(&self, stream: Stream, event: &dyn Event) -> Result<()>;
    /// Blocks that were not finite in a round, as far as the host knows by now; it does not wait to know more. Rounds of long
    /// ago have none.
    fn non_finite(&self, round: u64) -> u64;
    /// From now on work may take this long.
    fn set_limit(&self, limit: Duration);
    /// Whether all is well: work that was enqueued tells of its failure to who asks.
    fn check(&self) -> Result<()>;
    /// Ends what is under way, on all streams.
    fn abandon(&self, error: &Error);
}

/// Before the members of a group connect by other means: everybody hands in what they connect by, of which the first member's
/// counts, or why it cannot. If one cannot, all get the same error.
pub fn meet(group: &Group, mine: Result<Vec<u8>>, interrupt: Option<&Interrupt<'_>>) -> Result<Vec<u8>> {
    let (able, bytes) = match &mine {
        Ok(bytes) => (1, bytes.as_slice()),
        Err(error) => (0, error.message.as_bytes()),
    };
    let mut card: Vec<u8> = [&[able], bytes].concat();
    let buffer = Buffer::host(card.as_mut_ptr(), card.len(), DType::U8);
    let call = Call::AllGather { tensor: Shaped { buffer, shape: vec![card.len() as u64] } };
    let cards = group.run_on(Work { call, keep: None }, &Terms { interrupt, ..Terms::default() })?;
    let unable = cards.iter().position(|card| card.bytes().first() != Some(&1));
    match (unable, mine) {
        (None, _) => Ok(cards.first().map_or(Vec::new(), |card| card.bytes()[1..].to_vec())),
        // in its own words, and with its own kind
        (Some(_), Err(error)) => Err(error),
        (Some(member), Ok(_)) => {
            let text = cards.get(member).map(Owned::bytes).and_then(|card| card.get(1..)).unwrap_or_default();
            let rank = group.ranks().get(member).copied().unwrap_or_default();
            Err(Error::unsupported(format!("rank {rank} cannot take part: {}", String::from_utf8_lossy(text))))
        }
    }
}
