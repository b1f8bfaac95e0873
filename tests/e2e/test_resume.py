"""Runs that are really killed, and what a resume refuses."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from commands import lockstep
from conftest import chat_rows, write_jsonl, write_sft_recipe
from conftest import run as command
from kills import Moment, interrupted, killed, lines
from lockstep.errors import Refusal
from lockstep.parity.compare.logs.log_curves import Log
from lockstep.parity.compare.logs.run_logs import read_evidence as evidence_of
from lockstep.parity.compare.run_setup import differences
from lockstep.recipe import load_recipe
from lockstep.run.checkpoint import told_of
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from refusals import refuses
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


# Every day in a checkpoint, while an old one is removed, and late.
@pytest.mark.parametrize("chosen", [(2, 5, 6), pytest.param(range(7), marks=pytest.mark.slow)], ids=["some", "all"])
def test_killed_at_many_moments_ends_bit_identical(recipe_file: Path, tmp_path: Path, chosen: Sequence[int]) -> None:
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
    for number in chosen:
        killed(["train", recipe_file, "run.name=killed", *SETTINGS], moments[number])
    done = lockstep("train", recipe_file, "run.name=killed", *SETTINGS)
    assert done.returncode == 0, done.stderr
    assert facts(folder) == facts(runs / "whole")
    assert same_weights(folder, runs / "whole")
    left = sorted(p.name for p in checkpoints.iterdir())
    assert left == sorted(p.name for p in (runs / "whole" / "checkpoints").iterdir())


def train(recipe_file: Path, *overrides: str) -> None:
    train_offline(load_recipe(str(recipe_file), ["run.export=false", *overrides]), Console.silent())


@pytest.mark.slow
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


# Every file of it is damaged in test_damaged_runs.py too.
@pytest.mark.parametrize(
    "file",
    [
        "model.safetensors",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("optimizer.safetensors", "state.json", "manifest.json")
        ),
    ],
)
def test_a_damaged_checkpoint_is_passed_over_aloud(often_saved: Path, tmp_path: Path, file: str) -> None:
    run = shutil.copytree(often_saved.parent / "runs" / "run", tmp_path / "run")
    before = facts(run)
    path = run / "checkpoints" / "step_6" / file
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x20
    path.write_bytes(content[:-1] if file == "manifest.json" else content)
    again = lockstep("train", often_saved, *OFTEN, "run.export=false", f"run.folder={tmp_path}")
    assert again.returncode == 0, again.stderr
    assert "step_6 is damaged" in again.stdout + again.stderr
    assert "after step 4" in " ".join(again.stdout.split())  # the path before it wraps the line
    assert facts(run) == before


def test_only_damaged_checkpoints_are_refused(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file)
    (tmp_path / "runs" / "run" / "checkpoints" / "step_6" / "model.safetensors").write_bytes(b"")
    with pytest.raises(Refusal, match="every checkpoint in this folder is damaged"):
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
        train(recipe_file, "optim.eps=2e-3", "batch.rows_per_update=4", "batch.tokens=512", "optim.lr=2e-3")
    assert {problem.where for problem in caught.value.problems} == {"optim.eps", "batch.rows_per_update"}
    assert "1e-08" in str(caught.value)
    assert "0.002" in str(caught.value)


@pytest.mark.slow
def test_more_steps_go_on_from_the_last(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file, "optim.schedule=constant")
    train(recipe_file, "optim.schedule=constant", "run.steps=9")
    whole = ["run.name=whole", "optim.schedule=constant", "run.steps=9"]
    train(recipe_file, *whole)
    assert same_weights(tmp_path / "runs" / "run", tmp_path / "runs" / "whole", step=9)


@pytest.mark.daily("[]")
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


@pytest.mark.slow
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
    with pytest.raises(Refusal, match="exists, and run"):
        train(recipe_file, "run.resume=never")


def test_ctrl_c_finishes_the_step_saves_and_goes_on(recipe_file: Path, tmp_path: Path) -> None:
    settings = ["run.steps=100000", "checkpoint.every=100000"]
    metrics = tmp_path / "runs" / "run" / "metrics.jsonl"
    status, output = interrupted(["train", recipe_file, *settings], lines(metrics, 3))
    assert status == 130, output
    assert "the same command to resume" in output
    steps = [p.name for p in (tmp_path / "runs" / "run" / "checkpoints").iterdir()]
    assert len(steps) == 1
    state = json.loads((tmp_path / "runs" / "run" / "checkpoints" / steps[0] / "state.json").read_text())
    assert read_metrics(metrics)[-1][0] == state["step"] < 100_000


@pytest.mark.slow
def test_a_smaller_budget_that_drops_other_rows_is_refused(recipe_file: Path) -> None:
    """batch.tokens may change on resume, unless it is what limits the rows."""
    settings = ["data.overlong=drop", "batch.tokens=90", "optim.schedule=constant"]
    train(recipe_file, *settings)
    with refuses("data.max_tokens", "changed-data"):
        train(recipe_file, "data.overlong=drop", "batch.tokens=60", "optim.schedule=constant", "run.steps=9")


def test_a_data_file_may_move(recipe_file: Path, tmp_path: Path) -> None:
    train(recipe_file, "run.steps=3")
    moved = tmp_path / "elsewhere.jsonl"
    (tmp_path / "train.jsonl").rename(moved)
    train(recipe_file, "run.steps=6", f"data.train={moved}")
    assert read_metrics(tmp_path / "runs" / "run" / "metrics.jsonl")[-1][0] == 6


def rates(run: Path) -> list[float]:
    return [told["train/lr"] for _, told in read_metrics(run / "metrics.jsonl")]


@pytest.mark.slow
def test_the_learning_rate_may_change_and_compare_shows_it(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rate, schedule, warm-up and length. By hand: step 4 is the second of 4 after a warm-up of 2, linear to 0."""
    constant = ["optim.schedule=constant", "optim.warmup=0"]
    train(recipe_file, *constant, "run.steps=3")
    words = ["optim.lr=4e-3", "optim.schedule=linear", "optim.warmup=2", "run.steps=6"]
    train_offline(load_recipe(str(recipe_file), words), Console.open())
    run = tmp_path / "runs" / "run"
    assert rates(run) == pytest.approx([1e-3, 1e-3, 1e-3, 3e-3, 2e-3, 1e-3])
    said = " ".join("".join(capsys.readouterr()).split())
    assert "resuming although optim.lr changed from 0.001 to 0.004" in said
    assert "step 4 has 0.003 (without the change: none" in said
    # The run's history has both parts, and a comparison with a run of one part names what changed and where.
    env = json.loads((run / "env.json").read_text())
    assert env["resumed"]["after_step"] == 3
    assert env["resumed"]["changed"]["optim.lr"] == [1e-3, 4e-3]
    train(recipe_file, *words, "run.name=whole")
    whole, parts = (Log(name, "run", {}, {}, evidence_of(tmp_path / "runs" / name)) for name in ("whole", "run"))
    found, told = differences(whole, parts)
    changed = {one.key: one for one in found if one.key.startswith("optim.")}
    assert (changed["optim.lr to step 3"].a, changed["optim.lr to step 3"].b) == (4e-3, 1e-3)
    assert changed["optim.lr to step 3"].weight == "blocks"
    assert "side b was resumed after step 3" in changed["optim.lr to step 3"].effect
    (history,) = [one for one in told if "with other keys" in one]
    assert history.startswith("run was resumed after step 3 ")
    assert "optim.lr from 0.001 to 0.004" in history


