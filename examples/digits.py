"""scikit-learn's handwritten digits, as the images the examples train on."""

import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def load(size=32, channels=1):
    """`((x_train, y_train), (x_test, y_test))`, images of `size` x `size` in [0, 1]."""
    images, labels = load_digits(return_X_y=True)
    images = images.reshape(-1, 8, 8, 1).astype(np.float32) / 16
    images = images.repeat(size // 8, axis=1).repeat(size // 8, axis=2).repeat(channels, axis=3)
    x_train, x_test, y_train, y_test = train_test_split(
        images, labels, test_size=0.2, stratify=labels, random_state=0
    )
    return (x_train, y_train), (x_test, y_test)
