"""Routing replay on a trained mixture of experts: flipped routes per layer, the difference of log-probs between engine
and trainer with and without it, and the behaviour under staleness.

python bench/routing_replay.py --folder /tmp/routing --out result.json

1. Writes a Qwen3-MoE (4 layers, 4 of 16 experts), and trains it with the recipe warmup-arithmetic.
2. Generates answers with the native engine and computes the log-probs of the same tokens with the trainer, with the
   experts of the engine (`rollout`) and with its own (`off`). `bf16 | fp32` is an engine in bf16 and a trainer in fp32.
   `lag N` is an engine with the weights before N steps of GRPO and a trainer with the weights after them.
3. Runs GRPO (recipe grpo-arithmetic) with `algorithm.routing_replay` off, old and rollout, with several values of
   `rollout.max_staleness` and several seeds, in bf16, and reports the reward over the steps.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from lockstep.data.prepare.generated import write_arithmetic
from lockstep.device.select import select
from lockstep.model.load import load_policy, load_tokenizer
from lockstep.model.policy import Policy
from lockstep.model.tiny import write_tiny
from lockstep.recipe.keys_rollout import RolloutSettings
from lockstep.recipe.schema import Model
from lockstep.rollout.native.native_engine import NativeEngine
from lockstep.types import Completion, Request, Sampling
from precision import trainer_logprobs
from report import DIFFERENCE, Table, logprob_difference, machine, write_record

SIZES = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "max_position_embeddings": 512,
}


REWARD = """
def digits(data_source, solution_str, ground_truth, extra_info):
    return sum(one.isdigit() for one in solution_str) / max(1, len(solution_str))
