"""Preference rows with images: formats, and losses and gradients that equal those of transformers for each row."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from image_rows import CPU, example, picture, plain_logprobs, plain_model, settings
from lockstep.commands.show import image_lines
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.prepare.squares import draw_squares
from lockstep.methods import METHODS
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.parallel.world import World
from lockstep.recipe.loader import checked_recipe
from lockstep.train.models import Models, Packing
from lockstep.types import LabeledResponse, Ranking
from lockstep.vision import processors
from lockstep.vision.images import png_bytes
from refusals import refuses

PNG, OTHER = (png_bytes(draw_squares(colour, (0, 5))) for colour in ("blue", "red"))
PATH, QUESTION, GOOD, BAD = "a.png", "What colour?", "blue", "deep red"
URI = "data:image/png;base64," + base64.b64encode(PNG).decode()
TEXT, PART = {"type": "text", "text": QUESTION}, {"type": "image"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(made, hidden=64, layers=1)
    return made


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vlm") / "reference"
    write_tiny_vlm(made, hidden=64, layers=1, seed=1)
    return made


def recipe_of(folder: Path, method: str, **keys: Any) -> Any:
    model, data = {"path": str(folder), "vision": "train"}, {"train": "rows.jsonl", **keys.pop("data", {})}
    return checked_recipe({"method": method, "model": model, "data": data, **keys})


def read(folder: Path, place: Path, method: str, rows: Sequence[Any], limit: int = 200, **keys: Any) -> list[Any]:
    """The items of rows in a file, as the method reads them."""
    (place / "a.png").write_bytes(PNG)
    (place / "b.png").write_bytes(OTHER)
    path = place / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    recipe = recipe_of(folder, method, data={"train": str(path), **keys})
    reader = METHODS[method].reader(recipe)
    request = RowRequest(Dataset, reader, recipe.data.train, recipe.data, load_tokenizer(str(folder)), limit)
    return list(load_rows(request).items)


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def pair(prompt: Any, **images: Any) -> dict[str, Any]:
    return {"prompt": prompt, "chosen": GOOD, "rejected": BAD, **images}


def full(content: Any, **images: Any) -> dict[str, Any]:
    return {"chosen": [user(content), answer(GOOD)], "rejected": [user(content), answer(BAD)], **images}


# Each row has the same image before the same question.
FORMATS: dict[str, dict[str, Any]] = {
    "verl": pair([user(f"<image>{QUESTION}")], images=[PATH]),
    "TRL parts": {
        **pair([user([PART, TEXT])], images=[PATH]),
        "chosen": [answer(GOOD)],
        "rejected": [answer(BAD)],
    },
    "TRL text": pair([user(QUESTION)], image=PATH),
    "TRL full chats": full([PART, TEXT], images=[PATH]),
    "TRL full chats of text": full(QUESTION, images=[PATH]),
    "prompt and full chats": {"prompt": f"<image>{QUESTION}", **full(f"<image>{QUESTION}"), "images": [PATH]},
    "OpenRLHF": pair([user([PART, TEXT])], images=[URI]),
    "OpenAI": pair([user([{"type": "image_url", "image_url": {"url": URI}}, TEXT])]),
    "LLaMA-Factory": {
        "conversations": [{"from": "human", "value": f"<image>{QUESTION}"}],
        "chosen": {"from": "gpt", "value": GOOD},
        "rejected": {"from": "gpt", "value": BAD},
        "images": [PATH],
    },
    "Alpaca": {"instruction": "<image>", "input": QUESTION, "chosen": GOOD, "rejected": BAD, "images": [PATH]},
    "dialogue": {
        "chosen": f"\n\nHuman: {QUESTION}\n\nAssistant: {GOOD}",
        "rejected": f"\n\nHuman: {QUESTION}\n\nAssistant: {BAD}",
        "images": [PATH],
    },
    "list": {"prompt": f"<image>{QUESTION}", "responses": [BAD, GOOD], "scores": [0, 1], "images": [PATH]},
}


@pytest.mark.daily
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("method", ["dpo", "rm"])
def test_formats_give_the_same_pair(folder: Path, tmp_path: Path, name: str, method: str) -> None:
    (found,) = read(folder, tmp_path, method, [FORMATS[name]])
    tokenizer, pads = load_tokenizer(str(folder)), "<|image_pad|>" * 4
    line = "\n" if name == "Alpaca" else ""
    for one, text in zip(found.examples, (GOOD, BAD), strict=True):
        assert tokenizer.decode(list(one.ids)) == (
            f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{line}{QUESTION}<|im_end|>\n"
            f"<|im_start|>assistant\n{text}<|im_end|>\n"
        )
        (image,) = one.images
        assert tokenizer.decode(list(one.ids[image.start : image.stop])) == pads
    assert found.examples[0].images == found.examples[1].images


def test_an_image_is_processed_once_for_both_responses(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, real = [], processors.processed
    monkeypatch.setattr(processors, "processed", lambda *given: seen.append(1) or real(*given))
    read(folder, tmp_path, "dpo", [FORMATS["verl"]])
    assert len(seen) == 1


LABELLED: dict[str, dict[str, Any]] = {
    "TRL": {"prompt": [user([PART, TEXT])], "completion": [answer(GOOD)], "label": True, "images": [PATH]},
    "LLaMA-Factory": {"messages": [user(f"<image>{QUESTION}"), answer(GOOD)], "kto_tag": True, "images": [PATH]},
}


@pytest.mark.parametrize("name", LABELLED)
def test_labelled_responses(folder: Path, tmp_path: Path, name: str) -> None:
    items = read(folder, tmp_path, "kto", [LABELLED[name]])
    (both,) = read(folder, tmp_path, "dpo", [FORMATS["verl"]])
    assert items == [LabeledResponse(both.examples[0], True)]
    pairs = read(folder, tmp_path, "kto", [FORMATS["verl"]])
    assert [one.example for one in pairs] == list(both.examples)


def test_steps_of_a_solution(folder: Path, tmp_path: Path) -> None:
    row = {"prompt": f"<image>{QUESTION}", "completions": ["look", "blue"], "labels": [1, 0], "images": [PATH]}
    keys = {"placeholder": "*", "tokens": ["+", "-"]}
    (tmp_path / "a.png").write_bytes(PNG)
    (tmp_path / "rows.jsonl").write_text(json.dumps(row), encoding="utf-8")
    recipe = recipe_of(folder, "prm", prm=keys, data={"train": str(tmp_path / "rows.jsonl")})
    tokenizer = load_tokenizer(str(folder))
    request = RowRequest(Dataset, METHODS["prm"].reader(recipe), recipe.data.train, recipe.data, tokenizer, 200)
    (found,) = load_rows(request).items
    assert tokenizer.decode([found.example.ids[at] for at in found.example.positions]) == "**"
    (image,) = found.example.images
    assert tokenizer.decode(list(found.example.ids[image.start : image.stop])) == "<|image_pad|>" * 4


BAD_ROWS: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "too few images": (pair([user("<image> <image>?")], images=[PATH]), "wrong-count", ("2", "1")),
    "too many images": (pair([user(f"<image>{QUESTION}")], images=[PATH, PATH]), "wrong-count", ("1", "2")),
    "image in a response": (
        {**pair([user(f"<image>{QUESTION}")], images=[PATH]), "chosen": "<image>"},
        "wrong-count",
        ("2", "1"),
    ),
    "two images": (
        {
            "chosen": [user([{**PART, "image": "a.png"}, TEXT]), answer(GOOD)],
            "rejected": [user([{**PART, "image": "b.png"}, TEXT]), answer(BAD)],
        },
        "different-prompts",
        (),
    ),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_pairs_are_refused(folder: Path, tmp_path: Path, name: str) -> None:
    row, code, values = BAD_ROWS[name]
    with refuses("rows.jsonl line 1", code, *values):
        read(folder, tmp_path, "dpo", [row])


def test_the_remedy_of_a_long_pair_names_what_helps(folder: Path, tmp_path: Path) -> None:
    row, short = FORMATS["verl"], pair([user("short?")])
    (both,) = read(folder, tmp_path, "dpo", [row])
    longest = max(map(len, both.examples))
    with refuses("rows.jsonl line 1", "row-too-long", longest, "4 of them", remedy="preprocessor_config.json") as error:
        read(folder, tmp_path, "dpo", [row], longest - 1)
    assert "truncate" not in error.value.problems[0].remedy
    for overlong, limit in (("truncate_left", longest - 30), ("truncate_right", 9)):
        with refuses("rows.jsonl line 1", "row-too-long", overlong, limit, remedy="data.overlong=drop"):
            read(folder, tmp_path, "dpo", [row], limit, overlong=overlong)
    assert len(read(folder, tmp_path, "dpo", [row, short], longest - 1, overlong="drop")) == 1


def test_data_show_lists_the_images_of_both_responses(folder: Path, tmp_path: Path) -> None:
    (found,) = read(folder, tmp_path, "dpo", [FORMATS["verl"]])
    start = found.examples[0].images[0].start
    for one in found.examples:
        (line,) = image_lines(one)
        assert f"{start} to {start + 3} (4)" in line
        assert "a.png" in line


def rankings(folder: Path) -> list[Ranking]:
    """Pairs with one, two and no images, of several sizes. The first and the last have the same image."""
    wide, tall = picture(1, 56, 112), picture(2, 140, 56)
    prompts = [("see #? ", [picture(0)]), ("# or # so ", [wide, tall]), ("no image ", []), ("# again ", [picture(0)])]
    return [
        Ranking(tuple(example(folder, text + end, images, row, len(end)) for end in ("blue!", "deep red")))
        for row, (text, images) in enumerate(prompts)
    ]


def models_of(folder: Path, reference: Path | None, tokens: int | None, **keys: Any) -> Models:
    policy = load_policy(settings(folder, **keys), CPU, "sdpa", 0)
    frozen = None if reference is None else load_policy(settings(reference), CPU, "sdpa", 0, frozen=True)
    packing = Packing(World(), tokens, None if tokens else 2, 0)
    return Models(policy, packing, CPU, reference=frozen, longest=200)


def our_gradients(models: Models, method: str, items: Sequence[Any], **keys: Any) -> tuple[float, dict[str, Any]]:
    objective, update = METHODS[method].objective(recipe_of(Path("m"), method, **keys)), models.arrange(items)
    task, total = objective.task(update, models), 0.0
    for batch in task.batches:
        loss = task.loss(models.module(batch), batch).loss / task.divisor
        loss.backward()
        total += float(loss.detach())
    found = models.module.causal_lm.named_parameters()  # type: ignore[union-attr]
    return total, {name: p.grad for name, p in found if p.grad is not None}


def same(ours: tuple[float, dict[str, Any]], model: Any, loss: torch.Tensor) -> None:
    loss.backward()
    assert ours[0] == pytest.approx(float(loss.detach()), rel=5e-6, abs=2e-5)
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert any("visual" in name for name in gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[1][name], gradient, atol=1e-4 * float(gradient.norm()) + 1e-6, rtol=0)


def sigmoid_loss(ratios: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(0.5 * (ratios[0::2] - ratios[1::2])).mean()


def ipo_loss(ratios: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    return ((ratios[0::2] - ratios[1::2] - 1 / (2 * 0.5)) ** 2).mean()


def simpo_loss(ratios: torch.Tensor, means: torch.Tensor) -> torch.Tensor:
    return -F.logsigmoid(0.5 * (means[0::2] - means[1::2]) - 0.5).mean()


LOSSES: dict[str, tuple[Callable[..., torch.Tensor], dict[str, Any]]] = {
    "dpo": (sigmoid_loss, {"beta": 0.5}),
    "ipo": (ipo_loss, {"beta": 0.5, "average": False}),
    "simpo": (simpo_loss, {"beta": 0.5, "gamma": 0.5}),
}


@pytest.mark.daily("dpo-60", "simpo-None")
@pytest.mark.parametrize("tokens", [1000, 60, None])
@pytest.mark.parametrize("method", LOSSES)
def test_losses_of_pairs_equal_transformers(folder: Path, reference: Path, method: str, tokens: int | None) -> None:
    """Packed into one or several micro-batches, and padded. The reference log-probs need the images too."""
    items, (formula, keys) = rankings(folder), LOSSES[method]
    rows = [one for item in items for one in item.examples]
    model, frozen = plain_model(folder), plain_model(reference)
    values = [plain_logprobs(model, one) for one in rows]
    with torch.no_grad():
        past = torch.stack([plain_logprobs(frozen, one).sum() for one in rows])
    sums, lengths = torch.stack([one.sum() for one in values]), torch.tensor([len(one) for one in values])
    models = models_of(folder, None if method == "simpo" else reference, tokens)
    same(our_gradients(models, method, items, preference=keys), model, formula(sums - past, sums / lengths))


def test_the_tower_runs_once_per_pair(folder: Path) -> None:
    items = rankings(folder)
    (batch,) = Packing(World(), 1000, None, 0)(items[:2]).batches
    assert batch.images is not None
    assert len(batch.images.distinct) == 3  # one image of the first pair, and two of the second
    assert len(batch.images.places_M) == sum(image.tokens for item in items[:2] for image in item.examples[0].images)


@pytest.mark.daily("60")
@pytest.mark.parametrize("tokens", [1000, 60])
def test_kto_equals_transformers(folder: Path, reference: Path, tokens: int) -> None:
    """Rows with the same question differ only in their images. Row i is compared with the response of another row."""
    images, ends = [picture(seed) for seed in (0, 3, 4)], ("blue!", "deep red", "no idea")
    items = [
        LabeledResponse(example(folder, "see #? " + end, [image], row, len(end)), row != 1)
        for row, (image, end) in enumerate(zip(images, ends, strict=True))
    ]
    others = [ends[(row + 1) % 3] for row in range(3)]
    mismatched = [
        example(folder, "see #? " + end, [image], row, len(end))
        for row, (image, end) in enumerate(zip(images, others, strict=True))
    ]
    model, frozen = plain_model(folder), plain_model(reference)

    def ratios(rows: Sequence[Any]) -> torch.Tensor:
        return torch.stack([plain_logprobs(model, one).sum() - plain_logprobs(frozen, one).sum() for one in rows])

    kl = ratios(mismatched).mean().clamp(min=0).detach()
    above = ratios([item.example for item in items]) - kl
    loss = (1 - torch.sigmoid(0.5 * torch.tensor([1, -1, 1]) * above)).mean()
    ours = our_gradients(models_of(folder, reference, tokens), "kto", items, preference={"beta": 0.5})
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    same(ours, model, loss)


def test_adapters_and_their_reference_see_the_images(folder: Path) -> None:
    """A new adapter changes nothing, so policy and reference have equal log-probs, those of transformers."""
    items, keys = rankings(folder)[:2], {"vision": "freeze", "lora": {"rank": 4, "alpha": 8}}
    models = models_of(folder, None, 1000, **keys)
    update, model = models.arrange(items), plain_model(folder)
    with torch.no_grad():
        wanted = torch.cat([plain_logprobs(model, one) for item in items for one in item.examples])
    torch.testing.assert_close(models.reference_logprobs(update), wanted, atol=2e-5, rtol=0)
    torch.testing.assert_close(models.logprobs(update), wanted, atol=2e-5, rtol=0)
    _, gradients = our_gradients(models, "dpo", items)
    assert gradients
    assert not [name for name in gradients if "visual" in name or "lora" not in name]
