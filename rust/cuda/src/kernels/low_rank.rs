//! The kernels of `kernels/low_rank.cu`: their tables, names and arguments, as `kernels/README.md` declares them.

use offbeat_core::Result;
use offbeat_core::algorithm::Part;
use offbeat_core::dtype::DType;

use super::{Kernels, Tiles, suffix};
use crate::module::{Arguments, Grid};
use crate::plan::Tile;
use crate::stream::{Address, Stream};

/// The file that has them.
const FILE: &str = "low_rank";
/// Threads of a block.
const THREADS: u32 = 512;
/// What a block has: rows of P; columns of Q; rows and columns of the product.
const ROWS: usize = 64;
const COLUMNS: usize = 64;
const PRODUCT: (usize, usize) = (128, 64);

/// A matrix and where its factors lie, as kernels declare it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Matrix {
    /// Its first element.
    pub value: u64,
    /// P's first number.
    pub left: u64,
    /// Q's first number.
    pub right: u64,
    /// Rows.
    pub rows: u32,
    /// Columns.
    pub cols: u32,
    /// Columns of its factors.
    pub rank: u32,
    /// Zero.
    pub unused: u32,
}

/// What kernels work on, and where tensors that are no matrices lie among the factors.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Blocks {
    /// The matrices.
    pub matrices: Vec<Matrix>,
    /// Blocks of rows.
    pub rows: Vec<Tile>,
    /// Blocks of columns.
    pub columns: Vec<Tile>,
    /// Blocks of both.
    pub products: Vec<Tile>,
    /// What travels whole: (first element, how many, first number beside P).
    pub whole: Vec<(usize, usize, usize)>,
    /// Numbers of P and of what travels whole, and of Q.
    pub lens: (usize, usize),
}

impl Blocks {
    /// For some tensors.
    pub fn new(parts: &[Part]) -> Self {
        let mut blocks = Blocks::default();
        for part in parts {
            let (first, second) = blocks.lens;
            match part.shape.map(|shape| shape.dims()) {
                None => blocks.whole.push((part.range.start, part.range.len(), first)),
                Some(dims) => blocks.add(part.range.start, dims),
            }
            blocks.lens = (first + part.first_len(), second + part.second_len());
        }
        blocks
    }

    fn add(&mut self, value: usize, (rows, cols, rank): (usize, usize, usize)) {
        let tile = |value: usize, record: usize, span: usize| Tile {
            value: value as u64,
            record: record as u64,
            count: 0,
            span: span as u32,
        };
        let span = self.matrices.len();
        self.rows.extend((0..rows).step_by(ROWS).map(|row| tile(row, 0, span)));
        self.columns.extend((0..cols).step_by(COLUMNS).map(|col| tile(col, 0, span)));
        for row in (0..rows).step_by(PRODUCT.0) {
            self.products.extend((0..cols).step_by(PRODUCT.1).map(|col| tile(row, col, span)));
        }
        let (left, right) = (self.lens.0 as u64, self.lens.1 as u64);
        let (rows, cols, rank) = (rows as u32, cols as u32, rank as u32);
        self.matrices.push(Matrix { value: value as u64, left, right, rows, cols, rank, unused: 0 });
    }
}

/// [`Blocks`] on the device.
#[derive(Clone, Copy, Debug)]
pub struct Tables {
    /// The matrices.
    pub matrices: Tiles,
    /// Blocks of rows.
    pub rows: Tiles,
    /// Blocks of columns.
    pub columns: Tiles,
    /// Blocks of both.
    pub products: Tiles,
}

/// A bucket: values and their type, and what is left of matrices, f32 of as many elements.
#[derive(Clone, Copy, Debug)]
pub struct Values {
    /// The values.
    pub start: Address,
    /// Their type.
    pub dtype: DType,
    /// What is left.
    pub left: Address,
}

/// Factors of all matrices.
#[derive(Clone, Copy, Debug)]
pub struct Factors {
    /// Everyone's P, orthonormal.
    pub p: Address,
    /// This rank's Q.
    pub own: Address,
    /// Everyone's Q.
    pub q: Address,
    /// Q as it is kept.
    pub kept: Address,
}

impl Kernels {
    unsafe fn launch_low_rank(&self, stream: &Stream, name: &str, blocks: u32, mut arguments: Arguments) -> Result<()> {
        if blocks == 0 {
            return Ok(());
        }
        let function = self.function(FILE, &format!("offbeat_low_rank_{name}"))?;
        // SAFETY: the callers' promise.
        unsafe { function.launch(stream, Grid { blocks, threads: THREADS }, &mut arguments) }
    }

