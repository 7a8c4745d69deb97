"""Hidden states of the frozen target for training sequences: computed online, or read from disk.

Shapes: see drafters/blocks.py; W is the C selected states and the D last ones of a token, P all
layers' keys and values of it.
"""

from __future__ import annotations

import hashlib
import json
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import pyarrow as pa
import torch

from carryover.durable import replacing, write_whole
from carryover.errors import DataError, EnvironmentProblem
from carryover.training.verification import Prefix, PrefixShapes, read_target

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from carryover.targets import Target
    from carryover.training.packing import Corpus

ROWS_PER_PART = 64
_ROWS_AT_ONCE = 8
_DISK_RESERVE_BYTES = 1 << 30
_PREFIX_SHAPES = b"carryover.prefix_shapes"


@dataclass(frozen=True)
class States:
    """The target's states of some rows' sequences, one after another.

    Attributes:
        hidden_TC: the selected layers' states, concatenated.
        last_hidden_TD: input of the final norm.
        prefix: keys and values of all layers, if the source keeps them.
    """

    hidden_TC: torch.Tensor
    last_hidden_TD: torch.Tensor
    prefix: Prefix | None = None


class StateSource(Protocol):
    """Gives the target's states for rows of the corpus."""

    def states(self, rows: Sequence[int]) -> States:
        """States of these rows' sequences, which do not see each other."""
        ...


class OnlineStates:
    """Runs the target on a pack of sequences at once.

    Args:
        model: the frozen target.
        layer_ids: which layers' states are concatenated, in this order.
        corpus: the rows.
        keep_prefix: keep the keys and values of all layers too, for verification.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        layer_ids: Sequence[int],
        corpus: Corpus,
        keep_prefix: bool = False,
    ) -> None:
        self._model = model
        self._layer_ids = tuple(layer_ids)
        self._corpus = corpus
        self._keep_prefix = keep_prefix

    def states(self, rows: Sequence[int]) -> States:
        """States of these rows' sequences, which do not see each other."""
        documents = [self._corpus.sequence(int(row)).input_ids_T for row in rows]
        positions = [np.arange(len(document)) for document in documents]
        device = next(self._model.parameters()).device
        found, prefix = read_target(
            self._model,
            input_ids_T=torch.from_numpy(np.concatenate(documents).astype(np.int64)).to(device),
            position_ids_T=torch.from_numpy(np.concatenate(positions)).to(device),
            layer_ids=self._layer_ids,
        )
        kept = prefix if self._keep_prefix else None
        return States(found.hidden_NC, found.last_hidden_ND, kept)


def weights_fingerprint(target: Target) -> list:
    """Tells one version of a target's weights from another, without reading them.

    Size and modification time of a local folder's files; the commit of a hub model.
    """
    folder = Path(target.path)
    if folder.is_dir():
        stats = [(path.name, path.stat()) for path in sorted(folder.glob("*.safetensors"))]
        return [[name, stat.st_size, stat.st_mtime_ns] for name, stat in stats]
    return [target.path, getattr(target.load_config(), "_commit_hash", None)]


