"""Checks every case of the sweep, stores the outcomes in tests/sweep/outcomes.json and writes docs/models.md.

All cases take many minutes. `--only llama qwen3+yarn` checks some of them again, `--missing` those without an outcome,
and `--page` none: it prints the page from the stored outcomes. `--kernels` checks only the column of kernels again, of
the given cases or of all that have columns.
"""

from __future__ import annotations

import argparse
import atexit
import contextlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("sweep", "support")]
if "LOCKSTEP_CACHE" not in os.environ:
    os.environ["LOCKSTEP_CACHE"] = tempfile.mkdtemp(prefix="lockstep-cache-")
    atexit.register(shutil.rmtree, os.environ["LOCKSTEP_CACHE"], ignore_errors=True)
# Kernels for CUDA are compared with the operators that they replace on the host.
os.environ["TRITON_INTERPRET"] = "1"
warnings.filterwarnings("ignore")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--only", nargs="+", default=[], metavar="CASE")
    chosen.add_argument("--missing", action="store_true")
    chosen.add_argument("--page", action="store_true")
    chosen.add_argument("--kernels", nargs="*", metavar="CASE")
    given = parser.parse_args(arguments)
    from sweep_cases import all_cases
    from sweep_table import STORED, page, store, stored

    cases = {str(case): case for case in all_cases()}
    if not (given.only or given.missing or given.page or given.kernels is not None):
        STORED.unlink(missing_ok=True)
    known = stored() if STORED.exists() else {}
    names = given.only or [name for name in cases if name not in known and not given.page and given.kernels is None]
    checked = {}
    if given.kernels is not None:
        for name in given.kernels or [name for name, one in known.items() if one.columns]:
            store({name: _with_kernels(cases[name], known[name])}, cases)
    for number, name in enumerate(names, 1):
        checked[name] = one = _checked(cases[name])
        store({name: one}, cases)
        print(f"{number}/{len(names)} {name}: {one.status} {one.why[:120]}", file=sys.stderr)
    unfinished = {name: one for name, one in store({}, cases).items() if one.columns and "tensor" not in one.columns}
    outcomes = store(_with_tensor(cases, unfinished if given.missing else checked), cases)
    if missing := sorted(set(cases) - set(outcomes)):
        sys.exit(f"docs/models.md needs the outcomes of {len(missing)} more cases: {', '.join(missing[:9])}")
    (ROOT / "docs" / "models.md").write_text(page(outcomes), encoding="utf-8")


def _checked(case: Any) -> Any:
    """Returns the outcome of a case, and what the columns say if it has a common name."""
    import sweep_columns
    from sweep_families import NAMES
    from sweep_judge import judge

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        model = Path(folder) / "model"
        outcome = judge(case, model)
        if str(case) not in NAMES or outcome.status not in ("supported", "training"):
            return outcome
        columns = {name: getattr(sweep_columns, name)(model) for name in ("context", "lora", "kernels")}
        return replace(outcome, columns=columns)


def _with_kernels(case: Any, outcome: Any) -> Any:
    import sweep_columns
    from sweep_judge import small_model

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
        small_model(case).save_pretrained(folder)
        said = sweep_columns.kernels(Path(folder))
    print(f"{case}: {said}", file=sys.stderr)
    return replace(outcome, columns={**outcome.columns, "kernels": said})


def _with_tensor(cases: dict[str, Any], checked: dict[str, Any]) -> dict[str, Any]:
    """Returns the outcomes with what two processes say about tensor parallelism. They check all models, because their
    start takes seconds. With `--missing`, models that an interrupted sweep has left are checked too."""
    from sweep_columns import tensor

    chosen = [cases[name] for name, one in checked.items() if one.columns]
    said = {str(case): text for case, text in (tensor(chosen) if chosen else {}).items()}
    return {
        name: replace(one, columns={**one.columns, "tensor": said[name]}) if name in said else one
        for name, one in checked.items()
    }


if __name__ == "__main__":
    main()
