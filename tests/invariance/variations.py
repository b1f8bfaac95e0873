"""Settings that must not change a run, and the comparison of a run with its reference trajectory.

A variation names the keys that differ from the reference, the number of processes, and how close its results must be:

`bits`      The arithmetic is the same, in the same order: every metric, response, weight and optimizer state is equal.
`rounding`  Sums run in another order. Responses are equal. A float32 sum of n terms in another order differs by about
            sqrt(n) * 6e-8 of its terms, here at most 1e-6. Scores and metrics of the first step start from equal
            weights and may differ by 2e-5 of their size (or 2e-6: differences of log-probabilities of size 5). Adam
            turns a noise of 1e-6 in a gradient into at most lr / eps * 1e-6 = 1e-5 in a weight. Metrics of later steps
            and of the validation see these weights, and may differ by 1e-4 of their size (or 2e-5).
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from recipes import Drawn

from lockstep.recipe import load_recipe
from lockstep.recipe.method_checks import reference_kind
from lockstep.recipe.methods import ONLINE
from lockstep.recipe.registry import estimator_row
from lockstep.recipe.schema import Recipe
from lockstep.run.checkpoint import steps_in
from lockstep.run.console import Console
from runs import facts, samples, stored

Kind = Literal["bits", "rounding"]
FIRST, LATER = {"rel_tol": 2e-5, "abs_tol": 2e-6}, {"rel_tol": 1e-4, "abs_tol": 2e-5}
WEIGHTS = 1e-5
Keys = Callable[[Recipe, Drawn], "list[str] | None"]


@dataclass(frozen=True)
class Variation:
    name: str
    kind: Kind
    keys: Keys
    """The keys that differ from the reference; None where the recipe has nothing to vary."""
    processes: int = 1
    resumes: bool = False
    """Starts from the first checkpoint of the reference."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Constants of lockstep during the run: small rows reach thresholds of real ones."""

    def words(self, recipe: Recipe, drawn: Drawn) -> list[str] | None:
        """`key=value` words, or None where the variation does not apply."""
        lora = recipe.model.lora
        if self.kind == "rounding" and lora is not None and lora.dropout:
            return None  # masks are drawn per micro-batch
        found = self.keys(recipe, drawn)
        return None if found is None else [f"run.name={self.name}", *found]


def always(*words: str) -> Keys:
    return lambda recipe, drawn: list(words)


def online(*words: str) -> Keys:
    return lambda recipe, drawn: list(words) if drawn.online else None


def packed(tokens: int, *words: str) -> Keys:
    return always("batch.micro_batch_size=null", f"batch.tokens={tokens}", *words)


def _frozen_offload(recipe: Recipe, drawn: Drawn) -> list[str] | None:
    words = []
    if reference_kind(recipe) == "model":
        words.append("parallel.offload_reference=true")
    if recipe.distill.teacher is not None:
        words.append("parallel.offload_teacher=true")
    if drawn.online and recipe.reward.model:
        words.append("parallel.offload_reward=true")
    return words or None


def _offload(what: str) -> Keys:
    def keys(recipe: Recipe, drawn: Drawn) -> list[str]:
        critic = drawn.online and estimator_row(recipe.algorithm.advantage).critic
        return [f"parallel.offload={what}", *([f"parallel.offload_critic={what}"] if critic else [])]

    return keys


def _everything_on_host(recipe: Recipe, drawn: Drawn) -> list[str]:
    return [*_offload("all")(recipe, drawn), *(_frozen_offload(recipe, drawn) or [])]


def _precomputed(recipe: Recipe, drawn: Drawn) -> list[str] | None:
    reads = reference_kind(recipe) in ("model", "adapter") and not drawn.online and drawn.method != "kto"
    return ["preference.precompute=true"] if reads else None


def _function_workers(recipe: Recipe, drawn: Drawn) -> list[str] | None:
    return ["reward.workers=2"] if recipe.reward.function else None


def _tensor(*words: str) -> Keys:
    def keys(recipe: Recipe, drawn: Drawn) -> list[str] | None:
        if recipe.model.aux_loss_coef:
            return None  # refused: the router outputs of all tokens are on no rank
        return ["parallel.tensor_parallel=2", *words]

    return keys


