"""`lockstep generate`: answers come in pieces; a conversation can be taken back, begun anew and told who it is with."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, PeftModel, get_peft_model
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, AutoTokenizer

from lockstep.commands.generate import Chat, Conversation, converse, entered
from lockstep.errors import Refusal
from lockstep.serve.text_stream import TextStream
from refusals import refuses
from speaker import write_speaker


def conversation(folder: Path, **more) -> Conversation:
    settings = {"max_new_tokens": 12, "temperature": 0.0, "seed": 0, "system": None}
    return Conversation(str(folder), "cpu", **{**settings, **more})


@pytest.fixture(scope="module")
def spoken(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Conversation:
    return conversation(write_speaker(tmp_path_factory.mktemp("speaker") / "model", tiny_folder))


def said_by(lines: list[str]) -> Iterator[str]:
    yield from lines
    raise EOFError


def test_pieces_are_the_answer(spoken: Conversation) -> None:
    pieces: list[str] = []
    whole = spoken.answer("Tell me é.", pieces.append)
    assert "".join(pieces) == whole == spoken.answer("Tell me é.")
    assert len([piece for piece in pieces if piece]) > 1


def test_what_was_said_can_be_changed(spoken: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    chat = Chat(spoken)
    for said in ("/undo", "one", "two", "/undo", "/system Be brief.", "three"):
        chat.enter(said)
    reply = spoken.reply([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "three"}])
    assert chat.messages == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "three"},
        {"role": "assistant", "content": reply},
    ]
    told = capsys.readouterr().out
    assert told.startswith("the conversation is empty\nmodel> ")
    assert "removed: two\n" in told
    chat.enter("/history")
    assert capsys.readouterr().out.splitlines()[0] == "system> Be brief."
    chat.enter("/reset")
    assert chat.messages == [{"role": "system", "content": "Be brief."}]
    chat.enter("/system")
    assert chat.messages == []
    chat.enter("/nope")
    assert "no such command: /nope\n/reset" in capsys.readouterr().out
    chat.enter("//nope")
    assert chat.messages[0] == {"role": "user", "content": "/nope"}
    chat.enter("/exit")
    assert chat.over


def test_an_answer_has_seen_what_was_said_before(
    spoken: Conversation, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = said_by(["and 3?"])
    monkeypatch.setattr("builtins.input", lambda prompt: next(turns))
    converse(spoken, "2?")
    first = spoken.reply([{"role": "user", "content": "2?"}])
    before = [{"role": "user", "content": "2?"}, {"role": "assistant", "content": first}]
    second = spoken.reply([*before, {"role": "user", "content": "and 3?"}])
    assert second != spoken.answer("and 3?")
    # Control characters are shown, not sent.
    shown = capsys.readouterr().out.replace("\n", "")
    assert shown.count("model> ") == 2
    assert len(shown) >= len(first) + len(second)


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["hello "], "hello"),
        (["one \\", "two"], "one \ntwo"),
        (["\\", "two\\", ""], "\ntwo\n"),
        (['"""', "a", "", "  b", '"""'], "a\n\n  b"),
        (['"""one line"""'], "one line"),
        (['"""a', 'b"""'], "a\nb"),
        ([""], ""),
    ],
)
def test_messages_of_several_lines(lines: list[str], message: str) -> None:
    source = said_by(lines)
    assert entered(lambda prompt: next(source)) == message


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(spoken: Conversation) -> None:
    spoken.interruptible = True
    heard: list[str] = []

    def hear(piece: str) -> None:
        heard.append(piece)
        if len(heard) == 4:
            raise KeyboardInterrupt

    try:
        reply = spoken.answer("Go on", hear)
    finally:
        spoken.interruptible = False
    assert reply == spoken.answer("Go on")[:4] == "".join(heard)


def test_a_conversation_ends_at_the_context(spoken: Conversation, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny model takes 2,048 tokens, a byte each: an answer has what is left, and beyond it nothing is said."""
    chat = Chat(spoken)
    room = 2048 - len(
        spoken.tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=True)["input_ids"]
    )
    room -= len(spoken.tokenizer("<|im_start|>assistant\n")["input_ids"])
    chat.enter("x" * (room - 3))
    assert len(chat.messages) == 2
    assert len(chat.messages[1]["content"]) <= 3
    chat.enter("more")
    assert len(chat.messages) == 2
    assert "the model's context is 2048" in capsys.readouterr().out


