// Trains a classification file of tflite_tools.export with LiteRT's CompiledModel, without Python.
//
//   train MODEL DATA_FOLDER CHECKPOINT [--epochs N] [--learning-rate R]
//
// DATA_FOLDER holds what examples/mobile/export.py writes. Training goes on from CHECKPOINT if
// there is one; it is a .safetensors file, which tflite_tools.Trainer.load reads, too.

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#include "litert_c.h"

namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail(const std::string& message) { throw std::runtime_error(message); }

void check(LiteRtStatus status, const std::string& doing) {
  if (status != kLiteRtStatusOk) {
    fail("LiteRT failed to " + doing + " (status " + std::to_string(status) +
         "). What it logged above may say why.");
  }
}

std::string read_file(const fs::path& path) {
  std::ifstream file(path, std::ios::binary);
  std::string content{std::istreambuf_iterator<char>(file), {}};
  if (!file) fail("Cannot read " + path.string() + ". Is it there, and a file?");
  return content;
}

// Whole or not at all: an app can be killed at any time.
void write_file(const fs::path& path, const std::string& content) {
  const std::string part = path.string() + ".part";
  std::FILE* file = std::fopen(part.c_str(), "wb");
  if (!file) fail("Cannot write " + part + ". Is its folder there, and writable?");
  bool written = std::fwrite(content.data(), 1, content.size(), file) == content.size();
  written = std::fflush(file) == 0 && written;
  written = fsync(fileno(file)) == 0 && written;
  written = std::fclose(file) == 0 && written;
  if (!written || std::rename(part.c_str(), path.c_str()) != 0) {
    std::remove(part.c_str());
    fail("Cannot write " + path.string() + ". Is there space?");
  }
}

// LiteRT takes the process down over a file that lacks its end. What export() writes there is a
// mark and a SHA-256 checksum of the rest; the checksum is for who downloads the file to compare.
void check_whole(const std::string& path) {
  const std::string content = read_file(path), mark = "bittrain";
  const size_t tail = mark.size() + 32;
  if (content.size() < tail || content.compare(content.size() - tail, mark.size(), mark) != 0) {
    fail(path + " is not a whole file of tflite_tools.export. Export it, or copy it, again.");
  }
}

template <auto destroy>
struct Destroy {
  template <typename T>
  void operator()(T* handle) const {
    destroy(handle);
  }
};
using Environment = std::unique_ptr<LiteRtEnvironmentT, Destroy<LiteRtDestroyEnvironment>>;
using Options = std::unique_ptr<LiteRtOptionsT, Destroy<LiteRtDestroyOptions>>;
using Model = std::unique_ptr<LiteRtModelT, Destroy<LiteRtDestroyModel>>;
using Compiled = std::unique_ptr<LiteRtCompiledModelT, Destroy<LiteRtDestroyCompiledModel>>;
using Buffer = std::unique_ptr<LiteRtTensorBufferT, Destroy<LiteRtDestroyTensorBuffer>>;

// Members are destroyed in reverse: each needs those before it.
struct Runtime {
  Environment environment;
  Model model;
  Compiled compiled;

  explicit Runtime(const std::string& path) {
    check_whole(path);
    LiteRtEnvironment new_environment;
    check(LiteRtCreateEnvironment(0, nullptr, &new_environment), "start");
    environment.reset(new_environment);

    LiteRtModel new_model;
    check(LiteRtCreateModelFromFile(new_environment, path.c_str(), &new_model), "load " + path);
    model.reset(new_model);

    LiteRtOptions new_options;
    check(LiteRtCreateOptions(&new_options), "make options");
    const Options options(new_options);
    // The others have not been tried: they may lack operators, or round more coarsely.
    check(LiteRtSetOptionsHardwareAccelerators(new_options, kLiteRtHwAcceleratorCpu),
          "choose the CPU");

    LiteRtCompiledModel new_compiled;
    check(LiteRtCreateCompiledModel(new_environment, new_model, new_options, &new_compiled),
          "compile " + path);
    compiled.reset(new_compiled);
  }
};

struct Tensor {
  std::string name;
  LiteRtElementType type;
  std::vector<int32_t> shape;
  size_t bytes;
  Buffer buffer;

  size_t elements() const {
    size_t count = 1;
    for (const int32_t size : shape) count *= size;
    return count;
  }

