"""Splits rows of various formats into a prompt and its responses; finds special tokens that are written out in text."""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from lockstep.data.encode.messages import REASONING, as_messages, is_message
from lockstep.errors import Refusal
from lockstep.types import Message, Origin

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


Turns = str | list[Message]
"""A text, or the messages of a chat."""

# The text before an answer in dialogues stored as one text (Anthropic's helpful and harmless pairs, HH-RLHF).
ANSWER_MARK = "\n\nAssistant:"
# The start of a text that is a chat, stored as JSON or as the repr of a Python list.
_CHAT_TEXT = re.compile(r"""\s*\[\s*\{\s*["'](role|from|content|value)["']\s*:""")
_PYTHON_CHAT = re.compile(
    r"\[\{'(role|from)': '\w+', '(content|value)': |\[\{'(content|value)': .*, '(role|from)': '\w+'", re.DOTALL
)
_CHAT_KEYS = ({"role", "content"}, {"from", "value"})
_SPEAKERS = re.compile(r"\n\n(Human|Assistant):")


def divide(prompt: Any, responses: Sequence[Any], names: Sequence[str], origin: Origin) -> tuple[Turns, list[Turns]]:
    """Returns the prompt, and each response without the prompt.

    If `prompt` is None, the prompt is the common prefix of the responses. Responses are texts or chats. A chat that
    does not start with the assistant is a full chat and must begin with the prompt. `names` are the columns of the
    responses.
    """
    responses = [_filled(name, response, origin) for name, response in zip(names, responses, strict=True)]
    if len({type(response) for response in responses}) > 1:
        raise Refusal.at(
            origin,
            f"{_listed(names)} are partly text and partly chats",
            "write all of them as text, or all of them as chats",
            code="mixed-rows",
        )
    if prompt is None:
        if all(response == responses[0] for response in responses):
            raise Refusal.at(origin, f"{_listed(names)} are identical", "remove the row", code="identical-responses")
        shared = _shared_text if isinstance(responses[0], str) else _shared_turns
        beginning, rests = shared(responses, names, origin)
    elif isinstance(responses[0], str):
        beginning, rests = as_turns(prompt, "the prompt", origin), list(responses)
    else:
        beginning, rests = _continued(as_turns(prompt, "the prompt", origin), responses, names, origin)
    if isinstance(beginning, list) and beginning[-1]["role"] == "assistant":
        raise Refusal.at(
            origin,
            "the prompt ends with an assistant turn, so the model would answer itself",
            "fix the prompt",
            code="prompt-ends-with-assistant",
        )
    for name, rest in zip(names, rests, strict=True):
        _refuse_no_answer(name, rest, origin)
    return beginning, rests


def spoken(beginning: Turns, answers: Sequence[Turns]) -> tuple[list[Message], list[Turns]] | None:
    """Converts a dialogue that is one text with "Human:" and "Assistant:" to a chat. Returns None for other values.

    Without this conversion, a chat template would put the full dialogue into one user message.
    """
    if not isinstance(beginning, str) or not all(isinstance(answer, str) for answer in answers):
        return None
    before, *pieces = _SPEAKERS.split("\n\n" + beginning.lstrip())
    speakers, contents = pieces[0::2], [piece.strip() for piece in pieces[1::2]]
    if before or speakers[:1] != ["Human"] or speakers[-1:] != ["Assistant"] or contents[-1] or not all(contents[:-1]):
        return None
    roles = {"Human": "user", "Assistant": "assistant"}
    turns = [{"role": roles[who], "content": text} for who, text in zip(speakers[:-1], contents[:-1], strict=True)]
    return turns, [str(answer).strip() for answer in answers]


def as_turns(value: Any, name: str, origin: Origin) -> Turns:
    """Returns a text, or a list of messages in the standard form. Refuses anything else.

    The value may be a text, a list of messages or a single message. A text with the JSON of messages, as in csv files,
    is parsed.
    """
    if isinstance(value, str):
        value = _written_chat(value, name, origin)
        if isinstance(value, str):
            return value
    turns = [value] if is_message(value) else value
    if not isinstance(turns, list) or not all(map(is_message, turns)):
        raise Refusal.at(
            origin,
            f"{name} is neither text nor a list of {{role, content}} messages",
            "fix or remove the row",
            code="invalid-chat",
        )
    return as_messages(turns, origin)


def _written_chat(text: str, name: str, origin: Origin) -> Any:
    """Returns the parsed messages if the text is the JSON of messages, else the text."""
    if not _CHAT_TEXT.match(text):
        return text
    try:
        found = json.loads(text)
    except ValueError as error:
        if not _PYTHON_CHAT.match(text):
            return text
        why = f"{name} looks like the repr of a Python list, not JSON: {error}"
        raise Refusal.at(
            origin, why, "write the chat as JSON, or as a list of messages", code="invalid-json"
        ) from error
    is_chat = all(isinstance(one, dict) and any(keys <= one.keys() for keys in _CHAT_KEYS) for one in found)
    return found if is_chat else text


def _filled(name: str, response: Any, origin: Origin) -> Turns:
    turns = as_turns(response, name, origin)
    if not turns or (isinstance(turns, str) and not turns.strip()):
        raise Refusal.at(origin, f"{name} is empty", "remove the row or fill in the value", code="empty-field")
    return turns


