"""Token in, token out, for the chat templates of ten model families: sampled ids stay, messages are appended as the
template renders them, and the trainer computes the log-probs that the engine had when it sampled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, load, native, write_model
from transformers import Qwen2Config
from transformers.utils.chat_template_utils import render_jinja_template

import environment_classes
from conversations import Conversation, conversations
from family_tokenizers import FAMILIES, WITHOUT_TOOLS, chat_of, tokenizer_of
from lockstep.data.batching import micro_batch
from lockstep.environments.conversation import ChatConversation, ChatFormat, probe_template
from lockstep.environments.environment import Reply
from lockstep.environments.host import EnvironmentHosts
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.setup import host_setup
from lockstep.model.load import load_tokenizer
from lockstep.model.policy import Policy, Scoring
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.hf import HfEngine
from lockstep.trajectory import ToolCall
from lockstep.types import Completion, Example, Message, Origin, Question, Request, Sampling
from scripted_engine import Scripted

ORIGIN = Origin("rows.jsonl", 1)


def rendered(tokenizer: Any, messages: list[Message], inputs: dict[str, Any], *, open_turn: bool) -> str:
    given = {"tools": None, **inputs, **tokenizer.special_tokens_map}
    # The template of gpt-oss reads the reasoning as `thinking`. transformers gives it both names since 5.21.
    messages = [
        {"thinking": message["reasoning_content"], **message} if "reasoning_content" in message else message
        for message in messages
    ]
    text = render_jinja_template(
        [messages], chat_template=tokenizer.chat_template, add_generation_prompt=open_turn, **given
    )
    return str(text[0][0])


def reply_of(message: Message) -> Reply:
    """The turn as the parser reads it."""
    calls = [
        ToolCall(call["function"]["name"], call["function"]["arguments"], call["id"])
        for call in message.get("tool_calls") or []
    ]
    return Reply("", message["content"], message.get("reasoning_content", ""), tuple(calls))


def sampled_ids(tokenizer: Any, chat: ChatFormat, before: str, after: str, full: str) -> list[int]:
    """The ids that a model samples that writes the turn as the template does, with its end token. If the template does
    not render the turn behind its generation prompt, the model writes something else."""
    ends = [tokenizer.decode([token]) for token in chat.end_ids]
    text = after[len(before) :] if after.startswith(before) else f"something else{ends[0]}"
    place = max(text.rfind(end) + len(end) for end in ends if end in text) if any(e in text for e in ends) else -1
    if place < 0:  # the template has no end token: the next message begins with it
        text += next((end for end in ends if full.startswith(after + end)), ends[0])
    else:
        text = text[:place]
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def walk(tokenizer: Any, chat: ChatFormat, talk: Conversation) -> Iterator[tuple[ChatConversation, str]]:
    """Has the conversation turn by turn. Yields the conversation after each extension, and the text of the chat as the
    template renders it."""
    messages = talk.messages
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    start = messages[: turns[0]]
    arguments = {key: value for key, value in talk.inputs.items() if key in tokenizer.chat_template and key != "tools"}
    question = Question("", start, "", ORIGIN, template_arguments=arguments)
    conversation = ChatConversation(chat, question, start, talk.inputs.get("tools", []))
    for turn, following in pairwise(turns):
        before = rendered(tokenizer, messages[:turn], talk.inputs, open_turn=True)
        after = rendered(tokenizer, messages[: turn + 1], talk.inputs, open_turn=False)
        full = rendered(tokenizer, messages[:following], talk.inputs, open_turn=True)
        ids = sampled_ids(tokenizer, chat, before, after, full)
        reply, new = replace(reply_of(messages[turn]), ids=tuple(ids)), messages[turn + 1 : following]
        held, row = conversation.context, conversation.number
        conversation.add_turn(Completion(0, 0, ids, [-1.0] * len(ids), "token"))
        conversation.add_reply(reply)
        extension = conversation.extension(reply, new)
        conversation.extend(extension)
        prompt, rows = conversation.rows()
        assert prompt == conversation.prompt[: len(prompt)]
        # The sampled tokens are kept in their row, with mask 1, behind the tokens after which they were sampled.
        found, end = rows[row], len(held) + len(ids) - len(prompt)
        assert prompt + found.ids[:end] == held + ids
        assert found.loss_mask[end - len(ids) :] == [1] * len(ids) + [0] * (len(found.ids) - end)
        assert prompt + rows[-1].ids == conversation.context
        assert len(rows) == row + 1 + extension.new_row
        yield conversation, full


def split(message: Message) -> Message:
    """Moves reasoning in the content to its own field, as the parser does."""
    thought, mark, said = str(message["content"]).rpartition("</think>")
    if message["role"] != "assistant" or not mark:
        return message
    return {**message, "reasoning_content": thought.replace("<think>", "").strip("\n"), "content": said.strip("\n")}


def talks(name: str, count: int) -> Iterator[Conversation]:
    """Generated chats that the template supports, with parallel calls, unicode and reasoning."""
    tools = name not in WITHOUT_TOOLS
    for talk in [*conversations(count, tools=tools), *conversations(count, tools=tools, thoughts=False)]:
        messages = [split(message) for message in talk.messages]
        calls = [message.get("tool_calls") or [] for message in messages]
        if name == "llama3.1" and max(map(len, calls)) > 1:
            continue  # one call at a time
        if name == "gpt-oss":  # a turn with a call has content or reasoning
            messages = [
                {**message, "content": ""} if made and message.get("reasoning_content") else message
                for message, made in zip(messages, calls, strict=True)
            ]
        yield Conversation(messages, talk.inputs)


def check_family(folder: Path, name: str, count: int) -> tuple[int, int]:
    """Compares the tokens with the rendered chat. Returns the numbers of extensions and of new rows."""
    tokenizer = tokenizer_of(folder, name)
    keep, as_template = (chat_of(tokenizer, name, history) for history in ("keep", "as_template"))
    extensions = rows = 0
    for talk in talks(name, count):
        made = 0
        for conversation, full in walk(tokenizer, as_template, talk):
            wanted = list(tokenizer(full, add_special_tokens=False)["input_ids"])
            assert conversation.context == wanted, (name, tokenizer.decode(conversation.context), full)
            extensions, made = extensions + 1, conversation.number
        rows += made
        for conversation, full in walk(tokenizer, keep, talk):
            assert conversation.number == 0
            text = tokenizer.decode(conversation.context)
            assert text.endswith(full[-8:]), (text, full)
            if not made:
                assert text == full
    return extensions, rows


@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_are_those_of_the_rendered_chat(tiny_folder: Path, name: str) -> None:
    """The model writes each turn as the template renders it. With `as_template` the tokens of the conversation are then
    those of the rendered chat, tokenised as one text; with `keep` too, unless the template changes earlier turns."""
    extensions, rows = check_family(tiny_folder, name, 12)
    assert extensions >= 10
    assert rows < extensions or name in ("deepseek-r1", "gpt-oss", "glm4.5", "qwen3.5")


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_the_tokens_of_many_chats_are_those_of_the_rendered_chats(tiny_folder: Path, name: str) -> None:
    assert check_family(tiny_folder, name, 200)[0] > 100


@pytest.mark.parametrize("name", FAMILIES)
def test_the_probe_names_what_a_template_changes(tiny_folder: Path, name: str) -> None:
    tokenizer = tokenizer_of(tiny_folder, name)
    report = probe_template(chat_of(tokenizer, name, "keep"), {}, tools=False)
    assert report.refuses == ()
    forgets = name in ("qwen3", "qwen3.5", "deepseek-r1", "glm4.5", "gpt-oss")
    ignores = name not in ("qwen3", "qwen3.5", "glm4.5", "gpt-oss")  # these read the field of the reasoning
    assert ("a user message that follows reasoning" in report.changes) == (forgets or ignores)
    if name not in WITHOUT_TOOLS:
        assert probe_template(chat_of(tokenizer, name, "keep"), {}, tools=True).refuses == ()


# -- log-probs ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    config = Qwen2Config(**{**SIZES, "vocab_size": 290, "max_position_embeddings": 1024})
    return write_model(tmp_path_factory.mktemp("qwen2") / "model", config, tiny_folder)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load(folder)


@pytest.fixture(scope="module")
def hosts() -> Iterator[EnvironmentHosts]:
    answer = "né 東京 \U0001f600 {}"
    settings = RolloutSettings(
        environment=f"{environment_classes.__file__}:Echo", environment_args={"turns": 3, "answer": answer}
    )
    opened = EnvironmentHosts(host_setup(settings))
    yield opened
    opened.close()


@pytest.mark.parametrize("name", FAMILIES)
def test_the_trainer_computes_the_log_probs_of_the_engine(
    folder: Path, policy: Policy, hosts: EnvironmentHosts, name: str
) -> None:
    """The turns are cut after 7 tokens, unless the random model ends them."""
    tokenizer = tokenizer_of(folder, name)
    chat = chat_of(tokenizer, name, "keep")
    settings = RolloutSettings(environment="used: by the hosts", turn_tokens=7)
    engine = EnvironmentEngine(native(policy, folder), hosts, settings, chat, len(tokenizer))
    prompt = [{"role": "user", "content": "née?"}]
    asked = [Request([1], key, 2, question=Question("", prompt, "0", Origin("x", key))) for key in range(2)]
    stops = (*chat.end_ids, *range(60, 70))
    made = list(engine.generate(asked, Sampling(600, temperature=0.8, stop_ids=stops, seed=3)))
    assert len(made) == 4
    cut = 0
    for one in made:
        assert one.trajectory is not None
        whole = one.trajectory.turns[-1].finish == "stop"
        assert (one.failure, len(one.trajectory.turns)) == ("", 3)
        assert one.trajectory.stop == ("completed" if whole else "max_tokens")
        cut += sum(turn.finish == "length" for turn in one.trajectory.turns)
        start = list(one.prompt_ids or ())
        row = Example(start + one.ids, [0] * len(start) + list(one.loss_mask), Origin("x", 0))
        policy.scoring = Scoring(temperature=0.8)
        with torch.no_grad():
            scored = policy(micro_batch([row], packed=True, pad_id=0)).logprobs_K
        policy.scoring = Scoring()
        wanted = torch.tensor([score for score, mine in zip(one.logprobs, one.loss_mask, strict=True) if mine])
        torch.testing.assert_close(scored, wanted, rtol=0, atol=2e-4)
    assert cut > 0


def test_a_template_that_forgets_reasoning_gives_several_rows(tiny_folder: Path) -> None:
    """Qwen3 removes the reasoning of a turn when a user message follows."""
    tokenizer = tokenizer_of(tiny_folder, "qwen3")
    chat = chat_of(tokenizer, "qwen3", "as_template")
    settings = RolloutSettings(
        environment=f"{environment_classes.__file__}:Echo", history="as_template", environment_args={"turns": 3}
    )
    hosts = EnvironmentHosts(host_setup(settings))
    turns = ("<think>\nso\n</think>\n\none", "two", "<think>\nlast\n</think>\n\nthree")
    engine = EnvironmentEngine(
        Scripted(tokenizer, lambda request, turn: turns[turn]), hosts, settings, chat, len(tokenizer)
    )
    prompt = [{"role": "user", "content": "count"}]
    request = Request([1], 0, question=Question("", prompt, "0", Origin("x", 0)))
    (made,) = engine.generate([request], Sampling(600, stop_ids=tuple(chat.end_ids)))
    hosts.close()
    start = "<|im_start|>user\ncount<|im_end|>\n<|im_start|>assistant\n"
    second = f"{start}one<|im_end|>\n<|im_start|>user\nyou said {turns[0]}<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(made.prompt_ids) == start
    texts = [start + tokenizer.decode(row.ids) for row in made.rows]
    asked = "<|im_end|>\n<|im_start|>user\nyou said two<|im_end|>\n<|im_start|>assistant\n"
    assert texts == [f"{start}{turns[0]}<|im_end|>", f"{second}two{asked}{turns[2]}<|im_end|>"]
    assert made.ids == [token for row in made.rows for token in row.ids]
    assert list(made.loss_mask) == [mask for row in made.rows for mask in row.loss_mask]
    assert made.logprobs == [logprob for row in made.rows for logprob in row.logprobs]
    assert made.trajectory is not None
    assert [tokenizer.decode(made.ids[turn.start : turn.stop]) for turn in made.trajectory.turns] == [
        f"{turn}<|im_end|>" for turn in turns
    ]
    assert all(all(made.loss_mask[turn.start : turn.stop]) for turn in made.trajectory.turns)
    assert sum(made.loss_mask) == sum(turn.stop - turn.start for turn in made.trajectory.turns)
    assert made.trajectory.metrics["rows"] == 2


@pytest.mark.parametrize("kind", ["native", "hf"])
def test_a_request_has_its_own_stop_conditions(folder: Path, policy: Policy, kind: str) -> None:
    tokenizer = load_tokenizer(str(folder))
    engine: Any = native(policy, folder) if kind == "native" else HfEngine(policy.generating, tokenizer.decode)
    sampling = Sampling(12, temperature=0.8, seed=1)
    (free,) = engine.generate([Request([65, 66], 7)], sampling)
    assert (len(free.ids), free.stop) == (12, "length")
    text = tokenizer.decode(free.ids[3:4])
    first = next(i for i in range(12) if text in tokenizer.decode(free.ids[: i + 1]))
    token = free.ids[5]
    asked = [Request([65, 66], 7), Request([65, 66], 7, stop_ids=(token,)), Request([65, 66], 7, stop_strings=(text,))]
    made = sorted(engine.generate(asked, sampling), key=lambda one: one.request)
    assert [(one.ids, one.stop) for one in made] == [
        (free.ids, "length"),
        (free.ids[: free.ids.index(token) + 1], "token"),
        (free.ids[: first + 1], "string"),
    ]
