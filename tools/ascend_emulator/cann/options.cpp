// Options and the log. torch_npu looks most of these up by name while it initialises a device, so no link check
// would miss them.
//
//   ASCEND_EMULATOR_LOG  lowest level of torch_npu's own log that is printed (0 is everything; unset prints nothing)
#include "runtime.h"

#include <acl/acl_mdl.h>
#include <acl/acl_op_compiler.h>

#include <cstdarg>
#include <cstdio>
#include <cstring>

namespace {

// How a 910B answers for jit_compile. torch_npu then prefers the aclnn kernels over compiled graphs.
constexpr char kJitCompile[] = "disable";

}  // namespace

extern "C" {

aclError aclrtSetDeviceSatMode(aclrtFloatOverflowMode) { return ACL_SUCCESS; }

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }

aclError aclrtSetSysParamOpt(aclSysParamOpt, int64_t) { return ACL_SUCCESS; }

aclError aclrtGetSysParamOpt(aclSysParamOpt, int64_t* value) {
  *value = 0;
  return ACL_SUCCESS;
}

aclError aclrtSetStreamFailureMode(aclrtStream, uint64_t) { return ACL_SUCCESS; }

aclError aclrtSetOpWaitTimeout(uint32_t) { return ACL_SUCCESS; }

aclError aclrtSetOpExecuteTimeOut(uint32_t) { return ACL_SUCCESS; }

aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }

size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof kJitCompile; }

aclError aclGetCompileopt(aclCompileOpt, char* value, size_t room) {
  if (room < sizeof kJitCompile) return emulator::kInvalidParameter;
  std::memcpy(value, kJitCompile, sizeof kJitCompile);
  return ACL_SUCCESS;
}

void aclAppLog(aclLogLevel level, const char* function, const char*, uint32_t line, const char* format, ...) {
  constexpr int kNothing = 1000;
  static const auto lowest = emulator::number_setting("ASCEND_EMULATOR_LOG", kNothing);
  if (static_cast<int>(level) < lowest) return;
  std::fprintf(stderr, "[torch_npu log %d] %s:%u ", static_cast<int>(level), function, line);
  va_list arguments;
  va_start(arguments, format);
  std::vfprintf(stderr, format, arguments);
  va_end(arguments);
  std::fputc('\n', stderr);
}

}  // extern "C"
