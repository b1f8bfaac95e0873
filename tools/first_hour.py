"""Parts of `first_hour.sh`: rows in the forms in which people have them, and looks at what the commands gave.

python tools/first_hour.py PART WORDS
"""

from __future__ import annotations

import json
import re
import socket
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

# Seconds for a server to come up on a busy machine.
PATIENCE = 600
SUMS = [(a, b) for a in range(2, 10) for b in range(1, 9)]
QUESTION = "What is {} + {}?"
REWARD = '''"""The right number earns most; one that is near earns something, and so does any number at all."""

import re


def score(data_source, solution_str, ground_truth, extra_info=None):
    found = re.findall(r"-?\\\\d+", solution_str)
    if not found:
        return 0.0
    return 1.0 if found[-1] == ground_truth else 0.1 + 0.2 / (1 + abs(int(found[-1][:9]) - int(ground_truth)))
'''


def rows(folder: str) -> None:
    """A file for each form, all of the same sums."""
    forms: dict[str, Callable[[str, str], dict[str, Any]]] = {
        "messages": lambda q, a: {"messages": [message("user", q), message("assistant", a)]},
        "openai": lambda q, a: {
            "messages": [message("user", [{"type": "text", "text": q}]), message("assistant", a)],
        },
        "alpaca": lambda q, a: {"instruction": q, "input": "", "output": a},
        "sharegpt": lambda q, a: {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]},
        "prompt_completion": lambda q, a: {"prompt": q, "completion": a},
        "question_answer": lambda q, a: {"question": q, "answer": a},
        "text": lambda q, a: {"text": f"{q} {a}"},
        "pairs": lambda q, a: {"prompt": q, "chosen": a, "rejected": "I do not know."},
        "prompts": lambda q, a: {
            "data_source": "mine",
            "prompt": [message("user", q)],
            "reward_model": {"style": "rule", "ground_truth": a.split()[-1]},
        },
        "questions": lambda q, a: {
            "data_source": "openai/gsm8k",
            "prompt": [message("user", q)],
            "reward_model": {"style": "rule", "ground_truth": a.split()[-1]},
        },
    }
    Path(folder).mkdir(exist_ok=True)
    for name, form in forms.items():
        lines = [json.dumps(form(QUESTION.format(a, b), f"{a} + {b} = {a + b} #### {a + b}")) for a, b in SUMS]
        (Path(folder) / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{folder}: {', '.join(forms)}, {len(SUMS)} rows each")


def message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def shown(file: str, form: str) -> None:
    """A row that is shown holds its question and its answer, whatever its columns were called."""
    text = Path(file).read_text(encoding="utf-8")
    print(text.strip())
    # Without the marks around what is trained.
    text = re.sub(r"\[\[|\]\]", "", text)
    a, b = SUMS[0]
    for part in (QUESTION.format(a, b), f"#### {a + b}"):
        must(part in text, f"{form}: the row that is shown does not hold {part!r}")


def reward(file: str) -> None:
    Path(file).write_text(REWARD.replace("\\\\", "\\"), encoding="utf-8")
    print(f"wrote {file}")


def rewarded(run: str) -> None:
    """The rewards of a run are of the function: more than one value, none of them failed."""
    lines = [json.loads(line)["data"] for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    scores = [line["critic/score/mean"] for line in lines if "critic/score/mean" in line]
    must(len(scores) >= 4, f"{run} logged {len(scores)} steps")
    must(any(score > 0 for score in scores), f"{run}: the function gave nothing: {scores}")
    must(all(line.get("reward/failed", 0) == 0 for line in lines), f"{run}: some responses had no score")


def port() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        print(free.getsockname()[1])


def link(log: str, process: str) -> None:
    """The first address that a server prints, as soon as it does."""
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        found = re.search(r"http://127\.0\.0\.1:\d+[^\s:,]*", Path(log).read_text(encoding="utf-8"))
        if found:
            print(found[0])
            return
        must(Path(f"/proc/{process}").exists() or not Path("/proc/self").exists(), "the server ended")
        time.sleep(0.2)
    must(False, f"no link within {PATIENCE} s")


def ask(address: str, expected: str) -> None:
    """The endpoint's greedy answer is that of `lockstep generate`."""
    base = re.match(r"http://[^/]+", address)
    assert base is not None
    models = fetched(f"{base[0]}/v1/models")
    name = json.loads(models)["data"][0]["id"]
    request = {
        "model": name,
        "messages": [message("user", QUESTION.format(2, 3))],
        "temperature": 0,
        "max_tokens": 24,
    }
    answer = json.loads(fetched(f"{base[0]}/v1/chat/completions", request))["choices"][0]["message"]["content"]
    print(f"{name}: {answer}")
    must(
        answer.strip() == Path(expected).read_text(encoding="utf-8").strip(), "`lockstep generate` says something else"
    )


def page(address: str, *runs: str) -> None:
    text = fetched(address)
    must("<html" in text.lower(), f"{address} is no page")
    print(f"{address}: {len(text):,} letters, of {', '.join(runs)}")


def fetched(address: str, body: dict[str, Any] | None = None) -> str:
    given = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(address, given, {"Content-Type": "application/json"} if given else {})
    with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
        return str(answer.read().decode())


def load(folder: str, expected: str) -> None:
    """Plain transformers, nothing of ours: the same greedy answer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    must("lockstep" not in sys.modules, "this is to be without lockstep")
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [message("user", QUESTION.format(2, 3))]
    given = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    ids = model.generate(**given, max_new_tokens=24, do_sample=False)
    answer = tokenizer.decode(ids[0, given["input_ids"].shape[1] :], skip_special_tokens=True)
    print(f"{type(model).__name__}: {answer}")
    must(
        answer.strip() == Path(expected).read_text(encoding="utf-8").strip(), "`lockstep generate` says something else"
    )


def must(true: bool, otherwise: str) -> None:
    if not true:
        sys.exit(f"first hour: {otherwise}")


PARTS: dict[str, Callable[..., None]] = {
    one.__name__: one for one in (rows, shown, reward, rewarded, port, link, ask, page, load)
}

if __name__ == "__main__":
    PARTS[sys.argv[1]](*sys.argv[2:])
