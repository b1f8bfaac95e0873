"""Faults that a variation must notice, as changes of lockstep's code while a run is trained.

    python trajectory_faults.py JOBS      (on every rank: trains `[fault or nothing, recipe, key, ...]`)

Each fault is one that has been made in some trainer: a mean of means, a lost row, a shared prompt that leaks, state
that a resume forgets, values that lose digits on their way to the host and back, a missing all-reduce.
"""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import job_ranks

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    break_code: Callable[[Patch], None]
    variations: tuple[str, ...]
    """Each of these notices it."""
    seed: int


def wrap(name: str, change: Callable[..., Any]) -> Callable[[Patch], None]:
    """`change(original, *arguments)` in the place of a function."""

    def apply(patch: Patch) -> None:
        original = pkgutil.resolve_name(name)
        patch.setattr(name, lambda *given, **named: change(original, *given, **named))

    return apply


def _mean_of_means(original: Any, self: Any, batches: Any, loss: Any, divisor: Any = None) -> Any:
    """Each micro-batch is divided by its own number of targets."""
    total = divisor or sum(len(batch.targets_K) for batch in batches)

    def local(output: Any, batch: Any) -> Any:
        sums = loss(output, batch)
        return replace(sums, loss=sums.loss * (total / len(batches) / max(1, len(batch.targets_K))))

    return original(self, batches, local, divisor)


def _last_batch_lost(original: Any, self: Any, batches: Any, loss: Any, divisor: Any = None) -> Any:
    return original(self, batches[:-1] or batches, loss, divisor)


def _row_lost(original: Any, examples: Any, shares: Any) -> Any:
    """The targets of the last sequence of a packed row are not trained."""
    batch = original(examples, shares)
    kept = len(batch.targets_K) - (examples[-1].targets if len(examples) > 2 else 0)
    return replace(
        batch,
        predictors_K=batch.predictors_K[torch.arange(len(batch.predictors_K)).clamp(max=kept - 1)],
    )


def _positions_continue(original: Any, examples: Any, shares: Any) -> Any:
    """Positions count through the packed row. Rotary embeddings see distances: it matters after a shared prompt."""
    batch = original(examples, shares)
    return replace(batch, position_ids_NT=torch.arange(batch.input_ids_NT.shape[1])[None])


def _sequences_joined(original: Any, examples: Any, shares: Any) -> Any:
    """Sequences of a packed row attend to those before them."""
    batch = original(examples, shares)
    return batch if any(shares) else replace(batch, lengths=(sum(batch.lengths),))


def _padding_trained(original: Any, examples: Any, pad_id: Any) -> Any:
    """Predictors are counted in rows of another width."""
    batch = original(examples, pad_id)
    return replace(
        batch, predictors_K=(batch.predictors_K - (batch.predictors_K >= batch.input_ids_NT.shape[1]).long())
    )


def _fewer_digits(original: Any, self: Any, *given: Any) -> Any:
    found = original(self, *given)
    return found.bfloat16().float() if found.is_floating_point() else found


def _other_weights(original: Any, self: Any) -> None:
    original(self)
    for parameter, _ in self.weights:
        parameter.data = parameter.data * 1.001


def _nothing(original: Any, *given: Any, **named: Any) -> None:
    return None


def _reversed(original: Any, *given: Any) -> Any:
    return original(*given)[::-1]


def _other_noise(original: Any, seed: int, key: int, sample: int) -> Any:
    return original(seed, key, sample + 1)


def _masks_drawn_again(original: Any, *given: Any, **named: Any) -> Any:
    return original(*given, **{**named, "preserve_rng_state": False})


def _earlier_call(original: Any, self: Any, call: Any) -> Any:
    """With several workers, a call gets the result of the one before it."""
    earlier, self.earlier = getattr(self, "earlier", call), call
    return original(self, call if len(self._workers) == 1 else earlier)


def _rotated_slots(original: Any, self: Any, *given: Any) -> Any:
    found = original(self, *given)
    return found if self.cache.block == 16 else found[::-1].copy()


def _shifted_rows(original: Any, self: Any, name: str, rows: Any) -> Any:
    return original(self, name, rows).roll(1)


def _later_tiles_lost(original: Any, total: Any, more: Any) -> Any:
    return original(total, more) if total is None else total


def _local_sum(original: Any, self: Any, values: Sequence[float]) -> list[float]:
    return list(values)


def _half(original: Any, self: Any, tensor: Any, *given: Any) -> Any:
    return original(self, tensor, *given) * 0.5


def _half_of_floats(original: Any, self: Any, tensor: Any, *given: Any) -> Any:
    found = original(self, tensor, *given)
    return (lambda: found() * 0.5) if callable(found) else found * 0.5


