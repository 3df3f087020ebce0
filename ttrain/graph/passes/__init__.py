"""Passes: pure functions from graph to graph. A diff of the printed graphs shows the effect of each."""

from ttrain.graph.passes.cleanup import live_nodes, merge_common_subexpressions, remove_dead_code
from ttrain.graph.passes.decompose import copy_reshapes, decompose
from ttrain.graph.passes.fuse import fuse
from ttrain.graph.passes.gather import gather_ahead
from ttrain.graph.passes.group import group
from ttrain.graph.passes.order import gather_sides, store_early
