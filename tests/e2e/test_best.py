"""Which checkpoint is the best, when a run stops early, and what of a finished run's folder stays."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from commands import torchrun
from conftest import question_rows, write_jsonl
from lockstep.commands.export import export_run
from lockstep.errors import Refusal
from lockstep.parallel.world import World
from lockstep.parity.compare.logs.log_curves import Log
from lockstep.parity.compare.logs.run_logs import read_evidence as evidence_of
from lockstep.parity.compare.run_setup import differences
from lockstep.recipe import load_recipe
from lockstep.recipe.measure import Measure, best_measure, measure_of
from lockstep.recipe.schema import EarlyStopping
from lockstep.run import checkpoint as checkpoints
from lockstep.run.console import Console
from lockstep.run.folder import RunFolder
from lockstep.run.metrics import read_metrics
from lockstep.train import training
from lockstep.train.monitor import EarlyStop
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from refusals import has_problem, refuses
from runs import facts, stored

# A learning rate that climbs until it ruins the model: the loss falls first and rises then.
RUINED = ["optim.lr=0.3", "optim.warmup=6", "optim.schedule=constant", "optim.clip=null", "val.every=1"]


def train(recipe_file: Path, *overrides: str) -> Path:
    recipe = load_recipe(str(recipe_file), list(overrides))
    (train_online if recipe.method == "grpo" else train_offline)(recipe, Console.silent())
    return Path(recipe.run.folder) / recipe.run.name


@pytest.mark.parametrize(
    ("words", "name", "highest"),
    [
        ("val/loss", "val/loss", False),
        ("val/accuracy", "val/accuracy", True),
        ("val/accuracy/gsm8k", "val/accuracy/gsm8k", True),
        ("val/pass@4", "val/pass@4", True),
        ("reward", "critic/score/mean", True),
        ("reward min", "critic/score/mean", False),
        ("response_length/mean min", "response_length/mean", False),
    ],
)
def test_a_metric_says_which_end_of_it_is_good(words: str, name: str, highest: bool) -> None:
    assert measure_of(words) == Measure(name, highest)


@pytest.mark.parametrize("words", ["response_length/mean", "val/loss up", "train/loss/accuracy"])
def test_a_metric_that_does_not_say_it_is_refused(words: str) -> None:
    with pytest.raises(ValueError, match=r"higher or lower is better|max nor min"):
        measure_of(words)


@pytest.mark.parametrize(
    ("words", "key", "says"),
    [
        (["checkpoint.best=response_length/mean"], "checkpoint.best", "higher or lower is better"),
        (["checkpoint.best=reward"], "checkpoint.best", "has no critic/score/mean"),
        (["checkpoint.best=val/loss", "checkpoint.keep_best=0"], "checkpoint.best", "keeps no best"),
        (["checkpoint.best=val/loss", "data.val=[]"], "checkpoint.best", "val/loss needs data.val"),
        (["run.early_stopping={metric: val/loss, patience: 2}"], "run.early_stopping.metric", "only at the end"),
        (["method=grpo", "data.val=[]", "checkpoint.best=val/accuracy"], "checkpoint.best", "no validation measures"),
        (["method=grpo", "data.val=[]", "checkpoint.best=val/loss"], "checkpoint.best", "online runs have no such"),
    ],
)
def test_metrics_that_the_run_will_not_have_are_refused(
    recipe_file: Path, words: list[str], key: str, says: str
) -> None:
    with pytest.raises(Refusal) as caught:
        load_recipe(str(recipe_file), words)
    assert any(problem.where == key and says in problem.why for problem in caught.value.problems), caught.value


def decisions(values: list[float], world: World | None = None, **settings: Any) -> list[bool]:
    early = EarlyStop(EarlyStopping(metric="val/loss", **settings), world or World())
    return [early.observe(step, {"val/loss": value}, validated=True) for step, value in enumerate(values, start=1)]


def test_patience_counts_measurements_that_did_not_improve() -> None:
    no, yes = False, True
    assert decisions([3, 2, 2, 2.5], patience=2) == [no, no, no, yes]  # an equal one is no improvement
    assert decisions([3, 2, 2.5, 1.9, 2, 1.95], patience=2) == [no, no, no, no, no, yes]
    # 2.95 and 2.91 are each less than 0.1 below the best that counted, 3; 2.85 is more than that.
    assert decisions([3, 2.95, 2.91, 2.85, 2.85], patience=3, min_delta=0.1) == [no, no, no, no, no]
    assert decisions([3, 2.95, 2.91, 2.85], patience=2, min_delta=0.1) == [no, no, yes, yes]
    assert decisions([math.nan, math.nan], patience=2) == [no, yes]


def test_steps_without_a_validation_are_not_counted() -> None:
    early = EarlyStop(EarlyStopping(metric="val/loss", patience=1), World())
    assert not early.observe(1, {"val/loss": 1.0}, validated=True)
    assert not early.observe(2, {"train/loss": 5.0}, validated=False)
    assert "has no val/loss" in str(early.missed({"val/accuracy": 1.0}))
    assert not early.observe(2, {"val/accuracy": 1.0}, validated=True)
    assert early.missed({"val/loss": 2.0}) is None
    assert early.observe(3, {"val/loss": 2.0}, validated=True)


class Second(World):
    """The second of two processes: the first one's number is another."""

    def gather(self, value: Any) -> list[Any]:
        return [{"val/loss": 1.0}, value] if isinstance(value, dict) else [[], value]


def test_every_process_decides_by_the_number_of_the_first() -> None:
    assert decisions([3, 2, 1], Second(), patience=2) == [False, False, True]


