//! Offbeat on GPUs: streams, kernels and NCCL, loaded when they are there.
//!
//! Always compiled, never linked: where the driver or NCCL is missing or too old, the first call says so in one line and the
//! CPU path goes on. Knows core's values and traits (buffers, events, codecs, layouts, graphs); no mesh, no scheduler, no
//! Python.
//!
//! # Layout, from the outside in
//!
//! - [`queue`]: collectives in order, core's `Queue`; [`watch`]: the thread that sees when they hang
//! - [`compressed`], [`gossip`], [`collective`]: what is enqueued for each; [`plan`]: who carries what (pure)
//! - [`kernels`]: our kernels by name; [`module`]: PTX on a device
//! - [`communicator`]: ranks that NCCL connects; [`nccl`]: its library; [`story`]: what became of a communicator
//! - [`stream`], [`memory`], [`device`]: the driver's things; [`library`]: whether it is there
//!
//! # How it plugs in
//!
//! 1. **Once for a rank**: `library::driver` and `Nccl::find` say whether the path is open; `Device::open` takes torch's current
//!    device, and `Stream::new` one stream for each queue.
//! 2. **Once for a group**: member 0 makes a `UniqueId`, the group's own broadcast (on the CPU mesh) spreads its 128 bytes, and
//!    everyone calls `Communicator::connect`. Background algorithms get a communicator, stream and queue of their own.
//! 3. **Once for a bucket** on `Place::Cuda`: `Compressed::build` or `Gossip::build`, from what the algorithm's pipeline has
//!    on the CPU: codec, spans and numbers of blocks, residuals (device memory of torch's).
//! 4. **In a step**: the hook of the last gradient marks torch's stream; the model's communication thread enqueues the bucket
//!    after that mark and keeps the `Done`; the end of backward lets torch's stream wait for it (`Stream::wait`). The host waits
//!    for nothing.
//! 5. **Failures**: an error, or a deadline that `Watch` sees, aborts the communicator and is told by the next call. Whoever
//!    owns the queue passes it on to the group's poison, so that all ranks tell the same story.
//!
//! In core this wants one trait beside `Queue`: what `Pipeline::run_stage` does with `Step::AllReduce` and `Step::Gossip` for a
//! bucket on a device, chosen once by the bucket's `Place` when the pipeline is built:
//!
//! ```text
//! trait Carrier: Send + Sync {                                  // implemented by `queue::Lane`
//!     fn build(&self, step: &Step, bucket: &Bucket, tensors: &[Tensor]) -> Result<Box<dyn Carried>>;
//! }
//! trait Carried: Send + Sync {
//!     fn enqueue(&self, buffer: Buffer, step: u64, after: Option<Arc<dyn Event>>) -> Result<Arc<dyn Event>>;
//! }
//! ```

pub mod collective;
pub mod communicator;
pub mod compressed;
pub mod device;
pub mod gossip;
pub mod kernels;
pub mod library;
pub mod memory;
pub mod module;
pub mod nccl;
pub mod plan;
pub mod queue;
pub mod story;
pub mod stream;
pub mod watch;
