"""Keys of verl's tools and agent loops, its configuration files, and OpenRLHF's agents: recipe keys and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lockstep.compat.conversion_output import checked, report
from lockstep.compat.key_table import Conversion
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verl.convert_verl import convert_verl
from lockstep.recipe import load_recipe
from lockstep.run.files import checksum
from lockstep.train.run_writer import user_code
from refusals import has_problem

R = "actor_rollout_ref.rollout"
T, G = f"{R}.multi_turn", f"{R}.agent"
GRPO = ("data.train_files=t.parquet", "actor_rollout_ref.model.path=m", "algorithm.adv_estimator=grpo", f"{R}.n=4")
AGENT = (
    "--actor.model_name_or_path", "m", "--data.prompt_dataset", "p.jsonl", "--data.max_len", "96",
    "--rollout.max_new_tokens", "64", "--rollout.n_samples_per_prompt", "4", "--train.agent_func_path", "a.py",
)  # fmt: skip
TOOLS = f"{T}.tool_config_path=tools.yaml"


def values(done: Conversion) -> dict[str, Any]:
    return {key: written.value for key, written in done.recipe.items()}


def outcome(done: Conversion, key: str) -> str:
    return next(found.outcome for found in done.outcomes if found.key == key)


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ((), {"rollout.max_turns": 512, "rollout.max_parallel_calls": 1, "rollout.result_chars": 256}),
        ((f"{T}.max_assistant_turns=5",), {"rollout.max_turns": 5}),
        # A user turn is an answer of tools: after two of them, the model has its third turn.
        ((f"{T}.max_user_turns=2",), {"rollout.max_turns": 3}),
        ((f"{T}.max_user_turns=2", f"{T}.max_assistant_turns=2"), {"rollout.max_turns": 2}),
        ((f"{T}.max_user_turns=1", f"{T}.max_assistant_turns=16"), {"rollout.max_turns": 2}),
        ((f"{T}.max_parallel_calls=4",), {"rollout.max_parallel_calls": 4}),
        ((f"{T}.max_tool_response_length=8",), {"rollout.result_chars": 16}),
        ((f"{T}.tool_response_truncate_side=left",), {"rollout.result_truncation": "left"}),
        ((f"{T}.format=qwen3_coder",), {"rollout.parser": "qwen3-coder"}),
        ((f"{T}.use_inference_chat_template=True",), {"rollout.history": "as_template"}),
        (
            (f"{T}.function_tool_path=f.py", f"{T}.enable=True"),
            {"rollout.tools": ["verl:tools.yaml", "verl:f.py"], "rollout.parser": "hermes"},
        ),
        ((f"{G}.default_agent_loop=tool_agent",), {"rollout.tools": ["verl:tools.yaml"]}),
    ],
)
def test_keys_of_tools(words: tuple[str, ...], expected: dict[str, Any]) -> None:
    done = convert_verl("main_ppo", [*GRPO, TOOLS, *words])
    assert not done.problems
    found = values(done)
    assert {key: found.get(key) for key in expected} == expected
    checked(done)
    assert all(key in report(done) for key in done.settings.given)


def test_without_tools_a_rollout_has_one_turn() -> None:
    done = convert_verl("main_ppo", [*GRPO, f"{T}.enable=True", f"{T}.format=hermes", f"{G}.num_workers=4"])
    assert not done.problems
    assert not [key for key in values(done) if key in ("rollout.tools", "rollout.max_turns", "rollout.parser")]
    assert {outcome(done, key) for key in (f"{T}.enable", f"{T}.format", f"{G}.num_workers")} == {"ignored"}
    checked(done)


def test_agent_loops_become_an_environment() -> None:
    words = (f"{G}.agent_loop_config_path=loops.yaml", f"{G}.default_agent_loop=react", TOOLS, f"{T}.format=hermes")
    done = convert_verl("main_ppo", [*GRPO, *words])
    found = values(done)
    assert found["rollout.environment"] == "verl:loops.yaml"
    assert found["rollout.environment_args"] == {"tools": ["tools.yaml"], "default": "react"}
    assert found["reward.weights"] == {"rule": 1.0}
    assert outcome(done, f"{T}.format") == "ignored"
    checked(done)
    other = convert_verl("main_ppo", [*GRPO, words[0], "custom_reward_function.path=r.py"])
    assert "reward.weights" not in values(other)
    assert values(other)["rollout.environment_args"] == {"default": "single_turn_agent"}


@pytest.mark.parametrize(
    ("words", "key", "code"),
    [
        ((f"{G}.default_agent_loop=react",), f"{G}.default_agent_loop", "unsupported-setting"),
        ((f"{T}.interaction_config_path=i.yaml",), f"{T}.interaction_config_path", "unsupported-setting"),
        ((f"{G}.custom_async_server.path=s.py",), f"{G}.custom_async_server.path", "unsupported-setting"),
        ((f"{G}.agent_loop_manager_class=a.B",), f"{G}.agent_loop_manager_class", "unsupported-setting"),
        ((TOOLS, f"{T}.format=gemma4"), f"{T}.format", "unsupported-setting"),
        ((TOOLS, f"{T}.tool_response_truncate_side=top"), f"{T}.tool_response_truncate_side", "unsupported-setting"),
        ((TOOLS, f"{T}.max_parallel_calls=many"), f"{T}.max_parallel_calls", "invalid-value"),
        ((TOOLS, f"{T}.num_repeat_rollouts=2"), f"{T}.num_repeat_rollouts", "unsupported-setting"),
        ((TOOLS, f"{T}.max_turns=2"), f"{T}.max_turns", "unknown-key"),
    ],
)
def test_keys_that_are_refused(words: tuple[str, ...], key: str, code: str) -> None:
    assert has_problem(convert_verl("main_ppo", [*GRPO, *words]).problems, key, code)


CONFIG = """
hydra: {searchpath: [file://verl/trainer/config]}
defaults: [ppo_trainer, _self_]
data: {train_batch_size: 64, max_response_length: 100}
actor_rollout_ref:
  rollout: {name: sglang, multi_turn: {enable: True, max_assistant_turns: 5}, sglang_rollout_mode: server}
"""


def test_a_configuration_file_is_read_below_the_overrides(tmp_path: Path) -> None:
    (tmp_path / "multi.yaml").write_text(CONFIG, encoding="utf-8")
    words = [f"--config-path={tmp_path}", "--config-name=multi", *GRPO, TOOLS, "data.max_response_length=200"]
    done = convert_verl("main_ppo", words)
    assert not done.problems
    found = values(done)
    assert (found["batch.prompts"], found["rollout.max_tokens"], found["rollout.max_turns"]) == (64, 200, 5)
    assert "multi.yaml: data.train_batch_size" in report(done)
    checked(done)


@pytest.mark.parametrize(
    ("text", "code", "word"),
    [
        (None, "unsupported-setting", "multi.yaml"),
        ("a: [", "invalid-yaml", "multi.yaml"),
        ("[]", "invalid-yaml", "multi.yaml"),
        ("defaults: [nothing_trainer]", "unsupported-setting", "nothing_trainer"),
        ("defaults: [{actor: mine}]", "unsupported-setting", "actor"),
        ("actor_rollout_ref: {rollout: {nn: 3}}", "unknown-key", "nn"),
    ],
)
def test_a_configuration_file_that_cannot_be_used(tmp_path: Path, text: str | None, code: str, word: str) -> None:
    if text is not None:
        (tmp_path / "multi.yaml").write_text(text, encoding="utf-8")
    done = convert_verl("main_ppo", [f"--config-dir={tmp_path}", "--config-name", "multi", *GRPO])
    (problem,) = done.problems
    assert problem.code == code
    assert word in f"{problem.where} {problem.why} {problem.remedy}"


def test_an_agent_of_openrlhf_gives_the_rewards() -> None:
    done = convert_openrlhf("train_ppo_ray", [*AGENT, "--reward.model_name_or_path", "rm"])
    assert not done.problems
    found = values(done)
    assert found["rollout.environment"] == "openrlhf:a.py"
    assert (found["rollout.max_turns"], found["rollout.max_tokens"], found["data.max_prompt_tokens"]) == (64, 64, 32)
    assert not [key for key in found if key.startswith("reward.") and key != "reward.clip"]
    assert outcome(done, "reward_pretrain") == "ignored"
    recipe = checked(done)
    assert recipe.rollout.environment_args == {}


def test_dynamic_filtering_uses_the_scores_of_the_agent() -> None:
    words = ("--algo.dynamic_filtering_enable", "--algo.advantage.estimator", "reinforce_baseline")
    done = convert_openrlhf("train_ppo_ray", [*AGENT, *words])
    found = values(done)
    assert found["rollout.environment_args"] == {"scores": True}
    assert found["reward.weights"] == {"score": 0.0}
    assert found["algorithm.dynamic_sampling.metric"] == "score"
    checked(done)


def test_partial_rollouts_are_what_asynchronous_generation_does() -> None:
    partial = "--train.partial_rollout_enable"
    done = convert_openrlhf("train_ppo_ray", [*AGENT, "--train.async_enable", partial])
    assert values(done)["rollout.max_staleness"] == 1
    assert outcome(done, "train.partial_rollout_enable") == "changed"
    alone = convert_openrlhf("train_ppo_ray", [*AGENT, partial])
    assert outcome(alone, "train.partial_rollout_enable") == "ignored"


@pytest.mark.parametrize("key", ["environment=openrlhf:{}", "environment=verl:{}", "tools=[verl:{}]"])
def test_the_file_of_an_agent_or_tool_is_recorded_as_user_code(online_file: Path, tmp_path: Path, key: str) -> None:
    file = tmp_path / "tools.yaml"
    file.write_text("tools: []", encoding="utf-8")
    recorded = user_code(load_recipe(str(online_file), [f"rollout.{key.format(file)}"]))
    (found,) = [one for name, one in recorded.items() if name.startswith(f"rollout.{key.partition('=')[0]}")]
    assert found["sha256"] == checksum(file)
