"""Faults that `rehearse_faults.py` brings back can be brought back, are judged right, and are on the page."""

import ast
import re
from dataclasses import replace
from pathlib import Path

import pytest

from scripts.faults.rehearse_faults import FAULTS, PAGE, PLANTED, ROOT, Fault, judge


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_is_one_replacement_and_its_test_is_there(fault: Fault) -> None:
    text = (ROOT / fault.file).read_text("utf-8")
    assert text.count(fault.mended) == 1
    ast.parse(text.replace(fault.mended, fault.broken))
    re.compile(fault.says)
    file, _, test = fault.test.partition("::")
    assert f"def {test.partition('[')[0]}(" in Path(ROOT / file).read_text("utf-8")


def test_the_page_has_a_verdict_on_every_fault_and_none_is_missed() -> None:
    rows = [line for line in PAGE.read_text("utf-8").splitlines() if line.startswith("| ")]
    for fault in FAULTS:
        (row,) = [row for row in rows if row.startswith(f"| {fault.name} |")]
        assert fault.words in row
        assert fault.test.removeprefix("tests/") in row
        assert row.endswith(f"| limit: {fault.limit} |" if fault.limit else "| noticed |")


def test_a_broken_run_is_no_notice_and_no_miss() -> None:
    fault = replace(PLANTED[0], says="uses what .* without waiting", limit="")
    assert judge(fault, passed=True, said="1 passed in 3.0s").startswith("missed")
    assert judge(
        fault, passed=False, said="mul uses what copy_ has written, without waiting\n1 failed"
    ).startswith("noticed")
    for said in (
        "AssertionError\n1 failed",
        "ERROR collecting\n1 error",
        "no end within 900 s",
        "1 skipped",
    ):
        assert judge(fault, passed=False, said=said).startswith("broken run")
    because = "NameError: name 'x'\nmul uses what copy_ has written, without waiting\n1 failed"
    assert judge(fault, passed=False, said=because).startswith("broken run")
    limit = replace(fault, limit="cannot be seen")
    assert judge(limit, passed=True, said="1 passed") == "limit: cannot be seen"
    assert "listed as a limit" in judge(
        limit, passed=False, said="uses what x without waiting\n1 failed"
    )
