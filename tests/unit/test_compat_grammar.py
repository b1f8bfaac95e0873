"""The grammars of the peers' command lines and scripts: Hydra's, argparse's and the shell's."""

from __future__ import annotations

import re
from typing import Any

import pytest
from omegaconf.errors import OmegaConfBaseException

from lockstep.compat.command_grammar import Flag, parse_flags
from lockstep.compat.hydra_overrides import Applied, StoredRelease, parse_overrides
from lockstep.compat.launchers import training_of
from lockstep.compat.migrate import looks_cut_off
from lockstep.compat.shell import Word as W
from lockstep.compat.shell import read_script


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1", 1),
        ("-1", -1),
        ("1e-6", 1e-6),
        ("1.", 1.0),
        (".5", 0.5),
        ("5e-7", 5e-7),
        # Hydra 1.3.8 reads an underscore between two digits as part of a number.
        ("0.5_5", 0.55),
        ("1_000", 1000),
        ("1e1_0", 1e10),
        ("0.5_5.0", "0.5_5.0"),
        ("'0.5_5'", "0.5_5"),
        ("1__0", "1__0"),
        ("007", "007"),
        ("True", True),
        ("false", False),
        ("null", None),
        ("", ""),
        ("Qwen/Qwen2-7B", "Qwen/Qwen2-7B"),
        ("[console,wandb]", ["console", "wandb"]),
        ("['console', \"wandb\"]", ["console", "wandb"]),
        ("[]", []),
        ("[0.9,0.999]", [0.9, 0.999]),
        ("[[1,2],[3]]", [[1, 2], [3]]),
        ("'1'", "1"),
        ("'it\\'s'", "it's"),
        ("{a:1,b:[x]}", {"a": 1, "b": ["x"]}),
        (".*visual.*", ".*visual.*"),
    ],
)
def test_values_of_hydra(text: str, value: Any) -> None:
    (found,) = parse_overrides([f"a={text}"]).overrides
    assert found.override.value() == value
    assert type(found.override.value()) is type(value)


@pytest.mark.parametrize("text", ["[1,2", "'open", "{a", "[1] 2", "a,b", "a=b"])
def test_values_that_hydra_refuses(text: str) -> None:
    (problem,) = parse_overrides([f"a={text}"], ["line 3"]).problems
    assert problem.code == "invalid-syntax"
    assert problem.where.startswith("line 3: a")


def applied(*words: str, known: tuple[str, ...] = ()) -> Applied:
    return Applied(StoredRelease("verl", "0.4.1").compose("sft_trainer"), parse_overrides(words).overrides, known)


def test_overrides_set_add_and_take_away() -> None:
    words = ["optim.lr=1", "+data.c=2", "++optim.lr=3", "data.seed=4", "~trainer", "data.multiturn={enable:true}"]
    found = applied(*words, known=("data.seed",))
    assert list(found.places) == ["data.c", "optim.lr", "data.seed", "data.multiturn.enable"]
    assert [found.value(key) for key in found.places] == [2, 3, 4, True]
    assert not found.has("trainer.seed")
    assert found.has("data.multiturn.messages_key")
    assert not found.problems
    assert parse_overrides(["--config-name=ppo_trainer", "-cd", "d"]).config == "ppo_trainer"


def test_references_to_values_of_the_whole_configuration() -> None:
    found = applied(
        "optim.lr=${optim.weight_decay}", "data.max_length=${oc.select:data.none,7}", "data.prompt_key=${no}"
    )
    assert (found.value("optim.lr"), found.value("data.max_length")) == (0.01, 7)
    with pytest.raises(OmegaConfBaseException):
        found.value("data.prompt_key")


def test_keys_that_no_release_has() -> None:
    found = applied("data.nothing=1", "~data.none", "+optim.lr=2")
    assert [placed.key for placed in found.unknown] == ["data.nothing"]
    assert [problem.where for problem in found.problems] == ["data.none"]
    assert found.value("optim.lr") == 2  # Hydra refuses to add a key that exists; another release may not have it


@pytest.mark.parametrize("word", ["a.b", "a b=1", "-x"])
def test_words_that_are_no_overrides(word: str) -> None:
    assert parse_overrides([word], ["line 3"]).problems[0].where.startswith("line 3")


