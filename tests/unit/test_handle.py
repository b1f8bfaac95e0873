"""The handle of `lockstep.load`: what it samples, scores and steps, against transformers and hand computations."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import lockstep
from lockstep.errors import Refusal
from lockstep.kernels.quantized.formats import dequantize, quantize
from lockstep.recipe.keys_lora import Lora
from refusals import refuses

ROWS = [("2+3=", "5"), ("10+20=", "thirty, I think"), ("1+1=", "2 and nothing else at all"), ("7+1=", "8")]


def handle(folder: Path, **settings: Any) -> lockstep.Handle:
    return lockstep.load(folder, device="cpu", **{"lr": 1e-3, **settings})


def examples(model: lockstep.Handle) -> list[lockstep.Datum]:
    return [model.example(prompt, response) for prompt, response in ROWS]


def weights(model: lockstep.Handle, folder: Path) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(model.export(folder)).state_dict()


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], tolerance: float = 1e-6) -> bool:
    return all(torch.allclose(one[name], other[name], rtol=0, atol=tolerance) for name in one)


def independent(folder: Path, data: Sequence[lockstep.Datum]) -> list[torch.Tensor]:
    """Log-probabilities of the trained tokens by transformers' own forward pass, row by row."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    found = []
    for datum in data:
        for sequence in datum.sequences:
            ids = torch.tensor([list(sequence.ids)])
            scores = torch.log_softmax(model(ids).logits[0].float(), -1)
            places = [i for i in range(1, len(sequence.ids)) if sequence.loss_mask[i]]
            found.append(torch.stack([scores[i - 1, sequence.ids[i]] for i in places]))
    return found


@pytest.mark.daily("settings0", "settings2", "settings4")
@pytest.mark.parametrize(
    "settings", [{}, {"temperature": 0.6}, {"temperature": 1.5, "top_k": 7}, {"temperature": 0.0}, {"top_p": 0.5}]
)
def test_log_probs_of_samples_are_those_that_the_trainer_scores(tiny_folder: Path, settings: dict[str, Any]) -> None:
    model = handle(tiny_folder)
    responses = model.sample(["2+3=", [{"role": "user", "content": "hello"}], [72, 105]], max_tokens=6, **settings)
    assert [response.prompt for response in responses] == [0, 1, 2]
    assert responses[2].prompt_ids == (72, 105)
    for response, scored in zip(responses, model.logprobs(responses), strict=True):
        assert len(response.ids) == len(response.logprobs) <= 6
        torch.testing.assert_close(scored, torch.tensor(response.logprobs), rtol=0, atol=1e-5)


