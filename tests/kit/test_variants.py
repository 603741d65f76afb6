"""Which variants of a test are in every run."""

from __future__ import annotations

from pathlib import Path

from variants import chosen, variants


def test_the_first_is_in_every_run_and_some_of_the_others() -> None:
    values = ["ordinary", *(f"variant {k}" for k in range(400))]
    first, *others = variants(values)
    assert first == "ordinary"
    assert [p.values for p in others] == [(v,) for v in values[1:]]
    in_every_run = [p.values[0] for p in others if not p.marks]
    assert in_every_run == [v for v in values[1:] if chosen(v)]
    assert 70 < len(in_every_run) < 130


def test_a_variant_is_chosen_by_its_name() -> None:
    """In each run and on each machine alike."""
    names = [(k, name) for k, name in enumerate(("a", "b", "c", "d", "e", "f", "g", "h"))]
    assert [chosen(n) for n in names] == [chosen(n) for n in names]
    assert chosen(Path("/one/x.py")) == chosen(Path("/other/x.py"))
    assert chosen(test_a_variant_is_chosen_by_its_name) == chosen("test_a_variant_is_chosen_by_its_name")
