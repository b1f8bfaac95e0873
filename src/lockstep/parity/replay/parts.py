"""The parts of a run that went on with other keys: each recorded step is replayed with the recipe that trained it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.run.folder import RunFolder
from lockstep.tape.format import TapeFolder


@dataclass(frozen=True)
class Part:
    """The steps after `before` up to `last` (None: to the end), and the recipe that trained them."""

    recipe: Path
    before: int
    last: int | None

    def holds(self, step: int) -> bool:
        return self.before < step and (self.last is None or step <= self.last)


def parts_of(source: RunFolder) -> list[Part]:
    if not source.recipe.is_file():
        raise Refusal.at(str(source.path), "is not a run folder", "give the folder of a run with a tape")
    found, before = [], 0
    for last, file in source.earlier_recipes().items():
        found.append(Part(file, before, last))
        before = last
    return [*found, Part(source.recipe, before, None)]


def shared_out(
    source: RunFolder, tape: TapeFolder, only: Sequence[int], *, forced: bool
) -> list[tuple[Part, list[int]]]:
    """The parts to replay, each with its steps (none: all that the tape has of it).

    Only in forced mode does every snapshot start from recorded weights. The other modes carry their own weights on, and
    go as far as the recipe that the run began with.
    """
    parts = parts_of(source)
    if len(parts) == 1:
        return [(parts[0], list(only))]
    steps = [step for step in ((tape.weighed() or [1]) if forced else tape.steps()) if not only or step in only]
    found = [(part, mine) for part in parts if (mine := [step for step in steps if part.holds(step)])]
    if not forced:
        found = [each for each in found if each[0] is parts[0]]
    if found:
        return found
    if only and not forced:
        raise Refusal.at(
            f"--step {only[0]}",
            f"{source.path} went on with another recipe after step {parts[0].last}, and this mode carries its own "
            "weights on from the first step",
            "use --mode forced, which starts each step from the recorded weights",
        )
    return [(parts[0], list(only))]  # nothing is recorded of what was asked for, which the replay tells


def left_out(source: RunFolder, tape: TapeFolder, *, forced: bool) -> list[str]:
    """What a replay that stops at the first change of the recipe says about the rest."""
    first, *later = parts_of(source)
    missing = [step for step in tape.steps() if not first.holds(step)]
    if forced or not later or not missing:
        return []
    return [
        f"The run went on with another recipe after step {first.last}: {len(missing)} recorded steps from {missing[0]} "
        "on are not replayed in this mode. With --mode forced each is replayed with its own recipe."
    ]
