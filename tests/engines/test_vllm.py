"""vLLM's answers held against the built-in engine and the trainer, and weights that are proven to have arrived."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine_replay import DATA, plain, recorded
from engine_session import (
    GREEDY,
    SAMPLED,
    adapted,
    load,
    move,
    opened,
    requests,
    run,
    scored,
    session,
    slept,
    sync,
)
from lockstep.device.cpu import Cpu
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.model.policy import Policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.servers.vllm import _adapters
from lockstep.types import Completion, Sampling

# Log-probs of fp32 by other kernels.
ROUNDING = 1e-4


def native(policy: Policy, model: Path) -> NativeEngine:
    return NativeEngine(policy, Cpu(), RolloutSettings(), load_tokenizer(str(model)).decode)


def assert_same_tokens(theirs: list[Completion], ours: list[Completion]) -> None:
    assert [(c.ids, c.stop) for c in theirs] == [(c.ids, c.stop) for c in ours]
    for one, other in zip(theirs, ours, strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), torch.tensor(other.logprobs), rtol=0, atol=ROUNDING)


def test_greedy_tokens_are_those_of_the_built_in_engine(server, embedded: Path, tmp_path: Path) -> None:
    policy = load(embedded)
    move(policy)
    with opened(server.url, policy, embedded, tmp_path) as engine:
        sync(engine)
        longer = replace(GREEDY, max_tokens=40)
        assert_same_tokens(run(engine, requests(1), longer), run(native(policy, embedded), requests(1), longer))


def test_sampled_log_probs_are_the_trainers(server, embedded: Path, tmp_path: Path) -> None:
    policy = load(embedded)
    move(policy)
    with opened(server.url, policy, embedded, tmp_path) as engine:
        sync(engine, 7)
        made = run(engine, requests(8), SAMPLED)
        again = run(engine, requests(8), SAMPLED)
    assert len({tuple(one.ids) for one in made if one.request == 0}) == 8  # n > 1: samples of their own
    assert [one.ids for one in made] == [one.ids for one in again]  # seeds are functions of what a sample is
    assert {one.stop for one in made} == {"token", "length"}
    assert all(one.ids[-1] in SAMPLED.stop_ids for one in made if one.stop == "token")
    assert all(len(one.ids) == SAMPLED.max_tokens for one in made if one.stop == "length")
    assert all(list(one.versions) == [7] * len(one.ids) for one in made)
    for one, ours in zip(made, scored(policy, made, SAMPLED.temperature), strict=True):
        torch.testing.assert_close(torch.tensor(one.logprobs), ours, rtol=0, atol=ROUNDING)


def test_a_truncated_distribution_is_scored_as_the_trainer_truncates(server, embedded: Path, tmp_path: Path) -> None:
    policy = load(embedded)
    move(policy)
    how = {"top_k": 5, "top_p": 0.9, "truncated_sampling": "mask", "temperature": 1.3}
    with opened(server.url, policy, embedded, tmp_path, **how) as engine:
        sync(engine)  # refused where the two differ
        sampling = Sampling(max_tokens=8, temperature=1.3, top_k=5, top_p=0.9, seed=1, score_truncated=True)
        made = run(engine, requests(4), sampling)
    # Renormalised over at most five tokens: above the log-probs of the whole distribution.
    whole = scored(policy, made, 1.3)
    assert all((torch.tensor(one.logprobs) >= ours - ROUNDING).all() for one, ours in zip(made, whole, strict=True))
    assert max((torch.tensor(one.logprobs) - ours).max() for one, ours in zip(made, whole, strict=True)) > 1


def test_a_stop_text_ends_a_response(server, embedded: Path, tmp_path: Path) -> None:
    policy = load(embedded)
    with opened(server.url, policy, embedded, tmp_path) as engine:
        sync(engine)
        whole = run(engine, requests(1), GREEDY)
        text = engine.decode(whole[0].ids[2:4])
        how = replace(GREEDY, stop_strings=(text,))
        cut = run(engine, requests(1), how)
    assert_same_tokens(cut, run(native(policy, embedded), requests(1), how))
    assert cut[0].stop == "string"
    assert len(cut[0].ids) < len(whole[0].ids)


def test_what_the_server_refuses_ends_the_run(server, embedded: Path, tmp_path: Path) -> None:
    """It is not taken for a server that is lost, which would be asked again."""
    with opened(server.url, load(embedded), embedded, tmp_path) as engine:
        sync(engine)
        with pytest.raises(Refusal, match=r"answered 400: .*temperature must be non-negative"):
            run(engine, requests(1), replace(SAMPLED, temperature=-1.0))
        assert len(run(engine, requests(1), SAMPLED)) == 3


def test_ten_pushes_are_each_proven(server, embedded: Path, tmp_path: Path) -> None:
    policy = load(embedded)
    with opened(server.url, policy, embedded, tmp_path) as engine:
        for update in range(10):
            # As small as real updates are, and as large.
            move(policy, by=10 ** -(1.5 + update % 5), seed=update)
            sync(engine, update)
            made = run(engine, requests(1), GREEDY)
            assert_same_tokens(made, run(native(policy, embedded), requests(1), GREEDY))
            assert {version for one in made for version in one.versions} == {update}
        pushes = engine.weight_sync.pushes
        sync(engine, 10)
        assert engine.weight_sync.pushes == pushes  # nothing has changed


def test_an_adapter_is_pushed_alone(server, embedded: Path, tmp_path: Path) -> None:
    policy = load(embedded, lora=8)
    # The server's base must be the run's: its last weights are another test's.
    with opened(server.url, load(embedded), embedded, tmp_path) as engine:
        sync(engine)
    kept: list[dict] = []
    with recorded(kept), opened(server.url, policy, embedded, tmp_path) as engine:
        sync(engine)
        first = run(engine, requests(1), GREEDY)
        for update in (1, 2):
            move(policy, by=0.1, seed=update)
            sync(engine, update)
            made = run(engine, requests(2), SAMPLED)
            for one, ours in zip(made, scored(policy, made, SAMPLED.temperature), strict=True):
                torch.testing.assert_close(torch.tensor(one.logprobs), ours, rtol=0, atol=ROUNDING)
        assert run(engine, requests(1), GREEDY) != first
    # The first is pushed twice.
    assert sum(one["path"] == "/v1/load_lora_adapter" for one in kept) == 4
    assert {one["body"]["method"] for one in kept if one["path"] == "/collective_rpc"} == {
        "lockstep_facts",
        "lockstep_version",
    }


@pytest.fixture(scope="module")
def sized_as_smollm2(tmp_path_factory: pytest.TempPathFactory, embedded: Path) -> Path:
    """134,515,008 random weights, a tied head among them, with the embedded model's tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "vocab_size": 49152}
    heads = {"num_attention_heads": 9, "num_key_value_heads": 3, "rope_theta": 100000.0, "rms_norm_eps": 1e-5}
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("smollm2") / "model"
    model = LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True, max_position_embeddings=2048))
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    model.save_pretrained(folder)
    load_tokenizer(str(embedded)).save_pretrained(folder)
    return folder


