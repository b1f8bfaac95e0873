"""Checks the optimizer step and the weights after the step, and compares the digests of parameters.

The AdamW step is checked for sampled weights: the weights after the step must equal AdamW's formula in double
precision. The formula uses the gradient and moments of the same run, so a wrong gradient does not make the optimizer
check fail.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from lockstep.parity.replay.replay_checks import Check, finite, rank_of_rows, share, worst_named
from lockstep.parity.replay.tolerances import (
    DEVIATIONS,
    Bound,
    Excess,
    Tolerance,
    movement_slope,
    overall_slope,
    slope_excess,
)
from lockstep.recipe.keys_optim import Optim
from lockstep.tape.digest import BLOCKS, SKETCH, distance, distances, norm, relative
from lockstep.tape.tape_format import StepRecord, TapeFolder, below
from lockstep.tape.tape_recorder import sampled

# The smallest movement of weights, relative to the norm of the weights, that digests can show. Movements below this
# value are lost in rounding.
SEEN = 1e-5
# The maximum relative difference between digests of identical weights. Digests of identical weights differ only because
# sums run in another order.
UNTOUCHED = 1e-5
# The error of a gradient is divided by its norm, but at least by this fraction of the average norm. A gradient whose
# norm is below this fraction of the average norm is mostly rounding.
NEGLIGIBLE = 1e-3
# The allowed rounding error of a weight, relative to the weight: 4 times the fp32 machine epsilon.
ULPS = 4 * torch.finfo(torch.float32).eps
# The distance of weights is estimated from the BLOCKS * SKETCH projections of a digest. An estimate from n projections
# has a relative standard deviation of 1 / sqrt(2 n).
ESTIMATED = 1 + DEVIATIONS / math.sqrt(2 * BLOCKS * SKETCH)
SAMPLED_KEYS = ("gradient", "before", "exp_avg", "exp_avg_sq", "after", "count")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def check_optimizer(
    manifest: Mapping[str, Any],
    one: StepRecord,
    other: StepRecord,
    learner: str,
    number: int,
    info: tuple[dict[str, Any], dict[str, Any]],
    tolerance: Tolerance,
    *,
    restored: bool,
) -> Iterator[Check]:
    """Checks the optimizer step of one update. `manifest` is the manifest of the replay. `restored` is true if the
    replay started from the recorded optimizer state."""
    rates = info[0]["lr"], info[1]["lr"]
    difference = abs(rates[0] - rates[1]) / max(rates[0], 1e-30)
    what = f"{learner}, update {number + 1}: learning rate"
    yield Check("optimizer", one.step, what, finite(difference), 1e-6, f"{rates[0]:g} against {rates[1]:g}", number)
    if number:
        return
    if restored:
        yield from _moments(one, other, learner, tolerance)
    yield from check_formula(manifest, other, learner, info[1], tolerance)
    yield from _masters(manifest, other, learner)
    yield from check_weights(manifest, one, other, learner, info, tolerance)


def check_unchanged(sides: Sequence[tuple[str, TapeFolder]], step: int) -> Iterator[Check]:
    """Checks that no weight changes between the last optimizer step and the start of the next step.

    Each run is compared with its own earlier weights. Other checks compare the weights of the replay with those of the
    recorded run.
    """
    for side, tape in sides:
        record, now = tape.read_step(step), tape.read_left(step)
        for learner in dict.fromkeys(name.split("/")[0] for name in now):
            errors = relative_errors(record.tensors, now, f"{learner}/left/")
            if not errors:
                continue
            worst, error, differing = worst_named(errors, UNTOUCHED)
            where = f"{differing} of {len(errors)} parameters changed after the optimizer step" if differing else ""
            what = f"{learner}: {worst}, {side}: from the last update to the next step"
            last = sum(update["learner"] == learner for update in record.info["updates"]) - 1
            yield Check("weights", step, what, error, UNTOUCHED, where, last)


def relative_errors(a: Mapping[str, torch.Tensor], b: Mapping[str, torch.Tensor], prefix: str) -> dict[str, float]:
    """Returns the relative distances of the digests that both runs have and whose names begin with `prefix`."""
    ours = below(a, prefix)
    return {name: relative(ours[name], digest) for name, digest in below(b, prefix).items() if name in ours}


def _moments(one: StepRecord, other: StepRecord, learner: str, tolerance: Tolerance) -> Iterator[Check]:
    """Compares AdamW's moments of the sampled weights before the update."""
    ours, theirs = (below(record.tensors, f"{learner}/0/sample/") for record in (one, other))
    error, where = 0.0, ""
    for key, value in ours.items():
        name, kind = key.rsplit("/", 1)
        # A parameter without a gradient in one run has no sample in that run. The gradient check reports the missing
        # gradient.
        if kind not in ("exp_avg", "exp_avg_sq", "count") or (key not in theirs and f"{name}/gradient" not in theirs):
            continue
        missing = key not in theirs
        difference = math.inf if missing else share(value.reshape(-1), theirs[key].reshape(-1))
        if not difference <= error:
            error = difference
            where = f"{key}: " + ("on one side only" if missing else f"relative difference {difference:.3g}")
    what = f"{learner}: moments before the update"
    yield Check("optimizer", one.step, what, finite(error), tolerance.optimizer, where)


