#!/bin/sh
# The tests of the Ascend paths: the real torch_npu wheel on an emulated CANN (tools/ascend_emulator), on any CPU.
# Arguments go to pytest: sh tools/test_ascend.sh tests/ascend/test_emulator_api.py -k memory
# Without any, all but the slow ones run; `sh tools/test_ascend.sh tests/ascend -m slow` runs those. `prepare` installs
# and builds, and runs no test.
#
# It has an environment of its own: where torch_npu is installed and CANN is not, a plain `import torch` fails. All but
# torch_npu is found in the other one (VENV, made by `make test-ascend`).
set -eu
venv=${ASCEND_VENV:-.venv-ascend}
shared=${VENV:-.venv}
workers=${WORKERS:-2}
version=2.13.0
reason() { { grep -m 1 ERROR "$1" || tail -n 1 "$1"; } | sed 's/^ *//'; }
skip() { printf 'SKIPPED test-ascend: %s\n' "$*"; exit 0; }

[ "$(uname -s)" = Linux ] || skip "torch_npu has wheels for Linux only, and this is $(uname -s)"
case "$(uname -m)" in x86_64 | aarch64) ;; *) skip "torch_npu has no wheel for $(uname -m)" ;; esac
command -v g++ >/dev/null || command -v clang++ >/dev/null || skip "no C++ compiler found (g++ or clang++)"
{ command -v nm && command -v readelf; } >/dev/null || skip "no binutils found (nm and readelf)"

[ -e "$shared/.test" ] || { echo "there is no environment in $shared: run \`make test-ascend\`"; exit 1; }
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
stamp=$venv/.installed
wanted=$({ cat pyproject.toml constraints.txt constraints-common.txt tools/test_ascend.sh; packages "$shared"; } | cksum)
if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
    "$shared/bin/python" -m venv --clear --without-pip "$venv" || skip "no virtual environment could be made in $venv"
    printf 'import site; site.addsitedir(r"%s")\n' "$(packages "$shared")" >"$(packages "$venv")/shared.pth"
    log=$venv/install.log
    if ! "$shared/bin/pip" --python "$venv/bin/python" install --quiet --disable-pip-version-check --no-compile -c constraints.txt \
        "torch==$version" "torch_npu==$version" >"$log" 2>&1; then
        skip "torch_npu $version could not be installed: $(reason "$log") (all of it in $log)"
    fi
    printf '%s' "$wanted" >"$stamp"
fi

# From here on nothing is skipped: what does not build or does not pass is a failure of the project.
"$venv/bin/python" tools/ascend_emulator build
[ "${1:-}" != prepare ] || exit 0
[ $# -gt 0 ] || set -- tests/ascend -m "not slow"
OMP_NUM_THREADS=1 exec "$venv/bin/python" tools/ascend_emulator run -m pytest -p no:cacheprovider \
    -n "$workers" --dist loadgroup "$@"
