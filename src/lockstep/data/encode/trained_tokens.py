"""Tokenises a rendered chat and marks the trained tokens."""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from lockstep.data.encode.tokenizer_cache import as_array, token_facts, token_ids, token_ids_and_offsets, token_runs
from lockstep.types import Example, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Spans:
    """A rendered text and the character ranges of its trained messages, in order."""

    text: str
    trained: tuple[tuple[int, int], ...]
    marked: bool = False
    """Whether the template's generation markers delimit the ranges."""
    version: str = ""
    """Name of the built-in append-only template that rendered the text instead of the tokenizer's template."""


def encode_spans(tokenizer: PreTrainedTokenizerBase, spans: Spans, origin: Origin) -> tuple[Example, bool]:
    """Tokenises the text of `spans`; also returns whether the text was split at the borders of trained ranges.

    A prompt must have the same tokens in training as in generation. If a token of the full text crosses the border of a
    trained range, the pieces between the borders are therefore tokenised separately.
    """
    counted = _between_borders(tokenizer, spans)
    if counted is None:
        ids, trained, split = _by_offsets(tokenizer, spans)
    else:
        (ids, trained), split = counted, False
    _untrain_after_end(tokenizer, ids, trained)
    return Example(ids, bytes(trained), origin), split


def _between_borders(tokenizer: PreTrainedTokenizerBase, spans: Spans) -> tuple[array[int], bytearray] | None:
    """Returns the tokens and a trained flag per token; None if tokens cannot be counted per trained range."""
    text, borders = spans.text, [border for span in spans.trained for border in span]
    # Some tokenizers report no offset for a token of spaces, or add its range to the following token.
    if any(text[start - 1 : start] == " " for start in borders[::2]) or borders != sorted(borders):
        return None
    runs = token_runs(tokenizer, text, borders)
    if runs is None:
        return None
    ids = as_array(runs)
    flags = (bytes([number % 2]) * (len(run) // ids.itemsize) for number, run in enumerate(runs))
    return ids, bytearray(b"".join(flags))


def _by_offsets(tokenizer: PreTrainedTokenizerBase, spans: Spans) -> tuple[array[int], bytearray, bool]:
    """Returns the tokens, a trained flag per token (from token offsets), and whether the text was split."""
    ids, offsets = token_ids_and_offsets(tokenizer, spans.text)
    trained, split = _inside(offsets, spans.trained)
    if split:
        ids, trained = [], bytearray()
        borders = [0, *[border for span in spans.trained for border in span], len(spans.text)]
        for number, (start, end) in enumerate(itertools.pairwise(borders)):
            piece = token_ids(tokenizer, spans.text[start:end])
            ids += piece
            trained += bytes([number % 2]) * len(piece)
    return array("q", ids), trained, split


def _inside(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> tuple[bytearray, bool]:
    """Returns 1 for each token inside a trained range (else 0), and whether a token crosses the border of a range."""
    flat = np.fromiter(itertools.chain.from_iterable(offsets), np.int64, 2 * len(offsets))
    starts, ends = flat[0::2], flat[1::2]
    inside, across = np.zeros(len(starts), dtype=bool), False
    for first, last in spans:
        within = (starts >= first) & (ends <= last)
        across = across or bool(((starts < last) & (ends > first) & ~within).any())
        inside |= within
    return bytearray(inside.astype(np.uint8).tobytes()), across


def _untrain_after_end(tokenizer: PreTrainedTokenizerBase, ids: array[int], trained: bytearray) -> None:
    """Masks white space after the end token: templates add a line break there, but generation stops before it.

    White space after a special token inside a turn stays trained.
    """
    facts = token_facts(tokenizer)
    for ended in facts.where_special(ids):
        if trained[ended]:
            after = ended + 1
            while after < len(ids) and trained[after] and facts.blank(tokenizer, ids[after]):
                after += 1
            if after == len(ids) or not trained[after]:
                trained[ended + 1 : after] = bytes(after - ended - 1)


def special_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Returns the special tokens, such as end-of-turn and end-of-text."""
    return token_facts(tokenizer).special
