"""Unmodified agents that send images with OpenAI's client. The trainer and plain transformers compute the log-probs
that the engine had when it sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import native

from agent_engines import FILE
from image_rows import CPU, picture, plain_logprobs, plain_model, settings
from lockstep.data.batching import micro_batch
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.prompt_rows import encoded_prompt
from lockstep.device.cpu import Cpu
from lockstep.environments.agents.agent_loop import AgentEngine
from lockstep.environments.agents.agent_server import AgentServer
from lockstep.environments.agents.agent_setup import agent_setup
from lockstep.environments.agents.conversation_rows import message_key
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.host import EnvironmentHosts
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.policy import Policy
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Example, Origin, Question, Request, Sampling
from lockstep.vision.processors import ImageTokens
from vision_families import write_family

SLOW = pytest.mark.slow


def run(folder: Path, agent: str, *, vision: bool = True, **keys: Any) -> tuple[list[Completion], Policy]:
    """Runs the agent twice for a row with an image."""
    tokenizer = load_tokenizer(str(folder))
    model = settings(folder, vision="freeze") if vision else settings(folder, vision=None)
    policy: Policy = load_policy(model, CPU, Cpu().attention, 0).eval()
    rollout = RolloutSettings(agent=f"{FILE}:{agent}", environment_workers=1, turn_tokens=6, **keys)
    hosts, server = EnvironmentHosts(agent_setup(rollout)), AgentServer("127.0.0.1", "rollout.agent_host")
    names = ("<end_of_turn>", "<|im_end|>")
    ends = [tokenizer.eos_token_id, *(tokenizer.convert_tokens_to_ids(name) for name in names)]
    stop = tuple(one for one in ends if one is not None)
    images = ImageTokens.of(str(folder), tokenizer) if vision else None
    reader = RowImages(str(folder), tokenizer, "") if vision else None
    content = f"see {reader.tokens.family.placeholder}?" if reader else "see?"
    refs = (picture(5, 32, 32),) if vision else ()
    asked = Question("x", [{"role": "user", "content": content}], "0", Origin("rows", 1), images=refs)
    prompt = encoded_prompt(tokenizer, asked, None, reader)
    chat = ChatFormat(tokenizer, frozenset(stop), rollout.history, images)
    engine = AgentEngine(native(policy, folder), hosts, rollout, chat, len(tokenizer))
    engine.server = server
    try:
        request = Request(prompt.ids, 7, 2, question=asked, images=prompt.images)
        made = list(engine.generate([request], Sampling(600, temperature=1.0, stop_ids=stop, seed=3)))
    finally:
        engine.close()
    return made, policy


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen") / "model"
    write_tiny_vlm(folder, hidden=64)
    return folder


def check_album(folder: Path, **keys: Any) -> None:
    made, policy = run(folder, "album", **keys)
    plain, compared = plain_model(folder), 0
    for one in made:
        assert not one.failure, one.failure
        assert one.trajectory is not None
        assert one.prompt_ids is not None
        rows, of_rows = one.rows, one.trajectory.images
        # The long conversation, its branch, two choices, and the request of the responses API. A history that the
        # template renders again may be one more row.
        counts = sorted(len(images) for images in of_rows)
        assert counts in ([1, 2, 2, 2, 2], [1, 2, 2, 2, 2, 2])
        assert len(counts) == 5 or keys["history"] == "as_template"
        assert len(one.trajectory.turns) == 7
        start = list(one.prompt_ids)
        examples = [
            Example(start + row.ids, [0] * len(start) + list(row.loss_mask), Origin("rows", 1), images=own)
            for row, own in zip(rows, of_rows, strict=True)
        ]
        for row, example in zip(rows, examples, strict=True):
            wanted = torch.tensor([p for p, mask in zip(row.logprobs, row.loss_mask, strict=True) if mask])
            with torch.no_grad():
                ours = policy(micro_batch([example], packed=True, pad_id=0)).logprobs_K
                torch.testing.assert_close(ours, wanted, rtol=0, atol=5e-4)
                pad = plain.config.image_token_id
                if pad not in [token for token, mask in zip(row.ids, row.loss_mask, strict=True) if mask]:
                    torch.testing.assert_close(plain_logprobs(plain, example), wanted, rtol=0, atol=5e-4)
                    compared += 1
    assert compared > 6


@pytest.mark.slow
def test_log_probs_of_agents_with_images_are_those_of_the_trainer(qwen: Path) -> None:
    check_album(qwen)


@SLOW
@pytest.mark.parametrize("history", ["keep", "as_template"])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3"])
def test_so_they_are_in_other_families(qwen: Path, tmp_path: Path, family: str, history: str) -> None:
    folder = qwen if family == "qwen2_5_vl" else write_family(family, tmp_path / "model")
    check_album(folder, history=history)


@SLOW
def test_images_that_cannot_be_read_are_refused_with_their_place(qwen: Path) -> None:
    made, _ = run(qwen, "wrong_image")
    assert made[0].trajectory is not None
    address, damaged, path = made[0].trajectory.info["errors"]
    assert "messages[0].content[0]" in address
    assert "data URI" in address
    assert "cannot be read" in damaged
    assert "data URI" in path


def test_messages_with_other_images_are_other_messages() -> None:
    def message(url: str) -> dict[str, Any]:
        return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}

    assert message_key(message("data:a")) == message_key(message("data:a"))
    assert message_key(message("data:a")) != message_key(message("data:b"))


@SLOW
def test_a_model_without_images_refuses_them(qwen: Path) -> None:
    made, _ = run(qwen, "album", vision=False)
    assert all("reads no images" in one.failure for one in made)
