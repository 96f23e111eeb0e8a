//! The kernels of steps that are no codec's own: momentum, outer steps, copies of peers.

use offbeat_core::Result;
use offbeat_core::algorithm::Rule;
use offbeat_core::codec::Codec;
use offbeat_core::dtype::DType;

use super::{Kernels, Salted, Stacked, Tiles, file, suffix};
use crate::module::Arguments;
use crate::stream::{Address, Stream};

/// A momentum's two ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Gradients become the momentum that they make.
    There,
    /// Momentum becomes the gradients that make it, and is kept.
    Back,
}

/// An outer step's numbers.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// The learning rate.
    pub lr: f32,
    /// How much of the momentum stays.
    pub momentum: f32,
}

/// What a rank keeps of the weights of others: f32, as long as the tensor. An address of 0 stands for none.
#[derive(Clone, Copy, Debug)]
pub struct Copies {
    /// Its own, as the others know them.
    pub own: Address,
    /// Those of the left neighbour on a ring; else the sum over all peers.
    pub first: Address,
    /// Those of the right neighbour; none but on a ring.
    pub second: Address,
}

/// Records of what hosts have told each other, and what is made of them.
#[derive(Clone, Copy, Debug)]
pub struct News {
    /// Where weights go.
    pub rule: Rule,
    /// How much this host and its peers count: f32, for CHOCO.
    pub weights: Address,
    /// This one.
    pub told: Address,
    /// Its peers.
    pub heard: Stacked,
}

impl Kernels {
    /// Gradients as momentum, or back; of (what is kept, a beta for each span).
    ///
    /// # Safety
    /// As for [`Kernels::encode`].
    pub unsafe fn momentum(
        &self,
        stream: &Stream,
        way: Way,
        (values, dtype): (Address, DType),
        (kept, betas): (Address, Address),
        tiles: Tiles,
    ) -> Result<()> {
        let name = match way {
            Way::There => "momentum",
            Way::Back => "gradient",
        };
        let function = self.function("momentum", &format!("offbeat_{name}_{}", suffix(dtype)?))?;
        let arguments = Arguments::new().wide(values).wide(kept).wide(betas).wide(tiles.address).short(tiles.count);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch(stream, &function, tiles, arguments) }
    }

    /// Weights as how far they are from an anchor.
    ///
    /// # Safety
    /// As for [`Kernels::encode`].
    pub unsafe fn difference(
        &self,
        stream: &Stream,
        (values, dtype): (Address, DType),
        anchor: Address,
        tiles: Tiles,
    ) -> Result<()> {
        let function = self.function("outer", &format!("offbeat_difference_{}", suffix(dtype)?))?;
        let arguments = Arguments::new().wide(values).wide(anchor).wide(tiles.address).short(tiles.count);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch(stream, &function, tiles, arguments) }
    }

    /// The outer step of (an anchor, its momentum).
    ///
    /// # Safety
    /// As for [`Kernels::encode`].
    pub unsafe fn outer(
        &self,
        stream: &Stream,
        (values, dtype): (Address, DType),
        (anchor, speed): (Address, Address),
        pace: Pace,
        tiles: Tiles,
        odd: Address,
    ) -> Result<()> {
        let function = self.function("outer", &format!("offbeat_outer_{}", suffix(dtype)?))?;
        let arguments = Arguments::new().wide(values).wide(anchor).wide(speed).float(pace.lr).float(pace.momentum);
        let arguments = arguments.wide(tiles.address).short(tiles.count).wide(odd);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch(stream, &function, tiles, arguments) }
    }

    /// How far weights are from copies of them, and how neighbours on a ring draw them, as records.
    ///
    /// # Safety
    /// As for [`Kernels::encode`].
    pub unsafe fn tell(
        &self,
        stream: &Stream,
        codec: Option<&dyn Codec>,
        (values, dtype): (Address, DType),
        (copies, (left, right)): (Copies, (f32, f32)),
        tiles: Tiles,
        (records, salt): (Address, Salted),
    ) -> Result<()> {
        let (file, name) = of_replicas(codec);
        let function = self.function(file, &format!("offbeat_{name}_tell_{}", suffix(dtype)?))?;
        // a sum over peers is no neighbour
        let first = if copies.second == 0 { 0 } else { copies.first };
        let arguments = Arguments::new().wide(values).wide(copies.own).wide(first).wide(copies.second);
        let arguments = arguments.float(left).float(right).wide(tiles.address).short(tiles.count).wide(records);
        let arguments = arguments.wide(salt.numbers).wide(salt.stream).wide(salt.odd);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch(stream, &function, tiles, arguments) }
    }

    /// Copies and weights as they are after what hosts have told each other.
    ///
    /// # Safety
    /// As for [`Kernels::encode`].
    pub unsafe fn hear(
        &self,
        stream: &Stream,
        codec: Option<&dyn Codec>,
        (values, dtype): (Address, DType),
        copies: Copies,
        news: News,
        tiles: Tiles,
    ) -> Result<()> {
        let (file, name) = of_replicas(codec);
        let function = self.function(file, &format!("offbeat_{name}_hear_{}", suffix(dtype)?))?;
        let (left, right, gamma) = match news.rule {
            Rule::Ring(left, right) => (left as u32, right as u32, 0.0),
            Rule::Choco(gamma) => (0, 0, gamma),
        };
        let arguments = Arguments::new().wide(values).wide(copies.own).wide(copies.first).wide(copies.second);
        let arguments = arguments.wide(news.told).wide(news.heard.first).wide(news.heard.stride);
        let arguments = arguments.short(news.heard.peers).short(left).short(right).wide(news.weights).float(gamma);
        let arguments = arguments.wide(tiles.address).short(tiles.count);
        // SAFETY: the caller's promise, and the arguments are those that kernels/README.md lists.
        unsafe { self.launch(stream, &function, tiles, arguments) }
    }
}

/// The file and the first part of the names of kernels for differences; those that travel as they are have their own.
fn of_replicas(codec: Option<&dyn Codec>) -> (&'static str, &'static str) {
    codec.map_or(("replicas", "plain"), |codec| (file(codec), codec.name()))
}
