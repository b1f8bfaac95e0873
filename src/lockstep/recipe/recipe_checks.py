"""Combinations of keys that cannot work, and defaults that depend on other keys."""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from lockstep.errors import Problem
from lockstep.functions import is_function_path
from lockstep.recipe.keys_data import Data
from lockstep.recipe.measure import measure_problems
from lockstep.recipe.method_checks import method_problems, preference_reads, reference_kind
from lockstep.recipe.methods import OFFLINE, ONLINE, OPTIONAL_SECTIONS, sections_read
from lockstep.recipe.registry import ENGINES, estimator_row, loss_row
from lockstep.recipe.rollout_checks import rollout_problems
from lockstep.recipe.schema import Recipe
from lockstep.recipe.section import Section

# What does not go together with tensor parallelism.


def tensor_problems(recipe: Recipe) -> Iterator[Problem]:
    parallel = recipe.parallel
    if parallel.tensor == 1:
        return
    key, alone = "parallel.tensor", "or set parallel.tensor=1"
    if parallel.context > 1:
        why = f"{parallel.tensor} is set together with parallel.context={parallel.context}"
        yield Problem(key, why, "set one of the two to 1")
    for name in ("offload", "offload_critic"):
        if getattr(parallel, name) in ("params", "all"):
            yield Problem(f"parallel.{name}", "divided weights stay on the device", f"use optimizer, {alone}")
    for name in ("offload_reference", "offload_teacher"):
        if getattr(parallel, name):
            yield Problem(f"parallel.{name}", "divided weights stay on the device", f"remove it, {alone}")
    if recipe.tape.record:
        yield Problem(
            "tape", "holds what one device computed, and modules are divided", "record with parallel.tensor=1"
        )
    if recipe.method in ONLINE or recipe.val.questions:
        if not ENGINES[recipe.rollout.engine].divided:
            why = f"{recipe.rollout.engine} generates from a whole model"
            yield Problem("rollout.engine", why, f"use native, {alone}")
        if recipe.rollout.function is not None:
            why = "each of the processes that divide a model would run it, and they must ask for the same"
            yield Problem("rollout.function", why, f"remove it, {alone}")


# Combinations of keys that cannot work, and the defaults that depend on other keys.

DEFAULT_TOKENS = 4096
# What every reward function gets by name.
REWARD_CALL = {"prompt", "data_source", "solution_str", "ground_truth", "extra_info"}
# Keys of the rows that only offline methods read, and what an online method has instead.
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
        "name the columns as in the RL schema",
    ),
    "require_end": "remove it",
    "max_tokens": "use data.max_prompt_tokens and rollout.max_tokens",
}


def combination_problems(recipe: Recipe) -> Iterator[Problem]:
    run = recipe.run
    if run.epochs is not None and run.steps is not None:
        yield Problem("run.steps", "set together with run.epochs; only one can end the run", "remove one of the two")
    yield from _tape_problems(recipe)
    yield from _batch_problems(recipe)
    yield from _optim_problems(recipe)
    yield from _validation_problems(recipe)
    yield from measure_problems(recipe)
    yield from _adapter_problems(recipe)
    yield from _prompt_format_problems(recipe.data)
    if recipe.parallel.launcher == "ray" and recipe.parallel.devices is None:
        yield Problem("parallel.devices", "a cluster may have any number of devices", "say how many the run takes")
    yield from _offload_problems(recipe)
    yield from _balance_problems(recipe)
    yield from tensor_problems(recipe)
    yield from _unread_sections(recipe)
    yield from (_online_problems(recipe) if recipe.method in ONLINE else _offline_problems(recipe))


def _tape_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.tape.record and recipe.model.lora is not None and recipe.model.lora.dropout:
        yield Problem(
            "tape", "a replay cannot draw the same dropout on another device", "set model.lora.dropout=0 for a tape"
        )
    if recipe.tape.record and recipe.parallel.context > 1:
        yield Problem(
            "tape",
            f"holds micro-batches that one device ran, and parallel.context={recipe.parallel.context} divides them",
            "record with parallel.context=1",
        )


def _balance_problems(recipe: Recipe) -> Iterator[Problem]:
    """The routers' choices are counted where whole micro-batches and whole layers are."""
    for key in ("context", "tensor"):
        ranks = getattr(recipe.parallel, key)
        if recipe.model.aux_loss_coef and ranks > 1:
            yield Problem(
                "model.aux_loss_coef",
                f"needs the routers' choices for all tokens, and parallel.{key}={ranks} divides them",
                f"set parallel.{key}=1, or model.aux_loss_coef=0",
            )


