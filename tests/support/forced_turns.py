"""Turns of the model that call tools, in the formats of ten template families, and a sampler that must choose them.

The texts are written by hand from the formats: the calls as the model writes them, and the messages that follow a turn
as the chat template renders them.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lockstep.kernels.sampling import sequence_keys, turn_key
from lockstep.rollout.native import sampler

Call = tuple[str, dict[str, Any]]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Family:
    """The format of a family. The texts after a turn begin behind its end token and end with the generation prompt."""

    write: Callable[[Sequence[Call]], str]
    user: str
    """A message of the user, with `{}` for its text."""
    result: Callable[[str, str, str], str]
    """The result of a tool, given the name of the tool, the id of the call and the text."""
    before: str
    """Stands before the results of a turn."""
    after: str
    """Stands after the results of a turn."""
    end: str
    """The token that ends a turn with calls. It is inserted if the turn was cut and results follow."""
    end_user: str = ""
    """The token that is inserted if a turn was cut and a user message follows, if it is not `end`."""
    final: str = ""
    """The token that ends an answer, if it is not `end`."""
    opens: bool = False
    """Whether the template has no end token: the model ends its turn with the first token of the next message."""
    calls: int = 2
    """The largest number of calls in a turn."""
    tools: bool = True
    """Whether the template shows tools. Otherwise an environment reads the calls in the text."""
    reasoning: str = ""
    """The beginning of a turn with reasoning."""
    thinks: bool = False
    """Whether the generation prompt opens the reasoning, so that every turn has some."""
    whole: bool = False
    """Whether the calls of a turn can be read only together."""
    answer: str = "{}"
    """An answer, with `{}` for its text."""

    def following(self, messages: Messages) -> str:
        """The text that the messages after a turn add."""
        if messages[0]["role"] == "user":
            (message,) = messages
            return self.user.replace("{}", message["content"])
        results = [self.result(m["name"], m["tool_call_id"], m["content"]) for m in messages]
        return self.before + "".join(results) + self.after

    def inserted(self, messages: Messages) -> str:
        """The end token of a turn that was cut before the messages."""
        return (self.end_user or self.end) if messages[0]["role"] == "user" else self.end


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


def _hermes(calls: Sequence[Call]) -> str:
    return "\n".join(f"<tool_call>\n{_json({'name': n, 'arguments': a})}\n</tool_call>" for n, a in calls)


def _coder(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
        written.append(f"<tool_call>\n<function={name}>\n{values}</function>\n</tool_call>")
    return "\n".join(written)


def _glm(calls: Sequence[Call]) -> str:
    written = []
    for name, given in calls:
        values = [f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in given.items()]
        written.append(f"\n<tool_call>{name}\n{''.join(values)}</tool_call>")
    return "".join(written)


def _llama(calls: Sequence[Call]) -> str:
    ((name, given),) = calls
    return f'{{"name": "{name}", "parameters": {_json(given)}}}'


def _mistral(calls: Sequence[Call]) -> str:
    listed = [{"name": n, "arguments": a, "id": f"id{number:07}"} for number, (n, a) in enumerate(calls)]
    return f"[TOOL_CALLS] {_json(listed)}"


def _deepseek(calls: Sequence[Call]) -> str:
    parts = [
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{n}\n```json\n{_json(a)}\n```<｜tool▁call▁end｜>" for n, a in calls
    ]
    return "<｜tool▁calls▁begin｜>" + "\n".join(parts) + "<｜tool▁calls▁end｜>"


def _gpt_oss(calls: Sequence[Call]) -> str:
    ((name, given),) = calls
    return f" to=functions.{name}<|channel|>commentary json<|message|>{_json(given)}"


_CHATML_USER = "\n<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"
_THOUGHT = "<think>\nüber 東京\n</think>\n\n"


def _qwen(write: Callable[[Sequence[Call]], str], opened: str = "", reasoning: str = "") -> Family:
    return Family(
        write,
        _CHATML_USER + opened,
        lambda name, identity, text: f"\n<tool_response>\n{text}\n</tool_response>",
        "\n<|im_start|>user",
        f"<|im_end|>\n<|im_start|>assistant\n{opened}",
        "<|im_end|>",
        reasoning=reasoning,
        thinks=bool(opened),
    )


def families(schemas: Sequence[Mapping[str, Any]]) -> dict[str, Family]:
    """The formats by the name of the template. `schemas` are those of the tools: Mistral repeats them."""
    listed = ", ".join(_json(schema) for schema in schemas)
    header = "<|start_header_id|>{}<|end_header_id|>\n\n"
    return {
        "chatml": Family(_hermes, _CHATML_USER, _no_result, "", "", "<|im_end|>", tools=False),
        "qwen2.5": _qwen(_hermes),
        "qwen3": _qwen(_hermes, reasoning=_THOUGHT),
        "qwen3.5": _qwen(_coder, "<think>\n", "über 東京\n</think>\n\n"),
        "llama3.1": Family(
            _llama,
            f"{header.format('user')}{{}}<|eot_id|>{header.format('assistant')}",
            lambda name, identity, text: f"{header.format('ipython')}{_json(text)}<|eot_id|>",
            "",
            header.format("assistant"),
            "<|eot_id|>",
            calls=1,
        ),
        "gemma": Family(
            _hermes,
            "\n<start_of_turn>user\n{}<end_of_turn>\n<start_of_turn>model\n",
            _no_result,
            "",
            "",
            "<end_of_turn>",
            tools=False,
        ),
        "mistral": Family(
            _mistral,
            f"[AVAILABLE_TOOLS] [{listed}][/AVAILABLE_TOOLS][INST] {{}}[/INST]",
            lambda name, identity, text: (
                f'[TOOL_RESULTS] {{"content": {text}, "call_id": "{identity}"}}[/TOOL_RESULTS]'
            ),
            "",
            "",
            "</s>",
            whole=True,
        ),
        "deepseek-r1": Family(
            _deepseek,
            "<｜User｜>{}<｜Assistant｜><think>\n",
            lambda name, identity, text: f"<｜tool▁output▁begin｜>{text}<｜tool▁output▁end｜>",
            "<｜tool▁outputs▁begin｜>",
            "<｜tool▁outputs▁end｜>",
            "<｜end▁of▁sentence｜>",
            reasoning="über 東京\n</think>\n\n",
            thinks=True,
        ),
        "glm4.5": Family(
            _glm,
            "\n{}<|assistant|>",
            lambda name, identity, text: f"\n<tool_response>\n{text}\n</tool_response>",
            "",
            "<|assistant|>",
            "<|observation|>",
            end_user="<|user|>",
            final="<|user|>",
            opens=True,
            reasoning="\n<think>über 東京</think>",
        ),
        "gpt-oss": Family(
            _gpt_oss,
            "<|start|>user<|message|>{}<|end|><|start|>assistant",
            lambda name, identity, text: (
                f"<|start|>functions.{name} to=assistant<|channel|>commentary<|message|>{_json(text)}<|end|>"
            ),
            "",
            "<|start|>assistant",
            "<|call|>",
            end_user="<|end|>",
            final="<|return|>",
            calls=1,
            reasoning="<|channel|>analysis<|message|>über 東京<|end|><|start|>assistant",
            answer="<|channel|>final<|message|>{}",
        ),
    }


def _no_result(name: str, identity: str, text: str) -> str:
    raise AssertionError("the template has no results of tools")


# -- turns -------------------------------------------------------------------------------------------------------------

PLACES = ("Rom", "東京", "Z\U0001f3d4", 'a "b" \\ c', "{x}", "x < y & z", "São\tP", "née")


@dataclass(frozen=True)
class ForcedTurn:
    """A turn that the model writes. `calls` are its valid calls. A turn that is `cut` has no end token."""

    kind: str
    text: str
    calls: tuple[Call, ...] = ()


def forced_turns(family: Family, draw: random.Random, limit: int) -> list[ForcedTurn]:
    """Turns with valid calls, invalid calls and calls that the limit of tokens cuts, in random order; an answer ends
    them, which the limit may cut, too."""
    kinds = ["calls", "cut", *draw.choices(("calls", "invalid", "cut"), k=draw.randint(0, 1))]
    draw.shuffle(kinds)
    turns = []
    for kind in kinds:
        calls = [_call(draw) for _ in range(draw.randint(1, family.calls))]
        start = family.reasoning if family.thinks else draw.choice(("", family.reasoning))
        if kind == "invalid":
            turns.append(ForcedTurn(kind, start + _broken(family, calls) + family.end))
        elif kind == "cut":
            calls[-1] = (calls[-1][0], {"place": "東京" * (limit // 3)})
            turns.append(ForcedTurn(kind, start + family.write(calls), () if family.whole else tuple(calls[:-1])))
        else:
            turns.append(ForcedTurn(kind, start + family.write(calls) + family.end, tuple(calls)))
    said = "né 東京 \U0001f600"
    last = draw.choice(("answer", "cut answer"))
    text = family.answer.format(said * (limit // 8) if last == "cut answer" else said)
    start = family.reasoning if family.thinks else ""
    return [*turns, ForcedTurn(last, start + text + (family.final or family.end) * (last == "answer"))]


def _call(draw: random.Random) -> Call:
    return draw.choice(("weather", "height")), {"place": draw.choice(PLACES)}


def _broken(family: Family, calls: Sequence[Call]) -> str:
    """A call without an argument that the tool needs; without the last bracket, if the environment checks nothing."""
    text = family.write([(calls[0][0], {"town": "Rom"})])
    return text if family.tools else text.replace("}}", "}")


def force(patch: pytest.MonkeyPatch, ids: Mapping[tuple[int, int, int], Sequence[int]], seed: int) -> None:
    """Makes the sampler of the native engine choose given token ids, by the key of the request, the sample and the
    turn. Only the noise is replaced, so the log-probs are those of the model."""
    wanted = {sequence_keys(seed, turn_key(key, turn), sample): list(made) for (key, sample, turn), made in ids.items()}

    def noise(keys_B2: torch.Tensor, positions_B: torch.Tensor, vocabulary: int) -> torch.Tensor:
        found = torch.zeros(len(keys_B2), vocabulary)
        for row, (keys, position) in enumerate(zip(keys_B2.tolist(), positions_B.tolist(), strict=True)):
            made = wanted.get(tuple(keys), [])  # idle rows of the batch have no turn
            found[row, made[position] if position < len(made) else 0] = 1e5
        return found

    patch.setattr(sampler, "gumbel_noise", noise)
