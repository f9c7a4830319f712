// The package's TensorFlow operations: definitions, shape functions, checks of the arguments.
// What they compute is in the headers.
//
// Through TensorFlow's C API alone, which is stable from release to release: no C++ type of
// TensorFlow crosses the boundary, so one shared object serves them all.

#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <memory>

#include "batch_norm.h"
#include "bitmap.h"
#include "mask.h"
#include "pages.h"
#include "pooling.h"
#include "tensorflow/c/kernels.h"
#include "tensorflow/c/ops.h"
#include "tensorflow/c/tf_datatype.h"
#include "tensorflow/c/tf_status.h"
#include "tensorflow/c/tf_tensor.h"

namespace {

using namespace bittrain;

struct Delete {
  void operator()(TF_Status* p) const { TF_DeleteStatus(p); }
  void operator()(TF_Tensor* p) const { TF_DeleteTensor(p); }
  void operator()(TF_ShapeHandle* p) const { TF_DeleteShapeHandle(p); }
  void operator()(TF_DimensionHandle* p) const { TF_DeleteDimensionHandle(p); }
};

template <typename T>
using Owned = std::unique_ptr<T, Delete>;

template <typename T>
T* Data(const Owned<TF_Tensor>& tensor) {
  return static_cast<T*>(TF_TensorData(tensor.get()));
}

int64_t Size(const Owned<TF_Tensor>& tensor) { return TF_TensorElementCount(tensor.get()); }

std::vector<int64_t> Shape(const Owned<TF_Tensor>& tensor) {
  std::vector<int64_t> shape(TF_NumDims(tensor.get()));
  for (size_t i = 0; i < shape.size(); ++i) {
    shape[i] = TF_Dim(tensor.get(), static_cast<int>(i));
  }
  return shape;
}

// ---------------------------------------------------------------------------------------------
// One run of a kernel. After a failure everything is a no-op and `ok()` false.

class Run {
 public:
  explicit Run(TF_OpKernelContext* context) : context_(context), status_(TF_NewStatus()) {}

  ~Run() {
    if (!ok()) TF_OpKernelContext_Failure(context_, status_.get());
  }

  bool ok() const { return TF_GetCode(status_.get()) == TF_OK; }

  __attribute__((format(printf, 2, 3))) void Fail(const char* format, ...) {
    if (!ok()) return;
    char message[512];
    va_list arguments;
    va_start(arguments, format);
    std::vsnprintf(message, sizeof message, format, arguments);
    va_end(arguments);
    TF_SetStatus(status_.get(), TF_INVALID_ARGUMENT, message);
  }

  int inputs() const { return TF_NumInputs(context_); }

  Owned<TF_Tensor> Input(int i) {
    TF_Tensor* tensor = nullptr;
    if (ok()) TF_GetInput(context_, i, &tensor, status_.get());
    return Owned<TF_Tensor>(tensor);
  }

  Owned<TF_Tensor> Output(int i, const std::vector<int64_t>& shape) {
    if (!ok()) return nullptr;
    const TF_DataType dtype = TF_ExpectedOutputDataType(context_, i);
    return Fresh(TF_AllocateOutput(context_, i, dtype, shape.data(),
                                   static_cast<int>(shape.size()), Bytes(shape, dtype),
                                   status_.get()));
  }

  // An output in the shape of input `i`, and in its buffer if nobody else needs that.
  Owned<TF_Tensor> OutputInPlaceOf(Owned<TF_Tensor>& input, int i, int output) {
    if (!ok()) return nullptr;
    const std::vector<int64_t> shape = Shape(input);
    input.reset();  // our own handle counts as a need
    int forwarded = -1;
    Owned<TF_Tensor> tensor(TF_ForwardInputOrAllocateOutput(
        context_, &i, 1, output, shape.data(), static_cast<int>(shape.size()), &forwarded,
        status_.get()));
    input = Input(i);
    return forwarded < 0 ? Fresh(tensor.release()) : std::move(tensor);
  }

