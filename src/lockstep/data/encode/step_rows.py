"""Reads rows with a label for each step of a solution (process reward models).

A placeholder token follows each step, and the model predicts the label of the step at that token. A row is a text with
placeholders, or a prompt with a list of steps. A list of steps is written as `step 1<placeholder>\\nstep
2<placeholder>`. With a chat template, the steps are the assistant turn after the prompt. Without a chat template, the
steps are lines after the prompt.
"""

from __future__ import annotations

import json
import math
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from lockstep.data.encode.chat import check_messages
from lockstep.data.encode.chat_text import render_prompt
from lockstep.data.encode.columns import ColumnFinder, filled
from lockstep.data.encode.dialogue import Turns, as_turns
from lockstep.data.encode.encoding import Encoding, as_chat, fit
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.messages import image_placeholder, refuse_not_text
from lockstep.data.encode.template_checks import refuse_dropped_by_template
from lockstep.data.row_reader import Kept
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.types import Message, Origin, Row, ScoredExample, StepLabels
from lockstep.vision.spans import ImageRef

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class Marks:
    """The step placeholder (`prm.placeholder`) and the label words (`prm.tokens`). The placeholder and each label word
    must be a single token."""

    placeholder: str
    placeholder_id: int
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, placeholder: str, tokens: Sequence[str]) -> Marks:
        """Creates the marks. Raises an error for a placeholder or label word that is not a single token, before any row
        is read."""
        texts = [("prm.placeholder", placeholder), *(("prm.tokens", token) for token in tokens)]
        ids = [list(tokenizer(text, add_special_tokens=False)["input_ids"]) for _, text in texts]
        problems = [
            Problem(
                key,
                f"{text!r} is {len(found)} tokens ({', '.join(map(str, found))}) in this tokenizer, not one token",
                f"set {key} to a text that is one token, or add {text!r} as a token to the tokenizer",
                code="unknown-token",
            )
            for (key, text), found in zip(texts, ids, strict=True)
            if len(found) != 1
        ]
        token_ids = tuple(found[0] for found in ids[1:] if found)
        if not problems and len(set(token_ids)) < len(token_ids):
            problems.append(
                Problem(
                    "prm.tokens",
                    f"{', '.join(tokens)} are not all different",
                    "name each word once",
                    code="duplicate-name",
                )
            )
        refuse_all(problems)
        return cls(placeholder, ids[0][0], tuple(tokens), token_ids)


def parse_labels(value: Any, key: str, marks: Marks, origin: Origin) -> list[tuple[float, ...]]:
    """Returns the target distribution over the label tokens at each step, from a list of labels or its JSON text.

    If a label is one of the label tokens, this token gets probability 1. If there are two label tokens, a label may
    also be the probability of the first token: true, 1 or 0.8.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise Refusal.at(
                origin,
                f"{key} is text, but not a JSON list: {error.msg}",
                'write it as ["+", "-"] or [1, 0]',
                code="invalid-json",
            ) from error
    if not isinstance(value, list) or not value:
        raise Refusal.at(
            origin, f"{key} must be a list with a label for each step", "fix or remove the row", code="invalid-label"
        )
    return [_distribution(label, number, key, marks, origin) for number, label in enumerate(value, 1)]


def _distribution(label: Any, number: int, key: str, marks: Marks, origin: Origin) -> tuple[float, ...]:
    if isinstance(label, str) and label in marks.tokens:
        return tuple(float(token == label) for token in marks.tokens)
    if isinstance(label, bool | int | float) and len(marks.tokens) == 2 and math.isfinite(label) and 0 <= label <= 1:
        return (float(label), 1.0 - label)
    numbers = ", or numbers from 0 to 1 (the probability of the first word)" if len(marks.tokens) == 2 else ""
    raise Refusal.at(
        origin,
        f"label {number} of {key} is {label!r}",
        f"labels are the words of prm.tokens ({', '.join(marks.tokens)}){numbers}",
        code="invalid-label",
    )


# In the Math-Shepherd data set, the text "ки" follows each step of the column `input`. The column `label` has the same
# text with + or - instead of "ки".
SHEPHERD = "ки"
_VERDICTS = {"+": 1, "-": 0}


def shepherd(text: str, labelled: str, names: tuple[str, str], origin: Origin) -> tuple[list[str], list[int]]:
    """Returns the text split at Math-Shepherd's placeholders, and the label (1 or 0) at each placeholder."""
    pieces = text.split(SHEPHERD)
    verdicts: list[int] = []
    rest = labelled
    for number, piece in enumerate(pieces, 1):
        if not rest.startswith(piece):
            raise _parts(names, number, origin)
        rest = rest[len(piece) :]
        if number < len(pieces):
            if rest[:1] not in _VERDICTS:
                raise _parts(names, number, origin)
            verdicts.append(_VERDICTS[rest[0]])
            rest = rest[1:]
    if rest:
        raise _parts(names, len(pieces), origin)
    return pieces, verdicts


