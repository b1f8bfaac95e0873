"""Environments of other packages: how a recipe selects them, what is refused, and what the adapters share."""

from __future__ import annotations

import random
import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import pytest

from lockstep.environments import setup
from lockstep.environments.adapters.game import OwnRandom, first_messages, refuse_unknown, row_seed
from lockstep.environments.setup import host_setup
from lockstep.errors import Refusal
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.registry import ADAPTERS
from lockstep.train.run_writer import user_code

PYPROJECT = (Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ADAPTERS)
def test_a_recipe_value_selects_an_adapter(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = ADAPTERS[name]
    module, _, kind = row.path.partition(":")
    assert callable(getattr(import_module(module), kind))
    assert hasattr(import_module(module), "import_package") == bool(row.package)
    settings = RolloutSettings(environment=f"{name}:a:b", environment_args={"size": 3}, step_timeout=7.0)
    tokenizer: Any = SimpleNamespace(name_or_path="m", chat_template="t", model_max_length=64)
    monkeypatch.setattr(setup, "find_spec", lambda package: package)
    made = host_setup(settings, None, tokenizer)
    arguments = dict(made.arguments)
    run = arguments.pop("run", None)
    limits: dict[str, Any] = {"result_chars": settings.result_chars, "timeout": 7.0}
    limits = {**limits, "truncation": "middle", "parallel": None} if row.tools else {}
    assert (made.environment, arguments) == (row.path, {"environment": "a:b", "size": 3, **limits})
    assert (run is not None) == row.tokenizer
    assert made.where == f"rollout.environment {name}:a:b"


@pytest.mark.parametrize("name", [name for name, row in ADAPTERS.items() if row.package])
def test_a_missing_package_is_refused_with_the_command_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "find_spec", lambda package: None)
    with pytest.raises(Refusal) as refused:
        host_setup(EnvironmentSettings(environment=f"{name}:x"))
    (problem,) = refused.value.problems
    assert (problem.where, problem.code) == (f"package {ADAPTERS[name].package}", "missing-package")
    assert f"{name}:x" in problem.why
    (extra,) = set(re.findall(r"\[([a-z-]+)\]", problem.remedy))
    assert f"\n{extra} = [" in PYPROJECT


def test_unknown_names_are_refused_with_the_closest_ones() -> None:
    names = ["FrozenLake-v1", "FrozenLake8x8-v1", "Taxi-v3"]
    for name, remedy in (("FrozenLak-v1", "use FrozenLake-v1"), ("axi", "use Taxi-v3"), ("???", "one of its 3 names")):
        with pytest.raises(Refusal) as refused:
            refuse_unknown(name, names, "package")
        assert remedy in refused.value.problems[0].remedy
        assert refused.value.problems[0].code == "unknown-name"
    refuse_unknown("Taxi-v3", names, "package")


def test_the_observation_follows_the_prompt_and_the_seed_is_that_of_the_row() -> None:
    prompt = [{"role": "system", "content": "A"}, {"role": "user", "content": "B"}]
    made = first_messages({"prompt": prompt}, "C")
    assert made == [{"role": "system", "content": "A"}, {"role": "user", "content": "B\n\nC"}]
    assert prompt[1]["content"] == "B"
    assert first_messages({"prompt": prompt}, "")[1]["content"] == "B"
    assert [row_seed(row, 5) for row in ({}, {"seed": 0}, {"extra_info": {"seed": 7}}, {"seed": None})] == [5, 0, 7, 5]
    for wrong in (-1, 2**32, "3", 1.5, True):
        with pytest.raises(Refusal):
            row_seed({"seed": wrong}, 5)


def test_games_have_their_own_random_numbers() -> None:
    def draws(games: list[OwnRandom], rounds: int) -> list[list[float]]:
        drawn: list[list[float]] = [[] for _ in games]
        for _ in range(rounds):
            for numbers, game in zip(drawn, games, strict=True):
                with game():
                    numbers += [random.random(), float(numpy.random.random())]
        return drawn

    random.seed(1)
    numpy.random.seed(1)
    before = random.getstate(), numpy.random.get_state()[1].tolist()
    together = draws([OwnRandom(3), OwnRandom(4), OwnRandom(3)], 4)
    assert together[0] == together[2] == draws([OwnRandom(3)], 4)[0]
    assert together[0] != together[1]
    assert len(set(together[0])) == 8
    generator = random.Random(3)
    assert together[0][::2] == [generator.random() for _ in range(4)]
    assert together[0][1::2] == numpy.random.RandomState(3).random_sample(4).tolist()
    with pytest.raises(ValueError, match="oh"), OwnRandom(3)():
        raise ValueError("oh")
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == before


def test_the_file_of_a_factory_is_recorded_as_user_code(online_file: Path) -> None:
    factory = online_file.parent / "factory.py"
    factory.write_text("class Game: ...\n")
    path = f"trl:{factory}:Game"
    recorded = user_code(load_recipe(str(online_file), [f"rollout.environment={path}"]))["rollout.environment"]
    assert (recorded["name"], recorded["sha256"] is None) == (path, False)
