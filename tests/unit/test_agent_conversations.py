"""Requests of agents as messages, and random conversations as rows, without a server."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from lockstep.environments.agents.agent_requests import TurnSpec, chat_turn, responses_turn
from lockstep.environments.agents.conversation_rows import AgentRows, message_key
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.parsers import parse_reply
from lockstep.http_server.http_api import ApiError
from lockstep.model.load import load_tokenizer
from lockstep.types import Completion, Message, Origin, Question, Sampling
from original_templates import ORIGINALS

END = 257
USER = {"role": "user", "content": "hi"}


def body(**keys: Any) -> bytes:
    return json.dumps(keys).encode()


def call(call_id: str, arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "type": "function", "function": {"name": "add", "arguments": arguments}}


def test_chat_messages_become_what_templates_read() -> None:
    spec = chat_turn(
        body(
            model="m",
            messages=[
                {"role": "developer", "content": [{"type": "text", "text": "be "}, {"type": "text", "text": "short"}]},
                USER,
                {"role": "assistant", "content": None, "tool_calls": [call("c1", '{"a": 1}')], "refusal": None},
                {"role": "tool", "tool_call_id": "c1", "content": "2"},
                {"role": "assistant", "content": "2", "reasoning": "easy", "tool_calls": [call("c2", "not json")]},
            ],
            tools=[{"type": "function", "function": {"name": "add", "strict": True, "parameters": {}}}],
            max_completion_tokens=7,
            temperature=0.5,
            seed=3,
        )
    )
    assert spec.messages == [
        {"role": "system", "content": "be short"},
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call("c1", {"a": 1})]},
        {"role": "tool", "content": "2", "tool_call_id": "c1", "name": "add"},
        {"role": "assistant", "content": "2", "reasoning_content": "easy", "tool_calls": [call("c2", "not json")]},
    ]
    assert spec.tools == [{"type": "function", "function": {"name": "add", "parameters": {}}}]
    assert (spec.max_tokens, spec.sampling, spec.calls, spec.n) == (7, {"temperature": 0.5}, True, 1)


def test_items_of_responses_become_turns() -> None:
    earlier: dict[str, list[Message]] = {"resp_1": [USER, {"role": "assistant", "content": "yes"}]}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "go"}]},
        {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "why"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "I add"}]},
        {"type": "function_call", "call_id": "c1", "name": "add", "arguments": '{"a": 1}'},
        {"type": "function_call", "call_id": "c2", "name": "add", "arguments": '{"a": 2}'},
        {"type": "function_call_output", "call_id": "c1", "output": "1"},
        {"type": "function_call_output", "call_id": "c2", "output": "2"},
    ]
    made = responses_turn(
        body(model="m", input=items, instructions="sys", previous_response_id="resp_1", tools=[]), earlier
    )
    assert made.messages == [
        {"role": "system", "content": "sys"},
        *earlier["resp_1"],
        {"role": "user", "content": "go"},
        {
            "role": "assistant",
            "content": "I add",
            "reasoning_content": "why",
            "tool_calls": [call("c1", {"a": 1}), call("c2", {"a": 2})],
        },
        {"role": "tool", "content": "1", "tool_call_id": "c1", "name": "add"},
        {"role": "tool", "content": "2", "tool_call_id": "c2", "name": "add"},
    ]
    assert made.instructions


@pytest.mark.parametrize(
    ("keys", "param"),
    [
        ({"previous_response_id": "resp_9"}, "previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"text": {"format": {"type": "json_object"}}}, "text.format"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"tool_choice": {"type": "function", "name": "add"}}, "tool_choice"),
        ({"temperature": "hot"}, "temperature"),
    ],
)
def test_what_responses_do_not_support_is_refused_by_name(keys: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        responses_turn(body(**{"model": "m", "input": "hi", **keys}), {})
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize(
    ("keys", "ignored"),
    [
        ({}, False),
        ({"temperature": 0.7, "top_p": 1, "top_k": -1, "presence_penalty": 0}, False),
        ({"temperature": 1.0}, True),
        ({"top_k": 20}, True),
        ({"frequency_penalty": 0.5}, True),
    ],
)
def test_other_sampling_parameters_are_noticed(keys: dict[str, Any], ignored: bool) -> None:
    spec = chat_turn(body(model="m", messages=[USER], **keys))
    assert spec.ignored(Sampling(10, temperature=0.7)) is ignored


def test_a_reply_is_recognised_without_its_reasoning() -> None:
    reply = {"role": "assistant", "content": "a", "reasoning_content": "because"}
    assert message_key(reply).matches(message_key({"role": "assistant", "content": "a"}))
    assert not message_key(reply).matches(message_key({**reply, "reasoning_content": "other"}))
    assert not message_key(reply).matches(message_key({"role": "assistant", "content": "b"}))


# -- rows --------------------------------------------------------------------------------------------------------------


class Talk:
    """Asks for turns as the engine does, and remembers the conversation before each turn."""

    def __init__(self, tokenizer: Any, history: str = "keep"):
        question = Question("", [USER], "", Origin("rows", 0))
        self.rows = AgentRows(ChatFormat(tokenizer, frozenset({END}), history), question)
        self.tokenizer = tokenizer
        self.contexts: list[list[int]] = []

    def ask(self, messages: list[Message], text: str) -> list[Message]:
        """Returns the conversation with the model's turn `text`."""
        number = len(self.contexts)
        place = self.rows.find(TurnSpec(messages))
        self.contexts.append(place.context)
        row = self.rows.begin(place)
        assert row.conversation.context == place.context
        ids = [*self.tokenizer(text, add_special_tokens=False)["input_ids"], END]
        reply = parse_reply(ids[:-1], self.tokenizer)
        reply = type(reply)(**{**vars(reply), "ids": tuple(ids)})
        completion = Completion(0, 0, ids, [-float(number)] * len(ids), "token")
        self.rows.finish(row, reply, completion, number, number, [number] * len(ids))
        return [*messages, {"role": "assistant", "content": reply.content}]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


