"""An engine: generates one response at a time, without a KV cache."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch

from lockstep.kernels.sampling import sequence_keys
from lockstep.recipe.registry import ENGINES, EngineRow
from lockstep.rollout.engine import SharedWeights, why_ended
from lockstep.rollout.native.sampler import choose
from lockstep.types import Completion, Request, Sampling


class NaiveEngine(SharedWeights):
    """One response at a time, without a KV cache: recomputes the sequence for each token."""

    instead = "use the native engine"

    def __init__(self, policy, decode):
        self.policy, self.decode = policy, decode

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        for number, request in enumerate(requests):
            most = min(sampling.max_tokens, request.max_tokens or sampling.max_tokens)
            for sample in range(request.first, request.first + request.n):
                yield self._complete(number, request, sample, replace(sampling, max_tokens=most))

    @torch.no_grad()
    def _complete(self, number: int, request: Request, sample: int, sampling: Sampling) -> Completion:
        ids, logprobs, stop = [], [], ""
        key = sequence_keys(sampling.seed, request.key, sample)
        with self.policy.generating() as model:
            keys = torch.tensor([key], dtype=torch.int32, device=model.device)
            while not stop:
                seen = torch.tensor([[*request.ids, *ids]], device=model.device)
                position = torch.tensor([len(ids)], device=model.device)
                token, logprob = choose(model(seen).logits[:, -1], sampling, keys, position)
                ids.append(int(token))
                logprobs.append(float(logprob))
                stop = why_ended(ids, 0, sampling, self.decode)
        return Completion(number, sample, ids, logprobs, stop)


def open_engine(policy, device, settings, tokenizer):
    return NaiveEngine(policy, tokenizer.decode)


ENGINES["naive"] = EngineRow("naive:open_engine")
