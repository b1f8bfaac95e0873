"""Prompts with images in online methods: reading rows, and the packed passes of groups of responses."""

from __future__ import annotations

import base64
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import native, run

from image_rows import CPU, picture, plain_inputs, plain_logprobs, plain_model, settings
from lockstep.data import image_batch
from lockstep.data.array_store import item_digests
from lockstep.data.batching import run_on
from lockstep.data.encode.image_rows import RowImages
from lockstep.data.encode.prompt_rows import PromptSet, load_prompts, read_questions
from lockstep.data.sources.read import read_rows
from lockstep.device.cpu import Cpu
from lockstep.model.load import load_policy, load_tokenizer, load_value_model
from lockstep.model.policy import Policy
from lockstep.model.towers.tiny_vision import write_tiny_vlm
from lockstep.parallel.world import World
from lockstep.recipe.keys_data import Data
from lockstep.recipe.schema import Batch
from lockstep.reward.function_worker import answer, as_reward_function
from lockstep.reward.trl_signature import batch_call
from lockstep.rollout.collect import encode_questions
from lockstep.train.experience import Experience, UpdatePlan, build_experience, pack_minibatches, plan_updates
from lockstep.train.models import Models, Packing
from lockstep.types import Prompt, Request, Rollout, Sampling, Score
from refusals import refuses

ASKED = "Which colour?"
END = 257


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("vlm") / "model"
    write_tiny_vlm(made, hidden=64, layers=1)
    return made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("rows")
    for name, ref in {"a": picture(0), "b": picture(1, 56, 112), "c": picture(2, 140, 84)}.items():
        (place / f"{name}.png").write_bytes(ref.data)
    return place


