"""`lockstep eval`: how well a model answers rows that a rule can check, or judges rows of preferences and steps."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from rich.table import Table

from lockstep.commands.engine import load_generator
from lockstep.commands.eval_rows import rows_recipe, score_rows
from lockstep.commands.options import refuse_long_answers, refuse_options
from lockstep.commands.questions import BY_NAME, NamedColumns, asked_questions
from lockstep.commands.sample_rewards import opened_scorer
from lockstep.data.prompts import ASKED
from lockstep.data.read import read_rows
from lockstep.device.select import explain
from lockstep.errors import Refusal
from lockstep.evaluate.validation import answer_metrics
from lockstep.model.load import load_tokenizer
from lockstep.model.resolve import model_folder
from lockstep.parallel.world import joined
from lockstep.recipe.keys_online import Reward
from lockstep.reward.reads import read_by_rewards
from lockstep.reward.rule_judge import RuleJudge
from lockstep.reward.rules import any_isolated, rule_for, rule_named
from lockstep.reward.scorer import Scorer
from lockstep.rollout.generator import Generator
from lockstep.rollout.questions import Examiner, encode_questions, validation_keys
from lockstep.run.console import Console
from lockstep.run.folder import refuse_unwritable
from lockstep.run.sample_log import sample_line
from lockstep.run.screen import Screen, shown
from lockstep.types import Prompt, Rollout, Sampling

# How a reward's key in a recipe is called here.
OPTIONS = {"reward.function": "--reward", "reward.rules.": "--rule ", "reward.rules": "--rule"}


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
    rules: Sequence[str] = (),
    reward: str | None = None,
    columns: NamedColumns = BY_NAME,
) -> dict[str, float]:
    """Answer or judge, score, show; returns the metrics. `rules` are of the form RULE or SOURCE=RULE."""
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
        if recipe is not None and (rules or reward):
            raise Refusal.at("--rule" if rules else "--reward", f"{data} is judged, not answered", "remove it")
        if recipe is not None:
            metrics = score_rows(
                recipe, rowset, rows=rows, reference=compared, out=out, device=device, world=world, console=console
            )
            if world.main:
                _show(model, data, metrics)
            return metrics
        if reference is not None:
            raise Refusal.at("--reference", f"{data} holds no pairs to compare", "remove it")
        asked = ASKED if rules or reward is None else read_by_rewards(Reward(function=reward))
        questions = asked_questions(rowset, rows, columns, asked=asked)
        named = _rules(rules, {question.data_source for question in questions}, judged=reward is not None)
        tokenizer = load_tokenizer(folder)
        prompts = encode_questions(tokenizer, questions)
        refuse_long_answers(prompts, max_new_tokens, folder)
        settings = Reward(rules=named, function=reward)
        with _judge(settings, prompts, device.torch_device(world.local_rank), console) as judge:
            generator = load_generator(folder, tokenizer, dtype, device, world, console)
            sampling = Sampling(max_new_tokens, temperature, stop_ids=generator.stop_ids, seed=seed)
            given = _answers(generator, prompts, n, sampling, judge, console)
            metrics = answer_metrics(given, judge.answer_of, n)
        if world.main:
            if out is not None:
                _write(out, given)
            _show(model, data, {"questions": float(len(prompts)), **_named(metrics)})
    return metrics


def _rules(words: Sequence[str], sources: set[str], *, judged: bool) -> dict[str, str]:
    """The rule of each data source that the options name. Unless a function judges, every source has one then."""
    own: dict[str, str] = {}
    for word in words:
        source, sign, rule = word.rpartition("=")
        rule_named(rule, f"--rule {word}")
        if sign and source not in sources:
            raise Refusal.at(f"--rule {word}", f"no row is of {source!r}", f"there are {', '.join(sorted(sources))}")
        key = source if sign else ""
        if own.setdefault(key, rule) != rule:
            why = f"{own[key]} is the rule {f'of {source!r}' if sign else 'of all sources'} already"
            raise Refusal.at(f"--rule {word}", why, "give one of them, or SOURCE=RULE for each source")
    general = own.pop("", None)
    named = {**(dict.fromkeys(sources, general) if general else {}), **own}
    if not judged:
        for source in sorted(sources):
            rule_for(source, named, "--rule")
    return named


@contextmanager
def _judge(
    reward: Reward, prompts: Sequence[Prompt], torch_device: torch.device, console: Console
) -> Iterator[RuleJudge | Scorer]:
    """The built-in rules, or what the options name, tried on real rows first."""
    sources = {prompt.question.data_source for prompt in prompts}
    if not reward.rules and reward.function is None and not any_isolated(sources):
        yield RuleJudge()
        return
    with opened_scorer(reward, prompts, torch_device, console, None, OPTIONS) as scorer:
        yield scorer


def _answers(
    generator: Generator, prompts: Sequence[Prompt], n: int, sampling: Sampling, judge: Examiner, console: Console
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
