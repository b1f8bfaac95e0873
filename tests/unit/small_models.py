"""Small random models of several architectures for tests of the engines, sharp enough that samples tell them apart."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lockstep.device.cpu import Cpu
from lockstep.device.select import select
from lockstep.kernels.sampling import gumbel_noise, sequence_keys
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.miniature import miniature_config
from lockstep.model.policy import Policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Lora, Model
from lockstep.rollout.engine import Engine
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Completion, Request, Sampling
from tiny_sizes import TINY

SIZES: dict[str, Any] = {**TINY, "initializer_range": 0.4, "tie_word_embeddings": False}


def uncached_config() -> Any:
    """A model that the built-in engine cannot run: DeepSeek-V4, with layers that compress keys."""
    config = miniature_config(AutoConfig.for_model("deepseek_v4"))
    config.vocab_size, config.max_position_embeddings = SIZES["vocab_size"], SIZES["max_position_embeddings"]
    return config


def write_model(folder: Path, config: Any, tokenizer_from: Path) -> Path:
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(tokenizer_from / name, folder)
    return folder


def load(folder: Path, lora: Lora | None = None) -> Policy:
    return load_policy(Model(path=str(folder), lora=lora), torch.device("cpu"), "sdpa", 0)


def native(policy: Policy, folder: Path, **settings: Any) -> NativeEngine:
    return NativeEngine(policy, select("cpu"), RolloutSettings(**settings), load_tokenizer(str(folder)).decode)


def run(engine: Engine, requests: Sequence[Request], sampling: Sampling) -> list[Completion]:
    return sorted(engine.generate(requests, sampling), key=lambda made: (made.request, made.sample))


def prompts(count: int, longest: int = 30, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


@torch.no_grad()
def slow_sample(policy: Policy, request: Request, number: int, sampling: Sampling) -> tuple[list[int], list[float]]:
    """One sample by the plainest means: the whole sequence through transformers' own forward for every token."""
    ids, logprobs = list(request.ids), []
    keys = torch.tensor([sequence_keys(sampling.seed, request.key, number)], dtype=torch.int32)
    with policy.generating() as model:
        for position in range(sampling.max_tokens):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1] / sampling.temperature
            token = (logits + gumbel_noise(keys, torch.tensor([position]), len(logits))[0]).argmax().item()
            ids.append(token)
            logprobs.append(logits.log_softmax(-1)[token].item())
            if token in sampling.stop_ids:
                break
    return ids[len(request.ids) :], logprobs


def gigabytes(blocks: int, block: int) -> float:
    """Keys and values of two layers with two heads of size 8, in fp32; half a block more for rounding."""
    return (blocks + 0.5) * block * 2 * 2 * 2 * 8 * 4 / 1e9


class Recorder(Cpu):
    """A device that records graphs, as far as the runner can tell: what is recorded runs on the same tensors."""

    graph_capture = True

    def __init__(self) -> None:
        self.captured = 0

    def capture(self, step: Callable[[], None], pool_of: Callable[[], None] | None = None) -> Callable[[], None]:
        self.captured += 1
        step()
        step()
        return step
