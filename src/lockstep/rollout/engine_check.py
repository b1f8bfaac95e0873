"""Checks that engine and trainer compute the same log-probs, with the loaded model and with a small copy of it."""

from __future__ import annotations

from typing import Any

import torch

from lockstep.data.batching import micro_batch, to_device
from lockstep.device.base import Device
from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import Problem, Refusal, first_line
from lockstep.kernels.attention.interface import ATTENTION
from lockstep.kernels.rotary import fixed_length
from lockstep.model.check import (
    CHECK_TOLERANCE,
    LOGPROB_ERROR,
    ROUNDING_RATIO,
    RUN_ERRORS,
    Miniature,
    build_miniature,
    tokens,
)
from lockstep.model.miniature import LIMIT, ORIGINAL_LENGTH, WORDS
from lockstep.model.policy import Policy, Scoring, in_fp32
from lockstep.model.text_model import placeholder_ids, text_config
from lockstep.model.trials import ENGINE, LOADED_ENGINE, Unfit, hardware, run_trial
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine import Engine, SharedWeights
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Example, MicroBatch, Origin, Request, Sampling

# Lengths for the comparison of the native engine with transformers on an fp32 miniature of the architecture. One prompt
# is shorter than every attention window, and one prompt is longer.
PROMPTS = (3, LIMIT + 3)
LONGEST = ORIGINAL_LENGTH + LIMIT


def check_engine_architecture(config: Any, kernel: str, device: Device, torch_device: torch.device) -> None:
    """Raises `Unfit` if the native engine does not generate the same tokens and log-probs as transformers. The check
    uses a miniature model, so it needs no weights. Its result is cached."""

    def attempt() -> None:
        try_engine(build_miniature(config, kernel, torch_device), device)

    run_trial(ENGINE, attempt, config=config, key=(kernel, *hardware(torch_device)))


def try_engine(miniature: Miniature, device: Device) -> None:
    """Compares the greedy tokens and log-probs of the engine with those of transformers, with and without chunked
    prefill."""
    policy = miniature.policy
    max_length = fixed_length(text_config(policy.causal_lm.config))
    longest = min(LONGEST, max_length or LONGEST)
    prompts = [tokens(length, WORDS) for length in PROMPTS]
    expected = [_greedy(policy.causal_lm, ids, longest - max(PROMPTS)) for ids in prompts]
    images = placeholder_ids(policy.causal_lm.config)
    for settings in (
        RolloutSettings(block_tokens=4),
        RolloutSettings(block_tokens=4, prefill_tokens=3, max_sequences=1),
    ):
        engine = NativeEngine(policy, device, settings, lambda ids: "")
        requests = [Request(ids, key) for key, ids in enumerate(prompts)]
        try:
            completions = list(engine.generate(requests, Sampling(max_tokens=longest - max(PROMPTS), temperature=0)))
        except RUN_ERRORS as error:
            refuse_trouble(error, next(policy.parameters()).device)
            raise Unfit(f"the engine cannot run this architecture: {first_line(error)}") from error
        for completion, (ids, logprobs) in zip(sorted(completions, key=lambda c: c.request), expected, strict=True):
            # After a placeholder transformers expects an image.
            count = next((place + 1 for place, token in enumerate(ids) if token in images), len(ids))
            made, wanted = completion.ids[:count], ids[:count]
            logprobs_engine = torch.tensor(completion.logprobs)[:count]
            difference = float((logprobs_engine - logprobs[:count]).abs().max()) if made == wanted else float("inf")
            if not difference <= LOGPROB_ERROR:
                token = next((i for i, pair in enumerate(zip(made, wanted, strict=True)) if pair[0] != pair[1]), None)
                what = f"differ by {difference:.2g}" if token is None else f"diverge at token {token} of a response"
                raise Unfit(f"the greedy tokens or log-probs of the engine and of transformers {what}")


@torch.no_grad()
def _greedy(model: Any, prompt: list[int], count: int) -> tuple[list[int], torch.Tensor]:
    """Returns the greedy tokens and log-probs of transformers as the reference; recomputes the full sequence for every
    token."""
    device = model.get_input_embeddings().weight.device
    ids, logprobs = list(prompt), []
    model.set_attn_implementation("eager")
    try:
        for _ in range(count):
            logits = model(input_ids=torch.tensor([ids], device=device), use_cache=False).logits[0, -1].float()
            ids.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1)[ids[-1]]))
    finally:
        model.set_attn_implementation(ATTENTION)
    return ids[len(prompt) :], torch.tensor(logprobs)


# The comparison of the engine with the trainer on the loaded model: sequences have at most LONGEST_TRIED tokens, and
# responses NEW_TOKENS_TRIED. One prompt has a single token, and the other prompt is as long as LONGEST_TRIED allows.
LONGEST_TRIED, NEW_TOKENS_TRIED = 25, 6
# The largest mean difference of log-probs between the trainer and generation with `rollout.precision`, or of a model
# whose rounding errors are large. The prompts of the comparison are arbitrary tokens, for which a model is less certain
# than for text.
VIEW_TOLERANCE = 0.5


@torch.no_grad()
def check_engine(engine: Engine, policy: Policy, device: torch.device, path: str, *, paged_on: Device | None) -> None:
    """Raises `Refusal` if the engine's log-probs differ from the trainer's.

    The check detects unusual attention, and layers that keep state other than keys and values. `paged_on` is the device
    of an engine marked `paged` in the registry; for such an engine, the architecture is checked first.
    """
    run_trial(LOADED_ENGINE, lambda: _engine_problem(engine, policy, device, path, paged_on))