def _refuse_no_answer(name: str, rest: Turns, origin: Origin) -> None:
    if isinstance(rest, str):
        if not rest.strip():
            raise Refusal.at(
                origin,
                f"{name} has no answer after the prompt",
                "remove the row or fill in the value",
                code="no-answer",
            )
    elif not rest or rest[0]["role"] != "assistant" or rest[-1]["role"] != "assistant":
        raise Refusal.at(
            origin,
            f"after the prompt, {name} must start and end with an assistant turn",
            "fix or remove the row",
            code="no-answer",
        )


def _continued(prompt: Turns, chats: Sequence[list[Message]], names: Sequence[str], origin: Origin) -> Any:
    heads: list[list[Message]] = []
    rests: list[list[Message]] = []
    for name, chat in zip(names, chats, strict=True):
        full = chat[0]["role"] != "assistant"
        cut = _end_of_prompt(prompt, chat) if full else 0
        if cut is None:
            raise Refusal.at(
                origin,
                f"{name} is a full chat that does not begin with the prompt",
                "check that the prompt belongs to this row, or set data.prompt_key",
                code="different-prompts",
            )
        opening = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        heads.append(chat[:cut] if full else opening)
        rests.append(chat[cut:])
    if any(head != heads[0] for head in heads):
        raise _different_prompts(names, origin)
    return heads[0], rests


def _end_of_prompt(prompt: Turns, chat: list[Message]) -> int | None:
    """Returns how many messages of a full chat are the prompt. If the prompt is a text, the last user turn with this
    text is the last message of the prompt."""
    if isinstance(prompt, list):
        return len(prompt) if chat[: len(prompt)] == prompt else None
    turns = [
        number
        for number, turn in enumerate(chat, 1)
        if turn["role"] == "user" and str(turn.get("content")).strip() == prompt.strip()
    ]
    return turns[-1] if turns else None


def _shared_turns(chats: Sequence[list[Message]], names: Sequence[str], origin: Origin) -> Any:
    shortest = min(len(chat) for chat in chats)
    cut = common_length(chats)
    if cut == shortest:
        short = names[[len(chat) for chat in chats].index(shortest)]
        raise Refusal.at(
            origin,
            f"{short} is only the beginning of the other chats, so it has no answer",
            "fix or remove the row",
            code="no-answer",
        )
    if not cut or any(chat[cut]["role"] != "assistant" for chat in chats):
        raise _different_prompts(names, origin)
    return chats[0][:cut], [chat[cut:] for chat in chats]


def _shared_text(texts: Sequence[str], names: Sequence[str], origin: Origin) -> Any:
    common = texts[0][: common_length(texts)]
    if ANSWER_MARK in common:
        cut = common.rindex(ANSWER_MARK) + len(ANSWER_MARK)
    else:
        cut = next((i for i in range(len(common), 0, -1) if common[i - 1].isspace()), 0)
    rests = [text[cut:] for text in texts]
    # If the text after the common prefix has another answer mark, the dialogues differ before their last answer.
    if not common[:cut].strip() or any(ANSWER_MARK in rest for rest in rests):
        raise _different_prompts(names, origin)
    return common[:cut], rests


def common_length(sequences: Sequence[Any]) -> int:
    """Returns the length of the longest prefix that all sequences share."""
    first, shortest = sequences[0], min(map(len, sequences))
    return bisect_left(range(1, shortest + 1), True, key=lambda n: any(s[:n] != first[:n] for s in sequences))


def _different_prompts(names: Sequence[str], origin: Origin) -> Refusal:
    return Refusal.at(
        origin,
        f"{_listed(names)} answer different prompts: they have no common beginning before their answers",
        "pair only responses to one prompt, or name the prompt's column with data.prompt_key",
        code="different-prompts",
    )


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:-1])} and {names[-1]}" if len(names) > 1 else names[0]


class SpecialText:
    """Finds special tokens of a tokenizer in texts.

    The tokenizer converts text that spells a special token: an `<|im_end|>` in a user's text ends the user's turn. Rows
    that contain special tokens are counted and reported.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase):
        added = (token.content for token in tokenizer.added_tokens_decoder.values() if token.special)
        names = {name for name in (*added, *tokenizer.all_special_tokens) if name}
        self._firsts = {name[0] for name in names}
        self._any = re.compile("|".join(map(re.escape, sorted(names))) or r"(?!)")

    def inside(self, turns: Iterable[Turns]) -> bool:
        """Returns whether a text, or the content or reasoning of a message, contains a special token."""
        return any(
            self._in(str(message.get(key) or ""))
            for one in turns
            for message in ([{"content": one}] if isinstance(one, str) else one)
            for key in (("content",) if len(message) <= 2 else ("content", *REASONING))
        )

    def _in(self, text: str) -> bool:
        # The first test is fast: most texts do not contain even the first character of a special token.
        return any(first in text for first in self._firsts) and self._any.search(text) is not None


def special_rows_note(rows: int, first: object) -> str:
    """Describes the rows that contain special tokens, for the data report."""
    return (
        f"{rows:,} rows hold special tokens of the tokenizer in their text, which are read as such and may end a turn; "
        f"the first is {first}"
    )
