"""Checks a recipe for invalid combinations of keys, and fills in defaults that depend on other keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from lockstep.errors import Problem, conflict, needs, unfit, unused
from lockstep.recipe.algorithm_checks import algorithm_problems
from lockstep.recipe.data_checks import data_problems
from lockstep.recipe.keys_data import Data
from lockstep.recipe.lora_checks import lora_problems, with_lora_rate
from lockstep.recipe.measure import measure_problems
from lockstep.recipe.method_checks import method_problems, preference_reads, reference_kind
from lockstep.recipe.methods import OFFLINE, ONLINE, OPTIONAL_SECTIONS, sections_read
from lockstep.recipe.optim_checks import optim_problems
from lockstep.recipe.precision_checks import matmul_problems
from lockstep.recipe.registry import ENGINES, estimator_row, loss_row
from lockstep.recipe.rollout_checks import rollout_problems
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import Section


def _tensor_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of keys that do not work with tensor parallelism."""
    parallel = recipe.parallel
    if parallel.tensor_parallel == 1:
        return
    key, alone = "parallel.tensor_parallel", "or set parallel.tensor_parallel=1"
    if parallel.context_parallel > 1:
        why = (
            f"{parallel.tensor_parallel} cannot be combined with parallel.context_parallel={parallel.context_parallel}"
        )
        yield conflict(key, why, "set parallel.tensor_parallel or parallel.context_parallel to 1")
    for name in ("offload", "offload_critic"):
        if getattr(parallel, name) in ("params", "all"):
            yield unfit(f"parallel.{name}", "tensor-parallel weights cannot be offloaded", f"use optimizer, {alone}")
    for name in ("offload_reference", "offload_teacher"):
        if getattr(parallel, name):
            yield unfit(f"parallel.{name}", "tensor-parallel weights cannot be offloaded", f"remove it, {alone}")
    if recipe.tape.record:
        yield unfit(
            "tape", "a tape cannot be recorded with tensor parallelism", "record with parallel.tensor_parallel=1"
        )
    if recipe.method in ONLINE or recipe.val.questions:
        if not ENGINES[recipe.rollout.engine].divided:
            why = f"{recipe.rollout.engine} does not support tensor parallelism"
            yield unfit("rollout.engine", why, f"use native, {alone}")
        if recipe.rollout.function is not None:
            why = (
                "each tensor-parallel rank would call the function, but all ranks must generate from identical requests"
            )
            yield unfit("rollout.function", why, f"remove it, {alone}")
        if recipe.rollout.interactive or recipe.val.environment not in (None, "none") or recipe.val.agent:
            why = (
                "each tensor-parallel rank would run the environments, and the requests of all ranks must be identical"
            )
            key = "rollout.agent" if recipe.rollout.agent else "rollout.environment"
            yield unfit(key, why, f"remove it, {alone}")


DEFAULT_TOKENS = 4096
# Keys of `data` that only offline methods read, each with the remedy that an online run shows.
OFFLINE_ROWS = {
    **dict.fromkeys(
        (
            "shape",
            "messages_key",
            "response_key",
            "text_key",
            "chosen_key",
            "rejected_key",
            "margin_key",
            "responses_key",
            "scores_key",
            "steps_key",
        ),
        "name the columns as in verl's RL schema",
    ),
    **dict.fromkeys(("require_end", "turns", "train_roles"), "remove it"),
    "long_text": "remove it: data.overlong handles long prompts",
    "max_tokens": "use data.max_prompt_tokens and rollout.max_tokens",
}


