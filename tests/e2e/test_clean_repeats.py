"""Replays without a fault: other micro-batches, packing, threads, engines and rounding raise no alarm."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest
import torch

import clean_bf16
from clean_bf16 import Repeat
from fault_modules import other_arithmetic
from fault_scene import replay_with
from lockstep.parity.replay.replay_checks import Check
from lockstep.parity.replay.replay_loop import Mode

pytestmark = pytest.mark.xdist_group("tapes")


HOW: dict[str, dict[str, object]] = {
    "small micro-batches": {"words": ("batch.tokens=128",)},
    "large micro-batches": {"words": ("batch.tokens=2048",)},
    "padded by two": {"words": ("batch.micro_batch_size=2", "batch.tokens=null")},
    "padded one by one": {"words": ("batch.micro_batch_size=1", "batch.tokens=null")},
    "gradient checkpointing": {"words": ("model.gradient_checkpointing=true", "batch.tokens=160")},
    "two threads": {"words": ("batch.tokens=200",), "threads": 2},
    "plain attention": {"words": ("model.attention=sdpa", "batch.tokens=300")},
    "other rounding": {"words": ("batch.tokens=200",), "inject": other_arithmetic},
}
RECIPES = ("sft", "dpo", "kto", "rm", "grpo", "ppo")
REPEATS = [
    *(Repeat(recipe, how, **keys) for recipe in RECIPES for how, keys in HOW.items()),  # type: ignore[arg-type]
    *(Repeat(recipe, "transformers' engine", ("rollout.engine=hf",)) for recipe in ("grpo", "ppo")),
]
# Daily: the second step of these, from recorded weights.
QUICK = {"sft-small-micro-batches"}
# Daily: all steps of these, each from the weights of the step before.
QUICK_CHAINED = {"sft-other-rounding"}


@pytest.fixture(scope="module")
def worst() -> Iterator[dict[tuple[str, str], Check]]:
    """The check closest to its tolerance by mode and stage, printed at the end."""
    found: dict[tuple[str, str], Check] = {}
    yield found
    for (mode, stage), check in sorted(found.items()):
        print(
            f"\n{mode:8} {stage:11} {check.error:.2g} of {check.allowed:.2g}: step {check.step}, {check.what}", end=""
        )
    print()


def _parameters(repeats: Iterable[Repeat], quick: set[str], modes: Sequence[Mode]) -> Iterator[object]:
    """Daily: the second step, or all steps of a chained replay. Slow: all steps of all repeats."""
    for mode in modes:
        for repeat in repeats:
            name = f"{mode}-{repeat.name}"
            chained = mode == "chained"
            if repeat.name in quick and not chained:
                yield pytest.param(repeat, mode, (2,), id=f"{name}-step-2")
            yield pytest.param(
                repeat, mode, (), id=name, marks=() if chained and repeat.name in QUICK_CHAINED else pytest.mark.slow
            )


def test_there_are_fifty() -> None:
    for repeats, quick in ((REPEATS, QUICK), (clean_bf16.REPEATS, clean_bf16.QUICK)):
        names = {repeat.name for repeat in repeats}
        assert len(names) == 50
        assert names >= quick
    assert {repeat.name for repeat in REPEATS} >= QUICK_CHAINED


@pytest.mark.daily("chained-sft-other-rounding")
@pytest.mark.parametrize(
    ("repeat", "mode", "steps"),
    [
        *_parameters(REPEATS, QUICK, ("forced", "chained")),
        *_parameters(clean_bf16.REPEATS, clean_bf16.QUICK, ("forced",)),
    ],
)
def test_a_clean_repeat_raises_no_alarm(
    repeat: Repeat,
    mode: Mode,
    steps: tuple[int, ...],
    tape: Callable[[str], Path],
    worst: dict[tuple[str, str], Check],
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(repeat.threads)
    try:
        found = replay_with(tape(repeat.recipe), repeat.inject, repeat.words, mode, steps)
    finally:
        torch.set_num_threads(threads)
    assert found is not None
    assert found.steps == (list(steps) or [1, 2, 3])
    assert found.in_step, (found.cause, found.module)
    for check in found.checks:
        before = worst.get((mode, check.stage))
        if check.allowed and (before is None or check.error / check.allowed > before.error / before.allowed):
            worst[mode, check.stage] = check
