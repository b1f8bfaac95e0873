"""Builds micro-batches, packed up to a token budget or padded, balanced over devices; responses may share a prompt."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from lockstep.data.image_batch import image_inputs, images_to
from lockstep.device.base import sent
from lockstep.types import Example, Item, MicroBatch
from lockstep.vision.spans import same_images_up_to

# The cost of attention grows with length^2, that of the other operators with length. At a length of QUADRATIC_AT
# tokens, both costs are about equal.
QUADRATIC_AT = 4096


def cost(length: int) -> float:
    """Returns the relative compute cost of one sequence."""
    return length + length * length / QUADRATIC_AT


def plan_micro_batches(
    lengths: Sequence[int],
    *,
    devices: int,
    tokens: int | None,
    rows: int | None,
    counts: Sequence[int] | None = None,
) -> list[list[list[int]]]:
    """Returns the micro-batches of each device, as lists of row numbers.

    `counts` are the numbers of sequences of each entry of `lengths`, if an entry is a trajectory with several
    sequences, which stay in one micro-batch. A trajectory with more than `rows` sequences has its own micro-batch.

    Every device gets the same number of micro-batches, because sharded training needs all ranks in every forward pass.
    Micro-batches that run at the same time have about the same cost. With fewer rows than devices, some micro-batches
    are empty.
    """
    if tokens is not None:
        bins = _pack(lengths, devices, tokens)
    elif counts is not None and max(counts, default=1) > 1:
        bins = _chunk_trajectories(lengths, counts, devices, rows or 1)
    else:
        bins = _chunk(lengths, devices, rows or 1)
    # Sorted by cost, so that micro-batches of similar cost run at the same time on all devices.
    bins.sort(key=lambda members: -sum(cost(lengths[i]) for i in members))
    return [bins[device::devices] for device in range(devices)]


def _pack(lengths: Sequence[int], devices: int, tokens: int) -> list[list[int]]:
    """Puts each row, longest first, into the cheapest micro-batch with room; adds micro-batches if none has room."""
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    if lengths and max(lengths) > tokens:
        raise ValueError(f"a row of {max(lengths)} tokens does not fit into a micro-batch of {tokens} tokens")
    count = _round_up(max(1, -(-sum(lengths) // tokens)), devices)
    while True:
        bins: list[list[int]] = [[] for _ in range(count)]
        room, work = [tokens] * count, [0.0] * count
        for i in longest_first:
            fitting = [b for b in range(count) if room[b] >= lengths[i]]
            if not fitting:
                break
            chosen = min(fitting, key=lambda b: work[b])
            bins[chosen].append(i)
            room[chosen] -= lengths[i]
            work[chosen] += cost(lengths[i])
        else:
            return bins
        count += devices


def _chunk(lengths: Sequence[int], devices: int, rows: int) -> list[list[int]]:
    """Puts rows of similar length into one micro-batch, to reduce padding."""
    longest_first = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    count = _round_up(-(-len(lengths) // rows), devices)
    even = -(-len(lengths) // count)
    bins = [longest_first[start : start + even] for start in range(0, len(lengths), even)]
    return bins + [[] for _ in range(count - len(bins))]


def _chunk_trajectories(lengths: Sequence[int], counts: Sequence[int], devices: int, rows: int) -> list[list[int]]:
    """Puts trajectories of similar length into one micro-batch of at most `rows` sequences."""
    bins: list[list[int]] = []
    used = 0
    for i in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if not bins or used + counts[i] > rows:
            bins.append([])
            used = 0
        bins[-1].append(i)
        used += counts[i]
    return bins + [[] for _ in range(_round_up(max(len(bins), 1), devices) - len(bins))]


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def shared_beginnings(examples: Sequence[Example]) -> list[int]:
    """Returns for each example the length of the prefix that it shares with its head, an earlier example.

    The head is the nearest example before it that was packed in full length. The last token of an example is
    never shared.
    """
    head: Example | None = None
    shares = []
    for example in examples:
        before = head.ids if head is not None else ()
        most = max(0, min(len(before), len(example)) - 1)
        share = next((i for i in range(most) if before[i] != example.ids[i]), most)
        if head is not None and (head.images or example.images):
            share = same_images_up_to(head.images, example.images, share)
        shares.append(share)
        if not share:
            head = example
    return shares


def packed_tokens(item: Item) -> int:
    """Returns the number of tokens of an item's sequences in a packed row, where a shared prefix is stored once."""
    examples = item.examples
    if len(examples) == 1:
        return len(examples[0])
    return sum(len(example) for example in examples) - sum(shared_beginnings(examples))


