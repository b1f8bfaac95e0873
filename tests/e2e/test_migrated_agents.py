"""Scripts of verl with tools and agent loops, and of OpenRLHF with agents: migrated, then trained on the tiny model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from conftest import run, write_jsonl
from lockstep.recipe import load_recipe
from lockstep.run.metrics import read_metrics

# The configuration file, the tool file and the keys of verl's multi-turn scripts.
VERL_CONFIG = """
hydra:
  searchpath: [file://verl/trainer/config]
defaults: [ppo_trainer, _self_]
data: {max_prompt_length: 1024, max_response_length: 1024, train_batch_size: 256, return_raw_chat: True}
actor_rollout_ref:
  hybrid_engine: True
  rollout:
    name: sglang
    multi_turn: {enable: True, max_assistant_turns: 3}
"""
TOOLS = """
tools:
  - class_name: answers.AnswerTool
    config: {type: native}
    tool_schema:
      type: function
      function:
        name: check
        description: Checks an answer.
        parameters: {type: object, properties: {answer: {type: string}}, required: [answer]}
"""
CLASSES = '''
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import ToolResponse

class AnswerTool(BaseTool):
    async def execute(self, instance_id, parameters, agent_data=None, **kwargs):
        truth = agent_data.tools_kwargs["check"]["create_kwargs"]["ground_truth"]
        right = parameters["answer"] == truth
        return ToolResponse(text="right" if right else "wrong"), 1.0 if right else -0.5, {"right": right}

class Twice(AgentLoopBase):
    """Asks a second time, and rewards odd tokens at the end."""

    async def run(self, sampling_params, **kwargs):
        messages, mask = list(kwargs["raw_prompt"]), []
        ids = await self.ct_build_initial_tokens(messages)
        for turn in range(2):
            output = await self.server_manager.generate("id", prompt_ids=ids, sampling_params=sampling_params)
            merged, mask, _ = await self.ct_merge_assistant_token(ids, output.token_ids, mask)
            ids = merged.token_ids
            messages.append({"role": "assistant", "content": "?"})
            if turn == 0:
                merged, mask, _ = await self.ct_merge_context_msg(
                    messages, [*messages, {"role": "user", "content": "more"}], ids, mask)
                ids = merged.token_ids
                messages.append({"role": "user", "content": "more"})
        start = len(ids) - len(mask)
        return AgentLoopOutput(prompt_ids=ids[:start], response_ids=ids[start:], response_mask=mask, num_turns=4,
                               reward_score=float(ids[-1] % 2))
'''
VERL = """
PROJECT_DIR="$(pwd)"
python3 -m verl.trainer.main_ppo \\
    --config-path="$PROJECT_DIR/config" --config-name='multiturn_grpo' \\
    algorithm.adv_estimator=grpo \\
    data.train_files=$PROJECT_DIR/rows.jsonl data.train_batch_size=4 \\
    data.max_prompt_length=700 data.max_response_length=120 data.return_raw_chat=True \\
    actor_rollout_ref.model.path=$MODEL actor_rollout_ref.actor.ppo_mini_batch_size=4 \\
    actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \\
    actor_rollout_ref.rollout.n=2 actor_rollout_ref.rollout.over_sample_rate=0.1 \\
    actor_rollout_ref.rollout.agent.num_workers=2 EXTRA \\
    trainer.logger='["console"]' trainer.n_gpus_per_node=1 trainer.device=cpu trainer.val_before_train=False \\
    trainer.default_local_dir=$PROJECT_DIR/runs trainer.experiment_name=$NAME trainer.total_training_steps=2
"""
AGENT = """
from openrlhf.utils.agent import AgentInstanceBase, MultiTurnAgentExecutor

class AgentInstance(AgentInstanceBase):
    def __init__(self, *args, **kwargs):
        self.steps = 0

    async def reset(self, states: dict, **kwargs):
        return {"observation": states["observation"]}

    async def step(self, states: dict, **kwargs):
        self.steps += 1
        done, reward = self.steps == 2, float(len(set(states["action_text"])) % 2)
        return {"rewards": reward, "scores": float(done), "environment_feedback": "" if done else "\\nagain: ",
                "done": done, "sampling_params": states["sampling_params"], "extra_logs": {"steps": self.steps}}

class AgentExecutor(MultiTurnAgentExecutor):
    def __init__(self):
        super().__init__(AgentInstance)
"""
OPENRLHF = """
ARGS=(
   --actor.model_name_or_path $MODEL --ckpt.output_dir runs/agent
   --train.agent_func_path agent_func.py
   --data.prompt_dataset rows.jsonl --data.input_key question --data.label_key answer
   --data.max_len 160 --rollout.max_new_tokens 48
   --rollout.batch_size 4 --rollout.n_samples_per_prompt 2 --train.batch_size 8 --train.micro_batch_size 2
   --train.max_epochs 1 --train.num_episodes 1 --actor.num_gpus_per_node 1
   --algo.advantage.estimator reinforce_baseline --algo.kl.init_coef 0
   --train.colocate_all --vllm.num_engines 1
)
ray job submit --address="http://127.0.0.1:8265" -- python3 -m openrlhf.cli.train_ppo_ray ${ARGS[@]}
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows: list[dict[str, Any]] = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{a}+1?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + 1)},
            "extra_info": {"tools_kwargs": {"check": {"create_kwargs": {"ground_truth": str(a + 1)}}}},
            "question": f"{a}+1=",
            "answer": str(a + 1),
        }
        for a in range(8)
    ]
    write_jsonl(tmp_path / "rows.jsonl", rows)
    (tmp_path / "config").mkdir()
    files = {
        "config/multiturn_grpo.yaml": VERL_CONFIG, "tools.yaml": TOOLS, "answers.py": CLASSES,
        "loops.yaml": "- {name: twice, _target_: answers.Twice}", "agent_func.py": AGENT,
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PWD", str(tmp_path))
    return tmp_path


def migrated(folder: Path, script: str, *words: object) -> Path:
    (folder / "train.sh").write_text(script, encoding="utf-8")
    assert run("migrate", "train.sh", *words, "-o", "recipe.yaml") == 0
    return folder / "recipe.yaml"


def steps(folder: Path) -> list[dict[str, float]]:
    return [values for _, values in read_metrics(folder / "metrics.jsonl") if "actor/pg_loss" in values]


@pytest.mark.slow
def test_a_script_of_verl_with_tools_trains(folder: Path, tiny_folder: Path) -> None:
    extra = "actor_rollout_ref.rollout.multi_turn.tool_config_path=$PROJECT_DIR/tools.yaml"
    file = migrated(folder, VERL.replace("EXTRA", extra), f"MODEL={tiny_folder}", "NAME=tools")
    rollout = load_recipe(str(file)).rollout
    assert rollout.tools == [f"verl:{folder}/tools.yaml"]
    assert (rollout.max_turns, rollout.max_parallel_calls, rollout.result_chars) == (3, 1, 256)
    assert (rollout.result_truncation, rollout.parser) == ("middle", "hermes")
    assert run("train", file, "data.template=qwen2.5", "checkpoint.every=null", "run.export=false") == 0
    values = steps(folder / "runs" / "tools")
    assert len(values) == 2
    assert all(one["environment/turns"] >= 1 for one in values)


@pytest.mark.slow
def test_a_script_of_verl_with_an_agent_loop_trains(folder: Path, tiny_folder: Path) -> None:
    extra = (
        "actor_rollout_ref.rollout.agent.agent_loop_config_path=$PROJECT_DIR/loops.yaml "
        "actor_rollout_ref.rollout.agent.default_agent_loop=twice"
    )
    file = migrated(folder, VERL.replace("EXTRA", extra), f"MODEL={tiny_folder}", "NAME=loop")
    recipe = load_recipe(str(file))
    assert recipe.rollout.environment == f"verl:{folder}/loops.yaml"
    assert recipe.rollout.environment_args == {"default": "twice"}
    assert recipe.reward.weights == {"rule": 1.0}
    assert run("train", file, "rollout.turn_tokens=20", "checkpoint.every=null", "run.export=false") == 0
    values = steps(folder / "runs" / "loop")
    assert [one["environment/turns"] for one in values] == [2.0, 2.0]
    # The mean response has the tokens of both turns; the tokens between them have no loss.
    assert all(one["environment/tokens"] > 0 for one in values)
    assert any(one["reward/environment/mean"] > 0 for one in values)


@pytest.mark.slow
def test_a_script_of_openrlhf_with_an_agent_trains(folder: Path, tiny_folder: Path) -> None:
    file = migrated(folder, OPENRLHF, f"MODEL={tiny_folder}")
    recipe = load_recipe(str(file))
    assert recipe.rollout.environment == "openrlhf:agent_func.py"
    assert recipe.data.template == "none"  # no --data.apply_chat_template: the agent writes all marks
    words = ("device=cpu", "rollout.turn_tokens=12", "checkpoint.every=null", "run.export=false")
    assert run("train", file, *words) == 0
    values = steps(folder / "runs" / "agent")
    assert len(values) == 2
    assert [one["environment/turns"] for one in values] == [2.0, 2.0]
    assert [one["environment/steps"] for one in values] == [2.0, 2.0]
    assert [one["environment/scores"] for one in values] == [1.0, 1.0]
    # The feedback has 8 characters, each a token of the tiny model, once in each trajectory.
    assert [one["environment/tokens"] for one in values] == [8.0, 8.0]
