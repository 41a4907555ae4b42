"""One Parquet file a table; units and meanings stand in the metadata of the columns."""

from __future__ import annotations

from pathlib import Path

from gradcheck_dist.diagnosis.finding import Report
from gradcheck_dist.errors import GradcheckError
from gradcheck_dist.reports.tables import COLUMNS, table
from gradcheck_dist.trace.run import Run


def write(report: Report, run: Run | None, output: Path) -> list[Path]:
    """Write the tables into the folder `output`.

    Raises:
        GradcheckError: E706 pyarrow is not installed.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise GradcheckError(
            "Parquet needs pyarrow, which is not installed: `pip install 'gradcheck-dist[parquet]'`, or use "
            "--format csv.",
            code="E706",
        ) from error
    types = {"int": pyarrow.int64(), "float": pyarrow.float64(), "str": pyarrow.string(), "bool": pyarrow.bool_()}
    output.mkdir(parents=True, exist_ok=True)
    written = []
    for name, columns in COLUMNS.items():
        rows = table(name, report, run).rows
        values = list(zip(*rows, strict=True)) or [()] * len(columns)
        fields = [
            pyarrow.field(one.name, types[one.kind], metadata={"unit": one.unit, "meaning": one.meaning})
            for one in columns
        ]
        arrays = [
            pyarrow.array(_clean(column, one.kind), type=types[one.kind])
            for column, one in zip(values, columns, strict=True)
        ]
        path = output / f"{name}.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_arrays(arrays, schema=pyarrow.schema(fields)), path)
        written.append(path)
    return written


def _clean(values: tuple[object, ...], kind: str) -> list[object]:
    """Lone surrogates cannot be written as UTF-8."""
    if kind != "str":
        return list(values)
    return [value.encode(errors="backslashreplace").decode() if isinstance(value, str) else None for value in values]