FLAGS = {
    flag.name: flag
    for flag in (
        Flag("bf16", bool, "switch"),
        Flag("learning_rate", float),
        Flag("max_len", int),
        Flag("max_norm", float),
        Flag("reward_clip_range", float, 2),
        Flag("reward_tokens", str, "many"),
        Flag("save_steps", int),
        Flag("input_template"),
        Flag("data.max_len", int),
    )
}


def test_flags_as_argparse_reads_them() -> None:
    line = "--learning_rate 5e-7 --max_len=4096 --bf16 --reward_clip_range -10 10 --save_steps -1 --reward_tokens + -"
    words = [*line.split(), "--data.max_len", "7", "--input_template", ""]
    found = parse_flags(words, FLAGS)
    assert not found.problems
    assert {key: given.value for key, given in found.given.items()} == {
        "learning_rate": 5e-7,
        "max_len": 4096,
        "bf16": True,
        "reward_clip_range": [-10.0, 10.0],
        "save_steps": -1,
        "reward_tokens": ["+", "-"],
        "data.max_len": 7,
        "input_template": "",
    }


def test_a_prefix_is_enough_where_it_is_one_flags_alone() -> None:
    assert parse_flags(["--learn", "1e-5"], FLAGS).given["learning_rate"].value == 1e-5
    ambiguous = parse_flags(["--max_", "3"], FLAGS).problems
    assert [(p.where, p.why) for p in ambiguous] == [
        ("--max_", "is ambiguous: it may mean any of --max_len, --max_norm")
    ]


@pytest.mark.parametrize(
    ("words", "code", "value"),
    [
        (["--learning_rat", "1", "--lerning_rate", "1"], "unknown-key", ""),
        (["--reward_clip_range", "1"], "invalid-value", "2 values"),
        (["--max_len", "long"], "invalid-value", "'long'"),
        (["--max_len", "12.5"], "invalid-value", "not an integer"),
        (["--bf16=1"], "invalid-value", "switch"),
        (["stray"], "invalid-syntax", ""),
    ],
)
def test_flags_that_cannot_be_read(words: list[str], code: str, value: str) -> None:
    problem = parse_flags(words, FLAGS).problems[-1]
    assert problem.code == code
    assert value in problem.why
    if code == "unknown-key":
        assert problem.remedy == "did you mean --learning_rate?"


def words(script: str, *arguments: str, **given: str) -> list[list[str]]:
    return [[word.text for word in command] for command in read_script(script, given, arguments).commands]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("run a \\\n  b \\\n  c\n", [["run", "a", "b", "c"]]),
        ("# comment\nrun a # b\n", [["run", "a"]]),
        ("X=1; run $X ${X} \"$X\" '$X'", [["run", "1", "1", "1", "$X"]]),
        ("run ${Y:-y} ${Z:=z} $Z", [["run", "y", "z", "z"]]),
        ("A='x y'\nrun $A \"$A\"", [["run", "x", "y", "x y"]]),
        ("n=$((1024 * 2))\nm=$((n + 512))\nrun $m $((m / 3)) $(( (n-8)*2 ))", [["run", "2560", "853", "4080"]]),
        ("A=(a 'b c' # why\n d)\nA+=(e)\nrun \"${A[@]}\" ${A[1]}", [["run", "a", "b c", "d", "e", "b", "c"]]),
        ("run x 2>&1 | tee log.txt", [["run", "x"], ["tee", "log.txt"]]),
        ("run a > out.txt && done_ b", [["run", "a"], ["done_", "b"]]),
        ("run a=1\\\n  b=2", [["run", "a=1", "b=2"]]),
        ('run "ab\\\ncd"', [["run", "abcd"]]),
        ("run a=${1:-vllm} b=$2 $@", [["run", "a=one", "b=two", "one", "two"]]),
        ('shift 1\nrun $1 "$@"', [["run", "two", "two"]]),
        ("export A=1 B=2\nC=3 run $A$B", [["run", "12"]]),
        ("run \"['$H/a', '$H/b']\"", [["run", "['/h/a', '/h/b']"]]),
        ("run $'a\\tb' \"\" ''", [["run", "a\tb", "", ""]]),
        ("for i in 4 5; do\nrun $i\ndone", [["run", "4"]]),
        ("run ${X:+yes} ${H:+yes}", [["run", "yes"]]),
        ('run `echo hi` $(echo "$H")', [["run", "hi", "/h"]]),
    ],
)
def test_a_script_is_read(script: str, expected: list[list[str]]) -> None:
    assert words(script, "one", "two", H="/h") == expected


