#include "hccl_segment.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>

namespace emulator {

namespace {

constexpr auto kPatience = std::chrono::minutes(20);  // a rank that hangs, not one on a busy machine
constexpr int kEagerPolls = 200;  // then sleep between polls: the ranks may share a core

}  // namespace

HcclResult wait_until(const std::function<bool()>& done) {
  const auto start = std::chrono::steady_clock::now();
  for (int polls = 0; !done(); ++polls) {
    if (polls < kEagerPolls) {
      sched_yield();
      continue;
    }
    usleep(20);
    if (std::chrono::steady_clock::now() - start > kPatience) {
      std::fprintf(stderr, "[ascend emulator] HCCL: a rank did not arrive in time\n");
      return HCCL_E_TIMEOUT;
    }
  }
  return HCCL_SUCCESS;
}

size_t Segment::bytes() const {
  return kHeaderBytes + ranks_ * kSlotBytes + static_cast<size_t>(ranks_) * ranks_ * sizeof(Mailbox);
}

HcclResult Segment::join() {
  const std::string path = "/" + name_;
  const int file = shm_open(path.c_str(), O_CREAT | O_RDWR, 0600);
  if (file < 0) return HCCL_E_SYSCALL;
  // A fresh segment is all zero bytes, which is the state the header and the mailboxes start from.
  if (ftruncate(file, static_cast<off_t>(bytes()))) {
    close(file);
    return HCCL_E_SYSCALL;
  }
  void* base = mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  close(file);
  if (base == MAP_FAILED) return HCCL_E_MEMORY;
  base_ = static_cast<char*>(base);
  const HcclResult met = barrier();
  // All of them have it mapped now: the name can go, and nothing is left behind however a process ends.
  if (rank_ == 0) shm_unlink(path.c_str());
  return met;
}

void Segment::leave() {
  if (base_) munmap(base_, bytes());
  base_ = nullptr;
}

Mailbox* Segment::mailbox(uint32_t from, uint32_t to) {
  return reinterpret_cast<Mailbox*>(base_ + kHeaderBytes + ranks_ * kSlotBytes) + from * ranks_ + to;
}

HcclResult Segment::barrier() {
  if (!base_) return HCCL_E_INTERNAL;
  const uint32_t round = header()->round;
  if (header()->arrived.fetch_add(1) + 1 == ranks_) {
    header()->arrived = 0;
    header()->round.fetch_add(1);
    return HCCL_SUCCESS;
  }
  return wait_until([&] { return header()->round != round; });
}

HcclResult Segment::exchange(const void* mine, size_t bytes, const std::function<void(size_t, size_t)>& consume) {
  for (size_t offset = 0; offset < bytes; offset += kSlotBytes) {
    const size_t length = std::min(kSlotBytes, bytes - offset);
    if (mine) std::memcpy(slot(rank_), static_cast<const char*>(mine) + offset, length);
    HcclResult met = barrier();
    if (met != HCCL_SUCCESS) return met;
    consume(offset, length);
    met = barrier();  // nobody may overwrite a slot that another rank still reads
    if (met != HCCL_SUCCESS) return met;
  }
  return HCCL_SUCCESS;
}

}  // namespace emulator
