"""The commands of the Ascend guides and of the port's scripts, whole, shrunk to the tiny model by overrides alone.

The settings themselves are those of the tables in data/migration; what is repeated behind them wins, in both grammars.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from conftest import write_jsonl
from lockstep.compat.key_table import Conversion
from lockstep.compat.openrlhf.convert_openrlhf import convert_openrlhf
from lockstep.compat.verl.convert_verl import convert_verl

TABLES = Path(__file__).parents[1] / "data" / "migration"
Rows = list[dict[str, object]]


@dataclass(frozen=True)
class Folders:
    """Where a command's files are: the model, a reward model, and the folder of its rows and runs."""

    model: Path
    reward: Path
    work: Path


def _sums() -> list[tuple[int, int]]:
    return [(a, b) for a in range(4) for b in range(3)]


def _questions(where: Folders) -> Path:
    """verl's rows of GSM8K: the question, its answer, and the answer's number."""
    rows: Rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{a}+{b}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(a + b)},
            "extra_info": {"question": f"{a}+{b}?", "answer": f"It is {a + b}.\n#### {a + b}"},
        }
        for a, b in _sums()
    ]
    return write_jsonl(where.work / "questions.jsonl", rows)


def _chats(where: Folders) -> Path:
    rows: Rows = [{"context_messages": [{"role": "user", "content": f"{a}+{b}?"}]} for a, b in _sums()]
    return write_jsonl(where.work / "chats.jsonl", rows)


def _pairs(where: Folders) -> Path:
    def chat(question: str, answer: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]

    rows: Rows = [
        {"chosen": chat(f"{a}+{b}?", str(a + b)), "rejected": chat(f"{a}+{b}?", f"{a + b + 1}!")} for a, b in _sums()
    ]
    return write_jsonl(where.work / "pairs.jsonl", rows)


def _judged(where: Folders) -> Path:
    rows: Rows = [{"instruction": f"{a}+{b}?", "response": str(a + b), "score": float(a % 2)} for a, b in _sums()]
    return write_jsonl(where.work / "judged.jsonl", rows)


def _steps(where: Folders) -> Path:
    rows: Rows = [
        {"input": f"{a}+{b}? First {a}@ then {a + b}@", "value": ["+", "+" if a % 2 else "-"]} for a, b in _sums()
    ]
    return write_jsonl(where.work / "steps.jsonl", rows)


def _grpo(where: Folders) -> list[str]:
    rows = _questions(where)
    a = "actor_rollout_ref.actor"
    return [
        f"data.train_files={rows}", f"data.val_files={rows}", f"actor_rollout_ref.model.path={where.model}",
        "data.train_batch_size=4", f"{a}.ppo_mini_batch_size=2", f"{a}.ppo_micro_batch_size_per_gpu=4",
        "data.max_response_length=6", "data.max_prompt_length=64", "actor_rollout_ref.rollout.n=2",
        "trainer.val_before_train=False", "trainer.total_training_steps=2", "trainer.n_gpus_per_node=1",
        f"trainer.default_local_dir={where.work}", "trainer.experiment_name=run",
    ]  # fmt: skip


def _lora_sft(where: Folders) -> list[str]:
    rows = _questions(where)
    return [
        f"data.train_files={rows}", f"data.val_files={rows}", f"model.partial_pretrain={where.model}",
        "data.train_batch_size=6", "data.micro_batch_size_per_gpu=2", "model.lora_rank=4", "data.max_length=128",
        f"trainer.default_local_dir={where.work}", "trainer.experiment_name=run",
    ]  # fmt: skip


def _offline(rows: Callable[[Folders], Path], *more: str) -> Callable[[Folders], list[str]]:
    def words(where: Folders) -> list[str]:
        sizes = ["--train_batch_size", "6", "--micro_train_batch_size", "2", "--max_len", "128"]
        files = ["--pretrain", str(where.model), "--dataset", str(rows(where)), "--save_path", str(where.work / "run")]
        return [*files, *sizes, *more]

    return words


def _online(where: Folders) -> list[str]:
    return [
        "--pretrain", str(where.model), "--reward_pretrain", str(where.reward), "--prompt_data", str(_chats(where)),
        "--save_path", str(where.work / "run"), "--rollout_batch_size", "6", "--train_batch_size", "3",
        "--micro_train_batch_size", "3", "--prompt_max_len", "64", "--generate_max_len", "6", "--use_wandb", "",
        "--actor_num_gpus_per_node", "1", "--critic_pretrain", str(where.model),
    ]  # fmt: skip


@dataclass(frozen=True)
class GuideCommand:
    """`table` and `case` say where its settings are; two steps are left of it by `shrunk`."""

    table: str
    case: str
    shrunk: Callable[[Folders], list[str]]
    loss: str = "train/loss"

    def converted(self, where: Folders, *more: str) -> Conversion:
        program, words = self.words(where)
        return (convert_verl if self.table == "verl" else convert_openrlhf)(program, [*words, *more])

    def words(self, where: Folders) -> tuple[str, list[str]]:
        (case,) = [
            case for case in json.loads((TABLES / f"{self.table}.json").read_text()) if case["name"] == self.case
        ]
        if self.table == "verl":
            given = [f"{key}={value}" for key, value in case["settings"].items()]
        else:
            given = [word for flag in case["flags"] for word in flag]
        return case["program"], [*given, *self.shrunk(where)]


GUIDES: dict[str, GuideCommand] = {
    "GRPO, quickstart": GuideCommand("verl", "quickstart, GRPO on 8 NPUs", _grpo, "actor/pg_loss"),
    "GRPO, 2 nodes": GuideCommand(
        "verl",
        "guide, GRPO on 2 nodes",
        lambda where: [*_grpo(where), "trainer.logger=[console]", "trainer.nnodes=1"],
        "actor/pg_loss",
    ),
    "SFT-PEFT": GuideCommand("verl", "guide, LoRA SFT", _lora_sft),
    "DPO": GuideCommand("openrlhf_flat", "scripts/train_dpo_llama", _offline(_pairs)),
    "KTO": GuideCommand("openrlhf_flat", "scripts/train_kto_llama", _offline(_judged)),
    "RM": GuideCommand("openrlhf_flat", "scripts/train_rm_llama", _offline(_pairs)),
    "PRM": GuideCommand("openrlhf_flat", "scripts/train_prm_mistral", _offline(_steps, "--placeholder_token", "@")),
    "PPO": GuideCommand("openrlhf_flat", "scripts/train_ppo_llama_ray", _online, "actor/pg_loss"),
    "REINFORCE++": GuideCommand("openrlhf_flat", "scripts/train_reinforce_llama_ray", _online, "actor/pg_loss"),
}
