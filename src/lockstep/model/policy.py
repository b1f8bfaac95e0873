"""The policy: a causal language model that returns log-probs of given tokens, and its output head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.kernels.attention.interface import ATTENTION
from lockstep.kernels.divergence import TeacherDivergence, Whole, compared_scores, summed_squares
from lockstep.kernels.logprob import Head, Scores, TokenGrads, token_scores, uniform_token_grads
from lockstep.kernels.sampling import Truncation
from lockstep.model.decoder import Decoder, decoder_layers, own_attention
from lockstep.model.weights import NONE
from lockstep.parallel.offload import resident
from lockstep.types import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# The head of a causal language model as its configuration describes it: what stands between states and logits.

# By the beginning of a model's type, since one name can mean opposite things: what its logits are multiplied by.
FACTORS: dict[str, str] = {
    "cohere": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
    "muse_": "output_multiplier",
}
# ... and what they are divided by (or the states before the projection, which comes to the same).
DIVISORS: dict[str, str] = {
    "granite": "logits_scaling",
    "inkling": "logits_mup_width_multiplier",
    "minicpm3": "logits_scaling",
}
# Soft caps mean the same wherever they are found.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")


def output_head(model: PreTrainedModel) -> Head:
    """The projection with the scale and the soft cap of its model.

    A model whose logits are made in yet another way is told apart by the check of a loaded model.
    """
    config = model.config.get_text_config()
    projection: Any = model.get_output_embeddings()
    caps = [cap for cap in (getattr(config, name, None) for name in CAPS) if cap is not None]
    return Head(projection.weight, projection.bias, _scale(config), float(caps[0]) if caps else None)


def _scale(config: Any) -> float:
    family = config.model_type
    for prefix, name in FACTORS.items():
        if family.startswith(prefix) and getattr(config, name, None) is not None:
            return float(getattr(config, name))
    for prefix, name in DIVISORS.items():
        if family.startswith(prefix) and getattr(config, name, None) is not None:
            return 1.0 / float(getattr(config, name))
    return 1.0


# The policy: a causal language model that answers one question, the log-probability of given tokens.
#
# Scoring happens inside this module's forward, so that a sharded model has its head at hand when it is needed.


@dataclass(frozen=True)
class Scoring:
    """The distribution whose log-probabilities a policy gives: that which its responses are sampled from."""

    temperature: float = 1.0
    truncation: Truncation | None = None
    entropy: bool = False
    alike: bool = False
    """Whether the loss is a multiple of the sum of the log-probabilities: see `kernels/logprob.py`."""
    comparison: TeacherDivergence | None = None
    """With a teacher: how its distribution and the policy's are compared."""
    squares: bool = False
    """Whether a pass that does not train tells the sums of squared probabilities too."""


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM (with or without a PEFT adapter)."""

    def __init__(self, model: nn.Module, kernel: str, scoring: Scoring | None = None):
        super().__init__()
        self.model = model
        self.kernel = kernel
        self.scoring = scoring or Scoring()
        self.digits = NONE
        self.unused: tuple[str, ...] = ()
        """Tensors of the model's files that the model does not have."""
        self.decoder = Decoder(self.causal_lm, kernel)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model inside, adapter layers included."""
        get_base = getattr(self.model, "get_base_model", None)
        return get_base() if get_base is not None else self.model

    @property
    def alike_up_to(self) -> int | None:
        """Up to how many tokens a beginning is the same whatever follows it; None: always."""
        return self.decoder.alike_up_to

    @property
    def stored(self) -> nn.Module:
        """The module whose trained weights a checkpoint holds."""
        return self.model

    def layers(self) -> list[nn.Module]:
        """The blocks that transformers says must stay whole: the decoder layers, which are sharded one by one."""
        return decoder_layers(self.causal_lm)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def states(self, batch: MicroBatch) -> torch.Tensor:
        """The last layer's output for the whole line."""
        return self.decoder(batch)

    def forward(self, batch: MicroBatch, *, whole: bool = False) -> Scores | Whole:
        """Log-probabilities of `batch.targets_K`, fp32, and entropies where the scoring asks for them; or, `whole`, all
        that is needed for the whole distributions."""
        hidden = self.states(batch)
        # Only positions that predict a trained token go through the vocabulary projection.
        hidden_KH = hidden.flatten(0, 1).index_select(0, batch.predictors_K)
        head = output_head(self.causal_lm)
        if whole:
            return Whole(hidden_KH, head)
        if batch.teacher is not None and self.scoring.comparison is not None:
            with torch.no_grad():
                taught = batch.teacher(batch)
            scores = compared_scores(hidden_KH, head, batch.targets_K, taught, self.scoring.comparison)
        else:
            scores = token_scores(
                hidden_KH,
                head,
                batch.targets_K,
                temperature=self.scoring.temperature,
                truncation=self.scoring.truncation,
                # A loss is taken of a policy that trains, and an entropy is read with it; a probe, which weighs targets
                # differently, goes through one that does not.
                entropy=self.scoring.entropy and self.training,
                token_grads=self._token_grads(batch) if self.training else None,
            )
        if self.scoring.squares and not self.training:
            scores = scores._replace(squares_K=self._squares(hidden_KH, head, batch.targets_K))
        # Keeps every parameter in the graph where a device's share of an update is empty: the sharded backward
        # is a collective that all devices must enter.
        return scores if len(batch.targets_K) else scores._replace(logprobs_K=scores.logprobs_K + hidden.sum() * 0)

    def _squares(self, hidden_KH: torch.Tensor, head: Head, targets_K: torch.Tensor) -> torch.Tensor:
        if head.weight_VH.shape[0] < self.causal_lm.config.get_text_config().vocab_size:
            raise Refusal.at(
                "algorithm.advantage",
                "sums the squares of all words' probabilities, and this device holds a part of the vocabulary",
                "another estimator, or a head that is not divided",
            )
        settings = self.scoring
        return summed_squares(
            hidden_KH, head, targets_K, temperature=settings.temperature, truncation=settings.truncation
        )

    def _token_grads(self, batch: MicroBatch) -> TokenGrads | None:
        """None for a loss split over context ranks, unless all tokens have the same weight."""
        if self.scoring.alike:
            return uniform_token_grads
        return batch.token_grads if batch.context is None else None

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """The model that the adapter was put on: the reference of a LoRA run."""
        with self.model.disable_adapter():  # type: ignore[operator]
            yield

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """The transformers model ready for `generate`: evaluation mode and an attention with a cache."""
        model, training = self.causal_lm, self.training
        self.eval()
        model.set_attn_implementation(own_attention(model))
        try:
            yield model
        finally:
            model.set_attn_implementation(ATTENTION)
            self.train(training)


class Teacher(nn.Module):
    """A frozen model whose whole distributions a student is compared with."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def layers(self) -> list[nn.Module]:
        return self.policy.layers()

    def forward(self, batch: MicroBatch) -> Whole:
        with resident(self.policy):
            # By the policy's own forward: it is the root of a sharded model.
            found: Whole = self.policy(batch, whole=True)
            # What is used after this pass must be what is here now.
            head = found.head
            bias = None if head.bias_V is None else head.bias_V.detach()
            return Whole(found.hidden_KH, head._replace(weight_VH=head.weight_VH.detach(), bias_V=bias))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Without dropout."""
    module.eval()
    try:
        yield
    finally:
        module.train()
