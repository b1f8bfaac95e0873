"""Built-in tools and environments: arithmetic, search, code, the guessing game and the maze."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from fractions import Fraction
from importlib import import_module
from pathlib import Path
from random import Random

import pytest

from lockstep.environments.builtin.calculator import calculator
from lockstep.environments.builtin.corpus_search import Corpus, words
from lockstep.environments.builtin.guess_number import GuessNumber
from lockstep.environments.builtin.maze import Maze, after, open_steps
from lockstep.environments.environment import Reply
from lockstep.environments.sandbox import NAMESPACES, why_unusable
from lockstep.environments.setup import host_setup
from lockstep.environments.tool_environment import ToolEnvironment
from lockstep.errors import Refusal
from lockstep.recipe.keys_environment import EnvironmentSettings
from lockstep.recipe.registry import ENVIRONMENTS, TOOLS


def builtin_tool(tool: str) -> Callable[..., str]:
    """The function of a built-in tool, found as the host of a run finds it."""
    arguments = host_setup(EnvironmentSettings(tools=[tool])).arguments
    (loaded,) = ToolEnvironment(**arguments)._tools.values()
    return loaded.function


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        ("4821 * 7730", "37266330"),
        ("2 + 3 * 4", "14"),
        ("(2 + 3) * 4", "20"),
        ("-2 ** 2", "-4"),
        ("2 ** 3 ** 2", "512"),
        ("2^-1", "0.5"),
        ("7 / 2", "3.5"),
        ("6 / 3", "2"),
        ("12 // 5 % 2", "0"),
        ("1,234 × 2", "2468"),
        ("0.5 * 4", "2"),
        ("--3", "3"),
        ("9" * 300 + " + 1", "1" + "0" * 300),
        ("1 / 0", "error: division by zero"),
        ("0 ** -1", "error: division by zero"),
        ("9 ** 9 ** 9", "error: the result is too large"),
        ("1e400", "error: the result is too large"),
        ("(-8) ** 0.5", "error: the result is not a real number"),
        ("(1 + 2", "error: a parenthesis is not closed"),
        ("1 +", "error: the expression ends too early"),
        ("5 5", "error: unexpected 5"),
        ("", "error: the expression is empty"),
        ("__import__('os').getpid()", "error: unexpected \"__import__('os').get\""),
        ("(" * 400, "error: the expression is nested too deeply"),
        ("1" * 1001, "error: the expression has more than 1000 characters"),
    ],
)
def test_the_calculator_computes_or_says_why_not(expression: str, result: str) -> None:
    assert calculator(expression) == result


def test_the_calculator_agrees_with_exact_fractions() -> None:
    draw = Random(0)
    for _ in range(300):
        numbers = [draw.randint(1, 10**6) for _ in range(5)]
        signs = [draw.choice("+-*") for _ in range(4)]
        expression = str(numbers[0])
        terms = [Fraction(numbers[0])]  # the expression as a sum of products
        for sign, number in zip(signs, numbers[1:], strict=True):
            expression += f" {sign} {number}"
            if sign == "*":
                terms[-1] *= number
            else:
                terms.append(Fraction(number if sign == "+" else -number))
        assert calculator(expression) == str(sum(terms)), expression


def test_search_ranks_by_bm25(tmp_path: Path) -> None:
    documents = ["The moon is a moon of Earth.", "Mars has two moons.", "Earth is a planet; Mars is a planet.", "Stone"]
    corpus = Corpus(documents)
    # By hand for "earth moon" and the first document: 7 words, of 5 on average; each word is in 2 or 1 of 4.
    scale = 1.2 * (0.25 + 0.75 * 7 / ((7 + 4 + 8 + 1) / 4))
    earth = math.log(1 + 2.5 / 2.5) * 1 * 2.2 / (1 + scale)
    moon = math.log(1 + 3.5 / 1.5) * 2 * 2.2 / (2 + scale)
    assert [len(words(document)) for document in documents] == [7, 4, 8, 1]
    assert corpus.score("earth moon", 0) == pytest.approx(earth + moon)
    assert corpus.search("earth moon") == [documents[0], documents[2]]
    assert corpus.search("unknown") == []
    file = tmp_path / "corpus.jsonl"
    file.write_text(
        "".join(json.dumps({"title": f"Page {n}", "text": text}) + "\n" for n, text in enumerate(documents))
    )
    search = builtin_tool(f"search:{file}")
    assert search("Stone?") == "[1] Page 3: Stone"
    assert search("unknown") == "no document matches"
    plain = tmp_path / "corpus.txt"
    plain.write_text("One\ntext.\n\n\nAnother one.\n")
    search = builtin_tool(f"search:{plain}")
    assert search("another") == "[1] Another one."


@pytest.mark.parametrize(
    ("tool", "code"),
    [
        ("search", "no-such-file"),
        ("search:missing.jsonl", "no-such-file"),
        ("python:hours=2", "out-of-range"),
        ("bash:seconds=-1", "out-of-range"),
        ("calculator:2", "unknown-name"),
    ],
)
def test_wrong_arguments_of_tools_are_refused(tool: str, code: str) -> None:
    with pytest.raises(Refusal) as refusal:
        builtin_tool(tool)
    assert refusal.value.problems[0].code == code
    assert refusal.value.problems[0].where.startswith("rollout.tools")


@pytest.mark.parametrize(("content", "why"), [("", "no document"), ('{"title": 1}\n', "line 1"), ("x\n", "line 1")])
def test_a_broken_corpus_is_refused(content: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "corpus.jsonl").write_text(content)
    with pytest.raises(Refusal, match=why):
        builtin_tool(f"search:{tmp_path / 'corpus.jsonl'}")


@pytest.mark.skipif(bool(why_unusable(NAMESPACES)), reason=why_unusable(NAMESPACES))
def test_code_runs_in_a_sandbox() -> None:
    python, bash = builtin_tool("python:seconds=50"), builtin_tool("bash:seconds=50,output_bytes=4")
    assert python("print(6 * 7)") == "42"
    assert "ZeroDivisionError" in python("1 / 0")
    assert bash("echo 123456").startswith("1234\n[the program was stopped: output limit]")


def test_every_name_leads_to_code() -> None:
    for path in (*TOOLS.values(), *ENVIRONMENTS.values()):
        module, _, name = path.partition(":")
        assert callable(getattr(import_module(module), name))


def guess(game: GuessNumber | Maze, text: str) -> tuple[str, float, bool]:
    turn = game.step(Reply(text, text))
    return str(turn.messages[0]["content"]) if turn.messages else "", turn.reward, turn.done


def test_the_game_answers_guesses_and_ends() -> None:
    game = GuessNumber(low=1, high=15, guesses=3)
    start = game.reset({"ground_truth": "9"}, seed=0)
    assert start.messages == [{"role": "user", "content": "Guess a number from 1 to 15 in 3 turns."}]
    assert guess(game, "8") == ("higher", 0.0, False)
    assert guess(game, "I say 12!") == ("lower", 0.0, False)
    assert guess(game, "9") == ("", 1.0, True)
    assert game.info == {"number": 9, "guesses": [8, 12, 9]}
    game.reset({"ground_truth": "9"}, seed=0)
    assert guess(game, "none") == ("a number!", 0.0, False)
    assert guess(game, "9" * 5000) == ("lower", 0.0, False)
    assert guess(game, "1") == ("", 0.0, True)


def test_the_seed_selects_the_number_of_a_row_without_one() -> None:
    numbers = set()
    for seed in range(100):
        game = GuessNumber(low=3, high=5)
        game.reset({}, seed)
        again = GuessNumber(low=3, high=5)
        again.reset({}, seed)
        assert game.number == again.number
        numbers.add(game.number)
    assert numbers == {3, 4, 5}


@pytest.mark.parametrize("size", [2, 3, 6])
def test_one_path_connects_all_cells_of_a_maze(size: int) -> None:
    """A connected graph with one edge fewer than cells is a tree."""
    for number in range(20):
        ways = open_steps(size, number)
        edges = {frozenset((cell, after(cell, step))) for cell, steps in ways.items() for step in steps}
        assert len(edges) == len(ways) - 1 == size**2 - 1
        reached = {(0, 0)}
        for _ in ways:
            reached |= {after(cell, step) for cell in reached for step in ways[cell]}
        assert reached == set(ways)
    assert len({str(open_steps(size, number)) for number in range(20)}) > 1


def path(ways: dict[tuple[int, int], set[str]], size: int) -> list[str]:
    """The steps to the exit, found by depth-first search."""
    stack: list[tuple[tuple[int, int], list[str]]] = [((0, 0), [])]
    while stack:
        here, steps = stack.pop()
        if here == (size - 1, size - 1):
            return steps
        back = {"up": "down", "down": "up", "left": "right", "right": "left"}[steps[-1]] if steps else ""
        stack += [(after(here, step), [*steps, step]) for step in sorted(ways[here]) if step != back]
    raise AssertionError("no path")


def test_the_path_to_the_exit_is_rewarded() -> None:
    for number in range(20):
        maze = Maze(size=3, moves=12)
        start = maze.reset({"ground_truth": str(number), "prompt": [{"role": "user", "content": "Go!"}]}, seed=5)
        ways = open_steps(3, number)
        shown = ", ".join(step for step in ("up", "down", "left", "right") if step in ways[0, 0])
        assert start.messages == [{"role": "user", "content": f"Go!\nopen: {shown}"}]
        *steps, last = path(ways, 3)
        for step in steps:
            said, reward, done = guess(maze, f"I go {step.upper()}.")
            assert (reward, done) == (0.0, False)
            assert set(said.removeprefix("open: ").split(", ")) == ways[maze.here]
        assert guess(maze, last) == ("", 1.0, True)
        assert len(maze.info["path"]) == len(steps) + 2


def test_walls_and_other_replies_cost_a_turn() -> None:
    maze = Maze(size=2, moves=4)
    start = maze.reset({}, seed=1)
    assert start.messages[0]["content"].startswith("You are in the upper left corner of a maze of 2 x 2 cells.")
    view = start.messages[0]["content"].rpartition("\n")[2]
    assert guess(maze, "up") == (f"a wall; {view}", 0.0, False)
    assert guess(maze, "upwards") == (f"a step!; {view}", 0.0, False)
    assert guess(maze, "left") == (f"a wall; {view}", 0.0, False)
    turn = maze.step(Reply("left", "left"))
    assert (turn.done, turn.reward, turn.metrics) == (True, 0.0, {"success": 0.0, "moves": 4})
    assert maze.info == {"maze": 1, "path": [[0, 0]]}
