"""Rows as their projects publish them, read by `data show` and trained; what is dropped or no text is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from conftest import run, write_jsonl
from published_rows import CALL, EVERY, REWARD, WEATHER, Published, bot, share, user
from refusals import has_problem, printed_problems

# One of each kind of method; the others train the same way, once they are read.
DAILY = ("openai_tools", "ultrafeedback", "math_shepherd", "plain_prompts")


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "1000")
    return tmp_path


def write(case: Published, model: Path) -> Path:
    write_jsonl(Path(f"{case.name}.jsonl"), case.rows)
    Path("reward.py").write_text(REWARD)
    path = Path("recipe.yaml")
    path.write_text(yaml.safe_dump(case.recipe(f"{case.name}.jsonl", str(model), "runs")))
    return path


@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_data_show_reads_it_and_says_how(case: Published, tiny_folder: Path, capsys: Any) -> None:
    assert run("data", "show", write(case, tiny_folder), "--rows", 1) == 0
    told = capsys.readouterr()
    assert re.findall(r"\[\[(.*?)\]\]", told.out, re.DOTALL) == case.trained
    assert case.holds in told.out
    assert case.said in " ".join((told.out + told.err).split())


@pytest.mark.daily("plain_prompts", "openai_tools", "math_shepherd")
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case.name in DAILY else pytest.mark.slow, id=case.name) for case in EVERY],
)
def test_it_trains(case: Published, tiny_folder: Path) -> None:
    assert run("train", write(case, tiny_folder)) == 0
    lines = [json.loads(line) for line in Path("runs", case.name, "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if line["step"]] == [1, 2]


# -- what is refused ---------------------------------------------------------------------------------------------------

CALLS = [{"type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}]
TOOL_CHAT = [user("Rome?"), {"role": "assistant", "content": None, "tool_calls": CALLS}]
# A template that knows the roles of user and assistant, and nothing else.
DEAF = (
    "{% for m in messages %}{% if m['role'] in ('user', 'assistant') %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As reasoning models have it: of earlier turns the thoughts are cut off, and the model begins with its thoughts.
FORGETS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if loop.last else m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKS = DEAF.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
TWO = [user("a"), bot("b"), user("c"), bot("d")]
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("row", "template", "problem"),
    [
        (
            {"messages": [user("Rome?"), bot("19")], "tools": [WEATHER]},
            "auto",
            ("template-changes-chat", "tools", "'get_weather'"),
        ),
        (
            {"messages": TOOL_CHAT},
            "chatml",
            ("template-changes-chat", "'get_weather'", "turn 1"),
        ),
        (
            {"messages": [{"role": "system", "content": "Be brief."}, user("a"), bot("b")]},
            "deaf.jinja",
            ("template-changes-chat", "message 1 (system)", "'Be brief.'"),
        ),
        (
            # The same words elsewhere are not the system message.
            {"messages": [{"role": "system", "content": "Be brief."}, user("Say: Be brief."), bot("b")]},
            "deaf.jinja",
            ("template-changes-chat", "message 1 (system)", "'Be brief.'"),
        ),
        (
            {"messages": [user("a"), bot("b"), {"role": "tool", "content": "19"}, bot("c")]},
            "deaf.jinja",
            ("template-changes-chat", "message 3 (tool)", "'19'"),
        ),
        (
            {"messages": [user("a"), bot("b") | {"reasoning_content": "Because."}]},
            "auto",
            ("template-changes-chat", "reasoning_content", "turn 1"),
        ),
        (
            {"messages": [{"role": "user", "content": [PICTURE, {"type": "text", "text": "?"}]}, bot("b")]},
            "auto",
            ("not-text", "message 1 (user)", "'image_url'"),
        ),
        ({"prompt": "a", "response": "b", "images": ["x.png"]}, "auto", ("not-text", "images")),
        ({"text": "<image> a", "image": "x.png"}, "auto", ("not-text", "image")),
        ({"messages": [user("a") | {"images": ["x"]}, bot("b")]}, "auto", ("not-text", "message 1 (user)", "images")),
        (
            {"conversations": [share("human", "a"), share("narrator", "b")]},
            "auto",
            ("unknown-role", "message 2", "'narrator'"),
        ),
        (
            {"messages": [user("a"), bot("b") | {"tool_calls": [{"id": "1"}]}]},
            "auto",
            ("invalid-tool", "call 1 of message 2 (assistant)"),
        ),
        (
            {"messages": [user("a"), {"role": "assistant", "tool_calls": [{"name": "f", "arguments": "{city"}]}]},
            "qwen",
            ("invalid-json", "call 1 of message 2 (assistant)"),
        ),
        ({"messages": TOOL_CHAT, "tools": "[{"}, "qwen", ("invalid-json", "tools")),
        (
            {"messages": [user("a"), {"role": "assistant", "content": None}]},
            "auto",
            ("empty-field", "message 2 (assistant)"),
        ),
        ({"messages": [user("a"), bot("b") | {"weight": 0.5}]}, "auto", ("invalid-turn-weight", "message 2", "0.5")),
        ({"messages": [user("a"), bot("b") | {"weight": 0}]}, "auto", ("no-trained-token",)),
        ({"messages": [user("a"), bot("b") | {"train": "yes"}]}, "auto", ("invalid-turn-weight", "message 2", "'yes'")),
        (
            {"messages": [user("a") | {"train": True}, bot("b")]},
            "auto",
            ("invalid-turn-weight", "message 1 (user)", "(train)"),
        ),
        (
            {"messages": [user("a"), bot("b") | {"train": True, "weight": 0}]},
            "auto",
            ("invalid-turn-weight", "weight and train of message 2"),
        ),
        (
            {
                "messages": [
                    user("a"),
                    bot("b") | {"train_detail": [{"begin_offset": 0, "end_offset": 1, "train": True}]},
                ]
            },
            "auto",
            ("invalid-turn-weight", "message 2", "train_detail"),
        ),
        ({"messages": [user("a"), {"role": "robot", "content": "b"}]}, "auto", ("no-answer", "user, robot")),
        (
            {"prompt": str([user("a")]), "response": "b"},
            "auto",
            ("invalid-json", "prompt"),
        ),
        (
            {"messages": [user("a"), bot("b")]},
            "thinks.jinja",
            ("template-unstable", r"'<think>\n'", "message 2"),
        ),
        # Without a template there is no place for more than a prompt and a response.
        ({"prompt": [user("a")], "completion": [bot("b")]}, "none", ("no-chat-template", "data.template is none")),
        ({"prompt": "a", "completion": "b", "system": "c"}, "none", ("no-chat-template", "data.template is none")),
        ({"prompt": "a", "completion": "b", "tools": [WEATHER]}, "none", ("no-chat-template", "data.template is none")),
        (
            {"system": "x", "messages": [{"role": "system", "content": "y"}, user("a"), bot("b")]},
            "auto",
            ("invalid-chat", "system"),
        ),
        ({"instruction": "a", "history": ["b"], "output": "c"}, "auto", ("invalid-chat", "history")),
    ],
)
def test_what_would_be_lost_is_refused_by_row_and_part(
    row: dict[str, Any], template: str, problem: tuple[str, ...], tiny_folder: Path, capsys: Any
) -> None:
    Path("deaf.jinja").write_text(DEAF)
    Path("thinks.jinja").write_text(THINKS)
    case = Published("bad", "sft", [row], [], "", {"template": template})
    assert run("data", "show", write(case, tiny_folder)) != 0
    assert has_problem(printed_problems(capsys.readouterr().err), "bad.jsonl line 1", *problem)


@pytest.mark.parametrize(
    ("row", "template", "trained"),
    [
        # Which turns are trained, as axolotl and ms-swift say it.
        ({"messages": [TWO[0], TWO[1] | {"train": False}, *TWO[2:]]}, "auto", ["d<|im_end|>"]),
        ({"messages": [TWO[0], TWO[1] | {"training": 0}, *TWO[2:]]}, "auto", ["d<|im_end|>"]),
        ({"messages": [*TWO[:3], TWO[3] | {"loss": False}]}, "auto", ["b<|im_end|>"]),
        (
            {"messages": [user("a") | {"train": False, "loss": None}, bot("b") | {"train": True}]},
            "auto",
            ["b<|im_end|>"],
        ),
        # A turn that is not trained may be shortened.
        (
            {"messages": [user("a"), bot("<think>b</think>c") | {"weight": 0}, user("d"), bot("<think>e</think>f")]},
            "forgets.jinja",
            ["<think>e</think>f<|im_end|>"],
        ),
        # What the model is given to begin with is not trained.
        ({"messages": [user("a"), bot("<think>\nb</think>c")]}, "thinks.jinja", ["b</think>c<|im_end|>"]),
        # A tool may answer nothing, and a system message may be empty.
        (
            {"messages": [{"role": "system", "content": ""}, *TOOL_CHAT, {"role": "tool", "content": ""}, bot("c")]},
            "qwen",
            [CALL, "c<|im_end|>"],
        ),
        ({"messages": [{"role": "User", "content": "a"}, {"role": "AI", "content": "b"}]}, "auto", ["b<|im_end|>"]),
        ({"system": "x", "messages": [{"role": "system", "content": ""}, *TWO[:2]]}, "auto", ["b<|im_end|>"]),
        ({"messages": [share("human", "a") | {"role": None}, share("gpt", "b")]}, "auto", ["b<|im_end|>"]),
        # Chats written as text, as a column of csv has them; other text in brackets is text.
        ({"messages": json.dumps([user("a"), bot("b")])}, "auto", ["b<|im_end|>"]),
        ({"messages": [user("a"), bot("") | {"tool_calls": json.dumps(CALLS)}]}, "qwen", [CALL]),
        ({"prompt": json.dumps([user("a")], indent=1), "completion": "[{b}]"}, "auto", ["[{b}]<|im_end|>"]),
        ({"prompt": "a", "completion": '[{"from": "b", "to": "c"}]'}, "auto", ['[{"from": "b", "to": "c"}]<|im_end|>']),
        ({"prompt": "a", "completion": "[{'value': 1}]"}, "auto", ["[{'value': 1}]<|im_end|>"]),
    ],
)
def test_which_turns_are_trained(
    row: dict[str, Any], template: str, trained: list[str], tiny_folder: Path, capsys: Any
) -> None:
    Path("forgets.jinja").write_text(FORGETS)
    Path("thinks.jinja").write_text(THINKS)
    case = Published("turns", "sft", [row], [], "", {"template": template})
    assert run("data", "show", write(case, tiny_folder)) == 0
    assert re.findall(r"\[\[(.*?)\]\]", capsys.readouterr().out, re.DOTALL) == trained


@pytest.mark.parametrize(
    ("method", "plain", "marked"),
    [
        ("sft", {"prompt": "a", "response": "b"}, {"prompt": "a<|im_end|>", "response": "b"}),
        ("sft", {"messages": TWO}, {"messages": [*TWO[:3], bot("<|endoftext|>")]}),
        (
            "dpo",
            {"prompt": "a", "chosen": "b", "rejected": "c"},
            {"prompt": "a", "chosen": "b", "rejected": "<|im_end|>"},
        ),
        ("grpo", {"question": "a", "answer": "#### 1"}, {"question": "<|im_start|>", "answer": "#### 1"}),
    ],
)
def test_special_tokens_in_the_text_of_rows_are_counted(
    method: str, plain: dict[str, Any], marked: dict[str, Any], tiny_folder: Path, capsys: Any
) -> None:
    case = Published("marks", method, [plain, marked, marked], [], "")
    said = "2 rows hold special tokens of the tokenizer in their text, which are read as such and may end a turn"
    assert run("data", "show", write(case, tiny_folder)) == 0
    told = capsys.readouterr()
    assert f"{said}; the first is marks.jsonl line 2" in " ".join((told.out + told.err).split())
    assert run("data", "show", "recipe.yaml", "data.max_rows=1") == 0
    told = capsys.readouterr()
    assert "special tokens" not in told.out + told.err


def test_bad_rows_can_be_dropped_and_are_named(tiny_folder: Path, capsys: Any) -> None:
    good, bad = {"conversations": [share("human", "a"), share("gpt", "b")]}, {"conversations": [share("gpt", "b")]}
    case = Published("rows", "sft", [good, bad, good, {"conversations": None}], [], "", {"bad_rows": "drop"})
    assert run("data", "show", write(case, tiny_folder), "--rows", 4) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "2 kept, 2 dropped, 0 truncated" in told
    assert re.search(
        r"rows.jsonl: 2 .*\(data.bad_rows\): rows.jsonl line 2: .*; rows.jsonl line 4: conversations ", told
    )
    assert run("plan", "recipe.yaml", "data.bad_rows=error") != 0
    told = " ".join(capsys.readouterr().err.split())
    assert "2 problems" in told
    assert told.count("; data.bad_rows=drop leaves such rows out") == 1
    # Neither a setting that fits no row nor the length of one is a row's fault.
    assert run("data", "show", "recipe.yaml", "data.max_tokens=5") != 0
    assert has_problem(
        printed_problems(capsys.readouterr().err), "rows.jsonl line 1", "row-too-long", "23", "data.max_tokens=5"
    )
    write_jsonl(Path("rows.jsonl"), [bad])
    assert run("data", "show", "recipe.yaml") != 0
    assert has_problem(
        printed_problems(capsys.readouterr().err),
        "rows.jsonl",
        "no-rows",
        "1 bad rows",
        "data.bad_rows",
        "rows.jsonl line 1: ",
    )


def test_what_was_counted_of_a_dropped_row_does_not_count(tiny_folder: Path, capsys: Any) -> None:
    rows = [{"question": "a", "answer": "#### 1"}, {"question": [user("a"), bot("b")], "answer": "\\boxed{1}"}]
    rows[0]["question"] = [user("a")]
    case = Published("rows", "grpo", rows, [], "", {"bad_rows": "drop"})
    assert run("data", "show", write(case, tiny_folder)) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "1 bad rows dropped" in told
    assert "ground truth from answer, after its #### (as openai/gsm8k))" in told


def test_a_later_turn_of_a_response_may_be_left_untrained(tiny_folder: Path, capsys: Any) -> None:
    pair = {"prompt": [user("a")], "chosen": [*TWO[1:3], TWO[3] | {"weight": 0}], "rejected": [bot("e")]}
    assert run("data", "show", write(Published("pairs", "dpo", [pair], [], ""), tiny_folder)) == 0
    assert re.findall(r"\[\[(.*?)\]\]", capsys.readouterr().out, re.DOTALL) == ["b<|im_end|>", "e<|im_end|>"]


def test_a_prompt_that_loses_its_tools_is_refused(tiny_folder: Path, capsys: Any) -> None:
    row = {"prompt": [user("Rome?")], "tools": [WEATHER], "ground_truth": "19", "data_source": "x"}
    more = {"reward": {"function": "reward.py:length"}}
    assert run("data", "show", write(Published("bad", "grpo", [row], [], "", {}, more), tiny_folder)) != 0
    assert has_problem(printed_problems(capsys.readouterr().err), "bad.jsonl line 1", "template-changes-chat", "tools")
    assert run("data", "show", "recipe.yaml", "data.template=none") != 0
    assert has_problem(
        printed_problems(capsys.readouterr().err), "bad.jsonl line 1", "no-chat-template", "tools", "data.template"
    )


def test_chats_are_refused_without_a_template(tiny_folder: Path, capsys: Any) -> None:
    case = Published("chats", "sft", [{"messages": [user("a"), bot("b")]}], [], "", {"template": "none"})
    assert run("data", "show", write(case, tiny_folder)) != 0
    assert has_problem(printed_problems(capsys.readouterr().err), "data.template", "no-chat-template", "messages")


def test_nulls_of_a_table_are_no_arguments(tmp_path: Path, tiny_folder: Path, capsys: Any) -> None:
    """A parquet column gives every call the arguments of all of them; in a text file a null was written down."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    def chat(**arguments: Any) -> dict[str, Any]:
        call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
        return {"messages": [user("a"), {"role": "assistant", "content": "", "tool_calls": [call]}]}

    case = Published("nulls", "sft", [chat(x="1", y=None)], [], "", {"template": "qwen"})
    assert run("data", "show", write(case, tiny_folder)) == 0
    assert '"arguments": {"x": "1", "y": null}' in capsys.readouterr().out
    pq.write_table(pa.Table.from_pylist([chat(x="1"), chat(y="2")]), "nulls.parquet")
    assert run("data", "show", "recipe.yaml", "data.train=nulls.parquet") == 0
    shown = capsys.readouterr().out
    assert '"arguments": {"x": "1"}' in shown
    assert '"arguments": {"y": "2"}' in shown


