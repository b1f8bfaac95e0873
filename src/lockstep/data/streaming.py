"""Reads, shuffles and encodes rows while training runs, for data sets larger than memory (`data.streaming`).

The order of rows depends only on the files and `run.seed`. In each epoch the files are visited in a new order. The rows
of all files, in the order of the epoch, are divided into windows of `data.shuffle_buffer` rows, and the rows of a
window are shuffled. So only one or two windows of rows are in memory. To continue, a run needs only the start of the
window and the position in it: a checkpoint stores this `StreamCursor` as numbers (`RowStream.state`).

Worker processes encode the rows of the next updates while this process trains. The cursor counts the items that were
taken, not the rows that were encoded, so the workers change neither the order of rows nor a resume.

Every rank reads all rows, and an update has the same rows for any number of ranks (`data/updates.py` divides them).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from lockstep.data.dataset import Dataset, LoadedRows, RowRequest, with_drop_hint
from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.encoding import OverLimit
from lockstep.data.parallel import BackgroundWorkers
from lockstep.data.row_reader import Kept, RowReader
from lockstep.data.sources.mix import permutation
from lockstep.data.sources.rowset import FORMAT_COLUMNS, OPTIONAL
from lockstep.data.sources.shards import OriginRow, Shard, open_shards
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.recipe.keys_data import Data
from lockstep.types import Origin, Row

if TYPE_CHECKING:
    pass

T = TypeVar("T")
LoadedT = TypeVar("LoadedT", bound=LoadedRows[Any])
ItemCheck = Callable[[Sequence[Any]], Iterable[Problem]]
"""Returns the problems of the items of an update, which a data set in memory reports before training."""

SAMPLED_ROWS = 256
"""Number of rows of each source that are encoded and checked before training."""
# Numbers for the purposes of random streams, greater than those in `data/sources/mix.py`.
_SHARDS, _WINDOW = 4, 5
# Items of this many updates stay in memory, because a run reads some updates twice (asynchronous rollouts).
_KEPT_UPDATES = 8
# Rows of this many updates are encoded ahead, in tasks of so many rows.
_AHEAD_UPDATES, _TASK_ROWS = 2, 16
_STATE = "stream/"


@dataclass(frozen=True)
class StreamCursor:
    """A position in the rows of a `ShardPool`: the start of a window, and the position in the window."""

    epoch: int = 0
    window: int = 0
    shard: int = 0
    """Index of the file, in the order of the epoch, in which the window starts."""
    row: int = 0
    """Number of rows of this file before the window."""
    used: int = 0
    """Number of rows of the shuffled window whose items were all returned."""
    item: int = 0
    """Number of items of the next row that were already returned. A split text gives several items."""
    given: int = 0
    """Number of items that the pool has returned in all epochs."""
    dropped: int = 0
    truncated: int = 0


@dataclass(frozen=True)
class SourceShard(Generic[T]):
    """A file, the reader that encodes its rows, and the columns that the reader knows."""

    shard: Shard
    reader: RowReader[T]
    columns: frozenset[str]

    def encoded(self, row: Row, origin: Origin) -> Sequence[Kept[T] | None]:
        """Encodes a row. Refuses a row with a column of `FORMAT_COLUMNS` or `OPTIONAL` that the first rows of the
        source lack, because the reader would ignore this column."""
        unknown = sorted((row.keys() - self.columns) & (FORMAT_COLUMNS | OPTIONAL))
        if unknown:
            raise Refusal.at(
                origin,
                f"has the column {unknown[0]!r}, which the first rows of the source lack",
                f"add {unknown[0]!r} to the first row of the file, as null if it has no value",
                code="mixed-rows",
            )
        return self.reader(row, origin)


RowTask = tuple[int, list[tuple[int, OriginRow]]]
"""Rows that a worker encodes: the number of the pool, and for each row the index of its file, its origin and itself."""
Encoded = Sequence[Kept[T] | None] | Refusal
"""The items of a row, or why the row is refused."""
Workers = BackgroundWorkers[RowTask, list[Any]]


def encode_rows(pools: Sequence[Sequence[SourceShard[T]]], task: RowTask) -> list[Encoded[T]]:
    """Encodes rows in a worker process."""
    number, rows = task
    found: list[Encoded[T]] = []
    for which, (origin, row) in rows:
        try:
            found.append(pools[number][which].encoded(row, origin))
        except Refusal as refusal:
            found.append(refusal)
    return found


@dataclass
class Window(Generic[T]):
    """Rows that are shuffled together, in the order in which they are taken. A window without rows ends an epoch."""

    rows: list[tuple[int, OriginRow] | None] = field(default_factory=list)
    """For each row the index of its file, its origin and itself; None after the row was taken."""
    end: tuple[int, int] = (0, 0)
    """The file (its index in the order of the epoch) and the row in it with which the next window starts."""
    submitted: int = 0
    """Number of rows that workers encoded or encode."""
    ahead: deque[tuple[int, Future[list[Encoded[T]] | None]]] = field(default_factory=deque)
    """The tasks of workers: the number of the first row of a task, and the encoded rows."""


class ShardPool(Generic[T]):
    """An endless sequence of items: the encoded rows of some files, epoch after epoch."""

    def __init__(
        self,
        shards: Sequence[SourceShard[T]],
        data: Data,
        key: tuple[int, ...],
        workers: Workers | None = None,
        ahead: int = 0,
    ):
        """`key` seeds the order of the rows. Its last number is the number of the pool. The workers encode `ahead` rows
        before they are taken."""
        self.shards, self._key, self._workers, self._rows_ahead = shards, key, workers, ahead
        self._shuffle, self._buffer, self._drop_bad = data.shuffle, data.shuffle_buffer, data.bad_rows == "drop"
        # The window of the cursor, if it was read, and the next one. A Refusal is raised when its rows are taken.
        self._windows: deque[Window[T] | Refusal] = deque()
        self.go_to(StreamCursor())

    def go_to(self, cursor: StreamCursor) -> None:
        for window in self._windows:
            for _, encoded in window.ahead if isinstance(window, Window) else ():
                encoded.cancel()
        self.cursor = cursor
        self._windows.clear()
        self._reading = self._read_windows(cursor)
        self._items: deque[Kept[T]] = deque()
        # None if reading starts at a later cursor, because it is then unknown whether the epoch has given items.
        self._given_before: int | None = cursor.given if cursor == StreamCursor() else None

    @property
    def resident_rows(self) -> int:
        """Number of rows in memory that were not taken yet."""
        windows = (window for window in self._windows if isinstance(window, Window))
        return sum(row is not None for window in windows for row in window.rows)

    def epochs(self, cursor: StreamCursor) -> float:
        """Returns the number of epochs before the cursor's window, counted in files: each file is visited once per
        epoch."""
        return cursor.epoch + cursor.shard / len(self.shards)

    def take(self) -> T:
        while not self._items:
            if not self._windows:
                self._windows.append(self._next_read())
            window = self._windows[0]
            if isinstance(window, Refusal):
                raise window
            if not window.rows:
                self._next_epoch()
            elif self.cursor.used == len(window.rows):
                self._next_window(window)
            else:
                self._take_row(window)
        kept = self._items.popleft()
        cursor = self.cursor
        at = {"item": cursor.item + 1} if self._items else {"used": cursor.used + 1, "item": 0}
        self.cursor = replace(cursor, **at, given=cursor.given + 1, truncated=cursor.truncated + kept.truncated)
        return kept.item

    def _read_windows(self, cursor: StreamCursor) -> Iterator[Window[T]]:
        """Reads the windows from the cursor on, without end."""
        epoch, number, shard, row, used = cursor.epoch, cursor.window, cursor.shard, cursor.row, cursor.used
        while True:
            rows, visits = self._rows_from(epoch, shard, row), self._visits(epoch)
            while read := list(islice(rows, self._buffer)):
                order: Iterable[int] = range(len(read))
                if self._shuffle:
                    order = permutation(len(read), *self._key, _WINDOW, epoch, number).tolist()
                taken: list[tuple[int, OriginRow] | None] = [(visits[read[at][0]], read[at][2]) for at in order]
                taken[:used] = [None] * used
                last_shard, last_row, _ = read[-1]
                yield Window(taken, (last_shard, last_row + 1), used)
                number, used = number + 1, 0
            yield Window()
            epoch, number, shard, row = epoch + 1, 0, 0, 0

    def _next_window(self, window: Window[T]) -> None:
        shard, row = window.end
        self.cursor = replace(self.cursor, window=self.cursor.window + 1, shard=shard, row=row, used=0, item=0)
        self._windows.popleft()

    def _next_epoch(self) -> None:
        cursor = self.cursor
        if cursor.given == self._given_before:
            names = self.shards[0].shard.name + (f" and {len(self.shards) - 1} more files" * (len(self.shards) > 1))
            raise Refusal.at(
                names,
                f"no row of an epoch can be trained: {cursor.dropped:,} were dropped",
                "check data.overlong, data.bad_rows and data.max_tokens (online methods: data.max_prompt_tokens)",
                code="no-rows",
            )
        counts = {"given": cursor.given, "dropped": cursor.dropped, "truncated": cursor.truncated}
        self.cursor, self._given_before = StreamCursor(epoch=cursor.epoch + 1, **counts), cursor.given
        self._windows.popleft()

    def _visits(self, epoch: int) -> list[int]:
        """Returns the order in which the epoch visits the files."""
        if not self._shuffle:
            return list(range(len(self.shards)))
        order: list[int] = permutation(len(self.shards), *self._key, _SHARDS, epoch).tolist()
        return order

    def _rows_from(self, epoch: int, shard: int, row: int) -> Iterator[tuple[int, int, OriginRow]]:
        """Yields (index of the file in the order of the epoch, row number in the file, row) up to the epoch's end."""
        for number, which in enumerate(self._visits(epoch)[shard:], start=shard):
            first = row if number == shard else 0
            for index, read in enumerate(self.shards[which].shard.rows(first), start=first):
                yield number, index, read

    def _take_row(self, window: Window[T]) -> None:
        """Encodes the next row of the window into `_items`. A row without items is counted and skipped."""
        cursor = self.cursor
        visited = window.rows[cursor.used]
        assert visited is not None
        which, (origin, row) = visited
        found = self._encoded_ahead(window, cursor.used)
        try:
            if isinstance(found, Refusal):
                raise found
            if found is None:
                found = self.shards[which].encoded(row, origin)
        except Refusal as refusal:
            of_row = refusal.problems[0].where == str(origin) and not isinstance(refusal, OverLimit)
            if not (self._drop_bad and of_row):
                raise Refusal(with_drop_hint(refusal.problems)) from refusal
            found = [None]
        window.rows[cursor.used] = None
        kept = [one for one in found if one is not None]
        if cursor.item == 0:
            self.cursor = cursor = replace(cursor, dropped=cursor.dropped + len(found) - len(kept))
        if not kept:
            self.cursor = replace(cursor, used=cursor.used + 1)
        self._items.extend(kept[cursor.item :])

    def _encoded_ahead(self, window: Window[T], used: int) -> Encoded[T] | None:
        """Returns the row as a worker encoded it; None if no worker did. Also submits the rows of the next updates."""
        if self._workers is None:
            return None
        self._submit_rows(self._workers)
        first, encoded = window.ahead[0]
        rows = encoded.result()
        last = window.ahead[1][0] if len(window.ahead) > 1 else window.submitted
        if used + 1 == last:
            window.ahead.popleft()
        return None if rows is None else rows[used - first]

    def _submit_rows(self, workers: Workers) -> None:
        """Submits rows to the workers until `_rows_ahead` rows are submitted and not taken. Reads the next window if
        this one has fewer rows."""
        left = self._rows_ahead + self.cursor.used
        for at in range(2):
            if at == len(self._windows):
                self._windows.append(self._next_read())
            window = self._windows[at]
            if isinstance(window, Refusal) or not window.rows:
                return  # an epoch may be without items, so the next epoch is not read ahead
            while window.submitted < min(len(window.rows), left):
                first = window.submitted
                rows = [row for row in window.rows[first : first + _TASK_ROWS] if row is not None]
                window.ahead.append((first, workers.submit((self._key[-1], rows))))
                window.submitted += len(rows)
            left -= len(window.rows)
            if left <= 0:
                return

    def _next_read(self) -> Window[T] | Refusal:
        try:
            return next(self._reading)
        except Refusal as refusal:
            return refusal


