//! A communicator of NCCL's: the ranks of a group, each with its device.
//!
//! It never blocks: NCCL is asked to work in the background (`Config::patient`), and whoever must wait until a call has been
//! taken looks at its state, with a deadline. What fails is aborted at once, which ends its work on all streams; the story is
//! kept, and every later call and every wait for earlier work tells it ([`Story`]).

use std::ffi::c_int;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use offbeat_core::dtype::{DType, Op};
use offbeat_core::{Error, Kind, Result};

use crate::device::Device;
use crate::nccl::{Code, Config, Functions, IN_PROGRESS, Nccl, Raw, SUCCESS, UniqueId, op_code, type_code};
use crate::story::Story;
use crate::stream::{Address, Stream};

/// Between two looks at the state of a call.
const PAUSES: (Duration, Duration) = (Duration::from_micros(20), Duration::from_millis(1));
/// How long a communicator that is dropped waits for its peers.
const PARTING: Duration = Duration::from_secs(5);

/// Who communicates.
#[derive(Clone, Debug)]
pub struct Members {
    /// The global ranks, in the order of the group.
    pub ranks: Vec<u32>,
    /// My place among them.
    pub me: usize,
}

/// The ranks of a group, connected by NCCL.
pub struct Communicator {
    nccl: Arc<Nccl>,
    device: Arc<Device>,
    members: Members,
    /// How long NCCL may take to accept a call.
    limit: Duration,
    /// None when it is closed or aborted. Held during every call of NCCL's on it: it is not to be freed meanwhile.
    raw: Mutex<Handle>,
    story: Arc<Story>,
    /// Says what else would end it.
    alarm: Alarm,
}

/// An error, where something has happened.
pub type Alarm = Box<dyn Fn() -> Result<()> + Send + Sync>;

struct Handle(Option<Raw>);

// SAFETY: a handle that NCCL lets any thread use, one at a time; the mutex around it sees to that.
unsafe impl Send for Handle {}

impl Communicator {
    /// Connects the members: all of them call this with the same id, and it returns when all are there.
    pub fn connect(
        nccl: &Arc<Nccl>,
        device: &Arc<Device>,
        members: Members,
        id: UniqueId,
        limit: Duration,
    ) -> Result<Arc<Self>> {
        Self::connect_heeding(nccl, device, members, id, limit, Box::new(|| Ok(())))
    }

    /// The same, and it is ended by what an alarm says, now or later: that a member is gone, which others may know long
    /// before NCCL does.
    pub fn connect_heeding(
        nccl: &Arc<Nccl>,
        device: &Arc<Device>,
        members: Members,
        id: UniqueId,
        limit: Duration,
        alarm: Alarm,
    ) -> Result<Arc<Self>> {
        let (size, me) = (members.ranks.len() as c_int, members.me as c_int);
        let this = Communicator {
            nccl: Arc::clone(nccl),
            device: Arc::clone(device),
            members,
            limit,
            raw: Mutex::new(Handle(None)),
            story: Arc::default(),
            alarm,
        };
        this.device.within(|| {
            let (mut raw, mut config) = (std::ptr::null_mut(), Config::patient());
            let mut handle = this.handle();
            // SAFETY: the context is current; the places are there until NCCL has read them.
            let code = unsafe { (this.nccl.call.init)(&raw mut raw, size, id, me, &raw mut config) };
            if !raw.is_null() {
                handle.0 = Some(raw);
            }
            let what = format!("connecting ranks {:?}", this.members.ranks);
            this.settle(&mut handle, code, &what)
        })?;
        Ok(Arc::new(this))
    }

    /// Who communicates.
    pub fn members(&self) -> &Members {
        &self.members
    }

    pub(crate) fn story(&self) -> &Arc<Story> {
        &self.story
    }

