"""Runs tools/first_hour.sh as a newcomer would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from hang import HANG

SCRIPT = Path(__file__).parents[2] / "tools" / "first_hour.sh"


def run_hour(hour: str, folder: Path) -> None:
    # Cold, as a newcomer's is: a warm interpreter has lockstep loaded, which the export must do without.
    own = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["sh", SCRIPT, *([] if hour == "first" else [hour]), folder],
        env={**os.environ, "PATH": own, "COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=4 * HANG,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-6000:]
    last = done.stdout.rstrip().splitlines()[-1]
    assert last.startswith(f"== the {'first hour' if hour == 'first' else f'hour of {hour}'} is over")
