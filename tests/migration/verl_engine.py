"""Five steps by verl 0.9.1 itself: its trainer's stages over its engine workers (FSDP, gloo, one process, fp32).

A program of its own, because it starts a process group. Ray would place the workers; here they are called directly.
"""

from __future__ import annotations

import os
import socket
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import transformers

from . import peers

VERSION = "0.9.1"
INSTALLED = ("codetiming", "torchdata", "hydra", "PIL", "flash_attn")
# These are installed and used, or verl has its own code for when one is absent.
peers.ABSENT = tuple(name for name in peers.ABSENT if name not in INSTALLED)


def main(folder: Path) -> None:
    jobs, done = torch.load(folder / "jobs.pt", weights_only=True), {}
    with peers._entered("verl", VERSION):
        vars(__import__("verl"))["DataProto"] = __import__("verl.protocol").protocol.DataProto
        started()
        for name, job in jobs.items():
            Heads.with_bias = job["bias"]
            trainer = Trainer(job["words"], len(job["steps"]))
            weights = {part: [whole(worker)] for part, worker in trainer.workers.items()}
            for rows in job["steps"]:
                trainer.step(rows)
                for part, worker in trainer.workers.items():
                    weights[part].append(whole(worker))
            done[name] = weights
    torch.save(done, folder / "weights.pt")


def whole(worker: Any) -> dict[str, torch.Tensor]:
    named, _ = worker.engine.get_per_tensor_param()
    return {name: value.detach().cpu().float().clone() for name, value in named}


def settings_of(words: list[str], total: int) -> Any:
    """The command's settings; only precision and kernels are those that a CPU has."""
    from omegaconf import OmegaConf, open_dict

    settings = peers.verl_settings(VERSION, words)
    with open_dict(settings):
        wide = {"param_dtype": "fp32", "reduce_dtype": "fp32", "buffer_dtype": "fp32"}
        part = settings.actor_rollout_ref
        for engine in (part.actor.fsdp_config, part.ref.fsdp_config, settings.critic.fsdp):
            engine.mixed_precision, engine.model_dtype, engine.use_torch_compile = wide, "fp32", False
            engine.strategy = "fsdp2"  # the other one needs a GPU
        for model in (part.model, settings.critic.model):
            model.use_remove_padding, model.enable_gradient_checkpointing = False, False
            model.override_config = {"attn_implementation": "eager"}
        part.actor.strategy = part.ref.strategy = settings.critic.strategy = "fsdp2"
        part.actor.optim.total_training_steps = settings.critic.optim.total_training_steps = total
        settings.trainer.device = "cpu"
    OmegaConf.resolve(settings)
    return settings


