"""The proof of the contract, on the machine at hand: every check compares bits.

`run` needs torch and safetensors alone; the command line shows the same report as a table.
"""

from lorafold.verify.report import Line, Report
from lorafold.verify.runner import replay, run
from lorafold.verify.tensor_cores import tensor_cores_follow

__all__ = ["Line", "Report", "replay", "run", "tensor_cores_follow"]
