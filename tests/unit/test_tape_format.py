"""Files of a tape: they round-trip, damaged files are refused, and plain libraries can read them."""

from __future__ import annotations

import json
import subprocess
import sys
from datetime import date, datetime, time, timedelta, timezone
from decimal import Decimal
from pathlib import Path

import pytest
import torch

from commands import warm_python
from lockstep.errors import Refusal
from lockstep.tape.tape_format import VERSION, StepRecord, TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import fed_examples, fed_tensors, item_rows, items_of, rollout_rows, rollouts_of
from lockstep.types import (
    Example,
    Failure,
    Item,
    LabeledResponse,
    Origin,
    Prompt,
    Question,
    Ranking,
    Rollout,
    Score,
    ScoredExample,
    StepLabels,
)


@pytest.fixture
def tape(tmp_path: Path) -> TapeFolder:
    folder = TapeFolder(tmp_path / "tape")
    folder.write_manifest({"recipe": {"method": "sft"}, "world_size": 1})
    return folder


def record(step: int, value: float = 0.5) -> StepRecord:
    tensors = {"fed/ids": torch.tensor([1, 2, 3], dtype=torch.int32), "train/0/answers": torch.tensor([value, -1.0])}
    return StepRecord(step, {"carried": {"position": 8.0}, "updates": [{"learner": "train", "loss": value}]}, tensors)


def rollout(
    score: Score | Failure, place: int = 0, sample: int = 0, text: str = "ça va ✓\n", trained: tuple[int, ...] = ()
) -> Rollout:
    question = Question(
        "arithmetic",
        [{"role": "system", "content": "är"}, {"role": "user", "content": "1+1?"}],
        "2",
        Origin("rows.parquet", 17),
        {"index": 3, "nested": {"list": [1, None, "é"]}},
    )
    prompt = Prompt(question, [5, 6, 7])
    # Numbers that single precision does not hold must come back too: these are Python's.
    earned = ((0, 0.25), (1, -0.5))
    return Rollout(prompt, place, sample, [9, 8], [-0.1, -2.0000000001], "token", text, score, earned, trained)


ROLLOUTS = [
    rollout(Score(0.75, {"letters": 0.5, "length": 0.25}, ((3, 0.1), (7, 0.2)))),
    rollout(Score(0.0), 1, 2, ""),
    rollout(Score(0.0), 1, 3, "", (1, 0)),
    rollout(Failure("letters", "cannot judge “this”"), 2),
]


@pytest.mark.parametrize("chosen", [ROLLOUTS, ROLLOUTS[:1], ROLLOUTS[2:], []], ids=["all", "scored", "failed", "none"])
def test_rollouts_come_back(tape: TapeFolder, chosen: list[Rollout]) -> None:
    file = tape.rollouts_file(1)
    tape.write_table(file, rollout_rows(chosen))
    assert rollouts_of(tape.read_table(file), TapeImages(tape.path)) == chosen


def test_a_tape_without_masks_has_the_policys_tokens_only() -> None:
    (row,) = rollout_rows([rollout(Score(1.0))])
    del row["trained"]
    assert list(rollouts_of([row], TapeImages(Path()))[0].loss_mask) == [1, 1]


@pytest.mark.parametrize(
    "value",
    [
        datetime(2024, 2, 29, 23, 59, 59, 123456),
        datetime(2024, 2, 29, tzinfo=timezone.utc),
        date(2024, 2, 29),
        time(1, 2, 3),
        -timedelta(days=1, microseconds=7),
        Decimal("0.10"),
        b"\x00\xff",
        {"$date": "but", "with": "company"},
        {},
        [None, True, 1.5, "é", {"in": [date(1, 1, 1)]}],
    ],
    ids=str,
)
def test_what_parquet_can_hold_comes_back(tape: TapeFolder, value: object) -> None:
    """A reward that reads `extra_info` must find in a replay what it found in the run."""
    made = rollout(Score(1.0))
    made.prompt.question.extra_info["own"] = value
    tape.write_table(tape.rollouts_file(1), rollout_rows([made]))
    [found] = rollouts_of(tape.read_table(tape.rollouts_file(1)), TapeImages(tape.path))
    assert found == made
    assert type(found.prompt.question.extra_info["own"]) is type(value)


