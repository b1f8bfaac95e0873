"""What each rank of test_expert_runs.py does beside complete runs: models with divided experts against whole ones.

Started by torchrun, with the names of some models or for all. A rank that finds a difference ends with an error.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping

import torch
from transformers import (
    DeepseekV3Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from lockstep.device.cpu import Cpu
from lockstep.model.division.expert_plan import try_experts
from lockstep.parallel.sharding import sharding_of
from lockstep.parallel.world import World, joined
from lockstep.recipe.keys_parallel import Parallel

CPU = torch.device("cpu")
# Shared experts, a dense layer before those with experts, biases and transposed weights.
MODELS: Mapping[str, PreTrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(num_attention_heads=8, num_key_value_heads=4, decoder_sparse_step=2),
    "qwen2_moe": Qwen2MoeConfig(),
    "mixtral": MixtralConfig(),
    "deepseek_v3": DeepseekV3Config(),
    "gpt_oss": GptOssConfig(),
}


def check_models(world: World, settings: Parallel, names: list[str]) -> None:
    sharding = sharding_of(settings, Cpu(), world)
    assert sharding is not None
    assert sharding.expert is not None
    for name in names:
        print(name, settings.expert_parallel, settings.tensor_parallel, flush=True)
        try_experts(MODELS[name], "sdpa", CPU, sharding.expert)


if __name__ == "__main__":
    torch.set_num_threads(1)
    with joined(Cpu()) as here:
        wanted = sys.argv[1:] or list(MODELS)
        check_models(here, Parallel(expert_parallel=here.size), wanted)
        if here.size > 2:
            check_models(here, Parallel(expert_parallel=2), wanted)
            divisible = [name for name in wanted if name in ("qwen3_moe", "mixtral")]
            check_models(here, Parallel(expert_parallel=here.size // 2, tensor_parallel=2), divisible)
