"""Write docs/reference/cards/: a card for each precision mode, memory trick, optimizer, model, task and system.

A card has the file's docstring (idea, limits, source), what the file declares (literals such as `RELIEVES`, `LOSSY`,
`CONFLICTS`), and the measured rows of docs/benchmarks/ whose first cell names the part. `python
scripts/documents/config_reference.py` writes the cards with the other generated pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mpt.config.finding.registry import PACKAGE_FOLDER, Plugin, Registry

DOCS = Path(__file__).resolve().parents[2] / "docs"
FOLDER = DOCS / "reference" / "cards"
HEAD = "Written by `python scripts/documents/config_reference.py` from the parts and the measured tables; do not edit."
KINDS: Mapping[str, tuple[str, str, str, tuple[str, ...]]] = {
    "precision": ("precision", "Cards: precision modes", "precision: {name}", ("precision.md",)),
    "memory": ("memory", "Cards: memory tricks", "memory: {{{name}: true}}", ("memory.md",)),
    "optimizers": ("optim", "Cards: optimizers", "optimizer: {{name: {name}}}", ("precision.md",)),
    "models": ("nn", "Cards: models", "model: {name}", ("dain.md", "yolofuse.md")),
    "tasks": ("tasks", "Cards: tasks", "task: {{name: {name}}}", ()),
}
"""Page -> subpackage, title, how it is written in YAML, and the benchmark pages with its rows."""
CHOICES = {
    "precision": "Where to begin: on a card without bfloat16 `amp`, or `fp16-24bit` (11 bytes for each weight with "
    "Adam, a loss scale) where the 16 of float32 weights are too many; with bfloat16 `bf16`, or `bf16-sr` (8 bytes)."
}
"""Page -> what to take if one does not want to read all of it."""
HEADING = re.compile(r"^#+ (.*)$", re.M)
TABLE = re.compile(r"(?:^\|.*\n)+", re.M)


def read_docstring(path: Path) -> str:
    return ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""


def files_of(registry: Registry, subpackage: str) -> dict[Path, list[Plugin]]:
    """Group the parts of a subpackage by file, in the order of their names."""
    grouped: dict[Path, list[Plugin]] = {}
    for name in registry.names(subpackage):
        plugin = registry.find(subpackage, name)
        assert plugin
        grouped.setdefault(plugin.path, []).append(plugin)
    return grouped


def declared(plugins: Sequence[Plugin]) -> Iterator[tuple[str, str]]:
    """Yield the declarations of a file that a reader asks for, as a label and a value."""
    literals = plugins[0].literals
    if plugins[0].task:
        yield "trained by the task", f"`{plugins[0].task}`"
    if literals.get("RELIEVES"):
        yield "makes smaller", str(literals["RELIEVES"])
    if "LOSSY" in literals:
        lossy = literals["LOSSY"]
        yield (
            "changes the learned result",
            ("yes" if lossy else "no") if isinstance(lossy, bool) else names_of(lossy),
        )
    if literals.get("PROPOSALS"):
        yield "proposed by `mpt plan` as", names_of(literals["PROPOSALS"])
    if literals.get("LADDER"):
        yield "used by `memory.on_oom: adapt` as", names_of(literals["LADDER"])
    if "SHARDED" in literals:
        sharded = literals["SHARDED"]
        yield (
            "with `parallel.strategy: fsdp`",
            ("yes" if sharded else "no") if isinstance(sharded, bool) else names_of(sharded),
        )
    if literals.get("NEEDS_BFLOAT16"):
        yield "needs a GPU with bfloat16", names_of(literals["NEEDS_BFLOAT16"])
    if literals.get("SCALED"):
        yield "has a loss scale", names_of(literals["SCALED"])
    for device, why in dict(literals.get("POINTLESS_ON") or {}).items():
        yield f"no gain on {device}", str(why)
    for other, why in plugins[0].conflicts.items():
        yield f"refused with `{other}`", why


def names_of(value: Any) -> str:
    """Write a declared value as code: a name, several, or `yes`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    several = value if isinstance(value, list | tuple | set | frozenset) else [value]
    return ", ".join(f"`{one}`" for one in several)


