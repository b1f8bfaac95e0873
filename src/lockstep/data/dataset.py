"""All rows of a recipe as items of its method, with what was counted on the way; and the updates they come in."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from lockstep.data.array_store import Joined, OriginOf, Store, sequences
from lockstep.data.encode import dialogue as special_text
from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.tokenizer_cache import forget_pieces
from lockstep.data.encode_parts import NAMED, RowPart, RowWork, Tallied, read_parts
from lockstep.data.row_cache import RowCache, cache_folder, worth_keeping
from lockstep.data.sources.mix import Mixture
from lockstep.data.sources.read import RowSet, read_rows
from lockstep.data.sources.user_reader import OwnReader
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Example, Item, Origin, Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

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
        trained = sum(example.trained_tokens for example in examples)
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

    def merge(self, other: Mapping[str, int]) -> None:
        """Add what was counted of other rows."""
        for name, value in other.items():
            own = getattr(self, name)
            setattr(self, name, max(own, value) if name == "longest" else own + value)

    def add_split(self, rows: int) -> None:
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

    def add_split(self, rows: int) -> None:
        self.split += rows


@dataclass
class LoadedRows(Generic[T]):
    """What was read of some sources: the items by source, and where they came from."""

    WHAT: ClassVar[str] = "rows"
    LIMIT: ClassVar[str] = "data.max_tokens"

    sources: list[Sequence[T]] = field(default_factory=list)
    weights: list[float] | None = None
    fingerprints: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    counts: RowCounts = field(default_factory=RowCounts)

    @property
    def items(self) -> Sequence[T]:
        return Joined(self.sources)

    def take(self, part: RowPart, origin_of: OriginOf) -> Sequence[T]:
        """Count what became of some rows; returns their items."""
        self.counts.merge(part.about["counts"])
        self.counts.add_split(part.about["split"])
        return part.items if part.data is None else Store(part.data, origin_of)


@dataclass
class Dataset(LoadedRows[ItemT]):
    """The items of an offline method."""

    counts: TrainedCounts = field(default_factory=TrainedCounts)
    end_tokens: set[int] = field(default_factory=set)

    @property
    def examples(self) -> list[Example]:
        """Every sequence of every item, all at once in memory."""
        return list(sequences(self.items))

    def take(self, part: RowPart, origin_of: OriginOf) -> Sequence[ItemT]:
        self.end_tokens.update(part.about["ends"])
        return super().take(part, origin_of)


class RowReader(Protocol[T]):
    """The rows of one source as items, within the limit: a row may give several, and None is one that is dropped.

    What becomes of a row depends on that row alone: rows are read in parts, in several processes, or found encoded. A
    reader that counts something for `found` has a `tally` (`data/encode_parts.py`).
    """

    @property
    def split_rows(self) -> int: ...

    @property
    def special_rows(self) -> int:
        """Rows with special tokens in their text (`data/encode/dialogue.py`)."""
        ...

    @property
    def unseparated_rows(self) -> int:
        """Rows whose prompt and response were joined without anything between them."""
        ...

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
OpenRows = Callable[[ColumnFinder, "PreTrainedTokenizerBase", int], RowReader[T]]


def open_sources(sources: Sequence[Source], data: Data) -> list[RowSet]:
    """The rows of each source, found and checked."""
    reader, cache = OwnReader.of(data), cache_folder(data)
    return [read_rows(source.path, reader=reader, cache=cache) for source in sources]


def rows_taken(source: Source, rows: RowSet) -> int:
    """How many rows of a source are read."""
    return min(len(rows), source.rows or len(rows))


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
    rowsets = open_sources(sources, data) if opened is None else opened
    weights = [source.weight for source in sources if source.weight is not None]
    forget_pieces(tokenizer)
    loaded = kind(weights=weights or None, fingerprints=[rows.described() for rows in rowsets])
    problems: list[Problem] = []
    all_dropped: list[Problem] = []
    for source, rows in zip(sources, rowsets, strict=True):
        reader = open_rows(ColumnFinder(source, data, rows.columns, rows.partly), tokenizer, limit)
        count = rows_taken(source, rows)
        kept = RowCache.of(open_rows, source, data, rows, tokenizer, limit) if worth_keeping(count) else None
        work = RowWork(rows, reader, type(loaded.counts), kept, data.bad_rows == "drop")
        parts = read_parts(work, count, advance)
        problems += [problem for part in parts for problem in part.problems]
        if problems:
            continue
        origin_of = rows.origins()
        loaded.sources.append(Joined([loaded.take(part, origin_of) for part in parts]))
        if isinstance(reader, Tallied):
            reader.tally = sum((Counter(part.about["tally"]) for part in parts), Counter())
        first = f"the first {count:,} of " if count < len(rows) else ""
        found = reader.found()
        loaded.notes.append(f"{source.path}: {first}{len(rows):,} rows as {found}")
        bad = bad_rows(parts, origin_of)
        if (bad or reader.unusable) and not loaded.sources[-1]:
            why = f"all rows were dropped: {bad}" if bad else f"all rows were dropped: read as {found}"
            all_dropped.append(Problem(source.path, why, "give other rows"))
        left_out = [f"not read: {', '.join(rows.ignored)}"] if rows.ignored else []
        loaded.notes += [f"{source.path}: {note}" for note in (bad, special_rows(parts, origin_of), *left_out) if note]
        loaded.warnings += [f"{source.path}: {text}" for text in unseparated_rows(parts, origin_of, tokenizer)]
        if kept is not None and kept.failure:
            loaded.notes.append(kept.failure)
    refuse_all(_with_a_way_out(problems) + all_dropped, "rows")
    for source, items in zip(sources, loaded.sources, strict=True):
        if not items:
            raise Refusal.at(
                source.path,
                f"all {loaded.WHAT} are over {limit} tokens and were dropped",
                f"raise {loaded.LIMIT}, as far as the model's context allows",
            )
    return loaded


def _with_a_way_out(problems: Sequence[Problem]) -> list[Problem]:
    """The first of them also says how to go on without such rows, where it is a row that has to be mended."""
    first, rest = problems[:1], problems[1:]
    way = "data.bad_rows=drop leaves such rows out"
    told = [replace(one, remedy=f"{one.remedy}; {way}") for one in first if one.remedy and "data." not in one.remedy]
    return [*(told or first), *rest]


def bad_rows(parts: Sequence[RowPart], origin_of: OriginOf) -> str:
    """What was left out with `data.bad_rows: drop`; empty where nothing was."""
    count = sum(part.about["refused"][0] for part in parts)
    first = [one for part in parts for one in part.about["refused"][1]][:NAMED]
    named = "; ".join(f"{origin_of(number)}: {why}" for number, why in first)
    return f"{count:,} bad rows dropped (data.bad_rows): {named}" if count else ""


def special_rows(parts: Sequence[RowPart], origin_of: OriginOf) -> str:
    """How many rows hold special tokens in their text; empty where none does."""
    found = [about for part in parts if (about := part.about["special"])]
    return special_text.told(sum(count for count, _ in found), origin_of(found[0][1])) if found else ""


def unseparated_rows(
    parts: Sequence[RowPart], origin_of: OriginOf, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """A warning for prompts that run into their responses: the model could not tell where its answer begins."""
    found = [about for part in parts if (about := part.about["unseparated"])[0]]
    if found:
        why = "data.template is none" if tokenizer.chat_template else "the tokenizer has no chat template"
        yield (
            f"{sum(count for count, _ in found):,} rows join prompt and response without a space or line break "
            f"between them ({why}); the first is {origin_of(found[0][1])}. Set a format, for example "
            'data.prompt_format="Question: {}\\nAnswer: ", or name a chat template with data.template'
        )


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
        return [self.sources[source][row] for source, row in map(self._place, range(first, last))]

    def different(self) -> tuple[int, int]:
        """How many rows the first update has, and how many of them are different rows."""
        rows = min(self.rows_per_update, self.total_rows or self.rows_per_update)
        return rows, len(set(map(self._place, range(rows))))

    def _place(self, index: int) -> tuple[int, int]:
        """Which row of which source."""
        epoch, position = divmod(index, self._epoch_rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.mixture.order(epoch)
        return self._order[position]


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