class RowStream(Generic[T]):
    """Selects the rows of each update from pools of files. Several pools are mixed by their weights: the next item
    comes from the pool whose number of items is furthest below its weighted fraction."""

    def __init__(
        self, pools: Sequence[ShardPool[T]], weights: Sequence[float], *, rows_per_update: int, check: ItemCheck
    ):
        self.pools, self._weights, self._check = pools, weights, check
        self.rows_per_update, self.position = rows_per_update, 0
        self._recent: OrderedDict[int, T] = OrderedDict()
        self._cursors: OrderedDict[int, list[StreamCursor]] = OrderedDict()

    def take(self, step: int) -> list[T]:
        """Returns the rows of update `step`, counted from 0."""
        return self.between(step * self.rows_per_update, (step + 1) * self.rows_per_update)

    def between(self, first: int, last: int) -> list[T]:
        """Returns the items at the positions `first` to `last` (exclusive). Items that are no longer in memory are read
        from the files again."""
        if first > self.position or any(at not in self._recent for at in range(first, min(last, self.position))):
            self._go_to(first)
        items = [self._recent[at] if at in self._recent else self._next() for at in range(first, last)]
        refuse_all(list(self._check(items)), "rows")
        return items

    def _go_to(self, position: int) -> None:
        """Continues at an earlier or later position. If the cursors of an earlier position are no longer in memory, all
        items before this position are read again."""
        cursors = self._cursors.get(position)
        if cursors is not None or position < self.position:
            self._set(position if cursors else 0, cursors or [StreamCursor()] * len(self.pools))
        while self.position < position:
            self._next()

    def _set(self, position: int, cursors: Sequence[StreamCursor]) -> None:
        for pool, cursor in zip(self.pools, cursors, strict=True):
            pool.go_to(cursor)
        self.position = position
        self._recent.clear()

    def _next(self) -> T:
        if len(self.pools) == 1:
            pool = self.pools[0]
        else:
            due = [(self.position + 1) * share / sum(self._weights) for share in self._weights]
            behind = [wanted - one.cursor.given for wanted, one in zip(due, self.pools, strict=True)]
            pool = self.pools[behind.index(max(behind))]
        self._cursors[self.position] = self._now()
        item = pool.take()
        self._recent[self.position] = item
        self.position += 1
        while len(self._recent) > _KEPT_UPDATES * self.rows_per_update:
            self._recent.popitem(last=False)
        while len(self._cursors) > _KEPT_UPDATES * self.rows_per_update:
            self._cursors.popitem(last=False)
        return item

    def _now(self) -> list[StreamCursor]:
        return [pool.cursor for pool in self.pools]

    def state(self, position: int) -> dict[str, float]:
        """Returns the numbers with which a resumed run continues at `position`."""
        cursors = self._now() if position == self.position else self._cursors.get(position)
        if cursors is None:
            return {}  # the resumed run then reads all items before `position` again
        numbers = {"position": position}
        for number, cursor in enumerate(cursors):
            numbers |= {f"{number}/{key}": value for key, value in asdict(cursor).items()}
        return {f"{_STATE}{key}": float(value) for key, value in numbers.items()}

    def restore(self, carried: Mapping[str, float]) -> None:
        """Continues at the position of a checkpoint."""
        if f"{_STATE}position" not in carried:
            return
        cursors = []
        for number in range(len(self.pools)):
            numbers = {one.name: int(carried[f"{_STATE}{number}/{one.name}"]) for one in fields(StreamCursor)}
            cursors.append(StreamCursor(**numbers))
        self._cursors.clear()
        self._set(int(carried[f"{_STATE}position"]), cursors)

    def progress(self, position: int, group: str) -> dict[str, float]:
        """Returns the number of epochs of the pool with the fewest epochs, and the counts of streamed, dropped and
        truncated rows so far."""
        # Asynchronous rollouts read ahead of `position`.
        cursors = self._cursors.get(position) or self._now()
        names = {"streamed": "given", "dropped": "dropped", "truncated": "truncated"}
        counts = {f"data/{name}": float(sum(getattr(cursor, key) for cursor in cursors)) for name, key in names.items()}
        return {f"{group}/epoch": min(map(ShardPool.epochs, self.pools, cursors)), **counts}


