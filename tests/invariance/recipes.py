"""Random recipes: a seed draws a method, a model, rows, a loss and an optimizer that `lockstep train` accepts.

    PYTHONPATH=tests:tests/support python tests/invariance/recipes.py SEED FOLDER
    lockstep train FOLDER/recipe.yaml

writes the recipe of a seed with its models, rows and reward function. The recipe is the reference: one process, one row
per micro-batch, no packing, no offload. Everything is fp32.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from conftest import chat_rows, question_rows, write_jsonl
from lockstep.recipe.methods import OFFLINE, ONLINE, PREFERENCE_READS
from lockstep.recipe.registry import ESTIMATORS, LOSSES, estimator_row, loss_row
from preference_rows import METHODS as PREFERENCE_ROWS
from preference_rows import ranking_rows

Values = dict[str, Any]
METHODS = (*OFFLINE, *ONLINE)
ESTIMATORS_WITH_GROUPS = [name for name, row in ESTIMATORS.items() if row.groups]
AGGREGATIONS = ("token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm")
# Adam moves a weight by lr * m / (sqrt(v) + eps). An eps above the rounding noise of the gradients limits how much one
# update can amplify that noise to lr / eps.
LR, EPS = 1e-3, 1e-4
SIZES: Values = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "initializer_range": 0.2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
}
FAMILIES: dict[str, Values] = {
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 4},
    "qwen3": {},
    "mistral": {"sliding_window": 24},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True},
}
REWARD = '''
"""Rewards different letters."""


def letters(data_source, solution_str, ground_truth, extra_info):
    return len(set(solution_str)) / 8
'''


@dataclass(frozen=True)
class Drawn:
    """The recipe of a seed. Paths in `values` are relative to the folder that `write` fills."""

    seed: int
    family: str
    values: Values
    ranked: bool = False
    """Rows with two to four responses (method `rm`)."""

    @property
    def method(self) -> str:
        return str(self.values["method"])

    @property
    def online(self) -> bool:
        return self.method in ONLINE

    @property
    def steps(self) -> int:
        return int(self.values["run"]["steps"])

    def get(self, key: str, default: Any = None) -> Any:
        """A value by its dotted key."""
        found: Any = self.values
        for name in key.split("."):
            if not isinstance(found, dict) or name not in found:
                return default
            found = found[name]
        return found

    def write(self, folder: Path) -> Path:
        """Write the recipe and everything it names; returns the recipe file."""
        folder.mkdir(parents=True, exist_ok=True)
        write_model(folder / "model", self.family, seed=1)
        named = yaml.safe_dump(self.values)
        if "other-model" in named:
            write_model(folder / "other-model", self.family, seed=2)
        if "reward-model" in named:
            write_model(folder / "reward-model", "llama", seed=3, scores=True)
        if "reward.py" in named:
            (folder / "reward.py").write_text(REWARD, encoding="utf-8")
        for name, count, seed in (("train", 14, self.seed), ("val", 5, self.seed + 1000)):
            write_jsonl(folder / f"{name}.jsonl", self._rows(count, seed))
        file = folder / "recipe.yaml"
        file.write_text(self.yaml(folder), encoding="utf-8")
        return file

    def _rows(self, count: int, seed: int) -> list[dict[str, object]]:
        if self.online:
            return question_rows(count)
        if self.ranked:
            return ranking_rows(count, seed)
        return PREFERENCE_ROWS[self.method](count, seed) if self.method in PREFERENCE_ROWS else chat_rows(count, seed)

    def yaml(self, folder: Path) -> str:
        """The recipe with the paths of a folder."""
        return yaml.safe_dump(_located(self.values, folder), sort_keys=False)


PATHS = ("model", "other-model", "reward-model", "train.jsonl", "val.jsonl", "runs")


def _located(value: Any, folder: Path) -> Any:
    if isinstance(value, dict):
        return {key: _located(one, folder) for key, one in value.items()}
    if value in PATHS or (isinstance(value, str) and value.startswith("reward.py:")):
        return f"{folder}/{value}"
    return value


def write_model(folder: Path, family: str, seed: int, *, scores: bool = False) -> None:
    """A random model of a family, with the byte tokenizer; `scores`: a reward model."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from lockstep.model.tiny import _save_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    special = _save_tokenizer(folder)
    labels = {"num_labels": 1} if scores else {}
    config = AutoConfig.for_model(family, **{**SIZES, **FAMILIES[family], **special, **labels})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        made = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
        made.from_config(config).save_pretrained(folder)


