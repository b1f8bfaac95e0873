"""Clean replays of models that have learned something: gradients nearly cancel there, and log-probs are near 0."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.data.prepare.generated import write_arithmetic
from lockstep.parity.replay.replay_command import replay
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.train.start import run_recipe

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("clean trained")]
TRAINED = 60
QUIET = ["run.export=false", "val.questions=null", "val.every=null", "val.at_start=false", "data.val=[]"]
QUIET += ["checkpoint.keep_best=0", "tape=true"]


@pytest.fixture(scope="module")
def model(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """After a supervised start on sums."""
    folder = tmp_path_factory.mktemp("trained")
    write_arithmetic(folder / "data", difficulty=2)
    words = [f"model.path={tiny_folder}", f"data.train={folder / 'data' / 'sft_train.parquet'}", f"run.steps={TRAINED}"]
    words += [word for word in QUIET if word not in ("run.export=false", "tape=true")]
    run_recipe(load_recipe("sft-arithmetic", [*words, f"run.folder={folder / 'runs'}", "run.name=start"]))
    return folder


def recorded(model: Path, name: str, dtype: str) -> Path:
    start, runs = model / "runs" / "start" / "export", model / "runs"
    settings = [f"model.path={start}", f"model.dtype={dtype}", f"run.folder={runs}", f"run.name={name}-{dtype}", *QUIET]
    if name == "sft":
        settings += [f"data.train={model / 'data' / 'sft_train.parquet'}", "run.steps=11", "tape.every=5"]
        return run_recipe(load_recipe("sft-arithmetic", [*settings, "optim.warmup=0"]))
    settings += [f"data.train={model / 'data' / 'train.parquet'}", "run.steps=3", "tape.every=1", "batch.prompts=8"]
    return run_recipe(load_recipe("grpo-arithmetic", settings))


@pytest.mark.parametrize("name", ["sft", "grpo"])
@pytest.mark.parametrize(("dtype", "changed"), [("fp32", "model.dtype=bf16"), ("bf16", "batch.tokens=700")])
def test_a_clean_replay_of_a_trained_model_is_in_step(model: Path, name: str, dtype: str, changed: str) -> None:
    found = replay(recorded(model, name, dtype), "forced", [changed], Console.silent())
    assert found is not None
    assert found.in_step, (found.cause, found.module)
