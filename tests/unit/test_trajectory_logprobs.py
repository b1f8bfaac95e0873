"""The trainer computes the log-probs that the engine had when it sampled, for conversations with tool calls in ten
template families: parallel calls, invalid calls, unicode, reasoning and turns that a limit cut.

A random model writes no calls, so the sampler is made to choose the tokens of written turns. The calls are then parsed
and answered by real tools.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from small_models import SIZES, load, native, write_model
from transformers import Qwen2Config

import environment_classes
from environment_classes import TextTools, height, weather
from family_tokenizers import FAMILIES, chat_of, tokenizer_of
from forced_turns import Family, ForcedTurn, families, force, forced_turns
from lockstep.data.batching import micro_batch
from lockstep.environments.host import EnvironmentHosts
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.setup import host_setup
from lockstep.environments.tools import FunctionTool
from lockstep.model.policy import Policy, Scoring
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Example, Origin, Question, Request, Sampling
from original_templates import DEEPSEEK_R1

TEMPERATURE, SEED, LIMIT = 0.8, 3, 230
TOOLS = families([FunctionTool.of(tool).schema for tool in (weather, height)])
PROMPT = [{"role": "user", "content": "née?"}]
# The published template renders calls and results, but does not show the tools. Templates of serving engines do.
SHOWN = {"deepseek-r1": DEEPSEEK_R1.replace("{{ bos_token }}", "{{ bos_token }}{{ tools | tojson }}", 1)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    config = Qwen2Config(**{**SIZES, "vocab_size": 300, "max_position_embeddings": 8192})
    return write_model(tmp_path_factory.mktemp("qwen2") / "model", config, tiny_folder)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load(folder)


def opened(**keys: Any) -> Iterator[EnvironmentHosts]:
    hosts = EnvironmentHosts(host_setup(RolloutSettings(environment_workers=1, **keys)))
    yield hosts
    hosts.close()


@pytest.fixture(scope="module")
def tool_hosts() -> Iterator[EnvironmentHosts]:
    yield from opened(tools=[f"{environment_classes.__file__}:{tool.__name__}" for tool in (weather, height)])


@pytest.fixture(scope="module")
def text_hosts() -> Iterator[EnvironmentHosts]:
    yield from opened(environment=f"{environment_classes.__file__}:{TextTools.__name__}")


def sampled(tokenizer: Any, turn: ForcedTurn) -> list[int]:
    """The tokens that the engine samples: those of the text, up to the limit."""
    return list(tokenizer(turn.text, add_special_tokens=False)["input_ids"])[:LIMIT]


def scores(policy: Policy, prompt: list[int], ids: list[int], mask: list[int]) -> torch.Tensor:
    """The log-probs of the trained tokens as the trainer computes them."""
    row = Example(prompt + ids, [0] * len(prompt) + mask, Origin("x", 0))
    policy.scoring = Scoring(temperature=TEMPERATURE)
    with torch.no_grad():
        found = policy(micro_batch([row], packed=True, pad_id=0)).logprobs_K
    policy.scoring = Scoring()
    return found


def check_row(tokenizer: Any, family: Family, turns: list[ForcedTurn], made: Completion) -> None:
    """Compares the tokens with the written turns and the messages that follow them, rendered by hand."""
    assert made.trajectory is not None
    messages = made.trajectory.messages[len(PROMPT) :]
    places = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    assert len(places) == len(turns), (made.failure, made.trajectory.stop, messages)
    ids, mask = list[int](), list[int]()
    for turn, place, following in zip(turns, places, [*places[1:], len(messages)], strict=True):
        own, new, context = sampled(tokenizer, turn), messages[place + 1 : following], ""
        if new:
            # The end token is context where the turn was cut, and where another message follows than the model meant.
            end = family.inserted(new)
            ended = turn.text.endswith(end) or (turn.text.endswith(family.end) and not family.opens)
            context = ("" if ended and len(own) < LIMIT else end) + family.following(new)
        added = list(tokenizer(context, add_special_tokens=False)["input_ids"])
        ids, mask = [*ids, *own, *added], [*mask, *[1] * len(own), *[0] * len(added)]
    assert tokenizer.decode(made.ids) == tokenizer.decode(ids)
    assert (made.ids, list(made.loss_mask)) == (ids, mask)
    assert all(logprob == 0.0 for logprob, mine in zip(made.logprobs, mask, strict=True) if not mine)


def check_answers(family: Family, turns: list[ForcedTurn], made: Completion) -> None:
    """Every call was parsed as written and answered by its tool, in order; the others are errors."""
    assert made.trajectory is not None
    for turn, record in zip(turns, made.trajectory.turns, strict=True):
        if family.tools:
            valid = [(call.name, dict(call.arguments)) for call in record.calls if not call.error]
            assert valid == list(turn.calls), (turn.text, record)
            assert bool(record.parse_error) == (turn.kind in ("invalid", "cut")), record
        assert record.finish == ("length" if turn.kind.startswith("cut") else "stop")
    said = "\n".join(m["content"] for m in made.trajectory.messages if m["role"] in ("tool", "user"))
    for turn in turns:
        for name, given in turn.calls:
            place = given["place"]
            result = f"In {place}: 7 °C ☔" if name == "weather" else f"{place}: {len(place)} m über 海"
            assert result in said


def check_family(
    name: str, count: int, policy: Policy, folder: Path, hosts: EnvironmentHosts, patch: pytest.MonkeyPatch, keep: bool
) -> int:
    """Has conversations of two samples for each prompt. Returns the number of rows."""
    tokenizer, family = tokenizer_of(folder, name, SHOWN.get(name)), TOOLS[name]
    chat = chat_of(tokenizer, name, "keep" if keep else "as_template")
    settings = RolloutSettings(environment="used: by the hosts", turn_tokens=LIMIT, history=chat.history)
    engine = EnvironmentEngine(native(policy, folder), hosts, settings, chat, len(tokenizer))
    draw = random.Random(f"{name}{count}")
    written = {(key, sample): forced_turns(family, draw, LIMIT) for key in range(count) for sample in range(2)}
    forced = {
        (*which, number): sampled(tokenizer, turn)
        for which, turns in written.items()
        for number, turn in enumerate(turns)
    }
    force(patch, forced, SEED)
    asked = [Request([1], key, 2, question=Question("", PROMPT, "0", Origin("x", key))) for key in range(count)]
    sampling = Sampling(6000, temperature=TEMPERATURE, stop_ids=tuple(chat.end_ids), seed=SEED)
    rows = 0
    for made in engine.generate(asked, sampling):
        turns = written[made.request, made.sample]
        assert not made.failure
        check_answers(family, turns, made)
        if keep:
            check_row(tokenizer, family, turns, made)
        start = list(made.prompt_ids or ())
        parts = [(row.ids, row.loss_mask, row.logprobs) for row in made.rows] or [
            (made.ids, list(made.loss_mask), made.logprobs)
        ]
        assert sum(sum(mask) for _, mask, _ in parts) == sum(len(sampled(tokenizer, turn)) for turn in turns)
        for ids, mask, logprobs in parts:
            wanted = torch.tensor([logprob for logprob, mine in zip(logprobs, mask, strict=True) if mine])
            torch.testing.assert_close(scores(policy, start, ids, mask), wanted, rtol=0, atol=5e-4)
        rows += len(parts)
    computed, reused = engine.take_prefill()
    assert reused > computed > 0 or not keep  # later turns continue from the cache
    return rows


def hosts_of(name: str, request: pytest.FixtureRequest) -> EnvironmentHosts:
    found: EnvironmentHosts = request.getfixturevalue("tool_hosts" if TOOLS[name].tools else "text_hosts")
    return found


@pytest.mark.daily("qwen2.5")
@pytest.mark.parametrize("name", ["qwen2.5", "gpt-oss"])
def test_the_trainer_computes_the_log_probs_of_conversations_with_tools(
    folder: Path, policy: Policy, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    assert check_family(name, 1, policy, folder, hosts_of(name, request), monkeypatch, keep=True) == 2


@pytest.mark.slow
def test_so_it_does_for_the_rows_of_a_template_that_drops_reasoning(
    folder: Path, policy: Policy, tool_hosts: EnvironmentHosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_family("qwen3", 1, policy, folder, tool_hosts, monkeypatch, keep=False) > 2


@pytest.mark.slow
@pytest.mark.parametrize("keep", [True, False], ids=["keep", "as_template"])
@pytest.mark.parametrize("name", FAMILIES)
def test_many_conversations(
    folder: Path, policy: Policy, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, name: str, keep: bool
) -> None:
    assert check_family(name, 4, policy, folder, hosts_of(name, request), monkeypatch, keep) >= 8
