"""What the documents point to is there: tests, files, commands, settings."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from mpt.cli import make_app
from mpt.config.load import load_config

ROOT = Path(__file__).parent.parent
DOCUMENTS = [
    *sorted(ROOT.glob("*.md")),
    ROOT / "tests" / "faults.md",
    *sorted((ROOT / "docs").glob("**/*.md")),
]
TESTS = re.compile(r"`((?:\w+/)*test_\w+\.py)::(\w+)`")
PAGES = re.compile(r"\bdocs/[a-z_/-]+\.md")
FENCES = re.compile(r"^```.*?^```", re.M | re.S)
INLINE = re.compile(r"`(mpt [^`\n]+)`|^    (mpt .+)$", re.M)
LINKS = re.compile(r"\]\((?!https?://|#|mailto:)([^)#\s]+)")
ANCHORS = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)#([^)\s]+)\)")
BLOCKS = re.compile(r"^```(?:sh|console|bash)?\n(.*?)^```", re.M | re.S)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands_of(text: str) -> list[list[str]]:
    """Return the words of every `mpt ...` line in a document's blocks, without what follows a comment sign."""
    lines = [
        line.removeprefix("$ ") for block in BLOCKS.findall(text) for line in block.splitlines()
    ]
    lines = [part.strip() for line in lines for part in line.split("&&")]
    return [shlex.split(line, comments=True) for line in lines if line.startswith("mpt ")]


def test_there_are_documents() -> None:
    names = {path.name for path in DOCUMENTS}
    assert names >= {
        "README.md",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "architecture.md",
        "index.md",
        "exit_codes.md",
    }


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_test_named_is_there(path: Path) -> None:
    for file, name in TESTS.findall(path.read_text("utf-8")):
        source = ROOT / "tests" / file
        assert source.is_file(), file
        functions = {
            node.name
            for node in ast.parse(source.read_text("utf-8")).body
            if isinstance(node, ast.FunctionDef)
        }
        assert name in functions, f"{file}::{name}"


def test_decisions_are_listed_by_subject() -> None:
    folder = ROOT / "docs" / "decisions"
    pages = {path.name for path in folder.glob("*.md")} - {"index.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", (folder / "index.md").read_text("utf-8"))) == pages
    assert not (ROOT / "docs" / "decisions.md").exists(), (
        "a decision goes to its subject's page in docs/decisions"
    )


def test_every_fault_has_a_test() -> None:
    rows = [
        line
        for line in (ROOT / "tests" / "faults.md").read_text("utf-8").splitlines()
        if line.startswith("| ") and not re.match(r"\| (fault|code|\d+)", line)
    ]
    assert len(rows) > 25
    assert [row for row in rows if not TESTS.search(row)] == []


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_link_leads_to_a_file(path: Path) -> None:
    missing = [
        link
        for link in LINKS.findall(FENCES.sub("", path.read_text("utf-8")))
        if not (path.parent / link).exists()
    ]
    assert missing == []


def cells_of(row: str) -> int:
    """Count the cells of a table's row; a bar after a backslash is text, also in code."""
    return len(re.findall(r"(?<!\\)\|", row)) - 1


def test_every_row_of_a_table_has_the_cells_of_its_rule() -> None:
    wrong = []
    for path in DOCUMENTS:
        for table in re.findall(r"(?:^\|.*\n)+", FENCES.sub("", path.read_text("utf-8")), re.M):
            rows = table.splitlines()
            wrong += [f"{named(path)}: {row}" for row in rows if cells_of(row) != cells_of(rows[1])]
    assert wrong == []


def slugs_of(path: Path) -> set[str]:
    """Return the anchors that the site gives to a page's headings."""
    found: list[str] = []
    for heading in re.findall(r"^#+ (.+)$", FENCES.sub("", path.read_text("utf-8")), re.M):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        slug = re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", words).strip().lower())
        found.append(f"{slug}_{found.count(slug)}" if slug in found else slug)
    return {*found, *re.findall(r"id=\"([\w-]+)\"", path.read_text("utf-8"))}


def test_every_anchor_is_a_heading_of_its_page() -> None:
    checked, lost = 0, []
    for path in DOCUMENTS:
        for page, anchor in ANCHORS.findall(FENCES.sub("", path.read_text("utf-8"))):
            target = (path.parent / page).resolve() if page else path
            checked += 1
            if target.suffix == ".md" and anchor not in slugs_of(target):
                lost.append(f"{named(path)}: {page}#{anchor}")
    assert checked > 20
    assert lost == []


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    listed = re.findall(
        r"^ +- (?:\w+: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.M
    )
    assert sorted(listed) == sorted(
        str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")
    )


