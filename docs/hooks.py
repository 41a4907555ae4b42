"""Pages that mkdocs makes out of the package: rules, scenarios, commands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
_SUB_HEADING = re.compile(r"^## ", re.M)


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages to those that are written."""
    pages = {"rules.md": rules(), "scenarios.md": scenarios(), "commands.md": commands()}
    for name, text in pages.items():
        files.append(File.generated(config, name, content=text))
    return files


def rules() -> str:
    """The pages of all rules, one below the other: the same texts as `gradcheck explain` shows."""
    from gradcheck_dist.cli.explain import pages

    parts = [
        "# Rules\n\nA finding carries the code of the rule that named it; `gradcheck explain CODE` shows its page.\n"
    ]
    for page in pages():
        first, _, rest = page.text.partition("\n")
        parts.append(f"## {page.code} {page.name}\n\n**{first}**\n{_SUB_HEADING.sub('### ', rest)}\n")
    return "\n".join(parts)


def scenarios() -> str:
    """What the library holds, read from its files."""
    from gradcheck_dist.scenarios.schema import library, load

    parts = [
        "# Scenarios\n\n`gradcheck scenario NAME` reproduces a bug on this machine, diagnoses it and shows that its "
        "healthy twin is clean; `gradcheck scenario --all` runs every one.\n"
    ]
    for name in library():
        found = load(name)
        rows = ["| variant | what must be found | weights are off by |", "|---|---|---|"]
        for variant in found.variants:
            codes = ", ".join(
                f"[{one.code}](rules.md#{one.code.lower()}-{one.name}) {one.name}" for one in variant.expect
            )
            ratios = ", ".join(f"`{one.ratio.text}`" for one in variant.expect)
            rows.append(f"| {variant.name} | {codes or 'nothing'} | {ratios} |")
        cited = "; ".join(found.citations)
        parts.append(
            f"## {name}\n\n**{found.title}**\n\n{found.story.strip()}\n\n" + "\n".join(rows) + f"\n\nSeen in: {cited}\n"
        )
    return "\n".join(parts)


def commands() -> str:
    """`--help` of every command."""
    import typer

    from gradcheck_dist.cli.main import COMMANDS, build

    parts = ["# Commands\n"]
    for name in COMMANDS:
        command: Any = typer.main.get_command(build(name))
        context = command.make_context(f"gradcheck {name}", [], resilient_parsing=True, max_content_width=96)
        parts.append(f"## gradcheck {name}\n\n```text\n{command.get_help(context)}\n```\n")
    return "\n".join(parts)
