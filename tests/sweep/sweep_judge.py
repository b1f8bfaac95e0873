"""What happens to a model folder: is it refused, or are its log-probs, gradients and greedy tokens transformers' own?

Nothing of the check at load is used to judge it: other weights, other lengths, and the micro-batches of training.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sweep_cases import Case
from transformers.models.auto.auto_factory import _get_model_class
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
)

from lockstep.data.batching import micro_batch
from lockstep.device.select import select
from lockstep.errors import Refusal
from lockstep.model.load import load_policy
from lockstep.model.miniature import VOCABULARY, miniature_config, randomise
from lockstep.model.policy import Policy
from lockstep.model.text_model import LanguageModel, placeholder_ids
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Model
from lockstep.rollout.engine_check import check_engine
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Example, Origin, Request, Sampling

CPU = torch.device("cpu")
MAPPINGS = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_MULTIMODAL_LM_MAPPING)
LENGTHS = (37, 2, 9, 23)
NEW_TOKENS = 12


@dataclass(frozen=True)
class Outcome:
    """`supported`; `training` where only the built-in engine refuses it; `refused`; `not built` where no small model
    of the class can be made; `unbuildable` where transformers cannot make a model of the class at all; `WRONG` is what
    must not be. `columns` has what is said about models with a common name."""

    status: str
    why: str = ""
    columns: dict[str, str] = field(default_factory=dict)


def small_model(case: Case) -> Any:
    # Towers are not built: the text path of their class needs none.
    small = miniature_config(case.config(), towers=False)
    torch.manual_seed(7)
    model = LanguageModel.from_config(small, attn_implementation="eager")
    randomise(model, seed=11)
    return model


def judge(case: Case, folder: Path) -> Outcome:
    torch.set_num_threads(1)
    try:
        model = small_model(case)
    except Exception as error:  # noqa: BLE001  any class may fail to be built in its own way
        own = _own_error(case)
        return Outcome("not built", _short(error)) if own is None else Outcome("unbuildable", _short(own))
    try:
        model.save_pretrained(folder)
        policy = load_policy(Model(path=str(folder)), CPU, "sdpa", 0)
    except Refusal as refusal:
        return Outcome("refused", _reason(refusal))
    except Exception as error:  # noqa: BLE001  what cannot be written cannot be loaded
        return Outcome("not built", _short(error))
    wrong = training_error(policy)
    if wrong:
        return Outcome("WRONG", wrong)
    engine = NativeEngine(policy, select("cpu"), RolloutSettings(block_tokens=8), lambda ids: "")
    try:
        check_engine(engine, policy, CPU, str(folder), paged_on=engine.device)
    except Refusal as refusal:
        return Outcome("training", _reason(refusal))
    wrong = _generation(policy, engine)
    return Outcome("WRONG", wrong) if wrong else Outcome("supported")


def _own_error(case: Case) -> Exception | None:
    """The error of transformers itself when it builds the full-sized class with its towers, or None."""
    try:
        config = case.config()
        kind = next((_get_model_class(config, mapping) for mapping in MAPPINGS if type(config) in mapping), None)
        if kind is None:
            return ValueError("no Auto class of transformers builds it from its configuration")
        with torch.device("meta"):
            kind._from_config(config)
    except Exception as error:  # noqa: BLE001  any class may fail to be built in its own way
        return error
    return None


def sequences(policy: Policy) -> list[list[int]]:
    config = policy.causal_lm.config
    generator = torch.Generator().manual_seed(5)
    words = torch.tensor([token for token in range(VOCABULARY) if token not in placeholder_ids(config)])
    return [words[torch.randint(0, len(words), (length,), generator=generator)].tolist() for length in LENGTHS]


def _own_logprobs(model: Any, ids: list[int]) -> torch.Tensor:
    logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1)[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]


def training_error(policy: Policy) -> str:
    """Log-probs and gradients, packed and padded, against transformers' eager attention on each sequence alone."""
    model = policy.causal_lm
    rows = sequences(policy)
    policy.eval()
    model.set_attn_implementation("eager")
    own = torch.cat([_own_logprobs(model, ids) for ids in rows])
    (own**2).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.set_attn_implementation("lockstep")
    largest = max(float(gradient.norm()) for gradient in gradients.values())
    examples = [Example(ids, [1] * len(ids), Origin("sweep", row)) for row, ids in enumerate(rows)]
    for packed in (True, False):
        policy.zero_grad(set_to_none=True)
        ours = policy(micro_batch(examples, packed=packed, pad_id=0)).logprobs_K
        (ours**2).sum().backward()
        apart = float((ours - own).abs().max())
        if not apart < 1e-3:
            return f"log-probs are off by {apart:.3g} ({'packed' if packed else 'padded'})"
        for name, gradient in gradients.items():
            mine = dict(model.named_parameters())[name].grad
            if mine is None:
                if not gradient.any():
                    continue  # an embedding of images or sounds, of which a text has none
                return f"{name} has no gradient"
            error = float((mine - gradient).norm()) / max(float(gradient.norm()), 1e-4 * largest)
            if not error < 1e-2:
                return f"the gradient of {name} is off by {error:.3g} of its norm"
    return ""


def _generation(policy: Policy, engine: NativeEngine) -> str:
    """Greedy tokens of the engine against transformers' forward over the whole sequence, token by token."""
    prompts = [ids[:limit] for ids, limit in zip(sequences(policy)[2:], (1, 3), strict=True)]
    requests = [Request(ids, key) for key, ids in enumerate(prompts)]
    made = sorted(engine.generate(requests, Sampling(max_tokens=NEW_TOKENS, temperature=0)), key=lambda c: c.request)
    model, images = policy.causal_lm, placeholder_ids(policy.causal_lm.config)
    model.set_attn_implementation("eager")
    try:
        for ids, completion in zip(prompts, made, strict=True):
            grown = list(ids)
            for _ in range(NEW_TOKENS):
                with torch.no_grad():
                    grown.append(int(model(input_ids=torch.tensor([grown]), use_cache=False).logits[0, -1].argmax()))
            wanted = grown[len(ids) :]
            # After a placeholder transformers expects an image.
            count = next((place + 1 for place, token in enumerate(wanted) if token in images), len(wanted))
            if completion.ids[:count] != wanted[:count]:
                return f"greedy tokens {completion.ids} against {wanted}"
    finally:
        model.set_attn_implementation("lockstep")
    return ""


def _reason(refusal: Refusal) -> str:
    return refusal.problems[0].why


def _short(error: Exception) -> str:
    said = " ".join(str(error).split())[:160]
    # A missing key says its name and nothing else.
    return said if len(said.split()) > 2 else f"transformers' own code stops with {type(error).__name__} {said}".strip()