    /// P = M·Q, where a Q that is zero begins as `starts` has it.
    ///
    /// # Safety
    /// All are as long as the tables say, and stay until the kernels have run.
    pub unsafe fn project(
        &self,
        stream: &Stream,
        values: Values,
        tables: &Tables,
        (starts, kept): (Address, Address),
        p: Address,
    ) -> Result<()> {
        let (Tables { matrices, rows, .. }, of) = (*tables, suffix(values.dtype)?);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe {
            let arguments = Arguments::new().wide(matrices.address).wide(starts).wide(kept);
            self.launch_low_rank(stream, "start", matrices.count, arguments)?;
            let arguments = Arguments::new().wide(values.start).wide(values.left).wide(matrices.address);
            let arguments = arguments.wide(rows.address).wide(kept).wide(p);
            self.launch_low_rank(stream, &format!("left_{of}"), rows.count, arguments)
        }
    }

    /// Makes P orthonormal, and Q = Mᵀ·P.
    ///
    /// # Safety
    /// As for [`Kernels::project`].
    pub unsafe fn project_back(
        &self,
        stream: &Stream,
        values: Values,
        tables: &Tables,
        (p, own): (Address, Address),
    ) -> Result<()> {
        let (Tables { matrices, columns, .. }, of) = (*tables, suffix(values.dtype)?);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe {
            let arguments = Arguments::new().wide(matrices.address).wide(p);
            self.launch_low_rank(stream, "orthonormalise", matrices.count, arguments)?;
            let arguments = Arguments::new().wide(values.start).wide(values.left).wide(matrices.address);
            let arguments = arguments.wide(columns.address).wide(p).wide(own);
            self.launch_low_rank(stream, &format!("right_{of}"), columns.count, arguments)
        }
    }

    /// The values become P·Qᵀ, what is left what this rank's own lack, and Q is kept: of matrices whose Q is finite, which
    /// `finite` is told, a number for each. `odd` counts the others, unless it is 0.
    ///
    /// # Safety
    /// As for [`Kernels::project`].
    pub unsafe fn multiply(
        &self,
        stream: &Stream,
        values: Values,
        tables: &Tables,
        factors: Factors,
        (finite, odd): (Address, Address),
    ) -> Result<()> {
        let (Tables { matrices, products, .. }, of) = (*tables, suffix(values.dtype)?);
        let Factors { p, own, q, kept } = factors;
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe {
            let arguments = Arguments::new().wide(matrices.address).wide(q).wide(finite).wide(odd);
            self.launch_low_rank(stream, "check", matrices.count, arguments)?;
            let arguments = Arguments::new().wide(values.start).wide(values.left).wide(matrices.address);
            let arguments = arguments.wide(products.address).wide(p).wide(own).wide(q).wide(finite).wide(kept);
            self.launch_low_rank(stream, &format!("finish_{of}"), products.count, arguments)
        }
    }
}

#[cfg(test)]
mod tests {
    use offbeat_core::codec::LowRank;

    use super::*;

    #[test]
    fn blocks_cover_every_matrix_and_what_is_whole_lies_beside_p() {
        let matrix = |start: usize, rows: usize, cols: usize, rank: usize| Part {
            range: start..start + rows * cols,
            key: 0,
            shape: Some(LowRank::new(rows, cols, rank).unwrap()),
        };
        let parts = [matrix(0, 130, 65, 3), Part { range: 8512..8519, key: 0, shape: None }, matrix(8576, 2, 9, 1)];
        let blocks = Blocks::new(&parts);
        assert_eq!(blocks.whole, [(8512, 7, 390)]);
        assert_eq!(blocks.lens, (390 + 7 + 2, 195 + 9));
        let places = |tiles: &[Tile]| tiles.iter().map(|it| (it.span, it.value, it.record)).collect::<Vec<_>>();
        assert_eq!(places(&blocks.rows), [(0, 0, 0), (0, 64, 0), (0, 128, 0), (1, 0, 0)]);
        assert_eq!(places(&blocks.columns), [(0, 0, 0), (0, 64, 0), (1, 0, 0)]);
        assert_eq!(places(&blocks.products), [(0, 0, 0), (0, 0, 64), (0, 128, 0), (0, 128, 64), (1, 0, 0)]);
        let second = blocks.matrices[1];
        assert_eq!((second.value, second.left, second.right), (8576, 397, 195));
    }
}
