/* emu_types.h - 16-bit floats as the chip converts them: used by kernels on the emulator and by its matrix product.
 *
 * Includes nothing, so that a kernel which leans on a system header fails here as it does under NVRTC. */
#ifndef EMU_TYPES_H
#define EMU_TYPES_H

typedef __INT8_TYPE__ int8_t;
typedef __INT16_TYPE__ int16_t;
typedef __INT32_TYPE__ int32_t;
typedef __INT64_TYPE__ int64_t;
typedef __UINT8_TYPE__ uint8_t;
typedef __UINT16_TYPE__ uint16_t;
typedef __UINT32_TYPE__ uint32_t;
typedef __UINT64_TYPE__ uint64_t;
typedef __UINTPTR_TYPE__ uintptr_t;
typedef __SIZE_TYPE__ size_t;

static inline uint32_t emu_bits(float v) {
    uint32_t u;
    __builtin_memcpy(&u, &v, sizeof u);
    return u;
}

static inline float emu_from_bits(uint32_t u) {
    float v;
    __builtin_memcpy(&v, &u, sizeof v);
    return v;
}

static inline float emu_f32_from_bf16(uint32_t low16) { return emu_from_bits(low16 << 16); }

static inline float emu_f32_from_f16(uint32_t low16) {
    const uint32_t sign = (low16 & 0x8000u) << 16, magnitude = low16 & 0x7fffu;
    if (magnitude >= 0x7c00u) return emu_from_bits(sign | 0x7f800000u | (magnitude & 0x3ffu) << 13);
    if (magnitude < 0x400u) { /* subnormal: a multiple of 2^-24 */
        const float v = (float)magnitude * 0x1p-24f;
        return sign ? -v : v;
    }
    return emu_from_bits(sign | ((magnitude << 13) + (112u << 23)));
}

/* To nearest, ties to even; NaN becomes 0x7fff. */
static inline uint32_t emu_bf16_from_f32(float v) {
    const uint32_t u = emu_bits(v);
    if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (u + 0x7fffu + (u >> 16 & 1u)) >> 16;
}

static inline uint32_t emu_f16_from_f32(float v) {
    const uint32_t u = emu_bits(v), sign = u >> 16 & 0x8000u, magnitude = u & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffu;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u; /* 65520 and more rounds to infinity */
    if (magnitude < 0x38800000u) {                       /* below 2^-14: subnormal, a multiple of 2^-24 */
        return sign | (uint32_t)__builtin_rintf(emu_from_bits(magnitude) * 0x1p24f);
    }
    return sign | ((magnitude + 0xfffu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13);
}

#endif
