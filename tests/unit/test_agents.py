"""Agents that use OpenAI's client against the real server: rows, tools, streams, limits and failures. The engine writes
given texts, so that the rows are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import agent_functions
from agent_engines import END, FILE, marked, repeats, run, whole
from hang import wait_until
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.environments.agents.agent_loop import AgentBatch, AgentEngine
from lockstep.environments.agents.agent_server import AgentRequest, AgentServer, AgentSession
from lockstep.environments.agents.agent_setup import agent_setup
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.host import EnvironmentHosts
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Request
from scripted_engine import Say, Scripted


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


@pytest.fixture(scope="module")
def with_tools(tiny_folder: Path) -> Any:
    """A tokenizer whose chat template has tools."""
    made = load_tokenizer(str(tiny_folder))
    made.chat_template = builtin_text("qwen2.5")
    return made


@pytest.fixture(scope="module")
def hosts() -> Iterator[EnvironmentHosts]:
    """A host process that runs the agent that a row names."""
    made = EnvironmentHosts(agent_setup(RolloutSettings(agent=f"{FILE}:any_agent", environment_workers=1)))
    yield made
    made.close()


@pytest.fixture
def once(hosts: EnvironmentHosts) -> Iterator[Any]:
    """Runs one agent of `agent_functions` for one row."""
    server = AgentServer("127.0.0.1", "rollout.agent_host")

    def run_once(tokenizer: Any, agent: str, say: Say, truth: str = "5", args: Any = None, **keys: Any) -> Completion:
        sampling, limit = keys.pop("sampling", {}), keys.pop("prompt_limit", None)
        settings = RolloutSettings(agent="used: by the hosts", **keys)
        chat = ChatFormat(tokenizer, frozenset({END}), settings.history)
        engine = AgentEngine(Scripted(tokenizer, say), hosts, settings, chat, len(tokenizer), limit)
        engine.server = server
        (made,) = run(engine, [truth], {"agent": agent, "keys": args or {}}, **sampling)
        return made

    yield run_once
    server.close()


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def calls_once(request: Request, turn: int) -> str:
    return CALL if turn == 0 else "5"


def test_retries_branches_compaction_and_subagents_are_rows(once: Any, tokenizer: Any) -> None:
    """The rows are written by hand: `<` and `>` are the tokens around a message, and brackets show trained tokens."""
    made = once(tokenizer, "tree", repeats(tokenizer))
    assert made.failure == ""
    rows = [marked(tokenizer, row) for row in whole(made)]
    a = "<user\na>\n<assistant\n"
    # The third request continues the retry, because it is the latest of two equal conversations. The second branch
    # continues the first attempt, and the third one starts a row after the retry, whose turn is then context.
    assert rows == [
        f"{a}[re a>]\n<user\nc>\n<assistant\n[re c>]",
        f"{a}re a>\n<user\nd>\n<assistant\n[re d>]",
        "<system\nthe summary>\n<user\ne>\n<assistant\n[re e>]",
        "<system\nyou help>\n<user\nf>\n<assistant\n[re f>]",
        f"{a}[re a>]\n<user\nb>\n<assistant\n[re b>]\n<user\ng>\n<assistant\n[re g>]",
    ]
    found = made.trajectory
    assert found is not None
    assert (len(found.turns), found.metrics["rows"], found.scores, found.stop) == (8, 5, {"score": 1.0}, "completed")
    texts = [tokenizer.decode(made.ids[turn.start : turn.stop]) for turn in found.turns]
    assert texts == [f"re {letter}<|im_end|>" for letter in "acdefabg"]
    for turn in found.turns:
        assert made.logprobs[turn.start : turn.stop] == [-float(i + 1) for i in range(turn.stop - turn.start)]
    sampled = [(one["row"], one["turn"], one["content"]) for one in found.messages if "turn" in one]
    assert [(number, text) for _, number, text in sampled] == list(enumerate(f"re {letter}" for letter in "acdefabg"))
    assert [row for row, _, _ in sampled] == [0, 0, 1, 2, 3, 4, 4, 4]
    assert [(one["row"], one["content"]) for one in found.messages if one["role"] == "user"] == [
        (0, "a"),
        (0, "c"),
        (1, "d"),
        (2, "e"),
        (3, "f"),
        (4, "a"),
        (4, "b"),
        (4, "g"),
    ]


def rendered(tokenizer: Any, *messages: dict[str, Any], tools: Any = None) -> list[int]:
    text = tokenizer.apply_chat_template(list(messages), tools=tools, tokenize=False)
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.mark.parametrize(
    ("agent", "args"),
    [
        ("calculate", {}),
        ("calculate_with_responses", {}),
        ("calculate_with_responses", {"stream": True}),
    ],
    ids=["chat", "responses", "streamed responses"],
)
def test_an_agent_with_tools(once: Any, with_tools: Any, agent: str, args: dict[str, Any]) -> None:
    made = once(with_tools, agent, calls_once, args=args)
    assert made.failure == ""
    assert made.rows == ()
    found = made.trajectory
    assert found is not None
    assert found.scores == {"score": 1.0}
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    (row,) = whole(made)
    # The tokens are those of the rendered conversation, apart from the line break after the last end token.
    assert (
        row.ids
        == rendered(
            with_tools,
            {"role": "user", "content": "2+3?"},
            {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": function}]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "5"},
            tools=agent_functions.TOOLS,
        )[: len(row.ids)]
    )
    spans = [with_tools.decode(made.ids[turn.start : turn.stop]) for turn in found.turns]
    assert spans == [f"{CALL}<|im_end|>", "5<|im_end|>"]
    assert sum(row.loss_mask) == sum(turn.stop - turn.start for turn in found.turns)
    assert found.turns[0].calls[0].arguments == {"a": 2, "b": 3}
    # The agent of chat completions asks for the temperature 0.2, which the run does not use.
    assert found.metrics["ignored_sampling"] == (2.0 if agent == "calculate" else 0.0)
    assert found.metrics["tool_calls"] == 1


def test_a_streamed_answer_has_the_calls_and_the_usage(once: Any, with_tools: Any) -> None:
    made = once(with_tools, "streamed", lambda request, turn: f"I add. {CALL}")
    found = made.trajectory
    assert (made.failure, found is None) == ("", False)
    assert found is not None
    assert found.info == {
        "calls": [["add", '{"a": 2, "b": 3}']],
        "text": "I add.",
        "finish": ["tool_calls"],
        "tokens": len(made.ids),
    }
    assert found.scores == {"score": 0.75, "score/style": 0.25, "score/right": 0.5}
    assert found.metrics["chunks"] == 5
    assert (found.metrics["turns"], found.metrics["own/turns"]) == (1, 9)
    assert (found.metrics["refused_requests"], found.metrics["own/refused_requests"]) == (0, 2)


def test_a_stored_response_continues_without_its_old_instructions(once: Any, tokenizer: Any) -> None:
    made = once(tokenizer, "stored_responses", repeats(tokenizer))
    assert made.failure == ""
    start = "<system\nbe short>\n<user\none>\n<assistant\n[re one>]\n<user\ntwo>\n<assistant\n[re t]"
    assert [marked(tokenizer, row) for row in whole(made)] == [start]
    assert made.trajectory is not None
    assert made.trajectory.scores == {"score": 4.0}
    assert [turn.finish for turn in made.trajectory.turns] == ["stop", "length"]
    assert made.trajectory.stop == "completed"  # the agent cut the turn itself


def test_requests_at_once(once: Any, tokenizer: Any) -> None:
    """Each sub-agent has a row, and no request waits for another one."""
    made = once(tokenizer, "subagents", repeats(tokenizer))
    assert made.failure == ""
    assert made.trajectory is not None
    assert made.trajectory.scores == {"score": 2.0, "score/right": 1.0, "score/seed": 1.0}
    rows = sorted(marked(tokenizer, row) for row in whole(made))
    more = "\n<user\nmore>\n<assistant\n[re more>]"
    assert rows == [f"<user\n{name}>\n<assistant\n[re {name}>]{more}" for name in "xyz"]
    # The noise depends on the tokens before a turn, and not on the order of the requests.
    again = once(tokenizer, "subagents", repeats(tokenizer))
    assert again.trajectory is not None
    assert {turn.noise for turn in made.trajectory.turns} == {turn.noise for turn in again.trajectory.turns}
    assert len({turn.noise for turn in made.trajectory.turns}) == 6


def test_several_choices_are_branches_and_a_stop_string_is_not_part_of_the_answer(once: Any, tokenizer: Any) -> None:
    made = once(tokenizer, "choices", repeats(tokenizer))
    assert made.failure == ""
    assert [marked(tokenizer, row) for row in whole(made)] == ["<user\na>\n<assistant\n[re a]"] * 3
    assert made.trajectory is not None
    assert made.trajectory.scores == {"score": 12.0}
    assert len({turn.noise for turn in made.trajectory.turns}) == 3


def test_what_is_not_supported_is_refused_by_name(once: Any, tokenizer: Any) -> None:
    made = once(tokenizer, "refused", repeats(tokenizer))
    assert made.failure == ""
    assert made.trajectory is not None
    assert made.trajectory.info["params"] == [
        "response_format",
        "tool_choice",
        "logit_bias",
        "top_logprobs",
        "guided_json",
        "n",
        "messages[0].content[0]",
        "messages[0].role",
    ]
    assert made.trajectory.metrics["turns"] == 1


@pytest.mark.parametrize(
    ("truth", "stop", "keys", "code"),
    [
        ("stay", "context_overflow", {"sampling": {"max_tokens": 60}}, "context_length_exceeded"),
        ("again", "completed", {"sampling": {"max_tokens": 60}, "trajectory_tokens": 50}, "context_length_exceeded"),
        ("stay", "context_overflow", {"prompt_limit": 5}, "context_length_exceeded"),
        ("stay", "max_turns", {"max_turns": 2}, "max_turns"),
        ("stay", "max_tokens", {"trajectory_tokens": 12}, "max_tokens"),
        ("stay", "timeout", {"trajectory_timeout": 1e-6}, "timeout"),
    ],
)
def test_limits(once: Any, tokenizer: Any, truth: str, stop: str, keys: dict[str, Any], code: str) -> None:
    made = once(tokenizer, "overflow", repeats(tokenizer), truth=truth, **keys)
    found = made.trajectory
    assert found is not None
    if not found.turns:  # the first request was refused
        assert (made.stop, found.stop) == ("failed", "tool_error")
        assert "without a turn" in made.failure
        return
    assert (made.failure, found.stop, found.info["code"]) == ("", stop, code)
    assert made.stop == ("token" if stop == "completed" else "length")
    rows = [len(row.ids) for row in whole(made)]
    prompt = len(tokenizer("<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n")["input_ids"])
    assert max(rows) <= prompt + keys.get("sampling", {}).get("max_tokens", 2000)
    sampled = sum(turn.stop - turn.start for turn in found.turns)
    assert sampled <= keys.get("trajectory_tokens", 60 if "sampling" in keys else 2000)


@pytest.mark.parametrize(("turn_tokens", "turns"), [(None, 2), (5, 4), (8, 3)])
def test_requests_at_once_stay_within_the_tokens_of_the_trajectory(
    once: Any, tokenizer: Any, turn_tokens: int | None, turns: int
) -> None:
    """Each answer would have 13 tokens. A request waits until others leave enough of the tokens that they reserved."""
    made = once(tokenizer, "crowd", repeats(tokenizer), trajectory_tokens=20, turn_tokens=turn_tokens)
    found = made.trajectory
    assert (made.failure, found is None) == ("", False)
    lengths = [turn.stop - turn.start for turn in found.turns]
    assert sum(lengths) == 20
    assert sorted(lengths, reverse=True) == {None: [13, 7], 5: [5, 5, 5, 5], 8: [8, 8, 4]}[turn_tokens]
    assert found.info["codes"] == ["max_tokens"] * (4 - turns)
    assert found.metrics["refused_requests"] == 4 - turns


@pytest.fixture
def posted(monkeypatch: pytest.MonkeyPatch) -> list[AgentRequest]:
    """The requests that the server has posted, in the order of their arrival. Those that were abandoned are in it
    twice."""
    made, open_session = list[AgentRequest](), AgentServer.open

    def opened(self: AgentServer, post: Callable[[AgentRequest], None]) -> AgentSession:
        def record(request: AgentRequest) -> None:
            post(request)
            made.append(request)

        return open_session(self, record)

    monkeypatch.setattr(AgentServer, "open", opened)
    return made


@pytest.mark.parametrize("unseen", [False, True])
def test_a_request_that_waits_for_tokens_can_be_abandoned(
    once: Any, tokenizer: Any, posted: list[AgentRequest], monkeypatch: pytest.MonkeyPatch, unseen: bool
) -> None:
    """All three requests arrive during the first turn. One of the others is cancelled during the second turn. With
    `unseen`, the loop gets the cancelled request only then."""
    called, delayed, handle = list[str](), list[AgentRequest](), AgentBatch.requested

    def requested(self: AgentBatch, request: AgentRequest) -> None:
        if unseen and request.spec.messages[0]["content"] == "c" and not request.gone:
            delayed.append(request)
            return
        for one in [*delayed, request] if request.gone else [request]:
            handle(self, one)

    monkeypatch.setattr(AgentBatch, "requested", requested)

    def say(request: Request, turn: int) -> str:
        called.append(repeats(tokenizer)(request, turn))
        if len(called) == 1:
            wait_until(lambda: len(posted) == 3)
        if len(called) == 2:
            wait_until(lambda: len(posted) == 4)
        return called[-1]

    made = once(tokenizer, "impatient_crowd", say)
    assert made.failure == ""
    assert len(whole(made)) == 2
    assert made.trajectory is not None
    assert made.trajectory.scores == {"score": 2.0}
    assert made.trajectory.metrics["abandoned_turns"] == 1


def test_a_limit_that_an_agent_does_not_handle(once: Any, tokenizer: Any) -> None:
    failed = once(tokenizer, "endless", repeats(tokenizer), max_turns=3)
    assert failed.stop == "failed"
    assert failed.failure_key == "rollout.agent"
    assert "run raised openai.BadRequestError" in failed.failure
    assert "max_turns" in failed.failure
    assert "rollout.agent_limit_reward" in failed.failure
    made = once(tokenizer, "endless", repeats(tokenizer), max_turns=3, agent_limit_reward=-0.5)
    assert made.failure == ""
    assert made.trajectory is not None
    assert (made.trajectory.stop, made.trajectory.scores) == ("max_turns", {"score": -0.5})
    assert len(made.trajectory.turns) == 3


@pytest.mark.slow
def test_a_turn_that_no_agent_got_is_not_trained(once: Any, posted: list[AgentRequest], tokenizer: Any) -> None:
    def say(request: Request, turn: int) -> str:
        text = repeats(tokenizer)(request, turn)
        if "slow" in text:
            wait_until(lambda: any(one.gone for one in posted))
        return text

    made = once(tokenizer, "abandoned", say)
    assert made.failure == ""
    assert [marked(tokenizer, row) for row in whole(made)] == ["<user\na>\n<assistant\n[re a>]"]
    assert made.trajectory is not None
    assert made.trajectory.metrics["abandoned_turns"] == 1


def test_a_posted_reward(once: Any, tokenizer: Any) -> None:
    made = once(tokenizer, "posted", repeats(tokenizer))
    assert made.failure == ""
    assert made.trajectory is not None
    assert made.trajectory.scores == {"score": 0.75}