def micro_batch(
    examples: Sequence[Example],
    *,
    packed: bool,
    pad_id: int,
    starts: Sequence[int] | None = None,
    shares: Sequence[int] | None = None,
    places: Sequence[int] | None = None,
) -> MicroBatch:
    """Builds the tensors of a micro-batch. A micro-batch without examples has one untrained token.

    `starts` has the index of each example's first target token among all targets of the update (default: among those of
    this micro-batch). `shares` has the number of leading tokens of each example that the packed row already contains
    (see `shared_beginnings`); padded rows share no tokens. `places` has the index of each example's first target among
    the targets of this rank. `places` is needed if the rank has only some of the targets.
    """
    if not examples:
        blank = torch.full((1, 1), pad_id)
        nothing = torch.empty(0, dtype=torch.long)
        return MicroBatch(blank, torch.zeros_like(blank), (1,), True, nothing, nothing, nothing)
    shares = shares or [0] * len(examples)
    batch = _packed(examples, shares) if packed else _padded(examples, pad_id)
    shares = shares if packed else [0] * len(examples)
    if any(example.images for example in examples):
        batch = replace(batch, images=image_inputs(examples, batch, shares))
    if any(example.routes is not None for example in examples):
        batch = replace(batch, routes_TLK=_routes(examples, shares, batch.input_ids_NT.shape[1], packed))
    if starts is not None:
        batch = replace(batch, index_K=_counted(starts, examples))
    return batch if places is None else replace(batch, local_index_K=_counted(places, examples))


def _routes(examples: Sequence[Example], shares: Sequence[int], width: int, packed: bool) -> torch.Tensor:
    """Returns the recorded experts of each position. Tokens without recorded experts, and padding, have -1."""
    parts = []
    for example, share in zip(examples, shares, strict=True):
        routes, (_, predictors, _) = example.routes, _numbers(example)
        least = int(predictors.max()) + 1 if len(predictors) else 0
        if routes is None or not least <= len(routes) <= len(example):
            found = 0 if routes is None else len(routes)
            why = f"the engine recorded the experts of {found} tokens, but {least} to {len(example)} are needed"
            raise ValueError(f"{example.origin}: {why}")
        full = np.full((len(example) if packed else width, *routes.shape[1:]), -1, dtype=np.int16)
        full[: len(routes)] = routes
        parts.append(full[share:])
    return _joined(parts)


def _counted(starts: Sequence[int], examples: Sequence[Example]) -> torch.Tensor:
    return torch.cat([torch.arange(start, start + e.targets) for start, e in zip(starts, examples, strict=True)])


def target_starts(examples: Sequence[Example]) -> list[int]:
    """Returns the index of each example's first target in the concatenated targets."""
    return [0, *accumulate(example.targets for example in examples)][:-1]


def _packed(examples: Sequence[Example], shares: Sequence[int]) -> MicroBatch:
    ids: list[np.ndarray] = []
    positions: list[np.ndarray] = []
    predictors: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    packed: list[np.ndarray] = []
    head = start = 0
    for example, share in zip(examples, shares, strict=True):
        if not share:
            head = start
        tokens, predicting, target_ids = _numbers(example)
        # Position of each token of the example in the packed row.
        where = np.arange(start - share, start - share + len(example))
        where[:share] = np.arange(head, head + share)
        ids.append(tokens[share:])
        positions.append(np.arange(share, len(example)))
        predictors.append(where[predicting])
        targets.append(target_ids)
        packed.append(where)
        start += len(example) - share
    batch = _assemble(
        _joined(ids)[None], _joined(positions)[None], examples, True, _joined(predictors), _joined(targets)
    )
    return replace(batch, packed_index_E=_joined(packed)) if any(shares) else batch


def _padded(examples: Sequence[Example], pad_id: int) -> MicroBatch:
    width = max(len(example) for example in examples)
    ids = np.full((len(examples), width), pad_id)
    predictors: list[np.ndarray] = []
    targets: list[np.ndarray] = []
    for row, example in enumerate(examples):
        tokens, predicting, target_ids = _numbers(example)
        ids[row, : len(tokens)] = tokens
        predictors.append(row * width + predicting)
        targets.append(target_ids)
    positions = torch.arange(width).repeat(len(examples), 1)
    return _assemble(torch.from_numpy(ids), positions, examples, False, _joined(predictors), _joined(targets))


