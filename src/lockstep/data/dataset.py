"""All rows of a recipe as items of its method, with what was counted on the way; and the updates they come in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from transformers import PreTrainedTokenizerBase

from lockstep.data.examples import Encoder, find_columns, fit, last_trained
from lockstep.data.mix import Mixture
from lockstep.data.read import RowSet, read_rows
from lockstep.errors import Problem, Refusal, shortened
from lockstep.recipe.schema import Data, Source
from lockstep.types import Example, Item, Origin, Row

T = TypeVar("T")
ItemT = TypeVar("ItemT", bound=Item)


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


@dataclass
class Counts(RowCounts):
    """Of rows that are trained."""

    trained_tokens: int = 0
    split: int = 0

    def sentence(self) -> str:
        return f"{self.tokens:,}, of which {self.trained_tokens:,} trained; longest row {self.longest}"


@dataclass
class Dataset(Generic[ItemT]):
    """The items of a method by source, and where they came from."""

    sources: list[list[ItemT]]
    weights: list[float] | None
    fingerprints: list[dict[str, object]]
    notes: list[str] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)
    end_tokens: set[int] = field(default_factory=set)

    @property
    def items(self) -> list[ItemT]:
        return [item for source in self.sources for item in source]

    @property
    def examples(self) -> list[Example]:
        """Every sequence of every item."""
        return [example for item in self.items for example in item.examples]


@dataclass(frozen=True)
class Kept(Generic[ItemT]):
    """An item within the limit, and the tokens at which the responses it trains end."""

    item: ItemT
    truncated: bool = False
    ends: tuple[int, ...] = ()


class Reader(Protocol[ItemT]):
    """The rows of one source as items, within the limit: a row may give several, and None is one that is dropped."""

    @property
    def split_rows(self) -> int: ...

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[ItemT] | None]: ...

    def found(self) -> str:
        """What the rows were read as; asked when all are read."""
        ...


def load_dataset(
    sources: Sequence[Source],
    data: Data,
    tokenizer: PreTrainedTokenizerBase,
    limit: int,
    advance: Callable[[int], None] = lambda rows: None,
    opened: Sequence[RowSet] | None = None,
) -> Dataset[Example]:
    """The rows of supervised training."""

    def reader(source: Source, rows: RowSet) -> SupervisedRows:
        columns = find_columns(source, data, list(rows.columns))
        return SupervisedRows(Encoder(tokenizer, columns, data), limit, data.overlong)

    return gather(sources, data, limit, advance, opened, reader)


class SupervisedRows:
    """One example a row."""

    def __init__(self, encoder: Encoder, limit: int, overlong: str):
        self.encoder, self.limit, self.overlong = encoder, limit, overlong

    @property
    def split_rows(self) -> int:
        return self.encoder.split_rows

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Example] | None]:
        whole = self.encoder(row, origin)
        example = fit(whole, self.limit, self.overlong)
        if example is None:
            return [None]
        return [Kept(example, len(example) < len(whole), (last_trained(whole),))]

    def found(self) -> str:
        return str(self.encoder.columns)


def gather(
    sources: Sequence[Source],
    data: Data,
    limit: int,
    advance: Callable[[int], None],
    opened: Sequence[RowSet] | None,
    open_reader: Callable[[Source, RowSet], Reader[ItemT]],
) -> Dataset[ItemT]:
    """Read and encode every row before anything is trained; all bad rows are told together."""
    rowsets = opened if opened is not None else [read_rows(source.path, reader=data.reader) for source in sources]
    weights = [source.weight for source in sources if source.weight is not None]
    dataset: Dataset[ItemT] = Dataset([], weights or None, [fingerprint(rows) for rows in rowsets])
    problems: list[Problem] = []
    for source, rows in zip(sources, rowsets, strict=True):
        reader = open_reader(source, rows)
        dataset.sources.append(_read_source(rows, reader, dataset, problems, advance))
        dataset.notes.append(f"{source.path}: {len(rows):,} rows as {reader.found()}")
        if rows.ignored:
            dataset.notes.append(f"{source.path}: not read: {', '.join(rows.ignored)}")
        dataset.counts.split += reader.split_rows
    if problems:
        raise Refusal(shortened(problems, "rows"))
    for source, items in zip(sources, dataset.sources, strict=True):
        if not items:
            raise Refusal.at(source.path, f"all rows are over {limit} tokens and were dropped", "raise data.max_tokens")
    return dataset


def fingerprint(rows: RowSet) -> dict[str, object]:
    """What a resume compares: content, not names."""
    return {
        "fingerprint": rows.fingerprint,
        "files": [{"name": f.name, "rows": f.rows, "bytes": f.bytes, "sha256": f.sha256} for f in rows.files],
    }


def _read_source(
    rows: RowSet,
    reader: Reader[ItemT],
    dataset: Dataset[ItemT],
    problems: list[Problem],
    advance: Callable[[int], None],
) -> list[ItemT]:
    items: list[ItemT] = []
    for i in range(len(rows)):
        try:
            for kept in reader(rows[i], rows.origin(i)):
                if kept is None:
                    dataset.counts.dropped += 1
                else:
                    _count(kept, dataset)
                    items.append(kept.item)
        except Refusal as refusal:
            problems.extend(refusal.problems)
        finally:
            advance(1)
    return items


def _count(kept: Kept[ItemT], dataset: Dataset[ItemT]) -> None:
    counts, examples = dataset.counts, kept.item.examples
    counts.rows += 1
    counts.truncated += kept.truncated
    counts.tokens += sum(len(example) for example in examples)
    counts.trained_tokens += sum(example.targets for example in examples)
    counts.longest = max(counts.longest, *(len(example) for example in examples))
    dataset.end_tokens.update(kept.ends)


class Loader(Generic[T]):
    """The rows of each update: a pure function of the seed and the place, so any position can be resumed.

    Updates run on over the end of an epoch; every row is visited once in each epoch, and only the very last
    update of a run with `total_rows` may be smaller.
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
    ):
        self.sources = sources
        self.mixture = Mixture([len(source) for source in sources], weights, seed, shuffle)
        self.rows_per_update = rows_per_update
        self.total_rows = total_rows
        self._epoch = -1
        self._order: Sequence[tuple[int, int]] = ()

    def take(self, step: int) -> list[T]:
        """The rows of update `step`, counted from 0."""
        first = step * self.rows_per_update
        last = first + self.rows_per_update
        return self.between(first, last if self.total_rows is None else min(last, self.total_rows))

    def between(self, first: int, last: int) -> list[T]:
        """Rows at the places `first` to `last` of the endless list."""
        return [self._row(i) for i in range(first, last)]

    def _row(self, index: int) -> T:
        epoch, place = divmod(index, self.mixture.epoch_length)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.mixture.order(epoch)
        source, row = self._order[place]
        return self.sources[source][row]


def steps_and_rows(rows: int, rows_per_update: int, *, epochs: int | None, steps: int | None) -> tuple[int, int]:
    """How many updates the run has, and how many rows they visit in all."""
    if steps is not None:
        return steps, steps * rows_per_update
    total = rows * (epochs or 1)
    return -(-total // rows_per_update), total
