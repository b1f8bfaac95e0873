"""Judged steps: where the verdicts are read and what they say, for every layout; and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from conftest import write_jsonl
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.step_rows import StepRows
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import ScoredExample
from refusals import refuses

PLUS, MINUS = ord("+"), ord("-")


@pytest.fixture
def tokenizer(tiny_folder: Path):
    return load_tokenizer(str(tiny_folder))


@pytest.fixture
def load(tmp_path: Path):
    def load(tokenizer, *rows, placeholder="~", tokens=("+", "-"), limit=500, **data):
        path = write_jsonl(tmp_path / "steps.jsonl", list(rows))
        settings = Data(train=[str(path)], **data)
        rows = partial(StepRows, placeholder=placeholder, tokens=tokens)
        return load_rows(RowRequest(Dataset, rows, [Source(path=str(path))], settings, tokenizer, limit))

    return load


def test_a_text_is_judged_at_its_placeholders(tokenizer, load):
    dataset = load(tokenizer, {"input": "q? one ~\ntwo ~", "label": ["+", "-"]})
    steps = dataset.items[0]
    # Bytes: "q? one " is 7, so the first is token 7; "\ntwo " is 5 more.
    assert list(steps.example.ids) == list(b"q? one ~\ntwo ~")
    assert isinstance(steps.example, ScoredExample)
    assert steps.example.positions == (7, 13)
    assert steps.example.scored_tokens() == [(7, PLUS), (7, MINUS), (13, PLUS), (13, MINUS)]
    assert steps.labels == ((1.0, 0.0), (0.0, 1.0))
    counts = dataset.counts
    # Two steps are trained, however many words are weighed at each.
    assert (counts.rows, counts.tokens, counts.trained_tokens, counts.longest) == (1, 14, 2, 14)
    assert dataset.end_tokens == set()
    assert "(input; labels from label)" in dataset.notes[0]


@pytest.mark.parametrize(
    "row",
    [
        {"text": "a~b~", "labels": [True, False]},
        {"prompt": "a~b~", "label": [1, 0]},
        {"input": "a~b~", "value": [1.0, 0.0]},
        {"input": "a~b~", "label": '["+", "-"]'},
        {"input": "a~b~", "label": "[1, 0]"},
    ],
)
def test_names_and_kinds_of_labels(tokenizer, load, row):
    steps = load(tokenizer, row).items[0]
    assert steps.example.positions == (1, 3)
    assert steps.labels == ((1.0, 0.0), (0.0, 1.0))


def test_soft_labels_and_more_words(tokenizer, load):
    soft = load(tokenizer, {"input": "a~b~", "label": [0.75, 0.5]}).items[0]
    assert soft.labels == ((0.75, 0.25), (0.5, 0.5))
    three = load(tokenizer, {"input": "a~b~", "label": ["0", "-"]}, tokens=["+", "-", "0"]).items[0]
    assert three.labels == ((0.0, 0.0, 1.0), (0.0, 1.0, 0.0))
    assert three.example.token_ids == (PLUS, MINUS, ord("0"))
    with pytest.raises(Refusal, match=r"label 1 of label is 1\n.*words of prm.tokens \(\+, -, 0\);"):
        load(tokenizer, {"input": "a~", "label": [1]}, tokens=["+", "-", "0"])


def test_settings_name_the_columns(tokenizer, load):
    row = {"x": {"t": "a~"}, "input": "no", "v": [1]}
    assert load(tokenizer, row, text_key="x.t", label_key="v").items[0].example.positions == (1,)
    assert load(tokenizer, row, prompt_key="x.t", label_key="v").items[0].example.positions == (1,)
    listed = {"q": "Q", "completions": ["no"], "s": ["a", "b"], "labels": [1, 0]}
    steps = load(tokenizer, listed, prompt_key="q", steps_key="s", template="none").items[0]
    assert list(steps.example.ids) == list(b"Q\na~\nb~")


ROW = {"prompt": "1+1+1?", "completions": ["1+1=2", "2+1=4"], "labels": [True, False]}


@pytest.mark.parametrize("prompt", ["1+1+1?", [{"role": "user", "content": "1+1+1?"}]])
def test_steps_are_the_assistants_turn(tokenizer, load, prompt):
    dataset = load(tokenizer, ROW | {"prompt": prompt}, system="Add.")
    example = dataset.items[0].example
    assert tokenizer.decode(list(example.ids)) == (
        "<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1+1?<|im_end|>\n"
        "<|im_start|>assistant\n1+1=2~\n2+1=4~<|im_end|>\n"
    )
    assert [chr(example.ids[place]) for place in example.positions] == ["~", "~"]
    assert dataset.items[0].labels == ((1.0, 0.0), (0.0, 1.0))
    assert "(prompt, completions; labels from labels)" in dataset.notes[0]


def test_steps_without_a_template_are_lines(tokenizer, load):
    tokenizer.chat_template = None
    example = load(tokenizer, ROW).items[0].example
    assert list(example.ids) == list(b"1+1+1?\n1+1=2~\n2+1=4~")
    assert example.positions == (12, 19)


def test_a_chat_that_holds_placeholders(tokenizer, load):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a~b~"}]
    example = load(tokenizer, {"input": chat, "label": [1, 1]}).items[0].example
    assert tokenizer.decode(list(example.ids)).endswith("assistant\na~b~<|im_end|>\n")
    assert len(example.positions) == 2


def words_tokenizer(*words: str):
    """A tokenizer of whole words that marks their beginnings with a low line, as sentence pieces do."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"<u>": 0, **{w: i for i, w in enumerate(words, 1)}}, unk_token="<u>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<u>")


