"""Checks the keys of long texts, of streamed rows and of images for invalid combinations."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.errors import Problem, needs, unfit, unused
from lockstep.recipe.method_checks import reference_kind
from lockstep.recipe.methods import OFFLINE, ONLINE
from lockstep.recipe.registry import ENGINES
from lockstep.recipe.schema import Recipe

# These offline methods look at all rows before training: at the balance of labels, or at the last tokens of all texts.
NOT_STREAMED = ("kto", "rm", "prm")


def data_problems(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if recipe.model.vision is not None:
        yield from _vision_problems(recipe)
    if recipe.model.vision_lr is not None and recipe.model.vision != "train":
        yield unused("model.vision_lr", "the vision tower is not trained", "set model.vision=train, or remove it")
    if data.long_text == "split" and recipe.method in OFFLINE and "text_key" not in OFFLINE[recipe.method].columns:
        yield unused("data.long_text", f"method {recipe.method} has no rows of plain text", "remove it")
    if data.streaming:
        yield from _stream_problems(recipe)
    elif data.shuffle_buffer != type(data).model_fields["shuffle_buffer"].default:
        yield needs("data.shuffle_buffer", "data.streaming is not set", "set data.streaming=true, or remove this key")


def _stream_problems(recipe: Recipe) -> Iterator[Problem]:
    data = recipe.data
    if recipe.run.steps is None:
        yield Problem(
            "run.steps",
            "must be set with data.streaming: the number of rows of an epoch is unknown"
            + (", so run.epochs cannot be used" if recipe.run.epochs else ""),
            "set run.steps to the number of optimizer steps, instead of run.epochs",
            code="not-set",
        )
    if recipe.method in NOT_STREAMED:
        why = f"method {recipe.method} looks at all rows before training"
        yield unfit("data.streaming", why, "set data.streaming=false")
    tables = {
        "preference.precompute": reference_kind(recipe) == "disk",
        "distill.top_k": recipe.distill.teacher is not None and recipe.distill.top_k is not None,
    }
    for key, used in tables.items():
        if used:
            why = "computes the log-probs of all rows before training, and streamed rows are read while training"
            yield unfit(key, why, "remove it, or set data.streaming=false")
    if data.drop_last:
        yield unused("data.drop_last", "all updates of streamed rows are full", "remove it")
    if data.reader is not None:
        why = "a user reader reads all rows of a path before training"
        yield unfit("data.reader", why, "write the rows to jsonl or parquet files, or set data.streaming=false")
    limits = {"data.max_rows": data.max_rows} | {f"data.train.{i}.rows": one.rows for i, one in enumerate(data.train)}
    for key, rows in limits.items():
        if rows is not None:
            why = "cannot be combined with data.streaming, which visits the files in shuffled order"
            yield unfit(key, why, "remove it and set run.steps, or list fewer files")


def _vision_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of keys that do not work with images yet."""
    model, parallel, key = recipe.model, recipe.parallel, "model.vision"
    if model.vision == "train" and model.lora is not None:
        why = "an adapter is trained instead of all weights, so the tower cannot be trained with it"
        yield unfit(key, why, "set model.vision=freeze, or remove model.lora")
    for name in ("context", "tensor", "expert"):
        if (size := getattr(parallel, f"{name}_parallel")) > 1:
            why = f"{size} does not work with images (model.vision)"
            remedy = f"set parallel.{name}_parallel=1; the processes then share the model in shards (parallel.shard)"
            yield unfit(f"parallel.{name}_parallel", why, remedy)
    settings: dict[str, tuple[object, str]] = {
        "model.quantize": (model.quantize, "the layers of the vision tower are not quantised"),
        "model.matmul": (model.matmul, "fp8 was never tested with image features"),
        "model.activation_offload": (
            model.activation_offload,
            "the activations of the tower stay on the device",
        ),
        "data.streaming": (recipe.data.streaming, "streamed rows with images are not read"),
        "data.long_text": (recipe.data.long_text == "split", "a text with images is not split"),
    }
    if recipe.method in ONLINE or recipe.val.questions:
        settings |= _generated_from_images(recipe)
    for name, (used, why) in settings.items():
        if used:
            yield unfit(name, f"{why}, and model.vision is set", "remove it, or remove model.vision")


def _generated_from_images(recipe: Recipe) -> dict[str, tuple[object, str]]:
    """Returns the keys of generation and rewards that do not work with images yet: whether each is used, and why it
    does not work."""
    rollout = recipe.rollout
    unread = f"engine {rollout.engine} does not read images"
    return {
        "rollout.engine": (not ENGINES[rollout.engine].images, unread),
        "rollout.precision": (rollout.precision, "low precision was never tested with image features"),
        "rollout.kv_cache": (rollout.kv_cache, "low precision was never tested with image features"),
    }