def _batch_problems(recipe: Recipe) -> Iterator[Problem]:
    data, batch = recipe.data, recipe.batch
    if batch.tokens is not None and batch.rows is not None:
        yield Problem("batch.rows", "set together with batch.tokens", "keep tokens (packed) or rows (padded), not both")
    if data.max_tokens and recipe.line_tokens and data.max_tokens > recipe.line_tokens:
        context = recipe.parallel.context
        yield Problem(
            "data.max_tokens",
            f"{data.max_tokens} is more than batch.tokens={batch.tokens}"
            + (f" on each of {context} devices" if context > 1 else "")
            + ": such a row fits no micro-batch",
            f"raise batch.tokens to {-(-data.max_tokens // context)} or lower data.max_tokens",
        )
    for key in ("train", "val"):
        sources = getattr(data, key)
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            bare = sources[weighted.index(False)].path
            yield Problem(f"data.{key}", f"{bare} has no weight but others have", "give every source a weight, or none")


def _optim_problems(recipe: Recipe) -> Iterator[Problem]:
    run, optim = recipe.run, recipe.optim
    if isinstance(optim.warmup, float) and optim.warmup >= 1 and not optim.warmup.is_integer():
        yield Problem("optim.warmup", f"{optim.warmup} is neither a share below 1 nor a whole number of steps")
    if optim.warmup >= 1 and run.steps is not None and optim.warmup >= run.steps:
        yield Problem("optim.warmup", f"{optim.warmup} warm-up steps of {run.steps} steps leave nothing to train")
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Problem("optim.betas", f"{optim.betas} are not in [0, 1)")


def _validation_problems(recipe: Recipe) -> Iterator[Problem]:
    data, val = recipe.data, recipe.val
    if val.every and not (data.val or val.questions):
        yield Problem("val.every", "nothing to validate on", "set data.val or val.questions")
    if val.at_start and not (data.val or val.questions):
        yield Problem("val.at_start", "nothing to validate on", "set data.val or val.questions")
    if val.question_rows and not val.questions:
        yield Problem("val.question_rows", "val.questions is not set", "set val.questions, or remove it")
    if val.rules and not val.questions:
        yield Problem("val.rules", "val.questions is not set", "set val.questions, or remove it")


def _adapter_problems(recipe: Recipe) -> Iterator[Problem]:
    lora = recipe.model.lora
    if lora and lora.adapter is None and lora.rank is None:
        yield Problem("model.lora.rank", "must be set", "8, say; or name an adapter to start from: model.lora.adapter")
    if lora and lora.adapter is not None:
        for key in ("dropout", "targets", "exclude"):
            if getattr(lora, key) != type(lora).model_fields[key].default:
                yield Problem(f"model.lora.{key}", "the adapter that training starts from says it", "remove it")
        if recipe.method == "rm":
            yield Problem("model.lora.adapter", "a reward model's decoder gets an adapter of its own", "remove it")
    if lora and lora.targets == []:
        yield Problem("model.lora.targets", "is empty: nothing would be trained", "use all-linear")


TEMPLATES = ("auto", "none", "chatml", "llama3", "qwen")


def _prompt_format_problems(data: Data) -> Iterator[Problem]:
    if data.template not in TEMPLATES and not data.template.endswith(".jinja"):
        near = difflib.get_close_matches(data.template, TEMPLATES, n=1)
        yield Problem(
            "data.template",
            f"{data.template!r} is no template",
            (f"did you mean {near[0]}? " if near else "") + f"{', '.join(TEMPLATES)}, or the path of a .jinja file",
        )
    for name in data.template_arguments:
        if not name.isidentifier():
            yield Problem(f"data.template_arguments.{name}", "is no name that a template could read", "letters and _")
    if data.template == "none" and data.template_arguments:
        yield Problem("data.template_arguments", "no chat template is used", "set data.template=auto")
    if data.prompt_format is not None and data.prompt_format.count("{}") != 1:
        yield Problem("data.prompt_format", f"{data.prompt_format!r} has no one place for the prompt", "write {} once")


