"""Which turns of a chat are trained, in which context (`data.turns`, `data.train_roles`), and with which arguments of
the template; every remedy that a refusal advises is tried."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import run, write_jsonl
from conversations import conversations
from lockstep.data.array_store import Store, stored
from lockstep.data.encode.builtin_templates import BUILTIN, builtin_text
from lockstep.data.encode.chat_template import with_arguments
from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.preference_rows import RankingRows
from lockstep.data.encode.prompt_rows import PromptRows
from lockstep.data.encode.sft_rows import SupervisedRows
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Origin
from original_templates import (
    CHATML,
    DEEPSEEK_R1,
    GEMMA,
    GLM45,
    GPT_OSS,
    MISTRAL,
    QWEN3,
    QWEN25,
    QWEN35_NOTHINK,
    SMOLLM3,
)
from refusals import refuses

ORIGIN = Origin("rows.jsonl", 7)
Row = dict[str, Any]
USER, BOT = "<|im_start|>user\n", "<|im_start|>assistant\n"
# A template that no built-in one replaces: only the last turn keeps its reasoning.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Its generation prompt opens the reasoning; STRIPS removes the reasoning from every turn, also from the last one.
OPENS = CHATML.replace("'<|im_start|>assistant\n'", "'<|im_start|>assistant\n<think>\n'")
STRIPS = OPENS.replace("m.content", "m.content.split('</think>')[-1]")


def user(text: str) -> Row:
    return {"role": "user", "content": text}


def bot(text: str, **more: Any) -> Row:
    return {"role": "assistant", "content": text, **more}


TWO = [user("a"), bot("<think>r</think>B"), user("c"), bot("D", reasoning_content="s")]


class Rows:
    """The sequences of rows, as text with the trained parts in [[double brackets]]."""

    eos = "<|im_end|>"
    special: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __call__(self, jinja: str, *rows: Row, **data: Any) -> list[str]:
        self.tokenizer: Any = load_tokenizer(str(self.folder))
        self.tokenizer.add_special_tokens({"eos_token": self.eos, "extra_special_tokens": list(self.special)})
        self.tokenizer.chat_template = jinja
        settings = Data(train=["x"], **data)
        with_arguments(self.tokenizer, settings.template_arguments)
        columns = list(dict.fromkeys(key for row in rows for key in row))
        self.reader = SupervisedRows(ColumnFinder(Source(path="x"), settings, columns), self.tokenizer, 5000)
        self.items = [kept.item for row in rows for kept in self.reader(row, ORIGIN) if kept is not None]
        return [self._shown(item) for item in self.items]

    def _shown(self, example: Any) -> str:
        runs = re.finditer(b"\0+|\1+", bytes(example.loss_mask))
        texts = [(self.tokenizer.decode(list(example.ids[run.start() : run.end()])), run[0][0]) for run in runs]
        return "".join(f"[[{text}]]" if trained else text for text, trained in texts)


@pytest.fixture
def rows(tiny_folder: Path) -> Rows:
    return Rows(tiny_folder)


def chat(*messages: Row, **columns: Any) -> Row:
    return {"messages": list(messages), **columns}


# -- data.turns --------------------------------------------------------------------------------------------------------

FIRST = f"{USER}a<|im_end|>\n{BOT}[[<think>\nr\n</think>\n\nB<|im_end|>]]\n"
LAST = f"{USER}a<|im_end|>\n{BOT}B<|im_end|>\n{USER}c<|im_end|>\n{BOT}[[<think>\ns\n</think>\n\nD<|im_end|>]]\n"


def test_all_turns_are_trained_in_the_append_only_version(rows: Rows) -> None:
    (shown,) = rows(QWEN3, chat(*TWO))
    assert shown == FIRST + f"{USER}c<|im_end|>\n{BOT}[[<think>\ns\n</think>\n\nD<|im_end|>]]\n"
    assert rows.reader.found() == (
        "messages (messages); 2 turns trained; 1 rows use the append-only template qwen3, because the tokenizer's "
        "template changes earlier turns"
    )


def test_each_turn_is_trained_in_the_context_of_its_generation(rows: Rows) -> None:
    assert rows(QWEN3, chat(*TWO), turns="each") == [FIRST, LAST]
    assert rows.reader.found() == "messages (messages); 2 turns trained, one sequence per turn (data.turns=each)"


def test_the_last_turn_alone(rows: Rows) -> None:
    assert rows(QWEN3, chat(*TWO, user("bye")), turns="last") == [LAST]
    assert rows.reader.found() == (
        "messages (messages); 1 turns trained, 1 not (weight 0, data.turns=last, or a row that is too long)"
    )
    # A turn of weight 0 is not trained, and is not the last one.
    assert rows(QWEN3, chat(*TWO[:3], TWO[3] | {"weight": 0}), turns="last") == [FIRST]
    with refuses("rows.jsonl row 7", "no-trained-token"):
        rows(QWEN3, chat(user("a"), bot("b", weight=0)), turns="last")


# -- templates that drop more than reasoning ---------------------------------------------------------------------------

WEATHER = {"function": {"name": "weather", "arguments": {"city": "Rome"}}, "id": "call00001", "type": "function"}
TOOLS = [{"name": "weather", "description": "Weather.", "parameters": {"properties": {"city": {"type": "string"}}}}]
CALLS = [user("a"), bot("", tool_calls=[WEATHER]), {"role": "tool", "content": "19"}, bot("B", reasoning_content="r")]


def test_glm_turns_end_with_the_token_of_the_next_message(rows: Rows) -> None:
    rows.special = BUILTIN["glm4.5"].tokens
    (shown,) = rows(GLM45, chat(*TWO))
    first = "[gMASK]<sop><|user|>\na<|assistant|>[[\n<think>r</think>\nB<|user|>]]\nc<|assistant|>"
    assert shown == first + "[[\n<think>s</think>\nD<|user|>]]"
    assert "glm4.5, because the tokenizer's template writes no end token" in rows.reader.found()
    # One turn is enough: the original has no end token there either.
    (shown,) = rows(GLM45, chat(user("a"), bot("B")))
    assert shown == "[gMASK]<sop><|user|>\na<|assistant|>[[\n<think></think>\nB<|user|>]]"
    (shown,) = rows(GLM45, chat(*CALLS, tools=TOOLS))
    call = "\n<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Rome</arg_value>\n</tool_call>"
    assert f"[[\n<think></think>{call}<|observation|>]]\n<tool_response>\n19\n</tool_response><|assistant|>" in shown
    assert shown.endswith("[[\n<think>r</think>\nB<|user|>]]")
    # In the context of its generation, the first turn has no reasoning.
    (last,) = rows(GLM45, chat(*TWO), turns="last")
    assert last == (
        "[gMASK]<sop><|user|>\na<|assistant|>\n<think></think>\nB<|user|>\nc<|assistant|>"
        "[[\n<think>s</think>\nD<|user|>]]"
    )
    # Another format is not the template of GLM, so the missing end token is refused.
    with refuses("rows.jsonl row 7", "no-end-token"):
        rows(GLM45.replace("<tool_response>", "<result>"), chat(user("a"), bot("B")))


def test_gpt_oss_turns_keep_their_analysis(rows: Rows) -> None:
    rows.special, rows.eos = BUILTIN["gpt-oss"].tokens[:-1], "<|return|>"
    (shown,) = rows(GPT_OSS, chat(user("a"), bot("B", thinking="r"), user("c"), bot("D", reasoning_content="s")))
    analysis = "<|start|>assistant[[<|channel|>analysis<|message|>{}<|end|>"
    turn = analysis + "<|start|>assistant<|channel|>final<|message|>{}<|return|>]]"
    asked = "<|start|>user<|message|>{}<|end|>"
    assert shown.endswith(asked.format("a") + turn.format("r", "B") + asked.format("c") + turn.format("s", "D"))
    assert "1 rows use the append-only template gpt-oss" in rows.reader.found()
    call = {**CALLS[1], "reasoning_content": "n"}
    (shown,) = rows(GPT_OSS, chat(CALLS[0], call, *CALLS[2:], tools=TOOLS))
    assert (
        "<|start|>assistant[[<|channel|>analysis<|message|>n<|end|><|start|>assistant to=functions.weather"
        '<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>]]<|start|>functions.weather to=assistant'
        '<|channel|>commentary<|message|>"19"<|end|>'
    ) in shown
    two = {
        **CALLS[1],
        "tool_calls": [WEATHER, {**WEATHER, "function": {"name": "weather", "arguments": {"city": "Oslo"}}}],
    }
    with refuses("rows.jsonl row 7", "template-changes-chat"):  # the original drops the second call
        rows(GPT_OSS, chat(CALLS[0], two, CALLS[3], tools=TOOLS))


@pytest.mark.parametrize("turns", ["all", "last"])
def test_smollm3_keeps_tool_calls_and_reasoning(rows: Rows, turns: str) -> None:
    (shown,) = rows(SMOLLM3, chat(*CALLS, tools=TOOLS), turns=turns)
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'
    assert f"assistant\n{f'[[{call}]]' if turns == 'all' else call}\n" in shown
    assert shown.endswith("user\n19<|im_end|>\n<|im_start|>assistant\n[[<think>\nr\n</think>\nB<|im_end|>]]\n")
    assert "{'name': 'weather'" in shown.partition("<|im_start|>user")[0]
    assert "smollm3, because the tokenizer's template drops tool calls or reasoning" in rows.reader.found()
    # Without them the original renders the row, and its markers decide what is trained.
    (shown,) = rows(SMOLLM3, chat(user("a"), bot("B")), turns=turns)
    assert shown.endswith("user\na<|im_end|>\n[[<|im_start|>assistant\nB<|im_end|>]]\n")
    # A template that writes the tools in another way has no version.
    other = SMOLLM3.replace("{%- for m in messages %}", "{{ tools | tojson if tools else '' }}{%- for m in messages %}")
    with refuses("rows.jsonl row 7", "template-changes-chat"):
        rows(other, chat(*CALLS, tools=TOOLS), turns=turns)


def test_turns_of_rows_that_are_too_long_are_not_counted_as_trained(rows: Rows) -> None:
    long = chat(user("a"), bot("b"), user("c"), bot("d" * 5000))
    rows(QWEN3, long, chat(*TWO), turns="each", overlong="drop")
    assert "; 3 turns trained, one sequence per turn (data.turns=each), 1 not" in rows.reader.found()
    rows(CHATML, long, chat(user("a"), bot("b")), overlong="drop")
    assert "; 1 turns trained, 2 not" in rows.reader.found()
    rows(CHATML, chat(user("a"), bot("b"), user("c" * 5000), bot("d")), overlong="truncate_right")
    assert "; 1 turns trained, 1 not" in rows.reader.found()


@pytest.mark.parametrize("turns", ["each", "last"])
def test_the_context_is_the_template_s_own(rows: Rows, turns: str) -> None:
    """Against `apply_chat_template`, on chats with tools: the prompt of a turn, and the turn after it."""
    for made in conversations(20, seed=5):
        tools = made.inputs.get("tools")
        given = {key: value for key, value in made.inputs.items() if key != "tools"}
        rows(QWEN3, {"messages": made.messages, "tools": tools, "chat_template_kwargs": given}, turns=turns)
        ends = [number for number, turn in enumerate(made.messages) if turn["role"] == "assistant"]
        ends = ends if turns == "each" else ends[-1:]
        assert len(rows.items) == len(ends)
        for item, end in zip(rows.items, ends, strict=True):
            ask = {"tools": tools, "add_generation_prompt": True, "tokenize": True, "return_dict": False, **given}
            prompt = rows.tokenizer.apply_chat_template(made.messages[:end], **ask)
            whole = rows.tokenizer.apply_chat_template(
                made.messages[: end + 1], **{**ask, "add_generation_prompt": False}
            )
            assert list(item.ids) == whole
            assert list(item.loss_mask).index(1) == len(prompt)
            assert list(item.loss_mask).count(1) == len(whole) - len(prompt) - 1  # the line break is not generated


@pytest.mark.parametrize(
    ("turns", "expected"),
    [
        ("all", ["Q:a|A:<think>\n[[r\n</think>\n\nB$]]Q:c|A:<think>\n[[s\n</think>\n\nD$]]"]),
        ("each", ["Q:a|A:<think>\n[[r\n</think>\n\nB$]]", "Q:a|A:B$Q:c|A:<think>\n[[s\n</think>\n\nD$]]"]),
        ("last", ["Q:a|A:B$Q:c|A:<think>\n[[s\n</think>\n\nD$]]"]),
    ],
)
def test_reasoning_that_the_template_strips_is_trained_after_its_prompt(
    rows: Rows, turns: str, expected: list[str]
) -> None:
    """DeepSeek-R1: the template never shows the reasoning; the context is as in generation, the turn is complete."""
    rows.eos = "<｜end▁of▁sentence｜>"
    words = {"Q:": "<｜User｜>", "|A:": "<｜Assistant｜>", "$": rows.eos}
    shown = rows(DEEPSEEK_R1, chat(*TWO), turns=turns)
    for short, mark in words.items():
        shown = [text.removeprefix("<|im_start|>").replace(mark, short) for text in shown]
    assert shown == expected
    assert "; 1 rows use the append-only template deepseek-r1" in rows.reader.found()


def test_a_system_message_that_the_template_moves(rows: Rows) -> None:
    """Mistral's template writes the system message at the last user turn, and drops it if an answer follows."""
    told = chat({"role": "system", "content": "S"}, user("a"), bot("B"), user("c"), bot("D"))
    assert rows(MISTRAL, told) == ["<|im_start|>[INST] S\n\na[/INST][[ B<|im_end|>]][INST] c[/INST][[ D<|im_end|>]]"]
    assert rows(MISTRAL, told, turns="each")[1] == (
        "<|im_start|>[INST] a[/INST] B<|im_end|>[INST] S\n\nc[/INST][[ D<|im_end|>]]"
    )


