"""The commands of the Ascend guides train on the emulated NPU, and begin where the same commands begin on the CPU."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from ascend_emulator import report
from guide_commands import GUIDES, Folders
from lockstep.compat.conversion_output import checked
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from reward_models import write_reward_model

pytestmark = pytest.mark.ascend

# bf16 on both, which samples other words where two are within rounding: the first step alone sees the same weights.
LOSS_BAR, SCORE_BAR = 0.02, 0.5


@pytest.fixture(scope="module")
def reward(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reward_model(tiny_folder, tmp_path_factory.mktemp("reward") / "model")


def history(name: str, device: str, where: Folders) -> list[dict[str, float]]:
    where.work.mkdir()
    recipe = checked(GUIDES[name].converted(where)).model_copy(update={"device": device})
    (train_online if recipe.method in ONLINE else train_offline)(recipe, Console.silent())
    return [metrics for _, metrics in read_metrics(where.work / "run" / "metrics.jsonl")]


# `make test` trains the methods on the NPU in test_recipes.py, with fewer rows.
@pytest.mark.slow
@pytest.mark.parametrize("name", GUIDES)
def test_it_trains_to_its_end(name: str, tiny_folder: Path, reward: Path, tmp_path: Path) -> None:
    report.clear()
    npu = history(name, "npu", Folders(tiny_folder, reward, tmp_path / "npu"))
    assert not report.fallbacks()
    assert "npu::npu_fusion_attention" in {operator.name for operator in report.operators()}
    loss = GUIDES[name].loss
    assert len([step for step in npu if loss in step]) == 2
    assert all(math.isfinite(step[loss]) for step in npu if loss in step)
    cpu = history(name, "cpu", Folders(tiny_folder, reward, tmp_path / "cpu"))
    if loss == "train/loss":
        assert npu[0][loss] == pytest.approx(cpu[0][loss], rel=LOSS_BAR)
    else:
        assert npu[0]["critic/score/mean"] == pytest.approx(cpu[0]["critic/score/mean"], abs=SCORE_BAR)
