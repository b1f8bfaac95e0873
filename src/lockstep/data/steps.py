"""Rows of solutions whose every step is judged: a placeholder stands after each step, where the judgement is read.

A row is a text that holds the placeholders, or a prompt with a list of steps. The latter is written as the steps in
lines of their own, the placeholder at the end of each: `step 1<placeholder>\\nstep 2<placeholder>`. They are the
assistant's turn after the prompt as the user's, or without a chat template a line each after the prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lockstep.data.chat import check_messages, render_prompt
from lockstep.data.columns import ColumnFinder, filled
from lockstep.data.dataset import Kept
from lockstep.data.dialogue import as_turns
from lockstep.data.encoding import Encoding, as_chat
from lockstep.data.fit import fit
from lockstep.data.marks import Marks, parse_labels
from lockstep.errors import Refusal
from lockstep.types import Message, Origin, Probe, Row, Steps

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LABELS = ("label", "labels", "value", "values")
TEXTS = ("input", "text", "prompt")


@dataclass(frozen=True)
class StepColumns:
    """A text with placeholders, or a prompt with its steps; beside it the verdicts."""

    label: str
    text: str = ""
    prompt: str = ""
    steps: str = ""


def find_step_columns(finder: ColumnFinder) -> StepColumns:
    """A list of steps where there is one (`steps_key`, `completions`), else a text with placeholders."""
    label, steps = finder.find("label_key", LABELS), finder.find("steps_key", ("completions",))
    prompt = finder.prompt()
    wants_text = bool(finder.setting("text_key")) and not finder.setting("steps_key")
    if label and steps and prompt and not wants_text:
        return StepColumns(label, prompt=prompt, steps=steps)
    text = finder.setting("text_key") or finder.find("prompt_key", TEXTS)
    if label and text:
        return StepColumns(label, text=text)
    raise finder.unknown(
        "hold the judged steps", "set data.label_key, and data.text_key or data.prompt_key and data.steps_key"
    )


class StepWriter:
    """Steps as the text that a process reward model reads, in training and when it judges."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, marks: Marks):
        self.tokenizer, self.marks = tokenizer, marks
        # Tokenizers that mark a word's beginning know the placeholder as a word, and need the space before it.
        sticks = self._ids("x" + marks.placeholder)[-1] != marks.placeholder_id
        self.before_placeholder = " " if sticks else ""

    def marked(self, steps: Sequence[str]) -> str:
        """Each step in a line of its own, the placeholder at its end."""
        return "\n".join(step + self.before_placeholder + self.marks.placeholder for step in steps)

    def chat(self, messages: list[Message], origin: Origin) -> tuple[str, list[int]]:
        """The text of a chat whose last turn holds marked steps, and its tokens."""
        text = render_prompt(self.tokenizer, messages, origin, open_turn=False)
        return text, self._ids(text)

    def positions(self, ids: Sequence[int]) -> list[int]:
        """Where the steps are judged."""
        return [position for position, token in enumerate(ids) if token == self.marks.placeholder_id]

    def _ids(self, text: str) -> list[int]:
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])


class StepRows:
    """The rows of one source as judged steps. Of `tokens`, which judge a step, the first is the good one."""

    split_rows = 0

    def __init__(
        self,
        finder: ColumnFinder,
        tokenizer: PreTrainedTokenizerBase,
        limit: int,
        *,
        placeholder: str,
        tokens: Sequence[str],
    ):
        self.marks = Marks.of(tokenizer, placeholder, tokens)
        self.columns, self.limit, self.overlong = find_step_columns(finder), limit, finder.data.overlong
        self.encoding = Encoding(tokenizer, finder.data, learned=False)
        self.writer = StepWriter(tokenizer, self.marks)
        if finder.data.system and self.columns.text:
            raise Refusal.at("data.system", "rows of text with placeholders have no place for it", "remove it")

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Steps] | None]:
        labels = parse_labels(filled(row, self.columns.label, origin), self.columns.label, self.marks, origin)
        if self.columns.steps:
            text, ids = self._from_steps(row, len(labels), origin)
        else:
            text, ids = self._from_text(filled(row, self.columns.text, origin), origin)
        positions = self.writer.positions(ids)
        self._refuse_mismatch(text, len(positions), len(labels), origin)
        probe = Probe(
            array("q", ids), bytes(len(ids)), origin, positions=tuple(positions), token_ids=self.marks.token_ids
        )
        self.encoding.refuse_two_openings(probe)
        whole = Steps(probe, tuple(labels))
        fitted = fit_steps(whole, self.limit, self.overlong)
        return [None] if fitted is None else [Kept.of(fitted, fitted is not whole)]

    def found(self) -> str:
        columns = self.columns
        parts = columns.text or f"{columns.prompt}, {columns.steps}"
        kind = "texts with a placeholder after each step" if columns.text else "prompts with a list of steps"
        return f"{kind} ({parts}; verdicts from {columns.label})"

    def _from_text(self, value: Any, origin: Origin) -> tuple[str, list[int]]:
        turns = as_turns(value, self.columns.text, origin)
        if isinstance(turns, list):
            return self._chat(turns, origin)
        return turns, self.encoding.opening + self.encoding.ids(turns)

    def _from_steps(self, row: Row, labels: int, origin: Origin) -> tuple[str, list[int]]:
        steps = filled(row, self.columns.steps, origin)
        if not isinstance(steps, list) or not all(isinstance(step, str) and step.strip() for step in steps):
            raise Refusal.at(
                origin, f"{self.columns.steps} must be a list of texts, none empty", "mend or remove the row"
            )
        if len(steps) != labels:
            raise Refusal.at(origin, f"has {len(steps)} steps and {labels} labels", "give each step its label")
        prompt = as_turns(filled(row, self.columns.prompt, origin), self.columns.prompt, origin)
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
        held = text.count(placeholder)
        if not held:
            raise Refusal.at(
                origin, f"the text holds no placeholder {placeholder!r}", "set prm.placeholder to what the rows use"
            )
        if held != found:
            raise Refusal.at(
                origin,
                f"the text holds the placeholder {placeholder!r} {held} times, but its token {found} times: it merges "
                "with its neighbours",
                "put a space or a line break around it, or add it to the tokenizer as a token of its own",
            )
        if held != labels:
            raise Refusal.at(
                origin,
                f"has {held} placeholders {placeholder!r} and {labels} labels",
                "give each placeholder its label",
            )


def fit_steps(item: Steps, limit: int, overlong: str) -> Steps | None:
    """The item within `limit` tokens, with the steps that remain; None when it is dropped."""
    fitted = fit(item.example, limit, overlong, needed="placeholder")
    if fitted is None or fitted is item.example:
        return None if fitted is None else item
    # One end alone is cut, and with it the steps there.
    count = len(fitted.positions)
    return Steps(fitted, item.labels[-count:] if overlong == "truncate_left" else item.labels[:count])
