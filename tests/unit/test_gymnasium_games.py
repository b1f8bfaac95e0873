"""Gymnasium through its adapter: real environments in a host process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from host_player import failed, played
from lockstep.environments.adapters.gymnasium_env import GymnasiumEnvironment
from lockstep.environments.environment import Reply, Turn
from lockstep.environments.setup import TrajectoryEngineSetup, open_environments
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Origin, Question, Request, Sampling
from scripted_engine import Scripted

gymnasium = pytest.importorskip("gymnasium")


def asked(**columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "Play."}], "extra_info": {}, **columns}


def say(game: GymnasiumEnvironment, text: str) -> Turn:
    return game.step(Reply(text, text))


def shown(game: GymnasiumEnvironment, row: dict[str, Any], seed: int = 0) -> str:
    return str(game.reset(row, seed).messages[0]["content"])


def test_a_game_gives_the_observations_and_rewards_of_gymnasium() -> None:
    game = gymnasium.make("FrozenLake-v1", is_slippery=True)
    game.reset(seed=11)
    with played(environment="gymnasium:FrozenLake-v1", environment_args={"is_slippery": True}) as player:
        start = player.reset({"seed": 11}, seed=5)
        assert start["messages"] == [{"role": "user", "content": "Play.\n\n0"}]
        for action in (2, 1, 2, 1, 0, 3, 2, 1) * 6:
            observation, reward, terminated, truncated, _ = game.step(action)
            turn = player.say(f"I go 99, no: {action}")
            done = terminated or truncated
            assert (turn["reward"], turn["done"]) == (reward, done)
            if done:
                break
            assert turn["messages"] == [{"role": "user", "content": str(observation)}]
            assert turn["anchor"] == str(observation)
        assert done
        assert "prob" in player.finish()["info"]
    with played(environment="gymnasium:FrozenLak-v1") as player:
        answer = failed(player.reset())
        assert (answer.code, "FrozenLake-v1" in answer.remedy) == ("unknown-name", True)


def test_the_seed_of_the_row_comes_before_the_seed_of_the_trajectory() -> None:
    game = GymnasiumEnvironment("Blackjack-v1")
    assert len({shown(game, asked(seed=3), seed) for seed in range(8)}) == 1
    assert len({shown(game, asked(extra_info={"seed": 3}), seed) for seed in range(8)}) == 1
    assert len({shown(game, asked(), seed) for seed in range(8)}) > 1
    assert shown(game, asked(), 3) == shown(game, asked(seed=3), 1)
    with pytest.raises(Refusal) as refused:
        game.reset(asked(seed=-1), 0)
    assert refused.value.problems[0].code == "out-of-range"


def test_actions_have_names_and_the_drawing_is_text() -> None:
    names = ["left", "down", "right", "up"]
    game = GymnasiumEnvironment("FrozenLake-v1", actions=names, render=True, is_slippery=False)
    assert shown(game, asked()).endswith("[S]FFF\nFHFH\nFFFH\nHFFG")
    assert say(game, "Not left but Down").messages[0]["content"] == "  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    wrong = say(game, "backwards, the upper way")
    assert wrong.messages[0]["content"] == "invalid action; write one of: left, down, right, up"
    assert (wrong.done, wrong.metrics) == (False, {"invalid_actions": 1.0})


def test_a_time_limit_of_gymnasium_ends_the_game_as_truncated() -> None:
    game = GymnasiumEnvironment("FrozenLake-v1", is_slippery=False, max_episode_steps=2)
    game.reset(asked(), 0)
    assert say(game, "0").metrics["truncated"] == 0
    last = say(game, "0")
    assert (last.done, last.metrics["truncated"]) == (True, 1.0)


@pytest.mark.parametrize(
    ("environment", "remedy"), [("FrozenLake-v7", "FrozenLake-v1"), ("no_such_module:Maze-v0", "")]
)
def test_an_unknown_environment_is_refused_with_the_closest_names(environment: str, remedy: str) -> None:
    with pytest.raises(Refusal) as refused:
        GymnasiumEnvironment(environment)
    (problem,) = refused.value.problems
    assert (problem.where, problem.code) == ("rollout.environment", "unknown-name")
    assert remedy in problem.remedy


def test_continuous_actions_are_lists_of_numbers() -> None:
    game = GymnasiumEnvironment("Pendulum-v1")
    other = gymnasium.make("Pendulum-v1")
    other.reset(seed=1)
    game.reset(asked(seed=1), 0)
    assert say(game, "torque [0.5]").reward == pytest.approx(float(other.step([0.5])[1]))
    for text in ("[7]", "[0.5, 0.5]", "none", "[x]"):
        assert say(game, text).metrics == {"invalid_actions": 1.0}, text


def test_an_action_space_without_a_text_form_is_refused() -> None:
    class Pairs(gymnasium.Env):  # type: ignore[misc, name-defined]
        action_space = gymnasium.spaces.Tuple([gymnasium.spaces.Discrete(2)])
        observation_space = gymnasium.spaces.Discrete(2)

    gymnasium.register("Pairs-v0", Pairs)
    with pytest.raises(Refusal) as refused:
        GymnasiumEnvironment("Pairs-v0")
    assert refused.value.problems[0].code == "unsupported-combination"


@pytest.mark.slow
def test_a_hung_game_fails_alone_and_is_killed(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The game is in a module, which Gymnasium imports because the name says so."""
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "support"))
    tokenizer = load_tokenizer(str(tiny_folder))
    environment = "gymnasium:hanging_games:Hanging-v0"
    settings = RolloutSettings(environment=environment, environment_workers=1, step_timeout=3.0)
    inner = Scripted(tokenizer, lambda request, turn: "hi")
    engine = open_environments(
        TrajectoryEngineSetup(inner, settings, tokenizer, frozenset({tokenizer.eos_token_id}), len(tokenizer))
    )
    try:
        requests = [
            Request([1], row, question=Question("", asked()["prompt"], "", Origin("rows", row), columns={"seed": row}))
            for row in range(3)
        ]
        found = engine.generate(requests, Sampling(200, stop_ids=(tokenizer.eos_token_id,)))
        made = sorted(found, key=lambda one: one.request)
        assert [one.trajectory and one.trajectory.stop for one in made] == ["completed", "timeout", "completed"]
        assert environment in made[1].failure
        assert "rollout.step_timeout" in made[1].failure
        assert engine.hosts.hosts == []
    finally:
        engine.close()
