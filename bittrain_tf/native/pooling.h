// Max pooling over windows that do not overlap and cover the input: float32, channels last.
//
// A bit for each element of the input says whether it was its window's maximum (the first, where
// there are several): all that the gradient needs.
#ifndef BITTRAIN_POOLING_H_
#define BITTRAIN_POOLING_H_

#include <algorithm>
#include <vector>

#include "mask.h"

namespace bittrain {

// Of a tensor [batch, height, width, channels]; height and width are multiples of the window's,
// and channels of 8, so that every pixel begins at a byte of the mask.
struct Pooling {
  int64_t batch, height, width, channels, window_height, window_width;

  int64_t rows() const { return batch * (height / window_height); }  // of windows
  int64_t columns() const { return width / window_width; }

  // The first element of place `k`, in row-major order, in the window at (row, column).
  int64_t at(int64_t row, int64_t column, int64_t k) const {
    const int64_t i = k / window_width, j = k % window_width;
    return ((row * window_height + i) * width + column * window_width + j) * channels;
  }

  int64_t grain() const {
    return std::max<int64_t>(1, kGrain / std::max<int64_t>(1, window_height * width * channels));
  }
};

inline void MaxPool(const Pooling& p, const float* x, int64_t threads, float* y, uint8_t* packed) {
  const FloatLoops& loops = BestFloatLoops();
  const Loops<uint32_t>& words = BestLoops<uint32_t>();
  const Shards shards(p.rows(), p.grain(), 1, threads);
  Pool::Get().Run(shards.count, threads, [&](int64_t shard) {
    const int64_t count = p.window_height * p.window_width;
    std::vector<uint32_t> places(p.channels);
    std::vector<const float*> window(count);
    for (int64_t row = shards.begin(shard); row < shards.end(shard); ++row) {
      for (int64_t column = 0; column < p.columns(); ++column) {
        for (int64_t k = 0; k < count; ++k) window[k] = x + p.at(row, column, k);
        loops.largest(window.data(), count, p.channels,
                      y + (row * p.columns() + column) * p.channels, places.data());
        for (int64_t k = 0; k < count; ++k) {
          const int32_t place = static_cast<int32_t>(k + 1);
          InRange(words, places.data(), p.channels, place, place,
                  packed + p.at(row, column, k) / 8);
        }
      }
    }
  });
}

inline void MaxPoolGradient(const Pooling& p, const float* dy, const uint8_t* packed,
                            int64_t threads, float* dx) {
  const FloatLoops& loops = BestFloatLoops();
  const Shards shards(p.rows(), p.grain(), 1, threads);
  Pool::Get().Run(shards.count, threads, [&](int64_t shard) {
    for (int64_t row = shards.begin(shard); row < shards.end(shard); ++row) {
      for (int64_t i = 0; i < p.window_height; ++i) {
        for (int64_t column = 0; column < p.columns(); ++column) {
          for (int64_t j = 0; j < p.window_width; ++j) {
            const int64_t place = p.at(row, column, i * p.window_width + j);
            loops.choose(dy + (row * p.columns() + column) * p.channels, packed + place / 8,
                         p.channels, 1.0f, 0.0f, dx + place);
          }
        }
      }
    }
  });
}

}  // namespace bittrain

#endif  // BITTRAIN_POOLING_H_
