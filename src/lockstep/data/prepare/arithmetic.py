"""Generated arithmetic with checkable answers: the embedded default's data, at four difficulties.

Every answer works the sum out in small steps and ends with `#### result`. Questions are drawn without repetition, and
no validation question is a training question.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.prepare.write import answered, asked, rl_row, too_few, write_files
from lockstep.errors import Problem, refuse_all
from lockstep.types import Row

DATA_SOURCE = "arithmetic"
# At most this share of a level's questions is held out when the level is small.
LARGEST_VAL_SHARE = 0.2


# A sign and the numbers it joins.
ArithmeticQuestion = tuple[str, tuple[int, ...]]


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
    (8,100). 3: sums and differences of 3-digit numbers (1,214,550). 4: products of 2-digit numbers (8,100).
    A level with fewer questions than asked for gives what it has, a fifth of it for validation at most: the returned
    counts say so. Questions are held out, not facts: `3 + 4 = 7` may be a step of another row's answer.
    """
    problems = too_few(train_rows=train_rows, val_rows=val_rows)
    if difficulty not in LEVELS:
        problems.append(Problem("difficulty", f"{difficulty} is not one of {', '.join(map(str, LEVELS))}"))
    refuse_all(problems)
    draw = random.Random(f"{difficulty}/{seed}")
    size, question_at = LEVELS[difficulty]
    held_out = min(val_rows, int(LARGEST_VAL_SHARE * size))
    drawn = draw.sample(range(size), min(size, held_out + train_rows))
    sums = [_worked(*question_at(number)) for number in drawn]
    splits = {"val": sums[:held_out], "train": sums[held_out : held_out + train_rows]}
    files: dict[str, list[Row]] = {}
    for split in ("train", "val"):
        files[split] = [
            rl_row(DATA_SOURCE, asked(w.question), w.result, split=split, index=i, question=w.question, answer=w.answer)
            for i, w in enumerate(splits[split])
        ]
        files[f"sft_{split}"] = [{"messages": asked(w.question) + answered(w.answer)} for w in splits[split]]
    return write_files(folder, files)


def _one_digit(number: int) -> ArithmeticQuestion:
    if number < 100:
        return "+", divmod(number, 10)
    a, rest = divmod(number - 100, 100)
    return "+", (a, *divmod(rest, 10))


def _two_digit(number: int) -> tuple[int, int]:
    a, b = divmod(number, 90)
    return 10 + a, 10 + b


def _three_digit(number: int) -> ArithmeticQuestion:
    if number < 900 * 900:
        a, b = divmod(number, 900)
        return "+", (100 + a, 100 + b)
    # The rest are the pairs a > b in the order (1, 0), (2, 0), (2, 1), (3, 0) ...
    rest = number - 900 * 900
    a = (1 + math.isqrt(8 * rest + 1)) // 2
    return "-", (100 + a, 100 + rest - a * (a - 1) // 2)


# How many questions a level has, and which is the one of a number.
LEVELS: dict[int, tuple[int, Callable[[int], ArithmeticQuestion]]] = {
    1: (1100, _one_digit),
    2: (90 * 90, lambda number: ("+", _two_digit(number))),
    3: (900 * 900 + 900 * 899 // 2, _three_digit),
    4: (90 * 90, lambda number: ("*", _two_digit(number))),
}


def _worked(sign: str, numbers: tuple[int, ...]) -> Sum:
    if sign == "*":
        result, steps = numbers[0] * numbers[1], _product_steps(*numbers)
    elif sign == "-":
        result, steps = numbers[0] - numbers[1], _difference_steps(*numbers)
    elif max(numbers) < 10:
        result, steps = sum(numbers), running_steps(numbers)
    else:
        result, steps = sum(numbers), _column_steps(*numbers)
    question = f"What is {f' {sign} '.join(map(str, numbers))}?"
    return Sum(question, "\n".join([*steps, f"#### {result}"]), result)


def running_steps(numbers: tuple[int, ...]) -> Iterator[str]:
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
