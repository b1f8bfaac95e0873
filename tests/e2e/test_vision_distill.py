"""Distillation on rows with images: the divergence is that of transformers, and the teacher sees the images."""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch

from image_rows import plain_inputs, plain_model
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.data.prepare.squares import draw_squares
from lockstep.model.load import load_tokenizer
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe import load_recipe
from lockstep.recipe.keys_data import Data, Source
from lockstep.train.start import run_recipe
from lockstep.types import Example
from lockstep.vision.images import png_bytes
from refusals import refuses
from runs import facts

RECIPE = """
method: distill
device: cpu
run: {{name: run, folder: {place}/runs, steps: 2, export: false}}
model: {{path: {place}/student, vision: train}}
distill: {{teacher: {place}/teacher, coefficient: 1.0}}
data: {{train: {place}/rows.jsonl, shuffle: false}}
batch: {{rows_per_update: 4, tokens: 512}}
optim: {{lr: 1e-3, eps: 1e-4}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("distill")
    write_tiny_vlm(folder / "student", hidden=64, layers=1)
    write_tiny_vlm(folder / "teacher", hidden=64, layers=2)
    rows = []
    for number, colour in enumerate(("red", "green", "blue")):
        (folder / f"{number}.png").write_bytes(png_bytes(draw_squares(colour, (number, 7))))
        turns = [{"role": "user", "content": "<image>Which colour?"}, {"role": "assistant", "content": colour}]
        rows.append({"messages": turns, "images": [f"{number}.png"]})
    rows.append(
        {"messages": [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}], "images": []}
    )
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE.format(place=folder), encoding="utf-8")
    return folder


def read_rows(folder: Path, path: Path) -> list[Example]:
    data, reader = Data(train=str(path)), partial(SupervisedRows, images=str(folder))
    request = RowRequest(Dataset, reader, [Source(path=str(path))], data, load_tokenizer(str(folder)), 500)
    return load_rows(request).examples


def trained(place: Path, name: str, *words: str) -> list[dict[str, float]]:
    run_recipe(load_recipe(str(place / "recipe.yaml"), [f"run.name={name}", *words]))
    return [metrics for step, metrics in facts(place / "runs" / name) if step]


@pytest.mark.slow
def test_the_divergence_is_that_of_transformers(place: Path) -> None:
    """KL(teacher, student) at each target, each row alone in plain transformers."""
    student, teacher = plain_model(place / "student").eval(), plain_model(place / "teacher").eval()
    total, targets = 0.0, 0
    for row in read_rows(place / "student", place / "rows.jsonl"):
        at = [position for position, _ in row.scored_tokens()]
        with torch.no_grad():
            p, q = (model(**plain_inputs(model, row)).logits[0, at].log_softmax(-1) for model in (teacher, student))
        total, targets = total + float((p.exp() * (p - q)).sum()), targets + len(at)
    first, second = trained(place, "kl")
    assert first["train/divergence"] == pytest.approx(total / targets, abs=2e-5)
    assert second["train/divergence"] < first["train/divergence"]


@pytest.mark.slow
def test_stored_probabilities_of_all_tokens_give_the_same_loss(place: Path) -> None:
    direct, table = trained(place, "direct"), trained(place, "table", "distill.top_k=200")
    assert [one["train/loss"] for one in direct] == pytest.approx([one["train/loss"] for one in table], rel=0.05)


@pytest.mark.slow
def test_a_teacher_with_other_pixels_is_refused(place: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(place / "teacher", tmp_path / "other"))
    file = other / "preprocessor_config.json"
    settings = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps(settings | {"image_mean": [0.1, 0.2, 0.3]}), encoding="utf-8")
    with refuses("distill.teacher", "wrong-model-kind", "image_mean", remedy="same family"):
        trained(place, "refused", f"distill.teacher={other}")
