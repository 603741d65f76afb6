"""What local torch warns of is a warning here too: at its line where the script can foresee it, else at the next wait,
naming the line."""

from __future__ import annotations

import inspect
import os
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils.data import Dataset, IterableDataset, TensorDataset

import disttensor as dt

NODE = "node:1"

#: Returns whether a text, "Warning" if none is given, was not among what the nodes have written to stderr until now.
Quiet = Callable[..., bool]


@pytest.fixture(scope="module")
def quiet(request: pytest.FixtureRequest) -> Iterator[Quiet]:
    """Two nodes that are processes, for the module, whose stderr is read here."""
    ours, theirs = os.pipe()
    kept = os.dup(2)
    os.dup2(theirs, 2)  # whoever writes for the nodes takes it as it is at their start
    os.close(theirs)
    try:
        request.getfixturevalue("processes")
    finally:
        os.dup2(kept, 2)
        os.close(kept)

    def so_far(text: str = "Warning") -> bool:
        dt.run(os.write, 2, b"that is all\n", node=1)
        written = b""
        while b"that is all" not in written:
            written += os.read(ours, 1 << 16)
        return text.encode() not in written

    yield so_far
    os.close(ours)


@pytest.fixture
def heard() -> Iterator[list[warnings.WarningMessage]]:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        yield found


@pytest.fixture
def always() -> Iterator[None]:
    torch.set_warn_always(True)
    yield
    torch.set_warn_always(False)


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


def resized(device: str) -> object:
    x, at = torch.ones(3, 2, device=device), torch.zeros(2, dtype=torch.int64, device=device)
    return torch.index_select(x, 0, at, out=torch.ones(5, device=device))


def in_place(device: str) -> object:
    into = torch.ones(4, 3, device=device)
    return into.index_reduce_(0, torch.zeros(1, dtype=torch.int64, device=device), into[:1].clone(), "mean")


def deprecated(device: str) -> object:
    return torch.lu_solve(
        torch.ones(2, 1, device=device), torch.eye(2, device=device), torch.tensor([1, 2], dtype=torch.int32).to(device)
    )


def copied(device: str) -> object:
    return torch.ones(3, device=device).copy_(torch.ones(3, dtype=torch.complex64, device=device))


def halved(device: str) -> object:
    return one(device).chalf()


PROGRAMS = [deviation, method, several, nothing, written, resized, in_place, deprecated, copied, halved]


@contextmanager
def in_turn() -> Iterator[None]:
    yield


@contextmanager
def on_a_stream() -> Iterator[None]:
    with dt.stream(dt.Stream(NODE)):
        yield


@contextmanager
def beside_one() -> Iterator[None]:
    stream = dt.Stream(NODE)
    yield
    del stream


@pytest.mark.parametrize("way", [in_turn, on_a_stream], ids=lambda way: way.__name__)
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_the_same_warnings_at_the_same_lines(
    quiet: Quiet,
    always: None,
    heard: list[warnings.WarningMessage],
    program: Callable[[str], object],
    way: Callable[[], AbstractContextManager[None]],
) -> None:
    program("cpu")
    expected = said(heard)
    assert expected
    with way():
        for _ in range(2):
            program(NODE)
            assert said(heard) == expected
    dt.synchronize()
    assert not heard
    assert quiet()


@pytest.mark.usefixtures("quiet")
def test_an_error_of_a_filter_is_raised_at_the_line() -> None:
    x = one(NODE)
    for _ in range(2):
        with pytest.raises(UserWarning, match="degrees of freedom"):
            torch.std(x)
    dt.synchronize()


@pytest.mark.usefixtures("quiet")
def test_what_is_warned_of_once_in_a_process_is_warned_of_once(heard: list[warnings.WarningMessage]) -> None:
    z = torch.ones(2, 7, dtype=torch.complex64, device=NODE)
    into = torch.ones(5, 7, device=NODE)
    for _ in range(3):
        into.index_reduce_(0, torch.zeros(1, dtype=torch.int64, device=NODE), into[:1].clone(), "mean")
        z.abs()
    dt.synchronize()
    assert len(said(heard)) <= 1


