"""Recordings of verl's and TRL's own trainers, made in other environments and judged here."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from lockstep.parity.compare.logs import read_log
from lockstep.parity.replay.foreign_recording import compare_recordings, replay_recording
from taped_runs import write_lively

from .loops import plain

pytestmark = [
    pytest.mark.recorder,
    pytest.mark.skipif("LOCKSTEP_OLD_STACK" not in os.environ, reason="`make test-recorder` runs these"),
]
ALL = {"batch", "log-probs", "gradient", "optimizer", "weights"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_lively(tmp_path_factory.mktemp("recorder") / "model")


def recorded(stack: str, loop: str, model: Path, folder: Path) -> Path:
    program = Path(__file__).parent / "loops.py"
    done = subprocess.run(
        [os.environ[stack], program, loop, model, folder], capture_output=True, text=True, check=False, timeout=600
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads((folder / "tape.json").read_text())["recorder"]["stopped"] is None
    return folder


@pytest.mark.parametrize(
    ("stack", "loop"),
    [
        ("LOCKSTEP_OLD_STACK", "plain"),
        ("LOCKSTEP_OLD_STACK", "verl"),
        ("LOCKSTEP_OLD_STACK", "trl_sft"),
        ("LOCKSTEP_OLD_STACK", "trl_dpo"),
        ("LOCKSTEP_OLD_STACK", "trl_grpo"),
        ("LOCKSTEP_NEW_TRL", "trl_sft"),
        ("LOCKSTEP_NEW_TRL", "trl_dpo"),
        ("LOCKSTEP_NEW_TRL", "trl_grpo"),
    ],
)
def test_updates_of_other_trainers_are_replayed_in_step(stack: str, loop: str, model: Path, tmp_path: Path) -> None:
    folder = recorded(stack, loop, model, tmp_path / loop)
    manifest = json.loads((folder / "tape.json").read_text())
    if stack == "LOCKSTEP_OLD_STACK":
        assert manifest["recorder"]["torch"].startswith("2.5.1")
    assert manifest["recipe"]["model"]["dtype"] == ("bf16" if loop == "verl" else "fp32")
    result = replay_recording(folder, str(model), ["device=cpu"])
    assert result.in_step, (result.stage, result.cause, result.module)
    assert result.steps == [1, 3]
    judged = {check.stage for check in result.checks}
    # The newest SFT trainer computes its loss without logits: tokens and modules are all that can be judged.
    assert judged == ({"batch"} if (stack, loop) == ("LOCKSTEP_NEW_TRL", "trl_sft") else ALL)
    assert len(read_log(str(folder)).metrics["train/loss"].steps) == (4 if loop == "verl" else 3)


def test_an_old_stack_against_this_one(model: Path, tmp_path: Path) -> None:
    """Two versions of torch and transformers, module by module; then with a fault on this side."""
    old = recorded("LOCKSTEP_OLD_STACK", "plain", model, tmp_path / "old")
    plain(str(model), str(tmp_path / "new"))
    assert compare_recordings(old, tmp_path / "new").in_step

    def fault(network: object) -> None:
        network.model.layers[2].input_layernorm.variance_epsilon = 1e-2  # type: ignore[attr-defined]

    plain(str(model), str(tmp_path / "faulty"), fault=fault)
    found = compare_recordings(old, tmp_path / "faulty")
    assert found.module is not None
    assert found.module.module == "model.layers.2.input_layernorm"
