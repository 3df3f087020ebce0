"""What a step will cost in time on a card before it runs: a model of the Wormhole chip and what it is held against."""
