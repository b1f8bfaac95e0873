"""Conversations with environments and tools that return images: tokens, positions, features and pixels. The trainer and
plain transformers compute the log-probs that the engine had when it sampled."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import native

import image_environments
from image_environments import drawn, png
from image_rows import CPU, picture, plain_logprobs, plain_model, settings
from lockstep.data import image_batch
from lockstep.data.batching import micro_batch, shared_beginnings
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.prompt_rows import encoded_prompt
from lockstep.device.cpu import Cpu
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.host import EnvironmentHosts
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.setup import host_setup
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.policy import Policy
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.collect import _prompt
from lockstep.rollout.native import decode_batch
from lockstep.types import Completion, Message, Origin, Prompt, Question, Request, Rollout, Sampling, Score
from lockstep.vision.processors import ImageTokens
from vision_families import write_family

FILE = image_environments.__file__
DAILY = ("qwen2_5_vl", "qwen3_vl", "gemma3")
SLOW = ("smolvlm", "qwen3_vl_moe", "qwen3_5", "gemma4", "internvl", "idefics3")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {"": tmp_path_factory.mktemp("families")}


def folder_of(folders: dict[str, Path], family: str) -> Path:
    if family not in folders:
        folders[family] = folders[""] / family
        if family == "qwen2_5_vl":
            write_tiny_vlm(folders[family], hidden=64)
        else:
            write_family(family, folders[family])
    return folders[family]


@pytest.fixture(scope="module")
def hosts() -> Iterator[dict[str, EnvironmentHosts]]:
    opened: dict[str, EnvironmentHosts] = {}
    yield opened
    for one in opened.values():
        one.close()


class Scene:
    """A model with its tokenizer, and an engine of conversations with an environment of the test file."""

    def __init__(self, folder: Path, hosts: dict[str, EnvironmentHosts], environment: str = "Gallery", **keys: Any):
        history, template = keys.pop("history", "keep"), keys.pop("template", None)
        engine_keys = {name: keys.pop(name) for name in ("block_tokens", "cache_gb", "prefill_tokens") if name in keys}
        self.folder, self.tokenizer = folder, load_tokenizer(str(folder))
        self.tokenizer.chat_template = template or self.tokenizer.chat_template
        self.policy: Policy = load_policy(settings(folder, vision="freeze"), CPU, Cpu().attention, 0).eval()
        where: dict[str, Any] = {"environment": f"{FILE}:{environment}"} if environment else {}
        rollout = RolloutSettings(environment_workers=1, turn_tokens=7, history=history, **where, **keys)
        setup = host_setup(rollout)
        opened = hosts[repr(setup)] = hosts.get(repr(setup)) or EnvironmentHosts(setup)
        ends = [self.tokenizer.eos_token_id, *(self.tokenizer.convert_tokens_to_ids(one) for one in ENDS)]
        self.stop = tuple(one for one in ends if one is not None)
        images = ImageTokens.of(str(folder), self.tokenizer)
        chat = ChatFormat(self.tokenizer, frozenset(self.stop), history, images)
        self.engine = EnvironmentEngine(
            native(self.policy, folder, **engine_keys), opened, rollout, chat, len(self.tokenizer)
        )

    def prompt(self, number: int, content: str, refs: list[Any], truth: str = "0") -> Prompt:
        """A row in which each # is an image."""
        reader = RowImages(str(self.folder), self.tokenizer, "")
        text = content.replace("#", reader.tokens.family.placeholder)
        messages: list[Message] = [{"role": "user", "content": text}]
        question = Question("x", messages, truth, Origin("rows.jsonl", number), images=tuple(refs))
        return encoded_prompt(self.tokenizer, question, None, reader)

    def run(self, prompts: list[Prompt], n: int = 2, limit: int = 900) -> list[tuple[Completion, Rollout]]:
        asked = [Request(one.ids, key, n, question=one.question, images=one.images) for key, one in enumerate(prompts)]
        sampling = Sampling(limit, temperature=1.0, stop_ids=self.stop, seed=3)
        made = sorted(self.engine.generate(asked, sampling), key=lambda one: (one.request, one.sample))
        return [(one, rollout_of(prompts[one.request], one)) for one in made]


ENDS = ("<end_of_turn>", "<end_of_utterance>", "<|im_end|>")


def rollout_of(prompt: Prompt, made: Completion) -> Rollout:
    return Rollout(
        _prompt(prompt, made),
        made.request,
        made.sample,
        made.ids,
        made.logprobs,
        made.stop,
        "",
        Score(0.0),
        loss_mask=made.loss_mask,
        trajectory=made.trajectory,
        rows=made.rows,
    )


