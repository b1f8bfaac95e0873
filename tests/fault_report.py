"""A fault, and what a replay reports for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fault_modules import other_arithmetic
from fault_scene import Inject
from lockstep.parity.replay.replay_result import Replayed


@dataclass(frozen=True)
class Fault:
    """A fault and the expected report. The failed check must contain `expects`.

    `ranks` processes replay. `steps` are replayed: by default the second step, where moments are not 0 and the policy
    differs from its reference. `device` is the correct rounding of another device."""

    name: str
    recipe: str
    inject: Inject
    stage: str
    module: str | None = None
    rank: int = 0
    expects: str = ""
    ranks: int = 1
    steps: tuple[int, ...] = (2,)
    device: Inject = other_arithmetic


@dataclass(frozen=True)
class Named:
    """What a replay reported for a fault."""

    fault: Fault
    stage: str | None
    module: str | None
    rank: int
    reported: str

    @property
    def stage_right(self) -> bool:
        return self.stage == self.fault.stage

    @property
    def place_right(self) -> bool:
        return (self.module, self.rank) == (self.fault.module, self.fault.rank) and self.fault.expects in self.reported


def summary(named: Sequence[Named]) -> str:
    """fault | expected | named | ok, and the shares of right stages and right places."""
    lines = [f"{'fault':32} {'expected':44} {'named':44} ok"]
    for one in named:
        wanted, found = f"{one.fault.stage} {one.fault.module or ''}", f"{one.stage} {one.module or ''}"
        lines.append(f"{one.fault.name:32} {wanted:44} {found:44} {one.stage_right and one.place_right}")
    stages = [one.stage_right for one in named]
    placed = [one.place_right for one in named if one.fault.module]
    lines.append(f"{_share(stages)} of the stages, {_share(placed)} of the modules")
    return "\n".join(lines)


def _share(right: Sequence[bool]) -> str:
    return f"{sum(right)} of {len(right)} ({sum(right) / max(1, len(right)):.1%})"


def named_by(fault: Fault, found: Replayed) -> Named:
    module, cause = found.module, found.cause
    reported = f"{cause.what} {cause.where}" if cause else ""
    rank = module.rank if module else int("rank 1" in reported)
    return Named(fault, found.stage, module.module if module else None, rank, reported)
