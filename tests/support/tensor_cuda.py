"""What each rank of test_cuda_tensor.py does: two of them divide models on one NVIDIA device.

Started by torchrun. NCCL wants a device for each rank, so gloo carries what they say. With words it is `lockstep`.
"""

from __future__ import annotations

import os
import sys

from lockstep.device.cuda import Cuda
from lockstep.device.select import DEVICES
from lockstep.model.tensor_trial import try_division
from lockstep.parallel.mesh import sharding_of
from lockstep.parallel.world import joined
from lockstep.recipe.parallel import Parallel
from tensor_ranks import MODELS, check_engine


class Shared(Cuda):
    collective = "gloo"


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
            for one in (MODELS["qwen2"], MODELS["qwen3"]):
                try_division(one, own.attention, sharding.device, sharding.tensor)
                check_engine(one, own, sharding.device, sharding.tensor)
