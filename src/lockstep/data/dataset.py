"""Loads and encodes all rows of a recipe as items of its method, and selects the rows of each update (`Loader`)."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar, runtime_checkable

from lockstep.data.array_store import Joined, OriginOf, Store, image_files, sequences, stored, unchanged_images
from lockstep.data.encode import dialogue as special_text
from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.encoding import OverLimit
from lockstep.data.encode.tokenizer_cache import forget_pieces
from lockstep.data.parallel import BackgroundWorkers, in_processes, processes_here
from lockstep.data.row_cache import PART_ROWS, RowCache, cache_folder, worth_keeping
from lockstep.data.row_reader import RowCounts, RowReader, TrainedCounts
from lockstep.data.sources.mix import Mixture
from lockstep.data.sources.read import RowSet, read_rows
from lockstep.data.sources.user_reader import UserReader
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Example, Item

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Rows are encoded in parts (ranges of rows), in this process or in worker processes, or are read from the row cache.
# Each row is encoded independently, so the parts can be encoded in any order.

Span = tuple[int, int]
NAMED = 3
# Image files whose digests a checkpoint contains.
NAMED_IMAGES = 1000
"""A message lists at most this many dropped rows."""


@runtime_checkable
class Tallied(Protocol):
    """A row reader with a counter `tally` of what it has read; its method `found` reports the counts."""

    tally: Counter[str]


@dataclass(frozen=True)
class RowPart:
    """Encoded rows, as bytes, or as objects if they cannot be stored as bytes."""

    data: Any = None
    """Bytes of a `Store`."""
    items: Sequence[Any] = ()
    about: dict[str, Any] = field(default_factory=dict)
    problems: Sequence[Problem] = ()
    elsewhere: bool = False
    """Whether another process has written these rows to the row cache in the meantime."""


@dataclass(frozen=True)
class RowWork:
    """The task of a worker process: the rows of a data source, and the reader that encodes them."""

    rows: RowSet
    reader: RowReader[Any]
    new_counts: Callable[[], RowCounts]
    cache: RowCache | None
    drop_bad: bool = False
    """Whether bad rows are dropped and counted instead of stopping the run."""

    def __call__(self, span: Span) -> RowPart:
        """Encodes a range of rows. Collects the problems of all rows instead of stopping at the first problem."""
        if self.cached(span) is not None:
            return RowPart(elsewhere=True)
        counts, ends, problems = self.new_counts(), set[int](), list[Problem]()
        items: list[Any] = []
        numbers: list[int] = []
        split, special, tally = self.reader.split_rows, self.reader.special_rows, self._tally()
        unseparated = self.reader.unseparated_rows
        first_special = first_unseparated = -1
        refused: list[tuple[int, str]] = []
        for number in range(*span):
            before = self._tally() if self.drop_bad else None
            try:
                found = self.reader(self.rows[number], self.rows.origin(number))
                if first_special < 0 and self.reader.special_rows > special:
                    first_special = number
                if first_unseparated < 0 and self.reader.unseparated_rows > unseparated:
                    first_unseparated = number
                for kept in found:
                    if kept is None:
                        counts.dropped += 1
                        continue
                    counts.add(kept)
                    ends.update(kept.ends)
                    items.append(kept.item)
                    numbers.append(number)
            except Refusal as refusal:
                if before is None or not self._is_bad(number, refusal):
                    problems += refusal.problems
                    continue
                counts.dropped += 1
                refused.append((number, refusal.problems[0].why))
                self._restore(before)
        tally = self._tally() - tally
        about = {
            "counts": vars(counts),
            "split": self.reader.split_rows - split,
            "special": (self.reader.special_rows - special, first_special) if first_special >= 0 else None,
            "unseparated": (self.reader.unseparated_rows - unseparated, first_unseparated),
            "refused": (len(refused), refused[:NAMED]),
            "tally": tally,
            "ends": sorted(ends),
        }
        if problems:
            return RowPart(problems=problems)
        data = stored(items, numbers, about, self.rows.origin)
        return RowPart(data=data, items=() if data is not None else items, about=about)

    def cached(self, span: Span) -> RowPart | None:
        """Returns a range of rows from the row cache. Returns None if it is not cached, or if an image file of the rows
        has changed."""
        data = None if self.cache is None else self.cache.get(span)
        if data is None:
            return None
        about = Store[Any](data, self.rows.origin).about
        return RowPart(data, about=about) if unchanged_images(about) else None

    def _is_bad(self, number: int, refusal: Refusal) -> bool:
        """Returns whether the error is about the row itself, and not about a setting or the row's length."""
        return refusal.problems[0].where == str(self.rows.origin(number)) and not isinstance(refusal, OverLimit)

    def _restore(self, tally: Counter[str]) -> None:
        if isinstance(self.reader, Tallied):
            self.reader.tally = tally

    def _tally(self) -> Counter[str]:
        return Counter(self.reader.tally) if isinstance(self.reader, Tallied) else Counter()


