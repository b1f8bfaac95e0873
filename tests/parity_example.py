"""A comparison made by hand, for the page and the support table: two judged metrics and one that is only shown."""

from __future__ import annotations

import math

from lockstep.parity.compare.comparison import (
    Comparison,
    Difference,
    Figures,
    Finding,
    Metric,
    Noise,
    PhaseTimes,
    Power,
    Throughput,
)

STEPS = list(range(1, 201))
HOSTILE = "</script><script>window.hacked = true; alert('hacked')</script> & <b>bold</b> <!--"


def loss(step: int) -> float:
    return 0.4 + 2.1 * math.exp(-step / 45) + 0.02 * math.sin(step / 3)


def loss_of_b(step: int) -> float:
    return loss(step) + 0.004 * math.cos(step / 5) + 0.0006 * (step % 7)


def reward(step: int) -> float:
    return 0.8 / (1 + math.exp(-(step - 80) / 25)) + 0.025 * math.sin(step * 1.7)


def reward_of_b(step: int) -> float:
    return reward(step) + 0.02 * math.cos(step * 2.3) - (0.0011 * (step - 120) if step > 120 else 0)


def example(verdict: str = "out of step") -> Comparison:
    metrics = [
        Metric(
            name="response_length/mean",
            names=("response_length/mean", "completions/mean_length"),
            kind="other",
            bar_percent=None,
            figures=Figures(200, 1, 200, 812.5, 3.1, 2.9, 31.0, 7, -4.25, 0.91, None),
            noise=None,
            verdict=None,
            decided_by="",
            steps=STEPS,
            a=[180.0 + step % 23 for step in STEPS],
            b=[176.0 + step % 29 if step != 50 else math.nan for step in STEPS],
        ),
        Metric(
            name="train/loss",
            names=("train/loss", "train/loss"),
            kind="loss",
            bar_percent=2.0,
            figures=Figures(200, 1, 200, 0.3120471, 0.4123, 0.3987123, 0.0076, 7, 0.0017998, 0.99991234, None),
            noise=Noise(2, 0.281, -0.012, 0.074),
            verdict="in step",
            decided_by="mean error 0.31 % <= 2 %",
            steps=STEPS,
            a=[loss(step) for step in STEPS],
            b=[loss_of_b(step) for step in STEPS],
            repeats=[
                [loss(step) + 0.004 * math.sin(step * 1.3) for step in STEPS],
                [loss(step) + 0.004 * math.cos(step * 0.9) for step in STEPS],
            ],
        ),
        Metric(
            name="critic/rewards/mean",
            names=("critic/rewards/mean", "reward"),
            kind="reward",
            bar_percent=4.0,
            figures=Figures(200, 1, 200, 4.8321, 21.4, 8.912, -0.1071, 199, -0.01793, 0.9871, 171),
            noise=Noise(1, 1.52, 1.21, 5.48),
            verdict="out of step",
            decided_by="mean error 4.83 % > 4 %, and by more than a repeat does",
            steps=STEPS,
            a=[reward(step) for step in STEPS],
            b=[reward_of_b(step) for step in STEPS],
            repeats=[[reward(step) + 0.02 * math.sin(step * 0.7) for step in STEPS]],
            findings=[
                Finding("end", 171, 200, -0.0712, 0.0311, 1.83),
                Finding("drift", 1, 200, -0.01793, 0.0162, 1.07),
            ],
            power=Power(1, 0.0182, 0.0249, 0.0821, 10, 198),
        ),
    ]
    question = [{"role": "user", "content": "Tom has 12 apples and gives 5 away. How many are left?"}]
    return Comparison(
        a="runs/2026/grpo-cpu",
        b="runs/2026/grpo-accelerator",
        kinds=("lockstep run", "lockstep run"),
        verdict=verdict,  # type: ignore[arg-type]
        reason="critic/rewards/mean: mean error 4.83 % > 4 %, and by more than a repeat does",
        metrics=metrics,
        throughput=Throughput(
            ratio=7.813,
            a=412.7,
            b=3224.4,
            matched_ratio=7.55,
            matched_steps=143,
            phases=[
                PhaseTimes("generation", 95.2, 701.9),
                PhaseTimes("log-probs", 2212.0, 21904.0),
                PhaseTimes("update", 640.0, 598.5),
            ],
            warnings=["mean response lengths differ by 3.1 %: the first ratio compares unequal work"],
        ),
        differences=[
            Difference("recipe", "log.every", 1, 10, "harmless", "fewer lines in the log"),
            Difference("recipe", "optim.lr", 1e-6, 2e-6, "blocks", "the curves belong to different step sizes"),
            Difference("versions", "torch", "2.11.0", "2.13.0", "matters", "kernels may round differently"),
            Difference("device", "chip", "x86_64, 16 cores", "emulated <chip>", "matters", "other order of summation"),
        ],
        unknown=["initial weights: B does not say where it started from"],
        samples=[
            (
                {
                    "step": 1,
                    "prompt": question,
                    "response": "12 - 5 = 7, so 7 apples are left.\n#### 7",
                    "score": 1.0,
                    "tokens": 21,
                    "stop": "eos",
                },
                {
                    "step": 1,
                    "prompt": question,
                    "response": "12 - 5 = 8, so there are 8.\n#### 8",
                    "score": 0.0,
                    "tokens": 18,
                    "stop": "eos",
                },
            ),
            (
                {"step": 1, "prompt": HOSTILE, "response": HOSTILE, "score": 0.1, "tokens": 30, "stop": "length"},
                None,
            ),
        ],
        facts={
            "method": ("grpo", "grpo"),
            "model": ("/models/tiny-7", "/models/tiny-7"),
            "dtype": ("float32", "bfloat16"),
            "hardware": ("CPU, 16 cores", "1 emulated chip"),
            "versions": ({"lockstep": "0.1.0", "torch": "2.11.0"}, {"lockstep": "0.1.0", "torch": "2.13.0"}),
        },
    )
