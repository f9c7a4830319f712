// Random inputs through the native kernels' algorithms, checked against plain loops. Meant to be
// compiled with -fsanitize=address,undefined: buffers have exactly the size they need, at addresses
// aligned for their elements only, so that every read or write beyond them is seen.
//
//   native_fuzz SECONDS SEED [CASE]
//
// A failure names its case, which the third argument runs alone.

#include <algorithm>
#include <chrono>
#include <cinttypes>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <set>
#include <string>
#include <type_traits>
#include <vector>

#include "batch_norm.h"
#include "bitmap.h"
#include "mask.h"
#include "pooling.h"

#if defined(__SANITIZE_ADDRESS__)
#define FUZZ_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define FUZZ_ASAN 1
#endif
#endif
#ifdef FUZZ_ASAN
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

namespace {

using namespace bittrain;

// ---------------------------------------------------------------------------------------------
// The case at hand, and what is said when it fails.

struct Case {
  uint64_t seed = 0, number = 0;
  char doing[200] = "";
  std::set<std::string> sets;  // names of the instruction sets met so far
};

Case current;

void Describe() {
  std::fprintf(stderr, "in case %" PRIu64 " of seed %" PRIu64 ": %s\n", current.number,
               current.seed, current.doing);
}

__attribute__((format(printf, 1, 2))) void Doing(const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  std::vsnprintf(current.doing, sizeof current.doing, format, arguments);
  va_end(arguments);
}

void Expect(bool ok, const char* what) {
  if (ok) return;
  std::fprintf(stderr, "FAILED: %s\n", what);
  Describe();
  std::exit(1);
}

// ---------------------------------------------------------------------------------------------
// Random numbers: splitmix64, as sanitized code has little time to spare.

uint64_t state;

uint64_t Random() {
  uint64_t z = state += 0x9E3779B97F4A7C15;
  z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9;
  z = (z ^ z >> 27) * 0x94D049BB133111EB;
  return z ^ z >> 31;
}

int64_t Below(int64_t n) { return static_cast<int64_t>(Random() % static_cast<uint64_t>(n)); }

bool Flip() { return Random() & 1; }

bool Chance(double p) { return static_cast<double>(Random() >> 11) * 0x1p-53 < p; }

template <typename T, size_t N>
T Any(const T (&choices)[N]) {
  return choices[Below(N)];
}

int64_t Threads() { return 1 + Below(4); }

// Around the sizes at which the code does something else, and up to some shards.
int64_t Length() {
  static constexpr int64_t kAround[] = {0, 8, 64, 128, kStretch, 2 * kStretch, kGrain, 2 * kGrain};
  switch (Below(6)) {
    case 0:
      return Below(4 * kGrain + 40'000);
    case 1:
    case 2:
      return Below(300);
    default:
      return std::max<int64_t>(0, Any(kAround) + Below(5) - 2);
  }
}

// ---------------------------------------------------------------------------------------------
// Buffers.

// `n` elements, and not a byte more.
template <typename T>
class Exact {
 public:
  explicit Exact(int64_t n)
      : n_(n),
        before_(Below(8) * static_cast<int64_t>(sizeof(T))),
        bytes_(new uint8_t[before_ + n * sizeof(T)]) {
#ifdef FUZZ_ASAN
    ASAN_POISON_MEMORY_REGION(bytes_.get(), before_);
#endif
  }

  Exact(int64_t n, T value) : Exact(n) { std::fill(begin(), end(), value); }

  Exact(const Exact& other) : Exact(other.n_) {
    std::copy(other.begin(), other.end(), begin());
  }

  ~Exact() {
#ifdef FUZZ_ASAN
    ASAN_UNPOISON_MEMORY_REGION(bytes_.get(), before_);
#endif
  }

  Exact& operator=(const Exact&) = delete;

  T* data() { return reinterpret_cast<T*>(bytes_.get() + before_); }
  const T* data() const { return reinterpret_cast<const T*>(bytes_.get() + before_); }
  int64_t size() const { return n_; }
  T& operator[](int64_t i) { return data()[i]; }
  const T& operator[](int64_t i) const { return data()[i]; }
  T* begin() { return data(); }
  T* end() { return data() + n_; }
  const T* begin() const { return data(); }
  const T* end() const { return data() + n_; }

 private:
  int64_t n_, before_;
  std::unique_ptr<uint8_t[]> bytes_;
};

// Bit for bit.
template <typename T>
bool Same(const Exact<T>& a, const Exact<T>& b) {
  return a.size() == b.size() &&
         (a.size() == 0 || std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0);
}

// Bit for bit, with two exceptions: any NaN is like any other, as which of two operands' it is
// depends on their order, which is the compiler's to choose; and so is whether a product by a
// constant one flushes a subnormal, where those are flushed.
template <typename T>
bool Alike(T a, T b) {
  if (std::memcmp(&a, &b, sizeof a) == 0) return true;
  return (std::isnan(a) && std::isnan(b)) || (SubnormalsAreZero() && a == b);
}

template <typename T>
bool AllAlike(const Exact<T>& a, const Exact<T>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), Alike<T>);
}

