"""Agents that use OpenAI's client against the real server: rows, tools, streams, limits and failures. The engine writes
given texts, so that the rows are known."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import agent_functions
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.environments.agents.agent_loop import AgentEngine
from lockstep.environments.agents.agent_server import AgentServer
from lockstep.environments.agents.agent_setup import agent_setup, open_agents, try_agent
from lockstep.environments.conversation import ChatFormat
from lockstep.environments.host import EnvironmentHosts
from lockstep.errors import Refusal
from lockstep.launch.supervisor import NOBODY, descendants
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Origin, Prompt, Question, Request, Sampling, TrajectoryRow
from scripted_engine import Say, Scripted

FILE = agent_functions.__file__
END = 257  # the end token of a turn
LAST = re.compile(r"<\|im_start\|>(?:user|tool)\n([^<]*)<\|im_end\|>\n<\|im_start\|>assistant\n$")


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


@pytest.fixture(scope="module")
def with_tools(tiny_folder: Path) -> Any:
    """A tokenizer whose chat template has tools."""
    made = load_tokenizer(str(tiny_folder))
    made.chat_template = builtin_text("qwen2.5")
    return made


def question(truth: str, extra: dict[str, Any] | None = None) -> Question:
    return Question("sums", [{"role": "user", "content": "2+3?"}], truth, Origin("rows.jsonl", 0), extra or {})


def engine_of(tokenizer: Any, agent: str, say: Say, **keys: Any) -> AgentEngine:
    name = agent if ":" in agent else f"{FILE}:{agent}"
    settings = RolloutSettings(agent=name, **{"environment_workers": 1, **keys})
    return open_agents(Scripted(tokenizer, say), settings, tokenizer, frozenset({END}), len(tokenizer))


def run(engine: AgentEngine, truths: Sequence[str] = ("5",), extra: Any = None, **sampling: Any) -> list[Completion]:
    requests = [Request([1], 100 + row, question=question(truth, extra)) for row, truth in enumerate(truths)]
    made = engine.generate(requests, Sampling(**{"max_tokens": 2000, "stop_ids": (END,), "seed": 5, **sampling}))
    return sorted(made, key=lambda one: one.request)


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


def repeats(tokenizer: Any) -> Say:
    """Answers with `re` and the last message."""

    def say(request: Request, turn: int) -> str:
        found = LAST.search(tokenizer.decode(list(request.ids)))
        assert found is not None
        return f"re {found.group(1)}"

    return say


CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'


def calls_once(request: Request, turn: int) -> str:
    return CALL if turn == 0 else "5"


def whole(made: Completion) -> list[TrajectoryRow]:
    """The rows with their prompt."""
    start = list(made.prompt_ids or ())
    rows = made.rows or [TrajectoryRow(made.ids, list(made.loss_mask), made.logprobs)]
    return [
        TrajectoryRow(start + row.ids, [0] * len(start) + row.loss_mask, [0.0] * len(start) + row.logprobs)
        for row in rows
    ]


def marked(tokenizer: Any, row: TrajectoryRow) -> str:
    """The text of a row, with brackets around the trained tokens."""
    text, before = "", 0
    for token, mask in zip(row.ids, row.loss_mask, strict=True):
        text += ("[" if mask > before else "]" if mask < before else "") + tokenizer.decode([token])
        before = mask
    return (text + ("]" if before else "")).replace("<|im_start|>", "<").replace("<|im_end|>", ">")


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


def test_a_turn_that_no_agent_got_is_not_trained(once: Any, tokenizer: Any) -> None:
    def say(request: Request, turn: int) -> str:
        text = repeats(tokenizer)(request, turn)
        if "slow" in text:
            waiting.wait(1.0)  # longer than the patience of the agent
        return text

    waiting = threading.Event()
    made = once(tokenizer, "abandoned", say)
    assert made.failure == ""
    assert [marked(tokenizer, row) for row in whole(made)] == ["<user\na>\n<assistant\n[re a>]"]
    assert made.trajectory is not None
    assert made.trajectory.metrics["abandoned_turns"] == 1


# -- failures ----------------------------------------------------------------------------------------------------------

FAILURES = {
    "raises": "run raised ValueError: the bug (agent_functions.py line",
    "exits": "run raised SystemExit: 3",
    "text": "run returned 'good' as the score, which is not a finite number",
    "nan": "run returned nan as the score, which is not a finite number",
    "nothing": "run returned no reward",
    "empty": "run returned an empty dict",
    "unknown": "run returned the key 'score' besides reward",
    "silent": "run ended without a turn of the model",
}


class Watched:
    """Remembers the host processes of an engine."""

    def __init__(self, engine: AgentEngine):
        self.hosts, self.marks = engine.hosts, [host._mark for host in engine.hosts.hosts]
        start = engine.hosts._start

        def started() -> Any:
            host = start()
            self.marks.append(host._mark)
            return host

        engine.hosts._start = started  # type: ignore[method-assign]

    def left(self) -> list[int]:
        return [pid for mark in self.marks for pid in descendants(NOBODY, mark)]


def test_a_bug_fails_its_trajectory_alone(tokenizer: Any) -> None:
    names = [*FAILURES, "leaves", ""]
    bugs = {name: name for name in names}
    engine = engine_of(tokenizer, "buggy", repeats(tokenizer), environment_args={"bugs": bugs})
    watched = Watched(engine)
    try:
        made = run(engine, names)
        again = run(engine, [""])
    finally:
        engine.close()
    for name, one in zip(names, made, strict=True):
        assert FAILURES.get(name, "") in one.failure, name
        assert (one.stop == "failed") == (name in FAILURES)
        if name in FAILURES:
            assert one.failure.startswith(f"{FILE}:buggy: ")
            assert one.failure_key == "rollout.agent"
    assert again[0].failure == ""
    assert watched.left() == []


def test_agents_that_hang_are_killed_and_named(tokenizer: Any) -> None:
    bugs = {"bad": "hangs"}
    keys = {"environment_args": {"bugs": bugs}, "step_timeout": 4.0}
    engine = engine_of(tokenizer, "buggy", repeats(tokenizer), **keys)
    watched = Watched(engine)
    try:
        bad, good = run(engine, ["bad", "good"])
    finally:
        engine.close()
    assert good.failure == ""
    assert "buggy: run neither asked the model nor returned within 4 s (rollout.step_timeout)" in bad.failure
    assert bad.trajectory is not None
    assert bad.trajectory.stop == "timeout"
    assert watched.left() == []
    engine = engine_of(tokenizer, "waits", repeats(tokenizer), step_timeout=4.0)
    watched = Watched(engine)
    try:
        (made,) = run(engine)
        assert len(engine.hosts.hosts) == 1  # a coroutine is cancelled, so that its host is not killed
    finally:
        engine.close()
    assert "waits: run neither asked" in made.failure
    assert watched.left() == []


@pytest.mark.slow
def test_a_host_that_dies_fails_its_trajectories(tokenizer: Any) -> None:
    keys = {"environment_args": {"bugs": {"bad": "kills"}}, "max_concurrent": 1}
    engine = engine_of(tokenizer, "buggy", repeats(tokenizer), **keys)
    watched = Watched(engine)
    try:
        bad, good = run(engine, ["bad", "good"])
    finally:
        engine.close()
    assert "its process" in bad.failure
    assert good.failure == ""
    assert watched.left() == []


@pytest.mark.slow
def test_an_interrupted_batch_leaves_nothing(tokenizer: Any) -> None:
    engine = engine_of(tokenizer, "buggy", repeats(tokenizer), environment_args={"bugs": {"bad": "hangs"}})
    watched = Watched(engine)
    requests = [Request([1], row, question=question(truth)) for row, truth in enumerate(("good", "bad"))]
    made = engine.generate(requests, Sampling(200, stop_ids=(tokenizer.eos_token_id,)))
    next(iter(made))
    made.close()  # type: ignore[attr-defined]
    engine.close()
    assert watched.left() == []


def test_a_posted_reward(once: Any, tokenizer: Any) -> None:
    made = once(tokenizer, "posted", repeats(tokenizer))
    assert made.failure == ""
    assert made.trajectory is not None
    assert made.trajectory.scores == {"score": 0.75}


# -- programs ----------------------------------------------------------------------------------------------------------

PROGRAM = """
import json, os, sys, time
from openai import OpenAI

