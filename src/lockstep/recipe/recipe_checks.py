"""Invalid combinations of keys, and defaults that depend on other keys."""

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


def _tensor_problems(recipe: Recipe) -> Iterator[Problem]:
    """Keys that do not work with tensor parallelism."""
    parallel = recipe.parallel
    if parallel.tensor_parallel == 1:
        return
    key, alone = "parallel.tensor_parallel", "or set parallel.tensor_parallel=1"
    if parallel.context_parallel > 1:
        why = (
            f"{parallel.tensor_parallel} cannot be combined with parallel.context_parallel={parallel.context_parallel}"
        )
        yield Problem(key, why, "set one of the two to 1")
    for name in ("offload", "offload_critic"):
        if getattr(parallel, name) in ("params", "all"):
            yield Problem(f"parallel.{name}", "tensor-parallel weights cannot be offloaded", f"use optimizer, {alone}")
    for name in ("offload_reference", "offload_teacher"):
        if getattr(parallel, name):
            yield Problem(f"parallel.{name}", "tensor-parallel weights cannot be offloaded", f"remove it, {alone}")
    if recipe.tape.record:
        yield Problem("tape", "cannot be recorded with tensor parallelism", "record with parallel.tensor_parallel=1")
    if recipe.method in ONLINE or recipe.val.questions:
        if not ENGINES[recipe.rollout.engine].divided:
            why = f"{recipe.rollout.engine} does not support tensor parallelism"
            yield Problem("rollout.engine", why, f"use native, {alone}")
        if recipe.rollout.function is not None:
            why = "each tensor-parallel rank would run it, and their requests must be identical"
            yield Problem("rollout.function", why, f"remove it, {alone}")


DEFAULT_TOKENS = 4096
# Keyword arguments that every reward function gets.
REWARD_CALL = {"prompt", "data_source", "solution_str", "ground_truth", "extra_info"}
# Data keys that only offline methods read, and the remedy for an online method.
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
        yield Problem("run.steps", "cannot be combined with run.epochs", "remove one of the two")
    yield from _tape_problems(recipe)
    yield from _batch_problems(recipe)
    yield from _optim_problems(recipe)
    yield from _validation_problems(recipe)
    yield from measure_problems(recipe)
    yield from _adapter_problems(recipe)
    yield from _prompt_format_problems(recipe.data)
    if recipe.parallel.launcher == "ray" and recipe.parallel.devices is None:
        yield Problem("parallel.devices", "must be set with launcher ray", "set the number of devices of the run")
    yield from _offload_problems(recipe)
    yield from _balance_problems(recipe)
    yield from _tensor_problems(recipe)
    yield from _unread_sections(recipe)
    yield from (_online_problems(recipe) if recipe.method in ONLINE else _offline_problems(recipe))


def _tape_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.tape.record and recipe.model.lora is not None and recipe.model.lora.dropout:
        yield Problem(
            "tape", "a replay cannot reproduce dropout on another device", "set model.lora.dropout=0 for a tape"
        )
    if recipe.tape.record and recipe.parallel.context_parallel > 1:
        yield Problem(
            "tape",
            f"cannot be recorded with parallel.context_parallel={recipe.parallel.context_parallel}",
            "record with parallel.context_parallel=1",
        )


def _balance_problems(recipe: Recipe) -> Iterator[Problem]:
    """Load-balancing losses without full micro-batches and full layers on one rank."""
    for key in ("context_parallel", "tensor_parallel"):
        ranks = getattr(recipe.parallel, key)
        if recipe.model.aux_loss_coef and ranks > 1:
            yield Problem(
                "model.aux_loss_coef",
                f"needs the router outputs of all tokens, and parallel.{key}={ranks} splits them",
                f"set parallel.{key}=1, or model.aux_loss_coef=0",
            )


def _batch_problems(recipe: Recipe) -> Iterator[Problem]:
    data, batch = recipe.data, recipe.batch
    if batch.tokens is not None and batch.micro_batch_size is not None:
        yield Problem(
            "batch.micro_batch_size",
            "cannot be combined with batch.tokens",
            "keep tokens (packed) or micro_batch_size (padded)",
        )
    if data.max_tokens and recipe.line_tokens and data.max_tokens > recipe.line_tokens:
        context = recipe.parallel.context_parallel
        yield Problem(
            "data.max_tokens",
            f"{data.max_tokens} exceeds batch.tokens={batch.tokens}"
            + (f" on each of {context} devices" if context > 1 else "")
            + ": such a row does not fit into a micro-batch",
            f"raise batch.tokens to {-(-data.max_tokens // context)} or lower data.max_tokens",
        )
    for key in ("train", "val"):
        sources = getattr(data, key)
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            path = sources[weighted.index(False)].path
            yield Problem(f"data.{key}", f"{path} has no weight but others have", "give every source a weight, or none")