CALLING = DEAF.replace(
    "{{ m['content'] }}", "{{ m['content'] }}{% for call in m['tool_calls'] or [] %}CALL{% endfor %}"
)


@pytest.mark.parametrize(
    ("call", "written"),
    [
        ("{{ call['function']['name'] + call['function']['arguments'] }}", 'get_weather{"city": "Rome"}'),
        ("{{ call['function']['name'] }} {{ call['function']['arguments'] }}", 'get_weather {"city": "Rome"}'),
        ("{{ call['function'] | tojson }}", '{"name": "get_weather", "arguments": {"city": "Rome"}}'),
        (
            "{% set f = call['function'] %}{{ f['name'] }}"
            "{% for k, v in f['arguments'].items() %} {{ k }}={{ v }}{% endfor %}",
            "get_weather city=Rome",
        ),
        ("{{ 1 // 0 }}", None),
    ],
)
def test_arguments_are_given_as_the_template_takes_them(
    call: str, written: str | None, tiny_folder: Path, capsys: Any
) -> None:
    """As an object or as JSON of one, and never written as Python shows an object."""
    Path("calling.jinja").write_text(CALLING.replace("CALL", call))
    for arguments in ('{"city": "Rome"}', {"city": "Rome"}):
        calls = [{"type": "function", "function": {"name": "get_weather", "arguments": arguments}}]
        rows = [{"messages": [user("Rome?"), bot("") | {"tool_calls": calls}]}]
        case = Published("calls", "sft", rows, [], "", {"template": "calling.jinja"})
        code = run("data", "show", write(case, tiny_folder))
        told = capsys.readouterr()
        assert (code == 0) == (written is not None)
        if written is None:
            assert has_problem(printed_problems(told.err), "line 1", "template-error", "integer division")
        else:
            assert f"[[{written}<|im_end|>]]" in " ".join(told.out.split())


