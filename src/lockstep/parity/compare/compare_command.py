"""The command `lockstep compare`: reads the logs, compares them and writes the requested output."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lockstep.errors import Refusal
from lockstep.parity.compare.compare_report import EXIT_CODES, as_strict_json, show, write_report
from lockstep.parity.compare.compare_runs import compare
from lockstep.parity.compare.comparison import Comparison
from lockstep.parity.compare.logs import read_log
from lockstep.parity.compare.logs.log_curves import Log
from lockstep.parity.compare.logs.log_formats import RECORDING
from lockstep.parity.compare.logs.metric_names import read_names
from lockstep.parity.compare.logs.table_logs import VALUE
from lockstep.parity.compare.support_record import record
from lockstep.run.console import Console
from lockstep.run.output import write


@dataclass(frozen=True)
class CompareOptions:
    """The options of the command. `report` None: B's run folder. `support` None: nothing is recorded. `value`: the
    metric of a csv export of tensorboard, which does not name it. `steps`: the first and last compared step."""

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


def compare_logs(options: CompareOptions, as_json: bool = False) -> int:
    """Return the exit code: 0 in step or within noise, 1 out of step, 2 cannot tell or not comparable."""
    names = {
        **(read_names(options.names) if options.names else {}),
        **({VALUE: options.value} if options.value else {}),
    }
    a, b, *repeats = (read_log(source, names) for source in (options.a, options.b, *options.repeats))
    comparison = compare(a, b, repeats, options.metrics, options.bars, options.shift, options.steps)
    in_step = True
    if a.kind == b.kind == RECORDING:
        in_step = _recordings(a, b, comparison, as_json)
    elif as_json:
        write(as_strict_json(comparison))
    else:
        show(comparison, Console.open())
    page = options.report or _page_of(b)
    if page is not None:
        try:
            write_report(comparison, page)
        except OSError as error:
            raise Refusal.at(
                f"--report {page}", f"cannot be written: {error.strerror}", "give another path", code="unwritable"
            ) from error
        write(f"wrote {page}", error=as_json)
    if options.support is not None:
        write(record(comparison, options.support, options.support.with_suffix("")), error=as_json)
    return EXIT_CODES[comparison.verdict] if in_step else 1


def _recordings(a: Log, b: Log, comparison: Comparison, as_json: bool) -> bool:
    """Show the curves, then every stage and module of the recorded updates; return whether the updates are in step."""
    # Only recordings need torch.
    from lockstep.parity.replay.foreign_recording import compare_recordings
    from lockstep.parity.replay.replay_result import as_json as replayed_json
    from lockstep.parity.replay.replay_result import show as show_stages

    judged = compare_recordings(Path(a.source), Path(b.source))
    if as_json:
        write(json.dumps({**json.loads(as_strict_json(comparison)), "recordings": replayed_json(judged)}, indent=2))
    else:
        console = Console.open()
        show(comparison, console)
        show_stages(judged, console, "recordings, update by update: A against B")
    return judged.in_step


def _page_of(b: Log) -> Path | None:
    """report.html in B's run folder, if B is a writable run folder."""
    folder = Path(b.source)
    return folder / "report.html" if b.evidence is not None and os.access(folder, os.W_OK) else None
