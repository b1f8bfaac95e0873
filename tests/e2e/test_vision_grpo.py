"""Online methods on images: equal log-probs of engine and trainer, resumed runs, several ranks, and learning."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

import job_ranks
from commands import lockstep, torchrun
from hang import HANG
from image_rows import CPU, plain_model, settings
from lockstep.data.batching import micro_batch
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.data.prepare.squares import draw_squares, write_squares
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_data import Data
from lockstep.train.start import run_recipe
from lockstep.types import Example
from lockstep.vision.images import png_bytes
from runs import close, facts, stored
from vision_families import CONFIGS, write_family

RECIPE = """
method: grpo
device: cpu
run: {{name: run, folder: {place}/runs, steps: 2}}
model: {{path: {place}/model, vision: train}}
data: {{train: {place}/rows.jsonl, shuffle: false}}
batch: {{prompts: 4, tokens: 512}}
rollout: {{n: 2, max_tokens: 6, max_logprob_diff: 1e-4}}
reward: {{function: "{place}/reward.py:score"}}
optim: {{lr: 1e-3, eps: 1e-4}}
val: {{questions: {place}/rows.jsonl, max_new_tokens: 4, at_start: true}}
checkpoint: {{every: 1}}
"""
# The reward depends on the pixels and on the response, so that it tells the responses of a group apart.
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    images = extra_info.get("images", [])
    assert len(images) == extra_info["images_wanted"]
    light = sum(sum(image.resize((1, 1)).getpixel((0, 0))) for image in images)
    return (len(solution_str) * 7 + sum(solution_str.encode()) + light) % 11 / 10
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and prompts that alternate between images and text."""
    folder = tmp_path_factory.mktemp("vision")
    write_tiny_vlm(folder / "model", hidden=64, layers=1)
    rows = []
    for number, colour in enumerate(("red", "green", "blue", "black")):
        (folder / f"{number}.png").write_bytes(png_bytes(draw_squares(colour, (number, 7))))
        same = {"data_source": "x", "reward_model": {"ground_truth": colour}}
        asked = [{"role": "user", "content": "<image>Which colour?"}]
        rows.append({"prompt": asked, "images": [f"{number}.png"], "extra_info": {"images_wanted": 1}, **same})
        asked = [{"role": "user", "content": f"How much is {number} + 1?"}]
        rows.append({"prompt": asked, "images": [], "extra_info": {"images_wanted": 0}, **same})
    (folder / "recipe.yaml").write_text(RECIPE.format(place=folder), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


def job(place: Path, name: str, *words: str) -> list[str]:
    return [str(place / "recipe.yaml"), f"run.name={name}", *words]


def trained(place: Path, name: str, *words: str) -> Path:
    recipe, *keys = job(place, name, *words)
    run_recipe(load_recipe(recipe, keys))
    return place / "runs" / name


SLOW = pytest.mark.slow
METHODS = {
    "grpo": [],
    "rloo": [],
    "ppo": ["critic.lr=1e-3"],
    "reinforce_pp": [],
    "remax": [],
    "dapo": ["algorithm.dynamic_sampling.max_gen_batches=2"],
    "gspo": ["model.vision=freeze", "model.lora.rank=4"],
    "dr_grpo": ["batch.prompts_per_update=2"],
    "on_policy_distill": [
        "algorithm.kl.reference={place}/model",
        "reward.function=null",
        "reward.rules.x=exact",
        "val.questions=null",
        "val.at_start=false",
    ],
}


@pytest.mark.parametrize("method", [pytest.param(one, marks=[] if one == "grpo" else SLOW) for one in METHODS])
def test_methods_train_on_images(place: Path, method: str) -> None:
    """The log-probs of the engine are compared with the trainer's in each step (`rollout.max_logprob_diff`)."""
    words = [word.format(place=place) for word in METHODS[method]]
    folder = trained(place, method, f"method={method}", *words)
    steps = [metrics for step, metrics in facts(folder) if step]
    assert len(steps) == 2
    assert max(metrics["training/rollout_logprob_diff_mean"] for metrics in steps) < 1e-5
    assert plain_model(folder / "export").config.vision_config.depth == 2
    if method == "grpo":
        lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
        shown = [line for line in lines if line.get("images")]
        assert shown
        assert all((folder / "images" / image["file"]).is_file() for line in shown for image in line["images"])


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param(one, marks=[] if one == "gemma3" else SLOW) for one in CONFIGS])
def test_families_train_on_images(place: Path, family: str) -> None:
    """Groups share the prefill of their prompt, and the engine has the log-probs of the trainer."""
    write_family(family, place / family)
    words = (f"model.path={place / family}", "val.questions=null", "val.at_start=false")
    steps = [metrics for step, metrics in facts(trained(place, family, *words)) if step]
    assert len(steps) == 2
    assert max(metrics["training/rollout_logprob_diff_mean"] for metrics in steps) < 1e-5


@SLOW
@pytest.mark.parametrize(("method", "vision"), [("grpo", "train"), ("ppo", "train"), ("ppo", "freeze")])
def test_a_resumed_run_is_bit_identical(place: Path, method: str, vision: str) -> None:
    words = [f"method={method}", f"model.vision={vision}", "optim.schedule=constant"]
    name = f"{method}-{vision}"
    whole = trained(place, f"whole-{name}", *words, "run.steps=4")
    trained(place, f"half-{name}", *words, "run.steps=2")
    resumed = trained(place, f"half-{name}", *words, "run.steps=4")
    one, other = stored(whole, 4), stored(resumed, 4)
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert generated(resumed) == generated(whole)


