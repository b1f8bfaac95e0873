"""The configurations that speed is measured on, written with random weights and the tiny byte tokenizer.

python bench/shapes.py qwen2.5-0.5b FOLDER
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep.model.tiny import write_tiny
from lockstep.preflight.cluster import ModelCost, model_cost


@dataclass(frozen=True)
class Shape:
    """What the work of a decoder follows from."""

    layers: int
    hidden: int
    queries: int
    keys: int
    head: int
    inner: int
    vocabulary: int
    tied: bool = True
    kind: str = "qwen2"
    context: int = 32768

    @property
    def multiplied(self) -> int:
        """Weights that every token is multiplied with: all but norms, biases and an embedding that is no head."""
        attention = 2 * self.hidden * self.queries * self.head + 2 * self.hidden * self.keys * self.head
        return self.layers * (attention + 3 * self.hidden * self.inner) + self.vocabulary * self.hidden

    @property
    def cost(self) -> ModelCost:
        return ModelCost(
            multiplied=self.multiplied,
            head=self.vocabulary * self.hidden,
            read=self.multiplied,
            attended=self.layers * self.queries * self.head,
            cached=2 * self.layers * self.keys * self.head,
            layers=self.layers,
            vocabulary=self.vocabulary,
        )

    @classmethod
    def of(cls, config: Any) -> Shape:
        queries = config.num_attention_heads
        return cls(
            layers=config.num_hidden_layers,
            hidden=config.hidden_size,
            queries=queries,
            keys=config.num_key_value_heads,
            head=getattr(config, "head_dim", None) or config.hidden_size // queries,
            inner=config.intermediate_size,
            vocabulary=config.vocab_size,
            tied=config.tie_word_embeddings,
            kind=config.model_type,
        )

    def config(self) -> Any:
        kinds = {
            "qwen2": transformers.Qwen2Config,
            "qwen3": transformers.Qwen3Config,
            "llama": transformers.LlamaConfig,
        }
        sizes = {"head_dim": self.head} if self.kind == "qwen3" else {}
        return kinds[self.kind](
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.queries,
            num_key_value_heads=self.keys,
            max_position_embeddings=self.context,
            tie_word_embeddings=self.tied,
            **sizes,
        )


@dataclass(frozen=True)
class ConfigShape:
    """A decoder whose work is counted on its modules: experts, latents, recurrent layers."""

    kind: str
    settings: Mapping[str, Any]

    @property
    def vocabulary(self) -> int:
        return int(self.settings["vocab_size"])

    @property
    def hidden(self) -> int:
        return int(self.settings["hidden_size"])

    @cached_property
    def cost(self) -> ModelCost:
        return model_cost(self.config())

    def config(self) -> Any:
        return transformers.AutoConfig.for_model(self.kind, **self.settings)


GEMMA3_1B = {
    "vocab_size": 262144,
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "num_hidden_layers": 26,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "head_dim": 256,
    "sliding_window": 512,
    "max_position_embeddings": 32768,
}
QWEN3_30B_A3B = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "moe_intermediate_size": 768,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
}
# 6.9 billion parameters, of which a token uses 1.3 billion: the sizes of OLMoE.
OLMOE_7B_A1B = {
    "vocab_size": 50304,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 4096,
}
# The same model in a size for a CPU.
TINY_MOE = OLMOE_7B_A1B | {
    "vocab_size": 259,
    "hidden_size": 64,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
# The sizes of DeepSeek-V2-Lite with the router of DeepSeek-V3.
DEEPSEEK_16B = {
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "n_shared_experts": 2,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "q_lora_rank": None,
    "num_mtp_layers": 0,
}
# Three of four layers are recurrent.
QWEN3_5_2B = {
    "vocab_size": 248320,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 24,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 16,
    "tie_word_embeddings": True,
}

SHAPES: dict[str, Shape | ConfigShape] = {
    "qwen2.5-0.5b": Shape(24, 896, 14, 2, 64, 4864, 151936),
    "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151936),
    "qwen3-0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936, kind="qwen3"),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064, tied=False),
    "qwen3-8b": Shape(36, 4096, 32, 8, 128, 12288, 151936, tied=False, kind="qwen3"),
    "llama3-70b": Shape(80, 8192, 64, 8, 128, 28672, 128256, tied=False, kind="llama"),
    "gemma3-1b": ConfigShape("gemma3_text", GEMMA3_1B),
    "qwen3-30b-a3b": ConfigShape("qwen3_moe", QWEN3_30B_A3B),
    "olmoe-7b-a1.3b": ConfigShape("olmoe", OLMOE_7B_A1B),
    "tiny-moe": ConfigShape("olmoe", TINY_MOE),
    "deepseek-16b": ConfigShape("deepseek_v3", DEEPSEEK_16B),
    "qwen3.5-2b": ConfigShape("qwen3_5_text", QWEN3_5_2B),
}


def write_model(folder: Path, name: str | Shape, device: str = "cpu", spread: float = 0.02) -> None:
    """Random weights are drawn on `device`: billions of them take long on a processor."""
    write_tiny(folder)
    torch.manual_seed(0)
    config = (SHAPES[name] if isinstance(name, str) else name).config()
    config.initializer_range = spread
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args()
    write_model(args.folder, args.shape, args.device)


if __name__ == "__main__":
    main()