def test_a_model_of_smollm2s_size(start, sized_as_smollm2: Path, tmp_path: Path) -> None:
    server = start(sized_as_smollm2)
    policy = load(sized_as_smollm2)
    move(policy, by=0.005)
    server.wait()
    with opened(server.url, policy, sized_as_smollm2, tmp_path) as engine:
        sync(engine)
        theirs = run(engine, requests(1), GREEDY)
        assert_same_tokens(theirs, run(native(policy, sized_as_smollm2), requests(1), GREEDY))
        move(policy, by=1e-4, seed=2)
        sync(engine, 1)
        print(f"sync of {engine.policy.causal_lm.num_parameters():,} weights: {engine.sync_seconds:.2f} s")
    server.process.close()


@pytest.mark.parametrize(("name", "work"), [("vllm", session), ("vllm-lora", adapted), ("vllm-sleep", slept)])
def test_what_was_recorded_is_what_the_server_says(server, embedded: Path, tmp_path: Path, name: str, work) -> None:
    """`LOCKSTEP_RECORD=1` writes it anew."""
    if name == "vllm-lora":
        # The server's base must be the run's, and its adapters none: those that it has are another test's.
        with opened(server.url, load(embedded), embedded, tmp_path) as engine:
            sync(engine)
            client = engine.fleet.servers[0].client
            for adapter in _adapters(client):
                client.post("/v1/unload_lora_adapter", {"lora_name": adapter})
    kept: list[dict] = []
    policy = load(embedded, lora=8 if name == "vllm-lora" else None)
    with recorded(kept), opened(server.url, policy, embedded, tmp_path, sleep=name == "vllm-sleep") as engine:
        work(engine)
    file = DATA / f"{name}.json"
    if os.environ.get("LOCKSTEP_RECORD"):
        lines = [json.dumps(one, sort_keys=True) for one in map(without_times, kept)]
        file.write_text("[\n" + ",\n".join(lines) + "\n]\n", encoding="utf-8")
    before = by_request(json.loads(file.read_text(encoding="utf-8")))
    now = by_request(map(without_times, kept))
    assert now.keys() == before.keys()
    for key, answers in now.items():
        # A server may be asked for its health several times, until it is up.
        for one, other in zip(answers, before[key], strict="/health" not in key):
            assert_alike(one, other, key)


def without_times(one: dict) -> dict:
    """What no two answers have in common."""
    answer = one["answer"]
    if isinstance(answer, dict):
        answer = {name: value for name, value in answer.items() if name not in ("request_id", "created", "usage")}
    if one["path"] == "/v1/models":
        answer = {"data": [{name: model[name] for name in ("id", "parent")} for model in answer["data"]]}
    return {**one, "answer": answer}


def by_request(kept) -> dict[str, list]:
    found: dict[str, list] = {}
    for one in kept:
        found.setdefault(plain([one["method"], one["path"], one["body"]]), []).append(one["answer"])
    return found


def assert_alike(one, other, where: str) -> None:
    """Equal, but for the last digits of log-probs."""
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_alike(one[key], other[key], f"{where} {key}")
    elif isinstance(one, list):
        assert len(one) == len(other), where
        for left, right in zip(one, other, strict=True):
            assert_alike(left, right, where)
    elif isinstance(one, float):
        assert one == pytest.approx(other, abs=ROUNDING), where
    else:
        assert one == other, where
