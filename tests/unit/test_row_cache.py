"""Encoded rows: the same bits row by row, over processes and found again; and never found for what they are not."""

from __future__ import annotations

import copy
import itertools
import json
import multiprocessing as mp
import os
import signal
import time
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from conftest import chat_rows, write_jsonl
from hang import HANG, wait_until
from lockstep.data import dataset as parts
from lockstep.data import row_cache as cache
from lockstep.data.array_store import Store, item_digests, stored
from lockstep.data.dataset import Dataset, LoadedRows, RowRequest, load_rows
from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.kto_rows import LabeledRows
from lockstep.data.encode.preference_rows import RankingRows
from lockstep.data.encode.prompt_rows import PromptRows, PromptSet
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.data.encode.step_rows import StepRows
from lockstep.data.parallel import in_processes, processes_here
from lockstep.data.sources import read
from lockstep.data.sources.read import read_rows
from lockstep.data.updates import row_size, row_sizes, sequence_counts
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data, Source
from lockstep.run.files import ASIDE
from lockstep.types import Example, Origin, Prompt, Question

ROWS = 11
PARTS = 4  # of three rows, the last of two


def pair(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}+1?", "chosen": f"so {number + 1}", "rejected": "no " * (number % 4 + 1)}


def scored(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "responses": ["a", "bb" * number, "c"], "scores": [1.5, 0.25, number + 2.0]}


def judged(number: int) -> dict[str, Any]:
    return {"prompt": f"{number}?", "completion": "yes" * (number + 1), "label": number % 3 == 0}


def solved(number: int) -> dict[str, Any]:
    return {
        "prompt": f"{number}?",
        "completions": ["one", "two" * number][: number % 2 + 1],
        "labels": [0.3, 1][: number % 2 + 1],
    }


def asked(number: int) -> dict[str, Any]:
    extra = {"index": number, "about": [None, 0.1, {"ü": True}]}
    return {
        "data_source": "arithmetic",
        "prompt": [{"role": "user", "content": f"{number}+1?"}],
        "reward_model": {"ground_truth": str(number + 1)},
        "extra_info": extra,
    }


STEPS = partial(StepRows, placeholder="~", tokens=("+", "-"))
METHODS: dict[str, tuple[Any, Any, list[dict[str, Any]]]] = {
    "sft": (Dataset, SupervisedRows, chat_rows(ROWS)),
    "text": (Dataset, SupervisedRows, [{"text": "so " * (number + 1)} for number in range(ROWS)]),
    "dpo": (Dataset, partial(RankingRows, read="response", several=False), list(map(pair, range(ROWS)))),
    "rm": (Dataset, partial(RankingRows, read="score", several=True), list(map(scored, range(1, ROWS + 1)))),
    "rm margin": (
        Dataset,
        partial(RankingRows, read="score", several=True),
        [pair(number) | {"margin": 0.1 * number} for number in range(ROWS)],
    ),
    "kto": (Dataset, LabeledRows, list(map(judged, range(ROWS)))),
    "kto of pairs": (Dataset, LabeledRows, list(map(pair, range(ROWS)))),
    "prm": (Dataset, STEPS, list(map(solved, range(ROWS)))),
    "prompts": (PromptSet, PromptRows, list(map(asked, range(ROWS)))),
}


def parts_of(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    """Rows are read, and kept, so many at a time."""
    for module in (parts, cache):
        monkeypatch.setattr(module, "PART_ROWS", rows)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    parts_of(monkeypatch, 3)
    monkeypatch.setattr(parts, "processes_here", lambda tasks: min(2, tasks))


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "rows.jsonl", chat_rows(ROWS))


def load(path: Path, tokenizer: Any, folder: Path | str, name: str = "sft", limit: int = 500, **keys: Any) -> Any:
    kind, reader, _ = METHODS[name]
    data = Data(train=str(path), **{"cache": str(folder), **keys})
    return load_rows(RowRequest(kind, reader, data.train, data, tokenizer, limit))


