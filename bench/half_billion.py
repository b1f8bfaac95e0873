"""Write a model of the shape of Qwen2.5-0.5B with random weights and the tiny tokenizer, for speed measurements.

python bench/half_billion.py FOLDER
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from lockstep.model.tiny import write_tiny
from memory import SHAPE


def write_half_billion(folder: Path) -> None:
    write_tiny(folder)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.Qwen2Config(**SHAPE), dtype=torch.bfloat16)
    model.save_pretrained(folder)


def main() -> None:
    write_half_billion(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
