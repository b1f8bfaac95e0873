"""Checks a method's keys for invalid combinations, and determines which reference model the method uses."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from lockstep.errors import Problem, conflict, unused
from lockstep.recipe.methods import OFFLINE, ONLINE, PREFERENCE_READS, sections_read
from lockstep.recipe.schema import Recipe


def _rm_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.rm.loss == "logexp" and recipe.rm.ranking == "plackett_luce":
        yield conflict("rm.loss", "ranking plackett_luce defines its loss", "remove rm.loss, or set rm.ranking=pairs")


def _prm_problems(recipe: Recipe) -> Iterator[Problem]:
    if len(set(recipe.prm.tokens)) < len(recipe.prm.tokens):
        yield Problem(
            "prm.tokens", "contains a word twice", "use a different word for each label", code="duplicate-name"
        )


def _kto_problems(recipe: Recipe) -> Iterator[Problem]:
    if recipe.batch.rows_per_update < 2:
        yield Problem(
            "batch.rows_per_update",
            "KTO estimates the KL from mismatched pairs of rows, and an update of one row has no such pair",
            "set batch.rows_per_update to 2 or more",
            code="too-few-rows",
        )
    if recipe.preference.reference_free and recipe.preference.reference:
        yield conflict(
            "preference.reference", "preference.reference_free uses no reference model", "remove one of them"
        )


def _distill_problems(recipe: Recipe) -> Iterator[Problem]:
    settings = recipe.distill
    if settings.teacher is None:
        yield Problem("distill.teacher", "must be set", "set the Hugging Face folder of the teacher", code="not-set")
    if settings.divergence != "jsd" and settings.mix != type(settings).model_fields["mix"].default:
        yield unused("distill.mix", f"divergence {settings.divergence} does not read distill.mix", "remove it")


METHOD_CHECKS: dict[str, Callable[[Recipe], Iterator[Problem]]] = {
    "rm": _rm_problems,
    "prm": _prm_problems,
    "kto": _kto_problems,
    "distill": _distill_problems,
}


def method_problems(recipe: Recipe) -> Iterator[Problem]:
    """Yields problems of the keys that only the recipe's offline method reads."""
    check = METHOD_CHECKS.get(recipe.method)
    return iter(()) if check is None else check(recipe)


def preference_reads(recipe: Recipe) -> tuple[str, ...]:
    """Returns the keys of `preference` that the recipe's method reads."""
    return PREFERENCE_READS[OFFLINE[recipe.method].preference or recipe.preference.loss]


def reference_kind(recipe: Recipe) -> str:
    """Returns the kind of reference model, which is `none`, `adapter` (the policy without its adapter), `model` (a
    separate model) or `disk` (precomputed log-probs)."""
    if recipe.method in ONLINE:
        used, folder, precompute = recipe.algorithm.kl.where != "none", recipe.algorithm.kl.reference, False
    elif "preference" in sections_read(recipe.method):
        settings = recipe.preference
        used = "reference" in preference_reads(recipe) and not settings.reference_free
        folder, precompute = settings.reference, settings.precompute
    else:
        return "none"
    if not used:
        return "none"
    if precompute:
        return "disk"
    return "adapter" if recipe.model.lora is not None and folder is None else "model"


def reference_folder(recipe: Recipe) -> str:
    """Returns the folder of the reference model; by default, the folder of the policy."""
    named = recipe.algorithm.kl.reference if recipe.method in ONLINE else recipe.preference.reference
    return named or recipe.model.path
