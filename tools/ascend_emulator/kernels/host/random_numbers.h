// Random numbers: torch_npu's own generator keeps seed and offset, and a CPU generator made from the two draws.
#pragma once

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "device_checks.h"

namespace emulator {

inline at::Generator default_npu_generator() {
  const auto index = c10::impl::VirtualGuardImpl(kNpu).getDevice().index();
  return at::globalContext().defaultGenerator(at::Device(kNpu, index));
}

inline at::Generator require_npu(const at::Generator& generator) {
  TORCH_CHECK(generator.device().type() == kNpu, "Expected a 'npu' device type for generator but found '",
              generator.device().type(), "'");
  return generator;
}

// The offset moves on with each use, as a device kernel moves it, so that two draws differ and a state can be restored.
inline at::Generator draw_from(at::Generator npu) {
  constexpr uint64_t kOddMultiplier = 0x9E3779B97F4A7C15ull;  // keeps neighbouring seeds apart
  constexpr uint64_t kStep = 4;                               // torch_npu accepts multiples of four only
  const uint64_t offset = npu.get_offset();
  auto cpu = at::detail::createCPUGenerator();
  cpu.set_current_seed(npu.current_seed() * kOddMultiplier + offset);
  npu.set_offset(offset + kStep);
  return cpu;
}

// For operators that take no generator: the default CPU generator is in a state of ours while this lives.
class BorrowedDefault {
 public:
  BorrowedDefault() : cpu_(at::detail::getDefaultCPUGenerator()), before_(cpu_.get_state()) {
    cpu_.set_state(draw_from(default_npu_generator()).get_state());
  }
  ~BorrowedDefault() { cpu_.set_state(before_); }
  BorrowedDefault(const BorrowedDefault&) = delete;
  BorrowedDefault& operator=(const BorrowedDefault&) = delete;

 private:
  at::Generator cpu_;
  at::Tensor before_;
};

}  // namespace emulator
