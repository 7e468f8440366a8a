"""Many processes as one run: joining, agreeing, and ending together when one of them is lost."""

from kernjax.pods.flags import PodFlags as PodFlags
from kernjax.pods.pod import Pod as Pod
