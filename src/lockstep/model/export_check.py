"""Does an exported folder compute what the trained model computed? A few rows through plain transformers.

A checkpoint stores what the trained model gave for a few short rows (`probe_of`), computed in memory by all processes
that hold it. An export, of whatever kind and whenever it is written, is loaded by transformers (and PEFT) alone and
must give the same numbers; a folder that does not is refused before it gets its name.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.device.cpu import host_memory
from lockstep.errors import Problem, Refusal, first_line, refuse_all
from lockstep.model.check import RUN_ERRORS, line_of, own_logprobs, plain_logprobs, tokens
from lockstep.model.heads import ValueModel
from lockstep.model.policy import Policy
from lockstep.model.pretrained import pretrained, refuse_partial

# Tokens of the rows, within the context of any model.
LENGTHS = (5, 9, 13)
# Mean difference of a number, which may be as far off as rounding on two devices makes it. In bf16 and fp16 single
# tokens part further: logits are rounded too, and a token may go to another expert. Of scores of a reward model, as a
# share of the largest where that is over 1.
TOLERANCE = {torch.float32: 2e-3, torch.bfloat16: 0.15, torch.float16: 0.05}
# In bf16 and fp16, where the host has room for it in fp32: the median token of the trained model may be so many times
# as far from the export in fp32 as the export in its own dtype is, and a little more.
ROUNDING_RATIO, ROUNDING_FLOOR = 4.0, {torch.bfloat16: 0.01, torch.float16: 0.002}
# What loading takes beside the weights themselves.
MEMORY_MARGIN = 1.1
LARGE = 2**30


@dataclass(frozen=True)
class Verification:
    """What came of comparing an export with the trained model. `done` is False where it could not be compared."""

    sentence: str
    done: bool


@torch.no_grad()
def probe_of(module: Policy | ValueModel, device: torch.device) -> dict[str, Any]:
    """Rows and what the model gives for them: log-probs of a policy, the score of each row of a reward model. All
    processes that hold a part of the model must call it."""
    model = module.causal_lm if isinstance(module, Policy) else module.decoder
    rows, training = _rows(model.config.get_text_config()), module.training
    module.eval()
    try:
        # A row of a value model is one token longer: the value of a row is that at its last token.
        longer = rows if isinstance(module, Policy) else [[*ids, ids[0]] for ids in rows]
        line = line_of(longer, device)
        found = plain_logprobs(module, line) if isinstance(module, Policy) else module(line)
    finally:
        module.train(training)
    values = found.float().cpu()
    if not isinstance(module, Policy):
        values = torch.stack([part[-1] for part in values.split([len(ids) for ids in rows])])
    return {"rows": rows, "values": values.tolist()}


def _rows(config: Any) -> list[list[int]]:
    # A value model reads one token more.
    longest = (getattr(config, "max_position_embeddings", None) or 2 * max(LENGTHS)) - 1
    return [tokens(min(length, longest), config.vocab_size, first) for first, length in enumerate(LENGTHS, 3)]


def verify_export(
    folder: Path, probe: Mapping[str, Any], kind: str, dtype: torch.dtype, where: str, *, base: str | None = None
) -> Verification:
    """Refuse a folder that gives other numbers than the trained model. `kind` is that of a checkpoint: a `policy` or a
    `value` model. Of an adapter's folder `base` is the model that it is for."""
    if not probe:
        return _unverified("the checkpoint does not hold what the trained model computed: an earlier version saved it")
    wanted = torch.tensor(probe["values"])
    if not torch.isfinite(wanted).all():
        return _unverified("the trained model gives numbers that are not finite")
    needed = math.ceil(_bytes_of(Path(base or folder)) * MEMORY_MARGIN)
    if needed > LARGE:
        gc.collect()  # the model that was written may be held by a cycle of references
    free = host_memory().free
    if needed > free:
        return _unverified(
            f"loading it takes {needed / 2**30:,.1f} GiB of host memory, of which {free / 2**30:,.1f} GiB are free; "
            "`lockstep export` on a larger machine verifies it"
        )
    model = _loaded(folder, kind, dtype, where, base)
    try:
        found = _asked(model, probe["rows"], kind)
        # Both copies of a parameter are there while it is converted.
        wide = kind == "policy" and dtype in ROUNDING_FLOOR and 3 * needed <= free
        exact = _asked(model.float(), probe["rows"], kind) if wide else found
    except RUN_ERRORS as error:
        return _unverified(f"transformers cannot run it on this host: {first_line(error)}")
    return _judged(found, exact, wanted, kind, dtype, where, len(probe["rows"]))