def said(loaded: LoadedRows[Any]) -> list[Any]:
    """All that was read."""
    ends = loaded.end_tokens if isinstance(loaded, Dataset) else None
    return [list(loaded.items), vars(loaded.counts), loaded.notes, ends, loaded.fingerprints, loaded.weights]


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """The parts that are encoded, as they are."""
    spans: list[tuple[int, int]] = []
    plain = parts.RowWork.__call__

    def watched(work: parts.RowWork, span: tuple[int, int]) -> parts.RowPart:
        spans.append(span)
        return plain(work, span)

    monkeypatch.setattr(parts.RowWork, "__call__", watched)
    monkeypatch.setattr(parts, "processes_here", lambda tasks: 1)
    return spans


# -- the same bits -----------------------------------------------------------------------------------------------------


@pytest.mark.daily("sft", "dpo", "kto of pairs", "prompts", "prm")
@pytest.mark.parametrize("name", METHODS)
def test_off_cold_and_warm_are_what_a_reader_gives_row_by_row(name: str, tokenizer: Any, tmp_path: Path) -> None:
    _, reader, rows = METHODS[name]
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    data = Data(train=str(path))
    given = read_rows(str(path))
    one = reader(ColumnFinder(data.train[0], data, given.columns), tokenizer, 500)
    plain = [kept.item for number in range(ROWS) for kept in one(given[number], given.origin(number))]
    off, cold, warm = (load(path, tokenizer, folder, name) for folder in ("off", tmp_path / "kept", tmp_path / "kept"))
    assert len(list(tmp_path.glob("kept/*/*.rows"))) == PARTS
    assert list(off.items) == plain
    assert said(off) == said(cold) == said(warm)
    assert off.counts.rows == len(plain)
    assert f"{one.found()}" in off.notes[0]  # also what it counted on the way
    for loaded in (off, warm):
        assert all(isinstance(part, Store) for source in loaded.sources for part in source.parts)
        assert loaded.items[-1] == plain[-1]
        assert loaded.items[2:5] == plain[2:5]
        with pytest.raises(IndexError):
            loaded.items[len(plain)]


@pytest.mark.daily("sft", "dpo")
@pytest.mark.parametrize("name", ["sft", "dpo", "rm", "prm"])
def test_sizes_are_those_of_the_items(name: str, tokenizer: Any, tmp_path: Path) -> None:
    items = load(write_jsonl(tmp_path / "rows.jsonl", METHODS[name][2]), tokenizer, "off", name).items
    for packed, shared in itertools.product((True, False), repeat=2):
        plain = [row_size(item, packed=packed, shared=shared) for item in items]
        assert row_sizes(items, packed=packed, shared=shared).tolist() == plain
        assert row_sizes(list(items), packed=packed, shared=shared).tolist() == plain
    assert sequence_counts(items).tolist() == [len(item.examples) for item in items]


def test_bad_rows_are_told_together_in_their_order_and_good_parts_are_kept(tokenizer: Any, tmp_path: Path) -> None:
    rows = chat_rows(ROWS)
    for number in (9, 1, 2):
        rows[number] = {"messages": [{"role": "user", "content": f"row {number}"}]}
    path = write_jsonl(tmp_path / "rows.jsonl", rows)
    for folder in ("off", tmp_path / "kept", tmp_path / "kept"):
        with pytest.raises(Refusal) as caught:
            load(path, tokenizer, folder)
        assert [problem.where for problem in caught.value.problems] == [f"{path} line {line}" for line in (2, 3, 10)]
    assert sorted(entry.name for entry in tmp_path.glob("kept/*/*.rows")) == ["3-6.rows", "6-9.rows"]


def test_dropped_and_truncated_rows_are_counted_alike(tokenizer: Any, source: Path, tmp_path: Path) -> None:
    for overlong in ("drop", "truncate_left"):
        keys = {"limit": 60, "overlong": overlong}
        off, cold, warm = (load(source, tokenizer, folder, **keys) for folder in ("off", *[tmp_path / "kept"] * 2))
        assert said(off) == said(cold) == said(warm)
        assert off.counts.dropped if overlong == "drop" else off.counts.truncated


