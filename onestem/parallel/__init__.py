"""One model over several devices: a process for each, of which the first schedules and samples.

`docs/tensor-parallel.md` has what is split, and what happens when a process dies.
"""

from onestem.parallel.team import Team
