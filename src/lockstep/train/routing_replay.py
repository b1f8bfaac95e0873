"""Routing replay in the passes of a step (`algorithm.routing_replay`): which passes record, replay and count routes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.model.policy import Policy
from lockstep.model.routing import KEY, Routing
from lockstep.parallel.context_split import Division
from lockstep.parallel.world import World
from lockstep.recipe import Recipe
from lockstep.types import MicroBatch


def install_routing(policy: Policy, recipe: Recipe, path: str, like: Routing | None = None) -> Routing | None:
    """Prepares the routers of a model for `algorithm.routing_replay`. `like` are the routers of the policy, whose
    experts a reference model replays. Returns None if the recipe replays nothing."""
    if recipe.algorithm.routing_replay == "off":
        return None
    routing = policy.decoder.install_routing(path)
    routing.from_engine = recipe.algorithm.routing_replay == "rollout"
    if like is not None:
        sizes = [(one.layers, one.top_k, one.experts) for one in (like, routing)]
        if sizes[0] != sizes[1]:
            raise Refusal.at(
                KEY,
                f"the policy has {sizes[0][0]} layers with {sizes[0][1]} of {sizes[0][2]} experts per token, and the "
                f"reference {path} has {sizes[1][0]} with {sizes[1][1]} of {sizes[1][2]}, so the reference cannot use "
                "the experts of the engine",
                "set it to old, or use a reference with the same experts",
                code="unsupported-combination",
            )
    return routing


class RoutingReplay:
    """Routing replay in one step. Flipped routes are counted once per step: in the pass for old log-probs if there is
    one, else in the updates. With `old`, the updates count how far the routers have moved since that pass."""

    def __init__(self, module: nn.Module, recipe: Recipe, plans: Sequence[Sequence[MicroBatch]]):
        self.mode = recipe.algorithm.routing_replay
        self.routing = module.decoder.routing if isinstance(module, Policy) and self.mode != "off" else None
        self._log: list[torch.Tensor] = []
        self._counted = False
        if self.routing is not None:
            self.routing.take_flips()
            self.routing.counts = False
        if self.mode == "rollout":
            missing = [one.origins for plan in plans for one in plan if one.tokens and one.routes_TLK is None]
            assert not missing, f"the responses to {missing[0]} have no recorded experts"

    @contextmanager
    def old_pass(self) -> Iterator[None]:
        """Surrounds the pass of the policy for old log-probs."""
        if self.routing is None:
            yield
            return
        self.routing.counts = self._counted = self.mode == "rollout"
        self.routing.log = self._log if self.mode == "old" else None
        try:
            yield
        finally:
            self.routing.counts, self.routing.log = False, None

    def into(self, plans: Sequence[list[MicroBatch]]) -> None:
        """Puts the experts of the pass for old log-probs into the micro-batches of the updates. Call it after the
        passes of the reference model, which replays only the experts of an engine."""
        if self.routing is None:
            return
        self.routing.counts = not self._counted
        routes = iter(self._log)
        for batches in plans if self._log else ():
            batches[:] = [_with_routes(batch, next(routes)) for batch in batches]


def _with_routes(batch: MicroBatch, routes_TLK: torch.Tensor) -> MicroBatch:
    routes_TLK = routes_TLK.to(torch.int16)
    if isinstance(batch.context, Division):
        routes_TLK = batch.context.of_full(routes_TLK)
    return replace(batch, routes_TLK=routes_TLK)


def flip_metrics(routing: Routing, world: World) -> dict[str, float]:
    """Returns the share of the routers' choices that were not among the replayed ones, in all layers and per layer.
    Returns an empty dict if no route was counted. All ranks must call this function."""
    flips, choices = routing.take_flips() or ([0] * routing.layers, 0)
    *flips_L, total = world.sum([*map(float, flips), float(choices)])
    if not total:
        return {}
    digits = len(str(routing.layers - 1))
    layers = {f"routing/flips/layer_{number:0{digits}d}": one / total for number, one in enumerate(flips_L)}
    return {"routing/flips": sum(flips_L) / (total * routing.layers), **layers}