def combination_problems(recipe: Recipe) -> Iterator[Problem]:
    run = recipe.run
    if run.epochs is not None and run.steps is not None:
        yield conflict("run.steps", "cannot be combined with run.epochs", "remove run.steps or run.epochs")
    yield from matmul_problems(recipe)
    yield from _tape_problems(recipe)
    yield from _batch_problems(recipe)
    yield from optim_problems(recipe)
    yield from _validation_problems(recipe)
    yield from measure_problems(recipe)
    yield from lora_problems(recipe)
    yield from _quantize_problems(recipe)
    yield from _prompt_format_problems(recipe.data)
    yield from data_problems(recipe)
    if recipe.parallel.launcher == "ray" and recipe.parallel.devices is None:
        yield Problem(
            "parallel.devices", "launcher ray needs the number of devices", "set parallel.devices", code="not-set"
        )
    yield from _offload_problems(recipe)
    yield from _balance_problems(recipe)
    yield from _tensor_problems(recipe)
    yield from _unread_sections(recipe)
    yield from (_online_problems(recipe) if recipe.method in ONLINE else _offline_problems(recipe))


def _tape_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.tape.record and recipe.model.lora is not None and recipe.model.lora.dropout:
        yield unfit(
            "tape", "a replay cannot reproduce dropout on another device", "set model.lora.dropout=0 to record a tape"
        )
    if recipe.tape.record and recipe.parallel.context_parallel > 1:
        yield unfit(
            "tape",
            f"a tape cannot be recorded with parallel.context_parallel={recipe.parallel.context_parallel}",
            "record with parallel.context_parallel=1",
        )


