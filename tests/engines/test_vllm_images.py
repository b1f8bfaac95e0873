"""vLLM generates from images: its log-probs are the trainer's, also after an update of the tower and in conversations
with an environment that returns images; other tokens of a prompt are an error."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import image_environments
from engine_session import END, move, opened, run, sync
from image_rows import CPU, example, picture, settings
from lockstep.data.batching import micro_batch
from lockstep.device.cpu import Cpu
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.host import EnvironmentHosts
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.setup import host_setup
from lockstep.errors import Refusal
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.policy import Policy
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.servers.vllm import Vllm
from lockstep.types import Completion, Example, Origin, Question, Request, Sampling
from lockstep.vision.processors import ImageTokens

# While one works on these tests: a server of the tiny vision-language model that runs already.
URL = os.environ.get("LOCKSTEP_VLLM_IMAGE_URL")
SAMPLING = Sampling(max_tokens=10, temperature=1.0, seed=3, stop_ids=(END,))
# Log-probs of fp32 by other kernels, and pixels that torchvision resized.
ROUNDING = 2e-3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(made, hidden=64)
    return made


@pytest.fixture(scope="module")
def seeing(start: Callable[..., Any], folder: Path) -> Any:
    if URL:
        return SimpleNamespace(url=URL)
    server = start(folder)
    server.wait()
    return server


def policy_of(folder: Path) -> Policy:
    return load_policy(settings(folder, vision="train"), CPU, Cpu().attention, 0).eval()


def rows_of(folder: Path) -> list[Example]:
    wide, tall = picture(1, 56, 112), picture(2, 112, 56)
    texts = {"what is # here?": [wide], "compare # and #: ": [tall, wide], "only text ": [], "# and #? ": [wide, tall]}
    return [example(folder, text, images, row) for row, (text, images) in enumerate(texts.items())]


def asked(rows: list[Example], n: int = 2) -> list[Request]:
    return [
        Request(list(one.ids), 100 + key, n, question=Question("x", [], "", one.origin), images=one.images)
        for key, one in enumerate(rows)
    ]


def difference(policy: Policy, rows: list[Example], made: list[Completion]) -> float:
    """The largest difference between the log-probs of the server and of the trainer."""
    full = []
    for one in made:
        row = rows[one.request]
        mask = [0] * len(row) + [1] * len(one.ids)
        full.append(Example([*row.ids, *one.ids], mask, row.origin, images=row.images))
    with torch.no_grad():
        ours = policy(micro_batch(full, packed=True, pad_id=0)).logprobs_K
    return float((ours - torch.tensor([value for one in made for value in one.logprobs])).abs().max())


def test_log_probs_are_the_trainers_before_and_after_an_update(seeing: Any, folder: Path, tmp_path: Path) -> None:
    policy, rows = policy_of(folder), rows_of(folder)
    with opened(seeing.url, policy, folder, tmp_path) as engine:
        sync(engine)
        before = run(engine, asked(rows), SAMPLING)
        assert difference(policy, rows, before) < ROUNDING
        # The features that the server keeps are those of the tower before the update.
        move(policy, by=0.05)
        sync(engine, 1)
        after = run(engine, asked(rows), SAMPLING)
        assert difference(policy, rows, after) < ROUNDING
        assert difference(policy, rows, before) > 10 * ROUNDING


def test_images_in_another_order_are_noticed(
    seeing: Any, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy, ask = policy_of(folder), Vllm.ask

    def swapped(self: Vllm, wanted: Any) -> Any:
        path, body = ask(self, wanted)
        return path, {**body, **({"image_order": body["image_order"][::-1]} if "image_order" in body else {})}

    square = [example(folder, "# and #? ", [picture(3), picture(4)])]
    with opened(seeing.url, policy, folder, tmp_path) as engine:
        sync(engine)
        assert difference(policy, square, run(engine, asked(square), SAMPLING)) < ROUNDING
        monkeypatch.setattr(Vllm, "ask", swapped)
        assert difference(policy, square, run(engine, asked(square), SAMPLING)) > 10 * ROUNDING
        # Images of other sizes have other tokens, which the comparison of the prompts notices.
        few = [example(folder, "# and #? ", [picture(1, 56, 112), picture(2, 56, 56)], 7)]
        with pytest.raises(Refusal, match=r"rows.jsonl row 7 with 2 images .* differ from token"):
            run(engine, asked(few), SAMPLING)


def test_another_image_processor_is_an_error_that_names_the_row(seeing: Any, folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(folder, other)
    file = other / "preprocessor_config.json"
    file.write_text(file.read_text().replace("50176", "6272"))
    rows = [example(other, "what is # here?", [picture(1, 140, 140)], 4)]
    with opened(seeing.url, policy_of(folder), folder, tmp_path) as engine:
        sync(engine)
        with pytest.raises(Refusal, match=r"the prompt of rows.jsonl row 4 with 1 images has \d+ tokens, but"):
            run(engine, asked(rows), SAMPLING)


def test_conversations_with_images(seeing: Any, folder: Path, tmp_path: Path) -> None:
    policy, tokenizer = policy_of(folder), load_tokenizer(str(folder))
    rollout = RolloutSettings(
        environment=f"{image_environments.__file__}:Gallery", environment_workers=1, turn_tokens=7
    )
    hosts = EnvironmentHosts(host_setup(rollout))
    chat = ChatFormat(tokenizer, frozenset({END}), images=ImageTokens.of(str(folder), tokenizer))
    question = Question("x", [{"role": "user", "content": "look"}], "0", Origin("rows.jsonl", 0))
    try:
        with opened(seeing.url, policy, folder, tmp_path) as engine:
            sync(engine)
            talks = EnvironmentEngine(engine, hosts, rollout, chat, len(tokenizer))
            made = list(talks.generate([Request([1], 0, 6, question=question)], replace(SAMPLING, max_tokens=400)))
    finally:
        hosts.close()
    whole = [one for one in made if not one.failure]
    # A random model may write the token of an image, which the server would take for an image.
    assert all("the server would take it for an image" in one.failure for one in made if one.failure)
    assert len(whole) >= 2
    for one in whole:
        assert one.trajectory is not None
        row = Example(
            [*(one.prompt_ids or ()), *one.ids],
            [0] * len(one.prompt_ids or ()) + list(one.loss_mask),
            question.origin,
            images=one.trajectory.images[0],
        )
        assert len(row.images) == 5
        with torch.no_grad():
            ours = policy(micro_batch([row], packed=True, pad_id=0)).logprobs_K
        theirs = [value for value, mask in zip(one.logprobs, one.loss_mask, strict=True) if mask]
        torch.testing.assert_close(torch.tensor(theirs), ours, rtol=0, atol=ROUNDING)
