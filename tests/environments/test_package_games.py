"""TextArena, Reasoning Gym and GEM through their adapters: the same games as the packages alone."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from host_player import failed, played
from lockstep.environments.adapters.gem_env import GemEnvironment
from lockstep.environments.adapters.reasoning_gym_env import ReasoningGymEnvironment
from lockstep.environments.adapters.textarena_env import TextArenaEnvironment
from lockstep.environments.environment import Reply, Turn
from lockstep.errors import Refusal

MOVES = ["[7]", "[12]", "[3]", "[9]", "[15]", "[18]", "[1]"]
gem_missing = sys.version_info >= (3, 12)


def asked(**columns: Any) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": "Play."}], "extra_info": {}, **columns}


def say(game: Any, text: str) -> Turn:
    return game.step(Reply(text, text))


def contents(messages: Any) -> list[str]:
    return [str(message["content"]) for message in messages]


def test_textarena_gives_the_rewards_of_the_package_and_only_new_messages() -> None:
    import textarena

    alone = textarena.make("GuessTheNumber-v0")
    alone.reset(num_players=1, seed=42)
    prompt = alone.get_observation()[1]
    with played(environment="textarena:GuessTheNumber-v0") as player:
        start = player.reset({"seed": 42}, seed=7)
        assert contents(start["messages"]) == ["Play.\n\n" + prompt.strip().removeprefix("[GAME] ")]
        history = ""
        for move in MOVES * 2:
            done, _ = alone.step(move)
            turn = player.say(move)
            assert turn["done"] == done
            if done:
                break
            everything = alone.get_observation()[1]
            new = everything.removeprefix(history or prompt).split(f"[Player] {move}")[1]
            assert contents(turn["messages"]) == ["\n".join(new.strip().split("[GAME] ")[1:]).strip()]
            history = everything
        assert done
        rewards, info = alone.close()
        assert turn["reward"] == pytest.approx(rewards[0])
        assert player.finish()["info"]["reason"] == info[0]["reason"]


def test_games_of_one_process_do_not_mix_their_random_numbers() -> None:
    def moves(games: list[TextArenaEnvironment]) -> list[list[str]]:
        said: list[list[str]] = [contents(game.reset(asked(seed=seed), 0).messages) for seed, game in enumerate(games)]
        for at in range(4):
            for text, game in zip(said, games, strict=True):
                text += contents(say(game, "[right]" if at % 2 else "[down]").messages)
        return said

    def made(count: int) -> list[TextArenaEnvironment]:
        return [TextArenaEnvironment("2048-v0") for _ in range(count)]

    random.seed(5)
    state = random.getstate()
    together = moves(made(3))
    assert random.getstate() == state
    assert moves(made(1)) == together[:1]
    assert len({tuple(text) for text in together}) == 3


def test_an_opponent_plays_the_second_player(tmp_path: Path) -> None:
    file = tmp_path / "players.py"
    file.write_text(
        "import re\n"
        "def first_free(messages):\n"
        "    free = [str(n) for n in range(9) if re.search(rf'\\b{n}\\b', messages.split('Current Board')[-1])]\n"
        "    return f'[{free[-1]}]'\n"
    )
    game = TextArenaEnvironment("TicTacToe-v0", opponent=f"{file}:first_free")
    first = contents(game.reset(asked(seed=1), 0).messages)[0]
    assert "Player 0" in first
    turns = [say(game, "[0]"), say(game, "[1]"), say(game, "[2]")]
    assert [turn.done for turn in turns] == [False, False, True]
    assert (turns[-1].reward, game.info["invalid_move"]) == (1.0, False)
    assert "[8]" in contents(turns[0].messages)[0]
    with pytest.raises(Refusal) as refused:
        TextArenaEnvironment("TicTacToe-v0").reset(asked(), 0)
    assert refused.value.problems[0].code == "unsupported-combination"


@pytest.mark.parametrize("name", ["Sudoku-v0", "TowerOfHanoi-v0", "Mastermind-v0", "FrozenLake-v0", "Blackjack-v0"])
def test_more_games_of_textarena_start_and_end(name: str) -> None:
    game = TextArenaEnvironment(name)
    assert len(contents(game.reset(asked(seed=2), 0).messages)[0]) > 100
    turn = say(game, "[nonsense]")
    assert not turn.done
    while not turn.done:
        turn = say(game, "[nonsense]")
    assert turn.metrics == {"invalid_move": 1.0}


def test_reasoning_gym_makes_the_question_and_scores_the_answer() -> None:
    import reasoning_gym

    with played(environment="reasoning_gym:chain_sum", environment_args={"max_terms": 3}) as player:
        for seed in range(3):
            task = reasoning_gym.create_dataset("chain_sum", size=1, seed=seed, max_terms=3)
            entry = task[0]
            start = player.reset({"seed": seed})
            assert contents(start["messages"]) == [f"Play.\n\n{entry['question']}"]
            wrong = f"<answer>{entry['answer']}</answer> no: <answer>x</answer>"
            for text, score in ((f"so <answer>{entry['answer']}</answer>", 1.0), (entry["answer"], 1.0), (wrong, 0.0)):
                turn = player.say(text)
                assert (turn["reward"], turn["done"]) == (score, True)
                assert turn["metrics"]["solved"] == score


@pytest.mark.parametrize(
    "task", ["countdown", "leg_counting", "word_sorting", "sudoku", "knights_knaves", "zebra_puzzles"]
)
def test_more_tasks_of_reasoning_gym_score_their_own_answer(task: str) -> None:
    environment = ReasoningGymEnvironment(task)
    environment.reset(asked(seed=3), 0)
    answer = environment.info["answer"]
    if task == "countdown":
        answer = environment._entry["metadata"]["expression"]
    assert say(environment, answer).reward == 1.0


@pytest.mark.skipif(gem_missing, reason="gem-llm needs Python 3.12.0 or older")
def test_gem_gives_the_observations_and_rewards_of_the_package() -> None:
    import gem

    alone = gem.make("game:GuessTheNumber-v0-easy")
    observation, info = alone.reset(seed=9)
    with played(environment="gem:game:GuessTheNumber-v0-easy") as player:
        start = player.reset({"seed": 9}, seed=1)
        assert contents(start["messages"]) == [f"Play.\n\n{observation.strip()}\n{info['suffix']}"]
        for guess in (5, 3, 30, 2):
            text = f"\\boxed{{{guess}}}"
            observation, reward, terminated, truncated, info = alone.step(text)
            turn = player.say(text)
            assert turn["reward"] == pytest.approx(float(reward))
            assert turn["done"] == (terminated or truncated)
            if turn["done"]:
                break
            assert contents(turn["messages"]) == [f"{observation.strip()}\n{info['suffix']}"]
        assert turn["done"]


@pytest.mark.skipif(gem_missing, reason="gem-llm needs Python 3.12.0 or older")
def test_games_of_gem_are_the_same_with_the_same_seed() -> None:
    games = [GemEnvironment("game:Sokoban-v0-easy") for _ in range(3)]
    said = [contents(game.reset(asked(seed=seed), 0).messages)[0] for game, seed in zip(games, (1, 2, 1), strict=True)]
    assert said[0] == said[2]
    assert said[0] != said[1]


@pytest.mark.parametrize(
    ("environment", "near"),
    [
        ("textarena:GuesTheNumber-v0", "GuessTheNumber-v0"),
        ("reasoning_gym:chainsum", "chain_sum"),
        pytest.param("gem:game:GuessNumber-v0", "GuessTheNumber-v0", marks=pytest.mark.skipif(gem_missing, reason="")),
    ],
)
def test_an_unknown_name_is_refused_with_the_closest_names(environment: str, near: str) -> None:
    with played(environment=environment) as player:
        answer = failed(player.reset())
    assert answer.code == "unknown-name"
    assert near in answer.remedy