def pairs(folder: Path, template: str, eos: str, row: Row) -> tuple[list[str], str]:
    """The texts of a preference pair, and what is reported of it."""
    tokenizer: Any = load_tokenizer(str(folder))
    tokenizer.add_special_tokens({"eos_token": eos})
    tokenizer.chat_template = template
    finder = ColumnFinder(Source(path="x"), Data(train=["x"]), list(row))
    reader = RankingRows(finder, tokenizer, 5000, read="response", several=False)
    (kept,) = reader(row, ORIGIN)
    assert kept is not None
    return [tokenizer.decode(list(example.ids)) for example in kept.item.examples], reader.found()


def test_preference_pairs_with_reasoning_keep_it(tiny_folder: Path) -> None:
    row = {"prompt": "a", "chosen": "<think>\nr\n</think>\n\nB", "rejected": "<think>\ns\n</think>\n\nC"}
    texts, found = pairs(tiny_folder, DEEPSEEK_R1, "<｜end▁of▁sentence｜>", row)
    assert texts[0].endswith("<｜User｜>a<｜Assistant｜><think>\nr\n</think>\n\nB<｜end▁of▁sentence｜>")
    assert "1 rows use the append-only template deepseek-r1" in found


def test_a_pair_of_several_turns_is_told_what_to_do(tiny_folder: Path) -> None:
    """`data.turns` is no key of preference pairs; the advice is to make the first turns a part of the prompt."""
    start = [bot("<think>r</think>B"), user("c")]
    row = {"prompt": [user("a")], "chosen": [*start, bot("D")], "rejected": [*start, bot("E")]}
    with refuses("rows.jsonl row 7", "template-unstable", "message 2", remedy="into the prompt") as caught:
        pairs(tiny_folder, FORGETS, "<|im_end|>", row)
    assert "data.turns" not in str(caught.value)
    moved = {"prompt": [user("a"), *start], "chosen": [bot("D")], "rejected": [bot("E")]}
    assert pairs(tiny_folder, FORGETS, "<|im_end|>", moved)[0][0].endswith(f"{BOT}D<|im_end|>\n")
    # A template that is recognised renders such a row in its append-only version.
    assert "append-only template qwen3" in pairs(tiny_folder, QWEN3, "<|im_end|>", row)[1]


