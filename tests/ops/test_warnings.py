"""What local torch warns of is a warning here too: at its line where the script can foresee it, else at the next wait,
naming the line."""

from __future__ import annotations

import inspect
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

import disttensor as dt

NODE = "node:1"


@pytest.fixture
def heard() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


def said(heard: list[warnings.WarningMessage]) -> list[tuple[type, str, int]]:
    found = [(each.category, str(each.message), each.lineno) for each in heard]
    heard.clear()
    return found


def one(device: str) -> torch.Tensor:
    return torch.ones(1, device=device)


def deviation(device: str) -> object:
    return torch.std(one(device))


def method(device: str) -> object:
    return one(device).var()


def several(device: str) -> object:
    return torch.std_mean(one(device))


def nothing(device: str) -> object:
    return torch.ones(0, device=device).std()


def written(device: str) -> object:
    out = torch.ones(3, device=device)
    return torch.ones(2, device=device).mul_(2), torch.std(one(device), out=torch.empty((), device=device)), out


def in_place(device: str) -> object:
    into = torch.ones(4, 3, device=device)
    return into.index_reduce_(0, torch.zeros(1, dtype=torch.int64, device=device), into[:1].clone(), "mean")


def deprecated(device: str) -> object:
    return torch.lu_solve(
        torch.ones(2, 1, device=device), torch.eye(2, device=device), torch.tensor([1, 2], dtype=torch.int32).to(device)
    )


PROGRAMS = [deviation, method, several, nothing, written, in_place, deprecated]


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_same_warnings_at_the_same_lines(
    heard: list[warnings.WarningMessage], capfd: pytest.CaptureFixture[str], program: Callable[[str], object]
) -> None:
    torch.set_warn_always(True)
    try:
        program("cpu")
        expected = said(heard)
        assert expected
        for _ in range(2):
            program(NODE)
            assert said(heard) == expected
        dt.synchronize()
        assert not heard
    finally:
        torch.set_warn_always(False)
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.usefixtures("processes")
def test_an_error_of_a_filter_is_raised_at_the_line() -> None:
    x = one(NODE)
    for _ in range(2):
        with pytest.raises(UserWarning, match="degrees of freedom"):
            torch.std(x)
    dt.synchronize()


@pytest.mark.usefixtures("processes")
def test_what_is_warned_of_once_in_a_process_is_warned_of_once(heard: list[warnings.WarningMessage]) -> None:
    z = torch.ones(2, 7, dtype=torch.complex64, device=NODE)
    into = torch.ones(5, 7, device=NODE)
    for _ in range(3):
        into.index_reduce_(0, torch.zeros(1, dtype=torch.int64, device=NODE), into[:1].clone(), "mean")
        z.abs()
    dt.synchronize()
    assert len(said(heard)) <= 1


@pytest.mark.usefixtures("processes")
def test_smaller_sizes_in_a_trial_warn_of_nothing(heard: list[warnings.WarningMessage]) -> None:
    torch.ones(3000, device=NODE).var(correction=5)
    dt.synchronize()
    assert not said(heard)


@pytest.mark.usefixtures("processes")
def test_what_only_the_node_finds_is_told_with_its_line(
    heard: list[warnings.WarningMessage], capfd: pytest.CaptureFixture[str]
) -> None:
    large = torch.ones(70_000, 1, device=NODE)
    for _ in range(2):
        large.std(1)
    large.std(1).sum().item()
    dt.synchronize()
    lines, start = inspect.getsourcelines(test_what_only_the_node_finds_is_told_with_its_line)
    at = [start + i for i, each in enumerate(lines) if "large.std(1)" in each][:2]
    found = [(each.filename, each.category, each.lineno) for each in heard]
    assert found == [(__file__, UserWarning, line) for line in (at[0], at[0], at[1])]
    assert all("degrees of freedom is <= 0" in str(each.message) for each in heard)
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.usefixtures("processes")
def test_modes_above_torch_see_no_trial(heard: list[warnings.WarningMessage]) -> None:
    x = torch.ones(1, 2, device=NODE)
    seen = []

    class Mode(TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.__name__)
            return func(*args, **kwargs or {})

    with torch._C.DisableTorchFunctionSubclass():
        assert torch.std(x, 0).shape == (2,)
    with Mode(), Mode():
        assert torch.std(torch.ones(1, 3, device=NODE), 0).shape == (3,)
    dt.synchronize()
    assert "std" in seen
    assert "abs" not in seen
    assert all("degrees of freedom is <= 0" in str(each.message) for each in heard)
    assert len(heard) >= 2


def warns(kind: type[Warning] | None, text: str) -> int:
    import warnings

    class Own(UserWarning):
        pass

    warnings.warn(text, kind or Own, stacklevel=1)
    return 7


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("beside", [False, True], ids=["in turn", "beside"])
@pytest.mark.parametrize("kind", [RuntimeWarning, None], ids=["python's", "its own"])
def test_a_functions_warning_is_one_of_the_line_that_issued_it(
    heard: list[warnings.WarningMessage], capfd: pytest.CaptureFixture[str], beside: bool, kind: type[Warning] | None
) -> None:
    text = f"as {kind} says{' beside' * beside}"
    assert dt.submit(warns, kind, text, node=1, beside=beside).result() == 7
    line = sys._getframe().f_lineno - 1
    dt.synchronize()
    (each,) = heard
    assert (each.category, each.filename, each.lineno) == (kind or UserWarning, __file__, line)
    assert str(each.message).startswith(text if kind else f"{__name__}.warns.<locals>.Own: {text}")
    assert str(each.message).endswith(", on a node)")
    assert text not in capfd.readouterr().err


def test_a_strict_script_fails_at_the_next_wait(script: Callable[..., subprocess.CompletedProcess[str]]) -> None:
    done = script("""
import warnings
import disttensor as dt
dt.init_master_worker(nodes=1)
def warn():
    import warnings
    warnings.warn("beware")
warnings.simplefilter("error")
dt.submit(warn, node=0)
dt.synchronize()
""")
    assert done.returncode == 1
    assert "UserWarning: beware (" in done.stderr
    assert "[node 0]" not in done.stderr