def test_log_probs_are_those_of_transformers(tiny_folder: Path) -> None:
    model = handle(tiny_folder, batch_tokens=64)
    data = [*examples(model), model.pair("who?", "me", "you, and many more"), model.tokens([5, 6, 7, 8], [0, 1, 0, 1])]
    for ours, theirs in zip(model.logprobs(data), independent(tiny_folder, data), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_a_stop_text_alone_is_one_text_and_not_its_letters(tiny_folder: Path) -> None:
    model = handle(tiny_folder)
    whole = model.sample("hi", max_tokens=8, temperature=0)[0].text
    one, listed = (model.sample("hi", max_tokens=8, temperature=0, stop=stop)[0] for stop in (whole[:3], [whole[:3]]))
    assert one.ids == listed.ids
    assert len(one.text) >= 3


def test_samples_repeat_with_the_seed_and_differ_from_call_to_call(tiny_folder: Path) -> None:
    first, second, other = handle(tiny_folder), handle(tiny_folder), handle(tiny_folder, seed=1)
    drawn = [[model.sample("hi", n=2, max_tokens=8)[i].ids for i in (0, 1)] for model in (first, second, other)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert drawn[0][0] != drawn[0][1]
    assert first.sample("hi", max_tokens=8)[0].ids != drawn[0][0]


def test_the_step_divides_once_by_the_trained_tokens_of_all_calls(tiny_folder: Path, tmp_path: Path) -> None:
    whole, parts = handle(tiny_folder), handle(tiny_folder)
    whole.forward_backward(examples(whole), "nll")
    # Calls of very different token counts: a mean of their means would be another gradient.
    for some in (slice(0, 1), slice(1, 3), slice(3, 4)):
        parts.forward_backward(examples(parts)[some], "nll")
    one, other = whole.optim_step(), parts.optim_step()
    model = AutoModelForCausalLM.from_pretrained(tiny_folder)
    rows = independent_with_gradient(model, examples(whole))
    (-torch.cat(rows)).mean().backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]).item()
    assert one["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert other["grad_norm"] == pytest.approx(norm, rel=1e-4)
    assert same(weights(whole, tmp_path / "a"), weights(parts, tmp_path / "b"), 1e-5)


def independent_with_gradient(model: Any, data: Sequence[lockstep.Datum]) -> list[torch.Tensor]:
    found = []
    for datum in data:
        (sequence,) = datum.sequences
        scores = torch.log_softmax(model(torch.tensor([list(sequence.ids)])).logits[0], -1)
        places = [i for i in range(1, len(sequence.ids)) if sequence.loss_mask[i]]
        found.append(torch.stack([scores[i - 1, sequence.ids[i]] for i in places]))
    return found


def test_a_function_is_divided_by_examples_or_by_tokens_as_asked(tiny_folder: Path) -> None:
    def negative(logprobs: torch.Tensor) -> torch.Tensor:
        return -logprobs.sum()

    model = handle(tiny_folder)
    data = examples(model)
    total = -torch.cat(independent(tiny_folder, data)).sum().item()
    assert model.forward_backward(data, negative)["loss"] == pytest.approx(total / 4, rel=1e-5)
    by_example = model.optim_step(lr=0.0)["grad_norm"]
    tokens = sum(datum.targets for datum in data)
    assert model.forward_backward(data, negative, per="token")["loss"] == pytest.approx(total / tokens, rel=1e-5)
    assert model.optim_step(lr=0.0)["grad_norm"] == pytest.approx(by_example * 4 / tokens, rel=1e-4)


def test_ours_by_name_are_the_formulas(tiny_folder: Path) -> None:
    model = handle(tiny_folder, reference=True)
    (datum,) = data = [model.example("2+3=", "five").having(advantage=-1.5)]
    (now,) = independent(tiny_folder, data)
    old = now - torch.linspace(-0.5, 0.6, len(now))
    clipped = datum.having(old=old.tolist())
    ratio = (now - old).exp()
    wanted = torch.maximum(1.5 * ratio, 1.5 * ratio.clamp(0.9, 1.3)).mean()
    said = model.forward_backward([clipped], "clip", clip_low=0.1, clip_high=0.3)
    assert said["loss"] == pytest.approx(wanted.item(), rel=1e-5)
    model.forget()

    pair = model.pair("who?", "me", "you and you")
    chosen, rejected = independent(tiny_folder, [pair])
    reference = (chosen + 0.25, rejected - 0.125)
    h = (chosen.sum() - reference[0].sum()) - (rejected.sum() - reference[1].sum())
    said = model.forward_backward([pair.having(reference=reference)], "sigmoid", beta=0.3)
    assert said["loss"] == pytest.approx(-torch.nn.functional.logsigmoid(0.3 * h).item(), rel=1e-4)
    assert said["margin"] == pytest.approx(0.3 * h.item(), rel=1e-4)


@pytest.mark.parametrize("settings", [{"lora": 4}, {"reference": True}])
def test_the_reference_stays_what_it_was(tiny_folder: Path, settings: dict[str, Any]) -> None:
    model = handle(tiny_folder, **settings)
    data = examples(model)
    before = independent(tiny_folder, data)
    for _ in range(3):
        model.forward_backward(data, "nll")
        model.optim_step(lr=1e-2)
    for said, was in zip(model.logprobs(data, reference=True), before, strict=True):
        torch.testing.assert_close(said, was, rtol=0, atol=1e-5)
    assert any(not torch.allclose(now, was, atol=0.1) for now, was in zip(model.logprobs(data), before, strict=True))


@pytest.mark.daily("settings0")
@pytest.mark.parametrize("settings", [{}, {"lora": 4}, {"dtype": "bf16"}, {"lora": 4, "quantize": "nf4"}])
def test_a_saved_handle_goes_on_as_if_nothing_had_happened(
    tiny_folder: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    def step(model: lockstep.Handle) -> None:
        model.forward_backward(examples(model), "nll")
        model.optim_step()

    straight, stopped = handle(tiny_folder, **settings), handle(tiny_folder, **settings)
    for model in (straight, stopped):
        model.sample("hi", max_tokens=2)
        step(model)
    stopped.save(tmp_path / "saved")
    resumed = handle(tiny_folder, **settings)
    resumed.restore(tmp_path / "saved")
    for model in (straight, resumed):
        step(model)
    assert resumed.steps == 2
    assert same(weights(straight, tmp_path / "a"), weights(resumed, tmp_path / "b"), 0.0)
    assert straight.sample("hi", max_tokens=4)[0].ids == resumed.sample("hi", max_tokens=4)[0].ids


@pytest.mark.slow
@pytest.mark.parametrize("coding", [None, "nf4", "int8"])
def test_the_exported_model_is_the_trained_one(tiny_folder: Path, tmp_path: Path, coding: Any) -> None:
    model = handle(tiny_folder, lora=4, quantize=coding)
    data = examples(model)
    model.forward_backward(data, "nll")
    model.optim_step(lr=1e-2)
    theirs = independent(model.export(tmp_path / "out"), data)
    for ours, said in zip(model.logprobs(data), theirs, strict=True):
        torch.testing.assert_close(ours, said, rtol=0, atol=1e-4)


def test_quantised_weights_are_those_of_the_format(tiny_folder: Path, tmp_path: Path) -> None:
    """A new adapter changes nothing, so the log-probs are those of a model with the dequantised weights."""
    model = handle(tiny_folder, lora=4, quantize="nf4")
    coded = AutoModelForCausalLM.from_pretrained(tiny_folder)
    with torch.no_grad():
        for name, module in coded.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.copy_(dequantize(quantize(module.weight, "nf4", True), torch.float32))
    coded.save_pretrained(tmp_path)
    data = examples(model)
    plain = independent(tiny_folder, data)
    for ours, theirs, other in zip(model.logprobs(data), independent(tmp_path, data), plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
        assert not torch.allclose(ours, other, rtol=0, atol=1e-3)


@pytest.mark.parametrize(
    ("settings", "where"),
    [
        ({"quantize": "nf4"}, "quantize"),
        ({"quantize": "nf4", "lora": Lora(rank=4, init="pissa")}, "model.lora.init"),
        ({"lora": Lora(rank=4, init="loftq")}, "model.lora.init"),
    ],
)
def test_unusable_formats_are_refused(tiny_folder: Path, settings: dict[str, Any], where: str) -> None:
    with refuses(where):
        handle(tiny_folder, **settings)


def without_gradient(logprobs: torch.Tensor) -> torch.Tensor:
    return -logprobs.detach().sum()


def a_vector(logprobs: torch.Tensor) -> torch.Tensor:
    return -logprobs


def a_number(logprobs: torch.Tensor) -> float:
    return 1.0


def needs_more(logprobs: torch.Tensor, *, weight: float) -> torch.Tensor:
    return -weight * logprobs.sum()


@pytest.mark.parametrize(
    ("loss", "settings", "said"),
    [
        (without_gradient, {}, "loss without_gradient [invalid-return]: "),
        (a_vector, {}, "numbers (shape ("),
        (a_number, {}, "loss a_number [invalid-return]: returned a float"),
        (needs_more, {}, "argument: 'weight'"),
        (needs_more, {"beta": 1.0}, "beta are settings of built-in losses"),
        ("policy_gradient", {}, "argument: 'advantage'"),
        ("nll", {"beta": 0.1}, "loss nll [unused-key]: does not read beta"),
        ("clip", {"sapo_positive": 1.0}, "loss clip [unused-key]: does not read sapo_positive"),
        ("kl_cov", {}, "selects tokens over a full update"),
        ("dpo", {}, "does not exist"),
        ("nll", {"per": "row"}, "'row' is not supported"),
    ],
)
def test_a_loss_that_cannot_be_is_refused_and_leaves_nothing(
    tiny_folder: Path, loss: Any, settings: dict[str, Any], said: str
) -> None:
    model = handle(tiny_folder)
    with pytest.raises(Refusal) as caught:
        model.forward_backward(examples(model), loss, **settings)
    assert said in str(caught.value)
    with pytest.raises(Refusal, match="there is no gradient"):
        model.optim_step()


def test_half_of_a_failed_call_is_in_no_step(tiny_folder: Path) -> None:
    """The second micro-batch fails after the first one's backward pass."""
    calls = []

    def fails_later(logprobs: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        if len(calls) > 1:
            raise RuntimeError("later")
        return -logprobs.sum()

    # The longest example fills the first micro-batch alone.
    longest = max(len(datum.sequences[0]) for datum in examples(handle(tiny_folder)))
    model, fresh = (handle(tiny_folder, batch_tokens=longest) for _ in range(2))
    with pytest.raises(RuntimeError):
        model.forward_backward(examples(model), fails_later)
    assert len(calls) == 2
    for one in (model, fresh):
        one.forward_backward(examples(one)[:1], "nll")
    assert model.optim_step()["grad_norm"] == fresh.optim_step()["grad_norm"]


def test_what_a_handle_refuses(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = handle(tiny_folder)
    refused: list[tuple[str, Any]] = [
        ("no chat or token ids|has no tokens|empty", lambda: model.sample([""], max_tokens=2)),
        ("would be identical", lambda: model.sample("hi", n=2, temperature=0.0)),
        ("the model's context of 2048", lambda: model.sample("hi", max_tokens=2048)),
        ("the handle has no reference", lambda: model.logprobs(examples(model), reference=True)),
        ("is a str, not an example", lambda: model.logprobs(["hello"])),  # type: ignore[list-item]
        ("has no trained token", lambda: model.logprobs([model.tokens([1, 2], [0, 0])])),
        ("3 entries for 2 tokens", lambda: model.tokens([1, 2], [0, 1, 1])),
        ("nothing was trained yet", lambda: model.save(tmp_path / "s")),
        ("batch_tokens=16", lambda: handle(tiny_folder, batch_tokens=16).forward_backward(examples(model), "nll")),
        ("is not a complete checkpoint", lambda: model.restore(tmp_path)),
        ("'fp8' is not supported", lambda: handle(tiny_folder, dtype="fp8")),
    ]
    for said, act in refused:
        with pytest.raises(Refusal, match=said):
            act()
    model.forward_backward(examples(model), "nll")
    with pytest.raises(Refusal, match="sums over tokens, and loss a_vector counts examples"):
        model.forward_backward(examples(model), a_vector)
    with pytest.raises(Refusal, match="gradients would not be saved"):
        model.save(tmp_path / "s")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(Refusal, match="one process on one device"):
        handle(tiny_folder)


@pytest.mark.parametrize(
    ("words", "where"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_k": -1}, "top_k"),
        ({"min_p": 1.0}, "min_p"),
        ({"n": 0}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"stop": [""]}, "stop.0"),
        ({"stop": ""}, "stop.0"),
    ],
    ids=str,
)
def test_settings_that_cannot_be_sampled_with_are_refused(tiny_folder: Path, words: dict[str, Any], where: str) -> None:
    with pytest.raises(Refusal) as refused:
        handle(tiny_folder).sample("hi", **words)
    assert [problem.where for problem in refused.value.problems] == [where]


def test_tokens_that_the_model_has_not_and_sequences_past_its_context_are_refused(tiny_folder: Path) -> None:
    model = handle(tiny_folder, batch_tokens=8192)
    words = AutoModelForCausalLM.from_pretrained(tiny_folder).config.vocab_size
    for bad in (-1, words):
        with pytest.raises(Refusal, match=rf"prompt 0 \[unknown-token\]: token {bad} at position 1 .* {words:,} "):
            model.sample([[3, bad]], max_tokens=2)
        with pytest.raises(Refusal, match=f"token {bad} at position 1"):
            model.logprobs([model.tokens([5, bad], [0, 1])])
    context = AutoModelForCausalLM.from_pretrained(tiny_folder).config.max_position_embeddings
    assert len(model.logprobs([model.tokens([5] * context, [0] * (context - 1) + [1])])) == 1
    with pytest.raises(Refusal, match=f"has {context + 1} tokens, .*context of {context}"):
        model.forward_backward([model.tokens([5] * (context + 1), [0] * context + [1])], "nll")


@pytest.mark.parametrize(("words", "where"), [({"lora": 0}, "rank"), ({"lr": -1.0}, "lr"), ({"clip": 0.0}, "clip")])
def test_settings_that_cannot_train_are_refused(tiny_folder: Path, words: dict[str, Any], where: str) -> None:
    with pytest.raises(Refusal) as refused:
        handle(tiny_folder, **words)
    assert [problem.where for problem in refused.value.problems] == [where]


def test_a_template_is_what_a_recipe_takes(tiny_folder: Path, tmp_path: Path) -> None:
    """One of ours, or a file; prompts, ends and the export follow it, and what a recipe refuses is refused."""
    own = handle(tiny_folder)
    (tmp_path / "own.jinja").write_text(
        "{% for m in messages %}| {{ m['role'] }}: {{ m['content'] }}{% if m['role'] == 'assistant' %}<|endoftext|>"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}| assistant: {% endif %}"
    )
    model = handle(tiny_folder, template=tmp_path / "own.jinja")
    assert model.tokenizer.decode(model.encode("hi")) == "| user: hi| assistant: "
    assert own.tokenizer.decode(own.encode("hi")) != "| user: hi| assistant: "
    end = model.tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert model.example("hi", "ho").sequences[0].ids[-1] == end
    exported = AutoTokenizer.from_pretrained(model.export(tmp_path / "out"))
    assert exported.chat_template == (tmp_path / "own.jinja").read_text()
    generation = AutoModelForCausalLM.from_pretrained(tmp_path / "out").generation_config
    assert end in generation.eos_token_id
    assert handle(tiny_folder, template="chatml").encode("hi") == own.encode("hi")  # which its own is
    for template, why in (("llama3", "no special token"), (str(tmp_path / "no.jinja"), "cannot be read")):
        with pytest.raises(Refusal, match=why):
            handle(tiny_folder, template=template)
