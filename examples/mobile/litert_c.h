// The part of LiteRT's C API that train.cc calls, as libLiteRt.so of ai-edge-litert 2.3.0 has it.
//
// An app includes the headers of LiteRT's SDK (litert/c/*.h) instead. This file exists because the
// pip package has the library without them. Another version of the library may take other
// arguments: in earlier ones LiteRtCreateModelFromFile takes no environment.

#ifndef EXAMPLES_MOBILE_LITERT_C_H_
#define EXAMPLES_MOBILE_LITERT_C_H_

#include <cstddef>
#include <cstdint>

extern "C" {

typedef struct LiteRtEnvironmentT* LiteRtEnvironment;
typedef struct LiteRtOptionsT* LiteRtOptions;
typedef struct LiteRtModelT* LiteRtModel;
typedef struct LiteRtSignatureT* LiteRtSignature;
typedef struct LiteRtTensorT* LiteRtTensor;
typedef struct LiteRtCompiledModelT* LiteRtCompiledModel;
typedef struct LiteRtTensorBufferT* LiteRtTensorBuffer;
typedef struct LiteRtTensorBufferRequirementsT* LiteRtTensorBufferRequirements;
typedef struct LiteRtEnvOption LiteRtEnvOption;

typedef enum : int { kLiteRtStatusOk = 0 } LiteRtStatus;

typedef enum : int { kLiteRtHwAcceleratorCpu = 1 } LiteRtHwAccelerators;

typedef enum : int {
  kLiteRtElementTypeFloat32 = 1,
  kLiteRtElementTypeInt32 = 2,
  kLiteRtElementTypeInt64 = 4,
} LiteRtElementType;

typedef enum : int {
  kLiteRtTensorBufferLockModeRead = 0,
  kLiteRtTensorBufferLockModeWrite = 1,
} LiteRtTensorBufferLockMode;

typedef struct {
  LiteRtElementType element_type;
  struct {
    unsigned int rank : 7;
    bool has_strides : 1;
    int32_t dimensions[8];
    uint32_t strides[8];
  } layout;
} LiteRtRankedTensorType;
static_assert(sizeof(LiteRtRankedTensorType) == 72, "the library writes 72 bytes");

LiteRtStatus LiteRtCreateEnvironment(int num_options, const LiteRtEnvOption* options,
                                     LiteRtEnvironment* environment);
void LiteRtDestroyEnvironment(LiteRtEnvironment environment);

LiteRtStatus LiteRtCreateOptions(LiteRtOptions* options);
LiteRtStatus LiteRtSetOptionsHardwareAccelerators(LiteRtOptions options, int accelerators);
void LiteRtDestroyOptions(LiteRtOptions options);

LiteRtStatus LiteRtCreateModelFromFile(LiteRtEnvironment environment, const char* filename,
                                       LiteRtModel* model);
void LiteRtDestroyModel(LiteRtModel model);
LiteRtStatus LiteRtGetNumModelSignatures(LiteRtModel model, size_t* count);
LiteRtStatus LiteRtGetModelSignature(LiteRtModel model, size_t index, LiteRtSignature* signature);

LiteRtStatus LiteRtGetSignatureKey(LiteRtSignature signature, const char** key);
LiteRtStatus LiteRtGetNumSignatureInputs(LiteRtSignature signature, size_t* count);
LiteRtStatus LiteRtGetSignatureInputName(LiteRtSignature signature, size_t index,
                                         const char** name);
LiteRtStatus LiteRtGetSignatureInputTensorByIndex(LiteRtSignature signature, size_t index,
                                                  LiteRtTensor* tensor);
LiteRtStatus LiteRtGetNumSignatureOutputs(LiteRtSignature signature, size_t* count);
LiteRtStatus LiteRtGetSignatureOutputName(LiteRtSignature signature, size_t index,
                                          const char** name);
LiteRtStatus LiteRtGetSignatureOutputTensorByIndex(LiteRtSignature signature, size_t index,
                                                   LiteRtTensor* tensor);
LiteRtStatus LiteRtGetRankedTensorType(LiteRtTensor tensor, LiteRtRankedTensorType* type);

LiteRtStatus LiteRtCreateCompiledModel(LiteRtEnvironment environment, LiteRtModel model,
                                       LiteRtOptions options, LiteRtCompiledModel* compiled);
void LiteRtDestroyCompiledModel(LiteRtCompiledModel compiled);
LiteRtStatus LiteRtGetCompiledModelInputBufferRequirements(
    LiteRtCompiledModel compiled, size_t signature, size_t input,
    LiteRtTensorBufferRequirements* requirements);
LiteRtStatus LiteRtGetCompiledModelOutputBufferRequirements(
    LiteRtCompiledModel compiled, size_t signature, size_t output,
    LiteRtTensorBufferRequirements* requirements);
LiteRtStatus LiteRtRunCompiledModel(LiteRtCompiledModel compiled, size_t signature,
                                    size_t num_inputs, LiteRtTensorBuffer* inputs,
                                    size_t num_outputs, LiteRtTensorBuffer* outputs);

LiteRtStatus LiteRtCreateManagedTensorBufferFromRequirements(
    LiteRtEnvironment environment, const LiteRtRankedTensorType* type,
    LiteRtTensorBufferRequirements requirements, LiteRtTensorBuffer* buffer);
void LiteRtDestroyTensorBuffer(LiteRtTensorBuffer buffer);
LiteRtStatus LiteRtGetTensorBufferPackedSize(LiteRtTensorBuffer buffer, size_t* bytes);
LiteRtStatus LiteRtLockTensorBuffer(LiteRtTensorBuffer buffer, void** address,
                                    LiteRtTensorBufferLockMode mode);
LiteRtStatus LiteRtUnlockTensorBuffer(LiteRtTensorBuffer buffer);

}  // extern "C"

#endif  // EXAMPLES_MOBILE_LITERT_C_H_
