"""Agents for the tests, written as their authors would write them: with OpenAI's client, and without lockstep. The host
processes load this file by its path."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import openai

FOREVER = 10_000
PATIENCE = 1.0  # seconds that an impatient agent waits for an answer
MODEL = "any-name"
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                "required": ["a", "b"],
            },
        },
    }
]


def client_of(base_url: str) -> Any:
    return openai.OpenAI(base_url=base_url, max_retries=0)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def ask(client: Any, messages: Sequence[Any], **keys: Any) -> Any:
    return client.chat.completions.create(model=MODEL, messages=list(messages), **keys).choices[0].message


def calculate(row: Mapping[str, Any], base_url: str) -> float:
    """A usual loop with tools: runs the calls until a reply has none."""
    client, messages = client_of(base_url), [*row["prompt"]]
    while True:
        reply = ask(client, messages, tools=TOOLS, temperature=0.2)
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return float(reply.content == "5")
        for call in reply.tool_calls:
            numbers = json.loads(call.function.arguments)
            result = str(numbers["a"] + numbers["b"])
            messages.append({"role": "tool", "tool_call_id": call.id, "content": result})


def calculate_with_responses(row: Mapping[str, Any], base_url: str, stream: bool = False) -> float:
    """The same loop with the responses API: sends all items again."""
    client, items = client_of(base_url), [*row["prompt"]]
    tools = [{"type": "function", "strict": False, **tool["function"]} for tool in TOOLS]
    while True:
        if stream:
            with client.responses.stream(model=MODEL, input=items, tools=tools) as events:
                kinds = [event.type for event in events]
                response = events.get_final_response()
            assert kinds[0] == "response.created"
            assert kinds[-1] == "response.completed"
        else:
            response = client.responses.create(model=MODEL, input=items, tools=tools)
        items += [item.model_dump(exclude_none=True) for item in response.output]
        calls = [item for item in response.output if item.type == "function_call"]
        if not calls:
            return float(response.output_text == "5")
        for call in calls:
            numbers = json.loads(call.arguments)
            output = str(numbers["a"] + numbers["b"])
            items.append({"type": "function_call_output", "call_id": call.call_id, "output": output})


def stored_responses(row: Mapping[str, Any], base_url: str) -> float:
    client = client_of(base_url)
    first = client.responses.create(model=MODEL, input="one", instructions="be short")
    second = client.responses.create(
        model=MODEL, input="two", instructions="be short", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.status == "incomplete"
    return float(len(second.output_text))


def streamed(row: Mapping[str, Any], base_url: str) -> dict[str, Any]:
    """Reads the stream of chunks, with tool calls and token counts."""
    client = client_of(base_url)
    options = {"include_usage": True}
    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=row["prompt"], tools=TOOLS, stream=True, stream_options=options
        )
    )
    calls = [call for chunk in chunks for one in chunk.choices for call in one.delta.tool_calls or ()]
    text = "".join(one.delta.content or "" for chunk in chunks for one in chunk.choices)
    finish = [one.finish_reason for chunk in chunks for one in chunk.choices if one.finish_reason]
    info = {
        "calls": [[call.function.name, call.function.arguments] for call in calls],
        "text": text,
        "finish": finish,
        "tokens": chunks[-1].usage.completion_tokens,
    }
    return {
        "reward": {"style": 0.25, "right": 0.5},
        "info": info,
        "metrics": {"chunks": len(chunks), "turns": 9, "refused_requests": 2},
    }


def tree(row: Mapping[str, Any], base_url: str) -> float:
    """A retry, two branches, a compaction and a sub-agent."""
    client = client_of(base_url)
    start = [user("a")]
    first = ask(client, start).model_dump(exclude_none=True)
    again = ask(client, start).model_dump(exclude_none=True)
    assert first == again == {"role": "assistant", "content": "re a"}
    for text in ("b", "c", "d"):
        ask(client, [*start, first, user(text)])
    ask(client, [{"role": "system", "content": "the summary"}, user("e")])
    ask(client, [{"role": "developer", "content": "you help"}, user("f")])
    ask(client, [*start, first, user("b"), {"role": "assistant", "content": "re b"}, user("g")])
    return 1.0


async def subagents(row: Mapping[str, Any], base_url: str, seed: int) -> dict[str, float]:
    """Three requests at once, twice."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

    async def work(name: str) -> str:
        messages: list[Any] = [user(name)]
        for _ in range(2):
            made = await client.chat.completions.create(model=MODEL, messages=messages)
            messages += [made.choices[0].message.model_dump(exclude_none=True), user("more")]
        return str(messages[-2]["content"])

    texts = await asyncio.gather(*(work(name) for name in ("x", "y", "z")))
    return {"right": float(texts == ["re more"] * 3), "seed": float(seed > 0)}


