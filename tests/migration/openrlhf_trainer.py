"""Five steps by OpenRLHF itself: its actors' models, strategy, experience maker, replay buffer and trainers.

A program of its own, because it starts a process group. Ray would place the actors; here they are called directly.
DeepSpeed is not there: `Engine` does what its engine does in fp32 on one rank, and says so where it does it.
"""

from __future__ import annotations

import importlib
import os
import socket
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import transformers

from . import peers


class Engine(torch.nn.Module):
    """DeepSpeed's engine: gradients of micro-batches are averaged, clipped and applied, then the schedule advances."""

    def __init__(self, model: torch.nn.Module, optimizer: Any, scheduler: Any, config: dict[str, Any]):
        super().__init__()
        self.module, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.parts = config["train_batch_size"] // config["train_micro_batch_size_per_gpu"]
        self.clip, self.done = config["gradient_clipping"], 0

    def forward(self, *words: Any, **keys: Any) -> Any:
        return self.module(*words, **keys)

    def backward(self, loss: torch.Tensor) -> None:
        (loss / self.parts).backward()

    def step(self) -> None:
        self.done += 1
        if self.done % self.parts:
            return
        if self.clip > 0:
            torch.nn.utils.clip_grad_norm_(self.module.parameters(), self.clip)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()


def initialize(
    *, model: Any, optimizer: Any, lr_scheduler: Any, config: dict[str, Any], model_parameters: Any = None, **_: Any
) -> tuple[Any, ...]:
    if optimizer is None:
        made = config["optimizer"]
        assert made["type"] == "AdamW", made
        optimizer = torch.optim.AdamW(model_parameters, **made["params"])
        lr_scheduler = lr_scheduler(optimizer)
    engine = Engine(model, optimizer, lr_scheduler, config)
    return engine, optimizer, None, lr_scheduler


def stand_ins() -> None:
    """Inside `peers._entered`: Ray's decorator changes nothing, and DeepSpeed has the engine of this file."""
    vars(importlib.import_module("ray"))["remote"] = lambda *_, **__: lambda kind: kind
    deepspeed, adam = importlib.import_module("deepspeed"), importlib.import_module("deepspeed.ops.adam")
    vars(deepspeed)["initialize"] = initialize
    vars(deepspeed)["__version__"] = "0"
    vars(importlib.import_module("vllm"))["__version__"] = "1"
    # A GPU's kernel of the log-probabilities; without it, they have their own code.
    sys.modules["flash_attn.ops.triton.cross_entropy"] = None  # type: ignore[assignment]
    vars(adam)["FusedAdam"] = torch.optim.AdamW  # with `adam_w_mode`, which is its default


class Cpu(str):
    """The current device, which is also written into the name of a device."""

    def __format__(self, spec: str) -> str:
        return "0"


