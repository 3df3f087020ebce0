"""A training step as data: values, nodes, the graph that records them, and passes that rewrite it."""

from ttrain.graph.graph import Graph, Kind, Node, RecordCounter, Stage, Value
from ttrain.graph.op import REGISTRY, Case, Op, declare

__all__ = ["REGISTRY", "Case", "Graph", "Kind", "Node", "Op", "RecordCounter", "Stage", "Value", "declare"]
