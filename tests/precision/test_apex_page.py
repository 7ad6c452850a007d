"""The example of docs/how-to/apex.md runs."""

import re
from pathlib import Path

from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_of_the_page_runs_as_it_stands() -> None:
    (example,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "apex.md").read_text("utf-8"), re.S
    )
    names: dict[str, object] = {}
    exec(compile(example, "docs/how-to/apex.md", "exec"), names)
    loss = names["loss"]
    assert isinstance(loss, Tensor)
    assert float(loss.detach()) < 0.6  # it learnt: from 0.7 at the start