def _tiles(*words: str) -> Keys:
    def keys(recipe: Recipe, drawn: Drawn) -> list[str] | None:
        if drawn.family == "qwen3_moe":
            return None  # refused: experts are not tiled
        return ["model.tiled_mlp=7", *words]

    return keys


def _context(layout: str, *words: str) -> Keys:
    def keys(recipe: Recipe, drawn: Drawn) -> list[str] | None:
        if recipe.model.aux_loss_coef or (drawn.family == "mistral" and layout == "zigzag"):
            return None  # refused
        return ["parallel.context_parallel=2", f"parallel.context_layout={layout}", *words]

    return keys


# The longest row of any method fits, and little else.
SMALL_BUDGET = 260
PACKED = ("batch.micro_batch_size=null", "batch.tokens=512")
VARIATIONS = {
    one.name: one
    for one in (
        Variation("packed-small", "rounding", packed(SMALL_BUDGET)),
        Variation("packed-all", "rounding", packed(4096)),
        Variation("rows-3", "rounding", always("batch.micro_batch_size=3")),
        Variation("rows-all", "rounding", always("batch.micro_batch_size=64")),
        Variation("checkpointing", "bits", always("model.gradient_checkpointing=true")),
        Variation(
            "activations-host",
            "bits",
            always("model.activation_offload=true"),
            settings={"lockstep.parallel.offload.LEAST": 1},
        ),
        Variation("tiled", "rounding", _tiles("model.gradient_checkpointing=true")),
        Variation("optimizer-host", "bits", _offload("optimizer")),
        Variation("frozen-host", "bits", _frozen_offload),
        Variation("resumed", "bits", always(), resumes=True),
        Variation("precomputed", "rounding", _precomputed),
        Variation(
            "encoded-in-workers",
            "bits",
            always("data.cache=off"),
            settings={"lockstep.data.dataset.PART_ROWS": 4, "lockstep.data.parallel.usable_cores": lambda: 3},
        ),
        Variation("reward-workers", "bits", _function_workers),
        Variation("hf", "rounding", online("rollout.engine=hf")),
        Variation(
            "engine-blocks",
            "rounding",
            online("rollout.block_tokens=3", "rollout.max_sequences=3", "rollout.prefill_tokens=24"),
        ),
        Variation("sharded-2", "rounding", always(), processes=2),
        Variation("copies-2", "rounding", packed(512, "parallel.replicate=2"), processes=2),
        Variation("optimizer-host-2", "rounding", _offload("optimizer"), processes=2),
        Variation("weights-host-2", "rounding", _offload("params"), processes=2),
        Variation("host-2", "rounding", _everything_on_host, processes=2),
        Variation("tensor-2", "rounding", _tensor(), processes=2),
        Variation("tiled-2", "rounding", _tiles(), processes=2),
        Variation("tiled-tensor-2", "rounding", _tiles("parallel.tensor_parallel=2"), processes=2),
        Variation("ring-2", "rounding", _context("zigzag", *PACKED), processes=2),
        Variation("gather-2", "rounding", _context("gather"), processes=2),
        Variation("ulysses-2", "rounding", _context("ulysses", "batch.micro_batch_size=3"), processes=2),
        Variation("resumed-2", "rounding", packed(512), processes=2, resumes=True),
        Variation("sharded-3", "rounding", always(), processes=3),
        Variation("copies-3", "rounding", packed(512, "parallel.replicate=3"), processes=3),
        Variation("host-4", "rounding", _everything_on_host, processes=4),
        Variation("sharded-4", "rounding", packed(512), processes=4),
        Variation("hybrid-4", "rounding", always("parallel.shard=2"), processes=4),
        Variation("tensor-copies-4", "rounding", _tensor("parallel.replicate=2"), processes=4),
        Variation("context-4", "rounding", _context("gather", *PACKED), processes=4),
    )
}


def run_variation(file: Path, variation: Variation, words: Sequence[str]) -> None:
    """A variation of a recipe in this process, whose reference is trained."""
    if variation.resumes:
        start_from_first_checkpoint(file.parent / "runs", variation.name)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variation.settings.items():
            patch.setattr(name, value)
        train(file, words)


