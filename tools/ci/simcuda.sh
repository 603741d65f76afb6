#!/usr/bin/env bash
# The tests on simulated CUDA devices: `tools/ci/simcuda.sh FOLDER [MARKERS]`. The environment in FOLDER has torch's CUDA
# build, which takes 2.5 GB; it is made once and kept. Where it can't be had nothing is tested, and the last line says so,
# in the file SIMCUDA_SAID as well: who runs other things besides has it last, too.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=$1
markers=${2:-simcuda}

not_run() {
    echo "$1" >&2
    echo "simcuda: not run"
    [ -z "${SIMCUDA_SAID:-}" ] || echo "simcuda: not run" >> "$SIMCUDA_SAID"
    exit 0
}

if [ ! -e "$venv/.made" ]; then
    command -v g++ > /dev/null || not_run "there is no g++"
    for python in python3.13 python3.12 ""; do
        # a shim may be on the path of what is not installed
        [ -z "$python" ] || ! "$python" -c 'import venv, ensurepip' 2> /dev/null || break
    done
    [ -n "$python" ] || not_run "there is neither python3.13 nor python3.12 on the path"
    "$python" -m venv "$venv" || not_run "$python can't make an environment in $venv"
    "$venv/bin/pip" install -q torch==2.13.0 'pyzmq>=26' 'msgspec>=0.19' 'cloudpickle>=3' 'numpy>=1.26' 'pytest>=8' \
        'pytest-timeout>=2.3' 'pytest-repeat>=0.9' 'pytest-xdist>=3.6' 'hypothesis>=6.100' 'expecttest>=0.3' 'psutil>=5.9' \
        || not_run "the packages can't be had"
    touch "$venv/.made"
fi
"$venv/bin/python" tools/simcuda/build.py --python "$venv/bin/python" > /dev/null  # once, and not in each of the two
exec "$venv/bin/python" -m pytest -q -n 2 -m "$markers" tests/simcuda
