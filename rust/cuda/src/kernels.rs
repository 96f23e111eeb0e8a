//! The kernels of `kernels/`, by their names and arguments. `kernels/README.md` declares them; this is their only caller.
//!
//! A module is handed to the driver when a kernel of it is first asked for, since the driver compiles it then: a job that
//! uses one codec does not wait for all others.

pub mod low_rank;
mod steps;
pub mod top_k;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use offbeat_core::codec::Codec;
use offbeat_core::dtype::DType;
use offbeat_core::{Error, Result};

use crate::device::Device;
use crate::module::{Arguments, Function, Grid, Module};
use crate::stream::{Address, Stream};

pub use steps::{Copies, News, Pace, Way};

/// A name and PTX.
pub type Image = (&'static str, &'static str);

/// What is embedded: an image for each file of `kernels/`.
pub static IMAGES: &[Image] = include!(concat!(env!("OUT_DIR"), "/images.rs"));

/// Threads of a block, of which each warp of 32 takes a tile.
const THREADS: u32 = 128;

/// The kernels on a device.
pub struct Kernels {
    device: Arc<Device>,
    images: &'static [Image],
    loaded: Mutex<Loaded>,
}

#[derive(Default)]
struct Loaded {
    modules: HashMap<&'static str, Arc<Module>>,
    functions: HashMap<String, Arc<Function>>,
}

/// Tiles in the device's memory.
#[derive(Clone, Copy, Debug)]
pub struct Tiles {
    /// The first.
    pub address: Address,
    /// How many.
    pub count: u32,
}

/// What encoding needs besides values and tiles. An address of 0 stands for none.
#[derive(Clone, Copy, Debug, Default)]
pub struct Salted {
    /// What was lost before, and is lost now: f32, as long as the tensor.
    pub residual: Address,
    /// A number for each block of the tensor.
    pub numbers: Address,
    /// Where random numbers come from.
    pub stream: u64,
    /// Counts blocks that are not finite.
    pub odd: Address,
}

/// Some arrays that are summed: `peers` of them, `stride` apart.
#[derive(Clone, Copy, Debug)]
pub struct Stacked {
    /// The first.
    pub first: Address,
    /// From one to the next: bytes of records, elements of values.
    pub stride: u64,
    /// How many.
    pub peers: u32,
}

impl Kernels {
    /// Those of some images, [`IMAGES`] or others, for a device. Nothing is compiled yet.
    pub fn new(device: &Arc<Device>, images: &'static [Image]) -> Arc<Self> {
        Arc::new(Kernels { device: Arc::clone(device), images, loaded: Mutex::default() })
    }

    fn function(&self, file: &'static str, name: &str) -> Result<Arc<Function>> {
        let mut loaded = self.loaded.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(function) = loaded.functions.get(name) {
            return Ok(Arc::clone(function));
        }
        let module = match loaded.modules.get(file) {
            Some(module) => Arc::clone(module),
            None => {
                let image = self.images.iter().find(|(image, _)| *image == file);
                let (_, ptx) = image.ok_or_else(|| {
                    Error::unsupported(format!(
                        "this build has no kernels of {file}; try: a wheel of a release, or no codec"
                    ))
                })?;
                let module = Module::load(&self.device, ptx)?;
                loaded.modules.insert(file, Arc::clone(&module));
                module
            }
        };
        let function = Arc::new(module.function(name)?);
        loaded.functions.insert(name.to_owned(), Arc::clone(&function));
        Ok(function)
    }

    /// Enqueues a launch with a warp for each tile.
    unsafe fn launch(&self, stream: &Stream, function: &Function, tiles: Tiles, arguments: Arguments) -> Result<()> {
        if tiles.count == 0 {
            return Ok(());
        }
        let grid = Grid { blocks: tiles.count.div_ceil(THREADS / 32), threads: THREADS };
        let mut arguments = arguments;
        // SAFETY: the callers' promise.
        unsafe { function.launch(stream, grid, &mut arguments) }
    }

