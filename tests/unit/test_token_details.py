"""What a stored response tells of its tokens: texts that join to the response, rounded numbers, a bounded size."""

from __future__ import annotations

from lockstep.run.sample_log import DIGITS, MOST_TOKENS, TokenTexts, sample_line, token_details
from lockstep.types import Origin, Prompt, Question, Rollout, Score

BYTES = list("né 語!".encode())


def by_bytes(ids: list[int]) -> str:
    return bytes(ids).decode(errors="replace")


def spaced(ids: list[int]) -> str:
    """As tokenizers of another kind: a space before each word but the first."""
    return " ".join("ab"[token] for token in ids)


def rollout(ids: list[int], trained: tuple[int, ...] = ()) -> Rollout:
    question = Question("rule", [{"role": "user", "content": "?"}], "1", Origin("rows", 3))
    prompt = Prompt(question, [1, 2])
    logprobs = [-0.123456789 * (i + 1) for i in range(len(ids))]
    return Rollout(prompt, 0, 0, ids, logprobs, "token", "text", Score(1.0, {}), loss_mask=trained)


def test_a_character_of_several_tokens_stands_at_the_last_of_them() -> None:
    texts = TokenTexts(by_bytes).of(BYTES)
    assert texts == ["n", "", "é", " ", "", "", "語", "!"]
    assert "".join(texts) == by_bytes(BYTES)


def test_bytes_that_are_no_text_are_not_waited_for() -> None:
    """0xe8 begins a character of three bytes that never comes."""
    texts = TokenTexts(by_bytes).of([0xE8] * 9 + [ord("x")])
    assert len(texts) == 10
    assert "".join(texts) == by_bytes([0xE8] * 9 + [ord("x")])


def test_a_tokenizer_that_writes_a_word_otherwise_after_others() -> None:
    texts = TokenTexts(spaced).of([0, 1, 1, 0])
    assert texts == ["a", " b", " b", " a"]


def test_numbers_are_rounded_and_tokens_of_an_environment_have_none() -> None:
    made = token_details(rollout([110, 33, 34], (1, 0, 1)), TokenTexts(by_bytes), [0.123456, -2.0])
    assert made == {
        "texts": ["n", "!", '"'],
        "logprobs": [-0.1235, None, round(-0.123456789 * 3, DIGITS)],
        "advantages": [0.1235, None, -2.0],
    }
    same = token_details(rollout([110, 33]), TokenTexts(by_bytes), [0.5, 0.5])
    assert "advantages" not in same, "the line tells it once"
    assert "advantages" not in token_details(rollout([110]), TokenTexts(by_bytes), None)


def test_of_a_long_response_the_beginning_is_told() -> None:
    made = token_details(rollout([110] * (MOST_TOKENS + 5)), TokenTexts(by_bytes), [1.0, 2.0] * (MOST_TOKENS // 2))
    assert {name: len(values) for name, values in made.items()} == dict.fromkeys(made, MOST_TOKENS)
    line = sample_line(4, "train", rollout([110]), 0.5, made)
    assert list(line)[-1] == "token_details"
    assert "token_details" not in sample_line(4, "val", rollout([110]), None)
