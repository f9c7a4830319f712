"""What every test starts from: quiet TensorFlow, fixed seeds, deterministic operations."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

keras.utils.set_random_seed(0)  # TensorFlow wants a seed before it promises determinism.
tf.config.experimental.enable_op_determinism()


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)