# -- data.train_roles --------------------------------------------------------------------------------------------------


def test_messages_of_other_roles_are_trained_where_they_stand(rows: Rows) -> None:
    """The content `s` also stands in the words of the template; `user` and `b` stand in other messages."""
    row = chat({"role": "system", "content": "user"}, user("s"), bot("b"), user("b"), bot("user"))
    trained = ["system", "user", "assistant"]
    (shown,) = rows(CHATML, row, train_roles=trained)
    assert shown == (
        f"<|im_start|>system\n[[user<|im_end|>]]\n{USER}[[s<|im_end|>]]\n{BOT}[[b<|im_end|>]]\n"
        f"{USER}[[b<|im_end|>]]\n{BOT}[[user<|im_end|>]]\n"
    )
    assert "5 turns of system, user, assistant trained" in rows.reader.found()
    # The same template with generation markers, which say nothing of users.
    marked = load_tokenizer(str(rows.folder)).chat_template
    assert rows(marked, row, train_roles=trained) == [shown]
    (only,) = rows(CHATML, row, train_roles=["user"])
    assert only.count("[[") == 2


def test_results_of_tools_are_trained_without_their_tags(rows: Rows) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {}}}
    results = [{"role": "tool", "content": "19"}, {"role": "tool", "content": ""}, {"role": "tool", "content": "20"}]
    (shown,) = rows(
        QWEN25, chat(user("a"), bot("", tool_calls=[call]), *results, bot("B")), train_roles=["tool", "assistant"]
    )
    assert "<tool_response>\n[[19]]\n</tool_response>" in shown
    assert "<tool_response>\n[[20]]\n</tool_response>" in shown
    assert shown.count("[[") == 4


