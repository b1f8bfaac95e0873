"""Whole runs of the methods that compare and judge: killed and resumed, on several processes, exported, shown."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from commands import torchrun
from kills import killed, lines
from lockstep.cli import app
from lockstep.model.load import load_policy
from lockstep.model.tiny import write_tiny
from lockstep.model.weights import restore_weights
from lockstep.recipe import load_recipe
from lockstep.run import checkpoint as checkpoints
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from preference_rows import METHODS, ranking_rows, write_recipe
from runs import facts, stored

IDS = torch.tensor([[257, 65, 66, 43, 49, 50, 51, 10]])
# What a method reports of every update beside the loss, and of the validation rows likewise.
PAIR = {"pair_accuracy", "chosen", "rejected", "margin"}
REPORTED = {
    **dict.fromkeys(("dpo", "ipo", "simpo"), PAIR),
    **{method: {*PAIR, "nll"} for method in ("orpo", "cpo")},
    "rm": {*PAIR, "score_mean", "score_std"},
    "prm": {"step_accuracy", "positive", "label_positive"},
    "kto": {"label_accuracy", "kl", "chosen", "rejected", "margin"},
    "distill": {"nll", "divergence"},
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    write_tiny(folder, seed=5, hidden=64, layers=1)
    return folder


def taught(method: str, teacher: Path) -> list[str]:
    return [f"distill.teacher={teacher}"] if method == "distill" else []


def train(recipe_file: Path, *overrides: str) -> Path:
    recipe = load_recipe(str(recipe_file), list(overrides))
    train_offline(recipe, Console.silent())
    return Path(recipe.run.folder) / recipe.run.name


def weights(folder: Path, step: int) -> Mapping[str, torch.Tensor]:
    return stored(folder, step)


def killed_in_the_middle(recipe_file: Path, folder: Path, words: list[str]) -> None:
    """SIGKILL once there is a checkpoint and a step after it."""
    killed(["train", recipe_file, f"run.name={folder.name}", *words], lines(folder / "metrics.jsonl", 4))
    assert checkpoints.steps_in(folder / "checkpoints") == [3]


RESUMED = {
    "dpo": ["model.lora.rank=4", "model.lora.dropout=0.2"],
    "kto": [],
    "rm": ["checkpoint.keep_best=1", "model.lora.rank=4", "model.lora.dropout=0.2"],
    "prm": [],
    "distill": ["distill.top_k=6"],
}


# Every day test_resume.py and test_online.py kill runs, and invariance/test_recipes.py resumes preference runs.
@pytest.mark.slow
@pytest.mark.parametrize("method", RESUMED)
def test_a_killed_run_ends_bit_identical(tiny_folder: Path, tmp_path: Path, teacher: Path, method: str) -> None:
    recipe_file = write_recipe(tmp_path, tiny_folder, method)
    words = ["run.steps=7", "checkpoint.every=3", "val.every=4", *RESUMED[method], *taught(method, teacher)]
    whole, again = train(recipe_file, "run.name=whole", *words), tmp_path / "runs" / "killed"
    killed_in_the_middle(recipe_file, again, words)
    train(recipe_file, "run.name=killed", *words)
    assert facts(again) == facts(whole)
    ours, theirs = weights(again, 7), weights(whole, 7)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    for file in ("model.safetensors", *(["score_stats.json"] if method == "rm" else [])):
        assert (again / "export" / file).read_bytes() == (whole / "export" / file).read_bytes()


@pytest.mark.torchrun
@pytest.mark.parametrize(
    ("method", "processes", "words"),
    [
        pytest.param(*("dpo", 2, []), marks=pytest.mark.slow),  # two ranks: invariance/test_recipes.py
        pytest.param(*("dpo", 2, ["model.lora.rank=4", "optim.lr=3e-3"]), marks=pytest.mark.slow),
        pytest.param(*("kto", 2, []), marks=pytest.mark.slow),
        pytest.param(*("rm", 2, []), marks=pytest.mark.slow),
        pytest.param(*("distill", 2, []), marks=pytest.mark.slow),  # one rank: invariance/test_recipes.py
        pytest.param(*("dpo", 2, ["preference.precompute=true"]), marks=pytest.mark.slow),
        pytest.param(*("distill", 2, ["distill.top_k=6"]), marks=pytest.mark.slow),
        # Fewer rows than processes: somebody's share is empty.
        pytest.param(*("kto", 3, ["batch.rows_per_update=2"]), marks=pytest.mark.slow),
        pytest.param(*("rm", 2, ["batch.rows_per_update=1", "rm.ranking=plackett_luce"]), marks=pytest.mark.slow),
        pytest.param(*("dpo", 2, ["batch.rows_per_update=1"]), marks=pytest.mark.slow),
        pytest.param(*("prm", 2, ["batch.rows_per_update=1"]), marks=pytest.mark.slow),
        pytest.param(*("distill", 2, ["batch.rows_per_update=1"]), marks=pytest.mark.slow),
    ],
)
def test_several_processes_train_what_one_does(
    tiny_folder: Path, tmp_path: Path, teacher: Path, method: str, processes: int, words: list[str]
) -> None:
    recipe_file = write_recipe(tmp_path, tiny_folder, method, ranking_rows(24) if method == "rm" else None)
    words = ["run.export=false", *words, *taught(method, teacher)]
    one, several = train(recipe_file, "run.name=one", *words), tmp_path / "runs" / "several"
    if "distill.top_k=6" in words or "preference.precompute=true" in words:
        # Not the table that the first run left behind.
        words.append(f"run.folder={tmp_path / 'elsewhere'}")
        several = tmp_path / "elsewhere" / "several"
    done = torchrun("train", recipe_file, "run.name=several", *words, processes=processes)
    assert done.returncode == 0, done.stderr
    assert len(facts(one)) == 4
    # What a table's rounding decides: in the first update every pair is a tie.
    left_out = {"train/pair_accuracy"} if "preference.precompute=true" in words else set()
    for (_, ours), (_, theirs) in zip(facts(one), facts(several), strict=True):
        assert ours.keys() == theirs.keys()
        for name in ours.keys() - left_out:
            assert theirs[name] == pytest.approx(ours[name], rel=1e-4, abs=1e-5), name
    mine, other = weights(one, 4), weights(several, 4)
    assert mine.keys() == other.keys()
    assert all((mine[name] - other[name]).abs().max() <= 1e-5 for name in mine)


# For every day each method once, and both ways; of supervised fine-tuning both are in test_export.py.
@pytest.mark.daily("kto-False", "prm-True", "distill-False")
@pytest.mark.parametrize(
    ("method", "lora"),
    [
        *(("dpo", True), ("kto", False), ("prm", True), ("distill", False)),
        *(
            pytest.param(method, lora, marks=pytest.mark.slow)
            for method, lora in (("dpo", False), ("kto", True), ("prm", False), ("distill", True))
        ),
    ],
)
def test_the_export_is_what_was_trained(
    tiny_folder: Path, tmp_path: Path, teacher: Path, method: str, lora: bool
) -> None:
    words = ["optim.lr=1e-2", *(["model.lora.rank=4"] if lora else []), *taught(method, teacher)]
    recipe_file = write_recipe(tmp_path, tiny_folder, method)
    folder, recipe = train(recipe_file, *words), load_recipe(str(recipe_file), words)
    policy = load_policy(recipe.model, torch.device("cpu"), "sdpa", recipe.run.seed)
    newest = checkpoints.newest(folder / "checkpoints")
    assert newest is not None
    restore_weights(policy.model, newest.weights, "test")
    with torch.no_grad(), policy.generating() as model:
        wanted = model(IDS).logits
    with torch.no_grad():
        assert (AutoModelForCausalLM.from_pretrained(tiny_folder)(IDS).logits - wanted).abs().max() > 0.01
        exported = AutoModelForCausalLM.from_pretrained(folder / "export")
        torch.testing.assert_close(exported(IDS).logits, wanted, rtol=1e-4, atol=1e-5)
    assert exported.num_parameters() == AutoModelForCausalLM.from_pretrained(tiny_folder).num_parameters()


@pytest.mark.daily("dpo", "rm", "kto", "prm")
@pytest.mark.parametrize("method", METHODS)
def test_metrics_plan_and_rows_of_every_method(tiny_folder: Path, tmp_path: Path, teacher: Path, method: str) -> None:
    recipe_file = write_recipe(tmp_path, tiny_folder, method)
    words = [
        "run.steps=2",
        "run.export=false",
        "data.shuffle=false",
        "val.at_start=true",
        "log.track=[tensorboard]",
        *taught(method, teacher),
    ]
    folder = train(recipe_file, *words)
    (zeroth, before), (_, first), (last, second) = read_metrics(folder / "metrics.jsonl")
    assert (zeroth, last) == (0, 2)
    common = {"train/epoch", "train/loss", "train/tokens", "train/trained_tokens", "train/lr", "train/grad_norm"}
    wanted = {f"train/{name}" for name in REPORTED[method]} | common
    for metrics in (first, second):
        assert {name for name in metrics if name.startswith("train/")} == wanted
    assert set(before) == {"val/loss", *(f"val/{name}" for name in REPORTED[method])}
    assert {name for name in second if name.startswith("val/")} == set(before)
    assert "train/loss" in tracked(folder)
    assert wanted <= tracked(folder)

    plan = CliRunner().invoke(app, ["plan", str(recipe_file), *words])
    assert plan.exit_code == 0, plan.output
    assert "2 of 6 rows" in plan.output
    assert "fits" in plan.output
    shown = CliRunner().invoke(app, ["data", "show", str(recipe_file), "--rows", "1", *words])
    assert shown.exit_code == 0, shown.output
    assert f"{tmp_path / 'train.jsonl'} line 1" in shown.output
    if method == "prm":
        # Steps, not the words that are weighed at each of them.
        steps = [len(row["labels"]) for row in METHODS[method](24, 0)]
        assert f" tokens, {steps[0]} trained" in shown.output
        assert f"of which {sum(steps):,} trained" in plan.output
        assert [step["train/trained_tokens"] for step in (first, second)] == [sum(steps[:6]), sum(steps[6:12])]
    if method in ("dpo", "rm"):
        assert "chosen" in shown.output
        assert "rejected" in shown.output
        assert "49+97?" in shown.output


def tracked(folder: Path) -> set[str]:
    """The names in the run's TensorBoard files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = next(folder.rglob("events.out.*"))
    accumulator = EventAccumulator(str(events))
    accumulator.Reload()
    return set(accumulator.Tags()["scalars"])
