"""Plays a task of verifiers 0.4 with the policy: `rollout.agent: command:PYTHON verifiers_agent.py TASKSET [HARNESS]`.

PYTHON is an interpreter with verifiers, whose dependencies do not fit to those of lockstep's tests. The program gets a
row as JSON on its standard input, with the number of the task as `extra_info.idx`, and the address of the policy as
OPENAI_BASE_URL. It prints the reward of the trace as JSON.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys

import verifiers.v1 as vf
from verifiers.v1.configs.client import EvalClientConfig
from verifiers.v1.runtimes import SubprocessConfig
from verifiers.v1.utils.loaders import load_taskset, taskset_config_type


async def play(taskset: str, harness: str, index: int) -> dict[str, object]:
    tasks = load_taskset(taskset_config_type(taskset)(id=taskset)).include(idx=[str(index)])
    task = next(iter(tasks))
    client = EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var="OPENAI_API_KEY")
    config = vf.AgentConfig(harness={"id": harness}, runtime=SubprocessConfig(), model="policy", client=client)
    async with vf.Agent(config) as agent:
        trace = await agent.run(task)
    if not trace.ok:
        raise SystemExit(f"{trace.errors[-1].type}: {trace.errors[-1].message}")
    return {"reward": trace.reward, "metrics": {name: float(value) for name, value in trace.metrics.items()}}


if __name__ == "__main__":
    row = json.loads(sys.stdin.readline())
    taskset, harness = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "null"
    print(json.dumps(asyncio.run(play(taskset, harness, int(row["extra_info"]["idx"])))))
