"""`lockstep eval`: measures accuracy on rows that a rule can check, on preference pairs and on step labels."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import nn

from lockstep.commands.without_recipe import (
    BY_NAME,
    NO_CONVERSATIONS,
    ConversationOptions,
    NamedColumns,
    load_generator,
    opened_scorer,
    option_images,
    read_option_questions,
    refuse_long_answers,
    refuse_options,
)
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.prompt_rows import COLUMNS, REWARD_FIELDS
from lockstep.data.sources.read import RowSet, read_rows
from lockstep.data.updates import even_groups, row_sizes
from lockstep.device.base import Device
from lockstep.device.select import explain
from lockstep.errors import Problem, Refusal
from lockstep.evaluate.validation import GROUP, answer_metrics, measure
from lockstep.methods import METHODS
from lockstep.model.load import load_config, load_policy, load_tokenizer, load_value_model
from lockstep.model.policy import Policy
from lockstep.model.resolve import model_folder
from lockstep.model.text_model import text_config
from lockstep.parallel.world import World, joined
from lockstep.preflight.row_checks import shared_and_moving
from lockstep.recipe import Recipe
from lockstep.recipe.keys_reward import Reward
from lockstep.recipe.method_checks import reference_kind
from lockstep.recipe.schema import Model
from lockstep.reward.process_model import PROCESS, read_judging
from lockstep.reward.row_rewards import RuleJudge, read_by_rewards
from lockstep.reward.rules import any_isolated, rule_for, rule_named
from lockstep.reward.scorer import Scorer
from lockstep.rollout.collect import Examiner, encode_questions, validation_keys
from lockstep.rollout.generator import Generator
from lockstep.run.console import Console
from lockstep.run.folder import refuse_unwritable
from lockstep.run.sample_log import sample_line
from lockstep.run.screen import Screen, shown
from lockstep.train.models import Models, Packing
from lockstep.types import Prompt, Rollout, Sampling

TOKENS = 8192


def rows_recipe(folder: str, data: str, rows: RowSet, dtype: str, reference: str | None) -> Recipe | None:
    """Returns a recipe whose method scores labeled rows with the model, or None if the rows are questions to answer."""
    values: dict[str, Any]
    if (Path(folder) / PROCESS).is_file():
        values = {"method": "prm", "prm": read_judging(Path(folder))}
    elif any(name.endswith("ForSequenceClassification") for name in load_config(folder).architectures or []):
        values = {"method": "rm"}
    elif not {"chosen", "rejected"} <= set(rows.columns):
        return None
    elif reference is not None:
        values = {"method": "dpo", "preference": {"beta": 1.0}}
    else:
        # Without a reference model, responses are compared by mean log-probability, because sums would favour shorter
        # responses.
        values = {"method": "cpo", "preference": {"loss": "cpo", "beta": 1.0, "average": True}}
    values |= {"model": {"path": folder, "dtype": dtype}, "data": {"train": data, "require_end": False}}
    recipe = Recipe.model_validate(values)
    if reference is not None and reference_kind(recipe) == "none":
        raise Refusal.at(
            "--reference", "applies only to preference pairs scored by a language model", "remove it", code="unused-key"
        )
    return recipe


def score_rows(
    recipe: Recipe,
    rowset: RowSet,
    *,
    rows: int | None,
    reference: str | None,
    out: Path | None,
    device: Device,
    world: World,
    console: Console,
) -> dict[str, float]:
    """Returns the validation metrics of the recipe's method, without the loss; writes per-row values to `out`."""
    method, folder = METHODS[recipe.method], recipe.model.path
    tokenizer, config = load_tokenizer(folder), load_config(folder)
    limit = getattr(text_config(config), "max_position_embeddings", None) or 2**31
    with console.task("Encoding rows", len(rowset)) as task:
        reader, data = method.reader(recipe), recipe.data
        try:
            request = RowRequest(Dataset, reader, data.train, data, tokenizer, limit)
            dataset = load_rows(request, task.advance, [rowset])
        except Refusal as refusal:
            raise _without_keys(refusal) from refusal
    for note in dataset.notes:
        console.say(note)
    items = dataset.items[:rows]
    torch_device = device.torch_device(world.local_rank)
    module = _load(recipe, folder, device, torch_device)
    standard = None if reference is None else _load(recipe, reference, device, torch_device)
    assert standard is None or isinstance(standard, Policy)
    longest = int(row_sizes(dataset.items, packed=False).max())
    tokens = max(TOKENS, 2 * longest * max(len(i.examples) for i in items))
    configs = [config, *([] if reference is None else [load_config(reference)])]
    # Pad rows instead of packing them if packed sequences would share a prompt but need different positions.
    padded = bool(shared_and_moving(dataset.items, *configs))
    packing = Packing(world, None if padded else tokens, max(1, tokens // longest // 2) if padded else None, 0)
    models = Models(module, packing, torch_device, reference=standard, longest=longest)
    metrics = measure(items, method.objective(recipe), models)
    del metrics["loss"]  # not reported, because the loss depends on settings that the user did not choose
    if out is not None:
        assert method.score_rows is not None
        lines = [line for group in even_groups(items, GROUP) for line in method.score_rows(group, models)]
        if world.main:
            out.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines), encoding="utf-8")
    return {"rows": float(len(items)), **metrics}


def _without_keys(refusal: Refusal) -> Refusal:
    """Replaces remedies that mention recipe keys, because `lockstep eval` has no recipe."""
    rename = "rename the columns of the data: `lockstep help data` lists the detected names"
    return Refusal(
        [Problem(p.where, p.why, rename if "data." in p.remedy else p.remedy, code=p.code) for p in refusal.problems]
    )