  void put(const void* data) const {
    void* address;
    check(LiteRtLockTensorBuffer(buffer.get(), &address, kLiteRtTensorBufferLockModeWrite),
          "lock " + name);
    std::memcpy(address, data, bytes);
    check(LiteRtUnlockTensorBuffer(buffer.get()), "unlock " + name);
  }

  void get(void* data) const {
    void* address;
    check(LiteRtLockTensorBuffer(buffer.get(), &address, kLiteRtTensorBufferLockModeRead),
          "lock " + name);
    std::memcpy(data, address, bytes);
    check(LiteRtUnlockTensorBuffer(buffer.get()), "unlock " + name);
  }

  float number() const {
    if (type != kLiteRtElementTypeFloat32 || elements() != 1) fail(name + " is not one number.");
    float value;
    get(&value);
    return value;
  }
};

// One signature of the file, with a buffer for each of its inputs and outputs.
class Signature {
 public:
  Signature(const Runtime& runtime, const std::string& name)
      : name_(name), compiled_(runtime.compiled.get()) {
    const LiteRtSignature signature = find(runtime.model.get());
    inputs_ = tensors<LiteRtGetNumSignatureInputs, LiteRtGetSignatureInputName,
                      LiteRtGetSignatureInputTensorByIndex,
                      LiteRtGetCompiledModelInputBufferRequirements>(runtime, signature);
    outputs_ = tensors<LiteRtGetNumSignatureOutputs, LiteRtGetSignatureOutputName,
                       LiteRtGetSignatureOutputTensorByIndex,
                       LiteRtGetCompiledModelOutputBufferRequirements>(runtime, signature);
  }

  const std::vector<Tensor>& inputs() const { return inputs_; }
  const Tensor& input(const std::string& name) const { return named(inputs_, name); }
  const Tensor& output(const std::string& name) const { return named(outputs_, name); }

  void run() const {
    std::vector<LiteRtTensorBuffer> in, out;
    for (const Tensor& tensor : inputs_) in.push_back(tensor.buffer.get());
    for (const Tensor& tensor : outputs_) out.push_back(tensor.buffer.get());
    check(LiteRtRunCompiledModel(compiled_, index_, in.size(), in.data(), out.size(), out.data()),
          "run " + name_);
  }

 private:
  LiteRtSignature find(LiteRtModel model) {
    size_t count;
    check(LiteRtGetNumModelSignatures(model, &count), "count signatures");
    for (index_ = 0; index_ < count; ++index_) {
      LiteRtSignature signature;
      const char* key;
      check(LiteRtGetModelSignature(model, index_, &signature), "find a signature");
      check(LiteRtGetSignatureKey(signature, &key), "name a signature");
      if (name_ == key) return signature;
    }
    fail("The file has no signature " + name_ + ". Give one that tflite_tools.export wrote.");
  }

  template <auto count_of, auto name_of, auto tensor_of, auto requirements_of>
  std::vector<Tensor> tensors(const Runtime& runtime, LiteRtSignature signature) const {
    size_t count;
    check(count_of(signature, &count), "count the tensors of " + name_);
    std::vector<Tensor> made;
    for (size_t i = 0; i < count; ++i) {
      const char* name;
      LiteRtTensor tensor;
      LiteRtRankedTensorType type;
      LiteRtTensorBufferRequirements requirements;
      LiteRtTensorBuffer buffer;
      size_t bytes;
      check(name_of(signature, i, &name), "name a tensor of " + name_);
      check(tensor_of(signature, i, &tensor), std::string("find ") + name);
      check(LiteRtGetRankedTensorType(tensor, &type), std::string("read the type of ") + name);
      check(requirements_of(compiled_, index_, i, &requirements), std::string("size ") + name);
      check(LiteRtCreateManagedTensorBufferFromRequirements(runtime.environment.get(), &type,
                                                            requirements, &buffer),
            std::string("allocate ") + name);
      Buffer owned(buffer);
      check(LiteRtGetTensorBufferPackedSize(buffer, &bytes), std::string("measure ") + name);
      const int32_t* sizes = type.layout.dimensions;
      made.push_back({name,
                      type.element_type,
                      {sizes, sizes + type.layout.rank},
                      bytes,
                      std::move(owned)});
    }
    return made;
  }

