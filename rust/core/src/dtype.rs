//! Element types and the operations that reduce them.

use std::fmt;

use crate::{Error, Result};

/// The type of an element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say it")]
pub enum DType {
    F64 = 1,
    F32 = 2,
    F16 = 3,
    BF16 = 4,
    I64 = 5,
    I32 = 6,
    I16 = 7,
    I8 = 8,
    U64 = 9,
    U32 = 10,
    U16 = 11,
    U8 = 12,
    Bool = 13,
}

impl DType {
    /// All of them.
    pub const ALL: [DType; 13] = [
        DType::F64,
        DType::F32,
        DType::F16,
        DType::BF16,
        DType::I64,
        DType::I32,
        DType::I16,
        DType::I8,
        DType::U64,
        DType::U32,
        DType::U16,
        DType::U8,
        DType::Bool,
    ];

    /// Bytes of an element.
    pub fn size(self) -> usize {
        match self {
            DType::F64 | DType::I64 | DType::U64 => 8,
            DType::F32 | DType::I32 | DType::U32 => 4,
            DType::F16 | DType::BF16 | DType::I16 | DType::U16 => 2,
            DType::I8 | DType::U8 | DType::Bool => 1,
        }
    }

    /// The type that sums are kept in: f16 and bf16 accumulate in f32 and round once.
    pub fn accumulator(self) -> DType {
        match self {
            DType::F16 | DType::BF16 => DType::F32,
            other => other,
        }
    }

    /// Whether it is a floating-point type.
    pub fn is_float(self) -> bool {
        matches!(self, DType::F64 | DType::F32 | DType::F16 | DType::BF16)
    }

    /// The number one, as its bytes.
    pub fn one(self) -> [u8; 8] {
        let bits = match self {
            DType::F64 => 1f64.to_bits(),
            DType::F32 => u64::from(1f32.to_bits()),
            DType::F16 => u64::from(half::f16::ONE.to_bits()),
            DType::BF16 => u64::from(half::bf16::ONE.to_bits()),
            _ => 1,
        };
        bits.to_le_bytes()
    }

    /// The type with a number, as [`DType`] as u8 gives it.
    pub fn from_code(code: u8) -> Option<Self> {
        DType::ALL.into_iter().find(|dtype| *dtype as u8 == code)
    }

    /// The name that torch uses.
    pub fn name(self) -> &'static str {
        match self {
            DType::F64 => "float64",
            DType::F32 => "float32",
            DType::F16 => "float16",
            DType::BF16 => "bfloat16",
            DType::I64 => "int64",
            DType::I32 => "int32",
            DType::I16 => "int16",
            DType::I8 => "int8",
            DType::U64 => "uint64",
            DType::U32 => "uint32",
            DType::U16 => "uint16",
            DType::U8 => "uint8",
            DType::Bool => "bool",
        }
    }

    /// The type that torch calls so.
    pub fn from_name(name: &str) -> Option<Self> {
        DType::ALL.into_iter().find(|dtype| dtype.name() == name)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// What reduces elements.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
#[expect(missing_docs, reason = "the names say it")]
pub enum Op {
    Sum = 1,
    Mean = 2,
    Min = 3,
    Max = 4,
    Product = 5,
    Band = 6,
    Bor = 7,
    Bxor = 8,
}

impl Op {
    /// All of them.
    pub const ALL: [Op; 8] = [Op::Sum, Op::Mean, Op::Min, Op::Max, Op::Product, Op::Band, Op::Bor, Op::Bxor];

    /// The name.
    pub fn name(self) -> &'static str {
        match self {
            Op::Sum => "sum",
            Op::Mean => "mean",
            Op::Min => "min",
            Op::Max => "max",
            Op::Product => "product",
            Op::Band => "band",
            Op::Bor => "bor",
            Op::Bxor => "bxor",
        }
    }

    /// The operation with a name.
    pub fn from_name(name: &str) -> Result<Self> {
        Op::ALL.into_iter().find(|op| op.name() == name).ok_or_else(|| {
            let known: Vec<&str> = Op::ALL.iter().map(|op| op.name()).collect();
            Error::invalid(format!("unknown op {name:?}; try: {}", known.join(", ")))
        })
    }

    /// The operation with a number.
    pub fn from_code(code: u8) -> Option<Self> {
        Op::ALL.into_iter().find(|op| *op as u8 == code)
    }

    /// Whether the operation makes sense for a type.
    pub fn check(self, dtype: DType) -> Result<()> {
        let bits = matches!(self, Op::Band | Op::Bor | Op::Bxor);
        let try_this = match (bits, dtype) {
            (true, dtype) if dtype.is_float() => {
                "bit operations take integers and bool; try: sum, mean, min, max, product"
            }
            (false, DType::Bool) => "bool has no numbers; try: band, bor, bxor, or .to(torch.uint8)",
            (false, dtype) if self == Op::Mean && !dtype.is_float() => "try: sum, or .to(torch.float32)",
            _ => return Ok(()),
        };
        Err(Error::invalid(format!("op {:?} does not work on {dtype}: {try_this}", self.name())))
    }
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