def test_a_placeholder_that_must_be_a_word_gets_its_space(load):
    tokenizer = words_tokenizer("q", "a", "b", "ки", "+", "-")
    row = {"prompt": "q", "completions": ["a", "b"], "labels": [1, 0]}
    example = load(tokenizer, row, placeholder="ки").items[0].example
    assert list(example.ids) == [1, 2, 4, 3, 4]
    assert example.positions == (2, 4)
    with refuses("line 1", "missing-placeholder", "'ки' 2 times", "1 times"):
        load(tokenizer, {"input": "q aки b ки", "label": [1, 0]}, placeholder="ки")


def test_marks_of_several_tokens_are_refused_before_any_row(tokenizer, load):
    with pytest.raises(Refusal) as caught:
        load(tokenizer, {"input": "", "label": []}, placeholder="ки", tokens=["+", "no"])
    first, second = caught.value.problems
    assert (first.where, second.where) == ("prm.placeholder", "prm.tokens")
    assert (first.code, second.code) == ("unknown-token", "unknown-token")
    assert "'ки' is 4 tokens (208, 186, 208, 184)" in first.why
    assert "add 'ки' " in first.remedy
    assert "'no' is 2 tokens (110, 111)" in second.why
    with refuses("prm.tokens", "duplicate-name", "+, +"):
        load(tokenizer, {"input": "a~", "label": [1]}, tokens=["+", "+"])


@pytest.mark.parametrize(
    ("row", "problem"),
    [
        ({"input": "a b", "label": [1]}, ("missing-placeholder", "'~'")),
        ({"input": "a~b~", "label": [1]}, ("wrong-count", "2 placeholders '~'", "1 labels")),
        ({"input": "", "label": [1]}, ("empty-field", "input")),
        ({"input": "a~", "label": []}, ("empty-field", "label")),
        ({"input": "a~", "label": None}, ("empty-field", "label")),
        ({"input": "a~", "label": "+"}, ("invalid-json", "label")),
        ({"input": "a~", "label": "1"}, ("invalid-label", "label")),
        ({"input": "a~", "label": ["good"]}, ("invalid-label", "label 1 of label", "'good'")),
        ({"input": "a~", "label": [-1]}, ("invalid-label", "label 1 of label", "-1")),
        ({"input": "a~", "label": [1.5]}, ("invalid-label", "label 1 of label", "1.5")),
        ({"input": "a~b~", "label": [1, None]}, ("invalid-label", "label 2 of label", "None")),
        ({"input": "a~", "label": "[NaN]"}, ("invalid-label", "label 1 of label", "nan")),
        ({"input": 3, "label": [1]}, ("invalid-chat", "input")),
        (ROW | {"labels": [1]}, ("wrong-count", "2 steps", "1 labels")),
        (ROW | {"completions": ["a", " "]}, ("not-text", "completions")),
        (ROW | {"completions": "a"}, ("not-text", "completions")),
        (ROW | {"completions": ["a~", "b"]}, ("wrong-count", "3 placeholders '~'", "2 labels")),
        (ROW | {"prompt": "~"}, ("wrong-count", "3 placeholders '~'", "2 labels")),
        (ROW | {"prompt": " "}, ("empty-field", "prompt")),
    ],
)
def test_bad_rows_are_refused(tokenizer, load, row, problem):
    with refuses("line 1", *problem):
        load(tokenizer, row)


