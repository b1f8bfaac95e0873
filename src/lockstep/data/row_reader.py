"""The protocol of row readers, and the items and row counts that a row reader produces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from lockstep.types import Origin, Row

T = TypeVar("T")


@dataclass(frozen=True)
class Kept(Generic[T]):
    """An encoded item within the token limit. `lengths` are the token counts of its sequences, `trained` is the number
    of trained tokens, and `ends` are the last tokens of its responses."""

    item: T
    lengths: tuple[int, ...]
    trained: int = 0
    truncated: bool = False
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, item: Any, truncated: bool, ends: tuple[int, ...] = ()) -> Kept[T]:
        examples = item.examples
        trained = sum(example.trained_tokens for example in examples)
        return cls(item, tuple(len(example) for example in examples), trained, truncated, ends)


@dataclass
class RowCounts:
    """Row and token counts of a data set, including the number of dropped rows."""

    rows: int = 0
    tokens: int = 0
    longest: int = 0
    dropped: int = 0
    truncated: int = 0

    def metrics(self) -> dict[str, float]:
        return {f"data/{name}": float(value) for name, value in vars(self).items()}

    def add(self, kept: Kept[Any]) -> None:
        self.rows += 1
        self.truncated += kept.truncated
        self.tokens += sum(kept.lengths)
        self.longest = max(self.longest, *kept.lengths)

    def merge(self, other: Mapping[str, int]) -> None:
        """Adds the row counts of another part of the data set."""
        for name, value in other.items():
            current = getattr(self, name)
            setattr(self, name, max(current, value) if name == "longest" else current + value)

    def add_split(self, rows: int) -> None:
        """Counts rows whose text was split and tokenised separately at borders of trained text. This base method does
        nothing, because prompts are never split."""


@dataclass
class TrainedCounts(RowCounts):
    """Row counts of training rows, with the number of trained tokens and of rows whose text was split for
    tokenisation."""

    trained_tokens: int = 0
    split: int = 0

    def sentence(self) -> str:
        return f"{self.tokens:,}, of which {self.trained_tokens:,} trained; longest row {self.longest}"

    def add(self, kept: Kept[Any]) -> None:
        super().add(kept)
        self.trained_tokens += kept.trained

    def add_split(self, rows: int) -> None:
        self.split += rows


class RowReader(Protocol[T]):
    """Converts rows of one data source to items within the token limit. A row may give several items. A dropped item is
    None.

    The items must depend on the row alone, because rows are read in parts, by several processes, or from the row cache.
    A reader whose `found` reports counts keeps them in a `tally` attribute (`data/dataset.py`).
    """

    @property
    def split_rows(self) -> int: ...

    @property
    def special_rows(self) -> int:
        """Number of rows with special tokens in their text (`data/encode/dialogue.py`)."""
        ...

    @property
    def unseparated_rows(self) -> int:
        """Number of rows whose prompt and response were joined without a separator."""
        ...

    @property
    def unusable(self) -> int:
        """Number of rows dropped because of their content, not because of their length. `found` gives the reason."""
        ...

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[T] | None]: ...

    def found(self) -> str:
        """Describes the format in which the rows were read. The caller calls this method after the last row."""
        ...
