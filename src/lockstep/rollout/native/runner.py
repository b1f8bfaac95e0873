"""Forward passes of the engine: the policy's own modules on a line of tokens, with the paged cache behind attention."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from lockstep.device.base import Device, fetched, sent
from lockstep.errors import first_line
from lockstep.kernels.attention.layout import Chunk, DecodePass, KVCache, make_layout
from lockstep.kernels.attention.paged import PrefillPass
from lockstep.kernels.decode_layers import GeneratingLayers
from lockstep.kernels.logprob import projected_logprobs_
from lockstep.model.decoder import inner_decoder
from lockstep.model.policy import Policy, output_head
from lockstep.parallel.tensor import group_of
from lockstep.rollout.native.decode_batch import DecodeBatch, DecodeState
from lockstep.rollout.native.sampler import choose, truncation_of
from lockstep.rollout.native.scheduler import SequenceState, Span
from lockstep.types import Sampling

# Passes between two looks of the host at the device, where the device runs ahead of the host.
AHEAD = 8
# Recording a pass takes as long as some dozens of passes: a batch that is a little smaller than one of a recorded size
# runs with idle rows until its own size has been asked for in so many rounds.
PATIENCE, LITTLE = 8, 1.5
# Tables of recorded passes hold at least so many blocks, and then a power of two: few lengths need a new recording.
LEAST_WIDTH = 64


@dataclass(frozen=True)
class Round:
    """Passes that the device was given: new tokens of each sample with log-probabilities, when they are there."""

    sequences: Sequence[SequenceState]
    width: int | None
    """Rows of the recorded pass; None where the passes were not recorded."""
    rows: Sequence[int]
    tokens_BA: Callable[[], torch.Tensor]
    logprobs_BA: Callable[[], torch.Tensor]

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Of each sample its tokens and log-probabilities; what follows an end token is noise."""
        tokens, logprobs = (found().numpy()[self.rows].tolist() for found in (self.tokens_BA, self.logprobs_BA))
        return tokens, logprobs


