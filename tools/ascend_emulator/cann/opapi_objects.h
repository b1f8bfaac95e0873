// The argument objects of the aclnn interface, as CPU tensors and plain vectors over the caller's memory, and its two
// phases: xxxGetWorkspaceSize(arguments..., &workspace, &executor), then xxx(workspace, size, executor, stream).
#pragma once

#include <ATen/ATen.h>
#include <acl/acl.h>
#include <c10/core/GradMode.h>

#include <cstdio>
#include <functional>
#include <memory>
#include <vector>

// The interface declares these names and leaves their contents to the library.
struct aclTensor {
  at::Tensor value;
};
struct aclScalar {
  c10::Scalar value;
};
struct aclIntArray {
  std::vector<int64_t> values;
};
struct aclBoolArray {
  std::vector<bool> values;
};
struct aclTensorList {
  std::vector<at::Tensor> values;
};
struct aclScalarList {
  std::vector<c10::Scalar> values;
};
struct aclOpExecutor {
  std::function<void()> work;
};

namespace emulator {

constexpr int kOperatorFailed = 561000;

inline at::Tensor tensor(const aclTensor* object) { return object ? object->value : at::Tensor(); }

inline int prepare(uint64_t* workspace, aclOpExecutor** executor, std::function<void()> work) {
  *workspace = 0;
  *executor = new aclOpExecutor{std::move(work)};
  return 0;
}

// An exception must not cross the C interface: torch_npu expects a number, and stderr gets the reason.
inline int execute(const char* name, aclOpExecutor* executor) {
  std::unique_ptr<aclOpExecutor> owned(executor);
  c10::AutoGradMode no_graph(false);
  try {
    owned->work();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "[ascend emulator] %s: %s\n", name, error.what());
    return kOperatorFailed;
  }
}

}  // namespace emulator

#define SECOND_PHASE(NAME)                                                \
  int NAME(void*, uint64_t, aclOpExecutor* executor, const aclrtStream) { \
    return emulator::execute(#NAME, executor);                            \
  }
