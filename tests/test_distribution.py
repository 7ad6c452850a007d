"""The wheel and the sdist, built, installed and run from an empty folder, outside of the checkout."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import numpy
import pytest
from PIL import Image

from mpt.config.finding.shipped import find_shipped
from tests.test_documents import commands_of

ROOT = Path(__file__).parent.parent


def test_the_distribution_is_not_called_like_the_other_program() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert project["name"] == "mpt-trainer"
    assert project["scripts"] == {"mpt": "mpt_trainer:main"}
    pages = [ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("mpt/**/*.py")]
    for page in pages:
        text = page.read_text("utf-8")
        for wrong in ("pip install mpt ", "pip install mpt\n", "pip install mpt`", "'mpt["):
            assert wrong not in text, f"{page}: {wrong!r} is another program"


@pytest.mark.parametrize("is_there", [False, True])
def test_another_package_called_mpt_is_named_in_one_line(is_there: bool, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "mpt" / "entry_point", tmp_path / "site" / "mpt_trainer")
    other = tmp_path / "other" / "mpt"
    if is_there:
        other.mkdir(parents=True)
        (other / "__init__.py").write_text("raise SystemExit('theirs ran')\n", "utf-8")
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(other.parent), str(tmp_path / "site")]),
    }
    # nor what is installed here
    command = [sys.executable, "-S", "-P", "-c", "from mpt_trainer import main; main()"]
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert ended.returncode == 1
    found = (
        f"another package called mpt comes first: {other}"
        if is_there
        else "its package mpt is missing"
    )
    assert ended.stderr.startswith(f"error: {found}. ")
    assert ended.stderr.count("\n") == 1


def left_out(folder: str, names: list[str]) -> set[str]:
    """Return what a copy of the source does without; a package may have a folder called like one of these."""
    here = ("__pycache__", "*.egg-info", ".*_cache")
    at_top = (".git", "build", "tests", "runs", ".venv*") if Path(folder) == ROOT else ()
    return set(shutil.ignore_patterns(*here, *at_top)(folder, names))


def install(kind: str, tmp_path: Path) -> Path:
    """Build a wheel or an sdist, install it, remove the source, and return the folder with the packages."""
    if find_spec("setuptools") is None or find_spec("pip") is None:
        pytest.skip("needs setuptools and pip to build")
    source = tmp_path / "source"
    shutil.copytree(ROOT, source, ignore=left_out)
    built = tmp_path / "built"
    if kind == "sdist":
        build = f"from setuptools import build_meta; build_meta.build_sdist({str(built)!r})"
        built.mkdir()
        subprocess.run([sys.executable, "-c", build], cwd=source, check=True, capture_output=True)
        what = str(next(built.glob("mpt_trainer-*.tar.gz")))
    else:
        what = str(source)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "-q",
    ]
    subprocess.run(
        [*pip, "--target", str(tmp_path / "site"), what],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    shutil.rmtree(source)
    return tmp_path / "site"


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_what_is_built_runs_from_an_empty_folder(kind: str, tmp_path: Path) -> None:
    install(kind, tmp_path)
    empty = tmp_path / "empty"
    empty.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def mpt(*words: str) -> str:
        command = [sys.executable, "-P", "-m", "mpt", *words]
        return subprocess.run(
            command, cwd=empty, env=environment, check=True, capture_output=True, text=True
        ).stdout

    where = "import mpt, pathlib; print(pathlib.Path(mpt.__file__).parent)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", where],
        cwd=empty,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert found.stdout.strip() == str(tmp_path / "site" / "mpt")
    command = [sys.executable, "-P", "-c", "from mpt_trainer import main; main()", "--version"]
    assert (
        subprocess.run(
            command, cwd=empty, env=environment, capture_output=True, text=True
        ).returncode
        == 0
    )
    assert "classify_digits" in mpt("list", "configs")
    mpt("train", "@classify_digits", "train.steps=2", "train.device=cpu", "--quiet")
    assert "wrote" in mpt("infer", "--count", "2")
    mpt("report")
    mpt("init", "--from", "saehd_512", "mine.yaml")
    assert (empty / "mine.yaml").read_text("utf-8") == find_shipped("@saehd_512").read_text("utf-8")
    assert "saehd" in mpt("validate", "mine.yaml")


TUTORIALS = ("first_run", "own_pictures", "face_swap", "detector", "video")
PLACEHOLDER = re.compile(
    r"\b(?:CONFIG|RUN|DIR|FILE|FOLDER|NAME|MODE|PATCH)\b|\.\.\.|^clip|^flownet"
)


def shortened(words: list[str], page: str) -> list[str]:
    """Return a documented command with two steps, one seed and small pictures in place of its own."""
    if words[1] not in ("train", "compare"):
        return words
    given = re.sub(r"--seeds \d+|train\.(?:epochs|steps)=\S+", "", " ".join(words)).split()
    short = [
        "train.steps=2",
        "train.epochs=null",
        *["model.image_size=32"][: "own_pictures" in page],
    ]
    if words[1] == "compare":
        return [*given, "--seeds", "1", *short]
    return [
        *given,
        *short,
        *["precision=fp32"][: not any(word.startswith("precision") for word in given)],
    ]


def write_pictures(folder: Path) -> None:
    """Write the folder of pictures that pages speak of, two classes of thirty."""
    random = numpy.random.default_rng(0)
    for name in ("cat", "dog"):
        (folder / name).mkdir(parents=True)
        for number in range(30):
            Image.fromarray(random.integers(0, 256, (40, 40, 3), "uint8")).save(
                folder / name / f"{number}.jpg"
            )


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install("wheel", tmp_path_factory.mktemp("wheel"))


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "page", ["README.md", *(f"docs/tutorials/{name}.md" for name in TUTORIALS)]
)
def test_commands_of_a_page_run_from_a_wheel_in_an_empty_folder(
    page: str, site: Path, tmp_path: Path
) -> None:
    """Trainings are shortened to two steps in float32; all other commands are run as the page has them."""
    text, environment = (
        (ROOT / page).read_text("utf-8"),
        {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"},
    )
    write_pictures(tmp_path / "pictures")
    for name, block in re.findall(r"^```yaml\n# (\S+)\n(.*?)^```", text, re.M | re.S):
        (tmp_path / name).write_text(block, "utf-8")
    commands = [
        words for words in commands_of(text) if not any(PLACEHOLDER.search(word) for word in words)
    ]
    for words in commands:
        command = [sys.executable, "-P", "-m", *shortened(words, page)]
        done = subprocess.run(
            command, cwd=tmp_path, env=environment, capture_output=True, text=True
        )
        # 8: outside the margin
        assert done.returncode in (0, 8), f"{' '.join(words)}: {done.stderr[-800:]}"
    assert commands


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    if find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert (tmp_path / "tutorials" / "own_pictures" / "index.html").is_file()