  const Tensor& named(const std::vector<Tensor>& tensors, const std::string& name) const {
    for (const Tensor& tensor : tensors) {
      if (tensor.name == name) return tensor;
    }
    fail(name_ + " has no " + name +
         ". Export a model of one input, without sample weights, and with "
         "metrics=[\"sparse_categorical_accuracy\"].");
  }

  std::string name_;
  LiteRtCompiledModel compiled_;
  size_t index_ = 0;
  std::vector<Tensor> inputs_, outputs_;
};

// Every variable, those of the optimizer included, as a .safetensors file.
class Checkpoint {
 public:
  explicit Checkpoint(const Runtime& runtime)
      : get_(runtime, "get_weights"), set_(runtime, "set_weights") {
    for (const Tensor& variable : set_.inputs()) variables_[variable.name] = &variable;
    const float unused = 0;
    get_.input("nothing").put(&unused);
  }

  void save(const fs::path& path) const {
    get_.run();
    std::string content = header();
    for (const auto& [name, variable] : variables_) {
      content.resize(content.size() + variable->bytes);
      get_.output(name).get(&content[content.size() - variable->bytes]);
    }
    write_file(path, content);
  }

  void load(const fs::path& path) const {
    const std::string content = read_file(path), expected = header();
    size_t size = expected.size();
    for (const auto& [name, variable] : variables_) size += variable->bytes;
    if (content.compare(0, expected.size(), expected) != 0 || content.size() != size) {
      fail(path.string() + " (" + std::to_string(content.size()) +
           " bytes) is not a whole checkpoint of this model (" + std::to_string(size) +
           " bytes). Name another, or remove it to start from the model.");
    }
    const char* data = content.data() + expected.size();
    for (const auto& [name, variable] : variables_) {
      variable->put(data);
      data += variable->bytes;
    }
    set_.run();
  }

 private:
  // What stands before the data: a length and JSON. It has all names and shapes, so that what
  // begins with it fits the model, and nothing has to be parsed.
  std::string header() const {
    const std::map<LiteRtElementType, std::string> types{{kLiteRtElementTypeFloat32, "F32"},
                                                         {kLiteRtElementTypeInt32, "I32"},
                                                         {kLiteRtElementTypeInt64, "I64"}};
    std::string json;
    size_t offset = 0;
    for (const auto& [name, variable] : variables_) {
      const auto type = types.find(variable->type);
      if (type == types.end()) fail(name + " is of a type that this program does not save.");
      std::string shape;
      for (const int32_t size : variable->shape) {
        shape += (shape.empty() ? "" : ",") + std::to_string(size);
      }
      const size_t end = offset + variable->bytes;
      json += (json.empty() ? "{\"" : ",\"") + name + "\":{\"dtype\":\"" + type->second +
              "\",\"shape\":[" + shape + "],\"data_offsets\":[" + std::to_string(offset) + "," +
              std::to_string(end) + "]}";
      offset = end;
    }
    json += "}";
    json.resize((json.size() + 7) / 8 * 8, ' ');
    std::string length;
    for (int i = 0; i < 8; ++i) length += static_cast<char>(json.size() >> (8 * i));
    return length + json;
  }

  Signature get_, set_;
  // By name, so that the order is the same in every runtime.
  std::map<std::string, const Tensor*> variables_;
};

struct Data {
  std::vector<float> x;
  std::vector<int32_t> y;
};

template <typename T>
std::vector<T> read_numbers(const fs::path& path) {
  const std::string content = read_file(path);
  std::vector<T> numbers(content.size() / sizeof(T));
  std::memcpy(numbers.data(), content.data(), numbers.size() * sizeof(T));
  return numbers;
}

class Classifier {
 public:
  Classifier(const Runtime& runtime, float learning_rate)
      : train_(runtime, "train"), infer_(runtime, "infer") {
    const Tensor &x = train_.input("x"), &y = train_.input("y");
    if (x.type != kLiteRtElementTypeFloat32 || x.shape.empty() ||
        y.type != kLiteRtElementTypeInt32 || y.elements() != size_t(x.shape[0])) {
      fail("The model does not take float32 samples and one int32 label for each.");
    }
    batch_ = x.shape[0];
    per_sample_ = x.elements() / batch_;
    train_.input("learning_rate").put(&learning_rate);
  }

