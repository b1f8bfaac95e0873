// The meeting place of the ranks of one communicator: a segment of POSIX shared memory on one host.
//
//   header | one slot a rank, for collectives | one mailbox for each ordered pair of ranks, for send and receive
#pragma once

#include <acl/acl.h>
#include <third_party/hccl/inc/hccl/hccl.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace emulator {

constexpr size_t kHeaderBytes = 4096;
constexpr size_t kSlotBytes = 1 << 20;
constexpr size_t kMailboxBytes = 256 << 10;

struct Header {
  std::atomic<uint32_t> arrived;
  std::atomic<uint32_t> round;
};

struct Mailbox {
  std::atomic<uint32_t> full;
  char padding[60];  // the payload starts on a cache line
  char payload[kMailboxBytes];
};

// The ranks are processes of their own, so the atomics in the segment must work without a lock in either of them.
static_assert(std::atomic<uint32_t>::is_always_lock_free);

class Segment {
 public:
  Segment(std::string name, uint32_t ranks, uint32_t rank) : name_(std::move(name)), ranks_(ranks), rank_(rank) {}

  HcclResult join();
  void leave();

  const std::string& name() const { return name_; }
  uint32_t ranks() const { return ranks_; }
  uint32_t rank() const { return rank_; }

  // Returns when every rank has called it.
  HcclResult barrier();

  // Every rank shows `bytes` of `mine` (or nothing, for null) slot by slot. While a piece is on show, consume(offset,
  // length) may read any rank's slot. `bytes` must be the same on every rank.
  HcclResult exchange(const void* mine, size_t bytes, const std::function<void(size_t, size_t)>& consume);

  char* slot(uint32_t rank) { return base_ + kHeaderBytes + rank * kSlotBytes; }
  Mailbox* mailbox(uint32_t from, uint32_t to);

 private:
  size_t bytes() const;
  Header* header() { return reinterpret_cast<Header*>(base_); }

  std::string name_;
  uint32_t ranks_;
  uint32_t rank_;
  char* base_ = nullptr;
};

// Polls until `done`. A peer that never comes is an error after a while, not a hang.
HcclResult wait_until(const std::function<bool()>& done);

}  // namespace emulator