class Trainer:
    def __init__(self, words: list[str], total: int):
        from verl.trainer.ppo import ray_trainer
        from verl.trainer.ppo.utils import need_critic, need_reference_policy

        self.module, self.settings = ray_trainer, settings_of(words, total)
        self.trainer = object.__new__(ray_trainer.RayPPOTrainer)
        self.trainer.config, self.trainer.ref_in_actor = self.settings, False
        if self.settings.algorithm.use_kl_in_reward:
            self.trainer.kl_ctrl_in_reward = ray_trainer.core_algos.get_kl_controller(self.settings.algorithm.kl_ctrl)
        self.reference, self.critic = need_reference_policy(self.settings), need_critic(self.settings)
        self.workers = self._workers()

    def _workers(self) -> dict[str, Any]:
        from verl.workers.engine_workers import ActorRolloutRefWorker

        trainer, part = self.trainer, self.settings.actor_rollout_ref
        trainer.actor_rollout_wg = ActorRolloutRefWorker(config=part, role="actor")
        trainer.actor_rollout_wg.init_model()
        found = {"actor": trainer.actor_rollout_wg.actor}
        if self.reference:
            trainer.ref_policy_wg = ActorRolloutRefWorker(config=part, role="ref")
            trainer.ref_policy_wg.init_model()
        if self.critic:
            found["critic"] = self._critic()
            trainer.critic_wg = Group(found["critic"])
        return found

    def _critic(self) -> Any:
        from verl.utils.config import omega_conf_to_dataclass
        from verl.workers.config import TrainingWorkerConfig
        from verl.workers.engine_workers import TrainingWorker
        from verl.workers.utils.losses import value_loss

        config = omega_conf_to_dataclass(self.settings.critic)
        engine = config.engine
        engine.infer_max_token_len_per_gpu = config.ppo_infer_max_token_len_per_gpu
        engine.max_token_len_per_gpu = config.ppo_max_token_len_per_gpu
        worker = TrainingWorker(
            TrainingWorkerConfig(
                model_type="value_model",
                model_config=config.model,
                engine_config=engine,
                optimizer_config=config.optim,
                checkpoint_config=config.checkpoint,
            )
        )
        worker.reset()
        worker.set_loss_fn(partial(value_loss, config=config))
        return worker

    def step(self, rows: list[dict[str, Any]]) -> None:
        """The stages of `RayPPOTrainer.fit` between generation and validation, in their order."""
        trainer, module, algorithm = self.trainer, self.module, self.settings.algorithm
        batch = self._batch(rows)
        batch.meta_info["temperature"] = self.settings.actor_rollout_ref.rollout.temperature
        batch.meta_info["global_token_num"] = batch.batch["attention_mask"].sum(-1).tolist()
        old, _ = trainer._compute_old_log_prob(batch)
        old.batch.pop("entropys")
        batch = batch.union(old)
        if self.reference:
            batch = batch.union(trainer._compute_ref_log_prob(batch))
        if self.critic:
            batch = batch.union(trainer._compute_values(batch))
        if algorithm.use_kl_in_reward:
            batch, _ = module.apply_kl_penalty(batch, trainer.kl_ctrl_in_reward, algorithm.kl_penalty)
        else:
            batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        batch = module.compute_advantage(
            batch,
            adv_estimator=algorithm.adv_estimator,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
            num_repeat=self.settings.actor_rollout_ref.rollout.n,
            norm_adv_by_std_in_grpo=algorithm.get("norm_adv_by_std_in_grpo", True),
            config=algorithm,
        )
        if self.critic:
            trainer._update_critic(batch)
        trainer._update_actor(batch)

    def _batch(self, rows: list[dict[str, Any]]) -> Any:
        """As a rollout worker returns it: prompts padded on the left, responses on the right."""
        from verl.protocol import DataProto

        before, after = max(len(row["prompt"]) for row in rows), max(len(row["response"]) for row in rows)
        prompts, responses = torch.zeros(len(rows), before).long(), torch.zeros(len(rows), after).long()
        attended = torch.zeros(len(rows), before + after).long()
        scores = torch.zeros(len(rows), after)
        for i, row in enumerate(rows):
            start, length = before - len(row["prompt"]), len(row["response"])
            prompts[i, start:] = torch.tensor(row["prompt"])
            responses[i, :length] = torch.tensor(row["response"])
            attended[i, start : before + length] = 1
            scores[i, length - 1] = row["score"]
        tensors = {
            "prompts": prompts,
            "responses": responses,
            "input_ids": torch.cat([prompts, responses], 1),
            "attention_mask": attended,
            "position_ids": (attended.cumsum(-1) - 1).clamp(min=0),
            "response_mask": attended[:, before:],
            "token_level_scores": scores,
        }
        groups = np.array([str(row["group"]) for row in rows], dtype=object)
        return DataProto.from_dict(tensors=tensors, non_tensors={"uid": groups})


class Group:
    """A worker whose results are waited for, as those of a group of workers are."""

    def __init__(self, worker: Any):
        self.worker = worker

    def infer_batch(self, data: Any) -> Any:
        found = self.worker.infer_batch(data)
        return SimpleNamespace(get=lambda: found)

    def train_mini_batch(self, data: Any) -> Any:
        found = self.worker.train_mini_batch(data)
        return SimpleNamespace(get=lambda: found)


def cpu_platform() -> None:
    """verl lets plugins add devices; a CPU is none that it has. The engines are those of a GPU."""
    from verl.plugin.platform import platform_manager
    from verl.plugin.platform.platform_cuda import PlatformCUDA

    class Cpu(PlatformCUDA):
        device_name, vendor_name = "cpu", "none"
        device_module = SimpleNamespace(
            **dict.fromkeys(("synchronize", "empty_cache", "ipc_collect"), lambda: None),
            **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda *_: 0),
            **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda *_: 0),
            mem_get_info=lambda *_: (0, 0),
            is_available=lambda: False,
            get_device_name=lambda *_: "CPU",
        )

        def current_device(self) -> Any:
            return torch.device("cpu")

        def communication_backend_name(self) -> str:
            return "gloo"

    platform_manager.set_platform(Cpu())
    from verl.workers.engine import EngineRegistry
    from verl.workers.engine.fsdp import transformer_impl as engines

    # The reference's weights are offloaded; without a GPU there is no pinned memory.
    offloaded = engines.CPUOffloadPolicy
    engines.CPUOffloadPolicy = lambda pin_memory: offloaded(pin_memory=False)
    kinds = {"language_model": engines.FSDPEngineWithLMHead, "value_model": engines.FSDPEngineWithValueHead}
    for name, kind in kinds.items():
        EngineRegistry.register(model_type=name, backend=["fsdp", "fsdp2"], device="cpu")(kind)


class Heads:
    """How the critic is loaded: verl allows a GPU's attention kernel only. Its head's bias may be left out."""

    with_bias = True
    loaded = staticmethod(transformers.AutoModelForTokenClassification.from_pretrained)

    @classmethod
    def load(cls, *words: Any, **keys: Any) -> Any:
        model = cls.loaded(*words, **{**keys, "attn_implementation": "eager"})
        if not cls.with_bias:
            model.score.bias = None
        return model


def started() -> None:
    """What Ray sets for a worker."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    torch.distributed.init_process_group("gloo")
    transformers.AutoModelForTokenClassification.from_pretrained = Heads.load
    cpu_platform()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
