"""Families with images: packed, padded and shared rows compute what transformers computes for each row alone, and the
engine generates what `generate` generates."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import native, run

from image_rows import CPU, by_transformers, check, check_generated, example, generated, picture, settings
from lockstep.data.batching import micro_batch, shared_beginnings
from lockstep.model.load import load_policy
from lockstep.rollout.native import decode_batch, runner
from lockstep.types import Request, Sampling
from lockstep.vision.spans import ImageBlock, ImageInputs
from refusals import refuses
from vision_families import CONFIGS, rows_of, write_family

LOGPROB = 2e-5
END = 257


# These have the same code as another family.
SLOW = ("qwen3_vl_moe", "qwen3_5_moe", "llava", "idefics3")


@pytest.fixture(scope="module", params=[pytest.param(one, marks=[pytest.mark.slow] * (one in SLOW)) for one in CONFIGS])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family(request.param, tmp_path_factory.mktemp(request.param))


def policy_of(folder: Path, vision: str = "train") -> Any:
    return load_policy(settings(folder, vision=vision), CPU, "sdpa", 0)


def test_packed_and_padded_rows_equal_each_row_alone(folder: Path) -> None:
    rows, policy = rows_of(folder), policy_of(folder)
    wanted = by_transformers(folder, rows)
    assert any("vis" in name for name in wanted[1])
    for packed in (True, False):
        check(policy, micro_batch(rows, packed=packed, pad_id=0), *wanted)


@pytest.mark.daily("gemma3", "smolvlm")
def test_rows_that_share_a_prefix_with_an_image(folder: Path) -> None:
    rows = [example(folder, f"see #? {answer}", [picture(3, 48, 32)], trained=5) for answer in ("red!!", "green")]
    batch = micro_batch(rows, packed=True, pad_id=0, shares=shared_beginnings(rows))
    assert len(batch.input_ids_NT[0]) == len(rows[0]) + 5
    check(policy_of(folder), batch, *by_transformers(folder, rows))


@pytest.mark.daily("qwen3_5-5", "gemma3-5", "gemma4-5", "smolvlm-5")
@pytest.mark.parametrize("budget", [None, 5])
def test_greedy_tokens_equal_those_of_transformers(folder: Path, budget: int | None) -> None:
    """Also if the prefill is divided inside of images."""
    policy, rows = policy_of(folder, "freeze").eval(), rows_of(folder)
    keys: dict[str, Any] = {} if budget is None else {"prefill_tokens": budget}
    asked = [Request(list(one.ids), 100 + key, 1, images=one.images) for key, one in enumerate(rows)]
    done = run(native(policy, folder, **keys), asked, Sampling(max_tokens=10, temperature=0.0, stop_ids=(END,)))
    check_generated(done, generated(folder, rows, 10, END))


@pytest.mark.daily("qwen3_vl", "gemma3")
def test_broken_inputs_change_the_log_probs(folder: Path) -> None:
    policy = policy_of(folder).eval()
    batch = micro_batch([example(folder, "what is #? it is red", [picture(1, 32, 64)])], packed=True, pad_id=0)
    images = batch.images
    assert images is not None
    broken = {
        "feature order": replace(images, features_M=images.features_M.flip(0)),
        "place": replace(images, places_M=images.places_M + 1),
    }
    if policy.decoder.images.family.three_axes:
        after = images.axes_3NT + (batch.position_ids_NT > images.places_M[-1])
        broken["axes"] = replace(images, axes_3NT=batch.position_ids_NT.expand(3, -1, -1))
        broken["swapped axes"] = replace(images, axes_3NT=images.axes_3NT[[0, 2, 1]])
        broken["offset"] = replace(images, axes_3NT=after)
    if images.blocks:
        broken["mask"] = replace(images, blocks=())
        rows, keys = images.blocks[0].rows_Q, images.blocks[0].keys_K
        broken["keys"] = replace(images, blocks=(ImageBlock(rows, keys.roll(1)),))
    with torch.no_grad():
        right = policy(batch).logprobs_K
        for name, one in broken.items():
            assert (policy(replace(batch, images=one)).logprobs_K - right).abs().max() > 50 * LOGPROB, name


def _flipped(images: ImageInputs) -> ImageInputs:
    return replace(images, features_M=images.features_M.flip(0))


@pytest.mark.slow
def test_a_broken_engine_changes_the_log_probs(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Features in another order in the prefill, and another offset in decode."""
    policy = policy_of(folder, "freeze").eval()
    one = example(folder, "what is #? it is", [picture(1, 32, 64)])
    sampling = Sampling(max_tokens=4, temperature=0.0, stop_ids=(END,))

    def logprobs() -> list[float]:
        return run(native(policy, folder), [Request(list(one.ids), 0, 1, images=one.images)], sampling)[0].logprobs

    right = logprobs()
    assert logprobs() == right
    with monkeypatch.context() as patch:
        plain = runner.chunk_images
        patch.setattr(runner, "chunk_images", lambda chunks: _flipped(plain(chunks)))
        assert abs(logprobs()[0] - right[0]) > 50 * LOGPROB
    if policy.decoder.images.family.three_axes:
        monkeypatch.setattr(decode_batch, "position_offset", lambda images: 0)
        assert abs(logprobs()[0] - right[0]) > 50 * LOGPROB


@pytest.mark.daily("llava_next", "smolvlm")
def test_frozen_weights_are_all_weights_outside_of_the_language_model(folder: Path) -> None:
    """The row ends of LLaVA-NeXT are a weight outside of the tower."""
    policy = policy_of(folder, "freeze")
    trained = {name for name, weight in policy.causal_lm.named_parameters() if weight.requires_grad}
    language = re.compile("language_model|text_model")
    assert trained == {name for name, _ in policy.causal_lm.named_parameters() if language.search(name)}
    rows = rows_of(folder)[:2]
    wanted, gradients = by_transformers(folder, rows)
    check(
        policy,
        micro_batch(rows, packed=True, pad_id=0),
        wanted,
        {name: one for name, one in gradients.items() if name in trained},
    )


def test_deepstack_features_are_added_after_the_layers_in_their_order(tmp_path: Path) -> None:
    """The features of exchanged layers change the log-probs, so the comparison with transformers sees their order."""
    folder = write_family("qwen3_vl", tmp_path)
    policy = policy_of(folder).eval()
    batch = micro_batch([example(folder, "what is #? it is red", [picture(1, 32, 64)])], packed=True, pad_id=0)
    with torch.no_grad():
        right = policy(batch).logprobs_K
        found = policy.decoder.images.features(batch.images.distinct, CPU)
        policy.decoder.images.features = lambda images, device: torch.cat(
            [found[:, :32], found[:, 64:], found[:, 32:64]], -1
        )
        exchanged = policy(batch).logprobs_K
        policy.decoder.images.features = lambda *_: found[:, :32]
        without = policy(batch).logprobs_K
    assert (right - exchanged).abs().max() > 50 * LOGPROB
    assert (right - without).abs().max() > 50 * LOGPROB


def test_a_wrong_number_of_features_is_refused(tmp_path: Path) -> None:
    """The config says 8 tokens per tile, and the tower computes 4."""
    folder = write_family("internvl", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "image_seq_length": 8}))
    batch = micro_batch([example(folder, "what is #? it is red", [picture(1, 32, 32)])], packed=True, pad_id=0)
    with refuses("model.path", "unsupported-model", 4, 8):
        policy_of(folder)(batch)