def example(row: int, *ids: int) -> Example:
    return Example(list(ids), [0, *[1] * (len(ids) - 1)], Origin("a.jsonl", row))


STEPS = StepLabels(
    ScoredExample([1, 2, 3, 4], [0] * 4, Origin("s.jsonl", 4), [1, 3], [70, 71]), ((1.0, 0.0), (0.25, 0.75))
)
ITEMS: dict[str, list[Item]] = {
    "sft": [example(0, 1, 2, 3), example(1, 4, 5)],
    "dpo": [Ranking((example(0, 1, 2), example(0, 1, 3)), 0.5), Ranking((example(1, 4, 5), example(1, 4)))],
    "ranking": [
        Ranking((example(2, 1, 2), example(2, 1, 3), example(2, 1, 4))),
        Ranking((example(3, 7, 8), example(3, 7))),
    ],
    "rm": [
        Ranking(
            (
                ScoredExample([1, 2], [0, 0], Origin("p", 0), [1], [0]),
                ScoredExample([3], [0], Origin("p", 0), [0], [0]),
            ),
            1.5,
        )
    ],
    "kto": [LabeledResponse(example(0, 1, 2), True), LabeledResponse(example(1, 3, 4), False)],
    "prm": [STEPS],
    "mixed": [example(0, 1, 2), STEPS, LabeledResponse(example(5, 6, 7), True)],
    "none": [],
}


@pytest.mark.parametrize("kind", ITEMS)
def test_items_of_every_kind_come_back(tape: TapeFolder, kind: str) -> None:
    file = tape.rows_file(1)
    tape.write_table(file, item_rows(ITEMS[kind]))
    assert items_of(tape.read_table(file), TapeImages(tape.path)) == ITEMS[kind]


def test_fed_examples_ask_what_was_asked() -> None:
    """Two sequences, the second asked twice at one place; a third that is asked nothing."""
    tensors = {
        "fed/ids": torch.tensor([1, 2, 3, 4, 5, 6]),
        "fed/lengths": torch.tensor([3, 2, 1]),
        "fed/asked": torch.tensor([[0, 2], [1, 3], [0, 70], [0, 71]]),
        "fed/targets": torch.tensor([2, 2, 0]),
    }
    found = fed_examples(tensors)
    assert [list(one.ids) for one in found] == [[1, 2, 3], [4, 5], [6]]
    assert [one.scored_tokens() for one in found] == [[(0, 2), (1, 3)], [(0, 70), (0, 71)], []]
    assert [one.targets for one in found] == [2, 2, 0]


def test_a_step_comes_back(tape: TapeFolder) -> None:
    wanted = record(3)
    tape.write_step(wanted)
    found = tape.read_step(3)
    assert (found.step, found.info) == (3, wanted.info)
    assert found.tensors.keys() == wanted.tensors.keys()
    assert all(torch.equal(found.tensors[name], wanted.tensors[name]) for name in wanted.tensors)
    assert found.tensors["fed/ids"].dtype == torch.int32


def test_one_tensor_under_two_names_and_views_are_written(tape: TapeFolder) -> None:
    """Advantages and returns may be one tensor; a transposed one is not contiguous."""
    vector, matrix = torch.arange(4.0), torch.arange(6.0).reshape(2, 3).t()
    tape.write_step(StepRecord(1, {}, {"a": vector, "b": vector, "part": vector[1:], "t": matrix}))
    found = tape.read_step(1).tensors
    assert found["a"].tolist() == found["b"].tolist() == [0, 1, 2, 3]
    assert found["part"].tolist() == [1, 2, 3]
    assert torch.equal(found["t"], matrix)


def test_weights_come_back_in_their_own_dtype(tape: TapeFolder) -> None:
    wanted = {
        "train/model/w": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "train/optimizer/step/w": torch.tensor(3.0),
    }
    tape.write_weights(1, wanted)
    found = tape.read_weights(1)
    assert {name: (tensor.dtype, tensor.tolist()) for name, tensor in found.items()} == {
        "train/model/w": (torch.bfloat16, [[1.5, -2.0]]),
        "train/optimizer/step/w": (torch.float32, 3.0),
    }


