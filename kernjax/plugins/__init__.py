"""Plug-ins: anybody's kernel in place of an op, named on the command line, proven by its hash."""

from kernjax.plugins.kernel import Kernel as Kernel
from kernjax.plugins.kernel import check_output as check_output
from kernjax.plugins.kernel import expected_output as expected_output
from kernjax.plugins.loading import check_called as check_called
from kernjax.plugins.loading import check_layers as check_layers
from kernjax.plugins.loading import check_lse as check_lse
from kernjax.plugins.loading import check_policy as check_policy
from kernjax.plugins.loading import load_kernel as load_kernel
from kernjax.plugins.loading import load_kernels as load_kernels
