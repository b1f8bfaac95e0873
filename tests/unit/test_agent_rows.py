"""Generated rows for agents: right results, wrong guesses, legal games, and a template that shows calls and tools."""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pyarrow.parquet as parquet
import pytest

from lockstep.data.prepare.agent_rows import (
    CALCULATOR_TOOL,
    GUESS_EVERY,
    call_chat,
    write_calculator,
    write_guess_number,
    write_seeds,
)
from lockstep.environments.builtin.calculator import calculator
from lockstep.environments.builtin.guess_number import GuessNumber
from lockstep.environments.environment import Reply
from lockstep.errors import Refusal
from lockstep.reward.rules import rule_for


def rows(path: Path) -> list[dict]:
    return parquet.read_table(path).to_pylist()


def test_few_calls_are_right_and_all_guesses_are_wrong(tmp_path: Path) -> None:
    counts = write_calculator(tmp_path, train_rows=120, val_rows=20)
    assert counts == {"train.parquet": 120, "val.parquet": 20, "sft_train.parquet": 120}
    asked = []
    for name in ("train", "val"):
        for row in rows(tmp_path / f"{name}.parquet"):
            question = row["prompt"][0]["content"]
            # Python is the independent judge.
            assert str(eval(question.removeprefix("What is ").removesuffix("?"))) == row["reward_model"]["ground_truth"]
            asked.append(question)
    added, guesses = Counter[str](), 0
    for row in rows(tmp_path / "sft_train.parquet"):
        question, *turns, answer = row["messages"]
        asked.append(question["content"])
        truth = str(eval(question["content"].removeprefix("What is ").removesuffix("?")))
        right = rule_for("arithmetic")(answer["content"], truth)
        if turns:
            expression = turns[0]["tool_calls"][0]["function"]["arguments"]["expression"]
            result = calculator(expression)
            assert (turns[1]["content"], answer["content"]) == (result, f"#### {result}")
            assert right == (result == truth)
            added[expression.partition("*")[2].strip()[2:]] += 1
        else:
            assert not right
            guesses += 1
    assert guesses == 120 / GUESS_EVERY
    assert set(added) == {"", " + 1", " - 1"}
    assert added[""] < min(added[" + 1"], added[" - 1"])
    assert len(set(asked)) == len(asked) == 260


def test_the_schema_of_the_rows_is_that_of_the_tool() -> None:
    from transformers.utils import get_json_schema

    assert get_json_schema(calculator) == CALCULATOR_TOOL


def test_the_template_is_append_only_and_marks_the_turns_of_the_model(tmp_path: Path, tiny_folder: Path) -> None:
    from transformers import AutoTokenizer

    write_calculator(tmp_path, train_rows=1, val_rows=1)
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    tokenizer.chat_template = (tmp_path / "template.jinja").read_text()
    chat, tools = call_chat(48, 60), json.loads(rows(tmp_path / "sft_train.parquet")[0]["tools"])
    texts = [tokenizer.apply_chat_template(chat[:n], tools=tools, tokenize=False) for n in range(1, len(chat) + 1)]
    assert all(text.startswith(before) for before, text in pairwise(texts))
    assert texts[0].startswith("<|im_start|>system\nTools: calculator(expression)<|im_end|>\n<|im_start|>user\n")
    marked = tokenizer.apply_chat_template(chat, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
    pairs = zip(marked["input_ids"], marked["assistant_masks"], strict=True)
    trained = tokenizer.decode([token for token, mask in pairs if mask])
    call = '<tool_call>{"name": "calculator", "arguments": {"expression": "48 * 60"}}</tool_call>'
    assert trained == f"{call}<|im_end|>#### 2880<|im_end|>"


def test_games_follow_the_rules(tmp_path: Path) -> None:
    write_guess_number(tmp_path, train_rows=70, val_rows=30)
    row = rows(tmp_path / "train.parquet")[0]
    numbers = [int(row["reward_model"]["ground_truth"]) for row in rows(tmp_path / "train.parquet")]
    assert {number: numbers.count(number) for number in numbers} == dict.fromkeys(range(1, 8), 10)
    for game in rows(tmp_path / "sft_train.parquet"):
        prompt, *turns = game["messages"]
        assert [prompt] == row["prompt"] == GuessNumber().reset({}, 0).messages
        guesses, answers = [int(turn["content"]) for turn in turns[::2]], [turn["content"] for turn in turns[1::2]]
        assert len(guesses) == len(answers) + 1 <= 3
        above = [guess for guess, answer in zip(guesses, answers, strict=False) if answer == "higher"]
        below = [guess for guess, answer in zip(guesses, answers, strict=False) if answer == "lower"]
        assert max(above, default=0) + 1 < min(below, default=8) or len(guesses) == 3


def test_halving_finds_every_number() -> None:
    for number in range(1, 8):
        game, low, high = GuessNumber(), 1, 7
        game.reset({"ground_truth": str(number)}, 0)
        while True:
            guess = (low + high) // 2
            turn = game.step(Reply(str(guess), str(guess)))
            if turn.done:
                break
            low, high = (guess + 1, high) if turn.messages[0]["content"] == "higher" else (low, guess - 1)
        assert turn.reward == 1.0


@pytest.mark.parametrize("write", [write_calculator, write_guess_number, write_seeds])
def test_no_rows_are_refused(write: object, tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="train_rows"):
        write(tmp_path, train_rows=0)  # type: ignore[operator]


def test_more_products_than_there_are_are_refused(tmp_path: Path) -> None:
    with pytest.raises(Refusal, match="train_rows"):
        write_calculator(tmp_path, train_rows=2300, val_rows=100)
    # 68 * 68 products, half of the rest.
    assert write_calculator(tmp_path, train_rows=2262, val_rows=100)["sft_train.parquet"] == 2262


def test_no_two_rows_have_the_same_seed(tmp_path: Path) -> None:
    write_seeds(tmp_path / "a", prompt="Play.", train_rows=500, val_rows=20)
    write_seeds(tmp_path / "b", prompt="Play.", train_rows=500, val_rows=20, seed=1)
    one, two = ([rows(tmp_path / name / f"{file}.parquet") for file in ("train", "val")] for name in ("a", "b"))
    seeds = [row["seed"] for split in one for row in split]
    assert len(set(seeds)) == 520
    assert [len(split) for split in one] == [500, 20]
    assert one[0][0]["prompt"] == [{"content": "Play.", "role": "user"}]
    assert seeds != [row["seed"] for split in two for row in split]