def test_every_page_that_code_names_is_there() -> None:
    files = [
        path for top in ("mpt", "scripts", "tests", "configs") for path in (ROOT / top).rglob("*")
    ]
    texts = {
        path: path.read_text("utf-8") for path in files if path.suffix in (".py", ".yaml", ".sh")
    }
    named = {(path.name, page) for path, text in texts.items() for page in PAGES.findall(text)}
    assert len(named) > 20
    scripts = {path.name for path in files if path.is_relative_to(ROOT / "scripts")}
    written = {page for name, page in named if name in scripts and "/benchmarks/" in page}
    lost = {
        (name, page) for name, page in named if not (ROOT / page).is_file() and page not in written
    }
    assert lost == set(), (
        "a page moved or was misspelt (a script's own table may be yet to be made)"
    )


@pytest.fixture(scope="module")
def app() -> Any:
    return make_app()


@pytest.mark.parametrize("path", DOCUMENTS, ids=named)
def test_every_command_shown_exists_and_its_configuration_is_valid(path: Path, app: Any) -> None:
    known: dict[str | None, set[str | None]] = {
        command.name: set() for command in app.registered_commands
    }
    for group in app.registered_groups:
        assert group.typer_instance
        known[group.name] = {command.name for command in group.typer_instance.registered_commands}
    for words in commands_of(path.read_text("utf-8")):
        if words[1].startswith("-"):
            continue
        assert words[1] in known, words
        # a group with a command of its own name takes that one's arguments directly
        inside = known[words[1]]
        assert not inside or words[1] in inside or words[2] in inside or words[2].startswith("-"), (
            words
        )
        files = [word for word in words[2:] if re.match(r"@\w|configs/.*\.yaml$", word)]
        overrides = [word for word in words[2:] if re.match(r"[a-z_.]+=", word)]
        if (
            words[1] in ("train", "validate", "plan")
            and files
            and not {"--with", "--parts"} & {*words}
        ):
            config = files[0] if files[0].startswith("@") else ROOT / files[0]
            load_config(config, [word for word in overrides if not names_an_example(word)])


def unknown_options(words: list[str], app: Any) -> list[str]:
    """Return the options of a command line that the command does not have."""
    command, place = app, 1
    while place < len(words) and words[place] in getattr(command, "commands", {}):
        command, place = command.commands[words[place]], place + 1
    # a group's own command
    command = getattr(command, "commands", {}).get(words[place - 1], command)
    if hasattr(command, "commands"):
        return []
    known = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
    known |= {"-h", "--help", "--parts", "--debug"}
    given = words[place : words.index("--")] if "--" in words else words[place:]
    return [
        word for word in given if re.match(r"-[a-z-]", word) and word.partition("=")[0] not in known
    ]


def test_every_option_shown_exists() -> None:
    app, checked, wrong = typer.main.get_command(make_app()), 0, []
    for path in DOCUMENTS:
        if path.parent.name == "decisions":  # which name what was taken out
            continue
        text = path.read_text("utf-8")
        lines = [
            words for found in INLINE.findall(text) if (words := split_or_none("".join(found)))
        ]
        for words in [*commands_of(text), *lines]:
            checked += 1
            wrong += [(named(path), option) for option in unknown_options(words, app)]
    assert checked > 400
    assert wrong == []


def split_or_none(line: str) -> list[str] | None:
    """Return a command line's words, None for an unfinished one."""
    try:
        return shlex.split(line, comments=True)
    except ValueError:
        return None


@pytest.mark.parametrize(
    "path", [path for path in DOCUMENTS if path.parent.name in ("how-to", "tutorials")], ids=named
)
def test_commands_of_the_pages_need_no_checkout(path: Path) -> None:
    named = re.findall(r"(?<![\w/])configs/(?:presets/)?\w+\.yaml", path.read_text("utf-8"))
    assert named == [], "a wheel has no configs/: write @NAME"


def names_an_example(override: str) -> bool:
    """Is this a part that a worked example adds? Those are checked by tests/test_contributing.py."""
    return override in (
        "precision=rounded-weights",
        "model=perceptron",
        "dataset=stripes",
        "task.metrics=[calibration_error]",
    )
