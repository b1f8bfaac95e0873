"""Generated task data (arithmetic, preferences) and GSM8K, written as RL rows."""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.data.sources.read import RowSet, read_rows
from lockstep.errors import Problem, Refusal, refuse_all
from lockstep.run.files import replace_text, written_aside
from lockstep.types import Message, Row


def rl_row(data_source: str, prompt: list[Message], truth: object, **extra_info: Any) -> Row:
    """Returns a row with a mathematics problem in verl's RL schema."""
    return {
        "data_source": data_source,
        "prompt": prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(truth)},
        "extra_info": extra_info,
    }


def user_message(text: str) -> list[Message]:
    return [{"role": "user", "content": text}]


def assistant_message(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def too_few(**rows: int) -> list[Problem]:
    """Returns an error (`Problem`) for each option that requests fewer than 1 row."""
    return [
        Problem(name, f"{count} rows are requested, which is not enough", "give at least 1", code="out-of-range")
        for name, count in rows.items()
        if count < 1
    ]


def write_files(folder: Path, files: Mapping[str, Sequence[Row]]) -> dict[str, int]:
    """Writes each list of rows as `name`.parquet. Returns the number of rows by file name."""
    for name, rows in files.items():
        write_rows(folder / f"{name}.parquet", rows)
    return {f"{name}.parquet": len(rows) for name, rows in files.items()}


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Writes rows as parquet, or as JSON lines for any other suffix. The file is written completely or not at all."""
    if path.parent.exists() and not path.parent.is_dir():
        raise Refusal.at(path.parent, "is a file, not a folder", "give another folder", code="not-a-folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        replace_text(path, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        return
    import pyarrow
    import pyarrow.parquet

    with written_aside(path) as aside:
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(list(rows)), aside)


# Generated arithmetic at four difficulties, with checkable answers: every answer is worked out in small steps and ends
# with `#### result`. Questions do not repeat, and validation questions are not in the training data.

ARITHMETIC_SOURCE = "arithmetic"
# At most this fraction of all questions of a difficulty level is used for validation.
LARGEST_VAL_SHARE = 0.2


# An arithmetic sign (+, - or *) and its operands.
ArithmeticQuestion = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Sum:
    """An arithmetic question, its worked answer (with steps) and the result."""

    question: str
    answer: str
    result: int


def write_arithmetic(
    folder: Path, *, train_rows: int = 2000, val_rows: int = 200, difficulty: int = 1, seed: int = 0
) -> dict[str, int]:
    """Writes training and validation rows in verl's RL schema, and the same rows for SFT (`sft_*`). Returns the number
    of rows by file.

    Difficulty 1 has 1,100 questions: sums of two or three 1-digit numbers. Difficulty 2 has 8,100 questions: sums of
    two 2-digit numbers. Difficulty 3 has 1,214,550 questions: sums and differences of 3-digit numbers. Difficulty 4 has
    8,100 questions: products of 2-digit numbers. If a level has fewer questions than requested, all its questions are
    written, and at most a fifth of them are used for validation. A validation question never occurs in the training
    rows, but one of its steps, such as `3 + 4 = 7`, may be a step of a training answer.
    """
    problems = too_few(train_rows=train_rows, val_rows=val_rows)
    if difficulty not in LEVELS:
        problems.append(
            Problem("difficulty", f"{difficulty} is not one of {', '.join(map(str, LEVELS))}", code="unknown-name")
        )
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
            rl_row(
                ARITHMETIC_SOURCE,
                user_message(w.question),
                w.result,
                split=split,
                index=i,
                question=w.question,
                answer=w.answer,
            )
            for i, w in enumerate(splits[split])
        ]
        files[f"sft_{split}"] = [
            {"messages": user_message(w.question) + assistant_message(w.answer)} for w in splits[split]
        ]
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
    # Subtractions a - b with a > b are numbered in the order (1, 0), (2, 0), (2, 1), (3, 0) ... (each plus 100).
    rest = number - 900 * 900
    a = (1 + math.isqrt(8 * rest + 1)) // 2
    return "-", (100 + a, 100 + rest - a * (a - 1) // 2)


# For each difficulty level: the number of questions, and a function that returns the question with a given index.
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
    """Yields the steps of an addition, right to left with carry."""
    carry = 0
    while a or b:
        column = a % 10 + b % 10 + carry
        yield f"{a % 10} + {b % 10} + {carry} = {column}"
        a, b, carry = a // 10, b // 10, column // 10


def _difference_steps(a: int, b: int) -> Iterator[str]:
    """Yields the steps of a subtraction, right to left with borrow."""
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


# Generated preferences: sums of one-digit numbers, where the prompt requests a brief answer or a worked answer. Every
# sum occurs with both requests, and the chosen answer of one request is the rejected answer of the other. A model that
# ignores the request therefore prefers the chosen answer half of the time. The `prompts_*` files have the same prompts,
# for online methods. The `steps_*` files have lists of small sums with a label for each sum, for process reward models.

BREVITY_SOURCE = "brevity"
BRIEF, WORKED = "Be brief.", "Show the work."
STEPS_PROMPT = "Add up."
FEWEST_STEPS, MOST_STEPS = 10, 14


@dataclass(frozen=True)
class RequestedSum:
    """A sum, with the request for a brief answer or a worked answer."""

    numbers: tuple[int, ...]
    request: str

    @property
    def prompt(self) -> list[Message]:
        return user_message(f"What is {' + '.join(map(str, self.numbers))}? {self.request}")


def write_preferences(folder: Path, *, train_rows: int = 2000, val_rows: int = 200, seed: int = 0) -> dict[str, int]:
    """Writes `pairs_*`, `prompts_*` (verl's RL schema) and `steps_*` files for training and validation. Returns the row
    count by file.

    There are 1,100 sums of two or three one-digit numbers, so there are 2,200 pairs and 2,200 prompts. If more rows are
    requested, all 2,200 are written, and at most a fifth of them are used for validation. The sum of a validation pair
    or prompt never occurs in a training pair or prompt. No two rows of `steps_*` have the same list of sums. Single
    steps such as `3 + 4 = 7` occur in both training and validation.
    """
    refuse_all(too_few(train_rows=train_rows, val_rows=val_rows))
    wanted = {"train": train_rows, "val": val_rows}
    questions = _questions(wanted, random.Random(f"pairs/{seed}"))
    steps = _step_rows(random.Random(f"steps/{seed}"))
    # Validation rows are generated first, so that they do not depend on the number of training rows.
    judged = {split: [next(steps) for _ in range(wanted[split])] for split in ("val", "train")}
    files: dict[str, list[Row]] = {}
    for split in ("train", "val"):
        files[f"pairs_{split}"] = list(map(_pair_row, questions[split]))
        files[f"prompts_{split}"] = [
            rl_row(BREVITY_SOURCE, q.prompt, sum(q.numbers), split=split, index=index, request=q.request)
            for index, q in enumerate(questions[split])
        ]
        files[f"steps_{split}"] = judged[split]
    return write_files(folder, files)


def _questions(wanted: dict[str, int], draw: random.Random) -> dict[str, list[RequestedSum]]:
    """Returns each sum with both requests (brief, worked), in random order. If `wanted` is odd, the last sum occurs
    with only one of the two requests."""
    size, question_at = LEVELS[1]
    drawn = draw.sample(range(size), size)
    # Each sum gives two questions, so half as many sums are needed, rounded up.
    held_out = min(-(-wanted["val"] // 2), int(LARGEST_VAL_SHARE * size))
    sums = {"val": drawn[:held_out], "train": drawn[held_out:]}
    questions = {}
    for split in ("val", "train"):
        both = [RequestedSum(question_at(number)[1], request) for number in sums[split] for request in (BRIEF, WORKED)]
        questions[split] = both[: wanted[split]]
        draw.shuffle(questions[split])
    return questions


def _pair_row(question: RequestedSum) -> Row:
    brief = f"#### {sum(question.numbers)}"
    worked = "\n".join([*running_steps(question.numbers), brief])
    chosen, rejected = (brief, worked) if question.request == BRIEF else (worked, brief)
    return {"prompt": question.prompt, "chosen": assistant_message(chosen), "rejected": assistant_message(rejected)}


def _step_rows(draw: random.Random) -> Iterator[Row]:
    """Yields rows of several sums with results below ten. Each sum is wrong with probability one half.

    Each number is one token and all steps have the same form, so a model only has to learn addition, which a tiny model
    can do. There are at least 55^10 lists of sums, so a repeated list is practically impossible.
    """
    facts = [(a, b) for a in range(10) for b in range(10 - a)]
    while True:
        sums = draw.choices(facts, k=draw.randint(FEWEST_STEPS, MOST_STEPS))
        labels = [draw.random() < 0.5 for _ in sums]
        yield {
            "prompt": user_message(STEPS_PROMPT),
            "completions": [
                f"{a}+{b}={a + b if right else _wrong(a + b, draw)}" for (a, b), right in zip(sums, labels, strict=True)
            ],
            "labels": labels,
        }


def _wrong(result: int, draw: random.Random) -> int:
    return draw.choice([number for number in range(10) if number != result])


# Converts GSM8K to RL rows, from its raw jsonl files or from the Hugging Face hub.

GSM8K_SOURCE = "openai/gsm8k"
INSTRUCTION = "Think step by step, and give the final answer after ####."
COUNTS = {"train": 7473, "test": 1319}
_NUMBER = re.compile(r"-?\d+(\.\d+)?")


def write_gsm8k(
    out: Path, *, source: Path | None = None, check_counts: bool = True, examples: int = 0
) -> dict[str, int]:
    """Writes GSM8K as train.parquet and test.parquet. Returns the row count by file. `source` is a folder with the raw
    train.jsonl and test.jsonl. If `source` is None, the data set comes from the Hugging Face hub. Each prompt begins
    with `examples` worked examples, for models that do not answer in the form that the rule reads. The examples are the
    first training questions, which are then not in train.parquet."""
    written: dict[str, list[Row]] = {}
    problems: list[Problem] = []
    shown: list[Message] = []
    for split, expected in COUNTS.items():
        path = str(source / f"{split}.jsonl") if source is not None else f"hub:{GSM8K_SOURCE}:main:{split}"
        rows = read_rows(path)
        if check_counts and len(rows) != expected:
            problems.append(
                Problem(
                    path,
                    f"has {len(rows):,} rows, but the complete data set has {expected:,}",
                    "get a complete copy of the data set",
                    code="too-few-rows",
                )
            )
        if split == "train":
            if examples >= len(rows):
                few = f"{examples:,} worked examples are requested, and the file has {len(rows):,} rows"
                problems.append(Problem(path, few, "ask for fewer examples", code="out-of-range"))
                continue
            shown = [message for index in range(examples) for message in _worked_example(rows[index])]
        written[split] = list(_convert(rows, split, shown, examples if split == "train" else 0, problems))
    refuse_all(problems, "rows")
    return write_files(out, written)


def _worked_example(row: Row) -> list[Message]:
    """Returns a question and its answer as a conversation. `<<48/2=24>>` in an answer is an instruction to a
    calculator."""
    answer = re.sub(r"<<.*?>>", "", str(row.get("answer")))
    return [*user_message(f"{row.get('question')} {INSTRUCTION}"), *assistant_message(answer)]


def _convert(rows: RowSet, split: str, shown: list[Message], first: int, problems: list[Problem]) -> Iterator[Row]:
    for index in range(len(rows)):
        row, origin = rows[index], rows.origin(index)
        question, answer = row.get("question"), row.get("answer")
        if not (isinstance(question, str) and question.strip() and isinstance(answer, str)):
            problems.append(
                Problem(str(origin), "the row needs a question and an answer, both as text", code="not-text")
            )
            continue
        _, mark, final = answer.rpartition("####")
        truth = final.strip().replace(",", "")
        if not mark or not _NUMBER.fullmatch(truth):
            problems.append(Problem(str(origin), "the answer does not end with '#### number'", code="invalid-label"))
            continue
        if index < first:
            continue  # a worked example, which is checked like the others
        prompt = [*shown, *user_message(f"{question} {INSTRUCTION}")]
        yield rl_row(GSM8K_SOURCE, prompt, truth, split=split, index=index, question=question, answer=answer)
