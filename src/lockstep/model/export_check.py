"""Verifies an exported model: plain transformers must reproduce the outputs of the trained model on a few rows.

A checkpoint stores outputs of the trained model for a few short rows (`probe_of`). Every export is loaded with only
transformers (and PEFT) and must give the stored outputs. An export with other outputs is refused before it is moved to
its final path.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lockstep.device.cpu import host_memory
from lockstep.errors import Problem, Refusal, first_line, refuse_all
from lockstep.kernels.quantized.fp8_linear import without_fp8
from lockstep.model.check import RUN_ERRORS, packed_row, plain_logprobs, reference_logprobs, tokens
from lockstep.model.decoder import own_attention
from lockstep.model.heads import ValueModel
from lockstep.model.load_folder import has_codes, load_base
from lockstep.model.policy import Policy
from lockstep.model.pretrained import pretrained, refuse_partial
from lockstep.model.text_model import FullModel, LanguageModel, text_config, writable_text_config
from lockstep.recipe.schema import Model

# Lengths of the test rows in tokens, within the context length of any model.
LENGTHS = (5, 9, 13)
# Allowed mean difference between the outputs of the export and those of the trained model. Two devices may round
# outputs differently. Single tokens may differ more in bf16 and fp16: logits are rounded, and a token may be routed to
# another expert. For reward models the tolerance is multiplied by the largest score if that is above 1.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# A second test for bf16 and fp16, if the host has memory for the export in fp32. Let r be the median difference between
# the outputs of the rounded export and the export in fp32. The median difference between the trained model and the
# export in fp32 may be ROUNDING_RATIO * r + ROUNDING_FLOOR.
ROUNDING_RATIO, ROUNDING_FLOOR = 4.0, {torch.bfloat16: 0.01, torch.float16: 0.002}
# Host memory that loading a model needs, relative to the size of its weights.
MEMORY_MARGIN = 1.1
LARGE = 2**30


@dataclass(frozen=True)
class Verification:
    """Result of the verification of an export. `done` is False if its outputs could not be compared."""

    sentence: str
    done: bool


class AdapterBase(NamedTuple):
    """The base model of an exported adapter: the model settings of the run, and the folder of the base model."""

    settings: Model
    folder: str


@torch.no_grad()
def probe_of(module: Policy | ValueModel, device: torch.device) -> dict[str, Any]:
    """Returns a few test rows and the outputs of the model: log-probs of a policy, or one score per row of a reward
    model. All ranks of a sharded model must call this function."""
    model = module.causal_lm if isinstance(module, Policy) else module.decoder
    rows, training = _rows(text_config(model.config)), module.training
    module.eval()
    try:
        # Each row gets one more token for a value model. The model returns values at positions that predict a token, so
        # the value at the last token of the row needs a next token.
        longer = rows if isinstance(module, Policy) else [[*ids, ids[0]] for ids in rows]
        line = packed_row(longer, device)
        with without_fp8(module):
            found = plain_logprobs(module, line) if isinstance(module, Policy) else module(line)
    finally:
        module.train(training)
    values = found.float().cpu()
    if not isinstance(module, Policy):
        values = torch.stack([part[-1] for part in values.split([len(ids) for ids in rows])])
    return {"rows": rows, "values": values.tolist()}


def _rows(config: Any) -> list[list[int]]:
    # One position is kept free, because `probe_of` adds a token to the rows of a value model.
    longest = (getattr(config, "max_position_embeddings", None) or 2 * max(LENGTHS)) - 1
    return [tokens(min(length, longest), config.vocab_size, first) for first, length in enumerate(LENGTHS, 3)]


def verify_export(
    folder: Path,
    probe: Mapping[str, Any],
    kind: str,
    dtype: torch.dtype,
    where: str,
    *,
    base: AdapterBase | None = None,
) -> Verification:
    """Raises `Refusal` if the model in the folder gives other outputs than the trained model (`probe`). `kind` is
    `policy` or `value`. `base` is the base model of an adapter."""
    if not probe:
        return _unverified("the checkpoint has no outputs to compare with: an earlier version saved it")
    wanted = torch.tensor(probe["values"])
    if not torch.isfinite(wanted).all():
        return _unverified("the outputs of the trained model are not finite")
    needed = math.ceil(_bytes_of(folder if base is None else Path(base.folder)) * MEMORY_MARGIN)
    if needed > LARGE:
        gc.collect()  # a reference cycle may keep the exported model in memory
    free = host_memory().free
    if needed > free:
        return _unverified(
            f"loading it takes {needed / 2**30:,.1f} GiB of host memory, of which {free / 2**30:,.1f} GiB are free; "
            "`lockstep export` on a larger machine verifies it"
        )
    model = _loaded(folder, kind, dtype, where, base)
    quantized = base is not None and has_codes(base.settings, base.folder)
    try:
        found = _outputs(model, probe["rows"], kind)
        # During the conversion to fp32 a parameter exists in both dtypes (2 and 4 bytes per value), so three times the
        # memory must be free.
        wide = kind == "policy" and dtype in ROUNDING_FLOOR and 3 * needed <= free and not quantized
        exact = _outputs(model.float(), probe["rows"], kind) if wide else found
    except RUN_ERRORS as error:
        return _unverified(f"transformers cannot run it on this host: {first_line(error)}")
    method = "quantised" if base is None else base.settings.quantize or "quantised"
    loaded = f"on the {method} weights of its base" if quantized else "loaded by plain transformers"
    return _verdict(found, exact, wanted, kind, dtype, where, f"{loaded} %s gives", len(probe["rows"]))


def _verdict(
    found: torch.Tensor,
    exact: torch.Tensor,
    wanted: torch.Tensor,
    kind: str,
    dtype: torch.dtype,
    where: str,
    gives: str,
    rows: int,
) -> Verification:
    """Compares the outputs `found` of the export with the outputs `wanted` of the trained model. `exact` are the
    outputs of the export in fp32, or `found` if these were not computed. `gives` says how the export was loaded."""
    what = "log-probs" if kind == "policy" else "scores"
    allowed = TOLERANCE[dtype] * (1.0 if kind == "policy" else max(1.0, float(wanted.abs().max())))
    off, how = float((found - wanted).abs().mean()), "in the mean"
    if exact is not found:  # `exact` and `found` differ only by rounding
        allowed = max(allowed, ROUNDING_RATIO * float((found - exact).abs().mean()))
    if off <= allowed and exact is not found:
        usual, off = (float((one - exact).abs().median()) for one in (found, wanted))
        allowed, how = ROUNDING_RATIO * usual + ROUNDING_FLOOR[dtype], "in the median, from the export in fp32"
    if off <= allowed:
        text = f"verified: {gives % 'it'} the trained model's {what} of {rows} rows"
        return Verification(f"{text} (they differ by {off:.2g} {how}; {allowed:.2g} is allowed)", True)
    why = (
        f"{gives % 'the export'} other {what} than the trained model: they differ by {off:.3g} "
        f"{how}, and {allowed:.2g} is allowed for {str(dtype).removeprefix('torch.')}"
    )
    raise Refusal.at(
        where, why, "the checkpoints are unchanged; please report this error with the recipe", code="export-differs"
    )


def _unverified(why: str) -> Verification:
    return Verification(f"NOT verified against the trained model: {why}", False)


def _bytes_of(folder: Path) -> int:
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(file.stat().st_size for file in files)


def _loaded(folder: Path, kind: str, dtype: torch.dtype, where: str, base: AdapterBase | None) -> Any:
    from transformers import AutoModelForSequenceClassification

    auto = FullModel if kind == "policy" else AutoModelForSequenceClassification
    if base is not None and has_codes(base.settings, base.folder):
        # The adapter was trained on quantised weights, so it is tested on these.
        _, model, info = load_base(LanguageModel, base.folder, base.settings, where, torch.device("cpu"), None)
        model.set_attn_implementation(own_attention(model))
    else:
        what = "the export" if base is None else "the adapter's base"
        path = str(folder) if base is None else base.folder
        model, info = pretrained(auto, path, where, what, dtype=dtype, output_loading_info=True)
    if base is None:
        refuse_partial(info, where)
        unused = sorted(info.get("unexpected_keys", ()))
        refuse_all(
            [
                Problem(where, f"the export has {name}, which transformers does not use", code="unknown-weight")
                for name in unused
            ]
        )
        return model.eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False).eval()


@torch.no_grad()
def probe_of_transformers(model: Any) -> dict[str, Any]:
    """Returns test rows and log-probs like `probe_of`, for a model of transformers or PEFT."""
    rows = _rows(text_config(model.config))
    return {"rows": rows, "values": _outputs(model, rows, "policy").tolist()}


@torch.no_grad()
def _outputs(model: Any, rows: list[list[int]], kind: str) -> torch.Tensor:
    inputs = [torch.tensor([ids]) for ids in rows]
    if kind == "policy":
        return torch.cat([reference_logprobs(model, ids) for ids in inputs])
    # If `pad_token_id` is None, the classifier scores the last token of a row, even if it is a padding token.
    writable_text_config(model.config).pad_token_id = None
    return torch.cat([model(input_ids=ids).logits[:, 0].float() for ids in inputs])
