"""Replies of models: content, reasoning and tool calls in the format of each template family, and what is malformed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conversations import conversations, rendered
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.environments.call_formats import FORMATS
from lockstep.environments.environment import Reply
from lockstep.environments.parsers import MOST_CALLS, detect_parser, parse_reply
from lockstep.model.load import load_tokenizer
from lockstep.trajectory import ToolCall
from original_templates import CHATML, GEMMA, ORIGINALS
from refusals import refuses

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}, "days": {"type": "integer"}, "where": {"type": "object"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "height")
]
# The format of each template, by the name of the built-in template.
FAMILIES = {
    "qwen": "hermes",
    "qwen2.5": "hermes",
    "qwen3": "hermes",
    "qwen3-thinking": "hermes",
    "smollm3": "hermes",
    "qwen3.5": "qwen3-coder",
    "qwen3.6": "qwen3-coder",
    "llama3.1": "llama3",
    "deepseek-r1": "deepseek",
    "mistral": "mistral",
    "mistral-nemo": "mistral",
    "glm4.5": "glm",
    "gpt-oss": "harmony",
    "kimi-k2": "kimi",
    "kimi-k2-thinking": "kimi",
}


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


def parsed(text: str, family: str, **more: Any) -> Reply:
    return parse_reply(text, None, family, TOOLS, **more)


def calls(reply: Reply) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, dict(call.arguments)) for call in reply.calls]


# -- the format of a template ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_the_format_is_found_in_the_template(name: str, tokenizer: Any) -> None:
    original = ORIGINALS[name] if name in ORIGINALS and name != "smollm3" else ""  # our copy of it has no tools
    for template in filter(None, (builtin_text(name), original)):
        assert detect_parser(template) == FAMILIES[name]
        tokenizer.chat_template = template
        assert detect_parser(tokenizer) == FAMILIES[name]


def test_templates_without_tool_calls_are_plain(tokenizer: Any) -> None:
    assert [detect_parser(template) for template in (CHATML, GEMMA, "", None)] == ["plain"] * 4
    # A tokenizer can have one template for chats and another for chats with tools.
    tokenizer.chat_template = {"default": CHATML, "tool_use": ORIGINALS["qwen3"]}
    assert detect_parser(tokenizer) == "hermes"


def test_a_format_can_be_named() -> None:
    text = '<tool_call>\n{"name": "weather", "arguments": {"place": "Rome"}}\n</tool_call>'
    assert calls(parsed(text, "hermes")) == [("weather", {"place": "Rome"})]
    assert parsed(text, "plain").content == text
    with refuses("parser", "unknown-name", remedy="hermes"):
        parsed(text, "hermse")


# These templates drop or move the content beside a call.
MOVED = ("llama3.1", "gpt-oss", "mistral", "mistral-nemo")
# These templates write <think> in the content after their own reasoning block.
VERBATIM = ("gpt-oss", "kimi-k2-thinking")


@pytest.mark.parametrize("name", FAMILIES)
def test_what_a_template_writes_is_read(name: str) -> None:
    """Generated turns with unicode, line breaks, braces, tags and several calls, against the messages."""
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    compared = 0
    for chat in conversations(60, seed=11):
        for number, turn in enumerate(chat.messages):  # Kimi writes the name of a tool only in the id
            for call in turn.get("tool_calls", ()) if "kimi" in name else ():
                call["id"] = f"functions.{call['function']['name']}:{number}"
        shown = rendered(builtin_text(name), chat, special)
        if shown is None:
            continue  # the template refuses the conversation
        turns = [turn for turn in chat.messages if turn["role"] == "assistant"]
        for turn, text, (before, _) in zip(turns, shown.trained, shown.borders, strict=True):
            made = [call["function"] for call in turn.get("tool_calls", ())]
            reply = parse_reply(text.removesuffix("\n"), None, FAMILIES[name], TOOLS, prompt=before)
            assert not reply.parse_error
            assert calls(reply) == [(call["name"], call["arguments"]) for call in made]
            assert reply.text in text
            compared += len(made)
            thought, closed, said = turn["content"].partition("</think>")
            thought = thought.partition("<think>")[2] if closed else str(turn.get("reasoning_content", ""))
            said = said if closed else turn["content"]
            if (closed and name in VERBATIM) or (made and name in MOVED):
                continue
            assert reply.content == said.strip()
            assert reply.reasoning == thought.strip() or thought.strip() not in text
    assert compared >= 10


# -- malformed calls ---------------------------------------------------------------------------------------------------

GOOD = {"place": "Rome"}
WRITTEN = {
    "hermes": '<tool_call>\n{{"name": "{name}", "arguments": {json}}}\n</tool_call>',
    "llama3": '{{"name": "{name}", "parameters": {json}}}',
    "mistral": "[TOOL_CALLS]{name}[ARGS]{json}",
    "deepseek": "<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{json}<｜tool▁call▁end｜>",
    "kimi": "<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{json}<|tool_call_end|>",
    "harmony": "<|start|>assistant<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{json}<|call|>",
}
TAGGED = {
    "qwen3-coder": (
        "<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>",
        "<parameter={key}>\n{value}\n</parameter>\n",
    ),
    "glm": (
        "<tool_call>{name}\n{body}</tool_call>",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
    ),
    "deepseek-v3.2": (
        '<｜DSML｜invoke name="{name}">\n{body}</｜DSML｜invoke>',
        '<｜DSML｜parameter name="{key}" string="true">{value}</｜DSML｜parameter>\n',
    ),
}
MARKED = [*WRITTEN, *TAGGED]


def written(family: str, name: str = "weather", arguments: Any = GOOD) -> str:
    """A call in the format of the family."""
    if family in WRITTEN:
        body = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        return WRITTEN[family].format(name=name, json=body)
    whole, one = TAGGED[family]
    texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    return whole.format(name=name, body="".join(one.format(key=key, value=value) for key, value in texts.items()))


@pytest.mark.parametrize("family", MARKED)
def test_several_calls_with_text_around(family: str) -> None:
    nested = {"place": '東京 "q" \\ é\n😀', "days": 3, "where": {"a": [{"b": None}, [1.5]], "c": {}}}
    opening = "<|channel|>commentary<|message|>First.<|end|>" if family == "harmony" else "First.\n"
    closing = "" if family in ("mistral", "harmony") else "\nLast."  # nothing follows a call of these models
    text = opening + written(family) + "\n" + written(family, "height", nested) + closing
    reply = parsed(text, family)
    assert calls(reply) == [("weather", GOOD), ("height", nested)]
    assert reply.content.split() == ["First.", *closing.split()]
    assert not reply.parse_error
    assert [call.error for call in reply.calls] == ["", ""]
    assert len({call.id for call in reply.calls}) == 2
    assert reply.valid_calls == reply.calls
    message = reply.message()
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather", "height"]


@pytest.mark.parametrize("family", MARKED)
def test_a_truncated_call_is_an_error(family: str) -> None:
    """Cut anywhere after the name was written, the turn has no valid second call."""
    second = written(family, "height", {"place": "Rome", "where": {"a": "b"}})
    text = written(family) + "\n" + second
    # The engine may drop <|call|>, because it ends the turn.
    last = len(second) - (len("<|call|>") if family == "harmony" else 0)
    for cut in range(second.index("height") + 6, last):
        reply = parsed(text[: len(text) - len(second) + cut], family, finish="length")
        assert [(call.name, call.error) for call in reply.valid_calls] == [("weather", "")]
        assert "Tool call 2" in reply.parse_error, text[: len(text) - len(second) + cut]
        assert reply.finish == "length"


@pytest.mark.parametrize("family", MARKED)
def test_an_unknown_tool_is_an_error(family: str) -> None:
    reply = parsed(written(family, "wether") + written(family), family)
    assert [(call.name, bool(call.error)) for call in reply.calls] == [("wether", True), ("weather", False)]
    assert reply.valid_calls == reply.calls[1:]
    for part in ("Tool call 1", '"wether"', "the tools are: weather, height", "Did you mean weather?"):
        assert part in reply.parse_error
    assert reply.calls[0].error in reply.parse_error
    if family != "llama3":  # without tools, JSON is an answer
        assert "there are no tools" in parse_reply(written(family), None, family).parse_error


@pytest.mark.parametrize("family", MARKED)
@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, 'the argument "place" is missing'),
        ({"place": "Rome", "days": "soon"}, 'the argument days must be an integer, not "soon"'),
        ({"place": "Rome", "plaice": "x"}, 'there is no argument "plaice"; the arguments are: place, days, where'),
        ({"place": "Rome", "where": "[1]"}, 'the argument where must be an object, not "[1]"'),
    ],
)
def test_arguments_must_match_the_schema(family: str, arguments: dict[str, Any], error: str) -> None:
    reply = parsed(written(family, arguments=arguments), family)
    (call,) = reply.calls
    assert not reply.valid_calls
    assert f"Tool call 1 (weather): {error}." == call.error == reply.parse_error.partition("\n")[0]


@pytest.mark.parametrize("family", WRITTEN)
@pytest.mark.parametrize(
    "arguments", ["{'place': 'Rome'}", '{"place": "Rome",}', '{"place": NaN}', '{"place": "a", "place": "b"}', "{]}"]
)
def test_only_json_is_read(family: str, arguments: str) -> None:
    reply = parsed(written(family, arguments=arguments), family)
    assert not reply.valid_calls
    assert "Tool call 1" in reply.parse_error
    assert "JSON" in reply.parse_error or "twice" in reply.parse_error


@pytest.mark.parametrize("family", TAGGED)
def test_text_among_tagged_arguments_is_an_error(family: str) -> None:
    good = written(family)
    at = good.index("Rome") + good[good.index("Rome") :].index("</") + 2
    at += good[at:].index(">") + 1  # after the closing tag of the value
    lost = parsed(good[:at] + "note" + good[at:], family)
    assert not lost.valid_calls
    assert "other text among its arguments" in lost.parse_error
    key = TAGGED[family][1]
    body = key.format(key="place", value="a") + key.format(key="place", value="b")
    assert "twice" in parsed(TAGGED[family][0].format(name="weather", body=body), family).parse_error


def test_values_with_tags_stay_whole() -> None:
    code = "<b>x</parameter></b>\n  if a < b:\n</tool_call>"
    text = written("qwen3-coder", arguments={"place": code})
    assert calls(parsed(text, "qwen3-coder")) == [("weather", {"place": code})]
    text = written("hermes", arguments={"place": "</tool_call><tool_call>"})
    assert calls(parsed(text, "hermes")) == [("weather", {"place": "</tool_call><tool_call>"})]


def test_text_of_numbers_becomes_numbers_only_if_the_schema_says_so() -> None:
    for family in MARKED:
        (call,) = parsed(written(family, arguments={"place": "12", "days": "3"}), family).calls
        assert call.arguments == {"place": "12", "days": 3}


def test_a_model_that_repeats_itself_is_cut() -> None:
    for family in MARKED:
        reply = parsed(written(family) * 500, family)
        assert len(reply.calls) == MOST_CALLS
        assert f"more than {MOST_CALLS} tool calls" in reply.parse_error
    assert parsed("<tool_call>{" * 3000, "hermes").parse_error


def test_other_formats_are_not_silently_content() -> None:
    reply = parsed(written("hermes"), "qwen3-coder")
    assert not reply.calls
    assert "not in the right format" in reply.parse_error
    assert "<function=" in reply.parse_error  # the example
    assert "<|" not in parsed(written("kimi")[:-30], "kimi").parse_error  # special tokens are not shown


def test_json_answers_of_llama_are_content() -> None:
    answer = '{"name": "Bob", "age": 3}'
    assert (parsed(answer, "llama3").content, parsed(answer, "llama3").parse_error) == (answer, "")
    assert parsed(f"See {{a}} {answer}.", "llama3").content == f"See {{a}} {answer}."
    assert parsed("<|python_tag|>print(1)", "llama3").parse_error
    assert calls(parsed('<|python_tag|>{"name": "weather", "parameters": {"place": "x"}}<|eom_id|>', "llama3"))


def test_older_mistral_writes_a_list() -> None:
    made = [{"name": "weather", "arguments": GOOD, "id": "abcdefghi"}, {"name": "height", "arguments": GOOD}]
    reply = parsed(f"[TOOL_CALLS] {json.dumps(made)}</s>", "mistral")
    assert calls(reply) == [("weather", GOOD), ("height", GOOD)]
    assert [call.id for call in reply.calls] == ["abcdefghi", "call00002"]
    assert parsed("[TOOL_CALLS] [3]", "mistral").parse_error


# -- reasoning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "prompt", "reasoning", "content"),
    [
        ("<think>\nr\n</think>\n\nA", "", "r", "A"),
        ("\n<think>r</think>\nA", "", "r", "A"),
        ("r\n</think>\n\nA", "<|im_start|>assistant\n<think>\n", "r", "A"),
        ("r\n</think>\n\nA", "", "r", "A"),  # no prompt was given
        ("r and no end", "<|im_start|>assistant\n<think>\n", "r and no end", ""),
        ("<think>cut", "", "cut", ""),
        ("<think>\n\n</think>\n\nA", "", "", "A"),
        ("A <think>b</think>", "", "", "A <think>b</think>"),
        ("A", "<think>\n\n</think>\n\n", "", "A"),
    ],
)
def test_reasoning_is_separated(text: str, prompt: str, reasoning: str, content: str) -> None:
    reply = parsed(text, "hermes", prompt=prompt)
    assert (reply.reasoning, reply.content, reply.parse_error) == (reasoning, content, "")


def test_calls_in_the_reasoning_are_not_made() -> None:
    reply = parsed(f"<think>{written('hermes')}</think>{written('hermes', 'height')}", "hermes")
    assert [call.name for call in reply.calls] == ["height"]
    cut = parsed(f"<think>{written('hermes')}", "hermes", finish="length")
    assert (cut.calls, cut.parse_error) == ((), "")


# -- token ids, response templates -------------------------------------------------------------------------------------


def test_token_ids_are_decoded_with_special_tokens(tokenizer: Any) -> None:
    tokens = ["<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"]
    tokenizer.add_special_tokens({"extra_special_tokens": tokens})
    text = written("kimi", arguments={"place": "東京"})
    ids = tokenizer(text)["input_ids"] + [tokenizer.eos_token_id]
    reply = parse_reply(ids, tokenizer, "kimi", TOOLS, first_call=7)
    assert (reply.text, reply.ids) == (text, tuple(ids))
    assert reply.calls == (ToolCall("weather", {"place": "東京"}, "functions.weather:0"),)
    # An output of the model that is no token of the tokenizer is ignored.
    assert parse_reply([*ids, len(tokenizer) + 5], tokenizer, "kimi", TOOLS).calls == reply.calls


def test_special_tokens_in_an_error_are_removed(tokenizer: Any) -> None:
    eos = tokenizer.eos_token
    for name in (f"wea{eos}ther2", f"{eos[:3]}{eos}{eos[3:]}"):
        reply = parse_reply(written("hermes", name), tokenizer, "hermes", TOOLS)
        assert reply.parse_error
        assert eos not in reply.parse_error + reply.calls[0].error


RESPONSES = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "tool_calls": {
            "open": "<call>",
            "close": "</call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close": "<|im_end|>", "content": "text"},
    },
}


def test_the_response_template_of_the_tokenizer_comes_first(tokenizer: Any) -> None:
    tokenizer.chat_template, tokenizer.response_template = CHATML, RESPONSES
    prompt = "<|im_start|>assistant\n<think>"
    call = '<call>{"name": "weather", "arguments": {"place": "Rome", "days": "2"}}</call>'
    text = f'r</think>A{call}<call>{{"name": "x"}}</call>'
    reply = parse_reply(text + "<|im_end|>", tokenizer, "auto", TOOLS, prompt=prompt)
    assert (reply.content, reply.reasoning) == ("A", "r")
    assert calls(reply)[0] == ("weather", {"place": "Rome", "days": 2})
    assert 'no tool named "x"' in reply.parse_error
    # The response template raises an error for a call that is not JSON.
    broken = parse_reply("A<call>{'name'}</call>", tokenizer, "auto", TOOLS)
    assert (broken.content, broken.calls) == ("A<call>{'name'}</call>", ())
    assert broken.parse_error.startswith("Tool call 1 cannot be read: json parser could not parse")
    # The format of the chat template finds what the response template overlooks.
    tokenizer.chat_template = ORIGINALS["qwen3"]
    tokenizer.response_template = json.loads(json.dumps(RESPONSES).replace("call>", "tool_call>"))
    cut = written("hermes").removesuffix("</tool_call>")
    assert "not closed" in parse_reply(cut, tokenizer, "auto", TOOLS).parse_error
    assert parse_reply(written("hermes"), tokenizer, "auto", TOOLS) == parsed(written("hermes"), "hermes")


# -- anything ----------------------------------------------------------------------------------------------------------

MARKS = [mark for form in FORMATS.values() for mark in (*form.marks, *form.ends, *form.think, form.example) if mark]
PIECES = st.sampled_from(
    [
        *MARKS,
        *(written(family) for family in MARKED),
        *(written(family)[:cut] for family in MARKED for cut in (5, 12, 25, 40, -1, -8)),
        *"{}[]\"'\\:,<>|\n ",
        '{"name": "weather", "arguments": ',
        '"parameters": {"place": "\\ud800"}}',
        "[TOOL_CALLS]",
        "[ARGS]",
        "</tool_call>",
        "</function>",
        "</arg_value>",
        "<|start|>",
        "to=functions.weather",
        "null",
        "1e999",
        "9" * 5000,
        "[" * 2000,
        '{"a":' * 2000,
        "\ud800",
    ]
)
TEXTS = st.lists(st.one_of(PIECES, st.text(max_size=8)), max_size=12).map("".join)


@given(text=TEXTS, family=st.sampled_from(list(FORMATS)), prompt=st.sampled_from(["", "<think>\n"]))
@settings(max_examples=400, deadline=None)
def test_no_text_raises_an_error(text: str, family: str, prompt: str) -> None:
    reply = parse_reply(text, None, family, TOOLS, prompt=prompt)
    for part in (reply.text, reply.content, reply.reasoning, reply.parse_error):
        part.encode("utf-8")
    assert bool(reply.parse_error) or reply.valid_calls == reply.calls
    for call in reply.calls:
        json.dumps(dict(call.arguments), ensure_ascii=False).encode("utf-8")
        assert call.name
        assert call.id
        assert call.error in reply.parse_error
        if not call.error:
            assert call.name in ("weather", "height")
            assert isinstance(call.arguments["place"], str)


@pytest.mark.slow
@given(text=TEXTS, family=st.sampled_from(list(FORMATS)))
@settings(max_examples=6000, deadline=None)
def test_no_text_of_many_raises_an_error(text: str, family: str) -> None:
    reply = parse_reply(text, None, family, TOOLS)
    assert bool(reply.parse_error) or reply.valid_calls == reply.calls
    assert all(call.error in reply.parse_error for call in reply.calls)
