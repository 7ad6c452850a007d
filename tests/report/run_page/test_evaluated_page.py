"""The remarks under the figures of `mpt evaluate`."""

from types import SimpleNamespace

import pytest

from mpt.report.run_page.evaluated_page import Evaluated

pytestmark = pytest.mark.tier("fast")


def test_metrics_that_were_refused_for_one_reason_are_named_in_one_sentence() -> None:
    refused = {"f1": "pip install it", "recall": "pip install it", "auc": "one class only"}
    measured = SimpleNamespace(
        precision="float32", figures={}, refused=refused, details={}, test_set=""
    )
    found = Evaluated("run", 1, "digits", 1, "cpu", 1.0, "accuracy", [measured], None)
    assert found.sentences() == [
        "f1, recall were not measured: pip install it",
        "auc was not measured: one class only",
    ]
