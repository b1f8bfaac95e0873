"""Modules with the names of verl's and OpenRLHF's programs."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

import lockstep.compat.openrlhf
import lockstep.compat.verl  # noqa: F401


@pytest.mark.slow
@pytest.mark.parametrize(
    ("module", "words", "expected"),
    [
        ("verl.trainer.main_ppo", ["a.b=1"], "a.b [unknown-key]"),
        ("verl.trainer.main_eval", [], "verl main_eval [not-training]"),
        ("verl.experimental.one_step_off_policy.main_ppo", ["a.b=1"], "a.b [unknown-key]"),
        ("verl.experimental.fully_async_policy.fully_async_main", ["a.b=1"], "a.b [unknown-key]"),
        ("openrlhf.cli.train_nothing", [], "openrlhf train_nothing [unknown-name]"),
        ("openrlhf.cli.train_dpo", ["--local_rank=0", "--unknown_flag", "1"], "--unknown_flag [unknown-key]"),
    ],
)
def test_a_command_runs_with_only_its_module_name_changed(module: str, words: list[str], expected: str) -> None:
    command = [sys.executable, "-m", f"lockstep.compat.{module}", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert (done.returncode, expected in done.stdout + done.stderr) == (2, True), done.stdout + done.stderr


def test_other_names_are_not_modules() -> None:
    assert importlib.util.find_spec("lockstep.compat.verl.trainer.main_ppo") is not None
    assert importlib.util.find_spec("lockstep.compat.verl.recipe.dapo.main_dapo") is not None
    assert importlib.util.find_spec("lockstep.compat.verl.nothing") is None
    assert importlib.util.find_spec("lockstep.compat.openrlhf.trainer") is None
