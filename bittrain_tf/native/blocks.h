// Inner loops over blocks of 64 elements, one set for each instruction set.
//
// Elements are words of 2, 4 or 8 bytes: what a float is worth is read off its bits, so that
// nothing depends on rounding or on how subnormals and NaNs compare. Bit i of a block's 64-bit
// mask is its element i. The sets differ in speed only.
#ifndef BITTRAIN_BLOCKS_H_
#define BITTRAIN_BLOCKS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "bittrain's bitmaps are little-endian"
#endif

namespace bittrain {

constexpr int64_t kBlock = 64;

inline uint64_t LoadMask(const uint8_t* bits) {
  uint64_t mask;
  std::memcpy(&mask, bits, sizeof mask);
  return mask;
}

inline void StoreMask(uint64_t mask, uint8_t* bits) { std::memcpy(bits, &mask, sizeof mask); }

// Pointers need no more alignment than their type's.
template <typename Word>
struct Loops {
  using Signed = std::make_signed_t<Word>;

  const char* name;

  // Marks the words that are not zero; returns how many.
  int64_t (*nonzero)(const Word* x, int64_t blocks, uint8_t* bits);

  // Marks the words that, as signed integers, are in [low, high].
  void (*in_range)(const Word* x, int64_t blocks, Signed low, Signed high, uint8_t* bits);

  // Moves the marked words together, and `*values` past them; returns whether exactly the words
  // that are not zero were marked. May write anywhere in `(*values)[0:64 * blocks]` if any were.
  bool (*compress)(const Word* x, int64_t blocks, const uint8_t* bits, Word** values);

  // The reverse, with zeros between. May read anywhere in `(*values)[0:64 * blocks]`.
  void (*expand)(const uint8_t* bits, const Word** values, int64_t blocks, Word* x);

  // How many bits are set.
  int64_t (*count)(const uint8_t* bits, int64_t blocks);
};

// ---------------------------------------------------------------------------------------------
// Plain C++. Its `compress` and `expand` touch no values beyond the marked ones.

template <typename Word>
struct Portable {
  using Signed = std::make_signed_t<Word>;

  static int64_t Nonzero(const Word* x, int64_t blocks, uint8_t* bits) {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      uint64_t mask = 0;
      for (int i = 0; i < kBlock; ++i) mask |= static_cast<uint64_t>(x[i] != 0) << i;
      StoreMask(mask, bits);
      count += __builtin_popcountll(mask);
    }
    return count;
  }

  static void InRange(const Word* x, int64_t blocks, Signed low, Signed high, uint8_t* bits) {
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      uint64_t mask = 0;
      for (int i = 0; i < kBlock; ++i) {
        const Signed word = static_cast<Signed>(x[i]);
        mask |= static_cast<uint64_t>(low <= word && word <= high) << i;
      }
      StoreMask(mask, bits);
    }
  }

  static bool Compress(const Word* x, int64_t blocks, const uint8_t* bits, Word** values) {
    bool same = true;
    Word* next = *values;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      const uint64_t mask = LoadMask(bits);
      for (int i = 0; i < kBlock; ++i) same &= (x[i] != 0) == (mask >> i & 1);
      for (uint64_t left = mask; left != 0; left &= left - 1) {
        *next++ = x[__builtin_ctzll(left)];
      }
    }
    *values = next;
    return same;
  }

  static void Expand(const uint8_t* bits, const Word** values, int64_t blocks, Word* x) {
    const Word* next = *values;
    for (int64_t b = 0; b < blocks; ++b, x += kBlock, bits += 8) {
      std::memset(x, 0, kBlock * sizeof(Word));
      for (uint64_t left = LoadMask(bits); left != 0; left &= left - 1) {
        x[__builtin_ctzll(left)] = *next++;
      }
    }
    *values = next;
  }

  static int64_t Count(const uint8_t* bits, int64_t blocks) {
    int64_t count = 0;
    for (int64_t b = 0; b < blocks; ++b) count += __builtin_popcountll(LoadMask(bits + 8 * b));
    return count;
  }

  static constexpr Loops<Word> kLoops{"portable", Nonzero, InRange,
                                       Compress,   Expand,  Count};
};

}  // namespace bittrain

#if defined(__x86_64__)
#include "blocks_x86.h"
#elif defined(__aarch64__)
#include "blocks_neon.h"
#endif

namespace bittrain {

// The sets this machine can run, the fastest first; ends with a null pointer.
template <typename Word>
const Loops<Word>* const* AvailableLoops() {
  static const Loops<Word>* const* const available = [] {
    static const Loops<Word>* found[4] = {};
    int count = 0;
#if defined(__x86_64__)
    if (HasAvx512<Word>()) found[count++] = &Avx512<Word>::kLoops;
    if (HasAvx2()) found[count++] = &Avx2<Word>::kLoops;
#elif defined(__aarch64__)
    found[count++] = &Neon<Word>::kLoops;
#endif
    found[count] = &Portable<Word>::kLoops;
    return found;
  }();
  return available;
}

template <typename Word>
const Loops<Word>& BestLoops() {
  return *AvailableLoops<Word>()[0];
}

}  // namespace bittrain

#endif  // BITTRAIN_BLOCKS_H_
