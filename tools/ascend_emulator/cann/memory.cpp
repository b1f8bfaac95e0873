// Device memory and pinned host memory: both are host memory, kept in a book so that figures and misuse can be told.
//
//   ASCEND_EMULATOR_MEMORY_GIB  memory of one device (64)
//   ASCEND_EMULATOR_POISON      fill fresh device memory with 0xFF bytes, which read as NaN
#include "runtime.h"

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

using namespace emulator;

namespace {

constexpr size_t kDeviceAlignment = 512;
constexpr size_t kHostAlignment = 64;

struct Block {
  size_t bytes;
  int device;
};

std::mutex book_mutex;
std::map<const char*, Block> device_blocks;
std::map<const char*, size_t> pinned_blocks;
size_t used_bytes[kMostDevices];

size_t device_bytes() { return static_cast<size_t>(number_setting("ASCEND_EMULATOR_MEMORY_GIB", 64)) << 30; }

aclError copy(void* to, size_t room, const void* from, size_t bytes) {
  if (bytes > room) return kInvalidParameter;
  std::memmove(to, from, bytes);
  return ACL_SUCCESS;
}

aclError fill(void* to, size_t room, int32_t value, size_t bytes) {
  if (bytes > room) return kInvalidParameter;
  std::memset(to, value, bytes);
  return ACL_SUCCESS;
}

bool is_pinned(const char* address) {
  auto block = pinned_blocks.upper_bound(address);
  if (block == pinned_blocks.begin()) return false;
  --block;
  return address < block->first + block->second;
}

}  // namespace

extern "C" {

aclError aclrtMalloc(void** address, size_t bytes, aclrtMemMallocPolicy) {
  const int device = current_device();
  if (device == kNone) return kNoContext;
  std::lock_guard<std::mutex> guard(book_mutex);
  if (bytes > device_bytes() - used_bytes[device]) return kAllocationFailed;
  if (posix_memalign(address, kDeviceAlignment, bytes ? bytes : kDeviceAlignment)) return kAllocationFailed;
  static const bool poison = std::getenv("ASCEND_EMULATOR_POISON") != nullptr;
  if (poison) std::memset(*address, 0xFF, bytes);
  device_blocks[static_cast<char*>(*address)] = {bytes, device};
  used_bytes[device] += bytes;
  return ACL_SUCCESS;
}

aclError aclrtMallocAlign32(void** address, size_t bytes, aclrtMemMallocPolicy policy) {
  return aclrtMalloc(address, bytes, policy);
}

aclError aclrtFree(void* address) {
  std::lock_guard<std::mutex> guard(book_mutex);
  const auto block = device_blocks.find(static_cast<char*>(address));
  if (block == device_blocks.end()) return kInvalidParameter;
  used_bytes[block->second.device] -= block->second.bytes;
  device_blocks.erase(block);
  std::free(address);
  return ACL_SUCCESS;
}

aclError aclrtMallocHost(void** address, size_t bytes) {
  if (posix_memalign(address, kHostAlignment, bytes ? bytes : kHostAlignment)) return kAllocationFailed;
  std::lock_guard<std::mutex> guard(book_mutex);
  pinned_blocks[static_cast<char*>(*address)] = bytes;
  return ACL_SUCCESS;
}

aclError aclrtFreeHost(void* address) {
  std::lock_guard<std::mutex> guard(book_mutex);
  if (!pinned_blocks.erase(static_cast<char*>(address))) return kInvalidParameter;
  std::free(address);
  return ACL_SUCCESS;
}

aclError aclrtMemcpy(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind) {
  return copy(to, room, from, bytes);
}

aclError aclrtMemcpyAsync(void* to, size_t room, const void* from, size_t bytes, aclrtMemcpyKind, aclrtStream) {
  return copy(to, room, from, bytes);
}

aclError aclrtMemset(void* to, size_t room, int32_t value, size_t bytes) { return fill(to, room, value, bytes); }

aclError aclrtMemsetAsync(void* to, size_t room, int32_t value, size_t bytes, aclrtStream) {
  return fill(to, room, value, bytes);
}

aclError aclrtGetMemInfo(aclrtMemAttr, size_t* free_bytes, size_t* total_bytes) {
  if (current_device() == kNone) return kNoContext;
  std::lock_guard<std::mutex> guard(book_mutex);
  *total_bytes = device_bytes();
  *free_bytes = device_bytes() - used_bytes[current_device()];
  return ACL_SUCCESS;
}

// How torch_npu finds out whether host memory is pinned.
aclError aclrtPointerGetAttributes(const void* address, aclrtPtrAttributes* attributes) {
  std::memset(attributes, 0, sizeof *attributes);
  std::lock_guard<std::mutex> guard(book_mutex);
  const bool pinned = is_pinned(static_cast<const char*>(address));
  attributes->location.type = pinned ? ACL_MEM_LOCATION_TYPE_HOST : ACL_MEM_LOCATION_TYPE_UNREGISTERED;
  return ACL_SUCCESS;
}

}  // extern "C"
