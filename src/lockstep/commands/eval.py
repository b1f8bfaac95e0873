"""`lockstep eval`: how well a model answers rows that a rule can check, or judges rows of preferences and steps."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from lockstep.commands.eval_rows import rows_recipe, score_rows
from lockstep.commands.options import refuse_long_answers, refuse_options
from lockstep.data.prompts import read_questions
from lockstep.data.read import read_rows
from lockstep.device.select import explain
from lockstep.errors import Refusal
from lockstep.evaluate.answers import answer_metrics
from lockstep.model.load import load_tokenizer
from lockstep.model.resolve import model_folder
from lockstep.parallel.world import joined
from lockstep.reward.rule_judge import RuleJudge
from lockstep.reward.rules import rule_for
from lockstep.rollout.generator import Generator
from lockstep.rollout.questions import encode_questions, validation_keys
from lockstep.run.folder import refuse_unwritable
from lockstep.run.progress import Console
from lockstep.run.samples import sample_line
from lockstep.run.screen import Screen, shown
from lockstep.types import Prompt, Rollout, Sampling


def score_model(
    model: str,
    data: str,
    *,
    rows: int | None,
    max_new_tokens: int,
    n: int,
    temperature: float,
    seed: int,
    out: Path | None,
    dtype: str,
    device_name: str,
    reference: str | None = None,
) -> dict[str, float]:
    """Answer or judge, score, show; returns the metrics."""
    refuse_options(dtype, n, temperature)
    if out is not None:
        refuse_unwritable(out, "--out")
    device, sentence = explain(device_name)
    with joined(device) as world:
        console = Console.open() if world.main else Console.silent()
        console.say(sentence)
        rowset = read_rows(data)
        folder = model_folder(model)
        compared = None if reference is None else model_folder(reference)
        recipe = rows_recipe(folder, data, rowset, dtype, compared)
        if recipe is not None:
            metrics = score_rows(
                recipe, rowset, rows=rows, reference=compared, out=out, device=device, world=world, console=console
            )
            if world.main:
                _show(model, data, metrics)
            return metrics
        if reference is not None:
            raise Refusal.at("--reference", f"{data} holds no pairs to compare", "remove it")
        questions, judge = read_questions(rowset, rows), RuleJudge()
        for source in sorted({question.data_source for question in questions}):
            rule_for(source)
        tokenizer = load_tokenizer(folder)
        prompts = encode_questions(tokenizer, questions)
        refuse_long_answers(prompts, max_new_tokens, folder)
        generator = Generator.load(folder, tokenizer, dtype, device, world)
        sampling = Sampling(max_new_tokens, temperature, stop_ids=generator.stop_ids, seed=seed)
        given = _answers(generator, prompts, n, sampling, judge, console)
        metrics = answer_metrics(given, judge.answer_of, n)
        if world.main:
            if out is not None:
                _write(out, given)
            _show(model, data, {"questions": float(len(prompts)), **_named(metrics)})
    return metrics


def _answers(
    generator: Generator, prompts: Sequence[Prompt], n: int, sampling: Sampling, judge: RuleJudge, console: Console
) -> list[Rollout]:
    keys, ranks = validation_keys(len(prompts)), generator.world.size
    with console.task("Answering", len(prompts) * n) as task:
        return generator.generate(prompts, keys, n, sampling, judge, advance=lambda done: task.advance(done * ranks))


def _named(metrics: dict[str, float]) -> dict[str, float]:
    """By the names that a user reads."""
    return {name.removeprefix("val/"): value for name, value in metrics.items() if name.startswith("val/")}


def _write(out: Path, given: list[Rollout]) -> None:
    with out.open("w", encoding="utf-8") as file:
        for rollout in given:
            file.write(json.dumps(sample_line(0, "eval", rollout, None), ensure_ascii=False) + "\n")


def _show(model: str, data: str, metrics: dict[str, float]) -> None:
    table = Table(title=shown(f"{model} on {data}"), title_justify="left")
    table.add_column("measure")
    table.add_column("value", justify="right")
    for name, value in metrics.items():
        table.add_row(shown(name), f"{value:,.0f}" if name in ("questions", "rows") else f"{value:.4f}")
    Screen.on_stdout().print(table)
