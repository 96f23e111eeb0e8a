//! IEEE half precision: 11 significant bits, up to 65504; what is larger becomes infinite.

use half::f16;

use super::{Codec, Salt, not_finite, pairs};

/// Two bytes an element; relative error at most 2⁻¹¹, absolute at most 2⁻²⁵ near zero.
#[derive(Debug)]
pub struct Float16;

impl Codec for Float16 {
    fn name(&self) -> &'static str {
        "float16"
    }

    fn code(&self) -> u8 {
        1
    }

    fn block(&self) -> usize {
        1
    }

    fn encoded_len(&self, count: usize) -> usize {
        count * 2
    }

    fn encode(&self, values: &[f32], _: Salt<'_>, out: &mut [u8]) {
        // the library converts slices with F16C where the processor has it
        use half::slice::HalfFloatSliceExt;
        let mut block = [f16::ZERO; 512];
        for (values, out) in values.chunks(512).zip(out.chunks_mut(1024)) {
            let block = &mut block[..values.len()];
            block.convert_from_f32_slice(values);
            for (out, value) in out.chunks_exact_mut(2).zip(block) {
                out.copy_from_slice(&value.to_le_bytes());
            }
        }
    }

    fn decode(&self, bytes: &[u8], out: &mut [f32]) {
        each_block(bytes, out, |out, values| out.copy_from_slice(values));
    }

    fn decode_add(&self, bytes: &[u8], out: &mut [f32]) {
        each_block(bytes, out, |out, values| out.iter_mut().zip(values).for_each(|(out, value)| *out += value));
    }

    fn error_bound(&self, values: &[f32]) -> f32 {
        values.iter().fold(0f32, |bound, v| bound.max(v.abs() / 2048.0)).max(2f32.powi(-25))
    }

    fn is_biased(&self) -> bool {
        true
    }

    fn non_finite(&self, bytes: &[u8]) -> usize {
        not_finite(bytes, 0x7c00)
    }
}

fn each_block(bytes: &[u8], out: &mut [f32], act: impl Fn(&mut [f32], &[f32])) {
    use half::slice::HalfFloatSliceExt;
    let (mut halves, mut wide) = ([f16::ZERO; 512], [0f32; 512]);
    for (bytes, out) in bytes.chunks(1024).zip(out.chunks_mut(512)) {
        halves.iter_mut().zip(pairs(bytes)).for_each(|(half, bits)| *half = f16::from_bits(bits));
        halves[..out.len()].convert_to_f32_slice(&mut wide[..out.len()]);
        let count = out.len();
        act(out, &wide[..count]);
    }
}