def test_a_message_that_the_template_changes_is_not_trained(rows: Rows) -> None:
    upper = CHATML.replace("m.content", "(m.content | upper if m.role == 'user' else m.content)")
    with refuses("rows.jsonl row 7", "template-changes-chat", "message 1 (user)"):
        rows(upper, chat(user("a"), bot("b")), train_roles=["user", "assistant"])


# -- reasoning ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "turn",
    [
        bot("<think>\nr\n</think>\n\nB"),
        bot("<think>r</think>B"),
        bot("r\n</think>\n\nB"),  # as R1's answers come: the prompt has opened the reasoning
        bot("B", reasoning_content="r"),
        bot("B", reasoning_content="\nr\n"),
        bot("B", reasoning="r"),
        bot("B", reasoning_content=[{"type": "text", "text": "r"}]),
        bot("B", thinking="r"),
    ],
)
def test_every_form_of_reasoning_is_the_same_text(rows: Rows, turn: Row) -> None:
    assert rows(QWEN3, chat(user("a"), turn)) == [f"{USER}a<|im_end|>\n{BOT}[[<think>\nr\n</think>\n\nB<|im_end|>]]\n"]


@pytest.mark.parametrize("turn", [bot("B"), bot("<think>\n\n</think>\n\nB"), bot("B", reasoning_content="")])
def test_empty_reasoning_is_an_empty_block(rows: Rows, turn: Row) -> None:
    block = "<think>\n\n</think>\n\n"
    assert rows(QWEN3, chat(user("a"), turn)) == [f"{USER}a<|im_end|>\n{BOT}[[{block}B<|im_end|>]]\n"]
    # Without thinking the block belongs to the prompt.
    given = chat(user("a"), turn, enable_thinking=False)
    assert rows(QWEN3, given) == [f"{USER}a<|im_end|>\n{BOT}{block}[[B<|im_end|>]]\n"]