def _offload_problems(recipe: Recipe) -> Iterator[Problem]:
    """What is to live on the host must be there, and a tape looks into the optimizer on the device."""
    parallel = recipe.parallel
    if recipe.tape.record and {parallel.offload, parallel.offload_critic} != {"none"}:
        yield Problem("parallel.offload", "a tape cannot be recorded of state on the host", "set it to none for a tape")
    critic = recipe.method in ONLINE and estimator_row(recipe.algorithm.advantage).critic
    there = {
        "offload_critic": (parallel.offload_critic != "none", critic, "critic"),
        "offload_reference": (parallel.offload_reference, reference_kind(recipe) in ("model", "disk"), "reference"),
        "offload_teacher": (parallel.offload_teacher, recipe.distill.teacher is not None, "teacher"),
        "offload_reward": (
            parallel.offload_reward,
            recipe.method in ONLINE and bool(recipe.reward.model or recipe.reward.process),
            "reward model",
        ),
    }
    for key, (asked, found, what) in there.items():
        if asked and not found:
            yield Problem(f"parallel.{key}", f"the run has no {what} of its own", "remove it")


def _unread_sections(recipe: Recipe) -> Iterator[Problem]:
    """Keys that the method would read past in silence."""
    for section in OPTIONAL_SECTIONS:
        if section not in sections_read(recipe.method):
            for key in getattr(recipe, section).model_fields_set:
                yield Problem(f"{section}.{key}", f"method {recipe.method} does not read it", "remove it")


def _offline_problems(recipe: Recipe) -> Iterator[Problem]:
    row = OFFLINE[recipe.method]
    for key in ("prompts", "prompts_per_update"):
        if key in recipe.batch.model_fields_set:
            yield Problem(f"batch.{key}", f"method {recipe.method} trains rows", "use batch.rows_per_update")
    if recipe.data.max_prompt_tokens is not None:
        yield Problem("data.max_prompt_tokens", f"method {recipe.method} trains rows", "use data.max_tokens")
    yield from _sampled_validation_problems(recipe)
    if row.judges and recipe.val.questions:
        yield Problem("val.questions", f"a model of method {recipe.method} judges, it does not answer", "use data.val")
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
        known = type(group).model_fields
        for key in sorted(every - set(OFFLINE[recipe.method].columns)):
            if key in known and getattr(group, key) != known[key].default:
                yield Problem(f"{where}.{key}", f"method {recipe.method} has no such column", "remove it")


def _preference_problems(recipe: Recipe) -> Iterator[Problem]:
    """Values are compared, since a stored recipe spells out every default."""
    settings, known = recipe.preference, type(recipe.preference).model_fields
    chosen = OFFLINE[recipe.method].preference or f"loss {settings.loss}"
    for key in known:
        if key not in preference_reads(recipe) and getattr(settings, key) != known[key].default:
            yield Problem(f"preference.{key}", f"{chosen} does not read it", "remove it")
    if OFFLINE[recipe.method].preference is None:
        if settings.loss == "exo_pair" and not settings.label_smoothing:
            yield Problem("preference.label_smoothing", "exo_pair takes the logarithm of it", "set it, to 0.001 say")
        reads_alpha = "alpha" in preference_reads(recipe)
        if reads_alpha and settings.divergence != "alpha" and settings.alpha != known["alpha"].default:
            yield Problem("preference.alpha", f"divergence {settings.divergence} does not read it", "remove it")


def _sampled_validation_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.val.n > 1 and not recipe.val.temperature:
        yield Problem("val.n", f"{recipe.val.n} greedy answers would all be the same", "set val.temperature")
    for key, off in (("top_p", 1.0), ("top_k", 0)):
        if getattr(recipe.val, key) != off and not recipe.val.temperature:
            yield Problem(f"val.{key}", "a greedy answer draws from nothing", "set val.temperature, or remove it")


def _online_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from rollout_problems(recipe)
    if recipe.data.val:
        yield Problem("data.val", "online methods validate on questions", "use val.questions")
    if recipe.val.rules:
        yield Problem("val.rules", "an online run judges answers by its own rewards", "use reward.rules")
    if recipe.data.overlong == "truncate_right":
        yield Problem("data.overlong", "a prompt cut at its end asks nothing", "use truncate_left, drop or error")
    yield from _algorithm_problems(recipe)
    yield from _offline_row_problems(recipe)
    yield from _sampled_validation_problems(recipe)


