"""Runs on images with a tape: the tape contains the images, replays are in step, and wrong images are found."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import image_environments
from lockstep.data import image_batch
from lockstep.data.prepare.squares import draw_squares
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.parity.replay.replay_command import replay
from lockstep.parity.replay.replay_result import Replayed
from lockstep.recipe import load_recipe
from lockstep.run.console import Console
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_images import FOLDER, TapeImages
from lockstep.tape.tape_rows import items_of, rollouts_of, step_examples
from lockstep.train.start import run_recipe
from lockstep.vision.images import image_bytes, png_bytes
from refusals import refuses
from runs import facts

SLOW = pytest.mark.slow
COMMON = """
device: cpu
run: {{name: run, folder: {place}/runs, steps: 2, export: false}}
model: {{path: {place}/model, vision: train}}
optim: {{lr: 1e-3, eps: 1e-4}}
tape: {{record: true, every: 1}}
"""
OFFLINE = "data: {{train: {place}/%s.jsonl, shuffle: false}}\nbatch: {{rows_per_update: 2, tokens: 512}}"
RECIPES = {
    "sft": "method: sft\n" + OFFLINE % "sft",
    "dpo": "method: dpo\n" + OFFLINE % "dpo",
    "grpo": """method: grpo
data: {{train: {place}/grpo.jsonl, shuffle: false}}
batch: {{prompts: 2, tokens: 512}}
rollout: {{n: 2, max_tokens: 6}}
reward: {{function: "{place}/reward.py:score"}}""",
    "environment": """method: grpo
data: {{train: {place}/grpo.jsonl, shuffle: false}}
batch: {{prompts: 2, tokens: 1024}}
rollout:
  {{n: 2, max_tokens: 200, turn_tokens: 4, environment: "{environment}:Gallery", environment_workers: 1,
    environment_args: {{turns: 2, sizes: [[28, 56], [56, 28]]}}}}
reward: {{function: "{place}/reward.py:score"}}""",
}
REWARD = """
def score(data_source, solution_str, ground_truth, extra_info):
    light = sum(sum(image.resize((1, 1)).getpixel((0, 0))) for image in extra_info["images"])
    return (len(solution_str) * 7 + sum(solution_str.encode()) + light) % 11 / 10
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("taped")
    write_tiny_vlm(folder / "model", hidden=64, layers=1)
    rows: dict[str, list[object]] = {"sft": [], "dpo": [], "grpo": []}
    for number, colour in enumerate(("red", "green", "blue", "black")):
        (folder / f"{number}.png").write_bytes(png_bytes(draw_squares(colour, (number, 7))))
        asked, images = [{"role": "user", "content": "<image>Which colour?"}], [f"{number}.png"]
        answer = [{"role": "assistant", "content": colour}]
        rows["sft"].append({"messages": asked + answer, "images": images})
        rows["dpo"].append({"prompt": "<image>Which?", "chosen": colour, "rejected": "no", "images": images})
        truth = {"data_source": "x", "reward_model": {"ground_truth": colour}}
        rows["grpo"].append({"prompt": asked, "images": images, **truth})
    for name, listed in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in listed), encoding="utf-8")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    for name, keys in RECIPES.items():
        text = (COMMON + keys).format(place=folder, environment=image_environments.__file__)
        (folder / f"{name}.yaml").write_text(text, encoding="utf-8")
    return folder


def trained(place: Path, kind: str, name: str, *words: str) -> Path:
    run_recipe(load_recipe(str(place / f"{kind}.yaml"), [f"run.name={name}", *words]))
    return place / "runs" / name


def replayed(run: Path, mode: str = "forced", **how: object) -> Replayed:
    return replay(run, mode, [], Console.silent(), **how)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grpo", *(pytest.param(one, marks=SLOW) for one in ("sft", "dpo", "environment"))])
def test_a_replay_of_a_run_on_images_is_in_step(place: Path, kind: str) -> None:
    run = trained(place, kind, f"{kind}-taped")
    found = replayed(run)
    assert found.in_step, found
    stages = {check.stage for check in found.checks}
    assert {"batch", "log-probs"} <= stages


@pytest.mark.slow
@pytest.mark.parametrize("words", [["model.vision=freeze"], ["model.vision=freeze", "model.lora.rank=4"]])
def test_kept_features_change_no_trace(place: Path, words: list[str]) -> None:
    """The features of a frozen tower are kept, but each trace contains the tower."""
    run = trained(place, "grpo", f"frozen-{len(words)}", *words)
    for step in (1, 2):
        record = TapeFolder(run / "tape").read_step(step)
        modules = {event["module"] for trace in record.info["probe"]["traces"] for event in trace["events"]}
        assert any("visual" in module for module in modules)
    assert replayed(run).in_step
    plain = trained(place, "grpo", f"plain-{len(words)}", *words, "tape.record=false")
    assert facts(plain) == facts(run)


@pytest.mark.slow
def test_the_tape_contains_the_images(place: Path, tmp_path: Path) -> None:
    runs = {kind: trained(place, kind, f"{kind}-files") for kind in ("dpo", "environment")}
    for kind, run in runs.items():
        moved = Path(shutil.copytree(run / "tape", tmp_path / kind))
        tape, files = TapeFolder(moved), TapeImages(moved)
        if kind == "dpo":
            read = [one for item in items_of(tape.read_table(tape.rows_file(1)), files) for one in item.examples]
        else:
            rollouts = rollouts_of(tape.read_table(tape.rollouts_file(1)), files)
            read = [one for rollout in rollouts for one in rollout.sequences]
            assert {len(one.images) for one in read} == {3}  # of the row, of the start and of a turn
        fed = step_examples(tape.read_step(1), files)
        assert [one.images for one in fed] == [one.images for one in read]
        for image in (image for one in read for image in one.images):
            assert image_bytes(image.ref, "test").startswith(b"\x89PNG")
            assert str(image.ref.path).startswith(str(moved))


@pytest.mark.slow
def test_a_changed_image_on_the_tape_is_refused(place: Path) -> None:
    run = trained(place, "sft", "changed")
    for file in (run / "tape" / FOLDER).iterdir():
        file.write_bytes(png_bytes(draw_squares("black", (1, 2))))
    with refuses("", "damaged-file", "has changed"):
        replayed(run, "chained")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["axes", "order"])
def test_a_wrong_axis_or_order_of_features_is_found(place: Path, fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The replay gets other positions or features than the recorded run, but the same tokens."""
    run = trained(place, "sft", f"fault-{fault}")
    inputs = image_batch._Collected.inputs

    def wrong(self: image_batch._Collected) -> object:
        if fault == "axes":
            self._axes = self._axes[[0, 2, 1]]
        else:
            self._features = [features[::-1] for features in self._features]
        return inputs(self)

    monkeypatch.setattr(image_batch._Collected, "inputs", wrong)
    found = replayed(run)
    assert not found.in_step
    failed = [(check.step, check.stage) for check in found.checks if not check.passed]
    assert failed == [(1, "batch"), (2, "batch")]
