"""A make-believe runner for tests of the scheduler: it writes down what each slot of the cache holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from lockstep.kernels.mixer_states import EMPTY, RESERVED
from lockstep.rollout.native.cached_spans import CachedSpan, SequenceState, SharedPrompt
from lockstep.rollout.native.scheduler import Scheduler, Work


@dataclass(frozen=True)
class Job:
    prompt: int
    lengths: list[int]
    """How many tokens each of its samples comes to; `limit` is what the scheduler knows."""
    limit: int


@dataclass
class Pretender:
    """Plays the runner: writes down what each slot of the cache holds and checks what is read."""

    scheduler: Scheduler
    prefixes: list[SharedPrompt]
    samples: list[SequenceState]
    lengths: dict[tuple[int, int], int]
    passes: int
    slots: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    states: dict[int, tuple[int, ...]] = field(default_factory=lambda: {EMPTY: ()})
    """The tokens that the state of each slot has seen."""
    prefilled: int = 0
    finished: list[tuple[int, int]] = field(default_factory=list)
    most_blocks: int = 0

    def run(self) -> None:
        rounds = 0
        total = sum(len(p.tokens) for p in self.prefixes) + sum(self.lengths.values())
        while self.scheduler.unfinished:
            before = [s.order for s in self.scheduler.running]
            oldest = min(s.order for s in self.samples if s.order not in self.finished)
            work = self.scheduler.next(self.passes)
            if oldest in before:
                assert oldest in [s.order for s in self.scheduler.running], "the oldest was preempted"
            assert len(self.scheduler.running) <= self.scheduler.rows
            self.check_blocks()
            self.play(work)
            rounds += 1
            assert rounds < 50 * (total + 1) * (len(self.samples) + 1), "does not come to an end"

    def play(self, work: Work) -> None:
        block = self.scheduler.block
        held = {slot: self.slots[slot] for slot in self.slots}
        for source, target in work.copies:
            for place in range(block):
                if (source, place) in held:
                    self.slots[target, place] = held[source, place]
        for origin, slot in work.state_copies:
            self.states[slot] = self.states[origin]
        assert sum(stop - part.cached for part, stop in work.prefill) <= self.scheduler.budget
        assert len({id(part) for part, _ in work.prefill}) == len(work.prefill)
        for part, stop in work.prefill:
            assert part.cached < stop
            self.prefilled += stop - part.cached
            self.write(part, part.cached, stop)
            part.cached = stop
        for sample in work.decode:
            self.decode(sample)

    def write(self, part: CachedSpan, start: int, stop: int) -> None:
        """A token's keys stand for everything before it, so a slot holds the whole history of its token."""
        block = self.scheduler.block
        if self.scheduler.states.used:
            assert not start or self.states[part.slot] == tuple(part.tokens[:start]), "another state than its own"
            self.states[part.slot] = tuple(part.tokens[:stop])
        for place in range(stop):
            slot = (part.blocks[place // block], place % block)
            history = tuple(part.tokens[: place + 1])
            if place >= start:
                self.slots[slot] = history
            assert self.slots.get(slot) == history, "another sequence wrote here"

    def decode(self, sample: SequenceState) -> None:
        assert sample in self.scheduler.running
        for _ in range(self.passes):
            assert sample.ready
            self.write(sample, sample.cached, len(sample.tokens))
            sample.cached = len(sample.tokens)
            sample.tokens.append(1000 * (sample.request + 1) + 10 * sample.number + len(sample.tokens))
            if len(sample.tokens) == self.lengths[sample.order]:
                sample.stop = "token"
                self.scheduler.finish(sample)
                self.finished.append(sample.order)
                return

    @property
    def spans(self) -> list[CachedSpan]:
        return [*self.prefixes, *self.samples, *self.scheduler.parked.spans.values()]

    def check_slots(self) -> None:
        """Every slot is free or held by one."""
        held = [part.slot for part in self.spans if part.slot]
        free = list(self.scheduler.states._free)
        assert sorted(held + free) == list(range(RESERVED, RESERVED + len(held) + len(free)))
        assert not self.scheduler.states.used or all(sample.slot for sample in self.scheduler.running)

    def check_blocks(self) -> None:
        """Every block is free or held; only whole blocks of a prefix are held by several."""
        self.check_slots()
        pool, block = self.scheduler.pool, self.scheduler.block
        holders: dict[int, int] = {}
        for part in self.spans:
            assert len(set(part.blocks)) == len(part.blocks)
            for number in part.blocks:
                holders[number] = holders.get(number, 0) + 1
        assert sorted([*pool._free, *holders]) == list(range(len(pool._readers)))
        assert all(pool._readers[number] == count for number, count in holders.items())
        self.most_blocks = max(self.most_blocks, len(holders))
        for sample in self.scheduler.running:
            whole = len(self.prefixes[sample.request].tokens) // block
            assert all(holders[number] == 1 for number in sample.blocks[whole:]), "a written block is shared"


def pretend(
    jobs: list[Job], *, blocks: int, block: int, rows: int, budget: int, passes: int = 1, slots: int | None = None
) -> Pretender:
    prefixes, samples, lengths = [], [], {}
    for request, job in enumerate(jobs):
        tokens = [1000 * (request + 1) + i for i in range(job.prompt)]
        prefixes.append(SharedPrompt(tokens[:-1]))
        for number, length in enumerate(job.lengths):
            samples.append(
                SequenceState(list(tokens), request=request, number=number, prompt=job.prompt, limit=job.limit)
            )
            lengths[request, number] = length
    scheduler = Scheduler(prefixes, samples, blocks=blocks, block=block, rows=rows, budget=budget, slots=slots)
    return Pretender(scheduler, prefixes, samples, lengths, passes)
