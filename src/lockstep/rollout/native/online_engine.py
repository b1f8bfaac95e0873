"""The built-in engine without a beginning and an end: requests come and go between rounds, each drawn in its own way.

One cache serves all of them as long as the engine lives. Where everybody who decodes is drawn alike and nobody asks for
log-probabilities, the device's recorded passes are used; else a pass feeds a token of each, and each is drawn by its
own sampling. `lockstep serve` runs it. All methods belong to one thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from lockstep.errors import Refusal
from lockstep.kernels.sampling import sequence_keys
from lockstep.model.policy import output_head
from lockstep.rollout.native.decode_batch import DecodeState
from lockstep.rollout.native.engine import NativeEngine
from lockstep.rollout.native.limits import prefill_budget
from lockstep.rollout.native.runner import Runner
from lockstep.rollout.native.sampler import choose
from lockstep.rollout.native.scheduler import Scheduler, SequenceState, SharedPrompt
from lockstep.types import Sampling

# Ways of drawing whose recorded passes are kept; each is some graphs.
RECORDED = 4


@dataclass(frozen=True)
class DrawnToken:
    """A token that was drawn. Log-probabilities are those of the model itself (temperature 1, nothing left out), and
    only there where they were asked for: the token's own, and the likeliest tokens with theirs."""

    token: int
    logprob: float | None = None
    likeliest: Sequence[tuple[int, float]] = ()


@dataclass(eq=False)
class LiveSample(SequenceState):
    """A continuation with a sampling of its own. `likeliest`: how many tokens are told beside each; None for no
    log-probabilities at all."""

    sampling: Sampling = field(default_factory=lambda: Sampling(1))
    likeliest: int | None = None


class LiveEngine:
    """`longest` is the most tokens of a prompt and its response together."""

    def __init__(self, engine: NativeEngine, longest: int):
        self.engine, self.longest = engine, longest
        settings, device, policy = engine.settings, engine.device, engine.policy
        self.blocks = blocks_for(engine, longest)
        self.cache = engine.cache_of(self.blocks)
        config = policy.causal_lm.config.get_text_config()
        budget = prefill_budget(settings, device, config, self.cache.slots.element_size())
        block = settings.block_tokens
        self.scheduler = Scheduler([], [], blocks=self.blocks, block=block, rows=settings.max_sequences, budget=budget)
        self._mixed = MixedRunner(policy, self.cache, Sampling(0), device, 0, longest)
        self._captured: dict[Sampling, Runner] = {}
        policy.eval()
        self._mixed.layers = engine.ready_layers()

    @property
    def busy(self) -> bool:
        return self.scheduler.unfinished

    @property
    def free(self) -> int:
        """Blocks of the cache that nobody holds."""
        return self.scheduler.pool.free

    def add(
        self, ids: Sequence[int], n: int, sampling: Sampling, *, key: int, likeliest: int | None = None
    ) -> list[LiveSample]:
        """`n` continuations of a prompt, behind all that are here."""
        if not ids or len(ids) + sampling.max_tokens > self.longest or sampling.max_tokens < 1:
            raise ValueError(f"{len(ids)} and {sampling.max_tokens} tokens do not fit {self.longest}")
        request = self.scheduler.asked
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
        """Its blocks are free when this returns. One that has ended holds none."""
        if not sequence.stop:
            sequence.stop = "cancelled"
            self.scheduler.cancel(sequence)

    def step(self) -> list[tuple[LiveSample, list[DrawnToken]]]:
        """One round: who got which tokens. A sample whose `stop` is set has got its last one."""
        passes = self._passes()
        work = self.scheduler.next(passes)
        if work.copies:
            self.cache.copy_blocks(work.copies)
        if work.prefill:
            self._mixed.prefill(work.prefill)
        decoding = [sequence for sequence in work.decode if isinstance(sequence, LiveSample)]
        if not decoding:
            return []
        runner = self._alike(decoding) if passes > 1 else None
        told = self._mixed.draw(decoding) if runner is None else _read(runner, decoding)
        if runner is None:
            # What the boards hold of these samples is a token behind now.
            for other in self._captured.values():
                if other.batch is not None:
                    other.batch.assign_slots([], other.batch.rows)
        return [(sequence, self._append(sequence, tokens)) for sequence, tokens in zip(decoding, told, strict=True)]

    def _append(self, sequence: LiveSample, told: Sequence[DrawnToken]) -> list[DrawnToken]:
        """Up to the token that ends it; a recorded round may have run on past that."""
        kept = []
        for one in told:
            sequence.cached = len(sequence.tokens)
            sequence.tokens.append(one.token)
            kept.append(one)
            if one.token in sequence.sampling.stop_ids:
                sequence.stop = "token"
            elif len(sequence.tokens) >= sequence.limit:
                sequence.stop = "length"
            if sequence.stop:
                self.scheduler.finish(sequence)
                break
        return kept

    def _passes(self) -> int:
        """Tokens of a round, by those who run or would come next."""
        scheduler = self.scheduler
        soon = [*scheduler.running, *scheduler.waiting[: max(0, scheduler.rows - len(scheduler.running))]]
        runner = self._alike([sequence for sequence in soon if isinstance(sequence, LiveSample)])
        return 1 if runner is None else runner.passes

    def _alike(self, sequences: Sequence[LiveSample]) -> Runner | None:
        """The runner with recorded passes for these, where there can be one."""
        engine = self.engine
        if not engine.device.graph_capture:
            return None
        ways = {_way(sequence) for sequence in sequences}
        if len(ways) != 1 or None in ways:
            return None
        (way,) = ways
        assert way is not None
        runner = self._captured.pop(way, None)
        if runner is None:
            rows = engine.settings.max_sequences
            runner = Runner(engine.policy, self.cache, way, engine.device, rows, self.longest)
            runner.layers = self._mixed.layers
            while len(self._captured) >= RECORDED:
                del self._captured[next(iter(self._captured))]
        # Used last stands last.
        self._captured[way] = runner
        return runner if runner.captures and runner.batch is not None else None


