// The checks that an NPU kernel makes of its arguments' devices and that a CPU kernel would not make.
#pragma once

#include <ATen/ATen.h>
#include <ATen/core/stack.h>

#include <string_view>

namespace emulator {

constexpr auto kNpu = c10::DeviceType::PrivateUse1;

// Indexing takes CPU indices on every device.
inline bool takes_cpu_indices(std::string_view name) {
  for (std::string_view start : {"aten::index", "aten::_index_put_impl_", "aten::_unsafe_index"})
    if (name.substr(0, start.size()) == start) return true;
  return false;
}

class DevicesSeen {
 public:
  explicit DevicesSeen(const std::string& name) : name_(name) {}

  void see(const at::Tensor& t) {
    if (!t.defined()) return;
    if (t.device().type() == kNpu) {
      TORCH_CHECK(index_ < 0 || index_ == t.device().index(), "Expected all tensors to be on the same device, but ",
                  name_, " got npu:", static_cast<int>(index_), " and ", t.device());
      index_ = t.device().index();
    } else if (t.is_cpu() && t.dim() > 0) {  // a CPU tensor without dimensions counts as a number
      cpu_ = true;
    }
  }

  void see(const c10::IValue& value) {
    if (value.isTensor()) {
      see(value.toTensor());
    } else if (value.isTensorList()) {
      for (const at::Tensor& t : value.toTensorList()) see(t);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<at::Tensor>& t : value.toOptionalTensorList())
        if (t) see(*t);
    }
  }

  // The index of the NPU that all arguments are on, or -1.
  c10::DeviceIndex common() const {
    TORCH_CHECK(!cpu_ || index_ < 0 || takes_cpu_indices(name_), "Expected all tensors to be on the same device, but ",
                name_, " got npu:", static_cast<int>(index_), " and cpu");
    return index_;
  }

 private:
  const std::string& name_;
  c10::DeviceIndex index_ = -1;
  bool cpu_ = false;
};

}  // namespace emulator
