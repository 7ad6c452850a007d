"""Faults that `scripts/rehearse_faults.py` brings back can be brought back, are judged right, and are on the page."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.rehearse_faults import FAULTS, MENDED, PLANTED, ROOT, Fault, judge, table


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_one_replacement_and_its_test_is_there(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text("utf-8")
    assert text.count(fault.mended) == 1
    ast.parse(text.replace(fault.mended, fault.broken))
    re.compile(fault.says)
    file, _, test = fault.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in Path(ROOT / file).read_text("utf-8")


def test_the_page_lists_the_faults() -> None:
    page = (ROOT / "docs" / "explanation" / "rehearsal.md").read_text("utf-8")
    for faults in (MENDED, PLANTED):
        assert "\n".join(table(faults)) in page


def test_a_broken_run_is_no_notice_and_no_miss() -> None:
    fault = replace(PLANTED[0], says="uses what .* without waiting", limit="")
    assert judge(fault, passed=True, said="1 passed in 3.0s").startswith("missed")
    assert judge(fault, passed=False, said="mul uses what copy_ has written, without waiting\n1 failed").startswith(
        "noticed"
    )
    for said in ("AssertionError\n1 failed", "ERROR collecting\n1 error", "no end within 900 s", "1 skipped"):
        assert judge(fault, passed=False, said=said).startswith("broken run")
    because = "NameError: name 'x'\nmul uses what copy_ has written, without waiting\n1 failed"
    assert judge(fault, passed=False, said=because).startswith("broken run")
    limit = replace(fault, limit="cannot be seen")
    assert judge(limit, passed=True, said="1 passed") == "limit: cannot be seen"
    assert "listed as a limit" in judge(limit, passed=False, said="uses what x without waiting\n1 failed")
