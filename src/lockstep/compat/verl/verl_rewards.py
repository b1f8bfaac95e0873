"""verl's reward rules by data source (`default_compute_score`), and their differences from the rules of lockstep."""

from __future__ import annotations

from lockstep.compat.key_table import Conversion, load_tables

MANAGERS = ("naive", "dapo", "prime")
SANDBOX = "reward_model.sandbox_fusion.url"


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
