"""The online engine of `lockstep serve`. Requests with different sampling can be added and cancelled between rounds.

One KV cache serves all requests. If all decoding sequences have the same sampling and need no log-probs, CUDA graphs
are used; otherwise an eager pass decodes one token per sequence. Call all methods of the engine from one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from lockstep.errors import Refusal
from lockstep.kernels.sampling import sequence_keys
from lockstep.model.policy import output_head
from lockstep.model.text_model import text_config
from lockstep.rollout.native.cached_spans import SequenceState, SharedPrompt
from lockstep.rollout.native.decode_batch import DecodeState
from lockstep.rollout.native.native_engine import NativeEngine, prefill_budget
from lockstep.rollout.native.runner import Runner
from lockstep.rollout.native.sampler import choose
from lockstep.rollout.native.scheduler import Scheduler
from lockstep.types import Sampling

# Number of sampling settings whose CUDA graphs are kept.
MAX_RUNNERS = 4


@dataclass(frozen=True)
class DrawnToken:
    """A sampled token. If the request asks for log-probs, `logprob` and `likeliest` are log-probs at temperature 1
    without truncation: of this token and of the likeliest tokens."""

    token: int
    logprob: float | None = None
    likeliest: Sequence[tuple[int, float]] = ()


@dataclass(eq=False)
class LiveSample(SequenceState):
    """A sequence with its sampling parameters. `likeliest` is the number of likeliest tokens to return per position, or
    None if the request needs no log-probs."""

    sampling: Sampling = field(default_factory=lambda: Sampling(1))
    likeliest: int | None = None


class LiveEngine:
    """The online engine. `longest` is the maximum number of tokens of prompt and response together."""

    def __init__(self, engine: NativeEngine, longest: int):
        self.engine, self.longest = engine, longest
        settings, device, policy = engine.settings, engine.device, engine.policy
        plan = engine.state_plan()
        self.blocks = blocks_for(engine, longest, engine.cache_room() - plan.bytes)
        self.cache = engine.cache_of(self.blocks, plan)
        config = text_config(policy.causal_lm.config)
        budget = prefill_budget(settings, device, config, self.cache.element_size)
        block = settings.block_tokens
        self.scheduler = Scheduler(
            [], [], blocks=self.blocks, block=block, rows=plan.rows, budget=budget, slots=plan.slots
        )
        self._mixed = MixedRunner(policy, self.cache, Sampling(0), device, 0, longest)
        self._captured: dict[Sampling, Runner] = {}
        policy.eval()
        self._mixed.layers = engine.ready_layers()

    @property
    def busy(self) -> bool:
        return self.scheduler.unfinished

    @property
    def free(self) -> int:
        """The number of free blocks of the KV cache."""
        return self.scheduler.pool.free

    def add(
        self, ids: Sequence[int], n: int, sampling: Sampling, *, key: int, likeliest: int | None = None
    ) -> list[LiveSample]:
        """Adds `n` sequences for a prompt at the end of the queue."""
        if not ids or len(ids) + sampling.max_tokens > self.longest or sampling.max_tokens < 1:
            raise ValueError(f"{len(ids)} prompt and {sampling.max_tokens} new tokens exceed the limit {self.longest}")
        request = self.scheduler.num_requests
        sequences = [
            LiveSample(
                list(ids),
                request=request,
                number=number,
                prompt=len(ids),
                limit=len(ids) + sampling.max_tokens,
                keys=sequence_keys(sampling.seed, key, number),
                sampling=sampling,
                likeliest=likeliest,
            )
            for number in range(n)
        ]
        self.scheduler.add([SharedPrompt(list(ids[:-1]))], sequences)
        return sequences

    def cancel(self, sequence: LiveSample) -> None:
        """Cancels a sequence and frees its blocks; has no effect on a finished sequence."""
        if not sequence.stop:
            sequence.stop = "cancelled"
            self.scheduler.cancel(sequence)

    def step(self) -> list[tuple[LiveSample, list[DrawnToken]]]:
        """Runs one round; returns the new tokens of each sequence. Sets `stop` of the sequences that have finished."""
        passes = self._passes()
        work = self.scheduler.next(passes)
        self._mixed.copy(work)
        if work.prefill:
            self._mixed.prefill(work.prefill)
        decoding = [sequence for sequence in work.decode if isinstance(sequence, LiveSample)]
        if not decoding:
            return []
        runner = self._runner_for(decoding) if passes > 1 else None
        drawn = self._mixed.draw(decoding) if runner is None else _read(runner, decoding)
        if runner is None:
            # The device state of the CUDA graphs now lacks the new token, so this state is dropped.
            for other in self._captured.values():
                if other.batch is not None:
                    other.batch.assign_slots([], other.batch.rows)
        return [(sequence, self._append(sequence, tokens)) for sequence, tokens in zip(decoding, drawn, strict=True)]

    def _append(self, sequence: LiveSample, drawn: Sequence[DrawnToken]) -> list[DrawnToken]:
        """Appends and returns the tokens up to the token that ends the sequence; drops all later tokens."""
        kept = []
        for token in drawn:
            sequence.cached = len(sequence.tokens)
            sequence.tokens.append(token.token)
            kept.append(token)
            if token.token in sequence.sampling.stop_ids:
                sequence.stop = "token"
            elif len(sequence.tokens) >= sequence.limit:
                sequence.stop = "length"
            if sequence.stop:
                self.scheduler.finish(sequence)
                break
        return kept

    def _passes(self) -> int:
        """Returns the number of tokens per round, which depends on the running and the next sequences."""
        scheduler = self.scheduler
        soon = [*scheduler.running, *scheduler.waiting[: max(0, scheduler.rows - len(scheduler.running))]]
        runner = self._runner_for([sequence for sequence in soon if isinstance(sequence, LiveSample)])
        return 1 if runner is None else runner.passes

    def _runner_for(self, sequences: Sequence[LiveSample]) -> Runner | None:
        """Returns the runner with CUDA graphs for these sequences, or None if the sequences cannot use the same
        graphs."""
        engine = self.engine
        if not engine.device.graph_capture:
            return None
        samplings = {_graph_sampling(sequence) for sequence in sequences}
        if len(samplings) != 1 or None in samplings:
            return None
        (sampling,) = samplings
        assert sampling is not None
        runner = self._captured.pop(sampling, None)
        if runner is None:
            rows = engine.settings.max_sequences
            runner = Runner(engine.policy, self.cache, sampling, engine.device, rows, self.longest)
            runner.layers = self._mixed.layers
            while len(self._captured) >= MAX_RUNNERS:
                del self._captured[next(iter(self._captured))]
        # The dict is in order of use: the most recently used runner is last.
        self._captured[sampling] = runner
        return runner if runner.captures and runner.batch is not None else None


class MixedRunner(Runner):
    """Runs eager forward passes for sequences with different sampling settings."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.batch, self.captures, self.passes = None, False, 1

    @torch.inference_mode()
    def draw(self, sequences: Sequence[LiveSample]) -> list[list[DrawnToken]]:
        """Samples one new token per sequence."""
        width = max(len(sequence.blocks) for sequence in sequences)
        state = DecodeState.of(sequences, width, self.torch_device)
        lengths = state.positions_B + 1
        head = output_head(self.model)
        logits = head.shaped(head.projected(self._fed(state, lengths)))
        places = lengths - state.prompts_B
        tokens = torch.empty_like(state.tokens_B)
        samplings = _rows_by_sampling(sequences)
        for sampling, rows in samplings.items():
            at = torch.tensor(rows, device=self.torch_device)
            seen = self._seen([sequences[row] for row in rows]) if sampling.repetition_penalty != 1 else None
            row_logits = logits if len(samplings) == 1 else logits[at]
            chosen, _ = choose(row_logits, sampling, state.keys_B2[at], places[at], seen, self.sampler)
            tokens[at] = chosen.to(tokens.dtype)
        return self._with_logprobs(sequences, logits, tokens)

    def _with_logprobs(
        self, sequences: Sequence[LiveSample], logits_BV: torch.Tensor, tokens_B: torch.Tensor
    ) -> list[list[DrawnToken]]:
        drawn = tokens_B.tolist()
        scored_rows = [row for row, sequence in enumerate(sequences) if sequence.likeliest is not None]
        if not scored_rows:
            return [[DrawnToken(token)] for token in drawn]
        at = torch.tensor(scored_rows, device=self.torch_device)
        scores = logits_BV[at].float().log_softmax(-1)
        token_logprobs = scores.gather(-1, tokens_B[at, None])[:, 0].tolist()
        count_max = max(sequences[row].likeliest or 0 for row in scored_rows)
        best = scores.topk(count_max, dim=-1)
        values, ids = best.values.tolist(), best.indices.tolist()
        result = [[DrawnToken(token)] for token in drawn]
        for place, row in enumerate(scored_rows):
            count = sequences[row].likeliest or 0
            likeliest = list(zip(ids[place][:count], values[place][:count], strict=True))
            result[row] = [DrawnToken(drawn[row], token_logprobs[place], likeliest)]
        return result


