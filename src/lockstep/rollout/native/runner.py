"""Forward passes of the engine: the policy's own modules on a line of tokens, with the paged cache behind attention."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.device.base import Device
from lockstep.errors import first_line
from lockstep.kernels.layout import make_layout
from lockstep.kernels.paged import Chunk, DecodePass, KVCache, PrefillPass
from lockstep.model.decoder import inner_decoder
from lockstep.model.output_head import output_head
from lockstep.model.policy import Policy
from lockstep.rollout.native.sampler import choose
from lockstep.rollout.native.sequence import Sample, Stretch
from lockstep.types import Sampling

# Passes between two looks of the host at the device, where the device runs ahead of the host.
AHEAD = 8


@dataclass
class DecodeState:
    """A decoding batch in device tensors: a pass reads and writes them, and the host need not look in between."""

    tokens_B: torch.Tensor
    positions_B: torch.Tensor
    """Place of the token that is fed, in its sequence."""
    prompts_B: torch.Tensor
    limits_B: torch.Tensor
    keys_B2: torch.Tensor
    table_BM: torch.Tensor
    done_B: torch.Tensor
    logprobs_B: torch.Tensor

    def copy_(self, other: DecodeState) -> None:
        for name, tensor in vars(self).items():
            tensor.copy_(getattr(other, name))


class Runner:
    def __init__(self, policy: Policy, cache: KVCache, sampling: Sampling, device: Device, longest: int):
        self.policy, self.cache, self.sampling, self.device = policy, cache, sampling, device
        self.model = policy.causal_lm
        self.torch_device, self.longest = cache.slots.device, longest
        self.stops = torch.tensor(sampling.stop_ids, device=self.torch_device, dtype=torch.long)
        self.table_width = -(-longest // cache.block)
        self.captures = device.graph_capture
        self.passes = 1 if not device.graph_capture or sampling.repetition_penalty != 1 else AHEAD
        self._graphs: dict[int, tuple[DecodeState, Callable[[], None]]] = {}

    @torch.inference_mode()
    def prefill(self, work: Sequence[tuple[Stretch, int]]) -> None:
        """Keys and values of each stretch up to its position."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        for part, stop in work:
            tokens += part.tokens[part.cached : stop]
            positions += range(part.cached, stop)
            slots += self._slots(part, part.cached, stop)
        whole = not any(part.cached for part, _ in work)
        lengths = [stop for _, stop in work]
        where = make_layout(lengths, self.torch_device, self.policy.kernel) if whole else self._chunks(work)
        self._hidden(tokens, positions, PrefillPass(self.cache, torch.tensor(slots, device=self.torch_device), where))
        for part, stop in work:
            part.cached = stop

    @torch.inference_mode()
    def decode(self, samples: Sequence[Sample]) -> tuple[list[list[int]], list[list[float]]]:
        """Up to `passes` new tokens of each sample, with log-probabilities; what follows an end token is noise."""
        state = self._state(samples)
        seen = self._seen(samples) if self.sampling.repetition_penalty != 1 else None
        found = self._captured(_bucket(len(samples)), state) if self.captures and seen is None else None
        static, step = found or (state, lambda: self._pass(state, seen))
        rounds = []
        for _ in range(self.passes):
            step()
            rounds.append((static.tokens_B.clone(), static.logprobs_B.clone()))
        tokens = torch.stack([tokens for tokens, _ in rounds], 1)[: len(samples)].tolist()
        logprobs = torch.stack([logprobs for _, logprobs in rounds], 1)[: len(samples)].tolist()
        return tokens, logprobs

    def _pass(self, state: DecodeState, seen_BV: torch.Tensor | None = None) -> None:
        """Feed a token of each sequence, draw the next. Sequences that are done stay where they are."""
        block = self.cache.block
        blocks = state.table_BM.gather(1, (state.positions_B // block)[:, None])[:, 0]
        slots = blocks * block + state.positions_B % block
        kernel = self.device.paged_attention
        lengths = state.positions_B + 1
        layout = DecodePass(self.cache, kernel, slots, state.table_BM, lengths)
        hidden = self._hidden(state.tokens_B, state.positions_B, layout)
        logits = output_head(self.model).logits(hidden)
        tokens, logprobs = choose(logits, self.sampling, state.keys_B2, lengths - state.prompts_B, seen_BV)
        state.tokens_B.copy_(tokens)
        state.logprobs_B.copy_(logprobs)
        ended = (tokens[:, None] == self.stops).any(1) | (lengths + 1 >= state.limits_B)
        state.done_B.logical_or_(ended)
        state.positions_B.add_(~state.done_B)

    def _hidden(
        self, tokens: list[int] | torch.Tensor, positions: list[int] | torch.Tensor, layout: PrefillPass | DecodePass
    ) -> torch.Tensor:
        ids, at = (torch.as_tensor(values, device=self.torch_device)[None] for values in (tokens, positions))
        decoder = inner_decoder(self.model)
        return decoder(input_ids=ids, position_ids=at, use_cache=False, layout=layout).last_hidden_state[0]

    def _chunks(self, work: Sequence[tuple[Stretch, int]]) -> tuple[Chunk, ...]:
        chunks = []
        first = 0
        for part, stop in work:
            slots = torch.tensor(self._slots(part, 0, stop), device=self.torch_device)
            chunks.append(Chunk(first, part.cached, stop, slots))
            first += stop - part.cached
        return tuple(chunks)

    def _slots(self, part: Stretch, start: int, stop: int) -> list[int]:
        block = self.cache.block
        return [part.blocks[position // block] * block + position % block for position in range(start, stop)]

    def _state(self, samples: Sequence[Sample]) -> DecodeState:
        width = self.table_width if self.device.graph_capture else max(len(sample.blocks) for sample in samples)
        rows = [
            [sample.tokens[-1], len(sample.tokens) - 1, sample.prompt, sample.limit, *sample.keys] for sample in samples
        ]
        tables = [sample.blocks + [0] * (width - len(sample.blocks)) for sample in samples]
        numbers = self._numbers(rows)
        return DecodeState(
            tokens_B=numbers[:, 0].contiguous(),
            positions_B=numbers[:, 1].contiguous(),
            prompts_B=numbers[:, 2].contiguous(),
            limits_B=numbers[:, 3].contiguous(),
            keys_B2=numbers[:, 4:].to(torch.int32),
            table_BM=self._numbers(tables),
            done_B=torch.zeros(len(samples), dtype=torch.bool, device=self.torch_device),
            logprobs_B=torch.zeros(len(samples), device=self.torch_device),
        )

    def _numbers(self, rows: list[list[int]]) -> torch.Tensor:
        # numpy reads nested lists several times faster than torch, and this is done every round.
        return torch.from_numpy(np.array(rows, dtype=np.int64)).to(self.torch_device)

    def _seen(self, samples: Sequence[Sample]) -> torch.Tensor:
        """Tokens that already stand in each sequence, prompt included."""
        rows = self.model.get_output_embeddings().weight.shape[0]
        seen = torch.zeros(len(samples), rows, dtype=torch.bool, device=self.torch_device)
        for row, sample in enumerate(samples):
            seen[row, torch.tensor(sample.tokens, device=self.torch_device)] = True
        return seen

    def _captured(self, width: int, state: DecodeState) -> tuple[DecodeState, Callable[[], None]] | None:
        """The pass recorded for this batch size, fed with `state`. Rows beyond the batch repeat its last one.

        They write what the last one writes, to the same slot. None where the model does what cannot be recorded, such
        as an operator that looks at the host.
        """
        padded = DecodeState(**{name: _widen(tensor, width) for name, tensor in vars(state).items()})
        if width not in self._graphs:
            static = DecodeState(**{name: tensor.clone() for name, tensor in vars(padded).items()})
            # Trial passes must not run on into blocks that are not theirs.
            static.done_B.fill_(True)
            try:
                replay = self.device.capture(lambda: self._pass(static))
            except RuntimeError as error:
                if isinstance(error, torch.OutOfMemoryError):
                    raise
                warnings.warn(f"decoding runs without a recorded graph, so slower: {first_line(error)}", stacklevel=2)
                self.captures = False
                return None
            self._graphs[width] = static, replay
        static, replay = self._graphs[width]
        static.copy_(padded)
        return static, replay


def _bucket(batch: int) -> int:
    """Captured batch sizes are powers of two: recording costs more than some idle rows in a pass."""
    return 1 << (batch - 1).bit_length()


def _widen(tensor: torch.Tensor, width: int) -> torch.Tensor:
    last = tensor[-1:].expand(width - len(tensor), *tensor.shape[1:])
    return torch.cat([tensor, last])