def fill(tape: TapeFolder, steps: int) -> None:
    for step in range(1, steps + 1):
        tape.write_table(tape.rows_file(step), item_rows(ITEMS["sft"]))
        tape.write_step(record(step))
        if step % 2:
            tape.write_weights(step, {"w": torch.zeros(2)})


def test_steps_and_snapshots_are_counted(tape: TapeFolder) -> None:
    fill(tape, 5)
    (tape.path / ".writing-step_000006.safetensors").write_bytes(b"half")
    (tape.path / "notes.safetensors").write_bytes(b"a user's own file")
    assert tape.steps() == [1, 2, 3, 4, 5]
    assert tape.weighed() == [1, 3, 5]


def test_rewind_forgets_what_came_later_and_what_is_half_written(tape: TapeFolder) -> None:
    fill(tape, 5)
    before = {file.name: file.read_bytes() for file in tape.path.iterdir()}
    (tape.path / ".writing-step_000002.safetensors").write_bytes(b"half")
    (tape.path / "notes.txt").write_text("a user's own file")
    tape.rewind(2)
    names = {file.name for file in tape.path.iterdir()}
    early = {f"step_00000{n}.{end}" for n in (1, 2) for end in ("safetensors", "rows.parquet")}
    assert names == {"tape.json", "notes.txt", "weights_000001.safetensors"} | early
    assert all((tape.path / name).read_bytes() == before[name] for name in early)
    tape.rewind(0)
    assert {file.name for file in tape.path.iterdir()} == {"tape.json", "notes.txt"}


def test_rewind_of_no_tape_is_nothing(tmp_path: Path) -> None:
    TapeFolder(tmp_path / "none").rewind(3)
    assert not (tmp_path / "none").exists()


def test_no_tape_is_refused_with_how_to_record_one(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="there is no tape") as caught:
        TapeFolder(tmp_path).manifest()
    assert "tape=true" in caught.value.problems[0].remedy


@pytest.mark.parametrize("text", ['{"version": 0}', '{"version": 99}', "{}", "[]"])
def test_another_format_is_refused(tape: TapeFolder, text: str) -> None:
    assert tape.manifest()["version"] == VERSION
    tape.manifest_file.write_text(text)
    with pytest.raises(Refusal, match=rf"format (None|\d+).*format {VERSION}") as caught:
        tape.manifest()
    assert caught.value.problems[0].where == str(tape.manifest_file)
    assert "record the run again" in caught.value.problems[0].remedy


