"""A training step as data: values, nodes, the graph that records them, and passes that rewrite it."""

from ttrain.graph.composite import Composite, cases, composite
from ttrain.graph.graph import Graph, Node, RecordCounter, Value
from ttrain.graph.kinds import Kind, Stage
from ttrain.graph.op import REGISTRY, Case, Op, declare

__all__ = ["REGISTRY", "Case", "Composite", "Graph", "Kind", "Node", "Op", "RecordCounter", "Stage", "Value", "cases",
           "composite", "declare"]  # fmt: skip