def _engine_problem(
    engine: Engine, policy: Policy, device: torch.device, path: str, paged_on: Device | None
) -> Problem | None:
    name, remedy = type(policy.causal_lm).__name__, engine.instead
    low_precision = engine.settings.low_precision if isinstance(engine, NativeEngine) else None
    try:
        if paged_on is not None:
            check_engine_architecture(policy.causal_lm.config, policy.kernel, paged_on, device)
        engine_logprobs, trainer_logprobs, batch = _two_scores(engine, policy, device)
    except Unfit as unfit:
        return Problem(f"model.path {path}", f"{name}: {unfit}", remedy, code="unsupported-model")
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        why = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise Refusal.at(
            f"model.path {path}", f"{name} cannot be run by the engine: {why}", remedy, code="unsupported-model"
        ) from error
    difference = (trainer_logprobs - engine_logprobs).abs().max().item()
    # A sum in another order can round an activation to another code.
    allowed = CHECK_TOLERANCE[next(policy.parameters()).dtype] if policy.matmul is None else VIEW_TOLERANCE
    if not difference <= allowed and not _is_rounding(engine, policy, batch, engine_logprobs, trainer_logprobs):
        why = f"{name}: the engine's log-probabilities differ from the trainer's by {difference:.3g}"
        return Problem(f"model.path {path}", why, remedy, code="logprobs-differ")
    return None if low_precision is None else _low_precision_problem(engine, policy, device, path, low_precision)


def _is_rounding(
    engine: Engine, policy: Policy, batch: MicroBatch, engine_K: torch.Tensor, trainer_K: torch.Tensor
) -> bool:
    """Returns whether a large difference in half precision is rounding.

    In bf16, neighbouring logits around 400 differ by 2. So a correct engine can differ from the trainer of a model with
    such logits. In fp32, the same weights then give the same log-probs in the engine and in the trainer. And the
    rounding error of the engine is about as large as that of the trainer, relative to the log-probs in fp32.
    """
    half = next(policy.parameters()).dtype != torch.float32
    if not half or policy.matmul is not None or not isinstance(engine, SharedWeights):
        return False
    device = engine_K.device
    try:
        with in_fp32(policy):
            exact_K = _scores(policy, batch)
            engine_fp32_K, trainer_fp32_K, _ = _two_scores(engine, policy, device)
            engine.release_memory()  # the KV cache is in fp32
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        return False  # the weights are quantized or divided over ranks, or a kernel does not support fp32
    same = float((engine_fp32_K - trainer_fp32_K).abs().max()) <= CHECK_TOLERANCE[torch.float32]
    off, usual = (float((found_K - exact_K).abs().mean()) for found_K in (engine_K, trainer_K))
    small = float((engine_K - trainer_K).abs().mean()) <= VIEW_TOLERANCE
    return same and small and off <= ROUNDING_RATIO * usual


def _low_precision_problem(
    engine: Engine, policy: Policy, device: torch.device, path: str, precision: str
) -> Problem | None:
    """Compares generation in low precision with the trainer: a model with extreme weights or activations loses too
    much."""
    engine_logprobs, trainer_logprobs, _ = _two_scores(engine, policy, device, full_precision=False)
    difference = (trainer_logprobs - engine_logprobs).abs().mean().item()
    if difference <= VIEW_TOLERANCE:
        return None
    return Problem(
        "rollout.precision",
        f"in {precision}, {path} gives log-probabilities that differ from the trainer's by {difference:.3g} on average "
        f"(at most {VIEW_TOLERANCE})",
        "remove rollout.precision and rollout.kv_cache",
        code="logprobs-differ",
    )


def _two_scores(
    engine: Engine, policy: Policy, device: torch.device, *, full_precision: bool = True
) -> tuple[torch.Tensor, torch.Tensor, MicroBatch]:
    """Returns the log-probs of a few sampled tokens, computed by the engine and by the policy, and the batch of these
    tokens."""
    vocabulary = policy.causal_lm.get_input_embeddings().weight.shape[0]
    max_length = fixed_length(text_config(policy.causal_lm.config)) or LONGEST_TRIED
    lengths = (1, min(LONGEST_TRIED, max_length) - NEW_TOKENS_TRIED)
    prompts = [[(5 * i + 2) % vocabulary for i in range(n)] for n in lengths]
    requests = [Request(ids, key) for key, ids in enumerate(prompts)]
    sampling = Sampling(max_tokens=NEW_TOKENS_TRIED, seed=1, full_precision=full_precision)
    completions = sorted(engine.generate(requests, sampling), key=lambda c: c.request)
    rows = [
        Example(ids + c.ids, [0] * len(ids) + [1] * len(c.ids), Origin("check", 0))
        for ids, c in zip(prompts, completions, strict=True)
    ]
    batch = to_device(micro_batch(rows, packed=True, pad_id=0), device)
    engine_logprobs = torch.tensor([score for c in completions for score in c.logprobs], device=device)
    return engine_logprobs, _scores(policy, batch), batch


def _scores(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    before = policy.scoring, policy.training
    policy.scoring = Scoring()
    policy.eval()
    try:
        scores: torch.Tensor = policy(batch).logprobs_K
        return scores
    finally:
        policy.scoring = before[0]
        policy.train(before[1])