  Owned<TF_Tensor> Temporary(TF_DataType dtype, const std::vector<int64_t>& shape) {
    if (!ok()) return nullptr;
    TF_AllocatorAttributes attributes{};
    attributes.struct_size = TF_ALLOCATOR_ATTRIBUTES_STRUCT_SIZE;
    attributes.on_host = 1;
    return Fresh(TF_AllocateTemp(context_, dtype, shape.data(), static_cast<int>(shape.size()),
                                 &attributes, status_.get()));
  }

  void SetOutput(int i, const TF_Tensor* tensor) {
    if (ok()) TF_SetOutput(context_, i, tensor, status_.get());
  }

 private:
  static Owned<TF_Tensor> Fresh(TF_Tensor* tensor) {
    if (tensor != nullptr) UseHugePages(TF_TensorData(tensor), TF_TensorByteSize(tensor));
    return Owned<TF_Tensor>(tensor);
  }

  static size_t Bytes(const std::vector<int64_t>& shape, TF_DataType dtype) {
    size_t bytes = TF_DataTypeSize(dtype);
    for (const int64_t size : shape) bytes *= static_cast<size_t>(size);
    return bytes;
  }

  TF_OpKernelContext* context_;
  Owned<TF_Status> status_;
};

// A mask of `elements`: uint8 of rank 1, one bit each, the last byte filled up with zeros.
bool CheckMask(Run& run, const char* name, const Owned<TF_Tensor>& mask, int64_t elements) {
  if (!run.ok()) return false;
  if (TF_NumDims(mask.get()) != 1 || Size(mask) != BitmapBytes(elements)) {
    run.Fail("%s of rank 1 and %lld bytes expected for %lld elements, got rank %d and %lld bytes",
             name, static_cast<long long>(BitmapBytes(elements)),
             static_cast<long long>(elements), TF_NumDims(mask.get()),
             static_cast<long long>(Size(mask)));
  } else if (!FilledWithZeros(Data<uint8_t>(mask), elements)) {
    run.Fail("%s has bits set beyond its %lld elements", name, static_cast<long long>(elements));
  }
  return run.ok();
}

bool CheckVector(Run& run, const char* name, const Owned<TF_Tensor>& vector, int64_t size) {
  if (!run.ok()) return false;
  if (TF_NumDims(vector.get()) != 1 || Size(vector) != size) {
    run.Fail("%s of shape [%lld] expected, got rank %d and %lld elements", name,
             static_cast<long long>(size), TF_NumDims(vector.get()),
             static_cast<long long>(Size(vector)));
  }
  return run.ok();
}

// ---------------------------------------------------------------------------------------------
// Attributes, and a kernel object that holds them.

class Attributes {
 public:
  explicit Attributes(TF_OpKernelConstruction* construction)
      : construction_(construction), status_(TF_NewStatus()) {}

  ~Attributes() {
    if (TF_GetCode(status_.get()) != TF_OK) {
      TF_OpKernelConstruction_Failure(construction_, status_.get());
    }
  }

  int64_t Int(const char* name) {
    int64_t value = 1;
    TF_OpKernelConstruction_GetAttrInt64(construction_, name, &value, status_.get());
    return value;
  }

  bool Bool(const char* name) {
    TF_Bool value = 0;
    TF_OpKernelConstruction_GetAttrBool(construction_, name, &value, status_.get());
    return value != 0;
  }

  float Float(const char* name) {
    float value = 0;
    TF_OpKernelConstruction_GetAttrFloat(construction_, name, &value, status_.get());
    return value;
  }

 private:
  TF_OpKernelConstruction* construction_;
  Owned<TF_Status> status_;
};

template <typename Kernel>
void* Create(TF_OpKernelConstruction* construction) {
  Attributes attributes(construction);
  return new Kernel(attributes);
}

template <typename Kernel>
void Destroy(void* kernel) {
  delete static_cast<Kernel*>(kernel);
}

template <typename Kernel>
void Compute(void* kernel, TF_OpKernelContext* context) {
  Run run(context);
  static_cast<Kernel*>(kernel)->Compute(run);
}

struct Threaded {
  explicit Threaded(Attributes& attributes) : threads(attributes.Int("threads")) {}
  const int64_t threads;
};

// ---------------------------------------------------------------------------------------------
// Kernels.

// x, [support] -> bitmap, values
template <typename Word>
struct EncodeKernel : Threaded {
  using Threaded::Threaded;

