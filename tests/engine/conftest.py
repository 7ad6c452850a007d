import pytest

import mpt.report.page
import mpt.workflows.out_of_memory_report


@pytest.fixture(autouse=True)
def _no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the report out: these tests train dozens of runs, and the page has tests of its own."""
    monkeypatch.setattr(mpt.report.page, "write_report", lambda path: None)


@pytest.fixture(autouse=True)
def _no_planner(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the planner out: the report has tests of its own."""
    monkeypatch.setattr(
        mpt.workflows.out_of_memory_report,
        "add_report",
        lambda message, training, arguments: message,
    )
