"""One update as OpenRLHF makes it of a command: its experience maker's advantages, its trainers' own training step."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

from .batch import Batch, Gradients, gradients
from .peers import module, openrlhf_arguments


class Strategy:
    """What the trainers ask of DeepSpeed: the gradient. There is one rank and no step of the optimizer."""

    ring_attn_group = None
    accumulated_gradient = 1
    world_size = 1

    def __init__(self, args: Any):
        self.args, self.losses = args, []  # type: ignore[var-annotated]

    def backward(self, loss: torch.Tensor, *_: Any, **__: Any) -> None:
        self.losses.append(float(loss.detach()))
        loss.backward()

    def optimizer_step(self, *_: Any, **__: Any) -> None:
        pass

    def get_grad_norm(self, *_: Any) -> float:
        return 0.0

    def print(self, *_: Any) -> None:
        pass

    def is_rank_0(self) -> bool:
        return False

    def all_reduce(self, values: Any) -> Any:
        return values


class OpenrlhfUpdate:
    def __init__(self, version: str, words: list[str], batch: Batch):
        self.version, self.batch = version, batch
        self.args = openrlhf_arguments(version, "train_ppo_ray", words)
        self.strategy = Strategy(self.args)
        self.flat = version == "0.7.5"
        self.experience = self._experience()

    def _experience(self) -> Any:
        """With the advantages and returns that the experience maker gives it."""
        batch, args = self.batch, self.args
        makers = module("openrlhf", self.version, "trainer.ppo_utils.experience_maker")
        in_loss = args.use_kl_loss if self.flat else args.algo.kl.use_loss
        estimator = args.kl_estimator if self.flat else args.algo.kl.estimator
        beta = args.init_kl_coef if self.flat else args.algo.kl.init_coef
        old, reference = batch.matrix(batch.old_K), batch.matrix(batch.reference_K)
        divergence = torch.zeros_like(old)
        if beta > 0 and not in_loss:
            divergence = makers.compute_approx_kl(old, reference, kl_estimator=estimator)
        mask = batch.mask.bool()
        known = {
            "sequences": batch.ids,
            "attention_mask": batch.attended,
            "action_mask": mask,
            "action_log_probs": old,
            "base_action_log_probs": reference if in_loss else None,
            "values": batch.matrix(batch.values_K),
            "kl": divergence,
        }
        if self.flat:
            made = makers.Experience(**known, returns=None, advantages=None, info={"reward": batch.scores.clone()})
        else:
            lengths = batch.mask.sum(1)
            more = {"rewards": batch.scores.clone(), "index": list(range(len(lengths))), "response_length": lengths}
            made = makers.Experience(**known, rollout_log_probs=old, **more)
        name = args.advantage_estimator if self.flat else args.algo.advantage.estimator
        maker = object.__new__(makers.RemoteExperienceMaker)
        maker.strategy, maker.args, maker.advantage_estimator = self.strategy, args, name
        maker.kl_ctl = SimpleNamespace(value=beta)
        self.beta = beta
        (done,) = maker.compute_advantages_and_returns([made])
        return done

    def policy(self) -> tuple[float, Gradients]:
        trainers = module("openrlhf", self.version, "trainer.ray.ppo_actor")
        actor = self.args if self.flat else self.args.actor
        if self.flat:
            loss = trainers.PolicyLoss(actor.eps_clip)
        else:
            low, high = actor.eps_clip_low_high
            over_tokens = actor.loss_agg_mode == "token-mean"
            loss = trainers.PolicyLoss(low, high, actor.dual_clip, over_tokens, actor.policy_loss_type)

        def model(*_: Any, **__: Any) -> Any:
            own, entropy = self.batch.logprobs()
            return own, SimpleNamespace(entropy=entropy)

        trainer = self._trainer(trainers.ActorPPOTrainer, actor=_Module(model), actor_loss_fn=loss)
        self.batch.model.zero_grad()
        trainer.training_step(self.experience, self.beta, *([] if self.flat else [0]))
        return self.strategy.losses[-1], gradients(self.batch.model)

    def critic(self, values_K: torch.Tensor, critic: torch.nn.Module) -> tuple[float, Gradients]:
        trainers = module("openrlhf", self.version, "trainer.ray.ppo_critic")
        clip = self.args.value_clip if self.flat else self.args.critic.value_clip
        model = _Module(lambda *_, **__: (self.batch.matrix(values_K), None))
        trainer = self._trainer(trainers.CriticPPOTrainer, critic=model, critic_loss_fn=trainers.ValueLoss(clip))
        trainer.training_step(self.experience, *([] if self.flat else [0]))
        return self.strategy.losses[-1], gradients(critic)

    def _trainer(self, kind: Any, **parts: Any) -> Any:
        trainer = object.__new__(kind)
        base = {"strategy": self.strategy, "args": self.args, "aux_loss": False, "ema_model": None}
        for name in ("actor_optim", "actor_scheduler", "critic_optim", "critic_scheduler", "replay_buffer"):
            setattr(trainer, name, MagicMock())
        for name, part in {**base, **parts}.items():
            setattr(trainer, name, part)
        return trainer


class _Module(torch.nn.Module):
    def __init__(self, call: Any):
        super().__init__()
        self.call = call

    def forward(self, *words: Any, **keys: Any) -> Any:
        return self.call(*words, **keys)
