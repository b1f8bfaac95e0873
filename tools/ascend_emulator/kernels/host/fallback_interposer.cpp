// Stands in front of at::native::cpu_fallback for torch_npu, to tell the operator log of every call and then pass it
// on. torch_npu's own fall-back, with its warning, stays as it is; only the last step becomes countable.
//
// It has to be in the process's global scope before torch_npu is loaded, and knows no more of torch than three names.
#include "fallback.h"

namespace {

void (*observer)(const c10::OperatorHandle&) = nullptr;

}  // namespace

extern "C" void ascend_emulator_observe_fallbacks(void (*function)(const c10::OperatorHandle&)) { observer = function; }

namespace at::native {

void cpu_fallback(const c10::OperatorHandle& op, std::vector<c10::IValue>* stack, bool error_on_views,
                  c10::DispatchKey key) {
  if (observer) observer(op);
  emulator::torch_cpu_fallback()(op, stack, error_on_views, key);
}

}  // namespace at::native
