#!/usr/bin/env bash
# The tests of two hosts, which are namespaces of this machine: `tools/ci/netns.sh [pytest]`. They need root and iproute2,
# which is installed where it can be; without them nothing is tested, and that is said.
set -euo pipefail
cd "$(dirname "$0")/../.."

skipped() {
    echo "================================================================================" >&2
    echo "NOT TESTED: two hosts in namespaces ($1)" >&2
    echo "================================================================================" >&2
    exit 0
}

[ "$(id -u)" = 0 ] || skipped "this user is not root"
if ! command -v ip >/dev/null; then
    tools/ci/packages.sh iproute2 >/dev/null 2>&1 || skipped "iproute2 is missing and cannot be installed"
fi
probe=$(unshare --net --uts --mount --pid --fork --mount-proc ip link add name left type veth 2>&1) ||
    skipped "no namespaces with a link between them: $probe"
exec ${1:-pytest} -q -m "netns ${CASES-and not slow}" $(grep -rl --include="test_*.py" "mark.netns" tests)
