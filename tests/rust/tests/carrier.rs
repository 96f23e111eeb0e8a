//! A scheduler whose buckets are on a device: what it asks of who carries them, and in which order. The device here is a diary.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "tests fail by panicking")]

use std::any::Any;
use std::ops::Range;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use offbeat_core::algorithm::{
    self, Carried, Carrier, Description, Keeper, Lent, Step, Storage, Stream, Trip, What, When, meet, spans,
};
use offbeat_core::bucket::{Bucket, Sizes, Tensor};
use offbeat_core::buffer::{Buffer, Place};
use offbeat_core::config::Tuning;
use offbeat_core::dtype::{DType, Op};
use offbeat_core::event::Event;
use offbeat_core::scheduler::Scheduler;
use offbeat_core::transport::Interrupt;
use offbeat_core::{Error, Kind, Result};
use offbeat_tests::world::{Rank, Setup};

/// A place in a stream, as a word in the diary.
struct Word(String);

impl Event for Word {
    fn done(&self) -> bool {
        false
    }

    fn wait(&self, _: Option<Duration>, _: Option<&Interrupt<'_>>) -> Result<()> {
        panic!("the host waits for {}", self.0)
    }

    fn as_any(&self) -> Option<&dyn Any> {
        Some(self)
    }
}

fn word(event: &dyn Event) -> &str {
    &event.as_any().unwrap().downcast_ref::<Word>().unwrap().0
}

struct Room(Vec<u8>);

