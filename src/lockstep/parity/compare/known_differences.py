"""Known differences of a migrated run from the trainer that it was converted from (`migration.json` of the run)."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lockstep.errors import Problem, Refusal
from lockstep.parity.compare.comparison import KnownDifference
from lockstep.parity.compare.logs.log_curves import Log
from lockstep.run.folder import RunFolder, read_object


def known_differences(a: Log, b: Log, metrics: Sequence[str]) -> list[KnownDifference]:
    """Returns the known differences that concern the compared metrics, if one log is a migrated run and the other log
    is not a run of lockstep."""
    pairs = [(one, other) for one, other in ((a, b), (b, a)) if one.evidence is not None and other.evidence is None]
    return [each for one, _ in pairs for each in _of_run(Path(one.source), metrics)]


def _of_run(folder: Path, metrics: Sequence[str]) -> list[KnownDifference]:
    file = RunFolder(folder).migration
    if not file.is_file():
        return []
    table = read_object(file, "restore or remove the file")
    try:
        rows = [row for row in table["rows"] if row["verdict"] == "different"]
        found = [_difference(str(table["peer"]), row, metrics) for row in rows]
    except (KeyError, TypeError, AttributeError) as error:
        raise Refusal(
            [Problem(str(file), f"is not a table of `lockstep migrate`: {error!r}", "remove it", code="damaged-file")]
        ) from error
    return [each for each in found if each.metrics]


def _difference(peer: str, row: dict[str, Any], metrics: Sequence[str]) -> KnownDifference:
    concerned = [name for name in metrics if any(fnmatch.fnmatchcase(name, form) for form in row["curves"])]
    value = "" if row["value"] is None else f" = {json.dumps(row['value'], ensure_ascii=False)}"
    everywhere = "*" in row["curves"]
    return KnownDifference(peer, f"{row['key']}{value}", str(row["why"]), concerned, everywhere)
