"""Vision-language models train on the emulated NPU in step with the CPU: the same images, losses and responses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from ascend_emulator import report
from lockstep.data.prepare.squares import draw_squares
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe import load_recipe
from lockstep.recipe.methods import ONLINE
from lockstep.run.console import Console
from lockstep.run.metrics import read_metrics
from lockstep.train.offline import train_offline
from lockstep.train.online import train_online
from lockstep.vision.images import png_bytes
from refusals import refuses
from vision_families import CONFIGS, write_family

from .processes import python

pytestmark = pytest.mark.ascend

RECIPE = """
method: {method}
device: cpu
run: {{name: run, folder: {place}/runs, steps: 2, export: false}}
model: {{path: {place}/{model}, vision: train}}
data: {{train: {place}/{method}.jsonl, shuffle: false}}
optim: {{lr: 1e-3, eps: 1e-4, schedule: constant}}
"""
MORE = {
    "sft": "batch: {rows_per_update: 4, tokens: 512}\n",
    "grpo": "batch: {prompts: 4, tokens: 512}\n"
    "rollout: {n: 2, max_tokens: 6, max_logprob_diff: 1.0e-4}\n"
    'reward: {function: "PLACE/reward.py:score", workers: 1}\n',
}
METRICS = {
    "sft": ("train/loss", "train/grad_norm"),
    "grpo": ("actor/loss", "actor/grad_norm", "critic/score/mean"),
}
# It tells the responses of a group apart, and depends on the pixels.
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    light = sum(sum(image.resize((1, 1)).getpixel((0, 0))) for image in extra_info.get("images", []))
    return (len(solution_str) * 7 + sum(solution_str.encode()) + light) % 11 / 10
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, and rows with one, two and no images."""
    folder = tmp_path_factory.mktemp("vision")
    write_tiny_vlm(folder / "qwen2_5_vl", hidden=32, layers=1)
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    rows = []
    for number, colour in enumerate(("red", "green", "blue", "black")):
        (folder / f"{number}.png").write_bytes(png_bytes(draw_squares(colour, (number, 7))))
        rows.append(("<image>Which colour?", [f"{number}.png"], colour))
    rows.append(("<image> or <image>?", ["0.png", "1.png"], "red"))
    rows.append(("How much is 1 + 1?", [], "2"))
    for method in MORE:
        lines = [{"images": images, "data_source": "x"} for _, images, _ in rows]
        for line, (question, _, answer) in zip(lines, rows, strict=True):
            asked = [{"role": "user", "content": question}]
            if method == "sft":
                line["messages"] = [*asked, {"role": "assistant", "content": answer}]
            else:
                line |= {"prompt": asked, "reward_model": {"ground_truth": answer}}
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / f"{method}.jsonl").write_text(text, encoding="utf-8")
    return folder


def run_name(*words: str) -> str:
    return "-".join(words).replace("=", "-")


def history(place: Path, method: str, model: str, device: str, *words: str) -> list[dict[str, float]]:
    """Train on the device; the metrics of each step."""
    path = place / f"{method}-{model}.yaml"
    text = RECIPE.format(place=place, method=method, model=model) + MORE[method].replace("PLACE", str(place))
    path.write_text(text, encoding="utf-8")
    name = run_name(method, model, device, *words)
    recipe = load_recipe(str(path), [f"device={device}", f"run.name={name}", *words])
    (train_online if method in ONLINE else train_offline)(recipe, Console.silent())
    return [metrics for _, metrics in read_metrics(place / "runs" / name / "metrics.jsonl")]


