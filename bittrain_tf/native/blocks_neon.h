// The loops of blocks.h for NEON, which every aarch64 has. Included by blocks.h only.
#ifndef BITTRAIN_BLOCKS_NEON_H_
#define BITTRAIN_BLOCKS_NEON_H_

#include <arm_neon.h>

#include "tables.h"

namespace bittrain {

// One vector of 128 bits at a time; words of 8 bytes gain nothing from that.
template <typename Word>
struct Neon : Portable<Word> {};

template <>
struct Neon<uint32_t> {
  static constexpr int kLanes = 4;

  static uint64_t Mask(uint32x4_t lanes) {
    const uint32x4_t bit = {1, 2, 4, 8};
    return vaddvq_u32(vandq_u32(lanes, bit));
  }

  static int64_t Nonzero(const uint32_t* x, int64_t blocks, uint8_t* bits) {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      uint64_t mask = 0;
      for (int i = 0; i < kBlock; i += kLanes) {
        const uint32x4_t v = vld1q_u32(x + i);
        mask |= Mask(vtstq_u32(v, v)) << i;
      }
      StoreMask(mask, bits);
      count += __builtin_popcountll(mask);
    }
    return count;
  }

  static void InRange(const uint32_t* x, int64_t blocks, int32_t low, int32_t high,
                      uint8_t* bits) {
    const int32x4_t lows = vdupq_n_s32(low), highs = vdupq_n_s32(high);
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      uint64_t mask = 0;
      for (int i = 0; i < kBlock; i += kLanes) {
        const int32x4_t v = vreinterpretq_s32_u32(vld1q_u32(x + i));
        mask |= Mask(vandq_u32(vcleq_s32(lows, v), vcleq_s32(v, highs))) << i;
      }
      StoreMask(mask, bits);
    }
  }

  static bool Compress(const uint32_t* x, int64_t blocks, const uint8_t* bits, uint32_t** values) {
    uint64_t differ = 0;
    uint32_t* next = *values;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      const uint64_t marks = LoadMask(bits);
      for (int i = 0; i < kBlock; i += kLanes) {
        const uint64_t mask = marks >> i & 15;
        const uint32x4_t v = vld1q_u32(x + i);
        differ |= Mask(vtstq_u32(v, v)) ^ mask;
        if (mask == 0) continue;  // there may be no room at all
        const uint8x16_t shuffle = vld1q_u8(kShuffles4.compress[mask]);
        vst1q_u32(next, vreinterpretq_u32_u8(vqtbl1q_u8(vreinterpretq_u8_u32(v), shuffle)));
        next += __builtin_popcountll(mask);
      }
    }
    *values = next;
    return differ == 0;
  }

  static void Expand(const uint8_t* bits, const uint32_t** values, int64_t blocks, uint32_t* x) {
    const uint32_t* next = *values;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      const uint64_t marks = LoadMask(bits);
      for (int i = 0; i < kBlock; i += kLanes) {
        const uint64_t mask = marks >> i & 15;
        const uint8x16_t v = vreinterpretq_u8_u32(vld1q_u32(next));
        vst1q_u32(x + i, vreinterpretq_u32_u8(vqtbl1q_u8(v, vld1q_u8(kShuffles4.expand[mask]))));
        next += __builtin_popcountll(mask);
      }
    }
    *values = next;
  }

  static constexpr Loops<uint32_t> kLoops{"neon",   Nonzero, InRange,
                                           Compress, Expand,  Portable<uint32_t>::Count};
};

template <>
struct Neon<uint16_t> {
  static constexpr int kLanes = 8;

  static uint8_t Mask(uint16x8_t lanes) {
    const uint16x8_t bit = {1, 2, 4, 8, 16, 32, 64, 128};
    return static_cast<uint8_t>(vaddvq_u16(vandq_u16(lanes, bit)));
  }

  static int64_t Nonzero(const uint16_t* x, int64_t blocks, uint8_t* bits) {
    int64_t count = 0;
    for (int64_t i = 0; i < blocks * 8; ++i, x += kLanes) {
      const uint16x8_t v = vld1q_u16(x);
      bits[i] = Mask(vtstq_u16(v, v));
      count += __builtin_popcount(bits[i]);
    }
    return count;
  }

  static void InRange(const uint16_t* x, int64_t blocks, int16_t low, int16_t high,
                      uint8_t* bits) {
    const int16x8_t lows = vdupq_n_s16(low), highs = vdupq_n_s16(high);
    for (int64_t i = 0; i < blocks * 8; ++i, x += kLanes) {
      const int16x8_t v = vreinterpretq_s16_u16(vld1q_u16(x));
      bits[i] = Mask(vandq_u16(vcleq_s16(lows, v), vcleq_s16(v, highs)));
    }
  }

  static bool Compress(const uint16_t* x, int64_t blocks, const uint8_t* bits, uint16_t** values) {
    unsigned differ = 0;
    uint16_t* next = *values;
    for (int64_t i = 0; i < blocks * 8; ++i, x += kLanes) {
      const uint16x8_t v = vld1q_u16(x);
      differ |= Mask(vtstq_u16(v, v)) ^ bits[i];
      if (bits[i] == 0) continue;  // there may be no room at all
      const uint8x16_t shuffle = vld1q_u8(kShuffles2.compress[bits[i]]);
      vst1q_u16(next, vreinterpretq_u16_u8(vqtbl1q_u8(vreinterpretq_u8_u16(v), shuffle)));
      next += __builtin_popcount(bits[i]);
    }
    *values = next;
    return differ == 0;
  }

  static void Expand(const uint8_t* bits, const uint16_t** values, int64_t blocks, uint16_t* x) {
    const uint16_t* next = *values;
    for (int64_t i = 0; i < blocks * 8; ++i, x += kLanes) {
      const uint8x16_t v = vreinterpretq_u8_u16(vld1q_u16(next));
      const uint8x16_t shuffle = vld1q_u8(kShuffles2.expand[bits[i]]);
      vst1q_u16(x, vreinterpretq_u16_u8(vqtbl1q_u8(v, shuffle)));
      next += __builtin_popcount(bits[i]);
    }
    *values = next;
  }

  static constexpr Loops<uint16_t> kLoops{"neon",   Nonzero, InRange,
                                           Compress, Expand,  Portable<uint32_t>::Count};
};

}  // namespace bittrain

#endif  // BITTRAIN_BLOCKS_NEON_H_
