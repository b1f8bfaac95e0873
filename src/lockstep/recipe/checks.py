"""Combinations of keys that cannot work, and the defaults that depend on other keys."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.errors import Problem
from lockstep.recipe.schema import Recipe

DEFAULT_TOKENS = 4096


def combination_problems(recipe: Recipe) -> Iterator[Problem]:
    run, data, batch, optim, val = recipe.run, recipe.data, recipe.batch, recipe.optim, recipe.val
    if run.epochs is not None and run.steps is not None:
        yield Problem("run.steps", "set together with run.epochs; only one can end the run", "remove one of the two")
    if batch.tokens is not None and batch.rows is not None:
        yield Problem("batch.rows", "set together with batch.tokens", "keep tokens (packed) or rows (padded), not both")
    if data.max_tokens and batch.tokens and data.max_tokens > batch.tokens:
        yield Problem(
            "data.max_tokens",
            f"{data.max_tokens} is more than batch.tokens={batch.tokens}: such a row fits no micro-batch",
            f"raise batch.tokens to {data.max_tokens} or lower data.max_tokens",
        )
    for key in ("train", "val"):
        sources = getattr(data, key)
        weighted = [source.weight is not None for source in sources]
        if any(weighted) and not all(weighted):
            bare = sources[weighted.index(False)].path
            yield Problem(f"data.{key}", f"{bare} has no weight but others have", "give every source a weight, or none")
    if isinstance(optim.warmup, float) and optim.warmup >= 1 and not optim.warmup.is_integer():
        yield Problem("optim.warmup", f"{optim.warmup} is neither a share below 1 nor a whole number of steps")
    if optim.warmup >= 1 and run.steps is not None and optim.warmup >= run.steps:
        yield Problem("optim.warmup", f"{optim.warmup} warm-up steps of {run.steps} steps leave nothing to train")
    if not all(0 <= beta < 1 for beta in optim.betas):
        yield Problem("optim.betas", f"{optim.betas} are not in [0, 1)")
    if recipe.checkpoint.keep_best and not data.val:
        yield Problem(
            "checkpoint.keep_best", "the best checkpoint is chosen by val/loss, and data.val is empty", "set data.val"
        )
    if val.every and not (data.val or val.questions):
        yield Problem("val.every", "nothing to validate on", "set data.val or val.questions")
    if val.at_start and not (data.val or val.questions):
        yield Problem("val.at_start", "nothing to validate on", "set data.val or val.questions")
    if val.question_rows and not val.questions:
        yield Problem("val.question_rows", "val.questions is not set", "set val.questions, or remove it")
    lora = recipe.model.lora
    if lora and isinstance(lora.targets, list):
        if not lora.targets:
            yield Problem("model.lora.targets", "is empty: nothing would be trained", "use all-linear")
        for name in lora.targets:
            if name.split(".")[-1] in ("lm_head", "embed_tokens"):
                yield Problem(
                    "model.lora.targets",
                    f"{name} cannot carry an adapter: the output head is run in chunks",
                    f"remove {name}",
                )


def with_derived_defaults(recipe: Recipe) -> Recipe:
    """Fill in what depends on other keys, so that the stored recipe says everything."""
    run, batch, model = recipe.run, recipe.batch, recipe.model
    if run.epochs is None and run.steps is None:
        run = run.model_copy(update={"epochs": 1})
    if batch.tokens is None and batch.rows is None:
        batch = batch.model_copy(update={"tokens": max(DEFAULT_TOKENS, recipe.data.max_tokens or 0)})
    if model.master_weights is None:
        model = model.model_copy(update={"master_weights": model.dtype != "fp32"})
    if model.lora and model.lora.alpha is None:
        model = model.model_copy(update={"lora": model.lora.model_copy(update={"alpha": 2.0 * model.lora.rank})})
    return recipe.model_copy(update={"run": run, "batch": batch, "model": model})
