"""Items of the checklist that hold the replayed first step against the recorded one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch

from lockstep.parity.checklist.bench import CheckItem
from lockstep.parity.replay.checks import Check, finite, worst_difference
from lockstep.parity.replay.loop import by_prompt_and_sample
from lockstep.parity.replay.stages import Side, responses
from lockstep.parity.replay.tolerance import Tolerance
from lockstep.tape.format import StepRecord
from lockstep.tape.rows import rollouts_of
from lockstep.types import Rollout

# Tokens of each response that must be the recorded ones.
FIRST_TOKENS = 20
# A score is compared as rewards are in a replay.
SCORE = 1e-4


def starting_weights(a: dict[str, Any], b: dict[str, Any], unlike: Sequence[str]) -> CheckItem:
    """The model folder of this side against what the run was recorded from."""
    name, ours, theirs = "starting weights", a["model"], b["model"]
    parts = [part for part in ours if ours[part] is not None and theirs.get(part) is not None]
    other = [part for part in parts if ours[part] != theirs[part]]
    if other or unlike:
        found = [f"other {part}" for part in other]
        found += [f"{len(unlike)} weights differ, the first is {unlike[0]}"] if unlike else []
        means = "the two sides do not start from the same model: copy the folder, and run this again before all else"
        return CheckItem(name, False, "; ".join(found), means)
    if "weights" not in parts:
        return CheckItem(name, None, "", "one side's model is not a folder here, so that its files cannot be summed")
    return CheckItem(name, True, f"the same {', '.join(parts)}", "both sides start from the same model")


def first_tokens(a: Side, recorded: StepRecord, generated: Sequence[Rollout], tolerance: Tolerance) -> CheckItem:
    rollouts = rollouts_of(a.tape.read_table(a.tape.rollouts_file(1)))
    ours, theirs = _beginnings(rollouts), _beginnings(generated)
    check = responses(a, recorded, ours, theirs, tolerance)
    said = by_prompt_and_sample(theirs)
    same = sum(
        which in said and said[which].ids == rollout.ids for which, rollout in by_prompt_and_sample(ours).items()
    )
    measured = f"{same} of {len(ours)} responses begin with the recorded {FIRST_TOKENS} tokens; "
    measured += f"log-probabilities differ by {check.error:.2g} (allowed {check.allowed:.2g})"
    if check.passed:
        measured += "" if same == len(ours) else "; where responses part it was a tie"
        return CheckItem("first tokens", True, measured, "the engines say the same from the same weights")
    means = (
        f"the engine says something else from the same weights, and no tie explains it ({check.where}): see prefill "
        "and decode; where that passes, look at what draws tokens (seed, temperature, top-p, end tokens)"
    )
    return CheckItem("first tokens", False, measured, means)


def _beginnings(rollouts: Iterable[Rollout]) -> list[Rollout]:
    return [
        replace(r, ids=r.ids[:FIRST_TOKENS], logprobs=r.logprobs[:FIRST_TOKENS], trained=r.trained[:FIRST_TOKENS])
        for r in rollouts
    ]


def rewards(recorded: StepRecord, own: StepRecord) -> CheckItem:
    x, y = recorded.tensors["step/scores"], own.tensors["step/scores"]
    off = torch.nan_to_num((x.double() - y.double()).abs(), nan=math.inf) > SCORE
    measured = f"{int((~off).sum())} of {len(x)} recorded responses have their recorded score"
    if not bool(off.any()):
        return CheckItem("rewards", True, measured, "rewards judge alike")
    means = (
        f"the same text is judged otherwise ({worst_difference(x, y, 'response')}): other versions of the reward or "
        "what it imports, another reward model, another weight or overlong penalty"
    )
    return CheckItem("rewards", False, measured, means)


def first_update(recorded: StepRecord, own: StepRecord, tolerance: Tolerance) -> CheckItem:
    """Loss and gradient norm of each learner's first update."""
    checks = [check for pair in _firsts(recorded, own) for check in _update_checks(recorded, *pair, tolerance)]
    measured = "; ".join(
        f"{check.what} {check.where} (off by {check.error:.2g}, allowed {check.allowed:.2g})" for check in checks
    )
    failed = [check.what for check in checks if not check.passed]
    if not any(update.get("grad_norm") for pair in _firsts(recorded, own) for update in pair):
        return CheckItem("first loss and gradient", None, measured, "proves nothing: the first step teaches nothing")
    if not failed:
        return CheckItem("first loss and gradient", True, measured, "the first update is the recorded one")
    means = "the same rows and weights give another " + " and ".join(failed) + ": "
    if all("gradient" in what for what in failed):
        means += "the backward pass or the summing of micro-batches and ranks is off"
    else:
        means += "`lockstep replay` says at which stage and module"
    return CheckItem("first loss and gradient", False, measured, means)


def _firsts(recorded: StepRecord, own: StepRecord) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    one, other = ({u["learner"]: u for u in reversed(record.info["updates"])} for record in (recorded, own))
    return [(one[learner], other[learner]) for learner in sorted(one.keys() & other.keys(), reverse=True)]


def _update_checks(recorded: StepRecord, a: dict[str, Any], b: dict[str, Any], tolerance: Tolerance) -> list[Check]:
    learner = a["learner"]
    # A loss may be 0 where its slopes are not (advantages around their mean), so these give it a size.
    pulls = float(recorded.tensors[f"{learner}/0/pulls"].double().abs().sum())
    figures = {"loss": (max(abs(a["loss"]), pulls, 1e-12), tolerance.loss + tolerance.logprob)}
    if "grad_norm" in a and "grad_norm" in b:
        figures["grad_norm"] = max(a["grad_norm"], 1e-7), tolerance.gradient
    checks = []
    for key, (size, allowed) in figures.items():
        error = abs(a[key] - b[key]) / size
        what = f"{learner} {'loss' if key == 'loss' else 'gradient norm'}"
        said = f"{a[key]:.6g} against {b[key]:.6g}"
        checks.append(Check("loss", 1, what, finite(error), allowed, said))
    return checks


def repeatability(own: StepRecord, again: StepRecord) -> CheckItem:
    """Information, never a failure: devices need not promise it."""
    names = sorted(own.tensors.keys() | again.tensors.keys())
    differ = [
        n
        for n in names
        if n not in own.tensors or n not in again.tensors or not _same(own.tensors[n], again.tensors[n])
    ]
    if not differ and own.info["updates"] == again.info["updates"]:
        return CheckItem(
            "repeatability", True, f"{len(names)} tensors of the step, bit for bit", "the step repeats exactly"
        )
    measured = f"{len(differ)} of {len(names)} tensors of the step differ when it is made twice"
    means = "for information: kernels here add up in changing order; run.deterministic=true asks for others"
    return CheckItem("repeatability", None, measured, means)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
