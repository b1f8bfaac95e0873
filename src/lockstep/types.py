"""The nouns of the domain, a type per stage. Nothing here is None until later.

Tensor shapes carry a suffix: N micro-batch rows, T positions, K trained tokens of a micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

Message = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Origin:
    """Where a row came from, for every message that must name it."""

    file: str
    row: int

    def __str__(self) -> str:
        return f"{self.file} row {self.row}"


@dataclass(frozen=True)
class Example:
    """A row as tokens. `trained[i]` is 1 where token i is a target (predicted from the tokens before it), else 0."""

    ids: Sequence[int]
    trained: Sequence[int]
    origin: Origin

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def targets(self) -> int:
        """How many tokens are really predicted: the first token of a sequence has nothing before it."""
        return sum(self.trained[1:])


@dataclass(frozen=True)
class MicroBatch:
    """What one device runs forward at once: packed rows in one line (N = 1), or right-padded rows.

    `lengths` are the sequence lengths in order: along the line when packed, one for each row when padded.
    `predictors_K` index the flattened N*T positions whose hidden state predicts `targets_K`.
    """

    input_ids_NT: torch.Tensor
    position_ids_NT: torch.Tensor
    lengths: tuple[int, ...]
    packed: bool
    predictors_K: torch.Tensor
    targets_K: torch.Tensor
    origins: tuple[Origin, ...] = field(default=())

    @property
    def tokens(self) -> int:
        """Real tokens, padding not counted."""
        return sum(self.lengths)


@dataclass
class Sums:
    """A loss and its companions as sums over tokens; the one division happens in the step."""

    loss: torch.Tensor
    metrics: dict[str, torch.Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Question:
    """A prompt whose answer can be checked by a rule (one RL row)."""

    data_source: str
    prompt: list[Message]
    ground_truth: str
    origin: Origin


@dataclass(frozen=True)
class Answer:
    """A generated answer to a question, as scored."""

    question: Question
    text: str
    score: float
    tokens: int
    stopped: bool