class Counting(SupervisedRows):
    """Says that every row was split, and counts in a tally."""

    def __init__(self, *given: Any, step: Any = frozenset({1})):
        super().__init__(*given)
        self.step, self.tally = max(step), Counter[str]()

    @property
    def split_rows(self) -> int:
        return self.tally["odd"] * 2

    def __call__(self, row: Any, origin: Any) -> Any:
        self.tally["odd"] += self.step
        self.tally[str(origin)[-1]] += 1
        return super().__call__(row, origin)

    def found(self) -> str:
        return f"{self.tally['odd']} rows, lines that end in 1: {self.tally['1']}"


def test_what_a_reader_counts_is_kept_with_its_rows(tokenizer: Any, source: Path, tmp_path: Path) -> None:
    data = Data(train=str(source), cache=str(tmp_path / "kept"))
    for reader, each in ((Counting, 1), (partial(Counting, step=frozenset({3})), 3)):
        for _ in range(2):
            found = load_rows(RowRequest(Dataset, reader, data.train, data, tokenizer, 500))
            assert found.notes[0].endswith(f" as {each * ROWS} rows, lines that end in 1: 2")  # 1 and 11
            assert found.counts.split == 2 * each * ROWS
    assert len(list(tmp_path.glob("kept/*/*.rows"))) == 2 * PARTS


def test_rows_that_cannot_be_kept_exactly_stay_objects(tokenizer: Any) -> None:
    origin = Origin("rows.parquet", 0)

    def prompt(extra: Any) -> Prompt:
        return Prompt(Question("a", [], "1", origin, {"extra": extra}), [1, 2])

    for extra, kept in (([1, 2.5, "x"], True), ((1, 2), False), ({1: 2}, False), (b"x", False), (float("nan"), False)):
        found = stored([prompt(extra)], [0], {}, lambda row: origin)
        assert (found is not None) == kept, extra
    example = Example([1, 2], [0, 1], origin)  # not the types that readers make
    assert stored([example], [0], {}, lambda row: origin) is None
    for ids, trained, where, kept in (
        ([1, 2], b"\0\1", origin, True),
        ([1, 2**40], b"\0\1", origin, False),
        ([1, 2], b"\0", origin, False),
        ([1, 2], b"\0\1", Origin("rows.parquet", 1), False),
    ):
        found = stored([Example(array("q", ids), trained, where)], [0], {}, lambda row: origin)
        assert (found is not None) == kept, (ids, trained, where)
    assert item_digests([prompt(1), prompt(2)]).tolist() == item_digests([prompt(3)] * 2).tolist()


# -- found again, or not -----------------------------------------------------------------------------------------------


