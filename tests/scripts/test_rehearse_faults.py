"""The faults that `scripts/rehearse_faults.py` brings back can be brought back, and the page lists them."""

from pathlib import Path

import pytest

from scripts.rehearse_faults import FAULTS, ROOT, Fault, table


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_one_replacement_and_its_test_is_there(fault: Fault) -> None:
    assert (ROOT / fault.file).read_text("utf-8").count(fault.mended) == 1
    file, _, test = fault.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in Path(ROOT / file).read_text("utf-8")


def test_the_page_lists_the_faults() -> None:
    assert "\n".join(table()) in (ROOT / "docs" / "rehearsal.md").read_text("utf-8")