    fn handle(&self) -> MutexGuard<'_, Handle> {
        self.raw.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enqueues what `act` asks for as one group: all of it goes on at once, in any order.
    pub fn group(&self, stream: &Stream, what: &str, act: impl FnOnce(&mut Calls<'_>) -> Result<()>) -> Result<()> {
        self.device.within(|| {
            let mut handle = self.handle();
            let raw = match (handle.0, self.story.told()) {
                (Some(raw), None) => raw,
                (_, Some(error)) => return Err(error),
                (None, None) => return Err(self.device.fails(Kind::NotInitialized, "the communicator is closed")),
            };
            let mut calls = Calls { call: &self.nccl.call, raw, stream, code: SUCCESS };
            // SAFETY: no argument; the group is ended below on every way.
            calls.note(unsafe { (self.nccl.call.group_start)() });
            let asked = act(&mut calls);
            let code = calls.code;
            // SAFETY: the group was begun on this thread.
            let ended = unsafe { (self.nccl.call.group_end)() };
            if let Err(error) = asked {
                // others wait for what was not asked for: nothing can go on
                return Err(self.give_up(&mut handle, error));
            }
            self.settle(&mut handle, if code == SUCCESS || code == IN_PROGRESS { ended } else { code }, what)
        })
    }

    /// Waits until NCCL has taken a call, for it may do so in the background.
    fn settle(&self, handle: &mut Handle, mut code: Code, what: &str) -> Result<()> {
        let began = Instant::now();
        let mut pause = PAUSES.0;
        while code == IN_PROGRESS {
            if began.elapsed() >= self.limit {
                let text = format!(
                    "{what}: not all of ranks {:?} came within {:.1} s; try: look which rank is late, NCCL_DEBUG=WARN, and \
                     NCCL_SOCKET_IFNAME",
                    self.members.ranks,
                    self.limit.as_secs_f64()
                );
                return Err(self.give_up(handle, self.device.fails(Kind::Timeout, &text)));
            }
            if let Err(error) = (self.alarm)() {
                return Err(self.give_up(handle, error));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(PAUSES.1);
            code = self.state(handle);
        }
        match code {
            SUCCESS => Ok(()),
            code => Err(self.fail(handle, what, code)),
        }
    }

    fn state(&self, handle: &Handle) -> Code {
        let mut state = SUCCESS;
        let Some(raw) = handle.0 else { return SUCCESS };
        // SAFETY: the communicator is alive while its handle is held.
        match unsafe { (self.nccl.call.async_error)(raw, &raw mut state) } {
            SUCCESS => state,
            code => code,
        }
    }

    fn fail(&self, handle: &mut Handle, what: &str, code: Code) -> Error {
        let kind = match code {
            // 4, 5: an argument or a use that is not valid, which is how ranks find out that they call different things
            4 | 5 => Kind::Mismatch,
            6 => Kind::PeerLost,
            _ => Kind::Unsupported,
        };
        let text = self.nccl.said(what, code, handle.0.unwrap_or(std::ptr::null_mut()));
        self.give_up(handle, self.device.fails(kind, &text))
    }

    fn give_up(&self, handle: &mut Handle, error: Error) -> Error {
        let error = self.story.tell(error);
        if let Some(raw) = handle.0.take() {
            // SAFETY: alive until now, and nobody finds it any more. It ends the work on the streams.
            let code = unsafe { (self.nccl.call.abort)(raw) };
            if !matches!(code, SUCCESS | IN_PROGRESS) {
                log::warn!("{}", self.nccl.said("ncclCommAbort", code, std::ptr::null_mut()));
            }
        }
        error
    }

    /// Whether it is as it should be. An error that NCCL found in the background ends it.
    pub fn check(&self) -> Result<()> {
        self.device.within(|| {
            let mut handle = self.handle();
            match (self.story.told(), self.state(&handle)) {
                (Some(error), _) => Err(error),
                (None, SUCCESS | IN_PROGRESS) => match (self.alarm)() {
                    Ok(()) => Ok(()),
                    Err(error) => Err(self.give_up(&mut handle, error)),
                },
                (None, code) => Err(self.fail(&mut handle, "work under way", code)),
            }
        })
    }

    /// Ends all its work, on all streams, with an error for whoever waits for it.
    pub fn abort(&self, error: Error) -> Error {
        let ended = self.device.within(|| Ok(self.give_up(&mut self.handle(), error)));
        ended.unwrap_or_else(|error| error)
    }

    /// Leaves in good order: work that is enqueued goes to its end first. At the deadline it is aborted.
    pub fn close(&self) -> Result<()> {
        self.device.within(|| {
            let mut handle = self.handle();
            let Some(raw) = handle.0 else { return Ok(()) };
            // SAFETY: alive, and its handle is held.
            let code = unsafe { (self.nccl.call.finalize)(raw) };
            self.settle(&mut handle, code, "closing the communicator")?;
            handle.0 = None;
            // SAFETY: finalized, and nobody finds it any more.
            match unsafe { (self.nccl.call.destroy)(raw) } {
                SUCCESS | IN_PROGRESS => Ok(()),
                code => Err(self.fail(&mut handle, "closing the communicator", code)),
            }
        })
    }
}

impl Drop for Communicator {
    fn drop(&mut self) {
        self.limit = self.limit.min(PARTING);
        if let Err(error) = self.close() {
            log::warn!("{}", error.message);
        }
    }
}

/// The calls of a group. The first error counts, and is told at the group's end.
pub struct Calls<'a> {
    call: &'a Functions,
    raw: Raw,
    stream: &'a Stream,
    code: Code,
}

impl Calls<'_> {
    fn note(&mut self, code: Code) {
        if matches!(self.code, SUCCESS | IN_PROGRESS) && code != SUCCESS {
            self.code = code;
        }
    }

