"""What a difference between two recipes does to their curves: a row for each key, or for all keys under it.

`blocks`: something else is computed, so the curves mean different things. `matters`: the same is meant, and the curves
differ by rounding, order or chance. `harmless`: the curves must not change, which the project's own tests hold.
"""

from __future__ import annotations

from lockstep.parity.compare.comparison import Weight

Effect = tuple[Weight, str]

_NAME: Effect = ("harmless", "only a name")
_COLUMN: Effect = ("matters", "other columns may be read; the counts of kept rows and tokens tell")
_LIMIT: Effect = ("matters", "other rows may be cut or left out; the counts of kept rows and tokens tell")
_FOLDER: Effect = ("matters", "another folder: other weights in it would give other values")
_STORED: Effect = ("harmless", "what is stored or shown, not what is computed")
_UPDATE: Effect = ("blocks", "another update is made from the same gradient")
_RATE: Effect = ("blocks", "the learning rate at the same step is another")
_GROUPS: Effect = ("blocks", "an update sees another number of rows: noise, and progress a step, are others")
_SAMPLING: Effect = ("blocks", "responses are drawn from another distribution")
_REWARD: Effect = ("blocks", "the same response earns another reward")
_CACHE: Effect = ("harmless", "memory and speed of generation; the drawn tokens are the same")
_MICRO: Effect = ("harmless", "how an update is cut into pieces; there is one division over all of it")

EFFECTS: dict[str, Effect] = {
    "method": ("blocks", "another objective is trained"),
    "device": ("harmless", "the same updates are meant on every device; this is what is compared"),
    "run.name": _NAME,
    "run.folder": _NAME,
    "run.seed": ("matters", "other samples and another order of rows: curves agree in distribution only"),
    "run.resume": _STORED,
    "run.deterministic": ("matters", "kernels without a fixed order add noise from run to run"),
    "run.allow_fallback": ("harmless", "an operator that the device lacks runs on the CPU, or stops the run"),
    "run.export": _STORED,
    "model.dtype": ("matters", "rounding in every operation: curves part slowly"),
    "model.master_weights": ("matters", "small updates are rounded away without fp32 copies"),
    "model.lora": ("blocks", "other parameters are trained"),
    "model.gradient_checkpointing": ("harmless", "activations are computed again, with the same values"),
    "model.attention": ("matters", "another kernel, another order of sums: rounding"),
    "data.train.weight": ("blocks", "the sources are mixed in other shares"),
    "data.train": _COLUMN,
    "data.reader": ("matters", "another function, or the same one elsewhere: the rows' checksums tell"),
    "data.val": ("harmless", "only the val/ curves are of other rows"),
    "data.system": ("blocks", "prompts begin with another text"),
    "data.template": ("blocks", "prompts are written in another form"),
    "data.require_end": ("harmless", "rows are refused or not; what is trained is the same"),
    "data.max_tokens": _LIMIT,
    "data.max_prompt_tokens": _LIMIT,
    "data.overlong": _LIMIT,
    "data.shuffle": ("matters", "rows come in another order: curves agree in distribution only"),
    "data": _COLUMN,
    "batch.rows_per_update": _GROUPS,
    "batch.prompts": _GROUPS,
    "batch.prompts_per_update": _GROUPS,
    "batch.tokens": _MICRO,
    "batch.rows": _MICRO,
    "optim.lr": _RATE,
    "optim.schedule": _RATE,
    "optim.warmup": _RATE,
    "optim.min_lr_ratio": _RATE,
    "optim.decay": _RATE,
    "optim": _UPDATE,
    "rollout.engine": ("matters", "the same distribution by other kernels: rounding moves some tokens"),
    "rollout.function": ("matters", "another function, or the same one elsewhere: the samples tell"),
    "rollout.n": _GROUPS,
    "rollout.max_tokens": ("blocks", "responses end at another length, and unfinished ones earn less"),
    "rollout.temperature": _SAMPLING,
    "rollout.top_p": _SAMPLING,
    "rollout.top_k": _SAMPLING,
    "rollout.min_p": _SAMPLING,
    "rollout.truncated": ("blocks", "log-probabilities are of another distribution"),
    "rollout.stop": ("blocks", "responses end elsewhere"),
    "rollout.stop_ids": ("blocks", "responses end elsewhere"),
    "rollout.max_sequences": _CACHE,
    "rollout.prefill_tokens": _CACHE,
    "rollout.block_tokens": _CACHE,
    "rollout.cache_gb": _CACHE,
    "rollout.free_cache": _CACHE,
    "rollout.max_probs_diff": ("harmless", "only when the run is stopped"),
    "reward.rules": _REWARD,
    "reward.function": ("matters", "another function, or the same one elsewhere: the rewards tell"),
    "reward.model": _FOLDER,
    "reward.process": _FOLDER,
    "reward.separator": _REWARD,
    "reward.remote": ("matters", "another endpoint: a model behind it may judge otherwise"),
    "reward.format": _REWARD,
    "reward.weights": _REWARD,
    "reward.workers": ("harmless", "how many processes judge at once"),
    "reward.time_limit": ("harmless", "only where a call is cut off; reward/failed tells"),
    "reward.memory_limit_gb": ("harmless", "only where a call is cut off; reward/failed tells"),
    "reward.max_failures": ("harmless", "only when the run is stopped"),
    "reward.remote_batch": ("harmless", "how many responses are sent at once"),
    "reward.remote_timeout": ("harmless", "only where a call is cut off; reward/failed tells"),
    "reward.remote_retries": ("harmless", "only where a call is cut off; reward/failed tells"),
    "algorithm.kl.reference": _FOLDER,
    "algorithm.kl": ("blocks", "the pull to the reference is another"),
    "algorithm.correction": ("blocks", "tokens are weighted or left out otherwise"),
    "algorithm.dynamic_sampling": ("blocks", "other groups are trained on"),
    "algorithm.overlong": _REWARD,
    "algorithm": ("blocks", "another loss or advantage from the same responses"),
    "critic.path": _FOLDER,
    "critic": ("blocks", "values, and the advantages from them, are learned otherwise"),
    "preference.reference": _FOLDER,
    "preference.precompute": ("harmless", "the same reference log-probabilities, computed earlier"),
    "preference": ("blocks", "another loss from the same pairs"),
    "rm": ("blocks", "another loss from the same responses"),
    "prm": ("blocks", "other places are judged, or by other words"),
    "distill.teacher": _FOLDER,
    "distill": ("blocks", "another divergence from the teacher"),
    "val": ("harmless", "when and how is validated; training does not see it"),
    "checkpoint": _STORED,
    "log": _STORED,
    "tape": _STORED,
}

