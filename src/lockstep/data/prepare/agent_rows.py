"""Generated tasks for agents: products that need a calculator, and a guessing game. Written as RL and SFT rows."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from lockstep.data.prepare.generated import (
    ARITHMETIC_SOURCE,
    assistant_message,
    rl_row,
    too_few,
    user_message,
    write_files,
)
from lockstep.errors import Problem, refuse_all
from lockstep.run.files import replace_text
from lockstep.types import Message, Row

# Products of two numbers with two digits. A tiny model cannot compute them, so it needs the calculator. The SFT rows
# teach the format of a call, but neither when nor what to call: a quarter of the answers guess, and most calls add or
# subtract 1. GRPO teaches the model to call, with the product alone.

GUESS_EVERY = 4
# What the calls in the SFT rows add to the product. The right call, which adds nothing, is the rarest.
ADDED = (" + 1", " - 1", " + 1", " - 1", "")
# The smallest and the largest factor. All products have four digits, so that all rows have the same form.
LOWEST, HIGHEST = 32, 99
FACTORS = HIGHEST - LOWEST + 1
CALCULATOR_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Calculates an arithmetic expression exactly.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers with + - * / // % ** and parentheses, such as 12 * (3 + 4).",
                }
            },
            "required": ["expression"],
        },
        "return": {"type": "string"},
    },
}
# ChatML with short tools, because each character is a token of the tiny model.
TEMPLATE = """\
{%- if tools -%}
{{- '<|im_start|>system\\nTools:' -}}
{%- for tool in tools -%}
{{- ' ' + tool['function']['name'] + '(' + tool['function']['parameters']['properties'] | join(', ') + ')' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{%- generation -%}
{{- message['content'] -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '<tool_call>{"name": ' + (call['function']['name'] | tojson) + ', "arguments": ' -}}
{{- (call['function']['arguments'] | tojson) + '}</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>' -}}
{%- endgeneration -%}
{{- '\\n' -}}
{%- else -%}
{{- message['content'] + '<|im_end|>\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""


def write_calculator(folder: Path, *, train_rows: int = 2000, val_rows: int = 100, seed: int = 0) -> dict[str, int]:
    """Writes products as RL rows, their SFT rows, and template.jinja, a chat template with tools for the tiny model.
    Returns the number of rows by file. No product occurs twice."""
    refuse_all([*too_few(train_rows=train_rows, val_rows=val_rows), *_too_many(train_rows, val_rows)])
    draw = random.Random(f"calculator/{seed}")
    pairs = draw.sample(range(FACTORS**2), 2 * train_rows + val_rows)
    products = [(LOWEST + number // FACTORS, LOWEST + number % FACTORS) for number in pairs]
    splits = {
        "val": products[:val_rows],
        "train": products[val_rows : val_rows + train_rows],
        "sft_train": products[val_rows + train_rows :],
    }
    files: dict[str, list[Row]] = {
        split: [
            rl_row(ARITHMETIC_SOURCE, user_message(f"What is {a} * {b}?"), a * b, split=split, index=index)
            for index, (a, b) in enumerate(splits[split])
        ]
        for split in ("train", "val")
    }
    files["sft_train"] = [
        {"messages": _sft_chat(index, a, b, draw), "tools": _TOOLS} for index, (a, b) in enumerate(splits["sft_train"])
    ]
    folder.mkdir(parents=True, exist_ok=True)
    replace_text(folder / "template.jinja", TEMPLATE)
    return write_files(folder, files)


def _too_many(train_rows: int, val_rows: int) -> list[Problem]:
    most = FACTORS**2
    if 2 * train_rows + val_rows <= most:
        return []
    why = f"twice {train_rows:,} rows and {val_rows:,} validation rows are requested, but there are {most:,} products"
    return [Problem("train_rows", why, f"give at most {(most - val_rows) // 2:,} training rows", code="out-of-range")]


_TOOLS = json.dumps([CALCULATOR_TOOL])


def _sft_chat(index: int, a: int, b: int, draw: random.Random) -> list[Message]:
    if index % GUESS_EVERY == 0:
        return _guess_chat(a, b, draw)
    return call_chat(a, b, draw.choice(ADDED))


def call_chat(a: int, b: int, added: str = "") -> list[Message]:
    """Returns the question for a product, a call of the calculator, its result, and the answer."""
    result = a * b + {" + 1": 1, " - 1": -1, "": 0}[added]
    arguments = {"expression": f"{a} * {b}{added}"}
    call = {"type": "function", "function": {"name": "calculator", "arguments": arguments}}
    return [
        *user_message(f"What is {a} * {b}?"),
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(result)},
        *assistant_message(f"#### {result}"),
    ]


def _guess_chat(a: int, b: int, draw: random.Random) -> list[Message]:
    """Returns an answer without the tool: a number of four digits, but not the product."""
    guess = draw.randrange(10**3, 10**4 - 1)
    wrong = guess if guess < a * b else guess + 1
    return [*user_message(f"What is {a} * {b}?"), *assistant_message(f"#### {wrong}")]


# The game `guess_number`: in the SFT rows, every second guess ignores the answers. GRPO teaches the model to use them:
# with 3 guesses, halving finds every number from 1 to 7.

GUESS_SOURCE = "guess_number"


def write_guess_number(folder: Path, *, train_rows: int = 2000, val_rows: int = 60, seed: int = 0) -> dict[str, int]:
    """Writes prompts of the game as RL rows, each with its number, and careless games as SFT rows. Returns the number
    of rows by file."""
    refuse_all(too_few(train_rows=train_rows, val_rows=val_rows))
    draw = random.Random(f"guess_number/{seed}")
    prompt = user_message(f"Guess a number from {LOW} to {HIGH} in {GUESSES} turns.")
    files: dict[str, list[Row]] = {}
    for split, rows in (("train", train_rows), ("val", val_rows)):
        # Every number occurs equally often.
        numbers = [LOW + index % (HIGH - LOW + 1) for index in range(rows)]
        draw.shuffle(numbers)
        files[split] = [
            rl_row(GUESS_SOURCE, prompt, number, split=split, index=index) for index, number in enumerate(numbers)
        ]
    files["sft_train"] = [{"messages": [*prompt, *_careless_game(draw)]} for _ in range(train_rows)]
    return write_files(folder, files)


LOW, HIGH, GUESSES = 1, 7, 3


def _careless_game(draw: random.Random) -> list[Message]:
    number, chat, low, high = draw.randint(LOW, HIGH), list[Message](), LOW, HIGH
    for made in range(1, GUESSES + 1):
        guess = draw.randint(low, high) if draw.random() < 0.5 else draw.randint(LOW, HIGH)
        chat += assistant_message(str(guess))
        if guess == number or made == GUESSES:
            break
        chat += user_message("higher" if guess < number else "lower")
        low, high = (max(low, guess + 1), high) if guess < number else (low, min(high, guess - 1))
    return chat


# Rows for the environments of other packages, which make their tasks from a seed.


def write_seeds(
    folder: Path, *, prompt: str = "Play the game.", train_rows: int = 2000, val_rows: int = 60, seed: int = 0
) -> dict[str, int]:
    """Writes rows with a prompt and the seed of a task. No two rows of both files have the same seed. Returns the
    number of rows by file."""
    refuse_all(too_few(train_rows=train_rows, val_rows=val_rows))
    seeds = random.Random(f"seeds/{seed}").sample(range(2**31), train_rows + val_rows)
    rows: list[Row] = [{"data_source": "environment", "prompt": user_message(prompt), "seed": one} for one in seeds]
    return write_files(folder, {"train": rows[:train_rows], "val": rows[train_rows:]})
