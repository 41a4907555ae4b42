"""What the package says reads as a person would write it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import gradcheck_dist

PACKAGE = Path(gradcheck_dist.__file__).parent
BOTH_NUMBERS = re.compile(r"[a-z]\((s|es)\)(?!\w)")


def test_no_message_leaves_the_number_open() -> None:
    """ "1 parameter" and "ranks 0 and 1" by `gradcheck_dist.wording`, never an s in brackets."""
    found = []
    for file in PACKAGE.rglob("*.py"):
        text = file.read_text()
        if not BOTH_NUMBERS.search(text):
            continue  # parsing them all takes seconds
        found += [
            f"{file.relative_to(PACKAGE)}:{node.lineno}: {node.value}"
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and BOTH_NUMBERS.search(node.value)
        ]
    assert found == []