def sampled(made: Completion) -> torch.Tensor:
    return torch.tensor([logprob for logprob, mask in zip(made.logprobs, made.loss_mask, strict=True) if mask])


def trained(policy: Policy, rollouts: list[Rollout]) -> torch.Tensor:
    """The log-probs that the trainer computes for the sampled tokens, packed with shared prefixes."""
    rows = [row for one in rollouts for row in one.sequences]
    with torch.no_grad():
        return policy(micro_batch(rows, packed=True, pad_id=0, shares=shared_beginnings(rows))).logprobs_K


def difference(scene: Scene, made: list[tuple[Completion, Rollout]]) -> float:
    """The largest difference of the log-probs of engine and trainer."""
    assert not any(one.failure for one, _ in made), made[0][0].failure
    wanted = torch.cat([sampled(one) for one, _ in made])
    return float((trained(scene.policy, [rollout for _, rollout in made]) - wanted).abs().max())


def prompts_of(scene: Scene) -> list[Prompt]:
    return [
        scene.prompt(0, "what is # here?", [picture(1, 32, 64)]),
        scene.prompt(1, "compare # and #", [picture(2, 64, 32), picture(3, 32, 32)]),
        scene.prompt(2, "no image", []),
    ]


def check_family(family: str, folders: dict[str, Path], hosts: dict[str, EnvironmentHosts]) -> None:
    scene = Scene(folder_of(folders, family), hosts)
    prompts = prompts_of(scene)
    made = scene.run(prompts)
    assert difference(scene, made) < 5e-4
    plain, compared = plain_model(scene.folder), 0
    for one, rollout in made:
        (row,) = rollout.sequences
        assert one.trajectory is not None
        assert len(one.trajectory.turns) == 4
        # The images of the row, one of the start, and four of the turns.
        assert len(row.images) == len(prompts[one.request].images) + 1 + 4
        assert len(rollout.prompt.images) == len(prompts[one.request].images) + 1
        inside = [place for image in row.images for place in range(image.start, image.stop)]
        assert not any(row.loss_mask[place] for place in inside)
        places = [place for image in row.images for place in image.places()]
        pad = scene.engine.chat.images.pad_id  # type: ignore[union-attr]
        context = [at for at, token in enumerate(row.ids) if token == pad and not row.loss_mask[at]]
        assert places == context
        if pad in [token for token, mask in zip(row.ids, row.loss_mask, strict=True) if mask]:
            continue  # transformers takes every placeholder token for an image, also one that the model sampled
        # Plain transformers reads the same images with its own positions and features.
        with torch.no_grad():
            torch.testing.assert_close(plain_logprobs(plain, row), sampled(one), rtol=0, atol=5e-4)
        compared += 1
    assert compared > 0
    digests = {tuple(image.ref.digest for image in rollout.sequences[0].images) for _, rollout in made}
    assert len(digests) == len(made)  # all samples saw different images


@pytest.mark.parametrize("family", DAILY)
def test_log_probs_of_conversations_with_images_are_those_of_the_trainer(
    family: str, folders: dict[str, Path], hosts: dict[str, EnvironmentHosts]
) -> None:
    check_family(family, folders, hosts)


@pytest.mark.slow
@pytest.mark.parametrize("family", SLOW)
def test_so_they_are_in_other_families(
    family: str, folders: dict[str, Path], hosts: dict[str, EnvironmentHosts]
) -> None:
    check_family(family, folders, hosts)


BREAKS = {
    "offset": lambda patch: patch.setattr(decode_batch, "position_offset", lambda images: 0),
    "axes": lambda patch: patch.setattr(image_batch, "three_axes", _one_axis),
    "order": lambda patch: patch.setattr(image_batch._Collected, "add", _reversed_add),
}


def _one_axis(length: int, images: Any) -> Any:
    import numpy as np

    return np.broadcast_to(np.arange(length), (3, length))


_add = image_batch._Collected.add


def _reversed_add(self: Any, images: Any, where: Any, axes: Any, first: int, stop: int | None = None) -> None:
    """Gives each image the pixels of another one with as many tokens."""
    from dataclasses import replace

    refs = [image.ref for image in images]
    _add(self, [replace(image, ref=refs[-1 - at]) for at, image in enumerate(images)], where, axes, first, stop)


