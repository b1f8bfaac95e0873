"""The files behind the run viewer: lines by byte offsets, growing curves, thinning that keeps extremes."""

from __future__ import annotations

import io
import json
import math
import os
import random
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from lockstep.run.folder import RunFolder
from lockstep.run.metrics import MetricsLog, read_metrics
from lockstep.serve.viewer_curves import Curves, downsampled, smoothed
from lockstep.serve.viewer_log import (
    BLOCK,
    PAGE_SIZE,
    Missing,
    SampleFilter,
    complete_end,
    first_of_step,
    last_line,
    line_at,
    lines_from,
    open_inside,
    parsed,
    samples_of_all_steps,
    samples_of_step,
    single_sample,
    step_of,
)
from lockstep.serve.viewer_runs import RunList, file_locks, find_runs, flat, recipe_of, summary
from view_runs import metric_line, sample, write_run

# Lines ------------------------------------------------------------------------------------------------------------


def lines_file(path: Path, seed: int, steps: int = 60) -> list[tuple[int, int | None]]:
    """Writes lines of very different lengths; returns where each begins and its step (None where damaged)."""
    chance = random.Random(seed)
    lines: list[tuple[int, int | None]] = []
    content = b""
    for step in range(0, steps, chance.choice([1, 2, 3])):
        for _ in range(chance.choice([0, 1, 1, 5])):
            lines.append((len(content), step))
            text = "x" * chance.choice([0, 3, 100, BLOCK - 40, BLOCK * 2])
            # Another order of keys is valid too.
            line = {"step": step, "t": text} if chance.random() < 0.8 else {"t": text, "step": step}
            content += json.dumps(line).encode() + b"\n"
            if chance.random() < 0.05:
                lines.append((len(content), None))
                content += b"{damaged\n"
    path.write_bytes(content + b'{"step": 99999, "being": "writ')
    return lines


@pytest.mark.daily("0", "4", "5")
@pytest.mark.parametrize("seed", range(6))
def test_the_first_line_of_a_step_is_found_by_bisection(tmp_path: Path, seed: int) -> None:
    lines = lines_file(tmp_path / "lines.jsonl", seed)
    with (tmp_path / "lines.jsonl").open("rb") as file:
        assert [(line.start, step_of(line.content)) for line in lines_from(file, 0)] == lines
        for step in range(-1, 63):
            at = first_of_step(file, step)
            # A damaged line just before it may come with it.
            after = [start for start, number in lines if number is not None and number >= step]
            before = [start for start, number in lines if number is not None and number < step]
            assert at <= (after[0] if after else complete_end(file))
            assert not before or at > before[-1]
        last = last_line(file)
        assert last is not None
        assert (last.start, step_of(last.content)) == lines[-1]


class Counted(io.RawIOBase):
    """A file that counts the bytes that are read."""

    def __init__(self, file: BinaryIO):
        self.file, self.bytes = file, 0

    def read(self, size: int = -1) -> bytes:
        content = self.file.read(size)
        self.bytes += len(content)
        return content

    def readline(self, size: int | None = -1) -> bytes:
        content = self.file.readline(-1 if size is None else size)
        self.bytes += len(content)
        return content

    def seek(self, offset: int, whence: int = 0) -> int:
        return self.file.seek(offset, whence)

    def fileno(self) -> int:
        return self.file.fileno()


