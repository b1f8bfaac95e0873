"""Weights between an optimizer's last step and the next step of the run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lockstep.parity.replay.optimizer_checks import check_unchanged
from lockstep.tape.digest import digest
from lockstep.tape.tape_format import StepRecord, TapeFolder

WEIGHTS = {
    "up": torch.randn(64, 32, generator=torch.Generator().manual_seed(0)),
    "norm": torch.ones(32),
}


def write(folder: Path, now: dict[str, torch.Tensor] | None, updates: int = 1) -> TapeFolder:
    tape = TapeFolder(folder)
    tape.write_manifest({"recipe": {"method": "sft"}})
    left = {f"train/left/{name}": digest(weight) for name, weight in WEIGHTS.items()}
    tape.write_step(StepRecord(3, {"updates": [{"learner": "train"}] * updates}, left))
    if now is not None:
        tape.write_left(3, {f"train/left/{name}": digest(weight) for name, weight in now.items()})
    return tape


def test_untouched_weights_pass(tmp_path: Path) -> None:
    [check] = check_unchanged([("replay", write(tmp_path, WEIGHTS))], 3)
    assert check.passed
    assert check.stage == "weights"


def test_a_single_changed_weight_is_named_with_its_parameter_and_side(tmp_path: Path) -> None:
    up = WEIGHTS["up"].clone()
    up[5, 7] += 0.01
    sides = [("recorded run", write(tmp_path / "a", WEIGHTS)), ("replay", write(tmp_path / "b", {**WEIGHTS, "up": up}))]
    clean, changed = check_unchanged(sides, 3)
    assert clean.passed
    assert not changed.passed
    assert "up" in changed.what
    assert "replay" in changed.what
    assert "1 of 2 parameters" in changed.where
    # The whole change is seen: 0.01 of the parameter's norm.
    assert changed.error == pytest.approx(0.01 / float(WEIGHTS["up"].norm()), rel=0.01)


def test_it_belongs_to_the_last_update(tmp_path: Path) -> None:
    [check] = check_unchanged([("replay", write(tmp_path, WEIGHTS, updates=4))], 3)
    assert check.update == 3


def test_a_tape_without_them_says_nothing(tmp_path: Path) -> None:
    assert list(check_unchanged([("recorded run", write(tmp_path, None))], 3)) == []


def test_they_are_forgotten_with_their_step(tmp_path: Path) -> None:
    tape = write(tmp_path, WEIGHTS)
    tape.rewind(2)
    assert tape.read_left(3) == {}
    assert not tape.left_file(3).exists()
