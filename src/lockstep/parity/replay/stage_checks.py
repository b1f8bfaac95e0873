"""Compares a replayed step with the recorded step: batch, generation, rewards, log-probs, advantages, loss, gradients.

`optimizer_checks.py` compares the optimizer step and the weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lockstep.algorithms.divergence import K3_BOUND, divergence
from lockstep.kernels.sampling import gumbel_noise, sequence_keys, turn_key
from lockstep.parity.replay.optimizer_checks import (
    check_optimizer,
    check_unchanged,
    overall,
    worst_parameter,
    worst_slope,
)
from lockstep.parity.replay.replay_checks import (
    Check,
    Stage,
    finite,
    largest_difference,
    root_mean_square,
    share,
    worst_difference,
)
from lockstep.parity.replay.tolerances import Limits, Tolerance, line
from lockstep.recipe.registry import drawn_by
from lockstep.tape.tape_format import StepRecord, TapeFolder, below
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_rows import RECEIVED, rollouts_of
from lockstep.types import Rollout

# The names of the log-prob checks whose values the loss uses.
LOSS_INPUTS = ("old", "reference", "values")
SCORE = 1e-4
# Limits for the fraction of a tensor's values that bf16 represents exactly. If the fraction is above ROUNDED, the
# tensor was rounded to bf16. If the fraction is below FINE, the tensor was not rounded. One of 65,536 fp32 values is
# exact in bf16 by chance. Tensors with fewer than ENOUGH values are not tested.
ROUNDED, FINE, ENOUGH = 0.99, 0.9, 32


@dataclass(frozen=True)
class TapeSide:
    """One of the two compared recordings (tapes), with its manifest."""

    tape: TapeFolder
    manifest: dict[str, Any]

    @classmethod
    def open(cls, tape: TapeFolder) -> TapeSide:
        return cls(tape, tape.manifest())

    @property
    def drawn_by(self) -> str:
        """The name of the sampler whose random numbers produced the responses of this run."""
        return drawn_by(self.recipe["rollout"].get("engine", "native"))

    @property
    def recipe(self) -> dict[str, Any]:
        return self.manifest["recipe"]


def check_step(a: TapeSide, b: TapeSide, step: int, tolerance: Tolerance, *, generated: bool) -> list[Check]:
    """Returns all checks of one step. `generated` is true if run B generated its responses with the recorded
    weights."""
    one, other = a.tape.read_step(step), b.tape.read_step(step)
    checks = [*_batch(one, other)]
    if not all(check.passed for check in checks):
        return checks  # values of different tokens cannot be compared
    if "rollout" in a.recipe:
        if generated and a.drawn_by == b.drawn_by:
            ours, theirs = (
                rollouts_of(side.tape.read_table(side.tape.rollouts_file(step)), TapeImages(side.tape.path))
                for side in (a, b)
            )
            checks.append(check_responses(a, one, ours, theirs, tolerance))
        x, y = one.tensors["step/scores"], other.tensors["step/scores"]
        where = worst_difference(x, y, "response")
        what = "scores of the recorded responses"
        checks.append(Check("reward", step, what, largest_difference(x, y), SCORE, where))
    same_dtype = a.recipe["model"]["dtype"] == b.recipe["model"]["dtype"]
    checks += _logprobs(one, other, tolerance, same_dtype=same_dtype)
    checks += _advantages(one, other, tolerance, checks)
    counts: Counter[str] = Counter()
    for info in zip(one.info["updates"], other.info["updates"], strict=False):
        learner = info[0]["learner"]
        update = _Update(one, other, learner, counts[learner], info, tolerance)
        counts[learner] += 1
        checks += update.checks(b.manifest, checks, restored=generated)
        if same_dtype and tolerance.systematic is not None and a.recipe["model"].get("master_weights"):
            checks += update.summed_in_fp32()
    checks += check_unchanged((("recorded run", a.tape), ("replay", b.tape)), step)
    return checks


def is_foreign(record: StepRecord) -> bool:
    """Returns whether the step was recorded in another framework's training loop (`lockstep_record.py`). A recording of
    another framework may lack some tensors."""
    return "calls" in record.info


# -- batch


def _batch(a: StepRecord, b: StepRecord) -> Iterator[Check]:
    names = {"fed/lengths": "sequence", "fed/ids": "token", "fed/asked": "target", "fed/targets": "sequence"}
    if is_foreign(a) and not (len(a.tensors["fed/asked"]) and len(b.tensors["fed/asked"])):
        # If the framework's model output has no logits, its recording contains no target tokens.
        names = {"fed/lengths": "sequence", "fed/ids": "token"}
    for name, unit in names.items():
        x, y = a.tensors[name], b.tensors[name]
        if not _equal(x, y):
            where = worst_difference(x.flatten(), y.flatten(), unit)
            yield Check("batch", a.step, "tokens and loss mask", math.inf, 0.0, where)
            return
    yield Check("batch", a.step, "tokens and loss mask", 0.0, 0.0)
    yield from _received(a, b)


def _received(a: StepRecord, b: StepRecord) -> Iterator[Check]:
    """Compares the micro-batches that the models receive. A packing or padding error changes the micro-batches, but not
    the data rows."""
    meaning = {
        "target": "the target token",
        "position": "the position that the target token is predicted from",
        "context": "hash of the tokens and positions before the target token",
    }
    counts: Counter[str] = Counter()
    for update in a.info["updates"]:
        learner = update["learner"]
        key, what = f"{learner}/{counts[learner]}/received", f"{learner}, update {counts[learner] + 1}: micro-batches"
        for name in RECEIVED:
            x, y = a.tensors.get(f"{key}/{name}"), b.tensors.get(f"{key}/{name}")
            if x is None or y is None:
                continue  # at least one run did not record this tensor
            if not _equal(x, y):
                differing = int((x != y).sum()) if x.shape == y.shape else len(x)
                where = f"{worst_difference(x, y, 'target')}: {meaning[name]}; {differing} of {len(x)} targets differ"
                yield Check("batch", a.step, what, math.inf, 0.0, where, counts[learner])
                break
        counts[learner] += 1


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return x.shape == y.shape and torch.equal(x, y)


# -- generation


def check_responses(
    a: TapeSide, record: StepRecord, ours: Sequence[Rollout], theirs: Sequence[Rollout], tolerance: Tolerance
) -> Check:
    """Compares the replay's responses to the prompts of a recorded step with the recorded responses."""
    return check_generation(
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


def by_prompt_and_sample(rollouts: Sequence[Rollout]) -> dict[tuple[int, int], Rollout]:
    return {(rollout.prompt_index, rollout.sample): rollout for rollout in rollouts}


def check_generation(
    step: int,
    a: Sequence[Rollout],
    b: Sequence[Rollout],
    allowed: float,
    *,
    seed: int,
    first_key: int,
    vocabulary: int,
    greedy: bool,
    known_noise: bool = True,
) -> Check:
    """Compares responses token by token up to the first different token.

    The native sampler adds Gumbel noise, which is equal on every device, to the log-probabilities and takes the token
    with the largest sum. So correct engines sample the same tokens. Where the tokens differ, the sums of the two tokens
    must be equal within rounding. `first_key`, the data position of the step's first prompt, seeds the noise. If
    `known_noise` is false (a serving engine), the first different token is not checked.
    """
    ours, theirs = by_prompt_and_sample(a), by_prompt_and_sample(b)
    missing = sorted(ours.keys() ^ theirs.keys())
    if missing:
        prompt_index, sample = missing[0]
        where = f"{len(missing)} responses are in only one run, the first to prompt {prompt_index}, sample {sample}"
        return Check("generation", step, "responses", math.inf, allowed, where)
    differences: list[float] = []
    worst, where, diverged = 0.0, "", 0
    for key, one in ours.items():
        other = theirs[key]
        shared = _shared(one.ids, other.ids)
        errors = [abs(x - y) for x, y in zip(one.logprobs[:shared], other.logprobs[:shared], strict=True)]
        if shared < max(len(one.ids), len(other.ids)):
            diverged += 1
            # End tokens are compared like any token. If one response has ended and the other has more tokens, the error
            # is infinite.
            ended = shared == min(len(one.ids), len(other.ids))
            if known_noise:
                turn, start = _turn_of(one, shared)
                keys = sequence_keys(seed, turn_key(first_key + key[0], turn), key[1])
                gap = math.inf if ended else _preference_gap(one, other, shared, start, keys, vocabulary, greedy)
                errors.append(gap)
        differences += errors
        if errors and max(errors) > worst:
            worst = max(errors)
            token = errors.index(worst)
            where = (
                f"prompt {key[0]}, sample {key[1]}, token {token}: {_token(one, token)} against {_token(other, token)}"
            )
    size = torch.tensor(differences, dtype=torch.float64)
    error = float(size.square().mean().sqrt()) if len(size) else 0.0
    unjudged = "" if known_noise else "; first differences are not checked: this engine's sampling is not reproducible"
    what = f"tokens and the engine's log-probabilities ({diverged} of {len(ours)} responses diverge{unjudged})"
    return Check("generation", step, what, error, allowed, where)


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    both = min(len(a), len(b))
    return next((i for i in range(both) if a[i] != b[i]), both)


def _token(rollout: Rollout, token: int) -> str:
    return f"{rollout.ids[token]} ({rollout.logprobs[token]:.6g})" if token < len(rollout.ids) else "nothing"


def _turn_of(rollout: Rollout, token: int) -> tuple[int, int]:
    """Returns the number of the turn that contains a token, and the index of its first token. The noise of a turn
    depends on its number and on the position in the turn."""
    if rollout.trajectory is None:
        return 0, 0
    begun = [(number, turn.start) for number, turn in enumerate(rollout.trajectory.turns) if turn.start <= token]
    return begun[-1] if begun else (0, 0)


def _preference_gap(
    one: Rollout, other: Rollout, position: int, start: int, keys: tuple[int, int], vocabulary: int, greedy: bool
) -> float:
    """Returns the difference of the two tokens' sums of log-probability and sampling noise. The difference is near 0 if
    rounding decided between the tokens. `start` is the first token of the turn."""
    scores = one.logprobs[position], other.logprobs[position]
    if greedy:
        return abs(scores[0] - scores[1])
    noise = gumbel_noise(torch.tensor([keys], dtype=torch.int32), torch.tensor([position - start]), vocabulary)[0]
    return abs((scores[0] + float(noise[one.ids[position]])) - (scores[1] + float(noise[other.ids[position]])))


# -- log-probs and advantages


def _logprobs(a: StepRecord, b: StepRecord, tolerance: Tolerance, *, same_dtype: bool) -> Iterator[Check]:
    named = {f"step/{name}": name for name in LOSS_INPUTS}
    for update in a.info["updates"]:
        learner = update["learner"]
        if learner != "critic":
            named[f"{learner}/0/answers"] = f"{learner}, first update"
    for name, what in named.items():
        if (name in a.tensors) != (name in b.tensors):
            # A recording of another framework lacks log-probs if the framework's model output has no logits.
            if not (is_foreign(a) or is_foreign(b)):
                yield Check("log-probs", a.step, what, math.inf, tolerance.logprob, "on one side only")
        elif name in a.tensors:
            x, y = a.tensors[name], b.tensors[name]
            where = worst_difference(x, y, "token") + _only_rank(b, name, x, y)
            yield Check("log-probs", a.step, what, root_mean_square(x, y), tolerance.logprob, where)
            if tolerance.systematic is not None and name != "step/values":
                yield from _on_a_line(a.step, what, x, y, tolerance.systematic)
                if same_dtype:
                    yield from check_precision("log-probs", a.step, what, x, y)


def _on_a_line(step: int, what: str, x: torch.Tensor, y: torch.Tensor, limits: Limits) -> Iterator[Check]:
    """Fits a regression line to the replayed log-probs as a function of the recorded ones. A different temperature,
    scale or mean changes the slope or the offset of this line."""
    found = line(x, y)
    if found is None:
        return
    allowed = limits.logprob_slope.allowed(found.rounding / found.spread, found.count)
    where = f"slope {1 + found.slope:.5f} over {found.count} targets"
    yield Check("log-probs", step, f"{what}: slope", abs(found.slope), allowed, where)
    allowed = limits.logprob_offset.allowed(found.rounding, found.count)
    where = f"a difference of {found.offset:+.5f} in the mean over {found.count} targets"
    yield Check("log-probs", step, f"{what}: offset", abs(found.offset), allowed, where)


def _only_rank(b: StepRecord, name: str, x: torch.Tensor, y: torch.Tensor) -> str:
    """Returns a text with the rank that computed the differing values, or "" if several ranks did."""
    owner = b.tensors.get(name.replace("/answers", "/owner"))
    if owner is None or x.shape != y.shape or owner.max() == 0:
        return ""
    errors = {int(rank): root_mean_square(x[owner == rank], y[owner == rank]) for rank in owner.unique()}
    worst = max(errors, key=lambda rank: errors[rank])
    rest = max((error for rank, error in errors.items() if rank != worst), default=0.0)
    return f" (rank {worst} alone)" if errors[worst] > 100 * rest else ""


def bf16_share(numbers: torch.Tensor) -> float | None:
    """Returns the fraction of the nonzero values that bf16 represents exactly, or None if there are too few values."""
    some = numbers[(numbers != 0) & torch.isfinite(numbers)].float()
    return float((some.bfloat16().float() == some).float().mean()) if len(some) >= ENOUGH else None


def check_precision(stage: Stage, step: int, what: str, a: torch.Tensor, b: torch.Tensor) -> Iterator[Check]:
    """Fails if the values of run B are rounded to bf16 and those of run A are not. A limit on the size of the error
    would not detect this, because one additional rounding changes the values too little."""
    ours, theirs = bf16_share(a), bf16_share(b)
    if ours is None or theirs is None or ours > FINE:
        return
    where = f"bf16 represents {theirs:.1%} of the replay's values exactly, and {ours:.1%} of the recorded values"
    yield Check(stage, step, f"{what}: precision", theirs, ROUNDED, where)


def _advantages(a: StepRecord, b: StepRecord, tolerance: Tolerance, checks: Sequence[Check]) -> Iterator[Check]:
    """Compares advantages. Advantages are computed from rewards and log-probabilities, so the tolerance includes the
    differences of the log-probabilities."""
    before = max((c.error for c in checks if c.stage == "log-probs" and "update" not in c.what), default=0.0)
    for name in ("rewards", "advantages", "returns", "keep", "importance"):
        x, y = a.tensors.get(f"step/{name}"), b.tensors.get(f"step/{name}")
        if x is not None and y is not None:
            allowed = max(tolerance.advantage, tolerance.growth * before)
            yield Check("advantages", a.step, name, share(x, y), allowed, worst_difference(x, y, "token"))


# -- loss and gradient


@dataclass(frozen=True)
class _Update:
    """One update of a learner (policy or critic) in both runs. `number` counts the learner's updates within the step,
    from 0."""

    one: StepRecord
    other: StepRecord
    learner: str
    number: int
    info: tuple[dict[str, Any], dict[str, Any]]
    tolerance: Tolerance

    @property
    def what(self) -> str:
        return f"{self.learner}, update {self.number + 1}"

    def _check(self, stage: Stage, what: str, error: float, allowed: float, where: str) -> Check:
        return Check(stage, self.one.step, f"{self.what}: {what}", error, allowed, where, self.number)

    def _both(self, name: str) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Returns a tensor of this update from both runs, or None if a recording of another framework lacks it."""
        key = f"{self.learner}/{self.number}/{name}"
        x, y = (r.tensors.get(key) if is_foreign(r) else r.tensors[key] for r in (self.one, self.other))
        return None if x is None or y is None else (x, y)

    def _has(self, key: str) -> bool:
        return key in self.info[0] and key in self.info[1]

    def checks(self, manifest: dict[str, Any], before: Sequence[Check], *, restored: bool) -> Iterator[Check]:
        """Yields all checks of this update. `before` contains the earlier checks of the step. `manifest` and `restored`
        are passed to the optimizer checks."""
        tolerance, outputs = self.tolerance, self._both("answers")
        answers = 0.0 if outputs is None else root_mean_square(*outputs)
        if self.number:
            yield from self._updated_answers()
        # Later updates of a step run with weights that already differ, so the tolerance of their loss includes the
        # difference of their outputs.
        inherited = tolerance.growth * answers if self.number else 0.0
        slopes = self._both("pulls")
        if self._has("loss"):
            x, y = self.info[0]["loss"], self.info[1]["loss"]
            recorded = self.one.tensors.get(f"{self.learner}/{self.number}/pulls")
            size = max(abs(x), 0.0 if recorded is None else float(recorded.double().abs().sum()), 1e-12)
            allowed = tolerance.loss + 10 * answers
            yield self._check("loss", "value", finite(abs(x - y) / size), allowed, f"{x:.8g} against {y:.8g}")
        slope_error = 0.0
        if slopes is not None:
            slope_error, allowed = share(*slopes), 10 * tolerance.loss + 10 * answers + inherited
            if tolerance.systematic is not None and not self.number:
                allowed = tolerance.systematic.loss + self._loss_input_error(answers, before)
            clamped = self._clamped_in_one_run(manifest["recipe"])
            if clamped is not None and clamped.any():
                inherited += tolerance.growth * slope_error
                slopes = slopes[0], torch.where(clamped, *slopes)
            what = "gradient with respect to each target's log-prob"
            yield self._check("loss", what, share(*slopes), allowed, worst_difference(*slopes, "target"))
        if self._has("grad_norm"):
            yield from self._gradient(tolerance.gradient + inherited, slope_error)
        if self._has("lr"):
            sides = self.one, self.other
            yield from check_optimizer(
                manifest, *sides, self.learner, self.number, self.info, tolerance, restored=restored
            )

    def _clamped_in_one_run(self, recipe: dict[str, Any]) -> torch.Tensor | None:
        """Returns the targets whose KL estimate reaches its bound in one run only, or None if no estimate has a bound.

        A clamped target has no gradient, so close to the bound the rounding of the log-prob decides whether it has one.
        """
        kl = recipe.get("algorithm", {}).get("kl", {})
        outputs = self._both("answers")
        if outputs is None or self.learner == "critic" or (kl.get("where"), kl.get("estimator")) != ("loss", "k3"):
            return None
        x, y = (_of_update(record, "reference", self.learner, self.number) for record in (self.one, self.other))
        if x is None or y is None or not x.shape == y.shape == outputs[0].shape == outputs[1].shape:
            return None
        one, other = (divergence("k3", *pair) >= K3_BOUND for pair in zip(outputs, (x, y), strict=True))
        return (one != other) & ((outputs[0] - outputs[1]).abs() <= 10 * self.tolerance.logprob)

    def _loss_input_error(self, answers: float, checks: Sequence[Check]) -> float:
        """Returns how far the gradients of the loss with respect to the log-probs may differ because the inputs of the
        loss differ. The loss itself is computed in fp32.

        A loss over whole sequences, such as a preference loss, sums the rounding errors of their tokens. The sum of the
        tokens' rounding errors grows with the square root of the sequence length.
        """
        other = max((c.error for c in checks if c.stage == "log-probs" and c.what in LOSS_INPUTS), default=0.0)
        estimated = max((c.error for c in checks if c.stage == "advantages"), default=0.0)
        targets = self.one.tensors["fed/targets"]
        longest = float(targets.max()) if len(targets) else 0.0
        return max(1.0, 0.3 * longest**0.5) * (answers + other) + 1.5 * estimated

    def _gradient(self, allowed: float, slope_error: float) -> Iterator[Check]:
        """Compares parameter gradients. `slope_error` is the difference of the loss's gradients with respect to the
        log-probs, which the parameter gradients inherit."""
        x, y = self.info[0]["grad_norm"], self.info[1]["grad_norm"]
        norms = f"{x:.8g} against {y:.8g}"
        digests = self.one, self.other, f"{self.learner}/{self.number}/gradient/"
        found = worst_parameter(*digests, allowed, total=x)
        if found is not None:
            yield self._check("gradient", found.name, found.error, allowed, found.where)
        limits = self.tolerance.systematic
        steepest = None if limits is None else worst_slope(*digests, limits.gradient, 2 * slope_error)
        if limits is not None and steepest is not None:
            name, excess, where = steepest
            yield self._check("gradient", f"{name}, slope", excess.value, excess.allowed, where)
            together = overall(*digests, limits.gradients, 2 * slope_error)
            yield self._check("gradient", "all, slope", together.value, together.allowed, norms)
        size = max(abs(x), 1e-12)
        if size > 1e-7:
            yield self._check("gradient", "norm", finite(abs(x - y) / size), allowed, norms)

    def summed_in_fp32(self) -> Iterator[Check]:
        """Checks that gradients are summed in fp32 over the micro-batches, if the model has fp32 master weights."""
        if not self.number and all(info.get("micro_batches", 1) > 1 for info in self.info):
            sides = [_sampled_gradients(record, self.learner) for record in (self.one, self.other)]
            yield from check_precision("gradient", self.one.step, self.what, sides[0], sides[1])

    def _updated_answers(self) -> Iterator[Check]:
        """Checks that earlier updates of the step changed the model's outputs by the same amount in both runs. If the
        changes differ, an update of the weights was lost.

        The tolerance is relative to the change of the outputs, as the tolerance of the weights is relative to their
        change.
        """
        key = f"{self.learner}/{self.number}/answers"
        name = "values" if self.learner == "critic" else "old"
        before = [_of_update(record, name, self.learner, self.number) for record in (self.one, self.other)]
        if before[0] is None or before[1] is None:
            return
        now = self.one.tensors[key], self.other.tensors[key]
        x, y = now[0] - before[0], now[1] - before[1]
        change = root_mean_square(x, torch.zeros_like(x))
        allowed = self.tolerance.logprob + (self.tolerance.update * change if change else 0.0)
        where = f"{worst_difference(*now, 'target')}; the earlier updates changed the outputs by {change:.3g}"
        what = f"{self.what}: outputs after the previous update"
        # The check is reported for the previous update, because that update should have changed the outputs.
        yield Check("weights", self.one.step, what, root_mean_square(x, y), allowed, where, self.number - 1)


def _sampled_gradients(record: StepRecord, learner: str) -> torch.Tensor:
    """Returns the sampled gradient values of all parameters at the first update, as one vector."""
    samples = below(record.tensors, f"{learner}/0/sample/")
    found = [t.reshape(-1).float() for name, t in samples.items() if name.endswith("/gradient")]
    return torch.cat(found) if found else torch.zeros(0)


def _of_update(record: StepRecord, name: str, learner: str, number: int) -> torch.Tensor | None:
    """Returns the values that the step computed before its first update (`old`, `reference`, `values`) for the targets
    of one update, or None if the step did not compute them."""
    every = record.tensors.get(f"step/{name}")
    counts = [update["targets"] for update in record.info["updates"] if update["learner"] == learner]
    if every is None or not len(every):
        return None
    start = sum(counts[:number]) % len(every)
    found = every[start : start + counts[number]]
    return found if len(found) == counts[number] else None
