"""What lockstep adds to vLLM's scheduler (`--scheduler-cls lockstep_scheduler.scheduler`): a sample of `SampleRoute` is
told of once, when it is finished.

vLLM's engine tells its HTTP server of every token of every request: each goes with its log-prob, in three arrays,
through a socket between two processes. For a small model that takes longer than the tokens. Here the tokens stay where
they are until a sample is finished. Requests of anybody else are left as they are.

Runs in the server's Python, which need not have lockstep: it imports numpy and vLLM alone.
"""

from __future__ import annotations

from typing import Any

import numpy as np

SAMPLE = "lockstep-sample-"
"""How the names of requests begin that are told of once."""


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
        self._held: dict[str, list[Any]] = {}

    def update_from_output(self, *args: Any, **given: Any) -> Any:
        by_client = super().update_from_output(*args, **given)  # type: ignore[misc]
        for told in by_client.values():
            told.outputs = [whole for output in told.outputs if (whole := self._whole(output)) is not None]
        if len(self._held) > len(self.requests):
            # Of requests that were aborted, which nobody tells of here.
            self._held = {name: held for name, held in self._held.items() if name in self.requests}
        return by_client

    def _whole(self, output: Any) -> Any:
        """What is to be told now: None until a sample is finished, then all of it."""
        name = output.request_id
        if not name.startswith(SAMPLE):
            return output
        if output.finish_reason is None:
            self._held.setdefault(name, []).append(output)
            return None
        pieces = [*self._held.pop(name, ()), output]
        output.new_token_ids = [token for piece in pieces for token in piece.new_token_ids]
        output.new_logprobs = _joined([piece.new_logprobs for piece in pieces if piece.new_logprobs is not None])
        output.prefill_stats = pieces[0].prefill_stats
        output.events = [event for piece in pieces for event in piece.events or ()] or None
        return output


def _joined(pieces: list[Any]) -> Any:
    """Log-probs of several steps: arrays of a row for each token."""
    if not pieces:
        return None
    rows = zip(*((one.logprob_token_ids, one.logprobs, one.sampled_token_ranks) for one in pieces), strict=True)
    return type(pieces[0])(*map(np.concatenate, rows))