def measured(names: Sequence[str], pages: Sequence[str]) -> Iterator[str]:
    """Yield the rows of measured tables whose first cell names a part, each table with its head and its page."""
    for page in pages:
        text = (DOCS / "benchmarks" / page).read_text("utf-8")
        for table in TABLE.finditer(text):
            head, rule, *rows = table[0].splitlines()
            found = [row for row in rows if names_part(row, names)]
            if found and len(found) < len(rows):
                title = HEADING.findall(text[: table.start()])[-1]
                yield "\n".join(
                    [
                        f"Measured: {title} ([all rows](../../benchmarks/{page})).",
                        "",
                        head,
                        rule,
                        *found,
                    ]
                )


def names_part(row: str, names: Sequence[str]) -> bool:
    """Does the first cell of a row begin with one of the names, alone or as `name: value`?"""
    first = (
        row.split("|")[1]
        .strip()
        .strip("`")
        .removeprefix("optimizer.name=")
        .removeprefix("precision=")
    )
    return any(re.match(rf"{re.escape(name)}(?![\w-])", first) for name in names)


def card(plugins: Sequence[Plugin], spelling: str, pages: Sequence[str], anchor: str) -> str:
    names = [plugin.name for plugin in plugins]
    summary, _, rest = read_docstring(plugins[0].path).partition("\n\n")
    title = ", ".join(f"`{name}`" for name in names)
    parts = [f"## {title}", " ".join(summary.split())]
    parts.append(f"```yaml\n{spelling.format(name=names[0])}\n```")
    if rows := [f"| {label} | {value} |" for label, value in declared(plugins)]:
        parts.append("\n".join(["| | |", "|---|---|", *rows]))
    if rest.strip():
        parts.append(rest.strip())
    parts += list(measured(names, pages))
    parts.append(f"Settings: [{anchor}](../settings.md#{anchor}).")
    return "\n\n".join(parts)


def anchor_of(plugins: Sequence[Plugin]) -> str:
    """The anchor that mkdocs gives to the part's heading in settings.md."""
    title = "`, `".join(plugin.name for plugin in plugins)
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower())


def write_page(title: str, cards: Sequence[str], choice: str = "") -> str:
    return "\n\n".join([f"# {title}", HEAD, *([choice] if choice else []), *cards]) + "\n"


def system_cards() -> Iterator[str]:
    """Yield a card for each system: what it brings, and its commands."""
    for folder in sorted((PACKAGE_FOLDER / "systems").iterdir()):
        if not (folder / "__init__.py").is_file():
            continue
        text = read_docstring(folder / "__init__.py")
        rows = []
        for kind in ("nn", "tasks", "data", "losses", "metrics", "optim", "precision", "memory"):
            found = sorted(
                path.stem for path in (folder / kind).glob("*.py") if path.stem != "__init__"
            )
            if found:
                rows.append(f"| {kind} | {names_of(found)} |")
        commands = sorted(
            path.stem for path in (folder / "commands").glob("*.py") if path.stem != "__init__"
        )
        if commands:
            said = ", ".join(f"`mpt {folder.name} {name.replace('_', '-')}`" for name in commands)
            rows.append(f"| commands | {said} |")
        yield "\n\n".join(
            [f"## {folder.name}", text, "\n".join(["| parts | |", "|---|---|", *rows])]
        )


def write_cards(registry: Registry | None = None) -> dict[Path, str]:
    """Make the text of every page of cards."""
    registry = registry or Registry()
    pages = {}
    for page, (subpackage, title, spelling, tables) in KINDS.items():
        groups = files_of(registry, subpackage).values()
        cards = [card(plugins, spelling, tables, anchor_of(plugins)) for plugins in groups]
        pages[FOLDER / f"{page}.md"] = write_page(title, cards, CHOICES.get(page, ""))
    pages[FOLDER / "systems.md"] = write_page("Cards: systems", list(system_cards()))
    return pages
