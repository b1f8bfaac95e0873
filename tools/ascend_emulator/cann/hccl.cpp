// The C interface of HCCL, as ProcessGroupHCCL of torch_npu calls it: one host, and done when the call returns.
#include "hccl_reduce.h"
#include "hccl_segment.h"
#include "hccl_transfer.h"

#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <vector>

using namespace emulator;

namespace {

Segment& of(HcclComm communicator) { return *static_cast<Segment*>(communicator); }

char* part(const void* buffer, uint64_t index, uint64_t count, HcclDataType type) {
  return static_cast<char*>(const_cast<void*>(buffer)) + index * count * element_bytes(type);
}

uint64_t entry(const void* numbers, uint32_t index) { return static_cast<const uint64_t*>(numbers)[index]; }

}  // namespace

extern "C" {

// ---- communicators ----

// The root's process number and a counter name a segment that no other group on this host uses.
HcclResult HcclGetRootInfo(HcclRootInfo* info) {
  static std::atomic<int> groups{0};
  std::memset(info, 0, sizeof *info);
  std::snprintf(info->internal, 64, "ascend_emulator_%d_%d", getpid(), groups++);
  return HCCL_SUCCESS;
}

HcclResult HcclCommInitRootInfo(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, HcclComm* communicator) {
  auto* segment = new Segment(info->internal, ranks, rank);
  *communicator = segment;
  return segment->join();
}

HcclResult HcclCommInitRootInfoConfig(uint32_t ranks, const HcclRootInfo* info, uint32_t rank, const HcclCommConfig*,
                                      HcclComm* communicator) {
  return HcclCommInitRootInfo(ranks, info, rank, communicator);
}

// The object stays: torch_npu's watchdog thread may still ask a communicator that is gone for its state.
HcclResult HcclCommDestroy(HcclComm communicator) {
  of(communicator).leave();
  return HCCL_SUCCESS;
}

HcclResult HcclGetCommName(HcclComm communicator, char* name) {
  std::strcpy(name, of(communicator).name().c_str());
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankSize(HcclComm communicator, uint32_t* ranks) {
  *ranks = of(communicator).ranks();
  return HCCL_SUCCESS;
}

HcclResult HcclGetRankId(HcclComm communicator, uint32_t* rank) {
  *rank = of(communicator).rank();
  return HCCL_SUCCESS;
}

// A failed call has already said so: nothing happens later.
HcclResult HcclGetCommAsyncError(HcclComm, HcclResult* error) {
  *error = HCCL_SUCCESS;
  return HCCL_SUCCESS;
}

const char* HcclGetErrorString(HcclResult) { return "emulated HCCL: the call failed, see stderr"; }

uint32_t HcclGetCommConfigCapability() { return 0; }

HcclResult HcclSetConfig(HcclConfig, HcclConfigValue) { return HCCL_SUCCESS; }

// ---- collectives ----

HcclResult HcclBarrier(HcclComm communicator, aclrtStream) { return of(communicator).barrier(); }

HcclResult HcclAllReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                         HcclComm communicator, aclrtStream) {
  return reduce(of(communicator), send, receive, count * element_bytes(type), type, op, true);
}

HcclResult HcclReduce(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op, uint32_t root,
                      HcclComm communicator, aclrtStream) {
  Segment& segment = of(communicator);
  return reduce(segment, send, receive, count * element_bytes(type), type, op, segment.rank() == root);
}

// A round for each receiver. A refused type must not end the rounds early on one rank alone.
HcclResult HcclReduceScatter(void* send, void* receive, uint64_t count, HcclDataType type, HcclReduceOp op,
                             HcclComm communicator, aclrtStream) {
  Segment& segment = of(communicator);
  HcclResult worst = HCCL_SUCCESS;
  for (uint32_t rank = 0; rank < segment.ranks(); ++rank) {
    const HcclResult result = reduce(segment, part(send, rank, count, type), receive, count * element_bytes(type), type,
                                     op, segment.rank() == rank);
    if (result == HCCL_E_TIMEOUT) return result;
    if (result != HCCL_SUCCESS) worst = result;
  }
  return worst;
}

HcclResult HcclAllGather(void* send, void* receive, uint64_t count, HcclDataType type, HcclComm communicator,
                         aclrtStream) {
  Segment& segment = of(communicator);
  return segment.exchange(send, count * element_bytes(type), [&](size_t offset, size_t length) {
    for (uint32_t rank = 0; rank < segment.ranks(); ++rank)
      std::memcpy(part(receive, rank, count, type) + offset, segment.slot(rank), length);
  });
}

HcclResult HcclBroadcast(void* buffer, uint64_t count, HcclDataType type, uint32_t root, HcclComm communicator,
                         aclrtStream) {
  Segment& segment = of(communicator);
  const bool sends = segment.rank() == root;
  return segment.exchange(sends ? buffer : nullptr, count * element_bytes(type), [&](size_t offset, size_t length) {
    if (!sends) std::memcpy(static_cast<char*>(buffer) + offset, segment.slot(root), length);
  });
}

HcclResult HcclScatter(void* send, void* receive, uint64_t count, HcclDataType type, uint32_t root,
                       HcclComm communicator, aclrtStream) {
  Segment& segment = of(communicator);
  for (uint32_t rank = 0; rank < segment.ranks(); ++rank) {
    const void* mine = segment.rank() == root ? part(send, rank, count, type) : nullptr;
    const HcclResult result = segment.exchange(mine, count * element_bytes(type), [&](size_t offset, size_t length) {
      if (segment.rank() == rank) std::memcpy(static_cast<char*>(receive) + offset, segment.slot(root), length);
    });
    if (result != HCCL_SUCCESS) return result;
  }
  return HCCL_SUCCESS;
}

// ---- point to point, all to all ----

HcclResult HcclSend(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm communicator,
                    aclrtStream) {
  return transfer(of(communicator), {{HCCL_SEND, buffer, count, type, peer}});
}

HcclResult HcclRecv(void* buffer, uint64_t count, HcclDataType type, uint32_t peer, HcclComm communicator,
                    aclrtStream) {
  return transfer(of(communicator), {{HCCL_RECV, buffer, count, type, peer}});
}

HcclResult HcclBatchSendRecv(HcclSendRecvItem* items, uint32_t count, HcclComm communicator, aclrtStream) {
  return transfer(of(communicator), {items, items + count});
}

HcclResult HcclAlltoAllV(const void* send, const void* send_counts, const void* send_offsets, HcclDataType send_type,
                         const void* receive, const void* receive_counts, const void* receive_offsets,
                         HcclDataType receive_type, HcclComm communicator, aclrtStream) {
  Segment& segment = of(communicator);
  std::vector<HcclSendRecvItem> items;
  for (uint32_t rank = 0; rank < segment.ranks(); ++rank) {
    char* from = part(send, entry(send_offsets, rank), 1, send_type);
    char* to = part(receive, entry(receive_offsets, rank), 1, receive_type);
    items.push_back({HCCL_SEND, from, entry(send_counts, rank), send_type, rank});
    items.push_back({HCCL_RECV, to, entry(receive_counts, rank), receive_type, rank});
  }
  return transfer(segment, items);
}

HcclResult HcclAlltoAll(const void* send, uint64_t send_count, HcclDataType send_type, const void* receive,
                        uint64_t receive_count, HcclDataType receive_type, HcclComm communicator, aclrtStream) {
  Segment& segment = of(communicator);
  std::vector<HcclSendRecvItem> items;
  for (uint32_t rank = 0; rank < segment.ranks(); ++rank) {
    items.push_back({HCCL_SEND, part(send, rank, send_count, send_type), send_count, send_type, rank});
    items.push_back({HCCL_RECV, part(receive, rank, receive_count, receive_type), receive_count, receive_type, rank});
  }
  return transfer(segment, items);
}

}  // extern "C"
