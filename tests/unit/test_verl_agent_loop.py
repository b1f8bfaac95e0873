"""Agent loops of verl as token-level environments: tokens, masks, rewards, rows that select a loop, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from adapter_runs import played, question, trained_text
from lockstep.data.encode.builtin_templates import builtin_text
from lockstep.environments.adapters.verl_agent_loop import loops_of
from lockstep.environments.setup import try_environment
from lockstep.model.load import load_tokenizer
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.types import Completion, Prompt
from refusals import refuses

# Loops as verl's users write them. `TwoTurns` has the methods of verl 0.9, `Plain` those of earlier releases.
LOOPS = """
from uuid import uuid4
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer

class TwoTurns(AgentLoopBase):
    def __init__(self, *args, word="again", **kwargs):
        super().__init__(*args, **kwargs)
        self.word, self.response_length = word, self.rollout_config.response_length

    async def run(self, sampling_params, **kwargs):
        messages, mask, metrics, turns = list(kwargs["raw_prompt"]), [], {}, 0
        ids = await self.ct_build_initial_tokens(messages)
        while True:
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=uuid4().hex, prompt_ids=ids, sampling_params=sampling_params)
            merged, mask, _ = await self.ct_merge_assistant_token(ids, output.token_ids, mask)
            ids, turns = merged.token_ids, turns + 1
            said = self.tokenizer.decode(output.token_ids, skip_special_tokens=True)
            messages.append({"role": "assistant", "content": said})
            if said == kwargs["ground_truth"] or turns == 3:
                break
            before = list(messages)
            messages.append({"role": "user", "content": self.word})
            merged, mask, _ = await self.ct_merge_context_msg(before, messages, ids, mask)
            ids = merged.token_ids
        prompt = ids[:len(ids) - len(mask)]
        return AgentLoopOutput(
            prompt_ids=prompt, response_ids=ids[len(prompt):][:self.response_length],
            response_mask=mask[:self.response_length], num_turns=2 * turns, metrics=metrics,
            reward_score=1.0 if said == kwargs["ground_truth"] else 0.0, extra_fields={"said": said})

@register("plain")
class Plain(AgentLoopBase):
    async def run(self, sampling_params, **kwargs):
        prompt = await self.apply_chat_template(kwargs["raw_prompt"])
        what = kwargs["ground_truth"]
        if what == "hot":
            sampling_params = {**sampling_params, "temperature": 0.1}
        if what == "short":
            sampling_params = {**sampling_params, "max_tokens": 3}
        if what == "silent":
            return AgentLoopOutput(prompt_ids=prompt, response_ids=[], response_mask=[])
        output = await self.server_manager.generate("id", prompt_ids=prompt, sampling_params=sampling_params)
        ids, mask = output.token_ids, [1] * len(output.token_ids)
        if what == "changed":
            await self.server_manager.generate("id", prompt_ids=[0, *prompt], sampling_params=sampling_params)
        if what == "retokenised":
            ids = [ids[0] + 1, *ids[1:]]
        if what == "mask":
            mask[0] = 0
        if what == "raises":
            raise KeyError("field")
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=mask)
"""
CONFIG = """
- {name: two, _target_: my_loops.TwoTurns, word: once more}
- {name: plain, _target_: my_loops.Plain}
"""


@pytest.fixture(scope="module")
def tokenizer(tiny_folder: Path) -> Any:
    tokenizer = load_tokenizer(str(tiny_folder))
    tokenizer.chat_template = builtin_text("qwen2.5")
    return tokenizer


@pytest.fixture
def loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "my_loops.py").write_text(LOOPS, encoding="utf-8")
    (tmp_path / "loops.yaml").write_text(CONFIG, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "loops.yaml"


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] in ("verl", "my_loops")]:
        del sys.modules[name]


BUGS = {
    "hot": "rollout.temperature",
    "short": "rollout.turn_tokens",
    "silent": "generate",
    "changed": "token 0",
    "retokenised": "tokens",
    "mask": "response_mask",
    "raises": "field",
}


@pytest.fixture(scope="module")
def outcomes(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The trajectories of all rows, from one host process."""
    folder = tmp_path_factory.mktemp("loops")
    (folder / "my_loops.py").write_text(LOOPS, encoding="utf-8")
    (folder / "loops.yaml").write_text(CONFIG, encoding="utf-8")
    asked = [question(), question(agent_name="plain"), question(agent_name="tool_agent")]
    asked.append(question(agent_name="single_turn_agent"))
    asked += [question(truth=bug, agent_name="plain") for bug in BUGS]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        made, requests = played(
            tokenizer, lambda request, turn: "45"[turn], asked, environment=f"verl:{folder / 'loops.yaml'}"
        )
    return {"made": dict(zip(("two", "plain", "unknown", "single", *BUGS), made, strict=True)), "requests": requests}


