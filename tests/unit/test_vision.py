"""Images in a micro-batch: packed, padded and shared rows compute what transformers computes for each row alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from image_rows import CPU, LOGPROB, by_transformers, check, example, picture, plain_inputs, plain_model, settings
from lockstep.data import image_batch
from lockstep.data.batching import micro_batch, shared_beginnings
from lockstep.model.load import load_policy
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.preflight.image_trial import check_images
from lockstep.recipe.keys_optim import Optim
from lockstep.recipe.loader import checked_recipe
from lockstep.train.models import with_tower_rate
from lockstep.types import Example, MicroBatch
from lockstep.vision.positions import position_offset, three_axes
from lockstep.vision.spans import ImageRef, ImageSpan
from refusals import refuses


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(made, hidden=64)
    return made


@pytest.fixture(scope="module")
def rows(folder: Path) -> list[Example]:
    """Rows with one, two and no images, of several sizes; the first and the last have the same image."""
    wide, tall = picture(1, 56, 112), picture(2, 140, 56)
    return [
        example(folder, "what is #? it is red", [picture(0)]),
        example(folder, "compare # and #: they differ", [wide, tall], 1),
        example(folder, "only text without any image", [], 2),
        example(folder, "# # two at once, and more", [picture(0), wide], 3),
    ]


def span(start: int, height: int, width: int) -> ImageSpan:
    return ImageSpan(start, (1, height, width), 2, ImageRef(f"{start}"), "")


def test_three_axes_of_a_small_image() -> None:
    """By hand: 3 text tokens, an image of 2 x 2 tokens, 4 text tokens."""
    axes = three_axes(11, [span(3, 4, 4)]).tolist()
    assert axes == [
        [0, 1, 2, 3, 3, 3, 3, 5, 6, 7, 8],
        [0, 1, 2, 3, 3, 4, 4, 5, 6, 7, 8],
        [0, 1, 2, 3, 4, 3, 4, 5, 6, 7, 8],
    ]
    assert position_offset([span(3, 4, 4)]) == -2


def test_three_axes_equal_those_of_transformers(folder: Path, rows: list[Example]) -> None:
    model = plain_model(folder)
    for one in rows:
        if one.images:
            given = plain_inputs(model, one)
            given.pop("pixel_values")
            wanted, delta = model.model.get_rope_index(**given)
            assert three_axes(len(one), one.images).tolist() == wanted[:, 0].tolist()
            assert position_offset(one.images) == int(delta)


def trained(folder: Path, **keys: Any) -> Any:
    return load_policy(settings(folder, **keys), CPU, "sdpa", 0)


@pytest.mark.parametrize("packed", [True, False])
def test_log_probs_and_gradients_of_rows_with_images(folder: Path, rows: list[Example], packed: bool) -> None:
    batch = micro_batch(rows, packed=packed, pad_id=0)
    assert batch.images is not None
    assert len(batch.images.distinct) == 3  # two of the five images occur twice
    wanted, gradients = by_transformers(folder, rows)
    assert any("visual" in name for name in gradients)
    check(trained(folder), batch, wanted, gradients)


def test_rows_that_share_a_prefix_with_an_image(folder: Path) -> None:
    image = picture(3, 84, 56)
    rows = [example(folder, f"see #? {answer}", [image], trained=5) for answer in ("red!!", "green", "blue!")]
    shares = shared_beginnings(rows)
    assert shares == [0, len(rows[0]) - 5, len(rows[0]) - 5]
    batch = micro_batch(rows, packed=True, pad_id=0, shares=shares)
    assert batch.images is not None
    assert len(batch.images.places_M) == rows[0].images[0].tokens
    check(trained(folder), batch, *by_transformers(folder, rows))


def test_rows_with_other_images_share_only_the_text_before_them(folder: Path) -> None:
    """The tokens of the rows are equal, so a comparison of tokens alone would share the wrong image."""
    rows = [example(folder, "see #? so it is", [picture(seed)]) for seed in (4, 5)]
    assert list(rows[0].ids) == list(rows[1].ids)
    assert shared_beginnings(rows) == [0, 4]
    batch = micro_batch(rows, packed=True, pad_id=0, shares=shared_beginnings(rows))
    check(trained(folder), batch, *by_transformers(folder, rows))


def broken(batch: MicroBatch, how: str) -> MicroBatch:
    images = batch.images
    assert images is not None
    if how == "axes":
        return replace(batch, images=replace(images, axes_3NT=batch.position_ids_NT.expand(3, -1, -1)))
    if how == "swapped axes":
        return replace(batch, images=replace(images, axes_3NT=images.axes_3NT[[0, 2, 1]]))
    if how == "feature order":
        return replace(batch, images=replace(images, features_M=images.features_M.flip(0)))
    if how == "place":
        return replace(batch, images=replace(images, places_M=images.places_M + 1))
    axes = images.axes_3NT.clone()  # the text after an image continues at its index, as without an offset
    after = axes[0, 0] > axes[0, 0, int(images.places_M[0])]
    axes[:, 0, after] += 2
    return replace(batch, images=replace(images, axes_3NT=axes))


@pytest.mark.parametrize("how", ["axes", "swapped axes", "feature order", "place", "offset"])
def test_broken_inputs_change_the_log_probs(folder: Path, how: str) -> None:
    rows = [example(folder, "what is #? it is red", [picture(1, 56, 112)])]
    policy, batch = trained(folder).eval(), micro_batch(rows, packed=True, pad_id=0)
    with torch.no_grad():
        difference = (policy(batch).logprobs_K - policy(broken(batch, how)).logprobs_K).abs().max()
    assert difference > 50 * LOGPROB


def test_a_frozen_tower_gets_no_gradient_and_the_language_model_the_same(folder: Path, rows: list[Example]) -> None:
    wanted, gradients = by_transformers(folder, rows)
    language = {name: one for name, one in gradients.items() if "visual" not in name}
    policy = trained(folder, vision="freeze")
    check(policy, micro_batch(rows, packed=True, pad_id=0), wanted, language)
    assert all(p.grad is None for name, p in policy.causal_lm.named_parameters() if "visual" in name)


def test_adapters_are_only_in_the_language_model(folder: Path, rows: list[Example]) -> None:
    policy = trained(folder, vision="freeze", lora={"rank": 4, "alpha": 8})
    names = [name for name, _ in policy.trainable()]
    assert len(names) == 2 * 7 * 2  # two matrices in each of seven layers of two blocks
    assert not [name for name in names if "visual" in name]
    wanted, _ = by_transformers(folder, rows)
    with torch.no_grad():
        values = policy.eval()(micro_batch(rows, packed=True, pad_id=0)).logprobs_K
    torch.testing.assert_close(values, wanted, atol=LOGPROB, rtol=0)


def test_text_rows_do_not_depend_on_the_tower(folder: Path) -> None:
    rows = [example(folder, "only text without any image", [])]
    batch = micro_batch(rows, packed=True, pad_id=0)
    assert batch.images is None
    with torch.no_grad():
        values = [trained(folder, vision=vision).eval()(batch).logprobs_K for vision in (None, "freeze", "train")]
    assert values[0].tolist() == values[1].tolist() == values[2].tolist()


def test_a_batch_without_images_gives_a_trained_tower_a_gradient_of_zero(folder: Path) -> None:
    """All ranks run the tower in each micro-batch, so that no rank waits for the others."""
    policy = trained(folder)
    batch = micro_batch([example(folder, "only text without any image", [])], packed=True, pad_id=0)
    policy(batch).logprobs_K.sum().backward()
    found = {name: p.grad for name, p in policy.causal_lm.named_parameters() if "visual" in name}
    assert found
    assert all(grad is not None and not grad.any() for grad in found.values())


def test_a_cut_never_divides_an_image(folder: Path) -> None:
    one = example(folder, "see # and # here", [picture(0), picture(1)])
    kept = one.cut(slice(4, len(one)))
    assert [image.start for image in kept.images] == [image.start - 4 for image in one.images]
    first = one.cut(slice(0, one.images[0].stop))
    assert first.images == one.images[:1]
    with pytest.raises(ValueError, match="divide an image"):
        one.cut(slice(one.images[0].start + 1, len(one)))


def test_the_trial_of_a_loaded_model_has_images(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It passes for a model that computes right, and refuses wrong positions and features of other images."""
    policy = trained(folder)
    check_images(policy, str(folder), CPU)
    right = image_batch.three_axes
    with monkeypatch.context() as patch:
        patch.setattr(image_batch, "three_axes", lambda *given: right(*given)[[0, 2, 1]])
        with refuses(str(folder), "unsupported-model"):
            check_images(policy, str(folder), CPU)
    own = policy.decoder.images.features
    monkeypatch.setattr(policy.decoder.images, "features", lambda *given: own(*given).flip(0))
    with refuses(str(folder), "unsupported-model"):
        check_images(policy, str(folder), CPU)


def test_towers_have_their_own_learning_rate(folder: Path) -> None:
    policy, optim = trained(folder), Optim(lr=1e-3)
    for keys, wanted in (({}, 1e-3), ({"vision_lr": 1e-5}, 1e-5)):
        made = with_tower_rate(optim, settings(folder, **keys), policy)
        rates = {name: optim.lr * made.rate_ratio(made.group_of(name)) for name, _ in policy.trainable()}
        towers = [rate for name, rate in rates.items() if "visual" in name]
        assert len(towers) > 10
        assert towers == pytest.approx([wanted] * len(towers))
        assert {rate for name, rate in rates.items() if "visual" not in name} == {1e-3}


def test_a_learning_rate_of_frozen_towers_is_refused() -> None:
    model = {"path": "m", "vision": "freeze", "vision_lr": 1e-5}
    with refuses("model.vision_lr", "unused-key"):
        checked_recipe({"method": "sft", "model": model, "data": {"train": "rows.jsonl"}})
