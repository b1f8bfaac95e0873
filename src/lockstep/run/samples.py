"""A response as a line of samples.jsonl."""

from __future__ import annotations

from typing import Any

from lockstep.types import Failure, Rollout


def sample_line(
    step: int, kind: str, rollout: Rollout, advantage: float | None, details: dict[str, Any] | None = None
) -> dict[str, Any]:
    """`details` tell of each token (`token_details.py`); they come last, behind what a person reads in the file."""
    question, score = rollout.prompt.question, rollout.score
    line: dict[str, Any] = {
        "step": step,
        "kind": kind,
        "origin": str(question.origin),
        "sample": rollout.sample,
        "prompt": question.prompt,
        "response": rollout.text,
        "ground_truth": question.ground_truth,
    }
    if isinstance(score, Failure):
        line |= {"score": None, "failure": f"{score.part}: {score.why}"}
    else:
        line |= {"score": score.total, "parts": score.parts}
    if advantage is not None:
        line["advantage"] = advantage
    if rollout.versions:
        line["versions"] = list(rollout.versions)
    line |= {"prompt_tokens": len(rollout.prompt.ids), "tokens": len(rollout.ids), "stop": rollout.stop}
    return line if details is None else line | {"token_details": details}