def _optim_problems(recipe: Recipe) -> Iterator[Problem]:
    run, optim = recipe.run, recipe.optim
    if isinstance(optim.warmup, float) and optim.warmup >= 1 and not optim.warmup.is_integer():
        yield Problem("optim.warmup", f"{optim.warmup} is neither a fraction below 1 nor an integer number of steps")
    if optim.warmup >= 1 and run.steps is not None and optim.warmup >= run.steps:
        yield Problem("optim.warmup", f"{optim.warmup} warm-up steps leave no step of {run.steps} to train")
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Problem("optim.betas", f"{optim.betas} must be in [0, 1)")


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
        yield Problem(
            "model.lora.rank", "must be set", "for example 8; or set model.lora.adapter to start from an adapter"
        )
    if lora and lora.adapter is not None:
        for key in ("dropout", "targets", "exclude"):
            if getattr(lora, key) != type(lora).model_fields[key].default:
                yield Problem(f"model.lora.{key}", "model.lora.adapter sets it", "remove it")
        if recipe.method == "rm":
            yield Problem("model.lora.adapter", "a reward model trains a new adapter", "remove it")
    if lora and lora.targets == []:
        yield Problem("model.lora.targets", "must not be empty: nothing would be trained", "use all-linear")


TEMPLATES = ("auto", "none", "chatml", "llama3", "qwen")


def _prompt_format_problems(data: Data) -> Iterator[Problem]:
    if data.template not in TEMPLATES and not data.template.endswith(".jinja"):
        near = difflib.get_close_matches(data.template, TEMPLATES, n=1)
        yield Problem(
            "data.template",
            f"{data.template!r} is not a template",
            (f"did you mean {near[0]}? " if near else "") + f"{', '.join(TEMPLATES)}, or the path of a .jinja file",
        )
    for name in data.template_arguments:
        if not name.isidentifier():
            yield Problem(
                f"data.template_arguments.{name}", "is not a valid variable name", "use letters, digits and _"
            )
    if data.template == "none" and data.template_arguments:
        yield Problem("data.template_arguments", "no chat template is used", "set data.template=auto")
    if data.prompt_format is not None and data.prompt_format.count("{}") != 1:
        yield Problem(
            "data.prompt_format",
            f"{data.prompt_format!r} must contain {{}} exactly once",
            "write {} where the prompt goes",
        )


def _offload_problems(recipe: Recipe) -> Iterator[Problem]:
    """Offload keys without the model that they name, or with a tape, which reads the optimizer on the device."""
    parallel = recipe.parallel
    if recipe.tape.record and {parallel.offload, parallel.offload_critic} != {"none"}:
        yield Problem("parallel.offload", "a tape cannot record offloaded state", "set it to none for a tape")
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
            yield Problem(f"parallel.{key}", f"the run has no separate {model}", "remove it")


