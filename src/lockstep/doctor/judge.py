"""The table of all judgements. Each is a small function: the facts and the device, to what is wrong."""

from __future__ import annotations

from lockstep.doctor import judge_ascend, judge_environment, judge_packages, judge_system
from lockstep.doctor.facts import Facts
from lockstep.doctor.finding import Finding, Judgement

JUDGEMENTS: tuple[Judgement, ...] = (
    *judge_system.JUDGEMENTS,
    *judge_packages.JUDGEMENTS,
    *judge_ascend.JUDGEMENTS,
    *judge_environment.JUDGEMENTS,
)


def judge(facts: Facts, device: str) -> list[Finding]:
    return [finding for judgement in JUDGEMENTS for finding in judgement(facts, device)]
