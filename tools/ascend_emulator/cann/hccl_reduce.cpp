#include "hccl_reduce.h"

#include <cmath>
#include <cstdio>
#include <cstring>

namespace emulator {

namespace {

// g++ before 13 knows Arm's name of the type only.
#if defined(__aarch64__)
using Half = __fp16;
#else
using Half = _Float16;
#endif

// A bfloat16 is the upper half of a float.
struct Bfloat16 {
  uint16_t bits;

  operator float() const {
    const uint32_t wide = static_cast<uint32_t>(bits) << 16;
    float value;
    std::memcpy(&value, &wide, sizeof value);
    return value;
  }

  static Bfloat16 nearest(float value) {
    if (std::isnan(value)) return {0x7fc0};
    uint32_t wide;
    std::memcpy(&wide, &value, sizeof wide);
    const uint32_t ties_to_even = 0x7fff + ((wide >> 16) & 1);
    return {static_cast<uint16_t>((wide + ties_to_even) >> 16)};
  }
};

template <class T>
T combine(T a, T b, HcclReduceOp op) {
  switch (op) {
    case HCCL_REDUCE_SUM: return a + b;
    case HCCL_REDUCE_PROD: return a * b;
    case HCCL_REDUCE_MAX: return a > b ? a : b;
    default: return a < b ? a : b;
  }
}

// In the order of the ranks, so that every rank gets the same bits.
template <class T>
void reduce_slots(Segment& segment, void* out, size_t bytes, HcclReduceOp op) {
  for (size_t i = 0; i < bytes / sizeof(T); ++i) {
    T total = reinterpret_cast<T*>(segment.slot(0))[i];
    for (uint32_t rank = 1; rank < segment.ranks(); ++rank)
      total = combine<T>(total, reinterpret_cast<T*>(segment.slot(rank))[i], op);
    static_cast<T*>(out)[i] = total;
  }
}

template <>
void reduce_slots<Bfloat16>(Segment& segment, void* out, size_t bytes, HcclReduceOp op) {
  for (size_t i = 0; i < bytes / sizeof(Bfloat16); ++i) {
    float total = reinterpret_cast<Bfloat16*>(segment.slot(0))[i];
    for (uint32_t rank = 1; rank < segment.ranks(); ++rank)
      total = combine<float>(total, reinterpret_cast<Bfloat16*>(segment.slot(rank))[i], op);
    static_cast<Bfloat16*>(out)[i] = Bfloat16::nearest(total);
  }
}

// The types that HCCL's own header allows in a reduction.
HcclResult reduce_piece(Segment& segment, void* out, size_t bytes, HcclDataType type, HcclReduceOp op) {
  switch (type) {
    case HCCL_DATA_TYPE_FP32: reduce_slots<float>(segment, out, bytes, op); break;
    case HCCL_DATA_TYPE_FP16: reduce_slots<Half>(segment, out, bytes, op); break;
    case HCCL_DATA_TYPE_BFP16: reduce_slots<Bfloat16>(segment, out, bytes, op); break;
    case HCCL_DATA_TYPE_INT64: reduce_slots<int64_t>(segment, out, bytes, op); break;
    case HCCL_DATA_TYPE_INT32: reduce_slots<int32_t>(segment, out, bytes, op); break;
    case HCCL_DATA_TYPE_INT16: reduce_slots<int16_t>(segment, out, bytes, op); break;
    case HCCL_DATA_TYPE_INT8: reduce_slots<int8_t>(segment, out, bytes, op); break;
    default:
      std::fprintf(stderr, "[ascend emulator] HCCL reduces no data type %d\n", static_cast<int>(type));
      return HCCL_E_NOT_SUPPORT;
  }
  return HCCL_SUCCESS;
}

}  // namespace

size_t element_bytes(HcclDataType type) {
  switch (type) {
    case HCCL_DATA_TYPE_INT8:
    case HCCL_DATA_TYPE_UINT8: return 1;
    case HCCL_DATA_TYPE_INT16:
    case HCCL_DATA_TYPE_UINT16:
    case HCCL_DATA_TYPE_FP16:
    case HCCL_DATA_TYPE_BFP16: return 2;
    case HCCL_DATA_TYPE_INT32:
    case HCCL_DATA_TYPE_UINT32:
    case HCCL_DATA_TYPE_FP32: return 4;
    default: return 8;
  }
}

HcclResult reduce(Segment& segment, const void* send, void* receive, size_t bytes, HcclDataType type, HcclReduceOp op,
                  bool wanted) {
  HcclResult reduced = HCCL_SUCCESS;
  const HcclResult met = segment.exchange(send, bytes, [&](size_t offset, size_t length) {
    if (!wanted || reduced != HCCL_SUCCESS) return;
    reduced = reduce_piece(segment, static_cast<char*>(receive) + offset, length, type, op);
  });
  return met == HCCL_SUCCESS ? reduced : met;
}

}  // namespace emulator
