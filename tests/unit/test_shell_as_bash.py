"""The shell interpreter of `lockstep migrate` against bash: both expand the same scripts to the same words."""

from __future__ import annotations

import itertools
import random
import subprocess

import pytest

from lockstep.compat.shell import read_script

ARGUMENTS = ["vllm", "two words", "8"]
SETUP = """A=alpha
E=
N=7
NEG=-7
P=/models/Qwen2.5-7B-Instruct.v1.safetensors
S='two words'
L=(one "two words" three)
"""
TEXT_OPERATIONS = [
    *(
        "%.*",
        "%%.*",
        "#*/",
        "##*/",
        "%/*",
        "%%/*",
        "/./_",
        "//./_",
        "//-/",
        "/#\\/models/X",
        "/%tensors/Y",
        "//\\//_",
        '%".v1".*',
        "//[0-9]/#",
        "/Qwen*-",
    ),
    *(":0:3", ":2", ": -4", ":1:-2", "^", "^^", ",", ",,", ":-d", "-d", ":+set", "+set"),
]
ARITHMETIC = [
    *("N * 2", "$N + 1", "${N} - 10", "N / 2", "NEG / 2", "NEG % 4", "N % -4", "(N + 1) * (N - 1)", "-N", "N ** 2"),
    *("${N:-3} * 2", "${UNSET:-3} * 2", "$3 * 2", "${3} + N", "1 << N", "1024 >> 2", "$((N + 1)) * 2", "${#A} + 1"),
    *("N/2*2", "2*N/3", "- 7 / 2", "${#L[@]} * 8"),
]


def bash_words(script: str) -> list[list[str]]:
    """The words of every `run` command, expanded by bash."""
    function = "run() { printf '%s\\037' \"$@\"; printf '\\036'; }\n"
    result = subprocess.run(
        ["bash", "-c", function + script, "bash", *ARGUMENTS], capture_output=True, text=True, check=True
    )
    assert not result.stderr, result.stderr
    return [command.split("\037")[:-1] for command in result.stdout.split("\036")[:-1]]


def our_words(script: str) -> list[list[str]]:
    commands = read_script(script, {}, ARGUMENTS).commands
    return [[word.text for word in command[1:]] for command in commands if command[0].text == "run"]


def assert_same(lines: list[str]) -> None:
    script = SETUP + "\n".join(lines)
    expected, expanded = bash_words(script), our_words(script)
    differences = [
        (line, words, ours)
        for line, words, ours in itertools.zip_longest([x for x in lines if x.startswith("run")], expected, expanded)
        if words != ours
    ]
    assert not differences


def test_operations_on_every_variable() -> None:
    names = ("A", "E", "P", "S", "UNSET", "1", "2")
    unset = {"UNSET": ("-", ":-", "+", ":+")}  # other values of an unset variable are reported as unknown
    operations = [(name, op) for name in names for op in TEXT_OPERATIONS if op.startswith(unset.get(name, ""))]
    lines = [f"run x${{{name}{op}}}" for name, op in operations]
    assert_same(lines + [f'run "x${{{name}{op}}}"' for name, op in operations])


def test_arithmetic() -> None:
    assert_same([f"run $(({expression}))" for expression in ARITHMETIC])


@pytest.mark.parametrize(
    "line",
    [
        "run $S \"$S\" '$S' \\$S a$S",
        'run "$@" "${@:2}" ${@:1:1} $# $1-$3',
        'run "${L[@]}" ${L[1]} "${L[2]}" ${#L[@]}',
        'run \'\' "" $E "$E" x$E',
        "run a\"b c\"d'e f'g",
        "run \"['$P', '$A']\" '[\"console\",\"wandb\"]'",
        'run "a \\"b\\" \\$A \\\\ c"',
        "run $'tab\\there'",
        "run a=$A b=${A}_$N c=$A/$N.x",
        "run one \\\n  two \\\n  three",
        "X=$A-$N; run $X\nX+=-more\nrun $X",
        "for v in a b; do Y=$v; break; done\nrun $Y",
        "if [ $N -gt 5 ]; then run big; else run small; fi",
        "if [[ $P == *Qwen* ]]; then run qwen; elif [[ $A == alpha ]]; then run alpha; fi",
        'if [ -z "$E" ] ; then run empty; fi; if [ -n "$E" ]; then run full; fi',
        'f() { local x=$1; shift; run "$x" "$@"; }\nf a "b c" d',
        "run ${UNSET:=kept} $UNSET",
        "run $(echo $A) `echo $N` $(basename $P .safetensors) $(dirname $P)",
    ],
)
def test_constructs_of_scripts(line: str) -> None:
    script = SETUP + line
    expected = bash_words(script)
    assert expected
    assert our_words(script) == expected


@pytest.mark.parametrize("seed", range(3))
def test_random_words(seed: int) -> None:
    """Words of random parts: quotes, variables, operations and arithmetic next to each other."""
    draw = random.Random(seed)
    parts = [
        "a",
        "-",
        "=",
        "/",
        ".",
        "${A}",
        "${N}",
        "${S}",
        '"$S"',
        "'$S'",
        '"${L[@]}"',
        "${L[0]}",
        "\\ ",
        '""',
        "${2}",
        "${E}",
    ]
    parts += [f"${{P{op}}}" for op in TEXT_OPERATIONS] + [f"$(({expression}))" for expression in ARITHMETIC]
    words = ["".join(draw.choices(parts, k=draw.randint(1, 4))) for _ in range(300)]
    assert_same([f"run {' '.join(words[i : i + 3])}" for i in range(0, len(words), 3)])