row = json.loads(sys.stdin.readline())
assert sys.argv[1] == os.environ["OPENAI_BASE_URL"]
client = OpenAI()
reply = client.chat.completions.create(model="m", messages=row["prompt"]).choices[0].message.content
print("a line of the log")
if row["ground_truth"] == "hangs":
    time.sleep(10_000)
if row["ground_truth"] == "fails":
    sys.exit(3)
if row["ground_truth"] != "no reward":
    print(json.dumps({"reward": len(reply), "metrics": {"seed": int(os.environ["LOCKSTEP_SEED"]) % 7}}))
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "program.py"
    file.write_text(PROGRAM, encoding="utf-8")
    return f"command:{sys.executable} {file} {{base_url}}"


def test_a_program_is_an_agent(tokenizer: Any, program: str) -> None:
    """The host process of each rank starts the program. A program that hangs is killed."""
    engine = engine_of(tokenizer, program, repeats(tokenizer), step_timeout=15)
    watched = Watched(engine)
    try:
        right, fails, silent = run(engine, ["right", "fails", "no reward"])
        engine.settings = engine.settings.model_copy(update={"step_timeout": 5.0})
        (hangs,) = run(engine, ["hangs"])
    finally:
        engine.close()
    assert right.failure == ""
    assert right.trajectory is not None
    assert right.trajectory.scores == {"score": float(len("re 2+3?"))}
    assert "seed" in right.trajectory.metrics
    assert "the program ended with exit status 3" in fails.failure
    assert "run returned no reward" in silent.failure
    assert "run neither asked the model nor returned within" in hangs.failure
    assert watched.left() == []


