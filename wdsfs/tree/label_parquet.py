"""Lists of keys in parquet, by pyarrow: their rows, without values."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

from wdsfs.tree.label_files import LabelFile, OpenFile, Row, key_column, label_error, open_content, value_of

_BATCH = 10_000  # rows read at a time
_SHOWN = 200  # characters of pyarrow's message in ours


def read_parquet(file: LabelFile, open_file: OpenFile) -> Iterator[Row]:
    """Yield the keys of a file of parquet. Raises ViewError, ShardErrors, OSErrors."""
    pyarrow, parquet = importlib.import_module("pyarrow"), importlib.import_module("pyarrow.parquet")
    with open_content(file.path, open_file) as stream:
        try:
            with parquet.ParquetFile(stream, memory_map=False, pre_buffer=False) as table:
                column = key_column(file, table.schema_arrow.names)
                lines = 0
                for batch in table.iter_batches(_BATCH, columns=[column]):
                    for line, value in enumerate(batch.column(0).to_pylist(), lines + 1):
                        key = value_of(file, line, column, value)
                        if key is None:
                            raise label_error(file, line, f"the column {column!r} is null in this row")
                        yield key, line, {}
                    lines += len(batch)
        except pyarrow.ArrowException as error:
            raise label_error(
                file, None, f"cannot be read as parquet: {str(error).partition(chr(10))[0][:_SHOWN]}"
            ) from None