# Keys that are read only where another key has, on one side or the other, one of these values.
READ_WHERE: dict[str, tuple[str, tuple[object, ...]]] = {
    "optim.decay": ("optim.schedule", ("wsd",)),
    "optim.min_lr_ratio": ("optim.schedule", ("cosine", "linear", "wsd")),
    "algorithm.lam": ("algorithm.advantage", ("gae",)),
    "algorithm.dual_clip": ("algorithm.loss", ("clip",)),
    "algorithm.sapo_positive": ("algorithm.loss", ("sapo",)),
    "algorithm.sapo_negative": ("algorithm.loss", ("sapo",)),
    "algorithm.cov_share": ("algorithm.loss", ("clip_cov", "kl_cov")),
    "algorithm.cov_low": ("algorithm.loss", ("clip_cov",)),
    "algorithm.cov_high": ("algorithm.loss", ("clip_cov",)),
    "algorithm.cov_kl": ("algorithm.loss", ("kl_cov",)),
    "algorithm.kl.estimator": ("algorithm.kl.where", ("loss", "reward")),
    "algorithm.kl.coefficient": ("algorithm.kl.where", ("loss", "reward")),
    "algorithm.kl.target": ("algorithm.kl.where", ("loss", "reward")),
    "algorithm.kl.horizon": ("algorithm.kl.where", ("loss", "reward")),
    "algorithm.kl.reference": ("algorithm.kl.where", ("loss", "reward")),
    "algorithm.correction.cap": ("algorithm.correction.weight", ("token", "sequence")),
    "algorithm.correction.low": ("algorithm.correction.mask", ("token", "sequence")),
    "algorithm.correction.high": ("algorithm.correction.mask", ("token", "sequence")),
    "distill.mix": ("distill.divergence", ("jsd",)),
}
UNREAD: Effect = ("harmless", "neither side reads it")
UNKNOWN: Effect = ("matters", "not known here; look it up in the recipe's reference")


def effect_of(key: str) -> Effect | None:
    """The row of a recipe key, or of the nearest group that it is in. Places in a list are no part of a key's name."""
    parts = [part for part in key.split(".") if not part.isdigit()]
    while parts:
        if (found := EFFECTS.get(".".join(parts))) is not None:
            return found
        parts.pop()
    return None
