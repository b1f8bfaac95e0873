"""The policy: a causal language model that returns log-probs of given tokens, and its output head."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from lockstep.errors import Refusal
from lockstep.kernels.attention.interface import ATTENTION
from lockstep.kernels.logit_divergence import TeacherDivergence, Whole, compared_scores, summed_squares
from lockstep.kernels.logprob import Head, Scores, TokenGrads, token_scores, uniform_token_grads
from lockstep.kernels.sampling import Truncation
from lockstep.model.adapters.active import adapters_off, as_at_start, has_start, is_kept
from lockstep.model.decoder import Decoder, own_attention, sharded_layers
from lockstep.model.text_model import is_nested, text_config
from lockstep.model.weights import NONE
from lockstep.parallel.offload import resident
from lockstep.types import MicroBatch

if TYPE_CHECKING:
    from transformers import PreTrainedModel


# Config key of the logit multiplier, by prefix of the model type. In another model the same key can be a divisor.
FACTORS: dict[str, str] = {
    "cohere": "logit_scale",
    "falcon_h1": "lm_head_multiplier",
    "hyperclovax": "logits_scaling",
    "muse_": "output_multiplier",
}
# Config key of the number by which the model divides its logits, by prefix of the model type.
DIVISORS: dict[str, str] = {
    "granite": "logits_scaling",
    "inkling": "logits_mup_width_multiplier",
    "minicpm3": "logits_scaling",
}
# Config keys of the logit soft cap, which have this meaning in all models.
CAPS = ("final_logit_softcapping", "logits_soft_cap", "output_logit_soft_cap")
# Nested models that have the output head themselves and apply the scale and soft cap of their text config, by prefix
# of the model type.
SCALED_HEADS = (
    "cohere_compass",
    "gemma3n",
    "gemma4",
    "granite4_vision",
    "hyperclovax",
    "inkling",
    "mistral_large4",
    "muse_",
)


def output_head(model: PreTrainedModel) -> Head:
    """Returns the output projection with the scale and soft cap of the model.

    If a model computes logits in another way, `check_policy` refuses it.
    """
    projection: Any = model.get_output_embeddings()
    if _head_is_plain(model, projection):
        return Head(projection.weight, projection.bias)
    config = text_config(model.config)
    caps = [cap for cap in (getattr(config, name, None) for name in CAPS) if cap is not None]
    return Head(projection.weight, projection.bias, _scale(config), float(caps[0]) if caps else None)


def _head_is_plain(model: PreTrainedModel, projection: nn.Module) -> bool:
    """Returns whether a model ignores the scale and soft cap of its text config. So do most nested models that have the
    output head themselves, for example a LLaVA with the text config of Granite."""
    own = is_nested(model.config) and any(child is projection for child in model.children())
    return own and not model.config.model_type.startswith(SCALED_HEADS)


def _scale(config: Any) -> float:
    family = config.model_type
    for prefix, name in FACTORS.items():
        if family.startswith(prefix) and getattr(config, name, None) is not None:
            return float(getattr(config, name))
    for prefix, name in DIVISORS.items():
        if family.startswith(prefix) and getattr(config, name, None) is not None:
            return 1.0 / float(getattr(config, name))
    return 1.0


@dataclass(frozen=True)
class Scoring:
    """The distribution for which log-probs are computed, which is the distribution from which responses are sampled."""

    temperature: float = 1.0
    truncation: Truncation | None = None
    entropy: bool = False
    alike: bool = False
    """Whether the loss is a multiple of the sum of the log-probs, as in SFT. See `uniform_token_grads` in
    `kernels/logprob.py`."""
    comparison: TeacherDivergence | None = None
    """Which divergence from the teacher's distribution is computed, if there is a teacher."""
    squares: bool = False
    """Whether a forward pass outside of training also returns the sums of squared probabilities."""


