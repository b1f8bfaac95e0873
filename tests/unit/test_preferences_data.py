"""Pairs and rankings: every layout to the exact trained text, what is cut, and what is refused."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest

from conftest import write_jsonl
from lockstep.data.dataset import Dataset, RowRequest, load_rows
from lockstep.data.encode.columns import ColumnFinder
from lockstep.data.encode.dialogue import divide
from lockstep.data.encode.encoding import Encoding
from lockstep.data.encode.preference_rows import RankingRows
from lockstep.data.encode.responses import ResponseEncoder
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data, Source
from lockstep.types import Example, Origin, ScoredExample
from refusals import refuses

ORIGIN = Origin("rows.jsonl", 7)
NAMES = ["chosen", "rejected"]
PROMPT = "<|im_start|>user\n1+1?<|im_end|>\n<|im_start|>assistant\n"
# ChatML without markers that shortens earlier answers, as templates of reasoning models do.
SHORTENING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' and not loop.last %}...{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture
def tokenizer(tiny_folder: Path):
    return load_tokenizer(str(tiny_folder))


@pytest.fixture
def bare(tokenizer):
    tokenizer.chat_template = None
    return tokenizer


@pytest.fixture
def load(tmp_path: Path):
    def load(tokenizer, *rows, read="response", several=False, limit=500, source=None, **data):
        path = write_jsonl(tmp_path / "pairs.jsonl", list(rows))
        sources = [Source(path=str(path), **(source or {}))]
        settings = Data(train=[str(path)], **data)
        return load_rows(
            RowRequest(Dataset, partial(RankingRows, read=read, several=several), sources, settings, tokenizer, limit)
        )

    return load


def texts(tokenizer, example: Example) -> tuple[str, str]:
    """What is not trained, and what is, as text."""
    parts = [
        tokenizer.decode([t for t, trained in zip(example.ids, example.loss_mask, strict=True) if trained == which])
        for which in (0, 1)
    ]
    return parts[0], parts[1]


CHATS = [user("1+1?")], [bot("2")], [bot("3")]
LAYOUTS = {
    "prompt text, texts": {"prompt": "1+1?", "chosen": "2", "rejected": "3"},
    "another name": {"question": "1+1?", "chosen": "2", "rejected": "3"},
    "prompt chat, chats": {"prompt": CHATS[0], "chosen": CHATS[1], "rejected": CHATS[2]},
    "prompt chat, texts": {"prompt": CHATS[0], "chosen": "2", "rejected": "3"},
    "prompt text, chats": {"prompt": "1+1?", "chosen": CHATS[1], "rejected": CHATS[2]},
    "prompt text, whole chats": {"prompt": "1+1?", "chosen": CHATS[0] + CHATS[1], "rejected": CHATS[0] + CHATS[2]},
    "prompt chat, whole chats": {"prompt": CHATS[0], "chosen": CHATS[0] + CHATS[1], "rejected": CHATS[0] + CHATS[2]},
    "messages, texts": {"messages": CHATS[0], "chosen": "2", "rejected": "3"},
    "messages, chats": {"messages": CHATS[0], "chosen": CHATS[1], "rejected": CHATS[2]},
    "implicit chats": {"chosen": CHATS[0] + CHATS[1], "rejected": CHATS[0] + CHATS[2]},
    "list": {"prompt": "1+1?", "responses": ["2", "3"]},
    "list of chats with scores": {"prompt": CHATS[0], "responses": [CHATS[2], CHATS[1]], "scores": [-1, 0.5]},
}


@pytest.mark.parametrize("row", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_trains_the_response_alone(tokenizer, load, row):
    dataset = load(tokenizer, row)
    better, worse = dataset.items[0].examples
    # The template's line break after the end of the turn is not trained.
    assert texts(tokenizer, better) == (PROMPT + "\n", "2<|im_end|>")
    assert texts(tokenizer, worse) == (PROMPT + "\n", "3<|im_end|>")
    assert type(better) is Example
    assert dataset.examples == [better, worse]
    # Byte tokens: the prompt has "user\n1+1?" (9), "\n", "assistant\n" (10) and three specials; two tokens follow.
    assert len(better) == 9 + 1 + 10 + 3 + 2 + 1
    counts = dataset.counts
    assert (counts.rows, counts.tokens, counts.trained_tokens, counts.longest, counts.split) == (1, 52, 4, 26, 0)
    assert dataset.end_tokens == {tokenizer.eos_token_id}


@pytest.mark.parametrize("row", LAYOUTS.values(), ids=LAYOUTS)
def test_every_layout_is_scored_at_its_last_token(tokenizer, load, row):
    dataset = load(tokenizer, row, read="score")
    better, worse = dataset.items[0].examples
    assert tokenizer.decode(list(better.ids)) == PROMPT + "2<|im_end|>\n"
    assert tokenizer.decode(list(worse.ids)) == PROMPT + "3<|im_end|>\n"
    assert isinstance(better, ScoredExample)
    assert better.scored_tokens() == [(25, 0)]
    assert sum(better.loss_mask) == 0
    assert dataset.counts.trained_tokens == 2
    assert dataset.end_tokens == set()


def test_without_a_template_texts_are_joined(bare, load):
    dataset = load(bare, {"prompt": "1+1=", "chosen": "2", "rejected": "-12"})
    better, worse = dataset.items[0].examples
    end = bare.eos_token_id
    assert (list(better.ids), list(better.loss_mask)) == ([*b"1+1=2", end], [0, 0, 0, 0, 1, 1])
    assert (list(worse.ids), list(worse.loss_mask)) == ([*b"1+1=-12", end], [0, 0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize(
    ("chosen", "rejected", "prompt", "answers"),
    [
        (
            "\n\nHuman: Hi\n\nAssistant: I am well",
            "\n\nHuman: Hi\n\nAssistant: I was ill",
            "\n\nHuman: Hi\n\nAssistant:",
            [" I am well", " I was ill"],
        ),
        ("What is it? Bread", "What is it? Broth", "What is it? ", ["Bread", "Broth"]),
    ],
)
def test_an_implicit_prompt_of_text_ends_at_a_border(bare, load, chosen, rejected, prompt, answers):
    row = {"chosen": chosen, "rejected": rejected}
    assert divide(None, [chosen, rejected], NAMES, ORIGIN) == (prompt, answers)
    better, worse = load(bare, row).items[0].examples
    assert texts(bare, better) == (prompt, answers[0] + "<|im_end|>")
    assert texts(bare, worse) == (prompt, answers[1] + "<|im_end|>")


def test_earlier_answers_of_the_prompt_are_not_trained(tokenizer, load):
    before = [{"role": "system", "content": "Add."}, user("0+0?"), bot("0"), user("1+1?")]
    row = {"chosen": [*before, bot("2")], "rejected": [*before, bot("3"), user("Sure?"), bot("Yes")]}
    better, worse = load(tokenizer, row).items[0].examples
    assert texts(tokenizer, better)[1] == "2<|im_end|>"
    assert texts(tokenizer, worse)[1] == "3<|im_end|>Yes<|im_end|>"
    assert "assistant\n0<|im_end|>" in texts(tokenizer, worse)[0]


def test_a_template_may_shorten_earlier_answers(tokenizer, load):
    tokenizer.chat_template = SHORTENING
    before = [user("0+0?"), bot("none"), user("1+1?")]
    better = load(tokenizer, {"prompt": before, "chosen": "2", "rejected": "3"}).items[0].examples[0]
    assert texts(tokenizer, better)[1] == "2<|im_end|>"
    assert "assistant\n...<|im_end|>" in texts(tokenizer, better)[0]
    tokenizer.chat_template = SHORTENING.replace("and not loop.last", "")
    with pytest.raises(Refusal, match=r"drops or changes assistant turn 2 \(message 4\)"):
        load(tokenizer, {"prompt": before, "chosen": "2", "rejected": "3"})


def test_a_prompt_that_the_whole_text_does_not_begin_with_is_refused(tokenizer, load):
    tokenizer.chat_template = (
        "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>ASSISTANT\n{% endif %}"
    )
    with refuses("line 1", "template-unstable", "ASSISTANT", "the response"):
        load(tokenizer, PAIR)


def test_a_prompt_of_text_is_the_last_turn_that_says_it():
    before = [user("more"), bot("1"), user("more")]
    chats = [[*before, bot("2")], [*before, bot("3")]]
    assert divide("more", chats, NAMES, ORIGIN) == (before, [[bot("2")], [bot("3")]])


def test_null_keys_of_messages_do_not_count():
    chosen, rejected = [user("a") | {"name": None}, bot("b")], [user("a"), bot("c") | {"name": None}]
    prompt, answers = divide(None, [chosen, rejected], NAMES, ORIGIN)
    assert (len(prompt), [len(answer) for answer in answers]) == (1, [1, 1])
    assert divide([user("a")], [chosen, rejected], NAMES, ORIGIN)[1] == [[bot("b")], [bot("c")]]


def test_the_system_message_is_put_before_chats_that_have_none(tokenizer, load):
    row = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}
    better = load(tokenizer, row, system="Add.").items[0].examples[0]
    assert tokenizer.decode(list(better.ids)).startswith("<|im_start|>system\nAdd.<|im_end|>\n<|im_start|>user\n1+1?")
    with refuses("data.system", "no-chat-template"):
        load(tokenizer, row, system="Add.", template="none")


def test_prompts_are_the_same_tokens_whatever_follows(load):
    """A tokenizer that merges the prompt's last letter with the first of one answer, but not of the other."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2, "<e>": 3, "aa": 4}, [("a", "b"), ("a", "a")]))
    core.pre_tokenizer = pre_tokenizers.Sequence([])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<e>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<e>{% endif %}{% endfor %}"
    )
    # "aa" + "bb" as one text is a, ab, b: its own split gives aa, b, b. "aa" + "a" is aa, a at once.
    dataset = load(tokenizer, {"prompt": "aa", "chosen": "bb", "rejected": "a"})
    better, worse = dataset.examples
    assert (list(better.ids), list(better.loss_mask)) == ([4, 1, 1, 3], [0, 1, 1, 1])
    assert (list(worse.ids), list(worse.loss_mask)) == ([4, 0, 3], [0, 1, 1])
    assert dataset.counts.split == 1


