// Random inputs through the native kernels' algorithms, checked against plain loops. Meant to be
// compiled with -fsanitize=address,undefined: buffers have exactly the size they need, at addresses
// aligned for their elements only, so that every read or write beyond them is seen.
//
//   native_fuzz SECONDS SEED

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "batch_norm.h"
#include "bitmap.h"
#include "mask.h"
#include "pooling.h"

namespace {

using namespace bittrain;

std::mt19937_64 generator;
std::string doing;  // what is named if a check fails

int64_t Below(int64_t n) { return static_cast<int64_t>(generator() % static_cast<uint64_t>(n)); }

double Uniform() { return static_cast<double>(generator() >> 11) * 0x1p-53; }

void Expect(bool ok, const char* what) {
  if (ok) return;
  std::printf("FAILED: %s: %s\n", doing.c_str(), what);
  std::exit(1);
}

// `n` elements and not a byte more.
template <typename T>
class Exact {
 public:
  explicit Exact(int64_t n) : n_(n), bytes_(new uint8_t[n * sizeof(T) + sizeof(T)]) {}
  // Off by one element, to be aligned for that and nothing wider.
  T* data() { return reinterpret_cast<T*>(bytes_.get()) + 1; }
  T& operator[](int64_t i) { return data()[i]; }
  int64_t size() const { return n_; }
  T* begin() { return data(); }
  T* end() { return data() + n_; }

