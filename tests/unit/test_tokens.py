"""The short way from text to tokens gives what the tokenizer's own call gives."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest

from lockstep.data.encode.tokenizer_cache import token_facts, token_ids, token_ids_and_offsets
from lockstep.model.load import load_tokenizer

TEXTS = ["", "a", "two words\n", "<|im_start|>user\nhü 🙂<|im_end|>\n", " x" * 50]


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


def called(tokenizer: Any, text: str) -> tuple[list[int], list[tuple[int, int]]]:
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    return list(found["input_ids"]), list(found["offset_mapping"])


@pytest.mark.parametrize("text", TEXTS)
def test_a_call_says_the_same(tokenizer: Any, text: str) -> None:
    ids, offsets = called(tokenizer, text)
    assert token_ids(tokenizer, text) == ids
    assert token_ids_and_offsets(tokenizer, text) == (ids, offsets)


def test_what_the_file_says_of_cutting_and_filling_is_not_heeded_as_in_a_call(tokenizer: Any) -> None:
    whole = called(tokenizer, TEXTS[3])
    cutting = copy.deepcopy(tokenizer)
    cutting.backend_tokenizer.enable_truncation(3)
    cutting.backend_tokenizer.enable_padding(length=400)
    assert token_ids_and_offsets(cutting, TEXTS[3]) == whole
    splitting = copy.deepcopy(tokenizer)
    splitting.split_special_tokens = True
    assert token_ids(splitting, TEXTS[3]) == called(copy.deepcopy(splitting), TEXTS[3])[0] != whole[0]


def test_a_tokenizer_with_a_call_of_its_own_is_called(tokenizer: Any) -> None:
    class Own(type(tokenizer)):  # type: ignore[misc]
        def __call__(self, text: str, **keys: Any) -> Any:
            return {"input_ids": [7], "offset_mapping": [(0, len(text))]}

    own = copy.deepcopy(tokenizer)
    own.__class__ = Own
    assert token_ids(own, "ab") == [7]
    assert token_ids_and_offsets(own, "ab") == ([7], [(0, 2)])


@pytest.mark.slow
def test_facts_are_asked_again_when_tokens_are_added_and_keep_nothing_alive(tokenizer: Any) -> None:
    own = copy.deepcopy(tokenizer)
    before = token_facts(own)
    assert token_facts(own) is before
    own.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    assert own.convert_tokens_to_ids("<|new|>") in token_facts(own).special - before.special
    assert token_facts(own).blank(own, token_ids(own, "\n")[0])
    assert not token_facts(own).blank(own, token_ids(own, "x")[0])
    gone = weakref.ref(own)
    del own
    gc.collect()
    assert gone() is None
