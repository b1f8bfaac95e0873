"""Prints docs/models.md: runs every case of the sweep, which takes minutes. `make models` stores the page."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "sweep"))
os.environ.setdefault("LOCKSTEP_CACHE", tempfile.mkdtemp(prefix="lockstep-cache-"))
warnings.filterwarnings("ignore")


def main() -> None:
    from sweep_cases import all_cases
    from sweep_judge import judge
    from sweep_table import page

    outcomes = {}
    cases = all_cases()
    for number, case in enumerate(cases, 1):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            outcomes[case] = judge(case, Path(folder) / "model")
        print(f"{number}/{len(cases)} {case}: {outcomes[case].status} {outcomes[case].why[:120]}", file=sys.stderr)
    print(page(outcomes), end="")


if __name__ == "__main__":
    main()