 private:
  int64_t n_;
  std::unique_ptr<uint8_t[]> bytes_;
};

int64_t Length() {
  static constexpr int64_t kAround[] = {0, 8, 64, 128, 1024, 2048, kGrain, 2 * kGrain};
  switch (Below(4)) {
    case 0:
      return Below(300);
    case 1:
      return Below(4 * kGrain + 1);
    default:
      return std::max<int64_t>(0, kAround[Below(std::size(kAround))] + Below(5) - 2);
  }
}

template <typename Word>
Exact<Word> Words(int64_t n) {
  static constexpr double kDensities[] = {0, 0.001, 0.1, 0.5, 0.9, 1};
  const double density = kDensities[Below(std::size(kDensities))];
  Exact<Word> x(n);
  // Any bits at all: zeros of either sign, subnormals, infinities and NaNs among them.
  for (Word& word : x) {
    word = Uniform() < density ? static_cast<Word>(generator() | 1) << Below(8 * sizeof(Word)) : 0;
  }
  return x;
}

Exact<float> Floats(int64_t n) {
  Exact<float> x(n);
  for (float& value : x) value = static_cast<float>(Below(17) - 8) * 0.37f;
  return x;
}

// The reference: a bit for every i with `marked(i)`.
template <typename Marked>
Exact<uint8_t> Bits(int64_t n, const Marked& marked) {
  Exact<uint8_t> bits(BitmapBytes(n));
  std::fill(bits.begin(), bits.end(), 0);
  for (int64_t i = 0; i < n; ++i) bits[i / 8] |= static_cast<uint8_t>(marked(i) << (i % 8));
  return bits;
}

template <typename T>
bool Same(Exact<T>& a, Exact<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

// ---------------------------------------------------------------------------------------------

template <typename Word>
void FuzzCodec(const Loops<Word>& loops) {
  const int64_t n = Length(), threads = 1 + Below(4);
  doing = std::string("codec, ") + loops.name + ", words of " + std::to_string(sizeof(Word)) +
          " bytes, " + std::to_string(n) + " of them";
  Exact<Word> x = Words<Word>(n);
  Exact<uint8_t> expected = Bits(n, [&](int64_t i) { return x[i] != 0; });
  const int64_t nonzeros = n - std::count(x.begin(), x.end(), Word{0});

  Bitmap<Word> bitmap(n, threads, loops);
  Exact<uint8_t> bits(BitmapBytes(n));
  Expect(bitmap.Mark(x.data(), bits.data()) == nonzeros, "Mark counts");
  Expect(Same(bits, expected), "Mark marks");
  Exact<Word> values(nonzeros);
  Expect(bitmap.Compress(x.data(), bits.data(), values.data()), "Compress takes its own bitmap");
  int64_t next = 0;
  for (const Word word : x) {
    if (word != 0) Expect(values[next++] == word, "Compress keeps");
  }
  Exact<Word> y(n);
  Bitmap<Word> reader(n, threads, loops);
  Expect(reader.Read(bits.data()) == nonzeros, "Read counts");
  reader.Expand(bits.data(), values.data(), y.data());
  Expect(Same(x, y), "Expand restores");

  if (n == 0) return;
  for (int64_t flips = 1 + Below(3); flips > 0; --flips) {
    const int64_t i = Below(n);
    bits[i / 8] ^= static_cast<uint8_t>(1 << i % 8);
  }
  if (Same(bits, expected)) return;
  Exact<Word> others(reader.Read(bits.data()));
  Expect(!reader.Compress(x.data(), bits.data(), others.data()), "Compress sees a wrong bitmap");
}

template <typename Word>
void FuzzRange(const Loops<Word>& loops) {
  using Signed = std::make_signed_t<Word>;
  const int64_t n = Length();
  doing = std::string("range, ") + loops.name + ", " + std::to_string(n);
  Exact<Word> x = Words<Word>(n);
  const Signed low = static_cast<Signed>(static_cast<Word>(generator()) >> 1 | 1);
  const Signed high = static_cast<Signed>(static_cast<Word>(generator()) >> 1);
  Exact<uint8_t> expected = Bits(n, [&](int64_t i) {
    const Signed word = static_cast<Signed>(x[i]);
    return low <= word && word <= high;
  });
  Exact<uint8_t> bits(BitmapBytes(n));
  InRange(loops, x.data(), n, low, high, bits.data());
  Expect(Same(bits, expected), "InRange marks");
}

template <typename Word>
void FuzzWords(std::set<std::string>* names) {
  for (const Loops<Word>* const* loops = AvailableLoops<Word>(); *loops != nullptr; ++loops) {
    names->insert((*loops)->name);
    FuzzCodec(**loops);
    FuzzRange(**loops);
  }
}

void FuzzMasks() {
  const int64_t n = Length(), threads = 1 + Below(4);
  doing = "masks, " + std::to_string(n);
  Exact<uint8_t> flags(n);
  for (uint8_t& flag : flags) flag = static_cast<uint8_t>(Below(2));
  Exact<uint8_t> mask = Bits(n, [&](int64_t i) { return flags[i] != 0; });
  Exact<uint8_t> packed(BitmapBytes(n));
  MarkTrue(flags.data(), n, threads, packed.data());
  Expect(Same(packed, mask), "MarkTrue marks");
  Expect(FilledWithZeros(mask.data(), n), "FilledWithZeros accepts");
  if (n % 8 != 0) {
    packed[n / 8] |= 0x80;
    Expect(!FilledWithZeros(packed.data(), n), "FilledWithZeros refuses");
  }

  Exact<float> dy = Floats(n), out(n);
  Multiply(dy.data(), mask.data(), n, threads, out.data());
  for (int64_t i = 0; i < n; ++i) Expect(out[i] == dy[i] * flags[i], "Multiply multiplies");
  const float off = Below(2) != 0 ? 0.25f : 0.0f;
  Choose(dy.data(), mask.data(), n, 1.5f, off, threads, out.data());
  for (int64_t i = 0; i < n; ++i) {
    Expect(out[i] == (flags[i] != 0 ? dy[i] * 1.5f : dy[i] * off), "Choose chooses");
  }
  Choose(dy.data(), mask.data(), n, 1.5f, off, threads, dy.data());
  Expect(Same(dy, out), "Choose works in place");

  Exact<uint16_t> half = Words<uint16_t>(n), product(n);
  MultiplyBits<Half>(half.data(), mask.data(), n, threads, product.data());
  for (int64_t i = 0; i < n; ++i) {
    const bool finite = (half[i] & 0x7C00) != 0x7C00;
    const bool nan = (product[i] & 0x7C00) == 0x7C00 && (product[i] & 0x3FF) != 0;
    if (flags[i] != 0) {
      Expect(product[i] == half[i], "MultiplyBits by one");
    } else {
      Expect(finite ? product[i] == (half[i] & 0x8000) : nan, "MultiplyBits by zero");
    }
  }
}

void FuzzNormalization() {
  const int64_t channels = 1 + Below(Below(4) == 0 ? 2100 : 70);
  const int64_t rows = Below(1 + 100'000 / channels);
  const int64_t n = rows * channels;
  doing = "normalization, " + std::to_string(rows) + " x " + std::to_string(channels);
  Exact<float> x = Floats(n), dy = Floats(n), scale = Floats(channels), offset = Floats(channels);
  Exact<float> mean = Floats(channels), inv_std = Floats(channels);
  const float high = Below(2) != 0 ? 6.0f : std::numeric_limits<float>::infinity();

  Exact<float> y(n);
  Exact<uint8_t> packed(BitmapBytes(n));
  Normalize(x.data(), scale.data(), offset.data(), rows, channels, 0.0f, high, 1 + Below(4),
            y.data(), packed.data());
  Exact<uint8_t> mask = Bits(n, [&](int64_t i) { return 0 < y[i] && y[i] < high; });
  Expect(Same(packed, mask), "Normalize marks");
  for (int64_t i = 0; i < n; ++i) {
    volatile float product = x[i] * scale[i % channels];  // rounded: not contracted
    const float v = product + offset[i % channels];
    Expect(y[i] == std::min(std::max(v, 0.0f), high), "Normalize normalizes");
  }

  const uint8_t* used = Below(2) != 0 ? packed.data() : nullptr;
  Exact<float> dx(n), dgamma(channels), dbeta(channels);
  NormalizeGradient(dy.data(), used, x.data(), mean.data(), inv_std.data(), scale.data(), rows,
                    channels, 1, dx.data(), dgamma.data(), dbeta.data());
  // Up to 32 terms are added in float32, the rest in float64; a few roundings on top.
  const double epsilon = 36 * 0x1p-23;
  for (int64_t c = 0; c < channels; ++c) {
    double sum = 0, weighted = 0, magnitude = 0, weighted_magnitude = 0;
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t i = r * channels + c;
      const double g = used == nullptr || Bit(used, i) ? dy[i] : 0.0;
      const double centred = static_cast<double>(x[i]) - mean[c];
      sum += g;
      weighted += g * centred;
      magnitude += std::abs(g);
      weighted_magnitude += std::abs(g * centred);
    }
    Expect(std::abs(dbeta[c] - sum) <= epsilon * magnitude, "dbeta");
    Expect(std::abs(dgamma[c] - weighted * inv_std[c]) <=
               epsilon * weighted_magnitude * std::abs(inv_std[c]),
           "dgamma");
  }
  Exact<float> again_dgamma(channels), again_dbeta(channels);
  NormalizeGradient(dy.data(), used, x.data(), mean.data(), inv_std.data(), scale.data(), rows,
                    channels, 1 + Below(4), dy.data(), again_dgamma.data(), again_dbeta.data());
  Expect(Same(dy, dx) && Same(dgamma, again_dgamma) && Same(dbeta, again_dbeta),
         "the same in place and with any number of threads");
}

void FuzzPooling() {
  const Pooling p{Below(4),          (1 + Below(4)) * 2, (1 + Below(4)) * 3, 8 * (1 + Below(20)),
                  1 + Below(2),      1 + 2 * Below(2)};
  const int64_t n = p.batch * p.height * p.width * p.channels;
  doing = "pooling, " + std::to_string(n);
  if (p.height % p.window_height != 0 || p.width % p.window_width != 0) return;
  Exact<float> x = Floats(n), y(p.rows() * p.columns() * p.channels), dx(n);
  Exact<uint8_t> packed(BitmapBytes(n));
  MaxPool(p, x.data(), 1 + Below(4), y.data(), packed.data());
  Exact<float> dy = Floats(y.size());
  MaxPoolGradient(p, dy.data(), packed.data(), 1 + Below(4), dx.data());
  for (int64_t row = 0; row < p.rows(); ++row) {
    for (int64_t column = 0; column < p.columns(); ++column) {
      for (int64_t c = 0; c < p.channels; ++c) {
        const int64_t count = p.window_height * p.window_width;
        int64_t best = 0;
        for (int64_t k = 1; k < count; ++k) {
          if (x[p.at(row, column, k) + c] > x[p.at(row, column, best) + c]) best = k;
        }
        const int64_t out = (row * p.columns() + column) * p.channels + c;
        Expect(y[out] == x[p.at(row, column, best) + c], "MaxPool finds the maximum");
        for (int64_t k = 0; k < count; ++k) {
          const int64_t i = p.at(row, column, k) + c;
          Expect(Bit(packed.data(), i) == (k == best), "MaxPool marks the first");
          Expect(dx[i] == (k == best ? dy[out] : 0.0f), "MaxPoolGradient");
        }
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::printf("usage: native_fuzz SECONDS SEED\n");
    return 2;
  }
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoll(argv[1]));
  generator.seed(std::strtoull(argv[2], nullptr, 10));
  std::set<std::string> names;
  int64_t rounds = 0;
  do {
    FuzzWords<uint16_t>(&names);
    FuzzWords<uint32_t>(&names);
    FuzzWords<uint64_t>(&names);
    FuzzMasks();
    FuzzNormalization();
    FuzzPooling();
    ++rounds;
  } while (std::chrono::steady_clock::now() < end);
  std::printf("passed %lld rounds, seed %s:", static_cast<long long>(rounds), argv[2]);
  for (const std::string& name : names) std::printf(" %s", name.c_str());
  std::printf("\n");
  return 0;
}