def read_parts(work: RowWork, count: int, advance: Callable[[int], None]) -> list[RowPart]:
    """Encodes the first `count` rows in parts (ranges of rows), and returns the encoded parts in row order."""
    spans = [(first, min(first + PART_ROWS, count)) for first in range(0, count, PART_ROWS)]
    parts: dict[Span, RowPart] = {}
    cache = work.cache
    for span in spans if cache is not None else ():
        _found(work, span, parts, advance)
    missing = _rank_offset_first([span for span in spans if span not in parts])
    for span, part in in_processes(work, missing, processes_here(len(missing))):
        if part.elsewhere and _found(work, span, parts, advance):
            continue
        made = work(span) if part.elsewhere else part  # the cache entry was deleted in the meantime
        if cache is not None and made.data is not None:
            made = RowPart(cache.put(span, made.data), made.items, made.about)
        parts[span] = made
        advance(span[1] - span[0])
    if missing and cache is not None:
        cache.prune()
    return [parts[span] for span in spans]


def _found(work: RowWork, span: Span, parts: dict[Span, RowPart], advance: Callable[[int], None]) -> bool:
    """Reads the encoded rows of the range `span` from the row cache into `parts`. Returns False if the range is not
    cached."""
    part = work.cached(span)
    if part is None:
        return False
    parts[span] = part
    advance(span[1] - span[0])
    return True


def _rank_offset_first(spans: list[Span]) -> list[Span]:
    """Rotates the list of row ranges, so that each rank starts at a different range. Later, a rank reads from the row
    cache the ranges that other ranks have encoded."""
    ranks, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    begin = rank * len(spans) // max(1, ranks)
    return spans[begin:] + spans[:begin]


T = TypeVar("T")
ItemT = TypeVar("ItemT", bound=Item)


class OpenStream(Protocol[T]):
    """Opens the stream of a streamed data set (`data/streaming.py`)."""

    def __call__(
        self,
        rows_per_update: int,
        seed: int,
        carried: Mapping[str, float],
        workers: BackgroundWorkers[Any, Any] | None,
    ) -> BatchSource[T]: ...


