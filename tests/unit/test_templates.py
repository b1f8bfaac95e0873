"""The built-in chat templates: the same text as the models' own templates wherever these only append, and the same
trained turns where they change earlier ones."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conversations import Conversation, Rendered, conversations, rendered
from lockstep.data.encode.builtin_templates import (
    BUILTIN,
    append_only_version,
    builtin_text,
    same_without_thoughts,
    shows_reasoning,
    without_dropped,
)
from lockstep.data.encode.chat_template import turn_ends, with_template
from lockstep.data.encode.chat_text import TemplateInputs, messages_after_turn
from lockstep.data.encode.prompt_rows import prompt_ids
from lockstep.errors import Refusal
from lockstep.functions import register_callable
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data
from lockstep.recipe.recipe_checks import TEMPLATES
from lockstep.rollout.rollout_function import Canned, FunctionEngine, Generate, message_encoder
from lockstep.types import ROLLOUT_FUNCTION, Origin, Prompt, Question, Request, Sampling
from original_templates import ORIGINALS, QWEN3, SPECIAL
from refusals import refuses

ORIGIN = Origin("rows.jsonl", 7)
WITHOUT_TOOLS = ("chatml", "llama3", "gemma", "deepseek-r1")
REWRITTEN = [name for name, builtin in BUILTIN.items() if builtin.rewrites]


@pytest.fixture
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


def special(name: str) -> dict[str, str]:
    return SPECIAL.get(name, {"bos_token": "<s>", "eos_token": "</s>"})


def contradicts(name: str, chat: Conversation) -> bool:
    """Whether a turn has reasoning although the conversation says that the model does not think."""
    thinks = any("</think>" in str(turn["content"]) or turn.get("reasoning_content") for turn in chat.messages)
    return thinks and name == "qwen3.5-nothink" and not chat.inputs.get("enable_thinking")


def as_read(name: str, chat: Conversation) -> Conversation:
    """The conversation with the key of the reasoning that the template reads."""
    if name != "gpt-oss":
        return chat
    keys = {"reasoning_content": "thinking"}
    return replace(chat, messages=[{keys.get(key, key): turn[key] for key in turn} for turn in chat.messages])


def closed(name: str, chat: Conversation, original: Rendered) -> Rendered:
    """The original with an end token after each turn, where it writes this token before the next message."""
    if not BUILTIN[name].closings:
        return original
    turns = [turn for turn in chat.messages if turn["role"] == "assistant"]
    ends = ["<|observation|>" if turn.get("tool_calls") else "<|user|>" for turn in turns]
    borders = [(before, after + end) for (before, after), end in zip(original.borders, ends, strict=True)]
    return Rendered(original.text + ends[-1], borders)


def check(name: str, count: int) -> dict[str, int]:
    """Compares a built-in template with the original on generated conversations."""
    met, changes = dict.fromkeys(("append-only", "changed", "refused"), 0), BUILTIN[name].rewrites
    for chat in (as_read(name, chat) for chat in conversations(count, tools=name not in WITHOUT_TOOLS)):
        original = rendered(ORIGINALS[name], chat, special(name))
        ours = rendered(builtin_text(name), chat, special(name))
        if name == "gpt-oss" and any(len(turn.get("tool_calls", ())) > 1 for turn in chat.messages):
            assert ours is None  # the original drops the second call
            original = None
        if original is None:
            met["refused"] += 1
            continue
        assert ours is not None, chat
        assert ours.append_only or contradicts(name, chat), chat
        if changes == "drops":
            met["changed" if drops(name, chat, original, ours) else "append-only"] += 1
            continue
        original = closed(name, chat, original)
        if original.append_only and (changes != "thoughts" or shows_reasoning(chat.messages, original.text)):
            assert ours == original
            met["append-only"] += 1
            continue
        met["changed"] += 1
        if changes == "thoughts":
            assert same_without_thoughts(original.text, ours.text)
        turns = [turn for turn in chat.messages if turn["role"] == "assistant"]
        for number, (before, after) in enumerate(original.borders):
            if after.startswith(before) and shows_reasoning([turns[number]], after):
                assert ours.trained[number] == original.trained[number]  # what the model generates in this turn
    return met


def drops(name: str, chat: Conversation, original: Rendered, ours: Rendered) -> bool:
    """Checks a template that drops tool calls and reasoning fields; returns whether it drops a part of this chat."""
    kept = Conversation(without_dropped(chat.messages), {k: v for k, v in chat.inputs.items() if k != "tools"})
    assert rendered(ORIGINALS[name], kept, special(name)) == original
    assert rendered(builtin_text(name), kept, special(name)) == original
    turns = [turn for turn in chat.messages if turn["role"] == "assistant"]
    for turn, text in zip(turns, ours.trained, strict=True):
        assert turn.get("reasoning_content", "").strip() in text
        for call in turn.get("tool_calls", ()):
            made = {"name": call["function"]["name"], "arguments": call["function"]["arguments"]}
            assert f"<tool_call>\n{json.dumps(made, ensure_ascii=False)}\n</tool_call>" in text
    return ours != original


@pytest.mark.parametrize("name", ["qwen3", "deepseek-r1"])
def test_the_same_text_wherever_the_original_only_appends(name: str) -> None:
    met = check(name, 200)
    assert sum(met.values()) == 200
    assert met["changed"] > 100
    assert met["append-only"] > 30 or name == "deepseek-r1"  # the original never renders what the model generates


@pytest.mark.slow
@pytest.mark.parametrize("name", list(ORIGINALS))
def test_every_template_is_the_original_wherever_it_only_appends(name: str) -> None:
    met = check(name, 200)
    assert sum(met.values()) == 200
    assert met["append-only"] > 25 or name == "deepseek-r1"
    assert bool(met["changed"]) == bool(BUILTIN[name].rewrites)


@pytest.mark.parametrize("name", list(ORIGINALS))
def test_a_few_conversations_of_every_template(name: str) -> None:
    assert sum(check(name, 12).values()) == 12


def test_every_name_of_the_recipe_has_a_template() -> None:
    assert set(TEMPLATES) == {"auto", "none", *BUILTIN}
    assert set(ORIGINALS) == set(BUILTIN) - {"qwen"}  # its words for tools are lockstep's own


# -- which version belongs to a template -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(ORIGINALS))
def test_the_version_of_a_template_is_recognised(tokenizer: Any, name: str) -> None:
    tokenizer.chat_template = ORIGINALS[name]
    assert append_only_version(tokenizer) == (name if name in REWRITTEN else None)


@pytest.mark.parametrize(
    ("found", "instead"),
    [
        ("<|im_start|>user", "<|im_start|>person"),  # another format
        ("<tool_call>\n", "<call>\n"),  # another format of tool calls
        ("<|im_start|>assistant\n<think>\n", "<|im_start|>assistant\n<think>"),  # other space
        ("<think>\n\n</think>\n\n", "<think></think>"),  # another generation prompt
    ],
)
def test_a_template_that_differs_has_no_version(tokenizer: Any, found: str, instead: str) -> None:
    known = QWEN3.replace("'<|im_start|>' ~ m.role", "'<|im_start|>user'")
    tokenizer.chat_template = known
    assert append_only_version(tokenizer) == "qwen3"
    tokenizer.chat_template = known.replace(found, instead)
    assert tokenizer.chat_template != known
    assert append_only_version(tokenizer) is None


def test_the_marks_of_a_named_template_must_be_tokens(tokenizer: Any) -> None:
    with refuses("data.template deepseek-r1", "unknown-token", "<｜User｜>"):
        with_template(tokenizer, Data(train="x", template="deepseek-r1"))
    # As in DeepSeek's tokenizers: the roles are tokens, but not special ones.
    tokenizer.add_tokens(["<｜User｜>", "<｜Assistant｜>"])
    with refuses("data.template deepseek-r1", "unknown-token", "<｜end▁of▁sentence｜>"):
        with_template(tokenizer, Data(train="x", template="deepseek-r1"))
    tokenizer.add_special_tokens({"eos_token": "<｜end▁of▁sentence｜>"})
    with_template(tokenizer, Data(train="x", template="deepseek-r1"))
    assert tokenizer.chat_template == builtin_text("deepseek-r1")


@pytest.mark.parametrize(("name", "ends"), [("glm4.5", "<|user|><|observation|>"), ("gpt-oss", "<|return|><|call|>")])
def test_generation_stops_after_answers_and_after_calls(tokenizer: Any, name: str, ends: str) -> None:
    tokenizer.add_special_tokens({"extra_special_tokens": list(BUILTIN[name].tokens)})
    data = Data(train="x", template=name, template_arguments={} if name == "glm4.5" else {"date_string": "2025-01-31"})
    with_template(tokenizer, data)
    assert turn_ends(tokenizer, data) == tokenizer(ends)["input_ids"]
    assert turn_ends(tokenizer, Data(train="x")) == []
    shown = tokenizer.apply_chat_template([{"role": "user", "content": "a"}], tokenize=False)
    assert ("Current date: 2025-01-31\n" in shown) == (name == "gpt-oss")


# -- messages after a generated turn -----------------------------------------------------------------------------------


@pytest.mark.parametrize("template", [QWEN3, builtin_text("qwen3")], ids=["original", "built-in"])
def test_appended_messages_are_what_the_template_writes(tokenizer: Any, template: str) -> None:
    """Token by token: the generated turns stay, and the rest is as in the whole chat of the append-only template."""
    tokenizer.chat_template = template
    compared = 0
    for chat in conversations(60, seed=3):
        ours = rendered(builtin_text("qwen3"), chat, special("qwen3"))
        assert ours is not None
        inputs = TemplateInputs(chat.inputs.get("tools", ()), {k: v for k, v in chat.inputs.items() if k != "tools"})
        turns = [number for number, turn in enumerate(chat.messages) if turn["role"] == "assistant"]
        ids = tokenizer(ours.borders[0][0])["input_ids"]
        for number, (turn, generated) in enumerate(zip(turns, ours.trained, strict=True)):
            ids += tokenizer(generated.removesuffix("\n"))["input_ids"]  # it stops at the end token
            between = chat.messages[turn + 1 : turns[number + 1] if number + 1 < len(turns) else None]
            if between:
                ids += tokenizer(messages_after_turn(tokenizer, between, ORIGIN, inputs))["input_ids"]
                compared += 1
        assert ids == tokenizer(ours.text.removesuffix("\n"))["input_ids"]
    assert compared > 60


@pytest.mark.parametrize("template", [QWEN3, builtin_text("qwen3")], ids=["original", "built-in"])
def test_a_rollout_of_several_turns_is_the_append_only_chat(tokenizer: Any, template: str) -> None:
    """The engine's tokens are kept, so every one of them has the log-prob with which it was sampled."""
    tokenizer.chat_template = template
    said = "<think>\nr\n</think>\n\nB<|im_end|>"
    between = [[{"role": "tool", "content": "19"}], [{"role": "user", "content": "more"}]]

    def rollout(prompt: Prompt, generate: Generate) -> tuple[list[int], list[int]]:
        ids, trained = [], []
        for messages in [*between, []]:
            turn = generate([*prompt.ids, *ids])
            added = generate.encode_messages(messages) if messages else []
            ids += turn.ids + added
            trained += [1] * len(turn.ids) + [0] * len(added)
        return ids, trained

    question = Question("s", [{"role": "user", "content": "a"}], "", ORIGIN)
    prompt = prompt_ids(tokenizer, question)
    engine = FunctionEngine(
        Canned(tokenizer(said)["input_ids"]),
        register_callable(ROLLOUT_FUNCTION, rollout),
        lambda text: tokenizer(text)["input_ids"],
        tokenizer.decode,
        len(tokenizer),
        60,
        tolerant=False,
        encode_messages=message_encoder(tokenizer),
    )
    (made,) = engine.generate([Request(prompt, 0, question=question)], Sampling(500))
    answer = {"role": "assistant", "content": "<think>r</think>B"}
    chat = [*question.prompt, answer, *between[0], answer, *between[1], answer]
    whole = rendered(builtin_text("qwen3"), Conversation(chat), special("qwen3"))
    assert whole is not None
    assert tokenizer.decode([*prompt, *made.ids]) == whole.text.removesuffix("\n")
    assert [*prompt, *made.ids] == tokenizer(whole.text.removesuffix("\n"))["input_ids"]
    assert made.loss_mask.count(1) == 3 * len(tokenizer(said)["input_ids"])


def test_messages_need_an_end_token_before_them(tokenizer: Any) -> None:
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    with pytest.raises(Refusal, match=r"\[no-end-token\]"):
        messages_after_turn(tokenizer, [{"role": "user", "content": "more"}], ORIGIN)
