"""How long chat rows take to become tokens: cold, warm and without a cache, beside TRL and the `map` of `datasets`.

python bench/data.py                                  # 100,000 rows of about 300 tokens
python bench/data.py --rows 5000 --sides lockstep     # a quick look

Every measurement is a process of its own; imports and the loading of the tokenizer are not in its time.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

ROLES = ("user", "assistant", "user", "assistant")
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
LIMIT = 4096


def text() -> str:
    """English that comes with every Python: the topics of its help."""
    return re.sub(r"[ ]+", " ", "\n".join(topics.topics[name] for name in sorted(topics.topics)))


def write_tokenizer(folder: Path) -> None:
    """A byte-level BPE of that text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=16000,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text().splitlines(), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    fast.chat_template = TEMPLATE
    fast.save_pretrained(folder)


def write_rows(path: Path, rows: int) -> None:
    """Chats of four turns cut out of the text, about 300 tokens each."""
    words = re.findall(r"\S+\s+", text())
    draw = random.Random(0)

    def said() -> str:
        count = draw.randrange(25, 71)
        first = draw.randrange(len(words) - count)
        return "".join(words[first : first + count]).strip()

    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            file.write(json.dumps({"messages": [{"role": role, "content": said()} for role in ROLES]}) + "\n")


def lockstep(work: Path, cache: str) -> Callable[[], Any]:
    from transformers import AutoTokenizer

    from lockstep.data.dataset import Dataset, load_rows
    from lockstep.data.encode.sft_rows import SupervisedRows
    from lockstep.recipe.keys_data import Data

    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    data = Data(train=str(work / "chats.jsonl"), cache=cache)
    return lambda: load_rows(Dataset, SupervisedRows, data.train, data, tokenizer, LIMIT)


def datasets_map(work: Path, processes: int) -> Callable[[], Any]:
    """The least that others do: template and tokens, no mask of what is trained, nothing checked."""
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")

    def encode(rows: dict[str, list[Any]]) -> dict[str, Any]:
        texts = tokenizer.apply_chat_template(rows["messages"], tokenize=False)
        return {"input_ids": tokenizer(texts, add_special_tokens=False)["input_ids"]}

    def read() -> Any:
        path, folder = str(work / "chats.jsonl"), str(work / "datasets")
        rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=folder)
        return rows.map(encode, batched=True, num_proc=processes, remove_columns=["messages"])

    return read


def trl(work: Path, processes: int) -> Callable[[], Any]:
    """What `SFTTrainer` does before its first step, with a model of a few thousand weights."""
    import datasets
    from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM
    from trl import SFTConfig, SFTTrainer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(work / "tokenizer")
    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **shape))
    settings = SFTConfig(
        output_dir=str(work / "trl"),
        max_length=LIMIT,
        dataset_num_proc=processes,
        report_to=[],
        bf16=False,
        use_cpu=True,
    )

    def read() -> Any:
        path, folder = str(work / "chats.jsonl"), str(work / "datasets-trl")
        rows = datasets.load_dataset("json", data_files=path, split="train", cache_dir=folder)
        return SFTTrainer(model, args=settings, train_dataset=rows, processing_class=tokenizer).train_dataset

    return read


def measured(side: str, work: Path, processes: int) -> dict[str, Any]:
    """One side's seconds and memory, in this process."""
    opened = {
        "lockstep": lambda: lockstep(work, str(work / "cache")),
        "lockstep-off": lambda: lockstep(work, "off"),
        "datasets": lambda: datasets_map(work, processes),
        "trl": lambda: trl(work, processes),
    }[side]()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    used = _cpu()
    start = time.perf_counter()
    found = opened()
    seconds = time.perf_counter() - start
    cpu, after = _cpu() - used, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    items = found.items if side.startswith("lockstep") else found
    digest, tokens = hashlib.sha256(), 0
    for item in items:
        ids = list(item.ids if side.startswith("lockstep") else item["input_ids"])
        digest.update(json.dumps(ids).encode())
        tokens += len(ids)
    grown = (after - before) / 1024
    told = {"seconds": seconds, "cpu_s": cpu, "grown_mb": grown, "rows": len(items), "tokens": tokens}
    return told | {"sha256": digest.hexdigest()}


def _cpu() -> float:
    return sum(
        use.ru_utime + use.ru_stime for use in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--processes", type=int, default=len(os.sched_getaffinity(0)), help="Of the other sides.")
    parser.add_argument("--sides", nargs="+", default=["lockstep", "lockstep-off", "datasets", "trl"])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.measure:
        print(json.dumps(measured(words.measure, words.work, words.processes)))
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_tokenizer(work / "tokenizer")
        write_rows(work / "chats.jsonl", words.rows)
        results = compared(words.sides, work, words.processes)
    if words.out:
        facts = {"machine": platform.machine(), "cores": words.processes, "results": results}
        words.out.write_text(json.dumps(facts, indent=2) + "\n")


def compared(sides: list[str], work: Path, processes: int) -> dict[str, Any]:
    """Each side cold and warm, with its time as a multiple of ours."""
    results: dict[str, Any] = {}
    print(f"{'side':20} {'seconds':>8} {'CPU s':>8} {'MB more':>8}   times ours")
    for side in sides:
        for state in ("cold", "warm") if side != "lockstep-off" else ("cold",):
            command = [sys.executable, __file__, "--measure", side, "--work", str(work), "--processes", str(processes)]
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
            name = f"{side} {state}"
            if done.returncode:
                print(f"{name:20} failed (see above); TRL and datasets are the extra [bench]")
                break
            result = results[name] = json.loads(done.stdout.splitlines()[-1])
            ours = results.get(f"lockstep {state}", result)
            if result["sha256"] != next(iter(results.values()))["sha256"]:
                print(f"{name}: other tokens than ours")
            ratio = f"{result['seconds'] / ours['seconds']:.2f} ({result['cpu_s'] / ours['cpu_s']:.2f} in CPU time)"
            print(f"{name:20} {result['seconds']:8.2f} {result['cpu_s']:8.2f} {result['grown_mb']:8.0f}   {ratio}")
    return results


if __name__ == "__main__":
    main()