BACKWARD = "lockstep.train.step.Learner.forward_backward"
FAULTS: dict[str, Fault] = {
    "mean of means": Fault(wrap(BACKWARD, _mean_of_means), ("rows-3", "packed-small"), 0),
    "mean of means of responses": Fault(wrap(BACKWARD, _mean_of_means), ("rows-3", "packed-all"), 12),
    "last micro-batch lost": Fault(wrap(BACKWARD, _last_batch_lost), ("rows-3", "rows-all", "packed-all"), 0),
    "row lost in packing": Fault(wrap("lockstep.data.batching._packed", _row_lost), ("packed-all",), 0),
    "positions after a shared prompt": Fault(
        wrap("lockstep.data.batching._packed", _positions_continue), ("packed-small", "packed-all"), 3
    ),
    "packed rows see each other": Fault(
        wrap("lockstep.data.batching._packed", _sequences_joined), ("packed-small", "packed-all"), 0
    ),
    "predictors of padded rows": Fault(
        wrap("lockstep.data.batching._padded", _padding_trained), ("rows-3", "rows-all"), 0
    ),
    "optimizer not restored": Fault(wrap("lockstep.train.optim.Optimizer.restore", _nothing), ("resumed",), 0),
    "generators not restored": Fault(
        wrap("lockstep.train.checkpointing.Checkpointer._restore_generators", _nothing), ("resumed",), 11
    ),
    "weights not restored": Fault(wrap("lockstep.train.checkpointing.restore_weights", _nothing), ("resumed",), 20),
    "optimizer rounded on the host": Fault(
        wrap("lockstep.train.optim_offload.on_device", _fewer_digits), ("optimizer-host",), 0
    ),
    "reference changed on the host": Fault(
        wrap("lockstep.parallel.offload.Home.come", _other_weights), ("frozen-host",), 52
    ),
    "activations rounded on the host": Fault(
        wrap("lockstep.parallel.offload._Storage.arrived", _fewer_digits), ("activations-host",), 0
    ),
    "rows in the order of workers": Fault(
        wrap("lockstep.data.dataset.read_parts", _reversed), ("encoded-in-workers",), 0
    ),
    "other noise in an engine": Fault(wrap("lockstep.rollout.hf.sequence_keys", _other_noise), ("hf",), 12),
    "slots of small blocks": Fault(
        wrap("lockstep.rollout.native.runner.Runner._slots", _rotated_slots), ("engine-blocks",), 12
    ),
    "dropout drawn again for the backward pass": Fault(
        wrap("transformers.modeling_utils.checkpoint", _masks_drawn_again), ("checkpointing",), 11
    ),
    "rewards of other responses": Fault(
        wrap("lockstep.launch.process_pool.ProcessPool.submit", _earlier_call), ("reward-workers",), 22
    ),
    "gradients of later tiles lost": Fault(wrap("lockstep.kernels.tiled_mlp._added", _later_tiles_lost), ("tiled",), 0),
    "reference log-probs of other rows": Fault(
        wrap("lockstep.train.logprob_cache.LogprobCache.take", _shifted_rows), ("precomputed",), 52
    ),
}
RANK_FAULTS: dict[str, Fault] = {
    "divided by the local count": Fault(
        wrap("lockstep.parallel.world.World.sum", _local_sum),
        ("sharded-2", "copies-2", "optimizer-host-2", "weights-host-2", "host-2"),
        0,
    ),
    "ring without its neighbour": Fault(
        wrap("lockstep.parallel.context.ContextGroup.pass_on", _half_of_floats), ("ring-2",), 0
    ),
    "gathered keys lost": Fault(
        wrap("lockstep.parallel.context.ContextGroup.gather", _half_of_floats), ("gather-2",), 0
    ),
    "exchanged heads lost": Fault(wrap("lockstep.parallel.context.ContextGroup.exchange", _half), ("ulysses-2",), 0),
    "no all-reduce of a divided layer": Fault(
        wrap("lockstep.parallel.tensor.TensorGroup.sum_", lambda original, self, tensor: tensor), ("tensor-2",), 0
    ),
    "optimizer not restored": Fault(wrap("lockstep.train.optim.Optimizer.restore", _nothing), ("resumed-2",), 0),
    "gradients of later tiles lost": Fault(
        wrap("lockstep.kernels.tiled_mlp._added", _later_tiles_lost), ("tiled-2", "tiled-tensor-2"), 0
    ),
}


def main(jobs: Path) -> None:
    for name, *words in json.loads(jobs.read_text(encoding="utf-8")):
        print(name, *words, file=sys.stderr, flush=True)
        with pytest.MonkeyPatch.context() as patch:
            if name:
                RANK_FAULTS[name].break_code(patch)
            job_ranks.train(words)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