async def crowd(row: Mapping[str, Any], base_url: str) -> dict[str, Any]:
    """Four requests at once. Returns the codes of those that are refused."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

    async def work(name: str) -> str:
        try:
            await client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": name * 9}])
        except openai.BadRequestError as error:
            return str(error.code)
        return ""

    codes = await asyncio.gather(*map(work, "wxyz"))
    return {"reward": 1.0, "info": {"codes": sorted(filter(None, codes))}}


async def impatient_crowd(row: Mapping[str, Any], base_url: str) -> float:
    """Three requests at once. When one has its answer, another is cancelled."""
    client = openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0)

    async def work(name: str) -> None:
        messages: list[Any] = [user(name)]
        await client.chat.completions.create(model=MODEL, messages=messages)

    tasks = [asyncio.create_task(work(name)) for name in ("a", "b", "c")]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    next(task for task in reversed(tasks) if not task.done()).cancel()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    return float(sum(result is None for result in results))


def choices(row: Mapping[str, Any], base_url: str) -> float:
    client = client_of(base_url)
    made = client.chat.completions.create(model=MODEL, messages=[user("a")], n=3, logprobs=True, stop=["e a"])
    assert [one.message.content for one in made.choices] == ["r"] * 3
    assert [token.logprob for token in made.choices[0].logprobs.content] == [-1.0, -2.0, -3.0, -4.0]
    return float(made.usage.completion_tokens)


def refused(row: Mapping[str, Any], base_url: str) -> dict[str, Any]:
    """Sends what is not supported. Returns the names of the refused keys."""
    client = client_of(base_url)
    ask(client, [user("a")])
    wrong: list[dict[str, Any]] = [
        {"response_format": {"type": "json_object"}},
        {"tool_choice": "required", "tools": TOOLS},
        {"logit_bias": {"5": 1}},
        {"logprobs": True, "top_logprobs": 2},
        {"extra_body": {"guided_json": {}}},
        {"n": 17},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "critic", "content": "x"}]},
    ]
    params = []
    for keys in wrong:
        try:
            client.chat.completions.create(**{"model": MODEL, "messages": [user("a")], **keys})
        except openai.BadRequestError as error:
            params.append(error.param)
    return {"reward": 1.0, "info": {"params": params}}


def overflow(row: Mapping[str, Any], base_url: str) -> dict[str, Any]:
    """Goes on until the context is full, then starts again with a short conversation."""
    client, messages, turns = client_of(base_url), [user("a")], 0
    try:
        while True:
            messages += [ask(client, messages).model_dump(exclude_none=True), user("b" * 20)]
            turns += 1
    except openai.BadRequestError as error:
        code = error.code
    if row["ground_truth"] == "again":
        ask(client, [user("short")])
    return {"reward": 1.0, "info": {"code": code, "turns": turns}}


def endless(row: Mapping[str, Any], base_url: str) -> float:
    """Does not handle the errors of its requests."""
    client, messages = client_of(base_url), [user("a")]
    while True:
        messages += [ask(client, messages).model_dump(exclude_none=True), user("b")]


def abandoned(row: Mapping[str, Any], base_url: str) -> float:
    """Disconnects before an answer, and asks again."""
    impatient = openai.OpenAI(base_url=base_url, max_retries=0, timeout=PATIENCE)
    with contextlib.suppress(openai.APITimeoutError):
        ask(impatient, [user("slow")])
    ask(client_of(base_url), [user("a")])
    return 1.0


def posted(row: Mapping[str, Any], base_url: str) -> None:
    ask(client_of(base_url), [user("a")])
    body = json.dumps({"reward": 0.75}).encode()
    urllib.request.urlopen(urllib.request.Request(f"{base_url}/reward", body, method="POST")).read()


def _hangs(base_url: str) -> None:
    time.sleep(FOREVER)


def _raises(base_url: str) -> None:
    raise ValueError("the bug")


def _kills(base_url: str) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _leaves_a_request(base_url: str) -> float:
    """Returns while another thread still waits for the model."""
    threading.Thread(target=lambda: ask(client_of(base_url), [user("late")]), daemon=True).start()
    return 1.0


BUGS: dict[str, Any] = {
    "raises": _raises,
    "hangs": _hangs,
    "kills": _kills,
    "exits": lambda base_url: (_ for _ in ()).throw(SystemExit(3)),
    "text": lambda base_url: "good",
    "nan": lambda base_url: float("nan"),
    "nothing": lambda base_url: None,
    "empty": lambda base_url: {},
    "unknown": lambda base_url: {"reward": 1.0, "score": 2.0},
    "leaves": _leaves_a_request,
}


def buggy(row: Mapping[str, Any], base_url: str, bugs: Mapping[str, str]) -> Any:
    """Has the bug of its row, after one turn; a row with the bug `silent` has no turn."""
    bug = bugs.get(row["ground_truth"], "")
    if bug != "silent":
        ask(client_of(base_url), [user("a")])
    return BUGS[bug](base_url) if bug in BUGS else 1.0


async def waits(row: Mapping[str, Any], base_url: str) -> float:
    """A coroutine that hangs."""
    client = openai.AsyncOpenAI(base_url=base_url, max_retries=0)
    await client.chat.completions.create(model=MODEL, messages=[user("a")])
    await asyncio.sleep(FOREVER)
    return 1.0


def any_agent(row: Mapping[str, Any], base_url: str, seed: int) -> Any:
    """Runs the agent that the row names, so that tests can share a host process."""
    agent = globals()[row["extra_info"]["agent"]]
    keys = {"seed": seed} if agent is subagents else {}
    return agent(row, base_url, **keys, **row["extra_info"]["keys"])


def shown(seed: int, height: int, width: int) -> dict[str, Any]:
    """A part with an image of random pixels, as OpenAI's client sends it."""
    import base64
    import io

    import numpy as np
    from PIL import Image

    buffer = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(buffer, format="PNG")
    url = f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def album(row: Mapping[str, Any], base_url: str) -> float:
    """Looks at images: continues a conversation, goes back to its first turn with another image, starts another one,
    and asks the responses API."""
    client, start = client_of(base_url), [*row["prompt"]]
    first = ask(client, start)
    start.append({"role": "assistant", "content": first.content})
    more = [*start, {"role": "user", "content": [{"type": "text", "text": "and "}, shown(1, 32, 64)]}]
    second = ask(client, more)
    ask(client, [*more, {"role": "assistant", "content": second.content}, user("which is larger?")])
    ask(client, [*start, {"role": "user", "content": [shown(2, 64, 32), {"type": "text", "text": " or this?"}]}])
    two = [shown(3, 32, 32), {"type": "text", "text": " and "}, shown(1, 32, 64)]
    client.chat.completions.create(model=MODEL, messages=[{"role": "user", "content": two}], n=2)
    part = {"type": "input_image", "image_url": shown(4, 32, 32)["image_url"]["url"]}
    client.responses.create(model=MODEL, input=[{"role": "user", "content": [part]}])
    return 1.0


def wrong_image(row: Mapping[str, Any], base_url: str) -> Any:
    """Sends images that cannot be read. Returns the errors."""
    client, found = client_of(base_url), []
    ask(client, [user("hello")])
    for url in ("https://example.org/a.png", "data:image/png;base64,AAAA", "/etc/hostname"):
        try:
            ask(client, [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])
        except openai.BadRequestError as error:
            found.append(str(error))
    return {"reward": 1.0, "info": {"errors": found}}