def _balance_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of the load-balancing loss. Computing this loss needs full micro-batches and full layers on every
    rank."""
    for key in ("context_parallel", "tensor_parallel"):
        ranks = getattr(recipe.parallel, key)
        if recipe.model.aux_loss_coef and ranks > 1:
            yield unfit(
                "model.aux_loss_coef",
                f"the load-balancing loss needs all router outputs on a rank, but parallel.{key}={ranks} splits them",
                f"set parallel.{key}=1, or model.aux_loss_coef=0",
            )


def _batch_problems(recipe: Recipe) -> Iterator[Problem]:
    data, batch = recipe.data, recipe.batch
    if batch.tokens is not None and batch.micro_batch_size is not None:
        yield conflict(
            "batch.micro_batch_size",
            "cannot be combined with batch.tokens",
            "keep only batch.tokens (packed) or only batch.micro_batch_size (padded)",
        )
    if data.max_tokens and recipe.line_tokens and data.max_tokens > recipe.line_tokens:
        context = recipe.parallel.context_parallel
        yield Problem(
            "data.max_tokens",
            f"{data.max_tokens} exceeds batch.tokens={batch.tokens}"
            + (f" on each of {context} devices" if context > 1 else "")
            + ": a row of this length does not fit into a micro-batch",
            f"raise batch.tokens to {-(-data.max_tokens // context)} or lower data.max_tokens",
            code="over-batch-tokens",
        )
    for key in ("train", "val"):
        sources = getattr(data, key)
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            path = sources[weighted.index(False)].path
            yield Problem(
                f"data.{key}",
                f"{path} has no weight, but other sources have one",
                "give a weight to every source, or to no source",
                code="wrong-count",
            )


def _validation_problems(recipe: Recipe) -> Iterator[Problem]:
    data, val = recipe.data, recipe.val
    if val.every and not (data.val or val.questions):
        yield needs("val.every", "nothing to validate on", "set data.val or val.questions")
    if val.at_start and not (data.val or val.questions):
        yield needs("val.at_start", "nothing to validate on", "set data.val or val.questions")
    if val.question_rows and not val.questions:
        yield needs("val.question_rows", "val.questions is not set", "set val.questions, or remove this key")
    if val.rules and not val.questions:
        yield needs("val.rules", "val.questions is not set", "set val.questions, or remove this key")


def _quantize_problems(recipe: Recipe) -> Iterator[Problem]:
    model, key = recipe.model, "model.quantize"
    if model.quantize is None:
        if model.quantize_exclude:
            yield needs("model.quantize_exclude", "model.quantize is not set", "set model.quantize, or remove this key")
        return
    if model.lora is None:
        yield needs(
            key,
            f"{model.quantize} weights are frozen, and all weights would be trained",
            "set model.lora.rank, for example 16, to train an adapter; or remove model.quantize",
        )
    stored = f"model.quantize stores the weights in {model.quantize}"
    if model.matmul is not None:
        yield unfit("model.matmul", f"{stored}, which are multiplied in model.dtype", "remove one of the two keys")
    if recipe.method in ONLINE and recipe.rollout.precision is not None:
        yield unfit("rollout.precision", f"{stored}, from which the engine generates", "remove one of the two keys")
    if recipe.method in ONLINE and ENGINES[recipe.rollout.engine].served:
        yield unfit(
            key,
            f"{recipe.rollout.engine} would generate from the weights of model.path, which differ from the "
            f"{model.quantize} weights of the trainer by more than rounding",
            "set rollout.engine=native, which generates from the same weights",
        )


# fmt: off
TEMPLATES = (
    "auto", "none", "chatml", "qwen", "llama3", "qwen2.5", "qwen3", "qwen3-thinking", "qwen3.5", "qwen3.5-nothink",
    "qwen3.6", "llama3.1", "deepseek-r1", "gemma", "mistral", "mistral-nemo",
    "glm4.5", "gpt-oss", "kimi-k2", "kimi-k2-thinking", "smollm3",
)
# fmt: on


def _prompt_format_problems(data: Data) -> Iterator[Problem]:
    if data.template not in TEMPLATES and not data.template.endswith(".jinja"):
        near = difflib.get_close_matches(data.template, TEMPLATES, n=1)
        yield Problem(
            "data.template",
            f"{data.template!r} is not a template",
            (f"did you mean {near[0]}? " if near else "") + f"use {', '.join(TEMPLATES)}, or the path of a .jinja file",
            code="unknown-name",
        )
    for name in data.template_arguments:
        if not name.isidentifier():
            yield Problem(
                f"data.template_arguments.{name}",
                "the name of this template argument is not a valid variable name",
                "use letters, digits and _",
                code="invalid-name",
            )
    if data.turns != "all" and data.train_roles != ["assistant"]:
        yield conflict("data.train_roles", f"data.turns={data.turns} trains assistant turns only", "set data.turns=all")
    if data.template == "none" and data.template_arguments:
        yield needs("data.template_arguments", "no chat template is used", "set data.template=auto")
    if data.prompt_format is not None and data.prompt_format.count("{}") != 1:
        yield Problem(
            "data.prompt_format",
            f"{data.prompt_format!r} must contain {{}} exactly once",
            "write {} where the prompt goes",
            code="missing-placeholder",
        )


def _offload_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields a problem for each offload key that names a model which the run does not have, and for offloaded state in
    a run that records a tape."""
    parallel = recipe.parallel
    if recipe.tape.record and {parallel.offload, parallel.offload_critic} != {"none"}:
        yield unfit(
            "parallel.offload",
            "a tape cannot record offloaded state",
            "set parallel.offload and parallel.offload_critic to none to record a tape",
        )
    critic = recipe.method in ONLINE and estimator_row(recipe.algorithm.advantage).critic
    offloads = {
        "offload_critic": (parallel.offload_critic != "none", critic, "critic"),
        "offload_reference": (parallel.offload_reference, reference_kind(recipe) in ("model", "disk"), "reference"),
        "offload_teacher": (parallel.offload_teacher, recipe.distill.teacher is not None, "teacher"),
        "offload_reward": (
            parallel.offload_reward,
            recipe.method in ONLINE and bool(recipe.reward.model or recipe.reward.process),
            "reward model",
        ),
    }
    for key, (enabled, exists, model) in offloads.items():
        if enabled and not exists:
            yield unused(f"parallel.{key}", f"the run has no separate {model}", "remove it")


def _unread_sections(recipe: Recipe) -> Iterator[Problem]:
    """Yields a problem for each key that the recipe sets although the method does not read the group of the key."""
    for section in OPTIONAL_SECTIONS:
        if section not in sections_read(recipe.method):
            for key in getattr(recipe, section).model_fields_set:
                yield unused(f"{section}.{key}", f"method {recipe.method} does not read this key", "remove it")


