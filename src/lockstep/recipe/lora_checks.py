"""Checks the keys of `model.lora` against each other and against the rest of the recipe."""

from __future__ import annotations

from collections.abc import Iterator

from lockstep.errors import Problem, needs, unfit, unused
from lockstep.recipe.keys_lora import Lora
from lockstep.recipe.keys_optim import Optim, ParameterGroup
from lockstep.recipe.method_checks import reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import ENGINES
from lockstep.recipe.schema import Recipe

# Keys that a stored adapter determines.
STORED = ("dropout", "targets", "exclude", "rslora", "dora", "init", "layers", "modules_to_save")


# The parameter group of LoRA+: the matrices B, also those of embeddings.
_RAISED = r"\.lora_(embedding_)?B\."
_RAISED_NAME = "lora_B"


def with_lora_rate(optim: Optim, lora: Lora | None) -> Optim:
    """Returns the optimizer settings with a parameter group for the matrices B, if `model.lora.lr_ratio` is set. Groups
    of the recipe come first. A stored recipe has the group already."""
    if lora is None or lora.lr_ratio == 1 or any(group.name == _RAISED_NAME for group in optim.groups):
        return optim
    raised = ParameterGroup(match=_RAISED, name=_RAISED_NAME, lr_ratio=lora.lr_ratio)
    return optim.model_copy(update={"groups": [*optim.groups, raised]})


def lora_problems(recipe: Recipe) -> Iterator[Problem]:
    lora = recipe.model.lora
    if lora is None:
        return
    if lora.adapter is None and lora.rank is None:
        yield Problem(
            "model.lora.rank",
            "must be set",
            "set a rank, for example 8, or set model.lora.adapter to start from an adapter",
            code="not-set",
        )
    if lora.adapter is not None:
        for key in STORED:
            if getattr(lora, key) != type(lora).model_fields[key].default:
                yield unused(f"model.lora.{key}", "model.lora.adapter sets it", "remove it")
        if recipe.method == "rm":
            yield unused("model.lora.adapter", "a reward model trains a new adapter", "remove it")
    for key in ("targets", "layers"):
        if getattr(lora, key) == []:
            yield Problem(
                f"model.lora.{key}",
                "must not be empty: nothing would be trained",
                "use all-linear" if key == "targets" else "remove it to adapt all layers",
                code="empty-value",
            )
    yield from init_problems(lora, recipe.model.quantize)
    yield from _reference_problems(recipe, lora)
    yield from _served_problems(recipe, lora)


def init_problems(lora: Lora, quantized: str | None) -> Iterator[Problem]:
    """Yields problems of `model.lora.init` with weights in the format `quantized`, or None for unquantised weights."""
    key = "model.lora.init"
    if lora.dora and lora.init.startswith(("pissa", "loftq")):
        why = f"DoRA starts from the norms of the unchanged weights, and {lora.init} changes them"
        yield unfit(key, why, "set model.lora.dora=false, or model.lora.init=default")
    if lora.init == "loftq" and quantized is None:
        why = "loftq starts from the errors of quantised weights, and the weights are not quantised"
        yield needs(key, why, "set model.quantize, or another model.lora.init")
    if lora.init.startswith("pissa") and quantized is not None:
        why = f"{lora.init} decomposes weights that model.quantize={quantized} has rounded"
        yield unfit(key, why, "use loftq, which decomposes the rounding errors, or remove model.quantize")


def _reference_problems(recipe: Recipe, lora: Lora) -> Iterator[Problem]:
    key, kind = "model.lora.reference", reference_kind(recipe)
    if lora.init == "loftq" and kind == "disk":
        why = "the log-probs of the reference are precomputed from the quantised model without its adapter"
        yield unfit("preference.precompute", why, "set preference.precompute=false, or another model.lora.init")
    if lora.reference == "base":
        return
    if lora.adapter is None:
        why = "start is the adapter of model.lora.adapter, which is not set; a new adapter starts as the base model"
        yield needs(key, why, "set model.lora.adapter, or remove this key")
    elif kind == "disk":
        why = "the log-probs of the reference are precomputed from a model without an adapter"
        yield unfit(key, why, "set preference.precompute=false, or remove this key")
    elif kind == "model":
        section = "algorithm.kl.reference" if recipe.method in ONLINE else "preference.reference"
        yield unused(key, f"{section} names another reference model", f"remove this key, or {section}")
    elif kind == "none":
        yield unused(key, "the run has no reference model", "remove it")


def _served_problems(recipe: Recipe, lora: Lora) -> Iterator[Problem]:
    """Yields problems of adapters that a serving engine cannot apply. vLLM and SGLang serve plain LoRA adapters."""
    online = recipe.method in ONLINE or bool(recipe.val.questions)
    if not online or not ENGINES[recipe.rollout.engine].served:
        return
    for key, what in (("dora", "DoRA"), ("modules_to_save", "trained copies of modules")):
        if getattr(lora, key):
            why = f"rollout.engine {recipe.rollout.engine} serves plain LoRA adapters, without {what}"
            yield unfit(f"model.lora.{key}", why, "use rollout.engine=native, which runs every adapter")
