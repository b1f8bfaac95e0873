"""Checks a model before training: lockstep's log-probs and gradients must equal transformers'.

First the architecture is tested with a small random model (`miniature.py`) in fp32. The test sequences are longer than
the sliding window and other limits of the small model. After the small model, the loaded model is tested on a few
tokens in its dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import nn

from lockstep.device.device_errors import refuse_trouble
from lockstep.errors import Problem, Refusal, first_line
from lockstep.kernels.attention.interface import ATTENTION, register_attention
from lockstep.kernels.attention.masks import BeyondCausal
from lockstep.kernels.bf16_matmul import prepare_products
from lockstep.kernels.fused import fuse
from lockstep.kernels.mixers import RECURRENT_KINDS, TOKENWISE_KINDS, layer_kinds
from lockstep.model.decoder import OUTSIDE
from lockstep.model.miniature import LIMIT, ORIGINAL_LENGTH, WORDS, miniature_config, randomise
from lockstep.model.policy import Policy, Scoring
from lockstep.model.text_model import LanguageModel, no_language_model, text_config
from lockstep.model.trials import ARCHITECTURE, LOADED_MODEL, Unfit, hardware, run_trial
from lockstep.parallel.sharding import unit_gathered
from lockstep.run.console import Console
from lockstep.types import MicroBatch

# Allowed difference between lockstep's log-probs of a packed row and the log-probs of transformers, per dtype.
CHECK_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25, torch.float16: 0.1}
# Tolerances for the small model in fp32: absolute error of log-probs, relative error of gradient norms.
LOGPROB_ERROR, GRADIENT_ERROR = 2e-4, 2e-3
GRADIENT_FLOOR = 1e-4
# Allowed rounding error of lockstep in bf16 or fp16, relative to that of transformers' attention. With correct kernels,
# the ratio of the two errors is at most 1.2. With a wrong kernel that makes attention 5 % too strong, the ratio is
# above 2.3 in bf16 (llama, mistral, mixtral, qwen2).
ROUNDING_RATIO = 1.8
# The rounding error is measured on this many sets of sequences. With fewer sets, the error does not separate correct
# from wrong kernels.
ROUNDING_SETS = 6
# Test sequence lengths for the small model: within every limit, beyond the sliding window, and beyond the original
# context length of the rotary embedding.
LENGTHS = (5, LIMIT + 4, ORIGINAL_LENGTH + LIMIT + 3)
# Errors that transformers and torch raise for a model that cannot run with lockstep's attention.
RUN_ERRORS = (
    StrictDataclassError,
    TypeError,
    ValueError,
    AttributeError,
    RuntimeError,
    LookupError,
    ImportError,
    AssertionError,
)


@dataclass(frozen=True)
class Miniature:
    """A small random model of an architecture, wrapped as a policy that uses lockstep's attention."""

    policy: Policy

    @property
    def model(self) -> Any:
        return self.policy.causal_lm


def build_miniature(config: Any, kernel: str, device: torch.device, divisor: int = 1) -> Miniature:
    """Builds a small random model of the architecture in fp32. Raises `Unfit` if lockstep's attention does not support
    the architecture. The model's numbers of heads and experts and its MLP width are divisible by `divisor`."""
    register_attention()
    _refuse_other_kinds(config)
    try:
        model = _build(config, divisor)
        randomise(model)
        model.to(device).eval()
        fuse(model, kernel)
        return Miniature(Policy(model, kernel).eval())
    except BeyondCausal as error:
        raise Unfit(str(error)) from error
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        raise Unfit(f"its layers cannot be run with our attention: {first_line(error)}") from error


def _refuse_other_kinds(config: Any) -> None:
    if reason := no_language_model(config):
        raise Unfit(reason)
    known = RECURRENT_KINDS | TOKENWISE_KINDS
    kinds = [kind for kind in layer_kinds(text_config(config)) if kind not in known]
    others = sorted(kind for kind in kinds if "attention" not in kind and not kind.endswith("_sparse"))
    if others:
        raise Unfit(f"its layers of kind {', '.join(others)} are neither attention nor a known recurrence")


def _build(config: Any, divisor: int) -> Any:
    try:
        small = miniature_config(config, divisor, towers=False)
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)  # only the CPU generator is forked, so only it may be seeded
            return LanguageModel.from_config(
                small, dtype=torch.float32, attn_implementation=ATTENTION, trust_remote_code=False
            )
    except RUN_ERRORS as error:
        if isinstance(error, KeyError) and error.args == (ATTENTION,):
            # The model does not use the attention registry of transformers.
            raise Unfit(OUTSIDE) from error
        why = " ".join(str(error).split())
        raise Unfit(f"it cannot be checked, since no small {config.model_type} can be built: {why[:200]}") from error


