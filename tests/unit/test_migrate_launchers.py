"""`lockstep migrate` behind launchers, containers and job scripts, with old file names, and with unset variables."""

from __future__ import annotations

import pytest

from lockstep.compat.conversion_output import checked
from lockstep.compat.launchers import slurm_variables, training_of
from lockstep.compat.migrate import migrated
from lockstep.compat.shell import read_script
from lockstep.errors import Problem

VERL = (
    "data.train_files=t.parquet actor_rollout_ref.model.path=m algorithm.adv_estimator=grpo "
    "actor_rollout_ref.rollout.n=4"
)
MAIN = f"python3 -m verl.trainer.main_ppo {VERL}"
PPO = "--pretrain m --reward_pretrain r --prompt_data p.jsonl --critic_pretrain c"


def one(script: str, *words: str):  # type: ignore[no-untyped-def]
    found, problems, _ = migrated(script, words)
    assert not problems
    (only,) = found
    return only


def problem_of(script: str, *words: str) -> Problem:
    found, problems, _ = migrated(script, words)
    assert not found
    (problem,) = problems
    return problem


@pytest.mark.parametrize(
    "script",
    [
        f"srun --nodes=2 --ntasks-per-node=1 {MAIN}",
        f"srun -N1 singularity exec --nv -B /data img.sif {MAIN}",
        f"apptainer exec --nv img.sif bash -lc '{MAIN}'",
        f'docker exec -it box /bin/bash -c "cd /w && {MAIN}"',
        f"docker run --rm --gpus all image:1 {MAIN}",
        f"conda run -n rl --no-capture-output {MAIN}",
        f"uv run --extra gpu {MAIN}",
        f"nohup {MAIN} > log 2>&1 &",
        f"env CUDA_VISIBLE_DEVICES=0,1 HYDRA_FULL_ERROR=1 {MAIN}",
        f"PYTHONUNBUFFERED=1 {MAIN}",
        f'sbatch --nodes 2 --wrap "{MAIN}"',
        f"sbatch --wrap='{MAIN}'",
        f"ssh node1 'source env.sh; {MAIN}'",
        f"sbatch <<EOF\n#!/bin/bash\n#SBATCH -N 2\n{MAIN}\nEOF",
        f"srun --pty bash <<'EOF'\n{MAIN}\nEOF",
        f"ray job submit --address=http://h:8265 --runtime-env=env.yaml -- {MAIN}",
        f"timeout 3600 {MAIN}",
        f"PYTHON=python3\n$PYTHON -u -m verl.trainer.main_ppo {VERL}",
        f"CMD='{MAIN}'\nsrun bash -c \"$CMD\"",
        f"M=m\nbash -c 'python3 -m verl.trainer.main_ppo {VERL.replace('path=m', 'path=$M')}'",
    ],
)
def test_the_command_behind_a_launcher(script: str) -> None:
    found = one(script)
    assert (found.training.peer, found.training.program) == ("verl", "main_ppo")
    assert (checked(found.done).model.path, checked(found.done).rollout.n) == ("m", 4)


def test_lines_of_a_here_document() -> None:
    done = one(f"set -x\nsbatch <<EOF\n#!/bin/bash\n{MAIN}\nEOF").done
    assert {given.where for given in done.settings.given.values()} == {"line 4"}


@pytest.mark.parametrize(
    ("script", "program"),
    [
        (f"python ../train_ppo_ray.py {PPO}", "train_ppo_ray"),
        (f"deepspeed ./train_ppo.py {PPO}", "train_ppo"),
        (f"deepspeed examples/train_ppo.py {PPO} --flash_attn --bf16", "train_ppo"),
        (f"deepspeed --module openrlhf.cli.train_ppo {PPO}", "train_ppo"),
        (f"ray job submit --address=a -- python3 examples/train_ppo_ray.py {PPO}", "train_ppo_ray"),
        ("deepspeed ./train_sft.py --pretrain m --dataset d.jsonl --max_len 8 --output_key o", "train_sft"),
        ("accelerate launch --num_processes 4 train_dpo.py --pretrain m --dataset d.jsonl", "train_dpo"),
    ],
)
def test_old_forms_of_openrlhf(script: str, program: str) -> None:
    found = one(script)
    assert (found.training.peer, found.training.program) == ("openrlhf", program)
    checked(found.done)


def test_ppo_without_ray_has_its_own_defaults() -> None:
    """OpenRLHF 0.5: rollout_batch_size 512, lambd 1.0."""
    done = one(f"deepspeed --num_gpus 4 examples/train_ppo.py {PPO}").done
    recipe = checked(done)
    assert (recipe.batch.prompts, recipe.algorithm.lam, done.devices) == (512, 1.0, 4)
    assert any("0.95" in remark for remark in done.remarks)
    assert checked(one(f"python ../train_ppo_ray.py {PPO}").done).batch.prompts == 1024
    k3 = checked(one(f"python ../train_ppo_ray.py {PPO} --use_kl_estimator_k3").done)
    assert k3.algorithm.kl.estimator == "k3"
    found, _, _ = migrated(f"deepspeed examples/train_ppo.py {PPO} --pretrain_data x --ptx_coef 0.05")
    assert [problem.where for problem in found[0].done.problems] == ["line 1: --pretrain_data"]


def test_files_of_other_projects_are_not_taken_for_openrlhf() -> None:
    assert training_of(read_script("python train_sft.py --model_name_or_path m").commands[0]) is None
    assert training_of(read_script("python examples/data_preprocess/gsm8k.py --local_dir d").commands[0]) is None


