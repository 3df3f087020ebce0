"""A training step as data: values, nodes, the graph that records them, and passes that rewrite it."""

from ttrain.graph.composite import Composite, cases, composite
from ttrain.graph.graph import REGISTRY, Case, Graph, Node, Op, RecordCounter, Value
from ttrain.graph.kinds import Kind, Stage
