"""Weight pushes against a recorded vLLM server: shared memory, the check of truncated sampling, timings."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from engine_replay import Replay, Unrecorded, replaying
from engine_session import load, opened, sync
from lockstep.errors import Refusal
from lockstep.model.tiny import write_tiny
from lockstep.parallel.world import World
from lockstep.rollout.servers.adapter import prompt_digest
from lockstep.rollout.servers.vllm import SAMPLES
from lockstep.rollout.servers.weight_check import TEMPERATURE, most_of
from lockstep.rollout.servers.weight_source import ScoreAnswers


@pytest.fixture(scope="module")
def embedded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedded") / "model"
    write_tiny(folder)
    return folder


def calls(server: Replay, method: str) -> int:
    return sum(body is not None and body.get("method") == method for _, body in server.asked)


def greedy(folder: Path, *, truncated: bool) -> Unrecorded:
    """A server with `top_k` 1: the kept token has probability 1. `truncated=False` reports its probability among all
    tokens, as an engine does that truncates after it computed the log-probs."""

    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=False, attn_implementation="eager").eval()

    @torch.no_grad()
    def answer(path: str, body: Any) -> Any:
        if path != SAMPLES:
            return None
        ids, logprobs = list(body["token_ids"]), []
        assert body["sampling_params"]["top_k"] == 1
        for _ in range(body["sampling_params"]["max_tokens"]):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1]
            scores = (logits / body["sampling_params"]["temperature"]).log_softmax(-1)
            ids.append(int(scores.argmax()))
            logprobs.append(0.0 if truncated else float(scores.max()))
        new = ids[len(body["token_ids"]) :]
        return {
            "prompt": prompt_digest(body["token_ids"]),
            "token_ids": new,
            "logprobs": logprobs,
            "finish_reason": "length",
            "stop_reason": None,
            "versions": [],
        }

    return answer


def test_an_engine_that_truncates_like_the_trainer_passes(embedded: Path, tmp_path: Path) -> None:
    with (
        replaying("vllm", unrecorded=greedy(embedded, truncated=True)) as server,
        opened(server.address, load(embedded), embedded, tmp_path, top_k=1, truncated_sampling="mask") as engine,
    ):
        sync(engine)
        truncated = [
            body for path, body in server.asked if path == SAMPLES and body and body["sampling_params"]["top_k"] == 1
        ]
        assert len(truncated) > 0


@pytest.mark.slow
def test_an_engine_that_truncates_differently_is_refused(embedded: Path, tmp_path: Path) -> None:
    with (
        replaying("vllm", unrecorded=greedy(embedded, truncated=False)) as server,
        opened(server.address, load(embedded), embedded, tmp_path, top_k=1, truncated_sampling="mask") as engine,
        pytest.raises(Refusal) as caught,
    ):
        sync(engine)
    assert "[truncated-sampling]" in str(caught.value)
    assert "top_k 1" in str(caught.value)


@pytest.mark.slow
def test_a_server_that_is_lost_in_the_truncation_check_is_checked_again(embedded: Path, tmp_path: Path) -> None:
    """The bounds of the weight check are known by then, so the check must not depend on them being unknown."""
    answers, lost = greedy(embedded, truncated=False), []

    def unrecorded(path: str, body: Any) -> Any:
        if path == SAMPLES and not lost:
            lost.append(True)
            raise ConnectionError("cuts the connection")
        return answers(path, body)

    with (
        replaying("vllm", unrecorded=unrecorded) as server,
        opened(server.address, load(embedded), embedded, tmp_path, top_k=1, truncated_sampling="mask") as engine,
        pytest.raises(Refusal, match="truncated-sampling"),
    ):
        sync(engine)
    assert lost


def noisy(folder: Path) -> Path:
    """A model with so large activations that bf16 rounds its log-probs by more than the bounds of the weight check."""
    file = folder / "model.safetensors"
    factors = {"model.norm.weight": 3.0, "layernorm.weight": 2.0}
    weights = load_file(file)
    for name, weight in weights.items():
        weight *= next((factor for end, factor in factors.items() if name.endswith(end)), 1.0)
    save_file(weights, file, {"format": "pt"})
    return folder


def in_bf16(folder: Path, *, stronger: float = 1.0, token: int | None = None) -> Unrecorded:
    """A server that computes in bf16 by the attention of transformers, with other weights if `stronger` is not 1, or
    for one token of the vocabulary."""
    model = AutoModelForCausalLM.from_pretrained(
        folder, trust_remote_code=False, attn_implementation="eager", dtype=torch.bfloat16
    ).eval()
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.mul_(stronger)
        if token is not None:
            row = model.model.embed_tokens.weight[token]
            row += torch.randn(row.shape, generator=torch.Generator().manual_seed(0)).to(row) * row.std() * 0.3

    @cache  # each check has the same prompts
    @torch.no_grad()
    def sampled(prompt: tuple[int, ...], seed: int, count: int, temperature: float) -> tuple[list[int], list[float]]:
        ids, logprobs = list(prompt), []
        generator = torch.Generator().manual_seed(seed)
        for _ in range(count):
            logits = model(input_ids=torch.tensor([ids])).logits[0, -1].float()
            scores = (logits / temperature).log_softmax(-1)
            ids.append(int(torch.multinomial(scores.exp(), 1, generator=generator)))
            logprobs.append(float(scores[ids[-1]]))
        return ids[len(prompt) :], logprobs

    def answer(path: str, body: Any) -> Any:
        if path != SAMPLES:
            return None
        sampling = body["sampling_params"]
        ids, logprobs = sampled(
            tuple(body["token_ids"]), sampling["seed"], sampling["max_tokens"], sampling["temperature"]
        )
        return {
            "prompt": prompt_digest(body["token_ids"]),
            "token_ids": ids,
            "logprobs": logprobs,
            "finish_reason": "length",
            "stop_reason": None,
            "versions": [],
        }

    return answer


@pytest.mark.daily("1.0-None", "1.0-2")
@pytest.mark.parametrize(("stronger", "token"), [(1.0, None), (1.1, None), (1.0, 2)])
def test_large_rounding_errors_are_not_taken_for_other_weights(
    stronger: float, token: int | None, tmp_path: Path
) -> None:
    """In bf16 the engine and the trainer differ by more than the bounds. The trainer's log-probs in fp32 show that the
    engine is as close to them as the trainer. An engine whose attention output is 10 % larger, or that has another row
    in its embedding, is not."""
    write_tiny(tmp_path / "model")
    folder = noisy(tmp_path / "model")
    policy, told = load(folder, dtype="bf16"), list[Any]()
    before = {name: parameter.data_ptr() for name, parameter in policy.named_parameters()}

    def as_bf16(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        return 200, json.loads(json.dumps(answer).replace("float32", "bfloat16"))

    with replaying("vllm", as_bf16, unrecorded=in_bf16(folder, stronger=stronger, token=token)) as server:
        for key in [key for key in server.answers if SAMPLES in key and f'"temperature": {TEMPERATURE}' in key]:
            del server.answers[key]
        with opened(server.address, policy, folder, tmp_path, Rank(0, 2, told=told)) as engine:
            if stronger == 1.0 and token is None:
                sync(engine)
                check = engine.weight_sync.checked[server.address]
                # The other ranks compute the same passes: they would wait for each other otherwise.
                assert [one.fp32 for one in told if isinstance(one, ScoreAnswers)] == [False, False, True] * 2
                passes = [engine.weight_sync.follow(one) for one in told if isinstance(one, ScoreAnswers)]
                assert len(passes) == 6
                assert check.off.mean > most_of(torch.bfloat16, None).mean
                # More tokens decide, because the errors of a few have too much noise.
                assert check.larger is not None
                assert check.larger.exact_K is not None
                assert len(check.larger.ids) == 32
                engine_error, trainer_error = check.larger.rounding_errors(check.larger.exact_K)
                assert 0.8 < engine_error / trainer_error < 1.25
                # A restarted server repeats the log-probs of this check.
                (lost,) = engine.fleet.servers
                restarted(server)
                lost.up = False
                engine.weight_sync.bring_up(lost)
                assert lost.up
            else:
                with pytest.raises(Refusal, match=r"(?s)\[weights-differ\].* with fp32 weights"):
                    sync(engine)
    assert {name: parameter.data_ptr() for name, parameter in policy.named_parameters()} == before
    assert {parameter.dtype for parameter in policy.parameters()} == {torch.bfloat16}


def takes(answer: dict[str, str]) -> Unrecorded:
    def unrecorded(path: str, body: Any) -> Any:
        return {"results": [answer]} if body is not None and body.get("method") == "lockstep_take" else None

    return unrecorded


def test_weights_in_shared_memory_are_not_written_to_files(embedded: Path, tmp_path: Path) -> None:
    with (
        replaying("vllm", unrecorded=takes({})) as server,
        opened(server.address, load(embedded), embedded, tmp_path, weight_sync="memory") as engine,
    ):
        sync(engine)
        assert engine.weight_sync.transport == "memory"
        assert (calls(server, "lockstep_take"), calls(server, "lockstep_load")) == (2, 0)


def test_memory_that_the_server_cannot_map_is_refused(embedded: Path, tmp_path: Path) -> None:
    with (
        replaying("vllm", unrecorded=takes({"unopened": "another machine"})) as server,
        opened(server.address, load(embedded), embedded, tmp_path, weight_sync="memory") as engine,
        pytest.raises(Refusal) as caught,
    ):
        sync(engine)
    assert "[weight-sync-failed]" in str(caught.value)
    assert "another machine" in str(caught.value)
    assert calls(server, "lockstep_load") == 0


def test_an_answer_of_other_weights_to_the_weight_check_is_refused(embedded: Path, tmp_path: Path) -> None:
    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        return 200, {**answer, "versions": ["default"]} if path == SAMPLES and body else answer

    with (
        replaying("vllm", fault) as server,
        opened(server.address, load(embedded), embedded, tmp_path) as engine,
        pytest.raises(Refusal) as caught,
    ):
        sync(engine)
    assert "[weight-sync-failed]" in str(caught.value)
    assert "version default" in str(caught.value)


@dataclass(frozen=True)
class Rank(World):
    """Gets from rank 0 what `told` lists."""

    told: list[Any] = field(default_factory=list)

    def gather(self, value: Any) -> list[Any]:
        if self.rank == 0:
            self.told.append(value)
        return [value, None] if self.rank == 0 else [self.told.pop(0), value]


def test_only_rank_0_sends_weights_to_a_server_that_responds_again(embedded: Path, tmp_path: Path) -> None:
    told: list[Any] = []
    with replaying("vllm") as server:
        with opened(server.address, load(embedded), embedded, tmp_path, Rank(0, 2, told=told)) as engine:
            sync(engine)
        sent = calls(server, "lockstep_load")
        with opened(server.address, load(embedded), embedded, tmp_path, Rank(1, 2, told=told)) as engine:
            sync(engine)
            (lost,) = engine.fleet.servers
            lost.up = False
            engine.weight_sync.bring_up(lost)
            assert lost.up
            engine.fleet.version = "of-a-later-push"
            engine.weight_sync.bring_up(lost)
            assert not lost.up
        assert calls(server, "lockstep_load") == sent


def restarted(server: Replay) -> None:
    """Its weights are those of its folder."""
    server.version = ""


def pushed(server: Replay) -> list[list[str]]:
    loads = (body for _, body in server.asked if body is not None and body.get("method") == "lockstep_load")
    return [json.loads(body["args"][0])["files"] for body in loads]


def test_a_restarted_server_gets_the_files_of_the_last_push(embedded: Path, tmp_path: Path) -> None:
    """Of a run of several processes, which generate and cannot gather the weights."""
    told: list[Any] = []
    with (
        replaying("vllm") as server,
        opened(server.address, load(embedded), embedded, tmp_path, Rank(0, 2, told=told)) as engine,
    ):
        sync(engine)
        (lost,) = engine.fleet.servers
        *_, last = pushed(server)
        restarted(server)
        lost.up, asked = False, len(told)
        engine.weight_sync.bring_up(lost)
        assert lost.up
        assert pushed(server)[2:] == [last]
        assert all(Path(file).is_file() for file in last)
        assert len(told) == asked  # nothing is asked of the other rank
    assert not any(Path(file).exists() for file in last)


def test_a_restarted_server_that_answers_with_other_weights_is_refused(embedded: Path, tmp_path: Path) -> None:
    back: list[bool] = []

    def fault(path: str, body: Any, number: int, answer: Any) -> tuple[int, Any]:
        if back and path == SAMPLES and body:
            answer = {**answer, "logprobs": [logprob + 0.1 for logprob in answer["logprobs"]]}
        return 200, answer

    with (
        replaying("vllm", fault) as server,
        opened(server.address, load(embedded), embedded, tmp_path, Rank(0, 2)) as engine,
    ):
        sync(engine)
        (lost,) = engine.fleet.servers
        restarted(server)
        lost.up = False
        back.append(True)
        with pytest.raises(Refusal, match=r"\[weights-differ\].* by 0\.1 on average"):
            engine.weight_sync.bring_up(lost)
        assert not lost.up


def test_timings_are_those_of_the_last_sync(embedded: Path, tmp_path: Path) -> None:
    with replaying("vllm") as server, opened(server.address, load(embedded), embedded, tmp_path) as engine:
        engine.weight_sync.seconds["an earlier phase"] = 1.0
        sync(engine)
        assert "push" in engine.weight_sync.seconds
        assert "an earlier phase" not in engine.weight_sync.seconds
