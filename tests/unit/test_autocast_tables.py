"""The tables of autocast: which operators are cast, and to what."""

from __future__ import annotations

import torch

from disttensor.torch_backend import autocast


def test_every_operator_of_the_tables_is_one_of_torchs() -> None:
    for kind, key in autocast._KEYS.items():
        registered = {n.removeprefix("aten::") for n in torch._C._dispatch_get_registrations_for_dispatch_key(key)}
        told = f"{autocast._LOWER[kind]} {autocast._PROMOTE[kind]} {autocast._BANNED[kind]}".split()
        assert set(told) <= registered
        assert len(told) == len(set(told))