def stream_rows(request: RowRequest[LoadedT], check: ItemCheck) -> LoadedT:
    """Opens the files of the sources, and encodes the first row of every file and the first rows of every source.

    The result contains only the encoded first rows, for the checks before training. `open_stream` of the result gives
    the rows of updates.
    """
    sources, data = request.sources, request.data
    weights = [source.weight for source in sources if source.weight is not None]
    loaded = request.kind(weights=weights or None)
    by_source: list[list[SourceShard[Any]]] = []
    problems: list[Problem] = []
    for source in sources:
        shards, ignored = open_shards(source.path, data.sample_by)
        columns = tuple(dict.fromkeys(column for _, row in _first_rows(shards) for column in row))
        reader = request.open_rows(ColumnFinder(source, data, columns), request.tokenizer, request.limit)
        by_source.append([SourceShard(shard, reader, frozenset(columns)) for shard in shards])
        problems += _sampled(loaded, shards, reader, drop_bad=data.bad_rows == "drop")
        files = f"{len(shards):,} file{'s' * (len(shards) > 1)}"
        loaded.notes.append(f"{source.path}: {files}, streamed as {reader.found()}")
        loaded.notes += [f"{source.path}: not read: {', '.join(ignored)}"] if ignored else []
        loaded.fingerprints.append(_described(shards))
    refuse_all(with_drop_hint(problems), "rows")
    for source, items in zip(sources, loaded.sources, strict=True):
        if not items:
            why = f"the first {SAMPLED_ROWS} rows were all dropped"
            raise Refusal.at(source.path, why, f"raise {loaded.LIMIT}, or check the rows", code="no-rows")
    # Without weights, the files of all sources are shuffled together.
    groups = by_source if weights else [[shard for shards in by_source for shard in shards]]

    def open_stream(
        rows_per_update: int, seed: int, carried: Mapping[str, float], workers: Workers | None
    ) -> RowStream[Any]:
        ahead = _AHEAD_UPDATES * rows_per_update
        pools = [ShardPool(group, data, (seed, number), workers, ahead) for number, group in enumerate(groups)]
        stream = RowStream(pools, weights or [1.0], rows_per_update=rows_per_update, check=check)
        stream.restore(carried)
        return stream

    loaded.open_stream, loaded.limit = open_stream, request.limit
    loaded.start_workers = partial(BackgroundWorkers, partial(encode_rows, groups))
    return loaded


