// Masks of one bit an element: made by a condition, and applied to a gradient.
#ifndef BITTRAIN_MASK_H_
#define BITTRAIN_MASK_H_

#include <cmath>
#include <cstring>

#include "bitmap.h"
#include "float_loops.h"

namespace bittrain {

// What the bits of a floating-point format mean.
template <typename Word, int MantissaBits>
struct Format {
  using Signed = std::make_signed_t<Word>;
  static constexpr int kMantissaBits = MantissaBits;
  static constexpr Signed kSmallestNormal = Signed{1} << MantissaBits;
  static constexpr Word kSign = Word{1} << (8 * sizeof(Word) - 1);
  static constexpr Signed kInfinity =
      static_cast<Signed>((kSign - 1) & ~(static_cast<Word>(kSmallestNormal) - 1));
};

using Half = Format<uint16_t, 10>;
using Bfloat16 = Format<uint16_t, 7>;
using Float = Format<uint32_t, 23>;
using Double = Format<uint64_t, 52>;

// Positive floats, as integers, are in the order of their values. With subnormals flushed, the
// comparison `x > 0` begins at the smallest normal number; not so for halves, which are compared
// as the floats they convert to.
template <typename F>
typename F::Signed SmallestPositive() {
  const bool flushed = SubnormalsAreZero() && F::kMantissaBits != Half::kMantissaBits;
  return flushed ? F::kSmallestNormal : 1;
}

// Calls `fn(begin, length)` for the shards of a mask, which begin at whole bytes.
template <typename Fn>
void ForShards(int64_t n, int64_t threads, const Fn& fn) {
  const Shards shards(n, kGrain, kStretch, threads);
  Pool::Get().Run(shards.count, threads, [&](int64_t shard) {
    fn(shards.begin(shard), shards.end(shard) - shards.begin(shard));
  });
}

// Marks low <= x <= high for a `low` above zero, everything compared as integers.
template <typename Word>
void MarkRange(const Word* x, int64_t n, std::make_signed_t<Word> low,
               std::make_signed_t<Word> high, int64_t threads, uint8_t* packed) {
  const Loops<Word>& loops = BestLoops<Word>();
  ForShards(n, threads, [&](int64_t begin, int64_t length) {
    InRange(loops, x + begin, length, low, high, packed + begin / 8);
  });
}

// Marks the true ones of TensorFlow's booleans, which are bytes of 0 and 1.
inline void MarkTrue(const uint8_t* x, int64_t n, int64_t threads, uint8_t* packed) {
  ForShards(n, threads, [&](int64_t begin, int64_t length) {
    const int64_t end = begin + length;
    int64_t i = begin;
    for (; i + 8 <= end; i += 8) {
      // The product's highest byte collects one bit of each of the eight bytes.
      packed[i / 8] = static_cast<uint8_t>((LoadMask(x + i) * 0x0102040810204080u) >> 56);
    }
    for (; i < end; ++i) {
      const uint8_t bit = static_cast<uint8_t>(x[i] << (i % 8));
      packed[i / 8] = static_cast<uint8_t>(i % 8 == 0 ? bit : packed[i / 8] | bit);
    }
  });
}

inline bool Bit(const uint8_t* packed, int64_t i) { return packed[i / 8] >> (i % 8) & 1; }

// out = dy * mask: as a product, so that the sign of a zero and a NaN come out as in
// TensorFlow's ReluGrad. `out` may be `dy`.
inline void Multiply(const float* dy, const uint8_t* packed, int64_t n, int64_t threads,
                     float* out) {
  ForShards(n, threads, [&](int64_t begin, int64_t length) {
    BestFloatLoops().multiply(dy + begin, packed + begin / 8, length, out + begin);
  });
}

inline void Multiply(const double* dy, const uint8_t* packed, int64_t n, int64_t threads,
                     double* out) {
  ForShards(n, threads, [&](int64_t begin, int64_t length) {
    for (int64_t i = begin; i < begin + length; ++i) out[i] = dy[i] * Bit(packed, i);
  });
}

// The same for 2-byte formats, on their bits: times 1 is itself, times 0 a zero of its sign, or
// NaN for what is not finite.
template <typename F>
void MultiplyBits(const uint16_t* dy, const uint8_t* packed, int64_t n, int64_t threads,
                  uint16_t* out) {
  constexpr uint16_t kNan = static_cast<uint16_t>(F::kInfinity | F::kSmallestNormal >> 1);
  ForShards(n, threads, [&](int64_t begin, int64_t length) {
    for (int64_t i = begin; i < begin + length; ++i) {
      const uint16_t word = dy[i], sign = word & F::kSign;
      const bool finite = (word & F::kInfinity) != F::kInfinity;
      const uint16_t zero = finite ? sign : static_cast<uint16_t>(sign | kNan);
      out[i] = Bit(packed, i) ? word : zero;
    }
  });
}

// out = dy * on where the mask is set, elsewhere dy * off, or plain zero for an `off` of zero.
// `out` may be `dy`.
inline void Choose(const float* dy, const uint8_t* packed, int64_t n, float on, float off,
                   int64_t threads, float* out) {
  ForShards(n, threads, [&](int64_t begin, int64_t length) {
    BestFloatLoops().choose(dy + begin, packed + begin / 8, length, on, off, out + begin);
  });
}

}  // namespace bittrain

#endif  // BITTRAIN_MASK_H_