def test_a_call_that_is_written_but_not_trained_is_refused(tiny_folder: Path, capsys: Any) -> None:
    markers = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\\n{% if m['role'] == 'assistant' %}{% generation %}"
        "{{ m['content'] }}<|im_end|>{% endgeneration %}{{ m['tool_calls'] | tojson if m['tool_calls'] }}\\n{% else %}"
        "{{ m['content'] }}<|im_end|>\\n{% endif %}{% endfor %}"
    )
    Path("markers.jinja").write_text(markers)
    case = Published("bad", "sft", [{"messages": TOOL_CHAT}], [], "", {"template": "markers.jinja"})
    assert run("data", "show", write(case, tiny_folder)) != 0
    assert has_problem(
        printed_problems(capsys.readouterr().err), "line 1", "template-changes-chat", "'get_weather'", "turn 1"
    )


def test_a_system_column_beside_whole_chats(tiny_folder: Path, capsys: Any) -> None:
    """Before the prompt that the responses begin with, and before the one that a column names."""
    pair = {"chosen": [user("a?"), bot("b")], "rejected": [user("a?"), bot("c")], "system": "Be brief."}
    for row in (pair, {"prompt": "a?", **pair}):
        assert run("data", "show", write(Published("pairs", "dpo", [row], [], ""), tiny_folder)) == 0
        shown = capsys.readouterr().out
        assert shown.count("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\na?<|im_end|>") == 2
        assert "system message from system" in " ".join(shown.split())