def train(file: Path, words: Sequence[str] = ()) -> None:
    """A run in this process, without console output."""
    recipe = load_recipe(str(file), list(words))
    if recipe.method in ONLINE:
        from lockstep.train.online import train_online

        train_online(recipe, Console.silent())
    else:
        from lockstep.train.offline import train_offline

        train_offline(recipe, Console.silent())


def start_from_first_checkpoint(runs: Path, name: str) -> None:
    """A copy of the reference run as it was when step 1 was saved."""
    shutil.copytree(runs / "reference", runs / name)
    for step in steps_in(runs / name / "checkpoints"):
        if step > 1:
            shutil.rmtree(runs / name / "checkpoints" / f"step_{step}")


def difference(run: Path, reference: Path, kind: Kind, steps: int) -> str:
    """The first difference between two run folders, in words; empty without one."""
    if told := _samples(samples(run), samples(reference), kind):
        return told
    ours, theirs = facts(run), facts(reference)
    if [step for step, _ in ours] != [step for step, _ in theirs] or max(
        (step for step, _ in theirs), default=0
    ) < steps:
        return f"other steps: {[step for step, _ in ours]}"
    for (step, found), (_, wanted) in zip(ours, theirs, strict=True):
        if told := _metrics(found, wanted, kind, step):
            return f"step {step}: {told}"
    parts = ["weights", *(["critic"] if stored(reference, steps, "critic") else [])]
    if kind == "bits":
        parts += ["optimizer", *(["critic_optimizer"] if "critic" in parts else [])]
    for part in parts:
        if told := _tensors(stored(run, steps, part), stored(reference, steps, part), kind):
            return f"{part}: {told}"
    return ""


def _samples(found: Sequence[tuple[str, float]], wanted: Sequence[tuple[str, float]], kind: Kind) -> str:
    if [text for text, _ in found] != [text for text, _ in wanted]:
        return "other responses"
    for (_, score), (text, expected) in zip(found, wanted, strict=True):
        if not _close(score, expected, kind, first=True):  # a reward model rounds like any other
            return f"the score of {text!r} is {score!r} and not {expected!r}"
    return ""


def _metrics(found: Mapping[str, float], wanted: Mapping[str, float], kind: Kind, step: int) -> str:
    if found.keys() != wanted.keys():
        return f"other metrics: {sorted(found.keys() ^ wanted.keys())}"
    for name, value in wanted.items():
        # Validation follows the update of a step.
        if not _close(found[name], value, kind, first=step + name.startswith("val/") <= 1):
            return f"{name} is {found[name]!r} and not {value!r}"
    return ""


def _close(found: float, wanted: float, kind: Kind, *, first: bool) -> bool:
    if math.isnan(wanted) or math.isnan(found) or kind == "bits":
        return found == wanted or (math.isnan(found) and math.isnan(wanted))
    return math.isclose(found, wanted, **(FIRST if first else LATER))


def _tensors(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], kind: Kind) -> str:
    if found.keys() != wanted.keys():
        return f"other tensors: {sorted(found.keys() ^ wanted.keys())[:4]}"
    for name, tensor in wanted.items():
        if kind == "bits" and not torch.equal(found[name], tensor):
            return f"{name} has other bits"
        if kind == "rounding" and (most := float((found[name] - tensor).abs().max())) > WEIGHTS:
            return f"{name} differs by {most:.3g}"
    return ""


def applicable(drawn: Drawn, file: Path, sizes: Sequence[int]) -> dict[str, tuple[Variation, list[str]]]:
    """The variations that a recipe has, with their keys, for these numbers of processes."""
    recipe = load_recipe(str(file), [])
    found = {}
    for name, variation in VARIATIONS.items():
        words = variation.words(recipe, drawn)
        if variation.processes in sizes and words is not None:
            found[name] = variation, words
    return found


def compared(drawn: Drawn, file: Path, names: Sequence[str]) -> dict[str, str]:
    """What differs from the reference, by variation."""
    runs = file.parent / "runs"
    found = {name: difference(runs / name, runs / "reference", VARIATIONS[name].kind, drawn.steps) for name in names}
    return {name: why for name, why in found.items() if why}
