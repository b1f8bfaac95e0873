// What the files of the emulated runtime (libascendcl) share: the settings and the device of the calling thread.
#pragma once

#include <acl/acl.h>

#include <cstdint>

namespace emulator {

constexpr int kMostDevices = 64;
constexpr aclError kInvalidParameter = ACL_ERROR_INVALID_PARAM;
constexpr aclError kInvalidDevice = ACL_ERROR_RT_INVALID_DEVICEID;
constexpr aclError kNoContext = ACL_ERROR_RT_CONTEXT_NULL;
constexpr aclError kAllocationFailed = ACL_ERROR_RT_MEMORY_ALLOCATION;

// A whole number from the environment, or `otherwise`.
int64_t number_setting(const char* name, int64_t otherwise);

// Devices that this process may see: ASCEND_EMULATOR_DEVICES, narrowed by ASCEND_RT_VISIBLE_DEVICES.
int visible_devices();

// The device that the calling thread chose, or kNone: a thread has none until it asks for one, as on real hardware.
// torch_npu counts on that to learn which devices are in use.
constexpr int kNone = -1;
int current_device();

}  // namespace emulator
