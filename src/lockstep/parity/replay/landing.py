"""What the optimizer made of the gradients, and where the weights landed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from lockstep.parity.replay.adamw import follow
from lockstep.parity.replay.checks import Check, finite, share
from lockstep.parity.replay.parameters import whose_rows, worst_parameter
from lockstep.parity.replay.systematic import Bound, Excess, movement_slope
from lockstep.parity.replay.tolerance import Tolerance
from lockstep.tape.digest import relative
from lockstep.tape.format import StepRecord, TapeFolder
from lockstep.tape.observer import sampled

# Movements of weights below this share of their size drown in the rounding of their digests.
SEEN = 1e-5
# Digests of the same weights on the same device differ by the order of their sums at most.
UNTOUCHED = 1e-5
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def judge_landing(
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
    """`manifest` is the replay's. `restored`: it started from the recorded optimizer state too."""
    rates = info[0]["lr"], info[1]["lr"]
    difference = abs(rates[0] - rates[1]) / max(rates[0], 1e-30)
    what = f"{learner}, update {number + 1}: learning rate"
    yield Check("optimizer", one.step, what, finite(difference), 1e-6, f"{rates[0]:g} against {rates[1]:g}", number)
    if number:
        return
    if restored:
        yield from _moments(one, other, learner, tolerance)
    yield from judge_formula(manifest, other, learner, info[1], tolerance)
    yield from _held(manifest, other, learner)
    yield from _weights(manifest, one, other, learner, tolerance)


def judge_left(sides: Sequence[tuple[str, TapeFolder]], step: int) -> Iterator[Check]:
    """Nothing may change a weight between an optimizer's last step and the beginning of the next step.

    Each side is held against itself, so that a forced replay, whose next step has recorded weights, sees it too.
    """
    for side, tape in sides:
        record, now = tape.read_step(step), tape.read_left(step)
        for learner in dict.fromkeys(name.split("/")[0] for name in now):
            prefix = f"{learner}/left/"
            errors = {
                name.removeprefix(prefix): relative(record.tensors[name], after)
                for name, after in now.items()
                if name.startswith(prefix) and name in record.tensors
            }
            if not errors:
                continue
            worst = max(errors, key=lambda name: errors[name])
            off = sum(not error <= UNTOUCHED for error in errors.values())
            where = f"{off} of {len(errors)} parameters were changed after the optimizer's step" if off else ""
            what = f"{learner}: {worst}, {side}: from the last update to the next step"
            last = sum(update["learner"] == learner for update in record.info["updates"]) - 1
            yield Check("weights", step, what, errors[worst], UNTOUCHED, where, last)


def _moments(one: StepRecord, other: StepRecord, learner: str, tolerance: Tolerance) -> Iterator[Check]:
    """The optimizer's memory before the update: of single weights, as the tape put it there."""
    prefix = f"{learner}/0/sample/"
    worst, error, where = "", 0.0, ""
    for key, ours in one.tensors.items():
        kind = key.rsplit("/", 1)[-1]
        if not key.startswith(prefix) or kind not in ("exp_avg", "exp_avg_sq", "count"):
            continue
        theirs = other.tensors.get(key)
        # Weights without a gradient on one side have no sample there; the gradient's check tells.
        if theirs is None and f"{key.rsplit('/', 1)[0]}/gradient" not in other.tensors:
            continue
        difference = math.inf if theirs is None else share(ours.reshape(-1), theirs.reshape(-1))
        if not difference <= error:
            worst, error = key.removeprefix(prefix), difference
            where = f"{worst}: on one side only" if theirs is None else f"{worst}: a share of {difference:.3g} apart"
    what = f"{learner}: moments before the update"
    yield Check("optimizer", one.step, what, finite(error), tolerance.optimizer, where)


def judge_formula(
    manifest: Mapping[str, Any], record: StepRecord, learner: str, info: dict[str, Any], tolerance: Tolerance
) -> Iterator[Check]:
    if not any(name.startswith(f"{learner}/0/sample/") for name in record.tensors):
        return
    shapes, optim = manifest["parameters"][learner], manifest["recipe"]["optim"]
    spared = manifest.get("spared", {}).get(learner, ())
    followed = follow(record, learner, shapes, optim, info["lr"], info["grad_norm"], tolerance.optimizer, spared)
    where = f"{followed.parameter}: {followed.expected:.9g} by the formula, {followed.actual:.9g} found"
    if followed.off:
        where += f"; off: {', '.join(followed.off[:4])}" + (" ..." if len(followed.off) > 4 else "")
        where += whose_rows(followed.indices, shapes[followed.parameter], manifest["world_size"])
    what = f"{learner}: weights by AdamW's formula"
    yield Check("optimizer", record.step, what, finite(followed.error), tolerance.optimizer, where)


