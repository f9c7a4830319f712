"""Windows that slide over images: what a convolution's and a pooling's gradients share."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import tensorflow as tf

from tflite_tools.rules.registry import attribute


class Windows:
    """Where the windows of one operation lie; sizes in rows and columns.

    Attributes:
        size: Of the image.
        count: How many windows.
        kernel: Of a window.
        stride: From one to the next.
        dilation: Between the rows and columns of one.
        before: How many rows and columns of padding before the image.
    """

    def __init__(
        self, op: tf.Operation, size: list[int], count: list[int], kernel: list[int]
    ) -> None:
        check_channels_last(op)
        self.size, self.count, self.kernel = size, count, kernel
        self.stride = list(attribute(op, "strides"))[1:3]
        has_dilations = "dilations" in op.node_def.attr
        self.dilation = list(attribute(op, "dilations"))[1:3] if has_dilations else [1, 1]
        if attribute(op, "padding") == "EXPLICIT":
            self.before = list(attribute(op, "explicit_paddings"))[2:6:2]
        elif attribute(op, "padding") == "SAME":
            self.before = [max(self.reach(k) - size[k], 0) // 2 for k in (0, 1)]
        else:
            self.before = [0, 0]

    def reach(self, axis: int) -> int:
        """From the first row of the first window to the last of the last."""
        window = (self.kernel[axis] - 1) * self.dilation[axis] + 1
        return (self.count[axis] - 1) * self.stride[axis] + window

    def pad(self, x: tf.Tensor, value: float = 0.0) -> tf.Tensor:
        """The images, padded and cut to what the windows reach."""
        return fit(x, [-n for n in self.before], [self.reach(0), self.reach(1)], value)

    def tap(self, padded: tf.Tensor, i: int, j: int) -> tf.Tensor:
        """What the windows have at their row `i` and column `j`."""
        if self.stride == [1, 1] and self.kernel == [1, 1]:
            return padded
        start = [i * self.dilation[0], j * self.dilation[1]]
        stop = [
            s + (n - 1) * step + 1
            for s, n, step in zip(start, self.count, self.stride, strict=True)
        ]
        return padded[:, start[0] : stop[0] : self.stride[0], start[1] : stop[1] : self.stride[1]]

    def spread(self, tap: Callable[[int, int], tf.Tensor]) -> tf.Tensor:
        """The sum of all windows laid where they lie: the reverse of taking taps.

        Rows that are a stride apart make one phase, in which neighbouring windows are neighbours;
        the phases are sums of a few shifted tensors, and interleaved at the end.

        Args:
            tap: `tap(i, j)` is what the windows have at their row `i` and column `j`, of shape
                `[batch, *count, channels]`; asked for in order.
        """
        rows, columns = self.stride
        cells = [-(-self.reach(k) // self.stride[k]) for k in (0, 1)]
        phases: dict[tuple[int, int], tf.Tensor] = {}
        for i in range(self.kernel[0]):
            for j in range(self.kernel[1]):
                at = i * self.dilation[0], j * self.dilation[1]
                shift = at[0] // rows, at[1] // columns
                paddings = [[shift[k], cells[k] - self.count[k] - shift[k]] for k in (0, 1)]
                part = tap(i, j)
                if np.any(paddings):
                    part = tf.pad(part, [[0, 0], *paddings, [0, 0]])
                phase = at[0] % rows, at[1] % columns
                phases[phase] = phases[phase] + part if phase in phases else part
        some = next(iter(phases.values()))
        zeros = tf.zeros(some.shape, some.dtype)
        every = [phases.get((i, j), zeros) for i in range(rows) for j in range(columns)]
        # Of the padded images, the images.
        return fit(_interleave(every, rows, columns), self.before, self.size)


def check_channels_last(op: tf.Operation) -> None:
    """Raise NotImplementedError if an operation's images have their channels first."""
    if attribute(op, "data_format") != "NHWC":
        raise NotImplementedError("images with their channels first")


def fit(x: tf.Tensor, start: list[int], size: list[int], value: float = 0.0) -> tf.Tensor:
    """`size` rows and columns of images, from those at `start` on; `value` where there are none."""
    paddings, slices = [[0, 0]], [slice(None)]
    for k in (0, 1):
        first = max(start[k], 0)
        paddings.append([first - start[k], max(start[k] + size[k] - x.shape[k + 1], 0)])
        slices.append(slice(first, first + size[k]))
    if np.any(paddings):
        x = tf.pad(x, [*paddings, [0, 0]], constant_values=value)
    return x if x.shape[1:3] == size else x[tuple(slices)]


def _interleave(phases: list[tf.Tensor], rows: int, columns: int) -> tf.Tensor:
    """`phases[i * columns + j]` at every row `i` modulo `rows`, column `j` modulo `columns`."""
    if rows == columns == 1:
        return phases[0]
    if rows == columns:
        return tf.nn.depth_to_space(tf.concat(phases, -1), rows)
    batch, height, width, channels = phases[0].shape
    # Columns first: [B, H, W, columns, C], then rows of that.
    lines = [
        tf.reshape(
            tf.stack(phases[i * columns : (i + 1) * columns], 3),
            [batch, height, 1, width * columns * channels],
        )
        for i in range(rows)
    ]
    return tf.reshape(tf.concat(lines, 2), [batch, height * rows, width * columns, channels])
