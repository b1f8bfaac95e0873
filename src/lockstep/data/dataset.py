"""All rows of a recipe as items of its method, with what was counted on the way; and the updates they come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from lockstep.data.columns import ColumnFinder
from lockstep.data.mix import Mixture
from lockstep.data.own_reader import OwnReader
from lockstep.data.read import RowSet, read_rows
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.recipe.schema import Data, Source
from lockstep.types import Example, Item, Origin, Row

T = TypeVar("T")
ItemT = TypeVar("ItemT", bound=Item)


@dataclass(frozen=True)
class Kept(Generic[T]):
    """An item within the limit: the tokens of its sequences, how many are trained, and those that end a response."""

    item: T
    lengths: tuple[int, ...]
    trained: int = 0
    truncated: bool = False
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, item: Any, truncated: bool, ends: tuple[int, ...] = ()) -> Kept[T]:
        examples = item.examples
        trained = sum(example.targets for example in examples)
        return cls(item, tuple(len(example) for example in examples), trained, truncated, ends)


@dataclass
class RowCounts:
    """What became of the rows. Nothing leaves the data without a number here."""

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

    def split_by(self, reader: RowReader[Any]) -> None:
        """Rows that a reader had to tokenise in pieces; of prompts there are none."""


@dataclass
class TrainedCounts(RowCounts):
    """Of rows that are trained."""

    trained_tokens: int = 0
    split: int = 0

    def sentence(self) -> str:
        return f"{self.tokens:,}, of which {self.trained_tokens:,} trained; longest row {self.longest}"

    def add(self, kept: Kept[Any]) -> None:
        super().add(kept)
        self.trained_tokens += kept.trained

    def split_by(self, reader: RowReader[Any]) -> None:
        self.split += reader.split_rows


@dataclass
class LoadedRows(Generic[T]):
    """What was read of some sources: the items by source, and where they came from."""

    WHAT: ClassVar[str] = "rows"
    LIMIT: ClassVar[str] = "data.max_tokens"

    sources: list[list[T]] = field(default_factory=list)
    weights: list[float] | None = None
    fingerprints: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    counts: RowCounts = field(default_factory=RowCounts)

    @property
    def items(self) -> list[T]:
        return [item for source in self.sources for item in source]

    def add(self, kept: Kept[T]) -> None:
        """To the last source."""
        self.sources[-1].append(kept.item)
        self.counts.add(kept)


@dataclass
class Dataset(LoadedRows[ItemT]):
    """The items of an offline method."""

    counts: TrainedCounts = field(default_factory=TrainedCounts)
    end_tokens: set[int] = field(default_factory=set)

    @property
    def examples(self) -> list[Example]:
        """Every sequence of every item."""
        return [example for item in self.items for example in item.examples]

    def add(self, kept: Kept[ItemT]) -> None:
        super().add(kept)
        self.end_tokens.update(kept.ends)


class RowReader(Protocol[T]):
    """The rows of one source as items, within the limit: a row may give several, and None is one that is dropped."""

    @property
    def split_rows(self) -> int: ...

    @property
    def unusable(self) -> int:
        """Rows that were dropped for what they hold, not for their length; `found` says why."""
        ...

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[T] | None]: ...

    def found(self) -> str:
        """What the rows were read as; asked when all are read."""
        ...


LoadedT = TypeVar("LoadedT", bound=LoadedRows[Any])
# Opens the rows of one source, whose columns are still to be found, within a limit of tokens.
OpenRows = Callable[[ColumnFinder, PreTrainedTokenizerBase, int], RowReader[T]]


def load_rows(
    kind: type[LoadedT],
    open_rows: OpenRows[Any],
    sources: Sequence[Source],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    advance: Callable[[int], None] = lambda rows: None,
    opened: Sequence[RowSet] | None = None,
) -> LoadedT:
    """Read and encode every row before anything is trained; all bad rows are told together."""
    rowsets = (
        opened if opened is not None else [read_rows(source.path, reader=OwnReader.of(data)) for source in sources]
    )
    weights = [source.weight for source in sources if source.weight is not None]
    loaded = kind(weights=weights or None, fingerprints=[rows.described() for rows in rowsets])
    problems: list[Problem] = []
    for source, rows in zip(sources, rowsets, strict=True):
        reader = open_rows(ColumnFinder(source, data, rows.columns), tokenizer, limit)
        loaded.sources.append([])
        count = min(len(rows), source.rows or len(rows))
        problems += _read_source(rows, count, reader, loaded, advance)
        loaded.counts.split_by(reader)
        first = f"the first {count:,} of " if count < len(rows) else ""
        found = reader.found()
        loaded.notes.append(f"{source.path}: {first}{len(rows):,} rows as {found}")
        if reader.unusable and not loaded.sources[-1]:
            problems.append(Problem(source.path, f"all rows were dropped: read as {found}", "give other rows"))
        if rows.ignored:
            loaded.notes.append(f"{source.path}: not read: {', '.join(rows.ignored)}")
    refuse_all(problems, "rows")
    for source, items in zip(sources, loaded.sources, strict=True):
        if not items:
            raise Refusal.at(
                source.path, f"all {loaded.WHAT} are over {limit} tokens and were dropped", f"raise {loaded.LIMIT}"
            )
    return loaded


def _read_source(
    rows: RowSet, count: int, reader: RowReader[T], loaded: LoadedRows[T], advance: Callable[[int], None]
) -> list[Problem]:
    problems: list[Problem] = []
    for i in range(count):
        try:
            for kept in reader(rows[i], rows.origin(i)):
                if kept is None:
                    loaded.counts.dropped += 1
                else:
                    loaded.add(kept)
        except Refusal as refusal:
            problems += refusal.problems
        finally:
            advance(1)
    advance(len(rows) - count)
    return problems


class Loader(Generic[T]):
    """The rows of each update: a pure function of the seed and the position, so any position can be resumed.

    Updates run on over the end of an epoch; every row is visited once in each epoch, and only the very last
    update of a run with `total_rows` may be smaller. With `drop_last` an epoch ends with its last whole update.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[T]],
        weights: list[float] | None,
        *,
        rows_per_update: int,
        seed: int,
        shuffle: bool,
        total_rows: int | None,
        drop_last: bool = False,
    ):
        self.sources = sources
        self.mixture = Mixture([len(source) for source in sources], weights, seed, shuffle)
        self.rows_per_update = rows_per_update
        self.total_rows = total_rows
        self._epoch_rows = epoch_rows(self.mixture.epoch_length, rows_per_update, drop_last=drop_last)
        self._epoch = -1
        self._order: Sequence[tuple[int, int]] = ()

    def take(self, step: int) -> list[T]:
        """The rows of update `step`, counted from 0."""
        first = step * self.rows_per_update
        last = first + self.rows_per_update
        return self.between(first, last if self.total_rows is None else min(last, self.total_rows))

    def between(self, first: int, last: int) -> list[T]:
        """Rows at the positions `first` to `last` of the endless list."""
        return [self._row(i) for i in range(first, last)]

    def _row(self, index: int) -> T:
        epoch, position = divmod(index, self._epoch_rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.mixture.order(epoch)
        source, row = self._order[position]
        return self.sources[source][row]


def epoch_rows(rows: int, rows_per_update: int, *, drop_last: bool) -> int:
    """How many of the rows an epoch visits."""
    if not drop_last:
        return rows
    if rows < rows_per_update:
        raise Refusal.at(
            "data.drop_last",
            f"{rows:,} rows are fewer than the {rows_per_update:,} of one update: every epoch would be empty",
            "lower batch.rows_per_update (online batch.prompts), or set data.drop_last=false",
        )
    return rows - rows % rows_per_update


def steps_and_rows(
    rows: int, rows_per_update: int, *, epochs: int | None, steps: int | None, drop_last: bool = False
) -> tuple[int, int]:
    """How many updates the run has, and how many rows they visit in all."""
    if steps is not None:
        return steps, steps * rows_per_update
    total = epoch_rows(rows, rows_per_update, drop_last=drop_last) * (epochs or 1)
    return -(-total // rows_per_update), total