def _algorithm_problems(recipe: Recipe) -> Iterator[Problem]:
    """Settings of the algorithm that contradict each other, or that nothing would read."""
    batch, algorithm, kl = recipe.batch, recipe.algorithm, recipe.algorithm.kl
    needs, per_update = estimator_row(algorithm.advantage), batch.prompts_per_update or batch.prompts
    if recipe.method == "on_policy_distill" and kl.reference is None:
        yield Problem("algorithm.kl.reference", "must be set: it is the teacher", "name the teacher's folder")
    if not loss_row(algorithm.loss).ratio and (per_update < batch.prompts or algorithm.epochs > 1):
        yield Problem(
            "batch.prompts_per_update" if per_update < batch.prompts else "algorithm.epochs",
            f"loss {algorithm.loss} has no ratio of new to old probability: a second update of a step would take "
            "responses of a policy that has moved on for its own",
            "one update a step (lower batch.prompts instead), or a loss with a ratio: algorithm.loss=clip",
        )
    if kl.target is not None and kl.where == "none":
        yield Problem("algorithm.kl.target", "no divergence is used", "set algorithm.kl.where to loss or reward")
    if kl.reward_coefficient and kl.where != "loss":
        yield Problem(
            "algorithm.kl.reward_coefficient",
            "is for a divergence besides the one in the loss",
            "set algorithm.kl.where=loss",
        )
    between = algorithm.dynamic_sampling.between
    if between and (between[0] >= between[1] or algorithm.dynamic_sampling.rounds < 2):
        yield Problem(
            "algorithm.dynamic_sampling.between",
            f"{between} replaces nothing, or everything",
            "the lower one first, and rounds over 1",
        )
    if kl.where == "reward" and kl.estimator.endswith("+"):
        yield Problem("algorithm.kl.estimator", "a reward has no gradient to pass through", "drop the +")
    if kl.weighted and not (kl.where == "loss" and kl.estimator.endswith("+")):
        yield Problem(
            "algorithm.kl.weighted",
            "weighs the gradient of an estimator with + in the loss",
            "set algorithm.kl.where=loss and algorithm.kl.estimator=k3+, or remove it",
        )
    yield from _correction_problems(recipe)
    yield from _gdpo_problems(recipe)
    if algorithm.dynamic_sampling.metric and algorithm.dynamic_sampling.rounds < 2:
        yield Problem("algorithm.dynamic_sampling.metric", "nothing is replaced in one round", "set rounds over 1")
    models, weights = recipe.reward.model, recipe.reward.model_weights
    if isinstance(models, list) and not models:
        yield Problem("reward.model", "is an empty list", "name a folder, or remove it")
    if weights and (not isinstance(models, list) or len(models) != len(weights)):
        yield Problem("reward.model_weights", f"{len(weights)} weights are not one for each of reward.model", "as many")
    if recipe.reward.arguments and recipe.reward.function is None:
        yield Problem("reward.arguments", "there is no reward.function to give them to", "set it, or remove them")
    for name in recipe.reward.arguments.keys() & REWARD_CALL:
        yield Problem(f"reward.arguments.{name}", "every reward function gets it already", "choose another name")
    if recipe.reward.clip and recipe.reward.clip[0] >= recipe.reward.clip[1]:
        yield Problem("reward.clip", f"{recipe.reward.clip} leaves one score for all", "write the lower bound first")
    if algorithm.overlong.buffer > recipe.rollout.max_tokens:
        yield Problem("algorithm.overlong.buffer", "is longer than rollout.max_tokens")
    if recipe.critic.model_fields_set and not needs.critic:
        yield Problem("critic", f"advantage {algorithm.advantage} has no critic", "use method ppo, or remove the keys")
    elif recipe.run.steps is not None and recipe.critic.warmup >= recipe.run.steps:
        yield Problem(
            "critic.warmup",
            f"{recipe.critic.warmup} steps for the critic alone, of {recipe.run.steps}, leave none to the policy",
            "lower it, or raise run.steps",
        )
    if algorithm.dynamic_sampling.rounds > 1 and not (needs.groups or is_function_path(algorithm.advantage)):
        yield Problem("algorithm.dynamic_sampling.rounds", "looks at the rewards of a group", "use a group method")