def _parts(names: tuple[str, str], number: int, origin: Origin) -> Refusal:
    return Refusal.at(
        origin,
        f"{names[1]} is not {names[0]} with + or - in place of each {SHEPHERD!r}: they first differ at step {number}",
        "fix or remove the row",
        code="invalid-label",
    )


@dataclass(frozen=True)
class Rated:
    """The steps of a PRM800K solution with their labels. `others` is the number of completions that are not part of the
    solution."""

    problem: str
    steps: list[str]
    verdicts: list[int]
    others: int


def is_rated(label: Any) -> bool:
    return isinstance(label, dict) and isinstance(label.get("steps"), list)


def rated(question: Any, label: dict[str, Any], names: tuple[str, str], origin: Origin) -> Rated:
    """Reads one solution of a PRM800K row: at each step the chosen completion, else the human completion, else the
    first.

    Ratings 1 and 0 (neutral) count as good, as in the PRM800K paper. A rating of -1 counts as bad. The solution ends at
    an unrated step, or at a step without a chosen or human completion.
    """
    problem = question.get("problem") if isinstance(question, dict) else None
    if not isinstance(problem, str) or not problem.strip():
        raise Refusal.at(origin, f"{names[0]} has no problem", "fix or remove the row", code="missing-column")
    steps: list[str] = []
    verdicts: list[int] = []
    others = 0
    for number, step in enumerate(label["steps"], 1):
        completions = (step.get("completions") if isinstance(step, dict) else None) or []
        if not isinstance(step, dict) or not all(isinstance(one, dict) for one in completions):
            raise Refusal.at(
                origin,
                f"step {number} of {names[1]} is not in PRM800K format",
                "fix or remove the row",
                code="invalid-label",
            )
        chosen, human = step.get("chosen_completion"), step.get("human_completion")
        if chosen is None and isinstance(human, dict):
            taken: dict[str, Any] = {"rating": 1, **{key: human[key] for key in human if human[key] is not None}}
            others += len(completions)
        elif completions and (chosen is None or (isinstance(chosen, int) and 0 <= chosen < len(completions))):
            taken = completions[chosen or 0]
            others += len(completions) - 1
        else:
            break
        text, rating = taken.get("text"), taken.get("rating")
        if rating is None:
            break
        if rating not in (-1, 0, 1) or not isinstance(text, str) or not text.strip():
            raise Refusal.at(
                origin,
                f"step {number} of {names[1]} has an invalid rating ({rating!r}) or no text",
                "fix or remove the row",
                code="invalid-label",
            )
        steps.append(text)
        verdicts.append(int(rating >= 0))
        if chosen is None and not isinstance(human, dict):
            break
    return Rated(problem, steps, verdicts, others)


LABELS = ("label", "labels", "value", "values")
TEXTS = ("input", "text", "prompt")


@dataclass(frozen=True)
class StepColumns:
    """Column names of PRM rows: the labels, and either a text with placeholders or a prompt and its steps."""

    label: str
    text: str = ""
    prompt: str = ""
    steps: str = ""


def find_step_columns(finder: ColumnFinder) -> StepColumns:
    """Returns the columns of PRM rows: a list of steps (`steps_key`, `completions`) if present, else a text with
    placeholders."""
    label, steps = finder.find("label_key", LABELS), finder.find("steps_key", ("completions",))
    prompt = finder.prompt()
    wants_text = bool(finder.setting("text_key")) and not finder.setting("steps_key")
    if label and steps and prompt and not wants_text:
        return StepColumns(label, prompt=prompt, steps=steps)
    text = finder.setting("text_key") or finder.find("prompt_key", TEXTS)
    if label and text:
        return StepColumns(label, text=text)
    if label and prompt:
        # Rows of PRM800K have a question, and a label object with rated steps.
        return StepColumns(label, prompt=prompt)
    raise finder.unknown(
        "hold the labelled steps", "set data.label_key, and either data.text_key, or data.prompt_key and data.steps_key"
    )


