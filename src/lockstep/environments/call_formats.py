"""The formats in which models write tool calls: how each is recognised in a chat template, and read from a reply.

A reader never raises an error for a text: a call that cannot be read becomes a `RawCall` with an error, which the model
can be told.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from lockstep.environments.json_schema import DEEPEST, InvalidJson, read_json


@dataclass(frozen=True)
class RawCall:
    """A call as the model wrote it, before the check against the tools."""

    name: str = ""
    arguments: Any = None
    id: str = ""
    error: str = ""
    """Why the call cannot be read."""


class Reasoning(str):
    """A piece of a reply that is reasoning, if the model writes it as a message of its own (gpt-oss)."""

    __slots__ = ()


ReplyParts = Iterator[str | RawCall]
"""The text of a reply, in order: pieces of content, and calls. The consumer may stop early, so a reader is lazy."""


THINK = ("<think>", "</think>")


@dataclass(frozen=True)
class CallFormat:
    """A format of tool calls."""

    marks: tuple[str, ...]
    """Texts of which a chat template of this format contains all."""
    read: Callable[[str], ReplyParts]
    example: str
    """A call, for messages to the model."""
    ends: tuple[str, ...] = ()
    """Tokens that end a turn, besides the end token of the tokenizer."""
    think: tuple[str, str] = THINK
    """The marks around reasoning; empty if the reader finds the reasoning."""
    needs_tools: bool = False
    """Whether a call looks like ordinary text, so that it is read only if there are tools."""

    @property
    def shows_example(self) -> bool:
        """Whether the example may be shown to the model. Special tokens in a message would end the message."""
        return bool(self.example) and not any(mark in self.example for mark in ("<|", "｜", "[TOOL"))


def _from_object(text: str) -> RawCall:
    """Reads `{"name": ..., "arguments": {...}}`. Some models write `parameters` instead of `arguments`."""
    try:
        value = read_json(text)
    except InvalidJson as error:
        return RawCall(error=f"is not valid JSON: {error}")
    return call_of_message(value)


def call_of_message(value: Any) -> RawCall:
    """Reads a call that is a JSON object, or an entry of the field `tool_calls` of a message."""
    if not isinstance(value, dict):
        return RawCall(error="is not a JSON object")
    made = value.get("function", value)
    if not isinstance(made, dict):
        made = {**value, "name": made}
    name = made.get("name")
    given: Any = next((made[key] for key in ("arguments", "parameters") if key in made), {})
    if not isinstance(name, str) or not name:
        return RawCall(error='has no "name"')
    identity = value.get("id")
    return _with_arguments(name, given, identity if isinstance(identity, str) else "")


def _with_arguments(name: str, arguments: Any, identity: str = "") -> RawCall:
    """Returns the call. Arguments that are text are read as JSON."""
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments) if arguments.strip() else {}
        except InvalidJson as error:
            return RawCall(name, {}, identity, f"has arguments that are not valid JSON: {error}")
    return RawCall(name, {} if arguments is None else arguments, identity)


def _json_end(text: str, start: int) -> int:
    """Returns the end of the JSON object or list at `start`; -1 if it does not end, or is nested too deeply."""
    depth, inside, at = 0, False, start
    for found in _STRUCTURE.finditer(text, start):
        mark = found.group()
        if inside:
            inside = mark != '"'
        elif mark == '"':
            inside = True
        elif mark in "{[":
            depth += 1
            if depth > DEEPEST:
                return -1
        elif mark in "}]":
            depth -= 1
        at = found.end()
        if depth == 0 and not inside:
            return at
    return -1


_SOME_TEXT = re.compile(r"\S")
_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)


def _between(text: str, opening: str, closing: str, read: Callable[[str], RawCall]) -> ReplyParts:
    """Reads calls between two marks. A closing mark inside a JSON string belongs to the string."""
    at = 0
    while (start := text.find(opening, at)) >= 0:
        yield text[at:start]
        start += len(opening)
        body = _SOME_TEXT.search(text, start)
        after = _json_end(text, body.start()) if body and body.group() == "{" else -1
        end = text.find(closing, max(after, start))
        following = text.find(opening, start)
        if end < 0 or (after < 0 <= following < end):
            cut = following if following >= 0 else len(text)
            yield RawCall(error=f"is not closed with {closing}")
            at = cut
            continue
        yield read(text[start:end])
        at = end + len(closing)
    yield text[at:]


# -- Hermes: Qwen2.5, Qwen3, SmolLM3 -----------------------------------------------------------------------------------


def _hermes(text: str) -> ReplyParts:
    return _between(text, "<tool_call>", "</tool_call>", _from_object)


# -- calls with tags: Qwen3-Coder, GLM, DeepSeek V3.2 ------------------------------------------------------------------


@dataclass(frozen=True)
class _Tags:
    """The tags of a call. `key` finds the beginning of an argument, with its name as a group."""

    opening: re.Pattern[str]
    key: re.Pattern[str]
    value_end: str
    closing: re.Pattern[str]
    closed: str
    """The closing tag, for messages."""
    stray: str
    """A mark that begins a call. Outside of a call, it is an error."""
    lines: bool = False
    """Whether a line break after the opening tag and before the closing tag of a value does not belong to it."""
    wrapper: tuple[str, str] = ("", "")
    """Tags around a call that may both be missing."""

    def read(self, text: str) -> ReplyParts:
        at = 0
        while found := self.opening.search(text, at):
            yield from self._outside(text[at : found.start()])
            call, at = self._call(text, found)
            yield call
        yield from self._outside(text[at:])

    def _outside(self, text: str) -> ReplyParts:
        """Returns text between calls. A call in another format is an error, and not content."""
        content, stray, _ = text.partition(self.stray)
        yield content
        if stray:
            yield RawCall(error="is not in the right format")

    def _call(self, text: str, found: re.Match[str]) -> tuple[RawCall, int]:
        name, at, given = found["name"].strip(), found.end(), dict[str, str]()
        if not name:
            return RawCall(error="has no name"), at
        while argument := self.key.match(text, at):
            end = self._value_end(text, argument.end())
            if end < 0:
                break
            key, value = argument["key"].strip(), text[argument.end() : end]
            if key in given:
                return RawCall(name, {}, error=f"has the argument {key!r} twice"), end
            given[key] = value.removeprefix("\n").removesuffix("\n") if self.lines else value
            at = end + len(self.value_end)
        closing = self.closing.match(text, at)
        wrapped, unwrapped = self.wrapper
        if closing is not None and wrapped and found.group().startswith(wrapped):
            closing = re.compile(r"\s*" + re.escape(unwrapped)).match(text, closing.end())
        if closing is None:
            after = self.opening.search(text, at)
            cut = after.start() if after else len(text)
            return RawCall(
                name, {}, error=f"has other text among its arguments, or is not closed with {self.closed}"
            ), cut
        return RawCall(name, given), closing.end()

    def _value_end(self, text: str, start: int) -> int:
        """Returns the end of a value: the first closing tag after which an argument or the end of the call follows."""
        end = text.find(self.value_end, start)
        while end >= 0:
            after = end + len(self.value_end)
            if self.key.match(text, after) or self.closing.match(text, after):
                return end
            end = text.find(self.value_end, after)
        return -1


_QWEN_CODER = _Tags(
    opening=re.compile(r"(?:<tool_call>\s*)?<function=(?P<name>[^>\n]*)>"),
    key=re.compile(r"\s*<parameter=(?P<key>[^>\n]*)>"),
    value_end="</parameter>",
    closing=re.compile(r"\s*</function>"),
    closed="</function>",
    stray="<tool_call>",
    lines=True,
    wrapper=("<tool_call>", "</tool_call>"),
)
_GLM = _Tags(
    opening=re.compile(r"<tool_call>(?P<name>[^<\n]*)"),
    key=re.compile(r"\s*<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>"),
    value_end="</arg_value>",
    closing=re.compile(r"\s*</tool_call>"),
    closed="</tool_call>",
    stray="<tool_call>",
)
_DSML = _Tags(
    opening=re.compile(r'<｜DSML｜invoke name="(?P<name>[^"\n]*)">'),
    key=re.compile(r'\s*<｜DSML｜parameter name="(?P<key>[^"\n]*)"(?: string="(?:true|false)")?>'),
    value_end="</｜DSML｜parameter>",
    closing=re.compile(r"\s*</｜DSML｜invoke>"),
    closed="its closing tag",
    stray="<｜DSML｜",
)


def _deepseek_tags(text: str) -> ReplyParts:
    return _DSML.read(re.sub(r"</?｜DSML｜function_calls>", "", text))


# -- Llama 3 -----------------------------------------------------------------------------------------------------------

_LLAMA_CALL = re.compile(r'\{\s*"(?:name|type|function|parameters)"\s*:')
_LLAMA_ARGUMENTS = re.compile(r'"(?:parameters|arguments)"\s*:')


def _llama(text: str) -> ReplyParts:
    """Reads JSON objects with a name and parameters. The model writes them without marks, or after `<|python_tag|>`.
    Other JSON is content."""
    content, tag, called = text.partition("<|python_tag|>")
    yield from _llama_objects(content, whole=not tag)
    if tag and not _LLAMA_CALL.match(called.strip()):
        yield RawCall(error="is not a JSON object")
    elif tag:
        yield from _llama_objects(called.strip(), whole=True)


def _llama_objects(text: str, *, whole: bool) -> ReplyParts:
    """`whole`: whether an object that is not closed is a call, and not content, if only calls stand before it."""
    at = 0
    while found := _LLAMA_CALL.search(text, at):
        start, end = found.start(), _json_end(text, found.start())
        if end < 0:
            meant = _LLAMA_ARGUMENTS.search(text, start) or (whole and not text[at:start].strip(" \n;,"))
            yield text[at:start] if meant else text[at:]
            if meant:
                yield RawCall(error="is not valid JSON: the object is not closed")
            return
        if _LLAMA_ARGUMENTS.search(text, start, end):
            yield text[at:start].rstrip().rstrip(";,")
            yield _from_object(text[start:end])
        else:
            yield text[at:end]
            whole = False
        at = end
    yield text[at:]


# -- Mistral -----------------------------------------------------------------------------------------------------------

_MISTRAL_CALL = re.compile(r"(?P<name>[^\[\]{}\s]+)\s*(?:\[CALL_ID\](?P<id>[^\[\s]*)\s*)?\[ARGS\]\s*")


def _mistral(text: str) -> ReplyParts:
    """Reads `[TOOL_CALLS] [{"name": ..., "arguments": ..., "id": ...}]`, and `[TOOL_CALLS]name[ARGS]{...}`."""
    content, *sections = text.split("[TOOL_CALLS]")
    yield content
    for section in sections:
        body = section.strip()
        named = _MISTRAL_CALL.match(body)
        start = named.end() if named else 0
        end = _json_end(body, start) if body[start : start + 1] in ("{", "[") else -1
        if end < 0:
            name, identity = (named["name"], named["id"] or "") if named else ("", "")
            yield RawCall(name, {}, identity, "is not valid JSON, or is not complete")
            continue
        if named:
            yield _with_arguments(named["name"], body[start:end], named["id"] or "")
        else:
            yield from _mistral_list(body[start:end])
        yield body[end:]


def _mistral_list(text: str) -> Iterator[RawCall]:
    try:
        calls = read_json(text)
    except InvalidJson as error:
        yield RawCall(error=f"is not valid JSON: {error}")
        return
    for call in calls if isinstance(calls, list) else [calls]:
        yield call_of_message(call)


# -- calls between special tokens: DeepSeek, Kimi K2 -------------------------------------------------------------------


def _deepseek(text: str) -> ReplyParts:
    text = re.sub(r"<｜tool▁calls▁(?:begin|end)｜>", "", text)
    return _between_tokens(text, "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", _deepseek_call)


def _deepseek_call(body: str) -> RawCall:
    """R1 and V3 write `function`, the separator, the name and a block of code; V3.1 the name, the separator, JSON."""
    head, separator, tail = body.partition("<｜tool▁sep｜>")
    if not separator:
        return RawCall(error="has no separator between its parts")
    name, arguments = head, tail
    first, _, rest = tail.strip().partition("\n")
    if rest.startswith("```") and rest.endswith("```") and len(rest) >= len("``````"):
        name, arguments = first, rest[3:-3].removeprefix("json")
    return _with_arguments(name.strip(), arguments) if name.strip() else RawCall(error="has no name")


def _kimi(text: str) -> ReplyParts:
    text = re.sub(r"<\|tool_calls?_section_(?:begin|end)\|>", "", text)
    return _between_tokens(text, "<|tool_call_begin|>", "<|tool_call_end|>", _kimi_call)


def _kimi_call(body: str) -> RawCall:
    """The id is `functions.name:0`."""
    identity, separator, arguments = body.partition("<|tool_call_argument_begin|>")
    identity = identity.strip()
    name = identity.removeprefix("functions.").rpartition(":")[0] or identity.removeprefix("functions.")
    if not separator or not name:
        return RawCall(error="has no name or no arguments")
    return _with_arguments(name, arguments, identity)


def _between_tokens(text: str, opening: str, closing: str, read: Callable[[str], RawCall]) -> ReplyParts:
    """Reads calls between two tokens, which do not occur in JSON strings."""
    content, *sections = text.split(opening)
    yield content
    for section in sections:
        body, ended, after = section.partition(closing)
        if not ended:
            yield RawCall(
                error="is not complete"
            )  # without the name of a special token, which the model would be shown
            continue
        yield read(body)
        yield after


# -- gpt-oss (harmony) -------------------------------------------------------------------------------------------------

_HARMONY_END = re.compile(r"<\|(?:end|call|return|start)\|>")


def _harmony(text: str) -> ReplyParts:
    """Reads messages: a header with channel and recipient, `<|message|>`, and the body up to a token that ends it."""
    if "<|message|>" not in text and "<|channel|>" not in text and "<|start|>" not in text:
        yield text
        return
    at = 0
    while (body := text.find("<|message|>", at)) >= 0:
        header, body = text[at:body], body + len("<|message|>")
        end = _HARMONY_END.search(text, body)
        stop = end.start() if end else len(text)
        at = len(text) if end is None else end.start() if end.group() == "<|start|>" else end.end()
        channel = re.search(r"<\|channel\|>\s*(\w+)", header)
        recipient = re.search(r"\bto=([^\s<]+)", header)
        if recipient:
            yield _with_arguments(recipient[1].removeprefix("functions."), text[body:stop])
        elif channel and channel[1] == "analysis":
            yield Reasoning(text[body:stop])
        else:
            yield text[body:stop]
    if re.search(r"\bto=", text[at:]):  # the header of a message that was cut
        yield RawCall(error="is not complete")


FORMATS = {
    "harmony": CallFormat(
        ("<|channel|>", "<|message|>"),
        _harmony,
        '<|channel|>commentary to=functions.name <|constrain|>json<|message|>{"key": "value"}<|call|>',
        ("<|return|>", "<|call|>", "<|end|>"),
        ("", ""),
    ),
    "kimi": CallFormat(
        ("<|im_middle|>",),
        _kimi,
        "<|tool_calls_section_begin|><|tool_call_begin|>functions.name:0<|tool_call_argument_begin|>"
        '{"key": "value"}<|tool_call_end|><|tool_calls_section_end|>',
        ("<|im_end|>", "[EOS]"),
    ),
    "deepseek-v3.2": CallFormat(
        ("｜DSML｜",),
        _deepseek_tags,
        '<｜DSML｜function_calls>\n<｜DSML｜invoke name="name">\n<｜DSML｜parameter name="key" string="true">value'
        "</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
        ("<｜end▁of▁sentence｜>",),
    ),
    "deepseek": CallFormat(
        ("<｜tool▁call▁begin｜>",),
        _deepseek,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>name<｜tool▁sep｜>{"key": "value"}<｜tool▁call▁end｜>'
        "<｜tool▁calls▁end｜>",
        ("<｜end▁of▁sentence｜>",),
    ),
    "glm": CallFormat(
        ("<arg_key>",),
        _GLM.read,
        "<tool_call>name\n<arg_key>key</arg_key>\n<arg_value>value</arg_value>\n</tool_call>",
        ("<|user|>", "<|observation|>", "<|endoftext|>"),
    ),
    "qwen3-coder": CallFormat(
        ("<function=", "<parameter="),
        _QWEN_CODER.read,
        "<tool_call>\n<function=name>\n<parameter=key>\nvalue\n</parameter>\n</function>\n</tool_call>",
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "mistral": CallFormat(
        ("[TOOL_CALLS]",),
        _mistral,
        '[TOOL_CALLS] [{"name": "name", "arguments": {"key": "value"}}]',
        ("</s>",),
        ("[THINK]", "[/THINK]"),
    ),
    "hermes": CallFormat(
        ("<tool_call>",),
        _hermes,
        '<tool_call>\n{"name": "name", "arguments": {"key": "value"}}\n</tool_call>',
        ("<|im_end|>", "<|endoftext|>"),
    ),
    "llama3": CallFormat(
        ("<|start_header_id|>",),
        _llama,
        '{"name": "name", "parameters": {"key": "value"}}',
        ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
        needs_tools=True,
    ),
    "plain": CallFormat((), lambda text: iter((text,)), ""),
}
"""The formats by name, in the order in which they are tried. `plain` has no tool calls."""
