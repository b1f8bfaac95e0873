"""Routing replay: records the experts that the routers of a model choose, and makes routers use recorded experts.

A router computes a logit per expert, chooses the top k experts of a token and returns their gate weights. In a replay,
the recorded experts replace the chosen ones. Their gate weights are computed from the current logits, so that gradients
flow into the router (R3, arXiv 2510.11370). Suffixes: T tokens, L layers with a router, K experts per token, E experts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from lockstep.errors import Refusal

KEY = "algorithm.routing_replay"
# The entry of a token without recorded experts. Its router chooses.
UNKNOWN = -1

Gates = Callable[[Any, torch.Tensor, torch.Tensor], torch.Tensor]


def _softmax(router: Any, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    """Probabilities over all experts, divided by their sum over the chosen ones unless the config says otherwise."""
    gates_TK = torch.softmax(logits_TE, dim=-1, dtype=torch.float).gather(1, chosen_TK)
    return gates_TK / gates_TK.sum(-1, keepdim=True) if getattr(router, "norm_topk_prob", True) else gates_TK


def _scaled_softmax(router: Any, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    """Probabilities over all experts, also those of groups that the router would not choose (DeepSeek V2)."""
    probs_TE = torch.softmax(logits_TE, dim=-1, dtype=torch.float)
    return probs_TE.gather(1, chosen_TK) * router.routed_scaling_factor


def _chosen_softmax(router: Any, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    """Probabilities over the chosen experts alone (gpt-oss, Granite)."""
    chosen_logits_TK = logits_TE.gather(1, chosen_TK)
    return torch.softmax(chosen_logits_TK, dim=-1, dtype=chosen_logits_TK.dtype)


def _sigmoid(router: Any, logits_TE: torch.Tensor, chosen_TK: torch.Tensor) -> torch.Tensor:
    """Sigmoids without the selection bias, divided by their sum over the chosen experts (DeepSeek V3)."""
    gates_TK = logits_TE.sigmoid().gather(1, chosen_TK)
    if router.norm_topk_prob:
        gates_TK = gates_TK / (gates_TK.sum(-1, keepdim=True) + 1e-20)
    return gates_TK * router.routed_scaling_factor


# How a router of transformers computes the gate weights of the chosen experts, by its class.
ROUTERS: dict[str, Gates] = {
    **dict.fromkeys(
        (
            "Qwen2MoeTopKRouter",
            "Qwen3MoeTopKRouter",
            "Qwen3NextTopKRouter",
            "Qwen3_5MoeTopKRouter",
            "Qwen3VLMoeTextTopKRouter",
            "OlmoeTopKRouter",
            "MixtralTopKRouter",
        ),
        _softmax,
    ),
    "DeepseekV2TopkRouter": _scaled_softmax,
    **dict.fromkeys(("GptOssTopKRouter", "GraniteMoeTopKRouter"), _chosen_softmax),
    **dict.fromkeys(("DeepseekV3TopkRouter", "Glm4MoeTopkRouter"), _sigmoid),
}


def routers_of(layers: Sequence[nn.Module]) -> list[list[nn.Module]]:
    """Returns the routers of each decoder layer that has one. A router that an adapter trains has a frozen copy in the
    same layer."""
    found = [[module for module in layer.modules() if type(module).__name__ in ROUTERS] for layer in layers]
    return [routers for routers in found if routers]


def refuse_unknown_routers(layers: Sequence[nn.Module], model: str, where: str) -> None:
    """Raises `Refusal` if the model has no experts, or routers of another class than those of `ROUTERS`."""
    if routers_of(layers):
        return
    names = {type(module).__name__ for layer in layers for module in layer.modules()}
    other = sorted(name for name in names if name.lower().endswith(("router", "gate", "experts", "moe")))
    known = ", ".join(sorted({name.split("Top")[0] for name in ROUTERS}))
    raise Refusal.at(
        KEY,
        f"{where}: {model} has no experts, so it has no routing to replay"
        if not other
        else f"{where}: lockstep does not know the routers of {model} ({', '.join(other)})",
        f"set it to off; models with routing replay: {known}",
        code="unsupported-model",
    )


class Routing:
    """The routers of a model. Each forward pass records the chosen experts, or replays the experts of `begin`.

    A replay stays in effect until the next `begin`, because gradient checkpointing runs layers again in the backward
    pass."""

    def __init__(self, layers: Sequence[nn.Module], model: str, where: str) -> None:
        refuse_unknown_routers(layers, model, where)
        self._routers = routers_of(layers)
        self.all_layers = len(layers)
        self.layer_numbers = [number for number, layer in enumerate(layers) if routers_of([layer])]
        """The numbers of the decoder layers that have a router."""
        first: Any = self._routers[0][0]
        self.layers, self.top_k, self.experts = len(self._routers), int(first.top_k), int(first.num_experts)
        self.from_engine = False
        """Whether the engine records the experts that the trainer replays."""
        self.counts = True
        """Whether passes count flipped routes."""
        self.log: list[torch.Tensor] | None = None
        """If it is a list, passes append the experts that they used, [T, L, K] on the CPU."""
        self._given_TLK: torch.Tensor | None = None
        self._slots: tuple[torch.Tensor, torch.Tensor] | None = None
        self._chosen: list[torch.Tensor | None] = [None] * self.layers
        self._flips: list[torch.Tensor | None] = [None] * self.layers
        self._totals: list[torch.Tensor] = []
        """The flipped choices per layer, and the number of replayed tokens, of each counted pass."""
        for number, routers in enumerate(self._routers):
            for router in routers:
                router.register_forward_hook(partial(self._routed, number, ROUTERS[type(router).__name__]))

    @property
    def dtype(self) -> torch.dtype:
        """The type in which the numbers of experts are stored."""
        return torch.uint8 if self.experts <= 256 else torch.int16

    @property
    def token_bytes(self) -> int:
        return self.layers * self.top_k * self.dtype.itemsize

    def begin(self, routes_TLK: torch.Tensor | None) -> None:
        """Begins a forward pass. `routes_TLK` are the experts to use; the router chooses where they are `UNKNOWN`."""
        if routes_TLK is not None and routes_TLK.shape[1:] != (self.layers, self.top_k):
            raise ValueError(
                f"routes of shape {tuple(routes_TLK.shape[1:])} do not fit {self.layers} layers with {self.top_k} "
                "experts per token"
            )
        self._given_TLK = routes_TLK
        self._chosen, self._flips = [None] * self.layers, [None] * self.layers

    def end(self) -> None:
        """Ends a forward pass: logs its experts, and adds its flipped routes to the counts."""
        missing = [number for number, chosen in enumerate(self._chosen) if chosen is None]
        assert not missing, f"the routers of layers {missing} did not run as modules, so no route was replayed"
        if self.log is not None:
            self.log.append(self._used().cpu())
        if self._given_TLK is None or not self.counts:
            return
        tokens = (self._given_TLK[:, 0, 0] != UNKNOWN).sum()
        self._totals.append(torch.stack([*(flips for flips in self._flips if flips is not None), tokens]))

    def _used(self) -> torch.Tensor:
        return torch.stack([chosen for chosen in self._chosen if chosen is not None], 1).to(self.dtype)

    def take_flips(self) -> tuple[list[int], int] | None:
        """Returns per layer how many choices of the routers were not among the replayed ones, and the number of choices
        per layer. Resets the counts. Returns None if nothing was replayed since the last call."""
        totals, self._totals = self._totals, []
        if not totals:
            return None
        *flips, tokens = torch.stack(totals).sum(0).tolist()
        return flips, tokens * self.top_k

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Counts no flipped routes inside the `with` block."""
        counts, self.counts = self.counts, False
        try:
            yield
        finally:
            self.counts = counts

    @contextmanager
    def stored(self, routes_LSK: torch.Tensor, slots_T: torch.Tensor) -> Iterator[None]:
        """Stores the chosen experts of the passes of an engine, by the slot of a token in the KV cache."""
        self._given_TLK, self._slots = None, (routes_LSK, slots_T)
        try:
            yield
        finally:
            self._slots = None

    @contextmanager
    def idle(self) -> Iterator[None]:
        """Makes the routers of an engine's passes choose."""
        self._given_TLK = None
        yield

    def _routed(self, layer: int, gates: Gates, router: nn.Module, _: Any, output: Any) -> Any:
        logits_TE, weights_TK, chosen_TK = output
        if chosen_TK.is_floating_point():
            what = (
                f"transformers {version('transformers')} returns the output of {type(router).__name__} in another order"
            )
            raise Refusal.at(KEY, what, 'run pip install "transformers>=5.20,<6"', code="missing-package")
        if self._slots is not None:
            routes_LSK, slots_T = self._slots
            routes_LSK[layer].index_copy_(0, slots_T, chosen_TK.to(routes_LSK.dtype))
            return None
        if self._given_TLK is None:
            self._chosen[layer] = chosen_TK.detach()
            return None
        given_TK = self._given_TLK[:, layer].long()
        known_T1 = given_TK[:, :1] != UNKNOWN
        used_TK = torch.where(known_T1, given_TK, chosen_TK)
        self._chosen[layer] = used_TK
        flipped_TK = (chosen_TK[:, :, None] != used_TK[:, None, :]).all(-1)
        self._flips[layer] = flipped_TK.sum()
        return logits_TE, gates(router, logits_TE, used_TK).to(weights_TK.dtype), used_TK
