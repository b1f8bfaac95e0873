"""Rows in the forms in which projects publish them, small and written for the tests; and what must be read of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

WEATHER: dict[str, Any] = {
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome"}}\n</tool_call><|im_end|>'


@dataclass(frozen=True)
class Published:
    """`trained` are the marked parts of the first row, in order (online: the prompt's text has no mark); `said` stands
    in the line of the source."""

    name: str
    method: str
    rows: list[dict[str, Any]]
    trained: list[str]
    said: str
    data: dict[str, Any] = field(default_factory=dict)
    more: dict[str, Any] = field(default_factory=dict)
    holds: str = ""
    """What the text of the first row holds besides."""

    def recipe(self, file: str, model: str, runs: str) -> dict[str, Any]:
        online = self.method == "grpo"
        values: dict[str, Any] = {
            "method": self.method,
            "device": "cpu",
            "run": {"name": self.name, "folder": runs, "steps": 2},
            "model": {"path": model},
            "data": {"train": file, **self.data},
            "batch": {"prompts": 1} if online else {"rows_per_update": 1},
            "optim": {"lr": 1e-3},
            **self.more,
        }
        if online:
            values["rollout"] = {"n": 2, "max_tokens": 4}
        if self.method == "prm":
            values["prm"] = {"placeholder": "~", "tokens": ["+", "-"]}
        return values


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def bot(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def share(source: str, text: str) -> dict[str, Any]:
    return {"from": source, "value": text}


SUPERVISED = [
    Published(
        "alpaca",
        "sft",
        [
            {"instruction": "Say it in French.", "input": "Good day", "output": "Bonjour"},
            {"instruction": "Name a colour.", "input": "", "output": "Blue"},
        ],
        ["Bonjour<|im_end|>"],
        "prompt_response (instruction + output, and input on a new line)",
        holds="<|im_start|>user\nSay it in French.\nGood day<|im_end|>",
    ),
    Published(
        "alpaca_history",
        "sft",
        [
            {
                "instruction": "And red?",
                "input": "",
                "output": "Rouge",
                "system": "Say it in French.",
                "history": [["Blue?", "Bleu"]],
            }
        ],
        ["Bleu<|im_end|>", "Rouge<|im_end|>"],
        "(instruction + output, and input on a new line, system message from system, earlier turns from history)",
        holds="<|im_start|>system\nSay it in French.<|im_end|>\n<|im_start|>user\nBlue?<|im_end|>",
    ),
    Published(
        "dolly",
        "sft",
        [{"instruction": "When?", "context": "It was in 1990.", "response": "1990", "category": "closed_qa"}],
        ["1990<|im_end|>"],
        "prompt_response (instruction + response, and context on a new line); not read: category",
        holds="When?\nIt was in 1990.<|im_end|>",
    ),
    Published(
        "sharegpt",
        "sft",
        [
            {
                "id": "a_1",
                "conversations": [
                    share("system", "Be brief."),
                    share("human", "Hi"),
                    share("gpt", "Hello"),
                    share("human", "Bye"),
                    share("bot", "Ciao"),
                ],
            }
        ],
        ["Hello<|im_end|>", "Ciao<|im_end|>"],
        "messages (conversations); not read: id",
        holds="<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>",
    ),
    Published(
        "sharegpt_tools",
        "sft",
        [
            {
                "conversations": [
                    share("human", "Rome?"),
                    share("function_call", '{"name": "get_weather", "arguments": {"city": "Rome"}}'),
                    share("observation", "19"),
                    share("gpt", "19 degrees"),
                ],
                "system": "Help.",
                "tools": json.dumps([WEATHER]),
            }
        ],
        [CALL, "19 degrees<|im_end|>"],
        "messages (conversations, system message from system, tools from tools)",
        {"template": "qwen"},
        holds="<tool_response>\n19\n</tool_response>",
    ),
    Published(
        "openai_tools",
        "sft",
        [
            {
                "messages": [
                    user("Rome?"),
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [
                            {
                                "id": "call_1",
                                "type": "function",
                                "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
                            }
                        ],
                    },
                    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "19"}]},
                    bot("19 degrees"),
                ],
                "parallel_tool_calls": False,
                "tools": [{"type": "function", "function": WEATHER}],
            }
        ],
        [CALL, "19 degrees<|im_end|>"],
        "messages (messages, tools from tools); not read: parallel_tool_calls",
        {"template": "qwen"},
        holds=json.dumps(WEATHER),
    ),
    Published(
        "openai_weights",
        "sft",
        [{"messages": [user("2+2?"), bot("5") | {"weight": 0}, user("No."), bot("4") | {"weight": 1}]}],
        ["4<|im_end|>"],
        "messages (messages)",
        holds="<|im_start|>assistant\n5<|im_end|>",
    ),
    Published(
        "orca",
        "sft",
        [{"id": "niv.1", "system_prompt": "Be kind.", "question": "Why?", "response": "Because."}],
        ["Because.<|im_end|>"],
        "prompt_response (question + response, system message from system_prompt); not read: id",
        holds="<|im_start|>system\nBe kind.<|im_end|>",
    ),
    Published(
        "trl_texts",
        "sft",
        [{"prompt": "The sky is", "completion": " blue."}],
        [" blue.<|im_end|>"],
        "prompt_response (prompt + completion)",
    ),
    Published(
        "trl_chats",
        "sft",
        [{"prompt": [user("The sky?")], "completion": [bot("Blue.")]}],
        ["Blue.<|im_end|>"],
        "prompt_response (prompt + completion)",
    ),
    Published(
        "prompt_answer",
        "sft",
        [{"prompt": "2+2?", "answer": "4"}],
        ["4<|im_end|>"],
        "prompt_response (prompt + answer)",
    ),
    Published(
        "gsm8k",
        "sft",
        [{"question": "Two and two?", "answer": "2+2=<<2+2=4>>4\n#### 4"}],
        ["2+2=<<2+2=4>>4\n#### 4<|im_end|>"],
        "prompt_response (question + answer)",
    ),
    Published(
        "math",
        "sft",
        [{"problem": "$2+2$?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{4}$."}],
        ["It is $\\boxed{4}$.<|im_end|>"],
        "prompt_response (problem + solution); not read: level, type",
    ),
    Published("text", "sft", [{"text": "Five."}], ["ive.<|im_end|>"], "text (text)"),
]

PREFERENCES = [
    Published(
        "implicit_prompt",
        "dpo",
        [{"chosen": [user("a?"), bot("b")], "rejected": [user("a?"), bot("c")]}],
        ["b<|im_end|>", "c<|im_end|>"],
        "chosen/rejected pairs (the prompt is the common beginning of the responses, chosen, rejected)",
    ),
    Published(
        "helpful_harmless",
        "dpo",
        [
            {
                "chosen": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Help?\n\nAssistant: Gladly.",
                "rejected": "\n\nHuman: Hi\n\nAssistant: Hello\n\nHuman: Help?\n\nAssistant: No.",
            }
        ],
        ["Gladly.<|im_end|>", "No.<|im_end|>"],
        "the common beginning of the responses, 1 dialogues of Human and Assistant read as chats, chosen, rejected)",
        holds="<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nHelp?<|im_end|>",
    ),
    Published(
        "sharegpt_pairs",
        "dpo",
        [{"conversations": [share("human", "a?")], "chosen": share("gpt", "b"), "rejected": share("gpt", "c")}],
        ["b<|im_end|>", "c<|im_end|>"],
        "prompt/chosen/rejected pairs (conversations, chosen, rejected)",
    ),
    Published(
        "alpaca_pairs",
        "dpo",
        [{"instruction": "Shorten.", "input": "aaa", "chosen": "a", "rejected": "b"}],
        ["a<|im_end|>", "b<|im_end|>"],
        "pairs (instruction, and input on a new line, chosen, rejected)",
        holds="Shorten.\naaa<|im_end|>",
    ),
    Published(
        "ultrafeedback",
        "dpo",
        [
            {
                "source": "evol_instruct",
                "instruction": "Greet.",
                "models": ["a", "b", "c", "d"],
                "completions": [
                    {"model": "a", "response": "Hm", "fine-grained_score": 2.0, "overall_score": 4.0},
                    {"model": "b", "response": "Hi!", "fine-grained_score": 4.75, "overall_score": 8.5},
                    {"model": "c", "response": "No", "fine-grained_score": 1.0, "overall_score": 2.0},
                    {"model": "d", "response": "Nope", "fine-grained_score": 1.0, "overall_score": 2.0},
                ],
                "correct_answers": ["None"],
                "incorrect_answers": ["None"],
            }
        ],
        ["Hi!<|im_end|>", "No<|im_end|>"],
        "rankings (instruction, completions; by completions.overall_score; only the best and the worst "
        "response are compared, 1 others left out; 1 responses left out because another has the same score); not read: "
        "source, models, correct_answers, incorrect_answers",
    ),
]

STEPS = [
    Published(
        "math_shepherd",
        "prm",
        [
            {
                "input": "Two and three? Step 1: 2+3=5 ки\nStep 2: The answer is: 6 ки",
                "label": "Two and three? Step 1: 2+3=5 +\nStep 2: The answer is: 6 -",
                "task": "GSM8K",
            }
        ],
        ["~", "~"],
        "labels from label, as + or - for 'ки' (Math-Shepherd), which becomes '~'); not read: task",
        holds="labels 1 0: ",
    ),
    Published(
        "prm800k",
        "prm",
        [
            {
                "labeler": "l1",
                "timestamp": "2022-07-17T16:56:51.323252",
                "generation": None,
                "is_quality_control_question": False,
                "is_initial_screening_question": False,
                "question": {"problem": "Two and three?", "ground_truth_answer": "5"},
                "label": {
                    "steps": [
                        {
                            "completions": [
                                {"text": "Guess.", "rating": -1, "flagged": None},
                                {"text": "Add them.", "rating": 0, "flagged": None},
                            ],
                            "human_completion": None,
                            "chosen_completion": 1,
                        },
                        {
                            "completions": [{"text": "2+3=5", "rating": 1, "flagged": None}],
                            "human_completion": None,
                            "chosen_completion": 0,
                        },
                        {
                            "completions": [{"text": "So 6.", "rating": -1, "flagged": False}],
                            "human_completion": None,
                            "chosen_completion": None,
                        },
                    ],
                    "total_time": 8000,
                    "finish_reason": "found_error",
                },
            }
        ],
        ["~", "~", "~"],
        "rated solutions of PRM800K (question; labels from label: 1 and 0 are good, -1 is bad; 1 completions "
        "that are not part of a solution are left out); not read: labeler, timestamp, generation,",
        holds="labels 1 1 0: ",
    ),
]

ONLINE = [
    Published(
        "gsm8k_prompts",
        "grpo",
        [{"question": "A thousand and four?", "answer": "1000+4=<<1000+4=1004>>1,004\n#### 1,004"}],
        [],
        "prompts (question; ground truth from answer, after its #### (as openai/gsm8k))",
        {"prompt_format": "{} End with ####."},
        {"algorithm": {"advantage": "grpo"}},
        holds="openai/gsm8k, answer 1004\n<|im_start|>user\nA thousand and four? End with ####.<|im_end|>",
    ),
    Published(
        "math_prompts",
        "grpo",
        [{"problem": "A half?", "level": "Level 1", "type": "Algebra", "solution": "It is $\\boxed{\\frac{1}{2}}$."}],
        [],
        "problem; ground truth from solution, in its last \\boxed{} (as lighteval/MATH)); not read: level, type",
        {"system": "Put it in \\boxed{}."},
        {"algorithm": {"advantage": "grpo"}},
        holds="lighteval/MATH, answer \\frac{1}{2}\n<|im_start|>system\nPut it in \\boxed{}.<|im_end|>",
    ),
    Published(
        "math_500_prompts",
        "grpo",
        [
            {
                "problem": "A half?",
                "solution": "It is $\\boxed{\\frac{1}{2}}$.",
                "answer": "\\frac{1}{2}",
                "subject": "Algebra",
                "level": 2,
                "unique_id": "test/algebra/1.json",
            }
        ],
        [],
        "ground truth from answer, the full text, in rows with a solution in \\boxed{} (as HuggingFaceH4/MATH-500))",
        holds="HuggingFaceH4/MATH-500, answer \\frac{1}{2}\n<|im_start|>user",
    ),
    Published(
        "plain_prompts",
        "grpo",
        [{"prompt": "Say something."}],
        [],
        "prompts (prompt; no ground truth)",
        {},
        {"reward": {"function": "reward.py:length", "workers": 1}},
        holds="plain_prompts.jsonl, no ground truth\n<|im_start|>user\nSay something.<|im_end|>",
    ),
    Published(
        "tool_prompts",
        "grpo",
        [{"messages": [user("Rome?")], "tools": [WEATHER], "ground_truth": "19"}],
        [],
        "prompts (messages, tools from tools; ground truth from ground_truth)",
        {"template": "qwen"},
        {"reward": {"function": "reward.py:length", "workers": 1}},
        holds=json.dumps(WEATHER),
    ),
]

REWARD = """
def length(data_source, solution_str, ground_truth, extra_info):
    return len(solution_str) / 20
"""
EVERY = [*SUPERVISED, *PREFERENCES, *STEPS, *ONLINE]