  void Compute(Run& run) const {
    const auto x = run.Input(0);
    if (!run.ok()) return;
    const int64_t n = Size(x);
    const TF_DataType dtype = TF_TensorType(x.get());
    Bitmap<Word> bitmap(n, threads);
    if (run.inputs() > 1) {
      const auto support = run.Input(1);
      if (!CheckMask(run, "support", support, n)) return;
      // Most likely the very bitmap. Then one sweep does, and nothing is stored for it.
      const auto values = run.Temporary(dtype, {bitmap.Read(Data<uint8_t>(support))});
      if (!run.ok()) return;
      if (bitmap.Compress(Data<Word>(x), Data<uint8_t>(support), Data<Word>(values))) {
        run.Output(0, {0});
        run.SetOutput(1, values.get());
        return;
      }
    }
    const auto own = run.Output(0, {BitmapBytes(n)});
    if (!run.ok()) return;
    const auto values = run.Output(1, {bitmap.Mark(Data<Word>(x), Data<uint8_t>(own))});
    if (!run.ok()) return;
    bitmap.Compress(Data<Word>(x), Data<uint8_t>(own), Data<Word>(values));
  }
};

// shape, values, bitmap, [support] -> x
template <typename Word>
struct DecodeKernel : Threaded {
  using Threaded::Threaded;

  void Compute(Run& run) const {
    const auto dims = run.Input(0), values = run.Input(1);
    auto bits = run.Input(2);
    if (!run.ok()) return;
    std::vector<int64_t> shape(Data<int64_t>(dims), Data<int64_t>(dims) + Size(dims));
    int64_t n = 1;
    for (const int64_t size : shape) {
      if (size < 0 || __builtin_mul_overflow(n, size, &n)) {
        run.Fail("shape has a dimension of %lld, or too many elements",
                 static_cast<long long>(size));
        return;
      }
    }
    if (TF_NumDims(values.get()) != 1) run.Fail("values of rank 1 expected");
    if (run.inputs() > 3 && Size(bits) == 0) bits = run.Input(3);
    if (!CheckMask(run, "bitmap", bits, n)) return;
    Bitmap<Word> bitmap(n, threads);
    const int64_t marked = bitmap.Read(Data<uint8_t>(bits));
    if (marked != Size(values)) {
      run.Fail("bitmap marks %lld values, got %lld", static_cast<long long>(marked),
               static_cast<long long>(Size(values)));
      return;
    }
    const auto x = run.Output(0, shape);
    if (run.ok()) bitmap.Expand(Data<uint8_t>(bits), Data<Word>(values), Data<Word>(x));
  }
};

// x -> packed: 0 < x < limit
template <typename F, typename Word>
struct MarkPositiveKernel : Threaded {
  explicit MarkPositiveKernel(Attributes& attributes)
      : Threaded(attributes), six(attributes.Bool("below_six")) {}

  void Compute(Run& run) const {
    const auto x = run.Input(0);
    if (!run.ok()) return;
    const auto packed = run.Output(0, {BitmapBytes(Size(x))});
    if (!run.ok()) return;
    MarkRange(Data<Word>(x), Size(x), SmallestPositive<F>(), six ? kSix - 1 : F::kInfinity,
              threads, Data<uint8_t>(packed));
  }

  // 1.5 * 2^2: the exponent's bias is half its range; the mantissa begins with a one.
  static constexpr typename F::Signed kSix =
      static_cast<typename F::Signed>(F::kInfinity / 2 / F::kSmallestNormal + 2) *
          F::kSmallestNormal +
      F::kSmallestNormal / 2;

