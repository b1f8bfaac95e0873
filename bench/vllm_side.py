"""vLLM's `generate` as a side of our benchmarks, in this process, where vLLM is importable.

As a program it times calls of what it is told on its standard input (`server_engine.py --own`): with and without a seed
for each prompt, with and without log-probabilities, which are those of the sampled distribution.
"""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
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


def write_config(config: Any, folder: str) -> None:
    """Writes what vLLM needs of a model with random weights. Without the name of a class, it would take `gemma3_text`
    for a model that embeds. It knows Qwen3.5 only with a vision tower, which `Vllm` then leaves out."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]
    if config.model_type == "qwen3_5_text":
        from transformers import Qwen3_5Config

        tower = {"depth": 1, "out_hidden_size": config.hidden_size}
        tied = config.tie_word_embeddings
        config = Qwen3_5Config(text_config=config.to_dict(), vision_config=tower, tie_word_embeddings=tied)
        name = "Qwen3_5ForConditionalGeneration"
    config.architectures = [name]
    config.save_pretrained(folder)


class Vllm:
    """Log-probabilities of the sampled tokens on, detokenising off, as our engine has them.

    `dummy` draws weights at random from the configuration alone.
    """

    def __init__(
        self,
        folder: str,
        dtype: str,
        rows: int,
        longest: int,
        share: float = 0.45,
        dummy: bool = False,
        logprobs_mode: str = "raw_logprobs",
    ):
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        import vllm

        # Its own recorded sizes stop at 512 sequences.
        sizes = [size for size in (1, 2, 4, 8, 16, 32, 64, 128, 192, 256, 384, 512, 768, 1024) if size <= rows]
        self.llm = vllm.LLM(
            model=folder,
            dtype={"bf16": "bfloat16", "fp32": "float32"}[dtype],
            runner="generate",
            language_model_only=True,
            skip_tokenizer_init=True,
            load_format="dummy" if dummy else "auto",
            gpu_memory_utilization=share,
            max_model_len=longest,
            max_num_seqs=rows,
            cudagraph_capture_sizes=sorted({*sizes, rows}),
            disable_log_stats=True,
            # On Hopper its default for the gated delta rule is a kernel of flashinfer.
            additional_config={} if importlib.util.find_spec("flashinfer") else {"gdn_prefill_backend": "triton"},
            logprobs_mode=logprobs_mode,
        )
        self.about = f"vLLM {vllm.__version__}, at most {rows} at once, graphs up to {rows}, its defaults otherwise"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        tokens: int,
        end: int | None,
        *,
        seeds: bool = False,
        logprobs: bool = True,
    ) -> list[list[int]]:
        from vllm import SamplingParams

        def how(seed: int | None) -> Any:
            return SamplingParams(
                n=n,
                temperature=1.0,
                max_tokens=tokens,
                ignore_eos=end is None,
                stop_token_ids=None if end is None else [end],
                seed=seed,
                logprobs=0 if logprobs else None,
                detokenize=False,
            )

        asked: Any = [{"prompt_token_ids": list(ids)} for ids in prompts]
        # The samples of a prompt have the seeds that follow its own.
        every: Any = [how(1000 * number) for number in range(len(prompts))] if seeds else how(None)
        made = self.llm.generate(asked, every, use_tqdm=False)
        found = [list(one.token_ids) for request in made for one in request.outputs]
        without = [one for request in made for one in request.outputs if one.logprobs is None]
        if logprobs and without:
            raise SystemExit("vLLM gave no log-probabilities")
        return found


def main() -> None:
    asked = json.load(sys.stdin)
    prompts, n, tokens = asked["prompts"], asked["n"], asked["tokens"]
    longest = max(map(len, prompts)) + tokens
    side = Vllm(sys.argv[1], asked["dtype"], len(prompts) * n, longest, logprobs_mode="processed_logprobs")
    told: dict[str, Any] = {"engine in this process": os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0"}
    for seeds, logprobs in ((False, True), (True, True), (False, False), (True, False)):
        seconds = []
        for _ in range(asked.get("times", 3) + 1):
            begun = time.perf_counter()
            made = side.generate(prompts, n, tokens, None, seeds=seeds, logprobs=logprobs)
            seconds.append(time.perf_counter() - begun)
        median, count = statistics.median(seconds[1:]), sum(map(len, made))
        name = f"{'seeds' if seeds else 'no seeds'}, {'log-probs' if logprobs else 'no log-probs'}"
        told[name] = {"timing_s/gen": median, "tokens": count, "tokens/s": count / median}
        print(name, told[name], file=sys.stderr, flush=True)
    print(json.dumps(told))


if __name__ == "__main__":
    main()
