"""Evaluates pipelines of text filters in scripts, such as `$(echo $CUDA_VISIBLE_DEVICES | tr ',' '\\n' | wc -l)`.

Only filters whose result depends on nothing but their input are evaluated; no program runs.
"""

from __future__ import annotations

import re
import shlex

_CLASSES = {"[:upper:]": "ABCDEFGHIJKLMNOPQRSTUVWXYZ", "[:lower:]": "abcdefghijklmnopqrstuvwxyz", "\\n": "\n"}


def pipeline(command: str) -> list[str]:
    """Splits a command at the pipes that are outside of quotes and substitutions."""
    parts, depth, quote = [""], 0, ""
    for sign in command:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign in "()":
            depth += 1 if sign == "(" else -1
        elif sign == "|" and depth == 0:
            parts.append("")
            continue
        parts[-1] += sign
    return parts


def filtered(text: str, filters: list[str]) -> str | None:
    """Returns the text after the filters, or None if a filter is not supported."""
    for command in filters:
        try:
            result = _filter(shlex.split(command), text)
        except (ValueError, IndexError):
            return None
        if result is None:
            return None
        text = result
    return text.rstrip("\n")


def _filter(words: list[str], text: str) -> str | None:
    lines = text.rstrip("\n").split("\n")
    if words[:1] == ["tr"] and len(words) == 3:
        return _translated(text, words[1], words[2])
    if words == ["wc", "-l"]:
        return str(len(lines) if text.strip("\n") else 0)
    if words[:2] == ["grep", "-o"] and len(words) == 3 and re.fullmatch(r"[\w,.:/-]+", words[2]):
        return "\n".join(re.findall(re.escape(words[2]), text))
    if words[0] == "cut":
        return _cut("".join(words[1:]), lines)
    if words[0] == "awk":
        return _awk(words[1:], lines)
    return text if words == ["xargs"] else None


def _translated(text: str, old: str, new: str) -> str | None:
    old, new = _CLASSES.get(old, old), _CLASSES.get(new, new)
    if re.search(r"\[|\w-\w", old + new) or not new:
        return None
    return text.translate({ord(sign): new[min(place, len(new) - 1)] for place, sign in enumerate(old)})


def _cut(options: str, lines: list[str]) -> str | None:
    """Evaluates `cut -dX -fN` and `cut -dX -fN-`."""
    match = re.fullmatch(r"-d(.)-f(\d+)(-?)", options)
    if match is None:
        return None
    first = int(match[2]) - 1
    fields = [line.split(match[1]) for line in lines]
    return "\n".join(
        match[1].join(field[first:] if match[3] else field[first : first + 1]) if len(field) > 1 else field[0]
        for field in fields
    )


def _awk(words: list[str], lines: list[str]) -> str | None:
    """Evaluates `awk -F, '{print NF}'` and `awk -F, '{print $N}'`."""
    separator = None
    if words[0].startswith("-F"):
        separator = words[0][2:] or words.pop(1)
        words = words[1:]
    match = re.fullmatch(r"\s*\{\s*print\s+(NF|\$NF|\$\d+)\s*;?\s*\}\s*", words[0]) if len(words) == 1 else None
    if match is None or (separator is not None and len(separator) != 1):
        return None
    fields = [line.split(separator) if line else [] for line in lines]
    if match[1] == "NF":
        return "\n".join(str(len(field)) for field in fields)
    places = [len(field) if match[1] == "$NF" else int(match[1][1:]) for field in fields]
    return "\n".join(
        field[place - 1] if 0 < place <= len(field) else "" for field, place in zip(fields, places, strict=True)
    )
