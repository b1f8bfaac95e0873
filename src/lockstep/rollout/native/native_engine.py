"""The native engine: generates with the trained modules, continuous batching and a paged KV cache.

The native engine needs no weight sync. The KV cache of the engine exists during one call of `generate`, or is kept
together with the CUDA graphs that use it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from lockstep.device.base import Device
from lockstep.errors import Refusal
from lockstep.kernels.attention.kv_cache import KVCache, token_bytes
from lockstep.kernels.decode.decode_layers import GeneratingLayers, generating_layers
from lockstep.kernels.mixer_states import ModuleShapes, StateSlots, slot_bytes
from lockstep.kernels.quantized.projections import projections
from lockstep.kernels.quantized.quantized_view import QuantizedView
from lockstep.kernels.rotary import fixed_length
from lockstep.model.decoder import inner_decoder
from lockstep.model.policy import Policy
from lockstep.model.text_model import text_config, text_sizes
from lockstep.parallel.tensor import group_of
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.rollout.engine import Conversations, Further, PrefillCounts, SharedWeights, why_ended
from lockstep.rollout.native.cached_spans import SequenceState
from lockstep.rollout.native.intake import Intake
from lockstep.rollout.native.runner import Round, Runner
from lockstep.rollout.native.scheduler import Scheduler
from lockstep.rollout.native.state_plan import STATE_SHARE, StatePlan, plan_states
from lockstep.types import PAUSED, Completion, Request, Sampling

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


# Limits of the prompt tokens per prefill pass and of the length of a sequence in the KV cache.


def refuse_moving_positions(config: Any, longest: int, model: str, key: str = "rollout.max_tokens") -> None:
    """Raises `Refusal` if a sequence can exceed the length at which the rotary embedding of cached keys changes."""
    fixed = fixed_length(config)
    if fixed is not None and longest > fixed:
        raise Refusal.at(
            key,
            f"prompt and response can have {longest} tokens; over {fixed} tokens the rotary embedding of {model} "
            "depends on the sequence length (longrope or dynamic), so cached keys become invalid",
            f"keep the prompt length plus {key} within {fixed} tokens",
            code="rotary-limit",
        )


# USUAL: number of tokens that a prefill pass may have on every device. SHARE: fraction of the device memory that a
# prefill pass with more than USUAL tokens may use.
USUAL, SHARE = 8192, 1 / 8


def prefill_budget(settings: RolloutSettings, device: Device, config: Any, size: int) -> int:
    """Returns the tokens per prefill pass: the recipe's value, or a default for the device and its memory.

    The default depends on the total memory, not on the free memory, so it is the same in every step and every run.
    """
    if settings.prefill_tokens is not None:
        return settings.prefill_tokens
    if device.prefill_tokens <= USUAL:
        return device.prefill_tokens
    return fitting_prefill(device.prefill_tokens, device.memory().total, config, size)


def fitting_prefill(most: int, memory: int, config: Any, size: int) -> int:
    """Returns how many tokens, at most `most`, fit in a prefill pass on a device with this memory."""
    fitting = int(SHARE * memory) // prefill_bytes(config, 1, size)
    return min(most, max(USUAL, fitting // USUAL * USUAL))


def prefill_bytes(config: Any, tokens: int, size: int) -> int:
    """Returns the peak memory of a Llama-like layer for `tokens` tokens without a backward pass.

    Per token, the estimate counts three tensors of the feed-forward width and several of the hidden width. The tensors
    of the hidden width are the layer input, the residual sum after attention, its normalised value and fp32 copies of
    that value. `size` is the number of bytes per element.
    """
    sizes, text = text_sizes(config), text_config(config)
    hidden, inner = sizes.hidden, sizes.inner
    experts = (getattr(text, "num_experts_per_tok", None) or 0) * (getattr(text, "moe_intermediate_size", None) or 0)
    return tokens * (size * (3 * max(inner, experts) + 4 * hidden) + 2 * 4 * hidden)


# Default fraction of the free device memory for the KV cache.
FREE_SHARE = 0.5
# Turns of trajectories start when 1/TOGETHER of the batch rows are free.
TOGETHER = 16
# A KV cache of at most this fraction of the device's total memory is kept between calls of `generate`, with its CUDA
# graphs.
KEPT_SHARE = 0.05


def kept_cache(memory: int) -> int:
    """Returns the largest KV cache, in bytes, that is kept between calls on a device with `memory` bytes."""
    return int(KEPT_SHARE * memory)


class NativeEngine(SharedWeights):
    """The native engine. `decode` converts token ids to text for stop strings."""

    instead = "set rollout.engine=hf: the built-in engine does not keep the state of this model between tokens"

    def __init__(self, policy: Policy, device: Device, settings: RolloutSettings, decode: Callable[[list[int]], str]):
        self.policy, self.device, self.settings, self.decode = policy, device, settings, decode
        self.pause: Callable[[], bool] = lambda: False
        """Called between rounds of decoding. If `pause` returns True, `generate` yields the unfinished sequences and
        ends."""
        self.further: Further | None = None
        """A source of more requests, used between rounds while batch rows are free."""
        self.preempted = 0
        self._counts = PrefillCounts()
        self._ended: list[int] = []
        self._group = group_of(policy.causal_lm)
        self._cache_kept: KVCache | None = None
        self._runners: dict[Sampling, Runner] = {}
        self._weights: tuple[int, ...] = ()
        self._layers: GeneratingLayers | None = None
        self._layers_tried = False
        self._plan = StatePlan(settings.max_sequences)
        self._shapes: list[ModuleShapes] | None = None
        self._routes = False
        """Whether the current call of `generate` records the experts of each token."""
        self._fp8_cache = False
        """Whether the current call of `generate` keeps keys and values in fp8 (`rollout.kv_cache`)."""
        if settings.kv_cache is not None:
            refuse_fp8_cache(policy)
        self.view = quantized_view(policy, settings.precision)
        """The quantised weights of `rollout.precision`."""

    def generate(self, requests: Sequence[Request], sampling: Sampling) -> Iterator[Completion]:
        if not requests and not isinstance(self.further, Conversations):
            return
        intake = Intake(sampling)
        prefixes, sequences = intake.sequences(requests, 0)
        longest = max((sequence.limit for sequence in sequences), default=1)
        if isinstance(self.further, Conversations):
            longest = max(longest, self.further.longest_sequence)
        elif self.further is not None:
            longest = max(longest, self.further.longest_prompt + sampling.max_tokens)
        model = self.policy.causal_lm
        refuse_moving_positions(text_config(model.config), longest, type(model).__name__)
        self._fp8_cache = self.settings.kv_cache is not None and not sampling.full_precision
        self._routes = sampling.routes
        if self._routes:
            self.policy.decoder.install_routing("model.path")
        if self.view is not None and not sampling.full_precision:
            # Every call quantises the current weights, so that the view cannot be stale.
            self.view.refresh()
        runner = self._runner(sequences, longest, sampling)
        cache, settings = runner.cache, self.settings
        config, size = text_config(model.config), cache.element_size
        scheduler = Scheduler(
            prefixes,
            sequences,
            blocks=cache.blocks,
            block=cache.block,
            rows=min(settings.max_sequences, self._plan.rows),
            budget=prefill_budget(settings, self.device, config, size),
            slots=None if cache.states is None else cache.states.slots,
        )
        scheduler.on_preempt = runner.keep_routes
        training = self.policy.training
        self.policy.eval()
        self._ended.clear()
        try:
            yield from self._run(scheduler, runner, intake)
        finally:
            self.policy.train(training)
            self.preempted = scheduler.preempted
            self._counts = PrefillCounts(scheduler.computed, scheduler.reused, scheduler.parked.evicted)
            self._ended.clear()
            self._fp8_cache = False
            if self._frees_cache():
                self.release_memory()
                if self.view is not None:
                    self.view.free()

    def end_session(self, session: int) -> None:
        """Frees the blocks that are kept for the next turn of a trajectory."""
        # Tensor-parallel ranks must free the same blocks in the same round, so the next round frees them.
        self._ended.append(session)

    def prompt_counts(self) -> PrefillCounts:
        return self._counts

    def longest_sequence(self) -> int:
        """Returns the largest number of tokens of a sequence, prompt included: its keys and values fit the KV cache,
        and they stay valid."""
        block, fixed = self.settings.block_tokens, fixed_length(text_config(self.policy.causal_lm.config))
        states = STATE_SHARE if self.policy.decoder.mixers else 0.0
        blocks = int(self.cache_room() * (1 - states) // self.block_bytes())
        longest = (blocks - Scheduler.least_blocks(0, block)) * block
        return longest if fixed is None else min(longest, fixed)

    def release_memory(self) -> None:
        """Frees the KV cache and the CUDA graphs."""
        self._cache_kept = None
        self._runners.clear()

    def _frees_cache(self) -> bool:
        if self._group is not None:
            return True
        if self.settings.free_cache is not None:
            return self.settings.free_cache
        cache_bytes = self._cache_kept.nbytes if self._cache_kept is not None else 0
        return not self.device.graph_capture or cache_bytes > kept_cache(self.device.memory().total)

    def _run(self, scheduler: Scheduler, runner: Runner, intake: Intake) -> Iterator[Completion]:
        ahead: Round | None = None
        while self._filled(scheduler, intake):
            if self.pause():
                # A pause drops the tokens that the device has sampled ahead. A later call samples the same tokens
                # again, because the sampling noise depends only on the position.
                for sequence in scheduler.left():
                    if sequence.logprobs:
                        yield _completion(sequence, PAUSED, runner.routes(sequence))
                return
            now = ahead or self._next(scheduler, runner)
            if now is None:
                continue
            # If the next schedule does not depend on the tokens of this round, the device starts the next round while
            # the host reads these tokens. Sequences that have ended stay in the next round without effect: their blocks
            # are not yet reused.
            work = scheduler.schedule_ahead(runner.passes)
            runner.copy(work)
            if work.prefill:
                runner.prefill(work.prefill)
            ahead = runner.schedule_ahead(now, work.decode)
            for sequence, tokens, logprobs in zip(now.sequences, *now.read(), strict=True):
                if sequence.stop:
                    continue
                self._append(sequence, tokens, logprobs, intake.sampling)
                if sequence.stop:
                    routes = runner.routes(sequence)
                    scheduler.finish(sequence, park=not (scheduler.states.used and runner.ran_on(sequence)))
                    yield _completion(sequence, sequence.stop, routes)

    def _filled(self, scheduler: Scheduler, intake: Intake) -> bool:
        """Adds requests from `further` if rows are free; returns whether unfinished sequences are left."""
        room = scheduler.rows - len(scheduler.running)
        # Each turn of a trajectory starts with a prefill, so turns start a few at a time.
        least = max(1, scheduler.rows // TOGETHER) if isinstance(self.further, Conversations) else 1
        requests: Sequence[Request] = ()
        ended: list[int] = []
        if self.further is not None and room >= least and not scheduler.waiting:
            requests, ended = self._taken(self.further, room, wait=not scheduler.unfinished)
        elif self._group is None:
            ended = self._take_ended()
        # Sessions that have ended go first, so that they are not kept while others are evicted.
        for session in ended:
            scheduler.end_session(session)
        scheduler.add(*intake.sequences(requests, scheduler.num_requests))
        return scheduler.unfinished

    def _take_ended(self) -> list[int]:
        ended, self._ended = self._ended, []
        return ended

    def _taken(self, further: Further, room: int, *, wait: bool) -> tuple[Sequence[Request], list[int]]:
        """Returns more requests, and the sessions that have ended. All ranks of a tensor-parallel group get those of
        the group's first rank, which alone asks the source."""
        if self._group is not None and not self._group.is_first:
            requests, ended = self._group.object_of_first(None)
            return requests, ended
        requests, ended = further.take(room, wait), self._take_ended()
        if self._group is not None:
            self._group.object_of_first((requests, ended))
        return requests, ended

    def _next(self, scheduler: Scheduler, runner: Runner) -> Round | None:
        work = scheduler.next(runner.passes)
        runner.copy(work)
        if work.prefill:
            runner.prefill(work.prefill)
        return runner.decode(work.decode) if work.decode else None

    def _append(self, sequence: SequenceState, tokens: list[int], logprobs: list[float], sampling: Sampling) -> None:
        """Appends new tokens up to the token that ends the sequence, and drops all later tokens."""
        sampling = sequence.stops or sampling
        within = len(sequence.tokens) + len(tokens) < sequence.limit
        if within and not sampling.stop_strings and not any(token in sampling.stop_ids for token in tokens):
            sequence.tokens += tokens
            sequence.logprobs += logprobs
            sequence.cached = len(sequence.tokens) - 1
            return
        for token, logprob in zip(tokens, logprobs, strict=True):
            sequence.cached = len(sequence.tokens)
            sequence.tokens.append(token)
            sequence.logprobs.append(logprob)
            sequence.stop = why_ended(sequence.tokens, sequence.prompt, sampling, self.decode)
            if not sequence.stop and len(sequence.tokens) >= sequence.limit:
                sequence.stop = "length"
            if sequence.stop:
                return

    def _runner(self, sequences: Sequence[SequenceState], longest: int, sampling: Sampling) -> Runner:
        """Returns the previous runner with its CUDA graphs if its KV cache is large enough and the weights have not
        moved in memory; else a new runner."""
        view = None if sampling.full_precision else self.view
        # The fused layers write keys and values in their own dtype.
        layers = None if self._fp8_cache else self.ready_layers()
        # With tensor parallelism, each call creates a new KV cache, which has the same size on all ranks.
        addresses = () if self._group else tuple(parameter.data_ptr() for parameter in self.policy.parameters())
        addresses += () if view is None else view.addresses
        kept = self._cache_kept
        self._plan = self.state_plan(sequences)
        if kept is None or addresses != self._weights or not self._fits(kept, self._blocks(sequences, longest)):
            kept = None
            self.release_memory()
        # A CUDA graph does not depend on `max_tokens`, `seed` and `stop_strings`, which only the host uses.
        graph_sampling = replace(sampling, max_tokens=0, seed=0, stop_strings=())
        rows = self.settings.max_sequences
        runner = self._runners.get(graph_sampling)
        if runner is None or not runner.fits(rows, longest):
            kept = kept or self.cache_of(self._blocks(sequences, longest), self._plan)
            runner = Runner(self.policy, kept, graph_sampling, self.device, rows, longest)
            self._cache_kept, self._weights = kept, addresses
            self._runners[graph_sampling] = runner
        runner.layers, runner.view = layers, view
        return runner

    def _fits(self, kept: KVCache, blocks: int) -> bool:
        slots = 0 if kept.states is None else kept.states.slots
        # A cache that records routes is also used for validation, which needs none, so that its CUDA graphs are kept.
        routes = kept.routes_LSK is not None or not self._routes
        return kept.fp8 == self._fp8_cache and kept.blocks >= blocks and slots >= (self._plan.slots or 0) and routes

    def state_plan(self, sequences: Sequence[SequenceState] | None = None) -> StatePlan:
        """Returns how many sequences run at once, and the slots for the states of recurrent layers. Without `sequences`
        the number and grouping of sequences are not known."""
        if self._shapes is None:
            self._shapes = self.policy.decoder.state_shapes()
        rows, samples = self.settings.max_sequences, 1
        if sequences is not None and self.further is None:
            rows = min(rows, len(sequences))
            samples = max(1, len(sequences) // len({sequence.request for sequence in sequences}))
        key = "rollout.cache_gb" if self.settings.cache_gb is not None else "memory"
        sessions = self.further.sessions if isinstance(self.further, Conversations) else 0
        plan = plan_states(slot_bytes(self._shapes), self.cache_room(), rows, samples, key, sessions)
        if self._group is None or plan.slots is None:
            return plan
        # All tensor-parallel ranks must run the same schedule.
        like = self.policy.causal_lm.get_input_embeddings().weight
        rows, slots = (self._group.least(number, like.device) for number in (plan.rows, plan.slots))
        return StatePlan(rows, slots, plan.bytes)

    def ready_layers(self) -> GeneratingLayers | None:
        """Returns the device's fused decoder layers with current weights, or None if the device has no such layers."""
        # A policy that does not use the device's attention kernel also uses no fused layers. No fused layer is
        # recurrent.
        plain = self.policy.kernel == self.device.attention and self._group is None
        tried, self._layers_tried = self._layers_tried, True
        if not tried and plain and not self.policy.decoder.mixers:
            decoder = inner_decoder(self.policy.causal_lm)
            layout = self.policy.decoder.cache_layout()
            self._layers = generating_layers(decoder, self.device.generating_layers, layout)
        if self._layers is not None:
            self._layers.lay()
        return self._layers if self._layers is not None and self._layers.ready else None

    def _blocks(self, sequences: Sequence[SequenceState], longest: int) -> int:
        """Returns the number of KV-cache blocks: as many as the sequences can use at once, within the memory limit."""
        block = self.settings.block_tokens
        like = self.policy.causal_lm.get_input_embeddings().weight
        block_bytes, configured = self.block_bytes(), self.settings.cache_gb
        room = self.cache_room() - self._plan.bytes
        useful = _useful_blocks(sequences, self.settings.max_sequences, block)
        if isinstance(self.further, Conversations):
            # A trajectory keeps its blocks while it waits for its environment.
            useful = max(useful, self.further.sessions * Scheduler.least_blocks(longest, block))
        if self.device.graph_capture:
            # Round up, so that a later call with slightly longer prompts can keep the graphs.
            step = 1 << max(0, useful.bit_length() - 4)
            useful = -(-useful // step) * step
        least = Scheduler.least_blocks(longest, block)
        blocks = min(max(useful, least), int(room // block_bytes))
        if self._group is not None:
            # All tensor-parallel ranks must run the same schedule.
            blocks = self._group.least(blocks, like.device)
        if blocks < least:
            raise Refusal.at(
                "rollout.cache_gb" if configured is not None else "memory",
                f"a response of {longest} tokens with its prompt needs {least * block_bytes / 1e9:.3g} GB of "
                f"key/value cache; {room / 1e9:.3g} GB are available",
                "raise rollout.cache_gb, or lower rollout.max_tokens",
                code="not-enough-memory",
            )
        return blocks

    def block_bytes(self) -> int:
        """Returns the bytes of one KV-cache block."""
        like = self.policy.causal_lm.get_input_embeddings().weight
        layout = self.policy.decoder.cache_layout()
        routing = self.policy.decoder.routing if self._routes else None
        routes = 0 if routing is None else routing.token_bytes
        return self.settings.block_tokens * (token_bytes(layout, like.element_size(), fp8=self._fp8_cache) + routes)

    def cache_room(self) -> float:
        """Returns the bytes available for the KV cache."""
        if self.settings.cache_gb is not None:
            return self.settings.cache_gb * 1e9
        cache_bytes = self._cache_kept.nbytes if self._cache_kept is not None else 0
        return FREE_SHARE * (self.device.memory().free + cache_bytes)

    def cache_of(self, blocks: int, plan: StatePlan) -> KVCache:
        like = self.policy.causal_lm.get_input_embeddings().weight
        layout = self.policy.decoder.cache_layout()
        cache = KVCache(layout, blocks, self.settings.block_tokens, like, fp8=self._fp8_cache)
        if plan.slots is not None:
            assert self._shapes is not None
            cache.states = StateSlots(self._shapes, plan.slots, like.device)
        if self._routes:
            routing = self.policy.decoder.install_routing("model.path")
            cache.keep_routes(routing.layers, routing.top_k, routing.dtype)
        return cache


def refuse_fp8_cache(policy: Policy) -> None:
    """Raises `Refusal` if the attention of the model reads its KV cache in another way than by keys and values."""
    calls = policy.decoder.cache_layout().calls
    if policy.decoder.selects_rows or any(call.latent is not None for call in calls):
        raise Refusal.at(
            "rollout.kv_cache",
            f"the attention of {type(policy.causal_lm).__name__} caches latents, or selects tokens by their keys",
            "remove rollout.kv_cache",
            code="unsupported-model",
        )


def quantized_view(policy: Policy, precision: str | None) -> QuantizedView | None:
    """Returns the view of the projections of the decoder layers, or None if generation has the trained precision."""
    if precision is None:
        return None
    assert policy.decoder.attentions or policy.decoder.mixers  # the access finds the recurrent modules
    found = projections(policy.decoder.layers, [mixer.module for mixer in policy.decoder.mixers])
    if not found:
        raise Refusal.at(
            "rollout.precision",
            f"{type(policy.causal_lm).__name__} has no projections that can be quantised to {precision}: its layers "
            "have no linear layers of torch, or their weights are quantised already",
            "remove rollout.precision",
            code="unsupported-model",
        )
    view = QuantizedView(found, precision)
    # Experts are stacked in parameters with three dimensions.
    stacked = sum(one.numel() for layer in policy.decoder.layers for one in layer.parameters() if one.ndim == 3)
    if stacked:
        share = view.parameters / (view.parameters + stacked)
        why = f"the stacked experts of {type(policy.causal_lm).__name__} keep model.dtype"
        warnings.warn(
            f"rollout.precision: {why}; {share:.0%} of the weights of its layers have {precision}", stacklevel=2
        )
    return view


def _completion(sequence: SequenceState, stop: str, routes: np.ndarray | None) -> Completion:
    ids = sequence.tokens[sequence.prompt :]
    return Completion(sequence.asked, sequence.number, ids, sequence.logprobs, stop, routes=routes)


def _useful_blocks(sequences: Sequence[SequenceState], rows: int, block: int) -> int:
    """Returns the largest number of KV-cache blocks in use at once, with one reserved block per running sequence."""
    # Samples of a prompt share the full blocks of the prompt, so each sequence needs only the blocks after these.
    unshared = sorted((-(-s.limit // block) - (s.prompt - 1) // block + 1 for s in sequences), reverse=True)
    shared = sorted((-(-prompt // block) for prompt in {s.request: s.prompt for s in sequences}.values()), reverse=True)
    return sum(unshared[:rows]) + sum(shared[:rows])


def open_engine(
    policy: Policy, device: Device, settings: RolloutSettings, tokenizer: PreTrainedTokenizerBase
) -> NativeEngine:
    return NativeEngine(policy, device, settings, tokenizer.decode)
