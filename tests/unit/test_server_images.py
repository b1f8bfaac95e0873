"""Prompts with images for vLLM: one placeholder token per image, each image file once, and other tokens refused."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from image_rows import picture
from lockstep.preflight.model_checks import served_images
from lockstep.rollout.engine import Further
from lockstep.rollout.servers.adapter import ServerFailed, WantedSample, prompt_digest
from lockstep.rollout.servers.request_stream import RequestStream
from lockstep.rollout.servers.server_client import _one_request
from lockstep.rollout.servers.vllm import Vllm
from lockstep.types import Origin, Question, Request, Sampling
from lockstep.vision.images import image_ref
from lockstep.vision.spans import ImageRef, ImageSpan
from recipe_files import refused, write

PAD, FIRST, LAST = 9, 7, 8
SAMPLING = Sampling(4, stop_ids=(1,))
RED, BLUE = picture(1), picture(2)


def span(start: int, ref: ImageRef, runs: tuple[int, ...] = ()) -> ImageSpan:
    """An image of 2 x 3 tokens, or with other tokens between the placeholders."""
    return ImageSpan(start, (1, 4, 6), 2, ref, "model", runs)


def wanted(first: ImageRef = RED, second: ImageRef = BLUE) -> WantedSample:
    """Two images, of which the second has two tiles of two tokens between other tokens."""
    ids = [5, *[PAD] * 6, 6, FIRST, PAD, PAD, FIRST, PAD, PAD, LAST, 4]
    images = (span(1, first), span(8, second, (1, 2, 1, 2, 1)))
    return WantedSample(ids, SAMPLING, 4, 0, images=images, row="rows.jsonl row 3")


def test_an_image_has_one_placeholder_token_in_the_request() -> None:
    _, body = Vllm().ask(wanted())
    assert body["token_ids"] == [5, PAD, 6, PAD, 4]
    assert body["image_order"] == [RED.digest, BLUE.digest]
    assert {key: base64.b64decode(text) for key, text in body["images"].items()} == {
        RED.digest: RED.data,
        BLUE.digest: BLUE.data,
    }
    assert Vllm().ask(WantedSample([1, 2], SAMPLING, 4, 0))[1].keys() == {"model", "token_ids", "sampling_params"}


def test_a_request_has_each_image_once_and_samples_keep_their_order() -> None:
    bodies = [Vllm().ask(one)[1] for one in (wanted(), wanted(BLUE, RED), wanted(), wanted(RED, RED))]
    made = _one_request(bodies)
    assert made["prompts"] == [(5, PAD, 6, PAD, 4)]
    assert list(made["images"]) == [RED.digest, BLUE.digest]
    orders = [[RED, BLUE], [BLUE, RED], [RED, BLUE], [RED, RED]]
    assert [one["image_order"] for one in made["samples"]] == [[ref.digest for ref in refs] for refs in orders]
    assert not any("images" in one for one in made["samples"])


def answer(ids: list[int]) -> dict[str, Any]:
    made = {"token_ids": [3, 1], "logprobs": [-1.0, -1.0], "finish_reason": "stop", "stop_reason": 1, "versions": None}
    return {**made, "prompt": prompt_digest(ids), "prompt_ids": ids}


def test_other_tokens_of_the_server_are_an_error_that_names_the_row() -> None:
    asked = wanted()
    assert Vllm().read(answer(list(asked.ids)), asked).ids == [3, 1]
    other = [*asked.ids[:7], PAD, *asked.ids[7:]]
    with pytest.raises(ServerFailed, match=r"rows.jsonl row 3 with 2 images has 16 tokens, but 17 .* token 7 on"):
        Vllm().read(answer(other), asked)
    with pytest.raises(ServerFailed, match="differ from token 15 on"):
        Vllm().read(answer(list(asked.ids[:-1])), asked)


def test_requests_bring_their_images_and_rows() -> None:
    question = Question("x", [], "", Origin("rows.jsonl", 5))
    request = Request(wanted().ids, 1, 2, question=question, images=wanted().images)
    none: Further | None = None
    found = RequestStream([request], SAMPLING, None, none, lambda: 8)(0)
    assert [(one.images, one.row) for one in found] == [(wanted().images, "rows.jsonl row 5")] * 2


def test_a_path_is_sent_as_the_bytes_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(RED.data)
    body = Vllm().ask(wanted(image_ref("a.png", tmp_path, "here")))[1]
    assert base64.b64decode(body["images"][RED.digest]) == RED.data


def test_families_that_were_not_tested_are_refused_by_name() -> None:
    def found(kind: str) -> list[str]:
        recipe = SimpleNamespace(rollout=SimpleNamespace(engine="vllm"))
        context: Any = SimpleNamespace(config=SimpleNamespace(model_type=kind), recipe=recipe)
        return [problem.why for problem in served_images(context)]

    assert found("qwen2_5_vl") == []
    assert found("gemma3") == ["engine vllm was not tested with images of gemma3 models"]


@pytest.mark.parametrize("engine", ["hf", "sglang"])
def test_other_engines_read_no_images(tmp_path: Path, engine: str) -> None:
    words = ["method=grpo", "model.vision=freeze", f"rollout.engine={engine}", "reward.rules.x=exact"]
    found = {problem.where: problem.why for problem in refused(write(tmp_path), *words)}
    assert f"engine {engine} does not read images" in found["rollout.engine"]