def test_a_prompt_that_only_one_answer_changes_is_encoded_apart(tokenizer, monkeypatch):
    """No token reaches over the border, yet the prompt's tokens differ: a whole text may be tokenised differently."""
    import lockstep.data.encode.responses as completions

    real = completions.encode_spans

    def fickle(tokenizer, spans, origin):
        example, split = real(tokenizer, spans, origin)
        if spans.text.startswith("<|im_start|>") and "3" in spans.text:
            example = Example([65, *example.ids[1:]], example.loss_mask, origin)
        return example, split

    monkeypatch.setattr(completions, "encode_spans", fickle)
    encode = ResponseEncoder(Encoding(tokenizer, Data(train=["x"])))
    better, worse = encode("1+1?", ["2", "3"], ORIGIN)
    assert encode.split_rows == 1
    assert texts(tokenizer, better) == (PROMPT + "\n", "2<|im_end|>")
    assert texts(tokenizer, worse) == (PROMPT + "\n", "3<|im_end|>")


PAIR = {"prompt": "1+1?", "chosen": "2", "rejected": "3"}


@pytest.mark.parametrize(
    ("extra", "data", "margin", "said"),
    [
        ({}, {}, 0.0, ""),
        ({"margin": 2}, {}, 2.0, "; margin from margin"),
        (
            {"score_chosen": 4.5, "score_rejected": 3.0},
            {},
            1.5,
            "; margin from score_chosen - score_rejected",
        ),
        ({"chosen_score": 4, "rejected_score": 4}, {}, 0.0, "; margin from chosen_score - rejected_score"),
        ({"extra": {"gap": 0.25}}, {"margin_key": "extra.gap"}, 0.25, "; margin from extra.gap"),
    ],
)
def test_margins_are_for_scores(tokenizer, load, extra, data, margin, said):
    dataset = load(tokenizer, PAIR | extra, read="score", **data)
    assert dataset.items[0].margin == margin
    path = dataset.notes[0].split(": ")[0]
    assert dataset.notes == [
        f"{path}: 1 rows as prompt/chosen/rejected pairs (prompt, chosen, rejected{said})",
    ]
    unused = load(tokenizer, PAIR | extra, **data)
    assert unused.items[0].margin == 0
    assert ("is not used" in unused.notes[0]) == bool(said)


