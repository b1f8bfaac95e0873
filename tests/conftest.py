"""Fixtures: the embedded model and small rows, made once."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

# Several workers share the cores; threads that wait for each other on a taken core cost more than they give.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from lockstep.model.tiny import write_tiny

    folder = tmp_path_factory.mktemp("tiny") / "model"
    write_tiny(folder, hidden=64, layers=2)
    return folder


def chat_rows(count: int, seed: int = 0) -> list[dict[str, object]]:
    """Sums with answers of very different lengths."""
    draw = random.Random(seed)
    rows: list[dict[str, object]] = []
    for _ in range(count):
        a, b = draw.randrange(100), draw.randrange(100)
        answer = "so " * draw.randrange(0, 25) + f"#### {a + b}"
        rows.append({"messages": [{"role": "user", "content": f"{a}+{b}?"}, {"role": "assistant", "content": answer}]})
    return rows


def write_jsonl(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture
def rows_file(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "train.jsonl", chat_rows(48))


@pytest.fixture
def recipe_file(tmp_path: Path, tiny_folder: Path, rows_file: Path) -> Path:
    """A small complete recipe whose run folder lies under the test's own folder."""
    val = write_jsonl(tmp_path / "val.jsonl", chat_rows(10, seed=1))
    path = tmp_path / "recipe.yaml"
    path.write_text(
        f"""
method: sft
device: cpu
run: {{name: run, folder: {tmp_path / "runs"}, steps: 6}}
model: {{path: {tiny_folder}}}
data: {{train: {rows_file}, val: {val}}}
batch: {{rows_per_update: 8, tokens: 256}}
optim: {{lr: 1e-3, warmup: 2}}
""",
        encoding="utf-8",
    )
    return path


def lockstep(*words: object, timeout: float = 300, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "lockstep", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, **environment},
        check=False,
    )