  const bool six;
};

static_assert(MarkPositiveKernel<Float, uint32_t>::kSix == 0x40C00000);
static_assert(MarkPositiveKernel<Half, uint16_t>::kSix == 0x4600);
static_assert(MarkPositiveKernel<Bfloat16, uint16_t>::kSix == 0x40C0);
static_assert(MarkPositiveKernel<Double, uint64_t>::kSix == 0x4018000000000000);

// x -> packed
struct MarkTrueKernel : Threaded {
  using Threaded::Threaded;

  void Compute(Run& run) const {
    const auto x = run.Input(0);
    if (!run.ok()) return;
    const auto packed = run.Output(0, {BitmapBytes(Size(x))});
    if (run.ok()) MarkTrue(Data<uint8_t>(x), Size(x), threads, Data<uint8_t>(packed));
  }
};

// dy, packed -> dx, in the buffer of dy if nobody else needs that. Calls `fn(dy, packed, size, dx)`.
template <typename T, typename Fn>
void ApplyMask(Run& run, const Fn& fn) {
  auto dy = run.Input(0);
  const auto packed = run.Input(1);
  if (!run.ok() || !CheckMask(run, "mask", packed, Size(dy))) return;
  const auto dx = run.OutputInPlaceOf(dy, 0, 0);
  if (run.ok()) fn(Data<T>(dy), Data<uint8_t>(packed), Size(dy), Data<T>(dx));
}

// dy, packed -> dy * packed
template <typename F, typename Word>
struct MultiplyKernel : Threaded {
  using Threaded::Threaded;

  void Compute(Run& run) const {
    using Real = std::conditional_t<std::is_same_v<F, Float>, float, double>;
    constexpr bool kComputes = sizeof(Word) > 2;  // the others are handled as bits
    using T = std::conditional_t<kComputes, Real, Word>;
    ApplyMask<T>(run, [this](const T* dy, const uint8_t* packed, int64_t n, T* dx) {
      if constexpr (kComputes) {
        Multiply(dy, packed, n, threads, dx);
      } else {
        MultiplyBits<F>(dy, packed, n, threads, dx);
      }
    });
  }
};

// dy, packed -> packed ? dy * on : dy * off
struct ChooseKernel : Threaded {
  explicit ChooseKernel(Attributes& attributes)
      : Threaded(attributes), on(attributes.Float("on")), off(attributes.Float("off")) {}

  void Compute(Run& run) const {
    ApplyMask<float>(run, [this](const float* dy, const uint8_t* packed, int64_t n, float* dx) {
      Choose(dy, packed, n, on, off, threads, dx);
    });
  }

  const float on, off;
};

// A tensor seen as rows of channels.
struct Channels {
  int64_t rows = 1, channels = 1;

  explicit Channels(const std::vector<int64_t>& shape) {
    channels = shape.back();
    for (size_t i = 0; i + 1 < shape.size(); ++i) rows *= shape[i];
  }
};

bool CheckHasChannels(Run& run, const Owned<TF_Tensor>& x) {
  if (run.ok() && TF_NumDims(x.get()) < 1) run.Fail("x has no axis of channels");
  return run.ok();
}

// x, scale, offset -> y, packed
struct NormalizeKernel : Threaded {
  explicit NormalizeKernel(Attributes& attributes)
      : Threaded(attributes),
        rectified(attributes.Bool("rectified")),
        limit(attributes.Float("limit")),
        marked(attributes.Bool("marked")) {}

  void Compute(Run& run) const {
    auto x = run.Input(0);
    const auto scale = run.Input(1), offset = run.Input(2);
    if (!CheckHasChannels(run, x)) return;
    const Channels of(Shape(x));
    if (!CheckVector(run, "scale", scale, of.channels)) return;
    if (!CheckVector(run, "offset", offset, of.channels)) return;
    const auto y = run.OutputInPlaceOf(x, 0, 0);
    const auto packed = run.Output(1, {marked ? BitmapBytes(Size(x)) : 0});
    if (!run.ok()) return;
    const float infinity = std::numeric_limits<float>::infinity();
    Normalize(Data<float>(x), Data<float>(scale), Data<float>(offset), of.rows, of.channels,
              rectified ? 0.0f : -infinity, rectified ? limit : infinity, threads,
              Data<float>(y), marked ? Data<uint8_t>(packed) : nullptr);
  }

