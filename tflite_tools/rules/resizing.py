"""Gradients of resized images.

A row of a resized image is a weighted sum of rows of the image, and a column one of columns. So its
gradient is two products with matrices that are known at export.
"""

from __future__ import annotations

import math

import numpy as np
import tensorflow as tf

from tflite_tools.rules.registry import attribute, register


@register("ResizeBilinearGrad")
def bilinear(op: tf.Operation, dy: tf.Tensor, x: tf.Tensor) -> tf.Tensor:
    """Each row is of its two neighbours, by how near they are."""

    def matrix(size: int, resized: int) -> np.ndarray:
        at = _positions(op, size, resized)
        below = np.floor(at)
        weight = at - below
        rows = np.arange(resized)
        weights = np.zeros((resized, size), np.float32)
        np.add.at(weights, (rows, np.maximum(below, 0).astype(int)), 1 - weight)
        np.add.at(weights, (rows, np.minimum(np.ceil(at), size - 1).astype(int)), weight)
        return weights

    sizes = zip(x.shape[1:3], dy.shape[1:3], strict=True)
    return _weighted(dy, *(matrix(*size) for size in sizes))


@register("ResizeNearestNeighborGrad")
def nearest(op: tf.Operation, dy: tf.Tensor, size: tf.Tensor) -> tf.Tensor:
    """Each row is one of the image."""

    def matrix(size: int, resized: int) -> np.ndarray:
        at = _positions(op, size, resized, middle=0.0)
        # Away from zero at .5, as TensorFlow rounds.
        chosen = (
            np.floor(at.astype(np.float64) + 0.5)
            if attribute(op, "align_corners")
            else np.floor(at)
        )
        return np.eye(size, dtype=np.float32)[np.clip(chosen, 0, size - 1).astype(int)]

    sizes = zip(map(int, tf.get_static_value(size)), dy.shape[1:3], strict=True)
    return _weighted(dy, *(matrix(*size) for size in sizes))


def _positions(op: tf.Operation, size: int, resized: int, middle: float = 0.5) -> np.ndarray:
    """Where in the image each row of the resized one lies, in TensorFlow's own float32."""
    corners = attribute(op, "align_corners") and resized > 1
    scale = np.float32((size - 1) / (resized - 1) if corners else size / resized)
    rows = np.arange(resized, dtype=np.float32)
    if attribute(op, "half_pixel_centers"):
        return (rows + np.float32(0.5)) * scale - np.float32(middle)
    return rows * scale


def _weighted(dy: tf.Tensor, of_rows: np.ndarray, of_columns: np.ndarray) -> tf.Tensor:
    """`of_rows`, transposed, times the rows, and the same of the columns."""
    turn = [0, 2, 3, 1]  # what is multiplied comes last; three turns are none
    x = dy
    for weights in (of_rows, of_columns):
        x = tf.transpose(x, turn)
        *around, rows = x.shape
        flat = tf.reshape(x, [math.prod(around), rows])
        x = tf.reshape(tf.matmul(flat, weights), [*around, weights.shape[1]])
    return tf.transpose(x, turn)
