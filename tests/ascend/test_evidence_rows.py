"""`tools/ascend_evidence.sh --rows` on the emulator: a row of docs/support.md from raw data to the table."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hang import HANG
from lockstep.model.tiny import write_tiny

ROOT = Path(__file__).parents[2]
STEPS = 8  # the fewest that the statistical test accepts


@pytest.mark.slow
@pytest.mark.ascend
def test_a_row_is_trained_on_both_sides_and_gets_its_cell(tmp_path: Path) -> None:
    write_tiny(tmp_path / "tiny")
    for split in ("train", "test"):
        rows = [{"question": f"What is {n} + 1?", "answer": f"{n} + 1 = {n + 1}\n#### {n + 1}"} for n in range(16)]
        (tmp_path / f"{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    environment = {
        **os.environ,
        "PYTHON": sys.executable,
        "MODEL": str(tmp_path / "tiny"),
        "GSM8K": str(tmp_path),
        "ROWS": "sft",
        "STEPS": str(STEPS),
    }
    command = ["sh", str(ROOT / "tools" / "ascend_evidence.sh"), "--rows", "--trial"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=8 * HANG, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    out = tmp_path / "ascend-evidence"
    assert (out / "verdict.txt").read_text(encoding="utf-8").startswith("rows pass\nemulated")
    result = json.loads((out / "rows" / "sft-npu-tiny" / "result.json").read_text(encoding="utf-8"))
    assert (result["verdict"], result["emulated"], result["steps"]) == ("in step", True, STEPS)
    (line,) = [
        line for line in (out / "table.md").read_text(encoding="utf-8").splitlines() if line.startswith("| SFT |")
    ]
    cells = [cell.strip() for cell in line.split("|")[2:-1]]
    # The emulator fills its own column, never the one of the hardware.
    assert [cell == "not measured" for cell in cells] == [True, True, False, True, True, False]