def _load(recipe: Recipe, folder: str, device: Device, torch_device: torch.device) -> nn.Module:
    settings = Model(path=folder, dtype=recipe.model.dtype)
    if METHODS[recipe.method].model == "value":
        return load_value_model(settings, folder, torch_device, device.attention, 0, key="MODEL")
    return load_policy(settings, torch_device, device.attention, seed=0)


# Maps recipe keys of rewards to the options of `lockstep eval` that set them.
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
    conversations: ConversationOptions = NO_CONVERSATIONS,
) -> dict[str, float]:
    """Evaluates a model, prints and returns the metrics. Each of `rules` has the form RULE or SOURCE=RULE."""
    refuse_options(dtype, n, temperature)
    rollout = conversations.settings()
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
        if recipe is not None and (rules or reward or conversations.any):
            options = {
                "--rule": rules,
                "--reward": reward,
                "--environment": conversations.environment,
                "--agent": conversations.agent,
            }
            raise Refusal.at(
                next((option for option, given in options.items() if given), "--tool"),
                f"{data} has labeled rows, which need no rule, reward or environment",
                "remove it",
                code="unused-key",
            )
        if recipe is not None:
            metrics = score_rows(
                recipe, rowset, rows=rows, reference=compared, out=out, device=device, world=world, console=console
            )
            if world.main:
                _show(model, data, metrics)
            return metrics
        if reference is not None:
            raise Refusal.at("--reference", f"{data} has no pairs to compare", "remove it", code="unused-key")
        rewarded = reward is not None or conversations.gives_rewards
        required = (
            REWARD_FIELDS if rules or not rewarded else read_by_rewards(Reward(function=reward), environment=True)
        )
        required |= {COLUMNS} if conversations.any else frozenset()
        tokenizer = load_tokenizer(folder)
        reader = option_images(rowset, 0, rows, folder, tokenizer, data)
        questions = read_option_questions(rowset, rows, columns, required=required, images=reader)
        named = _rules(rules, {question.data_source for question in questions}, judged=rewarded)
        prompts = encode_questions(tokenizer, questions, images=None if reader is None else folder)
        refuse_long_answers(prompts, max_new_tokens, folder)
        # With an environment, its rewards count, and rules only if an option names them.
        settings = Reward(
            rules=named,
            function=reward,
            weights={"rule": 1.0} if rules and conversations.gives_rewards else {},
        )
        torch_device = device.torch_device(world.local_rank)
        with _judge(settings, prompts, torch_device, console, conversations) as judge:
            images = reader is not None
            generator = load_generator(folder, tokenizer, dtype, device, world, console, rollout, images=images)
            try:
                sampling = Sampling(max_new_tokens, temperature, stop_ids=generator.stop_ids, seed=seed)
                given = _answers(generator, prompts, n, sampling, judge, console)
            finally:
                generator.close()
            metrics = answer_metrics(given, judge.answer_of, n)
        if world.main:
            if out is not None:
                _write(out, given)
            _show(model, data, {"questions": float(len(prompts)), **_named(metrics)})
    return metrics


def _rules(words: Sequence[str], sources: set[str], *, judged: bool) -> dict[str, str]:
    """Returns the rule of each data source. Every source needs a rule, unless a reward function scores the answers
    (`judged`)."""
    chosen: dict[str, str] = {}
    for word in words:
        source, sign, rule = word.rpartition("=")
        rule_named(rule, f"--rule {word}")
        if sign and source not in sources:
            raise Refusal.at(
                f"--rule {word}",
                f"no row has data source {source!r}",
                f"data sources: {', '.join(sorted(sources))}",
                code="unknown-source",
            )
        key = source if sign else ""
        if chosen.setdefault(key, rule) != rule:
            why = f"{chosen[key]} is already the rule {f'of {source!r}' if sign else 'of all sources'}"
            raise Refusal.at(
                f"--rule {word}",
                why,
                "give a single rule, or SOURCE=RULE for each data source",
                code="conflicting-keys",
            )
    general = chosen.pop("", None)
    named = {**(dict.fromkeys(sources, general) if general else {}), **chosen}
    if not judged:
        for source in sorted(sources):
            rule_for(source, named, "--rule")
    return named


@contextmanager
def _judge(
    reward: Reward,
    prompts: Sequence[Prompt],
    torch_device: torch.device,
    console: Console,
    conversations: ConversationOptions = NO_CONVERSATIONS,
) -> Iterator[RuleJudge | Scorer]:
    """Yields the scorer of the answers: the built-in rules, or the options' rewards (first tested on real rows)."""
    sources = {prompt.question.data_source for prompt in prompts}
    environment = conversations.gives_rewards
    if not reward.rules and reward.function is None and not environment and not any_isolated(sources):
        yield RuleJudge()
        return
    with opened_scorer(reward, prompts, torch_device, console, None, OPTIONS, conversations) as scorer:
        yield scorer


def _answers(
    generator: Generator, prompts: Sequence[Prompt], n: int, sampling: Sampling, judge: Examiner, console: Console
) -> list[Rollout]:
    keys, ranks = validation_keys(len(prompts)), generator.world.size
    with console.task("Answering", len(prompts) * n) as task:
        return generator.generate(prompts, keys, n, sampling, judge, advance=lambda done: task.advance(done * ranks))


def _named(metrics: dict[str, float]) -> dict[str, float]:
    """Returns the metrics without the `val/` prefix."""
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
