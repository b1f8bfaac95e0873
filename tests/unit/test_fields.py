"""Values by key: nested paths, and refusals that name row, key and the nearest key."""

from __future__ import annotations

from typing import Any

import pytest

from lockstep.data.encode.columns import lookup
from lockstep.errors import Refusal
from lockstep.types import Origin

ROW: dict[str, Any] = {
    "prompt": "2+2",
    "choices": ["a", "b"],
    "turns": [{"role": "user", "content": "hi"}],
    "extra_info": {"question": "why", "answer.short": "so", "index": None},
    "a.b": "literal",
    "a": {"b": "nested", "c": 1},
    "meta.info": {"lang": "en"},
}
ORIGIN = Origin("train.parquet", 7)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("prompt", "2+2"),
        ("extra_info.question", "why"),
        ("extra_info.index", None),
        ("choices.0", "a"),
        ("turns.0.content", "hi"),
        ("a.b", "literal"),
        ("a.c", 1),
        ("extra_info.answer.short", "so"),
        ("meta.info.lang", "en"),
    ],
)
def test_finds(key: str, value: Any) -> None:
    assert lookup(ROW, key, ORIGIN) == value


@pytest.mark.parametrize(
    ("key", "why", "remedy"),
    [
        ("promt", "the row has the keys 'prompt', 'choices', 'turns'", "did you mean 'prompt'?"),
        ("question", "the row has the keys", "did you mean 'extra_info.question'?"),
        ("extra_info.qestion", "'extra_info' has the keys 'question', 'answer.short'", "'extra_info.question'?"),
        ("choices.2", "'choices' is a list of 2", ""),
        ("choices.-1", "'choices' is a list of 2", ""),
        ("choices.first", "'choices' is a list of 2", ""),
        ("extra_info.index.deeper", "'extra_info.index' is null, which has no inner values", ""),
        ("prompt.0", "'prompt' is a str, which has no inner values", ""),
    ],
)
def test_refuses_what_is_missing(key: str, why: str, remedy: str) -> None:
    with pytest.raises(Refusal) as refused:
        lookup(ROW, key, ORIGIN)
    (problem,) = refused.value.problems
    assert problem.where == "train.parquet row 7"
    assert f"has no {key!r}: " in problem.why
    assert why in problem.why
    assert remedy in problem.remedy


def test_many_keys_are_listed_shortly() -> None:
    with pytest.raises(Refusal, match="'k19' and 5 more"):
        lookup({f"k{number}": 0 for number in range(25)}, "absent", ORIGIN)
