"""`ActivationPruning`: the callback that prunes activations while a model trains."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import keras

from bittrain_tf.layers.pruned import attach, ends_in_rectifier, prunable
from bittrain_tf.private import PART, flatten_layers
from bittrain_tf.pruning.quantile import CHANNEL, GROUPS, LAYER, SAMPLE
from bittrain_tf.pruning.report import PruningReport, pruning_report, prunings
from bittrain_tf.pruning.state import FORWARD, SAVED, Pruning
from bittrain_tf.rewrite import Filters, check_model, choose, forget_traces

_MODES = (FORWARD, SAVED)
_LOG_PREFIX = "sparsity"


class ActivationPruning(keras.callbacks.Callback):
    """Prune the activations of a compressed model while it trains.

    With `mode="forward"` the model itself computes with what pruning leaves of its layers'
    outputs, in training and in inference. It is another model than without; its gradients
    are exact. With `mode="saved"` the model computes what it always does, and pruned is only
    what is kept for the backward pass. Its gradients are approximate.

    The elements of the smallest magnitude become zeros: up to a threshold, the quantile of
    a sample of elements at each step. In forward mode thresholds are running means over the
    steps, and weights of the model: saved, loaded and exported with it.

    In a training loop of your own, call `set_model(model)` before the first step. A step is
    a call of a layer under a `tf.GradientTape`.
    """

    def __init__(
        self,
        target_sparsity: float = 0.7,
        *,
        begin: int = 0,
        ramp: int | None = None,
        scope: Filters | None = None,
        mode: str = FORWARD,
        per: str = LAYER,
        verbose: int = 1,
    ) -> None:
        """Choose what to prune.

        Args:
            target_sparsity: The share of zeros to reach, at least 0 and less than 1. A layer
                that is sparser already loses nothing.
            begin: The steps of training before pruning begins.
            ramp: The steps in which the share then rises to the target, fast at first (Zhu
                and Gupta, arXiv 1710.01878). By default half of the steps of `fit` in
                forward mode, and none in saved mode, where a gentle start would cost the
                memory that pruning is to save.
            scope: Which layers, as `filters` of `compress`: a regular expression, a list of
                names, or a function of the layer. By default in forward mode those that end
                in ReLU or ReLU6; in saved mode all. Of a batch normalization in forward
                mode the input is pruned, and its output by the same mask.
            mode: `"forward"` or `"saved"`.
            per: What has a threshold of its own: each `"layer"`; each `"channel"`, the last
                dimension; or, in saved mode, each `"sample"`.
            verbose: 1 to print a table when training ends, 0 to be silent.

        Raises:
            ValueError: If an argument is out of range.
        """
        super().__init__()
        if not (isinstance(target_sparsity, int | float) and 0 <= target_sparsity < 1):
            raise ValueError(
                "target_sparsity is the share of zeros to reach, from 0 to less than 1; got "
                f"{target_sparsity!r}."
            )
        for name, value in (("begin", begin), ("ramp", ramp)):
            if value is not None and not (isinstance(value, int) and value >= 0):
                raise ValueError(f"{name} is a number of steps, 0 or more; got {value!r}.")
        if mode not in _MODES:
            raise ValueError(f"mode must be one of {_MODES}, got {mode!r}.")
        if per not in GROUPS:
            raise ValueError(f"per must be one of {GROUPS}, got {per!r}.")
        if per == SAMPLE and mode == FORWARD:
            raise ValueError(
                f"per={SAMPLE!r} goes with mode={SAVED!r}: a threshold that the model is to "
                f"keep cannot be that of one sample. Use {LAYER!r} or {CHANNEL!r}."
            )
        self.target_sparsity, self.begin, self.ramp = float(target_sparsity), begin, ramp
        self.scope, self.mode, self.per = scope, mode, per
        self.verbose = verbose

    def set_model(self, model: keras.Model) -> None:
        """Have the activations of `model` pruned from now on.

        Layers pruned in this mode before, by an earlier training or the file they come from,
        keep their thresholds and go on from the step they had reached.

        Raises:
            TypeError: If `model` is no Keras model.
            ValueError: If it is not built or not compressed, or `scope` matches nothing that
                can be pruned.
        """
        super().set_model(model)
        check_model(model)
        chosen = self._chosen(model)
        changed = False
        with model.distribute_strategy.scope():
            for layer in chosen:
                changed |= self._prune(layer)
        if changed:
            forget_traces(model)

    def _chosen(self, model: keras.Model) -> list[keras.layers.Layer]:
        layers = flatten_layers(model)
        if not any(prunable(layer) for layer in layers):
            raise ValueError(
                f"No layer of model {model.name!r} is compressed, so there is nothing to "
                "prune: call bittrain_tf.compress(model) before training."
            )
        chosen = [layer for layer in choose(layers, self.scope) if prunable(layer)]
        if self.scope is None and self.mode == FORWARD:
            chosen = [layer for layer in chosen if ends_in_rectifier(layer)]
        if not chosen:
            raise ValueError(
                f"No layer that scope={self.scope!r} matches in model {model.name!r} can be "
                "pruned: they are not compressed (bittrain_tf.report(model) says why), or, by "
                "default in forward mode, none ends in ReLU or ReLU6. Name layers with scope, "
                "or use mode='saved'."
            )
        return chosen

    def _prune(self, layer: keras.layers.Layer) -> bool:
        """Have a layer pruned; returns whether it was not, or not like this, before."""
        before: Pruning | None = vars(layer).get(PART)
        options: dict[str, Any] = {
            "mode": self.mode,
            "target_sparsity": self.target_sparsity,
            "begin": self.begin,
            "ramp": self.ramp or 0,
            "per": self.per,
        }
        if before is None or (before.mode, before.per) != (self.mode, self.per):
            attach(layer, Pruning(**options))
            return True
        if self._ramp_is_half():
            options["ramp"] = before.ramp  # until `set_params` says half of what
        same = before.get_config() == options
        before.target_sparsity, before.begin = self.target_sparsity, self.begin
        before.ramp = options["ramp"]
        return not same

    def _ramp_is_half(self) -> bool:
        return self.ramp is None and self.mode == FORWARD and self.target_sparsity > 0

    def set_params(self, params: Mapping[str, Any]) -> None:
        """Take the number of steps from `fit`, for the default of `ramp`.

        Raises:
            ValueError: If `fit` does not know it and `ramp` was not given.
        """
        super().set_params(params)
        if not self._ramp_is_half():
            return
        steps, epochs = params.get("steps"), params.get("epochs")
        if steps is None or epochs is None:
            raise ValueError(
                "The length of the data is not known, so neither are the steps of training of "
                "which ramp is half by default: give ActivationPruning(ramp=...), in steps."
            )
        ramp = steps * epochs // 2
        changed = [p for p in prunings(self.model).values() if p.ramp != ramp]
        for pruning in changed:
            pruning.ramp = ramp
        if changed:
            forget_traces(self.model)

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Put every layer's sparsity into the logs.

        So `History` has them, and callbacks after this one, such as TensorBoard and CSVLogger.
        """
        found = {row.name: row.sparsity for row in self.report().layers}
        if logs is not None and found:
            logs[_LOG_PREFIX] = sum(found.values()) / len(found)
            logs.update({f"{_LOG_PREFIX}/{name}": value for name, value in found.items()})

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Print what has been reached."""
        if self.verbose:
            print(self.report().render())

    def report(self) -> PruningReport:
        """The sparsity and the threshold that every pruned layer has reached."""
        return pruning_report(self.model)
