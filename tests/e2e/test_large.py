"""bench/large.py on a few layers: four ranks train like one process, in the planned memory, and push all weights."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torchrun,
    pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads resident memory from /proc"),
]
PROGRAM = Path(__file__).parents[2] / "bench" / "large.py"
RANKS = 4
SMALL = ["--ranks", str(RANKS), "--dtype", "fp32", "--optimizer", "adamw", "--compare"]
# A pass gathers the vocabulary and two layers. They must be a small part of the model: a rank that holds all weights
# has to be told from one that gathers them layer by layer.
SMALL += ["--layers", "6", "--vocabulary", "1024"]
# Rows are short, so that weights, gradients and moments are most of the memory.
SMALL += ["--rows", "8", "--length", "32", "--tokens", "64", "--file-bytes", "20000000"]


@pytest.mark.parametrize(("shape", "width"), [("qwen3-32b", 8), ("qwen3-235b-a22b", 16)])
def test_four_ranks_train_and_push_a_large_model(tmp_path: Path, shape: str, width: int) -> None:
    out = tmp_path / "record.json"
    command = [sys.executable, str(PROGRAM), "--shape", shape, "--width", str(width), *SMALL]
    done = subprocess.run(
        [*command, "--folder", str(tmp_path), "--out", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    record: dict[str, Any] = json.loads(out.read_text())
    assert record["model"]["files"] > 1
    # Losses and gradients of both steps, the second one after a resume.
    trained, alone = record["train"], record["one_process"]
    assert trained["loss"] == pytest.approx(alone["loss"], rel=1e-5)
    assert trained["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
    # A rank reads only its own part of the weights, never holds the whole model, and the plan is right.
    memory = record["memory"]
    whole = memory["weights_of_all_bytes"]
    assert 0.9 < memory["read"]["ratio"] < 1.3
    assert memory["load"]["measured"] < 0.7 * whole
    assert 0.8 < memory["load"]["ratio"] < 1.2
    assert 0.8 < memory["update"]["ratio"] < 1.2
    # Both receivers have every tensor under its name in the files; large_ranks.py compares the values.
    push = record["push"]
    assert [one["tensors"] for one in push["receivers"]] == [record["model"]["tensors"]] * 2
    assert push["bytes"] == push["receivers"][0]["bytes"] + 8 * record["model"]["tensors"]
    sender, *others = push["peak_bytes_of_ranks"]
    # A rank gathers one parameter at a time. The stacked experts of a layer are a ninth of the MoE model.
    assert all(rank["push"] < 0.4 * whole for rank in others)
    assert all(rank["files"] < 0.4 * whole for rank in (sender, *others))