def test_a_run_stops_early_keeps_its_best_and_exports_it(recipe_file: Path, tmp_path: Path) -> None:
    words = [*RUINED, "run.steps=12", "checkpoint.every=1", "checkpoint.keep_last=1", "checkpoint.best=val/loss"]
    stop = "run.early_stopping={metric: val/loss, patience: 2}"
    run = train(recipe_file, *words, stop)
    losses = {step: metrics["val/loss"] for step, metrics in read_metrics(run / "metrics.jsonl")}
    best, last = min(losses, key=lambda step: losses[step]), max(losses)
    assert last == best + 2 < 12
    assert checkpoints.steps_in(run / "checkpoints") == [best, last]
    recipe = load_recipe(str(run / "recipe.yaml"))
    assert checkpoints.best_step(run / "checkpoints", best_measure(recipe)) == (best, losses[best])
    exported, kept = load_file(run / "export" / "model.safetensors"), stored(run, best)
    assert all((exported[name] == kept[name]).all() for name in kept if name in exported)
    assert any((exported[name] != stored(run, last)[name]).any() for name in kept if name in exported)
    assert f"step {best} of" in export_run(run, tmp_path / "best", step=None, best=True, adapter=False)

    # Started again it stays as it is; with more patience it goes on as an undisturbed run would have.
    before = {name: (run / name).read_bytes() for name in ("recipe.yaml", "env.json", "metrics.jsonl")}
    train(recipe_file, *words, stop)
    assert {name: (run / name).read_bytes() for name in before} == before
    patient = "run.early_stopping={metric: val/loss, patience: 3}"
    train(recipe_file, *words, patient)
    assert facts(run) == facts(train(recipe_file, *words, patient, "run.name=undisturbed"))
    assert facts(run)[-1][0] == last + 1


@pytest.mark.slow
def test_a_metric_that_is_written_wrong_costs_one_step(recipe_file: Path) -> None:
    with refuses("checkpoint.best", "unknown-metric", "val/acuracy") as caught:
        train(recipe_file, "checkpoint.best=val/acuracy max", "run.early_stopping={metric: train/los min, patience: 1}")
    assert has_problem(
        caught.value, "run.early_stopping.metric", "unknown-metric", "train/los", remedy="did you mean train/loss?"
    )
    with pytest.raises(Refusal, match=r"set val\.questions"):
        train(recipe_file, "run.name=b", "checkpoint.best=val/accuracy")


@pytest.mark.slow
def test_an_online_run_keeps_what_earned_most(online_file: Path, tmp_path: Path) -> None:
    questions = write_jsonl(tmp_path / "questions.jsonl", question_rows(3))
    keep = ["checkpoint.every=1", "checkpoint.keep_last=1", "run.export=false"]
    run = train(online_file, *keep, "checkpoint.best=reward")
    earned = {step: metrics["critic/score/mean"] for step, metrics in read_metrics(run / "metrics.jsonl")}
    best = max(earned, key=lambda step: (earned[step], -step))
    assert checkpoints.steps_in(run / "checkpoints") == sorted({best, 4})
    # Answers to questions: a constant measure never improves.
    stop = "run.early_stopping={metric: val/answered, patience: 2}"
    asked = [f"val.questions={questions}", "val.every=1", "val.max_new_tokens=1"]
    run = train(online_file, "run.name=asked", *keep, *asked, stop, "checkpoint.best=val/answered max")
    assert [step for step, _ in facts(run)] == [1, 2, 3]


@pytest.mark.slow
def test_a_start_that_trains_nothing_leaves_a_finished_run_as_it_is(
    recipe_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = RunFolder(train(recipe_file, "run.steps=3"))
    before = {file.name: file.read_bytes() for file in run.path.glob("*.*") if file.is_file()}

    def struck(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(training.Training, "step", struck)
    with pytest.raises(KeyboardInterrupt):
        train(recipe_file, "run.steps=6")
    assert {file.name: file.read_bytes() for file in run.path.glob("*.*") if file.is_file()} == before
    shutil.rmtree(run.checkpoints)
    with pytest.raises(Refusal, match="would overwrite its metrics"):
        train(recipe_file, "run.steps=6")
    assert run.metrics.read_bytes() == before["metrics.jsonl"]


@pytest.mark.slow
def test_a_stretched_schedule_is_told_and_explains_a_curve_that_parts(
    recipe_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(recipe_file, "run.steps=3")
    capsys.readouterr()
    recipe = load_recipe(str(recipe_file), ["run.steps=6"])
    train_offline(recipe, Console.open())
    # Step 4 of 6 with two of warm-up, by hand: 1e-3 * (1 + cos(pi / 4)) / 2.
    said = " ".join("".join(capsys.readouterr()).split())
    assert "for 6: step 4 has 0.000854" in said
    whole = train(recipe_file, "run.steps=6", "run.name=whole")
    logs = (Log(str(one), "run", {}, {}, evidence_of(one)) for one in (whole, tmp_path / "runs" / "run"))
    (found,) = [one for one in differences(*logs)[0] if one.key.startswith("run.steps")]
    assert (found.key, found.weight) == ("run.steps to step 3", "blocks")
    assert "side b was resumed after step 3" in found.effect


@pytest.mark.slow
def test_two_processes_stop_together(recipe_file: Path, tmp_path: Path) -> None:
    words = [*RUINED, "run.steps=12", "checkpoint.every=1", "checkpoint.best=val/loss", "run.export=false"]
    stop = "run.early_stopping={metric: val/loss, patience: 2}"
    done = torchrun("train", recipe_file, *words, stop, "run.name=two")
    assert done.returncode == 0, done.stderr
    assert "stopped early after step" in done.stdout
    one = train(recipe_file, *words, stop, "run.name=one")
    assert [step for step, _ in facts(one)] == [step for step, _ in facts(tmp_path / "runs" / "two")]