# -- before training ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("agent", "code", "why"),
    [
        (f"{FILE}:missing", "invalid-function", "has no"),
        (f"{FILE}:NotAFunction", "invalid-function", "NotAFunction is a class"),
        (f"{FILE}:no_url", "invalid-function", "no_url cannot be called"),
        ("nowhere.py:run", "no-such-file", "nowhere.py"),
        ("command:no-such-program x", "no-such-file", "no-such-program"),
        ("command:'x", "invalid-function", "command line"),
    ],
)
def test_an_agent_that_cannot_be_loaded_is_refused(tokenizer: Any, agent: str, code: str, why: str) -> None:
    with pytest.raises(Refusal) as refused:
        try_agent(RolloutSettings(agent=agent), Prompt(question("5"), [1]), tokenizer, 100, 0)
    (problem,) = refused.value.problems
    assert problem.where.startswith("rollout.agent ")
    assert problem.code == code
    assert why in problem.why


def test_the_trial_loads_the_agent(tokenizer: Any) -> None:
    said = try_agent(RolloutSettings(agent=f"{FILE}:tree"), Prompt(question("5"), [1]), tokenizer, 100, 0)
    assert said.startswith(f"rollout.agent {FILE}:tree: loaded")
    settings = RolloutSettings(agent=f"{FILE}:tree", agent_host="203.0.113.7")
    with pytest.raises(Refusal) as refused:
        try_agent(settings, Prompt(question("5"), [1]), tokenizer, 100, 0)
    (problem,) = refused.value.problems
    assert (problem.where, problem.code) == ("rollout.agent_host 203.0.113.7", "port-unavailable")
