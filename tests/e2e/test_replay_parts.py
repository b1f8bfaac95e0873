"""A run that was resumed with another recipe: each step is replayed with the recipe that trained it."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import chat_rows, write_jsonl
from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_loop import parts_of
from lockstep.parity.replay.replay_result import Replayed, first_divergence
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.train.offline import train_offline
from refusals import refuses
from taped_runs import write_lively


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps, then two more: the schedule of the first two ended with them, and a longer one goes on."""
    folder = tmp_path_factory.mktemp("parts")
    model = write_lively(folder / "model")
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""method: sft
device: cpu
batch: {{rows_per_update: 8, tokens: 256}}
run: {{name: run, folder: {folder / "runs"}, steps: 2, export: false}}
model: {{path: {model}}}
data: {{train: {write_jsonl(folder / "train.jsonl", chat_rows(48))}}}
optim: {{lr: 1.0e-3, clip: 1.0, weight_decay: 0.1, schedule: cosine, warmup: 0}}
checkpoint: {{every: 2}}
tape: {{record: true, every: 1, steps: 4}}
""",
        encoding="utf-8",
    )
    for words in ([], ["run.steps=4"]):
        train_offline(load_recipe(str(recipe), words), Console.silent())
    return folder / "runs" / "run"


def done(run: Path, mode: str, *words: str, steps: tuple[int, ...] = ()) -> Replayed:
    found = replay(run, mode, words, Console.silent(), steps)  # type: ignore[arg-type]
    assert found is not None
    return found


@pytest.mark.slow
def test_the_run_has_two_parts(run: Path) -> None:
    first, second = parts_of(RunFolder(run))
    assert (first.recipe.name, first.before, first.last) == ("recipe.to_step_2.yaml", 0, 2)
    assert (second.recipe.name, second.before, second.last) == ("recipe.yaml", 2, None)
    assert [first.holds(step) for step in (1, 2, 3)] == [True, True, False]


@pytest.mark.slow
def test_every_step_is_replayed_with_the_recipe_that_trained_it(run: Path) -> None:
    found = done(run, "forced")
    assert found.steps == [1, 2, 3, 4]
    assert found.in_step, first_divergence(found)
    assert "recipe.to_step_2.yaml" in found.remarks[0]
    assert len(list((run / "replays").glob("forced-*"))) == 2


def test_one_step_is_replayed_with_the_recipe_that_trained_it(run: Path) -> None:
    for step in (2, 4):
        found = done(run, "forced", steps=(step,))
        assert found.steps == [step]
        assert found.in_step, first_divergence(found)


@pytest.mark.slow
def test_the_newest_recipe_would_be_a_fault(run: Path) -> None:
    """The schedule of the second part is a fault in the first: its second step had another rate."""
    found = done(run, "forced", "run.steps=4")
    assert (found.stage, found.step) == ("optimizer", 2)
    assert {check.step for check in found.checks if not check.passed} == {2}


@pytest.mark.slow
def test_a_chained_replay_stops_at_the_first_recipe_change(run: Path) -> None:
    found = done(run, "chained")
    assert found.steps == [1, 2]
    assert found.in_step, first_divergence(found)
    assert any("after step 2: 2 recorded steps from 3 on" in remark for remark in found.remarks)
    with refuses("--step 3", "not-replayable", "after step 2"):
        done(run, "chained", steps=(3,))