@pytest.mark.parametrize(
    ("worked", "value", "source"),
    [
        ("2+2=4\n#### 4", "4", "openai/gsm8k"),
        ("so\n#### -1,234.5 ", "-1234.5", "openai/gsm8k"),
        ("#### red, green", "red, green", "openai/gsm8k"),
        # A heading of markdown is no answer.
        ("#### Step 1\nAdd them.\nIt is 4", "#### Step 1\nAdd them.\nIt is 4", ""),
        ("It is $\\boxed{\\frac{1}{2}}$.", "\\frac{1}{2}", "lighteval/MATH"),
        (" 42 ", "42", ""),
        ("####", "####", ""),
    ],
)
def test_the_end_of_a_worked_answer(worked: str, value: str, source: str) -> None:
    from lockstep.data.encode.prompt_rows import Truth, final_answer

    assert final_answer(worked) == Truth(value, source)


def test_what_some_chats_alone_have_may_be_missing_from_the_others(tiny_folder: Path, capsys: Any) -> None:
    """In lines of one file and in files read together; a row of another form is still refused."""
    chat = {"messages": [user("Rome?"), bot("19")]}
    with_tools = chat | {"tools": [WEATHER]}
    case = Published("some", "sft", [chat, with_tools, chat], [], "", {"template": "qwen"})
    assert run("data", "show", write(case, tiny_folder), "--rows", 3) == 0
    assert capsys.readouterr().out.count("<tools>") == 1
    Path("many").mkdir()
    write_jsonl(Path("many/a.jsonl"), [chat, chat])
    write_jsonl(Path("many/b.jsonl"), [with_tools])
    assert run("data", "show", "recipe.yaml", "data.train=many", "--rows", 3) == 0
    assert capsys.readouterr().out.count("<tools>") == 1
    write_jsonl(Path("some.jsonl"), [with_tools, chat | {"tools": "[]"}, with_tools])
    assert run("data", "show", "recipe.yaml") != 0
    assert has_problem(
        printed_problems(capsys.readouterr().err), "some.jsonl line 2", "mixed-rows", "'tools'", "line 1"
    )
    write_jsonl(Path("some.jsonl"), [chat, chat | {"other": 1, "id": "a"}, chat | {"id": "b"}])
    assert run("data", "show", "recipe.yaml") == 0
    told = capsys.readouterr()
    assert "messages (messages); not read: other (in 1 rows), id (in 2 rows)" in " ".join((told.out + told.err).split())
    write_jsonl(Path("some.jsonl"), [chat, chat | {"text": "a"}, chat])
    assert run("data", "show", "recipe.yaml") != 0
    assert has_problem(printed_problems(capsys.readouterr().err), "some.jsonl line 2", "mixed-rows", "'text'")


