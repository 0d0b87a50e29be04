"""Where the weights and caches of a model should live: prices of plans, and placements with a proven bound."""
