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


@pytest.mark.parametrize(
    "script",
    [
        "M=big\ncase $M in small) X=1;; big) X=2;; *) X=3;; esac\nrun $X",
        'case "$N" in\n  1|2)\n    X=1\n    ;;\n  7*)\n    X=2\n    ;;\nesac\nrun $X',
        "X=1\n[ $N = 7 ] && X=5\nrun $X",
        "X=1\n[[ $N == 1 ]] || X=5\nrun $X",
        "[[ $N == 1 ]] && X=5 || X=7\nrun $X",
        "if [[ $N == 1 || $N == 3 ]]; then X=1; else X=2; fi\nrun $X",
        "if [ $N = 7 ] && [ $N = 3 ]; then X=1; else X=2; fi\nrun $X",
        "if [ $N = 7 -a $N = 3 ]; then X=1; else X=2; fi\nrun $X",
        "if ! [[ $A == al* && $N -gt 3 ]]; then X=1; else X=2; fi\nrun $X",
        "if (( N > 3 && N != 5 )); then X=1; else X=2; fi\nrun $X",
        "((N++)); ((N *= 2)); (( M = N + 1 )); let K=M*2; run $N $M $K",
        "run $((N>5 ? 1 : 2)) $((N == 7)) $((N & 3)) $((0x10)) $((010)) $((!N))",
        'for v in a b c; do K+=("k=$v"); Y="${Y:-}$v"; done\nrun "${K[@]}" $Y',
        "for ((i = 0; i < 3; i++)); do Y=$i; done; run $Y $i",
        "i=0; while [ $i -lt 4 ]; do i=$((i + 2)); done; run $i",
        'while [[ $# -gt 0 ]]; do case $1 in vllm) E=$1; shift;; *) break;; esac; done\nrun $E "$@"',
        "for v in a b c; do if [ $v = b ]; then continue; fi; Y=$v; [ $v = b ] && break; done\nrun $Y",
        'set -- x "y z"\nrun $# "$@"',
        "unset A; run ${A:-gone}",
        "A=beta run $A\nrun $A",
        "f() { local A=inner B; B=2; run $A $B; }\nf\nrun $A ${B-none}",
        "f() { if [ $N = 7 ]; then return; fi; run no; }\nf; run yes",
        "A=1; (A=2; run in $A); run $A",
        "run last\nexit 0\nrun never",
        'L[1]=new\nrun "${L[@]}" ${L[-1]} "${L[@]:1}" ${!L[@]} "${L[@]/#/--}" ${L[N - 5]}',
        'declare -a D=(a b)\nreadonly -a R=(c)\ndeclare -i I=5\nrun "${D[@]}" ${R[0]} $I',
        "declare -A M=([a]=1 [b-c]=2)\nM[d]=3\nK=d\nrun ${M[a]} ${M[b-c]} ${M[$K]}",
        'run "pre ${L[@]} post" "${L[*]}"',
        'IFS=,\nX="${L[*]}"\nIFS=\' \'\nrun "$X"',
        "IFS=, read -ra P <<< 'a,b c,d'\nread F G <<< 'x y z'\nrun \"${P[@]}\" $F \"$G\"",
        "run {a,b}.parquet x{1..3} '{a,b}' \"{a,b}\" ${A}{1,2} {solo} {3..1}",
        'run ${UNSET:-"c d"} "${UNSET:-c d}" ${UNSET:-c d}',
        "X=A; run ${!X}",
        "run a \\\n `# a comment` \\\n b",
        ": ${UNSET:=5}\nrun $UNSET",
        "f() {\n  case $1 in\n    a) run A;;\n    *) run other;;\n  esac\n}\nf b",
        "{ run a; run b; } && run c",
        "if true; then for v in 1; do if [ $v = 1 ]; then run one; fi; done; else run no; fi",
    ],
)
def test_control_flow(script: str) -> None:
    expected = bash_words(SETUP + script)
    assert expected
    assert our_words(SETUP + script) == expected


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


def test_what_a_conversion_cannot_know_is_remarked() -> None:
    script = read_script(
        "X=1\nsource env.sh\nsource venv/bin/activate\nfor v in a b; do run $v $X; done\nexit\nrun late"
    )
    assert [[word.text for word in command] for command in script.commands] == [["run", "a", "1"]]
    assert script.remarks == [
        "line 2: env.sh is not read; set its variables with NAME=VALUE",
        "line 4: only the first pass of the loop is used, with v=a",
        "line 5: `exit` ends the script; later commands are not converted",
    ]


def test_a_check_of_the_arguments_does_not_end_the_script() -> None:
    """The caller learns which arguments are missing."""
    script = read_script('if [ "$#" -lt 1 ]; then echo usage; exit 1; fi\nrun $1')
    assert script.commands[-1][1].unknown == ["1"]
