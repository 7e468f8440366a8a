"""Precision policies: which tensor is rounded to which format, where, and how that is written."""

from kernjax.precision.fields import FIELDS as FIELDS
from kernjax.precision.fields import KVCacheFormats as KVCacheFormats
from kernjax.precision.fields import LayerPolicy as LayerPolicy
from kernjax.precision.grammar import parse_policy as parse_policy
from kernjax.precision.lenses import delta as delta
from kernjax.precision.lenses import isolated as isolated
from kernjax.precision.lenses import twin as twin
from kernjax.precision.named import describe as describe
from kernjax.precision.named import policy_names as policy_names
from kernjax.precision.policy import Change as Change
from kernjax.precision.policy import Policy as Policy
from kernjax.precision.policy import Setting as Setting
from kernjax.precision.policy import apply as apply
from kernjax.precision.policy import diff as diff
from kernjax.precision.sites import executed_sites as executed_sites
