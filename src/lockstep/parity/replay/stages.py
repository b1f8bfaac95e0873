"""A recorded step against its replay: a verdict for each stage, from what went in to where the weights landed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.parity.replay.checks import Check, finite, root_mean_square, share, worst_difference
from lockstep.parity.replay.generation import judge_generation
from lockstep.parity.replay.landing import judge_landing, judge_left
from lockstep.parity.replay.parameters import overall, worst_parameter, worst_slope
from lockstep.parity.replay.precision import judge_precision, sampled_gradients
from lockstep.parity.replay.systematic import Limits, line
from lockstep.parity.replay.tolerance import Tolerance
from lockstep.recipe.registry import drawn_by
from lockstep.tape.format import StepRecord, TapeFolder
from lockstep.tape.rows import RECEIVED, rollouts_of
from lockstep.types import Rollout

# Log-probabilities that losses compare with, as their checks are named.
WENT_IN = ("old", "reference", "values")


@dataclass(frozen=True)
class Side:
    """A tape with what its manifest says."""

    tape: TapeFolder
    manifest: dict[str, Any]

    @classmethod
    def open(cls, tape: TapeFolder) -> Side:
        return cls(tape, tape.manifest())

    @property
    def drawn_by(self) -> str:
        """Whose noise its responses were drawn with."""
        return drawn_by(self.recipe["rollout"].get("engine", "native"))

    @property
    def recipe(self) -> dict[str, Any]:
        return self.manifest["recipe"]


def judge_step(a: Side, b: Side, step: int, tolerance: Tolerance, *, generated: bool) -> list[Check]:
    """Every check of one step. `generated`: B's responses are its own, from the recorded weights."""
    one, other = a.tape.read_step(step), b.tape.read_step(step)
    checks = [*_batch(one, other)]
    if not all(check.passed for check in checks):
        return checks  # numbers of other tokens cannot be compared
    if "rollout" in a.recipe:
        if generated:
            checks += _generation(a, b, one, tolerance)
        checks += _reward(one, other)
    alike = a.recipe["model"]["dtype"] == b.recipe["model"]["dtype"]
    checks += _logprobs(one, other, tolerance, alike=alike)
    checks += _advantages(one, other, tolerance, checks)
    for index, update in enumerate(one.info["updates"]):
        if index < len(other.info["updates"]):
            checks += _update(b, one, other, update["learner"], index, tolerance, checks, restored=generated)
            if alike and tolerance.systematic is not None:
                checks += _summed_finely(a, one, other, index)
    checks += judge_left((("recorded run", a.tape), ("replay", b.tape)), step)
    return checks


def _batch(a: StepRecord, b: StepRecord) -> Iterator[Check]:
    names = {"fed/lengths": "sequence", "fed/ids": "token", "fed/asked": "target", "fed/targets": "sequence"}
    if recorded(a) and not (len(a.tensors["fed/asked"]) and len(b.tensors["fed/asked"])):
        # Where a framework's output holds no logits, nothing was asked.
        names = {"fed/lengths": "sequence", "fed/ids": "token"}
    for name, unit in names.items():
        x, y = a.tensors[name], b.tensors[name]
        if x.shape != y.shape or not torch.equal(x, y):
            where = worst_difference(x.flatten(), y.flatten(), unit)
            yield Check("batch", a.step, "tokens and loss mask", math.inf, 0.0, where)
            return
    yield Check("batch", a.step, "tokens and loss mask", 0.0, 0.0)
    yield from _received(a, b)


def _received(a: StepRecord, b: StepRecord) -> Iterator[Check]:
    """The micro-batches as the models get them: a fault of packing or padding changes these and not the rows."""
    said = {
        "target": "the token that is asked for",
        "position": "the position that the token is predicted from",
        "context": "hash of the tokens and positions before it",
    }
    counts: Counter[str] = Counter()
    for update in a.info["updates"]:
        learner = update["learner"]
        key, what = f"{learner}/{counts[learner]}/received", f"{learner}, update {counts[learner] + 1}: micro-batches"
        for name in RECEIVED:
            x, y = a.tensors.get(f"{key}/{name}"), b.tensors.get(f"{key}/{name}")
            if x is None or y is None:
                continue  # a tape of an earlier version, or an update that one side did not make
            if x.shape != y.shape or not torch.equal(x, y):
                where = f"{worst_difference(x, y, 'target')}: {said[name]}; {_share_off(x, y)}"
                yield Check("batch", a.step, what, math.inf, 0.0, where, counts[learner])
                break
        counts[learner] += 1


def _share_off(x: torch.Tensor, y: torch.Tensor) -> str:
    off = int((x != y).sum()) if x.shape == y.shape else len(x)
    return f"{off} of {len(x)} targets differ"


def _generation(a: Side, b: Side, one: StepRecord, tolerance: Tolerance) -> list[Check]:
    if a.drawn_by != b.drawn_by:
        return []
    ours, theirs = (rollouts_of(side.tape.read_table(side.tape.rollouts_file(one.step))) for side in (a, b))
    return [responses(a, one, ours, theirs, tolerance)]


