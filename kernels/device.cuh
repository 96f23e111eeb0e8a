// What only a device has instructions for. tests/gpu/shim says the same for a CPU.
#pragma once
#ifndef SHIM
static __device__ __forceinline__ float half_to_float(unsigned short bits) {
    float x;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}
static __device__ __forceinline__ unsigned short float_to_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}
// In one instruction: a compiler that sees a wide store beside narrow ones of the same numbers makes narrow ones of both.
static __device__ __forceinline__ void store_wide(void *to, uint4 raw) {
    asm volatile("st.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(raw.x), "r"(raw.y), "r"(raw.z), "r"(raw.w) : "memory");
}
static __device__ __forceinline__ void store_wide(void *to, uint2 raw) {
    asm volatile("st.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(raw.x), "r"(raw.y) : "memory");
}
#endif
