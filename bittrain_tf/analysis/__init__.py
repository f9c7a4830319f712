"""What a training step keeps, which layers are compressed, and what that costs: one file each."""

from bittrain_tf.analysis.audit import analyze
from bittrain_tf.analysis.kept import Analysis, Holder, KeptTensor
from bittrain_tf.analysis.measure import Figures, Measurement, measure
from bittrain_tf.analysis.plan import Plan, PlannedLayer, plan
from bittrain_tf.analysis.report import LayerReport, Report, report

__all__ = [
    "Analysis",
    "Figures",
    "Holder",
    "KeptTensor",
    "LayerReport",
    "Measurement",
    "Plan",
    "PlannedLayer",
    "Report",
    "analyze",
    "measure",
    "plan",
    "report",
]
