"""The cost of a step, and so of a job, before it runs: docs/cost-model.md. No torch."""

from onestem.cost.deal import TOKENS, Weights, deal_costs
from onestem.cost.job import Forecast, forecast
from onestem.cost.rates import Curve, Rates, named_devices, named_rates
from onestem.cost.step import ModelShape, StepCost
from onestem.cost.work import Limits, Work