def _offline_problems(recipe: Recipe) -> Iterator[Problem]:
    row = OFFLINE[recipe.method]
    for key in ("prompts", "prompts_per_update"):
        if key in recipe.batch.model_fields_set:
            yield unused(f"batch.{key}", f"method {recipe.method} trains rows", "use batch.rows_per_update")
    if recipe.data.max_prompt_tokens is not None:
        yield unused("data.max_prompt_tokens", f"method {recipe.method} trains rows", "use data.max_tokens")
    yield from _sampled_validation_problems(recipe)
    for key in ("rollout.environment", "rollout.tools", "rollout.agent", "val.environment", "val.agent"):
        section, _, name = key.partition(".")
        if getattr(getattr(recipe, section), name):
            why = f"environments give rewards, and method {recipe.method} has none"
            yield unused(key, why, "remove it, or use an online method")
    if row.judges and recipe.val.questions:
        yield unused(
            "val.questions", f"a model of method {recipe.method} scores responses and does not generate", "use data.val"
        )
    yield from _unread_row_keys(recipe)
    if "preference" in sections_read(recipe.method):
        yield from _preference_problems(recipe)
    yield from method_problems(recipe)


def _unread_row_keys(recipe: Recipe) -> Iterator[Problem]:
    every = {key for row in OFFLINE.values() for key in row.columns}
    lists = {"data.train": recipe.data.train, "data.val": recipe.data.val}
    groups: dict[str, Section] = {
        f"{name}.{i}": source for name, some in lists.items() for i, source in enumerate(some)
    }
    for where, group in {"data": recipe.data, **groups}.items():
        fields = type(group).model_fields
        for key in sorted(every - set(OFFLINE[recipe.method].columns)):
            if key in fields and getattr(group, key) != fields[key].default:
                yield unused(f"{where}.{key}", f"method {recipe.method} has no such column", "remove it")


def _preference_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields a problem for each key of `preference` that the loss does not read and that differs from its default. The
    check compares with defaults, because a recipe from a run folder sets every key."""
    settings, fields = recipe.preference, type(recipe.preference).model_fields
    chosen = OFFLINE[recipe.method].preference or f"loss {settings.loss}"
    for key in fields:
        if key not in preference_reads(recipe) and getattr(settings, key) != fields[key].default:
            yield unused(f"preference.{key}", f"{chosen} does not read this key", "remove it")
    if OFFLINE[recipe.method].preference is None:
        if settings.loss == "exo_pair" and not settings.label_smoothing:
            yield Problem(
                "preference.label_smoothing",
                "loss exo_pair takes the logarithm of label_smoothing, which must not be 0",
                "set preference.label_smoothing, for example to 0.001",
                code="out-of-range",
            )
        reads_alpha = "alpha" in preference_reads(recipe)
        if reads_alpha and settings.divergence != "alpha" and settings.alpha != fields["alpha"].default:
            yield unused(
                "preference.alpha", f"divergence {settings.divergence} does not read preference.alpha", "remove it"
            )


def _sampled_validation_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.val.n > 1 and not recipe.val.temperature:
        yield Problem(
            "val.n",
            f"the {recipe.val.n} greedy answers to a question would all be equal",
            "set val.temperature",
            code="identical-samples",
        )
    for key, off in (("top_p", 1.0), ("top_k", 0)):
        if getattr(recipe.val, key) != off and not recipe.val.temperature:
            yield unused(
                f"val.{key}",
                "greedy decoding does not sample, so this key has no effect",
                "set val.temperature, or remove this key",
            )


def _online_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from rollout_problems(recipe)
    if recipe.data.val:
        yield unused("data.val", "online methods validate only on questions, not on rows", "use val.questions")
    if recipe.val.rules:
        yield unused(
            "val.rules", "an online run scores validation answers with the rewards of the run", "use reward.rules"
        )
    if recipe.data.overlong == "truncate_right":
        yield unfit(
            "data.overlong",
            "a prompt that is truncated at its end may lose the question",
            "use truncate_left, drop or error",
        )
    yield from algorithm_problems(recipe)
    yield from _offline_row_problems(recipe)
    yield from _sampled_validation_problems(recipe)


def _offline_row_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields a problem for each key that only offline methods read and that differs from its default. The check
    compares with defaults, because a recipe from a run folder sets every key."""
    sources = {f"data.train.{i}": source for i, source in enumerate(recipe.data.train)}
    groups: dict[str, Section] = {"data": recipe.data, **sources}
    for where, group in groups.items():
        fields = type(group).model_fields
        for key, remedy in OFFLINE_ROWS.items():
            if key in fields and getattr(group, key) != fields[key].default:
                yield unused(f"{where}.{key}", f"method {recipe.method} reads prompts in verl's RL schema", remedy)


