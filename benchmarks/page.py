"""docs/benchmarks.md out of the figures that `make bench` kept.

python benchmarks/page.py
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from measure import RESULTS

PAGE = Path(__file__).parents[1] / "docs" / "benchmarks.md"
HEAD = """# Benchmarks

Written by `python benchmarks/page.py` out of `benchmarks/results/`; measure your own machine with `make bench`.
Ratios come from rounds that alternate within one run: median [lower quartile, upper quartile]. Times are CPU time.
"""


def ratio(value: dict[str, float]) -> str:
    """1.020 [1.010, 1.030]"""
    return f"{value['median']:.3f} [{value['low']:.3f}, {value['high']:.3f}]"


def table(head: list[str], rows: list[list[str]]) -> Iterator[str]:
    """A Markdown table, first column to the left."""
    yield "| " + " | ".join(head) + " |"
    yield "|---" + "|---:" * (len(head) - 1) + "|"
    yield from ("| " + " | ".join(row) + " |" for row in rows)


def overhead(results: dict[str, Any]) -> Iterator[str]:
    """Recording every step, beside other tools."""
    for name, found in results.items():
        goal = f" (goal {found['goal']:.2f})" if found["goal"] else ""
        yield f"\n## Recording every step: {name}\n"
        yield f"CPU time of a step as a multiple of the same step without any tool, {found['plain_ms']:.1f} ms{goal}.\n"
        rows = [[tool, ratio(of["ratio"]), f"{of['added_ms']:+.2f}"] for tool, of in found["tools"].items()]
        yield from table(["tool", "times the plain step", "added ms"], rows)
        ours, other = (found["tools"].get(tool, {}).get("added_ms", 0) for tool in ("gradcheck", "CommDebugMode"))
        if name.startswith("tiny") and ours > 0:
            yield f"\nCommDebugMode adds {other / ours:.1f} times as much (goal 10)."


def trace(results: dict[str, Any]) -> Iterator[str]:
    """Writing, tailing, and being killed."""
    write, tail, kill = results["write"], results["tail"], results["kill"]
    yield "\n## The trace\n"
    rows = [
        ["an event", f"{write['ns_per_event']} ns", f"{write['bytes_per_event']} bytes"],
        [f"a row of {write['values_per_row']} samples", f"{write['ns_per_row']} ns", f"{write['bytes_per_row']} bytes"],
    ]
    yield from table(["written", "CPU time", "size"], rows)
    yield f"\nLive tail, nobody calling flush: {tail['p50_ms']} ms median, {tail['p99_ms']} ms at the 99th percentile."
    yield f"{kill['num_rounds']} processes killed at random moments: {kill['acknowledged_lost']} of "
    yield f"{kill['acknowledged']} acknowledged events lost."


def statistics_cpu(results: dict[str, Any]) -> Iterator[str]:
    """Statistics of all gradients of a small model."""
    yield "\n## Statistics of gradients on a CPU\n"
    yield "39 tensors, 3.9 M elements, one thread.\n"
    rows = [[name, f"{found['ms']:.2f}", ratio(found["times_numpy"])] for name, found in results.items()]
    yield from table(["way", "ms", "times the numpy way"], rows)


def kernels_gpu(results: dict[str, Any]) -> Iterator[str]:
    """The kernel beside torch's own ways."""
    yield f"\n## Statistics of gradients on {results['name']}\n"
    goals = results["goals"]
    yield "Times by events of the device. From the call on, what the host takes before the launch counts; behind other"
    yield "work of the device, as at the end of a backward pass, it does not. Goals:"
    yield (
        f"{goals['copy_bandwidth']:.0%} of the copy bandwidth, {goals['foreach']:g} times torch._foreach, "
        f"{goals['compile']:g} times torch.compile.\n"
    )
    rows = []
    for dtype in ("float32", "bfloat16"):
        found = results[dtype]
        rows.append(
            [
                f"{dtype}, {found['gigabytes']} GB",
                f"{found['kernel, ahead']['ms']:.3f}",
                ratio(found["kernel, ahead"]["share_of_copy_bandwidth"]),
                f"{found['kernel']['ms']:.3f}",
                ratio(found["kernel"]["share_of_copy_bandwidth"]),
                ratio(found["foreach"]["times_the_kernel"]),
                ratio(found["compile"]["times_the_kernel"]),
            ]
        )
    heads = ["gradients", "behind other work, ms", "of copy bandwidth", "from the call on, ms", "of copy bandwidth"]
    yield from table([*heads, "torch._foreach", "torch.compile"], rows)
    recorded = ratio(results["recording"]["recorded"])
    yield f"\nA recorded step of the tiny trainer (d=64) takes {recorded} times a plain one there."


