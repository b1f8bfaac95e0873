"""The sides of `bench/rollout.py`: responses to the same prompts by our engines, by transformers, TRL and vLLM.

Each holds its own copy of the model. `generate` gives the responses in the order of prompts and samples.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import AutoConfig, GenerationConfig

from lockstep.data.batching import micro_batch, plan_micro_batches, to_device
from lockstep.model.load import load_policy
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Model
from lockstep.rollout.hf import HfEngine
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Example, Origin, Request, Sampling
from online_work import Work, make_trainer, temporary_folder
from vllm_side import Vllm

Response = list[int]


class Ours:
    """lockstep: the native engine, or with `engine="hf"` transformers' `generate` with our sampler inside."""

    def __init__(self, work: Work, engine: str = "native"):
        self.name = "lockstep" if engine == "native" else "lockstep hf engine"
        self.work, self.calls = work, 0
        self.prompts = work.encoded()
        settings = Model.model_validate({"path": work.model, "dtype": work.dtype})
        self.torch_device = work.device.torch_device()
        self.policy = load_policy(settings, self.torch_device, work.device.attention, seed=0)
        rollout = RolloutSettings(n=work.n, max_tokens=work.max_tokens, free_cache=False)
        if engine == "native":
            self.engine: Any = NativeEngine(self.policy, work.device, rollout, str)
            self.about = f"at most {rollout.max_sequences} at once, blocks of {rollout.block_tokens} tokens"
        else:
            self.engine = HfEngine(self.policy.generating, str)
            self.about = "the engine `hf`: left-padded `generate`, 64 at once"
        self.end = _end(self.policy.causal_lm)

    def generate(self) -> list[Response]:
        self.calls += 1
        return self.sample(first_key=self.calls * len(self.prompts))

    def sample(self, first_key: int) -> list[Response]:
        work = self.work
        requests = [Request(prompt.ids, first_key + i, work.n) for i, prompt in enumerate(self.prompts)]
        sampling = Sampling(work.max_tokens, stop_ids=(self.end,), seed=work.seed)
        made = sorted(self.engine.generate(requests, sampling), key=lambda c: (c.request, c.sample))
        return [completion.ids for completion in made]

    @torch.no_grad()
    def logprobs(self, responses: Sequence[Response]) -> list[float]:
        """How likely every token of some responses (one to each prompt and sample) is to the trainer's model."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.work.n)]
        rows = [
            Example([*p.ids, *ids], [0] * len(p.ids) + [1] * len(ids), Origin("bench", i))
            for i, (p, ids) in enumerate(zip(prompts, responses, strict=True))
        ]
        (plan,) = plan_micro_batches([len(row) for row in rows], devices=1, tokens=self.work.tokens, rows=None)
        found: list[float] = []
        for members in plan:
            batch = micro_batch([rows[i] for i in members], packed=True, pad_id=0)
            found += self.policy(to_device(batch, self.torch_device)).logprobs_K.tolist()
        return found


class Plain:
    """transformers' `generate` on all sequences at once, left-padded."""

    name = "transformers generate"

    def __init__(self, work: Work):
        self.work = work
        self.torch_device = work.device.torch_device()
        self.model = work.their_model().to(self.torch_device).eval()
        self.about = f"left-padded, all {work.sequences} at once, sdpa"
        self.end, self.pad = _end(self.model), self.model.config.pad_token_id
        rows = [list(prompt.ids) for prompt in work.encoded() for _ in range(work.n)]
        width = max(len(row) for row in rows)
        self.ids = torch.tensor([[self.pad] * (width - len(row)) + row for row in rows], device=self.torch_device)
        self.mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows], device=self.torch_device)

    @torch.no_grad()
    def generate(self) -> list[Response]:
        config = GenerationConfig(
            do_sample=True,
            temperature=1.0,
            top_k=0,
            max_new_tokens=self.work.max_tokens,
            eos_token_id=self.end,
            pad_token_id=self.pad,
        )
        out = self.model.generate(input_ids=self.ids, attention_mask=self.mask, generation_config=config)
        return [_cut(row, self.end) for row in out[:, self.ids.shape[1] :].tolist()]


class Trl:
    """What GRPOTrainer generates with, without vLLM; see `make_trainer` for the variants."""

    def __init__(self, work: Work, variant: str):
        self.name = f"TRL {variant}"
        self.work = work
        self.folder = temporary_folder()
        self.trainer = make_trainer(work, self.folder.name, variant, callbacks=[])
        self.at_once = self.trainer.args.generation_batch_size
        how = "use_transformers_continuous_batching=True" if variant == "continuous" else "left-padded, sdpa"
        self.about = f"{how}, {self.at_once} at once"
        self.prompts = [list(prompt.ids) for prompt in work.encoded() for _ in range(work.n)]
        self.trainer.model.train()

    def generate(self) -> list[Response]:
        made: list[Response] = []
        for start in range(0, len(self.prompts), self.at_once):
            part = self.prompts[start : start + self.at_once]
            made += self.trainer._generate_single_turn(part, None, {}, self.work.n)[0]
        return made


class ByVllm:
    """vLLM in this process; see `vllm_side.py`."""

    name = "vLLM"

    def __init__(self, work: Work):
        self.work = work
        self.vllm = Vllm(work.model, work.dtype, work.sequences, work.longest())
        self.about = self.vllm.about
        self.prompts = [list(prompt.ids) for prompt in work.encoded()]
        self.end = AutoConfig.from_pretrained(work.model).eos_token_id

    def generate(self) -> list[Response]:
        return self.vllm.generate(self.prompts, self.work.n, self.work.max_tokens, self.end)


Side = Ours | Plain | Trl | ByVllm

SIDES: dict[str, Callable[[Work], Side]] = {
    "lockstep": Ours,
    "lockstep-hf": lambda work: Ours(work, "hf"),
    "generate": Plain,
    "trl-padded": lambda work: Trl(work, "padded"),
    "trl-parts": lambda work: Trl(work, "parts"),
    "trl-continuous": lambda work: Trl(work, "continuous"),
    "vllm": ByVllm,
}


def _cut(ids: Response, end: int) -> Response:
    return ids[: ids.index(end) + 1] if end in ids else ids


def _end(model: Any) -> int:
    return model.config.eos_token_id