// The reference for all bitmaps: a bit for every i with `marked(i)`.
template <typename Marked>
Exact<uint8_t> Bits(int64_t n, const Marked& marked) {
  Exact<uint8_t> bits(BitmapBytes(n), 0);
  for (int64_t i = 0; i < n; ++i) bits[i / 8] |= static_cast<uint8_t>(marked(i) << (i % 8));
  return bits;
}

// ---------------------------------------------------------------------------------------------
// Contents.

template <typename Word>
struct FormatOf;
template <>
struct FormatOf<uint32_t> : Float {};
template <>
struct FormatOf<uint64_t> : Double {};
template <>
struct FormatOf<uint16_t> : Half {};

// A word that is not zero.
template <typename Word, typename F = FormatOf<Word>>
Word Nonzero() {
  const Word bits = static_cast<Word>(Random()), infinity = static_cast<Word>(F::kInfinity);
  const Word normal = static_cast<Word>(F::kSmallestNormal), sign = bits & F::kSign;
  switch (Below(8)) {
    case 0:
      return F::kSign;  // minus zero: bits are kept, not values
    case 1:
      return sign | infinity;
    case 2:
      return sign | infinity | (bits & (normal - 1)) | 1;  // NaN, quiet or signalling
    case 3:
      return sign | (bits & (normal - 1)) | 1;  // subnormal
    case 4:
      return static_cast<Word>(Word{1} << Below(8 * sizeof(Word)));
    case 5:
      return static_cast<Word>(sign | Any<Word>({1, static_cast<Word>(normal - 1), normal,
                                                 static_cast<Word>(infinity - 1)}));
    default:
      return bits | 1;
  }
}

// Of one density, or of stretches with one each: empty blocks and full ones next to each other.
class Density {
 public:
  bool Next() {
    if (left_-- == 0) {
      static constexpr double kDensities[] = {0, 0.001, 0.1, 0.5, 0.9, 0.999, 1};
      density_ = Any(kDensities);
      left_ = stretches_ ? 1 + Below(1000) : std::numeric_limits<int64_t>::max();
    }
    return Chance(density_);
  }

 private:
  const bool stretches_ = Flip();
  int64_t left_ = 0;
  double density_ = 0;
};

template <typename Word>
Exact<Word> AnyWords(int64_t n) {
  Density density;
  Exact<Word> x(n);
  for (Word& word : x) word = density.Next() ? Nonzero<Word>() : 0;
  return x;
}

// Floats of any kind at all.
template <typename T, typename Word>
Exact<T> Wild(int64_t n) {
  const Exact<Word> words = AnyWords<Word>(n);
  Exact<T> x(n);
  if (n > 0) std::memcpy(x.data(), words.data(), n * sizeof(T));
  return x;
}

// Zero and 2^-7 to 2^4 in size: nothing overflows, and what underflows is far below any tolerance.
Exact<float> Tame(int64_t n) {
  Exact<float> x(n);
  for (float& value : x) {
    const float size = std::ldexp(1.0f + static_cast<float>(Below(1 << 23)) * 0x1p-23f,
                                  static_cast<int>(Below(11)) - 7);
    value = Below(8) == 0 ? 0.0f : Flip() ? size : -size;
  }
  return x;
}

// A few values only, and so many ties, zeros of both signs among them.
Exact<float> Tied(int64_t n) {
  Exact<float> x(n);
  for (float& value : x) value = Any({-1.0f, -0.0f, 0.0f, 0.5f, 2.0f});
  return x;
}

Exact<float> AnyFloats(int64_t n) {
  return Below(3) == 0 ? Wild<float, uint32_t>(n) : Flip() ? Tame(n) : Tied(n);
}

