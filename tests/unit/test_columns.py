"""Tables of results: columns, rows, files, and the libraries that they are handed to."""

import csv
import json
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest

from poise.lab.columns import MissingPackageError, Table, UnknownKeyError
from poise.scheduler.model.errors import RequestError

MIXED = Table(
    {"job": ["a", "b", "c"], "gpus": np.array([1, 2, 4]), "jct": np.array([1.5, np.nan, 3.0]), "app": [None, "x", None]}
)
ROWS = [
    {"job": "a", "gpus": 1, "jct": 1.5, "app": None},
    {"job": "b", "gpus": 2, "jct": None, "app": "x"},
    {"job": "c", "gpus": 4, "jct": 3.0, "app": None},
]


def test_rows_are_plain_values_and_none_where_there_is_none() -> None:
    assert MIXED.rows() == list(MIXED) == ROWS
    assert all(type(row["gpus"]) is int for row in MIXED.rows())
    assert (len(MIXED), MIXED.columns) == (3, ("job", "gpus", "jct", "app"))


def test_a_column_of_numbers_is_an_array_and_one_of_text_a_list() -> None:
    assert MIXED["gpus"].tolist() == [1, 2, 4]
    assert MIXED["job"] == ["a", "b", "c"]


def test_an_unknown_column_gets_the_nearest() -> None:
    with pytest.raises(UnknownKeyError, match=r"^unknown column 'gpu'; did you mean gpus"):
        MIXED["gpu"]
    with pytest.raises(KeyError):
        MIXED["gpu"]


def test_some_columns_and_some_rows_are_tables_again() -> None:
    assert MIXED.select("jct", "job").columns == ("jct", "job")
    assert MIXED.where(lambda row: row["gpus"] > 1).rows() == ROWS[1:]
    assert not MIXED.where(lambda row: False)


def test_columns_have_one_length() -> None:
    with pytest.raises(RequestError, match="expected columns of one length, got 1, 2"):
        Table({"a": [1], "b": [1, 2]})


def test_other_libraries_get_the_same_rows() -> None:
    assert MIXED.to_polars().rows(named=True) == ROWS
    assert MIXED.to_arrow().to_pylist() == ROWS
    assert pl.DataFrame(MIXED).rows(named=True) == ROWS
    assert pa.table(MIXED).to_pylist() == ROWS
    frame = MIXED.to_pandas()
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == list(MIXED.columns)
    assert frame["gpus"].sum() == 7
    assert frame["jct"].isna().tolist() == [False, True, False]


def test_a_table_of_no_rows_keeps_its_columns_everywhere() -> None:
    empty = MIXED.where(lambda _row: False)
    assert empty.to_pandas().columns.tolist() == empty.to_polars().columns == empty.to_arrow().column_names
    assert "[0 rows × 4 columns]" in repr(empty)
    assert "0 rows" in empty._repr_html_()


def test_a_column_without_values_is_one_of_texts_so_that_tables_can_be_stacked() -> None:
    nothing = Table({"app": [None, None]})
    assert nothing.to_polars().schema == MIXED.select("app").to_polars().schema == {"app": pl.String}
    assert nothing.to_arrow().schema == MIXED.select("app").to_arrow().schema
    assert len(pl.concat([nothing.to_polars(), MIXED.select("app").to_polars()])) == 5


@pytest.mark.parametrize(
    ("module", "use"),
    {
        "pandas": lambda table: table.to_pandas(),
        "polars": lambda table: table.to_polars(),
        "pyarrow": lambda table: table.to_arrow(),
    }.items(),
)
def test_a_library_that_is_not_there_is_one_line_that_says_what_to_install(
    module: str, use: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=rf"^to_\w+\(\) needs {module}; install it with: pip install {module}$"):
        use(MIXED)


def test_files_hold_the_rows(tmp_path: Path) -> None:
    for name in ("t.csv", "t.json", "t.parquet"):
        MIXED.write(tmp_path / name)
    assert json.loads((tmp_path / "t.json").read_text()) == ROWS
    assert pl.read_parquet(tmp_path / "t.parquet").rows(named=True) == ROWS
    with (tmp_path / "t.csv").open() as stream:
        assert [row["jct"] for row in csv.DictReader(stream)] == ["1.5", "", "3.0"]
    with pytest.raises(RequestError, match=r"t\.xlsx: expected a file that ends in \.csv, \.json or \.parquet"):
        MIXED.write(tmp_path / "t.xlsx")


def test_text_shows_all_columns_and_the_ends_of_many_rows() -> None:
    long = Table({"n": np.arange(1000), "text": ["<b>" * 20] * 1000})
    assert repr(long).splitlines()[-1] == "[1,000 rows × 2 columns]"
    assert len(repr(long).splitlines()) == 11
    assert "\n999  <b>" in repr(long)
    wide = Table({f"column_{n}": [n] for n in range(40)})
    assert all(f"column_{n}" in repr(wide) for n in range(40))
    assert max(map(len, repr(wide).splitlines())) <= 110


def test_a_notebook_shows_text_as_text() -> None:
    shown = Table({"<i>": ["<script>"]})._repr_html_()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
    assert "<th>&lt;i&gt;</th>" in shown


def test_tables_travel_between_processes() -> None:
    assert pickle.loads(pickle.dumps(MIXED)) == MIXED