def try_architecture(miniature: Miniature) -> None:
    """Compares log-probs (packed and padded) and the gradient of every parameter with those of transformers."""
    sequences = [tokens(length, WORDS) for length in LENGTHS]
    policy, device = miniature.policy, next(miniature.policy.parameters()).device
    try:
        theirs, wanted = _reference_gradients(miniature.model, sequences, device)
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        raise Unfit(f"transformers itself cannot run it on plain tokens: {first_line(error)}") from error
    for kind, batch in (("packed", packed_row(sequences, device)), ("padded", _padded_rows(sequences, device))):
        try:
            policy.zero_grad(set_to_none=True)
            with torch.enable_grad():
                ours = policy(batch).logprobs_K
                (ours * weights_of(len(ours), device)).sum().backward()
        except RUN_ERRORS as error:
            refuse_trouble(error, device)
            raise Unfit(f"it cannot be run {kind}: {first_line(error)}") from error
        _compare_logprobs(kind, ours.detach(), theirs)
        _compare_gradients(kind, policy.causal_lm, wanted)


def _compare_logprobs(kind: str, ours: torch.Tensor, theirs: torch.Tensor) -> None:
    for length, one, other in zip(LENGTHS, *(x.split([n - 1 for n in LENGTHS]) for x in (ours, theirs)), strict=True):
        difference = (one - other).abs()
        if not difference.max() <= LOGPROB_ERROR:
            token = int((~(difference <= LOGPROB_ERROR)).nonzero()[0]) + 1
            raise Unfit(
                f"{kind} log-probs differ from those of transformers by up to {difference.max():.2g}, from token "
                f"{token} of a sequence of {length} on (windows and other limits scaled to {LIMIT} tokens)"
            )


def _compare_gradients(kind: str, model: nn.Module, wanted: dict[str, torch.Tensor | None]) -> None:
    # The relative error of a gradient that is 0 except for rounding (a key's bias) means nothing, so errors are divided
    # by at least `least`.
    least = GRADIENT_FLOOR * max(float(found.norm()) for found in wanted.values() if found is not None)
    nonzero = {name: found for name, found in wanted.items() if found is not None and float(found.norm()) > 0}
    for name, parameter in model.named_parameters():
        if name in nonzero and parameter.grad is None:
            raise Unfit(f"{name} gets no gradient, but transformers' attention gives it one")
    errors = {
        name: float((parameter.grad - nonzero[name]).norm()) / max(float(nonzero[name].norm()), least)
        for name, parameter in model.named_parameters()
        if name in nonzero and parameter.grad is not None
    }
    # A wrong gradient propagates to earlier layers. The parameter with the largest error is reported, because the error
    # is largest at its source.
    worst = max(errors, key=lambda name: errors[name] if math.isfinite(errors[name]) else math.inf)
    if not errors[worst] <= GRADIENT_ERROR:
        raise Unfit(f"the gradient of {worst} is off by {errors[worst]:.2g} of its norm when {kind}")


def _reference_gradients(
    model: Any, sequences: Sequence[list[int]], device: torch.device
) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    """Returns the log-probs and gradients that transformers computes with eager attention, one sequence at a time."""
    model.zero_grad(set_to_none=True)
    model.set_attn_implementation("eager")
    try:
        with torch.enable_grad():
            theirs = torch.cat([reference_logprobs(model, torch.tensor([ids], device=device)) for ids in sequences])
            (theirs * weights_of(len(theirs), device)).sum().backward()
    finally:
        model.set_attn_implementation(ATTENTION)
    found = {name: p.grad.clone() if p.grad is not None else None for name, p in model.named_parameters()}
    return theirs.detach(), found


def weights_of(count: int, device: torch.device) -> torch.Tensor:
    """Returns one loss weight per token. The loss weights of different tokens differ."""
    return torch.cos(torch.arange(count, dtype=torch.float32)).to(device)


def check_architecture(
    config: Any, path: str, dtype: torch.dtype, kernel: str, device: torch.device, console: Console | None = None
) -> None:
    """Raises `Refusal` for an architecture that lockstep would train wrongly. Needs no weights. A success is cached."""
    prepare_products(dtype)

    def attempt() -> Problem | None:
        try:
            _try(config, dtype, kernel, device)
        except Unfit as unfit:
            problem = wrong_kernel(
                kernel,
                device,
                str(unfit),
                lambda *how: _why_not(config, dtype, *how),
                lambda: _eager_difference(config, device),
            )
            return problem or _unsupported(path, (config.architectures or [config.model_type])[0], str(unfit))
        return None

    run_trial(ARCHITECTURE, attempt, config=config, key=(str(dtype), kernel, *hardware(device)), console=console)