class MixedRunner(Runner):
    """Passes that are not recorded, over sequences that are drawn each in its own way."""

    def __init__(self, *arguments: object) -> None:
        super().__init__(*arguments)  # type: ignore[arg-type]
        self.batch, self.captures, self.passes = None, False, 1

    @torch.inference_mode()
    def draw(self, sequences: Sequence[LiveSample]) -> list[list[DrawnToken]]:
        """One new token of each sample."""
        width = max(len(sequence.blocks) for sequence in sequences)
        state = DecodeState.of(sequences, width, self.torch_device)
        lengths = state.positions_B + 1
        head = output_head(self.model)
        logits = head.shaped(head.projected(self._fed(state, lengths)))
        places = lengths - state.prompts_B
        tokens = torch.empty_like(state.tokens_B)
        ways = _by_way(sequences)
        for way, rows in ways.items():
            at = torch.tensor(rows, device=self.torch_device)
            seen = self._seen([sequences[row] for row in rows]) if way.repetition_penalty != 1 else None
            own = logits if len(ways) == 1 else logits[at]
            chosen, _ = choose(own, way, state.keys_B2[at], places[at], seen, self.sampler)
            tokens[at] = chosen.to(tokens.dtype)
        return self._told(sequences, logits, tokens)

    def _told(
        self, sequences: Sequence[LiveSample], logits_BV: torch.Tensor, tokens_B: torch.Tensor
    ) -> list[list[DrawnToken]]:
        drawn = tokens_B.tolist()
        asked = [row for row, sequence in enumerate(sequences) if sequence.likeliest is not None]
        if not asked:
            return [[DrawnToken(token)] for token in drawn]
        at = torch.tensor(asked, device=self.torch_device)
        scores = logits_BV[at].float().log_softmax(-1)
        own = scores.gather(-1, tokens_B[at, None])[:, 0].tolist()
        most = max(sequences[row].likeliest or 0 for row in asked)
        best = scores.topk(most, dim=-1)
        values, ids = best.values.tolist(), best.indices.tolist()
        told = [[DrawnToken(token)] for token in drawn]
        for place, row in enumerate(asked):
            count = sequences[row].likeliest or 0
            beside = list(zip(ids[place][:count], values[place][:count], strict=True))
            told[row] = [DrawnToken(drawn[row], own[place], beside)]
        return told


def _read(runner: Runner, sequences: Sequence[LiveSample]) -> list[list[DrawnToken]]:
    tokens, _ = runner.decode(sequences).read()
    return [[DrawnToken(token) for token in each] for each in tokens]


def _by_way(sequences: Sequence[LiveSample]) -> dict[Sampling, list[int]]:
    """Rows by what their draw depends on; noise and limits are the rows' own."""
    found: dict[Sampling, list[int]] = {}
    for row, sequence in enumerate(sequences):
        way = replace(sequence.sampling, max_tokens=0, seed=0, stop_strings=(), stop_ids=())
        found.setdefault(way, []).append(row)
    return found


def _way(sequence: LiveSample) -> Sampling | None:
    """What the recorded passes of a sample depend on; None where it asks for what they do not tell."""
    if sequence.likeliest is not None or sequence.sampling.repetition_penalty != 1:
        return None
    return replace(sequence.sampling, max_tokens=0, seed=0, stop_strings=())


def blocks_for(engine: NativeEngine, longest: int) -> int:
    """Blocks of the one cache: for as many sequences of `longest` tokens as may run, within its memory."""
    settings, size, room = engine.settings, engine.block_bytes(), engine.cache_room()
    least = Scheduler.least_blocks(longest, settings.block_tokens)
    blocks = min(least * settings.max_sequences, int(room // size))
    if blocks < least:
        raise Refusal.at(
            "--max-length",
            f"a sequence of {longest} tokens needs {least * size / 1e9:.3g} GB of key/value cache, and there are "
            f"{room / 1e9:.3g} GB",
            "lower it, or raise --cache-gb",
        )
    return blocks


def longest_that_fits(engine: NativeEngine, wanted: int) -> int:
    """`wanted` tokens, or as many as the memory of the cache has room for."""
    block = engine.settings.block_tokens
    return min(wanted, (int(engine.cache_room() // engine.block_bytes()) - 1) * block)
