"""Generated arithmetic with checkable answers: the embedded default's data, at four difficulties.

Every answer works the sum out in small steps and ends with `#### result`. Questions are drawn without repetition, and
no validation question is a training question.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.data.prepare.write import write_parquet
from lockstep.errors import Problem, Refusal

DATA_SOURCE = "arithmetic"
# At most this share of a level's questions is held out when the level is small.
LARGEST_VAL_SHARE = 0.2


# A sign and the numbers it joins. A level is all its questions, or a way to draw one.
Question = tuple[str, tuple[int, ...]]
Level = list[Question] | Callable[[random.Random], Question]


@dataclass(frozen=True)
class Sum:
    """A question, its worked answer and the result."""

    question: str
    answer: str
    result: int


def write_arithmetic(
    folder: Path, *, train_rows: int = 2000, val_rows: int = 200, difficulty: int = 1, seed: int = 0
) -> dict[str, int]:
    """Write train and val rows in the RL schema and in the SFT schema (`sft_*`); returns rows by file.

    Difficulty 1: sums of two or three 1-digit numbers (1,100 questions in all). 2: sums of two 2-digit numbers
    (8,100). 3: sums and differences of 3-digit numbers. 4: products of 2-digit numbers (8,100).
    A level with fewer questions than asked for gives what it has, a fifth of it for validation at most: the returned
    counts say so.
    """
    problems = [
        Problem(name, f"{count} rows are not enough", "give at least 1")
        for name, count in (("train_rows", train_rows), ("val_rows", val_rows))
        if count < 1
    ]
    if difficulty not in LEVELS:
        problems.append(Problem("difficulty", f"{difficulty} is not one of {', '.join(map(str, LEVELS))}"))
    if problems:
        raise Refusal(problems)
    draw = random.Random(f"{difficulty}/{seed}")
    sums = _draw(LEVELS[difficulty], train_rows + val_rows, draw)
    held_out = min(val_rows, int(LARGEST_VAL_SHARE * len(sums)))
    splits = {"val": sums[:held_out], "train": sums[held_out : held_out + train_rows]}
    counts: dict[str, int] = {}
    for split in ("train", "val"):
        rows = splits[split]
        counts[f"{split}.parquet"] = len(rows)
        write_parquet(folder / f"{split}.parquet", [_rl_row(row, split, i) for i, row in enumerate(rows)])
        counts[f"sft_{split}.parquet"] = len(rows)
        write_parquet(folder / f"sft_{split}.parquet", [_sft_row(row) for row in rows])
    return counts


def _draw(level: Level, wanted: int, draw: random.Random) -> list[Sum]:
    """Distinct questions: all of a small level in random order, or a random part of a large one."""
    if isinstance(level, list):
        questions = list(level)
        draw.shuffle(questions)
        return [_worked(*question) for question in questions[:wanted]]
    seen: dict[tuple[str, tuple[int, ...]], None] = {}
    while len(seen) < wanted:
        seen[level(draw)] = None
    return [_worked(*question) for question in seen]


def _one_digit() -> list[Question]:
    pairs: list[Question] = [("+", (a, b)) for a in range(10) for b in range(10)]
    return pairs + [("+", (a, b, c)) for a in range(10) for b in range(10) for c in range(10)]


def _two_digit(sign: str) -> list[Question]:
    return [(sign, (a, b)) for a in range(10, 100) for b in range(10, 100)]


def _three_digit(draw: random.Random) -> Question:
    a, b = draw.randrange(100, 1000), draw.randrange(100, 1000)
    return ("+", (a, b)) if draw.random() < 0.5 else ("-", (max(a, b), min(a, b)))


LEVELS: dict[int, Level] = {1: _one_digit(), 2: _two_digit("+"), 3: _three_digit, 4: _two_digit("*")}


def _worked(sign: str, numbers: tuple[int, ...]) -> Sum:
    if sign == "*":
        result, steps = numbers[0] * numbers[1], _product_steps(*numbers)
    elif sign == "-":
        result, steps = numbers[0] - numbers[1], _difference_steps(*numbers)
    elif max(numbers) < 10:
        result, steps = sum(numbers), _running_steps(numbers)
    else:
        result, steps = sum(numbers), _column_steps(*numbers)
    question = f"What is {f' {sign} '.join(map(str, numbers))}?"
    return Sum(question, "\n".join([*steps, f"#### {result}"]), result)


def _running_steps(numbers: tuple[int, ...]) -> Iterator[str]:
    total = numbers[0]
    for number in numbers[1:]:
        yield f"{total} + {number} = {total + number}"
        total += number


def _column_steps(a: int, b: int) -> Iterator[str]:
    """Right to left with the carry, as on paper."""
    carry = 0
    while a or b:
        column = a % 10 + b % 10 + carry
        yield f"{a % 10} + {b % 10} + {carry} = {column}"
        a, b, carry = a // 10, b // 10, column // 10


def _difference_steps(a: int, b: int) -> Iterator[str]:
    """Right to left; a column that is too small takes ten from the next."""
    borrow = 0
    while a or b:
        top, bottom = a % 10, b % 10 + borrow
        lent = 10 if top < bottom else 0
        yield f"{top + lent} - {bottom} = {top + lent - bottom}"
        a, b, borrow = a // 10, b // 10, lent // 10


def _product_steps(a: int, b: int) -> Iterator[str]:
    tens, ones = b // 10 * 10, b % 10
    yield f"{a} * {tens} = {a * tens}"
    yield f"{a} * {ones} = {a * ones}"
    yield f"{a * tens} + {a * ones} = {a * b}"


def _rl_row(worked: Sum, split: str, index: int) -> dict[str, Any]:
    return {
        "data_source": DATA_SOURCE,
        "prompt": [{"role": "user", "content": worked.question}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(worked.result)},
        "extra_info": {"split": split, "index": index, "question": worked.question, "answer": worked.answer},
    }


def _sft_row(worked: Sum) -> dict[str, Any]:
    return {
        "messages": [
            {"role": "user", "content": worked.question},
            {"role": "assistant", "content": worked.answer},
        ]
    }