def _unread_sections(recipe: Recipe) -> Iterator[Problem]:
    """Keys that the method would silently ignore."""
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
        yield Problem(
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
                yield Problem(f"{where}.{key}", f"method {recipe.method} has no such column", "remove it")


def _preference_problems(recipe: Recipe) -> Iterator[Problem]:
    """Preference keys that the loss does not read. Values are compared: a stored recipe contains all defaults."""
    settings, fields = recipe.preference, type(recipe.preference).model_fields
    chosen = OFFLINE[recipe.method].preference or f"loss {settings.loss}"
    for key in fields:
        if key not in preference_reads(recipe) and getattr(settings, key) != fields[key].default:
            yield Problem(f"preference.{key}", f"{chosen} does not read it", "remove it")
    if OFFLINE[recipe.method].preference is None:
        if settings.loss == "exo_pair" and not settings.label_smoothing:
            yield Problem(
                "preference.label_smoothing",
                "exo_pair takes its logarithm, so it must not be 0",
                "set it, for example to 0.001",
            )
        reads_alpha = "alpha" in preference_reads(recipe)
        if reads_alpha and settings.divergence != "alpha" and settings.alpha != fields["alpha"].default:
            yield Problem("preference.alpha", f"divergence {settings.divergence} does not read it", "remove it")


def _sampled_validation_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.val.n > 1 and not recipe.val.temperature:
        yield Problem("val.n", f"{recipe.val.n} greedy answers would all be the same", "set val.temperature")
    for key, off in (("top_p", 1.0), ("top_k", 0)):
        if getattr(recipe.val, key) != off and not recipe.val.temperature:
            yield Problem(f"val.{key}", "greedy answers do not sample", "set val.temperature, or remove it")


def _online_problems(recipe: Recipe) -> Iterator[Problem]:
    yield from rollout_problems(recipe)
    if recipe.data.val:
        yield Problem("data.val", "online methods validate on questions", "use val.questions")
    if recipe.val.rules:
        yield Problem("val.rules", "an online run scores answers with its rewards", "use reward.rules")
    if recipe.data.overlong == "truncate_right":
        yield Problem(
            "data.overlong", "a prompt truncated at its end loses the question", "use truncate_left, drop or error"
        )
    yield from _algorithm_problems(recipe)
    yield from _offline_row_problems(recipe)
    yield from _sampled_validation_problems(recipe)


def _algorithm_problems(recipe: Recipe) -> Iterator[Problem]:
    """Algorithm keys that contradict each other or have no effect."""
    batch, algorithm = recipe.batch, recipe.algorithm
    per_update = batch.prompts_per_update or batch.prompts
    if not loss_row(algorithm.loss).ratio and (per_update < batch.prompts or algorithm.epochs > 1):
        yield Problem(
            "batch.prompts_per_update" if per_update < batch.prompts else "algorithm.epochs",
            f"loss {algorithm.loss} has no ratio of new to old probability: a second update in a step would treat "
            "off-policy responses as on-policy",
            "use one update per step (lower batch.prompts instead), or a loss with a ratio: algorithm.loss=clip",
        )
    yield from _kl_problems(recipe)
    yield from _dynamic_sampling_problems(recipe)
    yield from _correction_problems(recipe)
    yield from _gdpo_problems(recipe)
    yield from _reward_problems(recipe)
    if algorithm.overlong.buffer > recipe.rollout.max_tokens:
        yield Problem("algorithm.overlong.buffer", "exceeds rollout.max_tokens")
    yield from _critic_problems(recipe)


def _kl_problems(recipe: Recipe) -> Iterator[Problem]:
    kl = recipe.algorithm.kl
    if recipe.method == "on_policy_distill" and kl.reference is None:
        yield Problem("algorithm.kl.reference", "must be set: it is the teacher", "set it to the teacher's folder")
    if kl.target is not None and kl.where == "none":
        yield Problem(
            "algorithm.kl.target", "the run uses no KL divergence", "set algorithm.kl.where to loss or reward"
        )
    if kl.reward_coefficient and kl.where != "loss":
        yield Problem(
            "algorithm.kl.reward_coefficient",
            "adds a penalty to a KL term in the loss, and there is none",
            "set algorithm.kl.where=loss",
        )
    if kl.where == "reward" and kl.estimator.endswith("+"):
        yield Problem("algorithm.kl.estimator", "a reward has no gradient", "remove the +")
    if kl.weighted and not (kl.where == "loss" and kl.estimator.endswith("+")):
        yield Problem(
            "algorithm.kl.weighted",
            "applies only to an estimator with + in the loss",
            "set algorithm.kl.where=loss and algorithm.kl.estimator=k3+, or remove it",
        )


def _dynamic_sampling_problems(recipe: Recipe) -> Iterator[Problem]:
    settings, advantage = recipe.algorithm.dynamic_sampling, recipe.algorithm.advantage
    between, batches = settings.between, settings.max_gen_batches
    if between and (between[0] >= between[1] or batches < 2):
        yield Problem(
            "algorithm.dynamic_sampling.between",
            f"{between} replaces no group or all groups",
            "write the lower bound first, and set max_gen_batches above 1",
        )
    if settings.metric and batches < 2:
        yield Problem(
            "algorithm.dynamic_sampling.metric", "one batch replaces no groups", "set max_gen_batches above 1"
        )
    if batches > 1 and not (estimator_row(advantage).groups or is_function_path(advantage)):
        yield Problem(
            "algorithm.dynamic_sampling.max_gen_batches", "needs groups of responses to a prompt", "use a group method"
        )


def _reward_problems(recipe: Recipe) -> Iterator[Problem]:
    reward = recipe.reward
    models, weights = reward.model, reward.model_weights
    if isinstance(models, list) and not models:
        yield Problem("reward.model", "must not be an empty list", "name a folder, or remove it")
    if weights and (not isinstance(models, list) or len(models) != len(weights)):
        yield Problem(
            "reward.model_weights",
            f"{len(weights)} weights do not match the models in reward.model",
            "give one per model",
        )
    if reward.arguments and reward.function is None:
        yield Problem("reward.arguments", "reward.function is not set", "set it, or remove them")
    for name in reward.arguments.keys() & REWARD_CALL:
        yield Problem(
            f"reward.arguments.{name}", "every reward function already gets this argument", "choose another name"
        )
    if reward.clip and reward.clip[0] >= reward.clip[1]:
        yield Problem("reward.clip", f"{reward.clip} leaves a single score", "write the lower bound first")


def _critic_problems(recipe: Recipe) -> Iterator[Problem]:
    advantage, steps = recipe.algorithm.advantage, recipe.run.steps
    if recipe.critic.model_fields_set and not estimator_row(advantage).critic:
        yield Problem("critic", f"advantage {advantage} has no critic", "use method ppo, or remove the keys")
    elif steps is not None and recipe.critic.warmup >= steps:
        yield Problem(
            "critic.warmup",
            f"{recipe.critic.warmup} critic-only steps leave no step of {steps} for the policy",
            "lower it, or raise run.steps",
        )


def _correction_problems(recipe: Recipe) -> Iterator[Problem]:
    """Rollout correction that would apply twice or not at all."""
    algorithm, settings = recipe.algorithm, recipe.algorithm.rollout_correction
    if settings.low > settings.high:
        yield Problem("algorithm.rollout_correction.low", "exceeds algorithm.rollout_correction.high")
    if settings.cap is not None and settings.floor > settings.cap:
        yield Problem("algorithm.rollout_correction.floor", "exceeds algorithm.rollout_correction.cap")
    for number, band in enumerate(settings.reject):
        if band.low is not None and band.low > band.high:
            yield Problem(f"algorithm.rollout_correction.reject.{number}.low", "exceeds its high")
    if settings.rejected != "left_out" and settings.mask == "none" and not settings.reject:
        yield Problem(
            "algorithm.rollout_correction.rejected", "nothing is rejected", "set mask or reject, or remove it"
        )
    if settings.bypass and settings.weight != "none":
        yield Problem(
            "algorithm.rollout_correction.weight",
            "with bypass, the ratio of the loss already includes the engine, and a weight would count it twice",
            "remove one of them",
        )
    if settings.bypass and not loss_row(algorithm.loss).ratio:
        yield Problem(
            "algorithm.rollout_correction.bypass",
            f"loss {algorithm.loss} has no ratio of new to old",
            "use loss importance",
        )


def _gdpo_problems(recipe: Recipe) -> Iterator[Problem]:
    """Keys that change the total score but not the separate rewards that gdpo compares."""
    algorithm = recipe.algorithm
    if not estimator_row(algorithm.advantage).parts:
        if algorithm.gdpo_rewards:
            yield Problem("algorithm.gdpo_rewards", f"advantage {algorithm.advantage} does not read it", "remove it")
        return
    ignored = {
        "algorithm.kl.where": algorithm.kl.in_reward(),
        "reward.clip": recipe.reward.clip is not None,
        "algorithm.overlong.truncated_reward": algorithm.overlong.truncated_reward is not None,
    }
    for key, on in ignored.items():
        if on:
            remedy = "set it to loss or none" if key.endswith("where") else "remove it"
            yield Problem(key, f"{algorithm.advantage} compares separate rewards and would ignore it", remedy)


def _offline_row_problems(recipe: Recipe) -> Iterator[Problem]:
    """Data keys that an online method ignores. Values are compared because a stored recipe contains all defaults."""
    sources = {f"data.train.{i}": source for i, source in enumerate(recipe.data.train)}
    groups: dict[str, Section] = {"data": recipe.data, **sources}
    for where, group in groups.items():
        fields = type(group).model_fields
        for key, remedy in OFFLINE_ROWS.items():
            if key in fields and getattr(group, key) != fields[key].default:
                yield Problem(f"{where}.{key}", f"method {recipe.method} reads prompts of the RL schema", remedy)


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
    return recipe.model_copy(update={"run": run, "batch": batch, "model": model, "checkpoint": checkpoint})


def _derived_correction(recipe: Recipe) -> dict[str, bool | str]:
    """Default rollout correction for stale responses and for serving engines.

    Stale responses: the loss clips against the policy that generated them. With only an importance weight the policy
    drifts away (numbers in docs/online.md), so it is used only if the loss does not clip. A serving engine has the
    current weights, so the mismatch is rounding and the weight is sufficient.
    """
    stale, correction = bool(recipe.rollout.max_staleness), recipe.algorithm.rollout_correction
    if not (stale or ENGINES[recipe.rollout.engine].served) or correction.bypass:
        return {}
    given = correction.model_fields_set
    if (
        stale
        and loss_row(recipe.algorithm.loss).trust_region
        and not given & {"bypass", "weight", "cap", "floor", "normalize"}
    ):
        return {"bypass": True}
    return {} if "weight" in given else {"weight": "token"}