def test_the_samples_of_a_step_are_found_without_reading_the_others(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with path.open("w") as file:
        for step in range(3000):
            file.write(json.dumps(sample(step, response="y" * 3000)) + "\n")
    with path.open("rb") as file:
        counted = Counted(file)
        reply = samples_of_step(cast(BinaryIO, counted), SampleFilter(), 1234, None)
        assert [one["step"] for one in reply["samples"]] == [1234]
        assert (reply["first"], reply["last"], reply["before"], reply["after"]) == (0, 2999, 1233, 1235)
        assert counted.bytes < path.stat().st_size / 4


def test_a_filter_finds_what_it_says_in_all_steps(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    with path.open("w") as file:
        for step in range(100):
            fields: dict[str, Any] = {"score": step / 100, "response": "plain"}
            if step == 3:
                fields["kind"] = "val"
            if step == 4:
                fields["stop"] = "length"
            if step == 5:
                fields |= {"score": None, "failure": "function: it broke"}
            if step == 7:
                fields["response"] = "has a Needle in it"
            file.write(json.dumps(sample(step, **fields)) + "\n")

    def steps(wanted: SampleFilter) -> list[int]:
        with path.open("rb") as file:
            reply, found = samples_of_all_steps(file, wanted, 0), []
            while True:
                found += [one["step"] for one in reply["samples"]]
                if reply["next"] is None:
                    return found
                reply = samples_of_all_steps(file, wanted, reply["next"])

    assert steps(SampleFilter()) == list(range(100)), f"in parts of {PAGE_SIZE}"
    assert steps(SampleFilter(kind="val")) == [3]
    assert steps(SampleFilter(ended="length")) == [4]
    assert steps(SampleFilter(ended="failed")) == [5]
    assert steps(SampleFilter(text="needle")) == [7]
    assert steps(SampleFilter(text="what is 12 +")) == [12]
    assert steps(SampleFilter(text='"')) == steps(SampleFilter(text="\n")) == []
    assert steps(SampleFilter(least=0.95)) == [95, 96, 97, 98, 99]
    assert steps(SampleFilter(least=0.03, most=0.06)) == [3, 4, 6], "one without a score is in no range"


def test_a_long_response_is_cut_in_lists_only(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    long = "z" * 1_000_000
    path.write_text("".join(json.dumps(sample(step, response=long, score=math.nan)) + "\n" for step in (1, 2)))
    with path.open("rb") as file:
        (reply,) = samples_of_step(file, SampleFilter(), None, None)["samples"]
        assert len(reply["response"]) < 10_000
        assert reply["bytes"] > 1_000_000
        assert reply["score"] == "NaN", "as strict JSON can say it"
        assert single_sample(file, reply["offset"])["response"] == long
        with pytest.raises(Missing, match="no sample begins"):
            single_sample(file, reply["offset"] + 5)


def test_damaged_lines_at_the_ends_hide_no_step(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text("what\n" + "".join(json.dumps(sample(step)) + "\n" for step in (4, 5)) + "{\n[]\n")
    with path.open("rb") as file:
        reply = samples_of_step(file, SampleFilter(), None, None)
        assert (reply["first"], reply["last"], reply["step"], reply["before"]) == (4, 5, 5, 4)
        assert [one["step"] for one in reply["samples"]] == [5]
        everything = samples_of_all_steps(file, SampleFilter(), 0)["samples"]
        assert [one.get("step") for one in everything] == [None, 4, 5, None, None], "and they are listed"


def test_a_line_without_end_is_not_there(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"step": 1}')
    with path.open("rb") as file:
        assert complete_end(file) == 0
        assert last_line(file) is None
        assert line_at(file, 0) is None
        assert samples_of_step(file, SampleFilter(), None, None)["samples"] == []


@pytest.mark.parametrize(
    ("written", "wanted"),
    [
        ('"NEEDLE"', "needle"),
        ('"\\u006eeedle"', "needle"),
        ('"a\\/b"', "a/b"),
        ('"x \\" y"', '" y'),
        ('"x\\ny"', "x\ny"),
        ('"Größe"', "größe"),
        ('"\u212aelvin"', "kelvin"),
        ('"c:\\\\d"', "c:\\d"),
    ],
)
def test_a_search_finds_text_however_it_is_written(tmp_path: Path, written: str, wanted: str) -> None:
    path = tmp_path / "samples.jsonl"
    path.write_text('{"step": 1, "response": ' + written + '}\n{"step": 2, "response": "other"}\n', encoding="utf-8")
    with path.open("rb") as file:
        assert [one["step"] for one in samples_of_all_steps(file, SampleFilter(text=wanted), 0)["samples"]] == [1]


@pytest.mark.parametrize("text", [b"[1]\n", b"nonsense\n", b"[" * 100_000 + b"\n", b'{"step": "7"}\n', b"\xff\xfe\n"])
def test_what_is_no_line_of_a_log_has_no_step(text: bytes) -> None:
    assert step_of(text) is None


# Curves -----------------------------------------------------------------------------------------------------------


def opened(path: Path) -> Curves:
    return Curves(lambda: path.open("rb"))


def all_points(curves: Curves) -> dict[str, dict[int, float]]:
    return {
        name: dict(
            sorted(
                [
                    *zip(curve.steps, curve.values, strict=True),
                    *zip(curve.odd_steps, map(float, curve.odd_values), strict=True),
                ]
            )
        )
        for name, curve in curves.curves.items()
    }


def wanted_points(path: Path) -> dict[str, dict[int, float]]:
    """By the reader that resume and compare use."""
    found: dict[str, dict[int, float]] = {}
    for step, data in read_metrics(path):
        for name, value in data.items():
            found.setdefault(name, {})[step] = value
    return found


def test_curves_grow_with_the_file_and_go_back_with_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    log, curves = MetricsLog(path), opened(path)
    for step in range(1, 6):
        log.append(step, {"a": step / 3, "b": math.nan if step == 2 else math.inf if step == 3 else float(step)})
        curves.read_more()
        assert repr(all_points(curves)) == repr(wanted_points(path))
    version = curves.version
    # A run goes back to its checkpoint and writes other values, and more than there were.
    log.rewind(2)
    for step in range(3, 12):
        log.append(step, {"a": -float(step), "late": 1.0})
    curves.read_more()
    assert curves.version != version
    assert repr(all_points(curves)) == repr(wanted_points(path))
    assert curves.range() == (1, 11)
    with path.open("a") as file:
        file.write(metric_line(12, {"a": 5.0})[:-9])
    curves.read_more()
    assert 12 not in all_points(curves)["a"], "half a line"
    assert curves.read_share == 1.0


def test_a_file_written_anew_in_its_place_is_read_anew(tmp_path: Path) -> None:
    """The same inode and no fewer bytes: only what is in it tells."""
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(metric_line(step, {"a": 1.0}) for step in range(1, 4)))
    curves = opened(path)
    curves.read_more()
    with path.open("r+") as file:
        file.write("".join(metric_line(step, {"a": 2.0}) for step in range(1, 5)))
    curves.read_more()
    assert all_points(curves) == {"a": {1: 2.0, 2: 2.0, 3: 2.0, 4: 2.0}}


def test_a_request_reads_for_a_while_and_the_next_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(metric_line(step, {"a": float(step)}) for step in range(1, 51)))
    curves = opened(path)
    shares = []
    while not shares or shares[-1] < 1:
        curves.read_more(seconds=0)
        shares.append(curves.read_share)
    assert len(shares) == 50
    assert shares == sorted(shares)
    assert all_points(curves) == wanted_points(path)


def test_damaged_lines_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(
        metric_line(1, {"a": 1.0}) + 'what\n{"step": 2}\n' + metric_line(1, {"a": 9.0}) + metric_line(3, {"a": 3.0})
    )
    curves = opened(path)
    curves.read_more()
    assert curves.damaged == 3
    assert all_points(curves) == {"a": {1: 1.0, 3: 3.0}}


@pytest.mark.daily("0", "3")
@pytest.mark.parametrize("seed", range(4))
def test_thinning_keeps_every_extreme(seed: int) -> None:
    chance = random.Random(seed)
    steps = sorted(chance.sample(range(1, 40_000), 9_000))
    values = [chance.gauss(0, 1) for _ in steps]
    values[chance.randrange(9_000)], values[chance.randrange(9_000)] = 1e9, -1e9
    domain = (5_000, 30_000)
    places = downsampled(steps, values, domain, 200)
    assert places == sorted(set(places))
    assert len(places) <= 4 * 200 + 2
    kept = {steps[i] for i in places}
    width = (domain[1] + 1 - domain[0]) / 200
    for bucket in range(200):
        inside = [
            (value, step)
            for step, value in zip(steps, values, strict=True)
            if domain[0] + width * bucket <= step < domain[0] + width * (bucket + 1)
        ]
        if inside:
            assert {min(inside)[1], max(inside)[1]} <= kept, bucket
    assert downsampled(steps[:100], values[:100], (1, 40_000), 200) == list(range(100)), "few points are all drawn"


def test_the_mean_is_centred() -> None:
    values = [float(value) for value in (4, 1, 7, 2, 9, 3, 3)]
    wanted = [4, (4 + 1 + 7) / 3, (4 + 1 + 7 + 2 + 9) / 5, (1 + 7 + 2 + 9 + 3) / 5, (7 + 2 + 9 + 3 + 3) / 5, 5, 3]
    assert list(smoothed(values, 2)) == pytest.approx(wanted)


def test_a_curve_tells_its_points_its_mean_and_what_is_no_number(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    odd = {3: math.nan, 9: -math.inf}
    path.write_text("".join(metric_line(step, {"a": odd.get(step, float(step))}) for step in range(1, 13)))
    curves = opened(path)
    curves.read_more()
    reply = curves.shown("a", (4, 10), 100, half=1)
    assert reply is not None
    # One beyond each edge, so that the line runs out of the picture.
    assert reply["steps"] == [2, 4, 5, 6, 7, 8, 10, 11]
    assert reply["odd"] == {"count": 1, "first": [[9, "-inf"]]}
    assert reply["mean"]["values"][2] == pytest.approx((4 + 5 + 6) / 3)
    assert curves.shown("b", (4, 10), 100, 0) is None


# Folders ----------------------------------------------------------------------------------------------------------


def test_runs_are_found_and_links_out_are_not_followed(tmp_path: Path) -> None:
    root = tmp_path / "runs"
    write_run(root / "one", 3, {"critic/score/mean": float})
    write_run(root / "sweep" / "a", 2, {"train/loss": float})
    write_run(tmp_path / "elsewhere", 1, {"secret": float})
    (root / "out").symlink_to(tmp_path / "elsewhere")
    (root / "again").symlink_to(root / "one")
    (root / "empty").mkdir()
    found = find_runs(root)
    assert list(found.runs) == ["again", "one", "sweep/a"]
    (left_out,) = found.left_out
    assert left_out.startswith("out is a link")
    assert list(find_runs(root / "one").runs) == ["one"]
    reply = summary(root, "one", root / "one", file_locks())
    facts = {name: reply[name] for name in ("method", "model", "steps", "step", "metric", "value", "running", "report")}
    assert facts == {
        "method": "grpo",
        "model": "models/tiny",
        "steps": 3,
        "step": 3,
        "metric": "critic/score/mean",
        "value": 3.0,
        "running": False,
        "report": False,
    }


def test_the_list_follows_files_that_change(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 3, {"train/loss": float})
    shelf = RunList(tmp_path)
    assert [one["step"] for one in shelf.listed()["runs"]] == [3]
    with (run / "metrics.jsonl").open("a") as file:
        file.write(metric_line(4, {"train/loss": 0.5}))
    (run / "recipe.yaml").write_text("method: dpo\n")
    (reply,) = shelf.listed()["runs"]
    assert (reply["step"], reply["value"], reply["method"]) == (4, 0.5, "dpo")
    write_run(tmp_path / "later", 1, {})
    assert [one["run"] for one in shelf.listed()["runs"]] == ["later", "run"]


def test_files_outside_pipes_and_folders_are_not_opened(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "secret").write_text("secret")
    (root / "link").symlink_to(tmp_path / "secret")
    (root / "near").write_text("near")
    (root / "inner").symlink_to(root / "near")
    os.mkfifo(root / "pipe")
    for name, why in (
        ("link", "link out of"),
        ("pipe", "not a regular file"),
        (".", "regular file"),
        ("none", "No such file"),
    ):
        with pytest.raises(Missing, match=why):
            open_inside(root, root / name)
    with open_inside(root, root / "inner") as file:
        assert file.read() == b"near"


def test_a_recipe_is_listed_by_key(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, {}, lr=3e-4)
    (run / "recipe.to_step_5.yaml").write_text("method: old\n")
    reply = recipe_of(tmp_path, run)
    assert reply["recipe"] == {
        "method": '"grpo"',
        "run.name": '"run"',
        "run.steps": "1",
        "model.path": '"models/tiny"',
        "optim.lr": "0.0003",
    }
    assert reply["env"]["packages.torch"] == '"2.11"'
    assert reply["earlier"] == [{"last_step": 5, "text": "method: old\n"}]
    (run / "recipe.yaml").write_text("a: [1\n")
    assert "damaged" in recipe_of(tmp_path, run)["problems"][0]
    assert flat({"a": [{"b": 1}, {"c": []}], "d": [1, 2], "e": {}}) == {
        "a.0.b": "1",
        "a.1.c": "[]",
        "d": "[1, 2]",
        "e": "{}",
    }
    bomb: Any = [1]
    for _ in range(40):
        bomb = [bomb, bomb]
    with pytest.raises(Missing, match="too many"):
        flat(bomb)


def test_numbers_json_does_not_know_are_named() -> None:
    assert parsed(b'{"a": NaN, "b": -Infinity}') == {"a": "NaN", "b": "-Infinity"}


def test_a_lock_that_is_a_pipe_keeps_nobody_waiting(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", 1, {"a": float})
    os.mkfifo(run / ".lock")
    assert summary(tmp_path, "run", run, file_locks())["running"] is False


# The index ----------------------------------------------------------------------------------------------------------

OPENED: list[Path] = []
COUNTING = False


def _count(event: str, arguments: tuple[Any, ...]) -> None:
    if COUNTING and event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
        OPENED.append(Path(os.fsdecode(arguments[0])))


def opened_below(root: Path, call: Callable[[], Any]) -> tuple[Any, list[str]]:
    """What the call gives, and the files of runs that the process opened for it."""
    global COUNTING
    if not OPENED:
        sys.addaudithook(_count)  # stays as long as the process
    OPENED[:] = [Path("counted")]
    COUNTING = True
    try:
        given = call()
    finally:
        COUNTING = False
    return given, sorted(str(path.relative_to(root)) for path in OPENED if path.is_relative_to(root))


def many_runs(root: Path, count: int) -> Path:
    for number in range(count):
        write_run(root / f"run{number:03d}", 3, {"train/loss": lambda step: 1 / step})
    return Path(os.path.realpath(root))


def test_runs_that_did_not_change_are_not_opened_again(tmp_path: Path) -> None:
    """A page that starts anew reads what has changed since the last one, however many runs there are."""
    root = many_runs(tmp_path / "runs", 120)
    first, opened = opened_below(root, RunList(root).listed)
    assert len(opened) == 2 * 120  # recipe and metrics of each
    again, opened = opened_below(root, RunList(root).listed)
    assert opened == []
    assert again == first
    # A run that grows, one that is new, one that is replaced by another of the same size, one that is gone.
    with (root / "run007" / "metrics.jsonl").open("a") as file:
        file.write(metric_line(4, {"train/loss": 9.0}))
    write_run(root / "run999", 1, {"train/loss": lambda step: 5.0})
    text = (root / "run008" / "recipe.yaml").read_text()
    (root / "aside").write_text(text.replace("grpo", "rloo"))
    (root / "aside").replace(root / "run008" / "recipe.yaml")
    shutil.rmtree(root / "run009")
    now, opened = opened_below(root, RunList(root).listed)
    assert opened == [
        f"{run}/{name}" for run in ("run007", "run008", "run999") for name in ("metrics.jsonl", "recipe.yaml")
    ]
    runs = {run["run"]: run for run in now["runs"]}
    assert (runs["run007"]["step"], runs["run007"]["value"]) == (4, 9.0)
    assert (runs["run008"]["method"], runs["run999"]["value"]) == ("rloo", 5.0)
    assert "run009" not in runs
    assert now == json.loads(json.dumps(now))


@pytest.mark.parametrize("damage", ["cut", "text", "list", "entry", "version", "gone", "folder"])
def test_a_damaged_index_is_made_again(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCKSTEP_CACHE", str(tmp_path / "cache"))
    root = many_runs(tmp_path / "runs", 3)
    right = RunList(root).listed()
    (index,) = (tmp_path / "cache" / "runs").glob("*.json")
    assert stat.S_IMODE(index.stat().st_mode) == 0o600
    reply = json.loads(index.read_text())
    if damage == "entry":
        next(iter(reply["runs"].values()))[1]["method"] = "another"
    if damage == "version":
        reply["version"] = "another"
    changed = {"cut": index.read_text()[:-40], "text": "\0", "list": "[1]"}.get(damage, json.dumps(reply))
    index.unlink()
    if damage == "folder":
        index.mkdir()
    elif damage != "gone":
        index.write_text(changed)
    now, opened = opened_below(root, RunList(root).listed)
    assert now == right
    assert len(opened) == 6
    again, opened = opened_below(root, RunList(root).listed)
    assert again == right
    assert len(opened) == (6 if damage == "folder" else 0)


def test_only_the_lock_of_a_run_that_works_is_read(tmp_path: Path) -> None:
    root = many_runs(tmp_path / "runs", 3)
    for run in root.iterdir():
        (run / ".lock").write_text("1")
    RunList(root).listed()
    with RunFolder(root / "run001").lock():
        now, opened = opened_below(root, RunList(root).listed)
    assert opened == ["run001/.lock"]
    assert [run["running"] for run in now["runs"]] == [False, True, False]
