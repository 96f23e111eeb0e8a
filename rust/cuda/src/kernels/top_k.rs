//! The kernels of `kernels/top_k.cu`: their tables, names and arguments, as `kernels/README.md` declares them.

use std::ops::Range;

use offbeat_core::Result;
use offbeat_core::codec::TopK;
use offbeat_core::dtype::DType;

use super::{Kernels, Tiles, suffix};
use crate::module::{Arguments, Grid};
use crate::plan::Tile;
use crate::stream::{Address, Stream};

/// The file that has them.
const FILE: &str = "top_k";
/// Threads of a block, which has a tile, or a tensor.
const THREADS: u32 = 256;
/// Elements of a tile. Blocks of lists begin with one.
const TILE: usize = 16_384;
const _: () = assert!(TopK::BLOCK.is_multiple_of(TILE));
/// Bytes that a tensor has for counts.
pub(crate) const COUNTS: usize = 2048 * 4;
/// Bytes of scratch memory for a tensor, for a tile, and for an element.
pub(crate) const SCRATCH: (usize, usize, usize) = (8, 16, 8);

/// A tensor, as kernels declare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Span {
    /// Its first element.
    pub value: u64,
    /// The first byte of its list.
    pub list: u64,
    /// Its elements.
    pub count: u32,
    /// How many are sent.
    pub chosen: u32,
    /// Its tiles.
    pub first_tile: u32,
    /// How many they are.
    pub tile_count: u32,
}

/// What kernels work on, and where lists lie.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Lists {
    /// The tensors.
    pub spans: Vec<Span>,
    /// Tiles of their elements.
    pub tiles: Vec<Tile>,
    /// Tiles of the elements that their lists are for: blocks, or any of a tensor that is sent whole.
    pub targets: Vec<Tile>,
    /// Bytes of all lists.
    pub bytes: usize,
}

impl Lists {
    /// For some tensors, of which each sends as many as stands beside it.
    pub fn new(tensors: &[(Range<usize>, TopK)]) -> Self {
        let mut lists = Lists::default();
        for (span, (range, top)) in (0..).zip(tensors) {
            let tiles = cut(range.clone(), TILE, span);
            lists.spans.push(Span {
                value: range.start as u64,
                list: lists.bytes as u64,
                // indices have 32 bits, or `TopK` would not be
                count: range.len() as u32,
                chosen: top.chosen() as u32,
                first_tile: lists.tiles.len() as u32,
                tile_count: tiles.len() as u32,
            });
            lists.bytes += top.encoded_len();
            lists.tiles.extend(tiles);
            lists.targets.extend(cut(range.clone(), if top.is_whole() { TILE } else { TopK::BLOCK }, span));
        }
        lists
    }
}

/// Tiles of a range, of so many elements.
fn cut(range: Range<usize>, length: usize, span: u32) -> Vec<Tile> {
    let tile =
        |first: usize| Tile { value: first as u64, record: 0, count: length.min(range.end - first) as u32, span };
    range.clone().step_by(length).map(tile).collect()
}

/// [`Lists`] on the device.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// The tensors.
    pub spans: Tiles,
    /// Tiles of their elements.
    pub tiles: Tiles,
    /// Tiles of the elements that their lists are for.
    pub targets: Tiles,
    /// Counts: zero at the beginning, and again when a selection is over.
    pub counts: Address,
}

/// Memory for one selection, with anything in it: [`SCRATCH`] says how much.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Of tensors.
    pub searches: Address,
    /// Of tiles.
    pub tallies: Address,
    /// Of elements.
    pub candidates: Address,
}

/// What becomes of lists.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scatter {
    /// They are written over values, which are zero.
    Decode,
    /// They are added to values.
    Add,
}

impl Kernels {
    unsafe fn launch_top_k(&self, stream: &Stream, name: &str, blocks: u32, mut arguments: Arguments) -> Result<()> {
        let function = self.function(FILE, name)?;
        // SAFETY: the callers' promise.
        unsafe { function.launch(stream, Grid { blocks, threads: THREADS }, &mut arguments) }
    }