Exact<uint8_t> AnyBits(int64_t n) {
  Density density;
  return Bits(n, [&](int64_t) { return density.Next(); });
}

// ---------------------------------------------------------------------------------------------
// The codec.

// A bitmap that is not that of x, changed in one of the ways a support can differ.
Exact<uint8_t> Wrong(const Exact<uint8_t>& right, int64_t n) {
  Exact<uint8_t> bits(right);
  const auto flip = [&](int64_t i) { bits[i / 8] ^= static_cast<uint8_t>(1 << i % 8); };
  switch (Below(3)) {
    case 0:
      for (int64_t flips = 1 + Below(3); flips > 0; --flips) flip(Below(n));
      return bits;
    case 1: {  // as many marks, in other places
      const int64_t i = Below(n), j = Below(n);
      if (Bit(bits.data(), i) != Bit(bits.data(), j)) flip(i), flip(j);
      return bits;
    }
    default:
      return AnyBits(n);
  }
}

template <typename Word>
void CheckCodec(const Loops<Word>& loops, const Exact<Word>& x, const Exact<uint8_t>& marks,
                const Exact<Word>& nonzeros, int64_t threads) {
  const int64_t n = x.size();
  Bitmap<Word> bitmap(n, threads, loops);
  Exact<uint8_t> bits(BitmapBytes(n));
  Expect(bitmap.Mark(x.data(), bits.data()) == nonzeros.size(), "Mark counts");
  Expect(Same(bits, marks), "Mark marks");
  Exact<Word> values(nonzeros.size());
  Expect(bitmap.Compress(x.data(), bits.data(), values.data()), "Compress takes its own bitmap");
  Expect(Same(values, nonzeros), "Compress keeps");

  Exact<Word> y(n);
  Bitmap<Word> reader(n, threads, loops);
  Expect(reader.Read(bits.data()) == nonzeros.size(), "Read counts");
  reader.Expand(bits.data(), values.data(), y.data());
  Expect(Same(y, x), "Expand restores");
  Exact<Word> again(nonzeros.size());
  Expect(reader.Compress(x.data(), bits.data(), again.data()), "Compress takes a right support");
  Expect(Same(again, nonzeros), "Compress keeps, by a support");

  if (n == 0) return;
  const Exact<uint8_t> support = Wrong(marks, n);
  if (Same(support, marks)) return;
  Exact<Word> others(reader.Read(support.data()));
  Expect(!reader.Compress(x.data(), support.data(), others.data()), "Compress sees a wrong one");
  // A wrong support is good for decoding nevertheless, whatever the values.
  for (Word& word : others) word = static_cast<Word>(Random());
  reader.Expand(support.data(), others.data(), y.data());
  int64_t next = 0;
  for (int64_t i = 0; i < n; ++i) {
    Expect(y[i] == (Bit(support.data(), i) ? others[next++] : 0), "Expand expands anything");
  }
  // The encoder starts over with the same object.
  Expect(reader.Mark(x.data(), bits.data()) == nonzeros.size(), "Mark counts after Read");
  Expect(reader.Compress(x.data(), bits.data(), again.data()), "Compress after Read and Mark");
  Expect(Same(again, nonzeros), "Compress keeps after Read and Mark");
}

template <typename Word>
void FuzzCodec() {
  const int64_t n = Length(), threads = Threads();
  const Exact<Word> x = AnyWords<Word>(n);
  const Exact<uint8_t> marks = Bits(n, [&](int64_t i) { return x[i] != 0; });
  Exact<Word> nonzeros(n - std::count(x.begin(), x.end(), Word{0}));
  std::copy_if(x.begin(), x.end(), nonzeros.begin(), [](Word word) { return word != 0; });
  for (auto loops = AvailableLoops<Word>(); *loops != nullptr; ++loops) {
    Doing("codec, %s, words of %zu bytes, %" PRId64 " of them, %" PRId64 " threads",
          (*loops)->name, sizeof(Word), n, threads);
    current.sets.insert((*loops)->name);
    CheckCodec(**loops, x, marks, nonzeros, threads);
  }
}

// ---------------------------------------------------------------------------------------------
// Masks.

