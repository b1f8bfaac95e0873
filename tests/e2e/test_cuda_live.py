"""The engine behind `lockstep serve` on an NVIDIA device: what the batch engine answers, with recorded passes and
without."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from lockstep.device.select import select
from lockstep.model.load import load_policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Model
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.rollout.native.online_engine import LiveEngine, LiveSample
from lockstep.types import Request, Sampling
from speaker import write_speaker

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no NVIDIA device"),
]
GREEDY = Sampling(40, temperature=0.0, seed=1)
WARM = Sampling(40, temperature=0.9, top_p=0.9, seed=2)


def answered(engine: LiveEngine, orders: list[tuple[list[int], Sampling]]) -> list[list[int]]:
    """Orders that come two rounds apart; the third goes away after a while."""
    samples: list[LiveSample] = []
    waiting, rounds = list(orders), 0
    while waiting or engine.busy:
        if waiting and rounds % 2 == 0:
            ids, sampling = waiting.pop(0)
            samples += engine.add(ids, 1, sampling, key=1)
        if rounds == 9:
            engine.cancel(samples[2])
        if engine.busy:
            engine.step()
        rounds += 1
    return [sample.tokens[sample.prompt :] for sample in samples]


@pytest.mark.parametrize("mixed", [False, True])
def test_the_live_engine_answers_as_the_batch_engine(tiny_folder: Path, tmp_path: Path, mixed: bool) -> None:
    folder = write_speaker(tmp_path / "speaker", tiny_folder)
    device = select("cuda")
    policy = load_policy(Model(path=str(folder)), device.torch_device(), device.attention, seed=0)
    prompts = [[(7 * i + 3 * number) % 90 + 33 for i in range(5 + 9 * number)] for number in range(8)]
    orders = [(ids, WARM if mixed and number % 2 else GREEDY) for number, ids in enumerate(prompts)]
    batch = NativeEngine(policy, device, RolloutSettings(), lambda ids: "")
    alone = [next(iter(batch.generate([Request(ids, 1)], sampling))).ids for ids, sampling in orders]
    batch.release_memory()
    live = LiveEngine(NativeEngine(policy, device, RolloutSettings(max_sequences=8), lambda ids: ""), 200)
    before = live.free
    made = answered(live, orders)
    assert made[2] == alone[2][: len(made[2])]
    assert made[:2] + made[3:] == alone[:2] + alone[3:]
    assert live.free == before
    assert mixed or any(runner._graphs for runner in live._captured.values())
    # A request for log-probabilities among them changes nothing for the others.
    short = replace(GREEDY, max_tokens=20)
    asked = [sample for n in range(3) for sample in live.add(prompts[n], 1, short, key=1, likeliest=None if n else 3)]
    while live.busy:
        live.step()
    greedy = [next(iter(batch.generate([Request(ids, 1)], short))).ids for ids in prompts[:3]]
    assert [sample.tokens[sample.prompt :] for sample in asked] == greedy
