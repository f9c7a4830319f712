// Encoding and decoding whole tensors: a bit an element, and the words that are not zero.
#ifndef BITTRAIN_BITMAP_H_
#define BITTRAIN_BITMAP_H_

#include <algorithm>
#include <atomic>
#include <cstring>
#include <vector>

#include "blocks.h"
#include "parallel.h"

namespace bittrain {

constexpr int64_t kStretch = 16 * kBlock;  // elements handed to one call of an inner loop
constexpr int64_t kGrain = int64_t{1} << 16;

inline int64_t BitmapBytes(int64_t elements) { return elements / 8 + (elements % 8 != 0); }

// Whether the bits that fill up the last byte are all zero.
inline bool FilledWithZeros(const uint8_t* bitmap, int64_t elements) {
  return elements % 8 == 0 || bitmap[elements / 8] >> (elements % 8) == 0;
}

// ---------------------------------------------------------------------------------------------
// Stretches of any length, which begin at a byte of the bitmap.

// How many of the first `n` bits are set; those beyond are zero.
template <typename Word>
int64_t Count(const Loops<Word>& loops, const uint8_t* bits, int64_t n) {
  const int64_t whole = n / kBlock, rest = n % kBlock;
  int64_t count = loops.count(bits, whole);
  if (rest > 0) {
    uint8_t mask[8] = {};
    std::copy_n(bits + whole * 8, BitmapBytes(rest), mask);
    count += loops.count(mask, 1);
  }
  return count;
}

template <typename Word>
int64_t Nonzero(const Loops<Word>& loops, const Word* x, int64_t n, uint8_t* bits) {
  const int64_t whole = n / kBlock, rest = n % kBlock;
  int64_t count = loops.nonzero(x, whole, bits);
  if (rest > 0) {
    Word block[kBlock] = {};
    uint8_t mask[8];
    std::copy_n(x + whole * kBlock, rest, block);
    count += loops.nonzero(block, 1, mask);
    std::copy_n(mask, BitmapBytes(rest), bits + whole * 8);
  }
  return count;
}

// `low` is above zero.
template <typename Word>
void InRange(const Loops<Word>& loops, const Word* x, int64_t n, std::make_signed_t<Word> low,
             std::make_signed_t<Word> high, uint8_t* bits) {
  const int64_t whole = n / kBlock, rest = n % kBlock;
  loops.in_range(x, whole, low, high, bits);
  if (rest > 0) {
    Word block[kBlock] = {};
    uint8_t mask[8];
    std::copy_n(x + whole * kBlock, rest, block);
    loops.in_range(block, 1, low, high, mask);
    std::copy_n(mask, BitmapBytes(rest), bits + whole * 8);
  }
}

// Writes the marked words to [values, end), which has just the room for them; returns whether
// the marked ones were those that are not zero.
template <typename Word>
bool Compress(const Loops<Word>& loops, const Word* x, int64_t n, const uint8_t* bits,
              Word* values, Word* end) {
  bool same = true;
  int64_t i = 0;
  while (n - i >= kBlock) {
    const int64_t length = std::min(kStretch, (n - i) / kBlock * kBlock);
    const bool room = end - values >= length || loops.count(bits + i / 8, length / kBlock) == 0;
    const auto compress = room ? loops.compress : Portable<Word>::Compress;
    same &= compress(x + i, length / kBlock, bits + i / 8, &values);
    i += length;
  }
  if (i < n) {
    Word block[kBlock] = {};
    uint8_t mask[8] = {};
    std::copy_n(x + i, n - i, block);
    std::copy_n(bits + i / 8, BitmapBytes(n - i), mask);
    same &= Portable<Word>::Compress(block, 1, mask, &values);
  }
  return same;
}

// Reads the marked words from [values, end), where there are just as many.
template <typename Word>
void Expand(const Loops<Word>& loops, const uint8_t* bits, const Word* values, const Word* end,
            int64_t n, Word* x) {
  int64_t i = 0;
  while (n - i >= kBlock) {
    const int64_t length = std::min(kStretch, (n - i) / kBlock * kBlock);
    const bool room = end - values >= length;
    const auto expand = room ? loops.expand : Portable<Word>::Expand;
    expand(bits + i / 8, &values, length / kBlock, x + i);
    i += length;
  }
  if (i < n) {
    Word block[kBlock];
    uint8_t mask[8] = {};
    std::copy_n(bits + i / 8, BitmapBytes(n - i), mask);
    Portable<Word>::Expand(mask, &values, 1, block);
    std::copy_n(block, n - i, x + i);
  }
}

// ---------------------------------------------------------------------------------------------
// Whole tensors, in shards.

template <typename Word>
class Bitmap {
 public:
  Bitmap(int64_t elements, int64_t threads, const Loops<Word>& loops = BestLoops<Word>())
      : threads_(threads),
        loops_(loops),
        shards_(elements, kGrain, kStretch, threads),
        offsets_(shards_.count + 1) {}

  // Fills `bitmap`; returns the number of values.
  int64_t Mark(const Word* x, uint8_t* bitmap) {
    return Offsets([&](int64_t begin, int64_t length) {
      return bittrain::Nonzero(loops_, x + begin, length, bitmap + begin / 8);
    });
  }

  // Takes a bitmap as it is; returns the number of values it marks.
  int64_t Read(const uint8_t* bitmap) {
    return Offsets([&](int64_t begin, int64_t length) {
      return bittrain::Count(loops_, bitmap + begin / 8, length);
    });
  }

  // After `Mark` or `Read`: writes the marked values. Returns whether the bitmap marked just
  // the words that are not zero; if not, the values are of no use.
  bool Compress(const Word* x, const uint8_t* bitmap, Word* values) {
    std::atomic<bool> same{true};
    Pool::Get().Run(shards_.count, threads_, [&](int64_t shard) {
      if (!same) return;
      const int64_t begin = shards_.begin(shard), length = shards_.end(shard) - begin;
      if (!bittrain::Compress(loops_, x + begin, length, bitmap + begin / 8,
                              values + offsets_[shard], values + offsets_[shard + 1])) {
        same = false;
      }
    });
    return same;
  }

  // After `Read`: writes the tensor.
  void Expand(const uint8_t* bitmap, const Word* values, Word* x) {
    const Word* end = values + offsets_.back();
    Pool::Get().Run(shards_.count, threads_, [&](int64_t shard) {
      const int64_t begin = shards_.begin(shard), length = shards_.end(shard) - begin;
      bittrain::Expand(loops_, bitmap + begin / 8, values + offsets_[shard], end, length,
                       x + begin);
    });
  }

 private:
  template <typename Fn>
  int64_t Offsets(const Fn& count) {
    Pool::Get().Run(shards_.count, threads_, [&](int64_t shard) {
      const int64_t begin = shards_.begin(shard);
      offsets_[shard + 1] = count(begin, shards_.end(shard) - begin);
    });
    for (int64_t shard = 0; shard < shards_.count; ++shard) {
      offsets_[shard + 1] += offsets_[shard];
    }
    return offsets_.back();
  }

  int64_t threads_;
  const Loops<Word>& loops_;
  Shards shards_;
  std::vector<int64_t> offsets_;
};

}  // namespace bittrain

#endif  // BITTRAIN_BITMAP_H_
