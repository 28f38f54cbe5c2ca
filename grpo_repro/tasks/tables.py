"""Rows of a data set: a file or folder of this machine, or a name on the Hugging Face hub, through `datasets`.

What came from the hub is kept as parquet in the cache and read from there afterwards, without asking the hub again. Where the hub
cannot be reached, that is said after a few seconds.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from grpo_repro import paths
from grpo_repro.types import UserError

Rows = list[tuple[str, dict[str, Any]]]  # (where the row is, for messages; the row)

KINDS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
PARTS = ("train", "test")
SECONDS = 5.0  # that the hub has to answer


def read(path: str, config: str | None, columns: Sequence[str]) -> dict[str, Rows]:
    """{"train": rows} and, where there are any, "test": rows. `config` is the hub's name for a variant of the data set.

    A folder holds train.jsonl or train*.parquet (there or below), and perhaps test… beside it. Raises UserError where nothing is
    found or can be read, for an empty file, and for one that lacks one of the `columns`.
    """
    place = Path(path).expanduser()
    if place.exists():
        return _local(_files(place), columns)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", path) or place.suffix in KINDS:
        raise UserError(f"task.path: there is no file or folder {path!r}; give one, or a name on the hub such as openai/gsm8k.")
    kept = paths.cache() / "datasets" / "--".join([*path.split("/"), *([config] if config else [])])
    if not (kept / "train.parquet").is_file():
        _fetch(path, config, kept)
    return _local(_files(kept), columns)


def _files(place: Path) -> dict[str, list[Path]]:
    if place.is_file():
        if place.suffix not in KINDS:
            raise UserError(f"task.path: {place} is not one of {', '.join(KINDS)}: convert it.")
        return {"train": [place]}
    found = {part: sorted(p for p in place.rglob(f"{part}*") if p.suffix in KINDS and p.is_file()) for part in PARTS}
    if not found["train"]:
        raise UserError(f"task.path: {place} holds no train.jsonl and no train.parquet, there or below: name its files so.")
    for files in found.values():
        if len({p.suffix for p in files}) > 1:
            raise UserError(f"task.path: {place} holds {files[0].name} and {files[-1].name}: keep files of one kind for a part.")
    return {part: files for part, files in found.items() if files}


def _local(files: Mapping[str, Sequence[Path]], columns: Sequence[str]) -> dict[str, Rows]:
    return {part: [row for path in of_part for row in _rows(path, columns)] for part, of_part in files.items()}


def _rows(path: Path, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    import datasets
    import pyarrow
    import pyarrow.parquet

    if not path.stat().st_size:
        raise UserError(f"{path}: is empty; it must hold a row a problem.")
    datasets.disable_progress_bars()
    cache = str(paths.cache() / "datasets")
    try:
        if KINDS[path.suffix] == "parquet" and not pyarrow.parquet.read_metadata(path).num_rows:
            raise UserError(f"{path}: holds no rows; it must hold a row a problem.")
        table = datasets.load_dataset(KINDS[path.suffix], data_files=str(path), split="train", cache_dir=cache)
    except (OSError, ValueError, TypeError, pyarrow.ArrowException, datasets.exceptions.DatasetsError) as error:
        told = str(error.__cause__ or error).splitlines()[0][:200]
        raise UserError(f"{path}: cannot be read as {KINDS[path.suffix]} ({told}): correct the file.") from None
    if missing := [column for column in columns if column not in table.column_names]:
        raise UserError(f"{path}: has no column {missing[0]!r}, only {', '.join(table.column_names)}: rename or add it.")
    return ((f"{path}, row {i + 1}", dict(row)) for i, row in enumerate(table))


def _fetch(path: str, config: str | None, kept: Path) -> None:
    """Copy a data set of the hub into the cache; train.parquet comes last, so that it says that the rest is whole."""
    import datasets
    import huggingface_hub

    datasets.disable_progress_bars()
    try:
        huggingface_hub.HfApi().dataset_info(path, timeout=SECONDS)  # one question: `datasets` would repeat it for half a minute
        loaded = datasets.load_dataset(path, config, cache_dir=str(paths.cache() / "datasets"))
    except Exception as error:  # whatever the network makes of it: there is no list of what can go wrong
        told = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}" if str(error) else type(error).__name__
        raise UserError(
            f"task.path: {path!r} could not be read from the Hugging Face hub ({told}), and no copy of it is here: go online, or give a "
            "local file or folder (JSONL or parquet) as `path`."
        ) from None
    paths.writable(kept)
    parts = [part for part in reversed(PARTS) if part in loaded]
    if "train" not in parts:
        raise UserError(
            f"task.path: {path!r} has the parts {', '.join(loaded)}, and none is called train: save it as a local file."
        )
    for part in parts:
        scratch = kept / f".{part}.parquet"
        loaded[part].to_parquet(str(scratch))
        scratch.replace(kept / f"{part}.parquet")
