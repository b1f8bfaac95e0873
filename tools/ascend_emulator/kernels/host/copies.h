// Copies between host and device memory, which are the same kind of memory here.
#pragma once

#include <ATen/ATen.h>
#include <torch/library.h>

namespace emulator {

// The same memory as a CPU tensor.
inline at::Tensor on_host(const at::Tensor& t) {
  if (t.is_cpu()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), t.options().device(at::kCPU));
}

inline at::Tensor& copy_into(at::Tensor& to, const at::Tensor& from, bool) {
  if (to.numel() == 0) return to;
  at::NoGradGuard no_graph;
  on_host(to).copy_(on_host(from));
  return to;
}

inline at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  at::Tensor target = to;
  return copy_into(target, from, false);
}

inline at::Tensor copy_from_and_resize(const at::Tensor& from, const at::Tensor& to) {
  if (to.sizes() != from.sizes()) to.resize_(from.sizes());
  return copy_from(from, to, false);
}

inline at::Tensor clone_of(const at::Tensor& from, std::optional<at::MemoryFormat> wanted) {
  const bool preserve = wanted.value_or(at::MemoryFormat::Preserve) == at::MemoryFormat::Preserve;
  at::Tensor to = preserve && from.is_non_overlapping_and_dense()
                      ? at::empty_strided(from.sizes(), from.strides(), from.options())
                      : at::empty(from.sizes(), from.options(), preserve ? at::MemoryFormat::Contiguous : *wanted);
  return copy_into(to, from, false);
}

inline at::Tensor contiguous_of(const at::Tensor& from, at::MemoryFormat format) {
  return from.is_contiguous(format) ? from : clone_of(from, format);
}

inline const std::vector<std::string> kCopies = {"copy_", "clone", "contiguous", "_copy_from", "_copy_from_and_resize"};

inline void install_copies(torch::Library& library) {
  library.impl("copy_", copy_into);
  library.impl("clone", clone_of);
  library.impl("contiguous", contiguous_of);
  library.impl("_copy_from", copy_from);
  library.impl("_copy_from_and_resize", copy_from_and_resize);
}

}  // namespace emulator
