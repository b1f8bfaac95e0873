"""Small rows and a small recipe for every offline method that compares or judges responses."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

from conftest import chat_rows, write_jsonl

Rows = list[dict[str, object]]


def pair_rows(count: int, seed: int = 0) -> Rows:
    """Sums with a right and a wrong answer, which begin alike by more or less."""
    draw = random.Random(seed)
    rows: Rows = []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        begun, long = "so " * draw.randrange(0, 6), "then " * draw.randrange(0, 8)
        rows.append(
            {
                "prompt": [{"role": "user", "content": f"{a}+{b}?"}],
                "chosen": [{"role": "assistant", "content": f"{begun}#### {a + b}"}],
                "rejected": [{"role": "assistant", "content": f"{begun}{long}#### {a + b + draw.randrange(1, 9)}"}],
            }
        )
    return rows


def ranking_rows(count: int, seed: int = 0) -> Rows:
    """Two to four answers, their scores in no order."""
    draw = random.Random(seed)
    rows: Rows = []
    for _ in range(count):
        a, answers = draw.randrange(100), draw.randrange(2, 5)
        responses = [f"{'so ' * draw.randrange(0, 6)}#### {a + i}" for i in range(answers)]
        rows.append({"prompt": f"{a}+0?", "responses": responses, "scores": draw.sample(range(10), answers)})
    return rows


def judged_rows(count: int, seed: int = 0) -> Rows:
    draw = random.Random(seed)
    rows: Rows = []
    for number in range(count):
        a, good = draw.randrange(100), number % 3 > 0
        answer = "so " * draw.randrange(0, 12) + f"#### {a + (not good)}"
        rows.append({"prompt": f"{a}+0?", "completion": answer, "label": good})
    return rows


def step_rows(count: int, seed: int = 0) -> Rows:
    draw = random.Random(seed)
    rows: Rows = []
    for _ in range(count):
        steps = draw.randrange(1, 5)
        rows.append(
            {
                "prompt": f"{draw.randrange(100)}+1?",
                "completions": [f"step {i} {'so ' * draw.randrange(0, 5)}" for i in range(steps)],
                "labels": [draw.random() < 0.5 for _ in range(steps)],
            }
        )
    return rows


PAIRWISE = ("dpo", "ipo", "simpo", "orpo", "cpo", "rm")
METHODS: dict[str, Callable[[int, int], Rows]] = {
    **dict.fromkeys(PAIRWISE, pair_rows),
    "kto": judged_rows,
    "prm": step_rows,
    "distill": chat_rows,
}


def write_recipe(folder: Path, model: Path, method: str, rows: Rows | None = None) -> Path:
    """A complete recipe with rows of its own; the run folder lies beside it. A teacher must be named with it."""
    train = write_jsonl(folder / "train.jsonl", METHODS[method](24, 0) if rows is None else rows)
    val = write_jsonl(folder / "val.jsonl", METHODS[method](7, 1) if rows is None else rows[:7])
    path = folder / "recipe.yaml"
    own = {"prm": 'prm: {placeholder: "@"}'}.get(method, "")
    # eps above the gradients' noise: Adam's first steps would blow a rounding difference up to a whole step.
    path.write_text(
        f"""
method: {method}
device: cpu
run: {{name: run, folder: {folder / "runs"}, steps: 4}}
model: {{path: {model}}}
data: {{train: {train}, val: {val}}}
batch: {{rows_per_update: 6, tokens: 512}}
optim: {{lr: 1e-3, eps: 1e-4, warmup: 1}}
{own}
""",
        encoding="utf-8",
    )
    return path
