"""A cluster described by `lockstep plan --cluster`: its links, the tokens of a step, and roofline times."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from lockstep.data.batching import shared_beginnings
from lockstep.data.updates import row_size
from lockstep.device.chips import CHIPS, LINKS, ChipFacts, chip_named, nearest_chip
from lockstep.device.cpu import host_memory
from lockstep.errors import Refusal
from lockstep.preflight.batch_plan import sequences_per_update
from lockstep.preflight.prepared import Prepared
from lockstep.preflight.row_checks import longest_row
from lockstep.recipe import Recipe
from lockstep.recipe.registry import estimator_row
from lockstep.types import Item

# Clusters named by `lockstep plan --cluster`, and the time of collectives over their links.

GRAMMAR = "NODESxDEVICES:DEVICE, as 2x8:h200 for two nodes of eight"


class Members(NamedTuple):
    """Members of a group of ranks: `each` ranks on each of `nodes` nodes."""

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
        """Memory of one device in bytes."""
        return self.chip.memory if self.chip.memory is not None else host_memory().total // self.each

    def __str__(self) -> str:
        return f"{self.nodes}x{self.each}:{self.chip.name}"

    def neighbours(self, size: int) -> Members:
        """Members of a group of `size` consecutive ranks."""
        return Members(1, size) if size <= self.each else Members(-(-size // self.each), self.each)

    def apart(self, size: int, stride: int) -> Members:
        """Members of a group of ranks with a distance of `stride`."""
        on_a_node = max(1, self.each // stride)
        return Members(1, size) if size <= on_a_node else Members(-(-size // on_a_node), on_a_node)

    def gather_seconds(self, whole: float, group: Members) -> float:
        """Seconds of an all-gather whose result has `whole` bytes. A reduce-scatter takes the same time.

        All bytes cross the links inside a node. Bytes from other nodes arrive once per node and are divided over the
        links of its group members. Both transfers overlap.
        """
        if group.size == 1:
            return 0.0
        inside = whole * (group.size - 1) / group.size / self.chip.inside if group.each > 1 else 0.0
        outside = whole * (group.nodes - 1) / group.nodes / (group.each * self.chip.between)
        return max(inside, outside) / LINKS

    def sum_seconds(self, each: float, group: Members) -> float:
        """Seconds of an all-reduce of `each` bytes per member: a reduce-scatter and an all-gather."""
        return 2 * self.gather_seconds(each, group)

    def exchange_seconds(self, each: float, group: Members) -> float:
        """Seconds of an all-to-all or of ring hops: every member sends `each` bytes, possibly to another node."""
        if group.size == 1:
            return 0.0
        return each / (self.chip.inside if group.nodes == 1 else self.chip.between) / LINKS


def cluster_named(text: str) -> TargetCluster:
    """Parses the value of `--cluster`. Refuses invalid values, naming the grammar and the supported devices."""
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
            f"{cluster.each} devices in a node, and a node of {chip.name} has up to {chip.most_devices}",
            f"say more nodes: {-(-cluster.devices // chip.most_devices)}x{chip.most_devices}:{chip.name}",
            code="out-of-range",
        )
    if chip.most_nodes is not None and cluster.nodes > chip.most_nodes:
        raise Refusal.at(
            "--cluster",
            f"{cluster.nodes} nodes, and the links between nodes of {chip.name} are known for up to {chip.most_nodes}",
            f"plan for {chip.most_nodes} nodes or fewer",
            code="out-of-range",
        )
    return cluster


# Roofline times of a step: the minimum allowed by matrix FLOP/s and memory bandwidth.
#
# Symbols: F FLOP/s, BW bytes/s, N multiplied weights of two bytes, B sequences, S tokens, L layers, Hq query heads,
# Hkv key heads, d head size.


@dataclass(frozen=True)
class ModelCost:
    """Sizes of a decoder that determine its compute and memory traffic."""

    multiplied: int
    """N: weights that one token is multiplied with. Excludes norms, biases, an input embedding that is not also the
    head, and experts that the token is not routed to."""
    head: int
    """The part of `multiplied` in the projection to the vocabulary."""
    read: int
    """Weights read when many tokens are computed at once: includes all experts."""
    attended: int
    """L Hq d."""
    cached: int
    """KV cache elements per token over all layers: 2 L Hkv d."""
    layers: int
    vocabulary: int


def model_cost(config: Any) -> ModelCost:
    """Counts the parameters of the model, built on the meta device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    text = config.get_text_config()
    heads = text.num_attention_heads
    key_heads = getattr(text, "num_key_value_heads", None) or heads
    size = getattr(text, "head_dim", None) or text.hidden_size // heads
    head = text.vocab_size * text.hidden_size
    experts, chosen = _experts(text)
    # The head is counted once, tied or not.
    apart = {id(module.weight) for module in (model.get_input_embeddings(), model.get_output_embeddings())}
    multiplied = read = head
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or id(parameter) in apart:
            continue
        count = parameter.numel()
        read += count
        multiplied += count * chosen // experts if re.search(r"\bexperts\b", name) else count
    layers = text.num_hidden_layers
    return ModelCost(
        multiplied, head, read, layers * heads * size, 2 * layers * key_heads * size, layers, text.vocab_size
    )