impl Lent for Room {
    fn start(&self) -> *mut u8 {
        self.0.as_ptr().cast_mut()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

/// What happened, and what is to happen.
#[derive(Default)]
struct Diary {
    written: Mutex<Vec<String>>,
    kept: Mutex<Vec<f32>>,
    /// The round in which something is not finite, and the one whose first bucket fails.
    odd: Option<u64>,
    fails: Option<u64>,
}

impl Diary {
    fn write(&self, text: String) {
        self.written.lock().unwrap().push(text);
    }

    fn read(&self) -> Vec<String> {
        std::mem::take(&mut self.written.lock().unwrap())
    }
}

struct Device(Arc<Diary>);

impl Carrier for Device {
    fn allocate(&self, bucket: &Bucket) -> Result<Arc<dyn Lent>> {
        Ok(Arc::new(Room(vec![0; bucket.bytes()])))
    }

    fn build(&self, steps: &[Step], bucket: &Bucket, tensors: &[Tensor], _: &Storage) -> Result<Box<dyn Carried>> {
        match steps.iter().find(|step| matches!(step, Step::Select { .. })) {
            Some(step) => Err(Error::unsupported(format!("no {}", step.name()))),
            None => Ok(Box::new(Steps(Arc::clone(&self.0), spans(bucket, tensors)))),
        }
    }

    fn mark(&self, stream: Stream) -> Result<Arc<dyn Event>> {
        Ok(Arc::new(Word(format!("stream {stream}"))))
    }

    fn wait(&self, stream: Stream, event: &dyn Event) -> Result<()> {
        self.0.write(format!("stream {stream} waits for {}", word(event)));
        Ok(())
    }

    fn non_finite(&self, round: u64) -> u64 {
        u64::from(self.0.odd == Some(round))
    }

    fn set_limit(&self, _: Duration) {}

    fn check(&self) -> Result<()> {
        Ok(())
    }

    fn abandon(&self, error: &Error) {
        self.0.write(format!("abandoned: {:?}", error.kind));
    }
}

struct Steps(Arc<Diary>, Vec<Range<usize>>);

impl Carried for Steps {
    fn enqueue(&self, trip: &Trip<'_>) -> Result<Arc<dyn Event>> {
        if self.0.fails == Some(trip.step) {
            return Err(Error::unsupported("the device is on fire"));
        }
        assert_eq!(trip.buffer.place, Place::Cuda(3));
        let after: Vec<&str> = trip.after.iter().map(|event| word(&**event)).collect();
        let bucket = trip.what.split(' ').nth(1).unwrap();
        self.0.write(format!("bucket {bucket} of step {} after {}", trip.step, after.join(", ")));
        Ok(Arc::new(Word(format!("bucket {bucket}"))))
    }

    fn begin(&self, buffer: Buffer, after: &[Arc<dyn Event>]) -> Result<Arc<dyn Event>> {
        let after: Vec<&str> = after.iter().map(|event| word(&**event)).collect();
        self.0.write(format!("{} elements begin after {}", buffer.count, after.join(", ")));
        Ok(Arc::new(Word("the beginning".to_owned())))
    }

    fn kept(&self) -> Vec<(usize, String, Keeper)> {
        vec![(0, "numbers".to_owned(), Keeper::All)]
    }

    fn place(&self, _: usize, slot: usize) -> Range<usize> {
        self.1[slot].clone()
    }

    fn read(&self, _: usize, range: Range<usize>) -> Result<Vec<f32>> {
        Ok(self.0.kept.lock().unwrap()[range].to_vec())
    }

    fn write(&self, _: usize, first: usize, values: &[f32]) -> Result<()> {
        self.0.kept.lock().unwrap()[first..first + values.len()].copy_from_slice(values);
        Ok(())
    }
}

/// Four tensors of 256 floats, two to a bucket.
fn start(rank: &Rank, diary: &Arc<Diary>, step: Step) -> Result<Scheduler> {
    start_with(rank, diary, Description::of_gradients(vec![step]))
}

fn start_with(rank: &Rank, diary: &Arc<Diary>, description: Description) -> Result<Scheduler> {
    let tensor =
        |at: usize| Tensor { name: format!("t{at}"), count: 256, rows: 1, dtype: DType::F32, place: Place::Cuda(3) };
    let lanes = vec![rank.engine().lane(false, None).unwrap()];
    let carrier: Arc<dyn Carrier> = Arc::new(Device(Arc::clone(diary)));
    let (tensors, sizes) = ((0..4).map(tensor).collect(), Sizes { first: 2048, rest: 2048 });
    *diary.kept.lock().unwrap() = vec![0.0; 2048];
    rank.engine().scheduler_on(Some(carrier), lanes, 0, tensors, description, sizes)
}

fn mean() -> Step {
    Step::AllReduce { op: Op::Mean, codec: None, feedback: false, seed: 0, hierarchical: true }
}

fn two() -> Setup {
    Setup::new(&["a", "b"], Tuning::default())
}

#[test]
fn a_bucket_waits_for_all_its_writers_and_the_caller_for_the_last_bucket() {
    two().spawn(|rank| {
        let diary = Arc::new(Diary::default());
        let scheduler = start(rank, &diary, mean()).unwrap();
        for round in 0..3 {
            // buckets hold tensors 3 and 2, 1 and 0; one of them is written by two streams
            for (tensor, stream) in [(3, 7), (2, 8), (1, 7), (0, 7)] {
                scheduler.mark_ready_on(tensor, stream).unwrap();
            }
            assert_eq!(scheduler.finish_on(9, None).unwrap(), []);
            let wanted = [
                format!("bucket 0 of step {round} after stream 7, stream 8"),
                format!("bucket 1 of step {round} after stream 7"),
                "stream 9 waits for bucket 1".to_owned(),
            ];
            assert_eq!(diary.read(), wanted);
        }
    });
}

#[test]
fn who_lacks_a_tensor_learns_at_once_whether_another_rank_has_it() {
    two().spawn(|rank| {
        let scheduler = start(rank, &Arc::default(), mean()).unwrap();
        for _ in 0..3 {
            let mine = rank.engine().rank();
            for tensor in 0..4 {
                // tensor 1 is rank 0's alone, tensor 2 nobody's
                match (tensor, mine) {
                    (1, 1) | (2, _) => scheduler.mark_absent_on(tensor, 7).unwrap(),
                    _ => scheduler.mark_ready_on(tensor, 7).unwrap(),
                }
            }
            let gained = scheduler.finish_on(7, None).unwrap();
            assert_eq!(gained, if mine == 1 { vec![1] } else { vec![] });
        }
    });
}

#[test]
fn what_was_not_finite_is_heard_by_all_in_the_same_later_round_if_a_step_was_made_of_it() {
    for stepped in [true, false] {
        two().spawn(move |rank| {
            let mine = rank.engine().rank();
            let diary = Arc::new(Diary { odd: (mine == 1).then_some(1), ..Diary::default() });
            let scheduler = start(rank, &diary, mean()).unwrap();
            let mut told = Vec::new();
            for round in 0..6 {
                (0..4).for_each(|tensor| scheduler.mark_ready_on(tensor, 7).unwrap());
                scheduler.finish_on(7, None).unwrap();
                // a step that is left out asks nothing
                told.push((round != 1 || stepped) && scheduler.was_non_finite());
            }
            // made in round 1, seen on rank 1 and told in round 2, heard in round 3
            assert_eq!(told, [false, false, false, stepped, false, false]);
        });
    }
}

#[test]
fn weights_begin_after_who_wrote_them_and_what_was_not_finite_is_known_at_the_next_exchange() {
    two().spawn(|rank| {
        let mine = rank.engine().rank();
        let diary = Arc::new(Diary { odd: (mine == 1).then_some(1), ..Diary::default() });
        let steps = vec![Step::Difference, mean(), Step::Outer { lr: 0.7, momentum: 0.9 }];
        let weights = Description { what: What::Weights, when: When::AfterStep, ..Description::of_gradients(steps) };
        let scheduler = start_with(rank, &diary, weights).unwrap();
        scheduler.begin(7).unwrap();
        // the steps of the warm-up, of which there are none, and those after it
        let one = ["512 elements begin after stream 7"; 2].map(str::to_owned);
        let waits = ["stream 7 waits for the beginning".to_owned()];
        assert_eq!(diary.read(), [&one[..], &waits, &one, &waits].concat());
        let mut told = Vec::new();
        for _ in 0..5 {
            (0..4).for_each(|tensor| scheduler.mark_ready_on(tensor, 7).unwrap());
            scheduler.finish_on(7, None).unwrap();
            told.push(scheduler.was_non_finite());
        }
        // made in round 1, and known in round 2 to the rank that met it
        assert_eq!(told, [false, false, mine == 1, false, false]);
    });
}

#[test]
fn a_failure_of_the_device_is_told_on_all_ranks_and_what_is_under_way_given_up() {
    two().spawn(|rank| {
        let mine = rank.engine().rank();
        let diary = Arc::new(Diary { fails: (mine == 1).then_some(1), ..Diary::default() });
        let scheduler = start(rank, &diary, mean()).unwrap();
        let round = || {
            (0..4).try_for_each(|tensor| scheduler.mark_ready_on(tensor, 7))?;
            scheduler.finish_on(7, None)
        };
        let error = (0..20).find_map(|_| round().err()).unwrap();
        assert!(error.message.contains("on fire") && error.message.contains("step 1"), "{}", error.message);
        assert!(diary.read().iter().any(|line| line.starts_with("abandoned")), "nothing was given up");
    });
}

#[test]
fn what_is_kept_moves_with_the_tensors_and_what_cannot_be_carried_is_refused() {
    two().spawn(|rank| {
        let diary = Arc::new(Diary::default());
        let scheduler = start(rank, &diary, mean()).unwrap();
        let values: Vec<f32> = (0..256u16).map(f32::from).collect();
        scheduler.restore(2, "0.numbers", &values).unwrap();
        assert_eq!(scheduler.restore(2, "0.numbers", &values[..5]).unwrap_err().kind, Kind::InvalidArgument);
        let saved = scheduler.saved(2).unwrap();
        assert_eq!((saved[0].name.as_str(), &saved[0].values), ("0.numbers", &values));
        let select = Step::Select { ratio: 0.1, hierarchical: true };
        let error = start(rank, &Arc::default(), select).err().unwrap();
        assert_eq!((error.kind, error.message.as_str()), (Kind::Unsupported, "no select"));
    });
}

#[test]
fn all_learn_if_one_cannot_connect() {
    two().spawn(|rank| {
        let (mine, lane) = (rank.engine().rank(), rank.engine().lane(false, None).unwrap());
        let card = if mine == 0 { vec![1, 2, 3] } else { Vec::new() };
        assert_eq!(algorithm::meet(&lane, Ok(card.clone()), None).unwrap(), [1, 2, 3]);
        let error = meet(&lane, if mine == 0 { Ok(card) } else { Err(Error::unsupported("no driver")) }, None);
        let wanted = ["rank 1 cannot take part: no driver", "no driver"][mine as usize];
        assert_eq!(error.unwrap_err().message, wanted);
    });
}
