"""What a job will take, and afterwards what came true: the cost model of a model on a device."""

from onestem.forecasts.dealt import STEAL_REQUESTS, Dealt, ReplicasForecast, dealt_parts
from onestem.forecasts.target import Target
from onestem.forecasts.watch import JobWatch, Verdict

__all__ = [
    "STEAL_REQUESTS",
    "Dealt",
    "JobWatch",
    "ReplicasForecast",
    "Target",
    "Verdict",
    "dealt_parts",
]
