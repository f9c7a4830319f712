"""What the model's own activations take in each format of sparse tensors.

Every tensor is really encoded, and the bytes of the arrays that come out are counted.
Not counted is the shape, which any format needs, dense too. All formats see the bits
as integers, so that zero means all bits zero for each of them, as for the bitmap codec.

For `n` elements of `b` bytes, rank `r`, of which a share `d` is not zero, dense takes `n b`
bytes. The others take fewer if `d` is below their break-even:

* COO, int64: a value and `r` indices of 8 bytes for each non-zero. `d n (8 r + b)` bytes,
  break-even `b / (8 r + b)`.
* COO, int32: the same with indices of 4 bytes. `d n (4 r + b)` bytes, `b / (4 r + b)`.
* CSR: a value and a column of 4 bytes for each non-zero, and where each of `m` rows begins.
  `d n (4 + b) + 4 (m + 1)` bytes, `(b - 4 (m + 1) / n) / (4 + b)`. The rows are the samples,
  flattened.
* bitmap: a value for each non-zero, and a bit for each element. `d n b + n / 8` bytes,
  `1 - 1 / (8 b)`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from bittrain_tf.analysis.audit import kept_tensors
from bittrain_tf.analysis.kept import DENSE as KEPT_DENSE
from bittrain_tf.analysis.text import size_text
from bittrain_tf.codecs import get_codec
from bittrain_tf.investigation.grid import Grid
from bittrain_tf.investigation.probe import Probe

DENSE, COO_64, COO_32, CSR, BITMAP = "dense", "COO, int64", "COO, int32", "CSR", "bitmap"
_INTEGERS = {2: tf.int16, 4: tf.int32, 8: tf.int64}
_MOST_SAMPLES = 8  # indices of all elements of a large batch would take gigabytes


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """One tensor in each format.

    Attributes:
        layer: The layer that made it.
        shape: Its shape, samples first.
        dtype: Its dtype, by name.
        density: The share of its elements that is not zero.
        nbytes: Its bytes by format.
    """

    layer: str
    shape: tuple[int, ...]
    dtype: str
    density: float
    nbytes: dict[str, int]


@dataclasses.dataclass(frozen=True)
class FormatTotal:
    """All tensors in one format.

    Attributes:
        format: Its name.
        nbytes: Bytes, every tensor in that format.
        or_dense: Bytes, every tensor in that format or dense, whichever is smaller.
        smaller: How many tensors it makes smaller.
    """

    format: str
    nbytes: int
    or_dense: int
    smaller: int


@dataclasses.dataclass(frozen=True)
class Formats:
    """The floating-point tensors that the stock model keeps, in each format.

    Attributes:
        batch_size: Samples.
        tensors: The tensors, in the order of the forward pass.
    """

    batch_size: int
    tensors: tuple[StoredTensor, ...]

    @property
    def totals(self) -> tuple[FormatTotal, ...]:
        """The sums, by format."""
        return tuple(
            FormatTotal(
                name,
                sum(t.nbytes[name] for t in self.tensors),
                sum(min(t.nbytes[name], t.nbytes[DENSE]) for t in self.tensors),
                sum(t.nbytes[name] < t.nbytes[DENSE] for t in self.tensors),
            )
            for name in ENCODERS
        )

    def to_dict(self) -> dict[str, Any]:
        """Everything, in types that JSON has."""
        return {
            **dataclasses.asdict(self),
            "totals": [dataclasses.asdict(total) for total in self.totals],
        }

    @property
    def grids(self) -> tuple[Grid, ...]:
        """The totals, and the densities at which formats break even."""
        dense = self.totals[0].nbytes
        numeric = ("bytes", "of dense", "where smaller only", "of dense ", "tensors made smaller")
        rows = (
            (
                total.format,
                size_text(total.nbytes),
                f"{total.nbytes / dense:.2f}",
                size_text(total.or_dense),
                f"{total.or_dense / dense:.2f}",
                f"{total.smaller} of {len(self.tensors)}",
            )
            for total in self.totals
        )
        title = f"Activations kept by the stock model in each format, batch {self.batch_size}"
        totals = Grid(title, ("format", *numeric), tuple(rows), numeric)
        return totals, self._break_evens()

    def _break_evens(self) -> Grid:
        """For the largest tensor of each rank and dtype."""
        largest: dict[tuple[str, int], StoredTensor] = {}
        for tensor in sorted(self.tensors, key=lambda t: t.nbytes[DENSE]):
            largest[tensor.dtype, len(tensor.shape)] = tensor
        shown = [largest[key] for key in sorted(largest)]
        columns = tuple(f"{t.dtype}, {'x'.join(map(str, t.shape))}" for t in shown)
        rows = tuple(
            (name, *(f"{break_even(name, t.shape, tf.as_dtype(t.dtype).size):.3f}" for t in shown))
            for name in ENCODERS
            if name != DENSE
        )
        return Grid("Density below which a format is smaller", ("format", *columns), rows, columns)


def formats_side_by_side(probe: Probe, batch_size: int) -> Formats:
    """Encode what the stock model keeps of up to 8 samples in every format.

    Raises:
        ValueError: If no tensor worth encoding is kept.
    """
    size = min(batch_size, _MOST_SAMPLES)
    with probe.stock():
        tensors = kept_tensors(probe.model, *probe.batch(size))
    stored = [
        stored_tensor(row.layer, tensor)
        for row, tensor in tensors
        if row.kind == KEPT_DENSE and tensor.dtype.is_floating
    ]
    if not stored:
        raise ValueError(
            "The stock model keeps no floating-point activation of 1 KB or more for its "
            "backward pass."
        )
    return Formats(size, tuple(stored))


def stored_tensor(layer: str, x: tf.Tensor) -> StoredTensor:
    """A floating-point tensor, encoded in each format.

    Args:
        layer: The layer that made it.
        x: The tensor, samples first.
    """
    bits = tf.bitcast(x, _INTEGERS[x.dtype.size])
    nonzero = np.count_nonzero(bits.numpy())
    return StoredTensor(
        layer,
        tuple(x.shape),
        x.dtype.name,
        nonzero / max(1, bits.numpy().size),
        {name: sum(part.nbytes for part in encode(x, bits)) for name, encode in ENCODERS.items()},
    )


def _dense(x: tf.Tensor, bits: tf.Tensor) -> list[np.ndarray]:
    return [bits.numpy()]


def _coo_64(x: tf.Tensor, bits: tf.Tensor) -> list[np.ndarray]:
    encoded = tf.sparse.from_dense(bits)
    return [encoded.indices.numpy(), encoded.values.numpy()]


def _coo_32(x: tf.Tensor, bits: tf.Tensor) -> list[np.ndarray]:
    encoded = tf.sparse.from_dense(bits)
    return [tf.cast(encoded.indices, tf.int32).numpy(), encoded.values.numpy()]


def _csr(x: tf.Tensor, bits: tf.Tensor) -> list[np.ndarray]:
    import scipy.sparse

    array = bits.numpy()
    encoded = scipy.sparse.csr_array(array.reshape(_csr_rows(array.shape), -1))
    return [encoded.data, encoded.indices, encoded.indptr]


def _bitmap(x: tf.Tensor, bits: tf.Tensor) -> list[np.ndarray]:
    return [part.numpy() for part in get_codec("bitmap").encode(x)]


ENCODERS: dict[str, Callable[[tf.Tensor, tf.Tensor], list[np.ndarray]]] = {
    DENSE: _dense,
    COO_64: _coo_64,
    COO_32: _coo_32,
    CSR: _csr,
    BITMAP: _bitmap,
}


def break_even(name: str, shape: tuple[int, ...], element_bytes: int) -> float:
    """The density below which a format takes fewer bytes than dense; see the module.

    Args:
        name: The format.
        shape: Shape of the tensor, samples first.
        element_bytes: Bytes of an element.
    """
    rank, size = len(shape), math.prod(shape)
    row_starts = 4 * (_csr_rows(shape) + 1) / size
    return {
        DENSE: 1.0,
        COO_64: element_bytes / (8 * rank + element_bytes),
        COO_32: element_bytes / (4 * rank + element_bytes),
        CSR: (element_bytes - row_starts) / (4 + element_bytes),
        BITMAP: 1 - 1 / (8 * element_bytes),
    }[name]


def _csr_rows(shape: tuple[int, ...]) -> int:
    return shape[0] if len(shape) > 1 else 1