  const bool rectified;
  const float limit;
  const bool marked;
};

// dy, packed, x, mean, inv_std, scale -> dx, dgamma, dbeta
struct NormalizeGradientKernel : Threaded {
  explicit NormalizeGradientKernel(Attributes& attributes)
      : Threaded(attributes), marked(attributes.Bool("marked")) {}

  void Compute(Run& run) const {
    auto dy = run.Input(0);
    const auto packed = run.Input(1), x = run.Input(2), mean = run.Input(3),
               inv_std = run.Input(4), scale = run.Input(5);
    if (!CheckHasChannels(run, x)) return;
    const auto shape = Shape(x);
    if (Shape(dy) != shape) {
      run.Fail("dy and x of one shape expected, got %lld and %lld elements",
               static_cast<long long>(Size(dy)), static_cast<long long>(Size(x)));
      return;
    }
    const Channels of(shape);
    if (marked && !CheckMask(run, "mask", packed, Size(x))) return;
    if (!CheckVector(run, "mean", mean, of.channels)) return;
    if (!CheckVector(run, "inv_std", inv_std, of.channels)) return;
    if (!CheckVector(run, "scale", scale, of.channels)) return;
    const auto dx = run.OutputInPlaceOf(dy, 0, 0);
    const auto dgamma = run.Output(1, {of.channels}), dbeta = run.Output(2, {of.channels});
    if (!run.ok()) return;
    NormalizeGradient(Data<float>(dy), marked ? Data<uint8_t>(packed) : nullptr, Data<float>(x),
                      Data<float>(mean), Data<float>(inv_std), Data<float>(scale), of.rows,
                      of.channels, threads, Data<float>(dx), Data<float>(dgamma),
                      Data<float>(dbeta));
  }

  const bool marked;
};

struct PoolingKernel : Threaded {
  explicit PoolingKernel(Attributes& attributes)
      : Threaded(attributes),
        window_height(attributes.Int("window_height")),
        window_width(attributes.Int("window_width")) {}

  // The geometry for an input of `shape`; false if it does not fit.
  bool Fit(Run& run, const std::vector<int64_t>& shape, Pooling& pooling) const {
    if (!run.ok()) return false;
    if (shape.size() != 4 || shape[1] % window_height || shape[2] % window_width ||
        shape[3] % 8) {
      run.Fail("an input of rank 4 expected, height and width multiples of %lld and %lld and "
               "channels of 8",
               static_cast<long long>(window_height), static_cast<long long>(window_width));
      return false;
    }
    pooling = {shape[0], shape[1], shape[2], shape[3], window_height, window_width};
    return true;
  }

  const int64_t window_height, window_width;
};

// x -> y, packed
struct MaxPoolKernel : PoolingKernel {
  using PoolingKernel::PoolingKernel;

  void Compute(Run& run) const {
    const auto x = run.Input(0);
    Pooling p;
    if (!run.ok() || !Fit(run, Shape(x), p)) return;
    const auto y = run.Output(
        0, {p.batch, p.height / window_height, p.width / window_width, p.channels});
    const auto packed = run.Output(1, {BitmapBytes(Size(x))});
    if (run.ok()) MaxPool(p, Data<float>(x), threads, Data<float>(y), Data<uint8_t>(packed));
  }
};

// dy, packed -> dx
struct MaxPoolGradientKernel : PoolingKernel {
  using PoolingKernel::PoolingKernel;

