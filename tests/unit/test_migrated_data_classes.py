"""Data classes, samplers and generators of verl: an empty path is harmless, a path is refused with a remedy."""

from __future__ import annotations

import pytest

from lockstep.compat.conversion_output import checked
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.errors import Refusal

PPO = ("data.train_files=t.parquet", "actor_rollout_ref.model.path=m", "critic.model.path=c")
SFT = ("data.train_files=t.parquet", "model.path=m")
CLASSES = [
    ("main_ppo", PPO, "data.custom_cls.path", "data.reader"),
    ("main_ppo", PPO, "data.sampler.class_path", "data.shuffle=False"),
    ("main_ppo", PPO, "data.datagen.path", "file"),
    ("sft_trainer", SFT, "data.custom_cls.path", "data.reader"),
]


@pytest.mark.parametrize(("program", "base", "key", "remedy"), CLASSES)
@pytest.mark.parametrize("empty", ["null", "", '""', "'null'"])
def test_an_empty_path_is_harmless(program: str, base: tuple[str, ...], key: str, remedy: str, empty: str) -> None:
    name = key.replace("_path", "_name").replace(".path", ".name")
    done = convert_verl(program, [*base, f"{key}={empty}", f"{name}=Mine"])
    checked(done)
    assert {found.key: found.outcome for found in done.outcomes}[name] == "ignored"


@pytest.mark.parametrize(("program", "base", "key", "remedy"), CLASSES)
def test_a_class_is_refused_with_a_remedy(program: str, base: tuple[str, ...], key: str, remedy: str) -> None:
    name = key.replace("_path", "_name").replace(".path", ".name")
    with pytest.raises(Refusal) as refused:
        checked(convert_verl(program, [*base, f"{key}=mine.py", f"{name}=Mine"]))
    (problem,) = refused.value.problems
    assert (problem.where, problem.code) == (key, "unsupported-setting")
    assert remedy in problem.remedy
