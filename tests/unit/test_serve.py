"""`lockstep serve` with OpenAI's client."""

from __future__ import annotations

import asyncio
import copy
import gc
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import replace
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hang import HANG, wait_until
from lockstep.commands.generate import Conversation
from lockstep.errors import Refusal
from lockstep.http_server.http_api import ApiError, ServeLimits
from lockstep.serve.api_request import chat_request, completion_request
from lockstep.serve.openai_api import LanguageModelApp
from served import chat, endpoint, opened_app, talk
from speaker import write_speaker

# Blocks of 8 KiB for two sequences of 256 tokens: with eight rows, some must wait for others.
LENGTH, ROWS = 256, 8
CACHE_GB = 36.5 * 2**13 / 1e9


@pytest.fixture(scope="module")
def speaker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("speaker") / "model", tiny_folder)


@pytest.fixture(scope="module")
def app(speaker: Path) -> Iterator[LanguageModelApp]:
    opened = opened_app(speaker, max_length=LENGTH, max_sequences=ROWS, cache_gb=CACHE_GB, name="tiny")
    assert isinstance(opened, LanguageModelApp)
    yield opened
    opened.close()


@pytest.fixture(scope="module")
def address(app: LanguageModelApp) -> Iterator[str]:
    with endpoint(app) as found:
        yield found


@pytest.fixture(scope="module")
def client(address: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=HANG) as found:
        yield found


@pytest.fixture(scope="module")
def conversation(speaker: Path) -> Conversation:
    """`lockstep generate`, which uses `generate` of transformers."""
    return Conversation(str(speaker), "cpu", max_new_tokens=24, temperature=0.0, seed=0, system=None)


def tokens_of(text: str) -> tuple[int, str]:
    """Of an answer within 24 tokens: a token a character, and one that ends it where it ends by itself."""
    return (24, "length") if len(text) == 24 else (len(text) + 1, "stop")


def all_free(app: LanguageModelApp) -> bool:
    load = app.worker.load
    return (load.running, load.waiting, load.free_blocks) == (0, 0, load.blocks)


def test_a_chat_is_answered_as_generate_does(client: openai.OpenAI, conversation: Conversation) -> None:
    answer = client.chat.completions.create(model="tiny", messages=chat("2 + 3?"), temperature=0, max_tokens=24)
    (choice,) = answer.choices
    assert choice.message.content == conversation.answer("2 + 3?")
    assert choice.message.content.isprintable()
    made, finish = tokens_of(choice.message.content)
    assert (choice.message.role, choice.finish_reason) == ("assistant", finish)
    ids = conversation.tokenizer.apply_chat_template(chat("2 + 3?"), add_generation_prompt=True)["input_ids"]
    assert answer.usage is not None
    counted = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    assert counted == (len(ids), made, len(ids) + made)
    assert [model.id for model in client.models.list()] == ["tiny"] == [client.models.retrieve("tiny").id]


def test_a_stream_is_the_same_text(client: openai.OpenAI, conversation: Conversation) -> None:
    request = {"model": "tiny", "messages": chat("Say é!"), "temperature": 0, "max_tokens": 24}
    stream = client.chat.completions.create(**request, stream=True, stream_options={"include_usage": True})
    chunks = list(stream)
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == conversation.answer("Say é!")
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == tokens_of(text)[1]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == tokens_of(text)[0]