def scale(results: dict[str, Any]) -> Iterator[str]:
    """A long run, judged."""
    size = f"{results['ranks']} ranks x {results['steps']} steps x {results['microbatches']} microbatches"
    yield f"\n## Judging {results['contributions']:,} contributions\n"
    yield f"{size}, steps in columns, {results['trace_bytes'] / 1e9:.2f} GB. Interpreter start and imports not counted;"
    rounds = next(iter(results["engines"].values()))["times_read"]["num_rounds"]
    goals = results["goals"]
    yield f"goals: {goals['times_read']:g} times the read, {goals['mib']:g} MiB. Rounds: {rounds}.\n"
    rows = [
        [name, f"{of['cpu_s']:.2f}", ratio(of["times_read"]), f"{of['ns_per_contribution']}", str(of["peak_mib"])]
        for name, of in results["engines"].items()
    ]
    yield from table(["engine", "CPU s", "times the bare read", "ns a contribution", "peak MiB"], rows)


def start(results: dict[str, Any]) -> Iterator[str]:
    """Commands, and the .pth file."""
    yield "\n## Starting\n"
    rows = [
        [name, f"{of['ms']:.1f}", ratio(of["ratio"]), f"{of['goal']:g}" if of["goal"] else ""]
        for name, of in results["commands"].items()
    ]
    yield from table(["process", "CPU ms", "times a bare Python", "goal"], rows)
    yield f"\nThe `.pth` file costs every Python without the variable {results['pth_us']} us (goal: below 1000)."


def scenario(results: dict[str, Any]) -> Iterator[str]:
    """A bug reproduced, with all its variants."""
    yield "\n## Reproducing a bug\n"
    yield f"Wall time from start to exit, all variants trained and judged; goal {results['goal']:g}.\n"
    rows = [[f"`{name}`", f"{of['wall_s']:.2f}", ratio(of["ratio"])] for name, of in results["commands"].items()]
    yield from table(["process", "wall s", "times `import torch.distributed`"], rows)


def scenarios(results: dict[str, Any]) -> Iterator[str]:
    """Every scenario's variants, real processes."""
    rows = results["rows"]
    right = sum(row["as_expected"] for row in rows)
    yield "\n## Detection in the scenario library\n"
    yield f"{right} of {len(rows)} variants of {len({row['scenario'] for row in rows})} scenarios are judged as their "
    yield "files say, trained on real processes; faulty ones with code, factor and culprit, healthy ones as clean.\n"
    cells = [
        [row["scenario"], row["variant"], row["found"] or "could not run", row["factor"],
         "yes" if row["as_expected"] else f"**no**: {row['note']}"]
        for row in rows
    ]  # fmt: skip
    yield from table(
        ["scenario", "variant", "found", "factor", "as its file says"], [list(map(cell, of)) for of in cells]
    )


def matrix(results: dict[str, Any]) -> Iterator[str]:
    """Correct configurations, real processes."""
    rows = results["rows"]
    verdicts = Counter(row["verdict"] or "could not run" for row in rows)
    off = [abs(row["grad_norm"] / row["control_norm"] - 1) for row in rows if row["grad_norm"] and row["control_norm"]]
    yield "\n## False alarms on correct configurations\n"
    yield f"{len(rows)} correct configurations of every axis, trained on real processes: "
    yield ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common()) + "."
    if off:
        yield f"Their gradient norm differs from that of one process by at most {max(off):.1e}."
    wrong = [[cell(row["name"]), cell(row["note"])] for row in rows if row["note"]]
    if wrong:
        yield ""
        yield from table(["not as it should be", "why"], wrong)


