// Puts a CPU kernel in the place of each aten kernel that torch_npu registers. Operators for which torch_npu has none
// are left to its own fall-back. Schemas, autograd, autocast and Meta functions stay torch_npu's and torch's.
//
// Python reaches this library through the C functions at the end: no Python headers are needed to build it.
#include <ATen/ATen.h>
#include <torch/library.h>

#include <memory>
#include <set>
#include <sstream>

#include "copies.h"
#include "device_checks.h"
#include "fallback.h"
#include "operator_log.h"
#include "random_numbers.h"

namespace emulator {

namespace {

constexpr auto kKey = c10::DispatchKey::PrivateUse1;

// Registrations live as long as this does: to the end of the process.
std::unique_ptr<torch::Library> library;

// True when the operator has a generator argument, which then holds a CPU generator.
bool replace_generator(const c10::FunctionSchema& schema, torch::jit::Stack& stack, size_t first) {
  bool found = false;
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    if (schema.arguments()[i].name() != "generator") continue;
    auto& value = stack[first + i];
    value = draw_from(value.isNone() ? default_npu_generator() : require_npu(value.toGenerator()));
    found = true;
  }
  return found;
}

void host_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  replaced_log.count(op);

  DevicesSeen devices(schema.name());
  for (size_t i = first; i < stack->size(); ++i) devices.see((*stack)[i]);
  c10::OptionalDeviceGuard guard;
  if (const auto index = devices.common(); index >= 0) guard.reset_device(at::Device(kNpu, index));

  std::unique_ptr<BorrowedDefault> borrowed;
  if (!replace_generator(schema, *stack, first) && op.hasTag(at::Tag::nondeterministic_seeded))
    borrowed = std::make_unique<BorrowedDefault>();
  constexpr bool kRefuseViews = true;  // a view computed on a CPU copy would no longer share the device's memory
  torch_cpu_fallback()(op, stack, kRefuseViews, c10::DispatchKey::CPU);
}

bool is_view(const c10::FunctionSchema& schema) {
  for (const auto& argument : schema.arguments())
    if (argument.alias_info() && !argument.alias_info()->isWrite()) return true;
  return false;
}

int install(std::set<std::string> keep) {
  library = std::make_unique<torch::Library>(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  install_copies(*library);
  keep.insert(kCopies.begin(), kCopies.end());
  auto& dispatcher = c10::Dispatcher::singleton();
  int replaced = 0;
  for (const auto& name : dispatcher.getAllOpNames()) {
    constexpr std::string_view kNamespace = "aten::";
    if (name.name.compare(0, kNamespace.size(), kNamespace) != 0) continue;
    const auto op = dispatcher.findSchema(name);
    if (!op || !op->hasKernelForDispatchKey(kKey) || is_view(op->schema())) continue;
    const auto full = toString(name).substr(kNamespace.size());
    if (keep.count(full)) continue;
    library->impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&host_kernel>());
    ++replaced;
  }
  return replaced;
}

std::set<std::string> words(const char* text) {
  std::istringstream stream(text);
  return {std::istream_iterator<std::string>(stream), {}};
}

}  // namespace

}  // namespace emulator

extern "C" {

// Keeps the kernels named in `keep` (parted by blanks), the views and the copies; returns how many were replaced.
int ascend_emulator_install(const char* keep) { return emulator::install(emulator::words(keep)); }

void ascend_emulator_count_fallback(const c10::OperatorHandle& op) { emulator::fallback_log.count(op); }

// The text stays valid until the next call from the same thread.
const char* ascend_emulator_log(bool fallbacks) {
  thread_local std::string text;
  text = (fallbacks ? emulator::fallback_log : emulator::replaced_log).text();
  return text.c_str();
}

void ascend_emulator_clear_log() {
  emulator::replaced_log.clear();
  emulator::fallback_log.clear();
}

}  // extern "C"