def _held(manifest: Mapping[str, Any], record: StepRecord, learner: str) -> Iterator[Check]:
    """Parameters in half precision must be their masters, rounded: nothing else may stand between the two."""
    prefix, dtype = f"{learner}/0/sample/", DTYPES[manifest["recipe"]["model"]["dtype"]]
    error, where = 0.0, ""
    for key, held in record.tensors.items():
        if not key.startswith(prefix) or not key.endswith("/held"):
            continue
        name = key.removeprefix(prefix).removesuffix("/held")
        wanted = record.tensors[f"{prefix}{name}/after"].to(dtype).float()
        off = (held != wanted).nonzero().flatten()
        if len(off) / len(held) > error:
            error = len(off) / len(held)
            shape = manifest["parameters"][learner][name]
            indices = sampled(math.prod(shape))[off].tolist()
            first = int(off[0])
            where = (
                f"{name}: {len(off)} of {len(held)} sampled weights are not their masters, "
                f"{float(held[first]):.6g} for {float(wanted[first]):.6g}"
                f"{whose_rows(indices, shape, manifest['world_size'])}"
            )
    if any(key.startswith(prefix) for key in record.tensors):
        yield Check("weights", record.step, f"{learner}: weights and their masters", error, 0.0, where)


def _weights(
    manifest: Mapping[str, Any], one: StepRecord, other: StepRecord, learner: str, tolerance: Tolerance
) -> Iterator[Check]:
    moved = _movement(one, learner, manifest["parameters"][learner])
    if not moved:
        return
    prefix = f"{learner}/0/weights/"
    sizes = {
        name: max(way, SEEN * float(one.tensors[prefix + name][0])) * (1 + _noise(one, other, learner, name))
        for name, way in moved.items()
        if prefix + name in one.tensors
    }
    found = worst_parameter(one, other, prefix, tolerance.update, sizes=sizes)
    if found is not None:
        yield Check("weights", one.step, f"{learner}: {found.name}", found.error, tolerance.update, found.where)
    if tolerance.systematic is not None:
        yield from _movements(one, other, learner, sizes, tolerance.systematic.movement)


def _noise(one: StepRecord, other: StepRecord, learner: str, name: str) -> float:
    """The share of a parameter's gradient that is rounding, at most 1. The gradient's own check judges it.

    AdamW moves a weight by the sign of its gradient more than by its size: where gradients nearly cancel, as those of
    keys' biases do, two clean updates may go opposite ways.
    """
    sides = [record.tensors.get(f"{learner}/0/gradient/{name}") for record in (one, other)]
    return 0.0 if sides[0] is None or sides[1] is None else min(1.0, relative(sides[0], sides[1]))


def _movements(
    one: StepRecord, other: StepRecord, learner: str, sizes: Mapping[str, float], bound: Bound
) -> Iterator[Check]:
    """By what factor of the recorded update a parameter moved: 0 of one that stayed, 2 of one that moved twice."""
    worst: tuple[Excess, str] | None = None
    for name in sizes:
        start, after = (
            [record.tensors.get(f"{learner}/0/{when}/{name}") for record in (one, other)]
            for when in ("start", "weights")
        )
        if any(digest is None for digest in (*start, *after)):
            continue  # a tape of an earlier version
        found = movement_slope(start, after)  # type: ignore[arg-type]
        if found is not None:
            off, rounding, count = found
            excess = Excess("slope", abs(off), bound.allowed(rounding, count))
            if worst is None or excess.times > worst[0].times:
                worst = excess, f"{name}: moved {1 + off:.3g} times as far"
    if worst is not None:
        excess, where = worst
        yield Check("weights", one.step, f"{learner}: movement", excess.value, excess.allowed, where)


def _movement(record: StepRecord, learner: str, shapes: dict[str, list[int]]) -> dict[str, float]:
    """How far the update moved each parameter, estimated from its sampled weights."""
    prefix, found = f"{learner}/0/sample/", {}
    for name, after in record.tensors.items():
        if name.startswith(prefix) and name.endswith("/after"):
            short = name.removeprefix(prefix).removesuffix("/after")
            before = record.tensors.get(f"{prefix}{short}/before")
            if before is not None:
                step = float((after.double() - before.double()).square().mean().sqrt())
                found[short] = step * math.prod(shapes[short]) ** 0.5
    return found