class Policy(nn.Module):
    """A Hugging Face causal LM (with or without a PEFT adapter) that returns log-probs of given tokens.

    Log-probs are computed inside `forward`, so that FSDP has gathered the output head of a sharded model.
    """

    def __init__(self, model: nn.Module, kernel: str, scoring: Scoring | None = None):
        super().__init__()
        self.model = model
        self.kernel = kernel
        self.scoring = scoring or Scoring()
        self.digits = NONE
        self.unused: tuple[str, ...] = ()
        """Names of tensors in the model's files that the model does not use."""
        self.matmul: str | None = None
        """The precision of the matmuls (`model.matmul`), or None for that of the weights."""
        self.decoder = Decoder(self.causal_lm, kernel)

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model, without the PEFT wrapper but with the adapter layers."""
        get_base = getattr(self.model, "get_base_model", None)
        return get_base() if get_base is not None else self.model

    @property
    def alike_up_to(self) -> int | None:
        """Sequence length up to which position embeddings, and so the results for a prefix, do not depend on the
        sequence length. The value is None if position embeddings never depend on the sequence length."""
        return self.decoder.alike_up_to

    @property
    def stored(self) -> nn.Module:
        """The module whose trained weights are written to a checkpoint."""
        return self.model

    def layers(self) -> list[nn.Module]:
        """Returns the layers, which are sharded one by one."""
        return sharded_layers(self.causal_lm)

    def trainable(self) -> Iterator[tuple[str, nn.Parameter]]:
        return ((name, p) for name, p in self.model.named_parameters() if p.requires_grad)

    def states(self, batch: MicroBatch) -> torch.Tensor:
        """Computes the hidden states of the last layer, for all tokens."""
        return self.decoder(batch)

    def forward(self, batch: MicroBatch, *, whole: bool = False) -> Scores | Whole:
        """Computes log-probs of `batch.targets_K` in fp32, with entropies if enabled. With `whole`, returns the hidden
        states and the output head instead, from which the full distributions follow."""
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
                # Entropies are needed only for the loss, so they are computed only in training mode.
                entropy=self.scoring.entropy and self.training,
                token_grads=self._token_grads(batch) if self.training else None,
            )
        if self.scoring.squares and not self.training:
            scores = scores._replace(squares_K=self._squares(hidden_KH, head, batch.targets_K))
        # If this rank has no targets, adding 0 * hidden keeps every parameter in the autograd graph, because all ranks
        # must run the sharded backward pass.
        return scores if len(batch.targets_K) else scores._replace(logprobs_K=scores.logprobs_K + hidden.sum() * 0)

    def _squares(self, hidden_KH: torch.Tensor, head: Head, targets_K: torch.Tensor) -> torch.Tensor:
        if head.weight_VH.shape[0] < text_config(self.causal_lm.config).vocab_size:
            raise Refusal.at(
                "algorithm.advantage",
                "sums the squared probabilities of all tokens, but this device has only a part of the vocabulary",
                "use another estimator, or an output head that is not split over devices",
                code="unsupported-combination",
            )
        settings = self.scoring
        return summed_squares(
            hidden_KH, head, targets_K, temperature=settings.temperature, truncation=settings.truncation
        )

    def _token_grads(self, batch: MicroBatch) -> TokenGrads | None:
        """Returns the function that computes the loss gradient of each log-prob and entropy during the forward pass, or
        None. With context parallelism, returns a function only for a loss with uniform gradients."""
        if self.scoring.alike:
            return uniform_token_grads
        return batch.token_grads if batch.context is None else None

    def kept(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yields the parameters that checkpoints and rollout workers get: the trained parameters, and the frozen
        initial adapter of PiSSA."""
        return ((name, p) for name, p in self.model.named_parameters() if is_kept(name, p))

    @contextmanager
    def without_adapter(self) -> Iterator[None]:
        """Disables the adapter inside the `with` block."""
        with adapters_off(self.model):
            yield

    @contextmanager
    def as_reference(self) -> Iterator[None]:
        """Makes the model the reference model of a LoRA run inside the `with` block: the model with the adapter with
        which the run started, if the model has a copy of this adapter, else the base model."""
        with as_at_start(self.model) if has_start(self.model) else adapters_off(self.model):
            yield

    @contextmanager
    def generating(self) -> Iterator[PreTrainedModel]:
        """Yields the transformers model prepared for `generate`: in evaluation mode, and with transformers' own
        attention, which supports a KV cache."""
        model, training = self.causal_lm, self.training
        if self.decoder.routing is not None:
            self.decoder.routing.begin(None)
        self.eval()
        model.set_attn_implementation(own_attention(model))
        try:
            yield model
        finally:
            model.set_attn_implementation(ATTENTION)
            self.train(training)


class Teacher(nn.Module):
    """A frozen model for distillation that returns full distributions."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.policy = policy

    def layers(self) -> list[nn.Module]:
        return self.policy.layers()

    def forward(self, batch: MicroBatch) -> Whole:
        with resident(self.policy):
            # The policy's `forward` is called, because the policy is the root module of a sharded model.
            found: Whole = self.policy(batch, whole=True)
            # The head is detached, because it is used after this forward pass.
            head = found.head
            bias = None if head.bias_V is None else head.bias_V.detach()
            return Whole(found.hidden_KH, head._replace(weight_VH=head.weight_VH.detach(), bias_V=bias))


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Puts the module into evaluation mode (no dropout) inside the `with` block, and back into training mode after
    it."""
    module.eval()
    try:
        yield
    finally:
        module.train()


@contextmanager
def in_fp32(policy: Policy) -> Iterator[None]:
    """Gives the policy fp32 copies of its weights inside the `with` block. A layer has its copies only while it
    runs."""
    layers = policy.layers()
    inside = {parameter for layer in layers for parameter in layer.parameters()}
    with ExitStack() as stack:
        stack.enter_context(_copied([parameter for parameter in policy.parameters() if parameter not in inside]))
        for layer in layers:
            running = ExitStack()
            stack.enter_context(running)  # if the layer fails, its hook after the forward pass does not run

            def begin(module: nn.Module, _: Any, running: ExitStack = running) -> None:
                running.enter_context(_copied(list(module.parameters())))

            def end(*_: Any, running: ExitStack = running) -> None:
                running.close()

            stack.callback(layer.register_forward_pre_hook(begin).remove)
            stack.callback(layer.register_forward_hook(end, prepend=True).remove)
        yield


@contextmanager
def _copied(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Replaces the data of half-precision parameters by fp32 copies inside the `with` block. The original data keep
    their addresses, which captured CUDA graphs use."""
    originals = [(p, p.data) for p in parameters if p.dtype in (torch.bfloat16, torch.float16)]
    try:
        for parameter, data in originals:
            parameter.data = data.float()
        yield
    finally:
        for parameter, data in originals:
            parameter.data = data
