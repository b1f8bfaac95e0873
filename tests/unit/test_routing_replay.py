"""Routing replay: the engine's experts are recorded, and every pass of the trainer uses them at the same token, layer
and sequence. The expected log-probs come from transformers' own forward with forced experts, one sequence at a time."""

from __future__ import annotations

import base64
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from small_models import SIZES, load, native, prompts, run, write_model
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3MoeConfig

from hand_rollouts import question
from lockstep.data.batching import common_prompt, micro_batch
from lockstep.errors import Refusal
from lockstep.model.decoder import decoder_layers
from lockstep.model.load import load_config
from lockstep.model.policy import Policy
from lockstep.model.routing import ROUTERS, Routing, refuse_unknown_routers, routers_of
from lockstep.model.text_model import model_on_meta
from lockstep.rollout.servers.adapter import ServerFailed, ServerNeeds, WantedSample, prompt_digest
from lockstep.rollout.servers.server_engine import ServerEngine
from lockstep.rollout.servers.vllm import Vllm
from lockstep.tape.tape_format import TapeFolder
from lockstep.tape.tape_images import TapeImages
from lockstep.tape.tape_recorder import trace_examples
from lockstep.tape.tape_rows import fed_examples, fed_tensors, rollout_rows, rollouts_of
from lockstep.trajectory import TrajectoryRow
from lockstep.types import (
    PAUSED,
    Completion,
    Example,
    Origin,
    PartialResponse,
    Prompt,
    Request,
    Rollout,
    Sampling,
    Score,
)
from refusals import refuses

EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SAMPLING = Sampling(max_tokens=12, temperature=0.9, stop_ids=(7, 9, 11), seed=3, routes=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    config = Qwen3MoeConfig(**SIZES, **EXPERTS, norm_topk_prob=True)
    return write_model(tmp_path_factory.mktemp("experts") / "model", config, tiny_folder)


def routers(policy: Policy) -> list[Any]:
    return [one for [one] in routers_of(policy.decoder.layers)]


def sharpened(policy: Policy, seed: int) -> Policy:
    """Gives the routers other weights, which choose the experts of most tokens differently."""
    with torch.no_grad():
        for number, router in enumerate(routers(policy)):
            noise = torch.Generator().manual_seed(100 * seed + number)
            router.weight.copy_(torch.randn(router.weight.shape, generator=noise) * 0.4)
    return policy


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return sharpened(load(folder), 1)


@contextmanager
def forced(policy: Policy, routes_TLK: np.ndarray) -> Iterator[list[torch.Tensor]]:
    """Replaces the forwards of the routers: a softmax over the logits of the given experts alone, which is what
    transformers' normalised gates of these experts are. Yields the logits of each layer."""
    seen: list[torch.Tensor] = []

    def forward(router: Any, layer: int) -> Any:
        def forced_forward(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
            logits = hidden.reshape(-1, router.hidden_dim) @ router.weight.T
            chosen = torch.from_numpy(routes_TLK[:, layer].astype(np.int64))
            seen.append(logits)
            return logits, torch.softmax(logits.gather(1, chosen), -1), chosen

        return forced_forward

    patch = pytest.MonkeyPatch()
    for layer, router in enumerate(routers(policy)):
        patch.setattr(router, "forward", forward(router, layer))
    try:
        yield seen
    finally:
        patch.undo()


@torch.no_grad()
def by_hand(policy: Policy, ids: Sequence[int], routes: np.ndarray) -> torch.Tensor:
    """The log-prob of each token but the first, with these experts. The last token has none: any will do."""
    full = np.concatenate([routes, np.tile(np.arange(2, dtype=routes.dtype), (len(ids) - len(routes), 2, 1))])
    with policy.generating() as model, forced(policy, full):
        logits = model(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0].float()
    return torch.log_softmax(logits[:-1], -1).gather(1, torch.tensor(list(ids[1:]))[:, None])[:, 0]


@pytest.fixture(scope="module")
def requests() -> list[Request]:
    return [Request(ids, 100 + key, 3) for key, ids in enumerate(prompts(4, longest=14))]


@pytest.fixture(scope="module")
def made(policy: Policy, folder: Path, requests: list[Request]) -> list[Completion]:
    return run(native(policy, folder), requests, SAMPLING)


def own_routes(policy: Policy, ids: Sequence[int]) -> np.ndarray:
    """The experts that the trainer's pass over one sequence chooses."""
    routing = policy.decoder.install_routing("model")
    routing.log = []
    with torch.no_grad():
        policy(micro_batch([Example(list(ids), [1] * len(ids), Origin("rows", 0))], packed=True, pad_id=0))
    found, routing.log = routing.log[0].numpy(), None
    return found


def same_choices(one: np.ndarray, other: np.ndarray) -> bool:
    return bool((np.sort(one, -1) == np.sort(other, -1)).all())


def test_the_engine_returns_the_experts_of_every_token_but_the_last(
    policy: Policy, requests: list[Request], made: list[Completion]
) -> None:
    for one in made:
        ids = [*requests[one.request].ids, *one.ids]
        assert one.routes is not None
        assert one.routes.dtype == np.uint8
        assert one.routes.shape == (len(ids) - 1, 2, 2)
        assert same_choices(one.routes, own_routes(policy, ids)[:-1])
    different = {tuple(route.flatten()) for one in made if one.routes is not None for route in one.routes}
    assert len(different) > 40, "the routers hardly choose, so a wrong route would not be noticed"


def test_without_the_key_nothing_is_recorded(policy: Policy, folder: Path, requests: list[Request]) -> None:
    engine = native(policy, folder)
    plain = run(engine, requests, replace(SAMPLING, routes=False))
    assert all(one.routes is None for one in plain)


@pytest.mark.parametrize(
    "settings",
    [{"max_sequences": 3}, {"prefill_tokens": 5}, {"max_sequences": 5, "block_tokens": 4}, {"block_tokens": 1}],
    ids=str,
)
def test_schedules_and_preemption_return_the_same_experts(
    policy: Policy, folder: Path, requests: list[Request], made: list[Completion], settings: dict[str, Any]
) -> None:
    engine = native(policy, folder, **settings)
    if "max_sequences" in settings and "block_tokens" in settings:
        # Room for two sequences, so that younger ones are preempted.
        policy.decoder.install_routing("model")
        engine._routes = True
        engine.settings = engine.settings.model_copy(update={"cache_gb": 11 * engine.block_bytes() / 1e9})
    found = run(engine, requests, SAMPLING)
    if engine.settings.cache_gb is not None:
        assert engine.preempted > 0
    for one, other in zip(found, made, strict=True):
        assert one.ids == other.ids
        assert one.routes is not None
        assert other.routes is not None
        assert same_choices(one.routes, other.routes)


def test_a_paused_response_keeps_the_experts_of_its_first_weights(
    folder: Path, requests: list[Request], made: list[Completion]
) -> None:
    """New weights arrive in a pause. Tokens before it keep the experts with which they were sampled."""
    policy = sharpened(load(folder), 1)
    engine, rounds = native(policy, folder), itertools.count(1)
    engine.pause = lambda: next(rounds) % 6 == 0
    paused = {one.sample: one for one in engine.generate(requests[:1], SAMPLING) if one.stop == PAUSED}
    assert paused
    sharpened(policy, 2)
    engine.pause = lambda: False
    begun = {n: PartialResponse(one.ids, one.logprobs, one.routes) for n, one in paused.items()}
    for one in run(engine, [replace(requests[0], partial_responses=begun)], SAMPLING):
        before, ids = paused[one.sample].routes, [*requests[0].ids, *one.ids]
        assert before is not None
        assert one.routes is not None
        assert (one.routes[: len(before)] == before).all()
        assert len(one.routes) == len(ids) - 1
        assert same_choices(one.routes[len(before) :], own_routes(policy, ids)[len(before) : -1])
        assert not same_choices(before, own_routes(policy, ids)[: len(before)])


def rollouts(requests: list[Request], made: list[Completion]) -> list[Rollout]:
    prompt = [Prompt(question(number), request.ids) for number, request in enumerate(requests)]
    return [
        Rollout(prompt[c.request], c.request, c.sample, c.ids, c.logprobs, c.stop, "", Score(1.0), routes=c.routes)
        for c in made
    ]


def shifted_token(routes: np.ndarray, prompt: int) -> np.ndarray:
    return np.roll(routes, 1, 0)


def shifted_layer(routes: np.ndarray, prompt: int) -> np.ndarray:
    return np.roll(routes, 1, 1)


def without_prompt(routes: np.ndarray, prompt: int) -> np.ndarray:
    """The routers then choose for the tokens of the prompt."""
    dropped = routes.astype(np.int16)
    dropped[: prompt - 1] = -1
    return dropped


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize(
    "wrong", [None, shifted_token, shifted_layer, without_prompt], ids=["right", "token", "layer", "prompt"]
)
def test_the_trainer_uses_the_recorded_experts(
    folder: Path, requests: list[Request], made: list[Completion], packed: bool, wrong: Any
) -> None:
    """The routers of the trainer have other weights than those of the engine, as under staleness."""
    trained = sharpened(load(folder), 5)
    trained.decoder.install_routing("model")
    responses = rollouts(requests, made)
    given = responses if wrong is None else [replace(r, routes=wrong(r.routes, len(r.prompt.ids))) for r in responses]
    examples = [one.sequences[0] for one in given]
    shares = [0] * len(examples)
    for first in range(0, len(examples), 3):
        shared = common_prompt(examples[first : first + 3])
        shares[first + 1 : first + 3] = [shared, shared]
    if packed and wrong is None:
        assert max(shares) > 0
    with torch.no_grad():
        found = trained(micro_batch(examples, packed=packed, pad_id=0, shares=shares)).logprobs_K
    expected = torch.cat(
        [
            by_hand(trained, example.ids, one.routes)[len(one.prompt.ids) - 1 :]  # type: ignore[arg-type]
            for one, example in zip(responses, examples, strict=True)
        ]
    )
    off = float((found - expected).abs().max())
    assert (off < 2e-5) == (wrong is None), off


def test_responses_share_only_a_prompt_with_equal_experts(requests: list[Request], made: list[Completion]) -> None:
    """Two policy versions answered one prompt: the hidden states of the prompt differ after the first other expert."""
    group = [one.sequences[0] for one in rollouts(requests, made)[:3]]
    prompt = len(requests[0].ids)
    assert common_prompt(group) == prompt
    assert group[1].routes is not None
    other = group[1].routes.copy()
    other[prompt - 2, 1] = 5 - other[prompt - 2, 1]
    assert common_prompt([group[0], replace(group[1], routes=other), group[2]]) == prompt - 2


def test_the_gradient_reaches_the_router_through_the_current_gates(folder: Path, made: list[Completion]) -> None:
    trained = sharpened(load(folder), 5)
    trained.decoder.install_routing("model")
    ids = list(range(20, 30))
    routes = np.tile(np.array([[4, 1], [0, 3]], dtype=np.uint8), (9, 1, 1))
    example = Example(ids, [0] + [1] * 9, Origin("rows", 0), routes=routes)
    trained(micro_batch([example], packed=True, pad_id=0)).logprobs_K.sum().backward()
    replayed = [router.weight.grad.clone() for router in routers(trained)]
    trained.zero_grad()
    with trained.generating() as model, forced(trained, np.concatenate([routes, routes[:1]])):
        logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits
        torch.log_softmax(logits[0, :-1].float(), -1).gather(1, torch.tensor(ids[1:])[:, None]).sum().backward()
    for one, router in zip(replayed, routers(trained), strict=True):
        torch.testing.assert_close(one, router.weight.grad, rtol=1e-4, atol=1e-6)
        chosen = one.abs().sum(1) > 1e-5 * one.abs().sum()  # others have only rounding
        assert chosen.sum() == 2, "only the gates of the replayed experts have a gradient"


def test_flips_count_the_choices_that_differ(folder: Path) -> None:
    trained = sharpened(load(folder), 5)
    routing = trained.decoder.install_routing("model")
    ids = list(range(30, 40))
    own = own_routes(trained, ids).astype(np.int16)
    changed = own.copy()
    # Three tokens of the first layer with one other expert, one token of the second layer with two others.
    for token in (0, 4, 8):
        changed[token, 0, 1] = next(e for e in range(6) if e not in own[token, 0])
    changed[5, 1] = [e for e in range(6) if e not in own[5, 1]][:2]
    swapped = changed[..., ::-1]  # the order of the experts of a token is no difference
    # The last token has no recorded experts, and does not count.
    example = Example(ids, [0] + [1] * 9, Origin("rows", 0), routes=np.ascontiguousarray(swapped[:9]))
    with torch.no_grad():
        trained(micro_batch([example], packed=False, pad_id=0))
    flips, choices = routing.take_flips() or ([], 0)
    # A flip in the first layer changes the inputs of the second one, so only the first layer's count is exact.
    assert (flips[0], choices) == (3, 18)
    assert flips[1] >= 2
    assert routing.take_flips() is None


_SHARED = {**EXPERTS, "shared_expert_intermediate_size": 16}
_LOCAL = {"num_local_experts": 6, "num_experts_per_tok": 2}
_GROUPED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 0,
    "n_shared_experts": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 1.7,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe": ("qwen2_moe", _SHARED),
    "qwen2_moe_normed": ("qwen2_moe", {**_SHARED, "norm_topk_prob": True}),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": True}),
    "qwen3_moe_raw": ("qwen3_moe", {**EXPERTS, "norm_topk_prob": False}),
    "qwen3_next": ("qwen3_next", _SHARED),
    "qwen3_5_moe": ("qwen3_5_moe_text", _SHARED),
    "olmoe": ("olmoe", {"num_experts": 6, "num_experts_per_tok": 2}),
    "mixtral": ("mixtral", _LOCAL),
    "granitemoe": ("granitemoe", _LOCAL),
    "gpt_oss": ("gpt_oss", _LOCAL),
    "deepseek_v2": ("deepseek_v2", {**_GROUPED, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": ("deepseek_v3", _GROUPED),
    "glm4_moe": ("glm4_moe", _GROUPED),
}


def config_of(family: str) -> Any:
    kind, sizes = FAMILIES[family]
    return AutoConfig.for_model(kind, **SIZES, **sizes)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_gates_of_a_family_are_those_of_its_own_router(family: str) -> None:
    """The replay of a router's own choices is its own output, bit by bit; and other experts get gates that the router
    itself would give them, if its selection bias chose them."""
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(config_of(family))
    layers = decoder_layers(model)
    routing = Routing(layers, family, "model.path")
    assert routing.layers == 2
    router: Any = routers_of(layers)[1][0]
    with torch.no_grad():
        for weight in (*router.parameters(), *router.buffers()):
            weight.copy_(torch.randn(weight.shape) * 0.5)
    hidden = torch.randn(40, SIZES["hidden_size"])
    logits, weights, chosen = router(hidden)
    given = torch.full((40, 2, routing.top_k), -1)
    given[:, 1] = chosen
    given[::3] = -1
    routing.begin(given.to(torch.int16))
    again = router(hidden)
    for one, other in zip(again, (logits, weights, chosen), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    # Other experts: the expected gates come from a router whose inputs are mirrored so that it chooses them.
    other = torch.stack([torch.randperm(routing.experts)[: routing.top_k] for _ in range(40)])
    given[:, 1] = other
    routing.begin(given.to(torch.int16))
    found = router(hidden)
    assert (found[2] == other).all()
    torch.testing.assert_close(found[1], expected_gates(family, router, logits, other), rtol=1e-6, atol=1e-7)


def test_a_router_with_its_output_in_another_order_is_refused() -> None:
    """Some versions of transformers return the chosen experts of Granite first."""
    layers = decoder_layers(AutoModelForCausalLM.from_config(config_of("granitemoe")))
    Routing(layers, "granitemoe", "model.path").begin(None)
    router: Any = routers_of(layers)[0][0]
    hidden, forward = torch.randn(4, SIZES["hidden_size"]), router.forward
    swapped = patch.object(router, "forward", lambda inputs: forward(inputs)[::-1])
    with swapped, pytest.raises(Refusal, match=r"GraniteMoeTopKRouter in another order\n.*transformers>="):
        router(hidden)


def expected_gates(family: str, router: Any, logits: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """The published formulas, expert by expert."""
    rows = []
    for token, experts in zip(logits.tolist(), chosen.tolist(), strict=True):
        picked = [token[expert] for expert in experts]
        if family in ("deepseek_v3", "glm4_moe"):
            odds = [1 / (1 + np.exp(-one)) for one in picked]
            rows.append([router.routed_scaling_factor * one / sum(odds) for one in odds])
        elif family in ("deepseek_v2", "qwen2_moe", "qwen3_moe_raw", "olmoe"):
            total, scale = sum(np.exp(one) for one in token), getattr(router, "routed_scaling_factor", 1.0)
            rows.append([scale * np.exp(one) / total for one in picked])
        else:
            rows.append([np.exp(one) / sum(np.exp(each) for each in picked) for one in picked])
    return torch.tensor(rows, dtype=torch.float32)


def test_every_known_router_has_a_family_test() -> None:
    tested = {type(routers_of(decoder_layers(model_on_meta(config_of(one))))[0][0]).__name__ for one in FAMILIES}
    # The text model of Qwen3-VL-MoE has the router of Qwen3-MoE with normalised gates.
    assert tested == set(ROUTERS) - {"Qwen3VLMoeTextTopKRouter"}


def test_models_without_known_routers_are_refused(tiny_folder: Path) -> None:
    dense = model_on_meta(load_config(str(tiny_folder)))
    with refuses("algorithm.routing_replay", "unsupported-model", "Qwen2ForCausalLM has no experts"):
        refuse_unknown_routers(decoder_layers(dense), type(dense).__name__, "model.path m")
    other = model_on_meta(AutoConfig.for_model("phimoe", **SIZES, **_LOCAL))
    with refuses("algorithm.routing_replay", "unsupported-model", "PhimoeTopKRouter"):
        refuse_unknown_routers(decoder_layers(other), type(other).__name__, "model.path m")


# vLLM: its answers count all decoder layers, with the experts of prompt and response.


def test_the_answers_of_vllm_have_the_experts_of_the_layers_with_routers(tmp_path: Path, tiny_folder: Path) -> None:
    config = Qwen3MoeConfig(**{**SIZES, "num_hidden_layers": 3}, **EXPERTS, mlp_only_layers=[1])
    policy = load(write_model(tmp_path / "model", config, tiny_folder))
    routing = policy.decoder.install_routing("model")
    assert (routing.all_layers, routing.layer_numbers) == (3, [0, 2])
    answered = np.random.default_rng(0).integers(0, 6, (9, 3, 2)).astype(np.uint8)
    body = {
        "token_ids": [30, 31, 32, 33],
        "logprobs": [-1.0] * 4,
        "finish_reason": "length",
        "stop_reason": None,
        "versions": None,
        "prompt": prompt_digest([5, 6, 7, 8, 9, 10]),
        "routes": base64.b64encode(answered.astype("<i2").tobytes()).decode(),
        "route_shape": [9, 3, 2],
    }
    wanted = WantedSample([5, 6, 7, 8, 9, 10], SAMPLING, 4, 0)
    answer = Vllm().read(body, wanted)
    assert answer.routes is not None
    engine = ServerEngine.__new__(ServerEngine)
    engine.server_adapter, engine.manager = Vllm(), SimpleNamespace(policy=policy)  # type: ignore[assignment]
    found = engine._routes(answer.routes, 9)
    assert (found == answered[:, [0, 2]]).all()
    assert found.dtype == np.uint8
    with refuses("algorithm.routing_replay", "wrong-response", "(9, 3, 2)"):
        engine._routes(answer.routes, 10)
    with refuses("algorithm.routing_replay", "wrong-response"):
        engine._routes(answer.routes + 6, 9)
    del body["routes"]
    with pytest.raises(ServerFailed, match="no experts"):
        Vllm().read(body, wanted)


def test_a_run_asks_vllm_for_experts_only_if_it_replays_them() -> None:
    flag = "--enable-return-routed-experts"
    assert flag not in Vllm().flags(ServerNeeds("cuda"))
    assert {flag, "--enable-prefix-caching"} <= set(Vllm().flags(ServerNeeds("cuda", routes=True)))


def test_the_trace_of_a_tape_replays_every_token() -> None:
    """The last tokens, which predict nothing, have the experts of the token before: a free choice could flip."""
    routes = np.array([[[1, 2]], [[3, 4]]], dtype=np.uint8)
    example = Example([5, 6, 7, 8], [0, 1, 1, 0], Origin("rows", 0), routes=routes)
    [traced] = trace_examples([example], 1)
    assert traced.routes is not None
    assert traced.routes.tolist() == [[[1, 2]], [[3, 4]], [[3, 4]], [[3, 4]]]


@pytest.mark.parametrize("dtype", [np.uint8, np.int16])
def test_a_tape_keeps_the_experts(requests: list[Request], made: list[Completion], tmp_path: Path, dtype: Any) -> None:
    responses = [replace(one, routes=one.routes.astype(dtype)) for one in rollouts(requests, made)]  # type: ignore[union-attr]
    # A failed response has no tokens, and a trajectory with two rows has the experts of each.
    failed = replace(responses[0], sample=8, ids=[], logprobs=[], loss_mask=[], routes=None)
    first, second = responses[1], responses[2]
    parts = [TrajectoryRow(one.ids, list(one.loss_mask), one.logprobs, one.routes) for one in (first, second)]
    ids, logprobs = parts[0].ids + parts[1].ids, parts[0].logprobs + parts[1].logprobs
    several = replace(first, sample=9, ids=ids, logprobs=logprobs, loss_mask=[], rows=tuple(parts), routes=None)
    tape = TapeFolder(tmp_path)
    every = [*responses, failed, several]
    tape.write_table(tape.rollouts_file(1), rollout_rows(every))
    back = rollouts_of(tape.read_table(tape.rollouts_file(1)), TapeImages(tape.path))
    for one, other in zip(back, every, strict=True):
        for found, expected in zip(one.sequences, other.sequences, strict=True):
            assert (found.routes is None) == (expected.routes is None)
            if found.routes is not None and expected.routes is not None:
                assert found.routes.dtype == dtype
                assert (found.routes == expected.routes).all()
    examples = [sequence for one in responses for sequence in one.sequences]
    for fed, example in zip(fed_examples(fed_tensors(examples)), examples, strict=True):
        assert fed.routes is not None
        assert (fed.routes == example.routes).all()