def test_settings_reach_into_columns_and_a_source_has_its_own(tokenizer, load):
    row = {"prompt": "no", "chosen": "no", "q": {"text": "1+1?"}, "a": [{"good": "2", "bad": "3"}], "rejected": "no"}
    settings = {"prompt_key": "q.text", "chosen_key": "a.0.good", "rejected_key": "a.0.bad"}
    for dataset in (load(tokenizer, row, **settings), load(tokenizer, row, source=settings, chosen_key="prompt")):
        assert texts(tokenizer, dataset.items[0].examples[0]) == (PROMPT + "\n", "2<|im_end|>")
        assert texts(tokenizer, dataset.items[0].examples[1]) == (PROMPT + "\n", "3<|im_end|>")


def test_rankings_are_sorted_best_first(tokenizer, load):
    row = {"prompt": "1+1?", "responses": ["1", "2", "3"], "scores": [0.0, 1.0, -1]}
    dataset = load(tokenizer, row, read="score", several=True)
    answers = [tokenizer.decode(list(example.ids))[len(PROMPT)] for example in dataset.items[0].examples]
    assert answers == ["2", "1", "3"]
    assert "rankings (prompt, responses; by scores)" in dataset.notes[0]
    unscored = load(tokenizer, {"prompt": "1+1?", "responses": ["1", "2", "3"]}, read="score", several=True)
    assert [tokenizer.decode(list(e.ids))[len(PROMPT)] for e in unscored.examples] == ["1", "2", "3"]
    assert "best first" in unscored.notes[0]


