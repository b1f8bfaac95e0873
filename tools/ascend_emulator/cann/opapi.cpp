// Emulated operator library (libopapi): the aclnn operators that torch_npu calls from C++ behind the dispatcher, where
// no kernel can be put in their place. torch_npu reports any other one as missing from this library, which is wanted.
#include "opapi_attention.h"
#include "opapi_objects.h"

using namespace emulator;
using at::Tensor;

namespace {

at::ScalarType scalar_type(aclDataType type) {
  switch (type) {
    case ACL_FLOAT: return at::kFloat;
    case ACL_FLOAT16: return at::kHalf;
    case ACL_BF16: return at::kBFloat16;
    case ACL_DOUBLE: return at::kDouble;
    case ACL_INT8: return at::kChar;
    case ACL_INT16: return at::kShort;
    case ACL_INT32: return at::kInt;
    case ACL_INT64: return at::kLong;
    case ACL_UINT8: return at::kByte;
    case ACL_BOOL: return at::kBool;
    default: TORCH_CHECK(false, "the emulated operator library has no data type ", static_cast<int>(type));
  }
}

template <class T>
T read(const void* address) {
  return *static_cast<const T*>(address);
}

template <class List, class Item>
List* take_over(const Item* const* items, uint64_t count) {
  auto* list = new List;
  for (uint64_t i = 0; i < count; ++i) {
    list->values.push_back(items[i]->value);
    delete items[i];  // a list owns what it was made of
  }
  return list;
}

template <class T>
int destroy(const T* object) {
  delete object;
  return 0;
}

}  // namespace