def started() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(WORLD_SIZE="1", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.distributed.init_process_group("gloo")
    torch.cuda.current_device = lambda: Cpu("cpu")
    torch.cuda.synchronize = lambda *_: None
    # 0.7.5 is older than transformers 5, whose models set this at the end of their initialisation.
    transformers.PreTrainedModel.all_tied_weights_keys = {}


class Trainer:
    def __init__(self, version: str, words: list[str], total: int):
        self.flat = version == "0.7.5"
        self.args = args = peers.openrlhf_arguments(version, "train_ppo_ray", words)
        stand_ins()
        load = importlib.import_module
        actors, critics = load("openrlhf.trainer.ray.ppo_actor"), load("openrlhf.trainer.ray.ppo_critic")
        self.makers = load("openrlhf.trainer.ppo_utils.experience_maker")
        utils = load("openrlhf.utils.utils")
        if self.flat:
            policy, value, self.beta = args.pretrain, args.critic_pretrain, args.init_kl_coef
            self.in_loss, self.kind, estimator = args.use_kl_loss, args.kl_estimator, args.advantage_estimator
            epochs = args.max_epochs
        else:
            # It loads 16 bits only; the weights are those of the file.
            for module in ("openrlhf.models.actor", "openrlhf.models.model", "openrlhf.utils.utils"):
                vars(load(module))["convert_to_torch_dtype"] = lambda _: torch.float32
            args.ds.attn_implementation = "eager"
            policy, value, self.beta = (
                args.actor.model_name_or_path,
                args.critic.model_name_or_path,
                args.algo.kl.init_coef,
            )
            self.in_loss, self.kind = args.algo.kl.use_loss, args.algo.kl.estimator
            estimator, epochs = args.algo.advantage.estimator, args.train.max_epochs
        self.strategy = strategy = utils.get_strategy(args)
        strategy.setup_distributed = self._distributed
        names = ("ActorModelRayActor", "CriticModelRayActor") if self.flat else ("PolicyModelActor", "CriticModelActor")
        self.actor = self._made(getattr(actors, names[0]), policy, total * epochs, None)
        self.reference = None
        if self.beta > 0:
            self.reference = self._made(getattr(actors, names[0]), policy, total * epochs, None)
        self.critic = None
        if estimator == "gae":
            self.critic = self._made(getattr(critics, names[1]), value, total * epochs)
        self.maker = object.__new__(self.makers.RemoteExperienceMaker)
        self.maker.strategy, self.maker.args, self.maker.advantage_estimator = strategy, args, estimator
        self.maker.kl_ctl = SimpleNamespace(value=self.beta)

    def _made(self, kind: Any, path: str, *more: Any) -> Any:
        made = object.__new__(kind)
        made._setup_distributed = lambda strategy: (setattr(made, "strategy", strategy), self._distributed())
        made.init_model_from_pretrained(self.strategy, path, *more)
        return made

    def _distributed(self, *_: Any) -> None:
        """One rank; a mesh of devices would need a GPU."""
        strategy = self.strategy
        strategy.world_size, strategy.ring_attn_rank = 1, 0
        strategy.accumulated_gradient = strategy.train_batch_size // strategy.micro_train_batch_size

    def models(self) -> dict[str, torch.nn.Module]:
        found = {"actor": self.actor.actor.model.module}
        return found if self.critic is None else {**found, "critic": self.critic.critic.module}

    def step(self, rows: list[dict[str, Any]]) -> None:
        sequences, attended, mask, rollout = padded(rows)
        whole = (sequences, mask, attended)
        old = self.actor.forward(*whole)
        reference = None if self.reference is None else self.reference.forward(*whole)
        values = None if self.critic is None else self.critic.forward(*whole)
        divergence = torch.zeros_like(old)
        if reference is not None and not self.in_loss:
            divergence = self.makers.compute_approx_kl(old, reference, kl_estimator=self.kind)
        known: dict[str, Any] = {
            "sequences": sequences,
            "attention_mask": attended,
            "action_mask": mask,
            "action_log_probs": old,
            "base_action_log_probs": reference if self.in_loss else None,
            "values": values,
            "kl": divergence,
        }
        scores, lengths = torch.tensor([row["score"] for row in rows]), mask.sum(1).float()
        counted = {"response_length": lengths, "total_length": attended.sum(1).float()}
        if self.flat:
            info = {"reward": scores.clone(), "kl": divergence.mean(1), **counted}
            experience = self.makers.Experience(**known, returns=None, advantages=None, info=info)
        else:
            more = {"rewards": scores.clone(), "index": list(range(len(rows))), "rollout_log_probs": rollout}
            experience = self.makers.Experience(**known, **more, **counted)
        (experience,) = self.maker.compute_advantages_and_returns([experience])
        for role in filter(None, (self.critic, self.actor)):
            role.trainer.replay_buffer.append(experience)
        if self.critic is not None:
            self.critic.fit()
        self.actor.fit(self.beta)


def padded(rows: list[dict[str, Any]]) -> tuple[torch.Tensor, ...]:
    """Prompts padded on the left, responses on the right, as their samples are."""
    before, after = max(len(row["prompt"]) for row in rows), max(len(row["response"]) for row in rows)
    sequences, attended = (torch.zeros(len(rows), before + after).long() for _ in range(2))
    mask, rollout = torch.zeros(len(rows), after).bool(), torch.zeros(len(rows), after)
    for i, row in enumerate(rows):
        start, length = before - len(row["prompt"]), len(row["response"])
        sequences[i, start : before + length] = torch.tensor([*row["prompt"], *row["response"]])
        attended[i, start : before + length] = 1
        mask[i, :length] = True
        rollout[i, :length] = torch.tensor(row["logprobs"])
    return sequences, attended, mask, rollout


def main(folder: Path) -> None:
    jobs, done = torch.load(folder / "jobs.pt", weights_only=True), {}
    started()
    for name, job in jobs.items():
        with peers._entered("openrlhf", job["version"]):
            trainer = Trainer(job["version"], job["words"], len(job["steps"]))
            weights: dict[str, list[Any]] = {part: [noted(model)] for part, model in trainer.models().items()}
            for rows in job["steps"]:
                trainer.step(rows)
                for part, model in trainer.models().items():
                    weights[part].append(noted(model))
            done[name] = weights
    torch.save(done, folder / "weights.pt")


def noted(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
