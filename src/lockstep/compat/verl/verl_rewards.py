"""Conversion rules of verl's `main_ppo` for rewards: functions, models, managers, and the rules by data source."""

from __future__ import annotations

from lockstep.compat.key_table import Conversion, load_tables
from lockstep.compat.verl.verl_rules import group_rule

MANAGERS = ("naive", "dapo", "prime")
SANDBOX = "reward_model.sandbox_fusion.url"


def reward_rule(done: Conversion) -> None:
    manager = "reward_model.reward_manager"
    if done[manager] not in MANAGERS:
        done.refuse(manager, f"{done[manager]} is not supported", f"use one of {', '.join(MANAGERS)}")
    else:
        done.ignore("each response is scored separately", manager)
    path, name = "custom_reward_function.path", "custom_reward_function.name"
    if done[path] is not None:
        done.write("reward.function", f"{done[path]}:{done[name]}", path, name)
        group_rule(done, "reward.arguments", "custom_reward_function.reward_kwargs")
    elif not done["reward_model.enable"]:
        default_rules(done)
    if "reward.rules" not in done.recipe:
        done.ignore("verl reads this key only without a reward function and a reward model", SANDBOX)
    if done["reward_model.enable"]:
        if done["reward_model.model.path"] is None:
            done.refuse("reward_model.enable", "reward_model.model.path is not set", "give the reward model's path")
        else:
            model = "reward_model.model.path"
            done.write("reward.model", str(done[model]), model, "reward_model.enable")
    _overlong(done)


def _overlong(done: Conversion) -> None:
    group, limit = "reward_model.reward_kwargs.overlong_buffer_cfg", "reward_model.reward_kwargs.max_resp_len"
    enabled, off = bool(done[f"{group}.enable"]), "the overlong buffer is off"
    if enabled and (done["reward_model.reward_manager"] != "dapo" or done["reward_model.enable"]):
        enabled, off = False, "only verl's reward manager dapo applies the penalty, and not to a reward model's scores"
    if enabled:
        _filter_metric(done)
        done.write_integer("algorithm.overlong.buffer", f"{group}.len", f"{group}.enable")
        done.write_number("algorithm.overlong.factor", f"{group}.penalty_factor")
        if done[limit] not in (None, done["data.max_response_length"]):
            why = f"{done[limit]} differs from data.max_response_length"
            done.refuse(limit, why, f"set it to {done['data.max_response_length']}")
    used = {key for written in done.recipe.values() for key in written.sources} | done.decided.keys()
    unused = [key for key in done.below("reward_model.reward_kwargs") if key not in used]
    log = f"{group}.log"
    if enabled and log in unused:
        done.ignore("critic/score, which lockstep always logs, contains the penalty", log)
        unused.remove(log)
    done.ignore("max_response_length is the limit" if enabled else off, *unused)


def _filter_metric(done: Conversion) -> None:
    """verl filters groups by `acc` or `score` without the overlong penalty, and by `seq_reward` with it."""
    key, to = "algorithm.filter_groups.metric", "algorithm.dynamic_sampling.metric"
    if not done["algorithm.filter_groups.enable"] or done[key] not in ("acc", "score") or to in done.recipe:
        return
    part = "rule" if done["custom_reward_function.path"] is None else "function"
    done.write(to, part, key)
    done.decided[key] = ("mapped", "as in verl, groups are filtered by the score without the overlong penalty")


def own_rewards_rule(done: Conversion) -> None:
    """Refuses a program that scores with its own function, unless the command names a function or a reward model."""
    path = "custom_reward_function.path"
    if done["program.rewards"] and done[path] is None and not done["reward_model.enable"]:
        remedy = f"write a file with compute_score that calls this function, and set {path}=FILE"
        done.refuse(path, str(done["program.rewards"]), remedy, "not-set")


def model_and_function_rule(done: Conversion) -> None:
    """Decides between a reward model and a reward function, if a command has both. verl 0.4 returns the score of the
    model. The reward loop of later releases serves the model, and the function calls it (generative reward model)."""
    path, enable = "custom_reward_function.path", "reward_model.enable"
    if done[path] is None or not done[enable]:
        return
    loop = ("reward_model.rollout", "reward_model.enable_resource_pool", "reward_model.use_reward_loop")
    if done.since("0.7") or any(done.is_set(key) or done.below(key) for key in loop):
        why = "the reward function calls the reward model, which verl serves, and lockstep serves no reward model"
        remedy = f"serve the model yourself (`vllm serve`), let the function call its address, and set {enable}=False"
        done.refuse(enable, why, remedy)
        return
    for name in ("reward.function", "reward.arguments"):
        done.recipe.pop(name, None)
    keys = (path, "custom_reward_function.name", *done.below("custom_reward_function.reward_kwargs"))
    done.ignore("with a reward model, verl 0.4 does not call the reward function in training", *keys)


def reward_rules(version: str) -> dict[str, str]:
    """Returns the rule of each data source in a version of verl, such as `0.9` or `0.4.1`. verl raises an error for
    other data sources."""
    rules: dict[str, str] = {}
    for entry in load_tables("verl")["reward_rules"]:
        if _numbers(entry["since"]) <= _numbers(version):
            rules |= dict.fromkeys(entry["sources"], f"verl/{entry['rule']}@{version}")
    return rules


def default_rules(done: Conversion) -> None:
    """Writes the rules of the command's verl version, and says how they differ from the rules of lockstep."""
    version = done.version
    rules = reward_rules(version)
    sources: tuple[str, ...] = ()
    note = "the rules of this verl version; change it if your verl is another"
    if done[SANDBOX] not in (None, "", "null"):
        code, remote = f"verl/prime_code@{version}", f"verl/sandbox_fusion@{version}"
        rules = {source: remote if name == code else name for source, name in rules.items()}
        sources = (SANDBOX,)
        note += "; lockstep runs programs in its own sandbox on this machine, and does not call the service"
    if done["reward_model.reward_manager"] == "prime":
        # verl's manager prime gives 0 to all responses of a batch with these data sources.
        rules = {source: name for source, name in rules.items() if "math_dapo" not in name}
    done.write("reward.rules", rules, *sources, note=note)
    differences = load_tables("verl")["reward_differences"]
    for name in dict.fromkeys(rules.values()):
        rule = name.partition("/")[2].partition("@")[0]
        done.remarks.append(f"reward rule {name}: {differences[rule]}")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]
