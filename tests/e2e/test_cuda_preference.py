"""Preference methods on an NVIDIA device, in step with the CPU."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from conftest import write_jsonl
from lockstep.model.tiny import write_tiny
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
]

METHODS = {
    "dpo": [],
    "ipo": ["preference.precompute=true"],
    "orpo": [],
    "simpo": [],
    "cpo": [],
    "kto": [],
    "rm": [],
    "prm": ["prm.placeholder='~'"],
    "distill": ["distill.divergence=jsd"],
}


def rows(method: str) -> list[dict[str, object]]:
    draw = random.Random(0)
    made: list[dict[str, object]] = []
    for _ in range(40):
        a, b = draw.randrange(90), draw.randrange(90)
        question = f"{'please ' * draw.randrange(9)}{a}+{b}?"
        right = "so " * draw.randrange(9) + f"#### {a + b}"
        if method == "prm":
            steps = [f"{a}+{i}={a + i}" for i in range(draw.randrange(1, 4))]
            made.append({"prompt": question, "completions": steps, "labels": [draw.random() for _ in steps]})
        elif method == "distill":
            made.append({"prompt": question, "response": right})
        else:
            made.append({"prompt": question, "chosen": right, "rejected": "no " * draw.randrange(1, 9)})
    return made


def losses(folder: Path, method: str, device: str, words: list[str]) -> list[float]:
    """Train three steps; the loss of each."""
    write_jsonl(folder / "rows.jsonl", rows(method))
    if not (folder / "teacher").exists():
        write_tiny(folder / "model", hidden=64, layers=2)
        write_tiny(folder / "teacher", hidden=64, layers=2, seed=1)
    words = [
        f"run.name={device}-{len(words)}",
        *([f"distill.teacher={folder / 'teacher'}"] if method == "distill" else []),
        *METHODS[method],
        *words,
    ]
    recipe = folder / "recipe.yaml"
    recipe.write_text(
        f"""
method: {method}
device: {device}
run: {{folder: {folder / "runs"}, steps: 3, resume: never, export: false}}
model: {{path: {folder / "model"}}}
data: {{train: {folder / "rows.jsonl"}, val: {folder / "rows.jsonl"}}}
batch: {{rows_per_update: 16, tokens: 1024}}
optim: {{lr: 1e-3, schedule: constant, eps: 1e-4}}
""",
        encoding="utf-8",
    )
    read = load_recipe(str(recipe), words)
    train_offline(read, Console.silent())
    history = read_metrics(Path(read.run.folder) / read.run.name / "metrics.jsonl")
    return [metrics["train/loss"] for _, metrics in history if "train/loss" in metrics]


@pytest.mark.parametrize("method", METHODS)
def test_fp32_trains_in_step_with_the_cpu(tmp_path: Path, method: str) -> None:
    assert losses(tmp_path, method, "cuda", []) == pytest.approx(losses(tmp_path, method, "cpu", []), rel=1e-4)


@pytest.mark.parametrize("method", METHODS)
def test_bf16_and_adapters_train(tmp_path: Path, method: str) -> None:
    """The flash kernel, with prompts shared; an adapter learns at the same first loss."""
    words = ["model.dtype=bf16"]
    found = losses(tmp_path, method, "cuda", words)
    assert found == pytest.approx(losses(tmp_path, method, "cpu", []), rel=0.1)
    adapted = losses(tmp_path, method, "cuda", [*words, "model.lora.rank=8"])
    assert adapted[0] == pytest.approx(found[0], rel=0.02)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_shared_prompt_changes_nothing(tmp_path: Path, dtype: torch.dtype) -> None:
    from lockstep.data.batching import micro_batch, shared_beginnings, to_device
    from lockstep.model.load import load_policy
    from lockstep.recipe.schema import Model
    from lockstep.types import Example, Origin

    write_tiny(tmp_path / "model", hidden=128, layers=2)
    name = "fp32" if dtype == torch.float32 else "bf16"
    place = torch.device("cuda")
    policy = load_policy(Model(path=str(tmp_path / "model"), dtype=name), place, "flash_varlen", seed=0)  # type: ignore[arg-type]
    draw = random.Random(0)
    examples, shares = [], []
    for row in range(12):
        prompt = [draw.randrange(90) for _ in range(draw.randrange(1, 200))]
        answers = [[draw.randrange(90) for _ in range(draw.randrange(1, 90))] for _ in range(2)]
        group = [Example(prompt + a, [0] * len(prompt) + [1] * len(a), Origin("rows", row)) for a in answers]
        examples += group
        shares += shared_beginnings(group)
    found = []
    for share in (None, shares):
        policy.zero_grad()
        line = to_device(micro_batch(examples, packed=True, pad_id=0, shares=share), place)
        logprobs = policy(line).logprobs_K
        logprobs.sum().backward()
        gradient = torch.cat([p.grad.float().flatten() for p in policy.parameters() if p.grad is not None])
        found.append((logprobs.detach(), gradient, line.input_ids_NT.numel()))
    (whole, gradient, tokens), (shared, shared_gradient, fewer) = found
    assert fewer < tokens
    tolerance = 1e-5 if dtype == torch.float32 else 0.05
    torch.testing.assert_close(shared, whole, atol=tolerance, rtol=tolerance)
    assert float((shared_gradient - gradient).norm() / gradient.norm()) < tolerance