template <typename Word>
void FuzzRange() {
  using Signed = std::make_signed_t<Word>;
  using F = FormatOf<Word>;
  const int64_t n = Length(), threads = Threads();
  const Exact<Word> x = AnyWords<Word>(n);
  // What is asked for in earnest, or anything, possibly empty; `low` is above zero.
  const auto bound = [] { return static_cast<Signed>(Nonzero<Word>()); };
  const Signed low = Flip() ? SmallestPositive<F>() : std::max<Signed>(1, bound());
  const Signed high = Flip() ? F::kInfinity : bound();
  const Exact<uint8_t> marks = Bits(n, [&](int64_t i) {
    Signed word;
    std::memcpy(&word, x.data() + i, sizeof word);
    return low <= word && word <= high;
  });
  for (auto loops = AvailableLoops<Word>(); *loops != nullptr; ++loops) {
    Doing("range [%" PRId64 ", %" PRId64 "], %s, words of %zu bytes, %" PRId64 " of them",
          static_cast<int64_t>(low), static_cast<int64_t>(high), (*loops)->name, sizeof(Word), n);
    Exact<uint8_t> bits(BitmapBytes(n));
    InRange(**loops, x.data(), n, low, high, bits.data());
    Expect(Same(bits, marks), "InRange marks");
  }
  Doing("range [%" PRId64 ", %" PRId64 "], words of %zu bytes, %" PRId64 " of them, %" PRId64
        " threads",
        static_cast<int64_t>(low), static_cast<int64_t>(high), sizeof(Word), n, threads);
  Exact<uint8_t> bits(BitmapBytes(n));
  MarkRange(x.data(), n, low, high, threads, bits.data());
  Expect(Same(bits, marks), "MarkRange marks");
  if constexpr (sizeof(Word) > 2) {
    if (low != SmallestPositive<F>() || high != F::kInfinity) return;
    using T = std::conditional_t<sizeof(Word) == 4, float, double>;
    const auto positive = [&](int64_t i) {
      T value;
      std::memcpy(&value, x.data() + i, sizeof value);
      return value > 0;  // in the float mode at hand
    };
    Expect(Same(bits, Bits(n, positive)), "SmallestPositive is where x > 0 begins");
  }
}

void FuzzTrue() {
  const int64_t n = Length(), threads = Threads();
  Doing("booleans, %" PRId64 " of them, %" PRId64 " threads", n, threads);
  Exact<uint8_t> marks = AnyBits(n);
  Exact<uint8_t> flags(n), packed(BitmapBytes(n));
  for (int64_t i = 0; i < n; ++i) flags[i] = Bit(marks.data(), i);
  MarkTrue(flags.data(), n, threads, packed.data());
  Expect(Same(packed, marks), "MarkTrue marks");

  Expect(FilledWithZeros(marks.data(), n), "FilledWithZeros accepts");
  if (n % 8 != 0) {  // corrupted: a bit beyond the last element
    marks[n / 8] |= static_cast<uint8_t>(1 << (n % 8 + Below(8 - n % 8)));
    Expect(!FilledWithZeros(marks.data(), n), "FilledWithZeros refuses");
  }
}

template <typename T, typename Word>
void FuzzMultiply() {
  const int64_t n = Length(), threads = Threads();
  Doing("product, floats of %zu bytes, %" PRId64 " of them, %" PRId64 " threads", sizeof(T), n,
        threads);
  Exact<T> dy = Wild<T, Word>(n), out(n), expected(n);
  const Exact<uint8_t> mask = AnyBits(n);
  for (int64_t i = 0; i < n; ++i) expected[i] = dy[i] * static_cast<T>(Bit(mask.data(), i));
  Multiply(dy.data(), mask.data(), n, threads, out.data());
  Expect(AllAlike(out, expected), "Multiply multiplies");
  Multiply(dy.data(), mask.data(), n, threads, dy.data());
  Expect(Same(dy, out), "Multiply works in place");
}

