"""SFT runs on images: two ranks of which one has no images, the export, and learning from images only."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch

import job_ranks
from commands import lockstep, torchrun
from hang import HANG
from image_rows import CPU, example, picture, plain_logprobs, plain_model, settings
from lockstep.data.batching import micro_batch
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.data.prepare.squares import draw_squares
from lockstep.device.select import select
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_data import Data
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.train.start import run_recipe
from lockstep.types import Example, Request, Sampling
from lockstep.vision.images import png_bytes
from refusals import refuses
from runs import close, facts, stored
from vision_families import CONFIGS, rows_of, write_family


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and rows that alternate between text and images."""
    folder = tmp_path_factory.mktemp("vision")
    write_tiny_vlm(folder / "model", hidden=64, layers=1)
    rows = []
    for number, colour in enumerate(("red", "green", "blue", "black")):
        (folder / f"{number}.png").write_bytes(png_bytes(draw_squares(colour, (number, 7))))
        asked = {"role": "user", "content": "<image>Which colour?"}
        rows.append({"messages": [asked, {"role": "assistant", "content": colour}], "images": [f"{number}.png"]})
        asked = {"role": "user", "content": f"How much is {number} + 1?"}
        rows.append({"messages": [asked, {"role": "assistant", "content": str(number + 1)}], "images": []})
    (folder / "recipe.yaml").write_text(RECIPE.format(place=folder), encoding="utf-8")
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return folder


RECIPE = """
method: sft
device: cpu
run: {{name: run, folder: {place}/runs, steps: 3}}
model: {{path: {place}/model}}
data: {{train: {place}/rows.jsonl, shuffle: false}}
batch: {{rows_per_update: 2, tokens: 512}}
optim: {{lr: 1e-3, eps: 1e-4}}
"""


def job(place: Path, name: str, *words: str) -> list[str]:
    return [str(place / "recipe.yaml"), f"run.name={name}", *words]


def trained(place: Path, name: str, *words: str) -> Path:
    recipe, *keys = job(place, name, *words)
    run_recipe(load_recipe(recipe, keys))
    return place / "runs" / name


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_ranks_of_which_one_has_no_images_train_like_one_process(place: Path) -> None:
    """Each update has one row with an image and one without, so in each update one rank has no image."""
    jobs = {
        "train": ["model.vision=train"],
        "freeze": ["model.vision=freeze"],
        "lora": ["model.vision=freeze", "model.lora={rank: 4}"],
    }
    for name, words in jobs.items():
        trained(place, f"{name}-one", *words)
    told = [job(place, f"{name}-two", *words) for name, words in jobs.items()]
    done = torchrun(job_ranks.write_jobs(place, told), program=job_ranks.PROGRAM, processes=2)
    assert done.returncode == 0, done.stderr
    for name in jobs:
        one, two = place / "runs" / f"{name}-one", place / "runs" / f"{name}-two"
        losses = [[metrics["train/loss"] for _, metrics in facts(run)] for run in (one, two)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
        assert close(stored(one, 3), stored(two, 3))
        assert any("visual" in key for key in stored(one, 3)) == (name == "train")


@pytest.mark.daily("train")
@pytest.mark.parametrize("vision", ["train", "freeze"])
def test_an_export_loads_in_transformers_with_equal_logits(place: Path, vision: str) -> None:
    from transformers import AutoImageProcessor

    out = trained(place, f"export-{vision}", f"model.vision={vision}", "run.steps=2") / "export"
    row = example(out, "what is #? it is red", [picture(1, 56, 84)])
    start, model = plain_model(place / "model"), plain_model(out)
    changed = {
        name for (name, a), b in zip(start.named_parameters(), model.parameters(), strict=True) if (a != b).any()
    }
    assert any("language_model" in name for name in changed)
    assert any("visual" in name for name in changed) == (vision == "train")
    with torch.no_grad():
        wanted = plain_logprobs(model, row)
        ours = load_policy(settings(out), CPU, "sdpa", 0).eval()(micro_batch([row], packed=True, pad_id=0)).logprobs_K
        before = plain_logprobs(start, row)
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=0)
    assert (before - wanted).abs().max() > 1e-3
    assert AutoImageProcessor.from_pretrained(out, backend="pil", trust_remote_code=False).patch_size == 14


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "vision"),
    [
        pytest.param(family, vision, marks=[] if (family, vision) == ("gemma3", "train") else pytest.mark.slow)
        for family in CONFIGS
        for vision in ("train", "freeze")
    ],
)
def test_exports_of_families_load_in_transformers(place: Path, family: str, vision: str) -> None:
    from transformers import AutoImageProcessor

    model = place / family
    if not model.exists():
        write_family(family, model)
    name = f"{family}-{vision}"
    words = (f"model.path={model}", f"model.vision={vision}", "run.steps=2", "data.require_end=false")
    out = trained(place, name, *words) / "export"
    row = rows_of(out)[1]
    start, loaded = plain_model(model), plain_model(out)
    changed = {
        a for (a, old), new in zip(start.named_parameters(), loaded.parameters(), strict=True) if (old != new).any()
    }
    assert any("layers.1.self_attn" in one and "vision" not in one for one in changed)
    assert any("vis" in one for one in changed) == (vision == "train")
    with torch.no_grad():
        wanted = plain_logprobs(loaded, row)
        ours = load_policy(settings(out), CPU, "sdpa", 0).eval()(micro_batch([row], packed=True, pad_id=0)).logprobs_K
    torch.testing.assert_close(ours, wanted, atol=2e-5, rtol=0)
    kinds = [
        type(AutoImageProcessor.from_pretrained(one, backend="pil", trust_remote_code=False)) for one in (model, out)
    ]
    assert kinds[0] is kinds[1]
    assert (out / "preprocessor_config.json").read_text() == (model / "preprocessor_config.json").read_text()