def responses(place: Path, name: str) -> list[tuple[str, float]]:
    lines = (place / "runs" / name / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    return [(line["response"], line["score"]) for line in map(json.loads, lines)]


def in_step(place: Path, method: str, model: str, *words: str) -> set[str]:
    """Trains on both devices and compares them. Returns the names of the operators that ran on the NPU."""
    report.clear()
    npu = history(place, method, model, "npu", *words)
    ran = {operator.name for operator in report.operators()}
    assert not report.fallbacks()
    cpu = history(place, method, model, "cpu", *words)
    assert len(npu) == len(cpu) == 2
    for name in METRICS[method]:
        # A gradient norm adds up the rounding of all layers.
        bar = 1e-4 if name.endswith("grad_norm") else 1e-5
        assert [m[name] for m in npu] == pytest.approx([m[name] for m in cpu], rel=bar, abs=1e-6)
    if method in ONLINE:
        runs = [run_name(method, model, device, *words) for device in ("npu", "cpu")]
        assert responses(place, runs[0]) == responses(place, runs[1])
    return ran


# Families that need an operator which the emulator has not: the code of the refusal, and the name of the operator.
LACKING = {"gemma4": ("unsupported-model", "OneHot")}
FUSED = {"npu::npu_fusion_attention", "npu::npu_rms_norm", "npu::npu_rotary_mul", "npu::npu_swiglu"}


@pytest.mark.daily("sft")
@pytest.mark.parametrize("method", MORE)
def test_images_train_in_step_with_the_cpu(place: Path, method: str) -> None:
    """The tower is trained too, and the language model runs on the fused operators."""
    assert in_step(place, method, "qwen2_5_vl") >= FUSED


@pytest.mark.slow
@pytest.mark.parametrize("method", MORE)
@pytest.mark.parametrize("family", [family for family in CONFIGS if family not in LACKING])
def test_families_train_in_step_with_the_cpu(place: Path, family: str, method: str) -> None:
    if not (place / family).exists():
        write_family(family, place / family)
    # The weights of these models are large, so that a large step would multiply rounding errors.
    words = ["optim.lr=1e-5", *(["data.require_end=false"] if method == "sft" else [])]
    in_step(place, method, family, *words)


@pytest.mark.slow
@pytest.mark.parametrize("family", LACKING)
def test_an_operator_without_a_kernel_is_refused_before_training(place: Path, family: str) -> None:
    write_family(family, place / family)
    with refuses("", *LACKING[family]):
        history(place, "grpo", family, "npu")
    assert not (place / "runs" / run_name("grpo", family, "npu") / "metrics.jsonl").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", MORE)
def test_a_frozen_tower_with_adapters_trains_in_step_with_the_cpu(place: Path, method: str) -> None:
    in_step(place, method, "qwen2_5_vl", "model.vision=freeze", "model.lora.rank=4")


@pytest.mark.slow
@pytest.mark.parametrize("method", MORE)
def test_bf16_stays_within_the_bars(place: Path, method: str) -> None:
    """Decoding goes through the paged operator, which has no fp32."""
    report.clear()
    words = ["model.dtype=bf16", *(["rollout.max_logprob_diff=0.05"] if method == "grpo" else [])]
    npu = history(place, method, "qwen2_5_vl", "npu", *words)
    ran = {operator.name for operator in report.operators()}
    assert ("npu::npu_fused_infer_attention_score" in ran) == (method == "grpo")
    assert not report.fallbacks()
    if method == "grpo":  # each step compared the log-probs of engine and trainer
        assert len(npu) == 2
        return
    cpu = history(place, method, "qwen2_5_vl", "cpu", *words)
    errors = [abs(a["train/loss"] - b["train/loss"]) / b["train/loss"] for a, b in zip(npu, cpu, strict=True)]
    assert sum(errors) / 2 <= 0.02


@pytest.mark.slow
@pytest.mark.parametrize("method", MORE)
def test_two_ranks_over_hccl_equal_one(place: Path, method: str) -> None:
    """The rows of an update have images and text, so a rank may have no image."""
    one = history(place, method, "qwen2_5_vl", "npu", "run.seed=1")
    words = ["device=npu", "run.seed=1", f"run.name={method}-ranks"]
    done = python(
        *("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2),
        *("-m", "lockstep", "train", place / f"{method}-qwen2_5_vl.yaml", *words),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    two = [metrics for _, metrics in read_metrics(place / "runs" / f"{method}-ranks" / "metrics.jsonl")]
    for name in METRICS[method]:
        assert [m[name] for m in two] == pytest.approx([m[name] for m in one], rel=1e-5, abs=1e-6)