template <typename F>
void FuzzMultiplyBits() {
  const int64_t n = Length(), threads = Threads();
  Doing("product, mantissa of %d bits, %" PRId64 " of them, %" PRId64 " threads",
        F::kMantissaBits, n, threads);
  constexpr int kInfinity = F::kInfinity;
  Exact<uint16_t> dy(n), out(n);
  for (uint16_t& word : dy) word = Below(8) == 0 ? 0 : Nonzero<uint16_t, F>();
  const Exact<uint8_t> mask = AnyBits(n);
  MultiplyBits<F>(dy.data(), mask.data(), n, threads, out.data());
  for (int64_t i = 0; i < n; ++i) {
    if (Bit(mask.data(), i)) {
      Expect(out[i] == dy[i], "MultiplyBits by one");
    } else if ((dy[i] & kInfinity) != kInfinity) {
      Expect(out[i] == (dy[i] & 0x8000), "MultiplyBits by zero");
    } else {
      Expect((out[i] & 0x7FFF) > kInfinity, "MultiplyBits makes NaN by zero");
    }
  }
  MultiplyBits<F>(dy.data(), mask.data(), n, threads, dy.data());
  Expect(Same(dy, out), "MultiplyBits works in place");
}

float Chosen(float g, bool marked, float on, float off) {
  return marked ? g * on : off == 0.0f ? 0.0f : g * off;
}

void FuzzChoose() {
  const int64_t n = Length(), threads = Threads();
  const float on = Any({1.0f, 1.25f, -0.5f}), off = Any({0.0f, -0.0f, 0.25f, 1.0f});
  Doing("choice of %g and %g, %" PRId64 " of them, %" PRId64 " threads", on, off, n, threads);
  Exact<float> dy = AnyFloats(n), out(n), expected(n);
  const Exact<uint8_t> mask = AnyBits(n);
  for (int64_t i = 0; i < n; ++i) expected[i] = Chosen(dy[i], Bit(mask.data(), i), on, off);
  Choose(dy.data(), mask.data(), n, on, off, threads, out.data());
  Expect(AllAlike(out, expected), "Choose chooses");
  Choose(dy.data(), mask.data(), n, on, off, threads, dy.data());
  Expect(Same(dy, out), "Choose works in place");
}

// ---------------------------------------------------------------------------------------------
// The loops over floats, every set of them: the functions above and below take the best only.

// `product` is rounded where it stands, which -ffp-contract=off promises as well.
float Normalized(float x, float scale, float offset, float low, float high) {
  volatile float product = x * scale;
  const float v = product + offset;
  return v <= low ? low : v >= high ? high : v;
}

void CheckFloatLoops(const FloatLoops& loops, int64_t rows, int64_t channels) {
  Doing("loops over floats, %s, %" PRId64 " x %" PRId64, loops.name, rows, channels);
  const int64_t n = rows * channels;
  const Exact<float> g = AnyFloats(n), x = AnyFloats(n), mean = Tame(channels);
  const Exact<float> scale = Tame(channels), offset = Tame(channels), slope = Tame(channels);
  const Exact<uint8_t> mask = AnyBits(n);
  const float low = Any({0.0f, -std::numeric_limits<float>::infinity()});
  const float high = Any({6.0f, std::numeric_limits<float>::infinity()});
  const float on = Any({1.0f, 1.25f}), off = Any({0.0f, 0.25f});

  Exact<float> out(n), expected(n);
  const auto expect = [&](const char* what) { Expect(AllAlike(out, expected), what); };
  loops.affine(x.data(), rows, channels, scale.data(), offset.data(), low, high, out.data());
  for (int64_t i = 0; i < n; ++i) {
    expected[i] = Normalized(x[i], scale[i % channels], offset[i % channels], low, high);
  }
  expect("affine");

  loops.input_gradient(g.data(), x.data(), rows, channels, mean.data(), slope.data(),
                       offset.data(), scale.data(), out.data());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t c = i % channels;
    volatile float product = (x[i] - mean[c]) * slope[c];
    expected[i] = (g[i] - (product + offset[c])) * scale[c];
  }
  expect("input_gradient");
  Exact<float> in_place(g);
  loops.input_gradient(in_place.data(), x.data(), rows, channels, mean.data(), slope.data(),
                       offset.data(), scale.data(), in_place.data());
  Expect(AllAlike(in_place, out), "input_gradient in place");

  Exact<float> dbeta(channels, 0), dgamma(channels, 0), beta(channels, 0), gamma(channels, 0);
  loops.add_gradients(g.data(), x.data(), rows, channels, mean.data(), dbeta.data(),
                      dgamma.data());
  for (int64_t i = 0; i < n; ++i) {
    const int64_t c = i % channels;
    volatile float product = g[i] * (x[i] - mean[c]);
    beta[c] += g[i];
    gamma[c] += product;
  }
  Expect(AllAlike(dbeta, beta) && AllAlike(dgamma, gamma), "add_gradients");

  loops.multiply(g.data(), mask.data(), n, out.data());
  for (int64_t i = 0; i < n; ++i) expected[i] = g[i] * static_cast<float>(Bit(mask.data(), i));
  expect("multiply");
  loops.choose(g.data(), mask.data(), n, on, off, out.data());
  for (int64_t i = 0; i < n; ++i) expected[i] = Chosen(g[i], Bit(mask.data(), i), on, off);
  expect("choose");

  const int64_t places = 1 + Below(9), eights = channels / 8 * 8;
  std::vector<Exact<float>> inputs;
  std::vector<const float*> pointers;
  for (int64_t k = 0; k < places; ++k) inputs.push_back(Flip() ? Tied(eights) : AnyFloats(eights));
  for (const Exact<float>& input : inputs) pointers.push_back(input.data());
  Exact<float> most(eights);
  Exact<uint32_t> place(eights);
  loops.largest(pointers.data(), places, eights, most.data(), place.data());
  for (int64_t i = 0; i < eights; ++i) {
    uint32_t best = 0;
    for (uint32_t k = 1; k < places; ++k) {
      if (inputs[k][i] > inputs[best][i]) best = k;
    }
    Expect(place[i] == best + 1 && Alike(most[i], inputs[best][i]), "largest");
  }
}

