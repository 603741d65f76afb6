#!/usr/bin/env bash
# The tests with ssh to two hosts, which are namespaces of this machine: `tools/ci/ssh.sh [pytest]`. They need root,
# OpenSSH and iproute2, which are installed where they can be; without them nothing is tested, and that is said.
set -euo pipefail
cd "$(dirname "$0")/../.."
export PATH="$PATH:/usr/sbin:/sbin"

skipped() {
    echo "================================================================================" >&2
    echo "NOT TESTED: nodes by ssh ($1)" >&2
    echo "================================================================================" >&2
    exit 0
}

[ "$(id -u)" = 0 ] || skipped "this user is not root"
for tool in sshd ssh ip; do
    command -v $tool >/dev/null && continue
    tools/ci/packages.sh openssh-server openssh-client iproute2 >/dev/null 2>&1 ||
        skipped "OpenSSH is missing and cannot be installed"
    break
done
probe=$(unshare --net --uts --mount --pid --fork --mount-proc ip link add name left type veth 2>&1) ||
    skipped "no namespaces with a link between them: $probe"
exec ${1:-pytest} -q -m "ssh ${CASES-and not slow}" $(grep -rl --include="test_*.py" "mark.ssh" tests)