# A failed check can be caused by the model or by the attention kernel of the device. To find the cause, the check is
# repeated on the device with plain torch instead of the kernel, and on the CPU.

PLAIN = "sdpa"
HOST = torch.device("cpu")
# A function that returns why a model fails the check with an attention kernel on a device, or None if it passes.
KernelCheck = Callable[[str, torch.device], str | None]


def wrong_kernel(
    kernel: str, device: torch.device, why: str, check: KernelCheck, eager: Callable[[], float]
) -> Problem | None:
    """Returns the problem if the device's attention causes the failed check, or None if the model causes it.

    `eager` returns by how much the log-probs of transformers' eager attention differ between the device and the CPU.
    """
    if kernel != PLAIN and check(PLAIN, device) is None:
        return Problem(
            f"device {device}",
            f"its attention kernel {kernel} is wrong: {why}. With model.attention={PLAIN} the same check passes here",
            f"set model.attention={PLAIN}, which is plain torch and slower. Another version of torch or of "
            "the driver may fix the kernel; `lockstep doctor` lists matching versions. A replay of a recorded run "
            "(`lockstep help replay`) writes a script that reproduces the error",
            code="wrong-kernel",
        )
    if device.type == HOST.type or check(PLAIN, HOST) is not None:
        return None
    difference, kinds = eager(), " and with ".join(dict.fromkeys((kernel, PLAIN)))
    return Problem(
        f"device {device}",
        f"attention is wrong on this device with {kinds}: {why}. On the CPU the same check passes; transformers' eager "
        f"attention on this device differs from that on the CPU by {difference:.2g} nats",
        "no setting of model.attention helps: run `lockstep doctor` for matching versions of torch and the driver, "
        "or train with device=cpu",
        code="wrong-kernel",
    )


def _try(config: Any, dtype: torch.dtype, kernel: str, device: torch.device) -> None:
    miniature = build_miniature(config, kernel, device)
    try_architecture(miniature)
    if dtype != torch.float32:
        try_dtype(miniature, dtype)


def _why_not(config: Any, dtype: torch.dtype, kernel: str, device: torch.device) -> str | None:
    try:
        _try(config, dtype, kernel, device)
    except (Unfit, Refusal) as unfit:
        return str(unfit)
    return None


def _eager_difference(config: Any, device: torch.device) -> float:
    """Returns the maximum difference between the log-probs of transformers' eager attention on the device and on the
    CPU."""
    sequences = [tokens(length, WORDS) for length in LENGTHS]
    found = []
    for one in (device, torch.device("cpu")):
        model = build_miniature(config, PLAIN, one).model
        found.append(_reference_gradients(model, sequences, one)[0].cpu())
    return float((found[0] - found[1]).abs().max())


@torch.no_grad()
def try_dtype(miniature: Miniature, dtype: torch.dtype) -> None:
    """Checks that lockstep's rounding error in the training dtype is about as large as that of transformers.

    The median error over tokens is compared, because rounding may route single tokens to other experts.
    """
    sequences = [tokens(length, WORDS, first) for first in range(ROUNDING_SETS) for length in LENGTHS]
    policy, model = miniature.policy, miniature.model
    device = next(policy.parameters()).device
    exact, _ = _reference_gradients(model, sequences, device)
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    policy.to(dtype)
    try:
        ours = policy(packed_row(sequences, device)).logprobs_K
        model.set_attn_implementation("eager")
        theirs = torch.cat([reference_logprobs(model, torch.tensor([ids], device=device)) for ids in sequences])
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        raise Unfit(f"it cannot be run in {dtype}: {first_line(error)}") from error
    finally:
        model.set_attn_implementation(ATTENTION)
        policy.to(torch.float32)
        for parameter, weight in zip(model.parameters(), weights, strict=True):
            parameter.copy_(weight)
    off, usual = (float((found - exact).abs().median()) for found in (ours, theirs))
    if not off <= ROUNDING_RATIO * usual + torch.finfo(dtype).eps:
        raise Unfit(f"in {dtype} the median error of our log-probs is {off:.2g}, that of transformers {usual:.2g}")


@torch.no_grad()
def check_policy(policy: Policy, path: str, on: torch.device | None = None) -> None:
    """Raises `Refusal` if the log-probs of a loaded model differ from those of transformers. `on` is the compute device
    if the weights are on another device."""
    run_trial(LOADED_MODEL, lambda: _wrong_logprobs(policy, path, on))