void FuzzFloatLoops() {
  const int64_t channels = 1 + Below(100), rows = Below(40);
  [[maybe_unused]] const uint64_t inputs = state;  // the same ones for every set
  CheckFloatLoops(portable::kFloatLoops, rows, channels);
#if defined(__x86_64__)
  if (!HasAvx2()) return;
  state = inputs;
  CheckFloatLoops(avx2::kFloatLoops, rows, channels);
#endif
}

// ---------------------------------------------------------------------------------------------
// Normalization.

struct Matrix {
  int64_t channels = Below(4) == 0 ? Below(5000) : Any<int64_t>({1, 3, 7, 8, 12, 16, 64, 65});
  int64_t rows = Below(1 + (Below(3) == 0 ? 300'000 : 10'000) / std::max<int64_t>(channels, 1));
  int64_t size() const { return rows * channels; }
};

void FuzzNormalize() {
  const Matrix m;
  const int64_t n = m.size(), threads = Threads();
  const float infinity = std::numeric_limits<float>::infinity();
  const bool rectified = Below(4) != 0, marked = rectified && Below(4) != 0;
  const float low = rectified ? 0.0f : -infinity;
  const float high = rectified ? Any({6.0f, 1.0f, infinity}) : infinity;
  Doing("normalize, %" PRId64 " x %" PRId64 ", [%g, %g], %" PRId64 " threads", m.rows, m.channels,
        low, high, threads);
  const Exact<float> scale = Tame(m.channels), offset = Tame(m.channels);
  Exact<float> x = AnyFloats(n), y(n), expected(n);
  for (int64_t i = 0; i < n; ++i) {
    expected[i] = Normalized(x[i], scale[i % m.channels], offset[i % m.channels], low, high);
  }
  Exact<uint8_t> packed(BitmapBytes(n), 0);
  uint8_t* const bits = marked ? packed.data() : nullptr;
  const auto check = [&](const Exact<float>& result) {
    Expect(AllAlike(result, expected), "Normalize normalizes");
    if (!marked) return;
    const auto inside = [&](int64_t i) {
      return 0 < result[i] && (std::isinf(high) || result[i] < high);
    };
    Expect(Same(packed, Bits(n, inside)), "Normalize marks");
    std::fill(packed.begin(), packed.end(), 0);
  };
  Normalize(x.data(), scale.data(), offset.data(), m.rows, m.channels, low, high, threads,
            y.data(), bits);
  check(y);
  // The kernel reuses its input's buffer where nobody else needs that.
  Normalize(x.data(), scale.data(), offset.data(), m.rows, m.channels, low, high, threads,
            x.data(), bits);
  check(x);
}

struct Gradients {
  Exact<float> dx, dgamma, dbeta;
  explicit Gradients(const Matrix& m) : dx(m.size()), dgamma(m.channels), dbeta(m.channels) {}
};

