"""Rows that say which response is better: pairs, and rankings of several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.data.columns import ColumnFinder, filled, lookup
from lockstep.data.completions import ResponseEncoder
from lockstep.data.dataset import Kept
from lockstep.data.dialogue import divide
from lockstep.data.encoding import Encoding, last_trained
from lockstep.data.fit import fit_responses, refuse_equal
from lockstep.errors import Refusal
from lockstep.types import Example, Origin, Probe, Ranking, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Read = Literal["response", "score"]
SCORES_OF_PAIR = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))


@dataclass(frozen=True)
class RankingColumns:
    """Where the parts of a row are; empty strings where it has no such part. Either a pair or a list of responses."""

    prompt: str
    chosen: str = ""
    rejected: str = ""
    margin: str = ""
    scores_of_pair: tuple[str, str] | None = None
    responses: str = ""
    scores: str = ""


def find_ranking_columns(finder: ColumnFinder) -> RankingColumns:
    """Pairs where there are both sides of one (or a setting names one), else lists of responses."""
    prompt = finder.prompt()
    pair = find_pair_columns(finder)
    responses = finder.find("responses_key", ("responses",))
    wants_list = bool(finder.setting("responses_key")) and not finder.setting("chosen_key")
    if pair and not wants_list:
        return pair
    if responses:
        return RankingColumns(prompt, responses=responses, scores=finder.find("scores_key", ("scores",)))
    raise finder.unknown(
        "hold the preferences",
        "set data.chosen_key and data.rejected_key, or data.responses_key, and data.prompt_key",
    )


def find_pair_columns(finder: ColumnFinder) -> RankingColumns | None:
    """The columns of a pair, None where a side is missing."""
    chosen, rejected = finder.find("chosen_key", ("chosen",)), finder.find("rejected_key", ("rejected",))
    if not (chosen and rejected):
        return None
    margin, scores = finder.find("margin_key", ("margin",)), finder.known_pair(SCORES_OF_PAIR)
    return RankingColumns(finder.prompt(), chosen, rejected, margin, scores)


class RankingRows:
    """The rows of one source as rankings. `read` is what the model gives of a response: its log-probability, token by
    token, or a score at the last token of the text. Without `several` a row has two responses."""

    def __init__(
        self, finder: ColumnFinder, tokenizer: PreTrainedTokenizerBase, limit: int, *, read: Read, several: bool
    ):
        self.columns, self.limit, self.overlong = find_ranking_columns(finder), limit, finder.data.overlong
        self.read, self.several = read, several
        self.encode = ResponseEncoder(Encoding(tokenizer, finder.data, learned=read == "response"))

    @property
    def split_rows(self) -> int:
        return self.encode.split_rows

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Ranking] | None]:
        columns = self.columns
        names, responses = responses_of(row, columns, origin)
        if len(responses) > 2 and not self.several:
            raise Refusal.at(
                origin, f"has {len(responses)} responses, and this method compares two", "write it as pairs"
            )
        margin = _margin(row, columns, origin, used=self.read == "score")
        prompt = filled(row, columns.prompt, origin) if columns.prompt else None
        beginning, answers = divide(prompt, responses, names, origin)
        whole = self.encode(beginning, answers, origin)
        refuse_equal(whole, names)
        fitted = fit_responses(whole, names, self.limit, self.overlong)
        if fitted is None:
            return [None]
        truncated = any(len(short) < len(long) for short, long in zip(fitted, whole, strict=True))
        if self.read == "score":
            return [Kept.of(Ranking(tuple(map(_scored_at_the_end, fitted)), margin), truncated)]
        return [Kept.of(Ranking(tuple(fitted)), truncated, tuple(map(last_trained, whole)))]

    def found(self) -> str:
        columns = self.columns
        prompt = columns.prompt or "the prompt is what the responses begin with"
        if columns.responses:
            order = f"by {columns.scores}" if columns.scores else "best first"
            return f"rankings ({prompt}, {columns.responses}; {order})"
        margin = columns.margin or " - ".join(columns.scores_of_pair or ())
        if self.read == "score":
            said = f"; margin from {margin}" if margin else ""
        else:
            said = f"; the margin ({margin}) is not used" if margin else ""
        return f"{'prompt/' if columns.prompt else ''}chosen/rejected pairs ({prompt}, {pair_names(columns)}{said})"


def pair_names(columns: RankingColumns) -> str:
    return f"{columns.chosen}, {columns.rejected}"


def responses_of(row: Row, columns: RankingColumns, origin: Origin) -> tuple[list[str], list[Any]]:
    """The responses, best first, and what to call each of them."""
    if not columns.responses:
        keys = [columns.chosen, columns.rejected]
        refuse_swapped(row, columns, origin)
        return keys, [lookup(row, key, origin) for key in keys]
    responses = lookup(row, columns.responses, origin)
    if not isinstance(responses, list) or len(responses) < 2:
        raise Refusal.at(
            origin, f"{columns.responses} must be a list of two or more responses", "mend or remove the row"
        )
    names = [f"{columns.responses}.{i}" for i in range(len(responses))]
    if not columns.scores:
        return names, responses
    order = _best_first(row, columns, len(responses), origin)
    return [names[i] for i in order], [responses[i] for i in order]


def refuse_swapped(row: Row, columns: RankingColumns, origin: Origin) -> None:
    """Scores that contradict the columns' names mean that somebody mixed the sides up."""
    if columns.scores_of_pair is None:
        return
    better, worse = (lookup(row, key, origin) for key in columns.scores_of_pair)
    if _is_number(better) and _is_number(worse) and better < worse:
        raise Refusal.at(
            origin,
            f"{columns.scores_of_pair[0]} {better} is below {columns.scores_of_pair[1]} {worse}: the sides are swapped",
            "swap the responses, or mend the scores",
        )


def _best_first(row: Row, columns: RankingColumns, count: int, origin: Origin) -> list[int]:
    scores = lookup(row, columns.scores, origin)
    if not isinstance(scores, list) or not all(_is_number(score) and math.isfinite(score) for score in scores):
        raise Refusal.at(origin, f"{columns.scores} must be a list of finite numbers", "mend or remove the row")
    if len(scores) != count:
        raise Refusal.at(origin, f"has {count} responses and {len(scores)} scores", "give each response its score")
    if len(set(scores)) < count:
        raise Refusal.at(
            origin,
            f"{columns.scores} holds equal scores, which do not say which response is better",
            "keep one of the responses with equal scores",
        )
    return sorted(range(count), key=lambda i: -scores[i])


def _margin(row: Row, columns: RankingColumns, origin: Origin, *, used: bool) -> float:
    if not used or not (columns.margin or columns.scores_of_pair):
        return 0.0
    if columns.margin:
        margin = _finite(lookup(row, columns.margin, origin), columns.margin, origin)
    else:
        better, worse = (_finite(lookup(row, key, origin), key, origin) for key in columns.scores_of_pair or ())
        margin = better - worse
    if margin < 0 or not math.isfinite(margin):
        raise Refusal.at(
            origin, f"a margin of {margin} asks that the rejected response wins", "swap the responses or mend it"
        )
    return margin


def _finite(value: Any, key: str, origin: Origin) -> float:
    if not _is_number(value) or not math.isfinite(value):
        raise Refusal.at(origin, f"{key} is {value!r}, not a finite number", "mend or remove the row")
    return float(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scored_at_the_end(example: Example) -> Probe:
    return Probe(example.ids, bytes(len(example)), example.origin, positions=(len(example) - 1,))
