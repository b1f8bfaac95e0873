"""Many samples that go to vLLM at once: one request for all, a line for each answer, one word from the scheduler."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lockstep.rollout.servers import adapter as server_adapter
from lockstep.rollout.servers import server_client
from lockstep.rollout.servers.adapter import ServerFailed
from lockstep.rollout.servers.server_client import RequestBatcher, _AnswerLines, _Waiting
from lockstep.rollout.servers.vllm import PLUGIN, SAMPLES

sys.path.append(str(PLUGIN))
from lockstep_samples import KEY_VARIABLE, PATH, SampleRoute, prompt_digest  # type: ignore[import-not-found]
from lockstep_scheduler import LOGPROBS, SAMPLE, _FinishedSamples  # type: ignore[import-not-found]


def line(number: int, **said: Any) -> bytes:
    return json.dumps({"number": number, **said}).encode() + b"\n"


def test_both_ends_name_the_same_route() -> None:
    assert PATH == SAMPLES


def test_both_ends_name_the_same_variable() -> None:
    assert KEY_VARIABLE == server_client.KEY_VARIABLE


@pytest.mark.parametrize(
    ("key", "method", "path", "given", "status"),
    [
        ("s3cret", "POST", "/collective_rpc", [], 401),
        ("s3cret", "POST", "/update_weight_version", ["Bearer other"], 401),
        ("s3cret", "POST", "/v1/completions", ["Basic s3cret"], 401),
        ("s3cret", "GET", PATH, [], 401),
        ("s3cret", "GET", "/health/../collective_rpc", [], 401),
        ("s3cret", "POST", "/health", [], 401),
        ("s3cret", "POST", "/pause", ["Bearer s3cret", "Bearer s3cret"], 401),
        ("s3cret", "POST", "/collective_rpc", ["Bearer s3cret"], 200),
        ("s3cret", "POST", "/collective_rpc", ["bearer s3cret"], 200),
        ("s3cret", "GET", PATH, ["BEARER s3cret"], 200),
        ("s3cret", "GET", "/health", [], 200),
        # A server without a key is open to nobody.
        ("", "POST", "/collective_rpc", ["Bearer "], 403),
        ("", "POST", "/collective_rpc", [], 403),
        ("", "GET", "/health", [], 200),
    ],
)
def test_every_route_of_the_server_asks_for_the_key(
    monkeypatch: pytest.MonkeyPatch, key: str, method: str, path: str, given: list[str], status: int
) -> None:
    monkeypatch.setenv(KEY_VARIABLE, key)
    told: list[Any] = []

    async def send(message: Any) -> None:
        told.append(message)

    async def vllm(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})

    headers = [(b"Authorization", each.encode()) for each in given]
    scope = {"type": "http", "method": method, "path": path, "headers": headers}
    asyncio.run(SampleRoute(vllm)(scope, None, send))
    assert told[0]["status"] == status
    if status != 200:
        assert KEY_VARIABLE in json.loads(told[1]["body"])["error"]
        asyncio.run(SampleRoute(vllm)({**scope, "type": "websocket"}, None, send))
        assert told[-1] == {"type": "websocket.close", "code": 1008}


def test_both_ends_name_a_prompt_alike() -> None:
    """The digest is the beginning of the SHA-256 of `[1,23]`."""
    assert prompt_digest([1, 23]) == server_adapter.prompt_digest((1, 23)) == "c0cb3dde31baa48b"


# -- the run's end


async def asked(post: Any, prompts: list[bytes]) -> list[Any]:
    batcher = RequestBatcher(post)
    bodies = [{"token_ids": list(prompt), "seed": seed} for seed, prompt in enumerate(prompts)]
    waits = [asyncio.ensure_future(batcher.submit("http://one", body, 60.0)) for body in bodies]
    return await asyncio.gather(*waits, return_exceptions=True)


def test_samples_of_one_moment_go_in_one_request_and_each_has_its_own_answer() -> None:
    sent: list[Any] = []

    async def post(address: str, body: Any, seconds: float, piece: Any) -> None:
        sent.append((address, body, seconds))
        whole = line(2, answer="c") + line(0, answer="a") + line(1, status=400, error="no")
        for start in range(0, len(whole), 7):  # wherever the network cuts it
            piece(whole[start : start + 7])

    first, second, third = asyncio.run(asked(post, [b"hi", b"a", b"hi"]))
    samples = [{"token_ids": 0, "seed": 0}, {"token_ids": 1, "seed": 1}, {"token_ids": 0, "seed": 2}]
    assert sent == [("http://one", {"prompts": [(104, 105), (97,)], "samples": samples}, 60.0)]
    assert (first, third) == ("a", "c")
    assert isinstance(second, ServerFailed)
    assert (str(second), second.lost, second.status) == ("answered 400: no", False, 400)


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        (line(0, answer="a") + line(0, answer="b"), "a second answer to sample 0"),
        (line(0, answer="a") + line(2, answer="b"), "the server answered sample 2, but the request has 2 samples"),
        (line(0, answer="a") + line(-1, answer="b"), "the server answered sample -1, but the request has 2 samples"),
        (line(0, answer="a") + b"<html>\n", "a malformed line"),
    ],
)
def test_lines_that_answer_nothing_are_no_loss_of_the_server(lines: bytes, why: str) -> None:
    async def post(address: str, body: Any, seconds: float, piece: Any) -> None:
        try:
            piece(lines)
        except ServerFailed as error:  # as the HTTP client tells what went wrong while it read
            raise ServerFailed("the connection broke", lost=True) from error

    first, second = asyncio.run(asked(post, [b"a", b"b"]))
    assert first == "a"
    assert isinstance(second, ServerFailed)
    assert why in str(second)
    assert not second.lost


def test_what_was_answered_before_the_server_was_lost_is_kept() -> None:
    async def cut(address: str, body: Any, seconds: float, piece: Any) -> None:
        piece(line(1, answer="b") + line(0, answer="a")[:9])
        raise ServerFailed("Connection reset by peer", lost=True)

    async def ended(address: str, body: Any, seconds: float, piece: Any) -> None:
        piece(line(1, answer="b"))

    for post, why in (
        (cut, "Connection reset by peer"),
        (ended, "the response ended before all samples were answered"),
    ):
        first, second = asyncio.run(asked(post, [b"a", b"b"]))
        assert second == "b"
        assert isinstance(first, ServerFailed)
        assert (str(first), first.lost) == (why, True)


def test_when_nobody_waits_any_more_the_request_is_dropped() -> None:
    async def story() -> str:
        begun, dropped = asyncio.Event(), asyncio.Event()

        async def post(address: str, body: Any, seconds: float, piece: Any) -> None:
            piece(line(0, answer="a"))
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                dropped.set()

        batcher = RequestBatcher(post)
        waits = [asyncio.ensure_future(batcher.submit("http://one", {"token_ids": []}, 60.0)) for _ in range(3)]
        await begun.wait()
        answered = await waits[0]
        waits[1].cancel()
        await asyncio.sleep(0)
        assert not dropped.is_set()  # one still waits
        waits[2].cancel()
        await asyncio.wait_for(dropped.wait(), 60)
        return str(answered)

    assert asyncio.run(story()) == "a"


def test_an_answer_comes_to_who_asked_for_it_byte_by_byte() -> None:
    async def story() -> Any:
        waits = _Waiting({}, asyncio.get_running_loop().create_future())
        lines = _AnswerLines([waits])
        for byte in line(0, answer=[1, 2]):
            assert not waits.answer.done()
            lines.add(bytes([byte]))
        return await waits.answer

    assert asyncio.run(story()) == [1, 2]


# -- the scheduler's end


class Steps:
    """A scheduler as far as outputs go: each step is told as it was laid down."""

    def __init__(self, steps: list[list[Any]], requests: dict[str, Any]):
        self.steps, self.requests = iter(steps), requests

    def update_from_output(self) -> dict[int, Any]:
        return {0: SimpleNamespace(outputs=next(self.steps), finished_requests=None, scheduler_stats=None)}


class Scheduler(_FinishedSamples, Steps):  # type: ignore[misc]
    pass


def output(name: str, token: int, logprob: float, finish: str | None = None, scored: int | None = None) -> Any:
    """As vLLM tells it of one token: the sampled one first, the likeliest behind it."""
    logprobs = SimpleNamespace(
        logprob_token_ids=np.array([[token if scored is None else scored, 9]], dtype=np.int32),
        logprobs=np.array([[logprob, -0.5]], dtype=np.float32),
    )
    return SimpleNamespace(
        request_id=name,
        new_token_ids=[token],
        new_logprobs=logprobs,
        finish_reason=finish,
        prefill_stats=f"first of {name}" if token == 1 else None,
        kv_transfer_params=None,
    )


def test_a_sample_is_told_of_once_and_a_strangers_request_at_every_token() -> None:
    ours, theirs = f"{SAMPLE}1", "cmpl-1"
    steps = [
        [output(ours, 1, -0.25), output(theirs, 1, -1.0)],
        [output(ours, 2, -0.1)],
        [output(theirs, 2, -1.0), output(ours, 3, -4.0, "stop")],
    ]
    scheduler = Scheduler(steps, {ours: None, theirs: None})
    told = [scheduler.update_from_output() for _ in steps]
    assert [[one.request_id for each in step.values() for one in each.outputs] for step in told] == [
        [theirs],
        [],
        [theirs, ours],
    ]
    assert told[1] == {}  # nobody is woken for nothing
    stranger, sample = told[2][0].outputs
    assert (stranger.new_token_ids, stranger.kv_transfer_params) == ([2], None)
    assert (sample.new_token_ids, sample.finish_reason, sample.new_logprobs) == ([1, 2, 3], "stop", None)
    assert sample.prefill_stats == f"first of {ours}"
    # Without a digit lost: what fp32 has.
    assert memoryview(sample.kv_transfer_params[LOGPROBS]).cast("d").tolist() == [-0.25, float(np.float32(-0.1)), -4.0]


def test_the_experts_of_all_tokens_are_told_with_the_sample() -> None:
    """With --enable-return-routed-experts, the first output has the experts of the prompt."""
    name = f"{SAMPLE}1"
    parts = [np.arange(12, dtype=np.uint8).reshape(3, 2, 2), np.full((1, 2, 2), 7, dtype=np.uint8)]
    outputs = [output(name, 1, -0.25), output(name, 2, -0.5, "stop")]
    for one, routes in zip(outputs, parts, strict=True):
        one.routed_experts = routes
    scheduler = Scheduler([[one] for one in outputs], {name: None})
    scheduler.update_from_output()
    [told] = scheduler.update_from_output()[0].outputs
    assert (told.routed_experts == np.concatenate(parts)).all()


def test_log_probs_of_other_tokens_are_no_answer() -> None:
    steps = [[output(f"{SAMPLE}1", 1, -0.25)], [output(f"{SAMPLE}1", 2, -0.25, "length", scored=5)]]
    scheduler = Scheduler(steps, {f"{SAMPLE}1": None})
    scheduler.update_from_output()
    with pytest.raises(RuntimeError, match="log-probs of tokens that were not sampled"):
        scheduler.update_from_output()


def test_what_was_aborted_is_forgotten() -> None:
    steps = [[output(f"{SAMPLE}1", 1, -0.25), output(f"{SAMPLE}2", 1, -0.25)], []]
    scheduler = Scheduler(steps, {f"{SAMPLE}1": None, f"{SAMPLE}2": None})
    scheduler.update_from_output()
    del scheduler.requests[f"{SAMPLE}1"]
    scheduler.update_from_output()
    assert list(scheduler._buffers) == [f"{SAMPLE}2"]