def _read(runner: Runner, sequences: Sequence[LiveSample]) -> list[list[DrawnToken]]:
    tokens, _ = runner.decode(sequences).read()
    return [[DrawnToken(token) for token in each] for each in tokens]


def _rows_by_sampling(sequences: Sequence[LiveSample]) -> dict[Sampling, list[int]]:
    """Groups the batch rows by sampling parameters, ignoring seeds and length limits."""
    rows: dict[Sampling, list[int]] = {}
    for row, sequence in enumerate(sequences):
        sampling = replace(sequence.sampling, max_tokens=0, seed=0, stop_strings=(), stop_ids=())
        rows.setdefault(sampling, []).append(row)
    return rows


def _graph_sampling(sequence: LiveSample) -> Sampling | None:
    """Returns the sampling parameters that a CUDA graph depends on, or None if the sequence cannot use a graph."""
    if sequence.likeliest is not None or sequence.sampling.repetition_penalty != 1:
        return None
    return replace(sequence.sampling, max_tokens=0, seed=0, stop_strings=())


def blocks_for(engine: NativeEngine, longest: int, room: float) -> int:
    """Returns the number of cache blocks for a full batch of sequences of `longest` tokens, within `room` bytes."""
    settings, size = engine.settings, engine.block_bytes()
    least = Scheduler.least_blocks(longest, settings.block_tokens)
    blocks = min(least * settings.max_sequences, int(room // size))
    if blocks < least:
        raise Refusal.at(
            "--max-length",
            f"a sequence of {longest} tokens needs {least * size / 1e9:.3g} GB of key/value cache; "
            f"{room / 1e9:.3g} GB are available",
            "lower the sequence length, or raise --cache-gb",
            code="not-enough-memory",
        )
    return blocks


def longest_that_fits(engine: NativeEngine, wanted: int) -> int:
    """Returns the largest sequence length, at most `wanted`, whose KV cache fits in memory."""
    block = engine.settings.block_tokens
    room = engine.cache_room() - engine.state_plan().bytes
    return min(wanted, (int(room // engine.block_bytes()) - 1) * block)