def test_what_has_no_place_or_columns_is_refused(tokenizer, load):
    with refuses("", "unclear-columns", "input"):
        load(tokenizer, {"input": "a~"})
    with refuses("data.system", "unused-key"):
        load(tokenizer, {"input": "a~", "label": [1]}, system="Add.")
    tokenizer.chat_template = None
    with refuses("line 1", "no-chat-template", remedy="data.template"):
        load(tokenizer, ROW | {"prompt": [{"role": "user", "content": "q"}]})


def test_two_opening_tokens_are_refused(tokenizer, load):
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|im_start|> $A", special_tokens=[("<|im_start|>", bos)]
    )
    steps = load(tokenizer, {"input": "a~", "label": [1]}).items[0]
    assert list(steps.example.ids) == [bos, *b"a~"]
    assert steps.example.positions == (2,)
    with refuses("line 1", "two-bos-tokens"):
        load(tokenizer, {"input": "<|im_start|>a~", "label": [1]})


# 12 tokens: placeholders at 4, 7 and 11.
LONG = {"input": "qq a~ b~ cc~", "label": [1, 0, 0.25]}


def test_overlong_rows(tokenizer, load):
    assert load(tokenizer, LONG, limit=12).counts.truncated == 0
    with refuses("line 1", "row-too-long", "12 tokens", "data.max_tokens=11"):
        load(tokenizer, LONG, limit=11)
    dropped = load(tokenizer, LONG, {"input": "a~", "label": [1]}, limit=11, overlong="drop")
    assert (dropped.counts.rows, dropped.counts.dropped) == (1, 1)


@pytest.mark.parametrize(
    ("overlong", "limit", "text", "places", "firsts"),
    [
        ("truncate_right", 11, "qq a~ b~ cc", (4, 7), [1.0, 0.0]),
        ("truncate_right", 5, "qq a~", (4,), [1.0]),
        ("truncate_left", 9, "a~ b~ cc~", (1, 4, 8), [1.0, 0.0, 0.25]),
        ("truncate_left", 7, " b~ cc~", (2, 6), [0.0, 0.25]),
        ("truncate_left", 1, "~", (0,), [0.25]),
    ],
)
def test_cut_rows_keep_the_steps_that_remain(tokenizer, load, overlong, limit, text, places, firsts):
    dataset = load(tokenizer, LONG, limit=limit, overlong=overlong)
    steps = dataset.items[0]
    assert bytes(list(steps.example.ids)).decode() == text
    assert steps.example.positions == places
    assert [label[0] for label in steps.labels] == firsts
    assert (dataset.counts.truncated, dataset.counts.longest) == (1, limit)


def test_a_cut_that_leaves_no_step_is_refused(tokenizer, load):
    with refuses("line 1", "truncated-away", "truncate_right to 4"):
        load(tokenizer, LONG, limit=4, overlong="truncate_right")
    with refuses("line 1", "truncated-away", "truncate_left to 3"):
        load(tokenizer, {"input": "a~bcd", "label": json.dumps([1])}, limit=3, overlong="truncate_left")
