"""What goes in and out of a handle: responses that a model wrote, and examples that a loss looks at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from lockstep.errors import Refusal
from lockstep.model.policy import Scoring
from lockstep.types import Example, Message, Origin

# A user's text, a chat, or token ids as they are.
PromptLike = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True)
class Datum:
    """What one loss looks at: a sequence, or several (chosen and rejected), with columns of its own.

    `scoring` is the distribution that log-probabilities are asked of: for a response, the one it was drawn from.
    """

    sequences: tuple[Example, ...]
    columns: Mapping[str, Any] = field(default_factory=dict)
    scoring: Scoring = field(default_factory=Scoring)

    @property
    def examples(self) -> tuple[Example, ...]:
        return self.sequences

    @property
    def origin(self) -> Origin:
        return self.sequences[0].origin

    @property
    def targets(self) -> int:
        """Trained tokens."""
        return sum(sequence.targets for sequence in self.sequences)

    def having(self, **columns: Any) -> Datum:
        """The same sequences with more columns."""
        return replace(self, columns={**self.columns, **columns})


@dataclass(frozen=True)
class Response:
    """A rollout that nobody has judged: sample number `sample` of prompt number `prompt`.

    `logprobs` has one entry for each of `ids`; an end token that was produced is the last of them. `text` is without
    special tokens. `stop` says why it ended: `token`, `string` or `length`.
    """

    prompt: int
    sample: int
    prompt_ids: tuple[int, ...]
    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    text: str
    stop: str
    scoring: Scoring = field(default_factory=Scoring)

    def datum(self, **columns: Any) -> Datum:
        """To train on: every token of the response is a target, none of the prompt's."""
        origin = Origin(f"response {self.sample} to prompt", self.prompt)
        trained = [0] * len(self.prompt_ids) + [1] * len(self.ids)
        return Datum((Example([*self.prompt_ids, *self.ids], trained, origin),), columns, self.scoring)


def as_data(examples: Sequence[Datum | Response]) -> list[Datum]:
    """Refuses what is no example, and examples that train nothing."""
    data = []
    for number, example in enumerate(examples):
        if isinstance(example, Response):
            example = example.datum()
        if not isinstance(example, Datum):
            raise Refusal.at(
                f"example {number}",
                f"is a {type(example).__name__}, and examples are made by the handle",
                "use a response of sample(), or model.example(prompt, response), model.pair(...), model.tokens(...)",
            )
        for sequence in example.sequences:
            if not sequence.targets:
                raise Refusal.at(f"example {number} ({sequence.origin})", "has no trained token", "leave it out")
        data.append(example)
    if not data:
        raise Refusal.at("examples", "there are none", "give at least one")
    return data


def by_scoring(data: Sequence[Datum]) -> list[tuple[Scoring, list[int]]]:
    """Numbers of the examples whose log-probabilities are asked of the same distribution."""
    groups: dict[Scoring, list[int]] = {}
    for number, datum in enumerate(data):
        groups.setdefault(datum.scoring, []).append(number)
    return list(groups.items())
