#!/usr/bin/env bash
# The tests of two hosts, which are namespaces of this machine, and of a limit of memory, which is a control group's:
# `tools/ci/netns.sh [pytest]`. They need root, and iproute2, which is installed where it can be; without them nothing is
# tested, and that is said.
set -euo pipefail
cd "$(dirname "$0")/../.."

untested() {
    echo "================================================================================" >&2
    echo "NOT TESTED: $1" >&2
    echo "================================================================================" >&2
}

skipped() {
    untested "two hosts in namespaces, a limit of memory ($1)"
    exit 0
}

[ "$(id -u)" = 0 ] || skipped "this user is not root"
if ! command -v ip >/dev/null; then
    tools/ci/packages.sh iproute2 >/dev/null 2>&1 || skipped "iproute2 is missing and cannot be installed"
fi
probe=$(unshare --net --uts --mount --pid --fork --mount-proc ip link add name left type veth 2>&1) ||
    skipped "no namespaces with a link between them: $probe"
limits=tests/launch/test_memory_limits.py
groups=/sys/fs/cgroup/memory
[ -e "$groups/memory.limit_in_bytes" ] || groups=/sys/fs/cgroup
if ! probe=$({ [ "$groups" != /sys/fs/cgroup ] || echo +memory > $groups/cgroup.subtree_control; } 2>&1 &&
    mkdir "$groups/disttensor-probe" 2>&1 && rmdir "$groups/disttensor-probe" 2>&1); then
    untested "a limit of memory (no control groups can be made: $probe)"
    set -- "${1:-pytest}" --ignore=$limits
fi
exec "${1:-pytest}" "${@:2}" -q -m "netns ${CASES-and not slow}" $(grep -rl --include="test_*.py" "mark.netns" tests)
