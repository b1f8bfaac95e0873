"""torch_npu's fused attention as its documents define it, in plain torch: in its place where there is no device.

Of packed sequences (TND) in fp32. Statistics of a query and head stand eight times over; head by head within each
sequence by default, query by query with softmax_layout "TND". The gradient takes them as they are given, and
subtracts the product of the output's gradient and the output that it is given. The switches are faults of an operator.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch


@dataclass
class FusionModel:
    """To be put in the place of the module `torch_npu`."""

    own_part: bool = False
    """Whether the gradient forgets the output that it is given."""
    own_sums: bool = False
    """Whether it forgets the statistics that it is given."""
    from_the_start: bool = False
    """Whether a causal sequence is aligned at its start."""
    by_head: bool = False
    """Whether statistics stand head by head whatever is asked for."""
    broken: bool = False
    calls: Counter[str] = field(default_factory=Counter)

    @property
    def npu(self) -> Any:
        return SimpleNamespace(synchronize=lambda: None)

    def npu_fusion_attention(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, heads: int, layout: str, **more: Any
    ) -> tuple[Any, ...]:
        self.calls["forward"] += 1
        assert (heads, layout) == (query.shape[1], "TND")
        if self.broken:
            raise RuntimeError("EZ9999: Inner Error")
        scale = more.pop("scale")
        outs, largest, total = [], [], []
        for q, k, v, hidden in self._sequences(query, key, value, more):
            scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)
            most = scores.amax(-1)
            powers = (scores - most[..., None]).exp()
            outs.append(torch.einsum("hqk,khd->qhd", powers / powers.sum(-1, keepdim=True), v))
            largest.append(most)
            total.append(powers.sum(-1))
        statistics = (self._placed(parts, more) for parts in (largest, total))
        return torch.cat(outs).to(query.dtype), *statistics, torch.empty(0), 0, 0, 0

    def npu_fusion_attention_grad(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        dy: torch.Tensor,
        heads: int,
        layout: str,
        **more: Any,
    ) -> tuple[torch.Tensor, ...]:
        self.calls["gradient"] += 1
        assert (heads, layout) == (query.shape[1], "TND")
        scale, out = more.pop("scale_value"), more.pop("attention_in")
        largest, total = more.pop("softmax_max"), more.pop("softmax_sum")
        assert largest.shape == total.shape == (len(query), heads, 8)
        by_query, by_key, by_value = [], [], []
        first = 0
        for q, k, v, hidden in self._sequences(query, key, value, more):
            rows = slice(first, first + len(q))
            first += len(q)
            most, sums = largest[rows, :, 0].t()[..., None], total[rows, :, 0].t()[..., None]
            scores = (torch.einsum("qhd,khd->hqk", q, k) * scale).masked_fill(hidden, -torch.inf)
            weights = scores.softmax(-1) if self.own_sums else (scores - most).exp() / sums
            upstream = dy[rows].float()
            along = torch.einsum("qhd,khd->hqk", upstream, v)
            given = torch.einsum("qhd,qhd->hq", upstream, out[rows].float())[..., None]
            less = (weights * along).sum(-1, keepdim=True) if self.own_part else given
            by_scores = weights * (along - less) * scale
            by_query.append(torch.einsum("hqk,khd->qhd", by_scores, k))
            by_key.append(torch.einsum("hqk,qhd->khd", by_scores, q))
            by_value.append(torch.einsum("hqk,qhd->khd", weights, upstream))
        each = heads // key.shape[1]
        shared = (torch.cat(parts).unflatten(1, (-1, each)).sum(2) for parts in (by_key, by_value))
        found = (torch.cat(by_query), *shared)
        return *(gradient.to(query.dtype) for gradient in found), torch.empty(0), torch.empty(0)

    def _sequences(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, more: dict[str, Any]
    ) -> Iterator[tuple[torch.Tensor, ...]]:
        each = query.shape[1] // key.shape[1]
        query_start = key_start = 0
        for query_end, key_end in zip(more["actual_seq_qlen"], more["actual_seq_kvlen"], strict=True):
            q = query[query_start:query_end].float()
            k, v = (x[key_start:key_end].float().repeat_interleave(each, 1) for x in (key, value))
            yield q, k, v, self._hidden(len(q), len(k), more)
            query_start, key_start = query_end, key_end
        assert (query_start, key_start) == (len(query), len(key))

    def _hidden(self, queries: int, keys: int, more: dict[str, Any]) -> torch.Tensor:
        mode = more.get("sparse_mode", 0)
        if more.get("atten_mask") is None:
            return torch.zeros(queries, keys, dtype=torch.bool)
        assert torch.equal(more["atten_mask"], torch.ones(2048, 2048, dtype=torch.bool).triu(1))
        own = torch.arange(queries)[:, None] + (0 if self.from_the_start else keys - queries)
        back = own - torch.arange(keys)
        if mode == 3:
            return back < 0
        assert mode == 4
        return (back < -more["next_tockens"]) | (back > more["pre_tockens"])

    def _placed(self, parts_HT: list[torch.Tensor], more: dict[str, Any]) -> torch.Tensor:
        by_query = torch.cat([part.t() for part in parts_HT])
        if more["softmax_layout"] != "TND" or self.by_head:
            by_query = torch.cat([part.flatten() for part in parts_HT]).view_as(by_query)
        return by_query[..., None].expand(-1, -1, 8).contiguous()
