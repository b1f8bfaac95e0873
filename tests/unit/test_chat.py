"""What of a chat is trained, token by token, with and without generation markers; and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from lockstep.data.encode.chat import render_chat
from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.encoding import fit, last_trained
from lockstep.data.encode.sft_rows import Encoder, SupervisedColumns, find_columns
from lockstep.data.encode.trained_tokens import encode_spans
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Origin
from refusals import refuses

ORIGIN = Origin("rows.jsonl", 7)
TURNS = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "1+1?"},
    {"role": "assistant", "content": "#### 2"},
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": "#### 4"},
]
# ChatML without markers, as many real models have it.
BARE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer(tiny_folder: Path):
    return load_tokenizer(str(tiny_folder))


def trained_text(tokenizer, example) -> list[str]:
    """The trained runs of an example as text."""
    runs, current = [], []
    for token, trained in zip(example.ids, example.loss_mask, strict=True):
        if trained:
            current.append(token)
        elif current:
            runs.append(tokenizer.decode(current))
            current = []
    return [*runs, tokenizer.decode(current)] if current else runs


def encode(tokenizer, **data):
    settings = {"train": ["x.jsonl"], **data}
    return only(Encoder(tokenizer, SupervisedColumns("messages", messages="messages"), Data(**settings)))


def only(encoder: Encoder):
    """The encoder of rows with one sequence."""

    def encode(row, origin):
        (example,) = encoder(row, origin)
        return example

    return encode


@pytest.mark.parametrize("template", [None, BARE])
def test_every_assistant_turn_and_its_end_is_trained_and_nothing_else(tokenizer, template):
    tokenizer.chat_template = template or tokenizer.chat_template
    example = encode(tokenizer)({"messages": TURNS}, ORIGIN)
    assert trained_text(tokenizer, example) == ["#### 2<|im_end|>", "#### 4<|im_end|>"]
    assert tokenizer.decode(list(example.ids)) == (
        "<|im_start|>system\nAdd.<|im_end|>\n"
        "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n#### 2<|im_end|>\n"
        "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n#### 4<|im_end|>\n"
    )
    # Byte tokens: 6 characters and the end token, twice.
    assert example.targets == 14
    assert last_trained(example) == tokenizer.eos_token_id


def test_end_token_is_trained_when_it_is_also_the_pad_token(tokenizer):
    tokenizer.pad_token = tokenizer.eos_token
    example = encode(tokenizer)({"messages": TURNS}, ORIGIN)
    assert trained_text(tokenizer, example)[-1].endswith(tokenizer.eos_token)


def test_a_token_across_the_border_is_split_as_generation_would(tiny_folder):
    """A tokenizer that merges the prompt's last letter with the answer's first one."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"a": 0, "b": 1, "ab": 2, "<e>": 3}
    core = Tokenizer(models.BPE(vocabulary, [("a", "b")]))
    core.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<e>{% endif %}{% endfor %}"
    )
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "ba"}]
    assert tokenizer("aba<e>", add_special_tokens=False)["input_ids"] == [2, 0, 3]
    example, split = encode_spans(tokenizer, render_chat(tokenizer, chat, ORIGIN), ORIGIN)
    assert split
    assert list(example.ids) == [0, 1, 0, 3]
    assert list(example.loss_mask) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for m in messages %}{% if m['role'] != 'assistant' %}{{ m['content'] }}{% endif %}{% endfor %}",
            "drops or changes",
        ),
        (
            "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% endfor %}",
            "5 of 2 assistant",
        ),
        (
            "{{ messages|length }}{% for m in messages %}{{ m['content'] }}{% endfor %}",
            "renders the messages before message 3 .assistant. differently",
        ),
        (
            "{{ raise_exception('system role not supported') }}",
            "refuses this chat at message 2: system role",
        ),
    ],
)
def test_templates_that_lose_the_assistant_are_refused(tokenizer, template, reason):
    tokenizer.chat_template = template
    with pytest.raises(Refusal, match=reason) as caught:
        encode(tokenizer)({"messages": TURNS}, ORIGIN)
    assert caught.value.problems[0].where == "rows.jsonl row 7"


def test_a_template_without_an_end_token_is_refused(tokenizer):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(Refusal, match="not an end token"):
        encode(tokenizer)({"messages": TURNS}, ORIGIN)
    example = encode(tokenizer, require_end=False)({"messages": TURNS}, ORIGIN)
    assert trained_text(tokenizer, example) == ["#### 2\n", "#### 4\n"]


