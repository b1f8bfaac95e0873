"""Choosing tokens: the truncations by frequency, log-probabilities as the trainer scores them, both engines alike."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from small_models import SIZES, load, native, prompts, run, write_model
from transformers import GenerationConfig, Qwen2Config

from lockstep.data.batching import micro_batch
from lockstep.kernels.sampling import Truncation, gumbel_noise, sequence_keys
from lockstep.model.load import load_tokenizer
from lockstep.model.policy import Policy, Scoring
from lockstep.rollout.engine import why_ended
from lockstep.rollout.hf import HfEngine
from lockstep.rollout.native.sampler import choose
from lockstep.types import Completion, Example, Origin, Request, Sampling

PROBABILITIES = torch.tensor([0.1, 0.4, 0.2, 0.3])


def draw(count: int, seen: torch.Tensor | None = None, **settings: Any) -> tuple[torch.Tensor, torch.Tensor]:
    sampling = Sampling(max_tokens=1, **settings)
    keys = torch.tensor([sequence_keys(0, i, 0) for i in range(count)], dtype=torch.int32)
    logits = PROBABILITIES.log().expand(count, 4)
    return choose(logits, sampling, keys, torch.zeros(count, dtype=torch.long), seen)


def test_frequencies_at_a_temperature_with_truncation() -> None:
    """At temperature 0.5 probabilities are squared: 0.16, 0.09, 0.04, 0.01 of 0.3; top-k leaves 16, 9 and 4 of 29."""
    tokens, logprobs = draw(20_000, temperature=0.5, top_k=3, score_truncated=True)
    right = torch.tensor([0, 16, 4, 9]) / 29
    shares = torch.bincount(tokens, minlength=4) / 20_000
    # Four deviations of a share: 4 * sqrt(0.25 / 20000) = 0.014.
    torch.testing.assert_close(shares, right, rtol=0, atol=0.014)
    torch.testing.assert_close(logprobs, right.log()[tokens])
    whole = draw(20_000, temperature=0.5, top_k=3)
    assert torch.equal(whole[0], tokens)
    torch.testing.assert_close(whole[1], (torch.tensor([1, 16, 4, 9]) / 30).log()[tokens])


def test_greedy_is_scored_at_temperature_one() -> None:
    tokens, logprobs = draw(5, temperature=0.0)
    assert tokens.tolist() == [1] * 5
    torch.testing.assert_close(logprobs, torch.full((5,), 0.4).log())


def test_a_repetition_penalty_moves_the_choice_and_not_the_score() -> None:
    """log 0.4 = -0.916 times 1.5 is -1.374, below log 0.3 = -1.204."""
    seen = torch.tensor([[False, True, False, False]])
    tokens, logprobs = draw(1, seen, temperature=0.0, repetition_penalty=1.5)
    assert tokens.tolist() == [3]
    torch.testing.assert_close(logprobs, torch.tensor([0.3]).log())
    positive = choose(torch.tensor([[3.0, 2.5]]), Sampling(1, 0.0, repetition_penalty=1.5), *_row(), seen[:, 1:3])
    assert positive[0].item() == 1


def fused_draw(
    offered: torch.Tensor,
    keys: torch.Tensor,
    positions: torch.Tensor,
    temperature: float,
    scored: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernel's contract in plain torch."""
    sharpness = 1 / temperature if temperature else 1.0
    noise = gumbel_noise(keys, positions, offered.shape[-1]) if temperature else 0.0
    tokens = (offered.float() * sharpness + noise).argmax(-1)
    logprobs = ((offered if scored is None else scored).float() * sharpness).log_softmax(-1)
    return tokens, logprobs.gather(-1, tokens[:, None])[:, 0]


