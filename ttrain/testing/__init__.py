"""Tests of your own ops, models and devices against PyTorch in fp64, as `task=verify` tests ours."""

from ttrain.testing.cases import cases_of
from ttrain.testing.compare import Comparison, Tolerance, VerifyError, verdict
from ttrain.testing.verifier import Verifier, check_model, check_ops

__all__ = ["Comparison", "Tolerance", "Verifier", "VerifyError", "cases_of", "check_model", "check_ops", "verdict"]
