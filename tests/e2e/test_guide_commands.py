"""The commands of the Ascend guides train on the CPU, shrunk to the tiny model by nothing but their own settings."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from guide_commands import GUIDES, Folders
from lockstep.compat.conversion_output import run
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.run.metrics import read_metrics
from reward_models import write_reward_model

DAILY = ("SFT-PEFT",)


@pytest.fixture(scope="module")
def reward(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tiny_folder, tmp_path_factory.mktemp("reward") / "model")


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in DAILY else pytest.mark.slow) for n in GUIDES])
def test_it_trains_to_its_end(name: str, tiny_folder: Path, reward: Path, tmp_path: Path) -> None:
    guide = GUIDES[name]
    program, words = guide.words(Folders(tiny_folder, reward, tmp_path))
    on_cpu = ["trainer.device=cpu"] if guide.table == "verl" else []
    run(convert_verl if guide.table == "verl" else convert_openrlhf, [program, *words, *on_cpu])
    steps = [values for _, values in read_metrics(tmp_path / "run" / "metrics.jsonl")]
    losses = [values[guide.loss] for values in steps if guide.loss in values]
    # Twelve rows: two updates of six, or the two steps that were asked for.
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert (tmp_path / "run" / "export").is_dir()