def with_derived_defaults(recipe: Recipe) -> Recipe:
    """Fills in defaults that depend on other keys, so that the stored recipe is complete."""
    run, batch, model = recipe.run, recipe.batch, recipe.model
    if run.epochs is None and run.steps is None:
        run = run.model_copy(update={"epochs": 1})
    if batch.tokens is None and batch.micro_batch_size is None:
        row_tokens = (recipe.data.max_tokens or 0) * (
            2 if recipe.method in OFFLINE and OFFLINE[recipe.method].compares else 1
        )
        batch = batch.model_copy(
            update={"tokens": max(DEFAULT_TOKENS, -(-row_tokens // recipe.parallel.context_parallel))}
        )
    if recipe.method in ONLINE and batch.prompts_per_update is None:
        batch = batch.model_copy(update={"prompts_per_update": batch.prompts})
    if model.master_weights is None:
        model = model.model_copy(update={"master_weights": model.dtype != "fp32"})
    if model.lora and model.lora.alpha is None and model.lora.rank is not None:
        model = model.model_copy(update={"lora": model.lora.model_copy(update={"alpha": 2.0 * model.lora.rank})})
    checkpoint = recipe.checkpoint
    if checkpoint.best is not None and not checkpoint.keep_best:
        checkpoint = checkpoint.model_copy(update={"keep_best": 1})
    algorithm = recipe.algorithm
    if recipe.method in ONLINE and (chosen := _derived_correction(recipe)):
        correction = algorithm.rollout_correction.model_copy(update=chosen)
        recipe = recipe.model_copy(
            update={"algorithm": algorithm.model_copy(update={"rollout_correction": correction})}
        )
    optim = with_lora_rate(recipe.optim, model.lora)
    return recipe.model_copy(
        update={"run": run, "batch": batch, "model": model, "checkpoint": checkpoint, "optim": optim}
    )


def _derived_correction(recipe: Recipe) -> dict[str, bool | str]:
    """Returns the default rollout correction for stale responses, for serving engines and for low precision.

    For stale responses, the loss clips against the policy that generated them (`bypass`). An importance weight alone
    does not keep the policy near the policy that generated the responses (measured in docs/asynchronous.md), so the
    weight is the default only for losses that do not clip. A serving engine has the current weights, so its log-probs
    differ only by rounding and an importance weight is sufficient. With `rollout.precision`, they differ by the
    rounding of quantised weights, and an importance weight corrects for it.
    """
    stale, correction = bool(recipe.rollout.max_staleness), recipe.algorithm.rollout_correction
    low_precision = recipe.rollout.low_precision is not None
    if not (stale or low_precision or ENGINES[recipe.rollout.engine].served) or correction.bypass:
        return {}
    given = correction.model_fields_set
    if (
        stale
        and loss_row(recipe.algorithm.loss).trust_region
        and not given & {"bypass", "weight", "cap", "floor", "normalize"}
    ):
        return {"bypass": True}
    return {} if "weight" in given else {"weight": "token"}
