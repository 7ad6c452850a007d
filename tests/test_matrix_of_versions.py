"""scripts/test_matrix.sh tries the ends of the ranges that pyproject.toml allows."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPT = (ROOT / "scripts" / "test_matrix.sh").read_text("utf-8")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def allowed(package: str) -> tuple[str, str]:
    """Return the oldest and the newest minor version that are allowed."""
    (found,) = [one for one in PROJECT["dependencies"] if re.match(rf"{package}\b", one)]
    oldest, beyond = re.fullmatch(
        rf"{package}>=0?\.?(\d+(?:\.\d+)?),<0?\.?(\d+(?:\.\d+)?)", found
    ).groups()  # type: ignore[union-attr]
    major, _, minor = beyond.rpartition(".")
    return oldest, ".".join(filter(None, (major, str(int(minor) - 1))))


def test_the_matrix_has_the_oldest_and_the_newest_torch_and_torchvision_and_each_python() -> None:
    listed = re.search(r"^ALL=\((.*?)\)$", SCRIPT, re.M | re.S)
    assert listed
    rows = [row.split(":") for row in listed[1].split()]
    tried = sorted(
        {torch for _, torch, _ in rows},
        key=lambda version: [int(part) for part in version.split(".")],
    )
    assert (tried[0], tried[-1]) == allowed("torch")
    vision = dict(re.findall(r"\[([\d.]+)\]=0\.(\d+)", SCRIPT))
    assert (vision[tried[0]], vision[tried[-1]]) == allowed("torchvision")
    assert f"newest ] && torch={tried[-1]}" in SCRIPT
    named = {
        one.rpartition(" ")[2] for one in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", one)
    }
    assert named <= {python for python, _, _ in rows}
    assert PROJECT["requires-python"] == f">={rows[0][0]}"


def test_every_wheel_that_the_pages_name_is_one_that_mpt_keeps() -> None:
    """Of an index the newest torch is taken; one beyond the range mpt replaces by the ordinary CUDA wheel."""
    pages = [(ROOT / page).read_text("utf-8") for page in ("README.md", "docs/how-to/gpu.md")]
    commands = re.findall(
        r"pip install ([^`\n]*) --index-url https://download\.pytorch\.org", "\n".join(pages)
    )
    assert len(commands) == len(pages)
    beyond = {
        name: re.search(
            rf'"{name}>=[\d.]+,(<[\d.]+)"', str(PROJECT["dependencies"]).replace("'", '"')
        )
        for name in ("torch", "torchvision")
    }
    for command in commands:
        for name, found in beyond.items():
            assert found
            assert re.search(rf"'{name}\S*{found[1]}'", command), command


def test_the_checks_take_a_pair_that_mpt_allows_where_there_is_no_gpu() -> None:
    """A CUDA build of the newest release is 6 GB that a machine without a GPU need not take."""
    lines = (ROOT / "scripts" / "torch_without_gpu.txt").read_text("utf-8").splitlines()
    beyond = dict(line.split("<") for line in lines if line and not line.startswith("#"))
    vision = {int(torch): int(own) for torch, own in re.findall(r"\[2\.(\d+)\]=0\.(\d+)", SCRIPT)}
    minor = int(beyond["torch"].removeprefix("2.")) - 1
    assert vision[minor] == int(beyond["torchvision"].removeprefix("0.")) - 1
    check = (ROOT / "scripts" / "test.sh").read_text("utf-8")
    assert "--constraint scripts/torch_without_gpu.txt" in check