def _joined(parts: Sequence[np.ndarray]) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts))


def _numbers(example: Example) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the token ids, the positions that predict a target, and the target ids at these positions."""
    ids = np.asarray(example.ids, dtype=np.int64)
    if type(example).scored_tokens is not Example.scored_tokens:
        pairs = np.asarray(example.scored_tokens(), dtype=np.int64).reshape(-1, 2)
        return ids, pairs[:, 0], pairs[:, 1]
    trained = example.loss_mask
    flags = np.frombuffer(trained, dtype=np.uint8) if isinstance(trained, bytes) else np.asarray(trained)
    positions = np.flatnonzero(flags[1:])
    return ids, positions, ids[positions + 1]


def _assemble(
    ids_NT: torch.Tensor,
    positions_NT: torch.Tensor,
    examples: Sequence[Example],
    packed: bool,
    predictors_K: torch.Tensor,
    targets_K: torch.Tensor,
) -> MicroBatch:
    return MicroBatch(
        input_ids_NT=ids_NT,
        position_ids_NT=positions_NT,
        lengths=tuple(len(example) for example in examples),
        packed=packed,
        predictors_K=predictors_K,
        targets_K=targets_K,
        index_K=torch.arange(len(targets_K)),
        origins=tuple(example.origin for example in examples),
    )


def to_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    return replace(
        batch,
        input_ids_NT=sent(batch.input_ids_NT, device),
        position_ids_NT=sent(batch.position_ids_NT, device),
        predictors_K=sent(batch.predictors_K, device),
        targets_K=sent(batch.targets_K, device),
        images=None if batch.images is None else images_to(batch.images, device),
        routes_TLK=None if batch.routes_TLK is None else sent(batch.routes_TLK, device),
    )


def own_part(batch: MicroBatch) -> MicroBatch:
    """Returns the part of a micro-batch that this rank runs: the full batch, or with context parallelism a slice."""
    return batch if batch.context is None else batch.context.local_part(batch)


def of_all(batch: MicroBatch, output: Any) -> Any:
    """Gathers the outputs of all context-parallel ranks into the output for all targets of the micro-batch."""
    return output if batch.context is None else batch.context.gather_outputs(output)


def run_on(module: nn.Module, batch: MicroBatch, device: torch.device) -> Any:
    """Runs a module on a micro-batch and returns the output for all targets of the micro-batch."""
    return of_all(batch, module(to_device(own_part(batch), device)))


# Responses to one prompt share the prompt: a packed row contains the prompt once, before its responses. `pack_groups`
# needs only the lengths, so packing can be planned before the responses are available.

# Some attention kernels need every sequence in full, including the prompt. The sum of the full lengths in a micro-batch
# is limited to MAX_FULL_LENGTHS times the token budget, which bounds the memory.
MAX_FULL_LENGTHS = 2


@dataclass(frozen=True)
class Outline:
    """The data of a response that the packing plan needs: the index of its prompt, and token counts. Responses to one
    prompt must be adjacent."""

    prompt: int
    length: int
    shared: int
    """Number of leading tokens that a packed row already contains if it has another response to the prompt."""
    further: tuple[int, ...] = ()
    """The lengths of the further sequences of a trajectory with several rows. They share the same leading tokens. All
    sequences of a trajectory are in one packed row."""

    @property
    def packed(self) -> int:
        """The number of tokens of all sequences of the response in a packed row without other responses."""
        return self.length + sum(length - self.shared for length in self.further)

    @property
    def full(self) -> int:
        """The sum of the lengths of all sequences of the response."""
        return self.length + sum(self.further)

    @property
    def longest(self) -> int:
        """The length of the longest sequence of the response."""
        return max(self.length, *self.further) if self.further else self.length


class PackedSequence(NamedTuple):
    """A response in a packed row: its index (`number`), and how many leading tokens it shares with an earlier response.
    `further` is the number of leading tokens that the further sequences of a trajectory share."""

    number: int
    shared: int
    further: int = 0


# The plan of a packed micro-batch: its responses, in order.
PackedRow = list[PackedSequence]


def pack_groups(
    responses: Sequence[Outline], shares: int, *, tokens: int, alike_up_to: int | None = None
) -> list[list[PackedRow]]:
    """Returns for each data-parallel rank its packed rows. There are `shares` ranks; a row has at most `tokens` tokens.

    A trajectory whose sequences have more than `tokens` tokens together has its own, longer row, because all sequences
    of a trajectory are in one row. If the responses to one prompt are split over several rows, each row contains the
    prompt.

    In sequences of up to `alike_up_to` tokens (None: of any length), the hidden states of a prefix do not depend on the
    sequence length. If the sequence of one response is longer than `alike_up_to`, the responses to its prompt do not
    share the prompt.
    """
    numbered = list(enumerate(_alike(responses, alike_up_to)))
    bins = _even(numbered, shares, tokens)
    bins.sort(key=lambda members: -sum(cost(length) for _, one in members for length in (one.length, *one.further)))
    return [[list(_packed_row(members)) for members in bins[share::shares]] for share in range(shares)]


def _alike(responses: Sequence[Outline], alike_up_to: int | None) -> Iterator[Outline]:
    for _, members in groupby(responses, key=lambda one: one.prompt):
        group = list(members)
        moves = alike_up_to is not None and max(one.longest for one in group) > alike_up_to
        yield from (replace(one, shared=0) for one in group) if moves else group


def common_prompt(group: Sequence[Example]) -> int:
    """Returns the length of the longest prefix that all examples share and that has no target."""
    if len(group) == 1:
        return 0
    head = group[0]
    prompt = min(_untrained(example) for example in group)
    if all(example.ids[:prompt] == head.ids[:prompt] and example.images == head.images for example in group):
        return min(prompt, *(_same_routes(head, example, prompt) for example in group[1:]))
    shared = min(prompt, *(shared_beginnings([head, example])[1] for example in group[1:]))
    return min(shared, *(_same_routes(head, example, shared) for example in group[1:]))


def _same_routes(one: Example, other: Example, most: int) -> int:
    """Returns how many of the first `most` tokens of two sequences have the same recorded experts. Tokens of other
    experts have other hidden states, so a packed row cannot share them. A group can have several versions of the
    weights, and an engine rounds differently if it computes a prompt again."""
    if one.routes is None or other.routes is None:
        return most
    length = min(most, len(one.routes), len(other.routes))
    differs = np.flatnonzero((one.routes[:length] != other.routes[:length]).any((1, 2)))
    return int(differs[0]) if len(differs) else length


def _untrained(example: Example) -> int:
    return example.loss_mask.index(1) if 1 in example.loss_mask else len(example) - 1


_Numbered = tuple[int, Outline]


def _packed_row(members: Sequence[_Numbered]) -> Iterator[PackedSequence]:
    """Yields the responses of a packed row. In a row, the first response to a prompt includes the prompt."""
    before: Outline | None = None
    for number, one in members:
        shared = one.shared if before is not None and before.prompt == one.prompt else 0
        yield PackedSequence(number, shared, one.shared if one.further else 0)
        before = one


def _even(responses: Sequence[_Numbered], devices: int, tokens: int) -> list[list[_Numbered]]:
    """Packs responses into as few rows as `tokens` allows: equally many rows per device, of about equal length."""
    longest = max(one.longest for _, one in responses)
    if longest > tokens:
        raise ValueError(f"a row of {longest} tokens does not fit into a micro-batch of {tokens} tokens")
    longest = max(one.packed for _, one in responses)
    tokens = max(tokens, longest)
    wanted = -(-len(_filled(responses, tokens, tokens)) // devices) * devices
    low, high = longest, tokens
    while low < high:
        middle = (low + high) // 2
        if len(_filled(responses, middle, tokens)) <= wanted:
            high = middle
        else:
            low = middle + 1
    bins = _filled(responses, high, tokens)
    return bins + [[] for _ in range(wanted - len(bins))]


def _filled(responses: Sequence[_Numbered], room: int, tokens: int) -> list[list[_Numbered]]:
    """Fills packed rows with the responses in order; starts a new row when the current row is full."""
    bins: list[list[_Numbered]] = []
    used = full = 0
    for number, one in responses:
        together = bins and bins[-1][-1][1].prompt == one.prompt
        added = one.packed - one.shared if together else one.packed
        if not bins or used + added > room or full + one.full > MAX_FULL_LENGTHS * tokens:
            bins.append([])
            used, full, added = 0, 0, one.packed
        bins[-1].append((number, one))
        used += added
        full += one.full
    return bins