@pytest.mark.parametrize("temperature", [0.0, 1.0, 0.5, 2.0])
@pytest.mark.parametrize("top_k", [0, 2])
@pytest.mark.parametrize("score_truncated", [False, True])
def test_the_fused_sampler_gives_what_the_plain_one_gives(temperature, top_k, score_truncated, monkeypatch) -> None:
    """The arguments that the kernel gets, with plain torch in its place; the kernel itself is tested with Triton."""
    calls = []
    module = ModuleType("lockstep.kernels.sampling_triton")
    module.draw = lambda *given: calls.append(len(given)) or fused_draw(*given)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    sampling = Sampling(1, temperature, top_k=top_k, score_truncated=score_truncated)
    keys = torch.tensor([sequence_keys(0, i, 0) for i in range(400)], dtype=torch.int32)
    row = PROBABILITIES.log().expand(400, 4), sampling, keys, torch.zeros(400, dtype=torch.long)
    plain, fused = choose(*row), choose(*row, kernel="triton")
    assert len(calls) == 1
    assert torch.equal(fused[0], plain[0])
    torch.testing.assert_close(fused[1], plain[1])
    # A repetition penalty has no kernel.
    seen = torch.tensor([[False, True, False, False]]).expand(400, 4)
    choose(*row, seen, kernel="triton")
    assert len(calls) == 1


@pytest.mark.parametrize("temperature", [1.0, 2.0])
def test_scores_at_a_temperature_by_hand(temperature) -> None:
    """At temperature 2 the probabilities are square roots over their sum."""
    tokens, logprobs = draw(50, temperature=temperature)
    raised = PROBABILITIES ** (1 / temperature)
    torch.testing.assert_close(logprobs, (raised / raised.sum()).log()[tokens])


def _row() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(1, 2, dtype=torch.int32), torch.zeros(1, dtype=torch.long)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    config = Qwen2Config(**{**SIZES, "initializer_range": 0.25})
    return write_model(tmp_path_factory.mktemp("sampler") / "model", config, tiny_folder)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load(folder)


def trainer_scores(policy: Policy, requests: list[Request], made: list[Completion], scoring: Scoring) -> torch.Tensor:
    """All responses in one packed line, as the trainer runs them."""
    rows = [
        Example(
            [*requests[c.request].ids, *c.ids], [0] * len(requests[c.request].ids) + [1] * len(c.ids), Origin("", 0)
        )
        for c in made
    ]
    before, policy.scoring = policy.scoring, scoring
    try:
        with torch.no_grad():
            return policy(micro_batch(rows, packed=True, pad_id=0)).logprobs_K
    finally:
        policy.scoring = before


TRUNCATIONS = [
    Truncation(),
    Truncation(top_k=5),
    Truncation(top_p=0.7),
    Truncation(20, 0.8, 0.05),
    Truncation(min_p=0.2),
]


@pytest.mark.daily
@pytest.mark.parametrize("temperature", [1.0, 0.6, 1.7])
@pytest.mark.parametrize("how", TRUNCATIONS, ids=str)
@pytest.mark.parametrize("mask", [True, False])
def test_the_trainer_scores_the_same(
    policy: Policy, folder: Path, temperature: float, how: Truncation, mask: bool
) -> None:
    requests = [Request(ids, key, 3) for key, ids in enumerate(prompts(4, seed=1))]
    sampling = Sampling(
        12, temperature, how.top_p, how.top_k, how.min_p, seed=4, stop_ids=(1, 2, 3), score_truncated=mask
    )
    made = run(native(policy, folder), requests, sampling)
    ours = torch.tensor([score for c in made for score in c.logprobs])
    scores = trainer_scores(policy, requests, made, Scoring(temperature, how if mask else None))
    torch.testing.assert_close(ours, scores, rtol=0, atol=2e-4)
    if how.active:
        other = trainer_scores(policy, requests, made, Scoring(temperature, None if mask else how))
        assert (ours - other).abs().max() > 0.01


ENGINE_CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "greedy": {"temperature": 0.0},
    "truncated": {"temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "score_truncated": True},
    "stop token": {"stop_ids": tuple(range(20, 40))},
    "stop string": {"stop_strings": ("e", "0\x00", "Q")},
    "penalty": {"repetition_penalty": 1.8},
    "greedy penalty": {"repetition_penalty": 1.3, "temperature": 0.0},
}


