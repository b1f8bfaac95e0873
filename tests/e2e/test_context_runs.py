"""Context parallelism: processes that divide every sequence compute and train what one does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

import context_ranks
from commands import lockstep, torchrun
from conftest import write_online_recipe, write_sft_recipe
from lockstep.model.tiny import write_tiny
from lockstep.run.checkpoint import steps_in
from preference_rows import METHODS, ranking_rows, write_recipe
from runs import close, facts, stored

pytestmark = pytest.mark.torchrun


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_divided_attention_and_models_are_whole_ones(ranks: int) -> None:
    """Random packings in fp64 and fp32, gradients included; models with windows, sinks, soft caps, moving positions."""
    done = torchrun(program=Path(context_ranks.__file__), processes=ranks)
    assert done.returncode == 0, done.stderr


def weights(run: Path, part: str = "weights") -> Mapping[str, torch.Tensor]:
    return stored(run, steps_in(run / "checkpoints")[-1], part)


def divided(recipe: Path, processes: int, layout: str, *words: str) -> tuple[Path, Path]:
    """The run folders of one process and of several that divide their micro-batches by two."""
    # eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
    common = ["optim.eps=1e-4", "run.export=false", *words]
    one = lockstep("train", recipe, "run.name=one", *common)
    assert one.returncode == 0, one.stderr
    context = ["parallel.context_parallel=2", f"parallel.context_layout={layout}"]
    several = torchrun("train", recipe, "run.name=several", *context, *common, processes=processes)
    assert several.returncode == 0, several.stderr
    folder = recipe.parent / "runs"
    return folder / "one", folder / "several"


def same_metrics(one: Path, several: Path) -> None:
    assert len(facts(one)) == len(facts(several)) > 1
    for (_, ours), (_, theirs) in zip(facts(one), facts(several), strict=True):
        assert ours.keys() == theirs.keys()
        assert theirs == pytest.approx(ours, rel=1e-4, abs=2e-5)


@pytest.mark.parametrize(
    ("processes", "layout", "words"),
    [
        pytest.param(*(2, "zigzag", ["val.every=3"]), marks=pytest.mark.slow),
        pytest.param(*(4, "gather", ["batch.rows_per_update=3"]), marks=pytest.mark.slow),
        pytest.param(
            *(2, "ulysses", ["batch.tokens=null", "batch.micro_batch_size=3", "model.gradient_checkpointing=true"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(2, "zigzag", ["model.lora.rank=4", "optim.lr=1e-2", "model.gradient_checkpointing=true"]),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_supervised_fine_tuning(
    tiny_folder: Path, tmp_path: Path, processes: int, layout: str, words: list[str]
) -> None:
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    one, several = divided(recipe, processes, layout, *words)
    same_metrics(one, several)
    assert close(weights(several), weights(one))


@pytest.mark.parametrize(
    ("method", "processes", "layout", "words"),
    [
        pytest.param(*("dpo", 2, "zigzag", []), marks=pytest.mark.slow),
        pytest.param(*("dpo", 4, "ulysses", ["batch.rows_per_update=1"]), marks=pytest.mark.slow),
        pytest.param(*("rm", 2, "gather", []), marks=pytest.mark.slow),
        pytest.param(*("kto", 2, "zigzag", []), marks=pytest.mark.slow),
        pytest.param(*("distill", 2, "zigzag", ["distill.top_k=6"]), marks=pytest.mark.slow),
        pytest.param(*("distill", 2, "gather", []), marks=pytest.mark.slow),
    ],
)
def test_methods_that_compare_and_judge(
    tiny_folder: Path, tmp_path: Path, method: str, processes: int, layout: str, words: list[str]
) -> None:
    assert method in METHODS
    recipe = write_recipe(tmp_path, tiny_folder, method, ranking_rows(24) if method == "rm" else None)
    if method == "distill":
        write_tiny(tmp_path / "teacher", seed=5, hidden=64, layers=1)
        words = [*words, f"distill.teacher={tmp_path / 'teacher'}"]
    one, several = divided(recipe, processes, layout, *words)
    same_metrics(one, several)
    assert close(weights(several), weights(one))


def samples(run: Path) -> list[tuple[str, float]]:
    stored = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [(sample["response"], sample["score"]) for sample in stored]


@pytest.mark.slow
@pytest.mark.parametrize(("method", "layout"), [("grpo", "zigzag"), ("ppo", "gather")])
def test_online_methods(tiny_folder: Path, tmp_path: Path, method: str, layout: str) -> None:
    """Both with several updates a step, so that old log-probs, and values, are asked for too."""
    recipe = write_online_recipe(tmp_path, tiny_folder)
    words = [f"method={method}", "log.samples=99", "batch.prompts_per_update=2", "algorithm.kl.where=loss"]
    words += ["algorithm.entropy=0.01"] + (["rollout.n=1", "critic.lr=1e-3"] if method == "ppo" else [])
    one, several = divided(recipe, 2, layout, *words)
    assert samples(several) == samples(one)
    same_metrics(one, several)
    assert close(weights(several), weights(one))
    if method == "ppo":
        assert close(weights(several, "critic"), weights(one, "critic"))


@pytest.mark.slow
def test_a_row_longer_than_one_device_holds(tiny_folder: Path, tmp_path: Path) -> None:
    """The budget of tokens counts for each of the devices that divide a line: this is what they do it for."""
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    alone = lockstep("train", recipe, "batch.tokens=60", "run.name=alone")
    assert alone.returncode != 0
    assert "tokens" in alone.stderr
    _, several = divided(recipe, 2, "zigzag")
    small = torchrun(
        "train",
        recipe,
        "run.name=small",
        "parallel.context_parallel=2",
        "batch.tokens=60",
        "optim.eps=1e-4",
        "run.export=false",
    )
    assert small.returncode == 0, small.stderr
    assert close(weights(tmp_path / "runs" / "small"), weights(several))


@pytest.mark.slow
def test_a_divided_run_goes_on_alone(tiny_folder: Path, tmp_path: Path) -> None:
    recipe = write_sft_recipe(tmp_path, tiny_folder)
    common = ["optim.eps=1e-4", "optim.schedule=constant", "run.export=false"]
    assert lockstep("train", recipe, "run.name=one", *common).returncode == 0
    first = torchrun("train", recipe, "run.name=moved", *common, "run.steps=3", "parallel.context_parallel=2")
    assert first.returncode == 0, first.stderr
    second = lockstep("train", recipe, "run.name=moved", *common)
    assert second.returncode == 0, second.stderr
    assert "after step 3" in " ".join(second.stdout.split())
    assert close(weights(tmp_path / "runs" / "moved"), weights(tmp_path / "runs" / "one"))