def _wrong_logprobs(policy: Policy, path: str, on: torch.device | None) -> Problem | None:
    model = policy.causal_lm
    parameter = next(model.parameters())
    device = on or parameter.device
    vocabulary = model.get_input_embeddings().weight.shape[0]
    sequences = [tokens(length, vocabulary) for length in (5, 9)]
    name = type(model).__name__
    policy.eval()
    try:
        ours = plain_logprobs(policy, packed_row(sequences, device))
        with unit_gathered(policy), policy.generating():
            expected = [reference_logprobs(model, torch.tensor([ids], device=device)) for ids in sequences]
    except RUN_ERRORS as error:
        refuse_trouble(error, device)
        raise unsupported(path, name, f"cannot be run packed: {first_line(error)}") from error
    policy.train()
    wanted, allowed = torch.cat(expected), CHECK_TOLERANCE[parameter.dtype]
    difference = (ours - wanted).abs().max().item()
    if difference <= allowed:
        return None
    if not torch.isfinite(wanted).all():
        why = "its log-probs in transformers are not finite: some of its weights are NaN or infinite"
        raise Refusal.at(f"model.path {path}", why, "copy or download the model again", code="not-finite")
    why = f"packed log-probs differ from those of transformers by {difference:.3g}"
    plain = (_with_plain_attention(policy, packed_row(sequences, device)) - wanted).abs().max().item()
    # If the check passes with plain torch, the attention kernel is wrong, not the model.
    plain_fails = why if plain > allowed else None
    problem = wrong_kernel(policy.kernel, device, f"{name}: {why}", lambda *_: plain_fails, lambda: math.nan)
    return problem or _unsupported(path, name, why)


@torch.no_grad()
def enter(module: nn.Module, device: torch.device) -> None:
    """Runs the root module of a sharded model once. FSDP requires that the root runs before a submodule runs."""
    module(packed_row([tokens(2, 8)], device))


def unsupported(path: str, name: str, why: str) -> Refusal:
    return Refusal([_unsupported(path, name, why)])


def _unsupported(path: str, name: str, why: str) -> Problem:
    return Problem(
        f"model.path {path}",
        f"{name}: {why}",
        "use a model that `lockstep help models` lists as supported",
        code="unsupported-model",
    )


def _with_plain_attention(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    """Computes `plain_logprobs` with plain torch instead of the device's attention kernel."""
    kernel, policy.decoder.kernel = policy.decoder.kernel, PLAIN
    policy.eval()
    try:
        return plain_logprobs(policy, batch)
    finally:
        policy.decoder.kernel = kernel
        policy.train()


def plain_logprobs(policy: Policy, batch: MicroBatch) -> torch.Tensor:
    """Computes log-probs of the unmodified distribution (no temperature or truncation)."""
    scoring, policy.scoring = policy.scoring, Scoring()
    try:
        return policy(batch).logprobs_K
    finally:
        policy.scoring = scoring


def reference_logprobs(model: Any, ids_1T: torch.Tensor) -> torch.Tensor:
    logits = model(input_ids=ids_1T, use_cache=False).logits[0, :-1].float()
    return logits.log_softmax(-1).gather(-1, ids_1T[0, 1:, None])[:, 0]


def tokens(length: int, vocabulary: int, first: int = 3) -> list[int]:
    """Returns fixed token ids for tests. The token ids do not repeat with a short period."""
    return [((7 + first) * i + first + i * i // 5) % vocabulary for i in range(length)]


def packed_row(sequences: Sequence[list[int]], device: torch.device) -> MicroBatch:
    flat = [token for ids in sequences for token in ids]
    positions = [i for ids in sequences for i in range(len(ids))]
    return _micro_batch([flat], [positions], sequences, device, packed=True)


def _padded_rows(sequences: Sequence[list[int]], device: torch.device) -> MicroBatch:
    width = max(len(ids) for ids in sequences)
    rows = [ids + [0] * (width - len(ids)) for ids in sequences]
    return _micro_batch(rows, [list(range(width))] * len(rows), sequences, device, packed=False)


def _micro_batch(
    rows: list[list[int]],
    positions: list[list[int]],
    sequences: Sequence[list[int]],
    device: torch.device,
    *,
    packed: bool,
) -> MicroBatch:
    predictors: list[int] = []
    first = 0
    for ids in sequences:
        predictors += range(first, first + len(ids) - 1)
        first += len(ids) if packed else len(rows[0])
    flat = [token for row in rows for token in row]
    return MicroBatch(
        input_ids_NT=torch.tensor(rows, device=device),
        position_ids_NT=torch.tensor(positions, device=device),
        lengths=tuple(len(ids) for ids in sequences),
        packed=packed,
        predictors_K=torch.tensor(predictors, device=device),
        targets_K=torch.tensor([flat[i + 1] for i in predictors], device=device),
        index_K=torch.arange(len(predictors)),
    )