@pytest.mark.parametrize("damage", ["cut", "noise", "empty"])
@pytest.mark.parametrize("kind", ["manifest", "step", "weights", "rows"])
def test_damaged_files_are_refused_by_name_and_with_advice(tape: TapeFolder, kind: str, damage: str) -> None:
    fill(tape, 1)
    file, read = {
        "manifest": (tape.manifest_file, tape.manifest),
        "step": (tape.step_file(1), lambda: tape.read_step(1)),
        "weights": (tape.weights_file(1), lambda: tape.read_weights(1)),
        "rows": (tape.rows_file(1), lambda: tape.read_table(tape.rows_file(1))),
    }[kind]
    read()
    whole = file.read_bytes()
    file.write_bytes({"cut": whole[: len(whole) // 2], "noise": bytes(range(255, 0, -1)), "empty": b""}[damage])
    with pytest.raises(Refusal, match="cannot be read") as caught:
        read()
    [problem] = caught.value.problems
    assert problem.where == str(file)
    assert "record it again" in problem.remedy


@pytest.mark.parametrize("kind", ["step", "weights", "rows"])
def test_a_missing_file_is_not_on_the_tape(tape: TapeFolder, kind: str) -> None:
    with pytest.raises(Refusal, match="is not on the tape") as caught:
        {
            "step": lambda: tape.read_step(7),
            "weights": lambda: tape.read_weights(7),
            "rows": lambda: tape.read_table(tape.rows_file(7)),
        }[kind]()
    assert "000007" in caught.value.problems[0].where
    assert "tape.steps" in caught.value.problems[0].remedy


FULL = """
import resource, sys, torch
from pathlib import Path
from lockstep.errors import Refusal
from lockstep.tape.tape_rows import fed_examples, fed_tensors
from lockstep.types import Example, Origin, ScoredExample
from lockstep.tape.tape_format import StepRecord, TapeFolder
tape = TapeFolder(Path(sys.argv[1]))
resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))
large = torch.zeros(100_000)
for write in (
    lambda: tape.write_step(StepRecord(1, {}, {"a": large})),
    lambda: tape.write_weights(1, {"a": large}),
    lambda: tape.write_table(tape.rows_file(1), [{"ids": torch.randperm(100_000).tolist()}]),
    lambda: tape.write_manifest({"text": "x" * 100_000}),
):
    try:
        write()
    except Refusal as refusal:
        print(refusal.problems[0].remedy)
"""


def test_a_disk_that_takes_no_more_is_refused_and_nothing_half_stays(tape: TapeFolder) -> None:
    """A limit on the size of files stands in for a full disk."""
    before = tape.manifest_file.read_bytes()
    done = subprocess.run([*warm_python(), "-c", FULL, tape.path], capture_output=True, text=True, check=False)
    remedies = done.stdout.splitlines()
    assert len(remedies) == 4, done.stderr
    assert all("disk" in remedy and "tape.steps" in remedy for remedy in remedies)
    assert [file.name for file in tape.path.iterdir()] == ["tape.json"]
    assert tape.manifest_file.read_bytes() == before


PLAIN = """
import json, sys
from pathlib import Path
import pyarrow.parquet as pq
from safetensors import safe_open
folder = Path(sys.argv[1])
manifest = json.loads((folder / "tape.json").read_text())
with safe_open(folder / "step_000001.safetensors", "numpy") as file:
    info = json.loads(file.metadata()["lockstep"])
    answers = file.get_tensor("train/0/answers").tolist()
rows = pq.read_table(folder / "step_000001.rows.parquet").to_pylist()
rollouts = pq.read_table(folder / "step_000001.rollouts.parquet").to_pylist()
assert not [name for name in sys.modules if name.partition(".")[0] == "lockstep"]
first = rollouts[0]
print(json.dumps([manifest["version"], info["carried"], answers, rows[0]["ids"], first["logprobs"], first["text"]]))
"""


def test_plain_libraries_read_it(tape: TapeFolder) -> None:
    tape.write_step(record(1))
    tape.write_table(tape.rows_file(1), item_rows(ITEMS["sft"]))
    tape.write_table(tape.rollouts_file(1), rollout_rows(ROLLOUTS))
    done = subprocess.run([sys.executable, "-c", PLAIN, tape.path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [
        VERSION,
        {"position": 8.0},
        [0.5, -1.0],
        [1, 2, 3],
        [-0.1, -2.0000000001],
        "ça va ✓\n",
    ]


def test_sequences_fed_are_kept_with_their_questions() -> None:
    rows = [([5, 6, 7], [0, 1, 1]), ([8], [1]), ([9, 4], [1, 0]), ([3, 2, 1, 0], [1, 0, 1, 1])]
    plain = [Example(ids, bytes(trained), Origin("a", row)) for row, (ids, trained) in enumerate(rows)]
    # By hand: the first token of a row has nothing before it.
    asked = [[(0, 6), (1, 7)], [], [], [(1, 1), (2, 0)]]
    assert [one.scored_tokens() for one in plain] == asked
    assert [one.scored_tokens() for one in fed_examples(fed_tensors(plain))] == asked
    assert [list(one.ids) for one in fed_examples(fed_tensors(plain))] == [ids for ids, _ in rows]
    judged = [ScoredExample([5, 6, 7], bytes(3), Origin("a", 0), [0, 2], [4, 9]), plain[0]]
    assert [one.scored_tokens() for one in fed_examples(fed_tensors(judged))] == [one.scored_tokens() for one in judged]