def cell(text: str) -> str:
    """Text that does not break a table."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def reports(results: dict[str, Any]) -> Iterator[str]:
    """Sizes and times of reports."""
    yield "\n## Reports\n"
    rows = [
        [f"{of['weights']:,}", name, f"{of['kb']:,.1f}", f"{of['ms']:.1f}"]
        for formats in results.values()
        for name, of in formats.items()
    ]
    yield from table(["weights in it", "format", "kB", "CPU ms"], rows)


def detection(results: dict[str, Any]) -> Iterator[str]:
    """Random trainers of which the truth is known."""
    yield "\n## Detection on simulated trainers\n"
    yield "`accused`: a finding where nothing is wrong, or one too many; `missed`: none where something is;"
    yield "`undetermined`: no verdict; `culprit` and `name`: share of the faulty ones with the right event,"
    yield "and with the right rule too.\n"

    def share(value: float | None) -> str:
        return "" if value is None else f"{value:.1%}"

    rows = [
        [name, *(str(of[key]) for key in ("runs", "accused", "missed", "undetermined")), share(of["culprit"]),
         share(of["name"])]
        for name, of in results["families"].items()
    ]  # fmt: skip
    yield from table(["family", "trainers", "accused", "missed", "undetermined", "culprit", "name"], rows)


def ranks(results: dict[str, Any]) -> Iterator[str]:
    """Worlds of many ranks."""
    yield "\n## Judging a sampled step of many ranks\n"
    yield f"FSDP over all ranks, {results['accumulation']} accumulation steps, {results['num_params']} parameters of 96"
    yield "samples each, simulated. Weights are those of every contribution on every rank; CPU time of judging alone.\n"
    rows = [
        [str(row["ranks"]), f"{row['weights']:,}", row["loss"], f"{row['verdict']} {' '.join(row['codes'])}".strip(),
         f"{row['observed']} of {results['num_params']}", f"{row['cpu_s']:.1f}", str(row["peak_mib"])]
        for row in results["rows"]
    ]  # fmt: skip
    yield from table(["ranks", "weights", "loss", "verdict", "observed", "CPU s", "peak MiB"], rows)


def tui(results: dict[str, Any]) -> Iterator[str]:
    """The screens."""
    first, frames, live, opening = (results[name] for name in ("first_frame", "frames", "live", "opening"))
    stream = f"{live['events_per_s']:,} events/s of {live['ranks']} ranks"
    large = f"{opening['ranks']} ranks x {opening['steps']} steps, {opening['gigabytes']} GB"
    yield "\n## The screens\n"
    rows = [
        ["first frame, times an empty Textual app", ratio(first["times_empty"]), "2"],
        [f"page down on a map of {frames['cells']:,} cells, ms", frames["page_down_ms"], "10"],
        ["one column to the right, ms", frames["column_ms"], "10"],
        ["another slice, ms", frames["slice_ms"], "10"],
        ["a slice of merged cells, ms", frames["slice_merged_ms"], "10"],
        [f"event to paint at {stream}, median ms", live["p50_ms"], "60"],
        ["the same at the 99th percentile, ms", live["p99_ms"], "250"],
        ["the screens' share of a core meanwhile", f"{live['cpu_share_of_a_core']:.2f}", "0.25"],
        ["events shown of those written", f"{live['shown']:,} of {live['written']:,}", "all"],
        [f"all ranks of {large} on the screen, wall s", f"{opening['wall_s']} (CPU {opening['cpu_s']})", "3"],
    ]
    yield from table(["what", "measured", "goal"], [[str(cell) for cell in row] for row in rows])
    yield f"\nA key costs {frames['harness_ms']} ms in the test harness alone, contained above, as are the"
    yield f"terminal's bytes. Load average {live['load_average']} during the live part: its latencies are wall clock."


SECTIONS = {
    "overhead_4": overhead,
    "overhead_tiny": overhead,
    "overhead_FSDP2": overhead,
    "overhead_pipeline": overhead,
    "trace": trace,
    "statistics_cpu": statistics_cpu,
    "kernels_gpu": kernels_gpu,
    "scale_1e6": scale,
    "scale_1e7": scale,
    "scale_65.5e6": scale,
    "start": start,
    "scenario": scenario,
    "tui": tui,
    "reports": reports,
    "scenarios": scenarios,
    "matrix": matrix,
    "ranks": ranks,
    "detection": detection,
}


def page() -> str:
    """The whole page; what was not measured is left out."""
    lines = [HEAD]
    for name, section in SECTIONS.items():
        path = RESULTS / f"{name}.json"
        if path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
            machine = document["machine"]
            lines += section(document["results"])
            lines.append(
                f"\n{machine['cpu']}, {machine['num_cores']} cores, load {machine['load_average_1_min']} at the end; "
                f"Python {machine['python']}, torch {machine['torch']}"
                + (f"; measured at commit {document['commit']}." if document.get("commit") else ".")
            )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE.relative_to(Path.cwd()) if PAGE.is_relative_to(Path.cwd()) else PAGE}")
