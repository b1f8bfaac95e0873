"""A recorded step against its replay: a verdict for each stage, from what went in to where the weights landed."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.parity.adamw import follow
from lockstep.parity.checks import Check, root_mean_square, share, worst_place
from lockstep.parity.generation import judge_generation
from lockstep.parity.tolerance import Tolerance
from lockstep.tape.digest import BLOCKS, distance, distances, norm
from lockstep.tape.format import StepRecord, TapeFolder
from lockstep.tape.rows import rollouts_of

# A gradient far below the others is rounding: it is held to this share of the average one.
NEGLIGIBLE = 1e-3
# Movements of weights below this share of their size drown in the rounding of their digests.
SEEN = 1e-5


@dataclass(frozen=True)
class Side:
    """A tape with what its manifest says."""

    tape: TapeFolder
    manifest: dict[str, Any]

    @classmethod
    def open(cls, tape: TapeFolder) -> Side:
        return cls(tape, tape.manifest())

    @property
    def recipe(self) -> dict[str, Any]:
        return self.manifest["recipe"]


def judge_step(a: Side, b: Side, step: int, tolerance: Tolerance, *, generated: bool) -> list[Check]:
    """Every check of one step. `generated`: B's responses are its own, from the recorded weights."""
    one, other = a.tape.read_step(step), b.tape.read_step(step)
    checks = [*_batch(one, other)]
    if not checks[0].passed:
        return checks  # numbers of other tokens cannot be compared
    if "rollout" in a.recipe:
        if generated:
            checks += _generation(a, b, one, tolerance)
        checks += _reward(one, other)
    checks += _logprobs(one, other, tolerance)
    checks += _advantages(one, other, tolerance, checks)
    for index, update in enumerate(one.info["updates"]):
        if index < len(other.info["updates"]):
            checks += _update(b, one, other, update["learner"], index, tolerance)
    return checks


def _batch(a: StepRecord, b: StepRecord) -> Iterator[Check]:
    names = {"fed/lengths": "sequence", "fed/ids": "token", "fed/asked": "target", "fed/targets": "sequence"}
    for name, unit in names.items():
        x, y = a.tensors[name], b.tensors[name]
        if x.shape != y.shape or not torch.equal(x, y):
            where = worst_place(x.flatten(), y.flatten(), unit)
            yield Check("batch", a.step, "tokens and loss mask", math.inf, 0.0, where)
            return
    yield Check("batch", a.step, "tokens and loss mask", 0.0, 0.0)


def _generation(a: Side, b: Side, one: StepRecord, tolerance: Tolerance) -> list[Check]:
    ours, theirs = (rollouts_of(side.tape.read_table(side.tape.rollouts_file(one.step))) for side in (a, b))
    return judge_generation(
        one.step,
        ours,
        theirs,
        allowed=tolerance.logprob,
        seed=a.recipe["run"]["seed"],
        first_key=int(one.info["carried"]["position"]),
        vocabulary=a.manifest["vocabulary"],
        greedy=a.recipe["rollout"]["temperature"] == 0,
    )


def _reward(a: StepRecord, b: StepRecord) -> Iterator[Check]:
    x, y = a.tensors["step/scores"], b.tensors["step/scores"]
    apart = torch.nan_to_num((x.double() - y.double()).abs(), nan=math.inf) if x.shape == y.shape else None
    error = math.inf if apart is None else float(apart.max()) if len(apart) else 0.0
    yield Check("reward", a.step, "scores of the recorded responses", error, 1e-4, worst_place(x, y, "response"))


def _logprobs(a: StepRecord, b: StepRecord, tolerance: Tolerance) -> Iterator[Check]:
    named = {"step/old": "old", "step/reference": "reference", "step/values": "values"}
    for update in a.info["updates"]:
        learner = update["learner"]
        if learner != "critic":
            named[f"{learner}/0/answers"] = f"{learner}, first update"
    for name, what in named.items():
        if (name in a.tensors) != (name in b.tensors):
            yield Check("log-probs", a.step, what, math.inf, tolerance.logprob, "on one side only")
        elif name in a.tensors:
            x, y = a.tensors[name], b.tensors[name]
            where = worst_place(x, y, "token") + _whose(b, name, x, y)
            yield Check("log-probs", a.step, what, root_mean_square(x, y), tolerance.logprob, where)


def _whose(b: StepRecord, name: str, x: torch.Tensor, y: torch.Tensor) -> str:
    """The rank that computed what is off, where one alone did."""
    owner = b.tensors.get(name.replace("/answers", "/owner"))
    if owner is None or x.shape != y.shape or owner.max() == 0:
        return ""
    errors = {int(rank): root_mean_square(x[owner == rank], y[owner == rank]) for rank in owner.unique()}
    worst = max(errors, key=lambda rank: errors[rank])
    rest = max((error for rank, error in errors.items() if rank != worst), default=0.0)
    return f" (rank {worst} alone)" if errors[worst] > 100 * rest else ""


def _advantages(a: StepRecord, b: StepRecord, tolerance: Tolerance, checks: list[Check]) -> Iterator[Check]:
    """What is estimated from rewards and log-probabilities may be off by what these are off."""
    before = max((c.error for c in checks if c.stage == "log-probs" and "update" not in c.what), default=0.0)
    for name in ("rewards", "advantages", "returns", "keep", "importance"):
        key = f"step/{name}"
        if key in a.tensors and key in b.tensors:
            x, y = a.tensors[key], b.tensors[key]
            allowed = max(tolerance.advantage, tolerance.growth * before)
            yield Check("advantages", a.step, name, share(x, y), allowed, worst_place(x, y, "token"))


