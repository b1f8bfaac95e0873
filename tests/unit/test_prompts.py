"""RL rows as prompts: what the model is given, what is refused, cut or dropped, and the order they come in."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from conftest import write_jsonl
from lockstep.data.dataset import Loader
from lockstep.data.encode.chat import render_chat
from lockstep.data.encode.prompt_rows import PromptCounts, PromptSet, fit_prompt, load_prompts, prompt_ids
from lockstep.data.encode.trained_tokens import encode_spans
from lockstep.errors import Refusal
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_data import Data, Source
from lockstep.rollout.collect import encode_questions
from lockstep.types import Message, Origin, Prompt, Question

# The tiny tokenizer has a token for each byte and one for each mark of the template.
HELLO = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
HELLO_TOKENS = 1 + len("user\nhello") + 1 + len("\n") + 1 + len("assistant\n")


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


def asked(*messages: Message, row: int = 7) -> Question:
    return Question("arithmetic", list(messages), "4", Origin("rows.jsonl", row))


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def row(prompt: object, source: str = "arithmetic", truth: object = "4") -> dict[str, object]:
    return {"data_source": source, "prompt": prompt, "reward_model": {"style": "rule", "ground_truth": truth}}


def load(tokenizer: Any, folder: Path, *files: list[dict[str, object]], limit: int = 99, **keys: Any) -> PromptSet:
    weights = keys.pop("weights", [None] * len(files))
    paths = [str(write_jsonl(folder / f"{i}.jsonl", rows)) for i, rows in enumerate(files)]
    sources = [Source(path=path, weight=weight) for path, weight in zip(paths, weights, strict=True)]
    return load_prompts(sources, Data(train=[source.model_dump() for source in sources], **keys), tokenizer, limit)


def refused(tokenizer: Any, folder: Path, *files: list[dict[str, object]], **keys: Any) -> list[str]:
    with pytest.raises(Refusal) as caught:
        load(tokenizer, folder, *files, **keys)
    return [str(problem) for problem in caught.value.problems]


# -- encoding ----------------------------------------------------------------------------------------------------------


def test_the_prompt_ends_where_the_answer_begins(tokenizer: Any) -> None:
    ids = prompt_ids(tokenizer, asked(user("hello")))
    assert tokenizer.decode(ids) == HELLO
    assert len(ids) == HELLO_TOKENS
    assert ids == tokenizer.apply_chat_template([user("hello")], add_generation_prompt=True)["input_ids"]


def test_the_prompt_is_what_a_trained_chat_has_before_its_answer(tokenizer: Any) -> None:
    """Online and offline training see the same tokens."""
    chat = [{"role": "system", "content": "short"}, user("2+2?"), {"role": "assistant", "content": "#### 4"}]
    example, split = encode_spans(tokenizer, render_chat(tokenizer, chat, Origin("x", 0)), Origin("x", 0))
    begins = list(example.loss_mask).index(1)
    assert not split
    assert list(example.ids[:begins]) == prompt_ids(tokenizer, asked(*chat[:2]))


# -- the limit ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlong", ["error", "drop", "truncate_left"])
def test_a_prompt_exactly_at_the_limit_is_whole(tokenizer: Any, overlong: str) -> None:
    kept = fit_prompt(asked(user("hello")), tokenizer, HELLO_TOKENS, overlong)
    assert kept is not None
    assert tokenizer.decode(kept.item.ids) == HELLO
    assert (kept.lengths, kept.truncated) == ((HELLO_TOKENS,), False)


def test_one_token_over_is_refused_by_row_with_a_remedy(tokenizer: Any) -> None:
    with pytest.raises(Refusal) as caught:
        fit_prompt(asked(user("hello")), tokenizer, HELLO_TOKENS - 1, "error")
    (problem,) = caught.value.problems
    assert problem.where == "rows.jsonl row 7"
    assert f"{HELLO_TOKENS} tokens, over the limit of {HELLO_TOKENS - 1}" in problem.why
    assert "lower rollout.max_tokens" in problem.remedy
    assert "truncate_left" in problem.remedy
    with pytest.raises(Refusal, match=r"raise data\.max_prompt_tokens"):
        fit_prompt(asked(user("hello")), tokenizer, 3, "error", Data(train="rows.jsonl", max_prompt_tokens=3))


def test_one_token_over_is_dropped(tokenizer: Any) -> None:
    assert fit_prompt(asked(user("hello")), tokenizer, HELLO_TOKENS - 1, "drop") is None


def test_one_token_over_loses_its_first(tokenizer: Any) -> None:
    kept = fit_prompt(asked(user("hello")), tokenizer, HELLO_TOKENS - 1, "truncate_left")
    assert kept is not None
    assert tokenizer.decode(kept.item.ids) == HELLO.removeprefix("<|im_start|>")
    assert (kept.lengths, kept.truncated) == ((HELLO_TOKENS - 1,), True)


def test_counts_over_several_rows(tokenizer: Any, tmp_path: Path) -> None:
    rows = [row([user("x" * n)]) for n in (1, 5, 6, 9)]
    base = HELLO_TOKENS - len("hello")
    dropped = load(tokenizer, tmp_path, rows, limit=base + 5, overlong="drop")
    assert dropped.counts == PromptCounts(rows=2, tokens=2 * base + 6, longest=base + 5, dropped=2)
    assert dropped.counts.metrics()["data/dropped"] == 2.0
    assert [p.question.origin.row for p in dropped.sources[0]] == [1, 2]
    cut = load(tokenizer, tmp_path, rows, limit=base + 5, overlong="truncate_left")
    assert cut.counts == PromptCounts(rows=4, tokens=4 * base + 1 + 5 + 5 + 5, longest=base + 5, truncated=2)


def test_a_source_that_is_dropped_whole_is_refused(tokenizer: Any, tmp_path: Path) -> None:
    (said,) = refused(tokenizer, tmp_path, [row([user("hello")])], limit=3, overlong="drop")
    assert "0.jsonl" in said
    assert "all prompts are over 3 tokens" in said


# -- rows --------------------------------------------------------------------------------------------------------------


def test_a_system_message_is_added_only_where_none_is(tokenizer: Any, tmp_path: Path) -> None:
    own = {"role": "system", "content": "mine"}
    bare, has = load(tokenizer, tmp_path, [row([user("a")]), row([own, user("a")])], system="ours").sources[0]
    assert tokenizer.decode(bare.ids).startswith("<|im_start|>system\nours<|im_end|>\n<|im_start|>user\na")
    assert tokenizer.decode(has.ids).startswith("<|im_start|>system\nmine<|im_end|>\n<|im_start|>user\na")
    # What is stored and shown is what the model was given.
    assert bare.question.prompt == [{"role": "system", "content": "ours"}, user("a")]
    assert bare.question.ground_truth == "4"


def test_data_sources_and_questions_of_all_sources(tokenizer: Any, tmp_path: Path) -> None:
    prompts = load(tokenizer, tmp_path, [row([user("a")], "b"), row([user("b")], "a")], [row([user("c")], "b")])
    assert prompts.data_sources == ["a", "b"]
    assert [q.prompt[0]["content"] for q in prompts.questions] == ["a", "b", "c"]
    assert len(prompts.fingerprints) == 2
    assert len({str(f["fingerprint"]) for f in prompts.fingerprints}) == 2


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([], "[empty-field]: prompt "),
        (["hello"], "[invalid-chat]: prompt "),
        ([[{"role": "user", "content": "a"}]], "[invalid-chat]: prompt "),
        ([{"content": "a"}], "[invalid-chat]: prompt "),
        (
            [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "[prompt-ends-with-assistant]",
        ),
        ([{"role": "user"}], "[empty-field]: message 1 (user) "),
        ([{"role": "user", "content": None}], "[empty-field]: message 1 (user) "),
        ([{"role": "user", "content": "a"}, {"role": "user", "content": 3}], "[empty-field]: message 2 (user) "),
        ([{"role": "user", "content": " "}], "[empty-field]: message 1 (user) "),
    ],
)
@pytest.mark.parametrize("system", [None, "be short"])
def test_a_bad_prompt_is_named_by_its_row(
    tokenizer: Any, tmp_path: Path, prompt: object, said: str, system: str | None
) -> None:
    (problem,) = refused(tokenizer, tmp_path, [row([user("fine")]), row(prompt)], system=system)
    assert "0.jsonl line 2" in problem
    assert said in problem


def test_a_prompt_that_is_text_is_a_message_of_the_user(tokenizer: Any, tmp_path: Path) -> None:
    (prompt,) = load(tokenizer, tmp_path, [row("hello")]).sources[0]
    assert tokenizer.decode(prompt.ids) == HELLO
    assert prompt.question.prompt == [user("hello")]


def test_bad_rows_of_all_sources_are_told_together(tokenizer: Any, tmp_path: Path) -> None:
    good, long = row([user("a")]), row([user("x" * 200)])
    problems = refused(tokenizer, tmp_path, [good, row([])], [long], [row([user("a")], truth=" "), good])
    assert [Path(p.split()[0]).name for p in problems] == ["0.jsonl", "1.jsonl", "2.jsonl"]
    assert "[empty-field]: prompt " in problems[0]
    assert "[row-too-long]" in problems[1]
    assert re.search(r"\[empty-field\]: \S*ground_truth ", problems[2])


def test_a_tokenizer_without_a_template_is_refused(tiny_folder: Path, tmp_path: Path) -> None:
    bare = load_tokenizer(str(tiny_folder))
    bare.chat_template = None
    (said,) = refused(bare, tmp_path, [row([user("a")])])
    assert "[no-chat-template]" in said


def test_questions_of_a_validation_are_checked_and_encoded_alike(tokenizer: Any) -> None:
    (prompt,) = encode_questions(tokenizer, [asked(user("hello"))])
    assert tokenizer.decode(prompt.ids) == HELLO
    with pytest.raises(Refusal, match=r"rows\.jsonl row 7 \[empty-field\]: message 1 \(user\)"):
        encode_questions(tokenizer, [asked({"role": "user", "content": None})])


# -- the order they come in --------------------------------------------------------------------------------------------


def loader(sizes: list[int], weights: list[float] | None = None, *, shuffle: bool) -> Loader[tuple[int, int]]:
    rows = [[(source, i) for i in range(size)] for source, size in enumerate(sizes)]
    return Loader(rows, weights, rows_per_update=2, seed=3, shuffle=shuffle, total_rows=None)


def test_places_run_on_over_the_end_of_an_epoch() -> None:
    plain = loader([3, 2], shuffle=False)
    epoch = [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert plain.between(3, 12) == [*epoch[3:], *epoch, *epoch[:2]]
    assert plain.between(4, 4) == []
    # Going back is as good as going on: a resumed run asks for any place first.
    assert plain.between(0, 2) == epoch[:2]


def test_shuffled_epochs_hold_every_row_and_any_cut_gives_the_same_line() -> None:
    whole = loader([3, 2], shuffle=True).between(0, 15)
    for start in (0, 5, 10):
        assert sorted(whole[start : start + 5]) == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)]
    assert len({tuple(whole[start : start + 5]) for start in (0, 5, 10)}) > 1
    other = loader([3, 2], shuffle=True)
    assert [*other.between(9, 15), *other.between(0, 4), *other.between(4, 9)] == whole[9:] + whole[:9]


def test_weighted_sources_share_an_epoch(tokenizer: Any, tmp_path: Path) -> None:
    files = [[row([user(f"{name}{i}")], name) for i in range(4)] for name in "ab"]
    prompts = load(tokenizer, tmp_path, *files, weights=[3.0, 1.0])
    assert prompts.weights == [3.0, 1.0]
    taken: Loader[Prompt] = Loader(
        prompts.sources, prompts.weights, rows_per_update=2, seed=0, shuffle=True, total_rows=None
    )
    # Eight rows an epoch: three quarters of them from a, whose four rows all come before one comes again.
    sources = Counter(prompt.question.data_source for prompt in taken.between(0, 8))
    assert sources == {"a": 6, "b": 2}
    from_a = [p.question.prompt[0]["content"] for p in taken.between(0, 16) if p.question.data_source == "a"]
    assert sorted(from_a[:4]) == sorted(from_a[4:8]) == ["a0", "a1", "a2", "a3"]
