"""The backend of docs/JOBLIB.md runs joblib, and scikit-learn, on nodes."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest
from checkout import ROOT
from printed import as_shown
from test_readme import SHOWN, python

pytest.importorskip("joblib", reason="joblib is not installed here")
((PROGRAM, PRINTS),) = SHOWN.findall((ROOT / "docs" / "JOBLIB.md").read_text())

SCORES = """
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import GridSearchCV, cross_val_score

x, y = load_iris(return_X_y=True)
model, grid = LogisticRegression(max_iter=500), {"C": [0.01, 1.0, 10.0]}


def scores():
    search = GridSearchCV(model, grid).fit(x, y)
    means = search.cv_results_["mean_test_score"].tolist()
    return cross_val_score(model, x, y, cv=4).tolist(), search.best_params_, means


with dt.init_master_worker(nodes=2), joblib.parallel_config("disttensor", n_jobs=-1):
    there = scores()
    try:
        RandomForestClassifier(4).fit(x, y)
    except TypeError as error:
        print(error)
print(there == scores())
"""


def test_its_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    shown = textwrap.dedent(PRINTS)
    assert as_shown(python("program.py", cwd=tmp_path), shown) == shown


@pytest.mark.slow
def test_scores_of_scikit_learn_are_those_of_a_local_run(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="scikit-learn is not installed here")
    (tmp_path / "program.py").write_text(PROGRAM[: PROGRAM.index("with dt.init")] + SCORES)
    said, same = python("program.py", cwd=tmp_path).splitlines()
    assert "returned a sklearn.tree._classes.DecisionTreeClassifier; return what it is made of" in said
    assert same == "True"