def generated(run: Path) -> list[tuple[int, str, float]]:
    """The stored responses of training: step, text and score."""
    lines = [json.loads(line) for line in (run / "samples.jsonl").read_text().splitlines()]
    return [(line["step"], line["response"], line["score"]) for line in lines if line["kind"] == "train"]


@SLOW
@pytest.mark.torchrun
def test_two_ranks_of_which_one_has_no_images_train_like_one_process(place: Path) -> None:
    """With two prompts per update, one rank trains on the image and the other on text."""
    both = ["batch.prompts=2", "run.steps=3"]
    jobs = {
        "train": ["model.vision=train"],
        "freeze": ["model.vision=freeze"],
        "ppo": ["method=ppo", "rollout.n=2"],
        "shard": ["parallel.shard=1"],
    }
    for name, words in jobs.items():
        trained(place, f"{name}-one", *both, *words)
    told = [job(place, f"{name}-two", *both, *words) for name, words in jobs.items()]
    done = torchrun(job_ranks.write_jobs(place, told), program=job_ranks.PROGRAM, processes=2)
    assert done.returncode == 0, done.stderr
    for name in jobs:
        one, two = place / "runs" / f"{name}-one", place / "runs" / f"{name}-two"
        rewards = [[metrics["critic/score/mean"] for step, metrics in facts(run) if step] for run in (one, two)]
        assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
        assert close(stored(one, 3), stored(two, 3))


def answer_logprobs(model: Path, rows: list[Example], shift: int = 0) -> float:
    """The mean log-prob of the answers. With `shift`, each row has the image of another row."""
    policy = load_policy(settings(model, vision="freeze"), CPU, "sdpa", 0).eval()
    refs = [rows[(number + shift) % len(rows)].images[0].ref for number in range(len(rows))]
    given = [replace(row, images=(replace(row.images[0], ref=ref),)) for row, ref in zip(rows, refs, strict=True)]
    with torch.no_grad():
        return float(policy(micro_batch(given, packed=True, pad_id=0)).logprobs_K.mean())


@SLOW
def test_grpo_improves_on_squares(tmp_path: Path) -> None:
    """After a short SFT, GRPO raises the accuracy on held-out images, and images of other rows lower the log-probs of
    the answers."""
    model, data, runs = tmp_path / "model", tmp_path / "data", tmp_path / "runs"
    write_tiny_vlm(model)
    write_squares(data)
    warmup = [f"model.path={model}", f"data.train={data}/sft_train.parquet", f"data.val={data}/sft_val.parquet"]
    grpo = [f"model.path={runs}/warmup-squares/export", f"data.train={data}/train.parquet"]
    grpo.append(f"val.questions={data}/val.parquet")
    for recipe, words in {"warmup-squares": warmup, "grpo-squares": grpo}.items():
        done = lockstep("train", recipe, f"run.folder={runs}", *words, timeout=8 * HANG)
        assert done.returncode == 0, done.stderr
    accuracy = [metrics["val/accuracy"] for _, metrics in facts(runs / "grpo-squares") if "val/accuracy" in metrics]
    assert accuracy[-1] >= accuracy[0] + 0.1
    out, settings_of = runs / "grpo-squares" / "export", Data(train=f"{data}/sft_val.parquet")
    reader = partial(SupervisedRows, images=str(out))
    request = RowRequest(Dataset, reader, settings_of.train, settings_of, load_tokenizer(str(out)), 200)
    rows = load_rows(request).examples
    assert answer_logprobs(out, rows, shift=1) < answer_logprobs(out, rows) - 0.2


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", "qwen3_5"])
def test_a_reward_model_that_was_trained_on_images_scores_responses(place: Path, tmp_path: Path, family: str) -> None:
    write_family(family, tmp_path / "start")
    answers = {"chosen": "red", "rejected": "no"}
    pairs = [{"prompt": "<image>Which colour?", "images": [f"{place}/{n}.png"], **answers} for n in range(4)]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs), encoding="utf-8")
    judge = {
        "method": "rm",
        "device": "cpu",
        "run": {"name": "rm", "folder": str(tmp_path), "steps": 2},
        "model": {"path": str(tmp_path / "start"), "vision": "train"},
        "data": {"train": str(tmp_path / "pairs.jsonl")},
        "batch": {"rows_per_update": 4, "tokens": 512},
        "optim": {"lr": 1e-2},
    }
    (tmp_path / "rm.yaml").write_text(json.dumps(judge), encoding="utf-8")
    run_recipe(load_recipe(str(tmp_path / "rm.yaml"), []))
    words = ["method=ppo", "critic.lr=1e-3", "reward.function=null", f"reward.model={tmp_path}/rm", "rollout.n=1"]
    run = trained(place, f"ppo-{family}", *words, "val.questions=null", "val.at_start=false", "log.samples=8")
    assert [step for step, _ in facts(run)] == [1, 2]
    lines = (run / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [one for one in map(json.loads, lines) if one["step"] == 1]
    assert len({one["parts"]["model"] for one in samples}) == len(samples) == 4