@dataclass
class LoadedRows(Generic[T]):
    """The encoded items of several data sources, with the sources' weights and fingerprints, and counts."""

    WHAT: ClassVar[str] = "rows"
    LIMIT: ClassVar[str] = "data.max_tokens"

    sources: list[Sequence[T]] = field(default_factory=list)
    weights: list[float] | None = None
    fingerprints: list[dict[str, object]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    counts: RowCounts = field(default_factory=RowCounts)
    open_stream: OpenStream[T] | None = None
    """Opens the stream of a streamed data set (`data/streaming.py`), from the number of rows of an update, the seed,
    the state of a checkpoint and the worker processes. `sources` and `counts` of a streamed data set contain only its
    first rows."""
    start_workers: Callable[[int], BackgroundWorkers[Any, Any]] | None = None
    """Forks so many worker processes, which encode rows of a streamed data set."""
    workers: BackgroundWorkers[Any, Any] | None = None
    """The worker processes, while they run."""
    limit: int = 0
    """The maximum number of tokens of a streamed row."""

    @property
    def streamed(self) -> bool:
        return self.open_stream is not None

    @contextmanager
    def encoding_ahead(self, processes: int) -> Iterator[None]:
        """Starts the worker processes of a streamed data set, and ends them with the context. Enter the context before
        models are loaded, because a worker is a copy of this process."""
        if self.start_workers is not None and processes:
            self.workers = self.start_workers(processes)
        try:
            yield
        finally:
            if self.workers is not None:
                self.workers.close()
            self.workers = None

    @property
    def longest(self) -> int:
        """Number of tokens of the longest row. A streamed row may have as many tokens as the limit allows."""
        return self.limit if self.streamed else self.counts.longest

    @property
    def sentence(self) -> str:
        """The token counts, for the report before training."""
        return f"counted while training; up to {self.limit:,} per row" if self.streamed else self.counts.sentence()

    @property
    def kept(self) -> dict[str, int]:
        """Counts that a resumed run compares with its checkpoint. The counts also change if a limit changes, for the
        same files."""
        return {"rows": self.counts.rows, "tokens": self.counts.tokens} | (
            {"limit": self.limit} if self.streamed else {}
        )

    @property
    def items(self) -> Sequence[T]:
        return Joined(self.sources)

    def take(self, part: RowPart, origin_of: OriginOf) -> Sequence[T]:
        """Adds the counts of a part of the rows to the total; returns the part's items."""
        self.counts.merge(part.about["counts"])
        self.counts.add_split(part.about["split"])
        return part.items if part.data is None else Store(part.data, origin_of)


@dataclass
class Dataset(LoadedRows[ItemT]):
    """The encoded items of an offline method (SFT, DPO, ...)."""

    counts: TrainedCounts = field(default_factory=TrainedCounts)
    end_tokens: set[int] = field(default_factory=set)

    @property
    def examples(self) -> list[Example]:
        """Every sequence of every item, in memory."""
        return list(sequences(self.items))

    def take(self, part: RowPart, origin_of: OriginOf) -> Sequence[ItemT]:
        self.end_tokens.update(part.about["ends"])
        return super().take(part, origin_of)


LoadedT = TypeVar("LoadedT", bound=LoadedRows[Any])
# A function that makes the row reader of a source, from its column finder, the tokenizer and the token limit.
OpenRows = Callable[[ColumnFinder, "PreTrainedTokenizerBase", int], RowReader[T]]


def open_sources(sources: Sequence[Source], data: Data) -> list[RowSet]:
    """Opens and checks the rows of each source."""
    reader, cache = UserReader.of(data), cache_folder(data)
    return [read_rows(source.path, reader=reader, cache=cache, sample_by=data.sample_by) for source in sources]


def rows_taken(source: Source, rows: RowSet) -> int:
    """Returns how many rows of a source are read."""
    return min(len(rows), source.rows or len(rows))


@dataclass(frozen=True)
class RowRequest(Generic[LoadedT]):
    """Which rows are read, how each is encoded, and the class of the result."""

    kind: type[LoadedT]
    open_rows: OpenRows[Any]
    sources: Sequence[Source]
    data: Data
    tokenizer: PreTrainedTokenizerBase
    limit: int
    """Maximum number of tokens of a row."""


def _described_images(images: Mapping[str, str]) -> dict[str, Any]:
    """Returns the identity of the image files of a source. A resumed run compares the hash of their contents, not their
    names. The digests of the first files name a changed file."""
    contents = hashlib.sha256("\n".join(images.values()).encode()).hexdigest()
    return {"fingerprint": contents, "files": dict(islice(images.items(), NAMED_IMAGES))}


def load_rows(
    request: RowRequest[LoadedT],
    advance: Callable[[int], None] = lambda rows: None,
    opened: Sequence[RowSet] | None = None,
) -> LoadedT:
    """Reads and encodes every row before training starts. All bad rows are reported together."""
    open_rows, sources, data = request.open_rows, request.sources, request.data
    tokenizer, limit = request.tokenizer, request.limit
    rowsets = open_sources(sources, data) if opened is None else opened
    weights = [source.weight for source in sources if source.weight is not None]
    forget_pieces(tokenizer)
    loaded = request.kind(weights=weights or None, fingerprints=[rows.described() for rows in rowsets])
    problems: list[Problem] = []
    all_dropped: list[Problem] = []
    for source, rows, described in zip(sources, rowsets, loaded.fingerprints, strict=True):
        reader = open_rows(ColumnFinder(source, data, rows.columns, rows.partly), tokenizer, limit)
        count = rows_taken(source, rows)
        several = worth_keeping(count, open_rows)
        kept = RowCache.of(open_rows, source, data, rows, tokenizer, limit) if several else None
        work = RowWork(rows, reader, type(loaded.counts), kept, data.bad_rows == "drop")
        parts = read_parts(work, count, advance)
        problems += [problem for part in parts for problem in part.problems]
        if problems:
            continue
        origin_of = rows.origins()
        loaded.sources.append(Joined([loaded.take(part, origin_of) for part in parts]))
        if images := image_files(loaded.sources[-1]):
            described["images"] = _described_images(images)
        if isinstance(reader, Tallied):
            reader.tally = sum((Counter(part.about["tally"]) for part in parts), Counter())
        first = f"the first {count:,} of " if count < len(rows) else ""
        found = reader.found()
        loaded.notes.append(f"{source.path}: {first}{len(rows):,} rows as {found}")
        bad = bad_rows(parts, origin_of)
        if (bad or reader.unusable) and not loaded.sources[-1]:
            why = f"all rows were dropped: {bad}" if bad else f"all rows were dropped; they were read as {found}"
            all_dropped.append(Problem(source.path, why, "give other rows", code="no-rows"))
        left_out = [f"not read: {', '.join(rows.ignored)}"] if rows.ignored else []
        loaded.notes += [f"{source.path}: {note}" for note in (bad, special_rows(parts, origin_of), *left_out) if note]
        loaded.warnings += [f"{source.path}: {text}" for text in unseparated_rows(parts, origin_of, tokenizer)]
        if kept is not None and kept.failure:
            loaded.notes.append(kept.failure)
    refuse_all(with_drop_hint(problems) + all_dropped, "rows")
    for source, items in zip(sources, loaded.sources, strict=True):
        if not items:
            raise Refusal.at(
                source.path,
                f"all {loaded.WHAT} are over {limit} tokens and were dropped",
                f"raise {loaded.LIMIT}, as far as the model's context allows",
                code="no-rows",
            )
    return loaded


def with_drop_hint(problems: Sequence[Problem]) -> list[Problem]:
    """Adds `data.bad_rows=drop` to the remedy of the first problem, if the remedy does not mention a setting."""
    first, rest = problems[:1], problems[1:]
    hint = "data.bad_rows=drop leaves such rows out"
    hinted = [replace(one, remedy=f"{one.remedy}; {hint}") for one in first if one.remedy and "data." not in one.remedy]
    return [*(hinted or first), *rest]


def bad_rows(parts: Sequence[RowPart], origin_of: OriginOf) -> str:
    """Describes the rows that `data.bad_rows: drop` dropped; empty if no row was dropped."""
    count = sum(part.about["refused"][0] for part in parts)
    first = [one for part in parts for one in part.about["refused"][1]][:NAMED]
    named = "; ".join(f"{origin_of(number)}: {why}" for number, why in first)
    return f"{count:,} bad rows dropped (data.bad_rows): {named}" if count else ""


def special_rows(parts: Sequence[RowPart], origin_of: OriginOf) -> str:
    """Describes the rows whose text contains special tokens; empty if there are no such rows."""
    found = [about for part in parts if (about := part.about["special"])]
    return special_text.special_rows_note(sum(count for count, _ in found), origin_of(found[0][1])) if found else ""


def unseparated_rows(
    parts: Sequence[RowPart], origin_of: OriginOf, tokenizer: PreTrainedTokenizerBase
) -> Iterator[str]:
    """Warns about prompts joined to responses without a separator: the model cannot see where the answer starts."""
    found = [about for part in parts if (about := part.about["unseparated"])[0]]
    if found:
        why = "data.template is none" if tokenizer.chat_template else "the tokenizer has no chat template"
        yield (
            f"{sum(count for count, _ in found):,} rows join prompt and response without a space or line break "
            f"between them ({why}); the first is {origin_of(found[0][1])}. Set a format, for example "
            'data.prompt_format="Question: {}\\nAnswer: ", or name a chat template with data.template'
        )


class BatchSource(Protocol[T]):
    """Gives the rows of each update: a `Loader`, or the stream of a data set that does not fit into memory."""

    def take(self, step: int) -> list[T]:
        """Returns the rows of update `step`, counted from 0."""
        ...

    def between(self, first: int, last: int) -> list[T]:
        """Returns the rows at the positions `first` to `last` (exclusive) of the endless sequence of epochs."""
        ...

    def state(self, position: int) -> dict[str, float]:
        """Returns what a checkpoint stores to continue at `position`."""
        ...

    def progress(self, position: int, group: str) -> dict[str, float]:
        """Returns the metric `group/epoch` at `position`, and the counts of streamed rows so far."""
        ...


class Loader(Generic[T]):
    """Selects the rows of each update. The selection depends only on seed and position: a run can resume at any update.

    An update may span two epochs. Every row is visited once per epoch. All updates have the same number of rows, but
    the last one may be smaller if `total_rows` is set. With `drop_last`, an epoch ends after its last full update.
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
        """Returns the rows of update `step`, counted from 0."""
        first = step * self.rows_per_update
        last = first + self.rows_per_update
        return self.between(first, last if self.total_rows is None else min(last, self.total_rows))

    def between(self, first: int, last: int) -> list[T]:
        """Returns the rows at the positions `first` to `last` (exclusive) of the endless sequence of epochs."""
        return [self.sources[source][row] for source, row in map(self._place, range(first, last))]

    def state(self, position: int) -> dict[str, float]:
        """Returns an empty state, because the rows of an update depend only on seed and position."""
        return {}

    def progress(self, position: int, group: str) -> dict[str, float]:
        """Returns the number of epochs up to `position`. Row counts are omitted: they are known at the start."""
        return {f"{group}/epoch": position / self.mixture.epoch_length}

    def different(self) -> tuple[int, int]:
        """Returns the number of rows of the first update, and the number of distinct rows among them."""
        rows = min(self.rows_per_update, self.total_rows or self.rows_per_update)
        return rows, len(set(map(self._place, range(rows))))

    def _place(self, index: int) -> tuple[int, int]:
        """Returns the (source, row) pair at position `index` of the endless sequence of epochs."""
        epoch, position = divmod(index, self._epoch_rows)
        if epoch != self._epoch:
            self._epoch, self._order = epoch, self.mixture.order(epoch)
        return self._order[position]


def epoch_rows(rows: int, rows_per_update: int, *, drop_last: bool) -> int:
    """Returns the number of rows that an epoch visits."""
    if not drop_last:
        return rows
    if rows < rows_per_update:
        raise Refusal.at(
            "data.drop_last",
            f"{rows:,} rows are fewer than the {rows_per_update:,} of one update: every epoch would be empty",
            "lower batch.rows_per_update (online methods: batch.prompts), or set data.drop_last=false",
            code="too-few-rows",
        )
    return rows - rows % rows_per_update


def steps_and_rows(
    rows: int, rows_per_update: int, *, epochs: int | None, steps: int | None, drop_last: bool = False
) -> tuple[int, int]:
    """Returns the number of updates of the run, and the total number of rows they visit."""
    if steps is not None:
        return steps, steps * rows_per_update
    total = epoch_rows(rows, rows_per_update, drop_last=drop_last) * (epochs or 1)
    return -(-total // rows_per_update), total
