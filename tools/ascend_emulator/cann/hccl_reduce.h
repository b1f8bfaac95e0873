// Element types and reductions of the emulated HCCL.
#pragma once

#include "hccl_segment.h"

namespace emulator {

size_t element_bytes(HcclDataType type);

// Reduces `bytes` of every rank's `send`; the result goes to `receive` on the ranks that pass `wanted`.
HcclResult reduce(Segment& segment, const void* send, void* receive, size_t bytes, HcclDataType type, HcclReduceOp op,
                  bool wanted);

}  // namespace emulator
