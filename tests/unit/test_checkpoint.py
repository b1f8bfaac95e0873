"""Checkpoints of one process: atomic writes, pruning, damage, and states of earlier versions."""

from __future__ import annotations

import json
import os
import shutil
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lockstep.errors import Refusal
from lockstep.recipe.measure import Measure
from lockstep.run import checkpoint
from lockstep.run.checkpoint import CRITIC, CRITIC_OPTIMIZER, MANIFEST, MODEL, OPTIMIZER, SPARE_BYTES, STATE, State

LOWEST, HIGHEST = Measure("val/loss", highest=False), Measure("val/accuracy", highest=True)


def state(step: int, **values: Any) -> State:
    return State(**{"step": step, "rows_seen": 8 * step, "recipe": {}, "data": {}, "world_size": 1, **values})


def tensors(**critic: Any) -> dict[str, dict[str, torch.Tensor]]:
    # The transposed matrix is not contiguous.
    return {MODEL: {"w": torch.arange(6.0).view(2, 3).T}, OPTIMIZER: {"m": torch.tensor([1.0, 2.0])}, **critic}


def save(folder: Path, step: int, **values: Any) -> Path:
    return checkpoint.save(folder, state(step, **values), tensors())


def change_state(path: Path, **values: Any) -> None:
    content = json.loads((path / STATE).read_text())
    (path / STATE).write_text(json.dumps({**content, **values}))


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = save(tmp_path, 3, measured={"val/loss": 0.5}, planned=10, files={"a.txt": "text"})
    assert path == tmp_path / "step_3"
    assert sorted(file.name for file in path.iterdir()) == sorted([MODEL, OPTIMIZER, STATE, MANIFEST])
    found = checkpoint.read(path)
    assert found.path == path
    assert found.state == state(3, measured={"val/loss": 0.5}, planned=10, files={"a.txt": "text"})
    assert found.state.version == 1
    assert found.weights["w"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert found.optimizer["m"].tolist() == [1.0, 2.0]
    assert not found.critic
    assert not found.critic_optimizer
    assert checkpoint.damage_of(path) is None


def test_a_critic_is_part_of_the_checkpoint(tmp_path: Path) -> None:
    critic = {CRITIC: {"v": torch.tensor([3.0])}, CRITIC_OPTIMIZER: {"n": torch.tensor([4.0])}}
    path = checkpoint.save(tmp_path, state(1), tensors(**critic))
    found = checkpoint.read(path)
    assert (found.critic["v"].item(), found.critic_optimizer["n"].item()) == (3.0, 4.0)
    manifest = json.loads((path / MANIFEST).read_text())
    assert manifest.keys() == {MODEL, OPTIMIZER, CRITIC, CRITIC_OPTIMIZER, STATE}
    del manifest[CRITIC]
    (path / MANIFEST).write_text(json.dumps(manifest))
    assert checkpoint.damage_of(path) == f"{MANIFEST} has no entry for {CRITIC}"


def test_fields_of_a_state_have_no_values_unless_they_are_given() -> None:
    bare = state(1)
    assert (bare.measured, bare.files, bare.carried, bare.probe, bare.models) == ({}, {}, {}, {}, {})
    assert (bare.loss_scale, bare.end_tokens, bare.skipped) == ([], [], 0)
    assert (bare.planned, bare.kind, bare.decay_rule, bare.version) == (None, "", "", 1)


def test_only_the_user_can_read_the_state(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    assert stat.S_IMODE((path / STATE).stat().st_mode) == 0o600
    (path / STATE).chmod(0o644)
    for leftover in (".writing-step_2", ".removing-step_1"):
        (tmp_path / leftover).mkdir()
    checkpoint.sweep(tmp_path)
    assert stat.S_IMODE((path / STATE).stat().st_mode) == 0o600
    assert [entry.name for entry in tmp_path.iterdir()] == ["step_1"]


def test_steps_are_numbers_of_folders(tmp_path: Path) -> None:
    for name in ("step_10", "step_9", "step_x", "damaged-step_3", ".writing-step_4"):
        (tmp_path / name).mkdir()
    (tmp_path / "step_5").write_text("")
    assert checkpoint.steps_in(tmp_path) == [9, 10]
    assert checkpoint.steps_in(tmp_path / "absent") == []


def test_the_newest_is_read(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path) is None
    for step in (9, 10):
        save(tmp_path, step)
    found = checkpoint.newest(tmp_path)
    assert found is not None
    assert found.state.step == 10


def test_a_failed_write_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> int:
        raise OSError("no space left")

    monkeypatch.setattr(os, "pwrite", fail)
    with pytest.raises(Refusal, match=r"(?s)step_2\b.*could not be written: .*no space left.*free some disk"):
        save(tmp_path, 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("free", "enough"), [(SPARE_BYTES + 32, True), (SPARE_BYTES + 31, False)])
def test_a_full_disk_is_refused_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free: int, enough: bool
) -> None:
    """6 + 2 numbers of 4 bytes; the folder does not exist yet, so the disk is that of its parent."""
    asked = []
    monkeypatch.setattr(shutil, "disk_usage", lambda path: asked.append(path) or SimpleNamespace(free=free))
    if enough:
        assert save(tmp_path / "new", 1).is_dir()
    else:
        with pytest.raises(Refusal, match=r"a checkpoint needs 4 MiB.* 4 MiB free") as refused:
            save(tmp_path / "new", 1)
        assert refused.value.problems[0].where == str(tmp_path / "new")
        assert "checkpoint.keep_last" in refused.value.problems[0].remedy
        assert not (tmp_path / "new").exists()
    assert asked == [tmp_path]
    assert SPARE_BYTES == 4 * 1024 * 1024


def kept_after(folder: Path, values: dict[int, float | None], warn: Any = None, **choices: Any) -> list[int]:
    for step, value in values.items():
        name = choices["measure"].name
        save(folder, step, measured={} if value is None else {name: value})
    checkpoint.prune(folder, warn=warn or pytest.fail, **choices)
    assert not list(folder.glob(".removing-*"))
    return checkpoint.steps_in(folder)


def test_the_newest_and_the_best_are_kept(tmp_path: Path) -> None:
    values = {1: 0.3, 2: 0.1, 3: None, 4: 0.2, 5: 0.9, 6: 0.8}
    assert kept_after(tmp_path / "a", values, keep_last=2, keep_best=2, measure=LOWEST) == [2, 4, 5, 6]
    assert kept_after(tmp_path / "b", values, keep_last=1, keep_best=1, measure=HIGHEST) == [5, 6]
    assert kept_after(tmp_path / "c", values, keep_last=1, keep_best=0, measure=LOWEST) == [6]
    # Of equal ones the first is the best.
    assert kept_after(tmp_path / "d", {1: 0.5, 2: 0.5, 3: 0.7}, keep_last=1, keep_best=1, measure=LOWEST) == [1, 3]


def test_a_checkpoint_with_unreadable_metrics_is_not_removed(tmp_path: Path) -> None:
    warned: list[str] = []
    for step in (1, 2, 3):
        save(tmp_path, step, measured={"val/loss": float(step)})
    (tmp_path / "step_2" / STATE).write_text("{")
    checkpoint.prune(tmp_path, keep_last=1, keep_best=0, measure=LOWEST, warn=warned.append)
    assert checkpoint.steps_in(tmp_path) == [3]
    for step in (4, 5):
        save(tmp_path, step, measured={"val/loss": float(step)})
    (tmp_path / "step_4" / STATE).write_text("{")
    checkpoint.prune(tmp_path, keep_last=1, keep_best=1, measure=LOWEST, warn=warned.append)
    assert checkpoint.steps_in(tmp_path) == [3, 5]
    assert (tmp_path / "damaged-step_4" / MODEL).is_file()
    (warning,) = warned
    assert str(tmp_path / "step_4" / STATE) in warning
    assert "damaged-step_4" in warning


def test_the_best_step(tmp_path: Path) -> None:
    assert checkpoint.best_step(tmp_path, LOWEST) is None
    for step, loss in ((1, 0.4), (2, 0.2), (3, 0.2)):
        save(tmp_path, step, measured={"val/loss": loss})
    save(tmp_path, 4)
    assert checkpoint.best_step(tmp_path, LOWEST) == (2, 0.2)
    assert checkpoint.best_step(tmp_path, Measure("val/loss", highest=True)) == (1, 0.4)
    assert checkpoint.best_step(tmp_path, HIGHEST) is None


@pytest.mark.parametrize("value", [True, "0.1", [1]])
def test_a_metric_that_is_no_number_is_refused(tmp_path: Path, value: Any) -> None:
    path = save(tmp_path, 1)
    change_state(path, measured={"val/loss": value})
    with pytest.raises(Refusal, match="its val/loss is") as refused:
        checkpoint.best_step(tmp_path, LOWEST)
    assert refused.value.problems[0].where == str(path / STATE)
    change_state(path, measured=value)
    with pytest.raises(Refusal, match="its val/loss is"):
        checkpoint.best_step(tmp_path, LOWEST)


def test_a_metric_that_is_not_finite_is_never_the_best(tmp_path: Path) -> None:
    change_state(save(tmp_path, 1), measured={"val/loss": float("-inf")})
    change_state(save(tmp_path, 2), measured={"val/loss": 3})
    assert checkpoint.best_step(tmp_path, LOWEST) == (2, 3)


def test_damage_is_described(tmp_path: Path) -> None:
    def damage(change: Any) -> str | None:
        shutil.rmtree(tmp_path / "step_1", ignore_errors=True)
        path = save(tmp_path, 1)
        change(path)
        return checkpoint.damage_of(path)

    def manifest(**entries: Any) -> Any:
        def change(path: Path) -> None:
            content = {**json.loads((path / MANIFEST).read_text()), **entries}
            (path / MANIFEST).write_text(json.dumps({k: v for k, v in content.items() if v != "absent"}))

        return change

    def flipped(path: Path) -> None:
        content = bytearray((path / MODEL).read_bytes())
        content[-1] ^= 1
        (path / MODEL).write_bytes(content)

    size = (save(tmp_path, 7) / MODEL).stat().st_size
    assert damage(lambda path: None) is None
    assert damage(flipped) == f"{MODEL} has a wrong checksum"
    assert damage(lambda path: (path / MODEL).write_bytes(b"abc")) == f"{MODEL} has 3 bytes instead of {size}"
    assert damage(lambda path: (path / OPTIMIZER).unlink()) == f"{OPTIMIZER} is missing"
    assert str(damage(lambda path: (path / MANIFEST).unlink())).startswith(f"{MANIFEST} cannot be read")
    assert damage(manifest(**{STATE: "absent"})) == f"{MANIFEST} has no entry for {STATE}"
    assert damage(manifest(**{MODEL: 5})) == f"{MANIFEST} has no size and checksum of {MODEL!r}"
    assert damage(manifest(**{MODEL: {"bytes": 1}})) == f"{MANIFEST} has no size and checksum of {MODEL!r}"
    zero = {"bytes": 1, "block": 0, "sha256_blocks": ""}
    assert damage(manifest(**{MODEL: zero})) == f"{MANIFEST} has no size and checksum of {MODEL!r}"
    entry = {"bytes": 1, "sha256": ""}
    assert damage(manifest(**{"../a": entry})) == f"{MANIFEST} has no size and checksum of '../a'"


def test_an_unreadable_file_is_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = save(tmp_path, 1)

    def fail(_: Path) -> str:
        raise OSError("input/output error")

    monkeypatch.setattr(checkpoint, "checksum", fail)
    assert checkpoint.damage_of(path) == "cannot be read: input/output error"


def test_damaged_checkpoints_are_set_aside(tmp_path: Path) -> None:
    warned: list[str] = []
    for step in (1, 2, 3):
        (save(tmp_path, step) / MODEL).write_bytes(b"abc")
    shutil.rmtree(tmp_path / "step_1")
    save(tmp_path, 1)
    # A folder of an earlier time with the same name is replaced.
    (tmp_path / "damaged-step_3").mkdir()
    (tmp_path / "damaged-step_3" / "old").write_text("")
    checkpoint.set_damaged_aside(tmp_path, warned.append)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["damaged-step_2", "damaged-step_3", "step_1"]
    assert not (tmp_path / "damaged-step_3" / "old").exists()
    assert len(warned) == 2
    assert warned[0].startswith("checkpoint step_3 is damaged (model.safetensors has 3 bytes")
    checkpoint.set_damaged_aside(tmp_path, pytest.fail)
    (tmp_path / "step_1" / MODEL).unlink()
    with pytest.raises(
        Refusal, match=r"every checkpoint in this folder is damaged \(model.safetensors is missing\)"
    ) as refused:
        checkpoint.set_damaged_aside(tmp_path, pytest.fail)
    assert refused.value.problems[0].where == str(tmp_path)
    assert (tmp_path / "step_1").is_dir()


def test_states_of_earlier_versions_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    content = json.loads((path / STATE).read_text())
    del content["measured"]
    for loss, measured in ((0.25, {"val/loss": 0.25}), (None, {})):
        (path / STATE).write_text(json.dumps({**content, "val_loss": loss}))
        assert checkpoint.read(path).state.measured == measured


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"version": 3}, r"format 3\b.*1 and 2"),
        ({"unknown": 1}, "cannot be read: .*unknown"),
        ({"files": {"../a": "text"}}, r"`files` .*'\.\./a'"),
        ({"files": {"..": "text"}}, r"`files` .*'\.\.'"),
        ({"files": {"": "text"}}, "`files` .*''"),
        ({"files": {"a\0": "text"}}, "`files`"),
        ({"files": {"a": 5}}, "`files` .*'a'"),
        ({"files": ["a"]}, "`files`"),
    ],
)
def test_a_changed_state_is_refused(tmp_path: Path, values: dict[str, Any], why: str) -> None:
    path = save(tmp_path, 1)
    change_state(path, **values)
    with pytest.raises(Refusal, match=why) as refused:
        checkpoint.read(path)
    assert refused.value.problems[0].where == str(path / STATE if "files" in values else path)


def test_missing_tensors_are_refused(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    (path / MODEL).unlink()
    with pytest.raises(Refusal, match="cannot be read"):
        checkpoint.read(path)


def test_old_names_of_recipe_keys_are_read(tmp_path: Path) -> None:
    path = save(tmp_path, 1)
    change_state(path, recipe={"batch": {"rows": 3}})
    assert checkpoint.read(path).state.recipe == {"batch": {"micro_batch_size": 3}}
