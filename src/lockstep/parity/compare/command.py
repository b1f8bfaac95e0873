"""What `lockstep compare` does: reads the logs, compares them, and tells it in every form that was asked for."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.parity.compare.compare import compare
from lockstep.parity.compare.comparison import Comparison
from lockstep.parity.compare.log import Log
from lockstep.parity.compare.logs import read_log
from lockstep.parity.compare.logs.kinds import RECORDING
from lockstep.parity.compare.logs.names import read_names
from lockstep.parity.compare.logs.tensorboard_csv import VALUE
from lockstep.parity.compare.record import record
from lockstep.parity.compare.report import write_report
from lockstep.parity.compare.show import EXIT_CODES, as_strict_json, show
from lockstep.run.console import Console
from lockstep.run.output import write


@dataclass(frozen=True)
class Order:
    """What the user asked for. `report` None: B's run folder. `support` None: nothing is recorded. `value`: what a
    csv of tensorboard, which does not say it, holds. `steps`: the first and the last that are compared."""

    a: str
    b: str
    repeats: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    bars: Mapping[str, float] | None = None
    names: Path | None = None
    report: Path | None = None
    support: Path | None = None
    shift: int = 0
    value: str | None = None
    steps: tuple[int, int] | None = None


def compare_logs(order: Order, as_json: bool = False) -> int:
    """The exit code: 0 in step or within noise, 1 out of step, 2 cannot tell or not comparable."""
    names = {**(read_names(order.names) if order.names else {}), **({VALUE: order.value} if order.value else {})}
    a, b, *repeats = (read_log(source, names) for source in (order.a, order.b, *order.repeats))
    comparison = compare(a, b, repeats, order.metrics, order.bars, order.shift, order.steps)
    in_step = True
    if a.kind == b.kind == RECORDING:
        in_step = _recordings(a, b, comparison, as_json)
    elif as_json:
        write(as_strict_json(comparison))
    else:
        show(comparison, Console.open())
    page = order.report or _page_of(b)
    if page is not None:
        try:
            write_report(comparison, page)
        except OSError as error:
            raise Refusal.at(f"--report {page}", f"cannot be written: {error.strerror}", "give another path") from error
        write(f"wrote {page}", error=as_json)
    if order.support is not None:
        write(record(comparison, order.support, order.support.with_suffix("")), error=as_json)
    return EXIT_CODES[comparison.verdict] if in_step else 1


def _recordings(a: Log, b: Log, comparison: Comparison, as_json: bool) -> bool:
    """The curves, then every stage and module of the updates that both recorded; whether these are in step."""
    # torch is only needed here: curves alone are compared without it.
    from lockstep.parity.replay.recording import compare_recordings
    from lockstep.parity.replay.replay import as_json as replayed_json
    from lockstep.parity.replay.show import show as show_stages

    judged = compare_recordings(Path(a.source), Path(b.source))
    if as_json:
        write(json.dumps({**json.loads(as_strict_json(comparison)), "recordings": replayed_json(judged)}, indent=2))
    else:
        console = Console.open()
        show(comparison, console)
        show_stages(judged, console, "recordings, update by update: A against B")
    return judged.in_step


def _page_of(b: Log) -> Path | None:
    """In B's run folder, where B is one that can be written to."""
    folder = Path(b.source)
    return folder / "report.html" if b.evidence is not None and os.access(folder, os.W_OK) else None
