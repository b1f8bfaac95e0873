"""How far two honest computations of the same thing may lie apart, by the coarser of their number formats.

They are shares of the size of what is compared, or, for log-probabilities, absolute. Those of fp32 are 5 to 30 times
the worst that 50 clean repeats of small models showed (`tests/e2e/test_clean_repeats.py`: other micro-batches,
packing, threads, engines, and sums in double precision, as another device has them), each from recorded weights: log-
probs 2e-6, advantages 2e-6, loss 2e-7 and its slopes 2e-6 (4e-5 at the second update of a step), gradients 8e-6, a
weight's movement by AdamW's formula 4e-7, weights 3e-3 of their movement, modules 2e-6 forwards and 5e-6 backwards.
An error of 1e-4 or 1e-2 put into the embedding grew at most 2 times in a module forwards, and 4.4 times backwards.
fp32 against bf16 showed log-probs 0.033, gradients 0.27 (of biases, in DPO, whose pairs nearly cancel) and weights
0.66. In bf16, where rounding hides faults, what is systematic has limits of its own (`systematic.py`), and a module may
be off by 1.5 % or by 2.5 times what its input is: clean pairs showed growth of 1.8 forwards and 2.4 backwards.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from lockstep.parity.replay.systematic import BF16, Limits


@dataclass(frozen=True)
class Tolerance:
    logprob: float
    """Root mean square over tokens."""
    advantage: float
    loss: float
    gradient: float
    """Of a parameter's gradient, as a share of its norm."""
    optimizer: float
    """Of a single weight's movement, by AdamW's formula from its own gradient."""
    update: float
    """Of a parameter's weights, as a share of how far the update moved them. Adam turns rounding of a gradient that is
    nearly 0 into a whole step, so this is wide."""
    module: float
    """Of a module's output, as a share of its norm."""
    growth: float
    """Times by which an error may grow from a module's input to its output."""
    systematic: Limits | None = None
    """Of what does not average out. fp32 has none: its rounding hides nothing."""


TOLERANCES = {
    "fp32": Tolerance(2e-5, 1e-4, 1e-5, 2e-4, 1e-3, 0.05, 1e-5, 10.0),
    "fp16": Tolerance(1e-2, 1e-2, 1e-2, 5e-2, 1e-3, 0.5, 1e-2, 8.0, BF16),
    "bf16": Tolerance(5e-2, 5e-2, 2e-2, 5e-1, 1e-3, 1.0, 1.5e-2, 2.5, BF16),
}
ORDER = ("fp32", "fp16", "bf16")


# Single operators that are given the same numbers: what a few roundings to their type leave. Bounds, not measured: a
# result is rounded by up to half of the type's spacing (2^-24, 2^-11, 2^-8), and a fused operator rounds once where the
# plain module rounds two to four times.
OPERATORS = {"fp32": 1e-5, "fp16": 3e-3, "bf16": 2e-2}


def operator_tolerance(dtype: str, *, backwards: bool = False) -> Tolerance:
    """For the operators of a module and of its clean copy on equal inputs. Gradients go through twice as many."""
    return replace(TOLERANCES[dtype], module=OPERATORS[dtype] * (2 if backwards else 1))


def tolerance_of(*dtypes: str) -> Tolerance:
    return TOLERANCES[max(dtypes, key=ORDER.index)]
