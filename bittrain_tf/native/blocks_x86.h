// The loops of blocks.h for AVX2 and AVX-512. Included by blocks.h only.
#ifndef BITTRAIN_BLOCKS_X86_H_
#define BITTRAIN_BLOCKS_X86_H_

#include <immintrin.h>

#include "tables.h"

#define BITTRAIN_AVX2 __attribute__((target("avx2,popcnt,bmi")))
#define BITTRAIN_AVX512 \
  __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi2,popcnt,bmi")))
#define BITTRAIN_INLINE __attribute__((always_inline)) inline

namespace bittrain {

// How far ahead of `compress` its output is fetched: the hardware does not foresee where it
// goes, and waiting costs a tenth of the time.
constexpr int64_t kAhead = 512;

inline bool HasAvx2() {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("popcnt") &&
         __builtin_cpu_supports("bmi");
}

template <typename Word>
bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi2");
}

// ---------------------------------------------------------------------------------------------
// One vector of 256 bits at a time.

template <typename Word>
struct Vector256;

template <>
struct Vector256<uint32_t> {
  static constexpr int kLanes = 8;

  BITTRAIN_AVX2 static BITTRAIN_INLINE unsigned Mask(__m256i lanes) {
    return static_cast<unsigned>(_mm256_movemask_ps(_mm256_castsi256_ps(lanes)));
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Set(int32_t v) { return _mm256_set1_epi32(v); }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Equal(__m256i a, __m256i b) {
    return _mm256_cmpeq_epi32(a, b);
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Greater(__m256i a, __m256i b) {
    return _mm256_cmpgt_epi32(a, b);
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Lanes(const uint8_t* eight) {
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(eight)));
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Compress(unsigned mask, __m256i v) {
    return _mm256_permutevar8x32_epi32(v, Lanes(kLaneShuffles.compress[mask]));
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Expand(unsigned mask, __m256i v) {
    const __m256i bit = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
    const __m256i marked = _mm256_and_si256(_mm256_set1_epi32(static_cast<int>(mask)), bit);
    const __m256i spread = _mm256_permutevar8x32_epi32(v, Lanes(kLaneShuffles.expand[mask]));
    return _mm256_and_si256(spread, _mm256_cmpeq_epi32(marked, bit));
  }
};

template <>
struct Vector256<uint64_t> {
  static constexpr int kLanes = 4;

  BITTRAIN_AVX2 static BITTRAIN_INLINE unsigned Mask(__m256i lanes) {
    return static_cast<unsigned>(_mm256_movemask_pd(_mm256_castsi256_pd(lanes)));
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Set(int64_t v) { return _mm256_set1_epi64x(v); }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Equal(__m256i a, __m256i b) {
    return _mm256_cmpeq_epi64(a, b);
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Greater(__m256i a, __m256i b) {
    return _mm256_cmpgt_epi64(a, b);
  }
  // A lane of 8 bytes is two of 4.
  static BITTRAIN_INLINE unsigned Twice(unsigned mask) {
    const unsigned spread = (mask & 1) | (mask & 2) << 1 | (mask & 4) << 2 | (mask & 8) << 3;
    return spread * 3;
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Compress(unsigned mask, __m256i v) {
    return Vector256<uint32_t>::Compress(Twice(mask), v);
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Expand(unsigned mask, __m256i v) {
    return Vector256<uint32_t>::Expand(Twice(mask), v);
  }
};

template <typename Word>
struct Avx2 {
  using Signed = std::make_signed_t<Word>;
  using Vector = Vector256<Word>;
  static constexpr int kLanes = Vector::kLanes;
  static constexpr unsigned kAll = (1u << kLanes) - 1;

  BITTRAIN_AVX2 static BITTRAIN_INLINE __m256i Load(const Word* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE void Store(__m256i v, Word* x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(x), v);
  }

  BITTRAIN_AVX2 static int64_t Nonzero(const Word* x, int64_t blocks, uint8_t* bits) {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      uint64_t zero = 0;
      for (int i = 0; i < kBlock; i += kLanes) {
        const __m256i equal = Vector::Equal(Load(x + i), _mm256_setzero_si256());
        zero |= static_cast<uint64_t>(Vector::Mask(equal)) << i;
      }
      StoreMask(~zero, bits);
      count += _mm_popcnt_u64(~zero);
    }
    return count;
  }

  BITTRAIN_AVX2 static void InRange(const Word* x, int64_t blocks, Signed low, Signed high,
                                    uint8_t* bits) {
    const __m256i lows = Vector::Set(low), highs = Vector::Set(high);
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      uint64_t outside = 0;
      for (int i = 0; i < kBlock; i += kLanes) {
        const __m256i v = Load(x + i);
        const __m256i out = _mm256_or_si256(Vector::Greater(lows, v), Vector::Greater(v, highs));
        outside |= static_cast<uint64_t>(Vector::Mask(out)) << i;
      }
      StoreMask(~outside, bits);
    }
  }

  BITTRAIN_AVX2 static bool Compress(const Word* x, int64_t blocks, const uint8_t* bits,
                                     Word** values) {
    uint64_t differ = 0;
    Word* next = *values;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      const uint64_t marks = LoadMask(bits);
      // There may be no room at all; and storing nothing to one place again and again is slow.
      if (marks == 0) {
        for (int i = 0; i < kBlock; i += kLanes) {
          differ |= Vector::Mask(Vector::Equal(Load(x + i), _mm256_setzero_si256())) ^ kAll;
        }
        continue;
      }
      for (int i = 0; i < kBlock; i += kLanes) {
        const unsigned mask = static_cast<unsigned>(marks >> i) & kAll;
        const __m256i v = Load(x + i);
        differ |= Vector::Mask(Vector::Equal(v, _mm256_setzero_si256())) ^ mask ^ kAll;
        __builtin_prefetch(next + kAhead, 1);
        Store(Vector::Compress(mask, v), next);
        next += _mm_popcnt_u32(mask);
      }
    }
    *values = next;
    return differ == 0;
  }

  BITTRAIN_AVX2 static void Expand(const uint8_t* bits, const Word** values, int64_t blocks,
                                   Word* x) {
    const Word* next = *values;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      const uint64_t marks = LoadMask(bits);
      for (int i = 0; i < kBlock; i += kLanes) {
        const unsigned mask = static_cast<unsigned>(marks >> i) & kAll;
        Store(Vector::Expand(mask, Load(next)), x + i);
        next += _mm_popcnt_u32(mask);
      }
    }
    *values = next;
  }

  BITTRAIN_AVX2 static int64_t Count(const uint8_t* bits, int64_t blocks) {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; ++b) count += _mm_popcnt_u64(LoadMask(bits + 8 * b));
    return count;
  }

  static constexpr Loops<Word> kLoops{"avx2", Nonzero, InRange, Compress, Expand, Count};
};

// Eight words of 2 bytes to a vector of 128 bits: bytes are not shuffled across more than that.
template <>
struct Avx2<uint16_t> {
  static constexpr int kLanes = 8;

  BITTRAIN_AVX2 static BITTRAIN_INLINE __m128i Load(const void* x) {
    return _mm_loadu_si128(static_cast<const __m128i*>(x));
  }
  BITTRAIN_AVX2 static BITTRAIN_INLINE unsigned Mask(__m128i lanes) {
    return static_cast<unsigned>(_mm_movemask_epi8(_mm_packs_epi16(lanes, _mm_setzero_si128())));
  }

  BITTRAIN_AVX2 static int64_t Nonzero(const uint16_t* x, int64_t blocks, uint8_t* bits) {
    int64_t count = 0;
    for (int64_t i = 0; i < blocks * 8; ++i, x += kLanes) {
      const unsigned zero = Mask(_mm_cmpeq_epi16(Load(x), _mm_setzero_si128()));
      bits[i] = static_cast<uint8_t>(~zero);
      count += kLanes - _mm_popcnt_u32(zero);
    }
    return count;
  }

  BITTRAIN_AVX2 static void InRange(const uint16_t* x, int64_t blocks, int16_t low, int16_t high,
                                    uint8_t* bits) {
    const __m128i lows = _mm_set1_epi16(low), highs = _mm_set1_epi16(high);
    for (int64_t i = 0; i < blocks * 8; ++i, x += kLanes) {
      const __m128i v = Load(x);
      bits[i] = static_cast<uint8_t>(
          ~Mask(_mm_or_si128(_mm_cmpgt_epi16(lows, v), _mm_cmpgt_epi16(v, highs))));
    }
  }

  BITTRAIN_AVX2 static bool Compress(const uint16_t* x, int64_t blocks, const uint8_t* bits,
                                     uint16_t** values) {
    unsigned differ = 0;
    uint16_t* next = *values;
    for (int64_t i = 0; i < blocks * 8; ++i, x += kLanes) {
      const __m128i v = Load(x);
      differ |= Mask(_mm_cmpeq_epi16(v, _mm_setzero_si128())) ^ bits[i] ^ 0xFF;
      if (bits[i] == 0) continue;  // as above
      _mm_storeu_si128(reinterpret_cast<__m128i*>(next),
                       _mm_shuffle_epi8(v, Load(kShuffles2.compress[bits[i]])));
      next += _mm_popcnt_u32(bits[i]);
    }
    *values = next;
    return differ == 0;
  }

  BITTRAIN_AVX2 static void Expand(const uint8_t* bits, const uint16_t** values, int64_t blocks,
                                   uint16_t* x) {
    const uint16_t* next = *values;
    for (int64_t i = 0; i < blocks * 8; ++i, x += kLanes) {
      _mm_storeu_si128(reinterpret_cast<__m128i*>(x),
                       _mm_shuffle_epi8(Load(next), Load(kShuffles2.expand[bits[i]])));
      next += _mm_popcnt_u32(bits[i]);
    }
    *values = next;
  }

  static constexpr Loops<uint16_t> kLoops{"avx2",   Nonzero, InRange,
                                           Compress, Expand,  Avx2<uint32_t>::Count};
};

// ---------------------------------------------------------------------------------------------
// One vector of 512 bits at a time; the instruction set itself compresses and expands.

template <typename Word>
struct Vector512;

#define BITTRAIN_VECTOR512(BITS, SET)                                                          \
  template <>                                                                                  \
  struct Vector512<uint##BITS##_t> {                                                           \
    BITTRAIN_AVX512 static BITTRAIN_INLINE __m512i Set(int##BITS##_t v) {                      \
      return SET(v);                                                                           \
    }                                                                                          \
    BITTRAIN_AVX512 static BITTRAIN_INLINE uint64_t Nonzero(__m512i v) {                       \
      return _mm512_test_epi##BITS##_mask(v, v);                                               \
    }                                                                                          \
    BITTRAIN_AVX512 static BITTRAIN_INLINE uint64_t InRange(__m512i v, __m512i low,            \
                                                            __m512i high) {                    \
      return _mm512_mask_cmple_epi##BITS##_mask(_mm512_cmple_epi##BITS##_mask(low, v), v, high); \
    }                                                                                          \
    BITTRAIN_AVX512 static BITTRAIN_INLINE __m512i Compress(uint64_t mask, __m512i v) {        \
      return _mm512_maskz_compress_epi##BITS(mask, v);                                         \
    }                                                                                          \
    BITTRAIN_AVX512 static BITTRAIN_INLINE __m512i Expand(uint64_t mask, __m512i v) {          \
      return _mm512_maskz_expand_epi##BITS(mask, v);                                           \
    }                                                                                          \
  };

BITTRAIN_VECTOR512(16, _mm512_set1_epi16)
BITTRAIN_VECTOR512(32, _mm512_set1_epi32)
BITTRAIN_VECTOR512(64, _mm512_set1_epi64)
#undef BITTRAIN_VECTOR512

template <typename Word>
struct Avx512 {
  using Signed = std::make_signed_t<Word>;
  using Vector = Vector512<Word>;
  static constexpr int kLanes = 64 / sizeof(Word);
  static constexpr uint64_t kAll = (uint64_t{1} << kLanes) - 1;

