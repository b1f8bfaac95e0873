"""Runs that are really killed, and what a resume refuses."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file

from commands import lockstep
from conftest import chat_rows, write_jsonl, write_sft_recipe
from kills import Moment, interrupted, killed, lines
from lockstep.errors import Refusal
from lockstep.parity.compare.comparable import differences
from lockstep.parity.compare.log import Log
from lockstep.parity.compare.logs.run_folder import evidence as evidence_of
from lockstep.recipe import load_recipe
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import read_metrics
from lockstep.run.progress import Console
from lockstep.train.offline import train_offline
from runs import facts

# Dropout makes the random state matter; LoRA keeps the checkpoint small and has the dropout.
SETTINGS = [
    "run.steps=12",
    "checkpoint.every=3",
    "checkpoint.keep_best=1",
    "val.every=4",
    "val.at_start=true",
    "model.lora.rank=4",
    "model.lora.dropout=0.2",
    "optim.lr=1e-2",
]


def same_weights(a: Path, b: Path, step: int = 12) -> bool:
    one, two = (load_file(f / "checkpoints" / f"step_{step}" / "model.safetensors") for f in (a, b))
    return one.keys() == two.keys() and all(bool((one[name] == two[name]).all()) for name in one)


def test_killed_at_many_moments_ends_bit_identical(recipe_file: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    assert lockstep("train", recipe_file, "run.name=whole", *SETTINGS).returncode == 0
    folder, checkpoints = runs / "killed", runs / "killed" / "checkpoints"
    moments = [
        Moment(f"{folder}"),  # before anything is trained
        lines(folder / "metrics.jsonl", 2),  # before the first checkpoint
        Moment(f"{checkpoints}/.writing-step_3"),  # while the first checkpoint is written
        Moment(f"{checkpoints}/step_6"),  # right after a checkpoint
        Moment(f"{checkpoints}/.writing-*/optimizer.safetensors"),  # half way through a later one
        Moment(f"{checkpoints}/.removing-*"),  # while an old one is removed
        lines(folder / "metrics.jsonl", 11),  # late
    ]
    for moment in moments:
        killed(["train", recipe_file, "run.name=killed", *SETTINGS], moment)
    done = lockstep("train", recipe_file, "run.name=killed", *SETTINGS)
    assert done.returncode == 0, done.stderr
    assert facts(folder) == facts(runs / "whole")
    assert same_weights(folder, runs / "whole")
    left = sorted(p.name for p in checkpoints.iterdir())
    assert left == sorted(p.name for p in (runs / "whole" / "checkpoints").iterdir())


def train(recipe_file: Path, *overrides: str) -> None:
    train_offline(load_recipe(str(recipe_file), list(overrides)), Console.silent())


def test_the_whole_model_in_bf16_with_masters_resumes_bit_identical(recipe_file: Path, tmp_path: Path) -> None:
    settings = ["model.dtype=bf16", "checkpoint.every=3", "checkpoint.keep_last=9"]
    train(recipe_file, "run.name=whole", *settings)
    train(recipe_file, "run.name=part", *settings)
    part = tmp_path / "runs" / "part"
    # As after a kill in step 5: the last checkpoint never came to be.
    shutil.rmtree(part / "checkpoints" / "step_6")
    train(recipe_file, "run.name=part", *settings)
    assert facts(part) == facts(tmp_path / "runs" / "whole")
    assert same_weights(part, tmp_path / "runs" / "whole", step=6)


OFTEN = ["checkpoint.every=2", "checkpoint.keep_last=9"]


@pytest.fixture(scope="module")
def often_saved(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    """The recipe of a finished run; tests copy the run."""
    recipe = write_sft_recipe(tmp_path_factory.mktemp("often-saved"), tiny_folder)
    train(recipe, *OFTEN)
    return recipe


@pytest.mark.parametrize("file", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
def test_a_damaged_checkpoint_is_passed_over_aloud(often_saved: Path, tmp_path: Path, file: str) -> None:
    run = shutil.copytree(often_saved.parent / "runs" / "run", tmp_path / "run")
    before = facts(run)
    path = run / "checkpoints" / "step_6" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x20
    path.write_bytes(content[:-1] if file == "manifest.json" else content)
    again = lockstep("train", often_saved, *OFTEN, f"run.folder={tmp_path}")
    assert again.returncode == 0, again.stderr
    assert "step_6 is damaged" in again.stdout + again.stderr
    assert "after step 4" in again.stdout
    assert facts(run) == before


def test_only_damaged_checkpoints_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file)
    (tmp_path / "runs" / "run" / "checkpoints" / "step_6" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Refusal, match="every checkpoint in it is damaged"):
        train(recipe_file)


def test_changed_data_is_refused_with_the_difference(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file)
    write_jsonl(tmp_path / "train.jsonl", chat_rows(47))
    with pytest.raises(Refusal, match=r"train\.jsonl had 48 rows.*now has 47") as caught:
        train(recipe_file)
    assert caught.value.problems[0].where == "data.train"


def test_a_changed_recipe_is_refused_with_the_keys(recipe_file: Path) -> None:
    train(recipe_file)
    with pytest.raises(Refusal) as caught:
        train(recipe_file, "optim.lr=2e-3", "batch.rows_per_update=4", "batch.tokens=512")
    assert {problem.where for problem in caught.value.problems} == {"optim.lr", "batch.rows_per_update"}
    assert "0.001" in str(caught.value)
    assert "0.002" in str(caught.value)


def test_more_steps_go_on_from_the_last(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file, "optim.schedule=constant")
    train(recipe_file, "optim.schedule=constant", "run.steps=9")
    whole = ["run.name=whole", "optim.schedule=constant", "run.steps=9"]
    train(recipe_file, *whole)
    assert same_weights(tmp_path / "runs" / "run", tmp_path / "runs" / "whole", step=9)


@pytest.mark.parametrize("other", [[], ["run.steps=3"], ["log.every=3", "batch.tokens=999"]], ids=str)
def test_a_finished_run_stays_as_it_is(recipe_file: Path, tmp_path: Path, other: list[str]) -> None:
    """What was trained, by which recipe and where: a start that trains nothing changes none of it."""
    train(recipe_file, "tape=true")
    run = tmp_path / "runs" / "run"

    def evidence() -> dict[str, bytes]:
        files = [*run.glob("*.*"), *(run / "tape").iterdir()]
        return {file.name: file.read_bytes() for file in files if file.is_file()}

    before = evidence()
    assert {"recipe.yaml", "env.json", "metrics.jsonl"} < set(before)
    train(recipe_file, "tape=true", *other)
    assert evidence() == before


def test_a_run_that_goes_on_with_other_keys_keeps_the_recipe_of_its_first_part(
    recipe_file: Path, tmp_path: Path
) -> None:
    train(recipe_file, "run.steps=4")
    run = RunFolder(tmp_path / "runs" / "run")
    first = run.recipe.read_bytes()
    train(recipe_file, "run.steps=6")
    train(recipe_file, "run.steps=6")
    train(recipe_file, "run.steps=8", "batch.tokens=999")
    assert {last: load_recipe(str(path)).run.steps for last, path in run.earlier_recipes().items()} == {4: 4, 6: 6}
    assert run.earlier_recipe(4).read_bytes() == first
    assert (load_recipe(str(run.recipe)).run.steps, load_recipe(str(run.recipe)).batch.tokens) == (8, 999)
    # A comparison sees both parts: the learning rate of the first four steps followed another length.
    train(recipe_file, "run.name=whole", "run.steps=8", "batch.tokens=999")
    whole, parts = (Log(name, "run", {}, {}, evidence_of(tmp_path / "runs" / name)) for name in ("whole", "run"))
    found = {one.key: (one.a, one.b, one.weight) for one in differences(whole, parts)[0]}
    assert found["run.steps to step 4"] == (8, 4, "blocks")
    assert found["run.steps to step 6"] == (8, 6, "blocks")
    assert "run.steps" not in found


def test_resume_never_and_required(recipe_file: Path) -> None:
    with pytest.raises(Refusal, match="no checkpoint to continue"):
        train(recipe_file, "run.resume=required")
    train(recipe_file, "run.resume=never")
    with pytest.raises(Refusal, match="exists and resume is never"):
        train(recipe_file, "run.resume=never")


def test_ctrl_c_finishes_the_step_saves_and_goes_on(recipe_file: Path, tmp_path: Path) -> None:
    settings = ["run.steps=100000", "checkpoint.every=100000"]
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    status, output = interrupted(["train", recipe_file, *settings], lines(metrics, 3))
    assert status == 130, output
    assert "the same command goes on" in output
    steps = [p.name for p in (tmp_path / "runs" / "run" / "checkpoints").iterdir()]
    assert len(steps) == 1
    state = json.loads((tmp_path / "runs" / "run" / "checkpoints" / steps[0] / "state.json").read_text())
    assert read_metrics(metrics)[-1][0] == state["step"] < 100_000


def test_a_smaller_budget_that_drops_other_rows_is_refused(recipe_file: Path) -> None:
    """batch.tokens may change on resume, unless it is what limits the rows."""
    settings = ["data.overlong=drop", "batch.tokens=90", "optim.schedule=constant"]
    train(recipe_file, *settings)
    with pytest.raises(Refusal, match=r"trained on \d+ rows of .* now leaves \d+ rows"):
        train(recipe_file, "data.overlong=drop", "batch.tokens=60", "optim.schedule=constant", "run.steps=9")


def test_a_data_file_may_move(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file, "run.steps=3")
    moved = tmp_path / "elsewhere.jsonl"
    (tmp_path / "train.jsonl").rename(moved)
    train(recipe_file, "run.steps=6", f"data.train={moved}")
    assert read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")[-1][0] == 6
