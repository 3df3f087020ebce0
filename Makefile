# What people type often. Everything runs in the environment that is active; see CONTRIBUTING.md.
.PHONY: fast test ci docs

fast:  # the contracts of the core, in 40 s
	python -m pytest -m fast

test:  # everything that this machine can run, under ten minutes
	python -m pytest

ci:  # what must pass before a change is merged, in a fresh environment
	bash .ci/run

docs:  # the site in site/, from docs/ and docstrings; any warning is an error
	python -m zensical build --strict --clean