def _correction_problems(recipe: Recipe) -> Iterator[Problem]:
    """Rollout correction that counts twice, or not at all."""
    algorithm, settings = recipe.algorithm, recipe.algorithm.correction
    if settings.low > settings.high:
        yield Problem("algorithm.correction.low", "is over algorithm.correction.high")
    if settings.cap is not None and settings.floor > settings.cap:
        yield Problem("algorithm.correction.floor", "is over algorithm.correction.cap")
    for number, band in enumerate(settings.reject):
        if band.low is not None and band.low > band.high:
            yield Problem(f"algorithm.correction.reject.{number}.low", "is over its high")
    if settings.rejected != "left_out" and settings.mask == "none" and not settings.reject:
        yield Problem("algorithm.correction.rejected", "nothing is rejected", "set mask or reject, or remove it")
    if settings.bypass and settings.weight != "none":
        yield Problem(
            "algorithm.correction.weight",
            "with bypass the ratio of the loss is from the engine already, and the weight would count it twice",
            "remove one of them",
        )
    if settings.bypass and not loss_row(algorithm.loss).ratio:
        yield Problem(
            "algorithm.correction.bypass", f"loss {algorithm.loss} has no ratio of new to old", "use loss importance"
        )


def _gdpo_problems(recipe: Recipe) -> Iterator[Problem]:
    """What changes the score and none of the rewards that are compared one by one."""
    algorithm = recipe.algorithm
    if not estimator_row(algorithm.advantage).parts:
        if algorithm.gdpo_rewards:
            yield Problem("algorithm.gdpo_rewards", f"advantage {algorithm.advantage} does not read it", "remove it")
        return
    passed_over = {
        "algorithm.kl.where": algorithm.kl.in_reward(),
        "reward.clip": recipe.reward.clip is not None,
        "algorithm.overlong.cut": algorithm.overlong.cut is not None,
    }
    for key, on in passed_over.items():
        if on:
            remedy = "set it to loss or none" if key.endswith("where") else "remove it"
            yield Problem(key, f"{algorithm.advantage} compares rewards one by one, and would pass over it", remedy)


def _offline_row_problems(recipe: Recipe) -> Iterator[Problem]:
    """Keys that would be read past in silence. Values are compared, since a stored recipe spells out every default."""
    sources = {f"data.train.{i}": source for i, source in enumerate(recipe.data.train)}
    groups: dict[str, Section] = {"data": recipe.data, **sources}
    for where, group in groups.items():
        known = type(group).model_fields
        for key, remedy in OFFLINE_ROWS.items():
            if key in known and getattr(group, key) != known[key].default:
                yield Problem(f"{where}.{key}", f"method {recipe.method} reads prompts of the RL schema", remedy)


def with_derived_defaults(recipe: Recipe) -> Recipe:
    """Fill in what depends on other keys, so that the stored recipe says everything."""
    run, batch, model = recipe.run, recipe.batch, recipe.model
    if run.epochs is None and run.steps is None:
        run = run.model_copy(update={"epochs": 1})
    if batch.tokens is None and batch.rows is None:
        together = (recipe.data.max_tokens or 0) * (
            2 if recipe.method in OFFLINE and OFFLINE[recipe.method].compares else 1
        )
        batch = batch.model_copy(update={"tokens": max(DEFAULT_TOKENS, -(-together // recipe.parallel.context))})
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
        correction = algorithm.correction.model_copy(update=chosen)
        recipe = recipe.model_copy(update={"algorithm": algorithm.model_copy(update={"correction": correction})})
    return recipe.model_copy(update={"run": run, "batch": batch, "model": model, "checkpoint": checkpoint})


def _derived_correction(recipe: Recipe) -> dict[str, bool | str]:
    """Where other weights, or another program, drew what is trained, and the recipe does not say what follows.

    Stale responses: the clip of the loss is held against the policy that drew them. A weight alone lets the policy run
    away from it (docs/online.md has the numbers), so it is the choice only where the loss holds nothing. A serving
    engine has the weights that are trained: there the difference is one of rounding, and the weight is right.
    """
    stale, correction = bool(recipe.rollout.max_staleness), recipe.algorithm.correction
    if not (stale or ENGINES[recipe.rollout.engine].served) or correction.bypass:
        return {}
    said = correction.model_fields_set
    if stale and loss_row(recipe.algorithm.loss).holds and not said & {"bypass", "weight", "cap", "floor", "normalize"}:
        return {"bypass": True}
    return {} if "weight" in said else {"weight": "token"}