"""


def write_model(folder: Path) -> None:
    """Writes a random model with the tokenizer of the embedded tiny model."""
    if (folder / "config.json").is_file():
        return
    write_tiny(folder, hidden=64, layers=1)
    tokenizer = load_tokenizer(str(folder))
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    torch.manual_seed(0)
    Qwen3MoeForCausalLM(Qwen3MoeConfig(vocab_size=len(tokenizer), **ends, **SIZES)).save_pretrained(folder)


def train(folder: Path, recipe: str, name: str, *words: str) -> list[dict[str, float]]:
    """Trains with `lockstep train`, unless the run is finished. Returns the metrics of each step."""
    run = folder / "runs" / name
    done = run / "export" / "config.json"
    if not done.is_file():
        command = [sys.executable, "-m", "lockstep", "train", recipe, f"run.name={name}", *words]
        subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(line)["data"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@dataclass(frozen=True)
class Side:
    """A model folder and the dtype in which it runs."""

    folder: Path
    dtype: str

    def load(self) -> Policy:
        model = Model(path=str(self.folder), dtype=self.dtype)  # type: ignore[arg-type]
        return load_policy(model, torch.device("cpu"), select("cpu").attention, 0)


def generated(side: Side, prompts: list[list[int]], n: int) -> list[Completion]:
    policy, tokenizer = side.load(), load_tokenizer(str(side.folder))
    engine = NativeEngine(policy, select("cpu"), RolloutSettings(), tokenizer.decode)
    sampling = Sampling(max_tokens=48, seed=0, stop_ids=(tokenizer.eos_token_id,), routes=True)
    requests = [Request(ids, key, n) for key, ids in enumerate(prompts)]
    return sorted(engine.generate(requests, sampling), key=lambda one: (one.request, one.sample))


def compared(name: str, engine: Side, trainer: Side, prompts: list[list[int]], n: int) -> dict[str, Any]:
    """Compares the log-probs of an engine and a trainer, with and without the experts of the engine."""
    made, policy = generated(engine, prompts, n), trainer.load()
    routing = policy.decoder.install_routing(str(trainer.folder))
    engine_K = torch.tensor([logprob for one in made for logprob in one.logprobs])
    found: dict[str, Any] = {"name": name, "tokens": len(engine_K)}
    for mode in ("off", "rollout"):
        trainer_K = trainer_logprobs(policy, prompts, made, torch.device("cpu"), replay=mode == "rollout")
        found[mode] = logprob_difference(trainer_K, engine_K)
    flips, choices = routing.take_flips() or ([], 1)
    found["flips"] = [count / choices for count in flips]
    return found


def mean(rows: list[dict[str, float]], name: str) -> float | None:
    values = [row[name] for row in rows if name in row]
    return fmean(values) if values else None


METRICS = {
    "routing/flips": ">8.4f",
    "rollout_corr/k3": ">9.2e",
    "training/rollout_probs_diff_mean": ">9.2e",
    "actor/grad_norm": ">9.3f",
}


def reinforced(folder: Path, given: argparse.Namespace, words: list[str]) -> list[dict[str, Any]]:
    """GRPO for each staleness, mode and seed: the reward of each step, and the means of other metrics."""
    rows = []
    for staleness, mode, seed in product(given.staleness, given.modes, given.seeds):
        own = [f"algorithm.routing_replay={mode}", f"run.seed={seed}", f"run.steps={given.steps}"]
        own += [f"rollout.max_staleness={staleness}"] if staleness else []
        # The learning rate is constant, so the first steps of a longer run are those of a shorter one.
        metrics = train(folder, "grpo-arithmetic", f"{mode}-{staleness}-{seed}", *words, *own)[: given.steps]
        row = {"staleness": staleness, "mode": mode, "seed": seed, **{name: mean(metrics, name) for name in METRICS}}
        row["rewards"] = [step["critic/score/mean"] for step in metrics]
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def print_rewards(rows: list[dict[str, Any]], parts: int = 3) -> None:
    """Prints the mean reward of each part of the steps, over all seeds."""
    steps = len(rows[0]["rewards"])
    bounds = [(steps * part // parts, steps * (part + 1) // parts) for part in range(parts)]
    named = {f"{first + 1}-{last}": ">7.3f" for first, last in bounds}
    metrics = {name.rsplit("/", 1)[1][:9]: form for name, form in METRICS.items()}
    table = Table({"staleness": ">9", "mode": "<8", **named, **metrics})
    print(table.header())
    for staleness, mode in dict.fromkeys((row["staleness"], row["mode"]) for row in rows):
        same = [row for row in rows if (row["staleness"], row["mode"]) == (staleness, mode)]
        rewards = [fmean(reward for row in same for reward in row["rewards"][slice(*bound)]) for bound in bounds]
        means = [fmean(float("nan") if row[name] is None else row[name] for row in same) for name in METRICS]
        print(table.line(staleness, mode, *rewards, *means))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="for models and runs; finished runs are reused")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--n", type=int, default=4)
    parser.add_argument("--warmup", type=int, default=150, help="steps of SFT")
    parser.add_argument("--steps", type=int, default=12, help="steps of GRPO")
    parser.add_argument("--staleness", type=int, nargs="*", default=[0, 2, 4])
    parser.add_argument("--modes", nargs="*", default=["off", "old", "rollout"])
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1])
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate of GRPO")
    parser.add_argument("--out")
    given = parser.parse_args()
    folder: Path = given.folder.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    if not (folder / "quickstart" / "carry").is_dir():
        write_arithmetic(folder / "quickstart" / "carry", difficulty=2)
    warmup = [f"run.steps={given.warmup}", f"model.path={folder / 'model'}", "val.questions=null"]
    train(folder, "warmup-arithmetic", "warmup", *warmup)
    trained = folder / "runs" / "warmup" / "export"
    arguments = {name: value for name, value in vars(given).items() if name not in ("folder", "out")}
    record: dict[str, Any] = {"machine": machine(select("cpu")), "arguments": arguments}

    words = [f"model.path={trained}", "val.questions=null", "val.at_start=false", "val.every=null", "model.dtype=bf16"]
    words += ["batch.prompts=8", "rollout.n=4", "rollout.max_tokens=32", f"optim.lr={given.lr}"]
    # The short warm-up solves few sums, so a dense reward moves the weights.
    (folder / "digits.py").write_text(REWARD, encoding="utf-8")
    words += ["reward.function=digits.py:digits"]
    # Several updates per step, so that `old` has an effect, and the trainer's log-probs are computed before them.
    words += ["batch.prompts_per_update=4", "algorithm.rollout_correction.weight=token"]
    record["runs"] = reinforced(folder, given, words)

    lags = [staleness for staleness in given.staleness if staleness]
    for lag in lags:
        train(folder, "grpo-arithmetic", f"lag-{lag}", *words, f"run.steps={lag}")
    tokenizer = load_tokenizer(str(trained))
    texts = [
        [{"role": "user", "content": f"{17 * i % 90 + 10} + {31 * i % 90 + 10} = ?"}] for i in range(given.prompts)
    ]
    prompts = [list(tokenizer.apply_chat_template(one, add_generation_prompt=True)["input_ids"]) for one in texts]
    fp32, bf16 = Side(trained, "fp32"), Side(trained, "bf16")
    pairs = {"fp32 | fp32": (fp32, fp32), "bf16 | bf16": (bf16, bf16), "bf16 | fp32": (bf16, fp32)}
    pairs |= {f"lag {lag}": (fp32, Side(folder / "runs" / f"lag-{lag}" / "export", "fp32")) for lag in lags}
    record["comparisons"] = [compared(name, *sides, prompts, given.n) for name, sides in pairs.items()]
    print_rewards(record["runs"])
    table = Table({"engine | trainer": "<16", "flips": ">7.4f", "of layers": ">28", "": ">8", **DIFFERENCE})
    print(table.header())
    for one in record["comparisons"]:
        layers = " ".join(f"{share:.4f}" for share in one["flips"])
        for mode in ("off", "rollout"):
            print(table.line(one["name"], fmean(one["flips"]), layers, mode, *one[mode].values()))
    if given.out:
        write_record(record, given.out)


if __name__ == "__main__":
    main()