class StepWriter:
    """Formats steps for a process reward model, in training and in scoring."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: Marks):
        self.tokenizer, self.marks = tokenizer, marks
        # Some tokenizers join a placeholder with the word before it, so they need a space before the placeholder.
        sticks = self._ids("x" + marks.placeholder)[-1] != marks.placeholder_id
        self.before_placeholder = " " if sticks else ""

    def marked(self, steps: Sequence[str]) -> str:
        """Joins the steps with newlines. Each line ends with the placeholder."""
        return "\n".join(step + self.before_placeholder + self.marks.placeholder for step in steps)

    def chat(self, messages: list[Message], origin: Origin) -> tuple[str, list[int]]:
        """Returns the text and the token ids of a chat whose last turn consists of steps with placeholders."""
        text = render_prompt(self.tokenizer, messages, origin, open_turn=False)
        refuse_dropped_by_template(text, messages, (), origin, image_placeholder(self.tokenizer))
        return text, self._ids(text)

    def positions(self, ids: Sequence[int]) -> list[int]:
        """Returns the positions of the placeholder tokens."""
        return [position for position, token in enumerate(ids) if token == self.marks.placeholder_id]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class StepRows:
    """Reads the rows of one source as labelled steps. The first of the label `tokens` means that a step is good."""

    split_rows = special_rows = unseparated_rows = 0

    def __init__(
        self,
        finder: ColumnFinder,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        *,
        placeholder: str,
        tokens: Sequence[str],
        images: str | None = None,
    ):
        """`images` is the model folder whose image processor reads the images of the rows (`model.vision`)."""
        self.images = RowImages.of(images, finder, tokenizer)
        self.marks, self.finder = Marks.of(tokenizer, placeholder, tokens), finder
        self.tally: Counter[str] = Counter()
        self.columns, self.limit, self.overlong = find_step_columns(finder), limit, finder.data.overlong
        self.encoding = Encoding(tokenizer, finder.data, learned=False)
        self.writer = StepWriter(tokenizer, self.marks)
        if finder.data.system and self.columns.text:
            raise Refusal.at(
                "data.system",
                "rows of text with placeholders cannot have a system message",
                "remove it",
                code="unused-key",
            )

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[StepLabels] | None]:
        columns, refs = self.columns, list[ImageRef]()
        if self.images is None:
            refuse_not_text(row, "the row", origin)
        else:
            row, refs = self.images.read(row, (columns.text, columns.prompt, columns.steps), origin)
        read = self._labelled(row, origin)
        if read is None:
            self.tally["unrated"] += 1
            return [None]
        labels, text, ids = read
        example = ScoredExample(array("q", ids), bytes(len(ids)), origin, token_ids=self.marks.token_ids)
        if self.images is not None:
            example = self.images.written(example, refs, all_turns=True)
        positions = self.writer.positions(example.ids)
        self._refuse_mismatch(text, len(positions), len(labels), origin)
        example = replace(example, positions=tuple(positions))
        self.encoding.refuse_two_openings(example)
        item = StepLabels(example, tuple(labels))
        fitted = fit_steps(item, self.limit, self.overlong)
        return [None] if fitted is None else [Kept.of(fitted, fitted is not item)]

    def _labelled(self, row: Row, origin: Origin) -> tuple[list[tuple[float, ...]], str, list[int]] | None:
        """Returns the labels, the text and its token ids. Returns None for a row without rated steps."""
        columns = self.columns
        value = filled(row, columns.label, origin)
        if is_rated(value) and not columns.steps:
            return self._from_ratings(row, value, origin)
        if not (columns.steps or columns.text):
            raise Refusal.at(
                origin,
                f"{columns.label} has no rated steps (PRM800K format), and the rows have no column of steps",
                "set data.steps_key or data.text_key",
                code="unclear-columns",
            )
        text = filled(row, columns.text, origin) if columns.text else None
        if isinstance(text, str) and isinstance(value, str) and SHEPHERD in text and not value.lstrip().startswith("["):
            pieces, verdicts = shepherd(text, value, (columns.text, columns.label), origin)
            self.tally["shepherd"] += 1
            return self._parsed(verdicts, origin), *self._from_text(self.marks.placeholder.join(pieces), origin)
        labels = parse_labels(value, columns.label, self.marks, origin)
        if columns.steps:
            return labels, *self._from_steps(row, len(labels), origin)
        return labels, *self._from_text(text, origin)

    def _from_ratings(
        self, row: Row, label: dict[str, Any], origin: Origin
    ) -> tuple[list[tuple[float, ...]], str, list[int]] | None:
        key = self.columns.prompt or self.finder.prompt()
        solution = rated(filled(row, key, origin), label, (key, self.columns.label), origin)
        if not solution.steps:
            return None
        self.tally["rated"] += 1
        self.tally["others"] += solution.others
        return self._parsed(solution.verdicts, origin), *self._written(solution.problem, solution.steps, origin)

    def _parsed(self, verdicts: list[int], origin: Origin) -> list[tuple[float, ...]]:
        return parse_labels(verdicts, self.columns.label, self.marks, origin)

    @property
    def unusable(self) -> int:
        return self.tally["unrated"]

    def found(self) -> str:
        columns = self.columns
        parts = columns.text or ", ".join(key for key in (columns.prompt, columns.steps) if key)
        kind = "texts with a placeholder after each step" if columns.text else "prompts with a list of steps"
        how = ""
        if self.tally["shepherd"]:
            how = f", as + or - for {SHEPHERD!r} (Math-Shepherd), which becomes {self.marks.placeholder!r}"
        if self.tally["rated"]:
            kind = "rated solutions of PRM800K"
            others = f"{self.tally['others']:,} completions that are not part of a solution are left out"
            how = f": 1 and 0 are good, -1 is bad; {others}"
        left = f"; {self.unusable:,} rows without a rated step dropped" if self.unusable else ""
        unread = self.finder.unread(columns.label, columns.text, columns.prompt, columns.steps)
        return f"{kind} ({parts}; labels from {columns.label}{how}{left}){unread}"

    def _from_text(self, value: Any, origin: Origin) -> tuple[str, list[int]]:
        turns = as_turns(value, self.columns.text, origin)
        if isinstance(turns, list):
            return self._chat(turns, origin)
        return turns, self.encoding.opening + self.encoding.ids(turns)

    def _from_steps(self, row: Row, labels: int, origin: Origin) -> tuple[str, list[int]]:
        steps = filled(row, self.columns.steps, origin)
        if not isinstance(steps, list) or not all(isinstance(step, str) and step.strip() for step in steps):
            raise Refusal.at(
                origin,
                f"{self.columns.steps} must be a list of non-empty texts",
                "fix or remove the row",
                code="not-text",
            )
        if len(steps) != labels:
            raise Refusal.at(
                origin,
                f"the row has {len(steps)} steps, but {labels} labels",
                "give each step its label",
                code="wrong-count",
            )
        prompt = as_turns(filled(row, self.columns.prompt, origin), self.columns.prompt, origin)
        return self._written(prompt, steps, origin)

    def _written(self, prompt: Turns, steps: list[str], origin: Origin) -> tuple[str, list[int]]:
        answer = self.writer.marked(steps)
        if self.encoding.templated or isinstance(prompt, list):
            return self._chat([*as_chat(prompt), {"role": "assistant", "content": answer}], origin)
        text = f"{prompt}\n{answer}"
        return text, self.encoding.opening + self.encoding.ids(text)

    def _chat(self, messages: list[Message], origin: Origin) -> tuple[str, list[int]]:
        check_messages(messages, origin)
        self.encoding.need_template(origin)
        return self.writer.chat(self.encoding.with_system(messages), origin)

    def _refuse_mismatch(self, text: str, found: int, labels: int, origin: Origin) -> None:
        placeholder = self.marks.placeholder
        count = text.count(placeholder)
        if not count:
            raise Refusal.at(
                origin,
                f"the text holds no placeholder {placeholder!r}",
                "set prm.placeholder to the placeholder that the rows use",
                code="missing-placeholder",
            )
        if count != found:
            raise Refusal.at(
                origin,
                f"the text holds the placeholder {placeholder!r} {count} times, but its token {found} times: the "
                "tokenizer merges it with neighbouring characters",
                "put a space or a line break around the placeholder, or add it to the tokenizer as a token",
                code="missing-placeholder",
            )
        if count != labels:
            raise Refusal.at(
                origin,
                f"the text has {count} placeholders {placeholder!r}, but {labels} labels",
                "give each placeholder its label, or set prm.placeholder to a text that no step contains",
                code="wrong-count",
            )


def fit_steps(item: StepLabels, limit: int, overlong: str) -> StepLabels | None:
    """Applies `overlong` to a row with more than `limit` tokens. Returns the row with its remaining steps, or None if
    the row is dropped."""
    fitted = fit(item.example, limit, overlong, needed="placeholder")
    if fitted is None or fitted is item.example:
        return None if fitted is None else item
    # Truncation cuts only one end of the row, and removes the labels of the steps at that end.
    count = len(fitted.positions)
    return StepLabels(fitted, item.labels[-count:] if overlong == "truncate_left" else item.labels[:count])