def test_the_tokens_are_those_of_the_template_and_the_model(tokenizer: Any, outcomes: dict[str, Any]) -> None:
    made: Completion = outcomes["made"]["two"]
    assert made.failure == ""
    chat = [*question().prompt, {"role": "assistant", "content": "4"}, {"role": "user", "content": "once more"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    end = tokenizer.eos_token_id
    expected = [*tokenizer(text, add_special_tokens=False)["input_ids"], *tokenizer("5")["input_ids"], end]
    assert [*made.prompt_ids, *made.ids] == expected
    assert trained_text(tokenizer, made) == ["4<|im_end|>", "5<|im_end|>"]


def test_the_reward_score_and_the_extra_fields_arrive(outcomes: dict[str, Any]) -> None:
    found = outcomes["made"]["two"].trajectory
    assert [turn.reward for turn in found.turns] == [0.0, 1.0]
    assert found.info == {"said": "5", "num_turns": 4}
    assert found.stop == "completed"


def test_rows_select_their_loop(tokenizer: Any, outcomes: dict[str, Any]) -> None:
    assert trained_text(tokenizer, outcomes["made"]["plain"]) == ["4<|im_end|>"]
    assert trained_text(tokenizer, outcomes["made"]["single"]) == ["4<|im_end|>"]
    assert "tool_agent" in outcomes["made"]["unknown"].failure


@pytest.mark.parametrize("bug", BUGS)
def test_a_loop_with_a_bug_fails_its_trajectory(outcomes: dict[str, Any], bug: str) -> None:
    assert BUGS[bug] in outcomes["made"][bug].failure


def test_registered_classes_of_a_python_file(loops: Path, stand_ins: None) -> None:
    found = loops_of(str(loops.with_name("my_loops.py")))
    assert [(name, created.__name__) for name, (created, _) in found.items()] == [("plain", "Plain")]


@pytest.mark.parametrize(
    ("text", "code", "where"),
    [
        ("[", "invalid-yaml", "rollout.environment"),
        ("{}", "wrong-type", "loops.yaml"),
        ("- {name: a}", "not-set", "[0]"),
        ("- {name: a, _target_: my_loops.No}", "import-failed", "[0]._target_"),
        ("- {name: a, _target_: my_loops.uuid4}", "invalid-function", "[0]._target_"),
    ],
)
def test_bad_files_are_refused_with_their_key(loops: Path, stand_ins: None, text: str, code: str, where: str) -> None:
    file = loops.with_name("loops.yaml")
    file.write_text(text, encoding="utf-8")
    loops_of.cache_clear()
    with refuses(where, code):
        loops_of(str(file))


def test_loops_of_verl_itself_need_verl(loops: Path, stand_ins: None) -> None:
    loops.write_text("- {name: t, _target_: verl.experimental.agent_loop.tool_agent_loop.ToolAgentLoop}")
    loops_of.cache_clear()
    with refuses("_target_", "import-failed", remedy="pip install verl"):
        loops_of(str(loops))


def test_a_missing_file_is_refused_before_training(tokenizer: Any, tmp_path: Path) -> None:
    ids = tokenizer.apply_chat_template(question().prompt, add_generation_prompt=True)["input_ids"]
    settings = RolloutSettings(environment=f"verl:{tmp_path}/none.yaml")
    with refuses("rollout.environment", "no-such-file", "none.yaml"):
        try_environment(settings, Prompt(question(), ids), tokenizer, 300, 0)