@pytest.mark.parametrize(
    ("turn", "problem"),
    [
        (bot("<think>r</think>B", reasoning_content="s"), ("invalid-chat", "message 2 (assistant)", "twice")),
        (bot("B", reasoning_content="s", thinking="t"), ("invalid-chat", "reasoning_content and in thinking")),
        (bot("B", reasoning_content={"text": "s"}), ("not-text", "reasoning_content of message 2 (assistant) is dict")),
        (bot("Well <think>r</think>B"), ("template-changes-chat", "assistant turn 1 (message 2)")),
        (bot("<think>r</think>B</think>C"), ("template-changes-chat", "assistant turn 1 (message 2)")),
    ],
)
def test_reasoning_that_would_be_lost_is_refused(rows: Rows, turn: Row, problem: tuple[str, ...]) -> None:
    with refuses("rows.jsonl row 7", *problem):
        rows(QWEN3, chat(user("a"), turn))


def test_special_tokens_in_reasoning_are_counted(rows: Rows) -> None:
    rows(QWEN3, chat(user("a"), bot("B", reasoning_content="r")), chat(user("a"), bot("B", thinking="<|im_end|>")))
    assert rows.reader.special_rows == 1


# -- arguments of the template, per row --------------------------------------------------------------------------------


def test_arguments_of_a_row_take_precedence(rows: Rows) -> None:
    one, off = chat(user("a"), bot("B")), "<think>\n\n</think>\n\n[["
    shown = rows(
        QWEN3,
        one | {"enable_thinking": True, "chat_template_kwargs": None},
        one | {"enable_thinking": None, "chat_template_kwargs": '{"enable_thinking": true}'},
        one | {"enable_thinking": None, "chat_template_kwargs": {"enable_thinking": None}},
        one | {"enable_thinking": False, "chat_template_kwargs": {"enable_thinking": False}},
        template_arguments={"enable_thinking": False},
    )
    assert [off in text for text in shown] == [False, False, True, True]
    assert "enable_thinking from enable_thinking, template arguments from chat_template_kwargs" in rows.reader.found()