def _judged(
    found: torch.Tensor,
    exact: torch.Tensor,
    wanted: torch.Tensor,
    kind: str,
    dtype: torch.dtype,
    where: str,
    rows: int,
) -> Verification:
    """`found` is what the export gives, `exact` the same in fp32, where that was computed, `wanted` the model's own."""
    what = "log-probs" if kind == "policy" else "scores"
    allowed = TOLERANCE[dtype] * (1.0 if kind == "policy" else max(1.0, float(wanted.abs().max())))
    off, how = float((found - wanted).abs().mean()), "in the mean"
    if exact is not found:  # what rounding alone does to this model
        allowed = max(allowed, ROUNDING_RATIO * float((found - exact).abs().mean()))
    if off <= allowed and exact is not found:
        usual, off = (float((one - exact).abs().median()) for one in (found, wanted))
        allowed, how = ROUNDING_RATIO * usual + ROUNDING_FLOOR[dtype], "in the median, from the export in fp32"
    if off <= allowed:
        told = f"verified: loaded by plain transformers it gives the trained model's {what} of {rows} rows"
        return Verification(f"{told} (they differ by {off:.2g} {how}; {allowed:.2g} is allowed)", True)
    why = (
        f"loaded by plain transformers the export gives other {what} than the trained model: they differ by {off:.3g} "
        f"{how}, and {allowed:.2g} is allowed for {str(dtype).removeprefix('torch.')}"
    )
    raise Refusal.at(where, why, "the checkpoints are untouched; please report it with the recipe")


def _unverified(why: str) -> Verification:
    return Verification(f"NOT verified against the trained model: {why}", False)


def _bytes_of(folder: Path) -> int:
    files = [*folder.glob("*.safetensors"), *folder.glob("*.bin")]
    return sum(file.stat().st_size for file in files)


def _loaded(folder: Path, kind: str, dtype: torch.dtype, where: str, base: str | None) -> Any:
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    auto = AutoModelForCausalLM if kind == "policy" else AutoModelForSequenceClassification
    what = "the export" if base is None else "the adapter's base"
    model, info = pretrained(auto, base or str(folder), where, what, dtype=dtype, output_loading_info=True)
    if base is None:
        refuse_partial(info, where)
        unused = sorted(info.get("unexpected_keys", ()))
        refuse_all([Problem(where, f"the export has {name}, which transformers does not use") for name in unused])
        return model.eval()
    from peft import PeftModel

    return PeftModel.from_pretrained(model, str(folder), autocast_adapter_dtype=False).eval()


@torch.no_grad()
def probe_of_transformers(model: Any) -> dict[str, Any]:
    """The same of a model of transformers or PEFT."""
    rows = _rows(model.config.get_text_config())
    return {"rows": rows, "values": _asked(model, rows, "policy").tolist()}


@torch.no_grad()
def _asked(model: Any, rows: list[list[int]], kind: str) -> torch.Tensor:
    asked = [torch.tensor([ids]) for ids in rows]
    if kind == "policy":
        return torch.cat([own_logprobs(model, ids) for ids in asked])
    # A row ends at its last token, also where that is the token for padding.
    model.config.get_text_config().pad_token_id = None
    return torch.cat([model(input_ids=ids).logits[:, 0].float() for ids in asked])
