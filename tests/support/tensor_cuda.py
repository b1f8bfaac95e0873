"""What each rank of test_cuda_tensor.py does: two of them divide models on one NVIDIA device.

Started by torchrun. NCCL wants a device for each rank, so gloo carries what they say. With words it is `lockstep`.
"""

from __future__ import annotations

import os
import sys

import torch
from transformers import PreTrainedConfig, Qwen2Config, Qwen3Config

from lockstep.device.base import Device
from lockstep.device.cuda import Cuda
from lockstep.device.select import DEVICES
from lockstep.model.check import build_miniature
from lockstep.model.decoder import inner_decoder
from lockstep.model.policy import Policy
from lockstep.model.tensor_plan import styles_of
from lockstep.model.tensor_trial import try_division
from lockstep.parallel.mesh import sharding_of
from lockstep.parallel.tensor import TensorGroup, divide
from lockstep.parallel.world import joined
from lockstep.recipe.online import RolloutSettings
from lockstep.recipe.parallel import Parallel
from lockstep.rollout.native.engine import NativeEngine
from lockstep.types import Completion, Request, Sampling

MODELS = (Qwen2Config(), Qwen3Config(num_key_value_heads=8))


class Shared(Cuda):
    collective = "gloo"


def generated(policy: Policy, device: Device) -> list[Completion]:
    engine = NativeEngine(policy, device, RolloutSettings(), str)
    requests = [Request([3 + number, 7, 11], number, 2) for number in range(5)]
    made = engine.generate(requests, Sampling(max_tokens=12, seed=3))
    return sorted(made, key=lambda one: (one.request, one.sample))


def check_engine(config: PreTrainedConfig, device: Device, where: torch.device, group: TensorGroup) -> None:
    """The same tokens, by half of the heads each."""
    whole = build_miniature(config, device.attention, where, group.size).policy
    model = build_miniature(config, device.attention, where, group.size).model
    divide(model, inner_decoder(model), styles_of(model, group.size), group)
    parts = Policy(model, device.attention).eval()
    for ours, theirs in zip(generated(parts, device), generated(whole, device), strict=True):
        assert ours.ids == theirs.ids
        torch.testing.assert_close(torch.tensor(ours.logprobs), torch.tensor(theirs.logprobs), rtol=0, atol=1e-3)
    heads = whole.decoder.cached_shape()[1]
    assert parts.decoder.cached_shape()[1] == heads // group.size


if __name__ == "__main__":
    os.environ["LOCAL_RANK"] = "0"
    if sys.argv[1:]:
        from lockstep.cli import main

        DEVICES["cuda"] = Shared
        main()
    else:
        own = Shared()
        with joined(own) as world:
            sharding = sharding_of(Parallel(tensor=world.size), own, world)
            assert sharding is not None
            assert sharding.tensor is not None
            for one in MODELS:
                try_division(one, own.attention, sharding.device, sharding.tensor)
                check_engine(one, own, sharding.device, sharding.tensor)
