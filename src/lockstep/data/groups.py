"""Responses to one prompt in micro-batches: on a packed line the prompt stands once before all of its responses.

What goes where is settled from lengths alone (`lay_groups`), so that it is known before the responses are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from lockstep.data.batching import cost, shared_beginnings
from lockstep.types import Example

# Attention may need every sequence whole, the prompt with it: a micro-batch holds no more of them than fill its budget
# so many times, however much they share. Memory then stays what the budget says.
MOST_WHOLE = 2


@dataclass(frozen=True)
class Outline:
    """A response as far as its place depends on it. Those to one prompt have its number and stand together."""

    prompt: int
    length: int
    shared: int
    """Tokens that stand on the line already where another response to the prompt is on it."""


class Laid(NamedTuple):
    """A response on a line: its number, and how many of its tokens stand there already."""

    number: int
    shared: int


# A micro-batch before it is made.
LaidLine = list[Laid]


def lay_groups(
    responses: Sequence[Outline], shares: int, *, tokens: int, alike_up_to: int | None = None
) -> list[list[LaidLine]]:
    """For each share its lines of at most `tokens` tokens. A group may be cut: every part has the prompt once.

    Up to `alike_up_to` tokens (None: always) a beginning is the same whatever follows it; groups with a longer sequence
    share nothing.
    """
    numbered = list(enumerate(_alike(responses, alike_up_to)))
    bins = _even(numbered, shares, tokens)
    bins.sort(key=lambda members: -sum(cost(one.length) for _, one in members))
    return [[list(_line(members)) for members in bins[share::shares]] for share in range(shares)]


def _alike(responses: Sequence[Outline], alike_up_to: int | None) -> Iterator[Outline]:
    for _, members in groupby(responses, key=lambda one: one.prompt):
        group = list(members)
        moves = alike_up_to is not None and max(one.length for one in group) > alike_up_to
        yield from (replace(one, shared=0) for one in group) if moves else group


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


_Numbered = tuple[int, Outline]


def _line(members: Sequence[_Numbered]) -> Iterator[Laid]:
    """A group's first response on the line brings the prompt."""
    before: Outline | None = None
    for number, one in members:
        yield Laid(number, one.shared if before is not None and before.prompt == one.prompt else 0)
        before = one


def _even(responses: Sequence[_Numbered], devices: int, tokens: int) -> list[list[_Numbered]]:
    """As few lines as `tokens` allows, as many on every device, and all about equally long."""
    longest = max(one.length for _, one in responses)
    if longest > tokens:
        raise ValueError(f"a row of {longest} tokens fits no micro-batch of {tokens}")
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
    """One response after another, on the same line while it has room."""
    bins: list[list[_Numbered]] = []
    used = whole = 0
    for number, one in responses:
        together = bins and bins[-1][-1][1].prompt == one.prompt
        own = one.length - one.shared if together else one.length
        if not bins or used + own > room or whole + one.length > MOST_WHOLE * tokens:
            bins.append([])
            used, whole, own = 0, 0, one.length
        bins[-1].append((number, one))
        used += own
        whole += one.length
    return bins
