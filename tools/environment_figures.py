"""Prints a figure of docs/environments.md as SVG: `trajectory` or `timeline`. `make docs` writes both.

The text of the trajectory comes from the chat template of `lockstep data calculator`; the timeline is a sketch.
"""

from __future__ import annotations

import re
import sys
from html import escape

from lockstep.data.prepare.agent_rows import CALCULATOR_TOOL, TEMPLATE, call_chat

FONT = "font-family='DejaVu Sans Mono, Menlo, Consolas, monospace'"
COLOURS = {"prompt": "#dfe6ee", "model": "#bfe3c0", "tool": "#f6dfb5", "template": "#e9e9e9"}
WIDTH = 960


def document(height: int, parts: list[str], title: str) -> str:
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {height}' role='img' {FONT} font-size='12'>"
    ground = f"<rect width='{WIDTH}' height='{height}' fill='#fbfbfb'/>"
    return "\n".join([head, f"<title>{escape(title)}</title>", ground, *parts, "</svg>"])


def text(x: float, y: float, words: str, *, colour: str = "#222", anchor: str = "start", weight: str = "normal") -> str:
    style = f"fill='{colour}' text-anchor='{anchor}' font-weight='{weight}'"
    return f"<text x='{x:g}' y='{y:g}' {style} xml:space='preserve'>{escape(words)}</text>"


def box(x: float, y: float, width: float, height: float, kind: str) -> str:
    place = f"x='{x:g}' y='{y:g}' width='{width:g}' height='{height:g}'"
    return f"<rect {place} rx='3' fill='{COLOURS[kind]}' stroke='#888' stroke-width='0.6'/>"


def speaker_lines() -> list[tuple[str, str, str]]:
    """Returns the rendered conversation as (speaker, text, mask): the tokens that the loss uses have the mask 1."""
    from transformers.utils.chat_template_utils import render_jinja_template

    chat = call_chat(444, 378)
    rendered, spans = render_jinja_template(
        [chat], tools=[CALCULATOR_TOOL], chat_template=TEMPLATE, return_assistant_tokens_mask=True
    )
    whole, lines, at = rendered[0], list[tuple[str, str, str]](), 0
    for start, stop in spans[0]:
        lines += _context(whole[at:start])
        lines.append(("model", whole[start:stop], "1"))
        at = stop
    return lines  # a rollout ends with the last token of the model


def _context(words: str) -> list[tuple[str, str, str]]:
    """Splits text that the model did not write into the end of the last turn, the messages and the opened turn."""
    lines = []
    for part in re.findall(r"^\n|<\|im_start\|>(?:(?!<\|im_start\|>).)*", words, re.DOTALL):
        role = part.removeprefix("<|im_start|>").split("\n")[0]
        kind = {"system": "prompt", "user": "prompt", "tool": "tool"}.get(role, "template")
        lines.append((kind, part, "0"))
    return lines


NAMES = {"prompt": "prompt", "model": "model", "tool": "tool", "template": "chat template"}


def trajectory() -> str:
    lines = speaker_lines()
    parts = [text(16, 24, "speaker", weight="bold"), text(140, 24, "tokens of the row", weight="bold")]
    parts.append(text(WIDTH - 16, 24, "loss mask", anchor="end", weight="bold"))
    y = 36
    for kind, words, mask in lines:
        shown = words.replace("\n", "↵")
        parts += [box(132, y, WIDTH - 230, 22, kind), text(140, y + 15, shown)]
        parts += [text(16, y + 15, NAMES[kind]), text(WIDTH - 48, y + 15, mask, anchor="middle")]
        y += 27
    note = "The model sampled the green tokens: they have log-probs, and only they are trained."
    parts.append(text(16, y + 14, note, colour="#555"))
    return document(y + 28, parts, "The tokens of a trajectory by speaker, with the loss mask")


# Four trajectories on two slots: (kind, duration, text). The third one has a slow tool, which delays no other one.
ROWS = [
    [("model", 3), ("tool", 1), ("model", 2), ("tool", 1), ("model", 2)],
    [("model", 2), ("tool", 3), ("model", 3)],
    [("waits", 2), ("model", 3), ("tool", 8), ("model", 1)],
    [("not started: max_concurrent is 3", 8), ("model", 2), ("tool", 1), ("model", 2)],
]
STEP, LEFT = 56, 130


def timeline() -> str:
    parts, y = [text(16, 24, "Four trajectories on two slots of the engine", weight="bold")], 40
    for number, row in enumerate(ROWS, 1):
        parts.append(text(16, y + 18, f"trajectory {number}"))
        x: float = LEFT
        for kind, length in row:
            if kind in COLOURS:
                parts.append(box(x, y, length * STEP - 2, 26, kind))
                parts.append(text(x + 6, y + 17, "tool" if kind == "tool" else "turn"))
            else:
                parts.append(text(x + 6, y + 17, kind, colour="#777"))
            x += length * STEP
        y += 36
    notes = (
        "Green: the model generates. Yellow: the environment runs, and the slot is free for another trajectory.",
        "A slow tool delays only its own trajectory. Time runs to the right.",
    )
    parts += [text(16, y + 14 + 16 * line, note, colour="#555") for line, note in enumerate(notes)]
    return document(y + 44, parts, "Trajectories at their own pace: turns of the model and calls of tools over time")


if __name__ == "__main__":
    print({"trajectory": trajectory, "timeline": timeline}[sys.argv[1]]())
