#!/usr/bin/env bash
# The tests on simulated CUDA devices: `tools/ci/simcuda.sh FOLDER [MARKERS]`. The environment in FOLDER has torch's CUDA
# build, which takes 2.5 GB; it is made once and kept, and with SIMCUDA_MAKE=no it has to be there already. Where it can't
# be had nothing is tested, and the last line says so and why. The last line goes to the file SIMCUDA_SAID as well: who
# runs other things besides has it last, too.
set -euo pipefail
cd "$(dirname "$0")/../.."
venv=$1
markers=${2:-simcuda}

say() {
    echo "simcuda: $1"
    [ -z "${SIMCUDA_SAID:-}" ] || echo "simcuda: $1" >> "$SIMCUDA_SAID"
}

not_run() {
    say "not run ($1)"
    exit 0
}

command -v g++ > /dev/null || not_run "there is no g++"
if [ ! -e "$venv/.made" ]; then
    [ "${SIMCUDA_MAKE:-}" != no ] || not_run "there is no environment in $venv: make simcuda-smoke makes it, of 2.5 GB"
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
# Bytecode is kept, whatever the environment says: a process that compiles what torch imports anew takes three times the
# CPU to start.
export PYTHONDONTWRITEBYTECODE=
[ -x "$venv/bin/python" ] || not_run "the Python that $venv was made with is gone: remove it, it is made anew"
"$venv/bin/python" tools/simcuda/build.py --python "$venv/bin/python" > /dev/null  # once, and not in each of the two
SECONDS=0 code=0
"$venv/bin/python" -m pytest -q -n 2 -m "$markers" tests/simcuda || code=$?
say "$([ "$code" = 0 ] && echo passed || echo failed) in $SECONDS s"
exit "$code"
