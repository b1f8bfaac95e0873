"""The configurations that speed is measured on, written with random weights and the tiny byte tokenizer.

python bench/shapes.py qwen2.5-0.5b FOLDER
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from lockstep.model.tiny import write_tiny
from lockstep.preflight.cluster import ModelCost


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
        kinds = {"qwen2": transformers.Qwen2Config, "qwen3": transformers.Qwen3Config}
        sizes = {"head_dim": self.head} if self.kind == "qwen3" else {}
        return kinds[self.kind](
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.queries,
            num_key_value_heads=self.keys,
            max_position_embeddings=32768,
            tie_word_embeddings=self.tied,
            **sizes,
        )


SHAPES = {
    "qwen2.5-0.5b": Shape(24, 896, 14, 2, 64, 4864, 151936),
    "qwen2.5-1.5b": Shape(28, 1536, 12, 2, 128, 8960, 151936),
    "qwen3-0.6b": Shape(28, 1024, 16, 8, 128, 3072, 151936, kind="qwen3"),
    "qwen2.5-7b": Shape(28, 3584, 28, 4, 128, 18944, 152064, tied=False),
}


def write_model(folder: Path, name: str, device: str = "cpu", spread: float = 0.02) -> None:
    """Random weights are drawn on `device`: billions of them take long on a processor."""
    write_tiny(folder)
    torch.manual_seed(0)
    config = SHAPES[name].config()
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
