"""`lockstep eval`: how well a model answers rows that a rule can check, or judges rows of preferences and steps."""

from __future__ import annotations

import json
from pathlib import Path

from rich.table import Table

from lockstep.commands.eval_rows import kind_of, score_rows
from lockstep.commands.options import refuse_options
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
from lockstep.types import Rollout, Sampling


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
        folder = model_folder(model)
        rowset = read_rows(data)
        method = kind_of(folder, rowset)
        if method is not None:
            metrics = score_rows(
                method,
                folder,
                data,
                rowset,
                rows=rows,
                reference=None if reference is None else model_folder(reference),
                out=out,
                dtype=dtype,
                device=device,
                world=world,
                console=console,
            )
            if world.main:
                _show(model, data, metrics)
            return metrics
        if reference is not None:
            raise Refusal.at("--reference", f"{data} holds no pairs to compare", "remove it")
        questions = read_questions(rowset, rows)
        for source in sorted({question.data_source for question in questions}):
            rule_for(source)
        tokenizer = load_tokenizer(folder)
        generator = Generator.load(folder, tokenizer, dtype, device, world)
        sampling = Sampling(max_new_tokens, temperature, stop_ids=generator.stop_ids, seed=seed)
        prompts, judge = encode_questions(tokenizer, questions), RuleJudge()
        keys = validation_keys(len(prompts))
        with console.task("Answering", len(questions) * n) as task:
            given = generator.generate(
                prompts, keys, n, sampling, judge, advance=lambda done: task.advance(done * world.size)
            )
        metrics = answer_metrics(given, judge.answer_of, n)
        if world.main:
            if out is not None:
                _write(out, given)
            asked = {"questions": float(len({rollout.place for rollout in given}))}
            shown = {name.removeprefix("val/"): v for name, v in metrics.items() if name.startswith("val/")}
            _show(model, data, asked | shown)
    return metrics


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
