"""Models of the transformers library, which a rule chooses, trained on a node by ``torch.compile``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[2] / "tools" / "ci" / "library_models.py"
#: What the tool has printed.
TABLE = Path(__file__).with_name("library_models.txt").read_text().splitlines()
#: The types that the rule has chosen, and what is known of each.
CHOSEN = [line.split() for line in TABLE if " unfit: " not in line and not line.startswith("#")]


def test_of_45_models_36_are_one_graph() -> None:
    """Those that are not are several locally as well, and all have the local numbers."""
    assert len(CHOSEN) == 45
    for name, graphs, locally, breaks, breaks_locally, by_operator, difference in CHOSEN:
        assert (graphs, breaks, by_operator, difference) == (locally, breaks_locally, "0", "0"), name
    assert sum(graphs == "1" for _, graphs, *_ in CHOSEN) >= 36


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_the_rule_chooses_the_models_of_the_table_and_they_do_what_it_says(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    if transformers.__version__ != TABLE[0].split()[2].rstrip(","):
        pytest.skip(f"the table is that of other versions: {TABLE[0]}")
    options = ["--results", str(tmp_path / "found.jsonl")]
    done = subprocess.run([sys.executable, TOOL, *options], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == TABLE