@pytest.mark.parametrize(
    ("columns", "problem"),
    [
        ({"enable_thinking": "yes"}, ("invalid-value", "enable_thinking is 'yes'")),
        ({"chat_template_kwargs": [1]}, ("invalid-value", "chat_template_kwargs is list")),
        ({"chat_template_kwargs": "{"}, ("invalid-json", "chat_template_kwargs")),
        ({"chat_template_kwargs": {"tools": []}}, ("invalid-name", "'tools'")),
        ({"chat_template_kwargs": {"style": "x"}}, ("unused-key", "style")),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            ("invalid-value", "chat_template_kwargs has another value"),
        ),
    ],
)
def test_bad_arguments_of_a_row_are_refused(rows: Rows, columns: Row, problem: tuple[str, ...]) -> None:
    with refuses("rows.jsonl row 7", *problem):
        rows(QWEN3, chat(user("a"), bot("B"), **columns))


def test_prompts_of_online_methods_have_arguments_too(rows: Rows) -> None:
    tokenizer: Any = load_tokenizer(str(rows.folder))
    tokenizer.chat_template = QWEN3
    finder = ColumnFinder(Source(path="x"), Data(train=["x"]), ["prompt", "ground_truth", "enable_thinking"])
    reader = PromptRows(finder, tokenizer, 5000)
    made = [
        reader({"prompt": "a", "ground_truth": "1", "enable_thinking": thinks}, ORIGIN)[0]
        for thinks in (False, True, None)
    ]
    prompts = [kept.item for kept in made if kept is not None]
    texts = [tokenizer.decode(prompt.ids) for prompt in prompts]
    assert texts == [f"{USER}a<|im_end|>\n{BOT}{block}" for block in ("<think>\n\n</think>\n\n", "", "")]
    data = stored(prompts, [0, 1, 2], {}, lambda number: ORIGIN)
    assert data is not None
    assert list(Store(data, lambda number: ORIGIN)) == prompts  # also in the row cache


def test_a_marked_template_refuses_arguments_too(rows: Rows) -> None:
    marked = load_tokenizer(str(rows.folder)).chat_template
    with refuses("rows.jsonl row 7", "unused-key", "enable_thinking"):
        rows(marked, chat(user("a"), bot("B"), enable_thinking=True))


# -- refusals, and that their remedies work ----------------------------------------------------------------------------


def refused(rows: Rows, jinja: str, row: Row, **data: Any) -> str:
    with pytest.raises(Refusal) as caught:
        rows(jinja, row, **data)
    assert caught.value.problems[0].where == "rows.jsonl row 7"
    return str(caught.value)


def test_a_turn_that_later_messages_change_is_trained_with_turns_each(rows: Rows) -> None:
    row = chat(user("a"), bot("<think>r</think>B"), user("c"), bot("D"))
    told = refused(rows, FORGETS, row)
    assert "renders message 2 differently once later messages follow" in told
    assert "data.turns=each" in told
    assert [text.count("[[") for text in rows(FORGETS, row, turns="each")] == [1, 1]
    assert len(rows(FORGETS, row, turns="last")) == 1
    assert len(rows(CHATML, row)) == 1  # a template that only appends


def test_a_last_answer_is_not_said_to_be_followed(rows: Rows) -> None:
    told = refused(rows, "{{ messages | length }}" + CHATML, chat(user("a"), bot("b")))
    assert "later messages" not in told
    assert "renders the messages before message 2 (assistant) differently when its text follows" in told


def test_an_answer_is_begun_as_advised(rows: Rows) -> None:
    told = refused(rows, OPENS, chat(user("a"), bot("b")))
    assert r"ends with '<think>\n', but message 2 (assistant) is rendered without it" in told
    assert r"begin the answer with '<think>\n'" in told
    (shown,) = rows(OPENS, chat(user("a"), bot("<think>\nb")))
    assert shown.endswith(f"{BOT}<think>\n[[b<|im_end|>]]\n")