    /// Sends bytes to a member.
    ///
    /// # Safety
    /// The memory is the device's and stays until the stream has come past this.
    pub unsafe fn send(&mut self, from: Address, bytes: usize, to: usize) {
        let stream = self.stream.raw().cast();
        // SAFETY: the caller's promise; NCCL checks the peer.
        let code = unsafe { (self.call.send)(from as _, bytes, BYTES, to as c_int, self.raw, stream) };
        self.note(code);
    }

    /// Receives bytes from a member, which sends as many.
    ///
    /// # Safety
    /// As for [`Calls::send`].
    pub unsafe fn recv(&mut self, to: Address, bytes: usize, from: usize) {
        let stream = self.stream.raw().cast();
        // SAFETY: the caller's promise; NCCL checks the peer.
        let code = unsafe { (self.call.recv)(to as _, bytes, BYTES, from as c_int, self.raw, stream) };
        self.note(code);
    }

    /// Reduces over all members, in place.
    ///
    /// # Safety
    /// As for [`Calls::send`].
    pub unsafe fn all_reduce(&mut self, at: Address, count: usize, dtype: DType, op: Op) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.all_reduce_to(at, at, count, dtype, op) }
    }

    /// Reduces over all members, from one place to another.
    ///
    /// # Safety
    /// As for [`Calls::send`].
    pub unsafe fn all_reduce_to(
        &mut self,
        from: Address,
        to: Address,
        count: usize,
        dtype: DType,
        op: Op,
    ) -> Result<()> {
        let (dtype, op) = (type_code(dtype)?, op_code(op)?);
        let stream = self.stream.raw().cast();
        // SAFETY: the caller's promise.
        let code = unsafe { (self.call.all_reduce)(from as _, to as _, count, dtype, op, self.raw, stream) };
        self.note(code);
        Ok(())
    }

    /// A member's bytes to all, in place.
    ///
    /// # Safety
    /// As for [`Calls::send`].
    pub unsafe fn broadcast(&mut self, at: Address, bytes: usize, root: usize) {
        let stream = self.stream.raw().cast();
        // SAFETY: the caller's promise; NCCL checks the root.
        let code = unsafe { (self.call.broadcast)(at as _, at as _, bytes, BYTES, root as c_int, self.raw, stream) };
        self.note(code);
    }
}

/// NCCL's number of the type u8.
const BYTES: c_int = 1;
