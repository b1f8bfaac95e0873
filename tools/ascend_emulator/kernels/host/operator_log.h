// Counts of the operators that ran in place of NPU kernels, and of those that torch_npu sent to the CPU itself.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <cstdint>
#include <map>
#include <mutex>
#include <sstream>
#include <string>

namespace emulator {

class OperatorLog {
 public:
  void count(const c10::OperatorHandle& op) {
    const auto name = toString(op.operator_name());
    std::lock_guard<std::mutex> guard(mutex_);
    ++calls_[name];
  }

  void clear() {
    std::lock_guard<std::mutex> guard(mutex_);
    calls_.clear();
  }

  // One line an operator: its name, a space, its calls.
  std::string text() {
    std::lock_guard<std::mutex> guard(mutex_);
    std::ostringstream lines;
    for (const auto& [name, calls] : calls_) lines << name << ' ' << calls << '\n';
    return lines.str();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, int64_t> calls_;
};

inline OperatorLog replaced_log;
inline OperatorLog fallback_log;

}  // namespace emulator
