"""Runs in which environments return images: equal log-probs of engine and trainer, rewards with images, two ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import image_environments
import job_ranks
from commands import torchrun
from image_rows import CPU, settings
from lockstep.data.prepare.squares import draw_squares
from lockstep.device.cpu import Cpu
from lockstep.model.load import load_policy
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.model.towers.vision_model import towers_of
from lockstep.recipe import load_recipe
from lockstep.rollout.worker.worker_protocol import LENGTH, ROWS, TOLERANCE, probe
from lockstep.train.start import run_recipe
from lockstep.vision.images import png_bytes
from runs import close, facts, stored

RECIPE = """
method: grpo
device: cpu
run: {{name: run, folder: {place}/runs, steps: 2}}
model: {{path: {place}/model, vision: train}}
data: {{train: {place}/rows.jsonl, shuffle: false}}
batch: {{prompts: 2, tokens: 1024}}
rollout:
  {{n: 2, max_tokens: 200, turn_tokens: 4, environment: "{environment}:Gallery", environment_workers: 1,
    environment_args: {{turns: 3, sizes: [[28, 56], [56, 28]]}}, max_logprob_diff: 1e-4}}
reward: {{function: "{place}/reward.py:score"}}
optim: {{lr: 1e-3, eps: 1e-4}}
"""
PLAIN = """
method: grpo
device: cpu
run: {{name: plain, folder: {place}/runs, steps: 2}}
model: {{path: {place}/model, vision: train}}
data: {{train: {place}/rows.jsonl, shuffle: false}}
batch: {{prompts: 2, tokens: 1024}}
rollout: {{n: 2, max_tokens: 12, max_logprob_diff: 1e-4}}
reward: {{function: "{place}/reward.py:plain"}}
optim: {{lr: 1e-3, eps: 1e-4}}
"""
# One image of the row, one of the start and three of the turns.
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    images = extra_info["images"]
    assert len(images) == 5, len(images)
    light = sum(sum(image.resize((1, 1)).getpixel((0, 0))) for image in images)
    return (sum(solution_str.encode()) + light) % 11 / 10


def plain(data_source, solution_str, ground_truth, extra_info):
    assert len(extra_info["images"]) == 1
    return sum(solution_str.encode()) % 11 / 10
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("vision")
    write_tiny_vlm(folder / "model", hidden=64, layers=1)
    rows = []
    for number, colour in enumerate(("red", "green")):
        (folder / f"{number}.png").write_bytes(png_bytes(draw_squares(colour, (number, 7))))
        asked = [{"role": "user", "content": "<image>Which colour?"}]
        truth = {"data_source": "x", "reward_model": {"ground_truth": colour}}
        rows.append({"prompt": asked, "images": [f"{number}.png"], **truth})
    text = RECIPE.format(place=folder, environment=image_environments.__file__)
    (folder / "recipe.yaml").write_text(text, encoding="utf-8")
    (folder / "plain.yaml").write_text(PLAIN.format(place=folder), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def test_grpo_trains_on_images_of_an_environment(place: Path) -> None:
    run_recipe(load_recipe(str(place / "recipe.yaml"), []))
    folder = place / "runs" / "run"
    steps = [metrics for step, metrics in facts(folder) if step]
    assert len(steps) == 2
    assert max(metrics["training/rollout_logprob_diff_mean"] for metrics in steps) < 1e-5
    assert steps[0]["environment/turns"] == 3
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    assert all(len(line["images"]) == 5 for line in lines)
    assert all((folder / "images" / image["file"]).is_file() for line in lines for image in line["images"])


@pytest.mark.slow
def test_two_ranks_make_the_update_of_one_process(place: Path) -> None:
    recipe, words = str(place / "recipe.yaml"), ["checkpoint.every=2", "run.deterministic=true"]
    run_recipe(load_recipe(recipe, [*words, "run.name=one"]))
    jobs = job_ranks.write_jobs(place, [[recipe, *words, "run.name=two"]])
    done = torchrun(jobs, program=job_ranks.PROGRAM, processes=2)
    assert done.returncode == 0, done.stderr
    one, two = place / "runs" / "one", place / "runs" / "two"
    rewards = [[metrics["critic/score/mean"] for step, metrics in facts(run) if step] for run in (one, two)]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
    assert close(stored(one, 2), stored(two, 2))


# Without updates, the log-probs of the worker must be those of the trainer.
ASYNC = ["rollout.max_staleness=1", "rollout.max_logprob_diff=null", "optim.lr=1e-9", "run.steps=3"]


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["recipe", "plain"])
def test_a_worker_generates_from_images(place: Path, recipe: str) -> None:
    run_recipe(load_recipe(str(place / f"{recipe}.yaml"), [*ASYNC, f"run.name=async-{recipe}"]))
    steps = [metrics for step, metrics in facts(place / "runs" / f"async-{recipe}") if step]
    assert len(steps) == 3
    assert steps[-1]["async/staleness_max"] == 1
    assert max(metrics["training/rollout_probs_diff_max"] for metrics in steps) < 1e-5


def test_the_weight_check_of_a_worker_notices_another_tower(place: Path) -> None:
    policy = load_policy(settings(place / "model"), CPU, Cpu().attention, 0)
    before = probe(policy, CPU)
    with torch.no_grad():
        next(iter(towers_of(policy.causal_lm)[0].parameters())).mul_(1.5)
    after = probe(policy, CPU)
    text = ROWS * (LENGTH - 1)
    assert torch.equal(before[:text], after[:text])
    assert float((before - after).abs().max()) > 100 * TOLERANCE[torch.float32]
