"""The built-in engine with images: prefill with features, decode with the position offset, shared prompts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import native, run

from image_rows import CPU, check_generated, example, generated, picture, settings
from lockstep.data.batching import micro_batch
from lockstep.device.cpu import Cpu
from lockstep.model.load import load_policy
from lockstep.model.policy import Policy
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.rollout.native import decode_batch
from lockstep.types import Example, Request, Sampling

END = 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(made, hidden=64)
    return made


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load_policy(settings(folder, vision="freeze"), CPU, Cpu().attention, 0).eval()


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Example]:
    wide, tall = picture(1, 56, 112), picture(2, 140, 84)
    texts = {"what is # here?": [wide], "compare # and #: ": [tall, wide], "only text ": [], "# first? ": [tall]}
    return [example(folder, text, images) for text, images in texts.items()]


def asked(rows: list[Example], n: int = 1) -> list[Request]:
    return [Request(list(one.ids), 100 + key, n, images=one.images) for key, one in enumerate(rows)]


GREEDY = Sampling(max_tokens=12, temperature=0.0, stop_ids=(END,))


@pytest.mark.parametrize("budget", [None, 5])
def test_greedy_tokens_equal_those_of_transformers(
    folder: Path, policy: Policy, rows: list[Example], budget: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the prefill is divided inside of images."""
    keys: dict[str, Any] = {} if budget is None else {"prefill_tokens": budget}
    done = run(native(policy, folder, **keys), asked(rows), GREEDY)
    check_generated(done, generated(folder, rows, 12, END))


def test_log_probs_of_samples_are_those_of_the_trainer(folder: Path, policy: Policy, rows: list[Example]) -> None:
    sampling = Sampling(max_tokens=10, temperature=1.0, stop_ids=(END,), seed=3)
    done = run(native(policy, folder), asked(rows, 3), sampling)
    assert len({tuple(one.ids) for one in done}) > len(rows)
    for one in done:
        prompt = rows[one.request]
        full = Example(
            [*prompt.ids, *one.ids], [0] * len(prompt) + [1] * len(one.ids), prompt.origin, images=prompt.images
        )
        with torch.no_grad():
            wanted = policy(micro_batch([full], packed=True, pad_id=0)).logprobs_K
        torch.testing.assert_close(torch.tensor(one.logprobs), wanted, atol=2e-4, rtol=0)


def test_a_wrong_offset_changes_the_log_probs(
    folder: Path, policy: Policy, rows: list[Example], monkeypatch: pytest.MonkeyPatch
) -> None:
    right = run(native(policy, folder), asked(rows[:1]), GREEDY)
    monkeypatch.setattr(decode_batch, "position_offset", lambda images: 0)
    wrong = run(native(policy, folder), asked(rows[:1]), GREEDY)
    assert abs(right[0].logprobs[0] - wrong[0].logprobs[0]) > 1e-4