def test_what_rows_depend_on_is_missed_when_it_changes(
    tokenizer: Any, source: Path, tmp_path: Path, encoded: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def new(path: Path = source, words: Any = tokenizer, **keys: Any) -> int:
        """How many parts had to be encoded."""
        encoded.clear()
        load(path, words, tmp_path / "kept", **keys)
        return len(encoded)

    assert (new(), new()) == (PARTS, 0)
    assert new(shuffle=False, drop_last=True, max_rows=3, cache_gb=1) == 0
    for keys in ({"system": "be short"}, {"limit": 400}, {"require_end": False}, {"overlong": "drop"}):
        assert (new(**keys), new(**keys)) == (PARTS, 0), keys

    other = copy.deepcopy(tokenizer)
    other.chat_template = "{# new #}" + other.chat_template
    assert (new(words=other), new(words=other), new()) == (PARTS, 0, 0)
    grown = copy.deepcopy(tokenizer)
    grown.add_tokens(["#### "])
    assert (new(words=grown), new(words=grown)) == (PARTS, 0)
    cutting = copy.deepcopy(tokenizer)
    cutting.backend_tokenizer.enable_truncation(5)  # which a call does not heed either
    assert new(words=cutting) == 0

    # A row more, or another one: the file is another.
    for rows in ([*chat_rows(ROWS), *chat_rows(1, seed=3)], [*chat_rows(ROWS - 1), *chat_rows(1, seed=3)]):
        changed = write_jsonl(source, rows)
        assert (new(changed), new(changed)) == (PARTS, 0)
    monkeypatch.setattr(cache, "code_digest", lambda: "other code")
    assert new(changed) == PARTS
    monkeypatch.setattr(cache, "FORMAT", cache.FORMAT + 1)
    assert new(changed) == PARTS


def test_the_first_rows_are_parts_of_all(tokenizer: Any, source: Path, tmp_path: Path, encoded: list[Any]) -> None:
    load(source, tokenizer, tmp_path / "kept")
    encoded.clear()
    data = Data(train=[{"path": str(source), "rows": 7}], cache=str(tmp_path / "kept"))
    first = load_rows(RowRequest(Dataset, SupervisedRows, data.train, data, tokenizer, 500))
    assert encoded == [(6, 7)]
    assert list(first.items) == list(load(source, tokenizer, "off").items)[:7]
    assert first.notes[0].startswith(f"{source}: the first 7 of {ROWS} rows")


def test_a_known_file_is_not_parsed_again_until_a_row_is_asked_for(
    tokenizer: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blank = tmp_path / "blank.jsonl"  # lines that are no rows: the rows' lines are not 1, 2, 3
    blank.write_text("\n" + source.read_text(), encoding="utf-8")
    cold = {path: said(load(path, tokenizer, tmp_path / "kept")) for path in (source, blank)}
    monkeypatch.setattr(read, "_parsed", lambda *given: pytest.fail("parsed"))
    for path, was in cold.items():
        assert said(load(path, tokenizer, tmp_path / "kept")) == was
    assert str(cold[blank][0][0].origin) == f"{blank} line 2"
    monkeypatch.undo()
    parts_of(monkeypatch, 3)
    rows = read_rows(str(source), cache=tmp_path / "kept")
    assert rows[4] == chat_rows(ROWS)[4]
    assert list(rows) == chat_rows(ROWS)
    rows = read_rows(str(source), cache=tmp_path / "kept")
    write_jsonl(source, chat_rows(ROWS, seed=5))
    with pytest.raises(Refusal, match="was changed while it was read"):
        rows[0]


def test_a_moved_file_is_named_as_it_is_now(tokenizer: Any, source: Path, tmp_path: Path) -> None:
    load(source, tokenizer, tmp_path / "kept")
    moved = source.rename(tmp_path / "moved.jsonl")
    assert str(load(moved, tokenizer, tmp_path / "kept").items[0].origin) == f"{moved} line 1"


# -- damage ------------------------------------------------------------------------------------------------------------


def damages(data: bytes) -> Iterator[bytes]:
    yield b""
    yield data[:10]
    yield data[:-1]
    yield data + b"\0"
    for place in (0, 30, 60, len(data) // 2, len(data) - 1):
        yield data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]


def test_a_damaged_entry_is_made_anew(tokenizer: Any, source: Path, tmp_path: Path, encoded: list[Any]) -> None:
    plain = said(load(source, tokenizer, tmp_path / "kept"))
    (entry,) = tmp_path.glob("kept/*/3-6.rows")
    whole = entry.read_bytes()
    (other,) = tmp_path.glob("kept/*/0-3.rows")
    for damaged in [*damages(whole), other.read_bytes()]:
        entry.write_bytes(damaged)
        encoded.clear()
        assert said(load(source, tokenizer, tmp_path / "kept")) == plain
        assert encoded == [(3, 6)]
        assert entry.read_bytes() == whole
    (facts,) = tmp_path.glob("kept/files/*")
    whole = facts.read_bytes()
    for damaged in damages(whole):
        facts.write_bytes(damaged)
        assert said(load(source, tokenizer, tmp_path / "kept")) == plain
        assert facts.read_bytes() == whole


def forked(function: Callable[[], Any]) -> Any:
    process = mp.get_context("fork").Process(target=function)
    process.start()
    return process


def test_a_kill_while_writing_leaves_nothing_that_is_taken_for_whole(
    tokenizer: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept, plain = tmp_path / "kept", said(load(source, tokenizer, "off"))

    def killed_at(renames: int) -> None:
        rename, seen = os.replace, []

        def counted(*paths: Any) -> None:
            seen.append(paths)
            if len(seen) == renames:
                os.kill(os.getpid(), signal.SIGKILL)
            rename(*paths)

        os.replace = counted
        load(source, tokenizer, kept)

    for renames in (1, 3):
        process = forked(partial(killed_at, renames))
        process.join(HANG)
        assert process.exitcode == -signal.SIGKILL
    left = [path for path in kept.glob("*/*") if path.name.startswith(ASIDE)]
    assert len(left) == 2
    assert len(list(kept.glob("*/*.rows"))) == 1  # before the second kill, after what is known of the file
    assert said(load(source, tokenizer, kept)) == plain
    # What was left is deleted when it is old.
    assert all(path.exists() for path in left)
    for path in left:
        os.utime(path, (0, time.time() - 2 * cache._LEFT_AFTER))
    cache.RowCache(kept, "any", 2**30).prune()
    assert not any(path.exists() for path in left)


def test_two_runs_at_once(tokenizer: Any, source: Path, tmp_path: Path) -> None:
    plain = said(load(source, tokenizer, "off"))
    meeting = mp.get_context("fork").Barrier(3)

    def run() -> None:
        meeting.wait(HANG)
        os._exit(0 if said(load(source, tokenizer, tmp_path / "kept")) == plain else 1)

    for _ in range(3):
        runs = [forked(run) for _ in range(3)]
        for process in runs:
            process.join(HANG)
        assert [process.exitcode for process in runs] == [0, 0, 0]
        assert len(list(tmp_path.glob("kept/*/*.rows"))) == PARTS
        assert not [path for path in tmp_path.glob("kept/*/*") if path.name.startswith(ASIDE)]
        for entry in list(tmp_path.glob("kept/*/*.rows"))[:2]:
            entry.unlink()


def test_a_part_that_another_run_deletes_meanwhile_is_made_here(
    tokenizer: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = said(load(source, tokenizer, tmp_path / "kept"))
    get, asked = cache.RowCache.get, []

    def flickering(self: cache.RowCache, span: tuple[int, int]) -> Any:
        asked.append(span)
        return get(self, span) if asked.count(span) == 2 else None  # there only when a process looks for it

    monkeypatch.setattr(parts, "processes_here", lambda tasks: 1)
    monkeypatch.setattr(cache.RowCache, "get", flickering)
    assert said(load(source, tokenizer, tmp_path / "kept")) == plain


def test_a_folder_that_cannot_be_written_is_told(tokenizer: Any, source: Path, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("no folder")
    found = load(source, tokenizer, blocked)
    assert list(found.items) == list(load(source, tokenizer, "off").items)
    assert found.notes[-1].startswith(f"{blocked}: encoded rows could not be cached")


def test_the_folder_stays_within_its_bound(tokenizer: Any, source: Path, tmp_path: Path) -> None:
    load(source, tokenizer, tmp_path / "kept")
    entries = sorted(tmp_path.glob("kept/*/*"), key=lambda path: path.name)
    for age, entry in enumerate(entries):
        os.utime(entry, (0, 1000 + age))
    load(source, tokenizer, tmp_path / "kept", max_tokens=400)  # uses none of these
    bound = sum(entry.stat().st_size for entry in tmp_path.glob("kept/*/*")) - 1
    cache.RowCache(tmp_path / "kept", "any", bound).prune()
    assert [entry.exists() for entry in entries] == [False] + [True] * (len(entries) - 1)
    cache.RowCache(tmp_path / "kept", "any", 0).prune()
    assert list((tmp_path / "kept").iterdir()) == []
    found = load(source, tokenizer, tmp_path / "kept", cache_gb=1e-9)  # deleted while they are in use
    assert list(tmp_path.glob("kept/*/*")) == []
    assert list(found.items) == list(load(source, tokenizer, "off").items)


def test_few_rows_are_not_kept_and_off_keeps_none(
    tokenizer: Any, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    load(source, tokenizer, "off")
    assert Data(train="x", cache=False).cache == "off"  # as YAML reads it
    assert not (tmp_path / "home").exists()
    load(source, tokenizer, "on")
    assert len(list(tmp_path.glob("home/rows/*/*.rows"))) == PARTS
    parts_of(monkeypatch, ROWS + 1)
    load(source, tokenizer, tmp_path / "few")
    assert not (tmp_path / "few").exists()
    assert not (tmp_path / "off").exists()


# -- processes ---------------------------------------------------------------------------------------------------------


def test_what_a_process_leaves_undone_is_done_here() -> None:
    here = os.getpid()

    def work(task: int) -> int:
        if os.getpid() != here and task in (3, 4):
            if task == 3:
                os._exit(1)
            raise ValueError("only there")
        return task * task

    assert sorted(in_processes(work, range(9), 2)) == [(task, task * task) for task in range(9)]

    def bad(task: int) -> int:
        raise ValueError(f"task {task}")

    with pytest.raises(ValueError, match="task 0"):
        list(in_processes(bad, range(9), 2))
    assert not mp.active_children()


def test_whoever_stops_asking_ends_the_processes() -> None:
    found = in_processes(lambda task: bytes(2**20), range(8), 2)
    next(found)
    assert len(mp.active_children()) == 2
    found.close()
    assert not mp.active_children()


def test_a_killed_run_leaves_no_process(tmp_path: Path) -> None:
    def work(task: int) -> bytes:
        (tmp_path / f"{os.getpid()}").touch()
        return bytes(2**20)  # more than a pipe holds: writing waits for a reader

    def run() -> None:
        for _ in in_processes(work, range(100), 2):
            if len(list(tmp_path.iterdir())) == 2:
                os.kill(os.getpid(), signal.SIGKILL)

    process = forked(run)
    process.join(HANG)
    assert process.exitcode == -signal.SIGKILL
    wait_until(lambda: not any(running(path.name) for path in tmp_path.iterdir()))


def running(pid: str) -> bool:
    """Whether a process is there that has not ended; nobody may have asked yet how it ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ranks_share_the_cores_and_begin_at_different_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lockstep.data.parallel.usable_cores", lambda: 8)
    for name in ("LOCAL_WORLD_SIZE", "WORLD_SIZE", "RANK"):
        monkeypatch.delenv(name, raising=False)
    assert [processes_here(tasks) for tasks in (0, 1, 5, 100)] == [1, 1, 5, 8]
    spans = [(number, number + 1) for number in range(6)]
    assert parts._rank_offset_first(spans) == spans
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert processes_here(100) == 2
    begins: Sequence[int] = [0, 2, 4]
    for rank, begin in enumerate(begins):
        monkeypatch.setenv("RANK", str(rank))
        assert parts._rank_offset_first(spans) == spans[begin:] + spans[:begin]
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "64")
    assert processes_here(100) == 1


def test_a_quota_of_the_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lockstep.data import parallel

    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    for text, cores in (("max 100000", 16), ("250000 100000", 2), ("5000 100000", 1), ("", 16)):
        quota = tmp_path / "cpu.max"
        quota.write_text(text)
        monkeypatch.setattr(parallel, "_QUOTA", quota)
        assert parallel.usable_cores() == cores
    monkeypatch.setattr(parallel, "_QUOTA", tmp_path / "none")
    assert parallel.usable_cores() == 16


def test_the_same_source_with_weights_and_rows(tokenizer: Any, source: Path, tmp_path: Path) -> None:
    data = Data(
        train=[{"path": str(source), "weight": 1.0, "rows": 5}, {"path": str(source), "weight": 3}],
        cache=str(tmp_path / "kept"),
        max_rows=4,
    )
    found = load_rows(RowRequest(Dataset, SupervisedRows, data.taken, data, tokenizer, 500))
    assert [len(rows) for rows in found.sources] == [5, 4]
    assert found.weights == [1, 3]
    assert Source(path="x", rows=None) == Data(train="x").taken[0]
    assert json.dumps(data.model_dump()["train"][1]["rows"]) == "null"  # a recipe is not changed by it