    /// Writes the lists of the largest of `values + residual`, and leaves all others in `residual`. `odd` counts what is not
    /// finite, unless it is 0.
    ///
    /// # Safety
    /// All are as long as the tables say, and stay until the kernels have run.
    pub unsafe fn select(
        &self,
        stream: &Stream,
        (values, dtype): (Address, DType),
        tables: &Tables,
        room: Room,
        (lists, residual, odd): (Address, Address, Address),
    ) -> Result<()> {
        if tables.tiles.count == 0 {
            return Ok(());
        }
        let (Tables { spans, tiles, counts, .. }, of) = (*tables, suffix(dtype)?);
        let Room { searches, tallies, candidates } = room;
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe {
            let arguments = Arguments::new().wide(values).wide(residual).wide(tiles.address).wide(counts);
            self.launch_top_k(stream, &format!("offbeat_top_k_first_{of}"), tiles.count, arguments)?;
            let narrow = |digit: u32| {
                let arguments = Arguments::new().wide(spans.address).wide(counts).wide(searches).short(digit);
                self.launch_top_k(stream, "offbeat_top_k_narrow", spans.count, arguments)
            };
            narrow(0)?;
            let arguments = Arguments::new().wide(values).wide(residual).wide(tiles.address).wide(spans.address);
            let arguments = arguments.wide(searches).wide(candidates).wide(tallies);
            self.launch_top_k(stream, &format!("offbeat_top_k_emit_{of}"), tiles.count, arguments)?;
            for digit in 1..3 {
                let arguments = Arguments::new().wide(tiles.address).wide(candidates).wide(tallies);
                let arguments = arguments.wide(searches).wide(counts).short(digit);
                self.launch_top_k(stream, "offbeat_top_k_count", tiles.count, arguments)?;
                narrow(digit)?;
            }
            let arguments = Arguments::new().wide(tiles.address).wide(candidates).wide(searches).wide(tallies);
            self.launch_top_k(stream, "offbeat_top_k_tally", tiles.count, arguments)?;
            let arguments = Arguments::new().wide(spans.address).wide(tallies);
            self.launch_top_k(stream, "offbeat_top_k_place", spans.count, arguments)?;
            let arguments = Arguments::new().wide(tiles.address).wide(spans.address).wide(candidates).wide(tallies);
            let arguments = arguments.wide(searches).wide(lists).wide(residual).wide(odd);
            self.launch_top_k(stream, "offbeat_top_k_gather", tiles.count, arguments)
        }
    }

    /// Lists to values. `odd` counts entries that no selection has written, which are passed over.
    ///
    /// # Safety
    /// As for [`Kernels::select`].
    pub unsafe fn scatter(
        &self,
        stream: &Stream,
        (how, lists): (Scatter, Address),
        tables: &Tables,
        (values, dtype): (Address, DType),
        odd: Address,
    ) -> Result<()> {
        let (Tables { spans, targets, .. }, of) = (*tables, suffix(dtype)?);
        if targets.count == 0 {
            return Ok(());
        }
        let name = match how {
            Scatter::Decode => format!("offbeat_top_k_decode_{of}"),
            Scatter::Add => format!("offbeat_top_k_add_{of}"),
        };
        let arguments = Arguments::new().wide(lists).wide(spans.address).wide(targets.address).wide(values).wide(odd);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch_top_k(stream, &name, targets.count, arguments) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiles_and_lists_follow_each_other_and_belong_to_one_tensor() {
        let top = |count, ratio| TopK::new(count, ratio).unwrap();
        let tensors =
            [(0..70_000, top(70_000, 0.5)), (70_016..70_016, top(0, 1.0)), (70_016..90_016, top(20_000, 1.0))];
        let lists = Lists::new(&tensors);
        // values, a start and places; values
        assert_eq!(lists.bytes, 6 * 35_000 + 4 + 4 * 20_000);
        let of = |tiles: &[Tile]| tiles.iter().map(|it| (it.span, it.value, it.count)).collect::<Vec<_>>();
        let whole = [(2, 70_016, 16_384), (2, 86_400, 3616)];
        let parts = [(0, 0, 16_384), (0, 16_384, 16_384), (0, 32_768, 16_384), (0, 49_152, 16_384), (0, 65_536, 4464)];
        assert_eq!(of(&lists.tiles), [&parts[..], &whole].concat());
        assert_eq!(of(&lists.targets), [&[(0, 0, 65_536), (0, 65_536, 4464)][..], &whole].concat());
        let spans: Vec<_> = lists.spans.iter().map(|it| (it.list, it.chosen, it.first_tile, it.tile_count)).collect();
        assert_eq!(spans, [(0, 35_000, 0, 5), (210_004, 0, 5, 0), (210_004, 20_000, 5, 2)]);
    }
}