def responses(
    a: Side, record: StepRecord, ours: Sequence[Rollout], theirs: Sequence[Rollout], tolerance: Tolerance
) -> Check:
    """Responses to a recorded step's prompts against the recorded ones."""
    return judge_generation(
        record.step,
        ours,
        theirs,
        allowed=tolerance.logprob,
        seed=a.recipe["run"]["seed"],
        first_key=int(record.info["carried"]["position"]),
        vocabulary=a.manifest["vocabulary"],
        greedy=a.recipe["rollout"]["temperature"] == 0,
        known_noise=a.drawn_by == drawn_by("native"),
    )


def _reward(a: StepRecord, b: StepRecord) -> Iterator[Check]:
    x, y = a.tensors["step/scores"], b.tensors["step/scores"]
    difference = torch.nan_to_num((x.double() - y.double()).abs(), nan=math.inf) if x.shape == y.shape else None
    error = math.inf if difference is None else float(difference.max()) if len(difference) else 0.0
    yield Check("reward", a.step, "scores of the recorded responses", error, 1e-4, worst_difference(x, y, "response"))


def _logprobs(a: StepRecord, b: StepRecord, tolerance: Tolerance, *, alike: bool) -> Iterator[Check]:
    named = {"step/old": "old", "step/reference": "reference", "step/values": "values"}
    for update in a.info["updates"]:
        learner = update["learner"]
        if learner != "critic":
            named[f"{learner}/0/answers"] = f"{learner}, first update"
    for name, what in named.items():
        if (name in a.tensors) != (name in b.tensors):
            # A recording of another framework has none where the framework's output holds no logits.
            if not (recorded(a) or recorded(b)):
                yield Check("log-probs", a.step, what, math.inf, tolerance.logprob, "on one side only")
        elif name in a.tensors:
            x, y = a.tensors[name], b.tensors[name]
            where = worst_difference(x, y, "token") + _whose(b, name, x, y)
            yield Check("log-probs", a.step, what, root_mean_square(x, y), tolerance.logprob, where)
            if tolerance.systematic is not None and name != "step/values":
                yield from _on_a_line(a.step, what, x, y, tolerance.systematic)
                if alike:
                    yield from judge_precision("log-probs", a.step, what, x, y)


def _on_a_line(step: int, what: str, x: torch.Tensor, y: torch.Tensor, limits: Limits) -> Iterator[Check]:
    """Over all targets together: what another temperature, scale or mean makes of log-probabilities."""
    found = line(x, y)
    if found is None:
        return
    allowed = limits.logprob_slope.allowed(found.rounding / found.spread, found.count)
    where = f"slope {1 + found.slope:.5f} over {found.count} targets"
    yield Check("log-probs", step, f"{what}: slope", abs(found.slope), allowed, where)
    allowed = limits.logprob_offset.allowed(found.rounding, found.count)
    where = f"{found.offset:+.5f} in the mean of {found.count} targets"
    yield Check("log-probs", step, f"{what}: offset", abs(found.offset), allowed, where)


def recorded(record: StepRecord) -> bool:
    """Whether another framework's loop was recorded (`lockstep_record.py`), of which some numbers may be missing."""
    return "calls" in record.info


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
            yield Check("advantages", a.step, name, share(x, y), allowed, worst_difference(x, y, "token"))


def _update(
    b: Side,
    one: StepRecord,
    other: StepRecord,
    learner: str,
    index: int,
    tolerance: Tolerance,
    checks: Sequence[Check],
    *,
    restored: bool,
) -> Iterator[Check]:
    mine = [u for u in one.info["updates"][:index] if u["learner"] == learner]
    number = len(mine)
    info = one.info["updates"][index], other.info["updates"][index]
    key, step = f"{learner}/{number}", one.step
    what = f"{learner}, update {number + 1}"
    x, y = (_found(record, f"{key}/pulls") for record in (one, other))
    said = _found(one, f"{key}/answers"), _found(other, f"{key}/answers")
    answers = 0.0 if said[0] is None or said[1] is None else root_mean_square(said[0], said[1])
    if number:
        yield from _moved_answers(one, other, learner, number, what, tolerance)
    # Later updates of a step see weights that earlier ones moved: what their answers are off by is not the loss's.
    inherited = tolerance.growth * answers if number else 0.0
    if "loss" in info[0] and "loss" in info[1]:
        size = max(abs(info[0]["loss"]), 0.0 if x is None else float(x.double().abs().sum()), 1e-12)
        difference = abs(info[0]["loss"] - info[1]["loss"]) / size
        words = f"{info[0]['loss']:.8g} against {info[1]['loss']:.8g}"
        yield Check("loss", step, f"{what}: value", finite(difference), tolerance.loss + 10 * answers, words, number)
    pulls = 0.0
    if x is not None and y is not None:
        pulls, allowed = share(x, y), 10 * tolerance.loss + 10 * answers + inherited
        if tolerance.systematic is not None and not number:
            allowed = tolerance.systematic.loss + _reason(one, answers, checks)
        where = worst_difference(x, y, "target")
        yield Check("loss", step, f"{what}: its slope at each target", pulls, allowed, where, number)
    yield from _gradient(one, other, key, what, info, number, tolerance, inherited, pulls)
    if "lr" in info[0] and "lr" in info[1]:
        yield from judge_landing(b.manifest, one, other, learner, number, info, tolerance, restored=restored)


