"""Five updates by TRL's own trainers, on tokens and responses that are given.

A program of its own, as the other trainers are. TRL's encoding and sampling are left out: rows come encoded, in their
order, and responses come from `rollout_func`. All else is TRL's, down to the optimizer and the schedule.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from .peers import FOLDER

# A folder of its own, because verl uses TRL where it finds it.
sys.path.insert(0, str(FOLDER / "trl"))

from datasets import Dataset
from torch.utils.data import SequentialSampler
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer, TrainerCallback
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RewardConfig,
    RewardTrainer,
)


class Ready:
    """Rows that are encoded, in their order."""

    def _prepare_dataset(self, dataset: Any, *_: Any, **__: Any) -> Any:
        return dataset

    def _get_train_sampler(self, dataset: Any = None) -> Any:
        return SequentialSampler(self.train_dataset)  # type: ignore[attr-defined]


class Pairs(Ready, DPOTrainer):  # type: ignore[misc]
    pass


class Verdicts(Ready, KTOTrainer):  # type: ignore[misc]
    pass


class Rewards(Ready, RewardTrainer):  # type: ignore[misc]
    pass


class Noted(TrainerCallback):  # type: ignore[misc]
    """The weights after every `each`-th update."""

    def __init__(self, weights: list[dict[str, torch.Tensor]], each: int):
        self.weights, self.each = weights, each

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        if state.global_step % self.each == 0:
            self.weights.append(noted(model))


def noted(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def settings_of(folder: Path, job: dict[str, Any], rows: int) -> dict[str, Any]:
    updates = len(job["steps"]) * job.get("each", 1)
    return {
        "output_dir": str(folder / "out"),
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
        "disable_tqdm": True,
        "max_steps": updates,
        "per_device_train_batch_size": rows,
        **job["settings"],
    }


def trained(folder: Path, job: dict[str, Any]) -> list[dict[str, torch.Tensor]]:
    path, kind = job["model"], job["kind"]
    tokenizer = AutoTokenizer.from_pretrained(path)
    loaded = AutoModelForSequenceClassification if kind == "rm" else AutoModelForCausalLM
    how = {"dtype": torch.float32, "attn_implementation": "eager"}
    model = loaded.from_pretrained(path, **how, **({"num_labels": 1} if kind == "rm" else {}))
    settings = settings_of(folder, job, len(job["steps"][0]))
    weights = [noted(model)]
    common = {"processing_class": tokenizer, "callbacks": [Noted(weights, job.get("each", 1))]}
    rows = Dataset.from_list([row for step in job["steps"] for row in step]) if kind != "grpo" else None
    if kind == "grpo":
        trainer = grpo(model, settings, job, common)
    elif kind == "rm":
        trainer = Rewards(model=model, args=RewardConfig(**settings), train_dataset=rows, **common)
    else:
        reference = loaded.from_pretrained(path, **how)
        config, made = (DPOConfig, Pairs) if kind == "dpo" else (KTOConfig, Verdicts)
        trainer = made(model=model, ref_model=reference, args=config(**settings), train_dataset=rows, **common)
    trainer.train()
    return weights


def grpo(model: Any, settings: dict[str, Any], job: dict[str, Any], common: dict[str, Any]) -> Any:
    steps, scores = iter(job["steps"]), []  # type: ignore[var-annotated]

    def sampled(prompts: Any, trainer: Any) -> dict[str, Any]:
        rows = next(steps)
        scores.append([row["score"] for row in rows])
        names = {"prompt_ids": "prompt", "completion_ids": "response"}
        found = {name: [row[key] for row in rows] for name, key in names.items()}
        return {**found, "logprobs": [[[one] for one in row["logprobs"]] for row in rows]}

    def reward(completions: Any, **_: Any) -> list[float]:
        return scores[-1]

    how = {"dtype": "float32", "attn_implementation": "eager"}
    config = GRPOConfig(**settings, model_init_kwargs=how, shuffle_dataset=False)
    prompts = Dataset.from_list([{"prompt": f"{i}?"} for i in range(len(job["steps"]) * len(job["steps"][0]))])
    return GRPOTrainer(
        model=job["model"], reward_funcs=reward, args=config, train_dataset=prompts, rollout_func=sampled, **common
    )


def main(folder: Path) -> None:
    jobs = torch.load(folder / "jobs.pt", weights_only=True)
    done = {name: {"actor": trained(folder, job)} for name, job in jobs.items()}
    torch.save(done, folder / "weights.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
