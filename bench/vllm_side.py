"""vLLM's `generate` as a side of our benchmarks, in this process, where vLLM is importable.

As a program it times one call, of what it is told on its standard input (`server_engine.py --own`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
from collections.abc import Sequence
from typing import Any

# In this process, so that one clock and one device see both; and no kernels that are fetched or built at the start.
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}


def has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


class Vllm:
    """Log-probabilities of the sampled tokens on, detokenising off, as our engine has them.

    `dummy` draws weights at random from the configuration alone.
    """

    def __init__(self, folder: str, dtype: str, rows: int, longest: int, share: float = 0.45, dummy: bool = False):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm

        # Its own recorded sizes stop at 512 sequences.
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024) if size <= rows]
        self.llm = vllm.LLM(
            model=folder,
            dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
            skip_tokenizer_init=True,
            load_format="dummy" if dummy else "auto",
            gpu_memory_utilization=share,
            max_model_len=longest,
            max_num_seqs=rows,
            cudagraph_capture_sizes=sorted({*sizes, rows}),
            disable_log_stats=True,
        )
        self.about = f"vLLM {vllm.__version__}, at most {rows} at once, graphs up to {rows}, its defaults otherwise"

    def generate(self, prompts: Sequence[Sequence[int]], n: int, tokens: int, end: int | None) -> list[list[int]]:
        from vllm import SamplingParams

        how: Any = SamplingParams(
            n=n,
            temperature=1.0,
            max_tokens=tokens,
            ignore_eos=end is None,
            stop_token_ids=None if end is None else [end],
            logprobs=0,
            detokenize=False,
        )
        asked: Any = [{"prompt_token_ids": list(ids)} for ids in prompts]
        made = self.llm.generate(asked, how, use_tqdm=False)
        found = [list(one.token_ids) for request in made for one in request.outputs]
        without = [one for request in made for one in request.outputs if one.logprobs is None]
        if without:
            raise SystemExit("vLLM gave no log-probabilities")
        return found


def main() -> None:
    asked = json.load(sys.stdin)
    prompts, n, tokens = asked["prompts"], asked["n"], asked["tokens"]
    longest = max(map(len, prompts)) + tokens
    side = Vllm(sys.argv[1], asked["dtype"], len(prompts) * n, longest)
    side.generate(prompts[:1], n, tokens, None)
    begun = time.perf_counter()
    made = side.generate(prompts, n, tokens, None)
    seconds = time.perf_counter() - begun
    print(json.dumps({"timing_s/gen": seconds, "tokens": sum(map(len, made))}))


if __name__ == "__main__":
    main()
