"""Checkpoints: HF safetensors to sharded arrays and back, sharding rules, identities."""

from kernjax.weights.convert import convert_checkpoint as convert_checkpoint
from kernjax.weights.converted import check_readable as check_readable
from kernjax.weights.digests import shared_digests as shared_digests
from kernjax.weights.identity import weights_sha256 as weights_sha256
from kernjax.weights.load import load_model as load_model
from kernjax.weights.load import load_params as load_params
from kernjax.weights.match import text_tensors as text_tensors
from kernjax.weights.safetensors_files import open_checkpoint as open_checkpoint
from kernjax.weights.save import save_hf as save_hf
from kernjax.weights.sharding import cache_shardings as cache_shardings
from kernjax.weights.sharding import check_mesh as check_mesh
from kernjax.weights.sharding import format_mesh as format_mesh
from kernjax.weights.sharding import mesh_plans as mesh_plans
from kernjax.weights.sharding import param_shardings as param_shardings
from kernjax.weights.sharding import parse_mesh as parse_mesh
from kernjax.weights.sharding import partition_spec as partition_spec
