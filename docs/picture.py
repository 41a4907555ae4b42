"""Draws docs/ddp-accum.svg, the terminal on the first page of the site, from a real run:

gradcheck scenario ddp-accum --report report.json && python docs/picture.py report.json docs/ddp-accum.svg
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from gradcheck_dist.diagnosis.finding import ScenarioReport
from gradcheck_dist.reports import json_report
from gradcheck_dist.reports.document import build, scenario_summary
from gradcheck_dist.reports.terminal import render

WIDTH = 100
COMMAND = "gradcheck scenario ddp-accum"


def draw(report: ScenarioReport) -> str:
    """What a terminal shows of the first variant, and the summary, as SVG that loads nothing from elsewhere."""
    console = Console(file=io.StringIO(), record=True, width=WIDTH, force_terminal=True, highlight=False)
    first = report.variants[0].report
    if first is not None:
        render(build(first), console)
    sentence, lines = scenario_summary(report)
    console.print(Text("…\n", style="dim"), Text(sentence, style="bold green" if report.as_expected else "bold red"))
    for line in lines:
        console.print(Text(f"  {line}"))
    return re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=COMMAND), flags=re.S)


def main(report_file: str, picture: str) -> None:
    report = json_report.decode(Path(report_file).read_bytes(), report_file)
    if not isinstance(report, ScenarioReport):
        raise SystemExit(f"{report_file} holds one run's report; name one of `{COMMAND} --report FILE`.")
    Path(picture).write_text(draw(report), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