def test_a_here_document_is_a_variable() -> None:
    script = """read -r -d '' training_commands <<EOF
openrlhf.cli.train_dpo \\
   --pretrain $MODEL \\
   --input_template ""
EOF
    # --use_wandb [TOKEN] or True
if [[ ${1} != "slurm" ]]; then
    deepspeed --module $training_commands
fi
"""
    assert words(script, MODEL="m")[-1] == [
        "deepspeed", "--module", "openrlhf.cli.train_dpo", "--pretrain", "m", "--input_template", '""',
    ]  # fmt: skip


def test_what_nobody_set_stays_unknown() -> None:
    script = read_script("run a=$NOBODY b=$(nproc) c=$(date +%s)\n")
    assert [word.unknown for word in script.commands[0]] == [[], ["NOBODY"], ["$(nproc)"], []]
    computed = read_script("V=$(cat a b)\nrun $V $((9**9**9))")  # the caller can set V
    assert [word.unknown for word in computed.commands[0]][1:] == [["V"], ["$((9**9**9))"]]
    assert computed.computed == {"V": "$(cat a b)"}
    assert script.commands[0][3].text == "c=now"


def test_a_variable_set_under_a_condition_does_not_replace_one() -> None:
    script = read_script('E=vllm\nif [ "$1" = sglang ]; then\n  E=sglang\n  M=1\nfi\nrun $E $M')
    assert [word.text for word in script.commands[-1]] == ["run", "vllm", "1"]
    first, second = script.remarks
    assert re.match(r"line 3: E .*condition; 'vllm' .*E=VALUE", first)
    assert re.match(r"line 4: M .*condition; '1' .*M=VALUE", second)
    assert last("if [ -f x ]; then\n  E=a\nfi\nrun $E", E="b") == ["run", "b"]


def last(script: str, *arguments: str, **given: str) -> list[str]:
    """The words of a script's last command."""
    return [word.text for word in read_script(script, given, arguments).commands[-1]]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("N=8\nif [ $N -gt 4 ]; then M=8; else M=2; fi\nrun $M", "8"),
        ("N=2\nif [[ $N -gt 4 ]]; then\n M=8\nelse\n M=2\nfi\nrun $M", "2"),
        ("N=8\nif [ $N -ge 16 ]; then M=16\nelif [[ $N == 8 ]]; then M=8\nelse M=1\nfi\nrun $M", "8"),
        ('A=x\nif [ -z "$A" ]; then A=y; fi\nrun $A', "x"),
        ("A=x\nif [[ $A != y* ]]; then B=1; fi\nrun $B", "1"),
        ("A=x\nif [ ! $A = x ]; then B=1; else B=2; fi\nrun $B", "2"),
        ("A=1\nfalse && A=2\nrun $A", "1"),
        ("case $1 in\n  --lr) LR=$2; shift 2;;\n  a|b) shift;;\nesac\nrun ok", "ok"),
        ("case $1 in --lr) X=1;; esac; run ok", "ok"),
        ("f() { run $1; }\nf a", "a"),
        ('function f {\n  local x="$1"; shift\n  run $x-$1\n}\nf a b', "a-b"),
        ("f()\n{\n  run $V\n}\nV=late\nf", "late"),
        ("D=/d/\nrun ${D%/}/x", "/d/x"),
        ("P=/m/Qwen2.5-7B\nrun ${P##*/}", "Qwen2.5-7B"),
        ("P=/m/q.safetensors\nrun ${P%%.*}", "/m/q"),
        ("P=a.b.c\nrun ${P//./_}", "a_b_c"),
        ("P=a.b.c\nrun ${P/./_}", "a_b.c"),
        ("P=abcdef\nrun ${P:1:3}", "bcd"),
        ("P=Qwen\nrun ${P,,}", "qwen"),
        ("P=abc\nrun ${#P}", "3"),
        ("P=(a b c)\nrun ${#P[@]}", "3"),
        ("run $((1 << 7))", "128"),
        ("P=(a b c)\nI=1\nrun ${P[$I]}", "b"),
        ("P=/m/x.sh\nrun $(basename $P .sh)", "x"),
        ('P=/m/x.sh\nrun $(dirname "$P")', "/m"),
        ("grep a <<< 'a here string'\nrun ok", "ok"),
        ('C="run ok"\n$C', "ok"),
    ],
)
def test_what_a_shell_works_out(script: str, expected: str) -> None:
    assert last(script) == ["run", expected]


