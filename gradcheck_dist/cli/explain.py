"""gradcheck explain CODE"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import typer

from gradcheck_dist.cli.output import beside, fold_paragraphs
from gradcheck_dist.errors import GradcheckError, unknown_value


@dataclass(frozen=True)
class Page:
    """The page of a rule: its module's docstring."""

    code: str
    name: str
    text: str


def explain(
    rule: Annotated[
        str | None, typer.Argument(metavar="CODE|NAME", help="A rule such as GS101 or double-averaging.")
    ] = None,
    all_: Annotated[bool, typer.Option("--all", help="Show the pages of all rules.")] = False,
) -> None:
    """Show the page of a rule.

    It tells what the rule finds, why it matters, an example, the fix, and references. Without a rule: the list of all.
    """
    known = {page.code: page for page in pages()}
    if all_:
        typer.echo("\n\n".join(_render(page) for page in known.values()))
        return
    if rule is None:
        width = max(len(page.name) for page in known.values())
        typer.echo("\n".join(_line(page, width) for page in known.values()))
        return
    names = {page.name: page for page in known.values()}
    page = known.get(rule.upper()) or names.get(rule.lower())
    if page is None and re.fullmatch(r"E\d{3}", rule, re.IGNORECASE):
        raise GradcheckError(
            f"{rule} is the code of an error and no rule: its message says what is wrong and what to do. "
            "`gradcheck explain` lists the rules.",
            code="E713",
        )
    if page is None:
        hint = "`gradcheck explain` lists them all."
        raise unknown_value("rule", rule, [*known, *names], code="E713", hint=hint)
    typer.echo(_render(page))


def _line(page: Page, width: int) -> str:
    return beside(f"{page.code} {page.name:<{width}} ", page.text.partition("\n")[0])


def _render(page: Page) -> str:
    return fold_paragraphs(f"# {page.code} {page.name}\n\n{page.text}")


def pages() -> list[Page]:
    """The pages of all rules by code. Read, not imported: a page needs nothing of what its rule needs."""
    from importlib import resources

    folder = resources.files("gradcheck_dist.diagnosis") / "rules"
    sources = [entry for entry in folder.iterdir() if entry.name.endswith(".py") and not entry.name.startswith("_")]
    found = (_page(entry.read_text(encoding="utf-8")) for entry in sources)
    return sorted((page for page in found if page is not None), key=lambda page: page.code)


def _page(source: str) -> Page | None:
    import ast
    import inspect

    module = ast.parse(source)
    constants: dict[str, str] = {}
    for node in module.body:
        if isinstance(node, ast.Assign | ast.AnnAssign) and isinstance(node.value, ast.Constant):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                if isinstance(target, ast.Name) and isinstance(node.value.value, str):
                    constants[target.id] = node.value.value
    if "CODE" not in constants:
        return None
    return Page(constants["CODE"], constants.get("NAME", ""), inspect.cleandoc(ast.get_docstring(module) or ""))