@pytest.mark.parametrize("broken", BREAKS)
def test_a_broken_engine_is_noticed(
    broken: str, folders: dict[str, Path], hosts: dict[str, EnvironmentHosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = Scene(folder_of(folders, "qwen2_5_vl"), hosts, environment_args={"sizes": [[56, 56]]})
    prompts = [scene.prompt(0, "compare # and #", [picture(2, 56, 56), picture(3, 56, 56)])]
    assert difference(scene, scene.run(prompts)) < 5e-4
    with monkeypatch.context() as patch:
        BREAKS[broken](patch)
        made = scene.run(prompts)
    assert difference(scene, made) > 5e-3


@pytest.mark.slow
@pytest.mark.parametrize("family", [pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "gemma3"])
def test_a_small_cache_and_small_prefills_change_nothing(
    family: str, folders: dict[str, Path], hosts: dict[str, EnvironmentHosts]
) -> None:
    """Sessions are evicted, and prefills are divided, also inside of images that are causal."""
    folder = folder_of(folders, family)
    usual = Scene(folder, hosts, block_tokens=16)
    room = 48 * usual.engine.inner.block_bytes() / 1e9  # type: ignore[attr-defined]
    small = Scene(folder, hosts, prefill_tokens=11, block_tokens=16, cache_gb=room)
    expected = [one for one, _ in usual.run(prompts_of(usual), limit=400)]
    made = small.run(prompts_of(small), limit=400)
    assert [one.ids for one, _ in made] == [one.ids for one in expected]
    assert difference(small, made) < 5e-4
    assert usual.engine.take_prefill()[1] > small.engine.take_prefill()[1]


@pytest.mark.slow
def test_tokens_of_a_conversation(folders: dict[str, Path], hosts: dict[str, EnvironmentHosts]) -> None:
    """The tokens between the turns, written by hand."""
    scene = Scene(folder_of(folders, "qwen2_5_vl"), hosts, environment_args={"sizes": [[56, 84]]})
    (made, rollout), _ = scene.run([scene.prompt(0, "#!", [picture(1, 56, 56)])])
    assert made.trajectory is not None

    def shown(tokens: int) -> str:
        return f"<|vision_start|>{'<|image_pad|>' * tokens}<|vision_end|>"

    def asked(text: str) -> str:
        return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"

    before = f"<|im_start|>user\n{shown(4)}!<|im_end|>\n<|im_start|>assistant\nyes<|im_end|>\n"
    start = before + asked(f"{shown(1)}and this?")
    texts = [
        asked(f"what is {shown(6)}?"),
        asked(f"two: {shown(6)} and {shown(6)}."),
        asked(f"{shown(6)} only"),
    ]
    ids = list(scene.tokenizer(start, add_special_tokens=False)["input_ids"])
    assert list(made.prompt_ids or ()) == ids
    end = scene.tokenizer.convert_tokens_to_ids("<|im_end|>")
    for turn, text in zip(made.trajectory.turns, [*texts, ""], strict=True):
        ids += made.ids[turn.start : turn.stop]
        if text:
            ids += ([] if ids[-1] == end else [end]) + list(
                scene.tokenizer("\n" + text, add_special_tokens=False)["input_ids"]
            )
    assert [*(made.prompt_ids or ()), *made.ids] == ids
    refs = [image.ref.data for image in rollout.sequences[0].images[:2]]
    assert refs == [picture(1, 56, 56).data, png(drawn(1, 32, 32))]
    assert made.trajectory.info == {"sizes": [[56, 56]]}
    assert made.trajectory.messages[-1] == {"role": "user", "content": "[image]the end"}
    assert "images" not in made.trajectory.as_dict()


CHANGING = (
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' -}}"
    "{%- if message['role'] == 'assistant' and not loop.last -%}{{- 'earlier' -}}"
    "{%- elif message['content'] is string -%}{{- message['content'] -}}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] -}}"
    "{%- endfor -%}{%- endif -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


@pytest.mark.slow
def test_rows_of_a_template_that_changes_earlier_turns(
    folders: dict[str, Path], hosts: dict[str, EnvironmentHosts]
) -> None:
    scene = Scene(folder_of(folders, "qwen2_5_vl"), hosts, history="as_template", template=CHANGING)
    made = scene.run(prompts_of(scene))
    assert difference(scene, made) < 5e-4
    for one, rollout in made:
        counts = [len(row.images) for row in rollout.sequences]
        first = len(prompts_of(scene)[one.request].images) + 1
        assert counts == [first, first + 1, first + 3, first + 4]
        assert len(rollout.prompt.images) == first


TOOLS = (
    "{%- macro written(content) -%}{%- if content is string -%}{{- content -}}{%- else -%}"
    "{%- for part in content -%}"
    "{{- '<|vision_start|><|image_pad|><|vision_end|>' if part['type'] == 'image' else part['text'] -}}"
    "{%- endfor -%}{%- endif -%}{%- endmacro -%}"
    "{%- if tools -%}{{- '<|im_start|>system\n' -}}{%- for tool in tools -%}{{- tool | tojson -}}{%- endfor -%}"
    "{{- '<|im_end|>\n' -}}{%- endif -%}"
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\n' + written(message['content']) -}}"
    "{%- for call in message['tool_calls'] or [] -%}"
    "{{- '<tool_call>\n' + {'name': call['function']['name'], 'arguments': call['function']['arguments']} | tojson"
    " + '\n</tool_call>' -}}{%- endfor -%}{{- '<|im_end|>\n' -}}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)


def test_tools_return_images(
    folders: dict[str, Path], hosts: dict[str, EnvironmentHosts], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A random model writes no calls, so the sampler must choose them."""
    from forced_turns import force

    tools = [f"{FILE}:look", f"{FILE}:picture_of"]
    scene = Scene(folder_of(folders, "qwen2_5_vl"), hosts, "", tools=tools, template=TOOLS, parser="hermes")
    scene.engine.settings = scene.engine.settings.model_copy(update={"turn_tokens": None})
    called = '<tool_call>\n{"name": "%s", "arguments": {"place": "%s"}}\n</tool_call>'
    turns = [called % ("look", "Rome") + "\n" + called % ("picture_of", "Bonn"), called % ("look", "Paris"), "red"]
    ids = [[*scene.tokenizer(turn, add_special_tokens=False)["input_ids"], scene.stop[0]] for turn in turns]
    force(monkeypatch, {(0, 0, number): turn for number, turn in enumerate(ids)}, 3)
    ((made, rollout),) = scene.run([scene.prompt(0, "look at #", [picture(1, 56, 56)])], n=1, limit=1500)
    assert made.trajectory is not None
    assert difference(scene, [(made, rollout)]) < 5e-4
    sizes = [(32, 64), (64, 32), (32, 64)]
    wanted = [png(drawn(len(place), *size)) for place, size in zip(("Rome", "Bonn", "Paris"), sizes, strict=True)]
    assert [image.ref.data for image in rollout.sequences[0].images[1:]] == wanted
    results = [message["content"] for message in made.trajectory.messages if message["role"] == "tool"]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    assert results == [f"A photo of Rome:{mark}", mark, f"A photo of Paris:{mark}"]


UNUSABLE = {
    "placeholder": "contains <|image_pad|>",
    "damaged": "cannot be read",
    "address": "not text or a list of texts and images",
    "path": "not text or a list of texts and images",
    "thin": "cannot be processed",
}


def test_messages_that_cannot_be_used(folders: dict[str, Path], hosts: dict[str, EnvironmentHosts]) -> None:
    scene = Scene(folder_of(folders, "qwen2_5_vl"), hosts, "Wrong")
    prompts = [scene.prompt(number, "#", [picture(1)], kind) for number, kind in enumerate(UNUSABLE)]
    for (made, rollout), why in zip(scene.run(prompts, n=1), UNUSABLE.values(), strict=True):
        assert why in made.failure
        assert len(rollout.sequences[0].images) == 1


def test_a_model_without_images_refuses_them(folders: dict[str, Path], hosts: dict[str, EnvironmentHosts]) -> None:
    scene = Scene(folder_of(folders, "qwen2_5_vl"), hosts)
    scene.engine.chat.images = None
    ((made, _),) = scene.run([scene.prompt(0, "text", [])], n=1)
    assert "the model reads no images" in made.failure


@pytest.mark.slow
def test_a_prompt_as_raw_text_keeps_its_images(folders: dict[str, Path], hosts: dict[str, EnvironmentHosts]) -> None:
    scene = Scene(folder_of(folders, "qwen2_5_vl"), hosts, "Raw")
    made = scene.run([scene.prompt(0, "compare # and #", [picture(1, 56, 84), picture(2)])])
    assert difference(scene, made) < 5e-4
    assert all(len(rollout.sequences[0].images) == 2 for _, rollout in made)
    marked = Scene(scene.folder, hosts, "Raw", environment_args={"answer": "<|image_pad|>"})
    ((failed, _),) = marked.run([scene.prompt(0, "#", [picture(1)])], n=1)
    assert "text and token ids have no images" in failed.failure
