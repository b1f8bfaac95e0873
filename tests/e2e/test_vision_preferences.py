"""Preference runs on images: kept features change no bit, two ranks of which one has no images, kill and resume."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import job_ranks
from commands import torchrun
from image_rows import CPU, example, picture, plain_inputs, settings
from kills import killed, lines
from lockstep.data.batching import micro_batch
from lockstep.data.prepare.squares import draw_squares
from lockstep.model.load import load_value_model
from lockstep.model.towers import feature_cache
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe import load_recipe
from lockstep.train.start import run_recipe
from lockstep.types import ScoredExample
from lockstep.vision.images import png_bytes
from refusals import refuses
from runs import close, facts, stored
from vision_families import write_family

RECIPE = """
method: dpo
device: cpu
run: {{name: run, folder: {place}/runs, steps: 4}}
model: {{path: {place}/model, vision: freeze}}
data: {{train: {place}/rows.jsonl, shuffle: false}}
batch: {{rows_per_update: 2, tokens: 512}}
optim: {{lr: 1e-3, eps: 1e-4}}
checkpoint: {{every: 2}}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model and pairs that alternate between text and images. Two updates are an epoch."""
    folder = tmp_path_factory.mktemp("vision")
    write_tiny_vlm(folder / "model", hidden=64, layers=1)
    rows = []
    for number, (colour, other) in enumerate((("red", "green"), ("blue", "black"))):
        (folder / f"{number}.png").write_bytes(png_bytes(draw_squares(colour, (number, 7))))
        image = {"prompt": "<image>Which colour?", "chosen": colour, "rejected": other, "images": [f"{number}.png"]}
        rows += [image, {"prompt": f"{number} + 1?", "chosen": str(number + 1), "rejected": "no", "images": []}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    (folder / "recipe.yaml").write_text(RECIPE.format(place=folder), encoding="utf-8")
    return folder


def trained(place: Path, name: str, *words: str) -> Path:
    run_recipe(load_recipe(str(place / "recipe.yaml"), [f"run.name={name}", *words]))
    return place / "runs" / name


def same_bits(one: Path, other: Path, step: int = 4) -> bool:
    first, second = stored(one, step), stored(other, step)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.slow
def test_kept_features_change_no_bit(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reference has the tower of the policy, so its passes also find the features."""
    caches: list[Any] = []
    monkeypatch.setattr(feature_cache, "_CACHES", _Listed(caches))
    kept = trained(place, "kept")
    assert "not read" not in capsys.readouterr().out  # the report knows that the images are read
    (one,) = caches
    assert (one.misses, len(one._kept)) == (2, 2)
    assert one.hits > 8  # in 4 updates, the policy and the reference read two images twice each
    none = trained(place, "none", "model.vision_cache_gb=0")
    assert caches == [one]  # the towers of the second run have the same weights
    assert (one.hits, len(one._kept)) == (0, 0)  # the trial of a loaded model clears the cache
    assert same_bits(kept, none)
    assert [one["train/loss"] for _, one in facts(kept)] == [one["train/loss"] for _, one in facts(none)]


class _Listed(set[Any]):
    """A set of caches that also lists them."""

    def __init__(self, caches: list[Any]):
        super().__init__()
        self.caches = caches

    def add(self, one: object) -> None:
        self.caches.append(one)
        super().add(one)


RUNS = {
    "dpo-train": ["model.vision=train"],
    "dpo-freeze": [],
    "dpo-lora": ["model.lora={rank: 4}"],
    "kto": ["method=kto", "model.vision=train", "batch.rows_per_update=4"],
    "simpo-padded": ["method=simpo", "batch.tokens=null", "batch.micro_batch_size=1"],
}


