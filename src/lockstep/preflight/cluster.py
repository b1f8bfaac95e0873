"""The cluster of `lockstep plan --cluster`: times of its collectives, tokens of a step, and roofline times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from lockstep.data.batching import shared_beginnings
from lockstep.data.updates import row_size
from lockstep.device.chips import CHIPS, LINKS, ChipFacts, chip_named, nearest_chip
from lockstep.device.cpu import host_memory
from lockstep.errors import Refusal
from lockstep.model.router import experts_of_token
from lockstep.model.text_model import model_on_meta, text_config, text_sizes
from lockstep.preflight.batch_plan import sequences_per_update
from lockstep.preflight.prepared import Prepared
from lockstep.preflight.row_checks import longest_row
from lockstep.preflight.state_sizes import cached_elements
from lockstep.recipe import Recipe
from lockstep.recipe.registry import estimator_row
from lockstep.types import Item

# The cluster that `lockstep plan --cluster` names, and the time of collectives over its links.

GRAMMAR = "NODESxDEVICES:DEVICE, for example 2x8:h200 for two nodes with eight devices each"


class Members(NamedTuple):
    """The size of a communication group: it has `each` ranks on each of `nodes` nodes."""

    nodes: int
    each: int

    @property
    def size(self) -> int:
        return self.nodes * self.each


@dataclass(frozen=True)
class TargetCluster:
    nodes: int
    each: int
    chip: ChipFacts

    @property
    def devices(self) -> int:
        return self.nodes * self.each

    @property
    def memory(self) -> int:
        """The memory of one device in bytes."""
        return self.chip.memory if self.chip.memory is not None else host_memory().total // self.each

    @property
    def _between(self) -> float:
        assert self.chip.between is not None, "`cluster_named` refuses several nodes without a known link"
        return self.chip.between

    def __str__(self) -> str:
        return f"{self.nodes}x{self.each}:{self.chip.name}"

    def neighbours(self, size: int) -> Members:
        """Returns how a communication group of `size` consecutive ranks is spread over nodes."""
        return Members(1, size) if size <= self.each else Members(-(-size // self.each), self.each)

    def apart(self, size: int, stride: int) -> Members:
        """Returns how a communication group of `size` ranks is spread over nodes, if neighbouring ranks of the group
        differ by `stride`."""
        on_a_node = max(1, self.each // stride)
        return Members(1, size) if size <= on_a_node else Members(-(-size // on_a_node), on_a_node)

    def gather_seconds(self, whole: float, group: Members) -> float:
        """Returns the seconds of an all-gather whose result has `whole` bytes. A reduce-scatter takes the same time.

        All bytes cross the links inside a node. Bytes from other nodes arrive at each node once, divided over the
        network links of the group's ranks on that node. Both transfers overlap.
        """
        if group.size == 1:
            return 0.0
        inside = whole * (group.size - 1) / group.size / self.chip.inside if group.each > 1 else 0.0
        outside = whole * (group.nodes - 1) / group.nodes / (group.each * self._between) if group.nodes > 1 else 0.0
        return max(inside, outside) / LINKS

    def sum_seconds(self, each: float, group: Members) -> float:
        """Returns the seconds of an all-reduce of `each` bytes per rank, which is a reduce-scatter and an
        all-gather."""
        return 2 * self.gather_seconds(each, group)

    def exchange_seconds(self, each: float, group: Members) -> float:
        """Returns the seconds of an all-to-all or of ring hops in which every rank of the group sends `each` bytes,
        possibly to another node."""
        if group.size == 1:
            return 0.0
        return each / (self.chip.inside if group.nodes == 1 else self._between) / LINKS


def cluster_named(text: str) -> TargetCluster:
    """Parses the value of `--cluster`. The message for an invalid value names the syntax and the supported devices."""
    found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,3}):(\S+)", text.strip(), re.IGNORECASE)
    if found is None:
        raise Refusal.at(
            "--cluster", f"{text!r} is not {GRAMMAR}", f"known devices: {', '.join(CHIPS)}", code="invalid-syntax"
        )
    name = found[3]
    chip = chip_named(name)
    if chip is None:
        nearest = nearest_chip(name)
        raise Refusal.at(
            "--cluster",
            f"unknown device {name!r}",
            f"known devices: {', '.join(CHIPS)}" + (f"; did you mean {nearest}?" if nearest else ""),
            code="unknown-device",
        )
    cluster = TargetCluster(int(found[1]), int(found[2]), chip)
    if chip.most_devices is not None and cluster.each > chip.most_devices:
        raise Refusal.at(
            "--cluster",
            f"it has {cluster.each} devices per node, but a node of {chip.name} has at most {chip.most_devices}",
            f"use more nodes: {-(-cluster.devices // chip.most_devices)}x{chip.most_devices}:{chip.name}",
            code="out-of-range",
        )
    if chip.between is None and cluster.nodes > 1:
        raise Refusal.at(
            "--cluster",
            f"it has {cluster.nodes} nodes, but the speed of the links between nodes of {chip.name} is not known",
            f"plan for one node: 1x{cluster.each}:{chip.name}",
            code="out-of-range",
        )
    return cluster


# Roofline times of a step: the minimum allowed by matrix FLOP/s and memory bandwidth.
#
# Symbols in the formulas: F is the compute speed in FLOP/s, BW the memory bandwidth in bytes/s, N the number of weights
# that a token is multiplied with (of two bytes each), B the number of sequences, S the tokens of a sequence, T the
# tokens of all sequences, L the layers, Hq the query heads, Hkv the key heads, d the head size, and kv the KV cache
# bytes per token.


@dataclass(frozen=True)
class ModelCost:
    """The sizes of a decoder model that determine its FLOPs and its memory traffic."""

    multiplied: int
    """N, the number of weights that one token is multiplied with. N excludes norms, biases, an input embedding that is
    not tied to the output head, and experts to which the token is not routed."""
    head: int
    """The weights of the output head (the projection to the vocabulary), which are part of `multiplied`."""
    read: int
    """The number of weights that are read when many tokens are computed at once, including those of all experts."""
    attended: int
    """The product L Hq d: the width of the queries of all layers."""
    cached: int
    """The KV cache elements per token in all layers: 2 L Hkv d if all layers have keys and values of one size."""
    layers: int
    vocabulary: int


def model_cost(config: Any) -> ModelCost:
    """Computes the sizes of a model that is built on the meta device."""
    model = model_on_meta(config)
    sizes = text_sizes(config)
    head = sizes.vocabulary * sizes.hidden
    experts, chosen = _experts(text_config(config))
    # The output head is counted once, whether it is tied to the input embedding or not.
    apart = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    multiplied = read = head
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in apart:
            continue
        count = parameter.numel()
        read += count
        multiplied += count * chosen // experts if re.search(r"\bexperts\b", name) else count
    attended = sizes.layers * sizes.heads * sizes.head_size
    cached = sum(cached_elements(config))
    return ModelCost(multiplied, head, read, attended, cached, sizes.layers, sizes.vocabulary)


def _experts(config: Any) -> tuple[int, int]:
    """Returns the number of experts per layer and the number of experts per token."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            return getattr(config, name), experts_of_token(config) or 1
    return 1, 1


