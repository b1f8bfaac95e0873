// Attention over a full mask, as aclnnFlashAttentionScore and its gradient are documented: a true mask element hides a
// key, grouped heads share keys, the softmax statistics are kept eight times over.
#pragma once

#include <ATen/ATen.h>

#include <limits>
#include <string>

namespace emulator {

struct AttentionSetting {
  std::string layout;
  int64_t heads;
  double scale;
  int64_t sparse_mode;
  int64_t pre_tokens;
  int64_t next_tokens;
};

constexpr int64_t kCompressedMask = 2048;  // the fixed side of the triangle that sparse modes 2, 3 and 4 take

inline at::Tensor to_heads_first(const at::Tensor& t, const std::string& layout, int64_t heads) {
  if (layout == "BNSD") return t;
  if (layout == "BSND") return t.transpose(1, 2);
  if (layout == "BSH") return t.unflatten(-1, {heads, -1}).transpose(1, 2);
  TORCH_CHECK(layout == "SBH", "the emulated attention has no layout ", layout);
  return t.unflatten(-1, {heads, -1}).permute({1, 2, 0, 3});
}

inline at::Tensor from_heads_first(const at::Tensor& t, const std::string& layout) {
  if (layout == "BNSD") return t;
  if (layout == "BSND") return t.transpose(1, 2);
  if (layout == "BSH") return t.transpose(1, 2).flatten(2);
  return t.permute({2, 0, 1, 3}).flatten(2);
}

// Hides the keys further than `before` behind or `after` ahead of the query's place.
inline at::Tensor outside_band(int64_t rows, int64_t columns, int64_t before, int64_t after, int64_t shift) {
  const auto place = at::arange(rows).unsqueeze(1) + shift;
  const auto key = at::arange(columns).unsqueeze(0);
  return (key > place + after).logical_or(key < place - before);
}

inline at::Tensor hidden(const at::Tensor& mask, int64_t rows, int64_t columns, const AttentionSetting& setting) {
  const auto mode = setting.sparse_mode;
  TORCH_CHECK(mode >= 0 && mode <= 4, "the emulated attention has no sparse_mode ", mode);
  if (mode <= 1) {
    constexpr int64_t kUnlimited = std::numeric_limits<int32_t>::max();
    const bool banded = setting.pre_tokens < kUnlimited || setting.next_tokens < kUnlimited;
    if (mode == 1 || !banded || !mask.defined()) return mask.defined() ? mask.to(at::kBool) : mask;
    return mask.to(at::kBool).logical_or(outside_band(rows, columns, setting.pre_tokens, setting.next_tokens, 0));
  }
  TORCH_CHECK(mask.defined() && mask.size(-1) == kCompressedMask && mask.size(-2) == kCompressedMask, "sparse_mode ",
              mode, " needs the 2048x2048 mask");
  if (mode == 4) return outside_band(rows, columns, setting.pre_tokens, setting.next_tokens, columns - rows);
  return outside_band(rows, columns, rows + columns, 0, mode == 3 ? columns - rows : 0);
}

// Queries, keys and values in float32 with as many key heads as query heads, and the masked scores.
struct Scores {
  at::Tensor query, key, value, scores;
  int64_t key_heads;

  Scores(const at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& mask,
         const AttentionSetting& setting) {
    query = to_heads_first(q, setting.layout, setting.heads).to(at::kFloat);
    // Layouts that fold the heads into the last dimension leave the number of key heads to be worked out.
    const int64_t folded = k.dim() == 3 ? k.size(-1) / query.size(-1) : 0;
    const auto grouped_key = to_heads_first(k, setting.layout, folded).to(at::kFloat);
    const auto grouped_value = to_heads_first(v, setting.layout, folded).to(at::kFloat);
    key_heads = grouped_key.size(1);
    key = grouped_key.repeat_interleave(query.size(1) / key_heads, 1);
    value = grouped_value.repeat_interleave(query.size(1) / key_heads, 1);
    scores = query.matmul(key.transpose(-1, -2)) * setting.scale;
    const auto hide = hidden(mask, scores.size(-2), scores.size(-1), setting);
    if (hide.defined()) scores = scores.masked_fill(hide, -std::numeric_limits<float>::infinity());
  }

  at::Tensor sum_of_group(const at::Tensor& t) const { return t.unflatten(1, {key_heads, -1}).sum(2); }
};

// A query that no key is open to gets zeros, which is the documented answer of the causal modes.
inline at::Tensor softmax_weights(const at::Tensor& scores, const at::Tensor& largest, const at::Tensor& total) {
  return (scores - largest).exp() / total.masked_fill(total == 0, 1);
}

inline at::Tensor finite_maximum(const at::Tensor& scores) {
  const auto largest = scores.amax(-1, true);
  return largest.masked_fill(largest.isneginf(), 0);
}

}  // namespace emulator
