"""Streamed rows: their order, exact continuation, bounded memory, mixtures, and what is refused."""

from __future__ import annotations

import gc
import gzip
import json
import multiprocessing
import os
import signal
import time
import tracemalloc
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import permutations
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hang import HANG, wait_until
from lockstep.data.dataset import Dataset, LoadedRows, RowRequest, load_rows
from lockstep.data.encode.preference_rows import RankingRows
from lockstep.data.encode.prompt_rows import PromptRows, PromptSet
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.data.parallel import BackgroundWorkers
from lockstep.data.row_reader import Kept
from lockstep.data.sources.read import read_rows
from lockstep.data.sources.shards import Shard, open_shards
from lockstep.data.streaming import SAMPLED_ROWS, RowStream, Window, _first_rows, stream_rows
from lockstep.errors import Problem, Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data
from lockstep.types import Example, Origin, Row
from refusals import refuses


class NumberedRows:
    """Encodes the row `{"n": 7}` as the token 7, twice if `copies` is 2, and drops so many items as `drop` says. Drops
    rows with a negative number, and refuses rows without a number."""

    split_rows = special_rows = unseparated_rows = unusable = 0

    def __init__(self, *_: Any):
        pass

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Example] | None]:
        if "n" not in row:
            raise Refusal.at(origin, "has no number", "add it", code="missing-column")
        number = int(row["n"])
        if number < 0:
            return [None]
        kept = Kept[Example].of(Example([number, 0], bytes([0, 1]), origin), False)
        return [*[None] * int(row.get("drop", 0)), *[kept] * int(row.get("copies", 1))]

    def found(self) -> str:
        return "numbers"


def requested(data: Data, reader: Any = NumberedRows) -> RowRequest[Dataset[Any]]:
    return RowRequest(Dataset, reader, data.train, data, None, 100)  # type: ignore[arg-type]


def streamed(
    folder: Path | list[dict[str, object]],
    per_update: int = 4,
    seed: int = 1,
    processes: int = 0,
    reader: Any = NumberedRows,
    **keys: Any,
) -> RowStream[Any]:
    train = str(folder) if isinstance(folder, Path) else folder
    data = Data.model_validate({"train": train, "streaming": True, "shuffle_buffer": 8, **keys})
    loaded = stream_rows(requested(data, reader), lambda items: ())
    assert loaded.open_stream is not None
    assert loaded.start_workers is not None
    workers = loaded.start_workers(processes) if processes else None
    stream = loaded.open_stream(per_update, seed, {}, workers)
    assert isinstance(stream, RowStream)
    return stream


