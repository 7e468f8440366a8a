"""Planted faults: bugs that kernels really had, each a small replacement of one op.

`catalogue` lists them with what they must come to; `kernjax.selftest` runs them. Every function of
`attention` and `delta_rule` goes through the same door as anybody's kernel.
"""

from kernjax.faults.catalogue import CATALOGUE as CATALOGUE
from kernjax.faults.catalogue import CONTROLS as CONTROLS
from kernjax.faults.catalogue import FAULTS as FAULTS
from kernjax.faults.catalogue import NORMALS as NORMALS
from kernjax.faults.catalogue import SHORT as SHORT
from kernjax.faults.catalogue import Fault as Fault
from kernjax.faults.catalogue import find as find