class Runner:
    """Recorded passes depend on how tokens are drawn, not on how many: `sampling` stands for all that differ in that.

    At most `rows` sequences decode at once, of at most `longest` tokens.
    """

    def __init__(self, policy: Policy, cache: KVCache, sampling: Sampling, device: Device, rows: int, longest: int):
        self.policy, self.cache, self.sampling, self.device = policy, cache, sampling, device
        self.model = policy.causal_lm
        self.layers: GeneratingLayers | None = None
        """What stands for the decoder's modules, where something does."""
        self.torch_device = cache.slots.device
        self.stops = torch.tensor(sampling.stop_ids, device=self.torch_device, dtype=torch.long)
        # A policy with another attention than its device's is one that was asked to be plain.
        self.sampler = device.sampler if policy.kernel == device.attention else "plain"
        self.group = group_of(self.model)
        # Collectives are not recorded.
        self.captures = device.graph_capture and sampling.repetition_penalty == 1 and self.group is None
        self.passes = AHEAD if self.captures else 1
        width = max(LEAST_WIDTH, _power_of_two(-(-longest // cache.block)))
        self.batch = DecodeBatch(_bucket(rows), width, cache.spare, self.torch_device) if self.captures else None
        self.longest = width * cache.block
        self._graphs: dict[int, Callable[[], None]] = {}
        self._wanted: Counter[int] = Counter()

    def fits(self, rows: int, longest: int) -> bool:
        """Whether a batch of so many rows and sequences of so many tokens can run here."""
        return self.batch is None or (rows <= self.batch.rows and longest <= self.longest)

    @torch.inference_mode()
    def prefill(self, work: Sequence[tuple[Span, int]]) -> None:
        """Keys and values of each stretch up to its position."""
        tokens = np.concatenate([np.array(part.tokens[part.cached : stop], dtype=np.int64) for part, stop in work])
        positions = np.concatenate([np.arange(part.cached, stop) for part, stop in work])
        slots = np.concatenate([self._slots(part, part.cached, stop) for part, stop in work])
        whole = not any(part.cached for part, _ in work)
        lengths = [stop for _, stop in work]
        where = make_layout(lengths, self.torch_device, self.policy.kernel) if whole else self._chunks(work)
        ids, at, to = (sent(torch.from_numpy(numbers), self.torch_device) for numbers in (tokens, positions, slots))
        step = PrefillPass(self.cache, to, where, self.device.paged_attention)
        if self.layers is not None:
            self.layers.prefill(ids, at, step)
        else:
            self._hidden(ids, at, step)
        for part, stop in work:
            part.cached = stop

    @torch.inference_mode()
    def decode(self, sequences: Sequence[SequenceState]) -> Round:
        """Give the device a round: up to `passes` new tokens of each sample."""
        width = self._captured_width(len(sequences))
        if width is not None:
            return self._captured_round(sequences, width)
        longest = max(len(sequence.blocks) for sequence in sequences)
        state = DecodeState.of(sequences, longest, self.torch_device)
        seen = self._seen(sequences) if self.sampling.repetition_penalty != 1 else None
        return self._round(sequences, None, state, lambda: self._pass(state, seen), range(len(sequences)))

    @torch.inference_mode()
    def schedule_ahead(self, last: Round, sequences: Sequence[SequenceState]) -> Round | None:
        """A round of some samples of the last one, of which the host does not know the tokens yet. None where their
        rows should change."""
        if last.width is None or not sequences or self._captured_width(len(sequences)) != last.width:
            return None
        return self._captured_round(sequences, last.width)

    def _captured_round(self, sequences: Sequence[SequenceState], width: int) -> Round:
        assert self.batch is not None
        rows = self.batch.assign_slots(sequences, within=width)
        return self._round(sequences, width, self.batch.state.first(width), self._graphs[width], rows)

    def _round(
        self,
        sequences: Sequence[SequenceState],
        width: int | None,
        state: DecodeState,
        step: Callable[[], None],
        rows: Sequence[int],
    ) -> Round:
        made = []
        for _ in range(self.passes):
            step()
            made.append((state.tokens_B.clone(), state.logprobs_B.clone()))
        tokens, logprobs = (fetched(torch.stack(parts, 1)) for parts in zip(*made, strict=True))
        return Round(sequences, width, rows, tokens, logprobs)

    def _pass(self, state: DecodeState, seen_BV: torch.Tensor | None = None) -> None:
        """Feed a token of each sequence, draw the next. Sequences that are done stay where they are."""
        head = output_head(self.model)
        lengths = state.positions_B + 1
        projected = head.projected(self._fed(state, lengths))
        places = lengths - state.prompts_B
        tokens, logprobs = choose(head.shaped(projected), self.sampling, state.keys_B2, places, seen_BV, self.sampler)
        if self.device.scored_by == "trainer":
            logprobs = projected_logprobs_(
                projected,
                head,
                tokens,
                temperature=self.sampling.temperature or 1.0,
                truncation=truncation_of(self.sampling) if self.sampling.score_truncated else None,
            )
        state.tokens_B.copy_(tokens)
        state.logprobs_B.copy_(logprobs)
        if self.group is not None:
            # They have drawn the same from the same states; were a rank to go its own way, all would hang.
            self.group.as_first_(state.tokens_B)
            self.group.as_first_(state.logprobs_B)
            tokens = state.tokens_B
        ended = (tokens[:, None] == self.stops).any(1) | (lengths + 1 >= state.limits_B)
        state.done_B.logical_or_(ended)
        state.positions_B.add_(~state.done_B)

    def _fed(self, state: DecodeState, lengths_B: torch.Tensor) -> torch.Tensor:
        """The last hidden states after a token of each sequence, whose keys and values are then in the cache."""
        block = self.cache.block
        blocks = state.table_BM.gather(1, (state.positions_B // block)[:, None])[:, 0]
        slots = blocks * block + state.positions_B % block
        layout = DecodePass(self.cache, self.device.paged_attention, slots, state.table_BM, lengths_B)
        run = self._hidden if self.layers is None else self.layers.decode
        return run(state.tokens_B, state.positions_B, layout)

    def _hidden(self, ids: torch.Tensor, at: torch.Tensor, layout: PrefillPass | DecodePass) -> torch.Tensor:
        decoder = inner_decoder(self.model)
        return decoder(input_ids=ids[None], position_ids=at[None], use_cache=False, layout=layout).last_hidden_state[0]

    def _chunks(self, work: Sequence[tuple[Span, int]]) -> tuple[Chunk, ...]:
        chunks = []
        first = 0
        for part, stop in work:
            slots = torch.from_numpy(self._slots(part, 0, stop)).to(self.torch_device)
            chunks.append(Chunk(first, part.cached, stop, slots))
            first += stop - part.cached
        return tuple(chunks)

    def _slots(self, part: Span, start: int, stop: int) -> np.ndarray:
        positions, blocks = np.arange(start, stop), np.array(part.blocks, dtype=np.int64)
        return blocks[positions // self.cache.block] * self.cache.block + positions % self.cache.block

    def _seen(self, sequences: Sequence[SequenceState]) -> torch.Tensor:
        """Tokens that already stand in each sequence, prompt included."""
        rows = self.model.get_output_embeddings().weight.shape[0]
        seen = torch.zeros(len(sequences), rows, dtype=torch.bool, device=self.torch_device)
        for row, sequence in enumerate(sequences):
            seen[row, torch.tensor(sequence.tokens, device=self.torch_device)] = True
        return seen

    def _captured_width(self, batch: int) -> int | None:
        """Rows of the recorded pass for this batch; the pass is there when this returns. None where none can be."""
        if self.batch is None:
            return None
        exact = _bucket(batch)
        self._wanted[exact] += 1
        larger = min((width for width in self._graphs if width >= exact), default=None)
        if larger is not None and larger < LITTLE * exact and self._wanted[exact] <= PATIENCE:
            return larger
        if exact not in self._graphs and not self._capture(self.batch, exact):
            # Its rows are of no use: passes that are not recorded make their own state.
            self.batch = None
            return None
        return exact

    def _capture(self, batch: DecodeBatch, width: int) -> bool:
        """Record the pass for so many rows; False where the model does what cannot be recorded, such as an operator
        that looks at the host."""
        state = batch.state.first(width)
        # On idle rows: trial passes draw tokens and write keys, which must not be anybody's.
        kept = state.clone()
        state.copy_(batch.idle(width))
        others = next(iter(self._graphs.values()), None)
        try:
            self._graphs[width] = self.device.capture(lambda: self._pass(state), beside=others)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            warnings.warn(f"decoding runs without a recorded graph, so slower: {first_line(error)}", stacklevel=2)
            return False
        state.copy_(kept)
        return True


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _bucket(batch: int) -> int:
    """Batch sizes of recorded passes: powers of two, and from 64 on its multiples."""
    return _power_of_two(batch) if batch <= 64 else -(-batch // 64) * 64