def test_what_no_template_writes_is_refused(spoken: Conversation) -> None:
    told = [{"role": "system", "content": "You are Bo."}, {"role": "user", "content": "Who?"}]
    before = spoken.tokenizer.chat_template
    try:
        spoken.tokenizer.chat_template = "{% for m in messages if m.role != 'system' %}{{ m.content }}{% endfor %}"
        with pytest.raises(Refusal, match=r"drops message 1 \(system\): 'You are Bo.'"):
            spoken.reply(told)
        spoken.tokenizer.chat_template, spoken.opening = None, told[:1]
        with refuses("--system", "no-chat-template"):
            spoken.answer("Who?")
    finally:
        spoken.tokenizer.chat_template, spoken.opening = before, []


def test_a_reward_model_does_not_talk(tiny_folder: Path, tmp_path: Path) -> None:
    for file in tiny_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen2ForSequenceClassification"]}))
    with pytest.raises(Refusal, match="is a reward model"):
        conversation(tmp_path)
    with pytest.raises(Refusal, match=r"--adapter .*\[no-adapter\]: .*adapter_config\.json"):
        conversation(tiny_folder, adapter=str(tiny_folder))


def test_an_adapter_is_put_on(tiny_folder: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_folder)
    torch.manual_seed(0)
    config = LoraConfig(r=4, lora_alpha=64, target_modules=["q_proj", "v_proj", "up_proj"], init_lora_weights=False)
    get_peft_model(base, config).save_pretrained(tmp_path / "adapter")
    said = conversation(tiny_folder, adapter=str(tmp_path / "adapter")).continue_text("2+3")
    fresh = AutoModelForCausalLM.from_pretrained(tiny_folder)
    theirs = PeftModel.from_pretrained(fresh, tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(tiny_folder)
    ids = tokenizer("2+3", return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = theirs.generate(input_ids=ids, max_new_tokens=12, do_sample=False)
    assert said == tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
    assert said != conversation(tiny_folder).continue_text("2+3")


# Characters of one, two and four bytes, and beginnings and ends of such.
PARTS = [b"a", b"b", b"x", "é".encode(), "\U0001d11e".encode(), b"\xc3", b"\xf0\x9d", b"\x80"]


@given(
    parts=st.lists(st.sampled_from(PARTS), max_size=40),
    stops=st.lists(st.text("abé", min_size=1, max_size=3), max_size=2),
)
def test_text_comes_whole_and_ends_at_a_stop(parts: list[bytes], stops: list[str]) -> None:
    """A token a byte, as in the tiny model: whatever the bytes, the pieces are the text, up to the first stop."""
    data = b"".join(parts)
    stream = TextStream(lambda ids: bytes(ids).decode(errors="replace"), stops)
    pieces = []
    for byte in data:
        pieces.append(stream.push(byte))
        if stream.stopped is not None:
            break
    else:
        pieces.append(stream.end())
    whole = data.decode(errors="replace")
    ends = [whole.index(stop) for stop in stops if stop in whole]
    assert "".join(pieces) == stream.text == whole[: min(ends, default=None)]


@given(text=st.text("ab ▁é日\U0001d11e", max_size=60), cut=st.integers(0, 3))
def test_tokens_of_single_bytes_break_no_character(text: str, cut: int) -> None:
    """Tokenizers of Llama 2's kind write characters they do not know as bytes, and decode a row of bytes that is not
    whole as broken from its beginning: also what was let out already."""
    pieces = ["▁", "a", "b", *[f"<0x{byte:02X}>" for byte in range(256)]]
    tokenizer = Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    known = {" ": [0], "a": [1], "b": [2]}
    ids = [token for sign in text for token in known.get(sign) or [3 + byte for byte in sign.encode()]]
    ids = ids[: len(ids) - cut]
    stream = TextStream(tokenizer.decode)
    told = "".join([*(stream.push(token) for token in ids), stream.end()])
    written = b"".join(b" ab"[token : token + 1] if token < 3 else bytes([token - 3]) for token in ids)
    whole = written.decode(errors="replace")
    assert told.rstrip("\N{REPLACEMENT CHARACTER}") == whole.rstrip("\N{REPLACEMENT CHARACTER}")
    assert told.count("\N{REPLACEMENT CHARACTER}") <= (3 if cut else 0)