RANKED = {"prompt": "q", "responses": ["a", "b"]}
REFUSED = [
    (PAIR | {"chosen": " "}, "line 1 [empty-field]: chosen "),
    (PAIR | {"rejected": ""}, "[empty-field]: rejected "),
    (PAIR | {"prompt": ""}, "[empty-field]: prompt "),
    (PAIR | {"chosen": "3"}, "[identical-responses]: chosen and rejected "),
    (PAIR | {"chosen": None}, "[invalid-chat]: chosen "),
    (PAIR | {"prompt": 3}, "[invalid-chat]: prompt "),
    (PAIR | {"chosen": CHATS[1]}, "[mixed-rows]: chosen and rejected "),
    (PAIR | {"prompt": CHATS[0] + CHATS[1]}, "[prompt-ends-with-assistant]"),
    (PAIR | {"chosen": [bot("")], "rejected": CHATS[2]}, "[empty-field]: message 2 (assistant) "),
    (PAIR | {"chosen": [user("2?"), bot("2")], "rejected": CHATS[2]}, "[different-prompts]: chosen "),
    (
        {"prompt": CHATS[0], "chosen": CHATS[0] + CHATS[1], "rejected": [user("?"), bot("3")]},
        "[different-prompts]: rejected ",
    ),
    (
        PAIR | {"chosen": CHATS[0] + CHATS[1], "rejected": [user("x"), *CHATS[0], *CHATS[2]]},
        "[different-prompts]: chosen and rejected ",
    ),
    (
        PAIR | {"chosen": CHATS[0], "rejected": CHATS[0] + CHATS[2]},
        "[no-answer]: after the prompt, chosen ",
    ),
    (
        PAIR | {"chosen": [bot("2"), user("?")], "rejected": CHATS[2]},
        "[no-answer]: after the prompt, chosen ",
    ),
    ({"chosen": [user("1"), bot("2")], "rejected": [user("2"), bot("3")]}, "[different-prompts]"),
    ({"chosen": CHATS[1], "rejected": CHATS[2]}, "[different-prompts]"),
    ({"chosen": [user("1"), user("2")], "rejected": [user("1"), bot("3")]}, "[different-prompts]"),
    ({"chosen": CHATS[0] + CHATS[1], "rejected": CHATS[0]}, "[no-answer]: rejected "),
    ({"chosen": CHATS[0] + CHATS[1], "rejected": CHATS[0] + CHATS[1]}, "[identical-responses]: chosen and rejected "),
    ({"chosen": "Yes", "rejected": "No"}, "[different-prompts]"),
    ({"chosen": "q? a", "rejected": "q? "}, "[no-answer]: rejected "),
    (
        {"chosen": "\n\nHuman: a\n\nAssistant: x", "rejected": "\n\nHuman: b\n\nAssistant: y"},
        "[different-prompts]",
    ),
    (
        PAIR | {"score_chosen": 1, "score_rejected": 2},
        "[swapped-responses]: score_chosen 1 is below score_rejected 2",
    ),
    (RANKED | {"responses": ["a"]}, "[wrong-count]: responses "),
    (RANKED | {"responses": ["a", "b", "c"]}, "[wrong-count]: the row has 3 responses"),
    (RANKED | {"responses": ["a", "a"]}, "[identical-responses]: responses.0 and responses.1 "),
    (RANKED | {"scores": [1]}, "[wrong-count]: the row has 2 responses, but 1 scores"),
    (RANKED | {"scores": ["1", "2"]}, "[not-a-number]: scores "),
]


