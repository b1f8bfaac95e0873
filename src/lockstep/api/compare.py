"""Two runs held against each other from Python: the figures of `lockstep compare`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lockstep.parity.compare.compare import compare as compare_logs
from lockstep.parity.compare.comparison import Comparison
from lockstep.parity.compare.logs import read_log

__all__ = ["Comparison", "compare"]


def compare(
    a: str | Path,
    b: str | Path,
    *,
    repeats: Sequence[str | Path] = (),
    metrics: Sequence[str] = (),
    bars: Mapping[str, float] | None = None,
    shift: int = 0,
    steps: tuple[int, int] | None = None,
) -> Comparison:
    """Did A and B (run folders, or logs of other frameworks) train in step? `.verdict` says it, `.reason` why.
    Of each judged metric `.bar_result` and `.test_result` say what the bar and the statistical test say by themselves.

    `repeats` are further runs of one side, the noise floor; `steps` are the first and the last that are compared; the
    rest are the options of the command.
    """
    first, second, *others = (read_log(str(source), {}) for source in (a, b, *repeats))
    return compare_logs(first, second, others, metrics, bars, shift, steps)