  void Compute(Run& run) const {
    const auto dy = run.Input(0), packed = run.Input(1);
    if (!run.ok()) return;
    auto shape = Shape(dy);
    if (shape.size() == 4) {
      shape[1] *= window_height;
      shape[2] *= window_width;
    }
    Pooling p;
    if (!Fit(run, shape, p)) return;
    if (!CheckMask(run, "mask", packed, Size(dy) * window_height * window_width)) return;
    const auto dx = run.Output(0, shape);
    if (run.ok()) {
      MaxPoolGradient(p, Data<float>(dy), Data<uint8_t>(packed), threads, Data<float>(dx));
    }
  }
};

// ---------------------------------------------------------------------------------------------
// Shape functions.

// The shapes of one operation, as far as they are known when it is put into a graph.
class Shapes {
 public:
  Shapes(TF_ShapeInferenceContext* context, TF_Status* status)
      : context_(context), status_(status) {}

  // Every call of the C API overwrites the status: none is made after a failure.
  bool ok() const { return TF_GetCode(status_) == TF_OK; }

  Owned<TF_ShapeHandle> Input(int i) {
    auto shape = Unknown();
    if (ok()) TF_ShapeInferenceContextGetInput(context_, i, shape.get(), status_);
    return shape;
  }

  Owned<TF_ShapeHandle> Unknown() { return Owned<TF_ShapeHandle>(TF_NewShapeHandle()); }

  Owned<TF_ShapeHandle> OfRank(int64_t rank) {
    auto shape = Unknown();
    if (ok()) TF_ShapeInferenceContextWithRank(context_, shape.get(), rank, shape.get(), status_);
    return shape;
  }

  Owned<TF_ShapeHandle> Vector(int64_t size) {
    if (size < 0) return OfRank(1);
    return Owned<TF_ShapeHandle>(
        TF_ShapeInferenceContextVectorFromSize(context_, static_cast<size_t>(size)));
  }

  // -1 if unknown.
  int64_t Dimension(const Owned<TF_ShapeHandle>& shape, int64_t i) {
    if (!TF_ShapeInferenceContextRankKnown(context_, shape.get())) return -1;
    Owned<TF_DimensionHandle> dimension(TF_NewDimensionHandle());
    TF_ShapeInferenceContextDim(context_, shape.get(), i, dimension.get());
    return TF_DimensionHandleValueKnown(dimension.get())
               ? TF_DimensionHandleValue(dimension.get())
               : -1;
  }

  // -1 if unknown.
  int64_t Elements(const Owned<TF_ShapeHandle>& shape) {
    if (!TF_ShapeInferenceContextRankKnown(context_, shape.get())) return -1;
    int64_t elements = 1;
    for (int64_t i = 0; i < TF_ShapeInferenceContextRank(context_, shape.get()); ++i) {
      const int64_t size = Dimension(shape, i);
      if (size < 0 || __builtin_mul_overflow(elements, size, &elements)) return -1;
    }
    return elements;
  }

  Owned<TF_ShapeHandle> MaskOf(const Owned<TF_ShapeHandle>& shape) {
    const int64_t elements = Elements(shape);
    return Vector(elements < 0 ? -1 : BitmapBytes(elements));
  }

  // Fails unless the rank is that, or unknown.
  void CheckRank(int input, int64_t rank) {
    const auto shape = Input(input);
    auto checked = Unknown();
    if (ok()) TF_ShapeInferenceContextWithRank(context_, shape.get(), rank, checked.get(), status_);
  }

  void Output(int i, const Owned<TF_ShapeHandle>& shape) {
    if (ok()) TF_ShapeInferenceContextSetOutput(context_, i, shape.get(), status_);
  }

  int64_t inputs() { return TF_ShapeInferenceContextNumInputs(context_); }

 private:
  TF_ShapeInferenceContext* context_;
  TF_Status* status_;
};

void EncodeShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  const bool supported = shapes.inputs() > 1;  // then the bitmap may be empty
  if (supported) shapes.CheckRank(1, 1);
  shapes.Output(0, supported ? shapes.OfRank(1) : shapes.MaskOf(shapes.Input(0)));
  shapes.Output(1, shapes.OfRank(1));
}

void DecodeShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  for (int i = 0; i < shapes.inputs(); ++i) shapes.CheckRank(i, 1);
  const int64_t rank = shapes.Dimension(shapes.Input(0), 0);
  shapes.Output(0, rank < 0 ? shapes.Unknown() : shapes.OfRank(rank));
}

void MaskShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  shapes.Output(0, shapes.MaskOf(shapes.Input(0)));
}

void ApplyShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  shapes.CheckRank(1, 1);
  shapes.Output(0, shapes.Input(0));
}

void NormalizeShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  shapes.CheckRank(1, 1);
  shapes.CheckRank(2, 1);
  shapes.Output(0, shapes.Input(0));
  shapes.Output(1, shapes.OfRank(1));
}

void NormalizeGradientShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  for (const int i : {1, 3, 4, 5}) shapes.CheckRank(i, 1);
  shapes.Output(0, shapes.Input(2));
  shapes.Output(1, shapes.Input(3));
  shapes.Output(2, shapes.Input(3));
}

void MaxPoolShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  shapes.CheckRank(0, 4);
  shapes.Output(0, shapes.OfRank(4));
  shapes.Output(1, shapes.MaskOf(shapes.Input(0)));
}

void MaxPoolGradientShapes(TF_ShapeInferenceContext* context, TF_Status* status) {
  Shapes shapes(context, status);
  shapes.CheckRank(0, 4);
  shapes.CheckRank(1, 1);
  shapes.Output(0, shapes.OfRank(4));
}

// ---------------------------------------------------------------------------------------------
// Registration, when the library is loaded.

using ShapeFunction = void (*)(TF_ShapeInferenceContext*, TF_Status*);

// Says what failed; TensorFlow then knows no such operation, which the loader notices.
void Check(const char* what, const Owned<TF_Status>& status) {
  if (TF_GetCode(status.get()) == TF_OK) return;
  std::fprintf(stderr, "bittrain: %s: %s\n", what, TF_Message(status.get()));
}

void Define(const char* name, ShapeFunction shapes, std::initializer_list<const char*> inputs,
            std::initializer_list<const char*> outputs,
            std::initializer_list<const char*> attributes) {
  TF_OpDefinitionBuilder* builder = TF_NewOpDefinitionBuilder(name);
  for (const char* spec : inputs) TF_OpDefinitionBuilderAddInput(builder, spec);
  for (const char* spec : outputs) TF_OpDefinitionBuilderAddOutput(builder, spec);
  for (const char* spec : attributes) TF_OpDefinitionBuilderAddAttr(builder, spec);
  TF_OpDefinitionBuilderAddAttr(builder, "threads: int >= 1");
  TF_OpDefinitionBuilderSetShapeInferenceFunction(builder, shapes);
  Owned<TF_Status> status(TF_NewStatus());
  TF_RegisterOpDefinition(builder, status.get());
  Check(name, status);
}

// For every dtype, if one is given: else for all.
template <typename Kernel>
void Implement(const char* name, int dtype = 0) {
  Owned<TF_Status> status(TF_NewStatus());
  TF_KernelBuilder* builder = TF_NewKernelBuilder(name, "CPU", &Create<Kernel>, &Compute<Kernel>,
                                                  &Destroy<Kernel>);
  if (dtype != 0) {
    TF_KernelBuilder_TypeConstraint(builder, "T", static_cast<TF_DataType>(dtype), status.get());
  }
  TF_RegisterKernelBuilder(name, builder, status.get());
  Check(name, status);
}

constexpr char kAnyFloat[] = "T: {half, bfloat16, float, double}";