@pytest.mark.daily("truncated", "penalty", "stop string", "greedy")
@pytest.mark.parametrize("case", ENGINE_CASES)
def test_both_engines_give_the_same(policy: Policy, folder: Path, case: str) -> None:
    requests = [Request(ids, 50 + key, 3) for key, ids in enumerate(prompts(6, seed=9))]
    sampling = Sampling(**{"max_tokens": 15, "seed": 2, **ENGINE_CASES[case]})
    ours = run(native(policy, folder), requests, sampling)
    theirs = run(HfEngine(policy.generating, load_tokenizer(str(folder)).decode), requests, sampling)
    assert [(c.ids, c.stop) for c in ours] == [(c.ids, c.stop) for c in theirs]
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=2e-4)
    if case.startswith("stop"):
        assert {c.stop for c in ours} == {case.removeprefix("stop "), "length"}


def test_defaults_in_a_models_folder_are_not_applied(policy: Policy, folder: Path) -> None:
    """Folders ask for penalties and truncation of their own; `generate` would follow them."""
    requests = [Request(ids, key, 2) for key, ids in enumerate(prompts(3, seed=4))]
    sampling = Sampling(max_tokens=12, seed=6)
    ours = run(native(policy, folder), requests, sampling)
    model = policy.causal_lm
    own = model.generation_config
    eos = ours[0].ids[3]
    model.generation_config = GenerationConfig(
        repetition_penalty=3.0, do_sample=True, top_k=1, min_new_tokens=3, eos_token_id=eos, suppress_tokens=[eos]
    )
    try:
        theirs = run(HfEngine(policy.generating, lambda ids: ""), requests, sampling)
        assert model.generation_config.top_k == 1
    finally:
        model.generation_config = own
    assert [(c.ids, c.stop) for c in ours] == [(c.ids, c.stop) for c in theirs]


def test_padding_is_not_penalised(policy: Policy, folder: Path) -> None:
    """`generate` pads the short prompt with the end token, which the penalty must not take for a token of it."""
    short, long = [65, 66], list(range(100, 130))
    greedy = Sampling(max_tokens=1, temperature=0)
    (first,) = run(native(policy, folder), [Request(short, 0)], greedy)[0].ids
    assert first not in short
    penalised = Sampling(max_tokens=1, temperature=0, repetition_penalty=50.0, stop_ids=(first,))
    requests = [Request(short, 0), Request(long, 1)]
    for engine in (native(policy, folder), HfEngine(policy.generating, lambda ids: "")):
        assert run(engine, requests, penalised)[0].ids == [first]


def test_more_responses_than_one_batch_of_generate(policy: Policy, folder: Path) -> None:
    requests = [Request([5, 6, 7], 1, 70)]
    sampling = Sampling(max_tokens=2, seed=1)
    with policy.generating() as model:
        made = run(HfEngine(lambda: nullcontext(model), lambda ids: ""), requests, sampling)
    assert [c.sample for c in made] == list(range(70))
    assert [c.ids for c in made] == [c.ids for c in run(native(policy, folder), requests, sampling)]


def test_why_a_response_ends() -> None:
    def decode(ids: list[int]) -> str:
        return bytes(ids).decode("utf-8", errors="replace")

    sampling = Sampling(max_tokens=20, stop_ids=(0,), stop_strings=("né", "END"))
    prompt = list(b"a prompt with END")
    # The prompt's own text does not end the response.
    assert why_ended([*prompt, *b"x"], len(prompt), sampling, decode) == ""
    assert why_ended([*prompt, 0], len(prompt), sampling, decode) == "token"
    assert why_ended([*prompt, *b"the EN"], len(prompt), sampling, decode) == ""
    assert why_ended([*prompt, *b"the END"], len(prompt), sampling, decode) == "string"
    # One token may complete a text and go on after it, or bring only the last byte of a character.
    assert why_ended([*prompt, *b"an END."], len(prompt), sampling, decode) == "string"
    assert why_ended([*prompt, *"né".encode()[:-1]], len(prompt), sampling, decode) == ""
    assert why_ended([*prompt, *"né".encode()], len(prompt), sampling, decode) == "string"
    assert why_ended([*prompt, *b"x" * 19], len(prompt), sampling, decode) == ""
    assert why_ended([*prompt, *b"x" * 20], len(prompt), sampling, decode) == "length"
