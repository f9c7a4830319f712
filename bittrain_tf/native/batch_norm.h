// Batch normalization over the last axis, float32: forward, given the statistics, and backward,
// each in as few sweeps over memory as the sums allow. (The statistics are TensorFlow's: sums in
// another order would have other last bits, and the forward pass is to be that of the stock layer.)
//
// Ioffe and Szegedy, 2015 (arXiv 1502.03167). Sums are taken over a few rows in float32 and from
// there on in float64, in an order that depends on the shape only: the same bits whatever the
// number of threads and the instruction set.
#ifndef BITTRAIN_BATCH_NORM_H_
#define BITTRAIN_BATCH_NORM_H_

#include <numeric>
#include <vector>

#include "float_loops.h"
#include "mask.h"

namespace bittrain {

constexpr int64_t kRowsInFloat = 32;  // a multiple of 8, for whole bytes of a mask

// Shards of rows, independent of the number of threads. They begin at whole bytes of a mask.
struct Rows {
  int64_t rows, channels, length, count;

  Rows(int64_t rows, int64_t channels) : rows(rows), channels(channels) {
    const int64_t least = std::max(kGrain / std::max<int64_t>(channels, 1), kRowsInFloat);
    length = std::max(least, (rows + 63) / 64);
    length = (length + 7) / 8 * 8;
    count = (rows + length - 1) / length;
  }

  int64_t begin(int64_t shard) const { return shard * length; }
  int64_t end(int64_t shard) const { return std::min(rows, (shard + 1) * length); }
};

// Rows at a time that fit the nearest cache and begin at whole bytes of a mask.
inline int64_t TileRows(int64_t channels) {
  const int64_t whole = 8 / std::gcd(channels, int64_t{8});
  return std::max(whole, kStretch * 2 / std::max<int64_t>(channels, 1) / whole * whole);
}

// Sums `width` numbers for every row, by channel. `add(begin, rows, sums)` adds those of some
// rows to float32 sums.
template <typename Add>
std::vector<double> SumRows(const Rows& shards, int64_t width, int64_t threads, const Add& add) {
  std::vector<double> sums(shards.count * width);
  Pool::Get().Run(shards.count, threads, [&](int64_t shard) {
    std::vector<float> part(width);
    double* sum = sums.data() + shard * width;
    for (int64_t r = shards.begin(shard); r < shards.end(shard); r += kRowsInFloat) {
      std::fill(part.begin(), part.end(), 0.0f);
      add(r, std::min(kRowsInFloat, shards.end(shard) - r), part.data());
      for (int64_t i = 0; i < width; ++i) sum[i] += part[i];
    }
  });
  for (int64_t shard = 1; shard < shards.count; ++shard) {
    for (int64_t i = 0; i < width; ++i) sums[i] += sums[shard * width + i];
  }
  sums.resize(width);
  return sums;
}

// y = x * scale + offset from `low` to `high`; `packed`, if not null, marks low < y < high. `y`
// may be `x`.
inline void Normalize(const float* x, const float* scale, const float* offset, int64_t rows,
                      int64_t channels, float low, float high, int64_t threads, float* y,
                      uint8_t* packed) {
  const FloatLoops& loops = BestFloatLoops();
  const Loops<uint32_t>& words = BestLoops<uint32_t>();
  const Rows shards(rows, channels);
  const int64_t tile = TileRows(channels);
  // y > low = 0 and y < high, on the bits. An infinite `high` bounds nothing.
  const int32_t least = SmallestPositive<Float>();
  int32_t most;
  std::memcpy(&most, &high, sizeof most);
  if (std::isfinite(high)) --most;
  Pool::Get().Run(shards.count, threads, [&](int64_t shard) {
    for (int64_t r = shards.begin(shard); r < shards.end(shard); r += tile) {
      const int64_t n = std::min(tile, shards.end(shard) - r), begin = r * channels;
      loops.affine(x + begin, n, channels, scale, offset, low, high, y + begin);
      if (packed != nullptr) {
        InRange(words, reinterpret_cast<const uint32_t*>(y + begin), n * channels, least, most,
                packed + begin / 8);
      }
    }
  });
}

// Gradients of `gamma * (x - mean) * inv_std + beta`, the statistics being those of x.
//
// With `packed`, dy is first multiplied by that mask. `scale` is gamma * inv_std. `dx` may be
// `dy`.
inline void NormalizeGradient(const float* dy, const uint8_t* packed, const float* x,
                              const float* mean, const float* inv_std, const float* scale,
                              int64_t rows, int64_t channels, int64_t threads, float* dx,
                              float* dgamma, float* dbeta) {
  const FloatLoops& loops = BestFloatLoops();
  const Rows shards(rows, channels);
  const int64_t tile = TileRows(channels);

  // Calls `fn(row, rows, gradient)` for tiles of the masked gradient.
  const auto masked = [&](int64_t begin, int64_t n, const auto& fn) {
    if (packed == nullptr) {
      fn(begin, n, dy + begin * channels);
      return;
    }
    thread_local std::vector<float> gradient;  // kept: this runs for every few rows
    gradient.resize(tile * channels);
    for (int64_t r = begin; r < begin + n; r += tile) {
      const int64_t here = std::min(tile, begin + n - r);
      loops.multiply(dy + r * channels, packed + r * channels / 8, here * channels,
                     gradient.data());
      fn(r, here, gradient.data());
    }
  };

  const auto sums =
      SumRows(shards, 2 * channels, threads, [&](int64_t begin, int64_t n, float* sum) {
        masked(begin, n, [&](int64_t r, int64_t here, const float* gradient) {
          loops.add_gradients(gradient, x + r * channels, here, channels, mean, sum,
                              sum + channels);
        });
      });
  std::vector<float> slope(channels), offset(channels);
  const float count = static_cast<float>(rows);
  for (int64_t c = 0; c < channels; ++c) {
    dbeta[c] = static_cast<float>(sums[c]);
    dgamma[c] = static_cast<float>(sums[channels + c]) * inv_std[c];
    slope[c] = dgamma[c] * inv_std[c] / count;
    offset[c] = dbeta[c] / count;
  }
  Pool::Get().Run(shards.count, threads, [&](int64_t shard) {
    const int64_t begin = shards.begin(shard);
    masked(begin, shards.end(shard) - begin,
           [&](int64_t r, int64_t here, const float* gradient) {
             loops.input_gradient(gradient, x + r * channels, here, channels, mean, slope.data(),
                                  offset.data(), scale, dx + r * channels);
           });
  });
}

}  // namespace bittrain

#endif  // BITTRAIN_BATCH_NORM_H_