extern "C" {

// ---- argument objects ----

aclTensor* aclCreateTensor(const int64_t* sizes, uint64_t dimensions, aclDataType type, const int64_t* strides,
                           int64_t offset, aclFormat, const int64_t*, uint64_t, void* data) {
  const auto dtype = scalar_type(type);
  const at::IntArrayRef shape(sizes, dimensions);
  if (!data) return new aclTensor{at::empty(shape, dtype)};
  char* start = static_cast<char*>(data) + offset * static_cast<int64_t>(c10::elementSize(dtype));
  return new aclTensor{at::from_blob(start, shape, at::IntArrayRef(strides, dimensions), dtype)};
}

aclScalar* aclCreateScalar(void* data, aclDataType type) {
  switch (type) {
    case ACL_DOUBLE: return new aclScalar{read<double>(data)};
    case ACL_FLOAT: return new aclScalar{read<float>(data)};
    case ACL_INT64: return new aclScalar{read<int64_t>(data)};
    case ACL_INT32: return new aclScalar{read<int32_t>(data)};
    case ACL_BOOL: return new aclScalar{read<bool>(data)};
    default: TORCH_CHECK(false, "the emulated operator library has no scalar of type ", static_cast<int>(type));
  }
}

aclIntArray* aclCreateIntArray(const int64_t* values, uint64_t count) {
  return new aclIntArray{{values, values + count}};
}
aclBoolArray* aclCreateBoolArray(const bool* values, uint64_t count) {
  return new aclBoolArray{{values, values + count}};
}
aclTensorList* aclCreateTensorList(const aclTensor* const* items, uint64_t count) {
  return take_over<aclTensorList>(items, count);
}
aclScalarList* aclCreateScalarList(const aclScalar* const* items, uint64_t count) {
  return take_over<aclScalarList>(items, count);
}

int aclDestroyTensor(const aclTensor* object) { return destroy(object); }
int aclDestroyScalar(const aclScalar* object) { return destroy(object); }
int aclDestroyIntArray(const aclIntArray* object) { return destroy(object); }
int aclDestroyBoolArray(const aclBoolArray* object) { return destroy(object); }
int aclDestroyTensorList(const aclTensorList* object) { return destroy(object); }
int aclDestroyScalarList(const aclScalarList* object) { return destroy(object); }

// ---- filling, copying, scaling ----

int aclnnInplaceFillScalarGetWorkspaceSize(aclTensor* self, aclScalar* value, uint64_t* workspace,
                                           aclOpExecutor** executor) {
  return prepare(workspace, executor, [x = tensor(self), v = value->value] { x.fill_(v); });
}
SECOND_PHASE(aclnnInplaceFillScalar)

int aclnnInplaceZeroGetWorkspaceSize(aclTensor* self, uint64_t* workspace, aclOpExecutor** executor) {
  return prepare(workspace, executor, [x = tensor(self)] { x.zero_(); });
}
SECOND_PHASE(aclnnInplaceZero)

int aclnnInplaceOneGetWorkspaceSize(aclTensor* self, uint64_t* workspace, aclOpExecutor** executor) {
  return prepare(workspace, executor, [x = tensor(self)] { x.fill_(1); });
}
SECOND_PHASE(aclnnInplaceOne)

int aclnnInplaceCopyGetWorkspaceSize(aclTensor* self, const aclTensor* source, uint64_t* workspace,
                                     aclOpExecutor** executor) {
  return prepare(workspace, executor, [x = tensor(self), y = tensor(source)] { x.copy_(y); });
}
SECOND_PHASE(aclnnInplaceCopy)

int aclnnConstantPadNdGetWorkspaceSize(const aclTensor* self, const aclIntArray* pad, const aclScalar* value,
                                       aclTensor* out, uint64_t* workspace, aclOpExecutor** executor) {
  return prepare(workspace, executor, [x = tensor(self), y = tensor(out), p = pad->values, v = value->value] {
    y.copy_(at::constant_pad_nd(x, p, v));
  });
}
SECOND_PHASE(aclnnConstantPadNd)

int aclnnCastGetWorkspaceSize(const aclTensor* self, aclDataType, aclTensor* out, uint64_t* workspace,
                              aclOpExecutor** executor) {
  return prepare(workspace, executor, [x = tensor(self), y = tensor(out)] { y.copy_(x); });
}
SECOND_PHASE(aclnnCast)

int aclnnInplaceDivsGetWorkspaceSize(aclTensor* self, const aclScalar* value, uint64_t* workspace,
                                     aclOpExecutor** executor) {
  return prepare(workspace, executor, [x = tensor(self), v = value->value] { x.div_(v); });
}
SECOND_PHASE(aclnnInplaceDivs)

int aclnnInplaceMulsGetWorkspaceSize(aclTensor* self, const aclScalar* value, uint64_t* workspace,
                                     aclOpExecutor** executor) {
  return prepare(workspace, executor, [x = tensor(self), v = value->value] { x.mul_(v); });
}
SECOND_PHASE(aclnnInplaceMuls)

// ---- attention, on the route of scaled_dot_product_attention ----

int aclnnFlashAttentionScoreGetWorkspaceSize(const aclTensor* query, const aclTensor* key, const aclTensor* value,
                                             const aclTensor* position_bias, const aclTensor* drop_mask,
                                             const aclTensor*, const aclTensor* mask, const aclIntArray*, double scale,
                                             double keep_prob, int64_t pre_tokens, int64_t next_tokens, int64_t heads,
                                             char* layout, int64_t, int64_t sparse_mode, const aclTensor* softmax_max,
                                             const aclTensor* softmax_sum, const aclTensor*, const aclTensor* out,
                                             uint64_t* workspace, aclOpExecutor** executor) {
  const AttentionSetting setting{layout, heads, scale, sparse_mode, pre_tokens, next_tokens};
  const bool plain = !position_bias && !drop_mask && keep_prob == 1.0;
  return prepare(workspace, executor,
                 [=, q = tensor(query), k = tensor(key), v = tensor(value), m = tensor(mask), o = tensor(out),
                  largest = tensor(softmax_max), total = tensor(softmax_sum)] {
                   TORCH_CHECK(plain, "the emulated attention has no position bias and no dropout");
                   const Scores s(q, k, v, m, setting);
                   const auto maximum = finite_maximum(s.scores);
                   const auto sum = (s.scores - maximum).exp().sum(-1, true);
                   const auto weights = softmax_weights(s.scores, maximum, sum);
                   largest.copy_(maximum.expand_as(largest));
                   total.copy_(sum.expand_as(total));
                   o.copy_(from_heads_first(weights.matmul(s.value), setting.layout));
                 });
}
SECOND_PHASE(aclnnFlashAttentionScore)

int aclnnFlashAttentionScoreGradGetWorkspaceSize(
    const aclTensor* query, const aclTensor* key, const aclTensor* value, const aclTensor* gradient,
    const aclTensor* position_bias, const aclTensor* drop_mask, const aclTensor*, const aclTensor* mask,
    const aclTensor* softmax_max, const aclTensor* softmax_sum, const aclTensor*, const aclTensor*, const aclIntArray*,
    double scale, double keep_prob, int64_t pre_tokens, int64_t next_tokens, int64_t heads, char* layout, int64_t,
    int64_t sparse_mode, const aclTensor* query_gradient, const aclTensor* key_gradient,
    const aclTensor* value_gradient, const aclTensor*, uint64_t* workspace, aclOpExecutor** executor) {
  const AttentionSetting setting{layout, heads, scale, sparse_mode, pre_tokens, next_tokens};
  const bool plain = !position_bias && !drop_mask && keep_prob == 1.0;
  return prepare(workspace, executor,
                 [=, q = tensor(query), k = tensor(key), v = tensor(value), g = tensor(gradient), m = tensor(mask),
                  largest = tensor(softmax_max), total = tensor(softmax_sum), dq = tensor(query_gradient),
                  dk = tensor(key_gradient), dv = tensor(value_gradient)] {
                   TORCH_CHECK(plain, "the emulated attention has no position bias and no dropout");
                   const Scores s(q, k, v, m, setting);
                   const auto out = to_heads_first(g, setting.layout, setting.heads).to(at::kFloat);
                   const auto weights = softmax_weights(s.scores, largest.narrow(-1, 0, 1), total.narrow(-1, 0, 1));
                   const auto inner = out.matmul(s.value.transpose(-1, -2));
                   const auto ds = weights * (inner - (inner * weights).sum(-1, true)) * scale;
                   const auto by_key = s.sum_of_group(ds.transpose(-1, -2).matmul(s.query));
                   const auto by_value = s.sum_of_group(weights.transpose(-1, -2).matmul(out));
                   dq.copy_(from_heads_first(ds.matmul(s.key), setting.layout));
                   dk.copy_(from_heads_first(by_key, setting.layout));
                   dv.copy_(from_heads_first(by_value, setting.layout));
                 });
}
SECOND_PHASE(aclnnFlashAttentionScoreGrad)

}  // extern "C"