def _update(
    b: Side, one: StepRecord, other: StepRecord, learner: str, index: int, tolerance: Tolerance
) -> Iterator[Check]:
    mine = [u for u in one.info["updates"][:index] if u["learner"] == learner]
    number = len(mine)
    info = one.info["updates"][index], other.info["updates"][index]
    key, step = f"{learner}/{number}", one.step
    what = f"{learner}, update {number + 1}"
    x, y = (record.tensors[f"{key}/pulls"] for record in (one, other))
    answers = root_mean_square(*(record.tensors[f"{key}/answers"] for record in (one, other)))
    # Later updates of a step see weights that earlier ones moved: what their answers are off by is not the loss's.
    inherited = tolerance.growth * answers if number else 0.0
    size = max(abs(info[0]["loss"]), float(x.double().abs().sum()), 1e-12)
    apart = abs(info[0]["loss"] - info[1]["loss"]) / size
    said = f"{info[0]['loss']:.8g} against {info[1]['loss']:.8g}"
    yield Check("loss", step, f"{what}: value", _finite(apart), tolerance.loss + 10 * answers, said, number)
    where = worst_place(x, y, "target")
    allowed = 10 * tolerance.loss + 10 * answers + inherited
    yield Check("loss", step, f"{what}: its slope at each target", share(x, y), allowed, where, number)
    yield from _gradient(one, other, key, what, info, number, tolerance, inherited)
    if number == 0 and "lr" in info[1]:
        yield from _optimizer(b, one, other, learner, info[1], tolerance)


def _gradient(
    one: StepRecord,
    other: StepRecord,
    key: str,
    what: str,
    info: tuple[dict[str, Any], dict[str, Any]],
    number: int,
    tolerance: Tolerance,
    inherited: float,
) -> Iterator[Check]:
    if "grad_norm" not in info[0] or "grad_norm" not in info[1]:
        return
    norms = info[0]["grad_norm"], info[1]["grad_norm"]
    size = max(abs(norms[0]), 1e-12)
    said = f"{norms[0]:.8g} against {norms[1]:.8g}"
    allowed = tolerance.gradient + inherited
    if size > 1e-7:
        apart = abs(norms[0] - norms[1]) / size
        yield Check("gradient", one.step, f"{what}: norm", _finite(apart), allowed, said, number)
    found = _parameters(one, other, f"{key}/gradient/", norms[0])
    if found is not None:
        name, error, where = found
        yield Check("gradient", one.step, f"{what}: {name}", error, allowed, where, number)


def _parameters(
    one: StepRecord, other: StepRecord, prefix: str, total: float, sizes: dict[str, float] | None = None
) -> tuple[str, float, str] | None:
    """The parameter that is off most, as a share of its size (or of `sizes`), and in which rows."""
    names = [name for name in one.tensors if name.startswith(prefix)]
    worst: tuple[str, float, str] | None = None
    for name in names:
        short = name.removeprefix(prefix)
        if name not in other.tensors:
            return short, math.inf, "on one side only"
        x, y = one.tensors[name], other.tensors[name]
        floor = NEGLIGIBLE * total / max(1, len(names)) ** 0.5
        size = max(norm(x), norm(y), floor) if sizes is None else max(sizes[short], SEEN * norm(x))
        error = _finite(distance(x, y) / size if size else 0.0)
        if worst is None or error > worst[1]:
            worst = short, error, f"norm {norm(x):.6g} against {norm(y):.6g}{_rows(x, y)}"
    return worst


def _rows(x: torch.Tensor, y: torch.Tensor) -> str:
    """In which eighths of the rows the difference lies, where it is not everywhere."""
    errors = distances(x, y)
    off = [i for i, error in enumerate(errors) if error > 0.05 * max(errors)]
    if not off or len(off) == BLOCKS or math.isinf(max(errors)):
        return ""
    return f", in eighths {off[0] + 1} to {off[-1] + 1} of its rows"


def _optimizer(
    b: Side, one: StepRecord, other: StepRecord, learner: str, info: dict[str, Any], tolerance: Tolerance
) -> Iterator[Check]:
    step = one.step
    if any(name.startswith(f"{learner}/0/sample/") for name in other.tensors):
        shapes = b.manifest["parameters"][learner]
        followed = follow(other, learner, shapes, b.recipe["optim"], info["lr"], info["grad_norm"], tolerance.optimizer)
        where = f"{followed.parameter}: {followed.expected:.9g} by the formula, {followed.actual:.9g} found"
        if followed.off:
            where += f"; off: {', '.join(followed.off[:4])}" + (" ..." if len(followed.off) > 4 else "")
        what = f"{learner}: weights by AdamW's formula"
        yield Check("optimizer", step, what, _finite(followed.error), tolerance.optimizer, where)
    moved = _movement(one, learner, b.manifest["parameters"][learner])
    found = _parameters(one, other, f"{learner}/0/weights/", 0.0, moved) if moved else None
    if found is not None:
        name, error, where = found
        yield Check("weights", step, f"{learner}: {name}", error, tolerance.update, where)


def _movement(record: StepRecord, learner: str, shapes: dict[str, list[int]]) -> dict[str, float]:
    """How far the update moved each parameter, estimated from its sampled weights."""
    prefix, found = f"{learner}/0/sample/", {}
    for name, after in record.tensors.items():
        if name.startswith(prefix) and name.endswith("/after"):
            short = name.removeprefix(prefix).removesuffix("/after")
            before = record.tensors[f"{prefix}{short}/before"]
            step = float((after.double() - before.double()).square().mean().sqrt())
            found[short] = step * math.prod(shapes[short]) ** 0.5
    return found


def _finite(error: float) -> float:
    return error if math.isfinite(error) else math.inf
