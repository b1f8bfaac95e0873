"""Methods that compare and judge responses learn the same, however their rows are cut into micro-batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from preference_rows import ranking_rows, write_recipe

# The longest row of any method fits, and little else.
VARIANTS = {
    "packed, everything at once": ["batch.tokens=4096"],
    "packed, small budget": ["batch.tokens=260"],
    "padded, one row a micro-batch": ["batch.tokens=null", "batch.micro_batch_size=1"],
    "padded, four rows a micro-batch": ["batch.tokens=null", "batch.micro_batch_size=4"],
}
KINDS = {
    "dpo": [],
    "ipo": [],
    "ipo of sums": ["preference.average=false"],
    "simpo": [],
    "orpo": [],
    "cpo": [],
    "kto": [],
    "rm": ["rm.center_rewards_coef=0.01"],
    "rm of several": [],
    "rm of several, plackett_luce": ["rm.ranking=plackett_luce"],
    "prm": [],
    "distill": ["distill.divergence=jsd", "distill.temperature=1.5"],
    "distill from disk": ["distill.top_k=5"],
    "dpo by ranks of the update": ["preference.loss=aot_unpaired", "preference.ld_alpha=0.5"],
    "dpo from disk": ["preference.precompute=true"],
}


@pytest.fixture(scope="module")
def teacher(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("teacher") / "model"
    write_tiny(folder, seed=5, hidden=96, layers=1)
    return folder


def run(recipe_file: Path, name: str, *overrides: str) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    recipe = load_recipe(str(recipe_file), [f"run.name={name}", "run.export=false", *overrides])
    train_offline(recipe, Console.silent())
    folder = Path(recipe.run.folder) / name
    history = [
        {key: value for key, value in metrics.items() if key.startswith(("train/", "val/"))}
        for _, metrics in read_metrics(folder / "metrics.jsonl")
    ]
    return history, load_file(folder / "checkpoints" / "step_4" / "model.safetensors")


# For every day: one cut of either kind is held against the first. The others are slow.
DAILY = ("packed, everything at once", "packed, small budget", "padded, four rows a micro-batch")
SLOW = ("packed, everything at once", "padded, one row a micro-batch")
# The adapter runs beside one method of each way to compare, with the smallest micro-batches of either kind.
CUT_FOR_LORA = ("packed, small budget", "padded, one row a micro-batch")
WITH_LORA = ("dpo", "kto", "rm")
SLOW_WITH_LORA = ("orpo", "rm of several", "prm", "distill")


# Another of its kind is there for every day; that a table on the disk changes nothing is in test_logprob_cache.py too.
SLOW_KINDS = ("ipo of sums", "distill from disk", "dpo from disk")


def _cases() -> Iterator[object]:
    for kind in KINDS:
        yield pytest.param(kind, False, DAILY, id=kind, marks=pytest.mark.slow if kind in SLOW_KINDS else ())
        yield pytest.param(kind, False, SLOW, id=f"{kind}, row by row", marks=pytest.mark.slow)
    for kind in (*WITH_LORA, *SLOW_WITH_LORA):
        marks = pytest.mark.slow if kind in SLOW_WITH_LORA else ()
        yield pytest.param(kind, True, CUT_FOR_LORA, id=f"{kind} with an adapter", marks=marks)


@pytest.mark.parametrize(("kind", "lora", "cuts"), _cases())
def test_the_same_run_however_it_is_cut(
    tiny_folder: Path, tmp_path: Path, teacher: Path, kind: str, lora: bool, cuts: tuple[str, ...]
) -> None:
    method = kind.split()[0]
    recipe_file = write_recipe(tmp_path, tiny_folder, method, ranking_rows(24) if "several" in kind else None)
    common = [*KINDS[kind], *(["model.lora.rank=4", "optim.lr=3e-3"] if lora else [])]
    if method == "distill":
        common.append(f"distill.teacher={teacher}")
    # Every cut is held against the first.
    reference, *others = cuts
    history, weights = run(recipe_file, "reference", *common, *VARIANTS[reference])
    if kind == "dpo from disk":
        # The table was made in other micro-batches: what should be a tie in the first update is decided by rounding.
        history[0].pop("train/pair_accuracy")
    losses = [metrics["train/loss"] for metrics in history]
    assert len(losses) == 4
    assert max(losses) - min(losses) > 1e-4, "nothing moved, so nothing is compared"
    for name in others:
        variant = VARIANTS[name]
        other_history, other_weights = run(
            recipe_file, name.split(",")[0] + variant[-1].replace("=", ""), *common, *variant
        )
        for ours, theirs in zip(history, other_history, strict=True):
            assert theirs["train/loss"] == pytest.approx(ours["train/loss"], abs=1e-5, rel=1e-5), name
            shown = {key: value for key, value in theirs.items() if key in ours}
            assert shown == pytest.approx(ours, rel=1e-3, abs=2e-5), name
        assert other_weights.keys() == weights.keys()
        for key, weight in weights.items():
            assert (other_weights[key] - weight).abs().max() <= 1e-5, (name, key)
