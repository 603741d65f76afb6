"""Process groups of scripts on several hosts: which networks they may use."""

from __future__ import annotations

import pytest

from disttensor.runtime.launch.torchrun_mode.everywhere import _check_network


def test_hosts_need_a_network_of_ones_own() -> None:
    _check_network(["127.0.0.1", "::1"], False)
    _check_network(["10.0.0.1"], True)
    with pytest.raises(ValueError, match="--trusted-network"):
        _check_network(["127.0.0.1", "10.0.0.1"], False)
