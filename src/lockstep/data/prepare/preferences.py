"""Generated preferences: sums of one-digit numbers where the prompt says how the answer should look.

Every sum is asked twice, once for a brief answer and once for a worked one, with the same two answers the other way
round: whoever does not read the request is right half of the time. Beside the pairs: the same prompts for online
methods, and lists of small sums with a verdict on each for process reward models.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

from lockstep.data.prepare.arithmetic import LARGEST_VAL_SHARE, LEVELS
from lockstep.data.prepare.write import write_parquet
from lockstep.errors import Problem, Refusal
from lockstep.types import Message, Row

DATA_SOURCE = "brevity"
BRIEF, WORKED = "Be brief.", "Show the work."
STEPS_PROMPT = "Add up."
FEWEST_STEPS, MOST_STEPS = 10, 14


@dataclass(frozen=True)
class Asked:
    """A sum with a request."""

    numbers: tuple[int, ...]
    request: str

    @property
    def prompt(self) -> list[Message]:
        return [{"role": "user", "content": f"What is {' + '.join(map(str, self.numbers))}? {self.request}"}]


def write_preferences(folder: Path, *, train_rows: int = 2000, val_rows: int = 200, seed: int = 0) -> dict[str, int]:
    """Write `pairs_*`, `prompts_*` (RL schema) and `steps_*`, a file for training and one for validation; returns rows
    by file.

    There are 1,100 sums of two or three one-digit numbers, so 2,200 pairs and prompts; where more are asked for, the
    files hold what there is, a fifth of it for validation at most. No sum of a validation pair or prompt is among the
    training rows, and no row of steps has the sums of another; single facts such as `3 + 4 = 7` are in both.
    """
    problems = [
        Problem(name, f"{count} rows are not enough", "give at least 1")
        for name, count in (("train_rows", train_rows), ("val_rows", val_rows))
        if count < 1
    ]
    if problems:
        raise Refusal(problems)
    wanted = {"train": train_rows, "val": val_rows}
    asked = _asked(wanted, random.Random(f"pairs/{seed}"))
    steps = _step_rows(random.Random(f"steps/{seed}"))
    # Validation first: it keeps its rows whatever the number of training rows is.
    judged = {split: [next(steps) for _ in range(wanted[split])] for split in ("val", "train")}
    counts: dict[str, int] = {}
    for split in ("train", "val"):
        prompts = [_rl_row(question, split, index) for index, question in enumerate(asked[split])]
        files = {"pairs": list(map(_pair_row, asked[split])), "prompts": prompts, "steps": judged[split]}
        for kind, rows in files.items():
            counts[f"{kind}_{split}.parquet"] = len(rows)
            write_parquet(folder / f"{kind}_{split}.parquet", rows)
    return counts


def _asked(wanted: dict[str, int], draw: random.Random) -> dict[str, list[Asked]]:
    """Each sum with both requests (an odd last one with one of them), in an order that keeps the two apart."""
    size, question_at = LEVELS[1]
    drawn = draw.sample(range(size), size)
    # Two questions a sum, rounded up.
    held_out = min(-(-wanted["val"] // 2), int(LARGEST_VAL_SHARE * size))
    sums = {"val": drawn[:held_out], "train": drawn[held_out:]}
    asked = {}
    for split in ("val", "train"):
        both = [Asked(question_at(number)[1], request) for number in sums[split] for request in (BRIEF, WORKED)]
        asked[split] = both[: wanted[split]]
        draw.shuffle(asked[split])
    return asked


def _pair_row(question: Asked) -> Row:
    brief = f"#### {sum(question.numbers)}"
    worked = "\n".join([*_running(question.numbers), brief])
    chosen, rejected = (brief, worked) if question.request == BRIEF else (worked, brief)
    return {"prompt": question.prompt, "chosen": _answer(chosen), "rejected": _answer(rejected)}


def _running(numbers: tuple[int, ...]) -> Iterator[str]:
    totals = list(accumulate(numbers))
    for before, number, after in zip(totals, numbers[1:], totals[1:], strict=False):
        yield f"{before} + {number} = {after}"


def _answer(text: str) -> list[Message]:
    return [{"role": "assistant", "content": text}]


def _rl_row(question: Asked, split: str, index: int) -> Row:
    return {
        "data_source": DATA_SOURCE,
        "prompt": question.prompt,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(sum(question.numbers))},
        "extra_info": {"split": split, "index": index, "request": question.request},
    }


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
            "prompt": [{"role": "user", "content": STEPS_PROMPT}],
            "completions": [
                f"{a}+{b}={a + b if right else _wrong(a + b, draw)}" for (a, b), right in zip(sums, labels, strict=True)
            ],
            "labels": labels,
        }


def _wrong(result: int, draw: random.Random) -> int:
    return draw.choice([number for number in range(10) if number != result])
