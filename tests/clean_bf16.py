"""Fifty bf16 replays without a fault, each with a different correct rounding."""

from __future__ import annotations

from dataclasses import dataclass

from fault_modules import fused, in_parts, other_arithmetic
from fault_scene import Inject, Scene


def as_it_is(scene: Scene) -> None:
    """Nothing is put into the replay."""


def fused_in_parts(scene: Scene) -> None:
    fused(scene)
    in_parts(scene)


@dataclass(frozen=True)
class Repeat:
    recipe: str
    how: str
    words: tuple[str, ...] = ()
    threads: int = 1
    inject: Inject = as_it_is

    @property
    def name(self) -> str:
        return f"{self.recipe}-{self.how}".replace(" ", "-")


HOW: dict[str, dict[str, object]] = {
    "small micro-batches": {"words": ("batch.tokens=128",)},
    "padded by two": {"words": ("batch.micro_batch_size=2", "batch.tokens=null")},
    "gradient checkpointing": {"words": ("model.gradient_checkpointing=true", "batch.tokens=160")},
    "two threads": {"words": ("batch.tokens=200",), "threads": 2},
    "plain attention": {"words": ("model.attention=sdpa", "batch.tokens=300")},
    "sums in double": {"words": ("batch.tokens=200",), "inject": other_arithmetic},
    "products in parts": {"words": ("batch.tokens=2048",), "inject": in_parts},
}
METHODS = ("sft", "dpo", "kto", "rm", "grpo", "ppo")
REPEATS = [
    # bf16 against bf16.
    *(Repeat(f"{method}-bf16", how, **keys) for method in METHODS for how, keys in HOW.items()),  # type: ignore[arg-type]
    Repeat("sft-bf16", "fused kernels", ("batch.tokens=200",), inject=fused),
    Repeat(
        "dpo-bf16", "fused kernels in parts", ("batch.micro_batch_size=2", "batch.tokens=null"), inject=fused_in_parts
    ),
    Repeat("grpo-bf16", "fused kernels", ("batch.tokens=200",), inject=fused),
    Repeat("ppo-bf16", "fused kernels in parts", ("batch.tokens=200",), inject=fused_in_parts),
    Repeat("grpo-bf16", "transformers' engine", ("rollout.engine=hf",)),
    # bf16 against fp32.
    *(Repeat(method, "bf16 of fp32", ("model.dtype=bf16", "batch.tokens=200")) for method in ("sft", "dpo", "grpo")),
]
QUICK = {"sft-bf16-fused-kernels", "sft-bf16-of-fp32"}
