"""The policy: a causal language model that answers one question, the log-probability of given tokens.

Scoring happens inside this module's forward, so that a sharded model has its head at hand when it is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from lockstep.errors import Refusal
from lockstep.kernels.attention import ATTENTION
from lockstep.kernels.divergence import Comparison, Whole, compared_scores
from lockstep.kernels.layout import Layout, make_layout, padded_layout
from lockstep.kernels.logprob import Scores, token_scores
from lockstep.kernels.truncate import Truncation
from lockstep.model.output_head import output_head
from lockstep.types import MicroBatch

# How far our packed log-probabilities may lie from transformers' own before the model counts as unsupported.
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}


@dataclass(frozen=True)
class Scoring:
    """The distribution whose log-probabilities a policy gives: that which its responses are sampled from."""

    temperature: float = 1.0
    truncation: Truncation | None = None
    entropy: bool = False
    comparison: Comparison | None = None
    """With a teacher: how its distribution and the policy's are compared."""


class Policy(nn.Module):
    """Wraps a Hugging Face causal LM (with or without a PEFT adapter)."""

    def __init__(self, model: nn.Module, kernel: str, scoring: Scoring | None = None):
        super().__init__()
        self.model = model
        self.kernel = kernel
        self.scoring = scoring or Scoring()

    @property
    def causal_lm(self) -> PreTrainedModel:
        """The transformers model inside, adapter layers included."""
        get_base = getattr(self.model, "get_base_model", None)
        return get_base() if get_base is not None else self.model

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
        return self.causal_lm.get_decoder()(
            input_ids=batch.input_ids_NT,
            position_ids=batch.position_ids_NT,
            use_cache=False,
            layout=layout_of(batch, self.kernel),
        ).last_hidden_state

    def forward(self, batch: MicroBatch) -> Scores:
        """Log-probabilities of `batch.targets_K`, fp32, and entropies where the scoring asks for them."""
        hidden = self.states(batch)
        # Only positions that predict a trained token go through the vocabulary projection.
        hidden_KH = hidden.flatten(0, 1).index_select(0, batch.predictors_K)
        head = output_head(self.causal_lm)
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
                entropy=self.scoring.entropy,
            )
        # Keeps every parameter in the graph where a device's share of an update is empty: the sharded backward
        # is a collective that all devices must enter.
        return scores if len(batch.targets_K) else scores._replace(logprobs_K=scores.logprobs_K + hidden.sum() * 0)

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
        model.set_attn_implementation("sdpa")
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
        hidden_KH = self.policy.states(batch).flatten(0, 1).index_select(0, batch.predictors_K)
        return Whole(hidden_KH, output_head(self.policy.causal_lm))


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    whole = set(model._no_split_modules or ())
    return [module for module in model.modules() if type(module).__name__ in whole]


def layout_of(batch: MicroBatch, kernel: str) -> Layout:
    """How the attention named `kernel` finds the sequences of a micro-batch."""
    rows, width = batch.input_ids_NT.shape
    device = batch.input_ids_NT.device
    if batch.packed:
        return make_layout(batch.lengths, device, kernel, batch.line_E)
    return padded_layout(rows, width, device, kernel)


@torch.no_grad()
def check_policy(policy: Policy, path: str) -> None:
    """Refuse a model that we would score differently from transformers itself.

    Two short packed sequences against the model's own forward, one by one: catches soft-capped or scaled logits,
    attention that looks across packed sequences, and architectures without the attention interface.
    """
    model = policy.causal_lm
    parameter = next(model.parameters())
    vocabulary = model.get_input_embeddings().weight.shape[0]
    sequences = [[(7 * i + 3) % vocabulary for i in range(n)] for n in (5, 9)]
    name = type(model).__name__
    policy.eval()
    try:
        ours = _whole(policy, _line(sequences, parameter.device))
        with policy.generating():
            own = [_own_logprobs(model, torch.tensor([ids], device=parameter.device)) for ids in sequences]
    except (TypeError, ValueError, NotImplementedError, AttributeError, RuntimeError) as error:
        raise Refusal.at(
            f"model.path {path}",
            f"{name} cannot be run packed: {str(error).splitlines()[0]}",
            "use an architecture with transformers' attention interface",
        ) from error
    policy.train()
    theirs = torch.cat(own)
    difference = (ours - theirs).abs().max().item()
    if not difference <= CHECK_TOLERANCE[parameter.dtype]:
        raise Refusal.at(
            f"model.path {path}",
            f"{name}: packed log-probabilities differ from transformers' own by {difference:.3g}",
            "its head or attention does something beyond a linear projection and causal attention; it is not supported",
        )


def _whole(policy: Policy, line: MicroBatch) -> torch.Tensor:
    """Log-probabilities of the plain distribution, whatever the policy is set to score."""
    scoring, policy.scoring = policy.scoring, Scoring()
    try:
        return policy(line).logprobs_K
    finally:
        policy.scoring = scoring


def _own_logprobs(model: Any, ids_1T: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0]


def _line(sequences: list[list[int]], device: torch.device) -> MicroBatch:
    positions = [i for ids in sequences for i in range(len(ids))]
    flat = [token for ids in sequences for token in ids]
    predictors = [i for i in range(len(flat) - 1) if positions[i + 1] > 0]
    return MicroBatch(
        input_ids_NT=torch.tensor([flat], device=device),
        position_ids_NT=torch.tensor([positions], device=device),
        lengths=tuple(len(ids) for ids in sequences),
        packed=True,
        predictors_K=torch.tensor(predictors, device=device),
        targets_K=torch.tensor([flat[i + 1] for i in predictors], device=device),
        index_K=torch.arange(len(predictors)),
    )