@pytest.mark.usefixtures("quiet")
def test_smaller_sizes_in_a_trial_warn_of_nothing(heard: list[warnings.WarningMessage]) -> None:
    torch.ones(3000, device=NODE).var(correction=5)
    dt.synchronize()
    assert not said(heard)


@pytest.mark.parametrize("way", [in_turn, on_a_stream, beside_one], ids=lambda way: way.__name__)
def test_what_only_the_node_finds_is_told_with_its_line(
    quiet: Quiet,
    heard: list[warnings.WarningMessage],
    way: Callable[[], AbstractContextManager[None]],
) -> None:
    own = [in_turn, on_a_stream, beside_one].index(way) + 1  # each way's first call is the first of its template
    with way():
        large = torch.ones(70_000, 1, device=NODE)
        for _ in range(2):
            large.std(1, correction=own)
        large.std(1, correction=own).sum().item()
    dt.synchronize()
    lines, start = inspect.getsourcelines(test_what_only_the_node_finds_is_told_with_its_line)
    at = [start + i for i, each in enumerate(lines) if "large.std(1" in each][:2]
    found = [(each.filename, each.category, each.lineno) for each in heard]
    assert found == [(__file__, UserWarning, line) for line in (at[0], at[0], at[1])]
    assert all("degrees of freedom is <= 0" in str(each.message) for each in heard)
    assert quiet()


def test_what_the_script_foresees_of_some_sizes_hides_nothing_of_others(
    quiet: Quiet, heard: list[warnings.WarningMessage]
) -> None:
    small, large = torch.ones(2, 1, device=NODE), torch.ones(70_000, 1, device=NODE)
    for order in ((small, large, small), (large, small, large)):
        for x in order:
            x.std(1, correction=7)
            dt.synchronize()
            (each,) = heard
            assert str(each.message).endswith("(on a node)") == (x is large)
            heard.clear()
    assert quiet()


@pytest.mark.parametrize("warm", [False, True], ids=["cold", "warm"])
def test_a_graph_warns_as_it_is_recorded_and_of_the_rest_as_it_is_replayed(
    quiet: Quiet, always: None, heard: list[warnings.WarningMessage], warm: bool
) -> None:
    small, large = torch.ones(2, 1, device=NODE), torch.ones(70_000, 1, device=NODE)
    into, source = torch.zeros(2, device=NODE), torch.full((2,), 2 + 1j, device=NODE)
    if warm:
        small.std(1, correction=8), large.std(1, correction=8), into.copy_(source)
        dt.synchronize()
        heard.clear()
    g = dt.Graph()
    with dt.graph(g):
        first = small.std(1, correction=8 + (not warm)).sum()
        at = sys._getframe().f_lineno
        second = large.std(1, correction=8 + (not warm)).sum()
        into.copy_(source)
    assert [each.lineno - at for each in heard] == [-1, 2]
    for _ in range(3):
        heard.clear()
        g.replay()
        line = sys._getframe().f_lineno - 1
        dt.synchronize()
        (each,) = heard
        assert (each.category, each.filename, each.lineno) == (UserWarning, __file__, line)
        assert str(each.message).endswith(f"(on a node) (recorded: {__file__}:{at + 1} in {_name()})")
    assert first.isnan().item()
    assert second.isnan().item()
    assert into.tolist() == [2, 2]
    assert quiet()


def _name() -> str:
    return sys._getframe(1).f_code.co_qualname


@pytest.mark.usefixtures("quiet")
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


def warns(kind: type[Warning] | None, text: str, level: int = 1) -> int:
    import warnings

    class Own(UserWarning):
        pass

    warnings.warn(text, kind or Own, stacklevel=level)
    return 7


class Mine(UserWarning):
    class Inner(DeprecationWarning):
        pass


class Strange(UserWarning):
    def __init__(self, one: str, two: str = "") -> None:
        super().__init__("something else")