def chat(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def truth(row: dict[str, Any]) -> dict[str, Any]:
    return {**row, "data_source": "squares", "reward_model": {"ground_truth": "red"}}


def written(data: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    path = data / f"{name}.jsonl"
    path.write_text("".join(json.dumps(truth(row)) + "\n" for row in rows), encoding="utf-8")
    return path


def prompts_of(folder: Path, path: Path, limit: int = 200, **keys: Any) -> PromptSet:
    made = Data(train=str(path), **keys)
    return load_prompts(made.train, made, load_tokenizer(str(folder)), limit, images=str(folder))


def formats(data: Path) -> dict[str, dict[str, Any]]:
    """Rows with the same image before the same question."""
    uri = "data:image/png;base64," + base64.b64encode((data / "a.png").read_bytes()).decode()
    text = {"type": "text", "text": ASKED}
    return {
        "verl": {"prompt": chat(f"<image>{ASKED}"), "images": ["a.png"]},
        "TRL": {"prompt": chat(ASKED), "image": "a.png"},
        "OpenRLHF": {"prompt": chat([{"type": "image"}, text]), "images": [uri]},
        "OpenAI": {"prompt": chat([{"type": "image_url", "image_url": {"url": uri}}, text])},
        "plain": {"prompt": ASKED, "images": ["a.png"]},
    }


def test_formats_give_the_same_prompt(folder: Path, data: Path) -> None:
    tokenizer = load_tokenizer(str(folder))
    pads = "<|image_pad|>" * 4
    for name, row in formats(data).items():
        (prompt,) = prompts_of(folder, written(data, "formats", [row])).items
        wanted = f"<|im_start|>user\n<|vision_start|>{pads}<|vision_end|>{ASKED}<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.decode(list(prompt.ids)) == wanted, name
        (image,) = prompt.images
        assert tokenizer.decode(list(prompt.ids[image.start : image.stop])) == pads
        assert [image.ref] == list(prompt.question.images)
        assert image.ref.digest == picture(0).digest


def test_questions_are_encoded_like_prompts(folder: Path, data: Path) -> None:
    path = written(data, "questions", [formats(data)["verl"], {"prompt": chat("How much is 1 + 1?")}])
    tokenizer = load_tokenizer(str(folder))
    questions = read_questions(read_rows(str(path)), images=RowImages(str(folder), tokenizer, str(path)))
    found = encode_questions(tokenizer, questions, images=str(folder))
    prompts = prompts_of(folder, path).items
    assert [(one.ids, one.images) for one in found] == [(list(one.ids), one.images) for one in prompts]
    with refuses("questions.jsonl line 1", "not-text", "images", remedy="model.vision"):
        read_questions(read_rows(str(path)))


def test_equal_texts_with_other_images_are_other_prompts(folder: Path, data: Path) -> None:
    rows = [{"prompt": chat(f"<image>{ASKED}"), "images": [name]} for name in ("a.png", "a.png", "d.png")]
    (data / "d.png").write_bytes(picture(3).data)
    prompts = prompts_of(folder, written(data, "alike", rows)).items
    assert list(prompts[0].ids) == list(prompts[2].ids)
    digests = item_digests(prompts)
    assert digests[0] == digests[1] != digests[2]


BAD = {
    "wrong-count": {"prompt": chat("<image> <image>?"), "images": ["a.png"]},
    "no-such-file": {"prompt": chat("<image>?"), "images": ["none.png"]},
    "not-text": {"prompt": chat("<|image_pad|>?"), "images": []},
}


@pytest.mark.parametrize("code", BAD)
def test_bad_rows_are_refused(folder: Path, data: Path, code: str) -> None:
    with refuses("bad.jsonl line 2", code):
        prompts_of(folder, written(data, "bad", [formats(data)["verl"], BAD[code]]))


def test_expanded_lengths_count_and_images_are_never_cut(folder: Path, data: Path) -> None:
    path = written(data, "long", [formats(data)["verl"], {"prompt": chat("hi")}])
    whole = prompts_of(folder, path)
    longest = whole.counts.longest
    assert longest == len(whole.items[0].ids)
    assert len(prompts_of(folder, path, longest - 1, overlong="drop").items) == 1
    for overlong, limit in (("error", longest - 1), ("truncate_left", longest - 20)):
        with refuses("long.jsonl line 1", "row-too-long", longest):
            prompts_of(folder, path, limit, overlong=overlong)
    cut = prompts_of(folder, path, longest - 2, overlong="truncate_left").items[0]
    assert cut.images[0].start == whole.items[0].images[0].start - 2


# The packed passes of groups of responses.


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load_policy(settings(folder, vision="train"), CPU, Cpu().attention, 0).eval()


@pytest.fixture(scope="module")
def prompts(folder: Path, data: Path) -> list[Prompt]:
    rows = [
        {"prompt": chat(f"<image>{ASKED}"), "images": ["b.png"]},
        {"prompt": chat("How much is 1 + 1?")},
        {"prompt": chat("<image> or <image>?"), "images": ["c.png", "b.png"]},
    ]
    return prompts_of(folder, written(data, "groups", rows)).items


@pytest.fixture(scope="module")
def experience(folder: Path, policy: Policy, prompts: list[Prompt]) -> Experience:
    """Three responses to each prompt, with the log-probs of the engine."""
    requests = [Request(one.ids, key, 3, images=one.images) for key, one in enumerate(prompts)]
    made = run(native(policy, folder), requests, Sampling(6, stop_ids=(END,), seed=1))
    assert len({tuple(one.ids) for one in made}) == 9
    score = Score(1.0)
    return build_experience(
        [Rollout(prompts[c.request], c.request, c.sample, c.ids, c.logprobs, c.stop, "", score) for c in made]
    )


def planned(policy: Policy, experience: Experience, tokens: int = 512) -> tuple[Models, UpdatePlan]:
    models = Models(policy, Packing(World(), tokens, None, 0), CPU)
    updates = pack_minibatches(experience, models, Batch(prompts=3, tokens=tokens))
    (plan,) = plan_updates(experience, updates, models)
    return models, plan


def test_packed_groups_equal_each_row_alone(folder: Path, policy: Policy, experience: Experience) -> None:
    """Log-probs and gradients of packed groups with shared prompts are those of transformers for each row alone, and
    the log-probs are those of the engine."""
    models, plan = planned(policy, experience)
    (batch,) = plan.batches
    assert batch.input_ids_NT.numel() < sum(batch.lengths)  # the responses to a prompt share its tokens
    plain = plain_model(folder)
    rows = [plain_logprobs(plain, one) for one in experience.examples]
    wanted = torch.cat(rows)
    torch.testing.assert_close(models.logprobs(plan), wanted.detach(), atol=2e-5, rtol=0)
    torch.testing.assert_close(experience.rollout_logprobs_K, wanted.detach(), atol=2e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(wanted))
    (wanted * weights).sum().backward()
    policy.zero_grad()
    (run_on(policy, batch, CPU).logprobs_K * weights[batch.index_K]).sum().backward()
    ours, theirs = dict(policy.causal_lm.named_parameters()), dict(plain.named_parameters())
    assert any("visual" in name for name in ours)
    for name, parameter in ours.items():
        torch.testing.assert_close(parameter.grad, theirs[name].grad, atol=2e-5, rtol=1e-4, msg=lambda m, n=name: n + m)
    policy.zero_grad()


def test_the_tower_runs_once_for_all_samples(policy: Policy, experience: Experience) -> None:
    """Also if a prompt is in several rows of the micro-batch, each image is stored and runs once."""
    seen: list[int] = []
    visual = policy.causal_lm.model.visual
    hook = visual.register_forward_hook(lambda module, given, output: seen.append(len(given[0])))
    try:
        models, plan = planned(policy, experience)
        models.logprobs(plan)
    finally:
        hook.remove()
    (batch,) = plan.batches
    assert batch.images is not None
    assert len(batch.images.distinct) == 2
    patches = {image.ref.digest: image.grid[1] * image.grid[2] for one in experience.examples for image in one.images}
    assert seen == [sum(patches.values())]


def reversed_features(inputs: Any) -> Any:
    return replace(inputs, features_M=inputs.features_M.flip(0))


def plain_positions(inputs: Any) -> Any:
    return replace(inputs, axes_3NT=inputs.axes_3NT[:1].expand(3, -1, -1).contiguous())


@pytest.mark.parametrize("broken", [reversed_features, plain_positions])
def test_broken_features_or_positions_change_log_probs(
    policy: Policy, experience: Experience, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    models, plan = planned(policy, experience)
    right = models.logprobs(plan)
    inputs = image_batch._Collected.inputs
    monkeypatch.setattr(image_batch._Collected, "inputs", lambda self: broken(inputs(self)))
    models, plan = planned(policy, experience)
    assert (models.logprobs(plan) - right).abs().max() > 1e-4


def test_greedy_answers_are_those_of_transformers(folder: Path, policy: Policy, prompts: list[Prompt]) -> None:
    requests = [Request(one.ids, key, images=one.images) for key, one in enumerate(prompts)]
    done = run(native(policy, folder), requests, Sampling(8, temperature=0.0, stop_ids=(END,)))
    plain = plain_model(folder).eval()
    for prompt, one in zip(prompts, done, strict=True):
        (example,) = Rollout(prompt, 0, 0, [], [], "token", "", Score(0.0)).sequences
        plain.model.rope_deltas = None
        ids = plain.generate(**plain_inputs(plain, example), do_sample=False, max_new_tokens=8, eos_token_id=END)
        assert one.ids == ids[0, len(prompt.ids) :].tolist()


def test_values_of_a_critic_depend_on_the_images(folder: Path, policy: Policy, experience: Experience) -> None:
    """The values of packed groups are those of transformers' hidden states for each row alone."""
    critic = load_value_model(settings(folder), str(folder), CPU, Cpu().attention, 0, head_init="random").eval()
    models, plan = planned(policy, experience)
    found = models.score_targets(critic, plan, lambda values: values)
    plain, wanted = plain_model(folder), []
    for one in experience.examples:
        plain.model.rope_deltas = None
        with torch.no_grad():
            out = plain(**plain_inputs(plain, one), use_cache=False, output_hidden_states=True).hidden_states[-1][0]
        wanted += [out[at] @ critic.head.weight[0] for at, _ in one.scored_tokens()]
    torch.testing.assert_close(found, torch.stack(wanted).detach(), atol=2e-5, rtol=0)


def test_a_critic_without_a_tower_is_refused(folder: Path, tiny_folder: Path) -> None:
    with refuses(f"critic.path {tiny_folder}", "wrong-model-kind"):
        load_value_model(settings(folder), str(tiny_folder), CPU, Cpu().attention, 0)


# Reward functions.


def scored(data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any]) -> float:
    return float(extra_info["images"][0].size[0] + extra_info["index"])


def scored_all(completions: list[Any], images: list[Any], **more: Any) -> list[float]:
    return [float(sum(image.size[0] for image in one)) for one in images]


def scored_queries(queries: list[str], prompts: list[str], labels: list[str], images: Any = ()) -> list[float]:
    return [float(images[0][0].size[0])]


def test_reward_functions_get_the_images(folder: Path, data: Path, prompts: list[Prompt]) -> None:
    wide, text, both = (one.question for one in prompts)
    call = {
        "prompt": "",
        "data_source": "squares",
        "solution_str": "red",
        "ground_truth": "red",
        "extra_info": {"index": 7},
        "images": wide.images,
    }
    for function, score in ((scored, 112.0 + 7), (scored_queries, 112.0)):
        usable = as_reward_function(function, "f", ("data_source", "solution_str", "ground_truth", "extra_info"))
        assert vars(answer(usable, pickle.dumps(call), "f.py"))["score"] == score
    batch = batch_call([(wide, "a"), (text, "b"), (both, "c")], None, {})
    usable = as_reward_function(scored_all, "f", ("data_source", "solution_str", "ground_truth", "extra_info"))
    assert vars(answer(usable, pickle.dumps(batch), "f.py"))["scores"] == [112.0, 0.0, 84.0 + 112.0]