def _experts(config: Any) -> tuple[int, int]:
    """Experts per layer, and experts per token."""
    for name in ("num_experts", "num_local_experts", "n_routed_experts"):
        if getattr(config, name, None):
            return getattr(config, name), config.num_experts_per_tok
    return 1, 1


def weights_seconds(cost: ModelCost, batch: int, flops: float, bandwidth: float, size: int = 2) -> float:
    """Seconds to pass one token of each of `batch` sequences through all weights: max(2 N / BW, 2 N B / F)."""
    return max(size * cost.read / bandwidth, 2 * cost.multiplied * batch / flops)


def cache_seconds(cost: ModelCost, batch: int, context: float, bandwidth: float, size: int = 2) -> float:
    """Seconds to read the keys and values of `batch` sequences of `context` tokens: B S kv / BW."""
    return batch * context * size * cost.cached / bandwidth


def decode_seconds(cost: ModelCost, batch: int, context: float, flops: float, bandwidth: float) -> float:
    """Seconds of one decode step for `batch` sequences: max(2 N / BW, 2 N B / F) + B S kv / BW."""
    return weights_seconds(cost, batch, flops, bandwidth) + cache_seconds(cost, batch, context, bandwidth)


def generation_seconds(
    cost: ModelCost, batch: int, prompt: int, response: int, flops: float, bandwidth: float
) -> float:
    """Seconds of decoding at the mean context of a response. Excludes prefill."""
    return response * decode_seconds(cost, batch, prompt + response / 2, flops, bandwidth)


def product_flops(cost: ModelCost, tokens: float, *, frozen: bool = False) -> float:
    """FLOPs of the weights in forward and backward: 6 N T, or 4 N T for frozen weights (no weight gradients)."""
    return (4 if frozen else 6) * cost.multiplied * tokens


def attention_flops(cost: ModelCost, squares: float) -> float:
    """FLOPs of causal attention in forward and backward: 6 L Hq d S^2 per sequence; `squares` is the sum of S^2."""
    return 6 * cost.attended * squares


def training_flops(cost: ModelCost, lengths: Sequence[int], *, frozen: bool = False) -> float:
    """FLOPs of forward and backward over causal sequences: 6 N S + 6 L Hq d S^2 each."""
    squares = sum(length**2 for length in lengths)
    return float(product_flops(cost, sum(lengths), frozen=frozen) + attention_flops(cost, squares))


def forward_flops(cost: ModelCost, lengths: Sequence[int]) -> float:
    return training_flops(cost, lengths) / 3


# The work of one step in tokens, from which memory and time are predicted.


@dataclass(frozen=True)
class StepWork:
    """The work of one step on all devices. A step of an offline run is one update without generation."""

    rows: int
    """Units that an update divides over the devices: sequences of an online run, rows of an offline run."""
    tokens: float
    """Tokens of all micro-batches. A prompt shared by packed responses counts once."""
    squares: float
    """Sum of S^2 over the sequences, excluding shared prefixes that are computed once."""
    whole: float
    """Tokens of all sequences, each with its prompt."""
    targets: float
    updates: int = 1
    epochs: int = 1
    prompts: int = 0
    samples: int = 0
    prompt_tokens: float = 0.0
    response_tokens: float = 0.0


class StepSource(Protocol):
    """Gives the work of a step. It may be called with changed recipe keys that do not change the training data."""

    def work(self, recipe: Recipe) -> StepWork: ...

    def longest(self, recipe: Recipe) -> int:
        """Micro-batch tokens of the longest row."""
        ...

    def rows(self, recipe: Recipe) -> int:
        """Sequences per update, each of at most `longest` tokens."""
        ...


class OfflineSteps:
    """StepSource of an offline run: updates of mean rows."""

    def __init__(self, prepared: Prepared):
        self.prepared = prepared
        # Keyed by (packed, sequences of a row share their prefix).
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
        # Padded rows have the width of the longest row of their micro-batch.
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
    """StepSource of an online run: prompts and responses of mean length."""

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
        """Responses of a group whose prompt is already in their packed row: all but one per packed row."""
        if recipe.batch.tokens is None or recipe.parallel.context_parallel > 1:
            return 0
        on_a_line = max(1, int((recipe.batch.tokens - self.prompt_tokens) // self.response_tokens))
        return recipe.rollout.n - -(-recipe.rollout.n // on_a_line)
