#!/usr/bin/env bash
# The tests of operators on several versions of Python and torch: `tools/ci/versions.sh [PYTHON:TORCH...]`, where
# "3.12:" is Python 3.12 with the newest torch. Each gets an environment, which is removed at the end unless VERSIONS
# names a folder to keep them in. Interpreters are found on PATH, and in the folders that INTERPRETERS names, with ":"
# between them. TESTS says what to run of the tests, JOBS in how many processes.
set -uo pipefail
here=$(cd "$(dirname "$0")/../.." && pwd)
[ $# -gt 0 ] || set -- 3.11:2.11 3.11:2.13 3.12: 3.13:
read -ra tests <<<"${TESTS:-tests/unit tests/ops tests/nn tests/shared tests/verify tests/views}"
PATH=${INTERPRETERS:+$INTERPRETERS:}$PATH

missing=()
for case in "$@"; do
    "python${case%%:*}" -c "" 2>/dev/null || missing+=("python${case%%:*}")
done
if [ ${#missing[@]} -gt 0 ]; then
    names=$(printf "%s\n" "${missing[@]}" | sort -u | sed ':a;N;$!ba;s/\n/ and /g')
    verb=$([[ $names == *" and "* ]] && echo are || echo is)
    echo "versions.sh: $names $verb missing: put the interpreters on PATH, or their folders into INTERPRETERS." >&2
    exit 1
fi

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
folder=${VERSIONS:-$scratch/environments}
export DISTTENSOR_UNTESTED=1 PYTHONDONTWRITEBYTECODE=1

# The first program of the README, beside no checkout: it has to print what stands below it.
cat >"$scratch/first.py" <<'PROGRAM'
import re, sys, textwrap
program, shown = re.search(r"```python\n(.*?)```\s*prints\n\n((?:    [^\n]*\n)+)", open(sys.argv[1]).read(), re.S).groups()
open("program.py", "w").write(program)
open("shown.txt", "w").write(textwrap.dedent(shown))
PROGRAM

first() {
    "$1" "$scratch/first.py" "$here/README.md" && "$1" program.py >printed.txt && diff shown.txt printed.txt
}

# Runs a part, keeps what it prints, and says how it ended.
part() {
    local name=$1
    shift
    if "$@" >"$log" 2>&1; then
        echo "    $name: $(tail -n 1 "$log")"
    else
        echo "    $name: FAILED"
        sed 's/^/        /' "$log" | tail -n 60
        failed=1
    fi
}

failed=0
for case in "$@"; do
    python=${case%%:*} torch=${case#*:}
    environment=$folder/$python-${torch:-newest}
    log=$scratch/log
    echo "Python $python, torch ${torch:-newest}"
    rm -rf "$scratch/source" "$scratch/elsewhere"
    mkdir -p "$scratch/source" "$scratch/elsewhere"
    git -C "$here" ls-files -z | (cd "$here" && xargs -0 cp --no-dereference --parents -t "$scratch/source")
    if [ ! -x "$environment/bin/python" ]; then
        "python$python" -m venv "$environment" || exit 1
    fi
    "$environment/bin/pip" install -q "torch${torch:+==$torch.*}" "$scratch/source" >"$log" 2>&1 || {
        cat "$log"
        failed=1
        continue
    }
    echo "    installed: $("$environment/bin/python" -c 'import platform, torch; print(platform.python_version(), torch.__version__)')"
    cd "$scratch/elsewhere"
    part "first program" first "$environment/bin/python"
    cd "$here"
    "$environment/bin/pip" install -q "$scratch/source[dev]" >"$log" 2>&1 || {
        cat "$log"
        failed=1
        continue
    }
    for tests_of in "${tests[@]}"; do
        part "$tests_of" env PYTHONPATH="$here" "$environment/bin/python" -m pytest -q -p no:cacheprovider \
            -n "${JOBS:-2}" --dist loadfile "$tests_of"
    done
done
exit $failed
