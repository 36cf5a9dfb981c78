"""What a job will take, and afterwards what came true: the cost model of a model on a device."""

from onestem.forecasts.dealt import STEAL_REQUESTS, Dealt, dealt_parts
from onestem.forecasts.target import Target
from onestem.forecasts.watch import JobWatch