@pytest.mark.parametrize(
    "script", ["run ${P[$I]}", "run ${P[@]}", 'run "${P[@]}"', "P=(a b)\nrun ${P[$I]}", "run ${P%/}"]
)
def test_what_is_cut_from_something_unknown_is_unknown(script: str) -> None:
    assert read_script(script).commands[-1][1].unknown


def test_arguments_from_the_second_on() -> None:
    assert last('run "${@:2}"', "a", "b c", "d") == ["run", "b c", "d"]
    assert last("run ${@:2:1}", "a", "b", "d") == ["run", "b"]


def test_a_condition_that_is_not_known_is_told() -> None:
    script = read_script("[ -f x ] && A=1\nrun ${A:-2}")
    (remark,) = script.remarks
    assert re.match(r"line 1: A .*condition; '1' .*A=VALUE", remark)


def test_a_function_that_nothing_calls_is_read_and_told() -> None:
    script = read_script("f() {\n  run a\n}\n")
    assert [word.text for word in script.commands[-1]] == ["run", "a"]
    (remark,) = script.remarks
    assert "function f" in remark


def test_a_function_that_calls_itself_ends() -> None:
    assert last("f() { run a; f; }\nf") == ["run", "a"]


def test_nothing_of_a_script_is_run(tmp_path: Any) -> None:
    mark = tmp_path / "ran"
    words(f"touch {mark}\nX=$(touch {mark})\nrun `touch {mark}` $(( $(touch {mark}; echo 1) + 1 ))")
    assert not mark.exists()


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        ("python3 -m verl.trainer.main_ppo a.b=1", ("verl", "main_ppo", ["a.b=1"], None, None)),
        (
            "torchrun --nproc_per_node=8 --nnodes 2 -m verl.trainer.fsdp_sft_trainer a.b=1",
            ("verl", "fsdp_sft_trainer", ["a.b=1"], 8, 2),
        ),
        (
            "deepspeed --num_gpus 4 --module openrlhf.cli.train_sft --bf16",
            ("openrlhf", "train_sft", ["--bf16"], 4, None),
        ),
        (
            'ray job submit --address=http://127.0.0.1:8265 --runtime-env-json=\'{"working_dir": "/o"}\' -- '
            "python3 -m openrlhf.cli.train_ppo_ray --bf16",
            ("openrlhf", "train_ppo_ray", ["--bf16"], None, None),
        ),
        ("srun --nodes 2 bash -c 'python -m verl.trainer.main_ppo a.b=1'", ("verl", "main_ppo", ["a.b=1"], None, None)),
        ("python verl/trainer/main_ppo.py a.b=1", ("verl", "main_ppo", ["a.b=1"], None, None)),
        ("python -m lockstep.compat.verl sft a.b=1", ("verl", "sft", ["a.b=1"], None, None)),
        ("python -m lockstep.compat.verl.trainer.main_ppo a.b=1", ("verl", "main_ppo", ["a.b=1"], None, None)),
        ("deepspeed --module lockstep.compat.openrlhf.cli.train_dpo -x", ("openrlhf", "train_dpo", ["-x"], None, None)),
        ("python examples/data_preprocess/gsm8k.py --local_dir d", None),
    ],
)
def test_training_commands_and_their_launchers(command: str, expected: Any) -> None:
    (read,) = read_script(command).commands
    found = training_of(read)
    if expected is None:
        assert found is None
        return
    assert found is not None
    assert (found.peer, found.program, [w.text for w in found.words], found.devices, found.nodes) == expected


@pytest.mark.parametrize(
    ("first", "cut"),
    [
        ("--bf16", True),
        ("trainer.nnodes=1", True),
        ("+data.x=1", True),
        ("export", False),
        ("a=1", False),
        ("./run.sh", False),
    ],
)
def test_a_line_that_lost_its_command(first: str, cut: bool) -> None:
    assert looks_cut_off([W(first, 1)]) is cut