  BITTRAIN_AVX512 static int64_t Nonzero(const Word* x, int64_t blocks, uint8_t* bits) {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      uint64_t mask = 0;
      for (int i = 0; i < kBlock; i += kLanes) {
        mask |= Vector::Nonzero(_mm512_loadu_si512(x + i)) << i;
      }
      StoreMask(mask, bits);
      count += _mm_popcnt_u64(mask);
    }
    return count;
  }

  BITTRAIN_AVX512 static void InRange(const Word* x, int64_t blocks, Signed low, Signed high,
                                      uint8_t* bits) {
    const __m512i lows = Vector::Set(low), highs = Vector::Set(high);
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      uint64_t mask = 0;
      for (int i = 0; i < kBlock; i += kLanes) {
        mask |= Vector::InRange(_mm512_loadu_si512(x + i), lows, highs) << i;
      }
      StoreMask(mask, bits);
    }
  }

  BITTRAIN_AVX512 static bool Compress(const Word* x, int64_t blocks, const uint8_t* bits,
                                       Word** values) {
    uint64_t differ = 0;
    Word* next = *values;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      const uint64_t marks = LoadMask(bits);
      if (marks == 0) {  // as above
        for (int i = 0; i < kBlock; i += kLanes) {
          differ |= Vector::Nonzero(_mm512_loadu_si512(x + i));
        }
        continue;
      }
      for (int i = 0; i < kBlock; i += kLanes) {
        const uint64_t mask = marks >> i & kAll;
        const __m512i v = _mm512_loadu_si512(x + i);
        differ |= Vector::Nonzero(v) ^ mask;
        __builtin_prefetch(next + kAhead, 1);
        _mm512_storeu_si512(next, Vector::Compress(mask, v));
        next += _mm_popcnt_u64(mask);
      }
    }
    *values = next;
    return differ == 0;
  }

  BITTRAIN_AVX512 static void Expand(const uint8_t* bits, const Word** values, int64_t blocks,
                                     Word* x) {
    const Word* next = *values;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      const uint64_t marks = LoadMask(bits);
      for (int i = 0; i < kBlock; i += kLanes) {
        const uint64_t mask = marks >> i & kAll;
        _mm512_storeu_si512(x + i, Vector::Expand(mask, _mm512_loadu_si512(next)));
        next += _mm_popcnt_u64(mask);
      }
    }
    *values = next;
  }

  BITTRAIN_AVX512 static int64_t Count(const uint8_t* bits, int64_t blocks) {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; ++b) count += _mm_popcnt_u64(LoadMask(bits + 8 * b));
    return count;
  }

  static constexpr Loops<Word> kLoops{"avx512", Nonzero, InRange, Compress, Expand, Count};
};

}  // namespace bittrain

#undef BITTRAIN_AVX2
#undef BITTRAIN_AVX512
#undef BITTRAIN_INLINE

#endif  // BITTRAIN_BLOCKS_X86_H_