def test_rows_whose_scores_are_all_equal_are_dropped_and_counted(tokenizer, load):
    equal, apart = RANKED | {"scores": [1, 1]}, RANKED | {"scores": [1, 2]}
    dataset = load(tokenizer, equal, apart, equal)
    assert (dataset.counts.rows, dataset.counts.dropped) == (1, 2)
    assert "(prompt, responses; by scores; 2 rows dropped because all their scores are equal)" in dataset.notes[0]
    with refuses("pairs.jsonl", "no-rows", "1 rows dropped because all their scores"):
        load(tokenizer, equal)


@pytest.mark.parametrize(("row", "reason"), REFUSED)
@pytest.mark.parametrize("read", ["response", "score"])
def test_bad_rows_are_refused(tokenizer, load, row, reason, read):
    with pytest.raises(Refusal, match=re.escape(reason)) as caught:
        load(tokenizer, row, read=read)
    assert caught.value.problems[0].where.endswith("pairs.jsonl line 1")
    assert caught.value.problems[0].remedy or "message 2" in reason


@pytest.mark.parametrize(
    ("extra", "reason"),
    [
        ({"margin": None}, "[not-a-number]: margin is None"),
        ({"margin": True}, "[not-a-number]: margin is True"),
        ({"margin": -1}, "[swapped-responses]: the margin is -1.0"),
        ({"margin": 1e999}, "[not-a-number]: margin is inf"),
        ({"score_chosen": None, "score_rejected": 1}, "score_chosen is None"),
    ],
)
def test_bad_margins_are_refused_where_they_are_used(tokenizer, extra, reason):
    finder = ColumnFinder(Source(path="x"), Data(train=["x"]), [*PAIR, *extra])
    for read in ("score", "response"):
        rows = RankingRows(finder, tokenizer, 99, read=read, several=False)
        if read == "response":
            assert rows(PAIR | extra, ORIGIN)[0].item.margin == 0
        else:
            with pytest.raises(Refusal, match=re.escape(reason)):
                rows(PAIR | extra, ORIGIN)


def test_all_bad_rows_are_told_together(tokenizer, load):
    with pytest.raises(Refusal) as caught:
        load(tokenizer, PAIR | {"chosen": ""}, PAIR, PAIR | {"chosen": "3"})
    assert [problem.where.split()[-1] for problem in caught.value.problems] == ["1", "3"]


def test_columns_that_cannot_be_told_are_refused(tokenizer, load):
    with refuses("pairs.jsonl", "unclear-columns", "prompt, chosen"):
        load(tokenizer, {"prompt": "a", "chosen": "b"})