def test_tokens_and_their_log_probabilities(client: openai.OpenAI, speaker: Path) -> None:
    """Token ids in and out; log-probs compared with a forward pass of transformers."""
    ids = [10, 20, 30, 40]
    extra = {"return_token_ids": True}
    request = {"model": "tiny", "prompt": ids, "max_tokens": 12, "temperature": 0.7, "top_p": 0.9, "seed": 5}
    answer = client.completions.create(**request, logprobs=3, extra_body=extra)
    (choice,) = answer.choices
    logprobs, made = choice.logprobs, choice.model_extra["token_ids"]
    assert choice.model_extra["prompt_token_ids"] == ids
    assert logprobs is not None
    model = AutoModelForCausalLM.from_pretrained(speaker, dtype=torch.float32).eval()
    with torch.no_grad():
        scores = model(torch.tensor([ids + made])).logits[0].log_softmax(-1)[len(ids) - 1 : -1]
    assert logprobs.token_logprobs == pytest.approx(scores[range(len(made)), made].tolist(), abs=1e-4)
    tokenizer = AutoTokenizer.from_pretrained(speaker)
    for row, (best, score) in enumerate(zip(logprobs.top_logprobs or (), scores, strict=True)):
        top = score.topk(3)
        # Bytes that are no characters look alike, so there may be fewer names than tokens.
        assert set(best) == {tokenizer.decode([i]) for i in top.indices.tolist()}, row
        assert max(best.values()) == pytest.approx(top.values[0].item(), abs=1e-4)
    # The same seed draws the same tokens, also in a stream.
    pieces = list(client.completions.create(**request, stream=True, extra_body=extra))
    assert [token for piece in pieces for token in piece.choices[0].model_extra["token_ids"]] == made
    assert "".join(piece.choices[0].text for piece in pieces) == choice.text
    chatted = client.chat.completions.create(
        model="tiny", messages=chat("x"), max_tokens=4, logprobs=True, top_logprobs=2, extra_body=extra
    )
    content = chatted.choices[0].logprobs.content
    assert [len(entry.top_logprobs) for entry in content] == [2] * len(chatted.choices[0].model_extra["token_ids"])
    assert chatted.usage.completion_tokens == len(content)
    assert chatted.model_extra["prompt_token_ids"]


def test_a_seed_is_that_of_generate(client: openai.OpenAI, speaker: Path) -> None:
    answers = Conversation(
        str(speaker), "cpu", max_new_tokens=16, temperature=0.8, seed=11, system=None, top_p=0.95, top_k=50
    )
    request = {"messages": chat("Why?"), "temperature": 0.8, "top_p": 0.95, "max_tokens": 16, "n": 3}
    first, again = (
        client.chat.completions.create(model="tiny", seed=11, extra_body={"top_k": 50}, **request) for _ in range(2)
    )
    texts = [choice.message.content for choice in first.choices]
    assert texts[0] == answers.answer("Why?")
    assert len(set(texts)) == 3
    assert texts == [choice.message.content for choice in again.choices]
    other = client.chat.completions.create(model="tiny", **request)
    assert texts != [choice.message.content for choice in other.choices]


