"""The time of a step on a card before it runs, by a model of the Wormhole chip."""