# -- AdamW's formula


@dataclass(frozen=True)
class FormulaError:
    """The parameter whose weights differ most from AdamW's formula, relative to how far the update moves them."""

    parameter: str
    error: float
    expected: float
    actual: float
    differing: tuple[str, ...]
    """The names of all parameters that exceed the tolerance."""
    indices: tuple[int, ...]
    """The indices of the weights of `parameter` that exceed the tolerance."""


def check_formula(
    manifest: Mapping[str, Any], record: StepRecord, learner: str, info: dict[str, Any], tolerance: Tolerance
) -> Iterator[Check]:
    if not below(record.tensors, f"{learner}/0/sample/"):
        return
    shapes, optim = manifest["parameters"][learner], _settings(manifest, learner)
    no_decay = manifest.get("spared", {}).get(learner, ())
    found = formula_error(record, learner, shapes, optim, info["lr"], info["grad_norm"], tolerance.optimizer, no_decay)
    where = f"{found.parameter}: expected {found.expected:.9g} by the formula, found {found.actual:.9g}"
    if found.differing:
        more = " ..." if len(found.differing) > 4 else ""
        where += f"; differing: {', '.join(found.differing[:4])}{more}"
        where += rank_of_rows(found.indices, shapes[found.parameter], manifest["world_size"])
    what = f"{learner}: weights by AdamW's formula"
    yield Check("optimizer", record.step, what, finite(found.error), tolerance.optimizer, where)


def formula_error(
    record: StepRecord,
    learner: str,
    shapes: dict[str, list[int]],
    optim: dict[str, Any],
    lr: float,
    grad_norm: float,
    allowed: float,
    no_decay: Collection[str] = (),
) -> FormulaError:
    """Compares the first update of a step with AdamW's formula, which uses the recipe's `optim` keys.

    `no_decay` names the biases and norms with more than one dimension, which have no weight decay. `no_decay` is empty
    for older recordings, because those runs applied weight decay to these parameters.
    """
    samples = below(record.tensors, f"{learner}/0/sample/")
    worst, differing = FormulaError("", 0.0, 0.0, 0.0, (), ()), []
    for name in sorted({key.rsplit("/", 1)[0] for key in samples}):
        kept = _kept(samples, name)
        if "after" not in kept or "gradient" not in kept:
            continue
        rate, decay = lr * rate_ratio_of(name, optim), decay_of(name, shapes[name], optim, no_decay)
        expected = _adamw(kept, rate, grad_norm, optim, decay)
        movement = (expected - kept["before"]).abs()
        difference = (kept["after"] - expected).abs() - ULPS * kept["before"].abs()
        errors = difference.clamp(min=0) / movement.clamp(min=1e-3 * float(movement.max()) + 1e-30)
        error = float(errors.max())
        if not error <= allowed:
            differing.append(name)
        if not error <= worst.error:
            index = int(errors.argmax())
            beyond = sampled(math.prod(shapes[name]))[~(errors <= allowed)].tolist()
            worst = FormulaError(name, error, float(expected[index]), float(kept["after"][index]), (), tuple(beyond))
    return replace(worst, differing=tuple(differing))


