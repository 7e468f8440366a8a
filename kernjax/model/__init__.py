"""The hybrid decoder: config, parameters, cache, forward pass."""

from kernjax.model.cache import Cache as Cache
from kernjax.model.cache import capacity_for as capacity_for
from kernjax.model.cache import init_cache as init_cache
from kernjax.model.config import ModelConfig as ModelConfig
from kernjax.model.decoder import Decoder as Decoder
from kernjax.model.decoder import forward as forward
from kernjax.model.decoder import logits as logits
from kernjax.model.decoder import one_layer as one_layer
from kernjax.model.decoder import run_layer as run_layer
from kernjax.model.embedding import EmbeddingPlacement as EmbeddingPlacement
from kernjax.model.execution import Execution as Execution
from kernjax.model.execution import plan_execution as plan_execution
from kernjax.model.moe import ExpertPlacement as ExpertPlacement
from kernjax.model.moe import Routes as Routes
from kernjax.model.pattern import Captured as Captured