def weights_seconds(cost: ModelCost, batch: int, flops: float, bandwidth: float, size: int = 2) -> float:
    """Returns the seconds to multiply one token of each of `batch` sequences with all weights: max(2 N / BW, 2 N B /
    F)."""
    return max(size * cost.read / bandwidth, 2 * cost.multiplied * batch / flops)


def cache_seconds(cost: ModelCost, batch: int, context: float, bandwidth: float, size: int = 2) -> float:
    """Returns the seconds to read the keys and values of `batch` sequences of `context` tokens, which is B S kv /
    BW."""
    return batch * context * size * cost.cached / bandwidth


def attention_flops(cost: ModelCost, squares: float) -> float:
    """Returns the FLOPs of causal attention in forward and backward: 6 L Hq d S^2 per sequence. `squares` is the sum of
    S^2 over the sequences."""
    return 6 * cost.attended * squares


# The number of tokens of one step, from which memory and time are predicted.


@dataclass(frozen=True)
class StepWork:
    """The tokens of one training step on all devices together. A step of an offline run is one update without
    generation."""

    rows: int
    """The number of units that are divided over the devices: sequences in an online run, rows in an offline run."""
    tokens: float
    """The tokens of all micro-batches. A prompt that several packed responses share is counted once."""
    squares: float
    """The sum of the squared lengths of the sequences. The squared length of a shared prefix is counted once."""
    whole: float
    """The tokens of all sequences. Each sequence includes its prompt, also if several sequences share it."""
    targets: float
    updates: int = 1
    epochs: int = 1
    prompts: int = 0
    samples: int = 0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0