def test_chats_need_a_template(bare, load):
    with refuses("line 1", "no-chat-template", remedy="data.template"):
        load(bare, LAYOUTS["implicit chats"])


def test_the_end_is_required_only_where_it_is_trained(tokenizer, load):
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    with pytest.raises(Refusal, match="not an end token"):
        load(tokenizer, PAIR)
    better = load(tokenizer, PAIR, require_end=False).items[0].examples[0]
    assert texts(tokenizer, better) == ("user: 1+1?\nassistant: ", "2\n")
    probe = load(tokenizer, PAIR, read="score").items[0].examples[0]
    assert tokenizer.decode(list(probe.ids)) == "user: 1+1?\nassistant: 2\n"


# Without a template: 10 bytes of prompt; 2 + end and 4 + end: 13 and 15 tokens.
LONG = {"prompt": "0123456789", "chosen": "ab", "rejected": "abcd"}


def cut(bare, load, limit, overlong, row=LONG):
    dataset = load(bare, row, limit=limit, overlong=overlong)
    return dataset, [bare.decode(list(example.ids)) for example in dataset.examples]


def test_what_fits_is_left_alone(bare, load):
    dataset, (better, worse) = cut(bare, load, 15, "error")
    assert (better, worse) == ("0123456789ab<|im_end|>", "0123456789abcd<|im_end|>")
    assert dataset.counts.truncated == 0
    assert (dataset.counts.tokens, dataset.counts.longest) == (28, 15)
    assert cut(bare, load, 15, "error", LONG | {"chosen": "abcd", "rejected": "ab"})[0].counts.longest == 15


def test_overlong_pairs_are_refused_or_dropped_as_one(bare, load):
    with refuses("line 1", "row-too-long", "15 tokens", "data.max_tokens=14"):
        cut(bare, load, 14, "error")
    dataset = load(bare, LONG, {"prompt": "1", "chosen": "2", "rejected": "3"}, limit=14, overlong="drop")
    assert (dataset.counts.rows, dataset.counts.dropped) == (1, 1)
    with pytest.raises(Refusal, match="all rows are over 14 tokens"):
        cut(bare, load, 14, "drop")


def test_the_left_is_cut_of_the_prompt_alone_and_equally(bare, load):
    dataset, (better, worse) = cut(bare, load, 12, "truncate_left")
    assert (better, worse) == ("3456789ab<|im_end|>", "3456789abcd<|im_end|>")
    assert [list(example.loss_mask) for example in dataset.examples] == [[0] * 7 + [1] * 3, [0] * 7 + [1] * 5]
    assert dataset.counts.truncated == 1
    assert cut(bare, load, 6, "truncate_left")[1] == ["9ab<|im_end|>", "9abcd<|im_end|>"]
    with refuses("line 1", "truncated-away", "rejected alone has 5 tokens"):
        cut(bare, load, 5, "truncate_left")


def test_the_right_is_cut_of_each_response(bare, load):
    dataset, (better, worse) = cut(bare, load, 13, "truncate_right")
    assert (better, worse) == ("0123456789ab<|im_end|>", "0123456789abc")
    assert dataset.counts.truncated == 1
    # The end that is cut away is still the one to stop at.
    assert dataset.end_tokens == {bare.eos_token_id}
    with refuses("line 1", "identical-responses", "12 tokens"):
        cut(bare, load, 12, "truncate_right")
    with refuses("line 1", "truncated-away", "truncate_right to 10", "chosen"):
        cut(bare, load, 10, "truncate_right")


def test_a_cut_text_is_scored_at_its_new_end(bare, load):
    dataset = load(bare, LONG, read="score", limit=13, overlong="truncate_right")
    assert [example.scored_tokens() for example in dataset.examples] == [[(12, 0)], [(12, 0)]]
    left = load(bare, LONG, read="score", limit=12, overlong="truncate_left")
    assert [example.scored_tokens() for example in left.examples] == [[(9, 0)], [(11, 0)]]