def write_numbers(folder: Path, files: Sequence[Sequence[int]], **more: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for index, numbers in enumerate(files):
        lines = "".join(json.dumps({"n": number, **more}) + "\n" for number in numbers)
        (folder / f"part-{index}.jsonl").write_text(lines)
    return folder


def numbers(items: Sequence[Example]) -> list[int]:
    return [item.ids[0] for item in items]


FIVE_FILES = [range(10), range(10, 13), range(13, 40), range(40, 41), range(41, 50)]


# --- the order of rows ------------------------------------------------------------------------------------------------


def test_an_epoch_visits_every_row_once_in_a_new_order(tmp_path: Path) -> None:
    stream = streamed(write_numbers(tmp_path, FIVE_FILES))
    first, second = numbers(stream.between(0, 50)), numbers(stream.between(50, 100))
    assert sorted(first) == sorted(second) == list(range(50))
    assert first != second != list(range(50))
    assert numbers(streamed(tmp_path, seed=2).between(0, 50)) != first
    assert numbers(streamed(tmp_path, shuffle=False).between(0, 60)) == [*range(50), *range(10)]


def test_the_rows_of_one_file_come_in_a_new_order_too(tmp_path: Path) -> None:
    stream = streamed(write_numbers(tmp_path, [range(8)]))
    orders = [tuple(numbers(stream.between(start, start + 8))) for start in range(0, 40, 8)]
    assert len(set(orders)) == 5


def test_a_window_holds_the_rows_of_consecutive_files(tmp_path: Path) -> None:
    """For some order of the files, each run of 8 rows in this order is shuffled within itself."""
    visited = numbers(streamed(write_numbers(tmp_path, FIVE_FILES)).between(0, 50))
    windows = [set(visited[start : start + 8]) for start in range(0, 50, 8)]

    def agrees(order: Sequence[Sequence[int]]) -> bool:
        in_order = [number for file in order for number in file]
        return windows == [set(in_order[start : start + 8]) for start in range(0, 50, 8)]

    assert any(map(agrees, permutations(FIVE_FILES)))
    assert not agrees(FIVE_FILES)


def test_updates_do_not_depend_on_their_size(tmp_path: Path) -> None:
    write_numbers(tmp_path, FIVE_FILES)
    expected = numbers(streamed(tmp_path, 4).between(0, 120))
    by_seven = streamed(tmp_path, 7)
    assert [number for step in range(17) for number in numbers(by_seven.take(step))] == expected[:119]


# --- exact continuation -----------------------------------------------------------------------------------------------


@pytest.mark.daily
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("shuffle", [True, False])
def test_a_stream_continues_at_every_position(tmp_path: Path, shuffle: bool, copies: int) -> None:
    write_numbers(tmp_path, [[*range(10), -1], [-1, -2], range(10, 24)], copies=copies, drop=copies - 1)
    whole = streamed(tmp_path, shuffle=shuffle)
    rows, total = [], 30 * copies
    for step in range(total):
        rows += whole.between(step, step + 1)
        state = {key: float(repr(value)) for key, value in whole.state(step + 1).items()}
        again = streamed(tmp_path, shuffle=shuffle)
        again.restore(state)
        assert again.progress(step + 1, "train") == whole.progress(step + 1, "train")
        fresh = streamed(tmp_path, shuffle=shuffle)
        assert numbers(again.between(step + 1, step + 9)) == numbers(fresh.between(step + 1, step + 9))
        assert again.progress(step + 9, "train") == fresh.progress(step + 9, "train")
    assert sorted(set(numbers(rows))) == list(range(24))


def test_earlier_updates_are_read_again(tmp_path: Path) -> None:
    stream = streamed(write_numbers(tmp_path, FIVE_FILES))
    steps = [numbers(stream.take(step)) for step in range(20)]
    assert numbers(stream.take(19)) == steps[19]
    assert numbers(stream.take(13)) == steps[13]
    assert numbers(stream.take(0)) == steps[0]
    assert numbers(stream.take(17)) == steps[17]
    assert streamed(tmp_path).state(3) == {}


def test_a_resumed_stream_skips_the_files_before(tmp_path: Path) -> None:
    """The state names the file and the row: a damaged earlier file is not read again."""
    write_numbers(tmp_path, [range(20), range(20, 40)])
    stream = streamed(tmp_path, shuffle=False)
    stream.between(0, 30)
    state = stream.state(30)
    again = streamed(tmp_path, shuffle=False)
    (tmp_path / "part-0.jsonl").write_text("damaged")
    again.restore(state)
    assert numbers(again.between(30, 40)) == list(range(30, 40))


# --- worker processes -------------------------------------------------------------------------------------------------


class MarkedRows(NumberedRows):
    """Adds the id of the process that encoded a row as a token."""

    def __call__(self, row: Row, origin: Origin) -> Sequence[Kept[Example] | None]:
        found = super().__call__(row, origin)
        return [one and replace(one, item=replace(one.item, ids=[*one.item.ids, os.getpid()])) for one in found]


def writers(items: Sequence[Example]) -> set[int]:
    return {item.ids[2] for item in items}


@pytest.mark.parametrize("shuffle", [True, False])
def test_workers_change_no_row_and_no_state(tmp_path: Path, shuffle: bool) -> None:
    """The window of 8 rows is smaller than the 2 updates that are encoded ahead, so windows and epochs are crossed."""
    write_numbers(tmp_path, [[*range(10), -1], [-1, -2], range(10, 64)], copies=3, drop=1)
    alone = streamed(tmp_path, 5, shuffle=shuffle)
    workers = streamed(tmp_path, 5, shuffle=shuffle, processes=2)
    for step in range(90):
        assert workers.take(step) == alone.take(step)
        assert workers.state(5 * step + 5) == alone.state(5 * step + 5)
        assert workers.progress(5 * step + 5, "train") == alone.progress(5 * step + 5, "train")
    assert alone.progress(450, "train")["train/epoch"] >= 2
    # An earlier update, and a resumed run, whose next row is in the middle of a task.
    assert workers.take(3) == alone.take(3)
    for step in (7, 38, 61):
        state = streamed(tmp_path, 5, shuffle=shuffle)
        state.take(step)
        again = streamed(tmp_path, 5, shuffle=shuffle, processes=1)
        again.restore(state.state(5 * step + 5))
        assert [again.take(next_step) for next_step in (step + 1, step + 2)] == [
            alone.take(next_step) for next_step in (step + 1, step + 2)
        ]


def test_rows_are_encoded_by_workers_ahead_of_the_step(tmp_path: Path) -> None:
    stream = streamed(write_numbers(tmp_path, FIVE_FILES), 4, processes=2, reader=MarkedRows, shuffle_buffer=40)
    first = stream.take(0)
    (window,) = stream.pools[0]._windows
    assert isinstance(window, Window)
    assert window.submitted >= 12  # this update and the next two
    for _, encoded in window.ahead:
        assert encoded.result(HANG)
    assert os.getpid() not in writers([*first, *stream.between(4, 30)])
    assert streamed(tmp_path, reader=MarkedRows).take(0)[0].ids[2] == os.getpid()


def test_rows_of_a_killed_worker_are_encoded_here(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    stream = streamed(write_numbers(tmp_path, FIVE_FILES), 4, processes=2, reader=MarkedRows)
    stream.take(0)
    for worker in set(multiprocessing.active_children()) - before:
        worker.kill()
        worker.join()
    assert numbers(stream.between(4, 100)) == numbers(streamed(tmp_path).between(4, 100))
    assert os.getpid() in writers(stream.between(90, 100))


def test_a_task_that_fails_in_a_worker_has_no_result() -> None:
    def work(task: Any) -> Any:
        if task == "fails":
            raise OSError("no file")
        return (lambda: task) if task == "unsendable" else task

    workers = BackgroundWorkers(work, 1)
    tasks = ["fails", "unsendable", lambda: 0, 7]  # a lambda cannot be pickled
    assert [workers.submit(task).result(HANG) for task in tasks] == [None, None, None, 7]
    workers.close()
    workers.close()


def test_workers_end_with_the_stream(tmp_path: Path) -> None:
    before = set(multiprocessing.active_children())
    stream = streamed(write_numbers(tmp_path, FIVE_FILES), processes=2)
    stream.take(0)
    started = set(multiprocessing.active_children()) - before
    assert len(started) == 3  # two workers, and the process that replaces them
    del stream
    gc.collect()
    assert not started & set(multiprocessing.active_children())


def test_workers_end_with_the_run_although_the_stream_lives(tmp_path: Path) -> None:
    """For example because a traceback refers to the stream."""
    data = Data.model_validate({"train": str(write_numbers(tmp_path, FIVE_FILES)), "streaming": True})
    loaded = stream_rows(requested(data), lambda items: ())
    assert loaded.open_stream is not None
    before = set(multiprocessing.active_children())
    with suppress(KeyError), loaded.encoding_ahead(2):
        stream = loaded.open_stream(4, 1, {}, loaded.workers)
        stream.take(0)
        started = set(multiprocessing.active_children()) - before
        assert len(started) == 3
        raise KeyError
    assert not started & set(multiprocessing.active_children())
    assert loaded.workers is None


def ends_or_names_itself(task: int) -> int:
    if task < 0:
        os._exit(7)
    return os.getpid()


def test_a_worker_that_ended_is_replaced() -> None:
    workers = BackgroundWorkers(ends_or_names_itself, 2)
    first = {workers.submit(0).result(HANG) for _ in range(20)}
    with pytest.warns(UserWarning, match="exit code 7.*replaced"):
        assert workers.submit(-1).result(HANG) is None
    later = {workers.submit(0).result(HANG) for _ in range(20)}
    assert len(later) == 2
    assert len(first - later) == 1
    (new,) = later - first
    assert new is not None
    os.kill(new, signal.SIGKILL)
    wait_until(lambda: not is_running(new))
    with pytest.warns(UserWarning, match="replaced"):
        found = {workers.submit(0).result(HANG) for _ in range(20)}
    assert len(found - {None}) == 2
    pids = [pid for pid in found if pid is not None]
    workers.close()
    wait_until(lambda: not any(map(is_running, pids)))


def test_workers_are_replaced_a_limited_number_of_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.data.parallel.REPLACED", 3)
    workers = BackgroundWorkers(ends_or_names_itself, 2)
    with pytest.warns(UserWarning, match="replaced"):
        assert [workers.submit(-1).result(HANG) for _ in range(3)] == [None] * 3
    with pytest.warns(UserWarning, match="the other 1"):
        assert workers.submit(-1).result(HANG) is None
    tasks = [workers.submit(task) for task in range(40)]
    assert len({task.result(HANG) for task in tasks}) == 1
    assert None not in {task.result(HANG) for task in tasks}
    with pytest.warns(UserWarning, match="this process encodes"):
        assert workers.submit(-1).result(HANG) is None
    # Now the caller does all tasks, and none of them waits.
    assert [workers.submit(task).result(HANG) for task in range(3)] == [None] * 3
    workers.close()


def open_and_wait(folder: Path, report: Any) -> None:
    """Main function of a process: opens a stream, reports its workers, and waits to be killed."""
    before = set(multiprocessing.active_children())
    stream = streamed(folder, processes=2)
    stream.take(0)
    report.send([worker.pid for worker in set(multiprocessing.active_children()) - before])
    time.sleep(HANG)


def test_workers_end_with_a_killed_run(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    run = context.Process(target=open_and_wait, args=(write_numbers(tmp_path, FIVE_FILES), theirs))
    run.start()
    assert ours.poll(HANG)
    workers = ours.recv()
    assert len(workers) == 3
    run.kill()
    run.join()
    wait_until(lambda: not any(map(is_running, workers)))


def is_running(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_bad_row_is_refused_when_it_is_taken(tmp_path: Path) -> None:
    """Workers and the reading of windows are ahead, but rows after the end of a run must not stop it."""
    write_numbers(tmp_path, [range(300)])
    with (tmp_path / "part-0.jsonl").open("a") as file:
        file.write('{"m": 1}\n{"n": 301}\n{"n": 302}\n{"n": 303}\n{"n": \n')
    stream = streamed(tmp_path, shuffle=False, processes=1)
    assert numbers(stream.between(0, 300)) == list(range(300))
    with refuses("part-0.jsonl line 301", "missing-column", remedy="data.bad_rows=drop"):
        stream.between(300, 301)
    # The damaged line is in the window after the row 303.
    stream = streamed(tmp_path, shuffle=False, processes=1, bad_rows="drop")
    assert numbers(stream.between(0, 303)) == [*range(300), 301, 302, 303]
    for _ in range(2):
        with refuses("part-0.jsonl line 305", "invalid-json"):
            stream.between(303, 304)


# --- files ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["a.jsonl", "a.jsonl.gz", "a.parquet", "a.arrow", "a.csv", "a.tsv", "a.txt", "a.txt.gz"]
)
def test_shards_give_the_rows_of_files(tmp_path: Path, name: str) -> None:
    rows = [{"text": f"line {number}"} for number in range(700)]
    path = tmp_path / name
    if ".parquet" in name:
        pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=300)
    elif ".arrow" in name:
        table = pa.Table.from_pylist(rows)
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=300)
    else:
        lines = [json.dumps(row) for row in rows] if "jsonl" in name else [row["text"] for row in rows]
        content = "\n".join([*(["text"] if name[-3:] in ("csv", "tsv") else []), *lines]).encode()
        path.write_bytes(gzip.compress(content) if name.endswith("gz") else content)
    ((shard,), _) = open_shards(str(path), "line")
    expected = read_rows(str(path))
    for first in (0, 1, 299, 300, 301, 699, 700):
        found = list(shard.rows(first))
        assert [row for _, row in found] == rows[first:]
        assert [origin for origin, _ in found] == [expected.origin(number) for number in range(first, 700)]


@pytest.mark.parametrize(
    ("name", "content", "code"),
    [
        ("a.jsonl", b'{"n": 1}\n{"n": \n', "invalid-json"),
        ("a.jsonl", b'{"n": 1}\n[]\n', "invalid-row"),
        ("a.csv", b"n,m\n1,2\n3\n", "invalid-csv"),
        ("a.tsv", b"n\tm\n1\t2\n\xff\t3\n", "not-utf8"),
        ("a.jsonl.gz", gzip.compress(b'{"n": 1}\n' * 1000, mtime=0)[:-20], "damaged-file"),
        ("a.json", b"[]", "unsupported-format"),
        ("a.jsonl", b"\n\n", "no-rows"),
        ("a.jsonl", b"", "no-rows"),
        ("a.parquet", b"PAR1 and more text, PAR1", "damaged-file"),
        ("a.jsonl", b"version https://git-lfs.github.com/spec/v1\n", "damaged-file"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, name: str, content: bytes, code: str) -> None:
    (tmp_path / name).write_bytes(content)
    with refuses(code=code):
        streamed(tmp_path / name).between(0, 2000)


# --- bounded memory ---------------------------------------------------------------------------------------------------


def test_rows_leave_memory_when_they_are_encoded(tmp_path: Path) -> None:
    stream = streamed(write_numbers(tmp_path, [range(20)]))
    resident = []
    for position in range(20):
        stream.between(position, position + 1)
        resident.append(stream.pools[0].resident_rows)
    assert resident == [7, 6, 5, 4, 3, 2, 1, 0, 7, 6, 5, 4, 3, 2, 1, 0, 3, 2, 1, 0]
    again = streamed(tmp_path)
    again.restore(stream.state(13))
    again.between(13, 14)
    assert again.pools[0].resident_rows == 2


def test_memory_does_not_grow_with_the_data(tmp_path: Path) -> None:
    """4 MB of rows, of which a stream holds a file and eight rows."""
    peaks = []
    for files in (4, 40):
        folder = write_numbers(
            tmp_path / str(files), [range(i * 50, i * 50 + 50) for i in range(files)], text="x" * 2000
        )
        stream = streamed(folder)
        tracemalloc.start()
        for step in range(50 * files // 4):
            stream.take(step)
            assert stream.pools[0].resident_rows <= 8
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert max(peaks) < 0.1 * 40 * 50 * 2000


# --- several sources, bad rows ----------------------------------------------------------------------------------------


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    write_numbers(tmp_path / "a", [range(30)])
    write_numbers(tmp_path / "b", [range(100, 107)])
    sources = [{"path": str(tmp_path / name), "weight": weight} for name, weight in (("a", 3), ("b", 1))]
    stream = streamed(sources)
    drawn = numbers(stream.between(0, 40))
    for length in range(4, 41, 4):
        assert sum(number >= 100 for number in drawn[:length]) == length // 4
    assert Counter(number for number in drawn if number < 100) == Counter(range(30))
    # Ten rows of the second source: each of its seven rows once before one repeats.
    assert sorted([number for number in drawn if number >= 100][:7]) == list(range(100, 107))
    again = streamed(sources)
    again.restore(stream.state(24))
    assert numbers(again.between(24, 40)) == drawn[24:]


def test_bad_rows_are_refused_or_dropped_and_counted(tmp_path: Path) -> None:
    write_numbers(tmp_path, [range(300)])
    with (tmp_path / "part-0.jsonl").open("a") as file:
        file.write('{"m": 1}\n{"n": -1}\n')
    with refuses("part-0.jsonl line 301", "missing-column", remedy="data.bad_rows=drop"):
        streamed(tmp_path).between(0, 400)
    stream = streamed(tmp_path, bad_rows="drop")
    assert sorted(numbers(stream.between(0, 300))) == list(range(300))
    stream.between(300, 301)
    progress = stream.progress(301, "train")
    assert progress == {"train/epoch": 1.0, "data/streamed": 301.0, "data/dropped": 2.0, "data/truncated": 0.0}


def test_a_new_column_with_a_meaning_is_refused(tmp_path: Path) -> None:
    """A reader finds its columns before training, so it would ignore the tools of a later row."""
    write_numbers(tmp_path, [range(300)])
    with (tmp_path / "part-0.jsonl").open("a") as file:
        file.write('{"n": 300, "id": 1}\n{"n": 301, "tools": []}\n')
    with refuses("part-0.jsonl line 302", "mixed-rows", "'tools'", remedy="null"):
        streamed(tmp_path, shuffle=False).between(0, 302)
    # The column is known if the first rows have it.
    (tmp_path / "part-1.jsonl").write_text('{"n": 302, "tools": null}\n')
    assert numbers(streamed(tmp_path, shuffle=False).between(0, 303)) == list(range(303))


def test_text_files_are_not_all_read_before_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(300):
        (tmp_path / f"{number:03}.txt").write_text(f"text {number}")
    opened: list[str] = []
    rows = Shard.rows
    monkeypatch.setattr(Shard, "rows", lambda self, first=0: opened.append(self.name) or rows(self, first))
    shards, _ = open_shards(str(tmp_path), "document")
    assert len(list(_first_rows(shards))) == SAMPLED_ROWS == len(opened)


def test_bad_first_rows_are_refused_before_training(tmp_path: Path) -> None:
    write_numbers(tmp_path, [range(300), [1]])
    (tmp_path / "part-2.jsonl").write_text('{"m": 1}\n')
    with refuses("part-2.jsonl line 1", "missing-column"):
        streamed(tmp_path)


def test_an_epoch_without_items_ends(tmp_path: Path) -> None:
    write_numbers(tmp_path, [[1] * 256 + [-1] * 10])
    data = Data.model_validate({"train": str(tmp_path), "streaming": True})
    loaded = stream_rows(requested(data), lambda items: ())
    write_numbers(tmp_path, [[-1] * 10])
    assert loaded.open_stream is not None
    with refuses("part-0.jsonl", "no-rows", "10 were dropped"):
        loaded.open_stream(4, 0, {}, None).take(0)


def test_rows_are_checked_when_they_are_read(tmp_path: Path) -> None:
    data = Data.model_validate({"train": str(write_numbers(tmp_path, [range(9)])), "streaming": True, "shuffle": False})

    def check(items: Sequence[Example]) -> list[Problem]:
        return [Problem(str(item.origin), "is 7", code="not-text") for item in items if item.ids[0] == 7]

    loaded = stream_rows(requested(data), check)
    assert loaded.open_stream is not None
    stream = loaded.open_stream(4, 0, {}, None)
    assert numbers(stream.take(0)) == [0, 1, 2, 3]
    with refuses("line 8", "not-text"):
        stream.take(1)


# --- real readers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("method", ["sft", "dpo", "prompts"])
def test_streamed_items_equal_those_in_memory(tmp_path: Path, tiny_folder: Path, method: str, processes: int) -> None:
    rows = [{"prompt": f"{n}+1?", "chosen": f"#### {n + 1}", "rejected": "no", "answer": str(n + 1)} for n in range(20)]
    for part in range(2):
        lines = "".join(json.dumps(row) + "\n" for row in rows[part::2])
        (tmp_path / f"{part}.jsonl").write_text(lines)
    kind: type[LoadedRows[Any]] = PromptSet if method == "prompts" else Dataset
    pairs = partial(RankingRows, read="response", several=False)
    reader: Any = {"sft": SupervisedRows, "dpo": pairs, "prompts": PromptRows}[method]
    data = Data.model_validate({"train": str(tmp_path), "streaming": True, "shuffle": False, "cache": "off"})
    request = RowRequest(kind, reader, data.train, data, load_tokenizer(str(tiny_folder)), 100)
    memory, stream = load_rows(request), stream_rows(request, lambda items: ())
    assert stream.open_stream is not None
    with stream.encoding_ahead(processes):
        found = stream.open_stream(5, 0, {}, stream.workers).between(0, 20)
    assert found == list(memory.items)
    assert (stream.streamed, stream.longest) == (True, 100)