def _kept(samples: Mapping[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    """Returns the sampled values of a parameter, in double precision."""
    return {key: samples[f"{name}/{key}"].double() for key in SAMPLED_KEYS if f"{name}/{key}" in samples}


def _settings(manifest: Mapping[str, Any], learner: str) -> dict[str, Any]:
    """Returns the recipe's `optim` keys. The critic has no parameter groups."""
    optim: dict[str, Any] = manifest["recipe"]["optim"]
    return {**optim, "groups": []} if learner == "critic" else optim


def decay_of(name: str, shape: Sequence[int], optim: Mapping[str, Any], no_decay: Collection[str]) -> float:
    """Returns the weight decay of a parameter. By default biases and norms have none."""
    matrix = len(shape) >= 2 and name not in no_decay
    decay = optim["weight_decay"] if optim.get("decay_all") or matrix else 0.0
    if optim.get("groups"):
        group = Optim(groups=optim["groups"]).group_of(name)
        decay = decay if group is None or group.weight_decay is None else group.weight_decay
    return float(optim.get("decays", {}).get(name, decay))  # from another framework's parameter groups


def rate_ratio_of(name: str, optim: Mapping[str, Any]) -> float:
    """Returns the learning rate of a parameter, divided by that of parameters without a group."""
    if not optim.get("groups"):
        return 1.0
    settings = Optim(lr=optim["lr"], groups=optim["groups"])
    return settings.rate_ratio(settings.group_of(name))


def _adamw(
    kept: Mapping[str, torch.Tensor], lr: float, grad_norm: float, optim: Mapping[str, Any], decay: float
) -> torch.Tensor:
    """Returns the weights after one AdamW step (Loshchilov and Hutter 2019, decoupled weight decay)."""
    beta1, beta2 = optim["betas"]
    clip = optim["clip"]
    factor = min(1.0, clip / (grad_norm + 1e-6)) if clip else 1.0
    gradient, before = kept["gradient"] * factor, kept["before"]
    zeros = torch.zeros_like(before)
    count = float(kept["count"]) + 1
    mean = beta1 * kept.get("exp_avg", zeros) + (1 - beta1) * gradient
    square = beta2 * kept.get("exp_avg_sq", zeros) + (1 - beta2) * gradient.square()
    denominator = (square / (1 - beta2**count)).sqrt() + optim["eps"]
    return before * (1 - lr * decay) - lr * (mean / (1 - beta1**count)) / denominator


# -- weights after the update


def _masters(manifest: Mapping[str, Any], record: StepRecord, learner: str) -> Iterator[Check]:
    """Checks that each half-precision weight equals its fp32 master weight after rounding."""
    samples, dtype = below(record.tensors, f"{learner}/0/sample/"), DTYPES[manifest["recipe"]["model"]["dtype"]]
    error, where = 0.0, ""
    for key, held in samples.items():
        if not key.endswith("/held"):
            continue
        name = key.removesuffix("/held")
        wanted = samples[f"{name}/after"].to(dtype).float()
        differing = (held != wanted).nonzero().flatten()
        if len(differing) / len(held) > error:
            error = len(differing) / len(held)
            shape = manifest["parameters"][learner][name]
            indices = sampled(math.prod(shape))[differing].tolist()
            first = int(differing[0])
            where = (
                f"{name}: {len(differing)} of {len(held)} sampled weights differ from their rounded master weights, "
                f"{float(held[first]):.6g} instead of {float(wanted[first]):.6g}"
                f"{rank_of_rows(indices, shape, manifest['world_size'])}"
            )
    if samples:
        yield Check("weights", record.step, f"{learner}: weights and their master weights", error, 0.0, where)


def check_weights(
    manifest: Mapping[str, Any],
    one: StepRecord,
    other: StepRecord,
    learner: str,
    info: tuple[dict[str, Any], dict[str, Any]],
    tolerance: Tolerance,
) -> Iterator[Check]:
    """Compares the weights after the update, relative to how far the update moves them.

    The weights of two correct runs differ because their gradients differ. AdamW's step depends more on the sign of a
    gradient than on its size. So where a gradient is mostly rounding, as that of a key's bias, which softmax cancels,
    two correct steps may have any directions. The difference of the steps that follow from the two gradients is
    therefore computed with AdamW's formula, and allowed in addition to the tolerance. Wrong gradients
    fail the gradient check, and an update that does not follow AdamW's formula fails this check.
    """
    movements = _movements(one, learner, manifest["parameters"][learner])
    if not movements:
        return
    prefix = f"{learner}/0/weights/"
    explained = _explained(manifest, one, other, learner, info)
    sizes = {}
    for name, movement in movements.items():
        if prefix + name in one.tensors:
            size = max(movement, SEEN * norm(one.tensors[prefix + name]))
            sizes[name] = size + ESTIMATED * explained.get(name, Explained()).distance / tolerance.update
    found = worst_parameter(one, other, prefix, tolerance.update, sizes=sizes)
    if found is not None:
        yield Check("weights", one.step, f"{learner}: {found.name}", found.error, tolerance.update, found.where)
    if tolerance.systematic is not None:
        slopes = {name: explained.get(name, Explained()).slope for name in sizes}
        yield from _movement_slopes(one, other, learner, slopes, tolerance.systematic.movement)


@dataclass(frozen=True)
class Explained:
    """How the step of a parameter in the replay differs from the recorded step, according to AdamW's formula for the
    two gradients: the norm of the difference, and the slope of the replay's step as a function of the recorded step,
    minus 1."""

    distance: float = 0.0
    slope: float = 0.0


def _explained(
    manifest: Mapping[str, Any],
    one: StepRecord,
    other: StepRecord,
    learner: str,
    info: tuple[dict[str, Any], dict[str, Any]],
) -> dict[str, Explained]:
    """Estimates from the sampled weights how the gradients of the two runs let their steps differ. Everything else is
    that of the recorded run, so that wrong moments or settings explain nothing."""
    shapes, optim = manifest["parameters"][learner], _settings(manifest, learner)
    no_decay = manifest.get("spared", {}).get(learner, ())
    ours, theirs = (below(record.tensors, f"{learner}/0/sample/") for record in (one, other))
    norms = [update["grad_norm"] for update in info]
    found = {}
    for name, shape in shapes.items():
        kept, gradient = _kept(ours, name), theirs.get(f"{name}/gradient")
        if gradient is None or not kept.keys() >= {"gradient", "before", "count"}:
            continue
        decay, rate = decay_of(name, shape, optim, no_decay), info[0]["lr"] * rate_ratio_of(name, optim)
        recorded, replayed = (
            _adamw(side, rate, size, optim, decay) - kept["before"]
            for side, size in zip((kept, {**kept, "gradient": gradient.double()}), norms, strict=True)
        )
        found[name] = _step_difference(recorded, replayed, math.prod(shape))
    return found


def _step_difference(ours: torch.Tensor, theirs: torch.Tensor, count: int) -> Explained:
    distance = float((theirs - ours).square().mean().sqrt()) * count**0.5
    size = float(ours.square().sum())
    slope = float((ours * theirs).sum()) / size - 1 if size else 0.0
    if not math.isfinite(distance + slope):
        return Explained()
    return Explained(distance, slope)


def _movements(record: StepRecord, learner: str, shapes: dict[str, list[int]]) -> dict[str, float]:
    """Estimates the norm of each parameter's change in the update, from the sampled weights."""
    samples, found = below(record.tensors, f"{learner}/0/sample/"), {}
    for key, after in samples.items():
        name = key.removesuffix("/after")
        if key != name and f"{name}/before" in samples:
            step = float((after.double() - samples[f"{name}/before"].double()).square().mean().sqrt())
            found[name] = step * math.prod(shapes[name]) ** 0.5
    return found


def _movement_slopes(
    one: StepRecord, other: StepRecord, learner: str, explained: Mapping[str, float], bound: Bound
) -> Iterator[Check]:
    """Compares how far the update moved each parameter in the replay and in the recorded run. The reported factor is 0
    if the parameter did not move in the replay, and 2 if it moved twice as far as in the recorded run. `explained` is
    the slope that follows from the gradients."""
    worst: tuple[Excess, str] | None = None
    for name, expected in explained.items():
        start, after = (
            [record.tensors.get(f"{learner}/0/{when}/{name}") for record in (one, other)]
            for when in ("start", "weights")
        )
        if any(digest is None for digest in (*start, *after)):
            continue  # an older tape
        found = movement_slope(start, after)  # type: ignore[arg-type]
        if found is not None:
            difference, rounding, count = found
            excess = Excess("slope", abs(difference - expected), bound.allowed(rounding, count))
            if worst is None or excess.times > worst[0].times:
                worst = excess, f"{name}: moved {1 + difference:.3g} times as far as in the recorded run"
    if worst is not None:
        excess, where = worst
        yield Check("weights", one.step, f"{learner}: movement", excess.value, excess.allowed, where)


# -- digests by parameter


@dataclass(frozen=True)
class WorstParameter:
    """The parameter whose digest has the largest relative error."""

    name: str
    error: float
    where: str


def worst_parameter(
    one: StepRecord,
    other: StepRecord,
    prefix: str,
    allowed: float,
    *,
    total: float = 0.0,
    sizes: Mapping[str, float] | None = None,
) -> WorstParameter | None:
    """Returns the parameter with the largest error among the digests whose name begins with `prefix`. An error is
    divided by the entry of `sizes`, or by the norm of the parameter. `total` is the norm of all parameters together."""
    ours, theirs = below(one.tensors, prefix), below(other.tensors, prefix)
    errors: dict[str, float] = {}
    floor = NEGLIGIBLE * total / max(1, len(ours)) ** 0.5
    for name, x in ours.items():
        if name not in theirs:
            return WorstParameter(name, math.inf, "on one side only")
        size = max(norm(x), norm(theirs[name]), floor) if sizes is None else sizes.get(name, 0.0)
        errors[name] = finite(distance(x, theirs[name]) / size) if size else 0.0
    if not errors:
        return None
    worst, error, differing = worst_named(errors, allowed)
    where = f"{_norms(ours[worst], theirs[worst])}{_blocks(ours[worst], theirs[worst])}"
    return WorstParameter(worst, error, where + _how_many(differing, len(errors)) if differing else where)


def worst_slope(
    one: StepRecord, other: StepRecord, prefix: str, bound: Bound, inherited: float
) -> tuple[str, Excess, str] | None:
    """Returns the parameter whose regression slope (replay on recorded run) exceeds its limit most, among the digests
    whose name begins with `prefix`. The result contains the name, the slope and both norms."""
    pairs = _pairs(one, other, prefix)
    found = {name: slope_excess(*pair, bound, inherited) for name, pair in pairs.items()}
    if not any(excess.allowed for excess in found.values()):
        return None
    worst, _, differing = worst_named({name: excess.times for name, excess in found.items()}, 1.0)
    return worst, found[worst], _norms(*pairs[worst]) + _how_many(differing, len(found))


def overall(one: StepRecord, other: StepRecord, prefix: str, bound: Bound, inherited: float) -> Excess:
    """Returns the regression slope over all parameters together, from the digests whose name begins with `prefix`."""
    return overall_slope(list(_pairs(one, other, prefix).values()), bound, inherited)


def _pairs(one: StepRecord, other: StepRecord, prefix: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    ours, theirs = below(one.tensors, prefix), below(other.tensors, prefix)
    return {name: (digest, theirs[name]) for name, digest in ours.items() if name in theirs}


def _norms(x: torch.Tensor, y: torch.Tensor) -> str:
    return f"norm {norm(x):.6g} against {norm(y):.6g}"


def _how_many(differing: int, count: int) -> str:
    return f"; {differing} of {count} parameters differ"


def _blocks(x: torch.Tensor, y: torch.Tensor) -> str:
    """Returns a text with the blocks of rows that differ, or "" if all blocks differ."""
    errors = distances(x, y)
    found = [i for i, error in enumerate(errors) if error > 0.05 * max(errors)]
    if not found or len(found) == BLOCKS or math.isinf(max(errors)):
        return ""
    return f", in eighths {found[0] + 1} to {found[-1] + 1} of the parameter's rows"
