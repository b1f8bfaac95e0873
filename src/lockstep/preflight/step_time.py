"""Predicts the step time on a cluster from the roofline minimum, measured kernel efficiency and link bandwidth.

Each phase has times for compute, for collectives between devices, and for copies to and from the host. How much of the
collectives and copies overlaps with compute is unknown before a run, so the predicted step time is a range.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from lockstep.model.load_folder import DTYPES
from lockstep.model.router import experts_of_token
from lockstep.model.text_model import text_sizes
from lockstep.parallel.sharding import grid_of
from lockstep.preflight.batch_plan import logprob_limit, old_needed
from lockstep.preflight.cluster import (
    Members,
    ModelCost,
    StepWork,
    TargetCluster,
    attention_flops,
    cache_seconds,
    weights_seconds,
)
from lockstep.preflight.model_sizes import Counted, LayerKernels, activation_bytes, kept_by_layer
from lockstep.recipe import Recipe
from lockstep.recipe.method_checks import reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import estimator_row


class Traffic(NamedTuple):
    """The bytes that a device receives over its links in a step, by type of collective."""

    gathered: float = 0.0
    scattered: float = 0.0
    summed: float = 0.0
    exchanged: float = 0.0

    def __add__(self, other: object) -> Traffic:
        assert isinstance(other, Traffic)
        return Traffic(*(a + b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class PhaseTime:
    """The seconds of one phase of a step, by what they are spent on."""

    name: str
    computing: float = 0.0
    waiting: float = 0.0
    """The seconds of collectives in the middle of a layer, which cannot overlap with compute."""
    links: float = 0.0
    host: float = 0.0
    tail: float = 0.0
    """The seconds from the end of all other responses to the end of one response of maximum length."""
    traffic: Traffic = field(default_factory=Traffic)

    @property
    def open(self) -> float:
        """The upper bound of the seconds: nothing overlaps, and one response reaches the length limit."""
        return self.computing + self.waiting + self.links + self.host + self.tail

    @property
    def hidden(self) -> float:
        """The lower bound of the seconds: communication fully overlaps with compute, and all responses end together. In
        the phase generate nothing overlaps, because weights are gathered before generation starts."""
        if self.name == "generate":
            return self.open - self.tail
        return max(self.computing + self.waiting, self.links + self.host)


@dataclass(frozen=True)
class ModelCosts:
    """The cost of the policy, its parameter counts, and the cost of the reference or teacher, which may be another
    model."""

    config: Any
    cost: ModelCost
    counted: Counted
    frozen: ModelCost


class StepTimes:
    """Predicts the time of each phase of a step for a recipe on a cluster."""

    def __init__(
        self, recipe: Recipe, models: ModelCosts, work: StepWork, cluster: TargetCluster, kernels: LayerKernels
    ):
        self.recipe, self.models, self.work, self.cluster, self.kernels = recipe, models, work, cluster, kernels
        self.chip, self.size = cluster.chip, DTYPES[recipe.model.dtype].itemsize
        flops = self.chip.flops(self.size)
        assert flops is not None, "the chip table has no FLOP/s for this dtype"
        self.flops, self.memory = flops, self.chip.memory_speed
        self.grid = grid_of(recipe.parallel, cluster.devices)
        # The ranks of a tensor-parallel group are consecutive. Parameters are sharded over the ranks that have the same
        # position in their tensor-parallel groups.
        self.tensor, self.pieces = cluster.neighbours(self.grid.tensor), self.grid.shard * self.grid.tensor
        self.slices = cluster.apart(self.grid.shard, self.grid.tensor)
        self.every = cluster.neighbours(self.pieces)
        # The ranks that exchange tokens, and those among which the experts of a rank are sharded.
        self.peers = cluster.apart(self.grid.expert, self.grid.tensor)
        self.holders = cluster.apart(self.grid.shard // self.grid.expert, self.grid.expert * self.grid.tensor)
        self.copies = cluster.apart(self.grid.replicate, self.pieces)
        self.context = recipe.parallel.context_parallel
        self.groups = cluster.devices // recipe.parallel.group
        cost = models.cost
        # The fraction of the weights (without the output head) that tensor parallelism divides.
        self.divided = min(1.0, models.counted.divided / (cost.read - cost.head))
        self.experts = min(1.0, models.counted.experts / (cost.read - cost.head))
        # The device with the most rows determines the time of an update. Context parallelism divides each row over
        # several devices.
        rows = max(1, work.rows // work.updates)
        self.share = -(-rows // self.groups) / rows / self.context

    # -- phases

    def phases(self) -> list[PhaseTime]:
        recipe, online = self.recipe, self.recipe.method in ONLINE
        found = [self.generate()] if online else []
        asked = reference_kind(recipe) in ("model", "adapter")
        if asked or (recipe.distill.teacher is not None and recipe.distill.top_k is None):
            found.append(self.reference())
        if online and (old_needed(recipe, self.work.updates) or logprob_limit(recipe) is not None):
            found.append(replace(self.scored(self.models.cost), name="old probs"))
        critic = online and estimator_row(recipe.algorithm.advantage).critic
        if critic:
            found.append(replace(self.scored(self.models.cost, head=False), name="values"))
        found.append(self.update())
        if critic:
            found.append(replace(self.update(head=False), name="critic"))
        return found

    def generate(self) -> PhaseTime:
        work, cost, counted = self.work, self.models.cost, self.models.counted
        asked = -(-work.prompts // (self.cluster.devices // self.grid.tensor))
        sequences = asked * work.samples
        batch = min(sequences, self.recipe.rollout.max_sequences)
        step = self._decoding(batch, work.prompt_tokens + work.response_tokens / 2)
        prompts = asked * work.prompt_tokens
        prefill = self._pass(cost, prompts, asked * work.prompt_tokens**2, asked) / 3
        decoding = -(-sequences // batch) * work.response_tokens * step
        sums = self._sums(prompts + sequences * work.response_tokens)
        left = max(0.0, self.recipe.rollout.max_tokens - work.response_tokens)
        whole = self._gathering(counted.parameters, counted.divided, self.size)
        return PhaseTime(
            "generate",
            prefill + decoding,
            sums.waiting,
            whole.links,
            tail=left
            * (self._decoding(1, work.prompt_tokens + self.recipe.rollout.max_tokens) + self._sums(1).waiting),
            traffic=whole.traffic + sums.traffic,
        )

    def _decoding(self, batch: int, context: float) -> float:
        """Returns the seconds of one decode step for `batch` sequences."""
        cost, reached = self._part_of(self.models.cost), self.chip.reached
        return (
            weights_seconds(cost, batch, self.flops * reached.decoding, self.memory, self.size)
            + cache_seconds(cost, batch, context, self.memory * reached.reading, self.size)
            + cost.layers * reached.layer_seconds
            + self._dequantising()
        )

    def reference(self) -> PhaseTime:
        found = self.scored(self.models.frozen)
        settings, counted = self.recipe.parallel, self.models.counted
        moved = settings.offload_reference or settings.offload_teacher
        once = sum(counted.frozen.values()) * self.size / self.pieces / self.chip.host
        return replace(found, name="reference", host=once if moved else 0.0)

    def scored(self, cost: ModelCost, *, head: bool = True) -> PhaseTime:
        """Returns the time of a forward pass over all sequences of a step."""
        work, updates = self.work, self.work.updates
        tokens, squares, targets = self._shares()
        micro = self.micro_batches
        computing = self._pass(cost, tokens, squares, targets if head else 0) / 3 * updates
        inside = cost.read - cost.head
        divided, experts = self.divided * inside, self.experts * inside
        whole = self._gathering(cost.read, divided, self.size * micro * updates, experts)
        cut = self._cut_sequences(work.tokens * self.share, backward=False)
        sums, sent = self._sums(work.tokens * self.share), self._dispatching(work.tokens * self.share)
        traffic = whole.traffic + cut.traffic + sums.traffic + sent.traffic
        return PhaseTime("", computing, sums.waiting + sent.waiting, whole.links + cut.links, traffic=traffic)

    def update(self, *, head: bool = True) -> PhaseTime:
        recipe, counted, cost = self.recipe, self.models.counted, self.models.cost
        times, micro = self.work.updates * self.work.epochs, self.micro_batches
        tokens, squares, targets = self._shares()
        frozen = recipe.model.lora is not None
        passes = self._pass(cost, tokens, squares, targets if head else 0, frozen=frozen)
        if recipe.model.gradient_checkpointing:
            passes += self._pass(cost, tokens, squares, 0) / 3
        elif self.kernels.tiles(_up(tokens / micro)):
            passes += self._feed_forwards(tokens)
        passes += micro * self._dequantising() * (3 if recipe.model.gradient_checkpointing else 2)
        masters = bool(recipe.model.master_weights)
        own = counted.trained / self.pieces
        # The optimizer reads the gradient, reads and writes its state, and writes the weight. Without master weights,
        # it also reads the weight.
        state = counted.state_bytes(recipe) / self.pieces
        moved = 2 * state + own * (4 + self.size if masters else 3 * self.size)
        adamw = moved / self.memory * self.chip.reached.optimizer_passes
        # If an update has several micro-batches, their gradients are accumulated in fp32.
        adding = micro * own * (8 + self.size) / self.memory if micro > 1 else 0.0
        # The weights of a layer are gathered before its forward pass and again before its backward pass. Gradients are
        # reduced in fp32.
        whole = self._gathering(counted.parameters, counted.divided, 2 * self.size * micro, counted.experts)
        # Tensor parallelism of an adapter is ignored, because adapters are small.
        divided, experts = (0, 0) if frozen else (counted.divided, counted.experts)
        back = self._gathering(counted.trained, divided, 4 * micro, experts)
        slice_bytes = own * 4 * micro
        cut = self._cut_sequences(tokens, backward=True)
        passed = 3 if recipe.model.gradient_checkpointing else 2
        sums, sent = self._sums(tokens, times=passed), self._dispatching(tokens, times=passed)
        links = whole.links + back.links + self.cluster.sum_seconds(slice_bytes, self.copies) + cut.links
        traffic = cut.traffic + sums.traffic + sent.traffic + whole.traffic
        traffic += Traffic(scattered=back.traffic.gathered, summed=2 * _others(slice_bytes, self.copies))
        host = (self._host_bytes(own, micro, state) + self._activations(tokens)) / self.chip.host
        all_traffic = Traffic(*(times * part for part in traffic))
        computing = times * (passes + adding + adamw)
        waiting = times * (sums.waiting + sent.waiting)
        return PhaseTime("update", computing, waiting, times * links, times * host, traffic=all_traffic)

    # -- parts

    @property
    def micro_batches(self) -> int:
        """The number of micro-batches of an update on each device."""
        work, batch = self.work, self.recipe.batch
        budget = self.recipe.line_tokens
        if budget is None:
            rows = -(-max(1, work.rows // work.updates) // self.groups)
            return -(-rows // (batch.micro_batch_size or rows))
        lines, whole = (part / work.updates / self.groups / budget for part in (work.tokens, work.whole))
        # If responses share a prompt, their sequences (each with its prompt) have at most twice the token budget of a
        # micro-batch. See `data/batching.py`.
        return max(1, _up(lines), _up(whole / 2))

    def _shares(self) -> tuple[float, float, float]:
        """Returns the tokens, the sum of squared lengths and the target tokens of an update on one device."""
        part = self.share / self.work.updates
        return self.work.tokens * part, self.work.squares * part, self.work.targets * part

    def _pass(self, cost: ModelCost, tokens: float, squares: float, targets: float, *, frozen: bool = False) -> float:
        """Returns the seconds of forward and backward. The forward pass takes a third of this time. The output head
        computes logits only for target tokens."""
        reached, cost = self.chip.reached, self._part_of(cost)
        multiplied = (cost.multiplied - cost.head) * tokens + cost.head * targets
        kept = activation_bytes(self.models.config, 1, self.size, False, self.kernels, tensor=self.grid.tensor) * tokens
        return (
            (4 if frozen else 6) * multiplied / self.flops
            + attention_flops(cost, squares) / self.flops / reached.attention_at(squares / max(1.0, tokens))
            + reached.layer_passes * kept / self.memory
            + reached.head_passes * 4 * cost.vocabulary * targets / self.memory
        )

    def _dequantising(self) -> float:
        """Returns the seconds in which all quantised weights are dequantised once: codes are read, and weights are
        written and read again. In the updates lora-7b, qlora-7b and int8-7b of bench/results/low_memory_h200.json, this
        takes 0.09 and 0.11 s, and the difference was 0.17 and 0.06 s."""
        if self.recipe.model.quantize is None:
            return 0.0
        codes = 0.5 if self.recipe.model.quantize == "nf4" else 1.0
        return (codes + 2 * self.size) * self.models.cost.read / self.grid.tensor / self.memory

    def _feed_forwards(self, tokens: float) -> float:
        """Returns the seconds in which feed-forwards in tiles are computed once more. With checkpointing, they are part
        of the recomputed layers."""
        hidden, inner, *_, layers, _ = text_sizes(self.models.config)
        return 2 * 3 * hidden * inner * layers / self.grid.tensor * tokens / self.flops

    def _part_of(self, cost: ModelCost) -> ModelCost:
        """Returns the sizes of the model part on one tensor-parallel rank: the full output head, and this rank's
        attention heads and feed-forward columns."""
        count = self.grid.tensor
        left = 1 - self.divided + self.divided / count
        return replace(
            cost,
            multiplied=cost.head + round((cost.multiplied - cost.head) * left),
            read=cost.head + round((cost.read - cost.head) * left),
            attended=cost.attended // count,
            cached=cost.cached // count,
        )

    def _gathering(self, parameters: float, divided: float, each: float, experts: float = 0.0) -> PhaseTime:
        """Returns the time of an all-gather of parameters of `each` bytes. Parameters that tensor parallelism divides
        are gathered over the shard group, and experts that expert parallelism divides over the ranks with the same
        experts. All other parameters are gathered over the shard and tensor groups."""
        held = experts / self.grid.tensor / self.grid.expert * each
        # Tensor parallelism divides the experts too.
        apart, whole = (experts, 0.0) if self.grid.tensor > 1 else (0.0, experts)
        part, rest = (divided - apart) / self.grid.tensor * each, (parameters - divided - whole) * each
        groups = [(part, self.slices), (rest, self.every), (held, self.holders)]
        seconds = sum(self.cluster.gather_seconds(size, group) for size, group in groups)
        return PhaseTime("", links=seconds, traffic=Traffic(sum(_others(size, group) for size, group in groups)))

    def _dispatching(self, tokens: float, *, times: int = 1) -> PhaseTime:
        """Returns the time of the all-to-alls that send tokens to the ranks of their experts and back, if the experts
        have equally many tokens. `times` is that of `_sums`."""
        if self.grid.expert == 1:
            return PhaseTime("")
        chosen, hidden = experts_of_token(self.models.config) or 1, text_sizes(self.models.config).hidden
        rows = tokens * chosen / self.grid.tensor * self.models.counted.expert_layers
        sent = 2 * times * _others(rows * hidden * self.size, self.peers)
        seconds = self.cluster.exchange_seconds(sent, self.peers)
        return PhaseTime("", waiting=seconds, traffic=Traffic(exchanged=sent))

    def _sums(self, tokens: float, *, times: int = 1) -> PhaseTime:
        """Returns the time of the tensor-parallel all-reduces of the outputs of attention and feed-forward in each
        layer. `times` is 1 for a forward pass, 2 with the backward pass, and 3 with checkpointing. Latency is
        excluded."""
        if self.grid.tensor == 1:
            return PhaseTime("")
        hidden = text_sizes(self.models.config).hidden
        whole = 2 * times * self.models.cost.layers * tokens * hidden * self.size
        seconds = self.cluster.sum_seconds(whole, self.tensor)
        return PhaseTime("", waiting=seconds, traffic=Traffic(summed=2 * _others(whole, self.tensor)))

    def _cut_sequences(self, tokens: float, *, backward: bool) -> PhaseTime:
        """Returns the communication time of context-parallel attention for `tokens` tokens per device.

        The forward pass sends keys and values, and with ulysses also queries and outputs. The backward pass sends the
        same tensors again. With layouts other than ulysses, the backward pass also sends the gradients of keys and
        values in fp32.
        """
        count = self.context
        if count == 1:
            return PhaseTime("")
        group, cost = self.cluster.neighbours(count), self.models.cost
        layout = self.recipe.parallel.context_layout
        if layout == "ulysses":
            sent = (2 * cost.attended + cost.cached) * tokens * self.size * (count - 1) / count * (2 if backward else 1)
            seconds = self.cluster.exchange_seconds(sent, group)
            return PhaseTime("", links=seconds, traffic=Traffic(exchanged=sent))
        once = cost.cached * tokens * self.size * (count - 1)
        gradients = cost.cached * tokens * 4 * (count if layout == "zigzag" else count - 1)
        sent = 2 * once + gradients if backward else once
        if layout == "zigzag":
            return PhaseTime("", links=self.cluster.exchange_seconds(sent, group), traffic=Traffic(exchanged=sent))
        seconds = self.cluster.gather_seconds(sent * count / (count - 1), group)
        back = gradients if backward else 0.0
        return PhaseTime("", links=seconds, traffic=Traffic(gathered=sent - back, scattered=back))

    def _host_bytes(self, own: float, micro: int, state: float) -> float:
        """Returns the bytes that parameter and optimizer offload copies to and from the host in an update."""
        offload, found = self.recipe.parallel.offload, 0.0
        if offload in ("optimizer", "all"):
            found += 2 * state
        if offload in ("params", "all"):
            found += micro * (2 * self.models.counted.parameters * self.size / self.pieces + 4 * own)
        return found

    def _activations(self, tokens: float) -> float:
        """Returns the bytes that activation offload copies to the host and back in an update, for all layers except the
        last."""
        model, config = self.recipe.model, self.models.config
        if not model.activation_offload:
            return 0.0
        how = (self.size, model.gradient_checkpointing, self.kernels)
        return 2 * (text_sizes(config).layers - 1) * kept_by_layer(config, int(tokens), *how, tensor=self.grid.tensor)


def _others(whole: float, group: Members) -> float:
    """Returns how many of the `whole` bytes of a sharded tensor are on the other ranks of a group."""
    return whole * (group.size - 1) / group.size


def _up(number: float) -> int:
    return int(number) + (number > int(number))
