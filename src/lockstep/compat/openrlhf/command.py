"""A command of OpenRLHF's as a conversion: which program, which dialect, which flags."""

from __future__ import annotations

from collections.abc import Sequence

from lockstep.compat.flags import is_flag, parse_flags
from lockstep.compat.openrlhf import offline, online, online_flags
from lockstep.compat.openrlhf.inference import PROGRAMS as INFERENCE
from lockstep.compat.openrlhf.inference import refuse_training
from lockstep.compat.openrlhf.options import Option, flags_of
from lockstep.compat.settings import Settings
from lockstep.compat.table import Conversion, KeyRule, converted
from lockstep.compat.writing import own_defaults
from lockstep.errors import Refusal

PROGRAMS: dict[str, str] = {name: name for name in (*offline.TRAINERS, "train_ppo_ray")}
ELSEWHERE: dict[str, str] = {
    "lora_combiner": "lockstep export RUN DIR merges the adapter of a run",
    "interactive_chat": "lockstep generate MODEL --chat",
}
# Gone from the dotted dialect.
_FLAT_ONLY = ("train_kto", "train_prm", "train_kd")


def convert_openrlhf(program: str, words: Sequence[str], wheres: Sequence[str] = ()) -> Conversion:
    """`program` is a name of PROGRAMS; `wheres` says of each word where it stands."""
    name = program.rsplit(".", 1)[-1]
    if name in INFERENCE:
        refuse_training(name, words, wheres)
    if name in ELSEWHERE:
        raise Refusal.at(f"openrlhf {name}", "is no training", f"use: {ELSEWHERE[name]}")
    if name not in PROGRAMS:
        raise Refusal.at(f"openrlhf {name}", "is not known", f"one of {', '.join([*PROGRAMS, *INFERENCE])}")
    dotted = is_dotted(words) and name not in _FLAT_ONLY
    options, rules, defaults = options_of(name), rules_of(name), defaults_of(name, dotted)
    said = parse_flags(words, flags_of(options, dotted), wheres)
    spelled = {option.row.key: f"--{option.name(dotted)}" for option in options if option.name(dotted)}
    settings = Settings(f"OpenRLHF {'0.11' if dotted else '0.7'}", name, said.given, defaults, spelled)
    done = converted(settings, [option.row for option in options], rules, own_defaults)
    done.problems[:0] = said.problems
    return done


def is_dotted(words: Sequence[str]) -> bool:
    """One flag with a dot is enough: the flat dialect has none."""
    return any(is_flag(word) and "." in word.partition("=")[0] for word in words)


def options_of(name: str) -> list[Option]:
    return online_flags.OPTIONS if name == "train_ppo_ray" else offline.TRAINERS[name].options


def rules_of(name: str) -> tuple[KeyRule, ...]:
    return online.RULES_IN_ORDER if name == "train_ppo_ray" else offline.rules_of(offline.TRAINERS[name])


def defaults_of(name: str, dotted: bool) -> dict[str, object]:
    """The dialect's; a key of the other dialect alone has none."""
    known = {
        option.row.key: option.row.default
        for option in options_of(name)
        if option.row.default is not None and (option.name(dotted) or option.row.key == "min_lr_ratio")
    }
    if name == "train_ppo_ray":
        return known | (online.DOTTED if dotted else online.FLAT)
    return known | offline.TRAINERS[name].defaults