// How far float32 may be from the sums in float64, of which the error is far less. With
// u = 2^-24, d = x - mean, A1 the sum of |g| and A2 that of |g * d|, by first order in u:
//
//   dbeta   32 terms are added in float32 (31u) and the sums in float64; once to float32 (u):
//           32u A1.
//   dgamma  The terms have 2 roundings of their own, and the product with inv_std is one more:
//           35u A2 |inv_std|.
//   dx      slope = dgamma * inv_std / rows: 37u; offset = dbeta / rows: 33u. Of what is a term
//           of dx, |d * slope| has 2 more roundings; the sum with offset, the difference from g
//           and the product with scale are 3 for both, and 2 for g: at most 42u of
//           (|g| + |d| A2 inv_std^2 / rows + A1 / rows) |scale|.
//
// One constant covers these and the second order. What underflows is far below kTiny.
constexpr double kRoundings = 44 * 0x1p-24;
constexpr double kTiny = 1e-25;

void CheckGradients(const Matrix& m, const Exact<float>& dy, const uint8_t* mask,
                    const Exact<float>& x, const Exact<float>& mean, const Exact<float>& inv_std,
                    const Exact<float>& scale, const Gradients& got) {
  const auto near = [](double value, double expected, double size, const char* what) {
    Expect(std::abs(value - expected) <= kRoundings * size + kTiny, what);
  };
  const double rows = static_cast<double>(m.rows);
  for (int64_t c = 0; c < m.channels; ++c) {
    const double s = inv_std[c];
    const auto g = [&](int64_t i) { return mask == nullptr || Bit(mask, i) ? 1.0 * dy[i] : 0.0; };
    const auto d = [&](int64_t i) { return static_cast<double>(x[i]) - mean[c]; };
    double sum1 = 0, sum2 = 0, size1 = 0, size2 = 0;
    for (int64_t i = c; i < m.size(); i += m.channels) {
      sum1 += g(i);
      sum2 += g(i) * d(i);
      size1 += std::abs(g(i));
      size2 += std::abs(g(i) * d(i));
    }
    near(got.dbeta[c], sum1, size1, "dbeta");
    near(got.dgamma[c], sum2 * s, size2 * std::abs(s), "dgamma");
    for (int64_t i = c; i < m.size(); i += m.channels) {
      const double expected = (g(i) - (d(i) * sum2 * s * s / rows + sum1 / rows)) * scale[c];
      const double size = std::abs(g(i)) + std::abs(d(i)) * size2 * s * s / rows + size1 / rows;
      near(got.dx[i], expected, size * std::abs(scale[c]), "dx");
    }
  }
}

void FuzzNormalizeGradient() {
  const Matrix m;
  const bool wild = Below(4) == 0, marked = Flip();
  Doing("gradients, %" PRId64 " x %" PRId64 "%s%s", m.rows, m.channels, wild ? ", wild" : "",
        marked ? ", marked" : "");
  const auto floats = [&](int64_t n) { return wild ? AnyFloats(n) : Tame(n); };
  const Exact<float> dy = floats(m.size()), x = floats(m.size()), mean = floats(m.channels);
  const Exact<float> inv_std = floats(m.channels), scale = floats(m.channels);
  const Exact<uint8_t> mask = AnyBits(m.size());
  const uint8_t* const bits = marked ? mask.data() : nullptr;

  Gradients first(m);
  for (int64_t threads = 1; threads <= 4; ++threads) {
    Gradients here(m);
    const bool in_place = threads % 2 == 0;
    if (in_place) std::copy(dy.begin(), dy.end(), here.dx.begin());
    NormalizeGradient(in_place ? here.dx.data() : dy.data(), bits, x.data(), mean.data(),
                      inv_std.data(), scale.data(), m.rows, m.channels, threads, here.dx.data(),
                      here.dgamma.data(), here.dbeta.data());
    if (threads == 1) {
      if (!wild) CheckGradients(m, dy, bits, x, mean, inv_std, scale, here);
      std::copy(here.dx.begin(), here.dx.end(), first.dx.begin());
      std::copy(here.dgamma.begin(), here.dgamma.end(), first.dgamma.begin());
      std::copy(here.dbeta.begin(), here.dbeta.end(), first.dbeta.begin());
    }
    Expect(Same(here.dx, first.dx) && Same(here.dgamma, first.dgamma) &&
               Same(here.dbeta, first.dbeta),
           "the same bits in place and with any number of threads");
  }
}

// ---------------------------------------------------------------------------------------------
// Pooling.

