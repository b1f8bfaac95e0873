"""`lockstep eval`: greedy accuracy of a model on rows that a rule can check."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rich.console import Console as RichConsole
from rich.table import Table
from rich.text import Text

from lockstep.data.questions import read_questions
from lockstep.data.read import read_rows
from lockstep.device.select import explain
from lockstep.errors import Refusal
from lockstep.model.load import DTYPES, load_policy, load_tokenizer
from lockstep.model.resolve import model_folder
from lockstep.parallel.world import joined
from lockstep.recipe.schema import Model
from lockstep.reward.rules import rule_for
from lockstep.run.progress import Console
from lockstep.train.evaluate import accuracy, answer
from lockstep.types import Answer

# Questions answered between two movements of the progress bar.
GROUP = 64


def score_model(
    model: str, data: str, *, rows: int | None, max_new_tokens: int, out: Path | None, dtype: str, device_name: str
) -> dict[str, float]:
    """Answer, score, show; returns the metrics."""
    if dtype not in DTYPES:
        raise Refusal.at("--dtype", f"{dtype} is not one of {', '.join(DTYPES)}")
    device, sentence = explain(device_name)
    with joined(device) as world:
        console = Console.open() if world.main else Console.silent()
        console.say(sentence)
        folder = model_folder(model)
        questions = read_questions(read_rows(data), rows)
        for source in sorted({question.data_source for question in questions}):
            rule_for(source)
        tokenizer = load_tokenizer(folder)
        settings = Model(path=folder, dtype=dtype)  # type: ignore[arg-type]
        place = device.torch_device(world.local_rank)
        policy = load_policy(settings, place, device.attention, seed=0)
        answers: list[Answer] = []
        with console.task("Answering", len(questions)) as task:
            for start in range(0, len(questions), GROUP * world.size):
                group = questions[start : start + GROUP * world.size]
                answers += answer(policy, tokenizer, group, world, place, max_new_tokens=max_new_tokens)
                task.advance(len(group))
        metrics = accuracy(answers)
        if world.main:
            if out is not None:
                _write(out, answers)
            _show(model, data, answers, metrics)
    return metrics


def _write(out: Path, answers: list[Answer]) -> None:
    with out.open("w", encoding="utf-8") as file:
        for given in answers:
            line = {
                "prompt": given.question.prompt,
                "response": given.text,
                "ground_truth": given.question.ground_truth,
                "score": given.score,
                "stopped": given.stopped,
            }
            file.write(json.dumps(line, ensure_ascii=False) + "\n")


def _show(model: str, data: str, answers: list[Answer], metrics: dict[str, float]) -> None:
    table = Table(title=Text(f"{model} on {data}"), title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    table.add_row("questions", f"{len(answers):,}")
    for name, value in metrics.items():
        table.add_row(name.removeprefix("val/"), f"{value:.4f}")
    RichConsole(file=sys.stdout, width=None if sys.stdout.isatty() else 80).print(table)
