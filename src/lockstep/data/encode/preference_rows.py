"""Preference rows: pairs and rankings of responses."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from lockstep.data.encode.builtin_templates import version_note
from lockstep.data.encode.columns import NO_EXTRA_COLUMNS, ColumnFinder, ExtraColumns, filled, lookup
from lockstep.data.encode.dialogue import Turns, as_turns, divide
from lockstep.data.encode.encoding import Encoding, fit_responses, last_trained, refuse_equal
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.responses import DIALOGUES, ResponseEncoder, ResponseRows
from lockstep.data.row_reader import Kept
from lockstep.errors import Refusal
from lockstep.types import Example, Origin, Ranking, Row, ScoredExample

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Keys of an object with a response and its score (UltraFeedback), in order of preference.
TEXTS = ("response", "text", "content", "completion")
SCORES = ("overall_score", "score", "rating", "reward")


@dataclass(frozen=True)
class RankedResponses:
    """The responses to one prompt with their names, best first. `alike` is the number of responses dropped because
    another response has the same score."""

    names: list[str]
    responses: list[Any]
    alike: int = 0


def is_objects(responses: Sequence[Any]) -> bool:
    """Returns whether each response is an object that is not a chat message."""
    return all(isinstance(one, dict) and "role" not in one and "from" not in one for one in responses)


def of_objects(responses: Sequence[dict[str, Any]], column: str, origin: Origin) -> tuple[list[Any], list[Any], str]:
    """Splits response objects into texts and scores. Also returns the key (such as `score`) under which the objects
    store their scores."""
    text = next((key for key in TEXTS if all(isinstance(one.get(key), str) for one in responses)), None)
    score = next((key for key in SCORES if all(is_number(one.get(key)) for one in responses)), None)
    if text is None or score is None:
        missing = f"a text ({', '.join(TEXTS)})" if text is None else f"a number ({', '.join(SCORES)})"
        raise Refusal.at(
            origin, f"not every response of {column} has {missing}", "fix or remove the row", code="missing-column"
        )
    return [one[text] for one in responses], [one[score] for one in responses], score


def best_first(responses: Sequence[Any], names: Sequence[str], scores: Sequence[float]) -> RankedResponses:
    """Sorts responses by descending score. Of several responses with equal scores, keeps only the first."""
    order = sorted(range(len(scores)), key=lambda i: -scores[i])
    kept = [i for place, i in enumerate(order) if not place or scores[i] != scores[order[place - 1]]]
    return RankedResponses([names[i] for i in kept], [responses[i] for i in kept], len(order) - len(kept))


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


Read = Literal["response", "score"]
_BY = "by "
SCORES_OF_PAIR = (("score_chosen", "score_rejected"), ("chosen_score", "rejected_score"))


@dataclass(frozen=True)
class RankingColumns:
    """Column names of a preference pair or of a list of responses. An empty string means that the row has no such
    column."""

    prompt: str
    chosen: str = ""
    rejected: str = ""
    margin: str = ""
    scores_of_pair: tuple[str, str] | None = None
    responses: str = ""
    scores: str = ""
    extra: ExtraColumns = NO_EXTRA_COLUMNS

    @property
    def names(self) -> tuple[str, ...]:
        sides = (self.chosen, self.rejected, self.margin, *(self.scores_of_pair or ()), self.responses, self.scores)
        return (self.prompt, *sides, *self.extra.columns)

    @property
    def prompts(self) -> tuple[str, ...]:
        """The columns of the prompt."""
        return self.extra.prompts(self.prompt)

    @property
    def pair(self) -> tuple[str, ...]:
        """The columns of the two responses of a pair."""
        return () if self.responses else (self.chosen, self.rejected)

    def place(self, name: str) -> int:
        """Returns the index of a response in its row, from its name."""
        return self.pair.index(name) if self.pair else int(name.removeprefix(f"{self.responses}."))

    def divided(
        self, row: Row, responses: Sequence[Any], names: Sequence[str], origin: Origin
    ) -> tuple[Turns, list[Turns]]:
        """Returns the prompt of a row, extended by its extra columns such as the system prompt, and each response
        without the prompt."""
        if not self.prompt:
            beginning, answers = divide(None, responses, names, origin)
            return self.extra.chat(beginning, row, origin), answers
        prompt = filled(row, self.prompt, origin)
        turns = [as_turns(response, name, origin) for name, response in zip(names, responses, strict=True)]
        if any(isinstance(chat, list) and chat and chat[0]["role"] != "assistant" for chat in turns):
            # If responses are full chats, each begins with the text of the prompt column, without the extra columns.
            beginning, answers = divide(prompt, turns, names, origin)
            return self.extra.prompt(beginning, self.prompt, row, origin), answers
        return divide(self.extra.prompt(prompt, self.prompt, row, origin), turns, names, origin)


def find_ranking_columns(finder: ColumnFinder) -> RankingColumns:
    """Returns the chosen and rejected columns if both exist, else the column with a list of responses.
    `data.responses_key` without `data.chosen_key` selects the list."""
    prompt = finder.prompt()
    pair = find_pair_columns(finder)
    scores = finder.find("scores_key", ("scores",))
    # If there is no scores column, `completions` holds objects with scores. For `prm`, `completions` holds steps.
    responses = finder.find("responses_key", ("responses", "completions"))
    wants_list = bool(finder.setting("responses_key")) and not finder.setting("chosen_key")
    if pair and not wants_list:
        return pair
    if responses:
        return RankingColumns(
            prompt, responses=responses, scores=scores, extra=finder.extra_columns(prompt, responses, scores)
        )
    raise finder.unknown(
        "hold the preferences",
        "set data.chosen_key and data.rejected_key, or data.responses_key, and data.prompt_key",
    )


def find_pair_columns(finder: ColumnFinder) -> RankingColumns | None:
    """Returns the columns of a pair, or None if the chosen or the rejected column is missing."""
    chosen, rejected = finder.find("chosen_key", ("chosen",)), finder.find("rejected_key", ("rejected",))
    if not (chosen and rejected):
        return None
    margin, scores = finder.find("margin_key", ("margin",)), finder.first_pair(SCORES_OF_PAIR)
    prompt = finder.prompt()
    return RankingColumns(
        prompt, chosen, rejected, margin, scores, extra=finder.extra_columns(prompt, chosen, rejected)
    )


class RankingRows(ResponseRows):
    """Reads the rows of one source as rankings. `read` is the model output that the method uses: log-probs of the
    response, or a score at the last token. If `several` is false, the method compares exactly two responses per row."""

    def __init__(
        self,
        finder: ColumnFinder,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        *,
        read: Read,
        several: bool,
        images: str | None = None,
    ):
        """`images` is the model folder whose image processor reads the images of the rows (`model.vision`)."""
        self.columns, self.limit, self.overlong = find_ranking_columns(finder), limit, finder.data.overlong
        self.read, self.several, self.finder = read, several, finder
        self.tally: Counter[str] = Counter()
        encoding = Encoding(tokenizer, finder.data, learned=read == "response")
        self.encode = ResponseEncoder(encoding, RowImages.of(images, finder, tokenizer))

    @property
    def unusable(self) -> int:
        return self.tally["all equal"]

    @property
    def scored_by(self) -> str:
        """The column of the scores, or an empty string if the responses have no scores and are listed best first."""
        return next((key.removeprefix(_BY) for key in self.tally if key.startswith(_BY)), "")

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Ranking] | None]:
        columns = self.columns
        row, refs = self.read_images(row, columns.prompts, columns.pair, columns.responses, origin)
        ranked = self._ranked(row, origin)
        if ranked is None:
            return [None]
        names, responses = ranked
        margin = _margin(row, columns, origin, used=self.read == "score")
        divided = columns.divided(row, responses, names, origin)
        beginning, answers = self.encode.as_chats(*divided, self.tally)
        examples = self.encode(beginning, answers, origin, columns.extra.inputs(row, origin), self.tally)
        examples = self.with_images(examples, [refs[columns.place(name)] for name in names] if refs else [])
        refuse_equal(examples, names)
        fitted = fit_responses(examples, names, self.limit, self.overlong)
        if fitted is None:
            return [None]
        truncated = any(len(short) < len(long) for short, long in zip(fitted, examples, strict=True))
        if self.read == "score":
            return [Kept.of(Ranking(tuple(map(_scored_at_the_end, fitted)), margin), truncated)]
        return [Kept.of(Ranking(tuple(fitted)), truncated, tuple(map(last_trained, examples)))]

    def _ranked(self, row: Row, origin: Origin) -> tuple[list[str], list[Any]] | None:
        """Returns the names and values of the responses to compare, best first. Returns None if all scores are
        equal."""
        columns = self.columns
        if not columns.responses:
            return pair_of(row, columns, origin)
        scored, scored_by = listed_responses(row, columns, origin)
        names, responses = scored.names, scored.responses
        if scored_by:
            self.tally[_BY + scored_by] += 1
            self.tally["alike"] += scored.alike if len(responses) > 1 else 0
            if len(responses) < 2:
                self.tally["all equal"] += 1
                return None
            if not self.several and len(responses) > 2:
                self.tally["passed over"] += len(responses) - 2
                return [names[0], names[-1]], [responses[0], responses[-1]]
        elif len(responses) > 2 and not self.several:
            raise Refusal.at(
                origin,
                f"the row has {len(responses)} responses, but this method compares two",
                "write the row as pairs, or give each response its score (data.scores_key)",
                code="wrong-count",
            )
        return names, responses

    def _score_counts(self) -> str:
        texts = {
            "passed over": "only the best and the worst response are compared, {:,} others left out",
            "alike": "{:,} responses left out because another has the same score",
            "all equal": "{:,} rows dropped because all their scores are equal",
        }
        return "".join(f"; {text.format(self.tally[key])}" for key, text in texts.items() if self.tally[key])

    def found(self) -> str:
        return self._found() + self.finder.unread(*self.columns.names) + version_note(self.tally)

    def _found(self) -> str:
        columns = self.columns
        prompt = prompt_description(columns, self.tally)
        if columns.responses:
            order = f"by {self.scored_by}" if self.scored_by else "best first"
            return f"rankings ({prompt}, {columns.responses}; {order}{self._score_counts()})"
        margin = columns.margin or " - ".join(columns.scores_of_pair or ())
        if self.read == "score":
            note = f"; margin from {margin}" if margin else ""
        else:
            note = f"; the margin ({margin}) is not used" if margin else ""
        return f"{'prompt/' if columns.prompt else ''}chosen/rejected pairs ({prompt}, {pair_names(columns)}{note})"


def prompt_description(columns: RankingColumns, tally: Counter[str]) -> str:
    """Returns text for the data report: which columns hold the prompts, and how the prompts were read."""
    count = tally[DIALOGUES]
    spoken = f", {count:,} dialogues of Human and Assistant read as chats" if count else ""
    return (
        (columns.prompt or "the prompt is the common beginning of the responses") + columns.extra.description() + spoken
    )


def pair_names(columns: RankingColumns) -> str:
    return f"{columns.chosen}, {columns.rejected}"


def pair_of(row: Row, columns: RankingColumns, origin: Origin) -> tuple[list[str], list[Any]]:
    """Returns the column names and values of the chosen and the rejected response, in this order."""
    keys = [columns.chosen, columns.rejected]
    refuse_swapped(row, columns, origin)
    return keys, [lookup(row, key, origin) for key in keys]


def listed_responses(row: Row, columns: RankingColumns, origin: Origin) -> tuple[RankedResponses, str]:
    """Returns the responses of a list, best first, and the column of their scores. The column is empty if the list has
    no scores and is already ranked."""
    responses = lookup(row, columns.responses, origin)
    if not isinstance(responses, list) or len(responses) < 2:
        raise Refusal.at(
            origin,
            f"{columns.responses} must be a list of two or more responses",
            "fix or remove the row",
            code="wrong-count",
        )
    names = [f"{columns.responses}.{i}" for i in range(len(responses))]
    if columns.scores:
        scores = _scores(row, columns, len(responses), origin)
        return best_first(responses, names, scores), columns.scores
    if is_objects(responses):
        texts, scores, key = of_objects(responses, columns.responses, origin)
        return best_first(texts, names, scores), f"{columns.responses}.{key}"
    return RankedResponses(names, responses), ""


def refuse_swapped(row: Row, columns: RankingColumns, origin: Origin) -> None:
    """Raises an error if the score of the chosen response is below the score of the rejected response."""
    if columns.scores_of_pair is None:
        return
    better, worse = (lookup(row, key, origin) for key in columns.scores_of_pair)
    if is_number(better) and is_number(worse) and better < worse:
        raise Refusal.at(
            origin,
            f"{columns.scores_of_pair[0]} {better} is below {columns.scores_of_pair[1]} {worse}: chosen and rejected "
            "are swapped",
            "swap the responses, or fix the scores",
            code="swapped-responses",
        )


def _scores(row: Row, columns: RankingColumns, count: int, origin: Origin) -> list[float]:
    scores = lookup(row, columns.scores, origin)
    if not isinstance(scores, list) or not all(is_number(score) for score in scores):
        raise Refusal.at(
            origin, f"{columns.scores} must be a list of finite numbers", "fix or remove the row", code="not-a-number"
        )
    if len(scores) != count:
        raise Refusal.at(
            origin,
            f"the row has {count} responses, but {len(scores)} scores",
            "give each response its score",
            code="wrong-count",
        )
    return scores


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
            origin,
            f"the margin is {margin}: a negative margin prefers the rejected response",
            "swap the responses or fix the margin",
            code="swapped-responses",
        )
    return margin


def _finite(value: Any, key: str, origin: Origin) -> float:
    if not is_number(value):
        raise Refusal.at(
            origin, f"{key} is {value!r}, not a finite number", "fix or remove the row", code="not-a-number"
        )
    return float(value)


def _scored_at_the_end(example: Example) -> ScoredExample:
    ids, images = example.ids, example.images
    return ScoredExample(ids, bytes(len(ids)), example.origin, positions=(len(ids) - 1,), images=images)
