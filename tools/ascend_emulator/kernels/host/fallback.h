// torch's own function that runs an operator on the CPU, found by name in libtorch_cpu. The interposer below stands in
// front of it for everybody who merely links to it.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

namespace c10 {
class OperatorHandle;
struct IValue;
enum class DispatchKey : uint16_t;
}  // namespace c10

namespace emulator {

using CpuFallback = void (*)(const c10::OperatorHandle&, std::vector<c10::IValue>*, bool, c10::DispatchKey);

inline CpuFallback torch_cpu_fallback() {
  static const auto found = reinterpret_cast<CpuFallback>(
      dlsym(dlopen("libtorch_cpu.so", RTLD_NOLOAD | RTLD_LAZY),
            "_ZN2at6native12cpu_fallbackERKN3c1014OperatorHandleEPSt6vectorINS1_6IValueESaIS6_EEbNS1_11DispatchKeyE"));
  if (!found) throw std::runtime_error("libtorch_cpu.so has no at::native::cpu_fallback of the expected signature");
  return found;
}

}  // namespace emulator