    /// Values as records.
    ///
    /// # Safety
    /// Values, records and what `salt` names are as long as the tiles say, and stay until the kernel has run.
    pub unsafe fn encode(
        &self,
        stream: &Stream,
        codec: &dyn Codec,
        (values, dtype): (Address, DType),
        tiles: Tiles,
        records: Address,
        salt: Salted,
    ) -> Result<()> {
        let name = format!("offbeat_{}_encode_{}", codec.name(), suffix(dtype)?);
        let function = self.function(file(codec), &name)?;
        let arguments = Arguments::new().wide(values).wide(salt.residual).wide(tiles.address).short(tiles.count);
        let arguments = arguments.wide(records).wide(salt.numbers).wide(salt.stream).wide(salt.odd);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch(stream, &function, tiles, arguments) }
    }

    /// Records as values.
    ///
    /// # Safety
    /// As for [`Kernels::encode`].
    pub unsafe fn decode(
        &self,
        stream: &Stream,
        codec: &dyn Codec,
        records: Address,
        tiles: Tiles,
        (values, dtype): (Address, DType),
    ) -> Result<()> {
        let name = format!("offbeat_{}_decode_{}", codec.name(), suffix(dtype)?);
        let function = self.function(file(codec), &name)?;
        let arguments = Arguments::new().wide(records).wide(tiles.address).short(tiles.count).wide(values);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch(stream, &function, tiles, arguments) }
    }

    /// The mean of everybody's records, encoded again.
    ///
    /// # Safety
    /// As for [`Kernels::encode`].
    pub unsafe fn average(
        &self,
        stream: &Stream,
        codec: &dyn Codec,
        (shares, divisor): (Stacked, f32),
        tiles: Tiles,
        records: Address,
        salt: Salted,
    ) -> Result<()> {
        let function = self.function(file(codec), &format!("offbeat_{}_average", codec.name()))?;
        let arguments = Arguments::new().wide(shares.first).wide(shares.stride).short(shares.peers).float(divisor);
        let arguments = arguments.wide(salt.residual).wide(tiles.address).short(tiles.count).wide(records);
        let arguments = arguments.wide(salt.numbers).wide(salt.stream).wide(salt.odd);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch(stream, &function, tiles, arguments) }
    }

    /// Sums arrays in their order, in f32, each multiplied by its factor (0: none are), and divides the sum.
    ///
    /// # Safety
    /// As for [`Kernels::encode`]; `factors` is 0 or as many f32 as there are arrays.
    pub unsafe fn mix(
        &self,
        stream: &Stream,
        (sources, from): (Stacked, DType),
        (factors, divisor): (Address, f32),
        tiles: Tiles,
        (values, to): (Address, DType),
    ) -> Result<()> {
        let name = format!("offbeat_mix_{}_{}", suffix(from)?, suffix(to)?);
        let function = self.function("elementwise", &name)?;
        let arguments = Arguments::new().wide(sources.first).wide(sources.stride).short(sources.peers);
        let arguments = arguments.wide(factors).float(divisor).wide(tiles.address).short(tiles.count).wide(values);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch(stream, &function, tiles, arguments) }
    }
}

/// The file that has a codec's kernels.
fn file(codec: &dyn Codec) -> &'static str {
    match codec.name() {
        "float16" | "bfloat16" => "cast",
        "minmax8" => "min_max8",
        "onebit" => "one_bit",
        other => other,
    }
}

fn suffix(dtype: DType) -> Result<&'static str> {
    match dtype {
        DType::F32 => Ok("f32"),
        DType::F16 => Ok("f16"),
        DType::BF16 => Ok("bf16"),
        other => Err(Error::unsupported(format!(
            "kernels take float32, float16 and bfloat16, not {other}; try: one of these, or an all_reduce without a codec"
        ))),
    }
}