class _Draw(random.Random):
    def one(self, *options: Any) -> Any:
        return self.choice(options)

    def chance(self, share: float) -> bool:
        return self.random() < share


@cache
def draw(seed: int) -> Drawn:
    """The recipe of a seed. Seeds in a row go through the methods, so that any 24 of them have all."""
    pick = _Draw(f"recipe {seed}")
    method = METHODS[seed % len(METHODS)]
    family = FAMILY_ORDER[(seed + 2 * (seed // len(METHODS))) % len(FAMILY_ORDER)]
    values: Values = {
        "method": method,
        "device": "cpu",
        "run": {
            "name": "reference",
            "folder": "runs",
            "steps": pick.one(2, 2, 3, 4),
            "seed": pick.randrange(100),
            "export": False,
        },
        "model": _model(pick, family),
        "data": {"train": "train.jsonl", "shuffle": pick.chance(0.7), "drop_last": pick.chance(0.3)},
        "batch": {"micro_batch_size": 1},
        "optim": _optim(pick),
        "checkpoint": {"every": 1, "keep_last": 9},
    }
    ranked = False
    if method in ONLINE:
        _online(pick, method, seed // len(METHODS), values)
    else:
        ranked = _offline(pick, method, seed // len(METHODS), values)
    return Drawn(seed, family, values, ranked)


FAMILY_ORDER = tuple(FAMILIES)


def _model(pick: _Draw, family: str) -> Values:
    model: Values = {"path": "model"}
    if family == "qwen3_moe":
        model["aux_loss_coef"] = pick.one(0.0, 0.05)
    if pick.chance(0.3):
        model["lora"] = {"rank": pick.one(2, 4)}
        if pick.chance(0.3):
            model["lora"]["targets"] = ["q_proj", "v_proj"]
        # Adapters of experts have no dropout.
        if pick.chance(0.25) and (family != "qwen3_moe" or "targets" in model["lora"]):
            model["lora"]["dropout"] = 0.2
    return model


def _optim(pick: _Draw) -> Values:
    return {
        "lr": LR,
        "eps": EPS,
        "betas": pick.one([0.9, 0.95], [0.9, 0.999]),
        "clip": pick.one(None, 0.1, 1.0),
        "weight_decay": pick.one(0.0, 0.1),
        "decay_all": pick.chance(0.2),
        "schedule": pick.one("cosine", "linear", "constant", "wsd"),
        "warmup": pick.one(0, 1, 0.5),
    }


def _offline(pick: _Draw, method: str, turn: int, values: Values) -> bool:
    """Add the keys of an offline method; returns whether its rows rank several responses."""
    values["batch"]["rows_per_update"] = pick.one(2, 4, 5, 6)
    values["data"]["val"] = "val.jsonl"
    values["val"] = {"every": pick.one(1, 2), "at_start": pick.chance(0.3)}
    if method == "sft" and pick.chance(0.5):
        values["data"] |= {"max_tokens": 60, "overlong": pick.one("drop", "truncate_right"), "require_end": False}
    if OFFLINE[method].sections == ("preference",):
        values["preference"] = _preference(pick, method, turn)
        if "divergence" in values["preference"]:
            # Exponentials of log-ratios: after large updates rounding would be amplified without bound.
            values["optim"] |= {"lr": LR / 100, "eps": EPS / 100}
    if method == "rm":
        ranking = pick.one("pairs", "plackett_luce")
        values["rm"] = {"ranking": ranking, "center_rewards_coef": pick.one(0.0, 0.01)}
        if ranking == "pairs":
            values["rm"]["loss"] = pick.one("sigmoid", "logexp")
    if method == "prm":
        values["prm"] = {"placeholder": "@"}
    if method == "distill":
        values["distill"] = {
            "teacher": "other-model",
            "divergence": ("forward", "reverse", "jsd")[turn % 3],
            "temperature": pick.one(1.0, 1.5),
            "coefficient": pick.one(0.5, 1.0),
        }
        if pick.chance(0.4):
            values["distill"]["top_k"] = 5
    return method == "rm" and pick.chance(0.6)


def _preference(pick: _Draw, method: str, turn: int) -> Values:
    if method == "kto":
        free = pick.chance(0.3)
        return {"beta": 0.3, "reference_free": free, "desirable": pick.one(1.0, 1.3)}
    settings: Values = {"beta": pick.one(0.1, 0.5)}
    loss = {"dpo": "sigmoid", "ipo": "ipo", "simpo": "simpo", "orpo": "orpo", "cpo": "cpo"}[method]
    # DPO, and CPO in every second turn, go through the losses that are no method.
    if method == "dpo" or (method == "cpo" and turn % 2):
        loss = settings["loss"] = PAIR_LOSSES[(turn if method == "dpo" else 9 + turn // 2) % len(PAIR_LOSSES)]
    reads = PREFERENCE_READS[loss]
    if "label_smoothing" in reads and (loss == "exo_pair" or pick.chance(0.4)):
        settings["label_smoothing"] = 0.1
    if "divergence" in reads and pick.chance(0.5):
        settings["divergence"] = pick.one("forward_kl", "js", "alpha")
    if "average" in reads and pick.chance(0.4):
        settings["average"] = pick.chance(0.5)
    if "ld_alpha" in reads and pick.chance(0.3):
        settings["ld_alpha"] = 0.5
    # Other divergences are exponentials of log-ratios, which between two models are far from 0: rounding would explode.
    if "reference" in reads and "divergence" not in settings and pick.chance(0.7):
        settings["reference"] = "other-model"
    if pick.chance(0.3):
        settings["nll"] = 0.2
    return settings


ANY_ESTIMATOR = ("grpo", "dapo")
ANY_LOSS = ("grpo", "dapo", "reinforce", "ppo", "reinforce_pp")
PAIR_LOSSES = [name for name in PREFERENCE_READS if name not in ("kto", "ipo", "simpo", "orpo", "cpo")]


def _online(pick: _Draw, method: str, turn: int, values: Values) -> None:
    defaults = ONLINE[method]["algorithm"]
    algorithm: Values = {}
    advantage, loss = defaults["advantage"], defaults.get("loss", "clip")
    # Two methods go through all estimators that compare groups, five through all losses.
    if method in ANY_ESTIMATOR:
        place = turn + ANY_ESTIMATOR.index(method) * len(ESTIMATORS_WITH_GROUPS) // 2
        advantage = algorithm["advantage"] = ESTIMATORS_WITH_GROUPS[place % len(ESTIMATORS_WITH_GROUPS)]
    if method == "reinforce" and pick.chance(0.4):
        advantage = algorithm["advantage"] = "flash_reinforce"
    if method in ANY_LOSS:
        place = turn * len(ANY_LOSS) + ANY_LOSS.index(method)
        loss = algorithm["loss"] = list(LOSSES)[place % len(LOSSES)]
    if pick.chance(0.5):
        algorithm["aggregation"] = pick.choice(AGGREGATIONS)
    prompts = pick.one(2, 4)
    values["batch"]["prompts"] = prompts
    if loss_row(loss).ratio and pick.chance(0.6):
        values["batch"]["prompts_per_update"] = prompts // 2
    if loss_row(loss).ratio and pick.chance(0.3):
        algorithm["epochs"] = 2
    groups = estimator_row(advantage).groups
    values["rollout"] = _rollout(pick, groups)
    values["log"] = {"samples": 99}
    values["reward"] = _reward(pick, advantage)
    _kl(pick, method, advantage, algorithm)
    _extras(pick, method, advantage, loss, algorithm)
    if estimator_row(advantage).critic:
        values["critic"] = {"lr": LR, "clip": pick.one(None, 0.5), "warmup": pick.one(0, 0, 1)}
        algorithm |= {"lam": pick.one(1.0, 0.95), "gamma": pick.one(1.0, 0.9)}
    values["algorithm"] = algorithm
    if pick.chance(0.3):
        values["val"] = {"questions": "val.jsonl", "every": 1, "max_new_tokens": 5}


def _rollout(pick: _Draw, groups: bool) -> Values:
    rollout: Values = {
        "n": pick.one(2, 3, 4) if groups else pick.one(1, 2),
        "max_tokens": pick.one(6, 9),
        "temperature": pick.one(1.0, 1.0, 0.7, 1.3),
    }
    if pick.chance(0.3):
        rollout |= pick.one({"top_p": 0.9}, {"top_k": 50}, {"min_p": 0.02})
        rollout["truncated_sampling"] = pick.one("mask", "ignore")
    if pick.chance(0.4):
        # One of ten random tokens ends a response.
        rollout["stop_ids"] = list(range(0, 256, 10))
    return rollout


def _reward(pick: _Draw, advantage: str) -> Values:
    kind = pick.one("format", "format", "model", "function")
    formats = {"format": "(?s).*[a-z].*"}
    if kind == "model":
        reward: Values = {"model": "reward-model", **({} if pick.chance(0.6) else formats)}
    elif kind == "function":
        reward = {"function": "reward.py:letters", "workers": 1, **({} if pick.chance(0.6) else formats)}
    else:
        reward = dict(formats)
    if not estimator_row(advantage).parts and pick.chance(0.2):
        reward["clip"] = [-1.0, 0.8]
    return reward


def _kl(pick: _Draw, method: str, advantage: str, algorithm: Values) -> None:
    if method == "on_policy_distill":
        algorithm["kl"] = {"reference": "other-model"}
        return
    if pick.chance(0.3):
        return
    separate = estimator_row(advantage).parts
    where = "loss" if separate else pick.one("loss", "reward", "none")
    kl: Values = {"where": where}
    if where != "none":
        estimators = ("k1", "abs", "k2", "k3", *(("k1+", "abs+", "k2+", "k3+") if where == "loss" else ()))
        kl |= {"estimator": pick.choice(estimators), "coefficient": pick.one(0.01, 0.1)}
        if pick.chance(0.3):
            kl["reference"] = "other-model"
        if pick.chance(0.2):
            kl |= {"target": 0.05, "horizon": 50}
    if where == "loss":
        kl["weighted"] = kl["estimator"].endswith("+") and pick.chance(0.5)
        if not separate and pick.chance(0.3):
            kl["reward_coefficient"] = 0.02
    algorithm["kl"] = kl


def _extras(pick: _Draw, method: str, advantage: str, loss: str, algorithm: Values) -> None:
    """Entropy, overlong responses, dynamic sampling, resampling, whitening and rollout correction."""
    row = estimator_row(advantage)
    if pick.chance(0.3):
        algorithm["entropy"] = 0.01
        algorithm["penalty_aggregation"] = pick.choice(AGGREGATIONS)
    if pick.chance(0.4):
        overlong: Values = pick.one(
            {"buffer": 3, "factor": 0.5},
            {"mask_truncated": True},
            {"truncated_reward": 0.5},
            {"truncated_reward": -0.2},
        )
        if not (row.parts and "truncated_reward" in overlong):
            algorithm["overlong"] = overlong
    if row.groups and (method == "dapo" or pick.chance(0.25)):
        algorithm["dynamic_sampling"] = {"max_gen_batches": pick.one(2, 3)}
    if method == "ppo" and pick.chance(0.3):
        algorithm["pf_ppo"] = {"method": pick.one("pow", "max_min", "max_random")}
    if pick.chance(0.2):
        algorithm["whiten"] = {"over": pick.one("none", "step"), "divide": pick.chance(0.7)}
    if pick.chance(0.3):
        corrections: Sequence[Values] = (
            {"weight": "token"},
            {"weight": "sequence", "normalize": True},
            {"mask": "token"},
            {"reject": [{"over": "mean", "by": "k3", "high": 0.1}]},
            *([{"bypass": True}] if loss_row(loss).ratio else []),
        )
        drawn = pick.choice(corrections)
        if drawn.get("weight") == "sequence" and not _keeps_weights(loss, ONLINE[method]["algorithm"] | algorithm):
            drawn = {"weight": "token"}
        algorithm["rollout_correction"] = drawn


def _keeps_weights(loss: str, algorithm: Values) -> bool:
    """Whether the loss of a recipe with weights of sequences is exact to the tolerance of `variations.py`.

    The weight of a sequence is an exponential of the sum of its tokens' log-ratios, so its tokens share the rounding
    of that sum. If terms of size 1 are averaged, this rounding stays below the tolerance. A sum over tokens adds it up,
    and log-probs in the loss enlarge it. The loss itself is small, because advantages have both signs."""
    summed = algorithm.get("aggregation", "token_mean") in ("token_sum", "seq_mean_token_sum")
    return loss_row(loss).ratio and loss not in LOGPROB_LOSSES and not summed


LOGPROB_LOSSES = ("cispo", "importance", "policy_gradient", "dro")


def main(words: Sequence[str], say: Callable[[str], object] = print) -> None:
    drawn, folder = draw(int(words[0])), Path(words[1]).absolute()
    say(f"# {drawn.write(folder)}\n{drawn.yaml(folder)}")


if __name__ == "__main__":
    main(sys.argv[1:])