def _found(record: StepRecord, name: str) -> torch.Tensor | None:
    """A tensor of the step. Only recordings of other frameworks may lack it."""
    return record.tensors.get(name) if recorded(record) else record.tensors[name]


def _reason(record: StepRecord, answers: float, checks: Sequence[Check]) -> float:
    """How far a loss's slopes may be off for what went into the loss. The loss itself is computed in fp32.

    A loss over whole sequences, as of preferences, adds their tokens' rounding up, which grows as their length's root.
    """
    other = max((c.error for c in checks if c.stage == "log-probs" and c.what in WENT_IN), default=0.0)
    estimated = max((c.error for c in checks if c.stage == "advantages"), default=0.0)
    longest = float(record.tensors["fed/targets"].max()) if len(record.tensors["fed/targets"]) else 0.0
    return max(1.0, 0.3 * longest**0.5) * (answers + other) + 1.5 * estimated


def _summed_finely(a: Side, one: StepRecord, other: StepRecord, index: int) -> Iterator[Check]:
    """With masters in fp32 the sum over micro-batches is kept in fp32 too; that of one micro-batch is as it came."""
    infos = one.info["updates"][index], other.info["updates"][index]
    learner = infos[0]["learner"]
    first = all(update["learner"] != learner for update in one.info["updates"][:index])
    several = all(info.get("micro_batches", 1) > 1 for info in infos)
    if first and several and a.recipe["model"]["master_weights"]:
        sides = [sampled_gradients(record, learner) for record in (one, other)]
        yield from judge_precision("gradient", one.step, f"{learner}, update 1", *sides)


def _moved_answers(
    one: StepRecord, other: StepRecord, learner: str, number: int, what: str, tolerance: Tolerance
) -> Iterator[Check]:
    """What a later update of a step sees must have moved from the first passes alike: else weights were lost between.

    Judged by how far the updates before it moved the answers, as the weights themselves are.
    """
    key = f"{learner}/{number}/answers"
    before, first = _before(one, learner, number), _before(other, learner, number)
    if before is None or first is None:
        return
    x, y = one.tensors[key] - before, other.tensors[key] - first
    way = root_mean_square(x, torch.zeros_like(x))
    allowed = tolerance.logprob + (tolerance.update * way if way else 0.0)
    said = f"{worst_difference(one.tensors[key], other.tensors[key], 'target')}; moved by {way:.3g} before"
    # Named with the update that should have moved them.
    yield Check(
        "weights",
        one.step,
        f"{what}: what it sees of the update before",
        root_mean_square(x, y),
        allowed,
        said,
        number - 1,
    )


def _before(record: StepRecord, learner: str, number: int) -> torch.Tensor | None:
    """What was said of an update's targets before the first update of the step; None where nobody asked."""
    every = record.tensors.get("step/values" if learner == "critic" else "step/old")
    counts = [update["targets"] for update in record.info["updates"] if update["learner"] == learner]
    if every is None or not len(every):
        return None
    start = sum(counts[:number]) % len(every)
    found = every[start : start + counts[number]]
    return found if len(found) == counts[number] else None


def _gradient(
    one: StepRecord,
    other: StepRecord,
    key: str,
    what: str,
    info: tuple[dict[str, Any], dict[str, Any]],
    number: int,
    tolerance: Tolerance,
    inherited: float,
    pulls: float,
) -> Iterator[Check]:
    """`pulls`: what the loss's slopes are off by, which is not the gradient's doing."""
    if "grad_norm" not in info[0] or "grad_norm" not in info[1]:
        return
    norms = info[0]["grad_norm"], info[1]["grad_norm"]
    size = max(abs(norms[0]), 1e-12)
    said = f"{norms[0]:.8g} against {norms[1]:.8g}"
    allowed = tolerance.gradient + inherited
    found = worst_parameter(one, other, f"{key}/gradient/", allowed, total=norms[0])
    if found is not None:
        yield Check("gradient", one.step, f"{what}: {found.name}", found.error, allowed, found.where, number)
    limits = tolerance.systematic
    steepest = None if limits is None else worst_slope(one, other, f"{key}/gradient/", limits.gradient, 2 * pulls)
    if limits is not None and steepest is not None:
        name, excess, where = steepest
        yield Check("gradient", one.step, f"{what}: {name}, slope", excess.value, excess.allowed, where, number)
        together = overall(one, other, f"{key}/gradient/", limits.gradients, 2 * pulls)
        yield Check("gradient", one.step, f"{what}: all, slope", together.value, together.allowed, said, number)
    if size > 1e-7:
        difference = abs(norms[0] - norms[1]) / size
        yield Check("gradient", one.step, f"{what}: norm", finite(difference), allowed, said, number)
