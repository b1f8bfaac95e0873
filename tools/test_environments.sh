#!/bin/sh
# Tests of the adapters with the packages that they adapt. Arguments go to pytest:
# sh tools/test_environments.sh tests/environments/test_package_games.py -k gem
#
# The packages have an environment of their own, which shares the packages of VENV (made by `make test-environments`).
# OpenEnv's server and verifiers have others: their dependencies do not fit into constraints.txt.
set -eu
venv=${ENVIRONMENTS_VENV:-.venv-environments}
server=${OPENENV_VENV:-.venv-openenv}
verifiers=${VERIFIERS_VENV:-.venv-verifiers}
shared=${VENV:-.venv}
openenv=0.10.0
# Without gradio, which only OpenEnv's web page needs.
needed="fastapi uvicorn websockets requests httpx pyyaml fastmcp>=3,<4"

[ -e "$shared/.test" ] || { echo "there is no environment in $shared: run \`make test-environments\`"; exit 1; }
packages() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }
wanted=$({ cat pyproject.toml constraints.txt constraints-common.txt tools/test_environments.sh; packages "$shared"; } | cksum)
if [ "$(cat "$venv/.installed" 2>/dev/null)" != "$wanted" ]; then
    "$shared/bin/python" -m venv --clear "$venv"
    printf 'import site; site.addsitedir(r"%s")\n' "$(packages "$shared")" >"$(packages "$venv")/shared.pth"
    install() { "$venv/bin/pip" install --quiet --disable-pip-version-check --no-compile -c constraints.txt "$@"; }
    install gymnasium textarena reasoning-gym websockets mcp==2.3.0 trl
    # openai-agents asks for an older websockets, which only its voice agents use.
    install griffelib
    install --no-deps openai-agents==0.24.0
    if "$venv/bin/python" -c 'import sys; sys.exit(sys.version_info >= (3, 12))'; then install gem-llm; fi
    printf '%s' "$wanted" >"$venv/.installed"
fi
if [ "$(cat "$server/.installed" 2>/dev/null)" != "$wanted" ]; then
    "$shared/bin/python" -m venv --clear "$server"
    "$server/bin/pip" install --quiet --disable-pip-version-check --no-compile --no-deps "openenv==$openenv"
    # shellcheck disable=SC2086
    "$server/bin/pip" install --quiet --disable-pip-version-check --no-compile $needed
    printf '%s' "$wanted" >"$server/.installed"
fi
if [ "$(cat "$verifiers/.installed" 2>/dev/null)" != "$wanted" ]; then
    "$shared/bin/python" -m venv --clear "$verifiers"
    "$verifiers/bin/pip" install --quiet --disable-pip-version-check --no-compile verifiers==0.4.0
    printf '%s' "$wanted" >"$verifiers/.installed"
fi

[ $# -gt 0 ] || set -- tests/environments tests/unit/test_gymnasium_games.py tests/unit/test_trl_environments.py \
    tests/unit/test_agent_containers.py
export LOCKSTEP_OPENENV_PYTHON="$PWD/$server/bin/python" LOCKSTEP_VERIFIERS_PYTHON="$PWD/$verifiers/bin/python"
OMP_NUM_THREADS=1 exec "$venv/bin/python" -m pytest -p no:cacheprovider "$@"
