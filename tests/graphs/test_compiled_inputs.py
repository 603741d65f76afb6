"""What a compiled program looks at of the inputs that it is given anew. A function here is in the library's place."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from disttensor.runtime.node.graphs.engines.compiled import Compiled
from disttensor.runtime.node.graphs.engines.listing import input_geometry
from disttensor.runtime.node.graphs.program import Program

ONE, TWO = torch.ones(4, 6), torch.full((4, 6), 2.0)


def doubled(first: Tensor, second: Tensor) -> Tensor:
    return first * 2 + second


def compiled_for(*inputs: Tensor) -> Compiled:
    """A program of these inputs, whose one result is ``doubled`` of the first two."""
    n, like = len(inputs), doubled(inputs[0], inputs[1])
    plan = {
        "arguments": [["input", i] for i in reversed(range(n))],
        **{key: [] for key in ("draws", "fence", "checks")},
        "results": [["made", 0]],
        "made": [[n, [*like.shape], [*like.stride()]]],
    }
    program = Program((), tuple(range(n)), (n,), 0)
    return Compiled(program, input_geometry(inputs), plan, lambda given: [doubled(given[-1], given[-2])])


def runs(compiled: Compiled, *inputs: Tensor) -> bool:
    """Whether it runs with these inputs; with the right result then."""
    results = compiled.run(inputs, ())
    assert results is None or torch.equal(results[0], doubled(inputs[0], inputs[1]))
    return results is not None


def inference_copy(x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.clone()


#: Tensors in the place of the second of two inputs, and whether the program runs with them. One with a gradient, or of
#: another class, is the same to it.
OTHERS: dict[str, tuple[Callable[[], Tensor], bool]] = {
    "a new one": (TWO.clone, True),
    "a parameter": (lambda: torch.nn.Parameter(TWO.clone()), True),
    "with a gradient": (lambda: TWO.clone().requires_grad_(), True),
    "an inference tensor": (lambda: inference_copy(TWO), True),
    "a part of another memory": (lambda: torch.ones(3, 4, 6)[1], True),
    "of another size": (lambda: torch.ones(1, 6), False),
    "of other strides": (lambda: torch.ones(6, 4).t(), False),
    "of another dtype": (TWO.double, False),
    "without memory": (lambda: TWO.to("meta"), False),
    "sparse": (TWO.to_sparse, False),
    "a lazy negative": (lambda: torch._neg_view(TWO), False),
    "in the memory of the first": (lambda: ONE.view(4, 6), False),
    "the first": (lambda: ONE, False),
}


@pytest.mark.parametrize("other", OTHERS)
def test_an_input_that_is_new(other: str) -> None:
    make, fits = OTHERS[other]
    compiled, third = compiled_for(ONE, TWO), make()
    for second in (TWO, TWO.clone(), third, third, TWO, third):
        assert runs(compiled, ONE, second) == (fits or second is not third)


def test_a_lazy_conjugate_is_refused() -> None:
    x = torch.ones(3, dtype=torch.complex64)
    compiled = compiled_for(x, x + 1)
    assert runs(compiled, x, x + 2)
    assert not runs(compiled, x, (x * 1j).conj())


def test_inputs_that_share_memory() -> None:
    """They may lie there in another way, or in memories of their own: all is looked at when one of them is new."""
    whole, more = torch.arange(10.0), torch.arange(20.0, 30.0)
    compiled = compiled_for(whole[:4], whole[2:6])
    for other in (more[3:7], more[2:6].clone(), whole[2:6]):
        assert runs(compiled, whole[:4], whole[2:6])
        assert runs(compiled, more[:4], more[2:6])
        assert not runs(compiled, more[:4], other)


def test_an_input_without_elements_shares_no_memory() -> None:
    """Wherever it lies: what is counted is the others' memories."""
    compiled = compiled_for(ONE, TWO, ONE[:0])
    for none in (ONE[:0], torch.ones(0, 6), TWO[:0]):
        assert runs(compiled, ONE, TWO, none)
        assert not runs(compiled, ONE, ONE.view(4, 6), torch.ones(0, 6))
