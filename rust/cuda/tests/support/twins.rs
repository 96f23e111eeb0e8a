//! The kernels' twins: what each kernel does, by core's codecs and sums, under the kernel's name in the double of libcuda.
//!
//! So the plumbing is tested with arithmetic that is right by definition; that kernels do the same is shown elsewhere, by
//! running them on golden vectors.

use std::ffi::{CString, c_char, c_void};

use libloading::os::unix::Library;
use offbeat_core::codec::{Codec, KNOWN, Salt};
use offbeat_core::dtype::{DType, Op};
use offbeat_core::reduce;
use offbeat_cuda::kernels::Image;
use offbeat_cuda::plan::Tile;

const TYPES: [(&str, DType); 3] = [("f32", DType::F32), ("f16", DType::F16), ("bf16", DType::BF16)];

/// Where a kernel is declared, and how: the sizes of its arguments, and which of them are pointers.
pub struct Twin {
    pub name: String,
    pub file: &'static str,
    sizes: &'static [u32],
    pointers: &'static [u8],
    what: What,
}

#[derive(Clone, Copy)]
enum What {
    Encode(&'static dyn Codec, DType),
    Decode(&'static dyn Codec, DType),
    Average(&'static dyn Codec),
    Mix(DType, DType),
}

/// All of them.
pub fn twins() -> Vec<Twin> {
    let mut twins = Vec::new();
    for codec in KNOWN {
        let file = match codec.name() {
            "float16" | "bfloat16" => "cast",
            "minmax8" => "min_max8",
            "onebit" => "one_bit",
            other => other,
        };
        let name = |what: &str| format!("offbeat_{}_{what}", codec.name());
        for (suffix, dtype) in TYPES {
            twins.push(Twin {
                name: name(&format!("encode_{suffix}")),
                file,
                sizes: &[8, 8, 8, 4, 8, 8, 8, 8],
                pointers: &[1, 1, 1, 0, 1, 1, 0, 1],
                what: What::Encode(codec, dtype),
            });
            twins.push(Twin {
                name: name(&format!("decode_{suffix}")),
                file,
                sizes: &[8, 8, 4, 8],
                pointers: &[1, 1, 0, 1],
                what: What::Decode(codec, dtype),
            });
        }
        twins.push(Twin {
            name: name("average"),
            file,
            sizes: &[8, 8, 4, 4, 8, 8, 4, 8, 8, 8, 8],
            pointers: &[1, 0, 0, 0, 1, 1, 0, 1, 1, 0, 1],
            what: What::Average(codec),
        });
    }
    for (from, wide) in TYPES {
        for (to, narrow) in TYPES {
            if wide == narrow || wide == DType::F32 || narrow == DType::F32 {
                twins.push(Twin {
                    name: format!("offbeat_mix_{from}_{to}"),
                    file: "elementwise",
                    sizes: &[8, 8, 4, 8, 4, 8, 4, 8],
                    pointers: &[1, 0, 0, 1, 0, 1, 0, 1],
                    what: What::Mix(wide, narrow),
                });
            }
        }
    }
    twins
}

impl Twin {
    /// Whether some PTX declares the kernel with these arguments.
    pub fn is_declared_in(&self, ptx: &str) -> bool {
        let Some(at) = ptx.find(&format!(".entry {}(", self.name)) else { return false };
        let declared = ptx[at..].split(')').next().unwrap().matches(".param .");
        let sizes = declared.clone().count();
        let wide = ptx[at..].split(')').next().unwrap().matches(".param .u64").count();
        (sizes, wide) == (self.sizes.len(), self.sizes.iter().filter(|size| **size == 8).count())
    }

    fn declare(&self) -> String {
        let parameters = self.sizes.iter().map(|size| if *size == 8 { ".param .u64 x" } else { ".param .u32 x" });
        format!(".visible .entry {}({}) {{ ret; }}\n", self.name, parameters.collect::<Vec<_>>().join(", "))
    }
}

/// Tells the double of all twins; gives PTX that declares them.
pub fn register() -> &'static [Image] {
    type Run = unsafe extern "C" fn(*const u32, *const u32, *const *const c_void, *const c_void);
    type Register = unsafe extern "C" fn(*const c_char, u32, *const u32, *const u8, Run, *const c_void) -> i32;
    let mut texts: Vec<(&'static str, String)> = Vec::new();
    // SAFETY: the double's library and function, as double.h declares it; twins live for ever.
    unsafe {
        let library = Library::new("libcuda.so.1").unwrap();
        let register = library.get::<Register>(b"fakecuda_register\0").unwrap();
        for twin in twins() {
            let twin = &*Box::leak(Box::new(twin));
            let name = CString::new(twin.name.as_str()).unwrap();
            let count = twin.sizes.len() as u32;
            let user = (&raw const *twin).cast();
            register(name.as_ptr(), count, twin.sizes.as_ptr(), twin.pointers.as_ptr(), run, user);
            match texts.iter_mut().find(|(file, _)| *file == twin.file) {
                Some((_, text)) => text.push_str(&twin.declare()),
                None => {
                    let head = ".version 8.0\n.target sm_70\n.address_size 64\n";
                    texts.push((twin.file, format!("{head}{}", twin.declare())));
                }
            }
        }
        std::mem::forget(library);
    }
    let images = texts.into_iter().map(|(file, text)| (file, &*text.leak()));
    images.collect::<Vec<Image>>().leak()
}

/// Arguments as they come from the driver, read in order.
struct Arguments(*const *const c_void, usize);

impl Arguments {
    unsafe fn next<T: Copy>(&mut self) -> T {
        self.1 += 1;
        // SAFETY: the double hands over as many as are declared, each of the declared size.
        unsafe { (*self.0.add(self.1 - 1)).cast::<T>().read_unaligned() }
    }
}

unsafe extern "C" fn run(grid: *const u32, block: *const u32, arguments: *const *const c_void, user: *const c_void) {
    let mut arguments = Arguments(arguments, 0);
    // SAFETY: what the double promises of arguments, and what the crate promises of memory.
    unsafe {
        let twin = &*user.cast::<Twin>();
        let tiles = match twin.what {
            What::Encode(codec, dtype) => encode(codec, dtype, &mut arguments),
            What::Decode(codec, dtype) => decode(codec, dtype, &mut arguments),
            What::Average(codec) => average(codec, &mut arguments),
            What::Mix(from, to) => mix(from, to, &mut arguments),
        };
        assert_eq!((*grid, *block), ((tiles as u32).div_ceil(4), 128), "{}: a warp for each tile", twin.name);
    }
}

unsafe fn tiles<'a>(arguments: &mut Arguments) -> &'a [Tile] {
    // SAFETY: a table and its length.
    unsafe {
        let first = arguments.next::<*const Tile>();
        std::slice::from_raw_parts(first, arguments.next::<u32>() as usize)
    }
}

/// What encoding is given after its records.
struct Salted(*mut f32, *const u64, u64, *mut u32);

/// Encodes a tile's values as records.
unsafe fn seal(codec: &dyn Codec, values: &[f32], tile: &Tile, records: *mut u8, salted: &Salted) {
    let Salted(residual, numbers, stream, odd) = salted;
    let (first, count) = (tile.value as usize, tile.count as usize);
    assert!(tile.record.is_multiple_of(16), "records begin where wide stores may");
    // SAFETY: as long as the tile says.
    unsafe {
        let out = std::slice::from_raw_parts_mut(records.add(tile.record as usize), codec.encoded_len(count));
        let block = first / codec.block();
        let blocks = if numbers.is_null() {
            &[][..]
        } else {
            std::slice::from_raw_parts(numbers.add(block), count.div_ceil(codec.block()))
        };
        let salt = Salt { stream: *stream, blocks, first: block as u64 };
        if residual.is_null() {
            codec.encode(values, salt, out);
        } else {
            let kept = std::slice::from_raw_parts_mut(residual.add(first), count);
            codec.encode_residual(values, kept, salt, out);
        }
        if !odd.is_null() {
            **odd += codec.non_finite(out) as u32;
        }
    }
}

unsafe fn encode(codec: &dyn Codec, dtype: DType, arguments: &mut Arguments) -> usize {
    // SAFETY: the kernel's arguments.
    unsafe {
        let (values, residual) = (arguments.next::<*const u8>(), arguments.next());
        let (tiles, records) = (tiles(arguments), arguments.next::<*mut u8>());
        let salted = Salted(residual, arguments.next(), arguments.next(), arguments.next());
        for tile in tiles {
            let mut wide = vec![0f32; tile.count as usize];
            let from = values.add(tile.value as usize * dtype.size());
            reduce::widen(from, wide.as_mut_ptr().cast(), wide.len(), dtype);
            seal(codec, &wide, tile, records, &salted);
        }
        tiles.len()
    }
}

unsafe fn decode(codec: &dyn Codec, dtype: DType, arguments: &mut Arguments) -> usize {
    // SAFETY: the kernel's arguments.
    unsafe {
        let (records, tiles, values) = (arguments.next::<*const u8>(), tiles(arguments), arguments.next::<*mut u8>());
        for tile in tiles {
            let mut wide = vec![0f32; tile.count as usize];
            let bytes = codec.encoded_len(wide.len());
            codec.decode(std::slice::from_raw_parts(records.add(tile.record as usize), bytes), &mut wide);
            let to = values.add(tile.value as usize * dtype.size());
            reduce::seal(wide.as_mut_ptr().cast(), &[to], wide.len(), dtype, None);
        }
        tiles.len()
    }
}

unsafe fn average(codec: &dyn Codec, arguments: &mut Arguments) -> usize {
    // SAFETY: the kernel's arguments.
    unsafe {
        let (shares, stride) = (arguments.next::<*const u8>(), arguments.next::<u64>() as usize);
        let (peers, divisor) = (arguments.next::<u32>() as usize, arguments.next::<f32>());
        let residual = arguments.next();
        let (tiles, records) = (tiles(arguments), arguments.next::<*mut u8>());
        let salted = Salted(residual, arguments.next(), arguments.next(), arguments.next());
        for tile in tiles {
            let mut sum = vec![0f32; tile.count as usize];
            for peer in 0..peers {
                let from = shares.add(peer * stride + tile.record as usize);
                let bytes = std::slice::from_raw_parts(from, codec.encoded_len(sum.len()));
                if peer == 0 { codec.decode(bytes, &mut sum) } else { codec.decode_add(bytes, &mut sum) }
            }
            sum.iter_mut().for_each(|value| *value /= divisor);
            seal(codec, &sum, tile, records, &salted);
        }
        tiles.len()
    }
}

unsafe fn mix(from: DType, to: DType, arguments: &mut Arguments) -> usize {
    // SAFETY: the kernel's arguments.
    unsafe {
        let (sources, stride) = (arguments.next::<*const u8>(), arguments.next::<u64>() as usize);
        let (peers, factors) = (arguments.next::<u32>() as usize, arguments.next::<*const f32>());
        let divisor = arguments.next::<f32>();
        let (tiles, values) = (tiles(arguments), arguments.next::<*mut u8>());
        for tile in tiles {
            let count = tile.count as usize;
            let mut sum = vec![0f32; count];
            for peer in 0..peers {
                let source = sources.add((peer * stride + tile.record as usize) * from.size());
                let mut wide = vec![0f32; count];
                reduce::widen(source, wide.as_mut_ptr().cast(), count, from);
                if !factors.is_null() {
                    wide.iter_mut().for_each(|value| *value *= *factors.add(peer));
                }
                match peer {
                    0 => sum = wide,
                    _ => reduce::fold(sum.as_mut_ptr().cast(), wide.as_ptr().cast(), count, DType::F32, Op::Sum),
                }
            }
            sum.iter_mut().for_each(|value| *value /= divisor);
            let to_place = values.add(tile.value as usize * to.size());
            reduce::seal(sum.as_mut_ptr().cast(), &[to_place], count, to, None);
        }
        tiles.len()
    }
}