@pytest.mark.slow
def test_a_key_that_changes_no_number_may_change(recipe_file: Path, tmp_path: Path) -> None:
    words = ["optim.schedule=constant"]
    train(recipe_file, *words, "run.steps=3")
    other = ["model.gradient_checkpointing=true", "data.require_end=false"]
    train(recipe_file, *words, *other, "run.steps=6")
    train(recipe_file, *words, "run.name=whole")
    assert same_weights(tmp_path / "runs" / "run", tmp_path / "runs" / "whole", step=6)


def test_other_validation_rows_are_said_and_used(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["optim.schedule=constant"]
    train(recipe_file, *words, "run.steps=3")
    write_jsonl(tmp_path / "val.jsonl", chat_rows(7, seed=2))
    train_offline(load_recipe(str(recipe_file), [*words, "run.steps=4"]), Console.open())
    said = " ".join("".join(capsys.readouterr()).split())
    assert "val.jsonl had 10 rows" in said
    assert "val/ metrics before and after" in said


@pytest.fixture
def adapter_run(tmp_path: Path, tiny_folder: Path) -> Path:
    """The recipe of a LoRA run over a copy of the tiny model, three steps old."""
    model = Path(shutil.copytree(tiny_folder, tmp_path / "base"))
    recipe = write_sft_recipe(tmp_path, model)
    train(recipe, *ADAPTER, "run.steps=3")
    return recipe


ADAPTER = ["model.lora.rank=4", "optim.schedule=constant", "run.export=false"]


def scale(file: Path, by: float) -> None:
    save_file({name: tensor * by for name, tensor in load_file(file).items()}, file, metadata={"format": "pt"})


def test_a_base_whose_weights_changed_is_refused(adapter_run: Path) -> None:
    scale(adapter_run.parent / "base" / "model.safetensors", 1.1)
    with pytest.raises(Refusal) as caught:
        train(adapter_run, *ADAPTER, "run.steps=4")
    (problem,) = caught.value.problems
    assert problem.where == f"model.path {adapter_run.parent / 'base'}"
    assert "model.safetensors has other content" in problem.why
    assert "--accept-changed" in problem.remedy


@pytest.mark.slow
def test_a_changed_base_is_accepted_by_the_option_and_told(adapter_run: Path) -> None:
    folder = adapter_run.parent
    scale(folder / "base" / "model.safetensors", 1.1)
    assert command("train", adapter_run, *ADAPTER, "run.steps=4", "--accept-changed") == 0
    run = folder / "runs" / "run"
    env = json.loads((run / "env.json").read_text())
    assert env["resumed"]["accepted_models"] == {"model.path": ["model.safetensors has other content"]}
    # The new content is the run's model from here on.
    train(adapter_run, *ADAPTER, "run.steps=5")
    log = Log("run", "run", {}, {}, evidence_of(run))
    told = differences(log, log)[1]
    assert re.search("run was resumed after step 3 .*model.path", " ".join(told))


@pytest.mark.slow
def test_a_model_may_move_and_its_content_is_compared(adapter_run: Path) -> None:
    base = adapter_run.parent / "base"
    moved = base.rename(base.with_name("elsewhere"))
    train(adapter_run, *ADAPTER, "run.steps=4", f"model.path={moved}")
    scale(moved / "model.safetensors", 0.9)
    shutil.copytree(moved, base)
    with refuses("model.path ", "changed-model"):
        train(adapter_run, *ADAPTER, "run.steps=5")


@pytest.mark.slow
def test_a_checkpoint_without_fingerprints_resumes_with_a_note(
    adapter_run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As earlier versions wrote them. Another path cannot be checked then, and is refused."""
    checkpoint = adapter_run.parent / "runs" / "run" / "checkpoints" / "step_3"
    state = json.loads((checkpoint / "state.json").read_text())
    assert state.pop("models")
    (checkpoint / "state.json").write_text(json.dumps(state))
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    manifest |= told_of(checkpoint, [checkpoint / "state.json"])
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    copy = shutil.copytree(adapter_run.parent / "base", adapter_run.parent / "copy")
    with refuses("model.path", "changed-setting"):
        train(adapter_run, *ADAPTER, "run.steps=4", f"model.path={copy}")
    train_offline(load_recipe(str(adapter_run), [*ADAPTER, "run.steps=4"]), Console.open())
    said = " ".join("".join(capsys.readouterr()).split())
    assert "stored no fingerprints of models" in said