def test_several_prompts_and_a_text_that_ends_an_answer(client: openai.OpenAI, conversation: Conversation) -> None:
    answers = {words: conversation.continue_text(words) for words in ("one", "two", "three", "four", "five")}
    words = sorted(answers, key=lambda one: -len(answers[one]))[:2]
    texts = [answers[one] for one in words]
    request = {"model": "tiny", "prompt": words, "temperature": 0, "max_tokens": 24}
    answer = client.completions.create(**request)
    assert [choice.text for choice in answer.choices] == texts
    # Three characters from the middle of the first answer, a token each.
    assert len(texts[0]) > 11
    stop = texts[0][8:11]
    cut = client.completions.create(**request, stop=[stop, "never answers"])
    assert cut.choices[0].text == texts[0][: texts[0].index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    streamed = list(client.completions.create(**{**request, "prompt": words[0]}, stop=stop, stream=True))
    assert "".join(piece.choices[0].text for piece in streamed) == cut.choices[0].text


@pytest.mark.parametrize(
    ("body", "kind", "message"),
    [
        ({"model": "gpt-4"}, openai.NotFoundError, "'gpt-4' is not served here; use 'tiny'"),
        ({"temperature": -1}, openai.BadRequestError, "temperature: -1 is not at least 0"),
        ({"temperature": 1e-6}, openai.BadRequestError, "temperature: 1e-06 is neither 0"),
        ({"top_p": 0}, openai.BadRequestError, "top_p: 0 leaves no token"),
        ({"max_tokens": LENGTH}, openai.BadRequestError, f"are over the limit of {LENGTH}"),
        ({"messages": chat("x" * LENGTH)}, openai.BadRequestError, "tokens of the prompt are over"),
        ({"messages": []}, openai.BadRequestError, "messages: is not a list of messages"),
        ({"n": 0}, openai.BadRequestError, "n: 0 is not between 1 and 128"),
        ({"stop": [1]}, openai.BadRequestError, "stop: is neither text"),
        ({"stop": ""}, openai.BadRequestError, "stop: an empty"),
        ({"temperature": 10**400}, openai.BadRequestError, "temperature: 1000"),
        ({"stream_options": {"x": 1}, "stream": True}, openai.BadRequestError, "stream_options.x: is not supported"),
        (
            {"stream_options": {"include_usage": "no"}, "stream": True},
            openai.BadRequestError,
            "stream_options.include_usage: is neither true nor false",
        ),
        ({"top_logprobs": 2}, openai.BadRequestError, "top_logprobs: needs logprobs"),
        ({"frequency_penalty": 0.5}, openai.BadRequestError, "frequency_penalty: is not supported"),
        ({"tools": [{"type": "function"}]}, openai.BadRequestError, "tools: the answer is plain text"),
        ({"extra_body": {"beams": 2}}, openai.BadRequestError, "beams: this endpoint has no such key"),
        ({"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}}, openai.BadRequestError, "is no argument of"),
        ({"extra_body": {"stop_token_ids": "x"}}, openai.BadRequestError, "stop_token_ids: is not a list"),
        ({"extra_body": {"stop_token_ids": [7, 10**6]}}, openai.BadRequestError, "stop_token_ids: token 1000000 is"),
        ({"extra_body": {"stop_token_ids": [7] * 1000}}, openai.BadRequestError, "stop_token_ids: has 1000 tokens"),
        ({"messages": [{**chat("x")[0], "name": "Bo"}]}, openai.BadRequestError, "messages[0].name: the model's chat"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            openai.BadRequestError,
            "content[0]: is of type 'image_url'",
        ),
    ],
)
def test_what_is_wrong_is_told_in_openais_shape(client: openai.OpenAI, body: dict, kind: type, message: str) -> None:
    with pytest.raises(kind) as refused:
        client.chat.completions.create(**{"model": "tiny", "messages": chat("x"), **body})
    assert message in refused.value.message
    assert refused.value.type == "invalid_request_error"


def test_a_message_that_the_template_drops_is_refused(app: LanguageModelApp) -> None:
    served = replace(app.served, tokenizer=copy.deepcopy(app.served.tokenizer))
    served.tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
    with_system = [{"role": "system", "content": "You are Bo."}, *chat("Who?")]
    for messages, problem in ((with_system, r"drops message 1 \(system\): 'You are Bo.'"), (chat("Who?"), None)):
        body = json.dumps({"messages": messages}).encode()
        if problem is None:
            assert chat_request(body, served).generation.prompts
        else:
            with pytest.raises(ApiError, match=problem):
                chat_request(body, served)


def test_of_a_text_that_is_far_too_long_only_the_beginning_is_encoded(app: LanguageModelApp) -> None:
    seen = []

    def encode(text: str, **more: Any) -> Any:
        seen.append(len(text))
        return app.served.tokenizer(text, **more)

    served = replace(app.served, tokenizer=encode)
    for prompt, message in (
        ("x" * 10**7, "its first 4096 characters alone are 4096 tokens"),
        ("x" * 300, "300 tokens of"),
    ):
        with pytest.raises(ApiError, match=message) as refused:
            completion_request(json.dumps({"prompt": prompt}).encode(), served)
        assert refused.value.code == "context_length_exceeded"
    assert seen == [16 * LENGTH, 300]
    assert completion_request(json.dumps({"prompt": "x" * 200}).encode(), served).generation.prompts == [[120] * 200]


def test_prompts_that_are_refused(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="add_special_tokens: 'no' is neither true nor false"):
        client.completions.create(model="tiny", prompt="x", extra_body={"add_special_tokens": "no"})
    for prompt, message in (
        ([], "is empty"),
        ([[1, 2], []], "has no tokens"),
        ([70000], "70000 is not in the vocab"),
    ):
        with pytest.raises(openai.BadRequestError, match=message):
            client.completions.create(model="tiny", prompt=prompt)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.mark.slow
def test_many_at_once_with_some_that_go_away(app: LanguageModelApp, address: str, conversation: Conversation) -> None:
    """More than there are rows and blocks for: nothing is mixed up, and nothing of anybody is left behind."""
    expected = {words: conversation.answer(words) for words in (f"{'so ' * (i % 4)}{i} and {i * i}?" for i in range(6))}
    assert len(set(expected.values())) == 6
    asyncio.run(talk(address, expected, 6))
    wait_until(lambda: all_free(app))
    gc.collect()
    files = open_files()
    asyncio.run(talk(address, expected, 40))
    wait_until(lambda: all_free(app))
    wait_until(lambda: gc.collect() >= 0 and open_files() <= files)
    assert not app.worker._responses
    assert not app.worker._samples
    assert not app.worker._engine.scheduler.prefixes


def raw(address: str, data: bytes, *, until_closed: bool = True) -> bytes:
    with socket.create_connection((urlsplit(address).hostname, urlsplit(address).port), HANG) as peer:
        peer.sendall(data)
        answer = b""
        while (more := peer.recv(65536)) and until_closed:
            answer += more
        return answer


def post(body: bytes, *headers: str, path: str = "/v1/completions") -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}", "Connection: close", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + body


def error_of(answer: bytes) -> tuple[int, str]:
    head, _, body = answer.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)["error"]["message"]


def broken() -> None:
    raise RuntimeError("the device is gone")


def test_limits_of_body_queue_and_time(speaker: Path) -> None:
    limits = ServeLimits(body_bytes=2000, queue=2)
    small = opened_app(speaker, limits, max_length=1024, max_sequences=1, cache_gb=0.01)
    try:
        with (
            endpoint(small, limits) as address,
            openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=HANG) as client,
        ):
            with pytest.raises(openai.APIStatusError) as long:
                client.completions.create(model=speaker.name, prompt="x" * 3000)
            assert (long.value.status_code, long.value.code) == (413, "body_too_large")
            with pytest.raises(openai.BadRequestError, match="3 sequences are over the limit of 2"):
                client.completions.create(model=speaker.name, prompt="x", n=3)
            forever = {"model": speaker.name, "prompt": "x", "max_tokens": 1000, "temperature": 0}
            endless = {"extra_body": {"ignore_eos": True}}
            with client.completions.create(**forever, **endless, stream=True) as stream:
                next(stream)
                with pytest.raises(openai.RateLimitError) as full:
                    client.completions.create(model=speaker.name, prompt="x", n=2)
                assert (full.value.code, full.value.response.headers["Retry-After"]) == ("queue_full", "1")
            wait_until(lambda: all_free(small))
            small.worker._limits = replace(limits, seconds=0.05)
            with pytest.raises(openai.InternalServerError) as late:
                client.completions.create(**forever, **endless)
            assert (late.value.status_code, late.value.code) == (504, "timeout")
            with pytest.raises(openai.APIError, match=r"no complete answer within 0\.05 s"):
                list(client.completions.create(**forever, **endless, stream=True))
            wait_until(lambda: all_free(small))
            # When the engine fails, waiting requests, later requests and /health get the error.
            small.worker._limits = limits
            with client.completions.create(**forever, **endless, stream=True) as stream:
                next(stream)
                small.worker._engine.step = broken
                with pytest.raises(openai.APIError, match="the engine stopped: RuntimeError: the device is gone"):
                    list(stream)
            with pytest.raises(openai.InternalServerError, match="503 - the engine stopped"):
                client.completions.create(**forever)
            assert (
                error_of(raw(address, b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"))[0]
                == 503
            )
    finally:
        small.close()


@pytest.mark.slow
def test_requests_that_are_no_requests(address: str, app: LanguageModelApp) -> None:
    status, message = error_of(raw(address, b"hello\r\n\r\n"))
    assert status == 400
    assert "no HTTP/1.1 request" in message
    assert error_of(raw(address, post(b"{}", path="/v2")))[0] == 404
    assert error_of(raw(address, post(b"{nope")))[1].startswith("the body is not JSON")
    assert "half of a character" in error_of(raw(address, post(rb'{"prompt": "\ud83d"}')))[1]
    assert error_of(raw(address, post(b"[]"))) == (400, "the body is not a JSON object")
    assert error_of(raw(address, b"GET / HTTP/1.1\r\nHost: localhost\r\nx: " + b"y" * 70000 + b"\r\n\r\n"))[0] == 431
    assert error_of(raw(address, post(b"{}", "Transfer-Encoding: chunked")))[0] == 400
    for line in ("Content-Length: 1", "Host: evil.example", "Origin: http://localhost\r\nOrigin: http://localhost"):
        assert error_of(raw(address, post(b"{}", line)))[0] == 400, line
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: [::1]\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    assert raw(address, chunked + b"%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)).startswith(b"HTTP/1.1 200")
    assert error_of(raw(address, chunked + b"+%x\r\n%s\r\n0\r\n\r\n" % (len(body), body)))[0] == 400
    # One of several words; answered and closed, or this would wait.
    assert raw(address, post(body).replace(b"close", b"TE, Close")).startswith(b"HTTP/1.1 200")
    # A browser's page, and a name that somebody else gave this machine.
    assert error_of(raw(address, post(body, "Origin: http://evil.example")))[0] == 403
    assert error_of(raw(address, post(body).replace(b"localhost", b"evil.example")))[0] == 403
    wait_until(lambda: all_free(app))


def test_a_key_is_asked_for(app: LanguageModelApp) -> None:
    with endpoint(app, api_key="s3cret") as address:
        for key, right in (("s3cret", True), ("other", False)):
            with openai.OpenAI(base_url=f"{address}/v1", api_key=key, max_retries=0, timeout=HANG) as client:
                if right:
                    assert client.models.list().data
                else:
                    with pytest.raises(openai.AuthenticationError):
                        client.models.list()


@pytest.mark.parametrize(
    ("method", "path", "given", "status"),
    [
        ("GET", "/v1/models", "Bearer s3cret", 200),
        ("GET", "/v1/models", "bearer s3cret", 200),
        ("GET", "/v1/models", "BEARER  s3cret", 200),
        ("GET", "/v1/models", "Basic s3cret", 401),
        ("GET", "/v1/models", "s3cret", 401),
        ("GET", "/v1/models", None, 401),
        ("GET", "/health", None, 200),
        ("GET", "/health/", None, 200),
        ("POST", "/health", None, 401),
        ("GET", "/healthy", None, 401),
    ],
)
def test_what_a_key_is_asked_for(app: LanguageModelApp, method: str, path: str, given: str | None, status: int) -> None:
    with endpoint(app, api_key="s3cret") as address:
        line = HTTPConnection(address.removeprefix("http://"), timeout=HANG)
        line.request(method, path, headers={} if given is None else {"Authorization": given})
        assert line.getresponse().status == status
        line.close()


def test_what_cannot_be_served_is_told_in_the_words_of_the_command(speaker: Path) -> None:
    with pytest.raises(Refusal, match=r"--max-length \[over-context\]: 4096 .* 2048"):
        opened_app(speaker, max_length=4096)
    with pytest.raises(Refusal, match=r"--max-length \[not-enough-memory\]: .* 1000 tokens .* GB"):
        opened_app(speaker, max_length=1000, cache_gb=CACHE_GB)
    with pytest.raises(Refusal, match=r"--cache-gb \[not-enough-memory\]: (.|\n)*raise --cache-gb"):
        opened_app(speaker, cache_gb=1e-5)
    with pytest.raises(Refusal, match=r"--dtype \[unknown-name\]: fp8 is not one of auto, fp32"):
        opened_app(speaker, dtype="fp8")
