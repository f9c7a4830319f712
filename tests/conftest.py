"""What every test starts from: quiet TensorFlow, fixed seeds, deterministic operations."""

import os
import warnings

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")

import keras
import pytest
import tensorflow as tf

from bittrain_tf import native

with warnings.catch_warnings():
    # Where there is no compiler, that is for tests/test_native_build.py to check.
    warnings.simplefilter("ignore", RuntimeWarning)
    native.available()

keras.utils.set_random_seed(0)  # TensorFlow wants a seed before it promises determinism.
tf.config.experimental.enable_op_determinism()


@pytest.fixture(autouse=True)
def fixed_seed():
    keras.utils.set_random_seed(0)


@pytest.fixture(params=["native", "tensorflow"])
def backend(request, monkeypatch):
    """Run the test with the native kernels and with TensorFlow operations in their place."""
    if request.param == "tensorflow":
        monkeypatch.setattr(native, "available", lambda: False)
    elif not native.available():
        pytest.skip(f"no native kernels: {native.native().detail}")
    return request.param


@pytest.fixture
def plain_graphs():
    """Graphs are run as they were traced."""
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    tf.config.optimizer.set_experimental_options(
        {"disable_meta_optimizer": before.get("disable_meta_optimizer", False)}
    )