@pytest.mark.parametrize("answer", ["b", "<think>\nr\n</think>\n\nb"])
def test_no_beginning_is_advised_that_the_template_strips(rows: Rows, answer: str) -> None:
    told = refused(rows, STRIPS, chat(user("a"), bot(answer)))
    assert "begin the answer" not in told
    assert "later messages" not in told
    assert "use a template that keeps the reasoning of assistant turns (data.template" in told
    assert rows(OPENS, chat(user("a"), bot("<think>\nr\n</think>\n\nb")))


@pytest.mark.parametrize(("template", "columns"), [(QWEN3, {"enable_thinking": False}), (QWEN35_NOTHINK, {})])
@pytest.mark.parametrize("turns", ["all", "each"])
def test_reasoning_without_thinking_is_refused(rows: Rows, template: str, columns: Row, turns: str) -> None:
    told = refused(rows, template, chat(user("a"), bot("b"), *TWO, **columns), turns=turns)
    assert "enable_thinking is not true, but message 4 (assistant) has reasoning" in told
    assert rows(template, chat(user("a"), bot("b"), *TWO, **columns | {"enable_thinking": True}), turns=turns)
    assert rows(template, chat(user("a"), bot("B"), user("c"), bot("D"), **columns), turns=turns)


def test_a_key_of_reasoning_that_the_template_lacks(rows: Rows) -> None:
    told = refused(rows, QWEN25, chat(user("a"), bot("B", reasoning_content="r")))
    assert "drops the reasoning_content from the trained text of assistant turn 1 (message 2)" in told
    assert "write it as <think>...</think> into the content" in told
    (shown,) = rows(QWEN25, chat(user("a"), bot("<think>\nr\n</think>\n\nB")))
    assert "[[<think>\nr\n</think>\n\nB<|im_end|>]]" in shown
    strips = CHATML.replace("m.content", "m.content.split('</think>')[-1]")
    assert "write it as" not in refused(rows, strips, chat(user("a"), bot("B", reasoning_content="r")))


def test_a_named_template_is_used_as_it_is_and_its_version_is_advised(rows: Rows) -> None:
    rows.eos = "<｜end▁of▁sentence｜>"
    row = chat(user("a"), bot("<think>r</think>B"))
    assert "set data.template=deepseek-r1" in refused(rows, DEEPSEEK_R1, row, template="own.jinja")
    assert rows(builtin_text("deepseek-r1"), row, template="deepseek-r1") == rows(DEEPSEEK_R1, row)


@pytest.mark.parametrize("marks", ["", "{% generation %}{% endgeneration %}"])
def test_a_template_that_fails_names_the_message(rows: Rows, marks: str) -> None:
    row = chat({"role": "system", "content": "S"}, user("a"), bot("B"), user("c"), user("d"), bot("E"))
    told = refused(rows, GEMMA.replace("bos_token }}", f"bos_token }}}}{marks}"), row)
    assert "[template-error]: the chat template refuses this chat at message 5: roles must alternate" in told


@pytest.mark.slow
@pytest.mark.parametrize("turns", ["all", "each"])
def test_a_run_reports_turns_and_template_and_keeps_the_template(
    turns: str, tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    shutil.copytree(tiny_folder, "model")
    Path("model/chat_template.jinja").write_text(QWEN3)
    made = conversations(12, tools=False, seed=2)
    write_jsonl(Path("rows.jsonl"), [{"messages": one.messages, **one.inputs} for one in made])
    count = sum(turn["role"] == "assistant" for one in made for turn in one.messages)
    settings = {
        "model": {"path": "model"},
        "device": "cpu",
        "data": {"train": "rows.jsonl", "turns": turns},
        "batch": {"tokens": 2048, "rows_per_update": 4},
        "run": {"name": "chats", "folder": "runs", "steps": 1},
    }
    Path("recipe.yaml").write_text(yaml.safe_dump(settings))
    assert run("train", "recipe.yaml") == 0
    told = " ".join("".join(capsys.readouterr()).split())
    assert f"; {count} turns trained" in told
    assert ("rows use the append-only template qwen3" in told) == (turns == "all")
    assert ("one sequence per turn" in told) == (turns == "each")
    assert Path("runs/chats/export/chat_template.jinja").read_text() == QWEN3