def test_every_name_that_is_looked_for_tells_the_form_of_a_row() -> None:
    from lockstep.data.encode import columns
    from lockstep.data.encode import kto_rows as judged
    from lockstep.data.encode import preference_rows as preferences
    from lockstep.data.encode import prompt_rows as prompts
    from lockstep.data.encode import sft_rows as examples
    from lockstep.data.encode import step_rows as steps
    from lockstep.data.sources.rowset import FORMAT_COLUMNS, OPTIONAL

    pairs = {name for pair in (*examples.PAIR_COLUMNS, *preferences.SCORES_OF_PAIR) for name in pair}
    looked_for = {*columns.PROMPTS, *columns.CHATS, *examples.TEXT_COLUMNS, *judged.RESPONSES, *prompts.TRUTHS}
    assert pairs | looked_for | {*steps.LABELS, *steps.TEXTS} <= FORMAT_COLUMNS | OPTIONAL


# -- templates ---------------------------------------------------------------------------------------------------------


def test_a_named_template_trains_a_tokenizer_without_one_and_is_exported(tiny_folder: Path, tmp_path: Path) -> None:
    """Its end token, which is not the model's own, ends the answers of the exported model."""
    import shutil

    from transformers import AutoTokenizer, GenerationConfig

    bare = tmp_path / "bare"
    shutil.copytree(tiny_folder, bare)
    (bare / "chat_template.jinja").unlink()
    (bare / "generation_config.json").write_text('{"eos_token_id": 258}')
    config = json.loads((bare / "config.json").read_text())
    (bare / "config.json").write_text(json.dumps({**config, "eos_token_id": 258}))
    assert AutoTokenizer.from_pretrained(bare).chat_template is None
    case = Published("named", "sft", [{"messages": [user("a"), bot("b")]}], [], "", {"template": "chatml"})
    assert run("train", write(case, bare)) == 0
    export = Path("runs/named/export")
    exported = AutoTokenizer.from_pretrained(export)
    assert exported.apply_chat_template([user("a")], tokenize=False, add_generation_prompt=True) == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    )
    ends = GenerationConfig.from_pretrained(export).eos_token_id
    assert exported.convert_tokens_to_ids("<|im_end|>") in (ends if isinstance(ends, list) else [ends])
    assert Path("runs/named/chat_template.jinja").is_file()


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("llama3", ("unknown-token", "<|begin_of_text|>, <|start_header_id|>, <|end_header_id|>, <|eot_id|>")),
        ("missing.jinja", ("unreadable",)),
        ("endless.jinja", ("no-end-token", "'5'")),
        ("broken.jinja", ("template-error",)),
        ("silent.jinja", ("template-changes-chat", "turn 1")),
        ("chatlm", ("unknown-name", "'chatlm'")),
    ],
)
def test_a_template_that_cannot_work_is_refused_before_any_row(
    template: str, problem: tuple[str, ...], tiny_folder: Path, capsys: Any
) -> None:
    Path("endless.jinja").write_text("{% for m in messages %}{{ m['content'] }}{% endfor %}")
    Path("broken.jinja").write_text("{% for m in messages %}{{ m['content'] }}")
    Path("silent.jinja").write_text("{% for m in messages %}{{ m['role'] }}<|im_end|>{% endfor %}")
    case = Published("rows", "sft", [{"messages": [user("a"), bot("b")]}], [], "", {"template": template})
    assert run("data", "show", write(case, tiny_folder)) != 0
    assert has_problem(printed_problems(capsys.readouterr().err), "data.template", *problem)


