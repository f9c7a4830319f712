"""What `benchmarks.accuracy` runs in child processes: one training, or all ways in turn."""

import gc
import gzip
import json
import pathlib
import resource
import statistics
import sys

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

import bittrain_tf as bt
from bittrain_tf.analysis import rss

# Of the Debian package dataset-fashion-mnist (Xiao, Rasul and Vollgraf, arXiv 1708.07747).
FASHION = "/usr/share/datasets/fashion-mnist"
_IDX_HEADER = {"images": 16, "labels": 8}

# Name of a way: None for the stock model, else arguments of ActivationPruning, if any.
NORMALIZED = "re_lu|batch_norm|hidden"
WAYS = {
    "stock": None,
    "lossless": {},
    **{f"forward {s:.0%}": {"target_sparsity": s} for s in (0.5, 0.7, 0.8, 0.9)},
    **{f"double mask {s:.0%}": {"target_sparsity": s, "scope": NORMALIZED} for s in (0.5, 0.7)},
    **{f"saved {s:.0%}": {"target_sparsity": s, "mode": "saved"} for s in (0.7, 0.9, 0.97)},
}


def digits(_):
    """1,797 images of 8x8: three quarters to train on, the others to test."""
    bunch = load_digits()
    x, y = bunch.images[..., None].astype("float32") / 16, bunch.target.astype("int32")
    order = np.random.default_rng(0).permutation(len(x))
    return x[order], y[order], len(x) * 3 // 4


def fashion(folder):
    """Of Fashion-MNIST, 28x28, the first 5,000 images to train on, and all 10,000 of the test."""

    def read(name):
        kind = "images" if "images" in name else "labels"
        data = gzip.decompress(pathlib.Path(folder, f"{name}-ubyte.gz").read_bytes())
        return np.frombuffer(data, np.uint8, offset=_IDX_HEADER[kind])

    x = np.concatenate([read("train-images-idx3")[: 5_000 * 784], read("t10k-images-idx3")])
    y = np.concatenate([read("train-labels-idx1")[:5_000], read("t10k-labels-idx1")])
    return x.reshape(-1, 28, 28, 1).astype("float32") / 255, y.astype("int32"), 5_000


DATA = {"digits": digits, "fashion": fashion}


def network(shape, classes, normalized):
    """Convolutions with ReLU, or with batch normalization between the two."""
    x = inputs = keras.Input(shape)
    for i, filters in enumerate((16, 16, 32, 32)):
        if normalized:
            x = layers.Conv2D(filters, 3, padding="same", use_bias=False)(x)
            x = layers.ReLU()(layers.BatchNormalization(momentum=0.9)(x))
        else:
            x = layers.Conv2D(filters, 3, padding="same", activation="relu")(x)
        if i % 2:
            x = layers.MaxPooling2D()(x)
    x = layers.Dense(64, activation="relu", name="hidden")(layers.Flatten()(x))
    return keras.Model(inputs, layers.Dense(classes, name="classes")(x))


def compiled(model, steps):
    """`model` with an optimizer whose rate falls to zero in so many steps."""
    rate = keras.optimizers.schedules.CosineDecay(2e-3, steps)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(keras.optimizers.Adam(rate), loss, metrics=["accuracy"])
    return model


class Task:
    """The data and the network of a request, and how they are trained."""

    def __init__(self, request):
        self.request = request
        self.batch_size, self.epochs = request["batch_size"], request["epochs"]
        x, y, train = DATA[request["data"]](request["folder"])
        self.train, self.test = (x[:train], y[:train]), (x[train:], y[train:])
        self.old = None
        if request["fine_tuning"]:
            # A network that knows half of the classes learns the others.
            self.old = _classes(self.train, range(5))
            self.train = _classes(self.train, range(5, 10))
            self.test = _classes(self.test, range(5, 10))

    def _steps(self):
        return -(-len(self.train[0]) // self.batch_size) * self.epochs

    def model(self, way, seed):
        """A network to be trained in a way."""
        keras.utils.set_random_seed(seed)
        shape, normalized = self.train[0].shape[1:], self.request["normalized"]
        model = compiled(network(shape, 10, normalized), self._steps())
        if self.old is not None:
            model.fit(*self.old, self.batch_size, self.epochs, verbose=0)
            head = layers.Dense(10, name="new_classes")(model.get_layer("hidden").output)
            model = compiled(keras.Model(model.inputs, head), self._steps())
        return model if WAYS[way] is None else bt.compress(model)

    def callbacks(self, way):
        """What trains in that way beside the model."""
        return [bt.ActivationPruning(**WAYS[way], verbose=0)] if WAYS[way] else []


def _classes(data, chosen):
    x, y = data
    found = np.isin(y, list(chosen))
    return x[found], y[found]


class Peak(keras.callbacks.Callback):
    """The peak of the last epoch above what is resident before it."""

    def __init__(self, epochs):
        super().__init__()
        self._last, self.nbytes = epochs - 1, 0

    def on_epoch_begin(self, epoch, logs=None):
        """Begin to measure."""
        if epoch == self._last:
            gc.collect()
            self.nbytes = -rss.resident()
            rss.reset_peak()

    def on_epoch_end(self, epoch, logs=None):
        """Have measured."""
        if epoch == self._last:
            self.nbytes += rss.peak()


def accuracy(request):
    """What comes of training in a way, from each seed; see `_trained`."""
    task = Task(request)
    return {"runs": [_trained(task, request["way"], seed) for seed in request["seeds"]]}


def _trained(task, way, seed):
    """Accuracy on the test data, the peak and what is kept in bytes, the sparsity by the logs."""
    model, peak = task.model(way, seed), Peak(task.epochs)
    callbacks = [*task.callbacks(way), peak]
    history = model.fit(*task.train, task.batch_size, task.epochs, verbose=0, callbacks=callbacks)
    _, found = model.evaluate(*task.test, batch_size=500, verbose=0)
    x, y = (array[: task.batch_size] for array in task.train)
    totals = bt.analyze(model, x, y).totals
    return {
        "accuracy": found,
        "peak": peak.nbytes,
        "kept": sum(nbytes for kind, nbytes in totals.items() if kind != "input"),
        "sparsity": history.history.get("sparsity", [None])[-1],
    }


def timing(request):
    """CPU seconds of an epoch of each way, as a ratio to stock's, taken in turns."""
    task = Task({**request, "fine_tuning": False})
    ways = {way: (task.model(way, 0), task.callbacks(way)) for way in request["ways"]}
    ratios = {way: [] for way in ways}
    for turn in range(request["rounds"] + 1):  # the first traces
        seconds = {}
        for way, (model, callbacks) in ways.items():
            before = _cpu_seconds()
            model.fit(*task.train, task.batch_size, verbose=0, callbacks=callbacks)
            seconds[way] = _cpu_seconds() - before
        for way in ways if turn else ():
            ratios[way].append(seconds[way] / seconds["stock"])
    return {way: statistics.median(found) for way, found in ratios.items()}


def _cpu_seconds():
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main():
    request = json.loads(pathlib.Path(sys.argv[1]).read_text())
    result = {"memory": accuracy, "timing": timing}[request["task"]](request)
    pathlib.Path(request["result"]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
