"""What lockstep adds to vLLM's scheduler (`--scheduler-cls lockstep_scheduler.scheduler`): a sample of `SampleRoute` is
told of once, when it is finished.

vLLM's engine tells its HTTP server of every token of every request: each goes with its log-prob, in three arrays,
through a socket between two processes, and is made an object of there. For a small model that takes longer than the
tokens. Here tokens and log-probs stay where they are until a sample is finished, and go as one row of bytes. Requests
of anybody else are left as they are.

Runs in the server's Python, which need not have lockstep: it imports numpy and vLLM alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLE = "lockstep-sample-"
"""How the names of requests begin that are told of once."""
LOGPROBS = "lockstep_logprobs"
"""Where their log-probs are: numbers of 8 bytes, the first byte the least."""


def scheduler(vllm_config: Any, **given: Any) -> Any:
    """The scheduler that vLLM would have taken, told to hold back."""
    config = vllm_config.scheduler_config
    named, config.scheduler_cls = config.scheduler_cls, None
    try:
        usual = config.get_scheduler_cls()
    finally:
        config.scheduler_cls = named
    return type("FinishedSamples", (_FinishedSamples, usual), {})(vllm_config=vllm_config, **given)


class _FinishedSamples:
    """Mixed into a scheduler class."""

    requests: dict[str, Any]

    def __init__(self, *args: Any, **given: Any):
        super().__init__(*args, **given)
        self._held: dict[str, _Held] = {}

    def update_from_output(self, *args: Any, **given: Any) -> Any:
        by_client = super().update_from_output(*args, **given)  # type: ignore[misc]
        for told in by_client.values():
            told.outputs = [whole for output in told.outputs if (whole := self._whole(output)) is not None]
        if len(self._held) > len(self.requests):
            # Of requests that were aborted, which nobody tells of here.
            self._held = {name: held for name, held in self._held.items() if name in self.requests}
        return {client: told for client, told in by_client.items() if _says_something(told)}

    def _whole(self, output: Any) -> Any:
        """What is to be told now: None until a sample is finished, then all of it."""
        name = output.request_id
        if not name.startswith(SAMPLE):
            return output
        held = self._held.get(name)
        if held is None:
            held = self._held[name] = _Held(output)
        held.take(output)
        if output.finish_reason is None:
            return None
        del self._held[name]
        return held.told(output)


class _Held:
    """A sample on its way."""

    def __init__(self, first: Any):
        self._first = first
        self._ids: list[int] = []
        self._scored, self._logprobs = bytearray(), bytearray()
        """The bytes of token ids and of their log-probs, as the arrays have them that come with each step."""
        self._kinds: tuple[Any, Any] = (np.int32, np.float32)

    def take(self, output: Any) -> None:
        self._ids += output.new_token_ids
        said = output.new_logprobs
        if said is not None:
            # The sampled token stands first in its row.
            self._scored += said.logprob_token_ids[:, 0].tobytes()
            self._logprobs += said.logprobs[:, 0].tobytes()
            self._kinds = said.logprob_token_ids.dtype, said.logprobs.dtype

    def told(self, last: Any) -> Any:
        scored, logprobs = (
            np.frombuffer(text, kind) for text, kind in zip((self._scored, self._logprobs), self._kinds, strict=True)
        )
        if scored.tolist() != self._ids:
            raise RuntimeError(f"vLLM gave log-probs of other tokens than the sampled ones: {last.request_id}")
        last.new_token_ids, last.new_logprobs = self._ids, None
        last.prefill_stats = self._first.prefill_stats
        # vLLM's front end hands this on as it is, and a sample of ours has no cache to be handed on.
        last.kv_transfer_params = {LOGPROBS: logprobs.astype("<f8").tobytes()}
        return last


def _says_something(told: Any) -> bool:
    return bool(told.outputs or told.finished_requests or told.scheduler_stats is not None)
