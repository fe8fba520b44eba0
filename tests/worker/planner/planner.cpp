// FlashInfer's host planner, compiled by a C++ compiler without CUDA. The few functions of the CUDA runtime that it calls are below: they
// answer for the device that `describe_device` was given.

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>

#include <cuda_runtime_api.h>

// nvcc provides these.
using std::max;
using std::min;
inline uint32_t max(uint32_t a, int32_t b) { return std::max(a, static_cast<uint32_t>(b)); }

#include <flashinfer/attention/scheduler.cuh>

namespace {

struct Device {
  int processors, shared_per_processor, shared_per_block, registers;
} device;

struct Copy {
  void* to;
  size_t bytes;
} copied;

std::string message;

struct Params {
  using IdType = int32_t;
  using DTypeKV = uint16_t;
};
struct Variant {};

}  // namespace

extern "C" {

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int* blocks, const void*, int threads, size_t shared, unsigned) {
  const int by_shared = device.shared_per_processor / static_cast<int>(shared + 1024);
  *blocks = std::min({2048 / threads, by_shared, 65536 / (device.registers * threads), 32});
  return cudaSuccess;
}

cudaError_t cudaGetDevice(int* number) {
  *number = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  switch (attribute) {
    case cudaDevAttrMultiProcessorCount: *value = device.processors; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMajor: *value = 9; return cudaSuccess;
    case cudaDevAttrComputeCapabilityMinor: *value = 0; return cudaSuccess;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = device.shared_per_block; return cudaSuccess;
    default: return cudaErrorInvalidValue;
  }
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  copied = {to, bytes};
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}
}

namespace flashinfer {
template <PosEncodingMode, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, typename, typename Params>
__global__ void BatchDecodeWithPagedKVCacheKernel(const __grid_constant__ Params) {}
}  // namespace flashinfer

using namespace flashinfer;

struct Workspace {
  size_t float_bytes;
  void* int_buffer;
  void* pinned;
  size_t int_bytes;
};

// Planning never touches the float workspace. Its address only has to be aligned.
static void* const kFloats = reinterpret_cast<void*>(1 << 20);

template <typename Info, typename Plan>
static const char* run(int64_t* result, int64_t* bytes, Plan plan) {
  copied = {};
  try {
    Info info;
    const cudaError_t status = plan(info);
    if (status != cudaSuccess) return "a function of the CUDA runtime failed";
    const auto values = info.ToVector();
    std::copy(values.begin(), values.end(), result);
    *bytes = static_cast<int64_t>(copied.bytes);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}

extern "C" {

void describe_device(int processors, int shared_per_processor, int shared_per_block, int registers) {
  device = {processors, shared_per_processor, shared_per_block, registers};
}

// Each returns an error message or null. `result`: the plan's numbers. `bytes`: what was copied to the device.
const char* plan_decode(const Workspace* space, int32_t* indptr, uint32_t batch, uint32_t heads, uint32_t kv_heads, uint32_t page_size,
                        bool graph, uint32_t head_dim, int64_t* result, int64_t* bytes) {
  return run<DecodePlanInfo>(result, bytes, [&](DecodePlanInfo& info) -> cudaError_t {
    DISPATCH_GQA_GROUP_SIZE(heads / kv_heads, GROUP, {DISPATCH_HEAD_DIM(head_dim, DIM, {
                              auto estimate = BatchDecodeWithPagedKVCacheWorkEstimationDispatched<GROUP, DIM, PosEncodingMode::kNone,
                                                                                                  Variant, Params>;
                              return DecodePlan<DIM, PosEncodingMode::kNone, Variant, Params>(
                                  kFloats, space->float_bytes, space->int_buffer, space->pinned, space->int_bytes, info, indptr, batch,
                                  heads, page_size, graph, nullptr, estimate);
                            })});
    return cudaErrorInvalidValue;
  });
}

const char* plan_prefill(const Workspace* space, int32_t* qo_indptr, int32_t* kv_indptr, uint32_t total_rows, uint32_t batch,
                         uint32_t heads, uint32_t kv_heads, uint32_t page_size, bool graph, uint32_t dim_qk, uint32_t dim_vo,
                         int32_t window_left, int32_t fixed_split, bool disable_split, int64_t uniform_queries, uint32_t kv_bytes,
                         int64_t* result, int64_t* bytes) {
  return run<PrefillPlanInfo>(result, bytes, [&](PrefillPlanInfo& info) {
    return PrefillPlan<int32_t>(kFloats, space->float_bytes, space->int_buffer, space->pinned, space->int_bytes, info, qo_indptr, kv_indptr,
                                total_rows, batch, heads, kv_heads, dim_qk, dim_vo, page_size, graph, 2, window_left, fixed_split,
                                disable_split, 0, uniform_queries, nullptr, kv_bytes);
  });
}

const char* plan_prefill_sm90(const Workspace* space, int32_t* qo_indptr, int32_t* kv_indptr, int32_t* kv_lengths, uint32_t total_rows,
                              uint32_t batch, uint32_t heads, uint32_t kv_heads, uint32_t page_size, bool graph, uint32_t dim_qk,
                              uint32_t dim_vo, bool causal, int64_t* result, int64_t* bytes) {
  return run<PrefillPlanSM90Info>(result, bytes, [&](PrefillPlanSM90Info& info) {
    return PrefillSM90Plan<int32_t>(kFloats, space->float_bytes, space->int_buffer, space->pinned, space->int_bytes, info, qo_indptr,
                                    kv_indptr, kv_lengths, total_rows, batch, heads, kv_heads, dim_qk, dim_vo, page_size, causal, graph, 2,
                                    nullptr);
  });
}
}
