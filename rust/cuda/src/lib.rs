//! Offbeat on GPUs: streams, kernels and NCCL, loaded when they are there.
//!
//! Always compiled, never linked: where the driver or NCCL is missing or too old, the first call says so in one line and the
//! CPU path goes on. Knows core's values and traits (buffers, events, codecs, layouts, graphs); no mesh, no scheduler, no
//! Python.
//!
//! # Layout, from the outside in
//!
//! - [`site`]: what a rank has of CUDA; [`carrier`]: a model's steps, core's `Carrier`; [`ferry`]: its snapshots in the
//!   background, core's `Ferry`
//! - [`queue`]: collectives in order, core's `Queue`; [`watch`]: the thread that sees when they hang
//! - [`compressed`], [`select`], [`low_rank`], [`gossip`], [`replicas`], [`collective`]: what is enqueued for each; [`plan`]: who
//!   carries what (pure)
//! - [`momentum`], [`outer`]: steps that exchange nothing
//! - [`kernels`]: our kernels by name; [`module`]: PTX on a device
//! - [`communicator`]: ranks that NCCL connects; [`nccl`]: its library; [`story`]: what became of a communicator
//! - [`stream`], [`memory`], [`pinned`], [`device`]: the driver's things; [`library`]: whether it is there
//!
//! # How it plugs in
//!
//! 1. **Once for a rank**: `library::driver` and `Nccl::find` say whether the path is open; [`Site`](site::Site) opens the
//!    device of the parameters.
//! 2. **Once for a model**: member 0 makes an id, the lane's own group (on the CPU mesh) spreads it, and everyone calls
//!    `Site::connect`. That gives a [`Carrier`](carrier::Carrier), with a communicator and a stream of its own.
//! 3. **Once for a bucket**: core's pipeline asks the carrier for memory, which is torch's, and for its steps.
//! 4. **In a step**: the hook of the last gradient marks torch's stream; the model's communication thread enqueues the bucket
//!    after that mark; the end of backward lets torch's stream wait for the last one. The host waits for nothing.
//! 5. **In the background** there is no communicator: a [`Ferry`](ferry::Ferry) with a stream of its own takes snapshots to
//!    pinned memory and deltas back, and core's background thread exchanges them on the CPU mesh.
//! 6. **Failures**: an error, a deadline that `Watch` sees, or a rank that the mesh knows to be gone aborts the communicator.
//!    The next call tells the story, which core passes on to the group, so that all ranks tell the same.

pub mod carrier;
pub mod collective;
pub mod communicator;
pub mod compressed;
pub mod device;
pub mod ferry;
pub mod gossip;
pub mod kernels;
pub mod library;
pub mod low_rank;
pub mod memory;
pub mod module;
pub mod momentum;
pub mod nccl;
mod odd;
pub mod outer;
pub mod pinned;
pub mod plan;
pub mod queue;
pub mod replicas;
pub mod select;
pub mod site;
pub mod story;
pub mod stream;
pub mod watch;