  Data read(const fs::path& folder, const std::string& part) const {
    Data data{read_numbers<float>(folder / (part + "_x.f32")),
              read_numbers<int32_t>(folder / (part + "_y.i32"))};
    if (data.x.size() != data.y.size() * per_sample_ || data.y.size() < batch_) {
      fail("The " + part + " data in " + folder.string() + " are " +
           std::to_string(data.y.size()) + " labels and " + std::to_string(data.x.size()) +
           " numbers; the model takes " + std::to_string(per_sample_) +
           " numbers a label, and at least " + std::to_string(batch_) + " labels.");
    }
    return data;
  }

  // In the order of the data. What is left over after whole batches is not trained on.
  void epoch(const Data& data, const std::string& title) const {
    const size_t steps = data.y.size() / batch_;
    double loss = 0, accuracy = 0;
    for (size_t step = 0; step < steps; ++step) {
      train_.input("x").put(&data.x[step * batch_ * per_sample_]);
      train_.input("y").put(&data.y[step * batch_]);
      train_.run();
      loss += train_.output("loss").number();
      accuracy += train_.output("sparse_categorical_accuracy").number();
    }
    std::printf("%s: loss %.7g, accuracy %.7g\n", title.c_str(), loss / steps, accuracy / steps);
    std::fflush(stdout);
  }

  // The share of samples whose largest output is that of their label.
  double accuracy(const Data& data) const {
    std::vector<float> x(batch_ * per_sample_), output(infer_.output("output").elements());
    const size_t classes = output.size() / batch_;
    size_t right = 0;
    for (size_t start = 0; start < data.y.size(); start += batch_) {
      // What the last batch lacks is left from the one before.
      const size_t count = std::min(batch_, data.y.size() - start);
      std::copy_n(&data.x[start * per_sample_], count * per_sample_, x.begin());
      infer_.input("x").put(x.data());
      infer_.run();
      infer_.output("output").get(output.data());
      for (size_t i = 0; i < count; ++i) {
        const auto scores = output.begin() + i * classes;
        right += std::max_element(scores, scores + classes) - scores == data.y[start + i];
      }
    }
    return static_cast<double>(right) / data.y.size();
  }

 private:
  Signature train_, infer_;
  size_t batch_ = 0, per_sample_ = 0;
};

template <typename T>
T positive(const std::string& option, const std::string& text) {
  std::istringstream stream(text);
  T value;
  if (!(stream >> value) || !stream.eof() || !(value > 0)) {
    fail(option + " takes a number above 0, not " + text + ".");
  }
  return value;
}

void run(const std::vector<std::string>& arguments) {
  const std::string usage =
      "Usage: train MODEL DATA_FOLDER CHECKPOINT [--epochs N] [--learning-rate R]";
  if (arguments.size() < 3 || arguments.size() % 2 == 0) fail(usage);
  int epochs = 4;
  float learning_rate = 2e-3f;
  for (size_t i = 3; i < arguments.size(); i += 2) {
    if (arguments[i] == "--epochs") {
      epochs = positive<int>(arguments[i], arguments[i + 1]);
    } else if (arguments[i] == "--learning-rate") {
      learning_rate = positive<float>(arguments[i], arguments[i + 1]);
    } else {
      fail(usage);
    }
  }

  const Runtime runtime(arguments[0]);
  const Classifier classifier(runtime, learning_rate);
  const Checkpoint checkpoint(runtime);
  const Data train = classifier.read(arguments[1], "train");
  const Data test = classifier.read(arguments[1], "test");
  const fs::path path = arguments[2];
  const bool resumed = fs::exists(path);
  if (resumed) checkpoint.load(path);

  std::printf("from %s: test accuracy %.7g\n", arguments[resumed ? 2 : 0].c_str(),
              classifier.accuracy(test));
  for (int epoch = 1; epoch <= epochs; ++epoch) {
    classifier.epoch(train, "epoch " + std::to_string(epoch) + "/" + std::to_string(epochs));
    checkpoint.save(path);
  }
  std::printf("saved in %s: test accuracy %.7g\n", path.c_str(), classifier.accuracy(test));
}

}  // namespace

int main(int count, char** arguments) {
  try {
    run({arguments + 1, arguments + count});
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