@pytest.mark.parametrize("seed", range(20))
def test_random_conversations(tokenizer: Any, seed: int) -> None:
    """Every turn follows the tokens of the rendered conversation, and is trained once, whatever the agent does: it
    continues, branches, repeats, forgets messages and starts new conversations."""
    made, talk = random.Random(seed), Talk(tokenizer)
    known: list[list[Message]] = [[]]
    wanted: list[list[Message]] = []
    for number in range(24):
        messages = list(made.choice(known[-6:]))
        if made.random() < 0.2 and len(messages) > 2:
            messages = messages[2:]
        if made.random() < 0.1:
            messages = [{"role": "system", "content": made.choice("pq")}, *messages]
        messages.append({"role": "user", "content": made.choice(["a", "b", "né"])})
        wanted.append(messages)
        known.append(talk.ask(messages, made.choice(["x", "y", f"turn {number}"])))
    rendered = [
        tokenizer(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))["input_ids"]
        for messages in wanted
    ]
    assert talk.contexts == rendered
    merged = talk.rows.merged()
    prompt, rows = merged.rows()
    offsets = merged.offsets()
    ids = [token for row in rows for token in row.ids]
    trained = [place for place, mask in enumerate(mask for row in rows for mask in row.loss_mask) if mask]
    starts = [0]
    for row in rows:
        starts.append(starts[-1] + len(row.ids))
    spans = []
    for record, row in zip(merged.turns, merged.turn_rows, strict=True):
        start, stop = record.start + offsets[row], record.stop + offsets[row]
        spans += range(start, stop)
        assert record.noise is not None
        # The tokens before the turn in its row are those that the model saw.
        assert prompt + ids[starts[row] : start] == rendered[record.noise]
        assert {rows[row].logprobs[place - starts[row]] for place in range(start, stop)} == {-float(record.noise)}
    assert spans == trained
    assert sorted(record.noise for record in merged.turns if record.noise is not None) == list(range(24))
    assert len(merged.versions) == len(trained)
    assert len(rows) < 24


def test_a_template_that_forgets_reasoning(tiny_folder: Path) -> None:
    """Qwen3 removes the reasoning of a turn when a user message follows: `keep` continues the row, and `as_template`
    starts another one. The agent does not send the reasoning back."""
    tokenizer = load_tokenizer(str(tiny_folder))
    tokenizer.chat_template = ORIGINALS["qwen3"]
    for history, count in (("keep", 1), ("as_template", 2)):
        talk = Talk(tokenizer, history)
        told = talk.ask([USER], "<think>\nhm\n</think>\n\nyes")
        assert told[-1]["content"] == "yes"
        talk.ask([*told, {"role": "user", "content": "more"}], "no")
        assert len(talk.rows.rows) == count
        text = tokenizer.decode(talk.contexts[1])
        assert ("hm" in text) == (history == "keep")


def test_other_tools_start_a_new_row(tiny_folder: Path) -> None:
    tokenizer = load_tokenizer(str(tiny_folder))
    tokenizer.chat_template = ORIGINALS["qwen3"]
    talk = Talk(tokenizer)
    more = [*talk.ask([USER], "yes"), {"role": "user", "content": "more"}]
    tools = [{"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {}}}]
    place = talk.rows.find(TurnSpec(more, tools))
    assert place.row is None
    assert place.suffix is None
    assert "Adds." in tokenizer.decode(place.context)
    assert talk.rows.find(TurnSpec(more)).row is talk.rows.rows[0]


def test_an_unanswered_request_leaves_no_trace(tokenizer: Any) -> None:
    talk = Talk(tokenizer)
    told = talk.ask([USER], "yes")
    more = [*told, {"role": "user", "content": "more"}]
    before = list(talk.rows.rows[0].conversation.ids)
    row = talk.rows.begin(talk.rows.find(TurnSpec(more)))
    branch = talk.rows.begin(talk.rows.find(TurnSpec(more)))
    assert row is talk.rows.rows[0]
    assert branch is talk.rows.rows[1]
    talk.rows.drop(branch)
    talk.rows.drop(row)
    assert [one.conversation.ids for one in talk.rows.rows] == [before]
    talk.ask(more, "no")
    assert len(talk.rows.rows) == 1
