"""Responses with a verdict: every layout to the exact trained text, the spellings of verdicts, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import write_jsonl
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.kto_rows import LabeledRows
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data, Source
from refusals import refuses

PROMPT = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
ASKED = [{"role": "user", "content": "1+1?"}]
ANSWERED = [{"role": "assistant", "content": "2"}]


@pytest.fixture
def tokenizer(tiny_folder: Path):
    return load_tokenizer(str(tiny_folder))


@pytest.fixture
def load(tmp_path: Path):
    def load(tokenizer, *rows, limit=500, **data):
        path = write_jsonl(tmp_path / "judged.jsonl", list(rows))
        settings = Data(train=[str(path)], **data)
        return load_rows(RowRequest(Dataset, LabeledRows, [Source(path=str(path))], settings, tokenizer, limit))

    return load


def read_back(tokenizer, dataset) -> list[tuple[str, str, bool]]:
    """(what is not trained, what is, the verdict) of each item."""
    found = []
    for item in dataset.items:
        marked = list(zip(item.example.ids, item.example.loss_mask, strict=True))
        parts = [tokenizer.decode([token for token, trained in marked if trained == which]) for which in (0, 1)]
        found.append((*parts, item.desirable))
    return found


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": "1+1?", "completion": "2"}, {}),
        ({"prompt": "1+1?", "response": "2"}, {}),
        ({"input": "1+1?", "output": "2"}, {}),
        ({"prompt": ASKED, "completion": ANSWERED}, {}),
        ({"prompt": ASKED, "completion": "2"}, {}),
        ({"prompt": "1+1?", "completion": ASKED + ANSWERED}, {}),
        ({"messages": ASKED + ANSWERED}, {}),
        ({"messages": ASKED + ANSWERED, "prompt": "x", "completion": "y"}, {"messages_key": "messages"}),
        ({"a": {"q": "1+1?", "r": "2"}}, {"prompt_key": "a.q", "response_key": "a.r"}),
        ({"prompt": "1+1?", "completion": "2", "chosen": "x", "rejected": "y"}, {}),
    ],
)
def test_every_layout_trains_the_response_alone(tokenizer, load, row, settings):
    dataset = load(tokenizer, row | {"label": True}, row | {"label": False}, **settings)
    assert read_back(tokenizer, dataset) == [
        (PROMPT + "\n", "2<|im_end|>", True),
        (PROMPT + "\n", "2<|im_end|>", False),
    ]
    assert dataset.end_tokens == {tokenizer.eos_token_id}
    counts = dataset.counts
    assert (counts.rows, counts.tokens, counts.trained_tokens, counts.longest) == (2, 52, 4, 26)
    assert "labelled responses (" in dataset.notes[0]
    assert "label from label): 1 desirable, 1 undesirable" in dataset.notes[0]


def test_only_the_last_turn_of_a_chat_is_judged(tokenizer, load):
    row = {"messages": [*ASKED, {"role": "assistant", "content": "3"}, *ASKED, *ANSWERED], "label": 1}
    before, trained, _ = read_back(tokenizer, load(tokenizer, row))[0]
    assert trained == "2<|im_end|>"
    assert "assistant\n3<|im_end|>" in before


def test_without_a_template_texts_are_joined(tokenizer, load):
    tokenizer.chat_template = None
    dataset = load(tokenizer, {"prompt": "1+1=", "completion": "2", "label": 1})
    example = dataset.items[0].example
    assert (list(example.ids), list(example.loss_mask)) == ([*b"1+1=2", tokenizer.eos_token_id], [0, 0, 0, 0, 1, 1])


def test_a_pair_is_a_good_and_a_bad_row(tokenizer, load):
    rows = [{"prompt": "1+1?", "chosen": "2", "rejected": "3"}, {"prompt": "1+1?", "chosen": "ii", "rejected": "iii"}]
    dataset = load(tokenizer, *rows)
    assert [(text, good) for _, text, good in read_back(tokenizer, dataset)] == [
        ("2<|im_end|>", True),
        ("3<|im_end|>", False),
        ("ii<|im_end|>", True),
        ("iii<|im_end|>", False),
    ]
    assert dataset.counts.rows == 4
    assert "2 desirable, 2 undesirable" in dataset.notes[0]
    implicit = {"chosen": ASKED + ANSWERED, "rejected": [*ASKED, {"role": "assistant", "content": "3"}]}
    assert [good for *_, good in read_back(tokenizer, load(tokenizer, implicit))] == [True, False]


@pytest.mark.parametrize(
    ("label", "good"),
    [
        (True, True),
        (False, False),
        (1, True),
        (0, False),
        (-1, False),
        (1.0, True),
        (-1.0, False),
        ("true", True),
        ("False", False),
        ("1", True),
        ("-1", False),
    ],
)
def test_verdicts(tokenizer, load, label, good):
    row = {"prompt": "1+1?", "completion": "2", "verdict": label}
    assert load(tokenizer, row, label_key="verdict").items[0].desirable is good


@pytest.mark.parametrize("label", [None, 2, 0.5, "good", "", [1], {"a": 1}])
def test_what_is_no_verdict_is_refused(tokenizer, load, label):
    with refuses("line 1", "invalid-label", f"label is {label!r}"):
        load(tokenizer, {"prompt": "1+1?", "completion": "2", "label": label})


@pytest.mark.parametrize(
    ("row", "code", "column"),
    [
        ({"prompt": "", "completion": "2", "label": 1}, "empty-field", "prompt"),
        ({"prompt": "q", "completion": " ", "label": 1}, "empty-field", "completion"),
        ({"prompt": "q", "completion": ASKED + ANSWERED, "label": 1}, "different-prompts", "completion"),
        ({"messages": ASKED, "label": 1}, "no-answer", "messages"),
        ({"messages": ANSWERED, "label": 1}, "no-answer", "messages"),
        ({"messages": "text", "label": 1}, "no-answer", "messages"),
        ({"prompt": "q", "chosen": "a", "rejected": "a"}, "identical-responses", "chosen and rejected"),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "score_chosen": 1, "score_rejected": 3},
            "swapped-responses",
            "score_chosen 1",
        ),
    ],
)
def test_bad_rows_are_refused(tokenizer, load, row, code, column):
    with refuses("line 1", code, column):
        load(tokenizer, row)


def test_columns_that_cannot_be_told_are_refused(tokenizer, load):
    with refuses("", "unclear-columns", "prompt, completion"):
        load(tokenizer, {"prompt": "q", "completion": "a"})


def test_overlong_rows(tokenizer, load):
    tokenizer.chat_template = None
    rows = [
        {"prompt": "0123456789", "completion": "abcd", "label": 1},
        {"prompt": "0", "completion": "a", "label": 0},
    ]
    with refuses("line 1", "row-too-long", "15 tokens", "data.max_tokens=12"):
        load(tokenizer, *rows, limit=12)
    dropped = load(tokenizer, *rows, limit=12, overlong="drop")
    assert (dropped.counts.rows, dropped.counts.dropped) == (1, 1)
    assert "0 desirable, 1 undesirable" in dropped.notes[0]
    left = load(tokenizer, *rows, limit=12, overlong="truncate_left")
    assert read_back(tokenizer, left)[0] == ("3456789", "abcd<|im_end|>", True)
    right = load(tokenizer, *rows, limit=12, overlong="truncate_right")
    assert read_back(tokenizer, right)[0] == ("0123456789", "ab", True)
    assert left.counts.truncated == right.counts.truncated == 1