def test_a_copy_of_verl_under_another_name_is_explained() -> None:
    problem = problem_of(f"python3 -m my_agent.main_ppo_agent {VERL}")
    assert (problem.where, problem.code) == ("line 1: verl my_agent.main_ppo_agent", "unknown-name")
    assert problem_of(f"python train_mine.py {VERL}").code == "unknown-name"
    assert problem_of("python train_mine.py --lr 1").code == "not-training"


# Unset variables -----------------------------------------------------------------------------------------------------


def test_a_here_document_with_an_unset_variable_is_a_command() -> None:
    script = """read -r -d '' words <<EOF
openrlhf.cli.train_dpo --model.model_name_or_path m \\
   --data.dataset ${DATA}/pairs.jsonl --ckpt.output_dir $(date +%d)
EOF
deepspeed --module $words
"""
    problem = problem_of(script)
    assert (problem.why, problem.code) == ("the variable DATA is not set in the script", "unresolved-reference")
    assert problem.remedy == "set it: lockstep migrate script.sh DATA=VALUE"
    assert checked(one(script, "DATA=d").done).data.train[0].path == "d/pairs.jsonl"


def test_a_folder_with_the_name_of_an_argument_is_reported_with_the_command_that_sets_it() -> None:
    script = f"{MAIN} trainer.default_local_dir=$2"
    _, _, remarks = migrated(script, path="my run.sh")
    assert remarks[-1].endswith("(set it: lockstep migrate 'my run.sh' ARGUMENT1 ARGUMENT2)")
    assert not migrated(script, ["8", "out"])[2]


def test_one_message_lists_every_missing_value_with_one_command() -> None:
    script = (
        "python3 -m verl.trainer.main_ppo data.train_files=$DATA/train.parquet \\\n"
        "  data.val_files=$DATA/val.parquet actor_rollout_ref.model.path=$MODEL \\\n"
        "  algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=$2\n"
    )
    problem = problem_of(script)
    assert (problem.where, problem.code) == ("line 1: data.train_files=DATA/train.parquet", "unresolved-reference")
    assert "DATA, MODEL, 2" in problem.why
    assert problem.remedy.endswith("lockstep migrate script.sh ARGUMENT1 ARGUMENT2 DATA=VALUE MODEL=VALUE")
    recipe = checked(one(script, "x", "4", "DATA=d", "MODEL=m").done)
    assert (recipe.data.train[0].path, recipe.model.path, recipe.rollout.n) == ("d/train.parquet", "m", 4)


def test_a_variable_with_the_output_of_a_program_can_be_set() -> None:
    script = f"GPUS=$(nvidia-smi -L | wc -l)\n{MAIN} data.train_batch_size=$((GPUS * 2)) data.seed=$GPUS"
    problem = problem_of(script)
    assert "GPUS = $(nvidia-smi -L | wc -l)" in problem.why
    assert problem.remedy.endswith("GPUS=VALUE")
    found, _, _ = migrated(f"{MAIN} data.seed=$(nproc)")
    assert not found


def test_unset_values_that_training_does_not_need() -> None:
    script = (
        f"{MAIN} trainer.project_name=$PROJECT trainer.experiment_name=qwen-$TAG trainer.nnodes=$NNODES "
        "trainer.default_local_dir=$OUT/ckpt ray_init.num_cpus=$CPUS "
        "actor_rollout_ref.rollout.gpu_memory_utilization=$SHARE trainer.logger=$LOGGER"
    )
    found, problems, remarks = migrated(script)
    assert not problems
    recipe = checked(found[0].done)
    assert (recipe.log.project, recipe.run.name, recipe.run.folder) == ("PROJECT", "qwen-TAG", "OUT/ckpt")
    named = [remark.split(": ")[1].split()[0] for remark in remarks]
    assert named == ["PROJECT", "TAG", "NNODES", "OUT", "CPUS", "SHARE", "LOGGER"]


def test_unset_flags_that_training_does_not_need() -> None:
    script = f"python3 -m openrlhf.cli.train_ppo_ray {PPO} --use_wandb $KEY --ckpt_path $CKPT --zero_stage $Z --bf16"
    found, problems, remarks = migrated(script)
    assert not problems
    assert checked(found[0].done).model.dtype == "bf16"
    assert len(remarks) == 3
    assert "KEY" not in str(found[0].done.settings.given)
    needed = f"python3 -m openrlhf.cli.train_ppo_ray {PPO} --max_epochs $EPOCHS --zero_stage $Z"
    assert "EPOCHS" in problem_of(needed).why
    assert "Z" not in problem_of(needed).remedy.replace("SIZE", "").split()[-1]


def test_the_folder_of_the_script() -> None:
    script = (
        'DIR="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"\n' + MAIN + " custom_reward_function.path=$DIR/r.py"
    )
    found, problems, _ = migrated(script, (), "/jobs/jobs/run.sh")
    assert not problems
    assert checked(found[0].done).reward.function == "/jobs/r.py:compute_score"


def test_job_scripts_set_variables() -> None:
    head = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --gres=gpu:a100:4\n#SBATCH -J grpo\n#SBATCH --gpus-per-node=8\n"
    assert slurm_variables(head) == {
        "SLURM_NNODES": "2",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
        "SLURM_GPUS_PER_NODE": "8",
        "SLURM_JOB_NAME": "grpo",
    }
    words = "trainer.nnodes=$SLURM_NNODES trainer.n_gpus_per_node=$SLURM_GPUS_PER_NODE"
    done = one(f"{head}srun {MAIN} {words} trainer.experiment_name=$SLURM_JOB_NAME-$SLURM_JOB_ID").done
    assert (done.nodes, done.devices, done.recipe["run.name"].value) == (2, 8, "grpo-SLURM_JOB_ID")
