"""Scheduler extension for vLLM (`--scheduler-cls lockstep_scheduler.scheduler`): sends the output of a `SampleRoute`
sample once, when the sample is finished.

vLLM's engine sends every token with its log-prob to the HTTP process separately. With a small model, sending each token
takes longer than decoding. This scheduler buffers tokens and log-probs until the sample is finished. Other requests are
unchanged.

The scheduler runs in the server's Python, which may not have lockstep installed, so it may only import numpy and vLLM.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLE = "lockstep-sample-"
"""Prefix of the request ids whose output is buffered."""
LOGPROBS = "lockstep_logprobs"
"""Key in `kv_transfer_params` under which the log-probs of buffered requests are sent, as little-endian float64."""


def scheduler(vllm_config: Any, **given: Any) -> Any:
    """Creates vLLM's default scheduler with buffering added."""
    config = vllm_config.scheduler_config
    named, config.scheduler_cls = config.scheduler_cls, None
    try:
        usual = config.get_scheduler_cls()
    finally:
        config.scheduler_cls = named
    return type("FinishedSamples", (_FinishedSamples, usual), {})(vllm_config=vllm_config, **given)


class _FinishedSamples:
    """Mixin for a vLLM scheduler class that buffers the output of unfinished samples."""

    requests: dict[str, Any]

    def __init__(self, *args: Any, **given: Any):
        super().__init__(*args, **given)
        self._buffers: dict[str, _Buffer] = {}

    def update_from_output(self, *args: Any, **given: Any) -> Any:
        by_client = super().update_from_output(*args, **given)  # type: ignore[misc]
        for outputs in by_client.values():
            outputs.outputs = [
                finished for output in outputs.outputs if (finished := self._finished(output)) is not None
            ]
        if len(self._buffers) > len(self.requests):
            # Drop the buffers of requests that vLLM has aborted.
            self._buffers = {name: buffer for name, buffer in self._buffers.items() if name in self.requests}
        return {client: outputs for client, outputs in by_client.items() if _is_needed(outputs)}

    def _finished(self, output: Any) -> Any:
        """Returns the output to send now. For a buffered sample, returns None until the sample is finished, then its
        complete output."""
        name = output.request_id
        if not name.startswith(SAMPLE):
            return output
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = self._buffers[name] = _Buffer(output)
        buffer.take(output)
        if output.finish_reason is None:
            return None
        del self._buffers[name]
        return buffer.output(output)


class _Buffer:
    """Collects the output of an unfinished sample."""

    def __init__(self, first: Any):
        self._first = first
        self._ids: list[int] = []
        self._scored, self._logprobs = bytearray(), bytearray()
        """Token ids and log-probs as raw bytes; each step appends the bytes of its arrays."""
        self._kinds: tuple[Any, Any] = (np.int32, np.float32)
        self._routes: list[Any] = []
        """The experts of the tokens of each step, with --enable-return-routed-experts."""

    def take(self, output: Any) -> None:
        self._ids += output.new_token_ids
        logprobs = output.new_logprobs
        if logprobs is not None:
            # The first entry of each row is the sampled token.
            self._scored += logprobs.logprob_token_ids[:, 0].tobytes()
            self._logprobs += logprobs.logprobs[:, 0].tobytes()
            self._kinds = logprobs.logprob_token_ids.dtype, logprobs.logprobs.dtype
        if getattr(output, "routed_experts", None) is not None:
            self._routes.append(output.routed_experts)

    def output(self, last: Any) -> Any:
        scored, logprobs = (
            np.frombuffer(text, kind) for text, kind in zip((self._scored, self._logprobs), self._kinds, strict=True)
        )
        if scored.tolist() != self._ids:
            raise RuntimeError(f"vLLM returned log-probs of tokens that were not sampled: {last.request_id}")
        last.new_token_ids, last.new_logprobs = self._ids, None
        last.prefill_stats = self._first.prefill_stats
        if self._routes:
            last.routed_experts = np.concatenate(self._routes)
        # The log-probs are sent in this field, because vLLM's front end passes it on unchanged and lockstep's samples
        # do not transfer KV caches.
        last.kv_transfer_params = {LOGPROBS: logprobs.astype("<f8").tobytes()}
        return last


def _is_needed(outputs: Any) -> bool:
    return bool(outputs.outputs or outputs.finished_requests or outputs.scheduler_stats is not None)
