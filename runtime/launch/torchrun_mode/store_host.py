"""Holds torch's TCPStore for `dtrun --process-group`, on the socket that it has inherited: a script, run by its path.

    python -P store_host.py LISTENING_FD

It ends with its standard input. As dtrun listens already, ranks that connect while torch is imported are served
afterwards.
"""

from __future__ import annotations

import signal
import socket
import sys


def main(fd: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    sock = socket.socket(fileno=fd)
    host, port = sock.getsockname()[:2]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=sock.detach())
    sys.stdin.read()
    del store


if __name__ == "__main__":
    main(int(sys.argv[1]))
