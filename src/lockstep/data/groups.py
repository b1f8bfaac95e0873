"""Responses to one prompt in micro-batches: on a packed line the prompt stands once before all of its responses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lockstep.data.batching import cost, micro_batch, shared_beginnings, target_starts
from lockstep.parallel.world import World
from lockstep.types import Example, MicroBatch

# Attention may need every sequence whole, the prompt with it: a micro-batch holds no more of them than fill its budget
# so many times, however much they share. Memory then stays what the budget says.
MOST_WHOLE = 2


@dataclass(frozen=True)
class _Member:
    number: int
    group: int
    length: int
    shared: int
    """Tokens that stand on the line already where another response of the group is on it."""


def arrange_groups(
    groups: Sequence[Sequence[Example]], world: World, *, tokens: int, pad_id: int, alike_up_to: int | None = None
) -> list[MicroBatch]:
    """This rank's micro-batches of at most `tokens` tokens. A group may be cut: every part has the prompt once.

    Up to `alike_up_to` tokens (None: always) a beginning is the same whatever follows it; groups with a longer sequence
    share nothing.
    """
    examples = [example for group in groups for example in group]
    starts, responses = target_starts(examples), _responses(groups, alike_up_to)
    bins = _even(responses, world.shares, tokens)
    bins.sort(key=lambda members: -sum(cost(one.length) for one in members))
    return [
        micro_batch(
            [examples[one.number] for one in members],
            packed=True,
            pad_id=pad_id,
            starts=[starts[one.number] for one in members],
            shares=list(_shares(members)),
        )
        for members in bins[world.share :: world.shares]
    ]


def _responses(groups: Sequence[Sequence[Example]], alike_up_to: int | None) -> list[_Member]:
    found: list[_Member] = []
    for number, group in enumerate(groups):
        moves = alike_up_to is not None and max(len(example) for example in group) > alike_up_to
        shared = 0 if moves else common_prompt(group)
        found += [_Member(len(found) + i, number, len(example), shared) for i, example in enumerate(group)]
    return found


def common_prompt(group: Sequence[Example]) -> int:
    """Tokens that all examples begin with, none of them asked for."""
    if len(group) == 1:
        return 0
    head = group[0]
    prompt = min(_untrained(example) for example in group)
    if all(example.ids[:prompt] == head.ids[:prompt] for example in group):
        return prompt
    return min(prompt, *(shared_beginnings([head, example])[1] for example in group[1:]))


def _untrained(example: Example) -> int:
    return example.trained.index(1) if 1 in example.trained else len(example) - 1


def _shares(members: Sequence[_Member]) -> Iterator[int]:
    """A group's first response on the line brings the prompt."""
    before: _Member | None = None
    for one in members:
        yield one.shared if before is not None and before.group == one.group else 0
        before = one


def _even(responses: Sequence[_Member], devices: int, tokens: int) -> list[list[_Member]]:
    """As few lines as `tokens` allows, as many on every device, and all about equally long."""
    if max(one.length for one in responses) > tokens:
        raise ValueError(f"a row of {max(one.length for one in responses)} tokens fits no micro-batch of {tokens}")
    wanted = -(-len(_filled(responses, tokens, tokens)) // devices) * devices
    low, high = max(one.length for one in responses), tokens
    while low < high:
        middle = (low + high) // 2
        if len(_filled(responses, middle, tokens)) <= wanted:
            high = middle
        else:
            low = middle + 1
    bins = _filled(responses, high, tokens)
    return bins + [[] for _ in range(wanted - len(bins))]


def _filled(responses: Sequence[_Member], room: int, tokens: int) -> list[list[_Member]]:
    """One response after another, on the same line while it has room."""
    bins: list[list[_Member]] = []
    used = whole = 0
    for one in responses:
        together = bins and bins[-1][-1].group == one.group
        own = one.length - one.shared if together else one.length
        if not bins or used + own > room or whole + one.length > MOST_WHOLE * tokens:
            bins.append([])
            used, whole, own = 0, 0, one.length
        bins[-1].append(one)
        used += own
        whole += one.length
    return bins
