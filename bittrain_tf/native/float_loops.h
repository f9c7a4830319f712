// Dispatch of float_loops.inc to the instruction set at hand.
#ifndef BITTRAIN_FLOAT_LOOPS_H_
#define BITTRAIN_FLOAT_LOOPS_H_

#include <cstdint>
#include <cstring>

#include "blocks.h"

namespace bittrain {

struct FloatLoops {
  const char* name;
  void (*affine)(const float* x, int64_t rows, int64_t channels, const float* scale,
                 const float* offset, float low, float high, float* y);
  void (*add_gradients)(const float* g, const float* x, int64_t rows, int64_t channels,
                        const float* mean, float* dbeta, float* dgamma);
  void (*input_gradient)(const float* g, const float* x, int64_t rows, int64_t channels,
                         const float* mean, const float* slope, const float* offset,
                         const float* scale, float* dx);
  void (*multiply)(const float* g, const uint8_t* bits, int64_t n, float* out);
  void (*choose)(const float* g, const uint8_t* bits, int64_t n, float on, float off, float* out);
  void (*largest)(const float* const* x, int64_t count, int64_t n, float* largest,
                  uint32_t* places);
};

// Vectors of eight, in the compiler's own notation: one register or two, by instruction set.
using Floats = float __attribute__((vector_size(32)));
using Words = uint32_t __attribute__((vector_size(32)));

// Eight words for each byte: all bits set for the byte's bits that are.
struct Marks {
  alignas(64) uint32_t of[256][8];

  constexpr Marks() : of() {
    for (int byte = 0; byte < 256; ++byte) {
      for (int i = 0; i < 8; ++i) of[byte][i] = byte >> i & 1 ? ~uint32_t{0} : 0;
    }
  }
};

inline constexpr Marks kMarks;

namespace portable {
#define BITTRAIN_TARGET
#include "float_loops.inc"
#undef BITTRAIN_TARGET
inline constexpr FloatLoops kFloatLoops{"portable", Affine, AddGradients, InputGradient,
                                        Multiply,   Choose, Largest};
}  // namespace portable

#if defined(__x86_64__)
namespace avx2 {
#define BITTRAIN_TARGET __attribute__((target("avx2")))
#include "float_loops.inc"
#undef BITTRAIN_TARGET
inline constexpr FloatLoops kFloatLoops{"avx2", Affine, AddGradients, InputGradient,
                                        Multiply,   Choose, Largest};
}  // namespace avx2
#endif

inline const FloatLoops& BestFloatLoops() {
#if defined(__x86_64__)
  if (HasAvx2()) return avx2::kFloatLoops;
#endif
  return portable::kFloatLoops;
}

}  // namespace bittrain

#endif  // BITTRAIN_FLOAT_LOOPS_H_
