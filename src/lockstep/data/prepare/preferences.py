"""Generated preferences: sums of one-digit numbers where the prompt says how the answer should look.

Every sum is asked twice, once for a brief answer and once for a worked one, with the same two answers the other way
round: whoever does not read the request is right half of the time. Beside the pairs: the same prompts for online
methods, and lists of small sums with a verdict on each for process reward models.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from lockstep.data.prepare.arithmetic import LARGEST_VAL_SHARE, LEVELS, running_steps
from lockstep.data.prepare.write import answered, asked, rl_row, too_few, write_files
from lockstep.errors import refuse_all
from lockstep.types import Message, Row

DATA_SOURCE = "brevity"
BRIEF, WORKED = "Be brief.", "Show the work."
STEPS_PROMPT = "Add up."
FEWEST_STEPS, MOST_STEPS = 10, 14


@dataclass(frozen=True)
class RequestedSum:
    """A sum with a request."""

    numbers: tuple[int, ...]
    request: str

    @property
    def prompt(self) -> list[Message]:
        return asked(f"What is {' + '.join(map(str, self.numbers))}? {self.request}")


def write_preferences(folder: Path, *, train_rows: int = 2000, val_rows: int = 200, seed: int = 0) -> dict[str, int]:
    """Write `pairs_*`, `prompts_*` (RL schema) and `steps_*`, a file for training and one for validation; returns rows
    by file.

    There are 1,100 sums of two or three one-digit numbers, so 2,200 pairs and prompts; where more are asked for, the
    files hold what there is, a fifth of it for validation at most. No sum of a validation pair or prompt is among the
    training rows, and no row of steps has the sums of another; single facts such as `3 + 4 = 7` are in both.
    """
    refuse_all(too_few(train_rows=train_rows, val_rows=val_rows))
    wanted = {"train": train_rows, "val": val_rows}
    questions = _questions(wanted, random.Random(f"pairs/{seed}"))
    steps = _step_rows(random.Random(f"steps/{seed}"))
    # Validation first: it keeps its rows whatever the number of training rows is.
    judged = {split: [next(steps) for _ in range(wanted[split])] for split in ("val", "train")}
    files: dict[str, list[Row]] = {}
    for split in ("train", "val"):
        files[f"pairs_{split}"] = list(map(_pair_row, questions[split]))
        files[f"prompts_{split}"] = [
            rl_row(DATA_SOURCE, q.prompt, sum(q.numbers), split=split, index=index, request=q.request)
            for index, q in enumerate(questions[split])
        ]
        files[f"steps_{split}"] = judged[split]
    return write_files(folder, files)


def _questions(wanted: dict[str, int], draw: random.Random) -> dict[str, list[RequestedSum]]:
    """Each sum with both requests (an odd last one with one of them), in an order that keeps the two apart."""
    size, question_at = LEVELS[1]
    drawn = draw.sample(range(size), size)
    # Two questions a sum, rounded up.
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
    return {"prompt": question.prompt, "chosen": answered(chosen), "rejected": answered(rejected)}


def _step_rows(draw: random.Random) -> Iterator[Row]:
    """Rows of several sums below ten, each wrong with probability one half.

    One token for a number and one step like the other: what is left to learn is to add, which a tiny model can. There
    are so many lists of sums (55 to the power of ten and more) that none comes twice.
    """
    facts = [(a, b) for a in range(10) for b in range(10 - a)]
    while True:
        sums = draw.choices(facts, k=draw.randint(FEWEST_STEPS, MOST_STEPS))
        labels = [draw.random() < 0.5 for _ in sums]
        yield {
            "prompt": asked(STEPS_PROMPT),
            "completions": [
                f"{a}+{b}={a + b if right else _wrong(a + b, draw)}" for (a, b), right in zip(sums, labels, strict=True)
            ],
            "labels": labels,
        }


def _wrong(result: int, draw: random.Random) -> int:
    return draw.choice([number for number in range(10) if number != result])
