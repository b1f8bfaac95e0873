"""Reward models see the images of prompts: scores equal those of transformers, one row at a time."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from image_rows import CPU, picture, plain_inputs, plain_model, settings
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.model.load import load_tokenizer, load_value_model
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe.keys_data import Data, Source
from lockstep.reward.model import ModelPart
from lockstep.reward.process_model import PROCESS, ProcessPart
from lockstep.types import Example, Failure, Origin, Question
from lockstep.vision.families import FAMILIES
from refusals import refuses
from reward_models import write_reward_model
from vision_families import write_family

SLOW = pytest.mark.slow
ANSWERS = ("red", "a green square")
# The number of images of each prompt.
COUNTS = (1, 0, 2)


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    write_tiny_vlm(folder, hidden=32, layers=1)
    return folder


def write_judge(family: str, folder: Path) -> Path:
    """A reward model with random weights, so large that scores depend on the images."""
    from transformers import AutoConfig, AutoModelForSequenceClassification

    write_family(family, folder)
    config = AutoConfig.from_pretrained(folder, num_labels=1, trust_remote_code=False)
    torch.manual_seed(1)
    model = AutoModelForSequenceClassification.from_pretrained(folder, config=config, trust_remote_code=False)
    with torch.no_grad():
        model.score.weight.normal_()
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_judge("gemma3", tmp_path_factory.mktemp("judge") / "model")


def asked(count: int) -> tuple[str, list[Any]]:
    return "<image>" * count + "Which colour?", [picture(7 + one, 32, 32) for one in range(count)]


def question(count: int) -> Question:
    """A prompt of the policy, with its placeholders."""
    text, images = asked(count)
    text = text.replace("<image>", FAMILIES["qwen2_5_vl"].placeholder)
    return Question("x", [{"role": "user", "content": text}], "red", Origin("rows", count), images=tuple(images))


def chats(folder: Path, place: Path, answers: list[str]) -> list[Example]:
    """The prompts with each answer, as SFT encodes them for the reward model: tests of SFT compare its tokens with
    those of the processor of transformers."""
    rows = []
    for count in COUNTS:
        text, images = asked(count)
        (place / f"{count}").mkdir(exist_ok=True)
        for number, image in enumerate(images):
            (place / f"{count}" / f"{number}.png").write_bytes(image.data)
        paths = [f"{count}/{number}.png" for number in range(count)]
        for answer in answers:
            turns = [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
            rows.append({"messages": turns, "images": paths})
    path = place / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    data, reader = Data(train=str(path), require_end=False), partial(SupervisedRows, images=str(folder))
    request = RowRequest(Dataset, reader, [Source(path=str(path))], data, load_tokenizer(str(folder)), 500)
    return load_rows(request).examples


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3_5", marks=SLOW)])
def test_scores_equal_those_of_transformers_for_each_row_alone(
    family: str, policy: Path, judge: Path, tmp_path: Path
) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = judge if family == "gemma3" else write_judge(family, tmp_path / "judge")
    part = ModelPart(str(folder), CPU, policy=str(policy))
    futures = [part.submit(question(count), answer) for count in COUNTS for answer in ANSWERS]
    part.flush()
    found = [future.result(0)["model"] for future in futures]
    model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=False).eval()
    with torch.no_grad():
        rows = chats(folder, tmp_path, list(ANSWERS))
        wanted = [float(model(**plain_inputs(model, row)).logits) for row in rows]
        blank = [float(model(input_ids=torch.tensor([list(row.ids)])).logits) for row in rows]
    assert found == pytest.approx(wanted, abs=2e-5)
    seen = [abs(one - other) > 1e-3 for one, other in zip(wanted, blank, strict=True)]
    assert seen == [True, True, False, False, True, True]  # only the rows without images have the same score


@SLOW
@pytest.mark.parametrize("family", ["gemma3", "qwen3_vl", "smolvlm"])
def test_steps_are_judged_with_images(family: str, policy: Path, tmp_path: Path) -> None:
    folder = write_family(family, tmp_path / "judge")
    (folder / PROCESS).write_text(json.dumps({"placeholder": "~", "tokens": ["+", "-"]}), encoding="utf-8")
    part = ProcessPart(str(folder), "\n", CPU, policy=str(policy))
    futures = [part.submit(question(count), "red\ngreen") for count in COUNTS]
    part.flush()
    found = [[share * 2 for _, share in future.result(0).steps] for future in futures]
    model = plain_model(folder).eval()
    wanted = []
    for row in chats(folder, tmp_path, ["red~\ngreen~"]):
        with torch.no_grad():
            logits = model(**plain_inputs(model, row)).logits[0]
        ends = [at for at, token in enumerate(row.ids) if token == ord("~")]
        wanted.append(logits[ends][:, [ord("+"), ord("-")]].softmax(-1)[:, 0].tolist())
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, abs=2e-5)


def test_an_answer_with_a_placeholder_fails_and_names_the_row(policy: Path, judge: Path) -> None:
    part = ModelPart(str(judge), CPU, policy=str(policy))
    failure = part.submit(question(1), "see <start_of_image>").result(0)
    assert isinstance(failure, Failure)
    assert "rows row 1" in failure.why
    assert "2 of 1 images" in failure.why


def test_a_reward_model_of_text_is_refused(policy: Path, tiny_folder: Path, tmp_path: Path) -> None:
    text = write_reward_model(tiny_folder, tmp_path / "text")
    with refuses(f"reward.model {text}", "wrong-model-kind", "read no images", remedy="method rm"):
        ModelPart(str(text), CPU, policy=str(policy))


def test_a_reward_model_as_critic_is_refused(judge: Path) -> None:
    with refuses("critic.path", "wrong-model-kind", "starts from a vision", remedy="from which it was trained"):
        load_value_model(settings(judge), str(judge), CPU, "sdpa", 0)
