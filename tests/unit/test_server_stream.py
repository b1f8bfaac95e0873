"""Turns that arrive over time on servers: each trajectory stays on its server, and moves if that is lost."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from small_models import SIZES, load, native, prompts, write_model
from transformers import Qwen2Config

from lockstep.device.cpu import Cpu
from lockstep.model.load import load_tokenizer
from lockstep.model.policy import Policy
from lockstep.parallel.world import World
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine import PrefillCounts, RunPlace, StreamEngine
from lockstep.rollout.servers import fleet
from lockstep.rollout.servers import weight_check as probe
from lockstep.rollout.servers.adapter import ServerNeeds, WantedSample, prompt_digest
from lockstep.rollout.servers.server_engine import ServerEngine
from lockstep.rollout.servers.sglang import Sglang
from lockstep.rollout.servers.vllm import Vllm
from lockstep.types import Completion, Sampling
from played_turns import Played, Script
from sglang_server import Server, serving

FLAGS = ("--enable-deterministic-inference", "--dtype", "float32")
GREEDY = Sampling(max_tokens=5, temperature=0.0, stop_ids=(7, 257, 9, 11))
MOST = 5


@pytest.fixture(autouse=True, scope="module")
def short_probes() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probe, "PROMPTS", 2)
        patch.setattr(probe, "NEW_TOKENS", 5)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, tiny_folder: Path) -> Path:
    config = Qwen2Config(**SIZES, eos_token_id=7)
    return write_model(tmp_path_factory.mktemp("qwen2") / "model", config, tiny_folder)


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load(folder)


@contextmanager
def engine_at(policy: Policy, folder: Path, *servers: Server) -> Iterator[ServerEngine]:
    told = RolloutSettings(engine="sglang", url=[server.url for server in servers])
    place = RunPlace(World(), str(folder), folder)
    engine = ServerEngine(Sglang(), policy, Cpu(), told, load_tokenizer(str(folder)), place)
    try:
        engine.sync(policy.stored.named_parameters())
        for server in servers:
            server.engine.asked.clear()
        yield engine
    finally:
        engine.close()


def scripts() -> list[Script]:
    texts = prompts(20, longest=8, seed=5)
    return [Script(texts[n], [texts[6 + n + t] for t in range(2)], [3 * n, 20]) for n in range(4)]


def tokens(turns: list[list[Completion]]) -> list[list[tuple[list[int], str]]]:
    return [[(one.ids, one.stop) for one in made] for made in turns]


@pytest.fixture(scope="module")
def expected(policy: Policy, folder: Path) -> list[list[tuple[list[int], str]]]:
    return tokens(Played(native(policy, folder), scripts(), MOST).play(GREEDY))


def prompts_of(server: Server) -> list[list[int]]:
    return [body["input_ids"] for path, body in server.engine.asked if path == "/generate"]


def test_turns_are_those_of_the_built_in_engine_and_stay_on_their_server(
    policy: Policy, folder: Path, expected: Any
) -> None:
    with ExitStack() as stack:
        servers = [stack.enter_context(serving(folder, *FLAGS)) for _ in range(2)]
        engine = stack.enter_context(engine_at(policy, folder, *servers))
        assert isinstance(engine, StreamEngine)
        played = Played(engine, scripts(), MOST)
        assert tokens(played.play(GREEDY)) == expected
        asked = [prompts_of(server) for server in servers]
        assert all(asked)
        for number, script in enumerate(played.scripts):
            turns = [
                script.request(number, [one.ids for one in played.turns[number][:turn]], MOST).ids for turn in range(3)
            ]
            assert [all(ids in each for ids in turns) for each in asked].count(True) == 1
            assert sum(ids in each for each in asked for ids in turns) == 3
        assert engine.prompt_counts().computed == sum(len(ids) for each in asked for ids in each)
        assert not engine.fleet._homes


def test_a_trajectory_moves_to_another_server_if_its_server_is_lost(
    policy: Policy, folder: Path, expected: Any
) -> None:
    with ExitStack() as stack:
        one, other = (stack.enter_context(serving(folder, *FLAGS)) for _ in range(2))
        engine = stack.enter_context(engine_at(policy, folder, one, other))
        played = Played(engine, scripts(), MOST)
        taken = played.take

        def take(room: int, wait: bool = False) -> Any:
            if not one.dead and len(played.requests) >= 4 and prompts_of(one):
                one.die()
            return taken(room, wait)

        played.take = take  # type: ignore[method-assign]
        assert tokens(played.play(GREEDY)) == expected
        assert one.dead


@pytest.mark.slow
def test_servers_are_looked_after_while_all_trajectories_wait_for_their_tools(
    policy: Policy, folder: Path, expected: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine never waits in the source. It restarts a server that is lost when nothing was asked of it."""
    monkeypatch.setattr(fleet, "_POLL_SECONDS", 0.0)
    with serving(folder, *FLAGS) as server, engine_at(policy, folder, server) as engine:
        played, idle, looked = Played(engine, scripts(), MOST), [False], []
        taken = played.take

        def take(room: int, wait: bool = False) -> Any:
            assert not wait
            found = taken(room)
            idle[0] = not found and room == engine._room()
            return found

        played.take = take  # type: ignore[method-assign]
        check = engine.manager.check_waits
        monkeypatch.setattr(engine.manager, "check_waits", lambda: (looked.append(idle[0]), check())[1])
        assert tokens(played.play(GREEDY)) == expected
        assert any(looked)


def test_requests_of_the_call_and_of_the_source_are_numbered_in_order(policy: Policy, folder: Path) -> None:
    with serving(folder, *FLAGS) as server, engine_at(policy, folder, server) as engine:
        played = Played(engine, scripts()[:2], MOST)
        first = [script.request(7, [], MOST) for script in scripts()[2:]]
        engine.further = played
        assert {one.request for one in engine.generate(first, GREEDY)} == {0, 1, 2, 3}


def test_the_tokens_of_the_prefix_cache_are_read() -> None:
    wanted = WantedSample([5, 6, 8], GREEDY, 1, 0)
    scored = {"output_token_logprobs": [[-1.0, 9, None]], "finish_reason": {"type": "stop", "matched": 9}}
    meta = {**scored, "id": f"{prompt_digest([5, 6, 8])}-x", "prompt_tokens": 3, "cached_tokens": 2}
    assert Sglang().read({"output_ids": [9], "meta_info": meta}, wanted).cached == 2
    told = {
        "token_ids": [9],
        "logprobs": [-1.0],
        "finish_reason": "stop",
        "stop_reason": 9,
        "versions": None,
        "prompt": prompt_digest([5, 6, 8]),
    }
    assert Vllm().read({**told, "cached": 2}, wanted).cached == 2
    assert Vllm().read({**told, "cached": None}, wanted).cached == 0


def test_an_environment_switches_the_prefix_cache_on() -> None:
    """SGLang has it on by default, and has a flag only to switch it off."""
    assert "--enable-prefix-caching" in Vllm().flags(ServerNeeds("cuda", turns=True))
    assert "--enable-prefix-caching" not in Vllm().flags(ServerNeeds("cuda"))
    assert Sglang().flags(ServerNeeds("cuda", turns=True)) == Sglang().flags(ServerNeeds("cuda"))


def test_nothing_to_do_is_nothing_done(policy: Policy, folder: Path) -> None:
    with serving(folder, *FLAGS) as server, engine_at(policy, folder, server) as engine:
        assert list(engine.generate([], GREEDY)) == []
        assert engine.prompt_counts() == PrefillCounts()
