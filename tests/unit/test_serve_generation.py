"""Generation over the OpenAI API: streams of several choices, stop conditions, bad requests, disconnects, shutdown."""

from __future__ import annotations

import json
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from hang import HANG, wait_until
from lockstep.http_server.http_api import ApiError
from lockstep.serve.api_request import chat_request, completion_request
from lockstep.serve.openai_api import LanguageModelApp
from served import chat, endpoint, opened_app
from speaker import write_speaker

MAX_LENGTH = 160


@pytest.fixture(scope="module")
def speaker(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_speaker(tmp_path_factory.mktemp("speaker") / "tiny", tiny_folder)


def open_app(speaker: Path) -> LanguageModelApp:
    app = opened_app(speaker, max_length=MAX_LENGTH, max_sequences=8, cache_gb=0.01)
    assert isinstance(app, LanguageModelApp)
    return app


@pytest.fixture(scope="module")
def app(speaker: Path) -> Iterator[LanguageModelApp]:
    app = open_app(speaker)
    yield app
    app.close()


@pytest.fixture(scope="module")
def client(app: LanguageModelApp) -> Iterator[openai.OpenAI]:
    with endpoint(app) as address, new_client(address) as client:
        yield client


def new_client(address: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0, timeout=HANG)


def is_idle(app: LanguageModelApp) -> bool:
    load = app.worker.load
    return (load.running, load.waiting, load.free_blocks) == (0, 0, load.blocks)


def test_a_completion_stream_has_the_choices_of_the_complete_reply(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["ab", "c"],
        "n": 2,
        "seed": 3,
        "max_tokens": 12,
        "logprobs": 2,
    }
    complete = client.completions.create(**request)
    chunks = list(client.completions.create(**request, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == []
    assert chunks[-1].usage == complete.usage
    assert [choice.index for choice in complete.choices] == [0, 1, 2, 3]
    text: dict[int, str] = defaultdict(str)
    logprobs: dict[int, list[float]] = defaultdict(list)
    offsets: dict[int, list[int]] = defaultdict(list)
    finish: dict[int, list[str | None]] = defaultdict(list)
    for chunk in chunks[:-1]:
        (choice,) = chunk.choices
        assert choice.logprobs is not None
        text[choice.index] += choice.text
        logprobs[choice.index] += choice.logprobs.token_logprobs or []
        offsets[choice.index] += choice.logprobs.text_offset or []
        finish[choice.index].append(choice.finish_reason)
    for choice in complete.choices:
        assert choice.logprobs is not None
        assert text[choice.index] == choice.text
        assert logprobs[choice.index] == choice.logprobs.token_logprobs
        assert offsets[choice.index] == choice.logprobs.text_offset == list(range(len(offsets[choice.index])))
        assert [reason for reason in finish[choice.index] if reason] == [choice.finish_reason]
        assert finish[choice.index][-1] == choice.finish_reason
    assert complete.usage.completion_tokens == sum(len(one) for one in logprobs.values())
    assert complete.usage.prompt_tokens == 3


def test_a_chat_stream_has_the_choices_of_the_complete_reply(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "messages": chat("2 + 3?"), "n": 3, "seed": 5, "max_tokens": 8}
    request |= {"logprobs": True, "top_logprobs": 1}
    complete = client.chat.completions.create(**request)
    chunks = list(client.chat.completions.create(**request, stream=True))
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    for expected in complete.choices:
        own = [chunk.choices[0] for chunk in chunks if chunk.choices[0].index == expected.index]
        assert [choice.delta.role for choice in own] == ["assistant"] + [None] * (len(own) - 1)
        assert "".join(choice.delta.content for choice in own) == expected.message.content
        tokens = [token for choice in own for token in choice.logprobs.content]
        assert tokens == expected.logprobs.content
        for token in tokens:
            # A token that is a part of a character has no bytes of its own.
            assert token.bytes == (None if "\N{REPLACEMENT CHARACTER}" in token.token else list(token.token.encode()))
            assert token.top_logprobs[0].logprob >= token.logprob
        assert own[-1].finish_reason == expected.finish_reason


def test_a_stop_string_over_several_tokens_never_appears_in_a_stream(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "one", "temperature": 0, "max_tokens": 24}
    request["extra_body"] = {"ignore_eos": True, "return_token_ids": True}
    text = client.completions.create(**request).choices[0].text
    stop = text[6:10]  # one token per character
    end = text.index(stop)
    for stops in (stop, [stop], ["never", stop + "", text[8:12]]):
        chunks = list(client.completions.create(**request, stop=stops, stream=True))
        assert "".join(chunk.choices[0].text for chunk in chunks) == text[:end]
        assert chunks[-1].choices[0].finish_reason == "stop"
        # The tokens of the stop string were generated, and are counted.
        tokens = [token for chunk in chunks for token in chunk.choices[0].model_extra["token_ids"]]
        assert len(tokens) == end + len(stop)
    # A text that only begins like the stop string is complete.
    almost = client.completions.create(**request, stop=text[-3:] + "\x00")
    assert (almost.choices[0].text, almost.choices[0].finish_reason) == (text, "length")


@pytest.mark.slow
def test_stop_tokens_and_limits_of_tokens(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "one", "temperature": 0}
    extra = {"ignore_eos": True, "return_token_ids": True}
    (choice,) = client.completions.create(**request, extra_body=extra).choices
    tokens = choice.model_extra["token_ids"]
    assert (len(tokens), choice.finish_reason) == (16, "length"), "the default of OpenAI's completions"
    stop = tokens[5]
    (stopped,) = client.completions.create(**request, extra_body={**extra, "stop_token_ids": [stop]}).choices
    assert stopped.finish_reason == "stop"
    assert stopped.model_extra["token_ids"] == tokens[: tokens.index(stop) + 1]
    # A chat without a limit may use the rest of the context.
    answer = client.chat.completions.create(model="tiny", messages=chat("x"), extra_body={"ignore_eos": True})
    assert answer.usage.total_tokens == MAX_LENGTH


def test_sampling_parameters_reach_the_engine(client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "one", "max_tokens": 16, "seed": 1}
    greedy = client.completions.create(**request, temperature=0).choices[0].text
    for key, value in (("top_k", 1), ("min_p", 1.0)):
        assert client.completions.create(**request, extra_body={key: value}).choices[0].text == greedy, key
    assert client.completions.create(**request, top_p=1e-6).choices[0].text == greedy
    assert client.completions.create(**request, temperature=1.5).choices[0].text != greedy
    penalty = client.completions.create(**request, temperature=0, extra_body={"repetition_penalty": 100.0})
    assert len(set(penalty.choices[0].text)) == len(penalty.choices[0].text), "no character twice"


# Every key with a wrong value: the key is named, and where there is an alternative, it is named too.
BOTH = [
    ("temperature", -0.1, "at least 0"),
    ("temperature", 0.001, "greedy"),
    ("temperature", "hot", "number"),
    ("top_p", 1.1, "between 0 and 1"),
    ("top_p", 0, "temperature 0"),
    ("top_k", -2, "at least -1"),
    ("min_p", 2, "between 0 and 1"),
    ("repetition_penalty", 0, "above 0"),
    ("repetition_penalty", -1, "at least 0"),
    ("max_tokens", 0, "at least 1"),
    ("max_tokens", 1.5, "integer"),
    ("n", 129, "between 1 and 128"),
    ("seed", 2**63, "between"),
    ("stop", ["a"] * 17, "limit of 16"),
    ("stop", [""], "empty"),
    ("stop", {"a": 1}, "list of texts"),
    ("stop_token_ids", [True], "list of token ids"),
    ("stop_token_ids", [-1], "vocabulary"),
    ("ignore_eos", "yes", "true nor false"),
    ("stream", 1, "true nor false"),
    ("stream_options", {"include_usage": True}, "stream: true"),
    ("stream_options", [], "object"),
    ("return_token_ids", 0, "true nor false"),
    ("frequency_penalty", 0.1, "repetition_penalty"),
    ("presence_penalty", -1, "repetition_penalty"),
    ("logit_bias", {"1": 5}, "not supported"),
    ("model", 7, "text"),
    ("max_token", 5, "no such key"),
]
CHAT = [
    ("messages", None, "missing"),
    ("messages", "hi", "list of messages"),
    ("messages[0]", [{"content": "x"}], "role"),
    ("messages[0].content", [{"role": "user"}], "text"),
    ("messages[0].content[0]", [{"role": "user", "content": [{"type": "audio"}]}], "only text"),
    ("messages[0].tool_calls", [{"role": "user", "content": "x", "tool_calls": [1]}], "tool calls"),
    ("messages[0].name", [{"role": "user", "content": "x", "name": 5}], "text"),
    ("max_completion_tokens", 0, "at least 1"),
    ("top_logprobs", 21, "between 0 and 20"),
    ("top_logprobs", 1, "logprobs: true"),
    ("response_format", {"type": "json_object"}, "not supported"),
    ("modalities", ["audio"], "text"),
    ("tool_choice", "required", "tool calls"),
    ("chat_template_kwargs", 1, "object"),
]
COMPLETION = [
    ("prompt", None, "missing"),
    ("prompt", "", "no tokens"),
    ("prompt", [1, "a"], "token ids"),
    ("prompt", [[1], [True]], "token ids"),
    ("logprobs", 21, "between 0 and 20"),
    ("echo", True, "return_token_ids"),
    ("suffix", "x", "after the prompt"),
    ("best_of", 2, "use n"),
    ("messages", [], "no such key"),
]


@pytest.mark.parametrize(("key", "value", "words"), BOTH)
@pytest.mark.parametrize("parse", [chat_request, completion_request], ids=["chat", "completion"])
def test_a_wrong_value_is_refused_with_its_key(
    app: LanguageModelApp, parse: Any, key: str, value: Any, words: str
) -> None:
    base = {"messages": chat("x")} if parse is chat_request else {"prompt": "x"}
    assert_refused(app, parse, base, key, value, words)


@pytest.mark.parametrize(("key", "value", "words"), CHAT)
def test_a_wrong_value_of_a_chat(app: LanguageModelApp, key: str, value: Any, words: str) -> None:
    assert_refused(app, chat_request, {"messages": chat("x")}, key, value, words)


@pytest.mark.parametrize(("key", "value", "words"), COMPLETION)
def test_a_wrong_value_of_a_completion(app: LanguageModelApp, key: str, value: Any, words: str) -> None:
    assert_refused(app, completion_request, {"prompt": "x"}, key, value, words)


def assert_refused(app: LanguageModelApp, parse: Any, base: dict[str, Any], key: str, value: Any, words: str) -> None:
    assert parse(json.dumps(base).encode(), app.served).generation.prompts
    body = {**base, key.partition("[")[0]: value}
    with pytest.raises(ApiError) as refused:
        parse(json.dumps(body).encode(), app.served)
    assert (refused.value.status, refused.value.param) == (400, key)
    assert words in str(refused.value)


def test_two_limits_of_a_chat_must_agree(app: LanguageModelApp) -> None:
    def body(**keys: int) -> bytes:
        return json.dumps({"messages": chat("x"), **keys}).encode()

    (sampling,) = chat_request(body(max_tokens=5, max_completion_tokens=5), app.served).generation.samplings
    assert sampling.max_tokens == 5
    with pytest.raises(ApiError) as refused:
        chat_request(body(max_tokens=5, max_completion_tokens=6), app.served)
    assert refused.value.param == "max_tokens"


def test_a_developer_message_is_a_system_message(app: LanguageModelApp) -> None:
    def prompt(role: str) -> Any:
        messages = [{"role": role, "content": "Be short."}, *chat("x")]
        return chat_request(json.dumps({"messages": messages}).encode(), app.served).generation.prompts

    assert prompt("developer") == prompt("system") != prompt("user")


def test_a_server_that_closes_ends_the_requests_under_way(speaker: Path) -> None:
    app = open_app(speaker)
    closing = threading.Thread(target=app.close)
    request: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 150, "extra_body": {"ignore_eos": True}}
    with endpoint(app) as address, new_client(address) as client:
        with client.completions.create(**request, n=8, stream=True) as stream:
            next(stream)
            closing.start()
            with pytest.raises(openai.APIError, match="shutting down"):
                list(stream)
        with pytest.raises(openai.InternalServerError) as refused:
            client.completions.create(**request)
        assert (refused.value.status_code, refused.value.code) == (503, "engine_stopped")
    closing.join(HANG)
    assert not closing.is_alive()


def test_a_client_that_disconnects_frees_its_sequences_for_others(app: LanguageModelApp, client: openai.OpenAI) -> None:
    request: dict[str, Any] = {"model": "tiny", "prompt": "x", "max_tokens": 150, "extra_body": {"ignore_eos": True}}
    with client.completions.create(**request, n=8, stream=True) as stream:
        for _ in range(20):
            next(stream)
        assert app.worker.load.running + app.worker.load.waiting > 0
    wait_until(lambda: is_idle(app))
    assert client.completions.create(model="tiny", prompt="x", max_tokens=2).usage.completion_tokens <= 2
