"""Scheduling policies: which request goes first. One file per policy, one interface (`base.Policy`), one registry."""

from collections.abc import Callable

from lorasrv.config import SchedulerOptions
from lorasrv.memory.cost_model import CostModel
from lorasrv.scheduler.length_predictor import LengthPredictor
from lorasrv.scheduler.policies.base import Policy
from lorasrv.scheduler.policies.fair import Fair
from lorasrv.scheduler.policies.fcfs import Fcfs
from lorasrv.scheduler.policies.mlfq import Mlfq
from lorasrv.scheduler.policies.sjf import Sjf
from lorasrv.scheduler.quotas import Quotas

__all__ = ["Policy", "make_policy"]
_MAKERS: dict[str, Callable[[int, CostModel, LengthPredictor, Quotas], Policy]] = {
    "fair": lambda slots, costs, predictor, quotas: Fair(slots, quotas, costs.step, predictor),
    "fcfs": lambda slots, costs, predictor, quotas: Fcfs(),
    "mlfq": lambda slots, costs, predictor, quotas: Mlfq(),
    "sjf": lambda slots, costs, predictor, quotas: Sjf(costs.step, predictor),
}


def make_policy(options: SchedulerOptions, costs: CostModel, predictor: LengthPredictor, quotas: Quotas) -> Policy:
    """Return the policy that `options` name; `SchedulerOptions` has checked the name."""
    return _MAKERS[options.scheduling_policy](options.max_num_seqs, costs, predictor, quotas)
