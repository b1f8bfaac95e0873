"""Tokens by pieces are the tokens of the tokenizer, and what is trained of a chat is what its own calls say."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from lockstep.data.encode.chat import render_chat
from lockstep.data.encode.chat_template import template_text
from lockstep.data.encode.chat_text import ChatText, TemplateInputs, _fast_template, _FastTemplate
from lockstep.data.encode.tokenizer_cache import _CUTS, _PIECES, Pieces, forget_pieces, token_ids
from lockstep.data.encode.trained_tokens import Spans, encode_spans
from lockstep.errors import Refusal
from lockstep.types import Message, Origin

ORIGIN = Origin("rows.jsonl", 0)
LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
MARKS = ["<|im_start|>", "<|im_end|>", "<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
PLAIN = [AddedToken(mark, special=True, normalized=False) for mark in [*MARKS, "<|im", "<tool_call>"]]
# Words and signs whose neighbours decide where a token ends, in many scripts; white space that is seldom told apart.
PARTS = [
    *("a", "b", "The", "the", "I'll", "don't", "'S", "'ſ", "x'", "12", "1234567", "3.5", "٣", "Ⅷ", "½"),
    *(".", ",", "!?", "...", "/", "//", "\\n", "<|", "|>", "(", "=", "_", "é", "e\u0301", "\u0301", "ß", "Å", "\u212b"),
    *("中文", "日本語", "한국", "\u1112\u1161", "हिन्दी", "🙂", "👩\u200d💻", "\u200b", "\ufeff", "\u180e"),
    *("\x00", "\x1c", ".\n/", "!\r\n\n//", "x\n/y"),
    *(" ", " ", " ", "  ", "   ", "\n", "\n", "\n\n", "\r\n", "\t", "\x0b", "\x0c", "\x85", "\xa0", "\u2028", "\u3000"),
]
TEXT = [
    "The quick brown fox doesn't jump over 12 lazy dogs.\n\n    It'll run: 3.5 km / h (again).\r\n",
    "#include <stdio.h>\n\nint main(void) {\n\treturn 0;  // ok\n}\n",
    "Ein Fluß, 中文 und 日本語: été é 🙂🙂\n",
] * 8


def backend(words: str | None, *, normal: Any = None, digits: bool = False, trims: bool = False) -> Tokenizer:
    """A small BPE whose words are those of a pattern; without one, of ByteLevel's own."""
    core = Tokenizer(models.BPE())
    core.normalizer = normal
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=words is None)
    split = [] if words is None else [pre_tokenizers.Split(Regex(words), "isolated")]
    split += [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    core.pre_tokenizer = pre_tokenizers.Sequence([*split, level]) if split else level
    core.decoder = decoders.ByteLevel()
    if trims:
        core.post_processor = processors.ByteLevel(trim_offsets=True)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    core.train_from_iterator(
        [*TEXT, *texts(99, 300, 24, PARTS)],
        trainers.BpeTrainer(vocab_size=1500, initial_alphabet=alphabet, show_progress=False, special_tokens=PLAIN),
    )
    return core


BACKENDS: dict[str, Any] = {
    "gpt2": lambda: backend(None),
    "gpt2 trims": lambda: backend(None, trims=True),
    "digits": lambda: backend(None, digits=True),
    **{f"pattern {number}": lambda words=words: backend(words) for number, words in enumerate(_CUTS)},
    "nfc": lambda: backend(LLAMA3, normal=normalizers.NFC(), trims=True),
}


@pytest.fixture(scope="module", params=list(BACKENDS))
def core(request: Any) -> Tokenizer:
    return BACKENDS[request.param]()


def texts(seed: int, count: int, longest: int, parts: Sequence[str] = (*PARTS, *MARKS, "<tool_call>")) -> list[str]:
    draw = random.Random(seed)
    return ["".join(draw.choices(parts, k=draw.randrange(longest))) for _ in range(count)]


def ids_of(runs: list[bytes]) -> list[list[int]]:
    return [memoryview(run).cast("q").tolist() for run in runs]


def check(core: Tokenizer, seed: int, count: int) -> dict[str, int]:
    """Compared with the tokenizer: how many texts had known pieces, and how many were cut at borders."""
    pieces = Pieces.of(core)
    assert pieces is not None
    draw, met = random.Random(seed), {"known": 0, "cut": 0}
    for text in texts(seed, count, 24):
        whole = core.encode(text, add_special_tokens=False)
        runs = pieces.runs(text)
        assert runs is None or ids_of(runs) == [whole.ids], repr(text)
        met["known"] += runs is not None
        borders = sorted(draw.randrange(len(text) + 1) for _ in range(draw.randrange(1, 5)))
        runs = pieces.runs(text, borders)
        if runs is None:
            continue
        met["cut"] += 1
        assert [token for run in ids_of(runs) for token in run] == whole.ids
        places = list(itertools.accumulate((len(run) // 8 for run in runs), initial=0))[1:-1]
        for border, place in zip(borders, places, strict=True):
            assert core.decode(whole.ids[:place], skip_special_tokens=False) == text[:border], (text, border)
    return met


def test_words_in_ascii_are_those_of_every_pattern() -> None:
    """A pattern that Python reads otherwise is not used, and its pieces go to the tokenizer one by one."""
    for words in _CUTS:
        pieces = Pieces.of(backend(words))
        assert pieces is not None
        assert pieces._words is not None, words


def test_pieces_give_the_tokens_of_the_whole_text(core: Tokenizer) -> None:
    met = check(core, 0, 700)
    assert met["known"] > 200
    assert met["cut"] > 60


@pytest.mark.slow
def test_pieces_give_the_tokens_of_many_texts(core: Tokenizer) -> None:
    met = check(core, 1, 20_000)
    assert met["known"] > 5_000


# -- chats -------------------------------------------------------------------------------------------------------------

BARE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEMPLATES = {
    "bare": BARE,
    "chatml": template_text("chatml"),
    "qwen": template_text("qwen"),
    "llama3": template_text("llama3"),
    # No token ends a turn, and a space stands before the answer.
    "words": (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    ),
    "stripped": BARE.replace("m['content']", "m['content'].strip()"),
    "joined": (
        "{% for m in messages %}{{ m['content'] }}{% if m['role'] == 'assistant' %}<|im_end|>{% endif %}{% endfor %}"
    ),
    "fickle": "{{ messages | length }}" + BARE,
    "strict": "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}" + BARE,
    "reads a mark": BARE.replace("<|im_end|>", "{{ eos_token }}"),
}
CALLS = [{"type": "function", "function": {"name": "weather", "arguments": {"city": "Rome", "days": 2}}}]
TOOL = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": {"city": {"type": "string"}}}},
}
EDGES = ["", " ", "\n", "\n\n", "  ", "\t", " \n", "x", ".", "7"]


def chats(seed: int, count: int) -> list[tuple[list[Message], list[dict[str, Any]]]]:
    """Chats of several turns, some with a system message, tools, weights or reasoning; contents with any edges."""
    draw, said = random.Random(seed), iter(texts(seed, 12 * count, 14, (*PARTS, "<|im_end|>", "<tool_call>")))

    def content() -> str:
        return draw.choice(EDGES) + "So" + next(said) + draw.choice(EDGES)

    made: list[tuple[list[Message], list[dict[str, Any]]]] = []
    for _ in range(count):
        turns: list[Message] = [{"role": "system", "content": content()}] if draw.random() < 0.3 else []
        tools = [TOOL] if draw.random() < 0.2 else []
        for _ in range(draw.randrange(1, 4)):
            answer: Message = {"role": "assistant", "content": content()}
            if draw.random() < 0.1:
                answer["weight"] = draw.randrange(2)
            turns += [{"role": "user", "content": content()}, answer]
            if tools and draw.random() < 0.5:
                answer["tool_calls"] = CALLS
                turns += [{"role": "tool", "content": content()}, {"role": "assistant", "content": content()}]
        made.append((turns, tools))
    return made


def by_calls(tokenizer: Any, spans: Spans) -> tuple[list[int], list[int], bool]:
    """Ids, what is trained and whether it was split, by the tokenizer's own call and the places of its tokens alone."""

    def call(text: str) -> tuple[list[int], list[tuple[int, int]]]:
        found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return list(found["input_ids"]), list(found["offset_mapping"])

    ids, places = call(spans.text)
    trained, split = [0] * len(ids), False
    for number, (start, end) in enumerate(places):
        for first, last in spans.trained:
            if first <= start and end <= last:
                trained[number] = 1
            elif start < last and end > first:
                split = True
    if split:
        borders = [0, *itertools.chain.from_iterable(spans.trained), len(spans.text)]
        pieces = [call(spans.text[start:end])[0] for start, end in itertools.pairwise(borders)]
        ids = [token for piece in pieces for token in piece]
        trained = [number % 2 for number, piece in enumerate(pieces) for _ in piece]
    if "{%- generation -%}" not in tokenizer.chat_template:
        # Blanks at the end of a run of trained tokens, right after a token that is no text.
        special = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
        for last in [n for n in range(len(ids)) if trained[n] and not (n + 1 < len(ids) and trained[n + 1])]:
            first = last
            while (
                first >= 0
                and trained[first]
                and ids[first] not in special
                and not tokenizer.decode([ids[first]]).strip()
            ):
                first -= 1
            if first >= 0 and trained[first] and ids[first] in special:
                trained[first + 1 : last + 1] = [0] * (last - first)
    return ids, trained, split


def outcome(tokenizer: Any, messages: list[Message], tools: list[dict[str, Any]]) -> Spans | str:
    try:
        return render_chat(tokenizer, messages, ORIGIN, TemplateInputs(tools))
    except Refusal as refusal:
        return str(refusal)


def check_chats(core: Tokenizer, seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    tokenizer: Any = PreTrainedTokenizerFast(
        tokenizer_object=core, bos_token="<|begin_of_text|>", eos_token="<|im_end|>", extra_special_tokens=MARKS
    )
    met = dict.fromkeys(("refused", "split", "whole"), 0)
    for number, template in enumerate(TEMPLATES.values()):
        tokenizer.chat_template = template
        for messages, tools in chats(seed + number, count):
            found = outcome(tokenizer, messages, tools)
            with monkeypatch.context() as patched:
                patched.setattr("lockstep.data.encode.chat_text._fast_template_of", lambda *given: None)
                assert outcome(tokenizer, copy.deepcopy(messages), tools) == found
            if isinstance(found, str):
                met["refused"] += 1
                continue
            example, split = encode_spans(tokenizer, found, ORIGIN)
            assert (list(example.ids), list(example.loss_mask), split) == by_calls(tokenizer, found), found
            met["split" if split else "whole"] += 1
    return met


@pytest.mark.parametrize("name", ["gpt2 trims", "nfc"])
def test_chats_are_what_the_calls_of_transformers_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met = check_chats(BACKENDS[name](), 0, 20, monkeypatch)
    assert min(met.values()) > 10, met


@pytest.mark.slow
@pytest.mark.parametrize("name", list(BACKENDS))
def test_many_chats_are_what_the_calls_of_transformers_say(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    met = check_chats(BACKENDS[name](), 100, 250, monkeypatch)
    assert min(met.values()) > 100, met


# -- what is left to the tokenizer as a whole --------------------------------------------------------------------------


def changed(core: Tokenizer, **parts: Any) -> Tokenizer:
    for name, part in parts.items():
        setattr(core, name, part)
    return core


def adding(token: AddedToken) -> Tokenizer:
    core = backend(None)
    core.add_tokens([token])
    return core


@pytest.mark.parametrize(
    "make",
    [
        lambda: backend(r"\p{L}+|\s"),
        lambda: backend(LLAMA3, normal=normalizers.NFKC()),
        lambda: changed(backend(None), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
        lambda: changed(backend(None), pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)),
        lambda: changed(backend(None), pre_tokenizer=pre_tokenizers.Split(Regex(LLAMA3), "isolated")),
        lambda: adding(AddedToken("xyz", normalized=True)),
        lambda: adding(AddedToken("xyz", normalized=False, lstrip=True)),
        lambda: adding(AddedToken("xyz", normalized=False, rstrip=True)),
        lambda: adding(AddedToken("xyz", normalized=False, single_word=True)),
        lambda: adding(AddedToken("  ", normalized=False)),
        lambda: Tokenizer(models.WordLevel({"a": 0}, unk_token="a")),
        lambda: Tokenizer(models.BPE(unk_token="a")),
    ],
)
def test_other_tokenizers_have_no_pieces(make: Any) -> None:
    assert Pieces.of(make()) is None


def test_what_is_known_is_bounded_and_follows_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    core = backend(None)
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=core)

    def agrees(text: str) -> None:
        assert token_ids(tokenizer, text) == tokenizer(text, add_special_tokens=False)["input_ids"]

    agrees("The quick brown fox")
    (pieces,) = (found for _, found in _PIECES.values() if found and found._owner() is tokenizer.backend_tokenizer)
    assert len(pieces) == 4
    monkeypatch.setattr("lockstep.data.encode.tokenizer_cache.MOST", 200)
    monkeypatch.setattr("lockstep.data.encode.tokenizer_cache.MOST_WORDS", 5)
    agrees(" ".join(f"word{number}" for number in range(300)))
    assert len(pieces) < 10
    assert len(pieces._word_tokens) <= 5
    agrees("a" * 1000 + " b")
    assert max(map(len, pieces)) < 256
    # Tokens that are added later; also one that is a word of the vocabulary, before many rows are read.
    tokenizer.add_tokens([AddedToken("quick br", normalized=False)])
    agrees("The quick brown fox")
    tokenizer.add_tokens([AddedToken("The", normalized=False)])
    forget_pieces(tokenizer)
    agrees("The quick brown fox Them")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    agrees("The quick brown fox")
    tokenizer.split_special_tokens = True
    agrees("a<|im_end|>b")


def test_half_a_character_fails_as_in_the_call() -> None:
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend(None))
    with pytest.raises(Exception) as called:
        tokenizer("a \ud800 b", add_special_tokens=False)
    with pytest.raises(type(called.value)):
        token_ids(tokenizer, "a \ud800 b")


def test_the_call_renders_where_the_fast_template_is_not_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Own(PreTrainedTokenizerFast):
        def apply_chat_template(self, *given: Any, **keys: Any) -> str:
            return "own"

    chat: list[Message] = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    own = Own(tokenizer_object=backend(None), chat_template=BARE)
    assert ChatText(own, chat, ORIGIN).upto(1, open_turn=True) == "own"
    tokenizer: Any = PreTrainedTokenizerFast(tokenizer_object=backend(None), chat_template=BARE)
    short = _FastTemplate(_fast_template(BARE)._compiled)  # type: ignore[union-attr]
    monkeypatch.setattr(_FastTemplate, "__call__", lambda *given: "other")
    monkeypatch.setattr("lockstep.data.encode.chat_text._fast_template", lambda template: short)
    for _ in range(2):
        text = ChatText(tokenizer, chat, ORIGIN).upto(1, open_turn=True)
        assert text == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"
    assert not short.correct