def _described(shards: Sequence[Shard]) -> dict[str, object]:
    """Returns the identity of a source, in the form of `RowSet.described`."""
    files = [shard.described() for shard in shards]
    digest = hashlib.sha256("\n".join(str(file["sha256"]) for file in files).encode()).hexdigest()
    return {"fingerprint": digest, "files": files}


def _first_rows(shards: Sequence[Shard]) -> Iterator[OriginRow]:
    """Yields the first rows of a source and the first row of every further file. Raises `Refusal` for a file without
    rows."""
    left = SAMPLED_ROWS
    for shard in shards:
        if left <= 0 and shard.is_plain_text:
            return  # all text files have the same columns, and a row may be a full file
        read = 0
        for one in islice(shard.rows(), max(1, left)):
            read += 1
            yield one
        if not read:
            raise Refusal.at(shard.name, "has no rows", "remove the file", code="no-rows")
        left -= read


def _sampled(
    loaded: LoadedRows[Any], shards: Sequence[Shard], reader: RowReader[Any], *, drop_bad: bool
) -> Iterator[Problem]:
    """Adds the first items of a source to the loaded rows. Yields the problems of the rows."""
    items: list[Any] = []
    loaded.sources.append(items)
    for origin, row in _first_rows(shards):
        try:
            found = reader(row, origin)
        except Refusal as refusal:
            if not drop_bad or isinstance(refusal, OverLimit) or refusal.problems[0].where != str(origin):
                yield from refusal.problems
            found = [None]
        for kept in found:
            if kept is None:
                loaded.counts.dropped += 1
                continue
            items.append(kept.item)
            loaded.counts.add(kept)
            if isinstance(loaded, Dataset):
                loaded.end_tokens.update(kept.ends)
