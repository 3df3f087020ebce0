"""A training step as data: values, nodes, the graph that records them, and passes that rewrite it."""

from ttrain.graph.composite import Composite, cases, composite, primitive, require
from ttrain.graph.graph import REGISTRY, Case, Graph, Kind, Node, Op, RecordSide, Stage, Value, declare, op