def accuracy(model: Path, rows: list[Example], shift: int = 0, vision: str | None = "freeze") -> float:
    """The share of rows whose greedy answer is right. With `shift`, each row has the image of another row."""
    policy = load_policy(settings(model, vision=vision), CPU, "sdpa", 0).eval()
    engine = NativeEngine(policy, select("cpu"), RolloutSettings(), load_tokenizer(str(model)).decode)
    requests, wanted = [], []
    for number, row in enumerate(rows):
        prompt, other = list(row.loss_mask).index(1), rows[(number + shift) % len(rows)]
        images = tuple(replace(one, ref=its.ref) for one, its in zip(row.images, other.images, strict=True))
        requests.append(Request(list(row.ids[:prompt]), number, images=images))
        wanted.append([token for token, flag in zip(row.ids, row.loss_mask, strict=True) if flag])
    sampling = Sampling(max_tokens=12, temperature=0.0, stop_ids=(wanted[0][-1],))
    answers = {one.request: one.ids for one in engine.generate(requests, sampling)}
    return sum(answers[number] == ids for number, ids in enumerate(wanted)) / len(wanted)


def without_images(path: Path) -> Path:
    """A file with the same rows, but without their images."""
    rows = pyarrow.parquet.read_table(path).to_pylist()
    for row in rows:
        row["messages"] = [{**turn, "content": turn["content"].replace("<image>", "")} for turn in row["messages"]]
        del row["images"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path.with_name(f"text_{path.name}"))
    return path.with_name(f"text_{path.name}")


@pytest.mark.slow
def test_squares_are_learned_from_their_images_only(tmp_path: Path, record_property: Any) -> None:
    """Held-out images are answered almost always. With the images of other rows, and by a model that was trained and
    asked without images, answers are at chance: 1 of 6 colours or 1 of 4 numbers."""
    assert lockstep("data", "tiny-vlm", tmp_path / "model").returncode == 0
    assert lockstep("data", "squares", tmp_path / "data").returncode == 0
    train, val = (tmp_path / "data" / f"sft_{split}.parquet" for split in ("train", "val"))

    def answers(name: str, train: Path, val: Path, vision: str | None) -> tuple[Path, list[Example]]:
        words = [f"run.name={name}", f"run.folder={tmp_path / 'runs'}", f"model.path={tmp_path / 'model'}"]
        words += [f"data.train={train}", f"data.val={val}", f"model.vision={vision or 'null'}"]
        done = lockstep("train", "sft-squares", *words, timeout=8 * HANG)
        assert done.returncode == 0, done.stderr
        out, data = tmp_path / "runs" / name / "export", Data(train=str(val))
        reader = partial(SupervisedRows, images=str(out) if vision else None)
        return out, load_rows(RowRequest(Dataset, reader, data.train, data, load_tokenizer(str(out)), 200)).examples

    out, rows = answers("seeing", train, val, "train")
    blind, texts = answers("blind", without_images(train), without_images(val), None)
    found = {
        "own images": accuracy(out, rows),
        "other images": accuracy(out, rows, shift=1),
        "text only": accuracy(blind, texts, vision=None),
    }
    record_property("accuracy", found)
    assert found["own images"] >= 0.95, found
    assert found["other images"] <= 0.35, found
    assert found["text only"] <= 0.35, found


def test_changed_images_and_processors_are_refused_on_resume(place: Path, tmp_path: Path) -> None:
    """A run resumes at a position in its rows, and their images belong to them."""
    shutil.copytree(place, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("runs"))
    (tmp_path / "recipe.yaml").write_text(RECIPE.format(place=tmp_path), encoding="utf-8")
    words = ["run.name=changed", "model.vision=freeze", "checkpoint.every=1", "run.export=false"]
    run_recipe(load_recipe(str(tmp_path / "recipe.yaml"), [*words, "run.steps=1"]))
    image, processor = tmp_path / "2.png", tmp_path / "model" / "preprocessor_config.json"
    before = image.read_bytes(), processor.read_bytes()
    for side in (56, 28):  # of the same and of another size
        pixels = draw_squares("yellow", (1,))[:side, :side]
        image.write_bytes(png_bytes(pixels))
        with refuses("data.train", "changed-data", "2.png has other content"):
            run_recipe(load_recipe(str(tmp_path / "recipe.yaml"), words))
    image.write_bytes(before[0])
    processor.write_text(before[1].decode().replace("0.48145466", "0.9"), encoding="utf-8")
    with refuses("model.path", "changed-model", "preprocessor_config.json has other content"):
        run_recipe(load_recipe(str(tmp_path / "recipe.yaml"), words))
    processor.write_bytes(before[1])
    run_recipe(load_recipe(str(tmp_path / "recipe.yaml"), words))
    assert len(facts(tmp_path / "runs" / "changed")) == 3