@pytest.mark.parametrize("beside", [False, True], ids=["in turn", "beside"])
@pytest.mark.parametrize("kind", [RuntimeWarning, Mine, Mine.Inner, Strange, None], ids=str)
def test_a_functions_warning_is_one_of_the_line_that_issued_it(
    quiet: Quiet, heard: list[warnings.WarningMessage], beside: bool, kind: type[Warning] | None
) -> None:
    text = f"as {kind} says{' beside' * beside}"
    for _ in range(2):
        heard.clear()
        assert dt.submit(warns, kind, text, node=1, beside=beside).result() == 7
        line = sys._getframe().f_lineno - 1
        dt.synchronize()
        (each,) = heard
    unknown = {None: "warns.<locals>.Own: as", Strange: "Strange: something else"}.get(kind)
    assert (each.category, each.filename, each.lineno) == (UserWarning if unknown else kind, __file__, line)
    assert str(each.message).startswith(f"{__name__}.{unknown}" if unknown else text)
    assert str(each.message).endswith(", on a node)")
    assert quiet(text)


class Samples(Dataset[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, i: int) -> int:
        return warns(RuntimeWarning, f"sample {i % 2}")


class Stream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        for i in range(4):
            yield warns(RuntimeWarning, f"sample {i % 2}")


def collated(samples: list[int]) -> torch.Tensor:
    return torch.tensor([warns(RuntimeWarning, f"sample {i}") for i in range(2)])


def begun(worker: int) -> None:
    for i in range(2):
        warns(RuntimeWarning, f"sample {i}")


@pytest.mark.parametrize(
    ("data", "options"),
    [
        (Samples(), {}),
        (Stream(), {}),
        (TensorDataset(torch.arange(4)), {"collate_fn": collated}),
        (TensorDataset(torch.arange(4)), {"worker_init_fn": begun, "num_workers": 1}),
    ],
    ids=["samples", "stream", "collated", "begun"],
)
def test_what_nodes_warn_of_as_they_read_is_of_the_line_of_the_loop(
    quiet: Quiet, heard: list[warnings.WarningMessage], data: Any, options: dict[str, Any]
) -> None:
    """As in a loop over a loader without workers, though processes of the nodes read."""
    mesh = dt.mesh(dp=2)
    batches = dt.data.distribute(data, mesh, at="node", batch_size=2, **options)
    heard.clear()
    assert sum(1 for _ in batches) == 2
    line = sys._getframe().f_lineno - 1
    dt.synchronize()
    mesh.close()
    assert {(each.category, each.filename, each.lineno) for each in heard} == {(RuntimeWarning, __file__, line)}
    assert {str(each.message).partition(" (")[0] for each in heard} == {"sample 0", "sample 1"}
    assert all(str(each.message).endswith(", on a node)") for each in heard)
    assert quiet("sample")


@pytest.mark.usefixtures("quiet")
@pytest.mark.parametrize("module", ["", __name__, "another"])
def test_the_filters_of_the_script_decide(module: str) -> None:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("ignore")
        warnings.filterwarnings("always", "beware", DeprecationWarning, module)
        dt.run(warns, DeprecationWarning, "beware", node=1)
        dt.run(warns, DeprecationWarning, "something else", node=1)
        dt.run(warns, DeprecationWarning, "beware of its caller", 2, node=1)
        dt.synchronize()
    texts = [str(each.message).partition(" (")[0] for each in found]
    assert texts == ["beware", "beware of its caller"] * (module != "another")


class Sourceless:
    """The loader of a module that was generated."""

    def get_source(self, name: str) -> str:
        raise OSError(f"{name} has no source")


@pytest.mark.usefixtures("quiet")
def test_a_module_whose_source_cannot_be_read_is_warned_of_as_by_warn(
    heard: list[warnings.WarningMessage], monkeypatch: pytest.MonkeyPatch
) -> None:
    for lacking in ({"__spec__": None}, {"__spec__": None, "__loader__": None}, {"__loader__": Sourceless()}):
        with monkeypatch.context() as changed:
            for name, value in lacking.items():
                changed.setitem(globals(), name, value)
            dt.submit(warns, RuntimeWarning, "beware", node=1)
            warnings.warn("beware", RuntimeWarning, stacklevel=1)
            dt.synchronize()
        here, late = heard
        assert (late.category, late.filename, late.lineno + 1) == (here.category, here.filename, here.lineno)
        heard.clear()


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
    assert re.search(r"issued: .*:9 in <module>\n", done.stderr)
    assert "[node 0]" not in done.stderr
