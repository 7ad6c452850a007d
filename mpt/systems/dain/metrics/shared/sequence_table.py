"""Each test sequence's figures as a section of a run's page (`mpt.report.run_page.evaluation_section`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

COLUMNS = {
    "psnr": ("PSNR, dB", 2),
    "average_psnr": ("mean of both frames, dB", 2),
    "ssim": ("SSIM", 4),
    "ie": ("IE", 2),
}
"""Of each figure its heading and its decimals."""


def describe(names: Sequence[str], figures: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return a table with a row for each sequence and one for their mean; figures are (samples,)."""
    rows = [
        [name, *(f"{figures[key][index]:.{decimals}f}" for key, (_, decimals) in COLUMNS.items())]
        for index, name in enumerate(names)
    ]
    rows.append(
        ["mean", *(f"{figures[key].mean():.{decimals}f}" for key, (_, decimals) in COLUMNS.items())]
    )
    section = {
        "title": "By sequence",
        "note": "PSNR, SSIM and IE (mean absolute difference in grey levels) of frames rounded to 8 bits.",
        "table": {
            "head": ["sequence", *(heading for heading, _ in COLUMNS.values())],
            "rows": rows,
        },
        "charts": [],
        "matrix": {"title": "", "names": [], "counts": [], "totals": []},
    }
    return {"section": section}