void FuzzPooling() {
  const int64_t window_height = 1 + Below(3), window_width = 1 + Below(3);
  const Pooling p{Below(4), Below(20) * window_height, Below(8) * window_width,
                  8 * Below(Flip() ? 3 : 20), window_height, window_width};
  const int64_t n = p.batch * p.height * p.width * p.channels, threads = Threads();
  Doing("pooling, %" PRId64 " x %" PRId64 " x %" PRId64 " x %" PRId64 " by %" PRId64 " x %" PRId64
        ", %" PRId64 " threads",
        p.batch, p.height, p.width, p.channels, window_height, window_width, threads);
  const int64_t count = window_height * window_width;
  const Exact<float> x = Flip() ? Tied(n) : AnyFloats(n), dy = AnyFloats(n / count);
  Exact<float> y(n / count), dx(n);
  Exact<uint8_t> packed(BitmapBytes(n));
  MaxPool(p, x.data(), threads, y.data(), packed.data());
  MaxPoolGradient(p, dy.data(), packed.data(), threads, dx.data());
  for (int64_t row = 0; row < p.rows(); ++row) {
    for (int64_t column = 0; column < p.columns(); ++column) {
      for (int64_t c = 0; c < p.channels; ++c) {
        const auto place = [&](int64_t k) {
          const int64_t i = row * window_height + k / window_width;
          const int64_t j = column * window_width + k % window_width;
          return (i * p.width + j) * p.channels + c;
        };
        int64_t best = 0;
        for (int64_t k = 1; k < count; ++k) {
          if (x[place(k)] > x[place(best)]) best = k;
        }
        const int64_t out = (row * p.columns() + column) * p.channels + c;
        Expect(Alike(y[out], x[place(best)]), "MaxPool finds the maximum");
        for (int64_t k = 0; k < count; ++k) {
          Expect(Bit(packed.data(), place(k)) == (k == best), "MaxPool marks the first");
          Expect(Alike(dx[place(k)], k == best ? dy[out] : 0.0f), "MaxPoolGradient");
        }
      }
    }
  }
}

// ---------------------------------------------------------------------------------------------

constexpr void (*kFuzzers[])() = {
    FuzzCodec<uint16_t>,
    FuzzCodec<uint32_t>,
    FuzzCodec<uint64_t>,
    FuzzRange<uint16_t>,
    FuzzRange<uint32_t>,
    FuzzRange<uint64_t>,
    FuzzTrue,
    FuzzMultiply<float, uint32_t>,
    FuzzMultiply<double, uint64_t>,
    FuzzMultiplyBits<Half>,
    FuzzMultiplyBits<Bfloat16>,
    FuzzChoose,
    FuzzFloatLoops,
    FuzzNormalize,
    FuzzNormalizeGradient,
    FuzzPooling,
};

// The bits of the float mode that flush subnormals, as TensorFlow's threads do.
#if defined(__x86_64__)
constexpr uint64_t kFlush = 0x8040;
#elif defined(__aarch64__)
constexpr uint64_t kFlush = 1 << 24;
#else
constexpr uint64_t kFlush = 0;
#endif

void Fuzz() {
  const uint64_t mode = FloatMode();
  state = current.seed * 0xD1342543DE82EF95 + current.number;
  state = Random();
  if (Flip()) SetFloatMode(mode | kFlush);
  kFuzzers[current.number % std::size(kFuzzers)]();
  SetFloatMode(mode);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3 || argc > 4) {
    std::fprintf(stderr, "usage: native_fuzz SECONDS SEED [CASE]\n");
    return 2;
  }
#ifdef FUZZ_ASAN
  __sanitizer_set_death_callback(Describe);
#endif
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(std::atoll(argv[1]));
  current.seed = std::strtoull(argv[2], nullptr, 10);
  if (argc == 4) {
    current.number = std::strtoull(argv[3], nullptr, 10);
    Fuzz();
    std::printf("passed case %" PRIu64 " of seed %" PRIu64 "\n", current.number, current.seed);
    return 0;
  }
  // Every kind once, however slow the machine.
  while (current.number < std::size(kFuzzers) || std::chrono::steady_clock::now() < end) {
    Fuzz();
    ++current.number;
  }
  std::printf("passed %" PRIu64 " cases of seed %" PRIu64 ":", current.number, current.seed);
  for (const std::string& set : current.sets) std::printf(" %s", set.c_str());
  std::printf("\n");
  return 0;
}