@pytest.mark.slow
@pytest.mark.torchrun
def test_two_ranks_of_which_one_has_no_images_train_like_one_process(place: Path) -> None:
    """Each update of two pairs has one with an image and one without, so in each update one rank has no image."""
    for name, words in RUNS.items():
        trained(place, f"{name}-one", *words)
    told = [[str(place / "recipe.yaml"), f"run.name={name}-two", *words] for name, words in RUNS.items()]
    done = torchrun(job_ranks.write_jobs(place, told), program=job_ranks.PROGRAM, processes=2)
    assert done.returncode == 0, done.stderr
    for name in RUNS:
        one, two = place / "runs" / f"{name}-one", place / "runs" / f"{name}-two"
        losses = [[metrics["train/loss"] for _, metrics in facts(run)] for run in (one, two)]
        assert losses[0] == pytest.approx(losses[1], abs=1e-5)
        assert close(stored(one, 4), stored(two, 4))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dpo-freeze", "dpo-lora", "kto"])
def test_a_killed_run_continues_with_the_same_bits(place: Path, name: str) -> None:
    whole, killed_name = trained(place, f"{name}-whole", *RUNS[name]), f"{name}-killed"
    words = ["train", place / "recipe.yaml", f"run.name={killed_name}", *RUNS[name]]
    killed(words, lines(place / "runs" / killed_name / "metrics.jsonl", 3))
    assert same_bits(whole, trained(place, killed_name, *RUNS[name]))


@pytest.mark.slow
def test_precomputed_reference_log_probs_see_the_images(place: Path) -> None:
    direct, table = trained(place, "direct"), trained(place, "table", "preference.precompute=true")
    losses = [[metrics["train/loss"] for _, metrics in facts(run)] for run in (direct, table)]
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.slow
def test_stored_reference_log_probs_are_those_of_the_images(place: Path, tmp_path: Path) -> None:
    """The tokens of a row stay the same when its image changes."""
    rows = tmp_path / "rows.jsonl"
    row = {"prompt": "<image>Which?", "chosen": "red", "rejected": "no", "images": ["a.png"]}
    rows.write_text(json.dumps(row) + "\n", encoding="utf-8")
    words = [f"data.train={rows}", "preference.precompute=true", "batch.rows_per_update=1", f"run.folder={tmp_path}"]
    for number, colour in enumerate(("red", "black")):
        (tmp_path / "a.png").write_bytes(png_bytes(draw_squares(colour, (1, 7))))
        trained(place, f"images-{number}", *words, "run.steps=1", "run.export=false")
    # The first step starts from the reference, so both log-probs are equal and the loss is -log(sigmoid(0)).
    losses = [facts(tmp_path / f"images-{number}")[0][1]["train/loss"] for number in (0, 1)]
    assert losses == pytest.approx([0.6931472] * 2, abs=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3_5", marks=pytest.mark.slow)])
def test_a_reward_model_scores_images_as_its_export_in_transformers(place: Path, tmp_path: Path, family: str) -> None:
    from transformers import AutoModelForSequenceClassification

    model = write_family(family, tmp_path / "model")
    words = ["method=rm", f"model.path={model}", "model.vision=train", "run.steps=2", f"run.folder={tmp_path}"]
    trained(place, "rm", *words)
    out = tmp_path / "rm" / "export"
    plain = AutoModelForSequenceClassification.from_pretrained(out, trust_remote_code=False).eval()
    rows = [example(model, "see # red", [picture(seed, 32, 32)], trained=1) for seed in (3, 4)]
    scored = [ScoredExample(one.ids, one.loss_mask, one.origin, (len(one) - 1,), images=one.images) for one in rows]
    value = load_value_model(settings(model), str(model), CPU, "sdpa", 0, key="model.path").eval()
    weights = stored(tmp_path / "rm", 2)
    value.load_state_dict({**value.state_dict(), **weights})
    with torch.no_grad():
        ours = value(micro_batch(scored, packed=True, pad_id=0))
        wanted = [float(plain(**plain_inputs(plain, one)).logits) for one in rows]
    assert ours.tolist() == pytest.approx(wanted, abs=2e-5)
    assert abs(wanted[0] - wanted[1]) > 1e-4  # the rows differ only in their images
    assert (out / "preprocessor_config.json").is_file()


def test_a_reward_model_without_a_class_in_transformers_is_refused(place: Path) -> None:
    with refuses("model.path", "unsupported-model", "qwen2_5_vl", remedy="model.vision"):
        trained(place, "refused", "method=rm")
