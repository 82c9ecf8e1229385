"""Keep or merge a mixture's experts; the router and the configuration follow."""

from surgery.experts.cut import keep as keep
from surgery.experts.cut import merge as merge
from surgery.experts.mixtures import Mixture as Mixture
from surgery.experts.mixtures import mixtures as mixtures
from surgery.experts.scores import frequency as frequency
from surgery.experts.scores import norm as norm