class StepSource(Protocol):
    """Computes the tokens of a step. The methods may be called with a changed recipe if the changed keys do not affect
    the training data."""

    def work(self, recipe: Recipe) -> StepWork: ...

    def longest(self, recipe: Recipe) -> int:
        """Returns the number of tokens that the longest row takes in a micro-batch."""
        ...

    def rows(self, recipe: Recipe) -> int:
        """Returns the number of rows or sequences per update. Each row or sequence has at most `longest` tokens."""
        ...


class OfflineSteps:
    """The StepSource of an offline run, which assumes that an update consists of rows of mean length."""

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        # The keys are pairs of booleans: whether rows are packed, and whether sequences of a row share their prefix.
        self._works: dict[tuple[bool, bool], StepWork] = {}
        self._longest: dict[tuple[bool, bool], int] = {}

    def work(self, recipe: Recipe) -> StepWork:
        key = _packed_and_shared(recipe)
        if key not in self._works:
            self._works[key] = self._work(*key)
        return self._works[key]

    def _work(self, packed: bool, shared: bool) -> StepWork:
        batches, items = self.prepared.batches, self.prepared.train.items
        rows = min(batches.rows_per_update, batches.total_rows)
        each = rows / len(items)
        # Without packing, rows are padded to the length of the longest row in their micro-batch.
        width = 1 if packed else 1 / batches.fill
        examples = [example for item in items for example in item.examples]
        return StepWork(
            rows=rows,
            tokens=each * width * sum(_tokens(item, packed, shared) for item in items),
            squares=each * width * sum(_squares(item, packed and shared) for item in items),
            whole=each * width * sum(len(example) for example in examples),
            targets=each * sum(example.targets for example in examples),
        )

    def longest(self, recipe: Recipe) -> int:
        key = _packed_and_shared(recipe)
        if key not in self._longest:
            self._longest[key] = longest_row(recipe, self.prepared.train)
        return self._longest[key]

    def rows(self, recipe: Recipe) -> int:
        return recipe.batch.rows_per_update


def _packed_and_shared(recipe: Recipe) -> tuple[bool, bool]:
    return recipe.batch.tokens is not None, recipe.parallel.context_parallel == 1


def _tokens(item: Item, packed: bool, shared: bool) -> int:
    size = row_size(item, packed=packed, shared=shared)
    return size if packed else size * len(item.examples)


def _squares(item: Item, shared: bool) -> int:
    common = shared_beginnings(item.examples) if shared and len(item.examples) > 1 else []
    return sum(len(example) ** 2 for example in item.examples) - sum(length**2 for length in common)


@dataclass(frozen=True)
class OnlineSteps:
    """The StepSource of an online run, which assumes prompts and responses of mean length."""

    prompt_tokens: float
    response_tokens: float
    longest_prompt: int

    @classmethod
    def of(cls, prompts: Sequence[Any], response_tokens: float) -> OnlineSteps:
        lengths = [len(prompt.ids) for prompt in prompts]
        return cls(sum(lengths) / len(lengths), response_tokens, max(lengths))

    def longest(self, recipe: Recipe) -> int:
        return self.longest_prompt + recipe.rollout.max_tokens

    def rows(self, recipe: Recipe) -> int:
        return sequences_per_update(recipe)

    def work(self, recipe: Recipe) -> StepWork:
        batch, samples = recipe.batch, recipe.rollout.n
        prompt, response = self.prompt_tokens, self.response_tokens
        sequences, again = batch.prompts * samples, batch.prompts * self._shared(recipe)
        return StepWork(
            rows=sequences,
            tokens=sequences * (prompt + response) - again * prompt,
            squares=sequences * (prompt + response) ** 2 - again * prompt**2,
            whole=sequences * (prompt + response),
            targets=sequences * response,
            updates=batch.prompts // (batch.prompts_per_update or batch.prompts),
            epochs=recipe.algorithm.epochs,
            prompts=batch.prompts,
            samples=samples + int(estimator_row(recipe.algorithm.advantage).greedy_baseline),
            prompt_tokens=prompt,
            response_tokens=response,
        )

    def _shared(self, recipe: Recipe) -> int:
        """Returns how many responses of a group reuse a prompt that their packed row already contains. In each packed
        row, these are all responses except the first."""
        if recipe.batch.tokens is None or recipe.parallel.context_parallel > 1:
            return 0
        on_a_line = max(1, int((recipe.batch.tokens - self.prompt_tokens) // self.response_tokens))
        return recipe.rollout.n - -(-recipe.rollout.n // on_a_line)