def test_space_after_a_special_token_within_a_turn_is_trained(tokenizer):
    """Reasoning models' marks may be special tokens; what follows the turn's last one is the template's."""
    tokenizer.add_special_tokens({"additional_special_tokens": ["<think>", "</think>"]})
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    turns = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "<think>\n\n</think>\n\n2"}]
    example = encode(tokenizer)({"messages": [*turns, *turns]}, ORIGIN)
    assert trained_text(tokenizer, example) == ["<think>\n\n</think>\n\n2<|im_end|>"] * 2


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        ([{"role": "user", "content": "hi"}], "no assistant turn"),
        ([{"role": "assistant", "content": "hi"}], "empty prompt"),
        ([{"role": "user", "content": " "}, {"role": "assistant", "content": "x"}], "message 1 .user. is empty"),
        ([{"role": "user", "content": "x"}, {"role": "assistant", "content": ""}], "message 2 .assistant. is empty"),
        ([], "is empty"),
        ("text", "list of"),
    ],
)
def test_broken_chats_are_refused_with_the_row(tokenizer, messages, reason):
    with pytest.raises(Refusal, match=reason) as caught:
        encode(tokenizer)({"messages": messages}, ORIGIN)
    assert "rows.jsonl row 7" in str(caught.value)


def pair(tokenizer, **data):
    columns = SupervisedColumns("prompt_response", prompt="extra.q", response="extra.a")
    return only(Encoder(tokenizer, columns, Data(train=["x"], **data)))


def test_nested_prompt_and_response_in_the_template(tokenizer):
    example = pair(tokenizer, system="Add.")({"extra": {"q": "1+1?", "a": "2"}}, ORIGIN)
    assert trained_text(tokenizer, example) == ["2<|im_end|>"]
    assert tokenizer.decode(list(example.ids)).startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?")


def test_prompt_and_response_as_they_are(tokenizer):
    example = pair(tokenizer, template="none")({"extra": {"q": "1+1=", "a": "2"}}, ORIGIN)
    assert tokenizer.decode(list(example.ids)) == "1+1=2<|im_end|>"
    assert list(example.loss_mask) == [0, 0, 0, 0, 1, 1]


def test_a_chat_prompt_with_a_text_response(tokenizer):
    row = {"extra": {"q": [{"role": "user", "content": "1+1?"}], "a": "2"}}
    assert trained_text(tokenizer, pair(tokenizer)(row, ORIGIN)) == ["2<|im_end|>"]


def test_plain_text_trains_every_token_but_the_first(tokenizer):
    encoder = only(Encoder(tokenizer, SupervisedColumns("text", text="text"), Data(train=["x"])))
    example = encoder({"text": "abc"}, ORIGIN)
    assert list(example.loss_mask) == [1, 1, 1, 1]
    assert example.targets == 3


def test_two_bos_tokens_are_refused(tokenizer):
    from tokenizers.processors import TemplateProcessing

    tokenizer.bos_token = "<|im_start|>"
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    encoder = only(Encoder(tokenizer, SupervisedColumns("text", text="text"), Data(train=["x"])))
    assert encoder({"text": "abc"}, ORIGIN).ids[0] == bos
    with pytest.raises(Refusal, match="starts with two"):
        encoder({"text": "<|im_start|>abc"}, ORIGIN)


def test_overlong_rows(tokenizer):
    example = pair(tokenizer, template="none")({"extra": {"q": "12345", "a": "678"}}, ORIGIN)
    assert len(example) == 9
    assert fit(example, 9, "error") is example
    with refuses("rows.jsonl row 7", "row-too-long", "9 tokens", "data.max_tokens=8"):
        fit(example, 8, "error")
    assert fit(example, 8, "drop") is None
    assert tokenizer.decode(list(fit(example, 4, "truncate_left").ids)) == "678<|im_end|>"
    assert tokenizer.decode(list(fit(example, 6, "truncate_right").ids)) == "123456"
    with pytest.raises(Refusal, match="leaves no trained token"):
        fit(example, 5, "truncate_right")


@pytest.mark.parametrize(
    ("available", "expected"),
    [
        (["id", "messages"], "messages (messages)"),
        (["conversations"], "messages (conversations)"),
        (["question", "answer"], "prompt_response (question + answer)"),
        (["prompt", "completion"], "prompt_response (prompt + completion)"),
        (["input", "output"], "prompt_response (input + output)"),
        (["text"], "text (text)"),
    ],
)
def test_well_known_columns_are_found(available, expected):
    assert str(find_columns(ColumnFinder(Source(path="x"), Data(train=["x"]), available))) == expected


def test_settings_come_before_names_and_the_source_before_the_recipe():
    data = Data(train=["x"], prompt_key="extra_info.question", response_key="extra_info.answer")
    assert str(find_columns(ColumnFinder(Source(path="x"), data, ["messages", "extra_info"]))).startswith(
        "prompt_response (extra_info.q"
    )
    assert str(find_columns(ColumnFinder(Source(path="x", shape="text"), data, ["text"]))) == "text (text)"
    with pytest.raises(Refusal, match="cannot tell which columns"):
        find_columns(ColumnFinder(Source(path="x"), Data(train=["x"]), ["a", "b"]))
