"""Agents of OpenRLHF as environments: tokens of raw text, rewards, logs, sampling_params and refused files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter_runs import played, question, trained_text
from lockstep.environments.adapters.openrlhf_agent import agent_class
from lockstep.environments.setup import try_environment
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Prompt
from refusals import refuses

# An agent as OpenRLHF's users write it: two wrong answers, then the end. It imports OpenRLHF's module. `tensor` has the
# method of torch's tensors that the adapter calls; an import of torch takes seconds.
AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class tensor:
    def __init__(self, *values):
        self.values = values

    def item(self):
        (value,) = self.values
        return value

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.steps, self.seen = 0, []

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"] + PREFIX}

    async def step(self, states: dict, **kwargs):
        self.steps += 1
        self.seen.append(states)
        right = states["action_text"].strip() == states["label"]
        done = right or self.steps == 3
        feedback = "<|im_end|>" if done else "\\n<|im_start|>user\\nwrong: again<|im_end|>\\n<|im_start|>assistant\\n"
        params = states["sampling_params"]
        EXTRA
        return {
            "rewards": tensor(1.0 if right else -0.25),
            "scores": tensor(float(right)),
            "environment_feedback": feedback,
            "done": done,
            "sampling_params": params,
            "extra_logs": {"steps": tensor(self.steps), "length": len(states["observation_text"])},
        }

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    return load_tokenizer(str(tiny_folder))


def agent_file(folder: Path, text: str = AGENT, prefix: str = "", extra: str = "pass") -> str:
    file = folder / "agent_func.py"
    file.write_text(text.replace("PREFIX", repr(prefix)).replace("EXTRA", extra), encoding="utf-8")
    return f"openrlhf:{file}"


def test_feedback_is_tokenised_without_a_template_and_has_no_loss(tokenizer: Any, tmp_path: Path) -> None:
    (made,), requests = played(tokenizer, ["4", "6", "5"], [question()], environment=agent_file(tmp_path))
    assert made.failure == ""
    assert made.trajectory is not None
    chat = tokenizer.apply_chat_template(question().prompt, tokenize=False, add_generation_prompt=True)
    feedback = "\n<|im_start|>user\nwrong: again<|im_end|>\n<|im_start|>assistant\n"
    end = tokenizer.eos_token_id

    def ids(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    # The last feedback follows the last turn, so no token of it is in the row.
    first, again = [*ids("4"), end], ids(feedback)
    assert made.prompt_ids == ids(chat)
    assert made.ids == [*first, *again, *ids("6"), end, *again, *ids("5"), end]
    assert trained_text(tokenizer, made) == [f"{said}<|im_end|>" for said in ("4", "6", "5")]
    assert [made.logprobs[place] for place, mask in enumerate(made.loss_mask or []) if not mask] == [0.0] * 2 * len(
        again
    )
    assert list(requests[1].ids) == [*made.prompt_ids, *first, *again]


def test_the_reward_is_the_sum_and_logs_are_the_last(tokenizer: Any, tmp_path: Path) -> None:
    (made,), _ = played(tokenizer, ["4", "6", "5"], [question()], environment=agent_file(tmp_path))
    found = made.trajectory
    assert found is not None
    assert [turn.reward for turn in found.turns] == [-0.25, -0.25, 1.0]
    assert found.reward == 0.5
    assert found.stop == "completed"
    chat = tokenizer.apply_chat_template(question().prompt, tokenize=False, add_generation_prompt=True)
    feedback = "\n<|im_start|>user\nwrong: again<|im_end|>\n<|im_start|>assistant\n"
    # OpenRLHF keeps the logs of the last step; its observation has the text of all turns without their end tokens.
    length = float(len(chat + "4" + feedback + "6" + feedback))
    assert (found.metrics["steps"], found.metrics["length"], found.metrics["scores"]) == (3.0, length, 1.0)
    assert found.info == {"scores": 1.0, "extra_logs": {"steps": 3.0, "length": length}}
    assert found.scores == {}


def test_scores_become_a_reward_component_on_request(tokenizer: Any, tmp_path: Path) -> None:
    keys: dict[str, Any] = {"environment": agent_file(tmp_path), "environment_args": {"scores": True}}
    (made,), _ = played(tokenizer, ["4", "6", "7"], [question()], **keys)
    assert made.trajectory is not None
    assert made.trajectory.scores == {"score": 0.0}
    assert made.trajectory.reward == -0.75


def test_reset_may_change_the_prompt(tokenizer: Any, tmp_path: Path) -> None:
    (made,), _ = played(tokenizer, ["5"], [question()], environment=agent_file(tmp_path, prefix="Answer:"))
    chat = tokenizer.apply_chat_template(question().prompt, tokenize=False, add_generation_prompt=True)
    assert made.prompt_ids == tokenizer(chat + "Answer:", add_special_tokens=False)["input_ids"]


def test_an_agent_may_change_what_ends_a_turn(tokenizer: Any, tmp_path: Path) -> None:
    environment = agent_file(tmp_path, extra='params.stop = ["9"]')
    (made,), requests = played(tokenizer, ["4", "192", "5"], [question()], environment=environment)
    assert [request.stop_strings for request in requests] == [(), ("9",), ("9",)]
    assert trained_text(tokenizer, made) == ["4<|im_end|>", "19", "5<|im_end|>"]


# What an agent does for a label, and a word of the reason why its trajectory fails.
BUGS = {
    "10": ("params.temperature = 0.5", "rollout.temperature"),
    "11": ("params = object()", "sampling_params"),
    "12": ("raise RuntimeError('broken tool')", "broken tool"),
    "13": ("return {'rewards': tensor(0, 0), 'environment_feedback': '', 'done': True}", "rewards"),
    "14": ("return {'environment_feedback': '', 'done': True}", "rewards"),
    "15": ("return {'rewards': 0.0, 'environment_feedback': 5, 'done': False}", "text"),
    "16": ("return {'rewards': 0.0, 'environment_feedback': '', 'done': True, 'environment_images': [1]}", "images"),
    "17": ("return {'rewards': 0.0, 'environment_feedback': '', 'done': False}", "done"),
    "18": ("return {'rewards': float('nan'), 'environment_feedback': '', 'done': True}", "finite"),
}


def test_an_agent_that_fails_fails_only_its_trajectory(tokenizer: Any, tmp_path: Path) -> None:
    bugs = "".join(
        f"\n        if states['label'] == '{label}':\n            {code}" for label, (code, _) in BUGS.items()
    )
    environment = agent_file(tmp_path, extra=bugs.strip())
    asked = [question(truth=label) for label in (*BUGS, "5")]
    made, _ = played(tokenizer, ["4", "5"], asked, environment=environment)
    reasons = dict(zip(BUGS, made, strict=False))
    assert [label for label, (_, word) in BUGS.items() if word not in reasons[label].failure] == []
    assert made[-1].failure == ""


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        ("", "invalid-function", "AgentExecutor"),
        ("class AgentExecutor: pass", "unsupported-setting", "rollout.agent"),
        ("import openrlhf.models", "import-failed", "pip install openrlhf"),
        ("def broken(:", "import-failed", "line 1"),
        (
            "from openrlhf.utils.agent import MultiTurnAgentExecutor\n"
            "class AgentExecutor(MultiTurnAgentExecutor):\n    def __init__(self):\n        super().__init__(None)",
            "invalid-function",
            "step",
        ),
        (
            "from openrlhf.utils.agent import MultiTurnAgentExecutor\n"
            "class AgentExecutor(MultiTurnAgentExecutor):\n    async def execute(self): pass",
            "unsupported-setting",
            "execute",
        ),
        (
            "from openrlhf.utils.agent import MultiTurnAgentExecutor\n"
            "class AgentExecutor(MultiTurnAgentExecutor):\n    def __init__(self, engine): pass",
            "function-raised",
            "engine",
        ),
    ],
)
def test_files_without_an_agent_are_refused(tmp_path: Path, stand_ins: None, text: str, code: str, word: str) -> None:
    source = agent_file(tmp_path, text).partition(":")[2]
    with refuses("agent_func.py", code) as refusal:
        agent_class(source)
    (problem,) = refusal.value.problems
    assert word in f"{problem.why} {problem.remedy}"


@pytest.fixture
def stand_ins() -> Iterator[None]:
    """Removes the stand-ins for OpenRLHF, which otherwise only host processes install."""
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "openrlhf"]:
        del sys.modules[name]


def test_a_missing_file_is_refused_before_training(tokenizer: Any, tmp_path: Path) -> None:
    with refuses("rollout.environment", "no-such-file", "missing.py"):
        tried(tokenizer, f"openrlhf:{tmp_path}/missing.py")


def test_a_usable_agent_passes_the_trial(tokenizer: Any, tmp_path: Path) -> None:
    line = tried(tokenizer, agent_file(tmp_path))
    assert "raw text" in line


def tried(tokenizer: Any, environment: str) -> str:
    asked = question()
    ids = tokenizer.apply_chat_template(asked.prompt, add_generation_prompt=True)["input_ids"]
    return try_environment(RolloutSettings(environment=environment), Prompt(asked, ids), tokenizer, 100, 0).line
