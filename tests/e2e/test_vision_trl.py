"""Rows and reward functions of TRL's vision-language scripts run unchanged.

The rows have the columns that `datasets` writes to parquet for TRL's `grpo_vlm.py` (a column `image`, a chat of texts)
and `sft_vlm.py` (a column `images`, messages of parts), and those of geometry3k. The reward functions have TRL's
signature.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from lockstep.data.prepare.squares import draw_squares
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe import load_recipe
from lockstep.train.start import run_recipe
from lockstep.vision.images import png_bytes
from runs import facts

COLOURS = ("red", "green", "blue", "black")
SYSTEM = "Think between <think> and </think> first."
REWARDS = '''
import re
from PIL import Image


def format_reward(completions, **kwargs):
    return [float(bool(re.match("<think>", one[0]["content"]))) for one in completions]


def accuracy_reward(completions, solution, **kwargs):
    """None: this function does not score the response."""
    texts = [completion[0]["content"] for completion in completions]
    pairs = zip(texts, solution)
    return [None if len(text) % 5 == 4 else float(len(text) % 3 == len(gold) % 3) for text, gold in pairs]


def image_reward(completions, image, prompts, original_question, **kwargs):
    assert all(isinstance(one, Image.Image) and one.size == (56, 56) for one in image)
    assert all(prompt[0]["role"] == "system" for prompt in prompts)
    light = [sum(one.resize((1, 1)).getpixel((0, 0))) % 7 / 7 for one in image]
    return [own + len(done[0]["content"]) % 4 for own, done in zip(light, completions)]


def all_rewards(completions, **columns):
    """The sum of TRL's `reward_funcs`, without the functions that do not score a response."""
    functions = (format_reward, accuracy_reward, image_reward)
    scores = zip(*(function(completions=completions, **columns) for function in functions))
    return [sum(score for score in one if score is not None) for one in scores]


def images_reward(completions, images, answer, **kwargs):
    """For rows with a column `images`."""
    assert all(len(each) == 1 and each[0].size == (56, 56) for each in images)
    return [len(done[0]["content"]) % 4 + len(gold) / 10 for done, gold in zip(completions, answer)]
'''
RECIPE = """
method: {method}
device: cpu
run: {{name: {name}, folder: {place}/runs, steps: 2}}
model: {{path: {place}/model, vision: train}}
data: {{train: {place}/{name}.parquet, shuffle: false}}
optim: {{lr: 1e-3, eps: 1e-4}}
{more}
"""
GRPO = """
batch: {{prompts: 2, tokens: 512}}
rollout: {{n: 2, max_tokens: 6, max_logprob_diff: 1e-4}}
reward: {{function: "{place}/rewards.py:{function}", workers: 1}}
"""


def stored_image(colour: str) -> dict[str, Any]:
    """An image as `datasets` stores it."""
    return {"bytes": png_bytes(draw_squares(colour, (1, 6))), "path": f"{colour}.png"}


def grpo_rows() -> list[dict[str, Any]]:
    return [
        {
            "image": stored_image(colour),
            "problem": "Which colour?",
            "solution": f"<answer> {colour} </answer>",
            "original_question": "Which colour?",
            "prompt": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "Which colour?"}],
        }
        for colour in COLOURS
    ]


def geometry3k_rows() -> list[dict[str, Any]]:
    """TRL trains these after a map that adds the column `prompt`."""
    part, text = {"type": "image", "text": None}, {"type": "text", "text": "Find $x$."}
    return [
        {
            "images": [stored_image(colour)],
            "problem": "<image>Find $x$.",
            "answer": colour,
            "prompt": [{"role": "user", "content": [part, text]}],
        }
        for colour in COLOURS
    ]


def sft_rows() -> list[dict[str, Any]]:
    """parquet gives each part all keys: those of other parts are null."""

    def turn(role: str, *parts: tuple[str, str | None]) -> dict[str, Any]:
        made = [{"index": 0 if kind == "image" else None, "text": text, "type": kind} for kind, text in parts]
        return {"role": role, "content": made}

    return [
        {
            "messages": [
                turn("user", ("text", "Which colour?"), ("image", None)),
                turn("assistant", ("text", colour)),
            ],
            "images": [stored_image(colour)],
        }
        for colour in COLOURS
    ]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trl")
    write_tiny_vlm(folder / "model", hidden=64, layers=1)
    (folder / "rewards.py").write_text(REWARDS, encoding="utf-8")
    for name, rows in {"grpo": grpo_rows(), "geometry3k": geometry3k_rows(), "sft": sft_rows()}.items():
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / f"{name}.parquet")
    return folder


def trained(place: Path, name: str, method: str, more: str) -> list[dict[str, float]]:
    (place / f"{name}.yaml").write_text(RECIPE.format(place=place, name=name, method=method, more=more))
    run_recipe(load_recipe(str(place / f"{name}.yaml"), []))
    return [metrics for step, metrics in facts(place / "runs" / name) if step]


@pytest.mark.parametrize(
    ("name", "function"),
    [("grpo", "all_rewards"), pytest.param("geometry3k", "images_reward", marks=pytest.mark.slow)],
)
def test_grpo_rows_and_reward_functions_of_trl(place: Path, name: str, function: str) -> None:
    steps = trained(place, name, "grpo", GRPO.format(place=place, function=function))
    assert len(steps) == 2
    assert all(metrics["reward/failed"] == 0 for metrics in steps)
    lines = (place / "runs" / name / "samples.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [json.loads(line) for line in lines]
    assert all(len(sample["images"]) == 1 for sample in samples)
    assert len({sample["score"] for sample in samples}) > 1
    if name == "grpo":
        # TRL writes the image before the first user text.
        asked = "<|vision_start|><|image_pad|><|vision_end|>Which colour?"
        wanted = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
        assert all(sample["prompt"] == wanted for sample in samples)


@pytest.mark.slow
def test_sft_rows_of_trl(place: Path) -> None:
    steps = trained(place, "sft", "sft", "batch: {rows_per_update: 2, tokens: 512}")
    assert len(steps) == 2
    # The answers are trained, with their end token: bytes of the colours.
    assert [metrics["train/trained_tokens"] for metrics in steps] == [
        len("red") + len("green") + 2,
        len("blueblack") + 2,
    ]