def test_llama3_renders_what_its_tokenizers_know() -> None:
    """Token by token, in a tokenizer with the marks of Llama 3."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    from lockstep.data.encode.builtin_templates import BUILTIN
    from lockstep.data.encode.chat import render_chat
    from lockstep.data.encode.chat_template import end_of_turn, with_template
    from lockstep.data.encode.chat_text import TemplateInputs
    from lockstep.data.encode.messages import as_messages
    from lockstep.data.encode.trained_tokens import encode_spans
    from lockstep.model.tiny import byte_vocabulary
    from lockstep.recipe.keys_data import Data
    from lockstep.types import Origin

    core = Tokenizer(models.BPE(byte_vocabulary(), []))
    core.pre_tokenizer, core.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin_of_text|>", extra_special_tokens=list(BUILTIN["llama3"].tokens)
    )
    data, origin = Data(train="x", template="llama3"), Origin("x", 0)
    with_template(tokenizer, data)
    chat = as_messages([*TOOL_CHAT, {"role": "tool", "content": "19"}, bot("19 degrees")], origin)
    spans = render_chat(tokenizer, chat, origin, TemplateInputs([{"type": "function", "function": WEATHER}]))
    assert [spans.text[start:end] for start, end in spans.trained] == [
        '{"name": "get_weather", "parameters": {"city": "Rome"}}<|eot_id|>',
        "19 degrees<|eot_id|>",
    ]
    assert spans.text.startswith("<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\n")
    assert "<|start_header_id|>ipython<|end_header_id|>\n\n19<|eot_id|>" in spans.text
    example, _ = encode_spans(tokenizer, spans, origin)
    assert list(example.ids).count(tokenizer.convert_tokens_to_ids("<|eot_id|>")) == 5
    assert end_of_turn(tokenizer, data) == tokenizer.convert_tokens_to_ids("<|eot_id|>")


# -- what is asked of a row --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "asked"),
    [
        ("return len(solution_str)", set()),
        ("return float(ground_truth in solution_str)", {"ground_truth"}),
        ("return float(data_source == 'a' and ground_truth in solution_str)", {"ground_truth", "data_source"}),
        ("return judge(**locals())", {"ground_truth", "data_source"}),
    ],
)
def test_rows_are_asked_for_what_the_function_reads(body: str, asked: set[str]) -> None:
    from lockstep.recipe.keys_reward import Reward
    from lockstep.reward.row_rewards import read_by_rewards

    head = "def f(data_source, solution_str, ground_truth, extra_info):\n    "
    Path("f.py").write_text(head + body)
    assert read_by_rewards(Reward(function="f.py:f")) == asked
    assert read_by_rewards(Reward(function="f.py:f", weights={"rule": 1, "function": 1})) == {
        "ground_truth",
        "data_source",
    }
    Path("g.py").write_text("def f(solution_str, **more):\n    return more['ground_truth'] == solution_str")
    assert read_by_rewards(Reward(function="g.py:f")) == {"ground_truth", "data_source"}
    Path("g.py").write_text("def f(solution_str, **more):\n    return len(solution_str)")
    assert read_by_rewards(Reward(function="g.py:f")) == set()
    assert read_by_rewards(Reward(remote="http://localhost:1")) == set()
    assert read_by_rewards(Reward()) == {"ground_truth", "data_source"}
    assert read_by_rewards(Reward(weights={"rule": 0})) == set()


@pytest.mark.parametrize(
    ("row", "reward", "problem"),
    [
        ({"prompt": "a"}, {}, ("", "unclear-columns", "ground truth")),
        ({"prompt": "a", "data_source": "x"}, {"function": "reads.py:f"}, ("", "unclear-columns", "ground truth")),
        (
            {"prompt": "a", "reward_model": {"style": "rule"}},
            {},
            (" line 1", "missing-column", "'reward_model.ground_truth'"),
        ),
        ({"prompt": "a", "reward_model": {"ground_truth": "1"}}, {}, (" line 1", "missing-column", "'data_source'")),
        ({"prompt": "a", "answer": " "}, {"function": "reads.py:f"}, (" line 1", "empty-field", "answer")),
        ({"prompt": "a", "answer": float("nan")}, {"function": "reads.py:f"}, (" line 1", "empty-field", "answer")),
        ({"text": "a"}, {"function": "reward.py:length"}, ("", "unclear-columns", "prompts")),
    ],
)
def test_what_a_reward_reads_is_asked_for(
    row: dict[str, Any], reward: dict[str, Any], problem: tuple[str, ...], tiny_folder: Path, capsys: Any
) -> None:
    Path("reads.py").write_text(
        "def f(data_source, solution_str, ground_truth, extra_info):\n    return float(ground_truth in solution_str)"
    )
    case = Published("bad", "grpo", [row], [], "", {}, {"reward": reward})
    assert run("data", "show", write(case, tiny_folder)) != 0
    place, *rest = problem
    assert has_problem(printed_problems(capsys.readouterr().err), f"bad.jsonl{place}", *rest)


def test_ground_truths_that_are_no_text_are_told_as_json(tiny_folder: Path, capsys: Any) -> None:
    rows = [{"prompt": "a", "data_source": "x", "reward_model": {"ground_truth": {"target": ["\u00e9", "b"]}}}]
    case = Published("listed", "grpo", rows, [], "", {}, {"reward": {"function": "reward.py:length"}})
    assert run("data", "show", write(case, tiny_folder)) == 0
    assert 'x, answer {"target": ["\u00e9", "b"]}\n' in capsys.readouterr().out


def test_a_schema_without_ground_truths_is_read_where_nothing_reads_them(tiny_folder: Path, capsys: Any) -> None:
    rows = [{"prompt": [user("a")], "reward_model": {"style": "model", "ground_truth": None}}]
    case = Published("bare", "grpo", rows, [], "", {}, {"reward": {"function": "reward.py:length"}})
    assert run("data", "show", write(case, tiny_folder)) == 0
    assert "bare.jsonl, no ground truth" in capsys.readouterr().out
