"""Conversations with environments in real host processes: tokens, limits, stop reasons, seeds, order of turns."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import environment_classes
import lockstep.environments.loop as loop
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.host import EnvironmentHosts
from lockstep.environments.loop import EnvironmentEngine
from lockstep.environments.running import environment_seed
from lockstep.environments.setup import host_setup
from lockstep.errors import Refusal
from lockstep.kernels.sampling import turn_key
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Origin, Question, Request, Sampling
from scripted_engine import Say, Scripted

FILE = environment_classes.__file__


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


def question(row: int) -> Question:
    prompt = [{"role": "user", "content": f"row {row}"}]
    return Question("sums", prompt, str(row), Origin("rows.jsonl", row), {}, columns={"level": row})


def requests_of(tokenizer: Any, rows: int, n: int = 1) -> list[Request]:
    ids = tokenizer.apply_chat_template([{"role": "user", "content": "row"}], add_generation_prompt=True)["input_ids"]
    return [Request(ids, 100 + row, n, question=question(row)) for row in range(rows)]


# Host processes that several tests use, by what they run.
_HOSTS: dict[str, EnvironmentHosts] = {}


@pytest.fixture(scope="module", autouse=True)
def closed_hosts() -> Iterator[None]:
    yield
    for hosts in _HOSTS.values():
        hosts.close()
    _HOSTS.clear()


def engine_with(tokenizer: Any, say: Say, settings: RolloutSettings, prompt_limit: int | None = None) -> Any:
    setup = host_setup(settings)
    hosts = _HOSTS[repr(setup)] = _HOSTS.get(repr(setup)) or EnvironmentHosts(setup)
    chat = ChatFormat(tokenizer, frozenset({tokenizer.eos_token_id}), settings.history)
    return EnvironmentEngine(Scripted(tokenizer, say), hosts, settings, chat, len(tokenizer), prompt_limit)


def opened(tokenizer: Any, environment: str, say: Say, prompt_limit: int | None = None, **keys: Any) -> Any:
    settings = RolloutSettings(environment=f"{FILE}:{environment}", **{"environment_workers": 1, **keys})
    return engine_with(tokenizer, say, settings, prompt_limit)


def run(engine: EnvironmentEngine, requests: Sequence[Request], **sampling: Any) -> list[Completion]:
    stop = (engine.chat.tokenizer.eos_token_id,)
    made = engine.generate(requests, Sampling(**{"max_tokens": 200, "stop_ids": stop, "seed": 5, **sampling}))
    return sorted(made, key=lambda one: (one.request, one.sample))


def hello(request: Request, turn: int) -> str:
    return f"hello {turn}"


def rendered(tokenizer: Any, *contents: str, open_turn: bool = True) -> list[int]:
    """The conversation as the chat template of the tiny model writes it, tokenised as one text."""
    roles = ("user", "assistant")
    chat = [{"role": roles[i % 2], "content": content} for i, content in enumerate(contents)]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=open_turn)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


def test_sampled_tokens_and_messages_alternate(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Echo", hello)
    (made,) = run(engine, requests_of(tokenizer, 1))
    first, second = engine.inner.batches
    prompt = rendered(tokenizer, "row 0")
    assert made.prompt_ids == prompt == list(first[0].ids)
    context = rendered(tokenizer, "row 0", "hello 0", "you said hello 0")
    assert list(second[0].ids) == context
    end, whole = tokenizer.eos_token_id, prompt + made.ids
    turn = [*tokenizer("hello 1")["input_ids"], end]
    assert whole == [*context, *turn]
    sampled = [i for i, mask in enumerate(made.loss_mask) if mask]
    length = len(turn)
    assert sampled == [*range(length), *range(len(made.ids) - length, len(made.ids))]
    assert [made.logprobs[i] for i in sampled] == [-float(i + 1) for i in range(length)] * 2
    assert all(made.logprobs[i] == 0 for i in range(len(made.ids)) if i not in sampled)
    assert made.stop == "token"
    assert made.failure == ""
    assert made.rows == ()


def test_the_trajectory_records_messages_turns_rewards_and_info(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Echo", hello)
    (made,) = run(engine, requests_of(tokenizer, 1))
    found = made.trajectory
    assert found is not None
    assert [(one["role"], one["content"]) for one in found.messages] == [
        ("user", "row 0"),
        ("assistant", "hello 0"),
        ("user", "you said hello 0"),
        ("assistant", "hello 1"),
    ]
    assert found.model_text == "hello 0\n\nhello 1"
    assert [(turn.reward, turn.finish) for turn in found.turns] == [(0.25, "stop"), (1.0, "stop")]
    assert found.reward == 1.25
    end = tokenizer.eos_token_id
    for number, turn in enumerate(found.turns):
        assert made.ids[turn.start : turn.stop] == [*tokenizer(f"hello {number}")["input_ids"], end]
    assert found.stop == "completed"
    assert found.info["row"] == "0"
    assert found.info["seen"] == [
        [f"hello {number}", "stop", [*tokenizer(f"hello {number}")["input_ids"], end]] for number in range(2)
    ]
    metrics = found.named_metrics()
    assert metrics["environment/turns"] == 2
    assert metrics["environment/said"] == 1 + len("hello 1")
    assert metrics["environment/stop/completed"] == 1
    assert metrics["environment/tokens"] == len(made.ids) - sum(made.loss_mask)


def test_metrics_of_the_environment_replace_no_metrics_of_the_run(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Counting", hello)
    (made,) = run(engine, requests_of(tokenizer, 1))
    assert made.trajectory is not None
    metrics = made.trajectory.named_metrics()
    assert (metrics["environment/turns"], metrics["environment/rows"]) == (2, 1)
    assert metrics["environment/stop/completed"] == 1
    own = {name: value for name, value in metrics.items() if name.startswith("environment/own/")}
    # The sums over two turns; both metrics with the same name count.
    assert own == {
        "environment/own/turns": 40,
        "environment/own/seconds": 1.0,
        "environment/own/rows": 8,
        "environment/own/stop/completed": 14,
    }


def test_a_cut_turn_gets_an_end_token_that_is_not_trained(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Echo", hello, turn_tokens=5)
    (made,) = run(engine, requests_of(tokenizer, 1))
    end = tokenizer.eos_token_id
    assert made.ids[:6] == [*tokenizer("hello")["input_ids"], end]
    assert made.loss_mask[:6] == [1, 1, 1, 1, 1, 0]
    assert list(made.prompt_ids or ()) + made.ids[:-5] == rendered(tokenizer, "row 0", "hello", "you said hello")
    assert made.trajectory is not None
    assert [turn.finish for turn in made.trajectory.turns] == ["length", "length"]
    # The last turn is not whole, although the environment ended the conversation.
    assert made.trajectory.stop == "max_tokens"
    assert made.stop == "length"


def test_a_cut_turn_before_the_last_does_not_truncate_the_trajectory(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Echo", lambda request, turn: "hello" if turn == 0 else "hi", turn_tokens=5)
    (made,) = run(engine, requests_of(tokenizer, 1))
    assert made.trajectory is not None
    assert [turn.finish for turn in made.trajectory.turns] == ["length", "stop"]
    assert (made.trajectory.stop, made.stop) == ("completed", "token")


@pytest.mark.parametrize(
    ("keys", "sampling", "reason", "turns"),
    [
        ({}, {}, "completed", 2),
        ({"max_turns": 1}, {}, "max_turns", 1),
        ({"trajectory_timeout": 1e-9}, {}, "timeout", 1),
        ({}, {"max_tokens": 6}, "max_tokens", 1),
        ({}, {"max_tokens": 30}, "context_overflow", 1),
    ],
)
def test_the_trajectory_has_the_last_messages_of_the_environment(
    tokenizer: Any, keys: dict[str, Any], sampling: dict[str, Any], reason: str, turns: int
) -> None:
    """`score` and reward functions see them. The model does not, so they have no tokens."""
    engine = opened(tokenizer, "Farewell", hello, environment_args={"answer": "bye"}, **keys)
    (made,) = run(engine, requests_of(tokenizer, 1), **sampling)
    found = made.trajectory
    assert found is not None
    assert (found.stop, len(found.turns)) == (reason, turns)
    assert [message["role"] for message in found.messages] == ["user", *["assistant", "user"] * turns]
    assert found.messages[-1] == {"role": "user", "content": "bye"}
    assert found.scores == {"score": 2 * turns + 1}
    assert made.loss_mask[-1] == 1


def test_stop_strings_of_the_environment_end_a_turn(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Echo", hello, environment_args={"stop": ["lo"]})
    (made,) = run(engine, requests_of(tokenizer, 1))
    assert made.trajectory is not None
    assert [message["content"] for message in made.trajectory.messages][1::2] == ["hello", "hello"]
    assert made.loss_mask[:6] == [1, 1, 1, 1, 1, 0]
    assert made.stop == "string"


@pytest.mark.parametrize(
    ("keys", "sampling", "reason", "turns"),
    [
        ({"max_turns": 3}, {}, "max_turns", 3),
        ({"trajectory_tokens": 12}, {}, "max_tokens", 2),
        ({}, {"max_tokens": 60}, "context_overflow", 2),  # 8 + 36 + 8 tokens, and 36 more
        ({}, {"max_tokens": 6}, "max_tokens", 1),
    ],
)
def test_limits_end_a_trajectory(
    tokenizer: Any, keys: dict[str, Any], sampling: dict[str, Any], reason: str, turns: int
) -> None:
    engine = opened(tokenizer, "Echo", hello, environment_args={"turns": 20}, **keys)
    (made,) = run(engine, requests_of(tokenizer, 1), **sampling)
    assert made.trajectory is not None
    assert (made.trajectory.stop, len(made.trajectory.turns), made.stop) == (reason, turns, "length")
    assert sum(made.loss_mask) <= keys.get("trajectory_tokens", 200)
    assert len(made.ids) <= sampling.get("max_tokens", 200)


def test_a_trajectory_over_its_time_ends_after_its_turn(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Echo", hello, trajectory_timeout=1e-9)
    (made,) = run(engine, requests_of(tokenizer, 1))
    assert made.trajectory is not None
    assert (made.trajectory.stop, made.stop, made.failure) == ("timeout", "length", "")


def test_a_prompt_over_the_limit_fails(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Echo", hello, prompt_limit=4)
    (made,) = run(engine, requests_of(tokenizer, 1))
    assert "reset returned a prompt of 24 tokens, over the limit of 4" in made.failure
    assert made.ids == []


def test_seeds_depend_on_run_row_and_sample_alone(tokenizer: Any) -> None:
    def seeds(**keys: Any) -> list[int]:
        engine = opened(tokenizer, "Echo", hello, **keys)
        made = run(engine, requests_of(tokenizer, 3, n=2))
        return [one.trajectory.info["seed"] for one in made if one.trajectory is not None]

    one = seeds()
    assert one == seeds(environment_workers=3, max_concurrent=1)
    assert one == [environment_seed(5, 100 + row, sample) for row in range(3) for sample in range(2)]
    assert len(set(one)) == 6
    assert all(0 <= seed < 2**31 for seed in one)


def test_scores_of_trajectories_and_groups(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Scored", hello)
    made = run(engine, requests_of(tokenizer, 2, n=3))
    scores = [one.trajectory.scores for one in made if one.trajectory is not None]
    assert [score["group"] for score in scores] == [3.0, 3.1, 3.2] * 2
    assert all((one["score"], one["score/turns"], one["score/reward"]) == (3.0, 2.0, 1.0) for one in scores)


def test_an_environment_of_token_ids(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Tokens", lambda request, turn: "ab\ncd")
    (made,) = run(engine, requests_of(tokenizer, 1))
    turn = [*tokenizer("ab\n")["input_ids"]]  # 10 is the byte of the line break, which ends a turn
    assert made.prompt_ids == [65, 66, 67]
    assert made.ids == [*turn, *reversed(turn), *turn]
    assert made.loss_mask == [1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert made.trajectory is not None
    assert made.trajectory.reward == 1.0
    contents = [message["content"] for message in made.trajectory.messages]
    assert contents == ["ABC", "ab\n", "\nba", "ab\n", "\nba"]
    assert made.trajectory.scores == {"score": 5}


@pytest.fixture
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_runs_generate_in_rounds_of_a_fixed_order(tokenizer: Any) -> None:
    def batches(**keys: Any) -> list[list[tuple[int, int]]]:
        engine = opened(tokenizer, "Echo", hello, **keys)
        run(engine, requests_of(tokenizer, 4, n=2))
        return [[(request.key, request.first) for request in batch] for batch in engine.inner.batches]

    assert batches()[0] == [(100 + row, sample) for row in range(4) for sample in range(2)]
    assert len(batches()) == 2
    assert batches(environment_workers=2) == batches()
    few = batches(max_concurrent=3)
    assert few == batches(max_concurrent=3, environment_workers=3)
    assert [len(batch) for batch in few] == [3, 3, 3, 3, 2, 2]


def test_the_noise_of_a_turn_depends_on_row_sample_and_turn(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Echo", hello)
    run(engine, requests_of(tokenizer, 2, n=2))
    asked = [request for batch in engine.inner.batches for request in batch]
    assert {request.key for request in asked if len(request.ids) < 40} == {100, 101}
    later = {request.key for request in asked if len(request.ids) >= 40}
    assert len(later) == 2
    assert not later & {100, 101}
    assert len({request.session for request in asked}) == 4
    assert len(asked) == 8


class Continuous(Scripted):
    """Takes more requests between its completions, as the native engine does."""

    further: Any = None

    def end_session(self, session: int) -> None:
        self.ended.append(session)

    def __init__(self, tokenizer: Any, say: Say):
        super().__init__(tokenizer, say)
        self.ended: list[int] = []

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        asked = list(requests)
        done = 0
        self.started = getattr(self, "started", 0) + 1
        assert self.further.longest_sequence >= max(len(request.ids) for request in requests)
        self.sessions = self.further.sessions
        while done < len(asked):
            for completion in super().generate(asked[done:], sampling):
                yield Completion(
                    completion.request + done, completion.sample, completion.ids, completion.logprobs, completion.stop
                )
            done = len(asked)
            asked += self.further.take(2, wait=True)


def test_an_engine_that_takes_more_requests_runs_all_turns_in_one_call(tokenizer: Any) -> None:
    engine = opened(tokenizer, "Echo", hello)
    usual = run(engine, requests_of(tokenizer, 3, n=2))
    engine.inner = Continuous(tokenizer, hello)
    assert [one.ids for one in run(engine, requests_of(tokenizer, 3, n=2))] == [one.ids for one in usual]
    assert engine.inner.further is None
    assert engine.inner.started == 1
    assert engine.inner.sessions == 6
    assert len(set(engine.inner.ended)) == 6


def test_a_prompt_that_has_outgrown_the_engine_does_not_wait_for_all_others(tokenizer: Any) -> None:
    """Two trajectories run at once. The third of eight has a long prompt."""
    long = 2
    engine = opened(tokenizer, "Echo", hello, max_concurrent=2)
    requests = requests_of(tokenizer, 8)
    question = requests[long].question
    assert question is not None
    chat = [{"role": "user", "content": "long " * 60}]
    requests[long] = replace(requests[long], question=replace(question, prompt=chat))
    inner = engine.inner = Continuous(tokenizer, hello)
    sampling = Sampling(max_tokens=200, stop_ids=(tokenizer.eos_token_id,))
    done = [one.request for one in engine.generate(requests, sampling)]
    assert sorted(done) == list(range(8))
    assert done.index(long) <= long + 1
    assert inner.started == 2


@pytest.mark.slow
def test_the_watchdog_hears_of_conversations_that_wait(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "PROGRESS_SECONDS", 0.01)
    engine, heard = opened(tokenizer, "Slow", hello), []
    engine.progress = lambda: heard.append(None)
    assert [one.failure for one in run(engine, requests_of(tokenizer, 1))] == [""]
    assert len(heard) > 5


def calls(tokens: str) -> Callable[[Request, int], str]:
    return lambda request, turn: tokens if turn == 0 else "the end"


CALL = '<tool_call>\n{"name": "%s", "arguments": %s}\n</tool_call>'
TOOLS = '''
import time

def add(a: int, b: int) -> int:
    """Adds.

    Args:
        a: One.
        b: Another.
    """
    return a + b

async def fail(text: str) -> str:
    """Fails.

    Args:
        text: Any.
    """
    raise ValueError(text)

def long(count: int) -> str:
    """Writes much.

    Args:
        count: How much.
    """
    return "x" * count

def slow() -> str:
    """Never returns."""
    time.sleep(10000)
'''


@pytest.fixture(scope="module")
def tools_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tools") / "tools.py"
    path.write_text(TOOLS, encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def caller(tiny_folder: Path) -> Any:
    """A tokenizer whose template shows tools."""
    tokenizer = load_tokenizer(str(tiny_folder))
    tokenizer.chat_template = builtin_text("qwen2.5")
    return tokenizer


def with_tools(tokenizer: Any, file: Path, text: str, **keys: Any) -> tuple[Completion, EnvironmentHosts]:
    tools = [f"{file}:{name}" for name in ("add", "fail", "long", "slow")]
    settings = RolloutSettings(tools=tools, environment_workers=1, result_chars=16, step_timeout=1.0, **keys)
    engine = engine_with(tokenizer, calls(text), settings)
    (made,) = run(engine, requests_of(tokenizer, 1), max_tokens=2000)
    return made, engine.hosts


def test_tool_calls_run_in_parallel_and_return_in_call_order(caller: Any, tools_file: Path) -> None:
    calls = [("add", '{"a": 1, "b": 2}'), ("fail", '{"text": "oh"}'), ("long", '{"count": 40}'), ("none", "{}")]
    text = "\n".join(CALL % call for call in calls) + CALL.replace("}", "") % ("add", "{")
    made, _ = with_tools(caller, tools_file, text)
    found = made.trajectory
    assert found is not None
    results = [message["content"] for message in found.messages if message["role"] == "tool"]
    assert results[0] == "3"
    assert results[1] == "error: ValueError: oh"
    assert results[2] == "xxxxxxxx\n[24 characters are left out]\nxxxxxxxx"
    assert "none" in results[3]
    assert len(results) == 4
    assert (found.stop, found.turns[0].parse_error != "") == ("completed", True)
    metrics = found.named_metrics()
    assert metrics["environment/tool_calls"] == 4
    assert metrics["environment/parse_errors"] == 1
    assert metrics["environment/tool_errors"] == 1
    assert found.info["calls"] == 3


def test_too_many_tool_calls_end_the_trajectory_before_they_run(caller: Any, tools_file: Path) -> None:
    text = CALL % ("add", '{"a": 1, "b": 2}')
    made, _ = with_tools(caller, tools_file, text * 3, max_tool_calls=2)
    found = made.trajectory
    assert found is not None
    assert (found.stop, len(found.turns), found.info["calls"], made.stop) == ("max_tool_calls", 1, 0, "length")


@pytest.mark.slow
def test_stuck_tools_block_no_reset_and_no_score(caller: Any, tools_file: Path) -> None:
    """The first trajectory fills the threads of a small host with stuck tools. Other trajectories start and end."""
    tools = [f"{tools_file}:{name}" for name in ("add", "slow")]
    settings = RolloutSettings(tools=tools, environment_workers=1, step_timeout=2.0, max_concurrent=2)

    def say(request: Request, turn: int) -> str:
        return CALL % ("slow", "{}") * 4 if turn == 0 and request.key == turn_key(100, 0) else "done"

    engine = engine_with(caller, say, settings)
    made = run(engine, requests_of(caller, 4), max_tokens=2000)
    assert [(one.failure, one.trajectory and one.trajectory.stop) for one in made] == [("", "completed")] * 4


@pytest.mark.parametrize("tools", [["python:seconds=5"], ["bash"], ["calculator", "python:seconds=7.5,memory_mb=99"]])
def test_a_tool_that_may_take_longer_than_its_limit_is_refused(tools: list[str]) -> None:
    with pytest.raises(Refusal) as refused:
        host_setup(RolloutSettings(tools=tools, step_timeout=5.0))
    (problem,) = refused.value.problems
    assert (problem.where, problem.code) == (f"rollout.tools {tools[-1]}", "out-of-range")
    assert "rollout.step_timeout" in problem.remedy
    host_setup(RolloutSettings(tools=tools, step_timeout=10.5))


@pytest.mark.slow
def test_a_tool_over_its_time_limit_is_a_message_and_its_host_is_replaced(caller: Any, tools_file: Path) -> None:
    made, hosts = with_tools(caller, tools_file, CALL % ("slow", "{}"))
    found = made.trajectory
    assert found is not None
    assert found.messages[2]["content"] == "error: slow did not return within 1 s"
    assert (found.stop, made.failure) == ("completed", "")
    assert hosts.hosts == []