const bool registered = [] {
  Define("Bittrain>Encode", EncodeShapes, {"x: T", "support: supports * uint8"},
         {"bitmap: uint8", "values: T"}, {kAnyFloat, "supports: int >= 0"});
  Define("Bittrain>Decode", DecodeShapes,
         {"shape: int64", "values: T", "bitmaps: bitmap_count * uint8"}, {"x: T"},
         {kAnyFloat, "bitmap_count: int >= 1"});
  Define("Bittrain>MarkPositive", MaskShapes, {"x: T"}, {"packed: uint8"},
         {kAnyFloat, "below_six: bool = false"});
  Define("Bittrain>MarkTrue", MaskShapes, {"x: bool"}, {"packed: uint8"}, {});
  Define("Bittrain>Multiply", ApplyShapes, {"dy: T", "packed: uint8"}, {"dx: T"}, {kAnyFloat});
  Define("Bittrain>Choose", ApplyShapes, {"dy: float", "packed: uint8"}, {"dx: float"},
         {"on: float", "off: float"});
  Define("Bittrain>Normalize", NormalizeShapes, {"x: float", "scale: float", "offset: float"},
         {"y: float", "packed: uint8"},
         {"rectified: bool = false", "limit: float", "marked: bool = false"});
  Define("Bittrain>NormalizeGradient", NormalizeGradientShapes,
         {"dy: float", "packed: uint8", "x: float", "mean: float", "inv_std: float",
          "scale: float"},
         {"dx: float", "dgamma: float", "dbeta: float"}, {"marked: bool = false"});
  Define("Bittrain>MaxPool", MaxPoolShapes, {"x: float"}, {"y: float", "packed: uint8"},
         {"window_height: int >= 1", "window_width: int >= 1"});
  Define("Bittrain>MaxPoolGradient", MaxPoolGradientShapes, {"dy: float", "packed: uint8"},
         {"dx: float"}, {"window_height: int >= 1", "window_width: int >= 1"});

  for (const int dtype : {TF_HALF, TF_BFLOAT16}) {
    Implement<EncodeKernel<uint16_t>>("Bittrain>Encode", dtype);
    Implement<DecodeKernel<uint16_t>>("Bittrain>Decode", dtype);
  }
  Implement<EncodeKernel<uint32_t>>("Bittrain>Encode", TF_FLOAT);
  Implement<DecodeKernel<uint32_t>>("Bittrain>Decode", TF_FLOAT);
  Implement<EncodeKernel<uint64_t>>("Bittrain>Encode", TF_DOUBLE);
  Implement<DecodeKernel<uint64_t>>("Bittrain>Decode", TF_DOUBLE);
  Implement<MarkPositiveKernel<Half, uint16_t>>("Bittrain>MarkPositive", TF_HALF);
  Implement<MarkPositiveKernel<Bfloat16, uint16_t>>("Bittrain>MarkPositive", TF_BFLOAT16);
  Implement<MarkPositiveKernel<Float, uint32_t>>("Bittrain>MarkPositive", TF_FLOAT);
  Implement<MarkPositiveKernel<Double, uint64_t>>("Bittrain>MarkPositive", TF_DOUBLE);
  Implement<MultiplyKernel<Half, uint16_t>>("Bittrain>Multiply", TF_HALF);
  Implement<MultiplyKernel<Bfloat16, uint16_t>>("Bittrain>Multiply", TF_BFLOAT16);
  Implement<MultiplyKernel<Float, uint32_t>>("Bittrain>Multiply", TF_FLOAT);
  Implement<MultiplyKernel<Double, uint64_t>>("Bittrain>Multiply", TF_DOUBLE);
  Implement<MarkTrueKernel>("Bittrain>MarkTrue");
  Implement<ChooseKernel>("Bittrain>Choose");
  Implement<NormalizeKernel>("Bittrain>Normalize");
  Implement<NormalizeGradientKernel>("Bittrain>NormalizeGradient");
  Implement<MaxPoolKernel>("Bittrain>MaxPool");
  Implement<MaxPoolGradientKernel>("Bittrain>MaxPoolGradient");
  return true;
}();

}  // namespace

// For `bittrain doctor`.
extern "C" __attribute__((visibility("default"))) const char* bittrain_instruction_set() {
  return registered ? BestLoops<uint32_t>().name : "none";
}
