"""Runs the native engine's forward passes on packed tokens with a paged KV cache, eagerly or as CUDA graphs."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from lockstep.data.image_batch import chunk_images, images_to
from lockstep.device.base import Device, fetched, sent
from lockstep.errors import first_line
from lockstep.kernels.attention.kv_cache import KVCache
from lockstep.kernels.attention.layout import Chunks, DecodePass, make_layout
from lockstep.kernels.attention.paged import PrefillPass
from lockstep.kernels.decode.decode_layers import GeneratingLayers
from lockstep.kernels.logprob import projected_logprobs_
from lockstep.kernels.mixer_states import DecodeStates, PrefillStates, StateChunk
from lockstep.kernels.quantized.quantized_view import QuantizedView
from lockstep.model.policy import Policy, output_head
from lockstep.parallel.tensor import group_of
from lockstep.rollout.native.cached_spans import CachedSpan, SequenceState
from lockstep.rollout.native.decode_batch import DecodeBatch, DecodeState
from lockstep.rollout.native.sampler import choose, truncation_of
from lockstep.rollout.native.scheduler import Work
from lockstep.types import Sampling
from lockstep.vision.spans import ImageBlock, ImageInputs

# Number of decode passes per round with CUDA graphs. The host does not synchronize with the device between the passes
# of a round.
AHEAD = 8
# Capturing a graph takes as long as dozens of forward passes. So a batch that is slightly smaller than a captured graph
# (by a factor below LITTLE) runs in that graph with idle rows. After PATIENCE rounds with the same batch size, a graph
# of the exact size is captured.
PATIENCE, LITTLE = 8, 1.5
# Minimum width, in blocks, of the block tables of captured graphs. Widths are powers of two, so few sequence lengths
# need a new capture.
LEAST_WIDTH = 64


@dataclass(frozen=True)
class Round:
    """A round of forward passes that are launched on the device. The tokens and log-probs of the round can be read when
    the device is done."""

    sequences: Sequence[SequenceState]
    width: int | None
    """Number of rows of the CUDA graph, or None if the round runs eagerly."""
    rows: Sequence[int]
    tokens_BA: Callable[[], torch.Tensor]
    logprobs_BA: Callable[[], torch.Tensor]

    def read(self) -> tuple[list[list[int]], list[list[float]]]:
        """Returns the tokens and log-probs of each sequence; tokens after an end token are meaningless."""
        tokens, logprobs = (found().numpy()[self.rows].tolist() for found in (self.tokens_BA, self.logprobs_BA))
        return tokens, logprobs


class Runner:
    """Runs prefill and decode passes. The captured CUDA graphs depend on `sampling`, but not on its length limits.

    At most `rows` sequences of at most `longest` tokens decode at once.
    """

    def __init__(self, policy: Policy, cache: KVCache, sampling: Sampling, device: Device, rows: int, longest: int):
        self.policy, self.cache, self.sampling, self.device = policy, cache, sampling, device
        self.model = policy.causal_lm
        self.layers: GeneratingLayers | None = None
        """The device's fused decoder layers, or None if the device has no such layers."""
        self.view: QuantizedView | None = None
        """The quantised weights with which the model's modules generate, or None for the trained weights."""
        self.torch_device = cache.device
        self.stops = torch.tensor(sampling.stop_ids, device=self.torch_device, dtype=torch.long)
        # A policy that does not use the device's attention kernel uses the plain PyTorch sampler.
        self.sampler = device.sampler if policy.kernel == device.attention else "plain"
        self.group = group_of(self.model)
        # With tensor parallelism there are no CUDA graphs, because collective operations are not captured.
        self.captures = device.graph_capture and sampling.repetition_penalty == 1 and self.group is None
        self.passes = AHEAD if self.captures else 1
        width = max(LEAST_WIDTH, _power_of_two(-(-longest // cache.block)))
        self.batch = DecodeBatch(_bucket(rows), width, cache.spare, self.torch_device) if self.captures else None
        self.longest = width * cache.block
        self._graphs: dict[int, Callable[[], None]] = {}
        self._wanted: Counter[int] = Counter()

    def fits(self, rows: int, longest: int) -> bool:
        """Returns whether batches of this size and length fit the CUDA graphs."""
        return self.batch is None or (rows <= self.batch.rows and longest <= self.longest)

    def ran_on(self, sequence: SequenceState) -> bool:
        """Returns whether the device may have continued after the end of a finished sequence: it does not know stop
        strings, nor the stop tokens of a single request. The states of recurrent layers then include later tokens."""
        known = sequence.stop == "length" or sequence.tokens[-1] in self.sampling.stop_ids
        return self.passes > 1 and not known

    def copy(self, work: Work) -> None:
        """Copies the KV-cache blocks and the states of recurrent layers with which sequences start."""
        if work.copies:
            self.cache.copy_blocks(work.copies)
        if work.state_copies:
            self.cache.states.copy(work.state_copies)

    def routes(self, sequence: SequenceState) -> np.ndarray | None:
        """Returns the experts of the cached tokens of a sequence, or None if they are not recorded. A token that was
        computed again, after a preemption or a pause, keeps its first experts: its response was sampled with them."""
        if not self.sampling.routes:
            return None
        assert self.cache.routes_LSK is not None
        before = sequence.routes
        start = 0 if before is None else len(before)
        if start >= sequence.cached:
            return before
        slots = sent(torch.from_numpy(self._slots(sequence, start, sequence.cached)), self.torch_device)
        found: np.ndarray = self.cache.routes_LSK[:, slots].transpose(0, 1).cpu().numpy()
        return found if before is None else np.concatenate([before, found])

    def keep_routes(self, sequence: SequenceState) -> None:
        sequence.routes = self.routes(sequence)

    @torch.inference_mode()
    def prefill(self, work: Sequence[tuple[CachedSpan, int]]) -> None:
        """For each pair (`CachedSpan`, position) in `work`: computes and caches the keys and values of its tokens up to
        this position."""
        tokens = np.concatenate([np.array(part.tokens[part.cached : stop], dtype=np.int64) for part, stop in work])
        positions = np.concatenate([np.arange(part.cached, stop) for part, stop in work])
        slots = np.concatenate([self._slots(part, part.cached, stop) for part, stop in work])
        unchunked = not any(part.cached for part, _ in work)
        lengths = [stop for _, stop in work]
        where = make_layout(lengths, self.torch_device, self.policy.kernel) if unchunked else self._chunks(work)
        ids, at, to = (sent(torch.from_numpy(numbers), self.torch_device) for numbers in (tokens, positions, slots))
        states, blocks = self._prefill_states(work), self._image_blocks(work)
        step = PrefillPass(self.cache, to, where, self.device.paged_attention, states, blocks)
        images = chunk_images([(len(part.tokens), part.images, part.cached, stop) for part, stop in work])
        if images is not None:
            self._hidden(ids, at, step, images_to(images, self.torch_device))
        elif self.layers is not None and self.layers.prefills:
            with self._viewed(), self._recorded(step):
                self.layers.prefill(ids, at, step)
        else:
            self._hidden(ids, at, step)
        for part, stop in work:
            part.cached = stop

    @torch.inference_mode()
    def decode(self, sequences: Sequence[SequenceState]) -> Round:
        """Launches a round that samples up to `passes` new tokens per sequence."""
        width = self._captured_width(len(sequences))
        if width is not None:
            return self._captured_round(sequences, width)
        longest = max(len(sequence.blocks) for sequence in sequences)
        state = DecodeState.of(sequences, longest, self.torch_device)
        seen = self._seen(sequences) if self.sampling.repetition_penalty != 1 else None
        return self._round(sequences, None, state, lambda: self._pass(state, seen), range(len(sequences)))

    @torch.inference_mode()
    def schedule_ahead(self, last: Round, sequences: Sequence[SequenceState]) -> Round | None:
        """Launches the next round before the host has read the tokens of the round `last`. Returns None if sequences
        would have to change rows."""
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
        """Runs one decode pass: one token per sequence through the model, then samples the next token. The rows of
        finished sequences become idle."""
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
            # All ranks should have sampled the same tokens. Different tokens would make the ranks hang later, so all
            # ranks use the tokens of the first rank.
            self.group.as_first_(state.tokens_B)
            self.group.as_first_(state.logprobs_B)
        ended = (state.tokens_B[:, None] == self.stops).any(1) | (lengths + 1 >= state.limits_B)
        state.done_B.logical_or_(ended)
        state.positions_B.add_(1)
        state.idle_done_(self.cache.spare)

    def _fed(self, state: DecodeState, lengths_B: torch.Tensor) -> torch.Tensor:
        """Runs the decoder on one token per sequence, updates the cache, and returns the hidden states."""
        block = self.cache.block
        blocks = state.table_BM.gather(1, (state.positions_B // block)[:, None])[:, 0]
        slots = blocks * block + state.positions_B % block
        held = self.cache.states
        states = None if held is None else DecodeStates(held, state.slots_B)
        layout = DecodePass(self.cache, self.device.paged_attention, slots, state.table_BM, lengths_B, states)
        at_B = state.positions_B + state.offsets_B
        if self.layers is None:
            return self._hidden(state.tokens_B, at_B, layout)
        with self._viewed(), self._recorded(layout):
            return self.layers.decode(state.tokens_B, at_B, layout)

    def _viewed(self) -> AbstractContextManager[None]:
        return nullcontext() if self.view is None else self.view.used()

    def _recorded(self, step: PrefillPass | DecodePass) -> AbstractContextManager[None]:
        """Stores the experts of the tokens of a pass in the slots of their keys and values."""
        routing, routes_LSK = self.policy.decoder.routing, self.cache.routes_LSK
        if not self.sampling.routes:
            return nullcontext() if routing is None else routing.idle()
        assert routing is not None
        assert routes_LSK is not None
        return routing.stored(routes_LSK, step.slots_T)

    def _hidden(
        self,
        ids: torch.Tensor,
        at: torch.Tensor,
        layout: PrefillPass | DecodePass,
        images: ImageInputs | None = None,
    ) -> torch.Tensor:
        with self._viewed(), self._recorded(layout):
            return self.policy.decoder.engine_states(ids, at, layout, images)

    def _prefill_states(self, work: Sequence[tuple[CachedSpan, int]]) -> PrefillStates | None:
        if self.cache.states is None:
            return None
        counts = [stop - part.cached for part, stop in work]
        chunks = [
            StateChunk(first, count, part.slot, fresh=part.cached == 0)
            for first, count, (part, _) in zip(accumulate([0, *counts]), counts, work, strict=False)
        ]
        return PrefillStates(self.cache.states, chunks)

    def _image_blocks(self, work: Sequence[tuple[CachedSpan, int]]) -> tuple[ImageBlock, ...]:
        """Returns the images in this pass whose tokens attend to each other in both directions."""
        blocks, first = [], 0
        for part, stop in work:
            for image in part.images:
                if image.both_ways and part.cached <= image.start < stop:
                    own = image.places()
                    arrays = first + own - part.cached, self._slots(part, 0, own[-1] + 1)
                    rows, keys = (sent(torch.from_numpy(one), self.torch_device) for one in arrays)
                    blocks.append(ImageBlock(rows, keys, image.both_ways == "windows"))
            first += stop - part.cached
        return tuple(blocks)

    def _chunks(self, work: Sequence[tuple[CachedSpan, int]]) -> Chunks:
        slots = [self._slots(part, 0, stop) for part, stop in work]
        return Chunks.of([(part.cached, stop) for part, stop in work], slots, self.policy.kernel, self.torch_device)

    def _slots(self, part: CachedSpan, start: int, stop: int) -> np.ndarray:
        positions, blocks = np.arange(start, stop), np.array(part.blocks, dtype=np.int64)
        return blocks[positions // self.cache.block] * self.cache.block + positions % self.cache.block

    def _seen(self, sequences: Sequence[SequenceState]) -> torch.Tensor:
        """Returns a mask of the tokens that occur in each sequence, prompt included."""
        rows = self.model.get_output_embeddings().weight.shape[0]
        seen = torch.zeros(len(sequences), rows, dtype=torch.bool, device=self.torch_device)
        for row, sequence in enumerate(sequences):
            seen[row, torch.tensor(sequence.tokens, device=self.torch_device)] = True
        return seen

    def _captured_width(self, batch: int) -> int | None:
        """Returns the number of rows of the CUDA graph for a batch of this size, and captures the graph if needed.
        Returns None if capturing is impossible."""
        if self.batch is None:
            return None
        exact = _bucket(batch)
        self._wanted[exact] += 1
        larger = min((width for width in self._graphs if width >= exact), default=None)
        if larger is not None and larger < LITTLE * exact and self._wanted[exact] <= PATIENCE:
            return larger
        if exact not in self._graphs and not self._capture(self.batch, exact):
            # Eager passes do not need the persistent batch state, because each round creates its own.
            self.batch = None
            return None
        return exact

    def _capture(self, batch: DecodeBatch, width: int) -> bool:
        """Captures the graph for `width` rows. Returns False if the model cannot be captured, for example because an
        operator synchronizes with the host."""
        state = batch.state.first(width)
        # The capture runs on idle rows, because its warm-up passes sample tokens and write to the KV cache.
        kept = state.clone()
        state.copy_(batch.idle(width))
        others = next(iter(self._graphs.values()), None)
        try:
            self._graphs[width] = self.device.capture(lambda: self._pass(state), pool_of=others)
        except RuntimeError as error:
            if isinstance(error, torch.OutOfMemoryError):
                raise
            warnings.warn(f"decoding runs without device graphs, which is slower: {first_line(error)}", stacklevel=2)
            return False
        state.copy_(kept)
        return True


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length()


def _bucket(batch: int) -> int:
    """Rounds a batch size up to a graph size: a power of two, or a multiple of 64 above 64."""
    return _power_of_two(batch) if batch <= 64 else -(-batch // 64) * 64
