// Process, devices and contexts of the emulated runtime.
//
//   ASCEND_EMULATOR_DEVICES    how many devices the host has (2)
//   ASCEND_EMULATOR_SOC        what the chip calls itself (Ascend910B1)
//   ASCEND_RT_VISIBLE_DEVICES  the real runtime's own variable, obeyed as documented
#include "runtime.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <sstream>
#include <string>

namespace emulator {

namespace {

thread_local int chosen_device = kNone;
std::atomic<bool> in_use[kMostDevices];

// One address a device is all that a context has to be: torch_npu hands it back and never looks inside.
char contexts[kMostDevices];

int present_devices() {
  return std::min<int64_t>(number_setting("ASCEND_EMULATOR_DEVICES", 2), kMostDevices);
}

}  // namespace

int64_t number_setting(const char* name, int64_t otherwise) {
  const char* text = std::getenv(name);
  return text && *text ? std::atoll(text) : otherwise;
}

// The list ends at the first entry that is no number, no device, or not larger than the one before it.
int visible_devices() {
  const char* list = std::getenv("ASCEND_RT_VISIBLE_DEVICES");
  if (!list) return present_devices();
  std::istringstream entries(list);
  int count = 0;
  long previous = -1;
  for (std::string entry; std::getline(entries, entry, ',');) {
    char* end = nullptr;
    const long device = std::strtol(entry.c_str(), &end, 10);
    if (end == entry.c_str() || *end || device <= previous || device >= present_devices()) break;
    previous = device;
    ++count;
  }
  return count;
}

int current_device() { return chosen_device; }

}  // namespace emulator

using namespace emulator;

extern "C" {

aclError aclInit(const char*) { return ACL_SUCCESS; }

aclError aclFinalize() { return ACL_SUCCESS; }

// The emulated functions say on stderr what is wrong; there is no second channel.
const char* aclGetRecentErrMsg() { return ""; }

const char* aclrtGetSocName() {
  const char* name = std::getenv("ASCEND_EMULATOR_SOC");
  return name ? name : "Ascend910B1";
}

aclError aclrtGetDeviceCount(uint32_t* count) {
  *count = visible_devices();
  return ACL_SUCCESS;
}

aclError aclrtSetDevice(int32_t device) {
  if (device < 0 || device >= visible_devices()) return kInvalidDevice;
  chosen_device = device;
  in_use[device] = true;
  return ACL_SUCCESS;
}

aclError aclrtGetDevice(int32_t* device) {
  if (chosen_device == kNone) return kNoContext;
  *device = chosen_device;
  return ACL_SUCCESS;
}

aclError aclrtResetDevice(int32_t device) {
  return device < 0 || device >= visible_devices() ? kInvalidDevice : ACL_SUCCESS;
}

aclError aclrtGetCurrentContext(aclrtContext* context) {
  if (chosen_device == kNone) return kNoContext;
  *context = &contexts[chosen_device];
  return ACL_SUCCESS;
}

aclError aclrtSetCurrentContext(aclrtContext context) {
  const auto device = static_cast<char*>(context) - contexts;
  return aclrtSetDevice(device >= 0 && device < kMostDevices ? static_cast<int32_t>(device) : -1);
}

aclError aclrtGetPrimaryCtxState(int32_t device, uint32_t* flags, int32_t* active) {
  if (device < 0 || device >= visible_devices()) return kInvalidDevice;
  if (flags) *flags = 0;
  *active = in_use[device];
  return ACL_SUCCESS;
}

// Work is done by the time its call returns, so there is never anything to wait for.
aclError aclrtSynchronizeDevice() { return ACL_SUCCESS; }

aclError aclrtSynchronizeDeviceWithTimeout(int32_t) { return ACL_SUCCESS; }

aclError aclrtDeviceCanAccessPeer(int32_t* can, int32_t device, int32_t peer) {
  *can = device != peer;
  return ACL_SUCCESS;
}

// torch_npu asks for the number of cube and vector cores only; 24 is that of a 910B1.
aclError aclGetDeviceCapability(uint32_t, aclDeviceInfo, int64_t* value) {
  *value = 24;
  return ACL_SUCCESS;
}

}  // extern "C"