class StateCache:
    """States of all rows of a corpus on disk, as Arrow files that are mapped into memory.

    The files belong to one target, layer choice, data and type: the folder's name is a hash of
    them. Each part holds up to 64 rows and appears at once, by renaming, so an interrupted build
    continues where it stopped.

    Args:
        folder: parent folder of all caches.
        corpus: the rows.
        rows: which of them are kept.
        identity: `Target.identity()`.
        weights: from `weights_fingerprint`.
        layer_ids: which layers' states are concatenated, in this order.
        compute_dtype: what the target computes in.
        dtype: what is stored.
        prefix_width: keep every layer's keys and values too, about so many numbers a token; None
            does not.
        read_prefix: give them; to leave them on disk makes `states` cheaper.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        corpus: Corpus,
        rows: np.ndarray,
        identity: dict,
        weights: list,
        layer_ids: Sequence[int],
        compute_dtype: str,
        dtype: str,
        prefix_width: int | None = None,
        read_prefix: bool = True,
    ) -> None:
        key = {
            "format": 1,
            "target": {name: value for name, value in identity.items() if name != "name"},
            "weights": weights,
            "layer_ids": list(layer_ids),
            "compute_dtype": compute_dtype,
            "dtype": dtype,
            "data_sha256": corpus.sha256(rows),
        }
        if prefix_width is not None:
            key["prefix"] = True
        digest = hashlib.sha256(json.dumps(key, sort_keys=True).encode()).hexdigest()
        self.folder = Path(folder) / digest[:24]
        self._key = key
        self._corpus = corpus
        self._rows = np.asarray(rows)
        self._place_of = {int(row): place for place, row in enumerate(self._rows)}
        self._hidden_size = identity["hidden_size"]
        self._width = (len(layer_ids) + 1) * self._hidden_size
        self._prefix_width = prefix_width or 0
        self.keeps_prefix = prefix_width is not None
        self._read_prefix = read_prefix and self.keeps_prefix
        self._dtype = getattr(torch, dtype)
        self._readers: dict[int, pa.ipc.RecordBatchFileReader] = {}

    @property
    def num_parts(self) -> int:
        return -(-len(self._rows) // ROWS_PER_PART)

    @property
    def size_bytes(self) -> int:
        """Bytes of all states, whether written yet or not."""
        return int(self._corpus.lengths(self._rows).sum()) * self._token_bytes

    @property
    def _token_bytes(self) -> int:
        return (self._width + self._prefix_width) * self._dtype.itemsize

    def missing_parts(self) -> list[int]:
        """Parts that are not on disk yet."""
        return [part for part in range(self.num_parts) if not self._part(part).exists()]

    def missing_tokens(self) -> int:
        """Tokens whose states `build` would compute."""
        rows = [self._rows_of(part) for part in self.missing_parts()]
        return sum(int(self._corpus.lengths(members).sum()) for members in rows)

    def missing_bytes(self) -> int:
        """Bytes that `build` would write."""
        return self.missing_tokens() * self._token_bytes

    def require_room(self) -> None:
        """Check that the disk holds what is missing, and a reserve of 1 GiB.

        Raises:
            EnvironmentProblem: it does not.
        """
        folder = self.folder
        while not folder.exists():
            folder = folder.parent
        free, needed = shutil.disk_usage(folder).free, self.missing_bytes()
        if needed and needed + _DISK_RESERVE_BYTES > free:
            raise EnvironmentProblem(
                f"the cache of hidden states needs {needed / 1e9:.2f} GB in {self.folder.parent} "
                f"(and 1 GiB to spare), but {free / 1e9:.2f} GB are free; set "
                f"hidden_states.cache{'_prefix=false' if self.keeps_prefix else '=none'}, or "
                "hidden_states.cache_folder to a larger disk"
            )

    def build(
        self,
        online: OnlineStates,
        *,
        parts: Iterable[int] | None = None,
        on_rows: Callable[[int], None] = lambda tokens: None,
    ) -> None:
        """Write missing parts.

        Runs that fill the same cache at once share the work: each takes the parts in an order of
        its own, and leaves those that are there by then.

        Args:
            online: computes the states.
            parts: which parts; default: all missing ones.
            on_rows: called now and then with the number of tokens done since the last call.

        Raises:
            DataError: a state is too large for the stored type, or not finite.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        description = self.folder / "cache.json"
        if not description.exists():
            write_whole(description, json.dumps(self._key, indent=2).encode())
        parts = list(self.missing_parts() if parts is None else parts)
        for part in random.sample(parts, len(parts)):
            if self._part(part).exists():
                on_rows(int(self._corpus.lengths(self._rows_of(part)).sum()))
            else:
                self._write_part(part, online, on_rows)

    def states(self, rows: Sequence[int]) -> States:
        """States of these rows' sequences, as they are on disk."""
        places = [self._place_of[int(row)] for row in rows]
        states_TW = torch.cat([self._read(place, "states", self._width) for place in places])
        split = self._width - self._hidden_size
        prefix = None
        if self._read_prefix:
            shapes = self._prefix_shapes(places[0])
            width = sum(heads * size for _, *both in shapes for heads, size in both)
            joined_TP = torch.cat([self._read(place, "prefix", width) for place in places])
            prefix = Prefix.split(joined_TP, shapes)
        return States(states_TW[:, :split], states_TW[:, split:], prefix)

    def _reader(self, part: int) -> pa.ipc.RecordBatchFileReader:
        if part not in self._readers:
            self._readers[part] = pa.ipc.open_file(pa.memory_map(str(self._part(part))))
        return self._readers[part]

    def _prefix_shapes(self, place: int) -> PrefixShapes:
        return json.loads(self._reader(place // ROWS_PER_PART).schema.metadata[_PREFIX_SHAPES])

    def _read(self, place: int, column: str, width: int) -> torch.Tensor:
        part, index = divmod(place, ROWS_PER_PART)
        stored = self._reader(part).get_batch(index).column(column)
        # torch has no read-only tensors, so the mapped bytes are copied.
        raw = np.frombuffer(stored[0].as_buffer(), dtype=np.uint8).copy()
        return torch.from_numpy(raw).view(self._dtype).view(-1, width)

    def _write_part(self, part: int, online: OnlineStates, on_rows: Callable[[int], None]) -> None:
        rows = self._rows_of(part)
        groups = np.array_split(rows, -(-len(rows) // _ROWS_AT_ONCE))
        first = online.states(groups[0])
        schema = _schema(first.prefix if self.keeps_prefix else None)
        with (
            replacing(self._part(part)) as partial,
            pa.OSFile(str(partial), "wb") as sink,
            pa.ipc.new_file(sink, schema) as writer,
        ):
            computed = chain([first], map(online.states, groups[1:]))
            for group, found in zip(groups, computed, strict=True):
                columns = [torch.cat([found.hidden_TC, found.last_hidden_TD], dim=-1)]
                if self.keeps_prefix:
                    columns.append(found.prefix.joined_TP())
                lengths = self._corpus.lengths(group).tolist()
                by_row = zip(*(column.split(lengths) for column in columns), strict=True)
                for row, values in zip(group, by_row, strict=True):
                    ids = pa.array([int(self._corpus.row_ids[row])], pa.int64())
                    stored = [
                        pa.array([self._stored(value, int(row))], pa.large_binary())
                        for value in values
                    ]
                    writer.write_batch(pa.record_batch([ids, *stored], schema=schema))
                on_rows(sum(lengths))

    def _stored(self, values_TX: torch.Tensor, row: int) -> bytes:
        converted = values_TX.to("cpu").to(self._dtype)
        if not converted.isfinite().all():
            largest = values_TX.float().abs().max().item()
            raise DataError(
                f"the target's states for row {self._corpus.row_ids[row]} reach {largest:.3g}, "
                f"which {self._key['dtype']} cannot hold; set hidden_states.cache_dtype=bfloat16"
            )
        return converted.contiguous().view(torch.uint8).numpy().tobytes()

    def _rows_of(self, part: int) -> np.ndarray:
        return self._rows[part * ROWS_PER_PART : (part + 1) * ROWS_PER_PART]

    def _part(self, part: int) -> Path:
        return self.folder / f"part-{part:06d}.arrow"


def _schema(prefix: Prefix | None) -> pa.Schema:
    """Of a part; one batch for each row."""
    names = ["states"] if prefix is None else ["states", "prefix"]
    fields = [pa.field("row_id", pa.int64()), *(pa.field(n, pa.large_binary()) for n in names)]
    shapes = {} if prefix is None else {_PREFIX_SHAPES: json.dumps(prefix.shapes()).encode()}
    return pa.schema(fields, metadata=shapes)
